"""WUG tests: whether the probabilities of two forms of a made-up word match people's choices.

Files come from the BabyLM challenge 2025: JSON lines with the candidate `sentences`, separated by a
tab, and the `ratio` of the people who chose the first.
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.labelled.files import SourceSentence
from metaseq_lm.data.records.record import Record
from metaseq_lm.evaluation.classification import spearman
from metaseq_lm.evaluation.completions import share_of_first
from metaseq_lm.evaluation.grouping import (
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

_SPEARMAN = "spearman"


@dataclass(frozen=True)
class _Inflection:
    """Sentences with two forms of a word, the share of people who chose the first, and groups."""

    sentences: tuple[SourceSentence, ...]
    ratio: float
    groups: Groups


class Wug(Suite[list[_Inflection], SentenceProbabilities]):
    """WUG tests: Spearman's correlation of the run's and of people's choices, by file.

    A run's choice is the first sentence's share in the softmax of the whole sentences' scores.
    """

    patterns = ("*.jsonl",)

    def read(self, folder: Path) -> list[_Inflection]:
        items = []
        for file in self.files(folder):
            for where, fields, is_bad in records_of(str(file), self.config.on_bad_utf8):
                if not (is_bad and self.config.on_bad_utf8 == "skip"):
                    items.append(_read_item(Record(fields, where), (group_value(file.stem),)))
        if not items:
            raise MetaseqError(f"{folder}: holds no item")
        return items

    def score(self, items: list[_Inflection], probabilities: SentenceProbabilities) -> Results:
        sentences = list(chain.from_iterable(item.sentences for item in items))
        scores = iter(probabilities.score(sentences))
        groups, values = [], []
        for item in items:
            of_item = [next(scores) for _ in item.sentences]
            plls = [score.pll for score in of_item if score is not None]
            if len(plls) == len(of_item):
                groups.append(item.groups)
                values.append((share_of_first(plls), item.ratio))
        check_groups([item.groups for item in items], groups)
        return results_by_group(groups, np.array(values), _correlation, _SPEARMAN)

    def references(self, items: list[_Inflection], folder: Path) -> References:
        groups = [item.groups for item in items]
        guess = results_by_group(
            groups, np.zeros(len(items)), lambda _: {_SPEARMAN: 0.0}, _SPEARMAN
        )
        return chance_references(guess)


def _correlation(values: np.ndarray) -> dict[str, float]:
    """Return the rank correlation of the columns of (items, 2); nan if one is constant."""
    return {_SPEARMAN: spearman(values[:, 0], values[:, 1])}


def _read_item(record: Record, groups: Groups) -> _Inflection:
    texts = record.text("sentences").split("\t")
    ratio = record.get("ratio")
    if len(texts) < 2:
        raise MetaseqError(f"{record.where}: field 'sentences' has no tab between two sentences")
    try:
        value = float(ratio)
    except (TypeError, ValueError) as error:
        raise MetaseqError(f"{record.where}: field 'ratio' is no number: {ratio!r}") from error
    return _Inflection(tuple(SourceSentence(text, record.where) for text in texts), value, groups)
