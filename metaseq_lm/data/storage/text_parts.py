"""Text files of which only some lines are read, or whose paragraphs are read as lines."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np

from metaseq_lm.data.storage.text_files import TextFile, joined

_FEWEST_WRAPPED = 20  # lines that tell whether a text is wrapped
_WIDTHS = range(20, 201)  # characters at which text is wrapped
_NEAR_WIDTH, _MOST_WRAPPED, _MOST_ENDS = 0.8, 0.75, 0.4
_ENDS_SENTENCE = re.compile(r"[.!?:;…。！？।؟]['\"’”»)\]]*$")


@dataclass(frozen=True)
class _OtherLines(TextFile):
    """A file whose lines are made from the lines of `file`, which may be of any kind."""

    file: TextFile = field(kw_only=True)

    def chunks(self, size: int) -> Iterator[tuple[bytes, int]]:
        return joined(((line + b"\n", read) for line, read in self._lines()), size)

    def _lines(self) -> Iterator[tuple[bytes, int]]:
        """Yield the lines, each with the bytes read from the disk by then."""
        raise NotImplementedError

    def _source_lines(self) -> Iterator[tuple[int, bytes, int]]:
        for number, line, read in self.file.numbered_lines():
            if self.on_bad_utf8 == "fail":
                self.file.decode(line, number)  # check now: the number changes later
            yield number, line, read


@dataclass(frozen=True)
class KeptLines(_OtherLines):
    """The lines of a file at the places, from 0, where `keep` is true."""

    keep: np.ndarray = field(kw_only=True)

    def _lines(self) -> Iterator[tuple[bytes, int]]:
        for number, line, read in self._source_lines():
            if self.keep[number - 1]:
                yield line, read


@dataclass(frozen=True)
class JoinedLines(_OtherLines):
    """The lines of a file up to a blank one joined by spaces, as if they had not been wrapped."""

    def _lines(self) -> Iterator[tuple[bytes, int]]:
        for is_blank, group in groupby(self._source_lines(), lambda line: not line[1].strip()):
            if is_blank:
                continue
            lines = list(group)
            yield b" ".join(line.strip() for _, line, _ in lines), lines[-1][2]


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
