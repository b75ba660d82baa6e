"""The formulas of SyntaxGym's predictions (Gauthier et al. 2020).

A formula compares surprisals: "[(5;%reduced%) > (5;%unreduced%)] & [(*;%a%) < (*;%b%)]". (R;%C%) is
the surprisal of region R in condition C, with * the sum of all regions. The syntax has numbers, +
and -, the comparisons <, > and = (approximate equality), & and |. Brackets equal parentheses.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from metaseq_lm.core.errors import MetaseqError

# Tolerance of "=", as in the reference implementation; surprisals are in bits.
_EQUAL, _RTOL, _ATOL = "=", 1e-5, 1e-3
_TOKENS = re.compile(
    r"\s*(?:\(\s*(?P<region>\d+|\*)\s*;\s*%(?P<condition>[^%]+)%\s*\)"
    r"|(?P<number>\d+(?:\.\d+)?)|(?P<sign>[-+<>=&|()\[\]]))"
)
_OPERATORS: tuple[dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]], ...] = (
    {"|": np.logical_or},
    {"&": np.logical_and},
    {
        "<": np.less,
        ">": np.greater,
        _EQUAL: lambda left, right: np.isclose(left, right, _RTOL, _ATOL),
    },
    {"+": np.add, "-": np.subtract},
)
_CLOSING = {"(": ")", "[": "]"}


class Region(NamedTuple):
    """A region of a condition; its number is "*" for all regions."""

    number: str
    condition: str


_Surprisal = Callable[[Region], np.ndarray]
_Node = Callable[[_Surprisal, list[np.ndarray]], np.ndarray]


class Formula:
    """A formula that is evaluated for any number of items at once.

    Operators of the same kind apply from left to right, and all operands are evaluated.

    Args:
        text: The formula.
        location: Its file and line, for messages.

    Attributes:
        regions: The regions in it.
        has_equality: Whether it has an "=", which holds for tiny differences.

    Raises:
        MetaseqError: The text is not a formula, or one without a truth value.
    """

    def __init__(self, text: str, location: str) -> None:
        self.text, self.location = text, location
        self.regions: list[Region] = []
        self._tokens = list(self._split())
        self.has_equality = any(sign == _EQUAL for sign, _ in self._tokens)
        self._at = 0
        self._node, kind = self._operation(0)
        if self._at < len(self._tokens):
            raise self._error(f"{self._tokens[self._at][0]!r} is not expected")
        if kind is not bool:
            raise self._error("it compares nothing")

    def __call__(self, surprisal: _Surprisal) -> tuple[np.ndarray, np.ndarray]:
        """Return where the formula holds, and where it compares two equal values by < or >.

        Args:
            surprisal: Returns the surprisals of a region in bits, in an array of any shape.

        Returns:
            Two boolean arrays of that shape.
        """
        ties: list[np.ndarray] = []
        holds = self._node(surprisal, ties)
        if not ties:
            return holds, np.zeros(holds.shape, bool)
        return holds, np.any(ties, axis=0)

    def _error(self, reason: str) -> MetaseqError:
        return MetaseqError(f"{self.location}: not a formula: {self.text!r}: {reason}")

    def _split(self) -> Iterator[tuple[str, re.Match[str]]]:
        at, text = 0, self.text.rstrip()
        while at < len(text):
            match = _TOKENS.match(text, at)
            if match is None:
                raise self._error(f"{text[at:].strip()[:20]!r} is neither region, number nor sign")
            yield match[0].strip(), match
            at = match.end()

    def _next(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def _operation(self, level: int) -> tuple[_Node, type]:
        """Parse operands joined by the operators of a level; also return the type of the value."""
        if level == len(_OPERATORS):
            return self._operand()
        left, kind = self._operation(level + 1)
        while (sign := self._next()) in _OPERATORS[level]:
            self._at += 1
            right, other = self._operation(level + 1)
            expected = bool if sign in "&|" else float
            if (kind, other) != (expected, expected):
                operands = "comparisons" if expected is bool else "numbers"
                raise self._error(f"{sign} stands between {operands} only")
            left = _applied(_OPERATORS[level][sign], left, right, sign in "<>")
            kind = float if sign in "+-" else bool
        return left, kind

    def _operand(self) -> tuple[_Node, type]:
        if not self._next():
            raise self._error("it ends within an expression")
        text, match = self._tokens[self._at]
        self._at += 1
        if text in _CLOSING:
            inner = self._operation(0)
            if self._next() != _CLOSING[text]:
                raise self._error(f"{text!r} is not closed")
            self._at += 1
            return inner
        if match["region"]:
            region = Region(match["region"], match["condition"])
            self.regions.append(region)
            return lambda surprisal, _: surprisal(region), float
        if match["number"]:
            number = np.array(float(match["number"]))
            return lambda _, __: number, float
        raise self._error(f"{text!r} is not expected")


def _applied(
    operator: Callable[[np.ndarray, np.ndarray], np.ndarray],
    left: _Node,
    right: _Node,
    strict: bool,
) -> _Node:
    """Return the node of an operator; a `strict` one records where its operands are equal."""

    def evaluate(surprisal: _Surprisal, ties: list[np.ndarray]) -> np.ndarray:
        a, b = left(surprisal, ties), right(surprisal, ties)
        if strict:
            ties.append(a == b)
        return operator(a, b)

    return evaluate
