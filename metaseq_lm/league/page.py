"""The page of a league: standings as text, Markdown, csv and html, with figures.

A row has its scores and verdict, its controls, and its gain over the untrained model with a
separate verdict. A void row has only the reason and no number; a flagged row has a letter and is
neither ranked nor tested.
"""

from pathlib import Path
from typing import Any

from metaseq_lm.core.files import write_atomic
from metaseq_lm.league.by_kind import kinds_record, kinds_table
from metaseq_lm.league.cells import (
    choice_text,
    decision_texts,
    gain_text,
    interval_title,
    score_text,
    signed_texts,
    summary_text,
)
from metaseq_lm.league.describe import describe_origins, describe_rule
from metaseq_lm.league.entries import Entry, Standings
from metaseq_lm.league.figures import draw_ladder, draw_standings
from metaseq_lm.league.html import league_sections
from metaseq_lm.league.kind_figures import draw_kinds
from metaseq_lm.league.ladder_tables import ladder_tables, predictions_table
from metaseq_lm.league.parts import describe_parts, part_texts, short_name
from metaseq_lm.league.standings import FLAG, NOTE, REFUSE, VOID
from metaseq_lm.league.verdict import VERDICTS
from metaseq_lm.reporting.drawing import collect
from metaseq_lm.reporting.formats import to_csv, to_markdown, to_text
from metaseq_lm.reporting.numbers import Metric, flops_text, summarise
from metaseq_lm.reporting.page import Page, Section, render
from metaseq_lm.reporting.table import Cell, Table

REPEAT = Section("To repeat it")


def write_page(
    standings: Standings, folder: Path, repeat: Section = REPEAT, reload: int = 0
) -> list[Path]:
    """Write standings.txt, .md, .csv, .html and .png.

    Several budgets add ladder.png, kinds of labels kinds.png, and predictions predictions.csv.

    Args:
        standings: Standings with decisions.
        folder: The folder of the files.
        repeat: The last section of the html page: plan and commands.
        reload: Seconds after which the html page reloads itself, 0 for never.

    Returns:
        The paths, standings.txt first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = standings_table(standings)
    others = [kinds_table(standings), gains_table(standings), *ladder_tables(standings)]
    others.append(secondary_table(standings))
    tables = [table, *(other for other in others if other)]
    pictures = []
    with collect() as drawings:
        for name, draw, is_drawn in (
            ("standings", draw_standings, True),
            ("kinds", draw_kinds, bool(standings.kinds)),
            ("ladder", draw_ladder, len(standings.budgets) > 1),
        ):
            picture = folder / f"{name}.png"
            if is_drawn:
                draw(standings, picture)
                pictures.append(picture)
            else:
                picture.unlink(missing_ok=True)  # of an earlier page
    sections = league_sections(standings, tables, drawings, repeat)
    texts = {
        "txt": "\n".join(map(to_text, tables)),
        "md": "\n".join(map(to_markdown, tables)),
        "csv": to_csv(table),
        "html": render(Page(standings.title, sections, reload)),
    }
    paths = []
    for ending, text in texts.items():
        paths.append(folder / f"standings.{ending}")
        write_atomic(paths[-1], text.encode("utf-8"))
    predictions = folder / "predictions.csv"
    if standings.predictions:
        write_atomic(predictions, to_csv(predictions_table(standings)).encode("utf-8"))
        pictures.append(predictions)
    else:
        predictions.unlink(missing_ok=True)
    return paths + pictures


def standings_table(standings: Standings) -> Table:
    """Return the rows by budget: primary metric and the means of its parts, controls, verdicts.

    Reasons and the basis of the verdicts follow as notes.
    """
    metric = standings.primary
    has_shuffled = any(entry.shuffled for entry in standings.entries)
    has_updates = any(entry.updates is not None for entry in standings.entries)
    head = ["FLOPs", "objective", "seeds", *["updates"] * has_updates, metric.title]
    head += ["sd of choice"] * standings.has_choices
    head += [*map(short_name, standings.parts), "untrained"]
    head += ["shuffled"] * has_shuffled
    head += ["difference", interval_title(standings.rule), "p (Holm)", "verdict"]
    head += ["gain", "verdict on the gain"] * standings.has_gains
    rows, records = [], []
    for budget in standings.budgets:
        best = _best_text(standings, budget, metric)
        for entry in standings.at(budget, metric):
            text = score_text(standings, entry, metric)
            row = [Cell(flops_text(budget)), Cell(entry.objective, number=False)]
            row.append(Cell(str(len(entry.scores.get(metric.name, ())))))
            if has_updates:
                row.append(Cell("-" if entry.updates is None else f"{entry.updates:,.0f}"))
            row.append(Cell(text, best=text == best))
            if standings.has_choices:
                row.append(Cell(choice_text(entry, metric)))
            row += map(Cell, part_texts(standings, entry))
            controls = [entry.untrained, entry.shuffled][: 1 + has_shuffled]
            row += [Cell(summary_text(scores, metric)) for scores in controls]
            row += map(Cell, decision_texts(entry.decision, metric))
            row.append(Cell(standings.verdict_text(entry), number=False))
            if standings.has_gains:
                row.append(Cell(gain_text(entry.gain(metric.name), metric)))
                row.append(Cell(gain_verdict(entry, metric), number=False))
            rows.append(row)
            records.append(record(standings, entry))
    notes = [*summaries(standings), *describe_parts(standings)]
    notes += [*_reasons(standings, metric), *references(standings)]
    notes += [describe_rule(standings), *describe_origins(standings)]
    notes += [*standings.remarks, *standings.notes]
    return Table(standings.title, head, rows, notes, records)


def gains_table(standings: Standings) -> Table | None:
    """Return the gains of training in the primary metric by budget; None without untrained models.

    A gain is the score minus the untrained model's score. The table also has its difference from
    the baseline's gain, with a verdict.
    """
    metric, interval = standings.primary, interval_title(standings.rule)
    if not standings.has_gains:
        return None
    head = ["FLOPs", "objective", "untrained", "gain", interval, "difference", interval]
    head += ["p (Holm)", "verdict on the gain"]
    rows = []
    for budget in standings.budgets:
        for entry in standings.at(budget, metric):
            if (gain := entry.gain(metric.name)) is None:
                continue
            row = [Cell(flops_text(budget)), Cell(entry.objective, number=False)]
            row += [Cell(summary_text(entry.untrained, metric)), Cell(gain_text(gain, metric))]
            ends = gain.interval(standings.rule.level)
            _, *texts = signed_texts(gain.mean, ends, metric)
            row.append(Cell(" to ".join(texts) or "-"))
            row += map(Cell, decision_texts(entry.gain_decision, metric))
            row.append(Cell(gain_verdict(entry, metric), number=False))
            rows.append(row)
    title = f"Gains over untrained models: {metric.title}, mean ± sd of a run less an untrained one"
    return Table(title, head, rows, [_describe_gains(standings)])


def secondary_table(standings: Standings) -> Table | None:
    """Return the other metrics of the same rows, without tests; None if there are none."""
    metrics = standings.metrics[1:]
    if not metrics:
        return None
    rows = []
    for budget in standings.budgets:
        best = {metric.name: _best_text(standings, budget, metric) for metric in metrics}
        for entry in standings.at(budget, standings.primary):
            row = [Cell(flops_text(budget)), Cell(entry.objective, number=False)]
            for metric in metrics:
                text = score_text(standings, entry, metric)
                row.append(Cell(text, best=text == best[metric.name]))
            rows.append(row)
    titles = [metric.title for metric in metrics]
    notes = ["The best is marked, nothing is tested: the plan decides by its primary metric."]
    for metric in metrics:
        notes += [f"{metric.name}: {line}" for line in _reasons(standings, metric, about_all=False)]
    return Table(
        "Other metrics: mean ± sample sd over seeds", ["FLOPs", "objective", *titles], rows, notes
    )


def _best_text(standings: Standings, budget: float, metric: Metric) -> str | None:
    """Return the cell of the best ranked row of a budget, None if less than two are ranked."""
    ranked = [e for e in standings.at(budget, metric) if e.is_ranked(metric.name)]
    return score_text(standings, ranked[0], metric) if len(ranked) > 1 else None


def summaries(standings: Standings) -> list[str]:
    """Return a sentence with the verdicts for each budget."""
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


def _reasons(standings: Standings, metric: Metric, about_all: bool = True) -> list[str]:
    """Return reasons of gates, flags with their letters first; `about_all` includes whole rows."""
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
    """Return a sentence for each metric on scores that need no training."""
    lines = []
    for metric in standings.metrics:
        if values := standings.references.get(metric.name):
            texts = [f"{name} {metric.text(value)}" for name, value in values.items()]
            lines.append(f"Without training, {metric.title}: {', '.join(texts)}.")
    return lines


def gain_verdict(entry: Entry, metric: Metric) -> str:
    """Return the verdict on a row's gain in words, "" without one."""
    decision = entry.stated_gain(metric.name)
    return decision.text if decision else ""


def _describe_gains(standings: Standings) -> str:
    """Return how the verdicts on gains came about."""
    rule = standings.rule
    count = sum(entry.gain_decision is not None for entry in standings.entries)
    return (
        f"The plan decides by the score; the verdict on the gain is secondary, and tells a head "
        "start from what was learnt. The difference is that of two gains, those of the row and of "
        f"{standings.baseline}, each over its own untrained models: Welch's t test and interval of "
        "four means, and a permutation test of the scores less the means of the untrained ones, "
        f"corrected among themselves for {max(rule.comparisons, count)} comparisons. Seeds that "
        "would decide are runs and untrained models of each."
    )


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
    if standings.has_choices:
        line["sd_of_choice"] = None if hidden else entry.sds_of_choice.get(standings.primary.name)
    decision = entry.decision
    low, high = (decision and decision.interval) or (None, None)
    line |= {"difference": decision.difference if decision else None, "low": low, "high": high}
    line |= {"p": decision.p if decision else None}
    line |= {"p_holm": decision.corrected if decision else None}
    line |= {"verdict": decision.verdict if decision else None}
    line |= {"seeds_that_decide": decision.seeds if decision else None}
    line |= {"updates": entry.updates, **_gain_record(standings, entry)}
    line["findings"] = "; ".join(f"{f.action} {f.gate}: {f.reason}" for f in entry.findings)
    line |= kinds_record(standings, entry)
    for metric in (*standings.metrics[1:], *standings.parts, *standings.kinds):
        summary = summarise(entry.scores.get(metric.name, ()))
        is_shown = summary and not entry.about(metric.name, VOID, REFUSE)
        line[metric.name] = summary.centre if summary and is_shown else None
    return line


def _gain_record(standings: Standings, entry: Entry) -> dict[str, Any]:
    """Return the unrounded numbers of the gain of a row, for csv."""
    gain, decision = entry.gain(standings.primary.name), entry.gain_decision
    ends = (gain and gain.interval(standings.rule.level)) or (None, None)
    line: dict[str, Any] = {"gain": gain and gain.mean, "gain_sd": gain and gain.sd}
    line |= {"gain_low": ends[0], "gain_high": ends[1]}
    low, high = (decision and decision.interval) or (None, None)
    line |= {"gain_difference": decision.difference if decision else None}
    line |= {"gain_difference_low": low, "gain_difference_high": high}
    line |= {"gain_p": decision.p if decision else None}
    line |= {"gain_p_holm": decision.corrected if decision else None}
    line |= {"gain_verdict": decision.verdict if decision else None}
    return line | {"gain_seeds_that_decide": decision.seeds if decision else None}
