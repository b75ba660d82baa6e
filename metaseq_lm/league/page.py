"""The page of a league: standings as text, Markdown, csv and html, with figures.

Scores and verdict of a row stand beside its controls. A void row has no number, only the reason;
a flagged one has a letter and is neither ranked nor tested.
"""

from pathlib import Path
from typing import Any

from metaseq_lm.core.files import write_atomic
from metaseq_lm.league.entries import (
    NOT_RANKED,
    Entry,
    Scores,
    Standings,
)
from metaseq_lm.league.figures import draw_ladder, draw_standings
from metaseq_lm.league.parts import describe_parts, part_texts, short_name
from metaseq_lm.league.standings import FLAG, NOTE, REFUSE, VOID
from metaseq_lm.league.verdict import VERDICTS, Decision, Rule
from metaseq_lm.reporting.formats import to_csv, to_markdown, to_text
from metaseq_lm.reporting.html import render_page
from metaseq_lm.reporting.numbers import Metric, flops_text, p_text, summarise
from metaseq_lm.reporting.table import Cell, Table


def write_page(standings: Standings, folder: Path) -> list[Path]:
    """Write standings.txt, .md, .csv, .html and .png, with several budgets ladder.png, too.

    `standings` are decided ones. Returns the paths; the text is the first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table, other = standings_table(standings), secondary_table(standings)
    tables = [table, other] if other else [table]
    pictures = [folder / "standings.png"]
    draw_standings(standings, pictures[0])
    ladder = folder / "ladder.png"
    ladder.unlink(missing_ok=True)  # of an earlier page
    if len(standings.budgets) > 1:
        pictures.append(ladder)
        draw_ladder(standings, ladder)
    texts = {
        "txt": "\n".join(map(to_text, tables)),
        "md": "\n".join(map(to_markdown, tables)),
        "csv": to_csv(table),
        "html": render_page(table, pictures, tables=tables[1:]),
    }
    paths = []
    for ending, text in texts.items():
        paths.append(folder / f"standings.{ending}")
        write_atomic(paths[-1], text.encode("utf-8"))
    return paths + pictures


def standings_table(standings: Standings) -> Table:
    """Return the rows by budget: primary metric and the means of its parts, controls, verdict.

    Then reasons and all that the verdicts rest on.
    """
    metric = standings.primary
    has_shuffled = any(entry.shuffled for entry in standings.entries)
    head = ["FLOPs", "objective", "seeds", metric.title]
    head += [*map(short_name, standings.parts), "untrained"]
    head += ["shuffled"] * has_shuffled
    head += ["difference", interval_title(standings.rule), "p (Holm)", "verdict"]
    rows, records = [], []
    for budget in standings.budgets:
        best = best_text(standings, budget, metric)
        for entry in standings.at(budget, metric):
            text = score_text(standings, entry, metric)
            row = [Cell(flops_text(budget)), Cell(entry.objective, number=False)]
            row.append(Cell(str(len(entry.scores.get(metric.name, ())))))
            row.append(Cell(text, best=text == best))
            row += map(Cell, part_texts(standings, entry))
            controls = [entry.untrained, entry.shuffled][: 1 + has_shuffled]
            row += [Cell(summary_text(scores, metric)) for scores in controls]
            row += map(Cell, decision_texts(entry.decision, metric))
            row.append(Cell(standings.verdict_text(entry), number=False))
            rows.append(row)
            records.append(record(standings, entry))
    notes = [*summaries(standings), *describe_parts(standings)]
    notes += [*reasons(standings, metric), *references(standings)]
    notes += [describe_rule(standings), *describe_origins(standings)]
    notes += [*standings.remarks, *standings.notes]
    return Table(standings.title, head, rows, notes, records)


def secondary_table(standings: Standings) -> Table | None:
    """Return the other metrics of the same rows, without tests; None if there are none."""
    metrics = standings.metrics[1:]
    if not metrics:
        return None
    rows = []
    for budget in standings.budgets:
        best = {metric.name: best_text(standings, budget, metric) for metric in metrics}
        for entry in standings.at(budget, standings.primary):
            row = [Cell(flops_text(budget)), Cell(entry.objective, number=False)]
            for metric in metrics:
                text = score_text(standings, entry, metric)
                row.append(Cell(text, best=text == best[metric.name]))
            rows.append(row)
    titles = [metric.title for metric in metrics]
    notes = ["The best is marked, nothing is tested: the plan decides by its primary metric."]
    for metric in metrics:
        notes += [f"{metric.name}: {line}" for line in reasons(standings, metric, about_all=False)]
    return Table(
        "Other metrics: mean ± sample sd over seeds", ["FLOPs", "objective", *titles], rows, notes
    )


def interval_title(rule: Rule) -> str:
    """Return the title of the column of intervals: 90 % interval."""
    return f"{100 * (1 - 2 * rule.level):g} % interval"


def summary_text(scores: Scores, metric: Metric) -> str:
    """Return mean ± sd of a metric, "-" without scores."""
    summary = summarise(scores.get(metric.name, ()))
    return summary.text(metric) if summary else "-"


def score_text(standings: Standings, entry: Entry, metric: Metric) -> str:
    """Return the cell of a score: the number with its letters, or why there is none."""
    for action in (VOID, REFUSE):
        if entry.about(metric.name, action):
            return NOT_RANKED[action]
    return " ".join([summary_text(entry.scores, metric), *standings.marks(entry, metric.name)])


def best_text(standings: Standings, budget: float, metric: Metric) -> str | None:
    """Return the cell of the best ranked row of a budget, None if less than two are ranked."""
    ranked = [e for e in standings.at(budget, metric) if e.is_ranked(metric.name)]
    return score_text(standings, ranked[0], metric) if len(ranked) > 1 else None


def decision_texts(decision: Decision | None, metric: Metric) -> list[str]:
    """Return the cells difference, interval and p."""
    if decision is None:
        return ["", "", ""]
    difference, *ends = signed_texts(decision, metric)
    return [difference, " to ".join(ends) or "-", p_text(decision.corrected)]


def signed_texts(decision: Decision, metric: Metric, digits: int | None = None) -> list[str]:
    """Return a difference and, if it has an interval, its ends, with `digits` after the point."""
    numbers = [decision.difference, *(decision.interval or ())]
    digits = metric.decimals(max(map(abs, numbers))) if digits is None else digits
    return [f"{'+' * (x >= 0)}{metric.text(x, digits)}" for x in numbers]


def summaries(standings: Standings) -> list[str]:
    """Return the verdicts of each budget in a sentence."""
    lines = []
    for budget in standings.budgets:
        parts = []
        name, outside = standings.primary.name, []
        by_verdict: dict[str, list[str]] = {verdict: [] for verdict in VERDICTS}
        for entry in standings.at(budget, standings.primary):
            if decision := entry.stated(name):
                by_verdict[decision.verdict].append(entry.objective)
            elif not entry.is_ranked(name):
                outside.append(entry.objective)
        for verdict, names in by_verdict.items():
            if names:
                parts.append(f"{verdict}: {', '.join(names)}")
        parts += [f"not ranked: {', '.join(outside)}"] if outside else []
        lines.append(
            f"{flops_text(budget)} FLOPs, beside {standings.baseline}: "
            f"{'; '.join(parts) or 'nothing was compared'}."
        )
    return lines


def reasons(standings: Standings, metric: Metric, about_all: bool = True) -> list[str]:
    """Return what the gates say, the flags by their letters first; `about_all`: of whole rows."""
    letters = standings.letters(metric.name)
    flagged: dict[str, list[str]] = {gate: [] for gate in letters}
    others = []
    for budget in standings.budgets:
        for entry in standings.at(budget, standings.primary):
            row = f"{entry.objective} at {flops_text(budget)}"
            for f in entry.about(metric.name, VOID, REFUSE, FLAG, NOTE):
                if not (about_all or f.metric):
                    continue
                if f.action == FLAG:
                    flagged[f.gate].append(f"{row}: {f.reason}")
                else:
                    title = "" if f.action == NOTE else f", {f.action} ({f.gate})"
                    others.append(f"{row}{title}: {f.reason}.")
    lines = [
        f"{letters[gate]} ({gate}): {'; '.join(rows)}." for gate, rows in flagged.items() if rows
    ]
    return lines + others


def references(standings: Standings) -> list[str]:
    """Return the scores that need no training, a sentence for each metric."""
    lines = []
    for metric in standings.metrics:
        if values := standings.references.get(metric.name):
            texts = [f"{name} {metric.text(value)}" for name, value in values.items()]
            lines.append(f"Without training, {metric.title}: {', '.join(texts)}.")
    return lines


def describe_rule(standings: Standings) -> str:
    """Return how the verdicts came about."""
    rule, metric = standings.rule, standings.primary
    count = sum(entry.decision is not None for entry in standings.entries)
    return (
        "Better, worse: a permutation test of means and Welch's t test, two-sided, below "
        f"{rule.level:g} after Holm's correction for {max(rule.comparisons, count)} comparisons. "
        "Equivalent: the "
        f"{interval_title(rule)} of the difference (Welch's) lies within ± "
        f"{metric.text(rule.smallest_effect)}, the smallest difference that matters."
    )


def describe_origins(standings: Standings) -> list[str]:
    """Return which rows were run and which ones shipped with the plan; [] if none did."""
    if not any(entry.shipped for entry in standings.entries):
        return []
    trained = []
    for budget in standings.budgets:
        entries = standings.at(budget, standings.primary)
        names = [entry.objective for entry in entries if not entry.shipped]
        trained += [f"{', '.join(names)} at {flops_text(budget)}"] if names else []
    if not trained:
        return ["All rows ship with the plan."]
    return [f"Run here: {'; '.join(trained)}; all other rows ship with the plan."]


def record(standings: Standings, entry: Entry) -> dict[str, Any]:
    """Return the unrounded numbers of a row, for csv."""
    name = standings.primary.name
    line: dict[str, Any] = {"objective": entry.objective, "flops": entry.budget, "metric": name}
    hidden = bool(entry.about(name, VOID, REFUSE))
    parts = {"": {} if hidden else entry.scores} | {
        "untrained_": entry.untrained,
        "shuffled_": entry.shuffled,
    }
    for prefix, scores in parts.items():
        summary = summarise(scores.get(name, ()))
        line[f"{prefix}n"] = summary.n if summary else 0
        line[f"{prefix}mean"] = summary.centre if summary else None
        line[f"{prefix}sd"] = summary.high - summary.centre if summary and summary.n > 1 else None
    decision = entry.decision
    low, high = (decision and decision.interval) or (None, None)
    line |= {"difference": decision.difference if decision else None, "low": low, "high": high}
    line |= {"p": decision.p if decision else None}
    line |= {"p_holm": decision.corrected if decision else None}
    line |= {"verdict": decision.verdict if decision else None}
    line |= {"seeds_that_decide": decision.seeds if decision else None}
    line["findings"] = "; ".join(f"{f.action} {f.gate}: {f.reason}" for f in entry.findings)
    for metric in (*standings.metrics[1:], *standings.parts):
        summary = summarise(entry.scores.get(metric.name, ()))
        is_shown = summary and not entry.about(metric.name, VOID, REFUSE)
        line[metric.name] = summary.centre if summary and is_shown else None
    return line
