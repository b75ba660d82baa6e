"""Minimal pairs: the share of pairs in which the acceptable sentence is the more probable one.

Files are JSON lines, or a table with a header row, with the fields `sentence_good` and
`sentence_bad`, as in BLiMP (Warstadt et al. 2020). The score of a sentence is the sum of its
tokens' log-probabilities, not divided by its length. A tie counts 1/2, so that chance is 1/2 for
every model: one with constant logits has only ties, and an argmax that takes the first of equal
scores, the good sentence's, would count all of them as right.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.config.suites import BlimpConfig
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.labelled.files import SourceSentence, source_lines
from metaseq_lm.data.records.json_files import json_object
from metaseq_lm.data.records.reading import records
from metaseq_lm.data.records.record import Record
from metaseq_lm.data.records.text_files import TextFile
from metaseq_lm.evaluation.grouping import (
    MACRO,
    Groups,
    chance_references,
    check_groups,
    group_value,
    results_by_group,
)
from metaseq_lm.evaluation.suites import (
    OVERALL,
    References,
    Results,
    SentenceProbabilities,
    SentenceScore,
    Suite,
    exact_scores,
)

__all__ = ["read_pairs"]

_TABLES = (".tsv", ".csv")
_GOOD, _BAD = "sentence_good", "sentence_bad"
# BLiMP's files have 13 terms; the paper's 12 phenomena count one of them as part of another.
_PAPER_TERMS = {"s-selection": "argument_structure"}


@dataclass(frozen=True)
class MinimalPair:
    """An acceptable and an unacceptable sentence, and their groups, the widest first."""

    good: SourceSentence
    bad: SourceSentence
    groups: Groups = ()


class MinimalPairs(Suite[list[MinimalPair], SentenceProbabilities]):
    """Minimal pairs of sentences, as in BLiMP: accuracy by group.

    The files of BLiMP's supplement (Warstadt et al. 2023) have only the fields of the sentences.
    """

    patterns = ("*.jsonl", "*.tsv", "*.csv")

    def read(self, folder: Path) -> list[MinimalPair]:
        pairs = []
        for file in self.files(folder):
            in_file, _ = read_pairs(str(file), self.config.groups, self.config.on_bad_utf8)
            pairs += self.config.of(in_file, file)
        if isinstance(self.config, BlimpConfig) and self.config.phenomena == "paper":
            for i, pair in enumerate(pairs):
                groups = tuple(_PAPER_TERMS.get(group, group) for group in pair.groups)
                pairs[i] = replace(pair, groups=groups)
        return pairs

    def score(self, items: list[MinimalPair], probabilities: SentenceProbabilities) -> Results:
        scores: Sequence[tuple[SentenceScore | None, SentenceScore | None] | None]
        if self.config.compare == "changed":
            scores = probabilities.score_changed([(pair.good, pair.bad) for pair in items])
        else:
            sentences = chain.from_iterable((pair.good, pair.bad) for pair in items)
            each = probabilities.score(list(sentences))
            scores = list(zip(each[::2], each[1::2]))
        pairs, margins = [], []
        for pair, score in zip(items, scores):
            good, bad = score or (None, None)
            if good is not None and bad is not None:
                pairs.append(pair)
                margins.append(good.pll - bad.pll)
        groups = [pair.groups for pair in pairs]
        check_groups([pair.groups for pair in items], groups)
        return results_by_group(groups, np.array(margins), _pair_metrics, "accuracy")

    def references(self, items: list[MinimalPair], folder: Path) -> References:
        groups = [pair.groups for pair in items]
        results = results_by_group(groups, np.zeros(len(items)), _pair_metrics, "accuracy")
        references = chance_references(results)
        world = exact_scores(folder.parent, "pairs")
        sizes = {name: group.n for name, group in results.items() if name != OVERALL}
        # Only if groups are the files of a world, read as a whole.
        is_whole = all(name in world and world[name]["pairs"] == n for name, n in sizes.items())
        if self.config.groups or not is_whole:
            return references
        of_all = references[OVERALL]
        for key in ("ngram", "bayes"):
            levels = [world[name][key] for name in sizes]
            for name, level in zip(sizes, levels):
                references[name]["accuracy"][key] = level
            of_all["accuracy"][key] = float(np.average(levels, weights=list(sizes.values())))
            of_all["accuracy" + MACRO][key] = float(np.mean(levels))
        return references


def read_pairs(
    source: str, groups: Sequence[str] = (), policy: str = "fail", name: str | None = None
) -> tuple[list[MinimalPair], int]:
    """Return the pairs of a file, and the number of pairs skipped for invalid UTF-8.

    Args:
        source: Path of the file, "-" for standard input.
        groups: The fields with the groups of a pair; none for one group called `name`.
        policy: Treatment of invalid UTF-8: "replace", "skip" or "fail".
        name: The name of the file's group, by default the stem of the file name.

    Raises:
        MetaseqError: The file has no pairs, or something else; the message names file and line.
    """
    pairs, skipped = [], 0
    for location, fields, is_bad in records_of(source, policy):
        if is_bad and policy == "skip":
            skipped += 1
            continue
        record = Record(fields, location)
        good = SourceSentence(record.text(_GOOD), location)
        bad = SourceSentence(record.text(_BAD), location)
        record = Record(fields, location, remedy="groups=[] groups the pairs by file")
        values = tuple(group_value(record.text(field)) for field in groups)
        pairs.append(MinimalPair(good, bad, values or (name or Path(source).stem,)))
    if not pairs:
        raise MetaseqError(f"{source}: holds no pair")
    return pairs, skipped


def records_of(source: str, policy: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield (file and line, fields, had bad UTF-8) of each line of JSON, or row of a table."""
    if Path(source).suffix in _TABLES:
        for record in records(TextFile(Path(source), policy)):
            yield record.where, record.fields, record.is_bad
        return
    for location, text, is_bad in source_lines(source, policy):
        if is_bad and policy == "skip":
            yield location, {}, True
        elif text.strip():
            yield location, json_object(text, location), is_bad


def _pair_metrics(margins: np.ndarray) -> dict[str, float]:
    """Return the metrics of pairs from their margins, (P,).

    "accuracy" counts a tie as 1/2, "strict_accuracy" as wrong. "soft_accuracy" is the mean of
    sigmoid(margin), which changes before an accuracy does. "ties" is a number of pairs.
    """
    wins, ties = float((margins > 0).sum()), float((margins == 0).sum())
    # tanh does not overflow, unlike exp.
    soft = (1 + np.tanh(margins / 2)) / 2
    return {
        "accuracy": (wins + ties / 2) / len(margins),
        "strict_accuracy": wins / len(margins),
        "soft_accuracy": float(soft.mean()),
        "ties": ties,
    }
