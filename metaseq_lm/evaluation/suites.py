"""Evaluation suites: items read from files and scored with the probabilities of a run.

A suite is registered like a task and does not depend on a model:

    @register_suite("my_suite", MySuiteConfig)
    class MySuite(Suite[list[Item], SentenceProbabilities]):
        patterns = ("*.jsonl",)

        def read(self, folder: Path) -> list[Item]: ...

        def score(self, items, probabilities) -> Results: ...

`metaseq-lm score RUN --suite my_suite --data FOLDER` restores the run, calls both methods and keeps
the results in the run folder, where `metaseq-lm report` reads them.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import read_words
from metaseq_lm.core.registry import SUITES
from metaseq_lm.data.labelled.files import SourceSentence
from metaseq_lm.data.storage.manifest import MANIFEST_FILE, Manifest
from metaseq_lm.runs.suite_results import COUNT, HITS
from metaseq_lm.runs.suite_results import OVERALL as OVERALL

if TYPE_CHECKING:
    from metaseq_lm.core.batch import TokenBatch

__all__ = [
    "PREDICTIONS",
    "SENTENCES",
    "STATES",
    "GroupMetrics",
    "Results",
    "Suite",
    "mean_by_group",
]

# What a suite scores items with: the attribute `takes`.
SENTENCES = "sentences"
PREDICTIONS = "predictions"
STATES = "states"
TUNING = "fine-tuning"
WORD_TUNING = "fine-tuning for labels of words"
SHARE = "share"
BLOCKS = 32  # number of blocks of items
CHUNK = 1 << 20

Items = TypeVar("Items")
Probabilities = TypeVar("Probabilities")


@dataclass(frozen=True)
class GroupMetrics:
    """The metrics of a group of items by name, and the number of items `n`.

    `hits` are an accuracy's right answers in each block of the items, see `hits_of`; else ().
    """

    n: int
    metrics: dict[str, float]
    hits: tuple[int, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return the group as a JSON object."""
        record: dict[str, Any] = {COUNT: self.n, "metrics": self.metrics}
        if self.hits:
            record[HITS] = list(self.hits)
        return record


def hits_of(right: np.ndarray) -> tuple[int, ...]:
    """Return the number of right items in each of BLOCKS blocks of a list of almost equal sizes.

    They show how far two runs agree on items, which accuracies do not. () if blocks would have
    fewer than two items.

    Args:
        right: Whether an item is right, bool (N,).
    """
    if len(right) < 2 * BLOCKS:
        return ()
    return tuple(int(block.sum()) for block in np.array_split(right, BLOCKS))


# The metrics of each group by name; the group of all items is OVERALL and comes first.
Results = dict[str, GroupMetrics]

# For each group, the references of its metrics: {metric: {name such as "chance": value}}.
References = dict[str, dict[str, dict[str, float]]]


@dataclass(frozen=True)
class SentenceScore:
    """The tokens of a sentence, ids (n,), and the log-probability of each given the others, (n,).

    A causal model conditions on earlier tokens only, and an energy-based one gives energies.
    """

    tokens: np.ndarray
    log_probs: np.ndarray

    @property
    def pll(self) -> float:
        """The sum of the log-probabilities in nats; 0 for a sentence without tokens."""
        return float(self.log_probs.sum())


class SentenceProbabilities(Protocol):
    """The log-probabilities that a run gives sentences."""

    def score(self, sentences: Sequence[SourceSentence]) -> Sequence[SentenceScore | None]:
        """Return the score of each sentence; None if it is longer than the run's rows."""

    def score_changed(
        self, pairs: Sequence[tuple[SourceSentence, SourceSentence]]
    ) -> Sequence[tuple[SentenceScore, SentenceScore] | None]:
        """Return the scores of the tokens in which the sentences of each pair differ.

        None for a pair with a sentence that is longer than the run's rows. Raises MetaseqError if
        the sentences of a pair have different numbers of tokens.
        """

    def score_parts(
        self, sentences: Sequence[SourceSentence], parts: Sequence[Sequence[tuple[int, int]]]
    ) -> Sequence[np.ndarray | None]:
        """Return the summed log-probabilities of the tokens of each part of each sentence.

        Args:
            sentences: The sentences.
            parts: The (first character, character after the last) of each sentence's parts, which
                do not overlap.

        Returns:
            Float64 (parts,) for each sentence; None if it is longer than the run's rows.
        """


class SuiteRows(Protocol):
    """Texts as rows of tokens with special ones, such as `SentenceRows` and `TaggedRows`."""

    lengths: np.ndarray

    def batch(self, samples: np.ndarray, keys: np.ndarray, width: int = 0) -> "TokenBatch":
        """Return the rows `samples` (B,); `keys` are not used."""


class HiddenStates(Protocol):
    """The frozen states of the layers of a run's encoder.

    Layer 0 is the embeddings. A token sees the same tokens as in the training of the run: in a
    causal language model only earlier ones.

    Attributes:
        longest: Largest number of tokens in a row, with special ones.
    """

    longest: int

    def at_targets(self, rows: SuiteRows, samples: np.ndarray) -> list[np.ndarray]:
        """Return each layer's states at the positions with a target, float32 (words, D).

        Args:
            rows: The rows.
            samples: The numbers of the rows to read, (B,); states are in this order.
        """

    def means(self, rows: SuiteRows, samples: np.ndarray) -> list[np.ndarray]:
        """Return each layer's mean over a row's states without special tokens, (B, D)."""

    def means_of_parts(self, rows: SuiteRows, samples: np.ndarray) -> list[np.ndarray]:
        """Return each layer's means over both texts of a row's pair, or its spans, (B, 2, D).

        Special tokens do not count.
        """


class Suite(Generic[Items, Probabilities]):
    """Base class of suites.

    Args:
        config: The options of the suite, an instance of the dataclass it is registered with.

    Attributes:
        name: The name that the suite is registered under.
        patterns: The files of a folder that it reads; {option} stands for the value of an option.
        takes: What `score` gets: SENTENCES, a `SentenceProbabilities`; PREDICTIONS, the result of
            `from_predictions` for a run's predictions of the split `config.split`; STATES, a
            `HiddenStates`; TUNING, an `evaluation.finetune.FineTuning`; or WORD_TUNING, an
            `evaluation.adapt.WordTuning`.
    """

    name: str = ""
    patterns: ClassVar[tuple[str, ...]] = ("*",)
    takes: ClassVar[str] = SENTENCES

    def __init__(self, config: Any) -> None:
        self.config = config

    def check(self, folder: Path) -> None:
        """Check, without reading everything, that a folder has items; raises like `files`.

        Called before the training of a run that ends with the suite.
        """
        self.files(folder)

    def read(self, folder: Path) -> Items:
        """Return the items in a folder, or in a single file.

        Raises:
            MetaseqError: A file is not of the suite's form; the message names file and line.
        """
        raise NotImplementedError

    def score(self, items: Items, probabilities: Probabilities) -> Results:
        """Return the metrics of all items and of each group of items."""
        raise NotImplementedError

    def from_predictions(self, rows: Sequence[dict[str, Any]]) -> Probabilities:
        """Return the second argument of `score`, made from the prediction rows of a split."""
        raise NotImplementedError

    def references(self, items: Items, folder: Path) -> References:
        """Return references of the metrics on the items of a folder, such as chance."""
        return {}

    def files(self, folder: Path) -> list[Path]:
        """Return the files to read, in the order of their names.

        Raises:
            UsageError: There is no such folder or file, or the folder has no file of the suite.
        """
        if folder.is_file():
            return [folder]
        if not folder.is_dir():
            raise UsageError(
                f"{folder}: no such folder; name that with the files of suite {self.name}"
            )
        patterns = [pattern.format(**vars(self.config)) for pattern in self.patterns]
        matches = set(chain.from_iterable(map(folder.glob, patterns)))
        files = sorted(filter(Path.is_file, matches))
        if not files:
            raise UsageError(
                f"{folder}: holds no file of suite {self.name} ({', '.join(patterns)})"
            )
        return files

    def data_hash(self, folder: Path) -> str:
        """Return a hash of the names and the contents of the files to read."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files(folder):
            if file.name == MANIFEST_FILE and MANIFEST_FILE in self.patterns:
                # It covers the data, not the command that made them.
                digest.update(Manifest.load(file.parent).data_hash.encode())
                continue
            digest.update(f"{file.name}\n{file.stat().st_size}\n".encode())
            with open(file, "rb") as content:
                while chunk := content.read(CHUNK):
                    digest.update(chunk)
        return digest.hexdigest()


def mean_by_group(items: Iterable[tuple[Sequence[str], Mapping[str, float]]]) -> Results:
    """Return the mean of each metric over all items, and over the items of each group.

    Args:
        items: The names of each item's groups, and its metrics, which are the same for all items.
    """
    members: dict[str, list[Mapping[str, float]]] = {OVERALL: []}
    for groups, metrics in items:
        for group in (OVERALL, *groups):
            members.setdefault(group, []).append(metrics)
    results = {}
    for group, rows in members.items():
        names = rows[0] if rows else {}
        means = {name: sum(row[name] for row in rows) / len(rows) for name in names}
        results[group] = GroupMetrics(len(rows), means)
    return results


def exact_scores(folder: Path, kind: str) -> dict[str, dict[str, float]]:
    """Return the scores of a perfect model and others in the world of a data folder, by item set.

    {} for data that belong to no world.

    Args:
        folder: A data folder.
        kind: "labelled", "pairs" or "losses".
    """
    if not (folder / MANIFEST_FILE).is_file():
        return {}
    scores: dict[str, Any] = Manifest.load(folder).details
    for key in ("world", "constants", kind):
        inner = scores.get(key)
        scores = inner if isinstance(inner, dict) else {}
    return scores


def exact_labels(folder: Path) -> dict[str, float]:
    """Return the accuracies of exact readers, of the word alone and of chance on a labelled set.

    {} for a set of no world, or of a world that does not say which side its labels need.
    """
    scores = exact_scores(folder.parent, "labelled").get(folder.name, {})
    if scores.keys().isdisjoint(("needs", "asks")):
        return {}
    return {name: value for name, value in scores.items() if isinstance(value, float)}


def share_known(accuracy: float, exact: Mapping[str, float]) -> dict[str, float]:
    """Return {"share": ...}, an accuracy's share of the gain over the labelled word alone.

    It is 0 at the accuracy of the word alone, 1 at the exact reader's of the whole document. {}
    without an exact reader, or if it is no better than the word.

    Args:
        accuracy: The accuracy.
        exact: The result of `exact_labels` for the set.
    """
    word, whole = exact.get("word", 0.0), exact.get("bayes", 0.0)
    if "word" not in exact or whole <= word:
        return {}
    return {SHARE: (accuracy - word) / (whole - word)}


def by_metric(references: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the values of references by metric, from the metrics of each reference."""
    values: dict[str, dict[str, float]] = {}
    for reference, metrics in references.items():
        for name, value in metrics.items():
            values.setdefault(name, {})[reference] = value
    return values


def build_suite(name: str, options: Sequence[str] = ()) -> Suite[Any, Any]:
    """Return the suite registered under `name` with options `name=value`.

    Raises:
        UsageError: The suite, an option or a value is unknown.
    """
    entry = SUITES.entry(name)
    suite: Suite[Any, Any] = entry.value(read_words(entry.dataclass, options, f"suite {name}"))
    suite.name = name
    return suite
