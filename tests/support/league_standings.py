"""Standings of rows with chosen numbers, and queries of their findings."""

from dataclasses import replace

import league_rows as make
from league_rows import BRACKETS, TOPIC

from metaseq_lm.league.gates import examine
from metaseq_lm.league.standings import ACTIONS, NOTE, GateFinding, Standing
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Row


def standing(*rows: Row, **context: object) -> Standing:
    """Return the standing of the last row."""
    return examine(make.make_context(*rows, **context))[-1]


def said(*rows: Row, **context: object) -> dict[str, GateFinding]:
    """Return the findings on the last row by gate, the last one of each."""
    return {finding.gate: finding for finding in standing(*rows, **context).findings}


def only(findings: tuple[GateFinding, ...], gate: str) -> GateFinding:
    """Return the only finding of a gate."""
    (finding,) = [finding for finding in findings if finding.gate == gate]
    return finding


def all_of(gate: str, *rows: Row) -> list[GateFinding]:
    """Return the findings of a gate in all rows."""
    standings = examine(make.make_context(*rows))
    return [finding for result in standings for finding in result.findings if finding.gate == gate]


def action_of(result: Standing, metric: str) -> str:
    """Return the most severe action of the findings about a metric, "" without findings."""
    actions = {finding.action for finding in result.findings if finding.metric in ("", metric)}
    return next((action for action in ACTIONS if action in actions), "")


def is_ranked(result: Standing, metric: str) -> bool:
    """Return whether a row has a score and no finding excludes it from the ranking."""
    return action_of(result, metric) in (NOTE, "") and bool(result.row.scores(metric))


def of_a_mean(*rows: Row) -> tuple[Row, ...]:
    """Return rows with the metric "both" in their runs, the mean of the two others."""
    means = {"both": (BRACKETS, TOPIC)}

    def edit(run: Run) -> Run:
        return replace(run, means=means)

    changed = []
    for row in rows:
        control = of_a_mean(row.control)[0] if row.control else None
        untrained = tuple(map(edit, row.untrained))
        shuffled = tuple(map(edit, row.shuffled))
        row = replace(row, control=control, untrained=untrained, shuffled=shuffled)
        changed.append(make.change(row, edit))
    return tuple(changed)
