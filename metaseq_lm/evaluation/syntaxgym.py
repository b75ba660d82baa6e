"""SyntaxGym: whether the surprisals of regions of sentences are as a formula predicts.

Files are suites in the JSON of Gauthier et al. (2020), as those of Hu et al. (2020). The surprisal
of a region is -log2 of the probabilities that the objective gives its tokens, summed; of a masked
LM these are its pseudo-log-likelihoods, which see the later regions, too. Texts are as people write
them: regions are joined by a space, but not before one that begins with a comma or a full stop.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.options import option
from metaseq_lm.data.labelled.files import Sentence
from metaseq_lm.data.labelled.records import Record
from metaseq_lm.data.storage.json_records import json_object
from metaseq_lm.data.storage.text_files import BAD_UTF8, TextFile
from metaseq_lm.evaluation.formulas import Formula, Region
from metaseq_lm.evaluation.grouping import Groups, check_groups, group_value, results_by_group
from metaseq_lm.evaluation.suites import (
    References,
    Results,
    SentenceProbabilities,
    Suite,
    register_suite,
)

ALL_REGIONS = "*"
SUM = "sum"  # the metric of a region: the sum of the surprisals of its tokens
ATTACHED = tuple(",.;:!?")  # what begins with one follows without a space
DRAWS = 200  # of surprisals, from which the level of chance is computed
ORDERS = 720  # of conditions at most, for each draw

# Where each region of a condition stands in its text, by number: (first character, end).
Spans = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Condition:
    """The sentence of a condition, and the places of its regions."""

    sentence: Sentence
    spans: Spans


@dataclass(frozen=True)
class PredictedItem:
    """An item of a suite with one of its predictions.

    Attributes:
        conditions: Its sentences by the name of the condition.
        formula: What is predicted.
        groups: The suite and, if it has several, the prediction.
    """

    conditions: dict[str, Condition]
    formula: Formula
    groups: Groups


@dataclass
class SyntaxGymConfig:
    """Which items are scored."""

    first: int = option(0, "only the first items of each suite (0 = all)", at_least=0)
    on_bad_utf8: str = option("fail", "lines with invalid UTF-8", choices=BAD_UTF8)


@register_suite("syntaxgym", SyntaxGymConfig)
class SyntaxGym(Suite[list[PredictedItem], SentenceProbabilities]):
    """Suites of SyntaxGym: the share of items whose formula over surprisals of regions holds.

    An item with two predictions counts as two. Comparisons are strict, so that equal surprisals
    satisfy none.
    """

    patterns = ("*.json",)

    def read(self, folder: Path) -> list[PredictedItem]:
        return [item for file in self.files(folder) for item in self._read_suite(file)]

    def _read_suite(self, file: Path) -> Iterator[PredictedItem]:
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
        for item in items[: self.config.first or None]:
            conditions = dict(map(read_condition, item.records("conditions")))
            for number, formula in enumerate(formulas, 1):
                check_regions(formula, conditions, f"{file}: {item.name}")
                groups = (name, str(number)) if len(formulas) > 1 else (name,)
                yield PredictedItem(conditions, formula, groups)

    def score(self, items: list[PredictedItem], probabilities: SentenceProbabilities) -> Results:
        """Return the share of items whose formula holds, and how many compare equal values."""
        sentences, parts, regions_scored = [], [], []
        for item in items:
            for name, condition in item.conditions.items():
                regions = regions_of(item.formula, name, condition)
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
                scored.append(item.groups)
                outcomes.append(item.formula(partial(surprisal_of, surprisals)))
        check_groups([item.groups for item in items], scored)
        return results_by_suite(scored, np.array(outcomes, float))

    def references(self, items: list[PredictedItem], folder: Path) -> References:
        chances: dict[tuple[str, tuple[str, ...]], float] = {}
        values = []
        for item in items:
            key = item.formula.text, tuple(item.conditions)
            if key not in chances:
                chances[key] = chance_of(item.formula, tuple(item.conditions))
            values.append([chances[key], 0.0])
        groups = [item.groups for item in items]
        results = results_by_suite(groups, np.array(values))
        return {
            name: {"accuracy": {"chance": group.metrics["accuracy"]}}
            for name, group in results.items()
        }


def results_by_suite(items: Sequence[Groups], outcomes: np.ndarray) -> Results:
    """Return the metrics of items by suite and prediction, with the mean over suites.

    A suite with several predictions weighs no more than another.

    Args:
        items: The groups of each item, the suite first.
        outcomes: Of each whether its formula holds and compares equal values, (items, 2).
    """
    return results_by_group(items, outcomes, item_metrics, "accuracy", of_widest=True)


def item_metrics(outcomes: np.ndarray) -> dict[str, float]:
    """Return the metrics of items, given (holds, compares equal values) of each, (items, 2)."""
    return {"accuracy": float(outcomes[:, 0].mean()), "ties": float(outcomes[:, 1].sum())}


def read_condition(record: Record) -> tuple[str, Condition]:
    """Return the name of a condition, and its text with the places of its regions."""
    text, spans = "", {}
    for region in record.records("regions"):
        content = " ".join(region.text("content").split())
        space = " " if text and content and not content.startswith(ATTACHED) else ""
        first = len(text) + len(space)
        text += space + content
        spans[str(region.number("region_number"))] = (first, len(text)) if content else (0, 0)
    return record.text("condition_name"), Condition(Sentence(text, record.where), spans)


def check_regions(formula: Formula, conditions: dict[str, Condition], where: str) -> None:
    """Raise MetaseqError for a region of a formula that an item does not have."""
    for region in formula.regions:
        if region.condition not in conditions:
            raise MetaseqError(
                f"{where}: no condition '{region.condition}', of which the formula "
                f"{formula.text!r} is; there are {', '.join(conditions)}"
            )
        spans = conditions[region.condition].spans
        if region.number != ALL_REGIONS and region.number not in spans:
            raise MetaseqError(
                f"{where}: no region {region.number}, of which the formula {formula.text!r} is; "
                f"there are {', '.join(spans)}"
            )


def regions_of(formula: Formula, name: str, condition: Condition) -> list[str]:
    """Return the numbers of the regions of a condition that a formula is about, each once."""
    numbers = [region.number for region in formula.regions if region.condition == name]
    return list(condition.spans if ALL_REGIONS in numbers else dict.fromkeys(numbers))


def surprisal_of(surprisals: dict[Region, np.ndarray], region: Region) -> np.ndarray:
    """Return the surprisal of a region, or the sum over all regions of its condition."""
    if region.number != ALL_REGIONS:
        return surprisals[region]
    parts = [value for of, value in surprisals.items() if of.condition == region.condition]
    return np.asarray(sum(parts))


def chance_of(formula: Formula, conditions: Sequence[str]) -> float:
    """Return how often a formula holds where the conditions of an item do not matter.

    That is the share of orders of the conditions in which it holds, a mean over draws of normal
    surprisals: exact where it compares single regions, as 1/4 for two comparisons of two conditions
    each.
    """
    rng = np.random.default_rng(1)
    numbers = dict.fromkeys(region.number for region in formula.regions)
    draws = {number: rng.standard_normal((DRAWS, len(conditions))) for number in numbers}
    orders = np.array(list(permutations(range(len(conditions))))[:ORDERS])  # (orders, conditions)

    def surprisal(region: Region) -> np.ndarray:
        at: Any = orders[:, conditions.index(region.condition)]
        return np.asarray(draws[region.number][:, at])  # (DRAWS, orders)

    return float(formula(surprisal)[0].mean())
