"""Fine-tuning as a suite: the recipe of each set, means, what chooses, references, mistakes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_sets import sentences, write_corpus, write_set

from metaseq_lm.core.errors import DivergedError, UsageError
from metaseq_lm.evaluation.finetune import FineTuned
from metaseq_lm.evaluation.suites import OVERALL, HiddenStates, SuiteRows, build_suite

# Labels of train and valid; most rows of train have class 1, those of valid 0.
TRAIN, VALID = [1, 1, 0, 1, 1, 0], [0, 0, 0, 1]


def make_set(folder: Path, benchmark: str, labels: tuple[str, ...] = ("0", "1")) -> None:
    rng = np.random.default_rng(3)
    splits = {}
    for split, gold in (("train", TRAIN), ("valid", VALID)):
        splits[split] = ([sentences(rng, len(gold)) for _ in range(2)], gold)
    write_set(folder, splits, labels, benchmark=benchmark)  # type: ignore[arg-type]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_corpus(tmp_path)
    make_set(tmp_path / "WSC", "babylm/WSC", ("false", "true"))
    make_set(tmp_path / "MRPC", "babylm/MRPC")
    return tmp_path


class Labels:
    """States of two layers: nothing, and labels."""

    longest = 64

    def means_of_parts(self, rows: SuiteRows, samples: np.ndarray) -> list[np.ndarray]:
        labels = rows.data.labels[samples]  # type: ignore[attr-defined]
        return [np.zeros((len(labels), 2, 2)), np.eye(2)[np.stack([labels, labels], 1)]]

    def means(self, rows: SuiteRows, samples: np.ndarray) -> list[np.ndarray]:
        raise AssertionError("these sets hold pairs")

    at_targets = means


class Recorded:
    """Fine-tuning whose metrics are given, by set and seed."""

    states: HiddenStates = Labels()

    def __init__(self, metrics: Mapping[tuple[str, int], Mapping[str, float]]) -> None:
        self.metrics = metrics
        self.options: dict[str, Mapping[str, Any]] = {}

    def fine_tune(
        self, folder: Path, split: str, seed: int, options: Mapping[str, Any]
    ) -> FineTuned:
        self.options[folder.name] = options
        return FineTuned(self.metrics[folder.name, seed], 0.5, 2.0 * seed, 5, 1, 0.25)


def test_means_over_seeds_and_over_sets(data: Path) -> None:
    tuning = Recorded(
        {
            ("WSC", 1): {"accuracy": 0.5},
            ("WSC", 3): {"accuracy": 0.7},
            ("MRPC", 1): {"accuracy": 0.8, "f1": 0.9},
            ("MRPC", 3): {"accuracy": 0.9, "f1": 0.92},
        }
    )
    suite = build_suite("finetune", ["seeds=1,3", "frozen=false"])
    items = suite.read(data)
    results = suite.score(items, tuning)
    assert list(results) == [OVERALL, "MRPC", "WSC"] and results[OVERALL].n == 8
    # The script of the challenge means accuracies, its README takes F1 of MRPC and QQP.
    overall = results[OVERALL].metrics
    assert overall == {
        "accuracy_macro": pytest.approx((0.85 + 0.6) / 2),
        "accuracy_f1_macro": pytest.approx((0.91 + 0.6) / 2),
    }
    assert results["WSC"].n == 4
    assert results["WSC"].metrics == {
        "accuracy": pytest.approx(0.6),
        "accuracy_sd": pytest.approx(0.2 / np.sqrt(2)),
        "epoch": 4.0,
        "rows_trained": 5,
        "rows_choosing": 1,
        "cut": 0.25,
    }
    references = suite.references(items, data)
    # Class 1 is most frequent in train, and one of four rows of valid has it.
    assert references["WSC"] == {"accuracy": {"majority": 0.25}}
    assert references["MRPC"] == {"accuracy": {"majority": 0.25}, "f1": {"majority": 0.4}}
    assert references[OVERALL] == {"accuracy_macro": {"majority": 0.25}}


def test_the_recipe_of_the_challenge_and_its_exceptions(data: Path) -> None:
    for task in ("BoolQ", "MultiRC", "QQP", "MNLI"):
        labels = ("false", "true") if task == "BoolQ" else ("0", "1")
        labels = ("contradiction", "entailment", "neutral") if task == "MNLI" else labels
        make_set(data / task, f"babylm/{task}", labels)
    make_set(data / "own", "")
    metrics = {"accuracy": 0.5, "f1": 0.5}
    suite = build_suite("finetune", ["frozen=false"])
    items = suite.read(data)
    tuning = Recorded({(path.name, 42): metrics for path in items})
    suite.score(items, tuning)
    usual = {
        "task.batch_size": 32,
        "task.epochs": 10,
        "task.train_size": 0,
        "task.tokens_per_sample": 512,
        "task.held_out": 0.1,
        "task.validate_epochs": 1,
        "task.pooled": True,
        "task.pooler_activation": "gelu",
        "task.head_dropout": 0.1,
        "optimizer.lr": 3e-5,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.01,
        "optimizer.clip_norm": 0,
        "schedule.warmup_ratio": 0.06,
        "schedule.end": 0.1,
        "trainer.valid_split": "held_out",
        "trainer.best_checkpoint_metric": "score",
        "trainer.maximize_best_checkpoint_metric": True,
    }
    exceptions: dict[str, dict[str, Any]] = {
        "BoolQ": {"task.batch_size": 16},
        "MultiRC": {"task.batch_size": 16},
        "WSC": {"task.epochs": 30},
        "MRPC": {"trainer.best_checkpoint_metric": "f1"},
        "QQP": {"task.train_size": 10_000, "trainer.best_checkpoint_metric": "f1"},
        "MNLI": {"task.train_size": 10_000},
        "own": {},
    }
    assert tuning.options == {name: usual | changes for name, changes in exceptions.items()}
    # What a user sets counts for all sets.
    words = "frozen=false choose=scored epochs=2 batch_size=8 train=5 tokens=64 lr=1e-3".split()
    suite = build_suite("finetune", words)
    suite.score(items, tuning)
    options = {
        "task.held_out": 0.0,
        "trainer.valid_split": "valid",
        "task.epochs": 2,
        "task.batch_size": 8,
        "task.train_size": 5,
        "task.tokens_per_sample": 64,
        "optimizer.lr": 1e-3,
    }
    assert tuning.options["WSC"] == usual | options
    assert tuning.options["QQP"] == usual | exceptions["QQP"] | options


class Rates(Recorded):
    """Fine-tuning that depends on the rate: what chooses, and what is scored; None diverges."""

    def __init__(self, outcomes: Mapping[tuple[int, float], tuple[float, float] | None]) -> None:
        super().__init__({})
        self.outcomes = outcomes

    def fine_tune(
        self, folder: Path, split: str, seed: int, options: Mapping[str, Any]
    ) -> FineTuned:
        outcome = self.outcomes[seed, options["optimizer.lr"]]
        if outcome is None:
            raise DivergedError(f"seed {seed} diverged")
        return FineTuned({"accuracy": outcome[1]}, outcome[0], 1.0, 5, 1, 0.25)


def test_what_chooses_the_epoch_chooses_the_rate(data: Path) -> None:
    """For each seed, of equal ones the first; not by the rows that are scored."""
    outcomes: dict[tuple[int, float], tuple[float, float] | None] = {
        (1, 0.1): (0.6, 0.9),
        (1, 0.2): (0.7, 0.5),
        (1, 0.4): (0.7, 0.8),
        (3, 0.1): (0.5, 0.3),
        (3, 0.2): (0.4, 0.9),
        (3, 0.4): None,
    }
    words = ["seeds=1,3", "frozen=false", "lr_choices=0.1,0.2,0.4", "lr=7.0"]
    suite = build_suite("finetune", words)
    items = suite.read(data / "WSC")
    metrics = suite.score(items, Rates(outcomes))[OVERALL].metrics
    assert metrics["accuracy"] == pytest.approx((0.5 + 0.3) / 2)
    assert metrics["lr"] == pytest.approx((0.2 + 0.1) / 2)
    with pytest.raises(DivergedError, match="seed 3"):
        suite.score(items, Rates(outcomes | {(3, 0.1): None, (3, 0.2): None}))
    with pytest.raises(UsageError, match=r"lr_choices=\[0.1,0.0\]"):
        build_suite("finetune", ["lr_choices=0.1,0"]).read(data)


def test_one_set_by_its_own_folder(data: Path) -> None:
    suite = build_suite("finetune", ["frozen=false"])
    items = suite.read(data / "WSC")
    results = suite.score(items, Recorded({("WSC", 42): {"accuracy": 0.5}}))
    assert list(results) == [OVERALL] and results[OVERALL].metrics["accuracy"] == 0.5
    assert suite.references(items, data / "WSC") == {OVERALL: {"accuracy": {"majority": 0.25}}}


def test_frozen_states_stand_beside(data: Path) -> None:
    """A probe of the same rows; what it is compared with, both are."""
    metrics = {("WSC", 42): {"accuracy": 0.5}, ("MRPC", 42): {"accuracy": 0.5, "f1": 0.1}}
    suite = build_suite("finetune")
    items = suite.read(data)
    results = suite.score(items, Recorded(metrics))
    assert results["WSC"].metrics["frozen_accuracy"] == 1
    assert results[OVERALL].metrics == {
        "accuracy_macro": 0.5,
        "accuracy_f1_macro": pytest.approx(0.3),
        "frozen_accuracy_macro": 1.0,
    }
    references = suite.references(items, data)
    probe = build_suite("probe", ["split=valid"])
    expected = probe.references(probe.read(data / "WSC"), data / "WSC")[OVERALL]["accuracy"]
    assert references["WSC"]["frozen_accuracy"] == {
        name: expected[name] for name in ("majority", "bag_of_words")
    }
    assert references["WSC"]["accuracy"].keys() == {"majority", "bag_of_words"}
    assert "frozen_accuracy_macro" in references[OVERALL]


def test_sets_with_other_metrics(data: Path) -> None:
    make_set(data / "CoLA", "glue/CoLA")
    suite = build_suite("finetune", ["sets=[WSC,CoLA]", "frozen=false"])
    items = suite.read(data)
    assert [path.name for path in items] == ["CoLA", "WSC"]
    metrics = {("WSC", 42): {"accuracy": 0.5}, ("CoLA", 42): {"matthews": 0.1}}
    results = suite.score(items, Recorded(metrics))
    assert results[OVERALL].metrics == {"score_macro": pytest.approx(0.3)}
    assert suite.references(items, data)["CoLA"] == {"matthews": {"majority": 0.0}}


def test_the_hash_is_that_of_the_sets(data: Path) -> None:
    suite = build_suite("finetune", ["sets=[WSC]"])
    first = suite.data_hash(data)
    make_set(data / "RTE", "babylm/RTE", ("entailment", "not_entailment"))
    assert suite.data_hash(data) == first
    assert build_suite("finetune").data_hash(data) != first
    VALID.reverse()
    make_set(data / "WSC", "babylm/WSC", ("false", "true"))
    VALID.reverse()
    assert suite.data_hash(data) != first


@pytest.mark.parametrize(
    "words, folder, message",
    [
        (["sets=[RTE]"], ".", "RTE.*no such file"),
        (["sets=[WSC]"], "WSC", "a labelled set; sets=NAMES goes with its data folder"),
        (["split=test"], ".", "no labelled set with the splits train and test"),
        (["split=test"], "WSC", "has no split 'test', only train, valid; .*split=NAME"),
        (["split=train"], "WSC", "split=train: it is trained on"),
        (["seeds=[]"], ".", "give one or more"),
        ([], "nowhere", "no such folder"),
    ],
)
def test_mistakes(data: Path, words: list[str], folder: str, message: str) -> None:
    with pytest.raises(Exception, match=message) as raised:
        build_suite("finetune", words).read(data / folder)
    assert isinstance(raised.value, UsageError) or "no such file" in message


def test_sets_that_cannot_be_fine_tuned_on_are_named(data: Path) -> None:
    rng = np.random.default_rng(3)
    columns = [sentences(rng, 4)]
    write_set(data / "bare", {"train": (columns, [0] * 4), "valid": (columns, None)}, ["a", "b"])
    with pytest.raises(UsageError, match="bare: .*labels.*'valid'"):
        build_suite("finetune", ["sets=[bare]"]).read(data)
    write_set(data / "many", {"train": (columns, [[0]] * 4)}, ["a", "b"], form="multi_label")
    with pytest.raises(UsageError, match="many: .*'multi_label'"):
        build_suite("finetune", ["sets=[many]"]).read(data)
    assert [path.name for path in build_suite("finetune").read(data)] == ["MRPC", "WSC"]
