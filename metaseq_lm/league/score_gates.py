"""Gates on scores: ties, items left out, constant outputs, changes of phase."""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from metaseq_lm.evaluation.grouping import MACRO, SOFT, STRICT, TIES
from metaseq_lm.league.control_gates import SYNTAXGYM, references
from metaseq_lm.league.gate import READINGS, SCORES, gate
from metaseq_lm.league.loss_gates import by_share, number
from metaseq_lm.league.standings import (
    FLAG,
    NOTE,
    VOID,
    Context,
    Finding,
    Row,
    metric_of,
    seed_scores,
)
from metaseq_lm.reporting.runs import Run

_MOST_TIES = 0.01  # share of the items
_ROUNDING = 1e-6  # mean soft accuracy minus chance if margins are only rounding errors
# The last part of an accuracy's name, such as soft_context_accuracy or context_accuracy_macro.
ACCURACY = re.compile(rf"(?:{STRICT}|{SOFT})?(?P<kind>.*)accuracy(?:{MACRO})?")
SPREAD = 0.1  # sd over seeds, as a share of the way from chance to the best possible score
_FEWEST = 3  # fewest seeds that show a spread


def sibling(metric: str, name: str) -> str:
    """Return another metric of the same group of items, such as pairs.copy.ties."""
    return f"{metric.rpartition('.')[0]}.{name}"


def _kind_of(metric: str) -> str:
    """Return the prefix of an accuracy within its group: "context_", or "" for the only one.

    context_accuracy and its mean over groups come with context_ties and soft_context_accuracy.
    """
    match = ACCURACY.fullmatch(metric.rpartition(".")[2])
    return match["kind"] if match else ""


def parts_of(row: Row, context: Context) -> Iterator[tuple[str, str]]:
    """Yield each metric with each metric that it averages, or with itself."""
    for metric in context.metrics:
        for part in row.parts(metric):
            yield metric, part


def _said_once(row: Row, context: Context) -> Iterator[tuple[str, str]]:
    """Yield the pairs of `parts_of` for findings on all rows at once, which the first row gets.

    Each part comes once; a part that is a metric of the plan comes with itself.
    """
    if row is context.rows[0]:
        of_part: dict[str, str] = {}
        for metric, part in parts_of(row, context):
            of_part[part] = part if part in context.metrics else metric
        yield from ((metric, part) for part, metric in of_part.items())


def _values_of(runs: Sequence[Run], metric: str) -> list[float]:
    """Return the values of a metric that runs have."""
    return [run.metrics[metric] for run in runs if metric in run.metrics]


@gate(SCORES, {"constant": "all outputs are the same up to rounding"})
def constant(row: Row, context: Context) -> Iterator[Finding]:
    """All items are ties but for rounding: the model gives every sentence the same score.

    Its soft accuracy is chance, which is 1/2 for two sentences.
    """
    for metric, part in parts_of(row, context):
        name = sibling(part, f"{SOFT}{_kind_of(part)}accuracy")
        soft, chance = _values_of(row.scored, name), references(row.scored, name).get("chance", 0.5)
        flat = sum(abs(value - chance) < _ROUNDING for value in soft)
        reason = f"{part} comes from ties, up to rounding: the outputs are constant"
        for finding in by_share("constant", flat, len(soft), (VOID, FLAG), reason):
            yield Finding(finding.gate, finding.action, finding.reason, metric)


@gate(SCORES, {"ties": "more than 1 % of the items are ties"})
def ties(row: Row, context: Context) -> Iterator[Finding]:
    """More than one item in a hundred is a tie."""
    for metric, part in parts_of(row, context):
        names = _kind_of(part) + TIES, "n"
        count, n = (_values_of(row.scored, sibling(part, name)) for name in names)
        share = float(np.mean(count)) / float(np.mean(n)) if count and n else 0.0
        if share > _MOST_TIES:
            yield Finding("ties", FLAG, f"{share:.0%} of the items of {part} are ties", metric)


@gate(SCORES, {"left out": "fewer items than in other rows"})
def left_out(row: Row, context: Context) -> Iterator[Finding]:
    """Items were left out that other rows were scored with."""
    for metric, part in parts_of(row, context):
        name = sibling(part, "n")
        most = max((n for other in context.rows for n in _values_of(other.scored, name)), default=0)
        least = min(_values_of(row.scored, name), default=most)
        if least < most:
            reason = f"{least:,.0f} of {most:,.0f} items of {part} are scored"
            yield Finding("left out", FLAG, reason, metric)


@gate(READINGS)
def transition(row: Row, context: Context) -> Iterator[Finding]:
    """The seeds spread as in a change of phase: some solve a task, others do not.

    The parts of a primary mean are also judged, since a mean dilutes a part's spread.
    """
    primary = context.primary
    parts = [(primary, part) for part in row.parts(primary) if part != primary]
    for metric, part in [*((metric, metric) for metric in context.metrics), *parts]:
        reason = _spread_text(row, part, context)
        if reason:
            yield Finding("in transition", NOTE, f"in transition: {reason}", metric)


@gate(READINGS)
def embedding_layer(row: Row, context: Context) -> Iterator[Finding]:
    """A probe reads the embedding layer in most runs: it says nothing of what the encoder learnt.

    The suite `probe` records the layer that it chose, 0 being the embedding layer.
    """
    for metric, part in _said_once(row, context):
        layers = []
        for other in context.rows:
            layers += _values_of(other.scored, sibling(part, "layer"))
        count = layers.count(0)
        if 2 * count > len(layers):
            yield Finding(
                "embedding layer",
                NOTE,
                f"{part} is read from the embedding layer in {count / len(layers):.0%} of the runs "
                "of all rows: it tells nothing of the layers above",
                metric,
            )


@gate(READINGS)
def reach(row: Row, context: Context) -> Iterator[Finding]:
    """Surprisals of SyntaxGym see what follows a region in some rows, and not in others.

    Results of earlier versions do not record it.
    """
    for metric, part in _said_once(row, context):
        objectives: dict[str, dict[str, None]] = {"causal": {}, "both": {}}
        for other in context.rows:
            for suite in (run.suite_of(part) for run in other.scored):
                if suite and suite.suite == SYNTAXGYM and suite.facts.get("reach") in objectives:
                    objectives[suite.facts["reach"]][other.objective] = None
        before, both = (", ".join(names) for names in objectives.values())
        if before and both:
            yield Finding(
                "reach",
                NOTE,
                f"{part} is of surprisals given what stands before a region in the rows of "
                f"{before}, and given what follows it, too, in those of {both}: what is compared "
                "is how well formulas hold, not surprisals of one kind",
                metric,
            )


def _spread_text(row: Row, metric: str, context: Context) -> str:
    """Return a text on the spread of a row's seeds in a metric, "" if it is no transition."""
    scores, untrained = row.scores(metric), seed_scores(row.untrained, metric)
    described = metric_of(metric, row.runs)
    if len(scores) < _FEWEST or not described.percent or described.lower_is_better:
        return ""
    levels, sd = references(row.scored, metric), float(np.std(scores, ddof=1))
    floor = levels.get("chance", float(np.mean(untrained)) if untrained else 0.0)
    share = sd / max(levels.get("bayes", 1.0) - floor, 1e-9)
    usual = float(np.std(untrained, ddof=1)) if len(untrained) > 1 else 0.0
    if share <= SPREAD or sd <= 2 * usual:
        return ""
    return (
        f"{metric} spreads over seeds from {number(min(scores))} to {number(max(scores))} (sd "
        f"{share:.0%} of the way from chance to the best possible); {_solved_text(scores, context)}"
    )


def _solved_text(scores: Sequence[float], context: Context) -> str:
    """Return how many seeds reach the score at which a task counts as solved."""
    count = sum(score >= context.solved for score in scores)
    return f"{count} of {len(scores)} seeds reach {number(context.solved)}"
