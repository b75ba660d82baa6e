"""The gates of a league: checks that void, refuse, flag or note a row.

They judge rows by what runs and their archives hold: validations, costs, hashes and the results of
suites. docs/reference/gates.md lists them with what to do.
"""

from collections.abc import Callable, Iterator

from metaseq_lm.league import (
    bound_gates,
    collapse_gates,
    control_gates,
    data_gates,
    loss_gates,
    parity_gates,
    score_gates,
)
from metaseq_lm.league.standings import FLAG, NOTE, REFUSE, VOID, Context, Finding, Row, Standing

Gate = Callable[[Row, Context], Iterator[Finding]]

# In the order in which their findings are printed.
GATES: tuple[Gate, ...] = (
    parity_gates.missing,
    parity_gates.budget,
    parity_gates.same_data,
    parity_gates.same_suites,
    parity_gates.same_code,
    parity_gates.same_defaults,
    parity_gates.controls,
    parity_gates.identical_runs,
    parity_gates.shared_encoder,
    parity_gates.tuned,
    data_gates.domain,
    data_gates.leak,
    data_gates.epochs,
    data_gates.conditions,
    data_gates.not_judged,
    bound_gates.above_reader,
    bound_gates.below_entropy,
    bound_gates.beyond_plan,
    loss_gates.ceiling,
    loss_gates.plateau,
    loss_gates.trigrams,
    loss_gates.undetected,
    loss_gates.first_best,
    loss_gates.diverged,
    loss_gates.still_falling,
    collapse_gates.collapse,
    score_gates.constant,
    score_gates.ties,
    score_gates.left_out,
    control_gates.untrained,
    control_gates.shared_untrained,
    control_gates.shuffled,
    control_gates.matched_control,
    control_gates.guessing,
    control_gates.part_below_chance,
    control_gates.loss_without_score,
    score_gates.transition,
    score_gates.embedding_layer,
    score_gates.reach,
)

# What a finding says, by the name of its gate, for a screen; its reason has the numbers.
MEANINGS = {
    "missing": "runs without a score, or other seeds than the plan asks for",
    "budget": "other FLOPs than the budget",
    "data": "other data or another tokenizer than the baseline",
    "suites": "other items or options of a suite than the baseline",
    "code": "other code than the baseline",
    "defaults": "other values of options that the plan leaves open than the baseline",
    "controls": "a control of another size or with other FLOPs",
    "identical runs": "runs that should differ are the same",
    "shared encoder": "seeds share a pre-trained encoder",
    "tuning": "not tuned, or not as the others",
    "edge of the grid": "the chosen value is the least or the largest that was tried",
    "baseline": "the baseline has no number that it could be compared with",
    "domain": "what is validated is of another domain than what is trained on",
    "conditions": "rates, batches, rows or tokens are not what was asked",
    "leak": "text that is validated stands in train, too",
    "bound": "better than anything can be: above an exact reader, or below an entropy",
    "ceiling": "the loss is no better than that of a uniform guess",
    "plateau": "the loss could be that of word frequencies, or of the share of fakes",
    "trigrams": "the loss of a causal language model is not below that of trigrams",
    "first best": "the first validation is the best one",
    "diverged": "the last validation is much worse than the best one",
    "collapse": "seeds collapsed: in their states, layers or losses",
    "constant": "all outputs are the same up to rounding",
    "ties": "more than 1 % of the items are ties",
    "left out": "fewer items than in other rows",
    "untrained": "not above the untrained model",
    "below untrained": "below the untrained model",
    "shuffled": "not above the same objective on shuffled text",
    "control": "below its matched control",
    "guessing": "not above a guess",
    "part below chance": "a part of the mean is below chance, so the mean hides a reversal",
}


def findings_of(row: Row, context: Context) -> tuple[Finding, ...]:
    """Return what the gates say of a row, in the order of GATES."""
    return tuple(finding for gate in GATES for finding in gate(row, context))


def examine(context: Context) -> list[Standing]:
    """Return the standings: each row with its findings, in the order of the context.

    A row whose baseline is void or refused is refused, too; one with a flagged baseline says so.
    """
    standings = {row: Standing(row, findings_of(row, context)) for row in context.rows}
    return [_with_baseline(standing, standings, context) for standing in standings.values()]


def _with_baseline(
    standing: Standing, standings: dict[Row, Standing], context: Context
) -> Standing:
    """Return a standing with the findings that its baseline gives rise to."""
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
