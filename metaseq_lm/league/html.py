"""The page of a league in the order of a reader: answer, picture, table, reasons, the rest."""

from collections.abc import Sequence
from dataclasses import replace

from metaseq_lm.league.columns import NOT_RANKED, OVERVIEW, column_table, letters
from metaseq_lm.league.describe import (
    describe_answer,
    describe_certainty,
    describe_origins,
    describe_question,
)
from metaseq_lm.league.entries import Entry, Standings
from metaseq_lm.league.ladder_tables import describe_crossovers, describe_decisions
from metaseq_lm.league.standings import FLAG, NOTE, REFUSE, VOID, Finding
from metaseq_lm.reporting.drawing import Drawing
from metaseq_lm.reporting.numbers import flops_text
from metaseq_lm.reporting.page import Page, Section
from metaseq_lm.reporting.table import Table

_ACTIONS = (VOID, REFUSE, FLAG)  # actions that exclude a row, in this order
_FINDING = ("objective", "FLOPs", "gate", "action", "of", "reason")
_PICTURES = ("kinds", "ladder", "standings")  # the first that is drawn is next to the answer


def league_page(
    standings: Standings,
    tables: Sequence[Table],
    drawings: Sequence[Drawing],
    repeat: Section,
    reload: int = 0,
) -> Page:
    """Return the page; the first table has the standings."""
    drawn = {drawing.name: drawing for drawing in drawings}
    first = drawn.pop(next(name for name in _PICTURES if name in drawn))
    barring, *others = finding_tables(standings)
    certainty = [*describe_certainty(standings), *describe_crossovers(standings)]
    certainty += [*describe_decisions(standings), *describe_origins(standings)]
    sections = [
        Section("Standings", drawings=[first], tables=[overview(standings)]),
        Section(barring.title, tables=[replace(barring, title="")]),
        Section("How sure this is", [*standings.remarks, *certainty]),
    ]
    main = replace(tables[0], title="All columns", notes=[])
    of_metrics = tuple(f"{metric.name}: " for metric in standings.metrics)
    for table in (main, *tables[1:], *others, _reference_table(standings)):
        # The tables of findings have the reasons.
        notes = [note for note in table.notes if not note.startswith(of_metrics)]
        title, *about = table.title.split(": ", 1)
        shown = replace(table, title=about[0].capitalize() if about else "", notes=notes)
        sections.append(Section(title, tables=[shown], closed=True))
    sections += [
        Section(f"Figure: {name}", drawings=[drawing], closed=True)
        for name, drawing in drawn.items()
    ]
    origin = [*standings.notes, *repeat.notes]
    sections.append(Section(repeat.title, origin, texts=repeat.texts, closed=True))
    lead = describe_question(standings), describe_answer(standings)
    return Page(standings.plan[0] or standings.title, sections, reload, lead, standings.title)


def overview(standings: Standings) -> Table:
    """Return the scores with their verdicts, by kind of labels if there are any."""
    rows = [
        (standings, entry) for budget in standings.budgets[::-1] for entry in standings.at(budget)
    ]
    has_kinds, has_budgets = bool(standings.kinds), len(standings.budgets) > 1
    unused = {"budget"} if not has_budgets else set()
    unused |= {"difference", "interval", "p"} if has_kinds else set()
    names = [name for name in OVERVIEW if name not in unused]
    note = (
        f"Mean ± sd over seeds, with the mark of the verdict beside {standings.baseline}: "
        "+ better, - worse, = equivalent, none undecided; ? a gate flags it."
    )
    return column_table(standings, names, "", [note] * has_kinds, rows)


def _reference_table(standings: Standings) -> Table:
    """Return a table of scores that need no training."""
    known = {metric: standings.references.get(metric.name) or {} for metric in standings.metrics}
    names: dict[str, None] = {}
    for values in known.values():
        names.update(dict.fromkeys(values))
    rows = []
    for metric, values in known.items():
        if values:
            texts = [metric.text(values[name]) if name in values else "-" for name in names]
            rows.append([metric.title, *texts])
    return Table.of_texts(["metric", *names], rows, tuple(names), "What needs no training")


def finding_tables(standings: Standings) -> list[Table]:
    """Return the findings that exclude rows, those that exclude other numbers, and the notes."""
    groups: dict[str, list[tuple[Entry, Finding]]] = {
        "Why rows are not ranked": [],
        "Why numbers of other metrics are not ranked": [],
        "Notes of gates": [],
    }
    barring, others, notes = groups.values()
    for entry in standings.ordered:
        for finding in entry.findings:
            is_primary = finding.metric in ("", standings.primary.name)
            group = notes if finding.action == NOTE else barring if is_primary else others
            group.append((entry, finding))
    barring.sort(key=lambda pair: (-pair[0].budget, _ACTIONS.index(pair[1].action)))
    tables = []
    for title, pairs in groups.items():
        rows = [_finding_row(standings, *pair) for pair in pairs]
        tables.append(Table.of_texts(_FINDING, rows, ("FLOPs",), title))
    return tables


def _finding_row(standings: Standings, entry: Entry, finding: Finding) -> list[str]:
    """Return a row of a table of findings; a flag has the letter next to the score."""
    action = NOT_RANKED.get(finding.action, finding.action)
    if finding.action == FLAG:
        metrics = {metric.name: metric for metric in standings.metrics}
        about = standings.about(metrics.get(finding.metric, standings.primary))
        by_gate = letters(about)
        action = f"{action} ({by_gate[finding.gate]})" if finding.gate in by_gate else action
    of = finding.metric or "all metrics"
    return [entry.objective, flops_text(entry.budget), finding.gate, action, of, finding.reason]
