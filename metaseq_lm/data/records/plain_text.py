"""Plain text: its lines as records, its paragraphs as blocks, and whether its lines are wrapped."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from metaseq_lm.data.records.record import LINES, TEXT, Reading, Record, register_reader
from metaseq_lm.data.records.text_files import BLOCK, Block, TextFile, check_length

_FEWEST_WRAPPED = 20  # lines that tell whether a text is wrapped
_WIDTHS = range(20, 201)  # characters at which text is wrapped
_NEAR_WIDTH, _MOST_WRAPPED, _MOST_ENDS = 0.8, 0.75, 0.4
_ENDS_SENTENCE = re.compile(r"[.!?:;…。！？।؟]['\"’”»)\]]*$")
_BLANKS = " \t\n\r\v\f"


@register_reader(LINES)
def _line_records(file: TextFile, reading: Reading) -> Iterator[Record]:
    """Yield the lines, each in the field "text"."""
    for number, text, is_bad in file.lines():
        where = f"{file}:{number}"
        yield Record({TEXT: text}, where, reading.counts, is_bad=is_bad, line=number)


def blocks_of(file: TextFile, texts: Iterable[tuple[str, bool]]) -> Iterator[Block]:
    """Yield texts of a file, each with whether it held invalid UTF-8, in blocks like its lines."""
    block, size = Block([], 1, 0), 0
    for text, is_bad in texts:
        if is_bad:
            block.bad.add(len(block.texts))
        block.texts.append(text)
        size += len(text)
        if size >= BLOCK:
            block.read = file.read
            yield block
            block, size = Block([], block.first + len(block.texts), 0), 0
    if block.texts:
        block.read = file.read
        yield block


def paragraphs(file: TextFile) -> Iterator[tuple[str, bool]]:
    """Yield the lines up to a blank one joined by spaces, and whether any held invalid UTF-8."""
    lines: list[str] = []
    has_bad, size = False, 0
    for number, text, is_bad in file.lines():
        if text.strip(_BLANKS):
            lines.append(text.strip(_BLANKS))
            has_bad, size = has_bad or is_bad, size + len(text)
            check_length(size, "paragraph", f"{file}:{number}")
        elif lines:
            yield " ".join(lines), has_bad
            lines, has_bad, size = [], False, 0
    if lines:
        yield " ".join(lines), has_bad


def wrapped_width(lines: Sequence[str]) -> int:
    """Return the width at which the lines of a text are wrapped, 0 if they do not look wrapped.

    In wrapped text, lines between two others of a paragraph have nearly the same length, and few of
    them end a sentence.
    """
    lines = [line.rstrip() for line in lines]
    inside = [line for line, after in pairwise(lines) if line.strip() and after.strip()]
    if len(inside) < _FEWEST_WRAPPED:
        return 0
    width = sorted(map(len, inside))[int(0.98 * (len(inside) - 1))]
    near = sum(len(line) > _NEAR_WIDTH * width for line in inside)
    ends = sum(_ENDS_SENTENCE.search(line) is not None for line in inside)
    is_wrapped = near >= _MOST_WRAPPED * len(inside) and ends <= _MOST_ENDS * len(inside)
    # Lines of one form, such as records, also have one length.
    is_varied = len({line.split()[0] for line in inside}) > 0.1 * len(inside)
    return width if width in _WIDTHS and is_wrapped and is_varied else 0
