"""Texts of the cells of standings: scores, gains, differences with their intervals."""

from metaseq_lm.league.entries import NOT_RANKED, Entry, Scores, Standings
from metaseq_lm.league.standings import REFUSE, VOID
from metaseq_lm.league.verdict import Decision, Gain, Rule
from metaseq_lm.reporting.numbers import Metric, p_text, summarise


def summary_text(scores: Scores, metric: Metric) -> str:
    """Return mean ± sd of a metric, "-" without scores."""
    summary = summarise(scores.get(metric.name, ()))
    return summary.text(metric) if summary else "-"


def choice_text(entry: Entry, metric: Metric) -> str:
    """Return the sd of choice of a row, "-" if it is unknown or the row shows no number."""
    sd = None if entry.about(metric.name, VOID, REFUSE) else entry.sds_of_choice.get(metric.name)
    return "-" if sd is None else metric.text(sd)


def score_text(standings: Standings, entry: Entry, metric: Metric) -> str:
    """Return the cell of a score: the number with its letters, or why there is none."""
    for action in (VOID, REFUSE):
        if entry.about(metric.name, action):
            return NOT_RANKED[action]
    return " ".join([summary_text(entry.scores, metric), *standings.marks(entry, metric.name)])


def gain_text(gain: Gain | None, metric: Metric, digits: int | None = None) -> str:
    """Return a gain ± its sd, with `digits` after the point; "" for none."""
    if gain is None:
        return ""
    if digits is None:
        digits = metric.decimals(max(abs(gain.mean), gain.sd or 0.0))
    text = signed(gain.mean, metric, digits)
    return text if gain.sd is None else f"{text} ± {metric.text(gain.sd, digits)}"


def decision_texts(decision: Decision | None, metric: Metric) -> list[str]:
    """Return the cells difference, interval and p."""
    if decision is None:
        return ["", "", ""]
    difference, *ends = signed_texts(decision.difference, decision.interval, metric)
    return [difference, " to ".join(ends) or "-", p_text(decision.corrected)]


def signed_texts(
    difference: float,
    interval: tuple[float, float] | None,
    metric: Metric,
    digits: int | None = None,
) -> list[str]:
    """Return a difference and, if it has an interval, its ends, with `digits` after the point."""
    numbers = [difference, *(interval or ())]
    digits = metric.decimals(max(map(abs, numbers))) if digits is None else digits
    return [signed(x, metric, digits) for x in numbers]


def signed(value: float, metric: Metric, digits: int | None) -> str:
    """Return a value with its sign."""
    return f"{'+' * (value >= 0)}{metric.text(value, digits)}"


def interval_title(rule: Rule) -> str:
    """Return the title of the column of intervals: 90 % interval."""
    return f"{100 * (1 - 2 * rule.level):g} % interval"
