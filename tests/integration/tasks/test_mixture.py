"""Mixtures of objectives: equal to their parts, by weights and by phases; budgets, reading."""

import json
from pathlib import Path

import battery
import pytest
import torch
from torch import Tensor

from metaseq_lm.cli import main
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.corpus.mixture import MixtureBatch
from metaseq_lm.data.labelled.files import SourceSentence
from metaseq_lm.data.streams import Shard
from metaseq_lm.forward.passes import weighted_loss
from metaseq_lm.interop.claims import claimed_export
from metaseq_lm.runs import manifests
from metaseq_lm.runs.manifests import CheckpointError
from metaseq_lm.tasks.mixture import MixtureTask, _parse_objectives
from metaseq_lm.tasks.protocols import reach_of, task_read_as
from metaseq_lm.tasks.sentence_prediction import _reach_of_manifest
from metaseq_lm.training.parts import Parts, build_parts, check_parts, prepare_config
from metaseq_lm.training.price import dry_run, estimate_price
from metaseq_lm.training.restore import open_run
from metaseq_lm.training.run import TrainingRun
from metaseq_lm.training.scoring import SentenceScorer
from metaseq_lm.training.states import EncoderStates

ROWS = ["task.sample_break_mode=eos", "task.tokens_per_sample=20", "task.batch_size=8"]
OPTIONS = {
    "masked_lm": ["task.mask_prob=0.3", "task.mask_unit=word"],
    "causal_lm": ["criterion.z_loss=0.01"],
    "prefix_lm": [],
    "masked_next_token": ["task.mask_prob=0.4"],
    "masked_diffusion": ["task.times=bell"],
    "span_corruption": ["task.mean_span=2"],
}
SCHEDULE = ["schedule=linear", "schedule.total_updates=7"]


def configure(data: Path, save: Path, *more: str) -> RunConfig:
    places = [f"data={data}", f"save_dir={save}", *ROWS]
    last = ["trainer.save_interval_updates=0", "trainer.validate_interval_updates=0"]
    return load_config([*places, *battery.TINY, *last, *more])


def mixture(*entries: str) -> list[str]:
    """Return overrides of a mixture."""
    return ["task=mixture", "criterion=mixture", f"task.objectives={json.dumps(entries)}"]


def alone(name: str) -> list[str]:
    """Return overrides of an objective alone."""
    return [f"task={name}", f"criterion={name}", *OPTIONS[name]]


def entry(name: str, *more: str) -> str:
    return " ".join([name, *OPTIONS[name], *more])


def valid_of(run: Path) -> dict[str, float]:
    metrics: dict[str, float] = json.loads((run / "results.json").read_text())["metrics"]["valid"]
    return metrics


@pytest.mark.parametrize("name", OPTIONS)
def test_a_weight_of_one_is_the_objective_alone(name, moons, tmp_path):
    """Bit for bit, with dropout: weights, validation and FLOPs."""
    other = "prefix_lm" if name == "causal_lm" else "causal_lm"
    weights = []
    for save, options in (
        ("alone", alone(name)),
        ("mixed", mixture(entry(name, "weight=1"), f"{other} weight=0")),
    ):
        config = configure(moons, tmp_path / save, *options, "trainer.max_update=3")
        weights.append(battery.train(config))
    assert battery.difference(*weights) == 0
    single, mixed = (valid_of(tmp_path / save) for save in ("alone", "mixed"))
    assert mixed["loss"] == single["loss"] == mixed[f"{name}.loss"] != mixed[f"{other}.loss"]
    del single["loss"]
    single.pop("perplexity", None)
    assert {key: mixed[f"{name}.{key}"] for key in single} == single
    flops = [json.loads((tmp_path / s / "results.json").read_text()) for s in ("alone", "mixed")]
    assert flops[0]["flops"] == flops[1]["flops"]
    assert flops[0]["flops_by_rule"] == pytest.approx(flops[1]["flops_by_rule"])


def test_two_phases_are_a_run_that_goes_on_with_the_other(moons, tmp_path):
    """Weights, moments, data, masks and dropout, bit for bit."""
    phases = ["task.phases=[3,4]", "trainer.max_update=7", *SCHEDULE]
    entries = entry("causal_lm", "weight=[1,0]"), entry("masked_lm", "weight=[0,1]")
    mixed = battery.train(configure(moons, tmp_path / "mixed", *mixture(*entries), *phases))
    first = TrainingRun(
        configure(moons, tmp_path / "1", *alone("causal_lm"), *SCHEDULE, "trainer.max_update=3")
    )
    first.train()
    second = TrainingRun(
        configure(moons, tmp_path / "2", *alone("masked_lm"), *SCHEDULE, "trainer.max_update=7")
    )
    second.model.load_state_dict(battery.weights_of(first))
    second.trainer.load_state_dict(first.trainer.state_dict())
    second.trainer.train()
    assert battery.difference(mixed, battery.weights_of(second)) == 0
    lines = (tmp_path / "mixed/log.jsonl").read_text().splitlines()
    logs = [log for log in map(json.loads, lines) if log["kind"] == "train"]
    is_causal = ["causal_lm.next_token" in log for log in logs]
    assert is_causal == [log["update"] <= 3 for log in logs] and len(logs) == 7
    assert ["masked_lm.mlm" in log for log in logs] == [not causal for causal in is_causal]


def test_a_branch_keeps_the_phases(moons, tmp_path):
    """Another end of the run moves no phase; without a word it would."""
    entries = mixture("causal_lm weight=[1,0]", "masked_lm weight=[0,1]")
    options = [*entries, "task.phases=[1,2]", "task.phase_updates=6"]
    whole = battery.train_uncounted(
        configure(moons, tmp_path / "whole", *options, "trainer.max_update=5")
    )
    short = configure(moons, tmp_path / "short", *options, "trainer.max_update=3")
    battery.train_uncounted(short)
    branch = [f"branch_from={tmp_path / 'short'}", "trainer.max_update=5"]
    gone_on = battery.train_uncounted(configure(moons, tmp_path / "branch", *options, *branch))
    assert battery.difference(whole, gone_on) == 0
    other = [*entries, "task.phases=[1,2]", "trainer.max_update=4"]
    save = tmp_path / "other"
    battery.train_uncounted(configure(moons, save, *other))
    longer = configure(moons, save, *other, "trainer.max_update=6")
    with pytest.raises(CheckpointError, match="other phase_updates"):
        TrainingRun(longer).train()
    end = configure(moons, save, *other, "trainer.max_update=6", "task.phase_updates=4")
    run = TrainingRun(end, ["schedule"])
    run.train()
    assert isinstance(run.task, MixtureTask)
    assert [run.task.weights_at(update).index(1) for update in range(6)] == [0, 0, 1, 1, 1, 1]


def open_parts(data: Path, save: Path, *more: str) -> Parts:
    """Return an untrained run in float64 without dropout."""
    config = configure(data, save, *battery.exact(*more))
    parts = build_parts(prepare_config(config), dry_run=True)
    parts.model.eval()
    return parts


def gradient(loss: Tensor, parts: Parts) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, [*parts.model.parameters()], allow_unused=True))


def test_the_gradient_is_the_weighted_sum(moons, tmp_path):
    """Of the gradients of the parts, each a mean over the items of its rows."""
    shares = {"causal_lm": 1, "masked_lm": 3, "masked_diffusion": 2, "span_corruption": 2}
    entries = [entry(name, f"weight={share}") for name, share in shares.items()]
    parts = open_parts(moons, tmp_path, *mixture(*entries), "model.max_positions=40")
    task, engine = parts.task, parts.engine
    assert isinstance(task, MixtureTask)
    batches = engine.to_device(task.build_streams("train")["train"].micro_batches(2, Shard()))
    engine.begin(2)
    found, logs = engine.gradients(
        lambda batch: task.criterion(parts.model, batch), batches, [*parts.model.parameters()]
    )
    total = 0.0
    expected = [torch.zeros_like(p) for p in parts.model.parameters()]
    for batch, (name, share) in zip(batches, shares.items(), strict=True):
        assert isinstance(batch, MixtureBatch) and batch.objective == name
        assert len(batch.samples) == share == 8 * batch.weight
        single = open_parts(moons, tmp_path, *alone(name), "model.max_positions=40")
        single.model.load_state_dict(parts.model.state_dict())
        terms = single.task.criterion(single.model, batch.batch)
        loss = weighted_loss(terms, batch.batch.sizes, {})
        total += share / 8 * loss.item()
        for sum_, part in zip(expected, gradient(loss, single)):
            sum_ += 0 if part is None else share / 8 * part
    for sum_, part in zip(expected, found):
        torch.testing.assert_close(torch.zeros_like(sum_) if part is None else part, sum_)
    assert float(logs["loss"]) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("phases", ["[1,3]", "[]"])
def test_a_budget_is_spent_by_all_phases(phases, moons, tmp_path):
    """Though a causal update costs more than a masked one, by the head, on a quarter of tokens."""
    weights = ("weight=[1,0]", "weight=[0,1]") if phases != "[]" else ("weight=0.3", "weight=0.7")
    entries = f"causal_lm {weights[0]}", f"masked_lm {weights[1]} task.mask_prob=0.25"
    options = [*mixture(*entries), f"task.phases={phases}", "model.encoder_layers=1"]
    rows = ["task.sample_break_mode=none", "task.tokens_per_sample=34"]
    costs = {}
    for name in ("causal_lm", "masked_lm"):
        single = [f"task={name}", f"criterion={name}", "model.encoder_layers=1"]
        costs[name] = estimate_price(configure(moons, tmp_path, *single, *rows)).flops
    budget = 60 * costs["causal_lm"]
    assert costs["masked_lm"] < 0.75 * costs["causal_lm"]
    limits = ["trainer.max_update=0", f"trainer.max_flops={budget}"]
    run = TrainingRun(configure(moons, tmp_path / "run", *options, *rows, *limits))
    run.train()
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert 0.98 <= results["flops"] / budget <= 1.005
    assert results["updates"] == results["max_update"]
    again = TrainingRun(configure(moons, tmp_path / "run", *options, *rows, *limits))
    assert again.config.trainer.max_update == results["updates"]


def test_a_mixture_is_read_as_one_of_its_objectives(moons, tmp_path):
    """By default as that with the largest weight in the last phase."""
    entries = [
        "causal_lm weight=[1,0.4]",
        "masked_lm weight=[0,0.6] task.mask_prob=0.3",
        "masked_lm name=other weight=0",
    ]
    more = [*mixture(*entries), "task.phases=[1,1]", *battery.exact("trainer.max_update=3")]
    run = TrainingRun(configure(moons, tmp_path, *more))
    run.train()
    valid = valid_of(tmp_path)
    assert valid["loss"] == pytest.approx(
        0.4 * valid["causal_lm.loss"] + 0.6 * valid["masked_lm.loss"]
    )
    assert valid["other.loss"] != valid["masked_lm.loss"] and "other.accuracy" in valid
    good, bad = SourceSentence("0 1 1 0", "1"), SourceSentence("0 1 0 0", "2")
    for overrides, name in (
        ([], "masked_lm"),
        (["criterion.read=masked_lm"], "masked_lm"),
        (["criterion.read=causal_lm"], "causal_lm"),
    ):
        parts = open_run(str(tmp_path), overrides=overrides)
        scorer = SentenceScorer(parts)
        (score,), (changed,) = scorer.score([good]), scorer.score_changed([(good, bad)])
        single = open_parts(moons, tmp_path, f"task={name}", f"criterion={name}")
        single.model.load_state_dict(run.model.state_dict())
        scorer = SentenceScorer(single)
        (expected,), (pair,) = scorer.score([good]), scorer.score_changed([(good, bad)])
        assert score is not None and expected is not None and changed is not None
        assert pair is not None and changed[0].log_probs == pair[0].log_probs
        assert score.log_probs.tolist() == expected.log_probs.tolist()
        reach = "causal" if name == "causal_lm" else "both"
        assert scorer.reach == reach
        read = EncoderStates(parts).task
        assert reach_of(read) == reach == claimed_export(parts.config, "run").reach
    for read, message in (("mlm", "Objectives: causal_lm, masked_lm, other"), ("other", "not tra")):
        with pytest.raises(UsageError, match=message):
            open_run(str(tmp_path), overrides=[f"criterion.read={read}"])
    words = ["export", str(tmp_path), "--out", str(tmp_path / "out"), "criterion.read=causal_lm"]
    assert main(words) == 0
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["MegatronBertForCausalLM"]
    manifest = manifests.read_manifest(manifests.resolve(str(tmp_path)))
    assert _reach_of_manifest(manifest) == "both"
    manifest["config"]["criterion"]["read"] = "causal_lm"
    assert _reach_of_manifest(manifest) == "causal"


@pytest.mark.parametrize("name", ["masked_next_token", "masked_diffusion"])
@pytest.mark.parametrize("share", [0, 0.25])
def test_runs_with_a_share_of_causal_rows_are_opened(name, share, moons, tmp_path):
    """Earlier versions had task.causal_share and criterion.read=both or causal."""
    config = configure(moons, tmp_path, *alone(name), "trainer.max_update=1")
    battery.train_uncounted(config)
    file = manifests.resolve(str(tmp_path)) / "manifest.json"
    manifest = json.loads(file.read_text())
    for read in ("both", "causal") if share else ("both",):
        manifest["config"]["task"]["causal_share"] = share
        manifest["config"]["criterion"]["read"] = read
        file.write_text(json.dumps(manifest))
        parts = open_run(str(tmp_path))
        reading = task_read_as(parts.task)
        if not share:
            assert vars(parts.config.task) == vars(config.task)
        else:
            assert parts.config.task.objectives[1] == "causal_lm weight=0.25"
            assert isinstance(parts.task, MixtureTask)
            assert parts.task.weights.tolist() == [[0.75, 0.25]]
            assert vars(parts.task.tasks[name].config) == vars(config.task)
        assert reading.run_config.task._name == ("causal_lm" if read == "causal" else name)
        assert parts.score("valid")[0]["loss"] > 0


@pytest.mark.parametrize(
    "entries, more, message",
    [
        ([], [], "give task.objectives="),
        (["maskd_lm"], [], "Did you mean 'masked_lm'"),
        (["masked_lm task.mask_prb=0.3"], [], "Did you mean 'task.mask_prob'"),
        (["masked_lm task.mask_prob=2"], [], "entry 'masked_lm task.mask_prob=2': .*at most 1"),
        (["masked_lm weeight=2"], [], "Did you mean 'weight'"),
        (["masked_lm weight=-1"], [], "weight=-1"),
        (["masked_lm optimizer.lr=1"], [], "'optimizer.lr' is no part of an entry"),
        (["masked_lm task.batch_size=2"], [], "task.batch_size is that of all objectives"),
        (["masked_lm criterion=prefix_lm"], [], "prefix_lm is for task prefix_lm, not for masked"),
        (["electra"], [], "task electra is no objective of a mixture"),
        (["sentence_pairs criterion=masked_lm"], [], "sentence_pairs is no objective"),
        (["masked_lm", "masked_lm"], [], "give it a name"),
        (["masked_lm name=a.b"], [], "name=a.b"),
        (["causal_lm weight=[1,0]"], [], "2 weights, but task.phases has no phases"),
        (["causal_lm weight=[1,0]"], ["task.phases=[1,1]"], "phase 2 .* no objective"),
        (["causal_lm weight=[1,0]"], ["task.phases=[1,0]"], "above 0"),
        (["causal_lm"], ["criterion.read=causal"], "Did you mean 'causal_lm'"),
        (["span_corruption"], ["task.sample_break_mode=documents"], "Choices: eos, none"),
        (["span_corruption task.inputs_length=9"], [], "ask for task.tokens_per_sample="),
        (["causal_lm", "span_corruption"], ["task.tokens_per_sample=34"], "model.max_positions"),
        (["causal_lm"], ["model=bilstm_lm", "~"], "bilstm_lm"),
    ],
)
def test_what_does_not_fit_is_refused(entries, more, message, moons, tmp_path):
    """By a dry run of `train` and by what a dry run of `sweep` calls."""
    if "~" in more:  # of a Transformer's options it has none
        config = load_config(
            [f"data={moons}", f"save_dir={tmp_path}", *mixture(*entries), *more[:1]]
        )
    for check in (dry_run, check_parts):
        with pytest.raises(UsageError, match=message):
            if "~" not in more:
                config = configure(moons, tmp_path, *mixture(*entries), *more)
            check(config)


def test_mappings_are_what_texts_are(moons, tmp_path):
    """An option is called by its name, or with its section."""
    more = [f"data={moons}", f"save_dir={tmp_path}", "task=mixture", "criterion=mixture"]
    by_text = load_config([*more, 'task.objectives=["masked_lm weight=2 task.mask_prob=0.3"]'])
    for key in ("mask_prob", "task.mask_prob"):
        entry = f"{{task: masked_lm, weight: 2, {key}: 0.3}}"
        by_mapping = load_config([*more, f"task.objectives=[{entry}]"])
        assert _parse_objectives(by_mapping) == _parse_objectives(by_text)
    for key, message in (("mask_pro", "Did you mean 'mask_prob'"), ("batch_size", "of all obj")):
        wrong = load_config([*more, f"task.objectives=[{{task: masked_lm, {key}: 3}}]"])
        with pytest.raises(UsageError, match=message):
            _parse_objectives(wrong)
