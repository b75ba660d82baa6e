"""CLOTH (Xie et al. 2018): passages of English exams with blanks to rows, one for each blank.

The texts of a row are the passage and four candidates; its spans are the blanks, with the one to
fill first.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import chain

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.benchmarks.examples import Example, Examples
from metaseq_lm.data.records.record import Record, structured
from metaseq_lm.data.records.text_files import without_surrogates

_BLANK = "_"
_LETTERS = ("A", "B", "C", "D")
_LEVELS = ("middle", "high")  # of schools; the field "source" of a passage begins with one


def passages_of(levels: Collection[str]) -> Examples:
    """Return the reader of a passage, an object, which takes those of some `levels`."""

    def examples(record: Record) -> Iterator[Example]:
        record = replace(record, fields=structured(record.fields, ("options", "answers")))
        source = record.text("source")
        level = next(filter(source.startswith, _LEVELS), "")
        if not level:
            raise MetaseqError(
                f"{record.where}: source {source[:40]!r} begins neither with middle nor with high"
            )
        if level in levels:
            yield from _blanks(record, level)

    return examples


def _blanks(record: Record, level: str) -> Iterator[Example]:
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
        yield (passage, *words), answer, spans, {"level": level}
