"""Completions: which of several texts is the most probable for a run, scored on a part of each.

COMPS (Misra et al. 2023), EWoK (Ivanova et al. 2024) and entity tracking (Kim and Schuster 2023),
in the files of their authors or of the BabyLM challenges. Only the tokens of the part count: given
the text before it for a causal model, given all other tokens for a masked one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path

import numpy as np

from metaseq_lm.config.suites import CompletionsConfig
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.labelled.files import SourceSentence
from metaseq_lm.data.records.record import Record
from metaseq_lm.evaluation.grouping import (
    SOFT,
    STRICT,
    TIES,
    Groups,
    chance_references,
    check_groups,
    group_value,
    results_by_group,
)
from metaseq_lm.evaluation.minimal_pairs import records_of
from metaseq_lm.evaluation.suites import (
    References,
    Results,
    SentenceProbabilities,
    Suite,
)

_ACCURACY = "accuracy"  # metrics with names that end so are averaged over groups


@dataclass(frozen=True)
class Completion:
    """A text that is scored from character `first` on."""

    sentence: SourceSentence
    first: int

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The scored characters."""
        return [(self.first, len(self.sentence.text))]


@dataclass(frozen=True)
class _CompletionChoice:
    """Completions, the right one first, and their groups, the widest first."""

    completions: tuple[Completion, ...]
    groups: Groups = ()


def _completed(before: str, text: str, record: Record) -> Completion:
    """Join a text and a completion, with a space between them if neither has one there."""
    if not before[-1:].isspace() and not text[:1].isspace():
        before += " "
    return Completion(SourceSentence(before + text, record.where), len(before))


class _Completions(Suite[list[_CompletionChoice], SentenceProbabilities]):
    """Choices between completions.

    Args:
        config: Which items are scored.
        choice: Returns the choice of a record, given the stem of its file name.
        metrics: Returns the metrics of a choice from its scores (completions,).
    """

    patterns = ("*.jsonl",)

    def __init__(
        self,
        config: CompletionsConfig,
        choice: Callable[[Record, str], _CompletionChoice],
        metrics: Callable[[np.ndarray], dict[str, float]],
    ) -> None:
        super().__init__(config)
        self.choice, self.metrics = choice, metrics

    def read(self, folder: Path) -> list[_CompletionChoice]:
        choices: list[_CompletionChoice] = []
        for file in self.files(folder):
            choices += self.config.of(self._read_file(file), file)
        return choices

    def _read_file(self, file: Path) -> Iterator[_CompletionChoice]:
        is_empty = True
        for where, fields, is_bad in records_of(str(file), self.config.on_bad_utf8):
            if is_bad and self.config.on_bad_utf8 == "skip":
                continue
            is_empty = False
            yield self.choice(Record(fields, where), group_value(file.stem))
        if is_empty:
            raise MetaseqError(f"{file}: holds no item")

    def score(
        self, items: list[_CompletionChoice], probabilities: SentenceProbabilities
    ) -> Results:
        """Return the metrics of the choices for which all completions fit into the run's rows."""
        completions = list(chain.from_iterable(item.completions for item in items))
        sums = iter(
            probabilities.score_parts(
                [completion.sentence for completion in completions],
                [completion.parts for completion in completions],
            )
        )
        groups, rows = [], []
        for item in items:
            scores = [next(sums) for _ in item.completions]
            fitting = [float(score[0]) for score in scores if score is not None]
            if len(fitting) == len(scores):
                groups.append(item.groups)
                rows.append(self.metrics(np.array(fitting)))
        check_groups([item.groups for item in items], groups)
        return self._results(groups, rows)

    def _results(self, groups: list[Groups], rows: Sequence[dict[str, float]]) -> Results:
        names = list(rows[0])

        def metrics(values: np.ndarray) -> dict[str, float]:
            results = dict(zip(names, values.mean(0).tolist()))
            for name, total in zip(names, values.sum(0).tolist()):
                if name.endswith(TIES):
                    results[name] = total
            return results

        values = np.array([list(row.values()) for row in rows])
        return results_by_group(groups, values, metrics, *filter(_has_mean, names))

    def references(self, items: list[_CompletionChoice], folder: Path) -> References:
        ties = [self.metrics(np.zeros(len(item.completions))) for item in items]
        results = self._results([item.groups for item in items], ties)
        return chance_references(results)


def _has_mean(metric: str) -> bool:
    """Return whether a metric is averaged over groups: an accuracy that counts ties in part."""
    return metric.endswith(_ACCURACY) and not metric.startswith((STRICT, SOFT))


def first_is_best(scores: np.ndarray) -> dict[str, float]:
    """Return the metrics of a choice with the right completion first.

    A tie of the k best scores counts 1 / k if the first is among them; for the strict accuracy, 0.
    The soft accuracy is the share of the first.
    """
    best = scores == scores.max()
    return {
        "accuracy": float(best[0] / best.sum()),
        "strict_accuracy": float(best[0] and best.sum() == 1),
        "soft_accuracy": share_of_first(scores),
        "ties": float(best.sum() > 1),
    }


def share_of_first(scores: Sequence[float] | np.ndarray) -> float:
    """Return the first score's share in the softmax; for two, the sigmoid of the difference."""
    return float(np.exp(scores[0] - np.logaddexp.reduce(scores)))


def _comparison(first: float, second: float) -> float:
    """Return 1 if the first score is the larger one, 1/2 for equal ones, else 0."""
    return float(first > second) + float(first == second) / 2


def _world_knowledge(scores: np.ndarray) -> dict[str, float]:
    """Return EWoK's metrics from the scores of targets 1 and 2 in context 1, then in context 2.

    For "context", each target should be likelier in its context, a mean of two comparisons (Ivanova
    et al. 2024). For "target", the first should be likelier than the second in context 1, as in the
    BabyLM challenges; their files also hold each item with swapped contexts. Ties count items with
    a tie.
    """
    target1, other2, other1, target2 = scores.tolist()
    of_context = (target1, other1), (target2, other2)
    return {
        "context_accuracy": sum(_comparison(*pair) for pair in of_context) / 2,
        "target_accuracy": _comparison(target1, other2),
        "strict_context_accuracy": sum(first > second for first, second in of_context) / 2,
        "strict_target_accuracy": float(target1 > other2),
        "soft_context_accuracy": sum(map(share_of_first, of_context)) / 2,
        "soft_target_accuracy": share_of_first((target1, other2)),
        "context_ties": float(any(first == second for first, second in of_context)),
        "target_ties": float(target1 == other2),
    }


def _property_choice(record: Record, file: str) -> _CompletionChoice:
    """Return the choice of a record of COMPS: a property of an acceptable or of another concept."""
    phrase = record.text("property_phrase")
    prefixes = record.text("prefix_acceptable"), record.text("prefix_unacceptable")
    return _CompletionChoice(
        tuple(_completed(prefix, phrase, record) for prefix in prefixes), (file,)
    )


def _target_choice(record: Record, file: str) -> _CompletionChoice:
    """Return the choice of a record of EWoK: two targets in each of two contexts."""
    completions = []
    for context, target in product(("Context1", "Context2"), ("Target1", "Target2")):
        # The space before a target belongs to it, which matters if a space is a token.
        before, text = record.text(context).rstrip(), record.text(target).lstrip()
        completions.append(_completed(before, f" {text}", record))
    return _CompletionChoice(tuple(completions), (group_value(record.text("Domain")),))


def _state_choice(record: Record, file: str) -> _CompletionChoice:
    """Return the choice of a record of entity tracking: a box's contents after operations."""
    options = record.get("options", list)
    if len(options) < 2 or not all(isinstance(text, str) and text.strip() for text in options):
        raise MetaseqError(f"{record.where}: field 'options' does not hold two texts or more")
    prefix = record.text("input_prefix")
    completions = tuple(_completed(prefix, text, record) for text in options)
    return _CompletionChoice(completions, (file, f"{record.get('numops')}_ops"))


def comps(config: CompletionsConfig) -> _Completions:
    """COMPS: a property phrase after an acceptable and an unacceptable concept, by file."""
    return _Completions(config, _property_choice, first_is_best)


def ewok(config: CompletionsConfig) -> _Completions:
    """EWoK: two targets in two contexts, by domain, compared by context and by target."""
    return _Completions(config, _target_choice, _world_knowledge)


def entity_tracking(config: CompletionsConfig) -> _Completions:
    """Entity tracking: the contents of a box, by file and number of operations."""
    return _Completions(config, _state_choice, first_is_best)
