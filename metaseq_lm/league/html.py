"""The sections of a league's page: verdicts, controls and gates, tables and figures, the plan."""

from collections.abc import Sequence

from metaseq_lm.league.entries import NOT_RANKED, Entry, Standings
from metaseq_lm.league.page import describe_origins, describe_rule, references
from metaseq_lm.league.parts import describe_parts
from metaseq_lm.league.standings import FLAG, NOTE, REFUSE, VOID, Finding
from metaseq_lm.league.verdict import VERDICTS
from metaseq_lm.reporting.drawing import Drawing
from metaseq_lm.reporting.numbers import flops_text
from metaseq_lm.reporting.page import HtmlTable, Section, html_table, text_table
from metaseq_lm.reporting.table import Table


def league_sections(
    standings: Standings, tables: Sequence[Table], drawings: Sequence[Drawing], repeat: Section
) -> list[Section]:
    """Return the sections; the first of the tables is that of the standings."""
    main, *others = tables
    about = [*describe_origins(standings), *standings.remarks, describe_rule(standings)]
    return [
        Section(
            "Verdicts",
            about,
            tables=[verdict_table(standings), html_table(main, standings.primary.title, [])],
        ),
        Section(
            "Controls and gates",
            [*references(standings), *describe_parts(standings)],
            tables=finding_tables(standings),
        ),
        Section("Figures", drawings=drawings),
        *(Section(table.title, tables=[html_table(table)]) for table in others),
        Section(repeat.title, [*standings.notes, *repeat.notes], texts=repeat.texts),
    ]


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


def finding_tables(standings: Standings) -> list[HtmlTable]:
    """Return what the gates say: what bars a row from the ranking, and notes, which are closed."""
    findings = []
    for budget in standings.budgets:
        for entry in standings.at(budget, standings.primary):
            findings += [(entry, finding) for finding in entry.findings]
    order = (VOID, REFUSE, FLAG)
    barring = [pair for pair in findings if pair[1].action in order]
    barring.sort(key=lambda pair: order.index(pair[1].action))
    notes = [pair for pair in findings if pair[1].action == NOTE]
    tables = []
    for title, pairs in (("What bars rows from the ranking", barring), ("Notes", notes)):
        if pairs:
            rows = [finding_row(standings, *pair) for pair in pairs]
            closed = f"{len(rows)} notes, which bar nothing" if pairs is notes else ""
            head = ["FLOPs", "objective", "gate", "action", "of", "reason"]
            tables.append(
                text_table(head, rows, right=("FLOPs",), title=title, look="small", closed=closed)
            )
    return tables


def finding_row(standings: Standings, entry: Entry, finding: Finding) -> list[str]:
    """Return a row of a table of findings; a flag has the letter that stands beside the score."""
    action = NOT_RANKED.get(finding.action, finding.action)
    if finding.action == FLAG:
        letters = standings.letters(finding.metric or standings.primary.name)
        action = f"{action} ({letters[finding.gate]})" if finding.gate in letters else action
    of = finding.metric or "all metrics"
    return [flops_text(entry.budget), entry.objective, finding.gate, action, of, finding.reason]
