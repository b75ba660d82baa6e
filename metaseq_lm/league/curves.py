"""Curves of scores over FLOPs, and the score that they predict for a further budget.

A loss has the form E + K C^-g, with E, K and g not negative. An accuracy has one of two forms: if
its ceiling is known, the logit of its share of the ceiling is a line over the logarithm of C;
otherwise it is A - K C^-g, with A at most 1. Curves are fitted to the means of the budgets by least
squares.

Seeds are one source of error: each draw adds to the fitted curve the shift of the means in a
bootstrap of the seeds (`ladders.draw_means`), and is fitted anew. A curve that the budgets miss by
more than the draws do is rejected, since seeds alone do not explain its error. The other source is
that the curve may not go on as it did, which only other ladders can show: `held_out_errors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.polynomial import polynomial
from scipy.special import expit, logit

from metaseq_lm.core.output import count_text
from metaseq_lm.league.ladders import UNBOUNDED, Ends, ObjectiveLadder, interval
from metaseq_lm.reporting.numbers import Metric, flops_text, p_text

DRAWS = 2_000
_FEWEST_SEEDS = 3  # of a budget
FEWEST_HELD_OUT = 3  # other ladders needed for their errors to widen an interval
_LEAST_SPAN = 30.0  # the last budget over the first: 1.5 decades
_EDGE = 1e-4  # distance of drawn accuracies from 0 and 1, where the logit is infinite
_POWERS = np.geomspace(0.01, 3.0, 60)  # powers of C in the first round of the search for g
_ROUNDS, _STEPS = 8, 11  # further rounds search between the neighbours of the best

_Scale = Callable[[np.ndarray], np.ndarray]


def _solve_power_law(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return E, the falling part at the first budget, and g, (n, 3), for values (n, budgets)."""
    # g is found by search, for all rows at once; the others are linear in the values, and fitted by
    # least squares with both at least zero.
    powers, y = np.broadcast_to(_POWERS, (len(values), len(_POWERS))), values[:, None, :]
    for _ in range(_ROUNDS + 1):
        basis = np.exp(-powers[:, :, None] * x)  # (n, powers, budgets)
        centred = basis - basis.mean(axis=2, keepdims=True)
        parts = np.maximum((centred * y).sum(axis=2) / (centred**2).sum(axis=2), 0.0)
        levels = y.mean(axis=2) - parts * basis.mean(axis=2)
        # Where the level would be below zero, the best fit within the bounds has a level of zero.
        alone = np.maximum((basis * y).sum(axis=2) / (basis**2).sum(axis=2), 0.0)
        parts, levels = np.where(levels < 0, alone, parts), np.maximum(levels, 0.0)
        squares = ((y - levels[:, :, None] - parts[:, :, None] * basis) ** 2).sum(axis=2)
        best = squares.argmin(axis=1)[:, None]
        chosen = [np.take_along_axis(part, best, axis=1) for part in (levels, parts, powers)]
        neighbours = np.clip(best + np.array([-1, 1]), 0, powers.shape[1] - 1)
        low, high = np.take_along_axis(powers, neighbours, axis=1).T[:, :, None]
        powers = low + (high - low) * np.linspace(0, 1, _STEPS)
    return np.concatenate(chosen, axis=1)


@dataclass(frozen=True)
class CurveForm:
    """A curve over x, the logarithm of C over the first budget: a power law of C, or a line.

    Attributes:
        name: Its formula.
        bounds: Bounds of scores.
        scale: Maps scores to the scale of the fit.
        unscale: Inverse of `scale`.
        ceiling: Of a line, whose means all have to be above 0 and below it; None for a power law.
    """

    name: str
    bounds: Ends
    scale: _Scale
    unscale: _Scale
    ceiling: float | None = None

    @property
    def parameters(self) -> int:
        """Number of parameters of the curve."""
        return 3 if self.ceiling is None else 2

    def solve(self, x: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return the parameters, (n, parameters), of curves through values, (n, budgets)."""
        if self.ceiling is None:
            return _solve_power_law(x, values)
        return polynomial.polyfit(x, values.T, 1).T

    def value_at(self, parameters: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the values of curves, (n, points)."""
        level, part, *powers = parameters.T[:, :, None]
        values: np.ndarray = level + part * (np.exp(-powers[0] * x) if powers else x)
        return values


POWER_LAW = CurveForm("E + K C^-g", (0.0, math.inf), np.positive, np.positive)
_shortfall = partial(np.subtract, 1.0)  # its own inverse
SATURATION = CurveForm("A - K C^-g", (0.0, 1.0), _shortfall, _shortfall)


def logit_line(ceiling: float) -> CurveForm:
    """Return the form in which the logit of accuracy / ceiling is a line."""
    share = "" if ceiling == 1 else f" of score / {ceiling:.4g},"
    return CurveForm(
        f"logit{share} linear in log C",
        (0.0, 1.0),
        lambda scores: logit(np.clip(scores / ceiling, _EDGE, 1 - _EDGE)),
        lambda values: ceiling * expit(values),
        ceiling,
    )


def form_of(metric: Metric, ceiling: float | None = None) -> CurveForm | None:
    """Return the form of curves of a metric, given its ceiling if known; None without a form."""
    if metric.lower_is_better:
        return replace(POWER_LAW, bounds=(0.0, 1.0)) if metric.percent else POWER_LAW
    if not metric.percent:
        return None
    return SATURATION if ceiling is None else logit_line(ceiling)


def bounds_of(metric: Metric, scores: Iterable[np.ndarray]) -> Ends:
    """Return the bounds of a metric's form; none without a form, or if scores exceed them.

    Some losses, such as those of cosines, may be below zero.
    """
    form = form_of(metric)
    low, high = bounds = form.bounds if form else UNBOUNDED
    return bounds if all(((low <= x) & (x <= high)).all() for x in scores) else UNBOUNDED


class Fit:
    """A curve that was fitted to a ladder; its interval and misfit need draws of the ladder.

    Attributes:
        parameters: The parameters of the curve, (1, parameters).
        drawn: The parameters of the curves of all draws, (draws, parameters).
    """

    def __init__(self, ladder: ObjectiveLadder, form: CurveForm) -> None:
        self.ladder, self.form = ladder, form
        self._x, self._values = ladder.logs - ladder.logs[0], form.scale(ladder.means)[None]
        self.parameters = form.solve(self._x, self._values)
        self._curve = form.value_at(self.parameters, self._x)
        self._shifted = self._curve + (form.scale(ladder.draws) - self._values)
        self.drawn = form.solve(self._x, self._shifted)

    def _at(self, parameters: np.ndarray, budget: float) -> np.ndarray:
        x = np.log([budget]) - self.ladder.logs[0]
        return self.form.unscale(self.form.value_at(parameters, x)[:, 0])

    def value(self, budget: float) -> float:
        """Return the score of the curve at a budget."""
        return float(self._at(self.parameters, budget)[0])

    def interval(
        self, budget: float, level: float, rng: np.random.Generator, errors: Sequence[float] = ()
    ) -> Ends | None:
        """Return the 1 - `level` interval of the mean over equally many runs at another budget.

        The mean scatters about the curve like the mean of a random budget of the ladder, in points
        on the scale of scores and not of the fit. With at least FEWEST_HELD_OUT `errors` of the
        form on other ladders, we add an error of the curve: their root mean square times Student's
        t.
        """
        rows, columns = self.ladder.draws.shape
        scatter = self.ladder.draws - self.ladder.means
        drawn = self._at(self.drawn, budget)
        drawn = drawn + scatter[rng.permutation(rows), rng.integers(columns, size=rows)]
        if (count := len(errors)) >= FEWEST_HELD_OUT:
            drawn += math.hypot(*errors) / math.sqrt(count) * rng.standard_t(count, rows)
        return interval(drawn, level, self.form.bounds)

    @property
    def misfit_p(self) -> float:
        """The share of draws that miss their curve by at least the misfit of the means."""
        observed = ((self._values - self._curve) ** 2).sum()
        refitted = self.form.value_at(self.drawn, self._x)
        drawn = ((self._shifted - refitted) ** 2).sum(axis=1)
        rounding = 1e-12 * (self._values**2).sum()
        return float((1 + (drawn >= observed - rounding).sum()) / (1 + len(drawn)))


def why_not_predictable(ladder: ObjectiveLadder, form: CurveForm, budget: float) -> str:
    """Return why a form cannot be fitted to a ladder and predict a budget above it, "" if it can.

    Reasons are too few budgets or seeds, too short a span, a mean at the end of a scale, or a
    budget too far away.
    """
    # With one budget less the misfit has a single degree of freedom, and three budgets of a handful
    # of seeds before a phase transition pass for a line.
    if (count := len(ladder.budgets)) < (needed := form.parameters + 2):
        return f"{count_text(count, 'budget')}; {form.name} needs {needed}"
    first, last = ladder.budgets[0], ladder.budgets[-1]
    names = flops_text(first), flops_text(last)
    if last < _LEAST_SPAN * first * (1 - 1e-9):
        return (
            f"{names[0]} to {names[1]} is a factor of {last / first:.3g}; a prediction needs "
            f"{_LEAST_SPAN:g}, 1.5 decades"
        )
    if ladder.least_seeds < _FEWEST_SEEDS:
        return f"a budget with fewer than {_FEWEST_SEEDS} seeds"
    if not has_logits(ladder, form):
        return f"a mean is not between 0 and the ceiling, {form.ceiling:.4g}: it has no logit"
    if math.log(budget) - ladder.logs[-1] > ladder.logs[-1] - ladder.logs[0] + 1e-9:
        return f"{flops_text(budget)} is further above {names[1]} than that is above {names[0]}"
    return ""


def has_logits(ladder: ObjectiveLadder, form: CurveForm) -> bool:
    """Return whether all means are above 0 and below the ceiling of a form, if it has one."""
    top = form.ceiling
    return top is None or bool(((ladder.means > 0) & (ladder.means < top)).all())


def held_out_errors(ladders: Iterable[tuple[ObjectiveLadder, CurveForm]]) -> list[float]:
    """Return the errors at the last budget of each ladder of its form, fitted to the budgets below.

    A ladder needs more budgets below its last than its form has parameters, else it is left out.
    """
    errors = []
    for ladder, form in ladders:
        below = ladder.at(ladder.budgets[:-1])
        if len(below.budgets) > form.parameters and has_logits(below, form):
            value = Fit(below, form).value(ladder.budgets[-1])
            errors.append(value - float(ladder.means[-1]))
    return errors


def rejection(fit: Fit, level: float) -> str:
    """Return a clause that the budgets do not lie on a curve of the form, "" if they may."""
    p = fit.misfit_p
    return f"the budgets do not lie on {fit.form.name} (p = {p_text(p)})" * (p < level)


def naive_predictions(ladder: ObjectiveLadder, budget: float) -> dict[str, float]:
    """Return the predictions of two rules without a curve for a budget above a ladder.

    "last" is the mean of the last budget. "line" extends the line over log FLOPs through the last
    two budgets, if there are two.
    """
    last = float(ladder.means[-1])
    predictions = {"last": last}
    if len(ladder.budgets) > 1:
        slope = np.diff(ladder.means)[-1] / np.diff(ladder.logs)[-1]
        predictions["line"] = last + float(slope * (math.log(budget) - ladder.logs[-1]))
    return predictions
