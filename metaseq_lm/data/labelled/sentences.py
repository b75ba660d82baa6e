"""Sentences and minimal pairs to score: one a line, each with its place for complaints."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.labelled.files import json_object, text_field
from metaseq_lm.data.storage.text_files import BOM, TextFile, decode

STANDARD_INPUT = "-"


@dataclass(frozen=True)
class Sentence:
    """A text and where it stands, such as "good.txt:3"."""

    text: str
    place: str


def _lines(source: str, policy: str) -> Iterator[tuple[str, str, bool]]:
    """Yield (place, text, held bad UTF-8) for each line of a file or of standard input."""
    if source != STANDARD_INPUT:
        for number, text, bad in TextFile(Path(source), policy).lines():
            yield f"{source}:{number}", text, bad
        return
    number = 0
    for number, line in enumerate(sys.stdin.buffer, 1):
        line = line.removeprefix(BOM) if number == 1 else line
        place = f"standard input:{number}"
        yield place, *decode(line.removesuffix(b"\n").removesuffix(b"\r"), place, policy)
    if not number:
        raise MetaseqError("standard input: is empty (0 bytes)")


def read_sentences(source: str, policy: str) -> tuple[list[Sentence], int]:
    """Return the lines of a file ("-" is standard input), and how many bad UTF-8 made it skip.

    `policy` is what becomes of invalid UTF-8: replace, skip or fail. A blank line is a sentence
    without tokens. MetaseqError for a file that is missing, empty or no text.
    """
    lines = list(_lines(source, policy))
    kept = [Sentence(text, place) for place, text, bad in lines if not (bad and policy == "skip")]
    return kept, len(lines) - len(kept)


def read_pairs(source: str, policy: str) -> tuple[list[tuple[Sentence, Sentence]], int]:
    """Return the minimal pairs (good, bad) of JSON lines, and how many bad UTF-8 made it skip.

    Fields sentence_good and sentence_bad, as in BLiMP (Warstadt et al. 2020); others and blank
    lines are passed over. MetaseqError with file and line for anything else.
    """
    pairs, skipped = [], 0
    for place, text, bad in _lines(source, policy):
        if bad and policy == "skip":
            skipped += 1
        elif text.strip():
            fields = json_object(text, place)
            good, wrong = (text_field(fields, f"sentence_{n}", place) for n in ("good", "bad"))
            pairs.append((Sentence(good, place), Sentence(wrong, place)))
    if not pairs:
        raise MetaseqError(f"{source}: holds no pair")
    return pairs, skipped
