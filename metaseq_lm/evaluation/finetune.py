"""A suite that fine-tunes on labelled sets: what the encoder of a run learns from each set.

All sets use the recipe of the BabyLM challenge's evaluation pipeline of 2025 (eval_finetuning.sh
and finetune/ at commit bf55c11), with its exceptions for some: AdamW with betas (.9, .999), eps
1e-8 and a weight decay of .01 on all parameters, no clipping, warm-up over 6 % of the updates, then
a cosine to a tenth of the rate, dropout of .1 in a head with a hidden layer (GELU).

The pipeline chooses the epoch on the file that it reports, so its scores are too high, the more so
the smaller the file. Here, by default, a held-out part of train chooses the epoch, and the learning
rate if several are tried: a single rate for all encoders favours some.

Each score comes with the score of a linear probe of the frozen states, on the same rows.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from metaseq_lm.config.suites import HELD_OUT, ProbeConfig
from metaseq_lm.core.errors import DivergedError, UsageError
from metaseq_lm.core.loading import format_value
from metaseq_lm.data.benchmarks import Recipe, benchmark_of
from metaseq_lm.data.labelled import baselines
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.manifest import LABELLED, MANIFEST_FILE, Manifest
from metaseq_lm.evaluation.benchmarks import LabelledItems, labelled_results
from metaseq_lm.evaluation.grouping import MACRO
from metaseq_lm.evaluation.probe import FORMS as PROBED_FORMS
from metaseq_lm.evaluation.probe import Probe
from metaseq_lm.evaluation.suites import (
    OVERALL,
    TUNING,
    GroupMetrics,
    HiddenStates,
    References,
    Results,
    Suite,
    by_metric,
)

_TRAIN = "train"
_SHARE = 0.1  # held-out share of train
_ACCURACY, F1 = "accuracy", "f1"
_FROZEN = "frozen"
_F1_MACRO = f"{_ACCURACY}_{F1}{MACRO}"
FORMS = ("single", "pair", "choices", "spans")  # of sets with one label a row
T = TypeVar("T")


@dataclass(frozen=True)
class FineTuned:
    """The results of a fine-tuned model on the scored split.

    Attributes:
        metrics: The metrics of the set, the main one first.
        choice: The value at the chosen epoch of the metric that chose it.
        epoch: The chosen epoch.
        trained: The number of rows that it was trained on.
        choosing: The number of rows that chose the epoch.
        cut: The share of the scored rows that lost tokens.
    """

    metrics: Mapping[str, float]
    choice: float
    epoch: float
    trained: int
    choosing: int
    cut: float


class FineTuning(Protocol):
    """Fine-tunes the encoder of a run.

    Attributes:
        states: The states of the encoder without fine-tuning.
    """

    states: HiddenStates

    def fine_tune(
        self, folder: Path, split: str, seed: int, options: Mapping[str, Any]
    ) -> FineTuned:
        """Train a model on the set in a folder and return its results on a split.

        Args:
            folder: The folder of the set.
            split: The split to score.
            seed: The seed of the head, the dropout and the order of the rows.
            options: Options of the training run by their keys.

        Raises:
            DivergedError: The training run diverged.
        """


class FineTune(Suite[list[Path], FineTuning]):
    """The encoder fine-tuned on each labelled set, by the recipe of the BabyLM challenge."""

    patterns: ClassVar[tuple[str, ...]] = (MANIFEST_FILE,)
    takes = TUNING

    def check(self, folder: Path) -> None:
        self.read(folder)

    def files(self, folder: Path) -> list[Path]:
        return [path / MANIFEST_FILE for path in self.read(folder)]

    def read(self, folder: Path) -> list[Path]:
        """Return the folders of the sets: the folder itself, or the folders in it."""
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder; name a labelled set, or the data folder")
        names, split = self.config.sets, self.config.split
        if not self.config.seeds:
            raise UsageError("seeds=[]: give one or more")
        check_rates("lr_choices", self.config.lr_choices)
        if split == _TRAIN:
            raise UsageError("split=train: it is trained on; name another")
        if _is_labelled(folder):
            if names:
                raise UsageError(f"{folder}: a labelled set; sets=NAMES goes with its data folder")
            _check_set(folder, split)
            return [folder]
        for name in names:
            _check_set(folder / name, split)
        if names:
            return [folder / name for name in sorted(set(names))]
        sets = []
        for path in sorted(folder.glob(f"*/{MANIFEST_FILE}")):
            manifest = Manifest.load(path.parent)
            if not _problem_of(manifest, split):
                sets.append(path.parent)
        if not sets:
            raise UsageError(
                f"{folder}: holds no labelled set with the splits train and {split}; 'preprocess "
                "--benchmark babylm/RTE --source FOLDER' makes one"
            )
        return sets

    def score(self, items: list[Path], probabilities: FineTuning) -> Results:
        results = {folder.name: self._tuned(folder, probabilities) for folder in items}
        if self._is_single(items):
            return {OVERALL: results[items[0].name]}
        count = sum(group.n for group in results.values())
        metrics = {name: group.metrics for name, group in results.items()}
        return {OVERALL: GroupMetrics(count, _macro_means(items, metrics)), **results}

    def _is_single(self, items: list[Path]) -> bool:
        return len(items) == 1 and not self.config.sets

    def _tuned(self, folder: Path, tuning: FineTuning) -> GroupMetrics:
        """Return the means over seeds of the metrics of a set, the main one first."""
        split, seeds = self.config.split, self.config.seeds
        chosen = [self._at_best_rate(folder, seed, tuning) for seed in seeds]
        runs = [run for _, run in chosen]
        means: dict[str, float] = {}
        for name in runs[0].metrics:
            means[name] = float(np.mean([run.metrics[name] for run in runs]))
        main = next(iter(means))
        if self._is_probed(folder):
            probe = self._probe(folder)
            frozen = probe.score(probe.read(folder), tuning.states)[OVERALL].metrics[main]
            means[f"{_FROZEN}_{main}"] = frozen
        if len(runs) > 1:
            means[f"{main}_sd"] = float(np.std([run.metrics[main] for run in runs], ddof=1))
        if self.config.lr_choices:
            means["lr"] = float(np.mean([rate for rate, _ in chosen]))
        means["epoch"] = float(np.mean([run.epoch for run in runs]))
        means |= {"rows_trained": runs[0].trained, "rows_choosing": runs[0].choosing}
        return GroupMetrics(len(LabelledSet(folder, split)), means | {"cut": runs[0].cut})

    def _at_best_rate(self, folder: Path, seed: int, tuning: FineTuning) -> tuple[float, FineTuned]:
        """Return the chosen learning rate and its model; raises like `at_best_rate`."""
        options, split = self.options_for(_recipe_of(folder)), self.config.split
        return at_best_rate(
            self.config.lr_choices or (self.config.lr,),
            lambda lr: tuning.fine_tune(folder, split, seed, options | {"optimizer.lr": lr}),
            lambda run: run.choice,
        )

    def _is_probed(self, folder: Path) -> bool:
        form: str = Manifest.load(folder).details["form"]
        return self.config.frozen and form in PROBED_FORMS

    def _probe(self, folder: Path) -> Probe:
        limit = self.config.train or _recipe_of(folder).train
        return Probe(ProbeConfig(split=self.config.split, train=limit))

    def options_for(self, recipe: Recipe) -> dict[str, Any]:
        """Return the options of the training run for a set."""
        config = self.config
        is_held_out = config.choose == HELD_OUT
        return {
            "task.batch_size": config.batch_size or recipe.batch_size,
            "task.epochs": config.epochs or recipe.epochs,
            "task.train_size": config.train or recipe.train,
            "task.tokens_per_sample": config.tokens,
            "task.held_out": _SHARE if is_held_out else 0.0,
            "task.validate_epochs": 1,
            "task.pooled": True,
            "task.pooler_activation": "gelu",
            "task.head_dropout": 0.1,
            "optimizer.betas": [0.9, 0.999],
            "optimizer.eps": 1e-8,
            "optimizer.weight_decay": 0.01,
            "optimizer.clip_norm": 0,
            "schedule.warmup_ratio": 0.06,
            "schedule.end": 0.1,
            "trainer.valid_split": HELD_OUT if is_held_out else config.split,
            "trainer.best_checkpoint_metric": recipe.metric,
            "trainer.maximize_best_checkpoint_metric": True,
        }

    def references(self, items: list[Path], folder: Path) -> References:
        references = {path.name: self._references(path) for path in items}
        if self._is_single(items):
            return {OVERALL: by_metric(references[items[0].name])}
        majorities = {n: of_set["majority"] for n, of_set in references.items() if of_set}
        macro: dict[str, float] = {}
        if len(majorities) == len(items):
            macro = _macro_means(items, majorities)
        # It would be a column with one number.
        macro.pop(_F1_MACRO, None)
        by_name = {name: by_metric(of_set) for name, of_set in references.items()}
        return {OVERALL: by_metric({"majority": macro}), **by_name}

    def _references(self, folder: Path) -> dict[str, dict[str, float]]:
        """Return the metrics of the most frequent class in train, and of bags of words.

        {} for real values.
        """
        train, scored = LabelledSet(folder, _TRAIN), LabelledSet(folder, self.config.split)
        if train.regression:
            return {}
        assert train.labels is not None and scored.labels is not None
        limit = self.config.train or _recipe_of(folder).train
        most = baselines.majority(train.labels[: limit or None], len(train.label_names))
        scores = np.tile(np.eye(len(train.label_names))[most], (len(scored), 1))
        items = LabelledItems(scored.benchmark, scored.labels, scored.rows, scored.label_names)
        references = {"majority": labelled_results(items, scores)[OVERALL].metrics}
        if not self._is_probed(folder):
            return references
        probe = self._probe(folder)
        main = next(iter(references["majority"]))
        of_probe = probe.references(probe.read(folder), folder)[OVERALL][main]
        references["majority"][f"{_FROZEN}_{main}"] = of_probe["majority"]
        words = of_probe["bag_of_words"]
        return references | {"bag_of_words": {main: words, f"{_FROZEN}_{main}": words}}


def at_best_rate(
    rates: Iterable[float], tuned: Callable[[float], T], choice: Callable[[T], float]
) -> tuple[float, T]:
    """Return the learning rate with the greatest `choice`, the first if equal, and its model.

    Args:
        rates: The rates to try.
        tuned: Makes the model at a rate; a rate at which it raises DivergedError is left out.
        choice: Returns the value to maximise, such as the accuracy on held-out rows.

    Raises:
        DivergedError: The training diverged at each rate.
    """
    models: dict[float, T] = {}
    diverged: DivergedError | None = None
    for rate in rates:
        try:
            models[rate] = tuned(rate)
        except DivergedError as error:
            diverged = error
    if diverged and not models:
        raise diverged
    best = max(models, key=lambda rate: choice(models[rate]))
    return best, models[best]


def check_rates(name: str, rates: Sequence[float]) -> None:
    """Raise UsageError unless the rates of an option are above 0 and finite."""
    if not all(0 < rate < math.inf for rate in rates):
        raise UsageError(f"{name}={format_value(list(rates))}: rates are above 0")


def _macro_means(
    folders: list[Path], metrics: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Return the mean over sets of their main metrics.

    It is called accuracy_macro if the main metric of all sets is the accuracy, else score_macro. If
    F1 chooses the epoch of some sets, accuracy_f1_macro uses F1 for these, like the challenge's
    README; the challenge's script uses the accuracy of all.

    Args:
        folders: The folders of the sets.
        metrics: The metrics of each, the main one first, by the name of its folder.
    """
    mains = {folder: next(iter(metrics[folder.name])) for folder in folders}

    def mean_of(names: Mapping[Path, str]) -> float:
        return float(np.mean([metrics[folder.name][name] for folder, name in names.items()]))

    main = _ACCURACY if {*mains.values()} == {_ACCURACY} else "score"
    means = {main + MACRO: mean_of(mains)}
    by_f1 = {folder: F1 for folder in folders if _recipe_of(folder).metric == F1}
    if main == _ACCURACY and by_f1:
        means[_F1_MACRO] = mean_of(mains | by_f1)
    frozen = {folder: f"{_FROZEN}_{name}" for folder, name in mains.items()}
    if all(name in metrics[folder.name] for folder, name in frozen.items()):
        means[f"{_FROZEN}_{main}{MACRO}"] = mean_of(frozen)
    return means


def _recipe_of(folder: Path) -> Recipe:
    benchmark = benchmark_of(Manifest.load(folder).details)
    return benchmark.recipe if benchmark else Recipe()


def _is_labelled(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).is_file() and Manifest.load(folder).kind == LABELLED


def _problem_of(manifest: Manifest, split: str) -> str:
    """Return why a set cannot be fine-tuned on and scored, "" if it can."""
    if manifest.kind != LABELLED:
        return "is no labelled set"
    if manifest.details["form"] not in FORMS:
        return f"is of form '{manifest.details['form']}', not of {', '.join(FORMS)}"
    for name in (_TRAIN, split):
        if name not in manifest.splits:
            return f"has no split '{name}', only {', '.join(manifest.splits)}"
        if f"{name}.label.bin" not in manifest.files:
            return f"has no labels of split '{name}'"
    return ""


def _check_set(folder: Path, split: str) -> None:
    """Raise UsageError for a set that cannot be fine-tuned on and scored."""
    if problem := _problem_of(Manifest.load(folder), split):
        raise UsageError(f"{folder}: {problem}; name the split that is scored with split=NAME")
