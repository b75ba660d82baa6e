"""Verdicts by kind of labels: in which kinds of end task is an objective better than the baseline?

If the primary metric of a plan is a mean of means, for example over labels that lie behind a word
and ahead of it, each of these means has a verdict of its own by the same rule.
"""

from typing import Any

from metaseq_lm.league.cells import decision_texts, interval_title, score_text
from metaseq_lm.league.entries import Entry, Standings
from metaseq_lm.league.parts import DOUBT, NONE, number_text, short_name
from metaseq_lm.league.standings import FLAG, REFUSE, VOID
from metaseq_lm.league.verdict import BETTER, EQUIVALENT, UNDECIDED, WORSE
from metaseq_lm.reporting.numbers import Metric, flops_text, summarise
from metaseq_lm.reporting.table import Cell, Table

_MARKS = {BETTER: "+", WORSE: "-", EQUIVALENT: "=", UNDECIDED: ""}
# Used with the baseline, and for further verdicts in the same sentence.
_PHRASES = {
    BETTER: ("better than {} in", "better in"),
    WORSE: ("worse than {} in", "worse in"),
    EQUIVALENT: ("equivalent to {} in", "equivalent in"),
    UNDECIDED: ("undecided beside {} in", "undecided in"),
    NONE: ("not ranked beside {} in", "not ranked in"),
}


def narrow_text(entry: Entry, metric: Metric) -> str:
    """Return mean and sd of a row in a narrow column, "61 ±3", "-" without a number."""
    summary = summarise(entry.scores.get(metric.name, ()))
    if summary is None or entry.about(metric.name, VOID, REFUSE):
        return NONE
    text = number_text(metric, summary.centre)
    return (
        text if summary.n < 2 else f"{text} ±{number_text(metric, summary.high - summary.centre)}"
    )


def kind_mark(entry: Entry, kind: Metric) -> str:
    """Return the mark of the verdict on a kind, with "?" if a gate flags the number."""
    if entry.about(kind.name, VOID, REFUSE):
        return ""
    stated = entry.stated_of(kind.name)
    return _MARKS[stated.verdict if stated else UNDECIDED] + DOUBT * bool(
        entry.about(kind.name, FLAG)
    )


def describe_kinds(standings: Standings, objective: str) -> str:
    """Return in which kinds an objective is better than the baseline, worse, and so on.

    The sentence is about the largest budget with a comparison; "" if there was none.
    """
    compared = [e for e in standings.entries if e.objective == objective and e.of_kinds]
    if not compared:
        return ""
    entry = max(compared, key=lambda entry: entry.budget)
    groups: dict[str, list[str]] = {verdict: [] for verdict in _PHRASES}
    for kind in standings.kinds:
        stated = entry.stated_of(kind.name)
        groups[stated.verdict if stated else NONE].append(short_name(kind))
    texts: list[str] = []
    for verdict, names in groups.items():
        if names:
            phrase = _PHRASES[verdict][bool(texts)].format(standings.baseline)
            texts.append(f"{phrase} {listed(names)}")
    at = f" at {flops_text(entry.budget)} FLOPs" * (len(standings.budgets) > 1)
    return f"{objective}{at}: {', '.join(texts)}"


def listed(names: list[str]) -> str:
    """Return names as "a", "a and b", "a, b and c"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def kinds_table(standings: Standings) -> Table | None:
    """Return score and verdict of each kind and row, None for a plan without kinds."""
    if not standings.kinds:
        return None
    head = ["FLOPs", "objective", "labels", "score", "difference"]
    head += [interval_title(standings.rule), "p (Holm)", "verdict"]
    rows = []
    for budget in standings.budgets:
        for kind in standings.kinds:
            for entry in standings.at(budget, standings.primary):
                row = [Cell(flops_text(budget)), Cell(entry.objective, number=False)]
                row.append(Cell(short_name(kind), number=False))
                row.append(Cell(score_text(standings, entry, kind)))
                row += map(Cell, decision_texts(entry.of_kinds.get(kind.name), kind))
                row.append(Cell(standings.verdict_text(entry, kind.name), number=False))
                rows.append(row)
    note = (
        "Each kind of labels has verdicts of its own, by the rule of the primary metric, corrected "
        "among those of the kind."
    )
    return Table("By kind of labels: mean ± sample sd over seeds", head, rows, [note])


def kinds_record(standings: Standings, entry: Entry) -> dict[str, Any]:
    """Return the unrounded numbers of the verdicts on kinds of a row, for csv."""
    line: dict[str, Any] = {}
    for kind in standings.kinds:
        name, decision = kind.name, entry.of_kinds.get(kind.name)
        low, high = (decision and decision.interval) or (None, None)
        line |= {f"{name}_difference": decision.difference if decision else None}
        line |= {f"{name}_low": low, f"{name}_high": high}
        line |= {f"{name}_p_holm": decision.corrected if decision else None}
        line |= {f"{name}_verdict": decision.verdict if decision else None}
    return line
