"""The gates of a league and their findings on its rows.

They judge rows by the content of runs and archives: validations, costs, hashes and results of
suites. docs/reference/gates.md lists the gates with remedies.
"""

from metaseq_lm.core.registry import Registry
from metaseq_lm.league import (
    bound_gates,
    collapse_gates,
    control_gates,
    data_gates,
    loss_gates,
    parity_gates,
    score_gates,
)
from metaseq_lm.league.gate import GATES, Gate, registered_gates
from metaseq_lm.league.standings import FLAG, NOTE, REFUSE, VOID, Context, Finding, Row, Standing

# Importing these modules registers the gates.
KINDS = (
    *(parity_gates, data_gates, bound_gates, loss_gates, collapse_gates),
    *(score_gates, control_gates),
)


def gate_registry() -> Registry[Gate]:
    """Return the registry with all gates of the package and of loaded plug-ins."""
    return GATES


def findings_of(row: Row, context: Context) -> tuple[Finding, ...]:
    """Return the findings of all gates on a row, in the order of their stages."""
    return tuple(finding for gate in registered_gates() for finding in gate(row, context))


def examine(context: Context) -> list[Standing]:
    """Return the standings: each row with its findings, in the order of the context.

    A row is refused if its baseline is void or refused, and gets a finding if it is flagged.
    """
    standings = {row: Standing(row, findings_of(row, context)) for row in context.rows}
    return [_with_baseline(standing, standings, context) for standing in standings.values()]


def _with_baseline(
    standing: Standing, standings: dict[Row, Standing], context: Context
) -> Standing:
    """Return a standing with the findings that follow from its baseline."""
    row, baseline = standing.row, context.baseline_of(standing.row)
    if row.objective == context.baseline:
        return standing
    if baseline is None:
        reason = f"there are no runs of the baseline {context.baseline} at this budget"
        return Standing(row, (*standing.findings, Finding("baseline", NOTE, reason)))
    further, flags = [], []
    for finding in standings[baseline].findings:
        if finding.action in (VOID, REFUSE):
            reason = f"the baseline {context.baseline}: {finding.reason}"
            further.append(Finding("baseline", REFUSE, reason, finding.metric))
        elif finding.action == FLAG and finding.metric in ("", context.primary):
            flags.append(finding.gate)
    if flags:
        gates = ", ".join(dict.fromkeys(flags))
        reason = f"nothing is tested against the baseline {context.baseline}, flagged: {gates}"
        further.append(Finding("baseline", NOTE, reason, context.primary))
    return Standing(row, (*standing.findings, *further))
