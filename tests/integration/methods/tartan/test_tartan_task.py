"""Whole runs: the systems of the paper's tables, their stages, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from tartan_bench import SIZES, build, configure, logged, same, weights

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.evaluation.classification import f1_macro
from metaseq_lm.training.run import TrainingRun

BEST = ["trainer.best_checkpoint_metric=f1_macro", "trainer.maximize_best_checkpoint_metric=true"]


def fine_tuning(data: Path, save: Path, start: Path, *more: str) -> TrainingRun:
    """Return the final fine-tuning of a run: its encoder and its head."""
    sizes = [s for s in SIZES if s.startswith(("model.", "engine.", "task.labelled", "task.tok"))]
    task = ["task=sentence_prediction", "criterion=sentence_prediction", "task.keep_head=true"]
    task += ["task.pooled=true", "task.pooler_dropout=true", "criterion.batch_sum=false"]
    places = [f"data={data}", f"save_dir={save}", f"init_from={start}"]
    return TrainingRun(load_config([*task, *sizes, "schedule=constant", *places, *more]))


@pytest.mark.parametrize("criterion", ["tartan_mt", "tartan_meta"])
def test_tartan_learns_an_easy_task(criterion, topics, tmp_path):
    """All metrics come with it; predictions agree with them; weights and cosines are logged."""
    more = ["trainer.max_update=80", "trainer.final_splits=[test]", "task.batch_size=24", *BEST]
    more += ["optimizer.lr=0.002", "model.dropout=0", "model.attention_dropout=0"]
    build(topics, tmp_path, criterion, "task.auxiliary=[train,tapt]", *more).train()
    metrics = json.loads((tmp_path / "results.json").read_text())["metrics"]["test"]
    assert metrics["accuracy"] > 0.9 and list(metrics)[:3] == ["score", "accuracy", "f1_macro"]
    rows = [json.loads(r) for r in (tmp_path / "predictions.test.jsonl").read_text().splitlines()]
    gold, predicted = [r["gold"] for r in rows], [r["predicted"] for r in rows]
    assert metrics["f1_macro"] == pytest.approx(f1_macro(gold, predicted, ["animal", "tool"]))
    last = logged(tmp_path)[-1]
    alphas = [last[f"alpha_{n}"] for n in ("train", "tapt", "endtask")]
    assert sum(alphas) == pytest.approx(1)
    assert last["loss"] == pytest.approx(
        sum(a * last[f"loss_{n}"] for a, n in zip(alphas, ("train", "tapt", "endtask")))
    )
    meta = criterion == "tartan_meta"
    assert ("cosine_tapt" in last and "meta_head_loss" in last) == meta
    assert (alphas[0] == alphas[1]) != meta


def test_checkpoints_hold_the_weights_of_the_tasks(topics, tmp_path):
    """A resumed run goes on with them, to the last bit."""
    more = ["criterion.weight_lr=0.5", "criterion.algorithm_1=true"]
    ends = []
    for name, stops in (("straight", [6]), ("cut", [3, 6])):
        for stop in stops:
            run = build(topics, tmp_path / name, "tartan_meta", *more, f"trainer.max_update={stop}")
            run.train()
        ends.append(weights(run))
    assert same(*ends) and ends[0]["task_logits"].abs().max() > 0.01
    alphas = [[row["alpha_tapt"] for row in logged(tmp_path / n)] for n in ("straight", "cut")]
    assert alphas[0] == alphas[1]


def test_dapt_then_tapt_then_the_end_task(topics, tmp_path):
    """The baselines: each stage takes encoder and LM head of the one before, the head is fresh."""
    dapt = build(topics, tmp_path / "dapt", "masked_lm", "task.auxiliary=[train]")
    dapt.train()
    assert set(logged(tmp_path / "dapt", "valid")[-1]) >= {"mlm", "accuracy", "loss"}
    start = f"init_from={tmp_path / 'dapt'}"
    tapt = build(topics, tmp_path / "tapt", "masked_lm", start)
    assert same(weights(dapt), weights(tapt))
    assert not any("sentence" in n or "meta" in n for n in weights(tapt))
    one = build(topics, tmp_path / "one", "tartan_mt", start, "task.fidelity=authors")
    assert "heads.lm1.bias" not in weights(one)
    tapt.train()
    tuned = fine_tuning(topics, tmp_path / "tuned", tmp_path / "tapt", "task.keep_head=false")
    encoder = {n: w for n, w in weights(tapt).items() if n.startswith("encoder.")}
    assert same(encoder, weights(tuned)) and encoder.keys() <= weights(tuned).keys()


def test_own_lm_heads_learn_apart(topics, tmp_path):
    """They start as the one head of an earlier run, or each as its own there."""
    two, start = "task.auxiliary=[train,tapt]", f"init_from={tmp_path / 'two'}"
    run = build(topics, tmp_path / "two", "tartan_mt", two)
    before = weights(run)
    run.train()
    after = weights(run)
    steps = [after[f"heads.{n}.bias"] - before[f"heads.{n}.bias"] for n in ("lm", "lm1")]
    assert all(step.any() for step in steps) and not torch.equal(*steps)
    one = build(topics, tmp_path / "one", "masked_lm", start)
    again = build(topics, tmp_path / "again", "tartan_mt", two, start)
    assert torch.equal(weights(one)["heads.lm.bias"], after["heads.lm.bias"])
    assert torch.equal(weights(again)["heads.lm1.bias"], after["heads.lm1.bias"])
    one.train()
    again = build(topics, tmp_path / "both", "tartan_mt", two, f"init_from={tmp_path / 'one'}")
    for head in ("lm", "lm1"):
        assert torch.equal(weights(again)[f"heads.{head}.bias"], weights(one)["heads.lm.bias"])


def test_tartan_starts_from_electra(topics, tmp_path):
    """The discriminator is the body; of the model's options those of a Transformer are used."""
    mine = [s for s in SIZES if s.startswith(("model.", "engine.", "trainer.", "task.tok"))]
    chosen = ["task=electra", "criterion=electra_rtd", "model=electra", "model.segments=1"]
    chosen += [f"data={topics}", f"save_dir={tmp_path / 'first'}", "trainer.valid_split=''"]
    first = TrainingRun(load_config([*chosen, *mine, "task.batch_size=8"]))
    first.train()
    own = [s for s in SIZES if not s.startswith("model.")]
    places = [f"data={topics}", f"init_from={tmp_path / 'first'}"]
    second = TrainingRun(
        load_config(
            [*own, *places, f"save_dir={tmp_path / 'mt'}", "criterion=tartan_mt", "model=inherit"]
        )
    )
    taken = {n: w for n, w in weights(first).items() if n.startswith("encoder.")}
    assert taken and same(taken, weights(second)) and taken.keys() <= weights(second).keys()


def test_the_final_fine_tuning_begins_where_the_run_ended(topics, tmp_path):
    """Same scores before the first update; that checkpoint stays the best if nothing beats it."""
    more = ["trainer.max_update=20", "trainer.final_splits=[test]", *BEST]
    interval = "trainer.validate_interval_updates=2"
    started = build(topics, tmp_path / "mt", "tartan_mt", *more, interval)
    started.train()
    assert started.trainer.best.update < 20, "this test is for a best checkpoint before the last"
    first = json.loads((tmp_path / "mt" / "results.json").read_text())["metrics"]
    options = ["trainer.validate_first=true", "task.batch_size=16", "trainer.patience=3"]
    options += ["trainer.validate_interval_updates=1", "trainer.max_update=9", "optimizer.lr=0"]
    run = fine_tuning(
        topics, tmp_path / "final", tmp_path / "mt" / "checkpoints" / "best", *more, *options
    )
    run.train()
    last = json.loads((tmp_path / "final" / "results.json").read_text())
    for split in ("valid", "test"):
        for name in ("accuracy", "f1_macro", "cross_entropy"):
            assert last["metrics"][split][name] == pytest.approx(first[split][name], abs=1e-6)
    assert [row["update"] for row in logged(tmp_path / "final", "valid")] == [0, 1, 2, 3]
    best = (tmp_path / "final" / "checkpoints" / "best").resolve()
    assert best.name == "update_000000000"


def test_epochs_are_those_of_the_largest_auxiliary(topics, tmp_path):
    more = ["task.auxiliary=[train,tapt]", "task.epochs=2", "schedule=linear"]
    run = build(topics, tmp_path, "tartan_mt", *more)
    assert run.config.trainer.max_update == 2 * -(-300 // 8)
    assert run.config.schedule.total_updates == 76


def test_the_head_has_its_own_rate_and_decay(topics, tmp_path):
    run = build(
        topics,
        tmp_path,
        "tartan_meta",
        "optimizer.lr=1e-4",
        "optimizer.decay_norms_and_biases=false",
    )
    body, head = (run.engine.optimizers[n] for n in ("body", "head"))
    assert body.lr == 1e-4 and head.lr == 1e-3
    assert {g["weight_decay"] for g in body.inner.param_groups} == {0.0, 0.01}
    assert {g["weight_decay"] for g in head.inner.param_groups} == {0.1}
    names = {id(p): n for n, p in run.model.named_parameters()}
    trained = {names[id(p)] for o in (body, head) for p in o.parameters}
    assert set(names.values()) - trained == {n for n in names.values() if "heads.meta" in n}


@pytest.mark.parametrize(
    "criterion, more, words",
    [
        ("replace_mlm", [], "criterion replace_mlm is for task electra"),
        ("bert_pretraining", [], "needs criterion=masked_lm or .*tartan_meta"),
        ("tartan_mt", ["task.auxiliary=[]"], "one or more different tasks"),
        ("tartan_mt", ["task.auxiliary=[tapt,tapt]"], "one or more different tasks"),
        ("tartan_mt", ["task.auxiliary=[endtask]"], "none may be called endtask"),
        ("tartan_mt", ["criterion.weights=[1,2,3]"], "it needs 2 positive numbers"),
        ("tartan_mt", ["criterion.weights=[1,0]"], "it needs 2 positive numbers"),
        ("tartan_mt", ["task.labelled=''"], "give task.labelled=NAME"),
        ("tartan_meta", ["criterion.similarity=cos"], "'cos.*cosine, dot"),
        ("tartan_meta", ["criterion.meta_head_split=valid"], "meta_head_split is 'valid'"),
        ("tartan_mt", ["task.auxiliary=[tapt,dev]"], "endtask or dev"),
        ("tartan_meta", ["criterion.meta_head_steps=-1"], "at least 0"),
        ("tartan_meta", ["criterion.weight_lr=-1"], "criterion.weight_lr .*at least 0"),
        ("tartan_meta", ["criterion.meta_head_lr=-1"], "criterion.meta_head_lr .*at least"),
        ("tartan_mt", ["task.lines_per_example=-1"], "task.lines_per_example .*at least 0"),
        ("tartan_mt", ["task.head_lr=-1"], "task.head_lr .*at least 0, got -1"),
        ("tartan_mt", ["task.meta_head_batch_size=0"], "task.meta_head_batch_size .*at least"),
    ],
)
def test_mistakes_are_named(criterion, more, words, topics, tmp_path):
    with pytest.raises(UsageError, match=words):
        build(topics, tmp_path, criterion, *more)


def test_a_domain_that_is_not_there(topics, tmp_path):
    with pytest.raises(MetaseqError, match="'papers'.*long, train"):
        build(topics, tmp_path, "tartan_mt", "task.auxiliary=[papers]").train()


def test_sets_of_other_forms_are_refused(pairs, tmp_path):
    config = configure(pairs, tmp_path, "tartan_mt", "task.labelled=scores")
    with pytest.raises(UsageError, match="real values"):
        TrainingRun(config)
