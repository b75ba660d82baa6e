"""The gates of a league and their findings on its rows.

docs/reference/gates.md lists the gates with remedies.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from metaseq_lm.league import (
    bound_gates,
    collapse_gates,
    control_gates,
    data_gates,
    loss_gates,
    parity_gates,
    score_gates,
)
from metaseq_lm.league.gate import GATES as GATES
from metaseq_lm.league.gate import registered_gates
from metaseq_lm.league.standings import FLAG, NOTE, REFUSE, VOID, Context, GateFinding, Standing
from metaseq_lm.reporting.settings import Row

# Importing these modules registers the gates.
_KINDS = (
    *(parity_gates, data_gates, bound_gates, loss_gates, collapse_gates),
    *(score_gates, control_gates),
)


def _findings_of(row: Row, context: Context) -> tuple[GateFinding, ...]:
    """Return the findings of all gates on a row, in the order of their stages."""
    return tuple(chain.from_iterable(gate(row, context) for gate in registered_gates()))


def examine(context: Context) -> list[Standing]:
    """Return the standings: each row with its findings, in the order of the context."""
    by_row = {row: _findings_of(row, context) for row in context.rows}
    return [
        Standing(row, (*findings, *_of_baseline(row, by_row, context)))
        for row, findings in by_row.items()
    ]


def _of_baseline(
    row: Row, by_row: Mapping[Row, Sequence[GateFinding]], context: Context
) -> Iterator[GateFinding]:
    """Yield what follows from the findings on the baseline, or from its absence."""
    name, baseline = context.baseline, context.baseline_of(row)
    if baseline is None and row.objective != name:
        reason = f"there are no runs of the baseline {name} at this budget"
        yield GateFinding("baseline", NOTE, reason)
    flags: dict[str, None] = {}
    of_baseline = by_row[baseline] if baseline else ()
    for finding in of_baseline:
        if finding.action in (VOID, REFUSE):
            reason = f"the baseline {name}: {finding.reason}"
            yield GateFinding("baseline", REFUSE, reason, finding.metric)
        elif finding.action == FLAG and finding.metric in ("", context.primary):
            flags[finding.gate] = None
    if flags:
        reason = f"nothing is tested against the baseline {name}, flagged: {', '.join(flags)}"
        yield GateFinding("baseline", NOTE, reason, context.primary)
