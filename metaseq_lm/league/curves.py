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
from functools import cached_property

import numpy as np
from scipy.special import expit, logit

from metaseq_lm.league.ladders import UNBOUNDED, Ends, Ladder, interval
from metaseq_lm.reporting.numbers import Metric, flops_text, p_text

DRAWS = 2_000
_FEWEST_SEEDS = 3  # of a budget
FEWEST_HELD_OUT = 3  # other ladders needed for their errors to widen an interval
_LEAST_SPAN = 30.0  # the last budget over the first: 1.5 decades
_EDGE = 1e-4  # distance of drawn accuracies from 0 and 1, where the logit is infinite
_POWERS = np.geomspace(0.01, 3.0, 60)  # powers of C in the first round of the search for g
_ROUNDS, _STEPS = 8, 11  # further rounds search between the neighbours of the best


def _solve_line(logs: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return level at the first budget and slope, (n, 2), of lines through (n, budgets)."""
    x = logs - logs[0]
    centred = x - x.mean()
    slopes = values @ centred / (centred @ centred)
    return np.stack([values.mean(axis=1) - slopes * x.mean(), slopes], axis=1)


def _line_at(parameters: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the values of lines, (n, points), at logarithms of C over the first budget."""
    level, slope = parameters.T[:, :, None]
    values: np.ndarray = level + slope * x
    return values


def _solve_power_law(logs: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return E, the falling part at the first budget, and g, (n, 3), for values (n, budgets).

    g is found by search; E and the falling part are linear in the values.
    """
    x = logs - logs[0]
    powers = np.broadcast_to(_POWERS, (len(values), len(_POWERS)))
    for _ in range(_ROUNDS + 1):
        levels, parts, squares = _linear_parts(x, values, powers)
        best = squares.argmin(axis=1)[:, None]
        low, high = (
            np.take_along_axis(powers, np.clip(best + step, 0, powers.shape[1] - 1), axis=1)
            for step in (-1, 1)
        )
        chosen = [np.take_along_axis(part, best, axis=1) for part in (levels, parts, powers)]
        powers = low + (high - low) * np.linspace(0, 1, _STEPS)
    return np.concatenate(chosen, axis=1)


def _linear_parts(
    x: np.ndarray, values: np.ndarray, powers: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return E, the falling part and the sum of squares for each power, each (n, powers).

    The fit is by least squares with both parts at least zero.
    """
    basis = np.exp(-powers[:, :, None] * x)  # (n, powers, budgets)
    y = values[:, None, :]
    centred = basis - basis.mean(axis=2, keepdims=True)
    part = np.maximum((centred * y).sum(axis=2) / (centred**2).sum(axis=2), 0.0)
    level = y.mean(axis=2) - part * basis.mean(axis=2)
    alone = np.maximum((basis * y).sum(axis=2) / (basis**2).sum(axis=2), 0.0)
    part, level = np.where(level < 0, alone, part), np.maximum(level, 0.0)
    squares = ((y - level[:, :, None] - part[:, :, None] * basis) ** 2).sum(axis=2)
    return level, part, squares


def _power_law_at(parameters: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the values of power laws, (n, points), at logarithms of C over the first budget."""
    level, part, power = parameters.T[:, :, None]
    values: np.ndarray = level + part * np.exp(-power * x)
    return values


def _logit_inside(scores: np.ndarray) -> np.ndarray:
    """Return the logit of accuracies, clipped to the range from EDGE to 1 - EDGE."""
    values: np.ndarray = logit(np.clip(scores, _EDGE, 1 - _EDGE))
    return values


def unchanged(scores: np.ndarray) -> np.ndarray:
    """Return scores as they are."""
    return scores


def _shortfall(scores: np.ndarray) -> np.ndarray:
    """Return 1 minus fractions; its own inverse."""
    lacking: np.ndarray = 1.0 - scores
    return lacking


@dataclass(frozen=True)
class Form:
    """A form of curves.

    Attributes:
        name: Its formula.
        parameters: Number of its parameters.
        bounds: Bounds of scores.
        scale: Maps scores to the scale of the fit.
        unscale: Inverse of `scale`.
        solve: Maps logarithms of budgets and values (n, budgets) to parameters (n, parameters).
        value_at: Maps parameters and logarithms of C over the first budget to values (n, points).
        ceiling: All means have to be above 0 and below it; None for no such limits.
    """

    name: str
    parameters: int
    bounds: Ends
    scale: Callable[[np.ndarray], np.ndarray]
    unscale: Callable[[np.ndarray], np.ndarray]
    solve: Callable[[np.ndarray, np.ndarray], np.ndarray]
    value_at: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ceiling: float | None = None

    @property
    def rungs(self) -> int:
        """The least number of budgets: the number of parameters plus two.

        With one less the misfit has a single degree of freedom, and three budgets of a handful of
        seeds before a phase transition pass for a line.
        """
        return self.parameters + 2


def logit_line(ceiling: float) -> Form:
    """Return the form in which the logit of accuracy / ceiling is a line."""
    share = "" if ceiling == 1 else f" of score / {ceiling:.4g},"
    return Form(
        f"logit{share} linear in log C",
        2,
        (0.0, 1.0),
        lambda scores: _logit_inside(scores / ceiling),
        lambda values: ceiling * expit(values),
        _solve_line,
        _line_at,
        ceiling,
    )


POWER_LAW = Form(
    "E + K C^-g", 3, (0.0, math.inf), unchanged, unchanged, _solve_power_law, _power_law_at
)
SATURATION = Form(
    "A - K C^-g", 3, (0.0, 1.0), _shortfall, _shortfall, _solve_power_law, _power_law_at
)


def form_of(metric: Metric, ceiling: float | None = None) -> Form | None:
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
    if form is None:
        return UNBOUNDED
    low, high = form.bounds
    return form.bounds if all(((low <= x) & (x <= high)).all() for x in scores) else UNBOUNDED


@dataclass(frozen=True, eq=False)
class Fit:
    """A curve that was fitted to a ladder.

    Attributes:
        ladder: The ladder that was fitted.
        form: The form of the curve.
        means: Drawn means of the ladder, (draws, budgets).
    """

    ladder: Ladder
    form: Form
    means: np.ndarray

    @classmethod
    def of(cls, ladder: Ladder, form: Form, rng: np.random.Generator, draws: int = DRAWS) -> Fit:
        """Return the fit of a form to a ladder, see `obstacle`."""
        return cls(ladder, form, ladder.draws(rng, draws))

    @cached_property
    def noise(self) -> np.ndarray:
        """The shift of each mean in each draw, on the scale of the fit, (draws, budgets)."""
        noise: np.ndarray = self.form.scale(self.means) - self.form.scale(self.ladder.means)
        return noise

    @cached_property
    def parameters(self) -> np.ndarray:
        """The parameters of the curve, (1, parameters)."""
        return self.form.solve(self.ladder.logs, self.form.scale(self.ladder.means)[None])

    @cached_property
    def drawn(self) -> np.ndarray:
        """The parameters of the draws, (draws, parameters)."""
        return self.form.solve(self.ladder.logs, self.fitted + self.noise)

    @property
    def fitted(self) -> np.ndarray:
        """The values of the curve at the budgets, on the scale of the fit, (1, budgets)."""
        return self.form.value_at(self.parameters, self.offsets(self.ladder.logs))

    def offsets(self, logs: np.ndarray) -> np.ndarray:
        """Return logarithms of budgets minus the logarithm of the ladder's first budget."""
        shifted: np.ndarray = logs - self.ladder.logs[0]
        return shifted

    def value(self, budget: float) -> float:
        """Return the score of the curve at a budget."""
        x = self.offsets(np.log([budget]))
        return float(self.form.unscale(self.form.value_at(self.parameters, x))[0, 0])

    def interval(
        self,
        budget: float,
        level: float,
        rng: np.random.Generator,
        errors: Sequence[float] = (),
    ) -> Ends | None:
        """Return the 1 - `level` interval of the mean over equally many runs at another budget.

        The mean scatters about the curve like the mean of a random budget of the ladder, in points
        on the scale of scores and not of the fit. With at least FEWEST_HELD_OUT `errors` of the
        form on other ladders, we add an error of the curve: their root mean square times Student's
        t.
        """
        values = self.form.value_at(self.drawn, self.offsets(np.log([budget])))[:, 0]
        rows, columns = self.means.shape
        scatter = (self.means - self.ladder.means)[
            rng.permutation(rows), rng.integers(columns, size=rows)
        ]
        drawn = self.form.unscale(values) + scatter
        if (count := len(errors)) >= FEWEST_HELD_OUT:
            drawn += math.hypot(*errors) / math.sqrt(count) * rng.standard_t(count, rows)
        return interval(drawn, level, self.form.bounds)

    @cached_property
    def misfit_p(self) -> float:
        """The share of draws that miss their curve by at least the misfit of the means."""
        values = self.form.scale(self.ladder.means)
        observed = float(((values - self.fitted) ** 2).sum())
        refitted = self.form.value_at(self.drawn, self.offsets(self.ladder.logs))
        drawn = ((self.fitted + self.noise - refitted) ** 2).sum(axis=1)
        rounding = 1e-12 * float((values**2).sum())
        return float((1 + (drawn >= observed - rounding).sum()) / (1 + len(drawn)))


def obstacle(ladder: Ladder, form: Form, budget: float) -> str:
    """Return why a form cannot be fitted to a ladder and predict a budget above it, "" if it can.

    Reasons are too few budgets or seeds, too short a span, a mean at the end of a scale, or a
    budget too far away.
    """
    if (count := len(ladder.budgets)) < form.rungs:
        return f"{count} budget{'s' * (count != 1)}; {form.name} needs {form.rungs}"
    first, last = ladder.budgets[0], ladder.budgets[-1]
    if last < _LEAST_SPAN * first * (1 - 1e-9):
        return (
            f"{flops_text(first)} to {flops_text(last)} is a factor of {last / first:.3g}; a "
            f"prediction needs {_LEAST_SPAN:g}, 1.5 decades"
        )
    if ladder.least_seeds < _FEWEST_SEEDS:
        return f"a budget with fewer than {_FEWEST_SEEDS} seeds"
    if not has_logits(ladder, form):
        return f"a mean is not between 0 and the ceiling, {form.ceiling:.4g}: it has no logit"
    if math.log(budget) - ladder.logs[-1] > ladder.logs[-1] - ladder.logs[0] + 1e-9:
        return (
            f"{flops_text(budget)} is further above {flops_text(last)} than that is above "
            f"{flops_text(first)}"
        )
    return ""


def has_logits(ladder: Ladder, form: Form) -> bool:
    """Return whether all means are above 0 and below the ceiling of a form, if it has one."""
    top = form.ceiling
    return top is None or bool(((ladder.means > 0) & (ladder.means < top)).all())


def held_out_errors(ladders: Iterable[tuple[Ladder, Form]]) -> list[float]:
    """Return the errors at the last budget of each ladder of its form, fitted to the budgets below.

    A ladder needs more budgets below its last than its form has parameters, else it is left out.
    """
    errors = []
    for ladder, form in ladders:
        below = ladder.at(ladder.budgets[:-1])
        if len(below.budgets) > form.parameters and has_logits(below, form):
            fit = Fit(below, form, np.empty((0, len(below.budgets))))
            errors.append(fit.value(ladder.budgets[-1]) - float(ladder.means[-1]))
    return errors


def rejection(fit: Fit, level: float) -> str:
    """Return a clause that the budgets do not lie on a curve of the form, "" if they may."""
    p = fit.misfit_p
    return f"the budgets do not lie on {fit.form.name} (p = {p_text(p)})" if p < level else ""


def naive_predictions(ladder: Ladder, budget: float) -> dict[str, float]:
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
