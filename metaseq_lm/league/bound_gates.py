"""Gates on upper bounds: exact readers of a world, its entropies, bounds that the plan states."""

import math
from collections.abc import Iterator

import numpy as np

from metaseq_lm.core.metric_names import CAUSAL_NLL, CLOZE_NLL
from metaseq_lm.evaluation.grouping import STRICT
from metaseq_lm.league.control_gates import EXACT, levels_of
from metaseq_lm.league.differences import side
from metaseq_lm.league.gate import BOUNDS, gate
from metaseq_lm.league.loss_gates import is_trained, lowest, number, unmasked_share
from metaseq_lm.league.score_gates import ACCURACY, parts_of, sibling
from metaseq_lm.league.standings import VOID, Context, GateFinding
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Row, metric_of
from metaseq_lm.runs.suite_results import OVERALL

_LEVEL = 1e-3  # probability of an honest accuracy so far above its bound


@gate(BOUNDS, {"bound": "better than anything can be: above an exact reader, or below an entropy"})
def above_reader(row: Row, context: Context) -> Iterator[GateFinding]:
    """An accuracy is above that of the exact reader of what the run's model sees.

    The number of items is that of one seed, since all seeds are scored with the same items.
    """
    for metric, part in parts_of(row, context):
        readers = [(run, reader) for run in row.scored if (reader := _reader_of(run, part))]
        scores = [run.metrics.get(part, math.nan) for run, _ in readers]
        most, n = max((reader for _, reader in readers), default=(1.0, 0))
        mean = float(np.mean(scores)) if len(scores) == len(row.scored) > 1 else math.nan
        above = [f"{number(mean)} in the mean over seeds"] * _is_above(mean, most, n)
        for (run, reader), score in zip(readers, scores):
            above += [f"{number(score)} of seed {run.seed}"] * _is_above(score, *reader)
        if above:
            reason = f"{part} is {', '.join(above)}, above the exact reader's {number(most)} by "
            reason += f"more than the error of {n:,} items"
            yield GateFinding("bound", VOID, reason, metric)


def _reader_of(run: Run, metric: str) -> tuple[float, int] | None:
    """Return accuracy and number of items of the exact reader with the run's reach, or None."""
    suite, name = run.suite_of(metric), metric.rpartition(".")[2]
    match, count = ACCURACY.fullmatch(name), run.metrics.get(sibling(metric, "n"))
    if suite is None or count is None or not match or match["kind"]:
        return None
    levels = levels_of(run, metric)
    # A group that contains all items, such as a layer of a probe, has the references of the suite.
    if not levels and count == suite.groups[OVERALL]["n"]:
        levels = levels_of(run, f"{suite.name}.{name.removeprefix(STRICT)}")
    return (levels[EXACT], int(count)) if EXACT in levels else None


def _is_above(accuracy: float, bound: float, items: int) -> bool:
    """Return whether an accuracy exceeds a bound by more than the binomial scatter of items."""
    if not accuracy > bound:
        return False
    from scipy.stats import binom  # takes half a second

    # A mean over seeds may give a fractional number of correct items, which is rounded down.
    correct = math.floor(accuracy * items + 1e-6)
    return bool(correct > items or binom.sf(correct - 1, items, bound) < _LEVEL)


@gate(BOUNDS)
def below_entropy(row: Row, context: Context) -> Iterator[GateFinding]:
    """A validation loss is below the entropy of the world, given what the criterion declares.

    If masking leaves a share of the targets unchanged, these may cost nothing.
    """
    exact = context.corpus.exact if context.corpus else None
    terms: dict[str, str] = {}
    for run in row.scored:
        terms |= run.recorded_terms
    for term, kind in terms.items():
        if exact is None or kind not in (CAUSAL_NLL, CLOZE_NLL):
            continue
        runs, below = [run for run in row.scored if is_trained(run, term)], []
        for run in runs:
            room = int(run.values.get("task.tokens_per_sample") or exact.longest + 2) - 2
            used = int(run.values.get("task.valid_size") or exact.documents)
            least = exact.least(kind, room, used) * (1 - unmasked_share(run, term))
            below += [(value, least) for value in lowest(run, term) if value < least]
        if below:
            value, least = min(below)
            reason = f"valid.{term} is {number(value)} nats at best, below {number(least)}, the "
            reason += f"{kind} entropy of the world less its error ({len(below)} of {len(runs)} "
            yield GateFinding("bound", VOID, f"{reason}runs)")


@gate(BOUNDS)
def beyond_plan(row: Row, context: Context) -> Iterator[GateFinding]:
    """A metric is beyond the bound that the plan names for it: below it, if a smaller is better."""
    for metric, bound in context.bounds.items():
        described = metric_of(metric, row.runs)
        best = described.best((run.metrics.get(metric, bound) for run in row.scored), default=bound)
        if described.best(bound, best) != bound:
            beyond = side(not described.lower_is_better)
            reason = f"{metric} is {number(best)} at best, {beyond} {number(bound)}, the bound of "
            reason += "the plan"
            yield GateFinding("bound", VOID, reason, metric if metric in context.metrics else "")
