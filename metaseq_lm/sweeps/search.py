"""The definition of a search: its space, the FLOPs for tuning each setting, and its rules.

A search tunes each setting of a sweep's grid and list with the same FLOPs, including trials that
were stopped early. Trials stop at rungs, which are parts of a run's budget, unless they are among
the better half of the trials that reached the rung so far (asynchronous successive halving, Li et
al. 2020, with a factor of 2).

The space has a range or the choices of each searched option. A range is written `1e-4..1e-2`, or
`log 1e-4..1e-2` if its logarithm is uniform. If both ends are whole numbers, such as 1..4, so are
the values. Choices are a list.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from metaseq_lm.core.config import SEARCH, SWEEP, why_set
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.files import is_number
from metaseq_lm.core.metric_names import lower_is_better
from metaseq_lm.core.options import option
from metaseq_lm.core.structured import read_structured
from metaseq_lm.sweeps.definition import (
    KEY,
    check_seeds,
    override_values,
    require_printable,
    text_of,
)

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
    source = f"--search {require_printable(text, '--search')}"
    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(
            f"{source}: not of the form KEY=LOW..HIGH, KEY='log LOW..HIGH' or KEY=VALUE,VALUE"
        )
    if ".." in value:
        return key, _read_range(value, f"--search {key}")
    return key, _read_choice(override_values(text, source), f"--search {key}")


def _parse_distribution(content: Any, place: str) -> Range | Choice:
    """Return the distribution of a key in a sweep file: the text of a range, or a list."""
    if isinstance(content, list):
        return _read_choice(content, place)
    return _read_range(str(content), place)


def _read_range(text: str, place: str) -> Range:
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{place}: {require_printable(text, place)!r} is neither a range, such as "
            "'log 1e-4..1e-2' or 1..4, nor a list of values"
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


def _check_space(space: Space, varied: set[str]) -> None:
    """Raise UsageError for keys that cannot be searched; `varied` are the keys of grid and list."""
    if not space:
        raise UsageError("search.space: no key is searched; give --search KEY=LOW..HIGH")
    for key in space:
        place = f"search.space.{key}"
        if not KEY.fullmatch(key) or ":" in key:
            raise UsageError(f"search.space: {require_printable(key, 'key')!r} is not a key")
        if reason := why_set(key, SWEEP, SEARCH):
            raise UsageError(f"{place}: {reason}")
        if key in varied:
            raise UsageError(f"{place}: it is searched and in grid or list; keep one")


FACTOR = 2  # trials that reach a rung for each one that goes on; also the ratio of rungs


@dataclass(frozen=True)
class Search:
    """The rules of a search.

    Each is also an option of `sweep`, such as --search-flops.

    Attributes:
        space: The distribution of each searched option, as a `Range` or `Choice`.
    """

    space: dict[str, Any] = field(default_factory=dict)
    flops: float = option(
        0.0, "FLOPs of the search for each setting, those of stopped trials among them", above=0
    )
    metric: str = option(
        "valid.loss", "metric of a run that chooses (default: valid.loss)", metavar="METRIC"
    )
    better: str | None = option(
        None, "which end of that metric is best (default: by its name)", choices=("higher", "lower")
    )
    seed: int = option(101, "seed of trials and of the sampler (default: 101)")
    sampler: str = option(
        "qmc",
        "qmc (a Sobol sequence), tpe or random (default: qmc)",
        choices=("qmc", "tpe", "random"),
    )
    prune: str = option(
        "halving",
        "halving: stop the worse half of the trials at each rung; none (default: halving)",
        choices=("halving", "none"),
    )
    # Halving is biased against slow starters, such as low rates and masked LMs on their plateau.
    first_rung: float = option(
        0.25,
        "part of a run before which no trial is stopped (default: 0.25)",
        at_least=0.25,
        below=1,
    )

    def __post_init__(self) -> None:
        for key, item in self.space.items():
            if not isinstance(item, Range | Choice):
                self.space[key] = _parse_distribution(item, f"space.{key}")
        check_seeds([self.seed], "seed")
        if not self.flops:
            raise UsageError(
                "flops: say how many FLOPs the tuning of each setting may take (--search-flops), "
                "such as four times trainer.max_flops"
            )

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Search:
        """Return the checked search of the rules in a sweep file; raises UsageError."""
        return read_structured(cls, content, "search")

    def as_json(self) -> dict[str, Any]:
        """Return the rules for sweep.json."""
        space = {key: distribution.as_json() for key, distribution in self.space.items()}
        return {**vars(self), "space": space}

    def check(self, varied: set[str], seeds: list[int]) -> None:
        """Raise UsageError for a search that contradicts the sweep around it."""
        _check_space(self.space, varied)
        if self.seed in seeds:
            raise UsageError(
                f"seed {self.seed} is that of the trials; values that were chosen by a seed's luck "
                "must be compared on other seeds, so give other --seeds, or another --search-seed"
            )

    def check_direction(self) -> None:
        """Raise UsageError if the direction of the metric is unknown."""
        if self.better is None and lower_is_better(self.metric) is None:
            raise UsageError(
                f"search: the name of {self.metric} does not say whether the higher or the lower "
                "value is the better one; give --search-better"
            )

    @property
    def lower_is_better(self) -> bool:
        """Whether a smaller value of the metric is better."""
        if self.better is not None:
            return self.better == "lower"
        return bool(lower_is_better(self.metric))

    @property
    def rungs(self) -> tuple[float, ...]:
        """Parts of a run at which a trial may be stopped, and 1 for its end."""
        shares = []
        share = self.first_rung if self.prune == "halving" else 1.0
        while share < 1:
            shares.append(share)
            share *= FACTOR
        return (*shares, 1.0)

    @property
    def is_independent(self) -> bool:
        """Whether trials are independent of each other's scores."""
        return self.prune == "none" and self.sampler != "tpe"
