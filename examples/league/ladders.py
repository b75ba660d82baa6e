"""Ladders of leagues: predictions of what has been measured, and how often intervals are right.

python examples/league/ladders.py                # those of the laptop division, and predictions
python examples/league/ladders.py examples/league/ladders.jsonl                # print simulations
python examples/league/ladders.py --simulate --out examples/league/ladders.jsonl

The largest budgets of the laptop division and of the ladder on English are predicted from the
smaller ones in hindsight, by several forms of curves.
Simulated are intervals of means, crossovers, FLOPs at equal score and predictions, of ladders whose
truth is known.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from scipy.special import expit

from metaseq_lm.core.errors import UsageError, run_script
from metaseq_lm.core.output import show
from metaseq_lm.league.assembly import LeagueRuns, read_league
from metaseq_lm.league.control_gates import ceiling, references
from metaseq_lm.league.curves import (
    DRAWS as FIT_DRAWS,
)
from metaseq_lm.league.curves import (
    FEWEST_HELD_OUT,
    POWER_LAW,
    SATURATION,
    CurveForm,
    Fit,
    form_of,
    has_logits,
    logit_line,
    naive_predictions,
    rejection,
)
from metaseq_lm.league.entries import Standings
from metaseq_lm.league.ladder_tables import equal_score_table, ladder_tables
from metaseq_lm.league.ladders import ObjectiveLadder, crossover, draw_means, equal_score, interval
from metaseq_lm.league.plan_files import LAPTOP
from metaseq_lm.league.rungs import (
    drawn_ladders,
    has_number,
    ladder_of,
    objectives_of,
    predict,
)
from metaseq_lm.reporting.formats import to_text
from metaseq_lm.reporting.numbers import Metric, flops_text, p_text
from metaseq_lm.reporting.settings import metric_of
from metaseq_lm.reporting.stats import LEVEL
from metaseq_lm.reporting.table import Cell, Table

DRAWS = 1_000  # of a simulated interval
SAMPLES, LADDERS, CURVES = 2_000, 500, 300  # of means, of crossovers and ratios, of fits
BUDGETS = 1e12 * 10.0 ** np.arange(0, 4, 0.5)
LOGIT_LINE = logit_line(1.0)
Draw = Callable[[np.random.Generator, int], np.ndarray]
Line = dict[str, Any]


# ---------------------------------------------------------------- hindsight

ENGLISH, TEXT_LADDER = (Path(__file__).with_name(x) for x in ("english.yaml", "text_ladder.yaml"))
RIVALS = ("to 100 %", "above chance", "asymptote", "through the loss")  # forms beside today's
RULES = ("as the last", "line of two")  # without a curve, see `curves.naive_predictions`


def laptop() -> LeagueRuns:
    """Return the runs of the laptop division."""
    return read_league(LAPTOP)


@dataclass(frozen=True)
class Case:
    """A row that was measured, with all that smaller budgets say of it.

    Attributes:
        objective: Its name.
        ladder: The scores up to the budget.
        losses: The validation losses of the same runs.
        ceiling: The most that can be reached; None if it is not known.
        chance: What guessing reaches.
    """

    objective: str
    ladder: ObjectiveLadder
    losses: ObjectiveLadder
    ceiling: float | None
    chance: float

    @property
    def value(self) -> float:
        """The mean at the largest budget."""
        return float(self.ladder.means[-1])

    def forms(self, metric: Metric) -> dict[str, CurveForm]:
        """Return the forms that are compared, that of today first, as "curve"."""
        form = form_of(metric, self.ceiling)
        assert form is not None
        if not metric.percent:
            return {"curve": form}
        above = above_chance(self.chance, self.ceiling or 1.0)
        return {"curve": form, **dict(zip(RIVALS, (LOGIT_LINE, above, SATURATION)))}


@dataclass(frozen=True)
class Hindsight:
    """What all smaller budgets predict of a mean.

    Attributes:
        case: The row.
        expected: By each form that can be fitted, and by the rules without a curve.
        fit: That of today's form; None if it cannot be fitted.
        ends: The interval that knows seeds alone.
        wide: The one that knows the errors of other objectives, too.
    """

    case: Case
    expected: dict[str, float]
    fit: Fit | None = None
    ends: tuple[float, float] | None = None
    wide: tuple[float, float] | None = None

    def error(self, form: str) -> float:
        """Return the error of a form, NaN if it could not be fitted."""
        return self.expected.get(form, math.nan) - self.case.value

    @property
    def p(self) -> float:
        """That of the misfit."""
        return self.fit.misfit_p if self.fit else math.nan

    def texts(self, metric: Metric) -> list[str]:
        """Return the cells of a row."""
        texts = [self.case.objective, metric.text(self.case.value)]
        texts.append(metric.text(self.expected["curve"]) if self.fit else "-")
        for ends in (self.ends, self.wide):
            inside = "yes" if covers(ends, self.case.value) else "no"
            texts += [" to ".join(map(metric.text, ends)), inside] if ends else ["-", "-"]
        errors = map(self.error, ("curve", *(RIVALS if metric.percent else ()), *RULES))
        texts += ["-" if math.isnan(error) else metric.text(error) for error in errors]
        return [*texts, p_text(self.p) if self.fit else "-"]


def above_chance(chance: float, ceiling: float) -> CurveForm:
    """Return the form of accuracies whose share of the way from chance to a ceiling is a line."""
    line, room = logit_line(1.0), ceiling - chance
    return replace(
        line,
        scale=lambda scores: line.scale((scores - chance) / room),
        unscale=lambda values: chance + room * line.unscale(values),
    )


def through_loss(case: Case, below: ObjectiveLadder) -> float:
    """Return the score that a power law of the loss predicts, by a line from losses to logits.

    The line is of all seeds of the smaller budgets, and does not rise with the loss.
    """
    form, losses = logit_line(case.ceiling or 1.0), case.losses.at(below.budgets)
    x, y = np.concatenate(losses.scores), form.scale(np.concatenate(below.scores))
    slope = min(float(np.cov(x, y)[0, 1] / x.var(ddof=1)), 0.0)
    loss = point(losses, POWER_LAW, case.ladder.budgets[-1])
    return float(form.unscale(np.array(y.mean() + slope * (loss - x.mean()))))


def point(ladder: ObjectiveLadder, form: CurveForm, budget: float) -> float:
    """Return what a form predicts, without draws."""
    return Fit(ladder, form).value(budget)


def look_back(case: Case, metric: Metric) -> Hindsight:
    """Return what the smaller budgets of a case predict, all of them, whether they may or not.

    Three are enough here, with which A - K C^-g misses nothing: `league predict` asks for two more
    than parameters, and this is what says why.
    """
    budget = case.ladder.budgets[-1]
    below = case.ladder.at(case.ladder.budgets[:-1])
    expected = dict(zip(RULES, naive_predictions(below, budget).values()))
    forms = case.forms(metric)
    if len(below.budgets) < 3 or not all(has_logits(below, form) for form in forms.values()):
        return Hindsight(case, expected)
    expected |= {name: point(below, form, budget) for name, form in forms.items()}
    if metric.percent:
        expected[RIVALS[-1]] = through_loss(case, below)
    rng = np.random.default_rng(0)
    fit = Fit(below.drawn(rng, FIT_DRAWS), forms["curve"])
    return Hindsight(case, expected, fit, fit.interval(budget, LEVEL, rng))


def widened(results: Sequence[Hindsight]) -> list[Hindsight]:
    """Return results with intervals that know the errors of the other objectives."""
    wide = []
    for result in results:
        others = [x.error("curve") for x in results if x is not result and x.fit]
        if result.fit and len(others) >= FEWEST_HELD_OUT:
            budget, rng = result.case.ladder.budgets[-1], np.random.default_rng(0)
            ends = result.fit.interval(budget, LEVEL, rng, others)
            result = replace(result, wide=ends)
        wide.append(result)
    return wide


def cases_of(league: LeagueRuns, standings: Standings, metric: str) -> list[Case]:
    """Return the cases of objectives over their budgets that are neither void nor refused."""
    cases = []
    for name in objectives_of(standings):
        budgets = ladder_of(standings, name, has_number).budgets
        rows = [row for row in league.rows() if row.objective == name and row.budget in budgets]
        scores, losses = (
            ObjectiveLadder.of({row.budget: row.scores(of) for row in rows})
            for of in (metric, "valid.loss")
        )
        top = ceiling(rows[-1].scored, metric)
        chance = references(rows[-1].scored, metric).get("chance", 0.0)
        cases.append(Case(name, scores, losses, top, chance))
    return cases


def hindsight_table(metric: Metric, budget: float, results: Sequence[Hindsight]) -> Table:
    """Return a table of predictions of the largest budget."""
    head = ["objective", "mean", "predicted", "95 %, seeds", "inside", "95 %, others", "inside"]
    head += ["error", *(RIVALS if metric.percent else ()), *RULES, "p"]
    title = f"{metric.title} at {flops_text(budget)} FLOPs, predicted from all smaller budgets"
    return table(title, head, [result.texts(metric) for result in results])


def summary_table(by_metric: dict[str, list[Hindsight]]) -> Table:
    """Return how many intervals have the mean, and mean sizes of errors, of fractions."""
    rows = []
    for name, results in by_metric.items():
        known = [result for result in results if result.fit]
        fitting = [result for result in known if result.p >= LEVEL]
        for which, chosen in (("all", known), ("not rejected", fitting)):
            texts = [name, which]
            for kind in ("ends", "wide"):
                with_ends = [x for x in chosen if getattr(x, kind)]
                inside = sum(covers(getattr(x, kind), x.case.value) for x in with_ends)
                texts.append(f"{inside} of {len(with_ends)}" if with_ends else "-")
            for form in ("curve", *RIVALS, *RULES):
                errors = [abs(100 * x.error(form)) for x in chosen]
                texts.append(f"{np.mean(errors):.2f}" if errors else "-")
            rows.append(texts)
    head = ["metric", "curves", "inside, seeds", "inside, others", "error", *RIVALS, *RULES]
    return table("Mean size of the errors, in points", head, rows)


def print_hindsight() -> None:
    """Print the ladders, what `league predict` would have said, predictions from all budgets."""
    league = laptop()
    standings, budget = league.standings(), max(league.plan.ladder.budgets)
    for part in ladder_tables(standings):
        show(to_text(part))
    rows = []
    for name in objectives_of(standings):
        try:
            text = standings.primary.text(predict(standings, name, budget).value)
        except UsageError as error:
            text = str(error)
        rows.append([name, text])
    title = f"What `league predict` would have said of {flops_text(budget)} FLOPs"
    show(to_text(table(title, ["objective", "prediction"], rows)))
    print_forms(league, standings)
    for plan in (ENGLISH, TEXT_LADDER):
        english = read_league(plan)
        show(to_text(lead_table(standings := english.standings())))
    show(to_text(equal_score_table(standings)))
    print_forms(english, standings)


def lead_table(standings: Standings) -> Table:
    """Return by how many points the baseline leads, and the FLOPs that others need for its scores.

    In times the FLOPs of the baseline.
    """
    ladders, rows, rule = drawn_ladders(standings), [], standings.rule
    base = ladders.pop(standings.baseline)
    for name, other in ladders.items():
        for budget, mean in zip(base.budgets, base.means):
            ratio, ends = equal_score(base.at([budget]), other, rule.lower_is_better, rule.level)
            there = other.at([x for x in other.budgets if x == budget]).means
            lead = standings.primary.text(mean - there[0]) if len(there) else "-"
            row = [name, flops_text(budget), lead]
            row.append("not reached" if math.isnan(ratio) else f"{1 / ratio:.2f}")
            rows.append([*row, f"{1 / ends[1]:.2f} to {1 / ends[0]:.2f}" if ends else "-"])
    head = ["objective", "FLOPs", "behind, points", "times the FLOPs", "95 % interval"]
    title = f"{standings.title}: FLOPs for the scores of {standings.baseline}"
    return table(title, head, rows)


def print_forms(league: LeagueRuns, standings: Standings) -> None:
    """Print what each form predicts of the largest budget that has runs."""
    fractions = {}
    for name in (standings.primary.name, *league.parts, "valid.loss"):
        metric = metric_of(name, league.runs)
        cases = cases_of(league, standings, name)
        results = widened([look_back(case, metric) for case in cases])
        show(to_text(hindsight_table(metric, standings.budgets[-1], results)))
        if metric.percent:
            fractions[name] = results
    show(to_text(summary_table(fractions)))


# ---------------------------------------------------------------- simulations


def solved(share: float) -> Draw:
    """Return accuracies of a task that a share of the seeds solves, the others not at all."""

    def draw(rng: np.random.Generator, n: int) -> np.ndarray:
        return np.where(rng.random(n) < share, 0.97, 0.55) + rng.normal(scale=0.02, size=n)

    return draw


POPULATIONS: dict[str, tuple[Draw, float]] = {
    "normal": (lambda rng, n: rng.normal(size=n), 0.0),
    "near 1": (lambda rng, n: rng.beta(30, 1, size=n), 30 / 31),
    "half of the seeds solve it": (solved(0.5), 0.76),
    "nine of ten solve it": (solved(0.9), 0.928),
}
SEEDS = (3, 5, 8)


def simulate_means(name: str, seeds: int) -> Line:
    """Return how many 95 % intervals of a mean have the true one."""
    draw, mean = POPULATIONS[name]
    rng = np.random.default_rng([seeds, list(POPULATIONS).index(name)])
    counts = dict.fromkeys(("plain bootstrap", "stretched", "Student"), 0)
    for _ in range(SAMPLES):
        scores = draw(rng, seeds)
        resampled = rng.choice(scores, (DRAWS, seeds)).mean(axis=1)
        half = stats.t.isf(LEVEL / 2, seeds - 1) * scores.std(ddof=1) / math.sqrt(seeds)
        intervals = {
            "plain bootstrap": interval(resampled, LEVEL),
            "stretched": interval(draw_means(scores, rng, DRAWS), LEVEL),
            "Student": (scores.mean() - half, scores.mean() + half),
        }
        for method, ends in intervals.items():
            counts[method] += covers(ends, mean)
    return {"kind": "means", "population": name, "seeds": seeds, "of": SAMPLES, **counts}


def covers(ends: tuple[float, float] | None, value: float) -> bool:
    """Return whether an interval has a value."""
    return ends is not None and bool(ends[0] <= value <= ends[1])


def draw_ladder(
    rng: np.random.Generator, means: np.ndarray, sd: float, seeds: int
) -> ObjectiveLadder:
    """Return a ladder of normal scores about means."""
    scores = means[:, None] + rng.normal(scale=sd, size=(len(means), seeds))
    return ObjectiveLadder.of(dict(zip(BUDGETS, scores)))


def simulate_crossovers(first: float, last: float, seeds: int) -> Line:
    """Return counts of crossovers of two ladders of 4 budgets, whose difference is a line.

    `first` and `last` are the differences at the ends, in sd over seeds.
    """
    rng = np.random.default_rng([seeds, round(10 * first + 100), round(10 * last + 100)])
    means = np.linspace(first, last, 4)
    log_budget = math.log(BUDGETS[0]) + (math.log(BUDGETS[3]) - math.log(BUDGETS[0])) * (
        first / (first - last) if first != last else math.nan
    )
    established = covered = 0
    none = []
    for _ in range(LADDERS):
        pair = draw_ladder(rng, means, 1.0, seeds), draw_ladder(rng, 0 * means, 1.0, seeds)
        one, other = (ladder.drawn(rng, DRAWS) for ladder in pair)
        result = crossover(one, other, LEVEL)
        established += result.p < LEVEL and result.none <= LEVEL
        ends = result.interval and (math.log(result.interval[0]), math.log(result.interval[1]))
        covered += covers(ends, log_budget)
        none.append(result.none)
    line: Line = {"kind": "crossovers", "first": first, "last": last, "seeds": seeds}
    line |= {"of": LADDERS, "established": established, "none": float(np.mean(none))}
    return line | {"covered": covered if first * last < 0 else None}


def simulate_equal_score(slope: float, seeds: int) -> Line:
    """Return how many intervals of FLOPs at equal score have the true ratio, 10.

    The ladder rises by `slope` sd a budget, of which there are 4; the score is that of its middle.
    """
    rng = np.random.default_rng([seeds, round(10 * slope), 7])
    means, middle = slope * np.arange(4), float(np.sqrt(BUDGETS[1] * BUDGETS[2]))
    covered = without = 0
    for _ in range(LADDERS):
        other = draw_ladder(rng, means, 1.0, seeds)
        scores = rng.normal(1.5 * slope, 1.0, seeds)
        base = ObjectiveLadder.of({10 * middle: scores.tolist()}).drawn(rng, DRAWS)
        _, ends = equal_score(base, other.drawn(rng, DRAWS), False, LEVEL)
        covered += covers(ends, 10.0)
        without += ends is None
    line: Line = {"kind": "equal score", "slope": slope, "seeds": seeds, "of": LADDERS}
    return line | {"covered": covered, "without": without}


def line_of_logits(budgets: np.ndarray) -> np.ndarray:
    """Return accuracies whose logit is linear in log FLOPs."""
    return np.asarray(expit(0.2 + 0.35 * np.log(budgets / 1e12)))


def power_law(budgets: np.ndarray) -> np.ndarray:
    """Return losses of a power law."""
    return np.asarray(1.8 + 2.5 * (budgets / 1e12) ** -0.3)


def phases(budgets: np.ndarray) -> np.ndarray:
    """Return accuracies of a task that is learnt within a decade, from 50 to 95 %."""
    return np.asarray(0.5 + 0.45 * expit(2.5 * np.log(budgets / 2e13)))


TRUTHS: dict[str, tuple[CurveForm, Callable[[np.ndarray], np.ndarray], float]] = {
    "logit line": (LOGIT_LINE, line_of_logits, 0.02),
    "power law": (POWER_LAW, power_law, 0.02),
    "change of phase": (LOGIT_LINE, phases, 0.02),
}


def simulate_predictions(name: str, rungs: int, seeds: int) -> Line:
    """Return how often the interval of the next budget has its mean, and sizes of errors."""
    form, curve, sd = TRUTHS[name]
    rng = np.random.default_rng([seeds, rungs, list(TRUTHS).index(name)])
    budget, covered, rejected = float(BUDGETS[rungs]), 0, 0
    errors = []
    for _ in range(CURVES):
        ladder = draw_ladder(rng, curve(BUDGETS[:rungs]), sd, seeds)
        value = float((curve(BUDGETS[rungs]) + rng.normal(scale=sd, size=seeds)).mean())
        fit = Fit(ladder.drawn(rng, DRAWS), form)
        if rejection(fit, LEVEL):
            rejected += 1
            continue
        covered += covers(fit.interval(budget, LEVEL, rng), value)
        expected = [fit.value(budget), *naive_predictions(ladder, budget).values()]
        errors.append([abs(x - value) for x in expected])
    line: Line = {"kind": "predictions", "truth": name, "rungs": rungs, "seeds": seeds}
    line |= {"of": CURVES, "rejected": rejected, "covered": covered}
    return line | {"errors": np.mean(errors, axis=0).tolist() if errors else None}


def simulations() -> Iterator[Line]:
    """Yield the lines of all simulations."""
    for name, seeds in product(POPULATIONS, SEEDS):
        yield simulate_means(name, seeds)
    for (first, last), seeds in product(
        ((0.0, 0.0), (0.0, 4.0), (-1.0, 1.0), (-2.0, 2.0), (-4.0, 4.0), (-1.0, 4.0)), (5, 8)
    ):
        yield simulate_crossovers(first, last, seeds)
    for slope, seeds in product((1.0, 2.0, 4.0), (5, 8)):
        yield simulate_equal_score(slope, seeds)
    for name, seeds in product(TRUTHS, (3, 8)):
        fewest = TRUTHS[name][0].parameters + 1  # one less than `league predict` takes
        for rungs in range(fewest, fewest + 3):
            yield simulate_predictions(name, rungs, seeds)


# ---------------------------------------------------------------- tables


def per_cent(count: float, total: int) -> str:
    """Return a share in per cent, "-" of nothing."""
    return f"{100 * count / total:.1f}" if total else "-"


def simulation_tables(lines: Sequence[Line]) -> Iterator[Table]:
    """Yield the tables of simulations."""
    by_kind: dict[str, list[Line]] = {}
    for line in lines:
        by_kind.setdefault(line["kind"], []).append(line)
    rows = []
    for line in by_kind["means"]:
        methods = ("plain bootstrap", "stretched", "Student")
        shares = [per_cent(line[method], line["of"]) for method in methods]
        rows.append([line["population"], str(line["seeds"]), *shares])
    head = ["scores", "seeds", "plain bootstrap", "stretched", "Student"]
    yield table("95 % intervals of a mean that have the true one, %", head, rows)
    rows = []
    for line in by_kind["crossovers"]:
        covered = "-" if line["covered"] is None else per_cent(line["covered"], line["of"])
        cells = [f"{line['first']:g}", f"{line['last']:g}", str(line["seeds"])]
        cells += [per_cent(line["established"], line["of"]), covered]
        rows.append([*cells, f"{line['none']:.2f}"])
    head = ["first", "last", "seeds", "established, %", "interval has it, %"]
    head += ["mean probability of none"]
    yield table("Crossovers by the difference at the first and last budget, in sd", head, rows)
    rows = []
    for line in by_kind["equal score"]:
        shown = line["of"] - line["without"]
        cells = [f"{line['slope']:g}", str(line["seeds"]), per_cent(line["covered"], shown)]
        rows.append([*cells, per_cent(line["without"], line["of"])])
    head = ["sd a budget", "seeds", "interval has it, %", "no interval, %"]
    yield table("FLOPs at equal score", head, rows)
    rows = []
    for line in by_kind["predictions"]:
        shown = line["of"] - line["rejected"]
        cells = [line["truth"], str(line["rungs"]), str(line["seeds"])]
        cells += [per_cent(line["rejected"], line["of"]), per_cent(line["covered"], shown)]
        errors = line["errors"] or [math.nan] * 3
        rows.append([*cells, *("-" if math.isnan(x) else f"{x:.4f}" for x in errors)])
    head = ["truth", "budgets", "seeds", "refused, %", "interval has the mean, %"]
    head += ["error", "as the last", "line of two"]
    yield table("Predictions of the next budget", head, rows)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of texts."""
    cells = [[Cell(text, number=False) for text in row] for row in rows]
    return Table(title, list(head), cells, [])


def main() -> None:
    """Print the laptop division in hindsight, or simulations, or simulate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", type=Path, nargs="?")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(sys.argv[1:])
    if arguments.simulate:
        with arguments.out.open("w", encoding="utf-8") as file:
            for line in simulations():
                print(json.dumps(line), file=file, flush=True)
    elif arguments.archive:
        text = arguments.archive.read_text(encoding="utf-8")
        for part in simulation_tables([json.loads(line) for line in text.splitlines()]):
            show(to_text(part))
    else:
        print_hindsight()


if __name__ == "__main__":
    run_script(main)
