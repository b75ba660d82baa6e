"""A suite: which of several words fills the gap of a sentence.

Files are JSON lines {"text": "the cats ___ here", "words": ["run", "runs"], "kind": "verb"}.
"""

from dataclasses import dataclass
from pathlib import Path

from metaseq_lm.core.options import option
from metaseq_lm.core.registry import register_suite
from metaseq_lm.data.labelled.files import SourceSentence, source_lines
from metaseq_lm.data.records import Record
from metaseq_lm.data.records.json_files import json_object
from metaseq_lm.evaluation.suites import Results, Suite, mean_by_group


@dataclass(frozen=True)
class Gap:
    """A sentence with each candidate word in its gap, the right word first."""

    kind: str
    sentences: list[SourceSentence]


@dataclass
class GapsConfig:
    """How a gap is written."""

    gap: str = option("___", "what stands for the missing word")


@register_suite("gaps", dataclass=GapsConfig)
class Gaps(Suite):
    """Words for the gap of a sentence: how often the right one is the most probable, by kind."""

    patterns = ("*.jsonl",)

    def read(self, folder: Path) -> list[Gap]:
        gaps = []
        for file in self.files(folder):
            for location, line, _ in source_lines(str(file), "fail"):
                record = Record(json_object(line, location), location)
                text, words = record.text("text"), record.get("words", list)
                filled = [
                    SourceSentence(text.replace(self.config.gap, str(word)), location)
                    for word in words
                ]
                gaps.append(Gap(record.text("kind"), filled))
        return gaps

    def score(self, items: list[Gap], probabilities) -> Results:
        rows = []
        scores = iter(probabilities.score([text for gap in items for text in gap.sentences]))
        for gap in items:
            of_gap = [next(scores) for _ in gap.sentences]
            if None in of_gap:
                continue  # a sentence was too long
            plls = [score.pll for score in of_gap]
            accuracy = (plls[0] == max(plls)) / plls.count(plls[0])  # equal words share a point
            rows.append(([gap.kind], {"accuracy": accuracy}))
        return mean_by_group(rows)
