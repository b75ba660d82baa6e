"""The gate on seeds that collapsed: by the rank of states, layer by layer, and by their losses."""

import math
from collections.abc import Iterator

import numpy as np

from metaseq_lm.league.corpus import ERRORS
from metaseq_lm.league.gate import STATES, gate
from metaseq_lm.league.loss_gates import curve, number, scores_best
from metaseq_lm.league.standings import FLAG, Context, GateFinding
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Row, finished

_RANK = ".last.effective_rank"  # metrics of the suite probe
_FEWEST_DIRECTIONS = 0.05  # effective rank of states, as a share of the largest possible rank
_FEWER_ERRORS = 1.64  # standard errors that one in 20 exceeds: for further seeds of a collapsed row
_DEVIATIONS = 5  # median absolute deviations of the losses of a row
_LOST = 0.5  # share of the row's gain since the first validation
_FEWEST = 4  # number of seeds from which one seed does not move the median

_Seeds = dict[int | None, float]


@gate(STATES, {"collapse": "seeds collapsed: in their states, layers or losses"})
def collapse(row: Row, context: Context) -> Iterator[GateFinding]:
    """Seeds collapsed; one is enough, since the mean with it describes neither kind of seed."""
    narrow, gaps, strayed = _narrow_seeds(row), _layer_gaps(row), _strayed_seeds(row)
    least = f"{min(narrow.values(), default=0.0):.1%} of the most possible"
    most = f"{100 * max(gaps.values(), default=0.0):.1f} points less than the embedding"
    above = f"{number(max(strayed.values(), default=0.0))} above the median"
    clauses = []
    for seeds, clause in (
        (narrow, f"the effective rank of states is {least}"),
        (gaps, f"the last layer tells the labels of words by up to {most}"),
        (strayed, f"the loss is {above}"),
    ):
        if seeds:
            names = ", ".join(map(str, sorted(seeds, key=lambda seed: seed or 0)))
            clauses.append(f"{clause} (seed {names})")
    if clauses:
        count, total = len({*narrow, *gaps, *strayed}), len({run.seed for run in row.scored})
        of_setting = " of this setting" * (count > 1)
        reason = f"collapsed: {count} of {total} seeds{of_setting}: {'; '.join(clauses)}"
        yield GateFinding("collapse", FLAG, reason)


def _narrow_seeds(row: Row) -> _Seeds:
    """Return small ranks of the last layer's states by seed, see suite `probe`."""
    ranks = {}
    for run in row.scored:
        of_run = [value for name, value in run.metrics.items() if name.endswith(_RANK)]
        # Among several probes the largest rank counts, since means over a text vary less than
        # states.
        if of_run and max(of_run) < _FEWEST_DIRECTIONS:
            ranks[run.seed] = max(of_run)
    return ranks


def _layer_gaps(row: Row) -> _Seeds:
    """Return by how much the last layer is less accurate than the embedding, where it is."""
    untrained = [layers[0] for run in finished(row.untrained) if (layers := _word_layers(run))]
    # A row that has learnt nothing has nothing to lose: its embedding has to beat the untrained
    # one.
    floor = float(np.mean(untrained)) if untrained else -math.inf
    gaps = {}
    for run in row.scored:
        if layers := _word_layers(run):
            embedding, last, error = layers
            if embedding - floor > ERRORS * error:
                gaps[run.seed] = embedding - last, error
    # Once a seed of the row has clearly collapsed, a smaller gap is enough for further seeds.
    is_clear = any(gap > ERRORS * error for gap, error in gaps.values())
    return {seed: x for seed, (x, error) in gaps.items() if is_clear and x > _FEWER_ERRORS * error}


def _word_layers(run: Run) -> tuple[float, float, float] | None:
    """Return the mean accuracy of the embedding and of the last layer, and the error of the gap."""
    pairs, variances = [], []
    for suite in run.suites:
        # Probes of text labels read means over words: for the embedding these are a bag of words,
        # which layers that mix words may well lose.
        if suite.suite == "probe" and "word" in suite.references.get("accuracy", {}):
            count = suite.metrics[f"{suite.name}.last.n"]
            pair = [suite.metrics[f"{suite.name}.{at}.accuracy"] for at in ("layer_0", "last")]
            pairs.append(pair)
            variances.append(sum(value * (1 - value) for value in pair) / count)
    if not pairs:
        return None
    embedding, last = np.mean(pairs, axis=0)
    return float(embedding), float(last), math.sqrt(math.fsum(variances)) / len(variances)


def _strayed_seeds(row: Row) -> _Seeds:
    """Return how far the scored loss of each outlying seed is above the median of all seeds."""
    curves = {run.seed: values for run in row.scored if len(values := curve(run)[1]) > 1}
    if len(curves) < _FEWEST:
        return {}
    best = {run.seed for run in row.scored if scores_best(run)}
    scored = {
        seed: float(values.min() if seed in best else values[-1]) for seed, values in curves.items()
    }
    losses = np.array([*scored.values()])
    median = float(np.median(losses))
    gained = max(0.0, float(np.median([values[0] for values in curves.values()])) - median)
    # The median deviation is small where some seeds have passed a phase transition and others have
    # not, so that a gap has to exceed a share of the row's gain, too.
    least = max(_DEVIATIONS * float(np.median(np.abs(losses - median))), _LOST * gained)
    gaps = {seed: loss - median for seed, loss in scored.items()}
    return {seed: gap for seed, gap in gaps.items() if gap > least}
