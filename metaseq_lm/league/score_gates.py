"""Gates on scores: ties, items left out, constant outputs, changes of phase."""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from metaseq_lm.evaluation.grouping import MACRO, SOFT, STRICT, TIES
from metaseq_lm.league.control_gates import SYNTAXGYM, references
from metaseq_lm.league.gate import READINGS, SCORES, gate
from metaseq_lm.league.loss_gates import by_share, number
from metaseq_lm.league.standings import FLAG, NOTE, VOID, Context, GateFinding
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Row, metric_of, seed_scores

_MOST_TIES = 0.01  # share of the items
_ROUNDING = 1e-6  # mean soft accuracy minus chance if margins are only rounding errors
# The last part of an accuracy's name, such as soft_context_accuracy or context_accuracy_macro.
# These come with context_ties: the kind is "context_", or "" for the only accuracy of a group.
ACCURACY = re.compile(rf"(?:{STRICT}|{SOFT})?(?P<kind>.*)accuracy(?:{MACRO})?")
_SPREAD = 0.1  # sd over seeds, as a share of the way from chance to the best possible score
_FEWEST = 3  # fewest seeds that show a spread


def sibling(metric: str, name: str) -> str:
    """Return another metric of the same group of items, such as pairs.copy.ties.

    A "{}" in its name is replaced by the kind of the accuracy.
    """
    group, _, last = metric.rpartition(".")
    match = ACCURACY.fullmatch(last)
    return f"{group}.{name.format(match['kind'] if match else '')}"


def parts_of(row: Row, context: Context) -> Iterator[tuple[str, str]]:
    """Yield each metric with each metric that it averages, or with itself."""
    for metric in context.metrics:
        for part in row.parts(metric):
            yield metric, part


def _said_once(row: Row, context: Context) -> Iterator[tuple[str, str]]:
    """Yield each part once, with a metric, for findings on all rows, which the first row gets."""
    of_part = {part: metric for metric, part in parts_of(row, context)}
    if row is context.rows[0]:
        for part, metric in of_part.items():
            yield part if part in context.metrics else metric, part


def _values_of(runs: Sequence[Run], metric: str) -> list[float]:
    return [run.metrics[metric] for run in runs if metric in run.metrics]


@gate(SCORES, {"constant": "all outputs are the same up to rounding"})
def constant(row: Row, context: Context) -> Iterator[GateFinding]:
    """All items are ties but for rounding: the model gives every sentence the same score."""
    for metric, part in parts_of(row, context):
        name = sibling(part, SOFT + "{}accuracy")
        # Then the soft accuracy is chance, which is 1/2 for two sentences.
        soft, chance = _values_of(row.scored, name), references(row.scored, name).get("chance", 0.5)
        flat = [abs(value - chance) < _ROUNDING for value in soft]
        reason = f"{part} comes from ties, up to rounding: the outputs are constant"
        yield from by_share(flat, "constant", VOID, FLAG, reason, metric)


@gate(SCORES, {"ties": "more than 1 % of the items are ties"})
def ties(row: Row, context: Context) -> Iterator[GateFinding]:
    """More than one item in a hundred is a tie."""
    for metric, part in parts_of(row, context):
        count, n = (_values_of(row.scored, sibling(part, name)) for name in ("{}" + TIES, "n"))
        share = float(np.mean(count)) / float(np.mean(n)) if count and n else 0.0
        if share > _MOST_TIES:
            yield GateFinding("ties", FLAG, f"{share:.0%} of the items of {part} are ties", metric)


@gate(SCORES, {"left out": "fewer items than in other rows"})
def left_out(row: Row, context: Context) -> Iterator[GateFinding]:
    """Items were left out that other rows were scored with."""
    for metric, part in parts_of(row, context):
        most = max(_values_of(context.scored, sibling(part, "n")), default=0.0)
        least = min(_values_of(row.scored, sibling(part, "n")), default=most)
        if least < most:
            reason = f"{least:,.0f} of {most:,.0f} items of {part} are scored"
            yield GateFinding("left out", FLAG, reason, metric)


@gate(READINGS)
def transition(row: Row, context: Context) -> Iterator[GateFinding]:
    """The seeds spread as in a change of phase: some solve a task, others do not.

    The parts of a primary mean are also judged, since a mean dilutes a part's spread.
    """
    primary = context.primary
    parts = [(primary, part) for part in row.parts(primary) if part != primary]
    for metric, part in [*((metric, metric) for metric in context.metrics), *parts]:
        scores, untrained = row.scores(part), seed_scores(row.untrained, part)
        described, levels = metric_of(part, row.runs), references(row.scored, part)
        if len(scores) < _FEWEST or not described.percent or described.lower_is_better:
            continue
        floor = levels.get("chance", float(np.mean(untrained)) if untrained else 0.0)
        usual = float(np.std(untrained, ddof=1)) if len(untrained) > 1 else 0.0
        sd = float(np.std(scores, ddof=1))
        share = sd / max(levels.get("bayes", 1.0) - floor, 1e-9)
        if share > _SPREAD and sd > 2 * usual:
            count = sum(score >= context.solved for score in scores)
            reason = f"in transition: {part} spreads over seeds from {number(min(scores))} to "
            reason += f"{number(max(scores))} (sd {share:.0%} of the way from chance to the best "
            reason += f"possible); {count} of {len(scores)} seeds reach {number(context.solved)}"
            yield GateFinding("in transition", NOTE, reason, metric)


@gate(READINGS)
def embedding_layer(row: Row, context: Context) -> Iterator[GateFinding]:
    """A probe reads the embedding layer in most runs: it tells nothing of the layers above."""
    for metric, part in _said_once(row, context):
        layers = _values_of(context.scored, sibling(part, "layer"))
        count = layers.count(0)
        if 2 * count > len(layers):
            reason = f"{part} is read from the embedding layer in {count / len(layers):.0%} of the "
            reason += "runs of all rows: it says nothing about the layers above"
            yield GateFinding("embedding layer", NOTE, reason, metric)


@gate(READINGS)
def reach(row: Row, context: Context) -> Iterator[GateFinding]:
    """Surprisals of SyntaxGym see what follows a region in some rows, and not in others."""
    for metric, part in _said_once(row, context):
        rows: dict[str, dict[str, None]] = {"causal": {}, "both": {}}
        for other in context.rows:
            for suite in (run.suite_of(part) for run in other.scored):
                if suite and suite.suite == SYNTAXGYM and suite.facts.get("reach") in rows:
                    rows[suite.facts["reach"]][other.objective] = None
        before, both = map(", ".join, rows.values())
        if before and both:
            reason = f"{part} uses surprisals given the text before a region in the rows of "
            reason += f"{before}, and the text after it, too, in those of {both}: rows are "
            reason += "compared by how well formulas hold, not by surprisals of one kind"
            yield GateFinding("reach", NOTE, reason, metric)
