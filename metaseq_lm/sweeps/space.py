"""The space of a search: the range or the choices of each searched option.

A range is written `1e-4..1e-2`, or `log 1e-4..1e-2` if its logarithm is uniform. If both ends are
whole numbers, such as 1..4, so are the values. Choices are a list.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metaseq_lm.core.config import SEARCH, SWEEP, why_set
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.files import is_number
from metaseq_lm.sweeps.definition import KEY, override_values, printable, text_of

NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"(log\s+)?({NUMBER})\s*\.\.\s*({NUMBER})")
_WHOLE = re.compile(r"[+-]?\d+")
_EDGE = 0.05  # the part of a range, from either end, that counts as its edge


@dataclass(frozen=True)
class Range:
    """An interval of numbers including its ends; whole numbers if both ends are `int`.

    Attributes:
        low: The smallest value.
        high: The largest value.
        log: Whether the logarithm is uniform.
    """

    low: float
    high: float
    log: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def samples(self) -> tuple[Any, ...]:
        """The values for a check to try: both ends."""
        return (self.low, self.high)

    def __contains__(self, value: Any) -> bool:
        is_inside = is_number(value) and self.low <= value <= self.high
        return is_inside and (not self.is_whole or value == int(value))

    def rounded(self, value: float) -> float:
        """Return a value with 4 significant digits, for readable names; still in the range."""
        if self.is_whole:
            return int(value)
        return min(max(float(f"{value:.4g}"), self.low), self.high)

    def edge_of(self, value: float) -> str:
        """Return the end that a value lies at, within `_EDGE` on the uniform scale, else ""."""
        low, high, x = self.low, self.high, value
        if self.log:
            low, high, x = math.log(low), math.log(high), math.log(x)
        position = (x - low) / (high - low)
        if position <= _EDGE:
            return "lower"
        return "upper" if position >= 1 - _EDGE else ""

    def as_json(self) -> str:
        """Return the range in its written form."""
        return f"{'log ' * self.log}{self.low!r}..{self.high!r}"


@dataclass(frozen=True)
class Choice:
    """Values to draw one from."""

    values: tuple[Any, ...]

    @property
    def samples(self) -> tuple[Any, ...]:
        """The values for a check to try: all."""
        return self.values

    def __contains__(self, value: Any) -> bool:
        return value in self.values

    def edge_of(self, value: Any) -> str:
        """Return the end of a list of numbers that a value equals, else ""."""
        if not all(map(is_number, (value, *self.values))) or len({*self.values}) < 2:
            return ""
        if value <= min(self.values):
            return "lower"
        return "upper" if value >= max(self.values) else ""

    def beyond(self, value: Any) -> float | None:
        """Return the number one step beyond `value` if that is an end of the list, else None.

        The step is the ratio of the last two values. Return None also for an end that is not
        positive, and for adjacent whole numbers.
        """
        if not self.edge_of(value):
            return None
        ordered = sorted(self.values, reverse=value == min(self.values))
        inner, end = ordered[-2:]
        if not end * inner > 0:
            return None
        step = end * end / inner
        further = round(step) if all(isinstance(x, int) for x in ordered) else float(f"{step:.4g}")
        return None if further in (0, *ordered) else further

    def as_json(self) -> list[Any]:
        """Return the choices in their written form."""
        return list(self.values)


Space = Mapping[str, Range | Choice]


def parse_axis(text: str) -> tuple[str, Range | Choice]:
    """Return key and distribution of KEY=RANGE or KEY=A,B; raises UsageError."""
    source = f"--search {printable(text, '--search')}"
    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(
            f"{source}: not of the form KEY=LOW..HIGH, KEY='log LOW..HIGH' or KEY=VALUE,VALUE"
        )
    if ".." in value:
        return key, _read_range(value, f"--search {key}")
    return key, _read_choice(override_values(text, source), f"--search {key}")


def parse_distribution(content: Any, place: str) -> Range | Choice:
    """Return the distribution of a key in a sweep file: the text of a range, or a list."""
    if isinstance(content, list):
        return _read_choice(content, place)
    return _read_range(str(content), place)


def _read_range(text: str, place: str) -> Range:
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{place}: {printable(text, place)!r} is neither a range, such as 'log 1e-4..1e-2' "
            "or 1..4, nor a list of values"
        )
    log, *ends = match.groups()
    whole = all(_WHOLE.fullmatch(end) for end in ends)
    low, high = (int(end) if whole else float(end) for end in ends)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UsageError(f"{place}: {text}: the ends of a range are finite numbers")
    if low >= high:
        raise UsageError(f"{place}: the range {text} is empty; give the smaller end first")
    if log and low <= 0:
        raise UsageError(
            f"{place}: {text}: numbers up to 0 have no logarithm; begin above 0, or leave 'log' out"
        )
    return Range(low, high, bool(log))


def _read_choice(values: list[Any], place: str) -> Choice:
    texts = [text_of(value, place) for value in values]
    if len(texts) < 2 or len(set(texts)) < len(texts):
        raise UsageError(
            f"{place}: {', '.join(texts)}: give a range, or two or more different values"
        )
    return Choice(tuple(values))


def check_space(space: Space, varied: set[str]) -> None:
    """Raise UsageError for keys that cannot be searched; `varied` are the keys of grid and list."""
    if not space:
        raise UsageError("search.space: no key is searched; give --search KEY=LOW..HIGH")
    for key in space:
        place = f"search.space.{key}"
        if not KEY.fullmatch(key) or ":" in key:
            raise UsageError(f"search.space: {printable(key, 'key')!r} is not a key")
        if reason := why_set(key, SWEEP, SEARCH):
            raise UsageError(f"{place}: {reason}")
        if key in varied:
            raise UsageError(f"{place}: it is searched and in grid or list; keep one")
