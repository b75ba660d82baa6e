"""Suite adapt: what is trained, by which rate, what it sees, and that the run stays as it is."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import battery
import numpy as np
import pytest
import small_data
import torch
from torch.nn import functional as F

from metaseq_lm.cli import main
from metaseq_lm.core.batch import TokenBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.words.subwords import TaggedRows
from metaseq_lm.evaluation.probe import ProbePart, _part_of
from metaseq_lm.evaluation.suites import build_suite
from metaseq_lm.models.transformer.classifiers import TokenClassifier
from metaseq_lm.runs import checkpoint, manifests, suite_results
from metaseq_lm.tasks.protocols import encoder_of, task_read_as
from metaseq_lm.training.finetuning import WordTuner
from metaseq_lm.training.parts import Parts
from metaseq_lm.training.restore import open_scored
from metaseq_lm.training.run import TrainingRun
from metaseq_lm.training.states import EncoderStates

SIZES = "--world-documents 30 --world-held-out 30 --world-labelled 40 --world-pairs 5"
MODEL = ["model=modern", *(f"model.{size}" for size in ("encoder_layers=2", "global_every=1"))]
MODEL += [f"model.encoder_{size}" for size in ("embed_dim=16", "ffn_embed_dim=24")]
MODEL += ["model.encoder_attention_heads=2", "model.max_positions=64"]
ROWS = ["task.sample_break_mode=eos", "task.tokens_per_sample=40"]
QUIET = ["engine.tensorboard=false", "engine.threads=1"]
RECIPE = ["train=10", "updates=6", "batch_size=4", "lr=[1e-3,3e-2]"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a world and a causal run of three updates, whose seed is 5."""
    folder = tmp_path_factory.mktemp("adapt")
    world = ["preprocess", "--world", "quad", *SIZES.split()]
    assert main([*world, "--destdir", f"{folder}/quad"]) == 0
    causal(folder, "run")
    return folder


def causal(place: Path, name: str, *more: str) -> None:
    command = ["train", f"{place}/quad", "--save-dir", f"{place}/{name}", *MODEL, *ROWS, *QUIET]
    command += ["task=causal_lm", "criterion=causal_lm", "trainer.max_update=3", "seed=5"]
    assert main([*command, *more]) == 0


def score(place: Path, *words: str) -> dict[str, Any]:
    """Return the record that `score --suite adapt` writes."""
    command = ["score", f"{place}/run", "--suite", "adapt", "--data", f"{place}/quad/depth"]
    assert main([*command, *words]) == 0
    (file,) = (place / "run" / "suites" / "adapt").glob("*.json")
    record: dict[str, Any] = json.loads(file.read_text())
    file.unlink()
    return record


def metrics_of(record: dict[str, Any]) -> dict[str, float]:
    metrics: dict[str, float] = record["groups"]["overall"]["metrics"]
    return metrics


def opened(place: Path, *overrides: str) -> tuple[Parts, Path]:
    """Return the run and the folder of its checkpoint."""
    folder = manifests.resolve(f"{place}/run", prefer="best")
    return open_scored(str(folder), overrides=overrides), folder


def test_results_are_those_of_train_at_the_rate_that_valid_chooses(place: Path) -> None:
    before = manifests.read_manifest(opened(place)[1])
    record = score(place, *RECIPE)
    results: dict[float, dict[str, float]] = {}
    for rate in (1e-3, 3e-2):
        save = place / f"alone-{rate}"
        command = ["train", f"{place}/quad", "--init-from", f"{place}/run", "--save-dir", str(save)]
        command += ["--task", "token_classification", "--criterion", "token_classification"]
        command += ["model=inherit", "schedule=linear", "schedule.warmup_ratio=0.1", *QUIET]
        command += ["task.labelled=depth", "task.train_size=10", "task.batch_size=4", "seed=5"]
        command += ["task.tokens_per_sample=40", f"optimizer.lr={rate}", "trainer.max_update=6"]
        assert main([*command, "trainer.final_splits=[valid,test]"]) == 0
        alone = json.loads((save / "results.json").read_text())
        results[rate] = {split: alone["metrics"][split]["accuracy"] for split in ("valid", "test")}
        results[rate]["flops"] = alone["flops"]
    best = max(results, key=lambda rate: results[rate]["valid"])
    assert len({of_rate["valid"] for of_rate in results.values()}) == 2
    metrics = metrics_of(record)
    references = record["references"]["accuracy"]
    assert list(metrics) == ["accuracy", "valid_accuracy", "lr", "rows_trained"]
    assert metrics["lr"] == best and metrics["rows_trained"] == 10
    assert (metrics["accuracy"], metrics["valid_accuracy"]) == (
        *(results[best][split] for split in ("test", "valid")),
    )
    assert {*references} >= {"chance", "majority", "word", "bayes"}
    assert record["facts"]["updates"] == 12
    assert record["facts"]["flops"] == sum(of_rate["flops"] for of_rate in results.values())
    # The checkpoint and its weights are as before, and nothing else is left in the folder.
    assert manifests.read_manifest(opened(place)[1]) == before
    assert not list((place / "run" / "suites").rglob("*.*"))


def test_the_same_seed_gives_the_same_and_another_one_does_not(place: Path) -> None:
    one = score(place, *RECIPE)
    again, other = score(place, *RECIPE, "seed=5"), score(place, *RECIPE, "seed=6")
    assert metrics_of(one) == metrics_of(again) != metrics_of(other)
    assert one["data"] == again["data"] and one["options"] != again["options"]


def test_without_a_valid_split_some_of_the_first_sentences_choose(place: Path) -> None:
    metrics = metrics_of(score(place, *RECIPE, "split=valid"))
    assert metrics["rows_trained"] == 8
    assert metrics_of(score(place, *RECIPE, "train=0"))["rows_trained"] == 40


def test_a_rate_that_diverges_is_left_out(place: Path) -> None:
    both, one = (score(place, *RECIPE, f"lr=[{rates}]") for rates in ("1e38,3e-2", "3e-2"))
    assert metrics_of(both) == metrics_of(one)
    command = ["score", f"{place}/run", "--suite", "adapt", "--data", f"{place}/quad/depth"]
    assert main([*command, *RECIPE, "lr=[1e38]"]) == 3
    assert not list((place / "run" / "suites").rglob("*.*"))


def test_at_the_end_of_a_run_beside_a_probe(place: Path) -> None:
    entry = f"adapt depth name=tuned {' '.join(RECIPE)}"
    causal(place, "other", f'trainer.final_suites=["{entry}", "probe depth"]')
    results, _ = suite_results.read_all(place / "other")
    by_name = {result.name: result for result in results}
    assert sorted(by_name) == ["probe", "tuned"]
    record = score(place, *RECIPE)
    assert dict(by_name["tuned"].groups) == record["groups"]
    assert by_name["tuned"].references["accuracy"]["bayes"] == 1


class Changed:
    """Rows whose last token before [SEP] is another."""

    def __init__(self, rows: TaggedRows) -> None:
        self.rows, self.lengths = rows, rows.lengths

    def batch(self, samples: np.ndarray, keys: np.ndarray, width: int = 0) -> TokenBatch:
        batch = self.rows.batch(samples, keys, width)
        batch.tokens[np.arange(len(samples)), self.lengths[samples] - 2] = 20
        return batch


@pytest.mark.parametrize("updates, rate", [(1, 1e-9), (6, 1e-3)])
def test_words_see_what_follows_them(place: Path, updates: int, rate: float) -> None:
    """As soon as a causal encoder is fine-tuned; its frozen states do not."""
    run, folder = opened(place)
    rows = TaggedRows(place / "quad" / "depth", "test", 40)
    part = _part_of(rows, 0, 40)
    # A label is at a filler, never at the full stop that is changed.
    changed = ProbePart(Changed(rows), part.samples, part.labels)  # type: ignore[arg-type]
    options = {"task.train_size": 8, "trainer.max_update": updates, "optimizer.lr": rate}
    logits = WordTuner(run, folder, 512).tune(place / "quad" / "depth", (part, changed), options)
    assert (logits[0] != logits[1]).any(axis=1).mean() > 0.9
    states = [EncoderStates(run).at_targets(p.rows, p.samples)[-1] for p in (part, changed)]
    assert np.array_equal(states[0], states[1])


def test_updates_are_those_of_a_plain_loop(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64: clipped sums over the words of all eight sentences, AdamW, a linear rate."""
    run, folder = opened(place, "engine.precision=fp64")
    rows = TaggedRows(place / "quad" / "depth", "train", 40)
    first: list[TokenClassifier] = []
    start = WordTuner._start

    def noted(tuner: WordTuner, parts: Parts) -> None:
        start(tuner, parts)
        assert isinstance(parts.model, TokenClassifier)
        first.append(copy.deepcopy(parts.model))

    monkeypatch.setattr(WordTuner, "_start", noted)
    options = {"task.train_size": 8, "task.batch_size": 8, "task.head_dropout": 0.0}
    options |= {"trainer.max_update": 5, "optimizer.lr": 0.01, "schedule.warmup_ratio": 0.2}
    part = _part_of(rows, 0, 8)
    (logits,) = WordTuner(run, folder, 10_000).tune(rows.data.folder, [part], options)
    [model] = first
    encoder = encoder_of(task_read_as(run.task), run.model)
    begun = model.encoder.state_dict()
    assert all(torch.equal(w, begun[name]) for name, w in encoder.state_dict().items())
    batch = rows.batch(part.samples, np.zeros(8, np.uint64))
    adam = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01)
    assert batch.targets is not None
    chosen = batch.targets >= 0
    for factor in (1, 0.75, 0.5, 0.25, 0):
        adam.param_groups[0]["lr"] = 0.01 * factor
        scores = model(batch.tokens, batch.layout, batch.segments)[chosen]
        adam.zero_grad()
        F.cross_entropy(scores, batch.targets[chosen], reduction="sum").backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
    with torch.no_grad():
        expected = model(batch.tokens, batch.layout, batch.segments)[chosen].numpy()
    assert logits == pytest.approx(expected, abs=1e-5)  # they are float32
    # The model of the run has not moved.
    stored = checkpoint.load(folder).weights
    current = run.model.state_dict()
    assert all(torch.equal(current[name], w.double()) for name, w in stored.items())


ENCODERS = [
    *(("masked_lm", 0), ("causal_lm", 0), ("prefix_lm", 0), ("masked_next_token", 0)),
    *(("masked_diffusion", 0), ("mixture", 0), ("meta_pseudo_label_hard", 0), ("electra_rtd", 0)),
    *(("electric_nce", 1), ("replace_mlm", 0), ("span_corruption", 2), ("joint_embedding", 1)),
]


@pytest.mark.parametrize("case", ENCODERS, ids=lambda case: case[0])
def test_every_objective_with_an_encoder(case: battery.Case, moons: Path, tmp_path: Path) -> None:
    config = battery.configure(moons, tmp_path / "run", case, "trainer.max_update=1")
    run = TrainingRun(config)
    run.train()
    folder = manifests.resolve(str(tmp_path / "run"), prefer="best")
    tagged = small_data.ensure(moons, "tagged")
    suite = build_suite("adapt", ["train=12", "updates=2", "lr=1e-2", "split=valid"])
    tuner = WordTuner(open_scored(str(folder), user_dir=config.user_dir), folder, 2000)
    results = suite.score(suite.read(tagged), tuner)
    assert 0 <= results["overall"].metrics["accuracy"] <= 1 and tuner.updates == 2
    assert tuner.flops > 0


def test_a_run_without_an_encoder(moons: Path, tmp_path: Path) -> None:
    case = ("language_modeling", 0)
    TrainingRun(battery.configure(moons, tmp_path / "run", case, "trainer.max_update=1")).train()
    folder = manifests.resolve(str(tmp_path / "run"), prefer="best")
    with pytest.raises(UsageError, match="no Transformer encoder"):
        WordTuner(open_scored(str(folder)), folder, 2000)


@pytest.mark.parametrize(
    "words, folder",
    [
        (["lr=[]"], "depth"),
        (["lr=[0]"], "depth"),
        (["updates=0"], "depth"),
        (["split=train"], "depth"),
        ([], "topic"),
        ([], "pairs"),
        ([], "nowhere"),
    ],
)
def test_mistakes(place: Path, words: Sequence[str], folder: str) -> None:
    command = ["score", f"{place}/run", "--suite", "adapt", "--data", f"{place}/quad/{folder}"]
    assert main([*command, *words]) == 2
