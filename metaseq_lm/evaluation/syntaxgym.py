"""SyntaxGym: whether the surprisals of regions of sentences satisfy a formula.

Files are suites in the JSON of Gauthier et al. (2020), such as those of Hu et al. (2020). The
surprisal of a region is the sum of -log2 of its tokens' probabilities. For a masked LM these are
pseudo-likelihoods, which also depend on later regions. Texts are joined in natural spelling: with a
space between regions, but not before one that begins with a comma or a full stop.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, permutations
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.labelled.files import SourceSentence
from metaseq_lm.data.records.json_files import json_object
from metaseq_lm.data.records.record import Record
from metaseq_lm.data.records.text_files import TextFile
from metaseq_lm.evaluation.formulas import Formula, Region
from metaseq_lm.evaluation.grouping import (
    Groups,
    chance_references,
    check_groups,
    group_value,
    names_of,
    results_by_group,
)
from metaseq_lm.evaluation.suites import (
    GroupMetrics,
    References,
    Results,
    SentenceProbabilities,
    Suite,
)

_ALL_REGIONS = "*"
_EQUALITY = "equality_accuracy"  # metric of predictions with "=" that do not count
SUM = "sum"  # the metric of a region: the sum of the surprisals of its tokens
_ATTACHED = tuple(",.;:!?")  # a region that begins with one follows without a space
DRAWS = 200  # draws of surprisals to compute the level of chance
_ORDERS = 720  # largest number of orders of conditions for each draw

# The place of each region of a condition in its text, by number: (first character, end).
Spans = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class _Condition:
    """The sentence of a condition, and the places of its regions."""

    sentence: SourceSentence
    spans: Spans


@dataclass(frozen=True)
class _PredictedItem:
    """An item of a suite with one of its predictions.

    Attributes:
        conditions: Its sentences by the name of the condition.
        formula: The prediction.
        groups: The suite and, if it has several, the prediction; a prediction that does not count
            for the suite has a single group named after both.
        counts: Whether it counts for the scores of its suite and of all items.
    """

    conditions: dict[str, _Condition]
    formula: Formula
    groups: Groups
    counts: bool = True


class SyntaxGym(Suite[list[_PredictedItem], SentenceProbabilities]):
    """Suites of SyntaxGym: the share of items whose formula over surprisals of regions holds.

    An item with two predictions counts as two. Comparisons are strict, so that equal surprisals
    satisfy none. A prediction with "=" is a separate group that other scores leave out unless
    `equalities` is set, because it holds best for a model that ignores the context.
    """

    patterns = ("*.json",)

    def read(self, folder: Path) -> list[_PredictedItem]:
        items = list(chain.from_iterable(map(self._read_suite, self.files(folder))))
        if not any(item.counts for item in items):
            raise UsageError(
                f"{folder}: all of its predictions have an '='; equalities=true counts them"
            )
        return items

    def _read_suite(self, file: Path) -> Iterator[_PredictedItem]:
        lines = [text for _, text, _ in TextFile(file, self.config.on_bad_utf8).lines()]
        suite = Record(json_object("\n".join(lines), str(file)), str(file))
        metric = suite.fields.get("meta", {}).get("metric", SUM)
        if metric != SUM:
            raise MetaseqError(f"{file}: its metric is {metric!r}; only {SUM!r} is known")
        name = group_value(file.stem)
        formulas = [
            Formula(prediction.text("formula"), f"{file}: prediction {number}")
            for number, prediction in enumerate(suite.records("predictions"), 1)
        ]
        items = suite.records("items")
        if not items or not formulas:
            raise MetaseqError(f"{file}: holds no item with a prediction")
        for item in self.config.of(items, file):
            conditions = dict(map(_read_condition, item.records("conditions")))
            for number, formula in enumerate(formulas, 1):
                _check_regions(formula, conditions, f"{file}: {item.name}")
                groups: Groups = (name, str(number)) if len(formulas) > 1 else (name,)
                counts = self.config.equalities or not formula.has_equality
                groups = groups if counts else tuple(names_of(groups)[-1:])
                yield _PredictedItem(conditions, formula, groups, counts)

    def score(self, items: list[_PredictedItem], probabilities: SentenceProbabilities) -> Results:
        """Return the share of items where the formula holds, and how many compare equal values."""
        sentences, parts, regions_scored = [], [], []
        for item in items:
            for name, condition in item.conditions.items():
                regions = _regions_of(item.formula, name, condition)
                sentences.append(condition.sentence)
                parts.append([condition.spans[number] for number in regions])
                regions_scored.append([Region(number, name) for number in regions])
        sums = iter(zip(regions_scored, probabilities.score_parts(sentences, parts)))
        scored, outcomes = [], []
        for item in items:
            surprisals: dict[Region, np.ndarray] = {}
            is_whole = True
            for _ in item.conditions:
                scored_regions, scores = next(sums)
                is_whole = is_whole and scores is not None
                if scores is not None:
                    surprisals |= zip(scored_regions, -scores / math.log(2))
            if is_whole:
                scored.append(item)
                outcomes.append(item.formula(partial(_surprisal_of, surprisals)))
        check_groups([item.groups for item in items], [item.groups for item in scored])
        return _results_by_suite(scored, np.array(outcomes, float))

    def references(self, items: list[_PredictedItem], folder: Path) -> References:
        """Return chance; groups with a formula that has an "=" have none."""
        chances: dict[tuple[str, tuple[str, ...]], float] = {}
        values = []
        for item in items:
            key = item.formula.text, tuple(item.conditions)
            if key not in chances:
                chances[key] = _chance_of(item.formula, tuple(item.conditions))
            values.append([chances[key], 0.0])
        return chance_references(_results_by_suite(items, np.array(values)))


def _results_by_suite(items: Sequence[_PredictedItem], outcomes: np.ndarray) -> Results:
    """Return the metrics of items by suite and prediction, with the mean over suites.

    All suites have the same weight, however many predictions they have. Items that do not count
    have a separate metric, `_EQUALITY`.

    Args:
        items: The items; at least one counts.
        outcomes: Whether each formula holds, and compares equal values, (items, 2).
    """
    counts = np.array([item.counts for item in items])
    counted = [item.groups for item in items if item.counts]
    results = results_by_group(counted, outcomes[counts], _item_metrics, "accuracy", of_widest=True)
    holds: dict[str, list[float]] = {}
    for item, (outcome, _) in zip(items, outcomes):
        if not item.counts:
            holds.setdefault(item.groups[0], []).append(float(outcome))
    for name, values in holds.items():
        results[name] = GroupMetrics(len(values), {_EQUALITY: float(np.mean(values))})
    return results


def _item_metrics(outcomes: np.ndarray) -> dict[str, float]:
    """Return the metrics of items from their (holds, compares equal values), (items, 2)."""
    return {"accuracy": float(outcomes[:, 0].mean()), "ties": float(outcomes[:, 1].sum())}


def _read_condition(record: Record) -> tuple[str, _Condition]:
    text, spans = "", {}
    for region in record.records("regions"):
        content = " ".join(region.text("content").split())
        space = " " if text and content and not content.startswith(_ATTACHED) else ""
        first = len(text) + len(space)
        text += space + content
        spans[str(region.number("region_number"))] = (first, len(text)) if content else (0, 0)
    return record.text("condition_name"), _Condition(SourceSentence(text, record.where), spans)


def _check_regions(formula: Formula, conditions: dict[str, _Condition], where: str) -> None:
    """Raise MetaseqError for a region of a formula that an item does not have."""
    for region in formula.regions:
        if region.condition not in conditions:
            raise MetaseqError(
                f"{where}: no condition '{region.condition}', of which the formula "
                f"{formula.text!r} is; there are {', '.join(conditions)}"
            )
        spans = conditions[region.condition].spans
        if region.number != _ALL_REGIONS and region.number not in spans:
            raise MetaseqError(
                f"{where}: no region {region.number}, of which the formula {formula.text!r} is; "
                f"there are {', '.join(spans)}"
            )


def _regions_of(formula: Formula, name: str, condition: _Condition) -> list[str]:
    """Return the numbers of the regions of a condition that a formula uses, each once."""
    numbers = [region.number for region in formula.regions if region.condition == name]
    return list(condition.spans if _ALL_REGIONS in numbers else dict.fromkeys(numbers))


def _surprisal_of(surprisals: dict[Region, np.ndarray], region: Region) -> np.ndarray:
    """Return the surprisal of a region, or the sum over all regions of its condition."""
    if region.number != _ALL_REGIONS:
        return surprisals[region]
    parts = [value for of, value in surprisals.items() if of.condition == region.condition]
    return np.asarray(sum(parts))


def _chance_of(formula: Formula, conditions: Sequence[str]) -> float:
    """Return how often a formula holds if the conditions of an item do not matter.

    It is the share of orders of the conditions in which the formula holds, a mean over draws of
    normal surprisals. It is exact if single regions are compared: 1/4 for two comparisons of two
    conditions each. NaN for a formula with "=", which holds the more often the less a model reacts.
    """
    if formula.has_equality:
        return math.nan
    rng = np.random.default_rng(1)
    numbers = dict.fromkeys(region.number for region in formula.regions)
    draws = {number: rng.standard_normal((DRAWS, len(conditions))) for number in numbers}
    orders = np.array(list(permutations(range(len(conditions))))[:_ORDERS])  # (orders, conditions)

    def surprisal(region: Region) -> np.ndarray:
        at: Any = orders[:, conditions.index(region.condition)]
        return np.asarray(draws[region.number][:, at])  # (DRAWS, orders)

    return float(formula(surprisal)[0].mean())
