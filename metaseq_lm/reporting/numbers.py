"""Summaries and formats of numbers: metrics, their spread over seeds, FLOPs, words."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from metaseq_lm.core.metric_names import is_fraction, lower_is_better

__all__ = ["Metric", "Summary", "summarise"]

SPREAD_TITLES = {"sd": "mean ± sample sd over seeds", "range": "median [min, max] over seeds"}


@dataclass(frozen=True)
class Metric:
    """A metric: its name, whether it is a fraction shown in per cent, and its direction.

    `guessed` is set if nothing told the direction, and higher counts as better.
    """

    name: str
    percent: bool
    lower_is_better: bool
    guessed: bool = False

    @classmethod
    def of(cls, name: str, values: Iterable[float], better: str | None = None) -> "Metric":
        """Describe a metric by its name and values; `better` ("higher", "lower") overrules.

        Only values within [-1, 1] are fractions, because some scorers already give per cent.
        """
        finite = [value for value in values if math.isfinite(value)]
        percent = is_fraction(name) and all(abs(value) <= 1 for value in finite)
        by_name = lower_is_better(name)
        lower = bool(by_name) if better is None else better == "lower"
        return cls(name, percent, lower, guessed=better is None and by_name is None)

    @property
    def better(self) -> str:
        """The direction, "higher" or "lower"."""
        return "lower" if self.lower_is_better else "higher"

    @property
    def best(self) -> Callable[..., Any]:
        """The function that returns the best of values, `min` or `max`."""
        return min if self.lower_is_better else max

    @property
    def scale(self) -> float:
        """The factor that a value is multiplied by before it is shown."""
        return 100.0 if self.percent else 1.0

    @property
    def title(self) -> str:
        """The name with its unit, for column heads."""
        return f"{self.name} (%)" if self.percent else self.name

    @property
    def axis(self) -> str:
        """The name in words with its unit, for axes."""
        words = re.sub(r"[._]+", " ", self.name)
        return f"{words} (%)" if self.percent else words

    def decimals(self, value: float) -> int:
        """Return the number of decimals: 2 for per cent, else enough for 4 significant digits."""
        if self.percent or value == 0 or not math.isfinite(value):
            return 2
        return min(max(3 - math.floor(math.log10(abs(value))), 0), 8)

    def text(self, value: float, digits: int | None = None) -> str:
        """Return a value as text with `digits` decimals, by default those of `decimals`."""
        digits = self.decimals(value) if digits is None else digits
        return f"{value * self.scale:.{digits}f}"


@dataclass(frozen=True)
class Summary:
    """The centre of values and their spread from `low` to `high`; one value has no spread."""

    n: int
    centre: float
    low: float
    high: float
    spread: str

    def text(self, metric: Metric) -> str:
        """Return "85.00 ± 1.00" (sd), "85.00 [84.00, 86.00]" (range) or "85.00" (one value)."""
        digits = metric.decimals(max(abs(self.centre), abs(self.high - self.centre)))
        centre, low, high = (metric.text(x, digits) for x in (self.centre, self.low, self.high))
        if self.n < 2:
            return centre
        if self.spread == "range":
            return f"{centre} [{low}, {high}]"
        return f"{centre} ± {metric.text(self.high - self.centre, digits)}"


def summarise(values: Sequence[float], spread: str = "sd") -> Summary | None:
    """Return mean and sample sd ("sd"), or median and extremes ("range"); None for no values."""
    assert spread in SPREAD_TITLES, spread
    if not len(values):
        return None
    x = np.asarray(values, dtype=float)
    if spread == "range":
        return Summary(len(x), float(np.median(x)), float(x.min()), float(x.max()), spread)
    mean = float(x.mean())
    sd = float(x.std(ddof=1)) if len(x) > 1 else 0.0
    return Summary(len(x), mean, mean - sd, mean + sd, spread)


def flops_text(flops: float | None) -> str:
    """Return FLOPs as 1.2e12, or "-" if unknown."""
    if flops is None:
        return "-"
    mantissa, _, exponent = f"{flops:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if flops else "0"


def words_text(words: float | None) -> str:
    """Return a number of words as 7,412,345, or "-" if unknown."""
    return "-" if words is None else f"{words:,.0f}"


def p_text(p: float | None) -> str:
    """Return a p-value as 0.013, smaller ones as 0.0013 or <0.0001, "-" for None."""
    if p is None:
        return "-"
    if p < 0.0001:
        return "<0.0001"
    return f"{p:.4f}" if p < 0.01 else f"{p:.3f}"


def bytes_text(size: float | None) -> str:
    """Return bytes as 343 MiB or 1.2 GiB, or "-" if unknown."""
    if size is None:
        return "-"
    mebi = size / 2**20
    return f"{mebi:.0f} MiB" if mebi < 1023.5 else f"{mebi / 1024:.1f} GiB"
