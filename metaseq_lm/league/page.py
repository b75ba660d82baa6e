"""The files of a league: standings as text, Markdown, csv, JSON and html, with figures.

A void row has only the reason and no number; a flagged row has a letter and is neither ranked nor
tested.
"""

from pathlib import Path
from typing import Any

from metaseq_lm.core.files import write_atomic
from metaseq_lm.league.columns import (
    GAINS,
    KINDS,
    OTHERS,
    STANDINGS,
    column_table,
    plugin_columns,
    record,
)
from metaseq_lm.league.describe import (
    describe_findings,
    describe_gains,
    describe_origins,
    describe_parts,
    describe_references,
    describe_rule,
    describe_verdicts,
)
from metaseq_lm.league.entries import Standings
from metaseq_lm.league.figures import draw_kinds, draw_ladder, draw_standings
from metaseq_lm.league.html import league_page
from metaseq_lm.league.ladder_tables import ladder_tables, predictions_table
from metaseq_lm.reporting.drawing import collect
from metaseq_lm.reporting.formats import to_csv, to_markdown, to_text
from metaseq_lm.reporting.numbers import Metric
from metaseq_lm.reporting.page import Section, render
from metaseq_lm.reporting.table import Table

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
    tables = [standings_table(standings), *other_tables(standings)]
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
    texts = {
        "standings.txt": "\n".join(map(to_text, tables)),
        "standings.md": "\n".join(map(to_markdown, tables)),
        "standings.csv": to_csv(tables[0]),
        "standings.html": render(league_page(standings, tables, drawings, repeat, reload)),
    }
    predictions = folder / "predictions.csv"
    predictions.unlink(missing_ok=True)
    for name, text in texts.items():
        write_atomic(folder / name, text.encode("utf-8"))
    if standings.predictions:
        write_atomic(predictions, to_csv(predictions_table(standings)).encode("utf-8"))
        pictures.append(predictions)
    return [*(folder / name for name in texts), *pictures]


def standings_table(standings: Standings) -> Table:
    """Return the rows by budget, with the reasons and the basis of the verdicts as notes."""
    notes = [*describe_verdicts(standings), *describe_parts(standings)]
    notes += [*describe_findings(standings), *describe_references(standings)]
    notes += [describe_rule(standings), *describe_origins(standings)]
    notes += [*standings.remarks, *standings.notes]
    table = column_table(standings, (*STANDINGS, *plugin_columns()), standings.title, notes)
    records = [record(standings, entry) for entry in standings.ordered]
    return Table(table.title, table.head, table.rows, notes, records)


def other_tables(standings: Standings) -> list[Table]:
    """Return the tables by kind of labels, of gains, of ladders and of the other metrics."""
    tables = [kinds_table(standings)] if standings.kinds else []
    tables += [gains_table(standings)] if standings.has_gains else []
    tables += ladder_tables(standings)
    return tables + ([secondary_table(standings)] if standings.metrics[1:] else [])


def kinds_table(standings: Standings) -> Table:
    """Return score and verdict of each kind of labels and row."""
    note = (
        "Each kind of labels has verdicts of its own, by the rule of the primary metric, corrected "
        "among those of the kind."
    )
    rows = [
        (standings.about(kind), entry)
        for budget in standings.budgets
        for kind in standings.kinds
        for entry in standings.at(budget)
    ]
    heads = standings.about(Metric("score", percent=False, lower_is_better=False))
    title = "By kind of labels: mean ± sample sd over seeds"
    return column_table(heads, KINDS, title, [note], rows)


def gains_table(standings: Standings) -> Table:
    """Return the gains over untrained models, with their differences from the baseline's gain."""
    metric = standings.primary
    title = f"Gains over untrained models: {metric.title}, mean ± sd of a run less an untrained one"
    rows = [(standings, entry) for entry in standings.ordered if entry.gain(metric.name)]
    return column_table(standings, GAINS, title, [describe_gains(standings)], rows)


def secondary_table(standings: Standings) -> Table:
    """Return the other metrics of the same rows, without tests."""
    notes = ["The best is marked, nothing is tested: the plan decides by its primary metric."]
    for metric in standings.metrics[1:]:
        lines = describe_findings(standings.about(metric), about_all=False)
        notes += [f"{metric.name}: {line}" for line in lines]
    return column_table(standings, OTHERS, "Other metrics: mean ± sample sd over seeds", notes)


def standings_document(standings: Standings) -> dict[str, Any]:
    """Return the standings for JSON, see docs/reference/json.md."""
    metric, rule, rows = standings.primary, standings.rule, []
    for entry in standings.ordered:
        findings = [
            {"gate": f.gate, "action": f.action, "metric": f.metric or None, "reason": f.reason}
            for f in entry.findings
        ]
        rows.append({**record(standings, entry), "findings": findings, "shipped": entry.shipped})
    name, plan_hash = standings.plan
    compared = sum(entry.decision is not None for entry in standings.entries)
    return {
        "plan": {"name": name, "hash": plan_hash},
        "title": standings.title,
        "metric": metric.name,
        "better": "lower" if metric.lower_is_better else "higher",
        "baseline": standings.baseline,
        "kinds": [kind.name for kind in standings.kinds],
        "rule": {
            "level": rule.level,
            "smallest_effect": rule.smallest_effect,
            "comparisons": max(rule.comparisons, compared),
            "sides": 2,
        },
        "rows": rows,
        "references": standings.references,
        "notes": [*standings.remarks, *standings.notes],
    }
