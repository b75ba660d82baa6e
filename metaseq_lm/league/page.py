"""The files of a league: standings as text, Markdown, csv, JSON and html, with figures.

A void row has only the reason and no number; a flagged row has a letter and is neither ranked nor
tested.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from metaseq_lm.core.files import write_atomic
from metaseq_lm.league import columns
from metaseq_lm.league.columns import column_table
from metaseq_lm.league.describe import (
    describe_all,
    describe_answer,
    describe_certainty,
    describe_findings,
    describe_gains,
)
from metaseq_lm.league.entries import Standings, StandingsEntry
from metaseq_lm.league.figures import draw_kinds, draw_ladder, draw_standings
from metaseq_lm.league.ladder_tables import ladder_tables, predictions_table
from metaseq_lm.league.standings import ACTIONS, FLAG, NOTE, GateFinding
from metaseq_lm.reporting.canvas import Drawing, collect
from metaseq_lm.reporting.formats import to_csv, to_markdown, to_text
from metaseq_lm.reporting.numbers import Metric, flops_text
from metaseq_lm.reporting.page import Page, Section, render
from metaseq_lm.reporting.table import Table

REPEAT = Section("To repeat it")

_FINDING = ("objective", "FLOPs", "gate", "action", "of", "reason")
_PICTURES = ("kinds", "ladder", "standings")  # the first that is drawn is next to the answer


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
    tables = [standings_table(standings), *_other_tables(standings)]
    for name in ("kinds.png", "ladder.png", "predictions.csv"):
        (folder / name).unlink(missing_ok=True)  # of an earlier page
    drawn = {"standings.png": draw_standings}
    if standings.kinds:
        drawn["kinds.png"] = draw_kinds
    if len(standings.budgets) > 1:
        drawn["ladder.png"] = draw_ladder
    with collect() as drawings:
        for name, draw in drawn.items():
            draw(standings, folder / name)
    texts = {
        "standings.txt": "\n".join(map(to_text, tables)),
        "standings.md": "\n".join(map(to_markdown, tables)),
        "standings.csv": to_csv(tables[0]),
        "standings.html": render(_html_page(standings, tables, drawings, repeat, reload)),
    }
    if standings.predictions:
        texts["predictions.csv"] = to_csv(predictions_table(standings))
    for name, text in texts.items():
        write_atomic(folder / name, text.encode("utf-8"))
    return [folder / name for name in (*texts, *drawn)]


def standings_table(standings: Standings) -> Table:
    """Return the rows by budget, with the reasons and the basis of the verdicts as notes."""
    names = (*columns.STANDINGS, *columns.plugin_columns())
    table = column_table(standings, names, standings.title, describe_all(standings))
    return replace(table, records=[columns.record(standings, entry) for entry in standings.ordered])


def _other_tables(standings: Standings) -> list[Table]:
    """Return the tables by kind of labels, of gains, of ladders and of the other metrics."""
    tables, primary, spread = [], standings.primary, "mean ± sample sd over seeds"
    if standings.kinds:
        note = (
            "Each kind of labels has its own verdicts, by the rule of the primary metric, "
            "corrected within the kind."
        )
        rows = []
        for budget in standings.budgets:
            for view in map(standings.about, standings.kinds):
                rows += [(view, entry) for entry in standings.at(budget)]
        heads = standings.about(Metric("score", percent=False, lower_is_better=False))
        title = f"By kind of labels: {spread}"
        tables.append(column_table(heads, columns.KINDS, title, [note], rows))
    if standings.has_gains:
        title = f"Gains over untrained models: {primary.title}, mean ± sd of a run less an "
        title += "untrained one"
        rows = [(standings, entry) for entry in standings.ordered if entry.gain(primary.name)]
        notes = [describe_gains(standings)]
        tables.append(column_table(standings, columns.GAINS, title, notes, rows))
    tables += ladder_tables(standings)
    if standings.metrics[1:]:
        notes = [
            "The best is marked, but nothing is tested: the plan decides by its primary metric."
        ]
        for metric in standings.metrics[1:]:
            lines = describe_findings(standings.about(metric), about_all=False)
            notes += [f"{metric.name}: {line}" for line in lines]
        title = f"Other metrics: {spread}"
        tables.append(column_table(standings, columns.OTHERS, title, notes))
    return tables


def standings_document(standings: Standings) -> dict[str, Any]:
    """Return the standings for JSON, see docs/reference/json.md."""
    metric, rule, rows = standings.primary, standings.rule, []
    for entry in standings.ordered:
        findings = []
        for item in entry.findings:
            findings.append({**vars(item), "metric": item.metric or None})
        rows.append(
            {**columns.record(standings, entry), "findings": findings, "shipped": entry.shipped}
        )
    return {
        "plan": dict(zip(("name", "hash"), standings.plan)),
        "title": standings.title,
        "metric": metric.name,
        "better": metric.better,
        "baseline": standings.baseline,
        "kinds": [kind.name for kind in standings.kinds],
        "rule": {
            "level": rule.level,
            "smallest_effect": rule.smallest_effect,
            "comparisons": standings.comparisons,
            "sides": 2,
        },
        "rows": rows,
        "references": standings.references,
        "notes": [*standings.remarks, *standings.notes],
    }


# ---------------------------------------------------------------- the html page


def _html_page(
    standings: Standings,
    tables: Sequence[Table],
    drawings: Sequence[Drawing],
    repeat: Section,
    reload: int,
) -> Page:
    """Return the page in the order of a reader: answer, picture, table, reasons, the rest."""
    drawn = {drawing.name: drawing for drawing in drawings}
    first = drawn.pop(next(name for name in _PICTURES if name in drawn))
    barring, *others = _finding_tables(standings)
    certainty = [*standings.remarks, *describe_certainty(standings)]
    sections = [
        Section("Standings", drawings=[first], tables=[_overview(standings)]),
        Section(barring.title, tables=[replace(barring, title="")]),
        Section("How sure this is", certainty),
    ]
    main = replace(tables[0], title="All columns", notes=[])
    of_metrics = tuple(f"{metric.name}: " for metric in standings.metrics)
    for table in (main, *tables[1:], *others, _reference_table(standings)):
        # The tables of findings have the reasons.
        notes = [note for note in table.notes if not note.startswith(of_metrics)]
        title, _, about = table.title.partition(": ")
        shown = replace(table, title=about.capitalize(), notes=notes)
        sections.append(Section(title, tables=[shown], closed=True))
    for name, drawing in drawn.items():
        sections.append(Section(f"Figure: {name}", drawings=[drawing], closed=True))
    origin = [*standings.notes, *repeat.notes]
    sections.append(Section(repeat.title, origin, texts=repeat.texts, closed=True))
    by = "for which kind of end task" if standings.kinds else f"by {standings.primary.name}"
    question = f"Which objective is best {by}, at equal compute, beside {standings.baseline}?"
    lead = question, describe_answer(standings)
    return Page(standings.plan[0] or standings.title, sections, reload, lead, standings.title)


def _overview(standings: Standings) -> Table:
    rows = []
    for budget in standings.budgets[::-1]:
        rows += [(standings, entry) for entry in standings.at(budget)]
    unused = {"budget"} if len(standings.budgets) == 1 else set()
    unused |= {"difference", "interval", "p"} if standings.kinds else set()
    names = [name for name in columns.OVERVIEW if name not in unused]
    note = (
        f"Mean ± sd over seeds, with the mark of the verdict beside {standings.baseline}: "
        "+ better, - worse, = equivalent, none undecided; ? a gate flags it."
    )
    return column_table(standings, names, "", [note] * bool(standings.kinds), rows)


def _reference_table(standings: Standings) -> Table:
    known = {metric: standings.references.get(metric.name) or {} for metric in standings.metrics}
    names, rows = dict.fromkeys(chain.from_iterable(known.values())), []
    for metric, values in known.items():
        if values:
            texts = [metric.text(values[name]) if name in values else "-" for name in names]
            rows.append([metric.title, *texts])
    return Table.of_texts(["metric", *names], rows, tuple(names), "What needs no training")


def _finding_tables(standings: Standings) -> list[Table]:
    """Return the findings that exclude rows, those that exclude other numbers, and the notes."""
    groups: dict[str, list[tuple[StandingsEntry, GateFinding]]] = {
        "Why rows are not ranked": [],
        "Why numbers of other metrics are not ranked": [],
        "Notes of gates": [],
    }
    barring, others, notes = groups.values()
    for entry in standings.ordered:
        for finding in entry.findings:
            group = barring if finding.metric in ("", standings.primary.name) else others
            if finding.action == NOTE:
                group = notes
            group.append((entry, finding))
    barring.sort(key=lambda pair: (-pair[0].budget, ACTIONS.index(pair[1].action)))
    by_metric = {x.name: columns.letters(standings.about(x)) for x in standings.metrics}
    tables = []
    for title, pairs in groups.items():
        rows = []
        for entry, finding in pairs:
            action = columns.NOT_RANKED.get(finding.action, finding.action)
            by_gate = by_metric.get(finding.metric, by_metric[standings.primary.name])
            if finding.action == FLAG and finding.gate in by_gate:
                action += f" ({by_gate[finding.gate]})"  # the letter next to the score
            of, flops = finding.metric or "all metrics", flops_text(entry.budget)
            rows.append([entry.objective, flops, finding.gate, action, of, finding.reason])
        tables.append(Table.of_texts(_FINDING, rows, ("FLOPs",), title))
    return tables
