"""The sections of a league's page: verdicts, controls and gates, tables and figures, the plan."""

from collections.abc import Sequence
from dataclasses import replace

from metaseq_lm.league.describe import describe_origins, describe_rule
from metaseq_lm.league.entries import NOT_RANKED, Entry, Standings
from metaseq_lm.league.parts import describe_parts
from metaseq_lm.league.standings import FLAG, NOTE, REFUSE, VOID, Finding
from metaseq_lm.league.verdict import VERDICTS
from metaseq_lm.reporting.drawing import Drawing
from metaseq_lm.reporting.numbers import flops_text
from metaseq_lm.reporting.page import HtmlTable, Section, html_table, text_table
from metaseq_lm.reporting.table import Table

_FIRST = ("FLOPs", "objective", "verdict")  # columns of the standings
_FINDING = ("FLOPs", "objective", "gate", "action", "of", "reason")
_ACTIONS = (VOID, REFUSE, FLAG)  # actions that exclude a row, in this order


def league_sections(
    standings: Standings, tables: Sequence[Table], drawings: Sequence[Drawing], repeat: Section
) -> list[Section]:
    """Return the sections; the first table has the standings."""
    main, *others = tables
    about = [*describe_origins(standings), *standings.remarks, describe_rule(standings)]
    return [
        Section(
            "Verdicts",
            about,
            tables=[verdict_table(standings), _main_table(standings, main)],
        ),
        Section(
            "Controls and gates",
            describe_parts(standings),
            tables=[*_reference_tables(standings), *finding_tables(standings)],
        ),
        Section("Figures", drawings=drawings),
        *(_other_section(standings, table) for table in others),
        Section(repeat.title, [*standings.notes, *repeat.notes], texts=repeat.texts),
    ]


def _main_table(standings: Standings, table: Table) -> HtmlTable:
    """Return the table of standings with the verdict next to the objective."""
    order = [*_FIRST, *(title for title in table.head if title not in _FIRST)]
    columns = [table.head.index(title) for title in order]
    rows = [[row[i] for i in columns] for row in table.rows]
    moved = Table(table.title, order, rows, [])
    return html_table(moved, f"Standings by {standings.primary.title}, mean ± sd over seeds")


def _other_section(standings: Standings, table: Table) -> Section:
    """Return a section with a table, named after the start of its title.

    Notes on findings about single metrics are left out, since the findings have them.
    """
    of_metrics = tuple(f"{metric.name}: " for metric in standings.metrics)
    notes = [note for note in table.notes if not note.startswith(of_metrics)]
    return Section(table.title.partition(":")[0], tables=[html_table(table, table.title, notes)])


def verdict_table(standings: Standings) -> HtmlTable:
    """Return the objectives by verdict, a row for each budget."""
    name, rows = standings.primary.name, []
    for budget in standings.budgets:
        by_verdict: dict[str, list[str]] = {verdict: [] for verdict in VERDICTS}
        outside = []
        for entry in standings.at(budget, standings.primary):
            if decision := entry.stated(name):
                by_verdict[decision.verdict].append(entry.objective)
            elif not entry.is_ranked(name):
                outside.append(entry.objective)
        names = [", ".join(objectives) for objectives in (*by_verdict.values(), outside)]
        rows.append([flops_text(budget), *names])
    title = f"Beside {standings.baseline}, by {standings.primary.title}"
    return text_table(["FLOPs", *VERDICTS, "not ranked"], rows, right=("FLOPs",), title=title)


def _reference_tables(standings: Standings) -> list[HtmlTable]:
    """Return a table of scores that need no training; [] without such scores."""
    known = {metric: standings.references.get(metric.name) or {} for metric in standings.metrics}
    names: dict[str, None] = {}
    for values in known.values():
        names.update(dict.fromkeys(values))
    rows = []
    for metric, values in known.items():
        if values:
            texts = [metric.text(values[name]) if name in values else "-" for name in names]
            rows.append([metric.title, *texts])
    title = "What needs no training"
    return [text_table(["metric", *names], rows, right=tuple(names), title=title)] if rows else []


def finding_tables(standings: Standings) -> list[HtmlTable]:
    """Return tables of findings: why rows are not ranked and, closed, the other findings."""
    barring: list[tuple[Entry, Finding]] = []
    others: list[tuple[Entry, Finding]] = []
    notes: list[tuple[Entry, Finding]] = []
    for budget in standings.budgets:
        for entry in standings.at(budget, standings.primary):
            for finding in entry.findings:
                is_primary = finding.metric in ("", standings.primary.name)
                rows = notes if finding.action == NOTE else barring if is_primary else others
                rows.append((entry, finding))
    barring.sort(key=lambda pair: _ACTIONS.index(pair[1].action))
    tables = []
    for title, rows in (
        ("What bars rows from the ranking", barring),
        ("What bars numbers of other metrics", others),
        ("Notes, which bar nothing", notes),
    ):
        if rows:
            texts = [_finding_row(standings, *row) for row in rows]
            closed = "" if rows is barring else f"{title} ({len(rows)})"
            table = text_table(_FINDING, texts, right=("FLOPs",), title=title, closed=closed)
            tables.append(replace(table, look="small"))
    return tables


def _finding_row(standings: Standings, entry: Entry, finding: Finding) -> list[str]:
    """Return a row of a table of findings; a flag has the letter next to the score."""
    action = NOT_RANKED.get(finding.action, finding.action)
    if finding.action == FLAG:
        letters = standings.letters(finding.metric or standings.primary.name)
        action = f"{action} ({letters[finding.gate]})" if finding.gate in letters else action
    of = finding.metric or "all metrics"
    return [flops_text(entry.budget), entry.objective, finding.gate, action, of, finding.reason]
