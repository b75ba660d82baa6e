"""The gate on seeds that collapsed: by the rank of states, layer by layer, and by their losses."""

import math
from collections.abc import Iterator

import numpy as np

from metaseq_lm.league.corpus import ERRORS
from metaseq_lm.league.gate import STATES, gate
from metaseq_lm.league.loss_gates import curve, number
from metaseq_lm.league.standings import FLAG, Context, Finding, Row, finished
from metaseq_lm.reporting.runs import Run

RANK = ".last.effective_rank"  # metrics of the suite probe
_FEWEST_DIRECTIONS = 0.05  # effective rank of states, as a share of the largest possible rank
_FEWER_ERRORS = 1.64  # standard errors that one in 20 exceeds: for further seeds of a collapsed row
_DEVIATIONS = 5  # median absolute deviations of the losses of a row
_LOST = 0.5  # share of the row's gain since the first validation
FEWEST = 4  # number of seeds from which one seed does not move the median

Seeds = dict[int | None, float]


@gate(STATES, {"collapse": "seeds collapsed: in their states, layers or losses"})
def collapse(row: Row, context: Context) -> Iterator[Finding]:
    """Seeds collapsed; one is enough, since the mean with it describes neither kind of seed.

    If several seeds collapse, the setting is the cause and not the seed, so the finding gives their
    share.
    """
    narrow, gaps, strayed = _narrow_seeds(row), _layer_gaps(row), _strayed_seeds(row)
    collapsed = {*narrow, *gaps, *strayed}
    if not collapsed:
        return
    clauses = []
    if narrow:
        least = f"{min(narrow.values()):.1%} of the most possible"
        clauses.append(f"the effective rank of states is {least} (seed {named(narrow)})")
    if gaps:
        most = f"{100 * max(gaps.values()):.1f} points"
        clauses.append(
            f"labels of words are told from the last layer by up to {most} less than from the "
            f"embedding (seed {named(gaps)})"
        )
    if strayed:
        most = number(max(strayed.values()))
        clauses.append(f"the last loss is {most} above the median (seed {named(strayed)})")
    total = len({run.seed for run in row.scored})
    of_setting = " of this setting" * (len(collapsed) > 1)
    reason = f"collapsed: {len(collapsed)} of {total} seeds{of_setting}: {'; '.join(clauses)}"
    yield Finding("collapse", FLAG, reason)


def named(seeds: Seeds) -> str:
    """Return the numbers of seeds as text, ascending."""
    return ", ".join(map(str, sorted(seeds, key=lambda seed: seed or 0)))


def _narrow_seeds(row: Row) -> Seeds:
    """Return small ranks of the last layer's states by seed, see suite `probe`.

    Among several probes the largest rank counts, since means over a text vary less than states.
    """
    ranks: Seeds = {}
    for run in row.scored:
        of_run = [run.metrics[name] for name in run.metrics if name.endswith(RANK)]
        if of_run and max(of_run) < _FEWEST_DIRECTIONS:
            ranks[run.seed] = max(of_run)
    return ranks


def _layer_gaps(row: Row) -> Seeds:
    """Return by how much the last layer is less accurate than the embedding, for seeds where it is.

    The gap has to exceed the error of the items, and the embedding has to beat the untrained
    models' embedding: a row that has learnt nothing has nothing to lose. If a row has such a seed,
    a smaller gap is enough for further seeds.
    """
    untrained = [layers[0] for run in finished(row.untrained) if (layers := _word_layers(run))]
    gaps, errors = {}, {}
    for run in row.scored:
        if layers := _word_layers(run):
            embedding, last, error = layers
            if not untrained or embedding - float(np.mean(untrained)) > ERRORS * error:
                gaps[run.seed], errors[run.seed] = embedding - last, error
    if not any(gap > ERRORS * errors[seed] for seed, gap in gaps.items()):
        return {}
    return {seed: gap for seed, gap in gaps.items() if gap > _FEWER_ERRORS * errors[seed]}


def _word_layers(run: Run) -> tuple[float, float, float] | None:
    """Return the mean accuracy of the embedding and of the last layer, and the difference's error.

    The means are over probes of word labels. Probes of text labels read means over words: for the
    embedding these are a bag of words, which layers that mix words may well lose.
    """
    first, last, variances = [], [], []
    for suite in run.suites:
        if suite.suite == "probe" and "word" in suite.references.get("accuracy", {}):
            count = suite.metrics[f"{suite.name}.last.n"]
            pair = [suite.metrics[f"{suite.name}.{at}.accuracy"] for at in ("layer_0", "last")]
            first.append(pair[0])
            last.append(pair[1])
            variances.append(sum(value * (1 - value) for value in pair) / count)
    if not first:
        return None
    error = math.sqrt(math.fsum(variances)) / len(variances)
    return float(np.mean(first)), float(np.mean(last)), error


def _strayed_seeds(row: Row) -> Seeds:
    """Return how far the last loss of each outlying seed is above the median of all seeds.

    A seed is outlying if the gap exceeds both _DEVIATIONS and the share LOST of the row's gain. The
    gap is smaller where some seeds have passed a phase transition and others have not.
    """
    curves = {run.seed: values for run in row.scored if len(values := curve(run)[1]) > 1}
    if len(curves) < FEWEST:
        return {}
    last, first = ([values[at] for values in curves.values()] for at in (-1, 0))
    median = float(np.median(last))
    usual = float(np.median(np.abs(np.array(last) - median)))
    gained = max(0.0, float(np.median(first)) - median)
    least = max(_DEVIATIONS * usual, _LOST * gained)
    gaps = {seed: float(values[-1]) - median for seed, values in curves.items()}
    return {seed: gap for seed, gap in gaps.items() if gap > least}
