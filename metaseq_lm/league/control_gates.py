"""Gates on controls: does a row score more than untrained models and other controls?

`differences` defines what counts as more.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from metaseq_lm.evaluation.grouping import MACRO, SEPARATOR
from metaseq_lm.league.differences import Difference, compare, side
from metaseq_lm.league.gate import CONTROLS, GAIN, LEARNING, gate
from metaseq_lm.league.loss_gates import curve, lowest, number
from metaseq_lm.league.standings import FLAG, NOTE, Context, GateFinding
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Row, finished, metric_of, seed_scores
from metaseq_lm.runs.suite_results import OVERALL, SuiteResults

SYNTAXGYM = "syntaxgym"  # the suite
EXACT = "exact"  # level of the exact reader with the reach of a run's model
_GUESSES = ("chance", "majority")  # references that need no model
_COUNTS = ("unigram", "ngram", "word", "bag_of_words")  # references from word counts
_CONTRADICTED = "the model follows a rule that these items contradict"


def references(runs: Sequence[Run], metric: str) -> dict[str, float]:
    """Return the recorded references of a metric by name, such as chance; {} if there are none.

    A mean of metrics has the means of the references that all of its parts share.
    """
    levels: dict[str, float] = next(filter(None, (levels_of(run, metric) for run in runs)), {})
    return {name: level for name, level in levels.items() if name != EXACT}


def ceiling(runs: Sequence[Run], metric: str) -> float | None:
    """Return the recorded score of the exact reader with the reach of a row's models, or None."""
    levels = (levels_of(run, metric) for run in runs)
    return next((known[EXACT] for known in levels if EXACT in known), None)


def levels_of(run: Run, metric: str) -> dict[str, float]:
    """Return the references of a metric that a run recorded, with that of its reach as EXACT."""
    if metric in run.means:
        return _mean_levels([levels_of(run, part) for part in run.means[metric]])
    suite = run.suite_of(metric)
    levels = _recorded_levels(suite, metric.partition(".")[2]) if suite else {}
    reach = suite.facts.get("reach") if suite else None
    if reach is None and run.values.get("task._name") == "causal_lm":
        reach = "causal"  # results of earlier versions do not record the reach of a suite's states
    exact = levels.get("bayes")
    exact = levels.get("bayes_left", exact) if reach == "causal" else exact
    return {**levels, EXACT: exact} if exact is not None else levels


def _recorded_levels(suite: SuiteResults, metric: str) -> dict[str, float]:
    """Return the references of a metric, METRIC or GROUP.METRIC, in the results of a suite."""
    if metric in suite.references or not metric.endswith(MACRO):
        return dict(suite.references.get(metric, {}))
    # Results of earlier versions lack references of means over groups. We average those of the
    # narrowest groups, for SyntaxGym those of its suites.
    group, _, name = metric.removesuffix(MACRO).rpartition(".")
    names = [inner for inner in suite.groups if inner != OVERALL]
    if suite.suite == SYNTAXGYM:
        names = [inner for inner in names if SEPARATOR not in inner]
    elif group:
        names = [inner for inner in names if inner.startswith(group + SEPARATOR)]
    narrowest = []
    for inner in names:
        if not any(other.startswith(inner + SEPARATOR) for other in names):
            narrowest.append(inner)
    return _mean_levels([suite.references.get(f"{inner}.{name}", {}) for inner in narrowest])


def _mean_levels(levels: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means of the references that all mappings have; {} without mappings."""
    means = {}
    for name in next(iter(levels), {}):
        if all(name in known for known in levels):
            means[name] = math.fsum(known[name] for known in levels) / len(levels)
    return means


def _differences(
    row: Row, control: Sequence[Run], context: Context
) -> Iterator[tuple[str, Difference | None]]:
    """Yield each metric with the difference of a row from a control, None if one has no score."""
    for metric in context.metrics:
        lower = context.lower_is_better(metric)
        yield metric, compare(row.scores(metric), seed_scores(control, metric), lower)


def _chance_above(row: Row, metric: str) -> float | None:
    """Return the chance of a metric if a row's scores are below it by more than their spread."""
    chance = references(row.scored, metric).get("chance")
    lower = metric_of(metric, row.runs).lower_is_better
    result = None if chance is None else compare(row.scores(metric), chance, lower)
    return chance if result is not None and result.sign < 0 else None


def _losses_text(runs: Sequence[Run], others: Sequence[Run]) -> str:
    """Return a clause on the mean best validation of each loss term that two settings share."""
    clauses = ""
    for term in sorted(set[str]().union(*(run.losses for run in runs))):
        best = [*chain.from_iterable(lowest(run, term) for run in runs)]
        other = [*chain.from_iterable(lowest(run, term) for run in others)]
        if best and other and any(term in run.losses for run in others):
            means = (number(float(np.mean(values))) for values in (best, other))
            clauses += f"; valid.{term} is {' at best against '.join(means)}"
    return clauses


@gate(
    CONTROLS,
    {"untrained": "not above the untrained model", "below untrained": "below the untrained model"},
    LEARNING,
)
def untrained(row: Row, context: Context) -> Iterator[GateFinding]:
    """The score is not above that of the same model without training, or is below it."""
    if not row.untrained:
        yield GateFinding("untrained", NOTE, "there is no untrained control")
        return
    for metric, result in _differences(row, row.untrained, context):
        if result is None and row.scores(metric):
            reason = f"the untrained control has no score of {metric}"
            yield GateFinding("untrained", NOTE, reason, metric)
        elif result and not result.sign:
            reason = f"{metric} is at the level of the untrained model ({result.text})"
            yield GateFinding("untrained", FLAG, reason, metric)
        elif result and result.sign < 0:
            below = side(not context.lower_is_better(metric))
            reason = f"{metric} is {below} the untrained model ({result.text})"
            if (chance := _chance_above(row, metric)) is not None:
                reason += f"; it is below chance, {number(chance)}, too: {_CONTRADICTED}"
            yield GateFinding("below untrained", FLAG, reason, metric)


@gate(CONTROLS)
def shared_untrained(row: Row, context: Context) -> Iterator[GateFinding]:
    """The untrained models of several objectives are the same, so that they are one control."""
    results = _suite_metrics(row.untrained)
    same = [other for other in context.rows if _suite_metrics(other.untrained) == results]
    names = list(dict.fromkeys(other.objective for other in same))
    if any(results.values()) and len(names) > 1 and same[0] is row:
        listed = f"{', '.join(names[:-1])} and {names[-1]}"
        reason = f"the untrained models of {listed} are the same: they are one control"
        yield GateFinding("shared control", NOTE, reason)


def _suite_metrics(runs: Sequence[Run]) -> dict[Any, list[Mapping[str, float]]]:
    return {run.seed: [suite.metrics for suite in run.suites] for run in finished(runs)}


@gate(CONTROLS, {"shuffled": "not above the same objective on shuffled text"}, GAIN)
def shuffled(row: Row, context: Context) -> Iterator[GateFinding]:
    """The score is not above that of the same objective on shuffled text: it shows no order.

    Another metric than the primary one may need no order, such as the topic of a document. The
    reason includes the losses, which may differ where scores do not.
    """
    if not row.shuffled and row.budget in context.shuffled:
        reason = "there is no control on shuffled text, which is planned"
        yield GateFinding("shuffled", NOTE, reason)
    learnt = dict(_differences(row, row.untrained, context))
    for metric, result in _differences(row, row.shuffled, context):
        if result is None and row.shuffled and row.scores(metric):
            reason = f"the control on shuffled text has no score of {metric}"
            yield GateFinding("shuffled", NOTE, reason, metric)
        if result is None or result.sign > 0:
            continue
        above, gain = side(context.lower_is_better(metric)), learnt[metric]
        losses = _losses_text(row.scored, finished(row.shuffled))
        reason = f"{metric} is not {above} that of the objective on shuffled text ({result.text})"
        if metric == context.primary:
            reason += f": it shows no order of words{losses}"
            yield GateFinding("shuffled", FLAG, reason, metric)
        elif gain is not None and gain.sign > 0:
            reason += f": it needs no order of words{losses}"
            yield GateFinding("shuffled", NOTE, reason, metric)


@gate(CONTROLS, {"control": "below its matched control"}, GAIN)
def matched_control(row: Row, context: Context) -> Iterator[GateFinding]:
    """The objective is not above its matched control, or has none.

    There is no finding if the control is the baseline, since the verdict covers it.
    """
    if context.baseline in (row.objective, row.control and row.control.objective):
        return
    conclusion = "a difference from the baseline is one of systems, not of objectives"
    if row.control is None:
        name = row.control_name
        absent = f"its control {name} was not run" if name else "no matched control"
        yield GateFinding("control", NOTE, f"{absent}: {conclusion}")
        return
    metric, control = context.primary, f"its control {row.control.objective}"
    losses = _losses_text(row.scored, row.control.scored)
    lower = context.lower_is_better(metric)
    result = compare(row.scores(metric), row.control.scores(metric), lower)
    if result is None:
        yield GateFinding("control", NOTE, f"{control} has no score: {conclusion}", metric)
    elif result.sign < 0:
        reason = f"{control} has the better {metric} ({result.text}){losses}"
        yield GateFinding("control", FLAG, reason, metric)
    elif not result.sign:
        reason = f"{metric} is not {side(lower)} that of {control} ({result.text}): {conclusion}"
        yield GateFinding("control", NOTE, reason + losses, metric)


@gate(CONTROLS, {"guessing": "not above a guess"}, GAIN)
def guessing(row: Row, context: Context) -> Iterator[GateFinding]:
    """The score is not above that of a guess, such as the most frequent class, or of counts."""
    for metric in context.metrics:
        scores, levels = row.scores(metric), references(row.scored, metric)
        lower = context.lower_is_better(metric)
        for names, action in ((_GUESSES, FLAG), (_COUNTS, NOTE)):
            unbeaten, error = [], ""
            for name in names:
                result = compare(scores, levels[name], lower) if name in levels else None
                if result is not None and result.sign <= 0:
                    unbeaten.append(f"{name} ({number(levels[name])})")
                    error = result.error_text
            if unbeaten:
                reason = f"{metric} is {number(float(np.mean(scores)))}, not {side(lower)} "
                reason += f"{' and '.join(unbeaten)}, {error}"
                yield GateFinding("guessing", action, reason, metric)


@gate(
    CONTROLS,
    {"part below chance": "a part of the mean is below chance, so the mean hides a reversal"},
    GAIN,
)
def part_below_chance(row: Row, context: Context) -> Iterator[GateFinding]:
    """A part of a mean is below chance: the mean hides that the row follows a contradicted rule.

    Such a part falls as the model learns that rule, for example agreement with the nearest noun.
    """
    for metric in context.metrics:
        for part in row.parts(metric):
            chance = _chance_above(row, part) if part != metric else None
            if chance is not None:
                below = side(not metric_of(part, row.runs).lower_is_better)
                reason = f"{part} is {number(float(np.mean(row.scores(part))))}, {below} chance, "
                reason += f"{number(chance)}: {_CONTRADICTED}, which {metric} hides"
                yield GateFinding("part below chance", FLAG, reason, metric)


def _minima(runs: Sequence[Run]) -> list[float]:
    return [float(values.min()) for _, values in map(curve, runs) if len(values)]


@gate(CONTROLS)
def loss_without_score(row: Row, context: Context) -> Iterator[GateFinding]:
    """The loss improves on that of the untrained model while a score falls below it."""
    result = compare(_minima(row.scored), _minima(row.untrained), lower_is_better=True)
    if result is None or result.mean >= result.other:
        return
    differences = _differences(row, row.untrained, context)
    falling = [metric for metric, score in differences if score and score.sign < 0]
    if falling:
        reason = f"the validation loss improves on the untrained model's ({number(result.mean)} "
        reason += f"against {number(result.other)}) while {', '.join(falling)} falls below it: "
        reason += "this loss is no guide to them"
        yield GateFinding("loss without score", NOTE, reason)
