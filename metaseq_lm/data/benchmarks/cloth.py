"""CLOTH (Xie et al. 2018): passages of English exams with blanks to rows, one for each blank.

The texts of a row are the passage and four candidates; its spans are the blanks, with the one to
fill first.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.labelled.files import LabelledRow
from metaseq_lm.data.records.reading import records
from metaseq_lm.data.records.record import Reading, Record, structured
from metaseq_lm.data.records.text_files import TextFile, without_surrogates

_BLANK = "_"
_LETTERS = ("A", "B", "C", "D")
_LEVELS = ("middle", "high")  # of schools; the field "source" of a passage begins with one


@dataclass
class ClothReader:
    """Iterates over the rows of a file of passages of some `levels`, a JSON object on each line."""

    file: TextFile
    levels: Sequence[str]
    counts: Counter[str] = field(default_factory=Counter)
    remarks: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[LabelledRow]:
        reading = Reading(counts=self.counts, remarks=self.remarks)
        for record in records(self.file, reading):
            fields = structured(record.fields, ("options", "answers"))
            record = replace(record, fields=fields, remedy="Is this a file of CLOTH?")
            source = record.text("source")
            level = next((name for name in _LEVELS if source.startswith(name)), "")
            if not level:
                raise MetaseqError(
                    f"{record.where}: source {source[:40]!r} begins neither with middle nor with "
                    "high"
                )
            if level in self.levels:
                yield from _rows(record, level)


def _rows(record: Record, level: str) -> Iterator[LabelledRow]:
    passage = " ".join(record.text("article").split())
    positions = [position for position, character in enumerate(passage) if character == _BLANK]
    options, answers = record.get("options", list), record.get("answers", list)
    if not len(positions) == len(options) == len(answers):
        raise MetaseqError(
            f"{record.where}: {len(positions)} blanks ({_BLANK}) in the article, {len(options)} "
            f"options and {len(answers)} answers; each blank has one of both"
        )
    for number, (position, candidates, answer) in enumerate(zip(positions, options, answers)):
        is_sound = type(candidates) is list and len(candidates) == len(_LETTERS)
        if not is_sound or not all(type(text) is str and text.strip() for text in candidates):
            raise MetaseqError(f"{record.where}: options[{number}] is not a list of four words")
        if answer not in _LETTERS:
            raise MetaseqError(f"{record.where}: answers[{number}] is {answer!r}, not A, B, C or D")
        # A tokenizer may distinguish a word after a space from one at the beginning of a text.
        words = (f" {without_surrogates(text).strip()}" for text in candidates)
        others = (other for other in positions if other != position)
        spans = tuple((0, blank, blank + 1) for blank in chain([position], others))
        texts = (passage, *words)
        facts = {"level": level}
        yield LabelledRow(record.line, texts, answer, record.is_bad, spans, facts)
