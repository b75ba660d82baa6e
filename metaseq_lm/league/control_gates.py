"""Gates on controls: does a row score more than untrained models and other controls?

`differences` defines what counts as more.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from metaseq_lm.evaluation.grouping import MACRO, SEPARATOR
from metaseq_lm.league.differences import compare, side
from metaseq_lm.league.gate import CONTROLS, GAIN, LEARNING, gate
from metaseq_lm.league.loss_gates import curve, number
from metaseq_lm.league.standings import (
    FLAG,
    NOTE,
    Context,
    Finding,
    Row,
    finished,
    metric_of,
    seed_scores,
)
from metaseq_lm.reporting.runs import Run
from metaseq_lm.runs.suite_results import OVERALL, SuiteResults

SYNTAXGYM = "syntaxgym"  # the suite
_GUESSES = ("chance", "majority")  # references that need no model
_COUNTS = ("unigram", "ngram", "word", "bag_of_words")  # references from word counts


def references(runs: Sequence[Run], metric: str) -> Mapping[str, float]:
    """Return the recorded references of a metric by name, such as chance; {} if there are none.

    A mean of metrics has the means of the references that all of its parts share.
    """
    return next((levels for run in runs if (levels := _references_of_run(run, metric))), {})


def _references_of_run(run: Run, metric: str) -> Mapping[str, float]:
    """Return the references of a metric that a run recorded, see `references`."""
    if metric in run.means:
        levels = [_references_of_run(run, part) for part in run.means[metric]]
        return _mean_levels(levels) if all(levels) else {}
    suite = run.suite_of(metric)
    return {} if suite is None else levels_of(suite, metric.partition(".")[2])


def ceiling(runs: Sequence[Run], metric: str) -> float | None:
    """Return the recorded score of the exact reader with the reach of a row's models, or None.

    For a mean of metrics it is the mean of the parts' ceilings.
    """
    return next((top for run in runs if (top := _ceiling_of_run(run, metric)) is not None), None)


def _ceiling_of_run(run: Run, metric: str) -> float | None:
    """Return the score of the exact reader with the reach of a run's model, see `ceiling`."""
    if metric in run.means:
        tops = [_ceiling_of_run(run, part) for part in run.means[metric]]
        known = [top for top in tops if top is not None]
        return math.fsum(known) / len(known) if len(known) == len(tops) > 0 else None
    return exact_of(run, run.suite_of(metric), _references_of_run(run, metric))


def exact_of(run: Run, suite: SuiteResults | None, levels: Mapping[str, float]) -> float | None:
    """Return the reference in `levels` that an exact reader with a run's reach scores."""
    reach = suite.facts.get("reach") if suite else None
    if reach is None and run.values.get("task._name") == "causal_lm":
        reach = "causal"  # results of earlier versions do not record the reach of a suite's states
    of_both_sides = levels.get("bayes")
    return levels.get("bayes_left", of_both_sides) if reach == "causal" else of_both_sides


def levels_of(suite: SuiteResults, metric: str) -> Mapping[str, float]:
    """Return the references of a metric, METRIC or GROUP.METRIC, in the results of a suite.

    Results of earlier versions lack references of means over groups; we average those of the
    groups.
    """
    if metric in suite.references or not metric.endswith(MACRO):
        return suite.references.get(metric, {})
    group, _, name = metric.removesuffix(MACRO).rpartition(".")
    levels = [suite.references.get(f"{inner}.{name}", {}) for inner in averaged(suite, group)]
    return _mean_levels(levels) if levels else {}


def averaged(suite: SuiteResults, group: str) -> list[str]:
    """Return the groups that the mean of a group, or of all groups (""), averages.

    They are the narrowest groups, except for SyntaxGym, where they are its suites, whatever
    predictions these have.
    """
    names = [name for name in suite.groups if name != OVERALL]
    if suite.suite == SYNTAXGYM:
        return [name for name in names if SEPARATOR not in name]
    inner = [name for name in names if not group or name.startswith(group + SEPARATOR)]
    return [name for name in inner if not any(x.startswith(name + SEPARATOR) for x in inner)]


def _mean_levels(levels: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means of the references that all mappings have."""
    common = [name for name in levels[0] if all(name in others for others in levels)]
    return {name: math.fsum(x[name] for x in levels) / len(levels) for name in common}


@gate(
    CONTROLS,
    {"untrained": "not above the untrained model", "below untrained": "below the untrained model"},
    LEARNING,
)
def untrained(row: Row, context: Context) -> Iterator[Finding]:
    """The score is not above that of the same model without training, or is below it."""
    if not row.untrained:
        yield Finding("untrained", NOTE, "there is no untrained control")
        return
    for metric in context.metrics:
        scores, others = row.scores(metric), seed_scores(row.untrained, metric)
        if scores and not others:
            reason = f"the untrained control has no score of {metric}"
            yield Finding("untrained", NOTE, reason, metric)
        result = compare(scores, others, context.lower_is_better(metric))
        if result is None or result.sign > 0:
            continue
        lower = context.lower_is_better(metric)
        level = "at the level of" if not result.sign else side(not lower)
        reason = f"{metric} is {level} the untrained model ({result.text})"
        chance = references(row.scored, metric).get("chance")
        if result.sign < 0 and chance is not None and _is_below(scores, chance, lower):
            reason += (
                f"; it is below chance, {number(chance)}, too: the model follows a rule that these "
                "items contradict"
            )
        name = "untrained" if not result.sign else "below untrained"
        yield Finding(name, FLAG, reason, metric)


@gate(CONTROLS)
def shared_untrained(row: Row, context: Context) -> Iterator[Finding]:
    """The untrained models of several objectives are the same, so that they are one control.

    Such objectives differ in training alone, for example in the share of masked tokens. Only the
    first row reports it.
    """
    results = _suite_metrics(row.untrained)
    same = [other for other in context.rows if _suite_metrics(other.untrained) == results]
    names = list(dict.fromkeys(other.objective for other in same))
    if results and len(names) > 1 and same[0] is row:
        listed = f"{', '.join(names[:-1])} and {names[-1]}"
        reason = f"the untrained models of {listed} are the same: they are one control"
        yield Finding("shared control", NOTE, reason)


def _suite_metrics(runs: Sequence[Run]) -> dict[Any, list[Mapping[str, float]]]:
    """Return the metrics of suites of runs that finished, by seed."""
    metrics: dict[Any, list[Mapping[str, float]]] = {}
    for run in finished(runs):
        metrics.setdefault(run.seed, []).extend(suite.metrics for suite in run.suites)
    return metrics if any(metrics.values()) else {}


def _best_losses(runs: Sequence[Run]) -> list[float]:
    """Return the best validation loss of each run that has one."""
    return [float(values.min()) for _, values in map(curve, runs) if len(values)]


@gate(CONTROLS, {"shuffled": "not above the same objective on shuffled text"}, GAIN)
def shuffled(row: Row, context: Context) -> Iterator[Finding]:
    """The score is not above that of the same objective on shuffled text: it shows no order.

    The finding is a flag for the primary metric. Another metric may need no order, such as the
    topic of a document; it gets a note if its score is above the untrained model's. The reason
    includes the losses, which may differ where scores do not.
    """
    losses = _losses_text(row.scored, finished(row.shuffled))
    if not row.shuffled and row.budget in context.shuffled:
        yield Finding("shuffled", NOTE, "there is no control on shuffled text, which is planned")
    for metric in context.metrics:
        scores, others = row.scores(metric), seed_scores(row.shuffled, metric)
        lower = context.lower_is_better(metric)
        if scores and row.shuffled and not others:
            reason = f"the control on shuffled text has no score of {metric}"
            yield Finding("shuffled", NOTE, reason, metric)
        result = compare(scores, others, lower)
        if result is None or result.sign > 0:
            continue
        reason = (
            f"{metric} is not {side(lower)} that of the objective on shuffled text ({result.text})"
        )
        if metric == context.primary:
            reason += f": it shows no order of words{losses}"
            yield Finding("shuffled", FLAG, reason, metric)
            continue
        learnt = compare(scores, seed_scores(row.untrained, metric), lower)
        if learnt is not None and learnt.sign > 0:
            reason += f": it needs no order of words{losses}"
            yield Finding("shuffled", NOTE, reason, metric)


def _losses_text(runs: Sequence[Run], others: Sequence[Run]) -> str:
    """Return a clause on the best validation of each loss term that two settings share.

    Values are means over runs. Return "" if the settings share no term.
    """
    clauses = []
    for term in sorted(_terms_of(runs) & _terms_of(others)):
        best, other = (float(np.mean(_best_values(x, term))) for x in (runs, others))
        clauses.append(f"valid.{term} is {number(best)} at best against {number(other)}")
    return "".join(f"; {clause}" for clause in clauses)


def _terms_of(runs: Sequence[Run]) -> set[str]:
    """Return the loss terms that appear in validations of runs."""
    return {term for run in runs for term in run.losses if run.series(f"valid.{term}")[1]}


def _best_values(runs: Sequence[Run], term: str) -> list[float]:
    """Return the smallest validation of a term of each run that has it."""
    series = (run.series(f"valid.{term}")[1] for run in runs)
    return [min(values) for values in series if values]


@gate(CONTROLS, {"control": "below its matched control"}, GAIN)
def matched_control(row: Row, context: Context) -> Iterator[Finding]:
    """The objective is not above its matched control, or has none.

    There is no finding if the control is the baseline, since the verdict covers it.
    """
    if context.baseline in (row.objective, row.control and row.control.objective):
        return
    conclusion = "a difference from the baseline is one of systems, not of objectives"
    if row.control is None:
        name = row.control_name
        absent = f"its control {name} was not run" if name else "no matched control"
        yield Finding("control", NOTE, f"{absent}: {conclusion}")
        return
    metric, name = context.primary, row.control.objective
    losses = _losses_text(row.scored, row.control.scored)
    lower = context.lower_is_better(metric)
    result = compare(row.scores(metric), row.control.scores(metric), lower)
    if result is None:
        yield Finding("control", NOTE, f"its control {name} has no score: {conclusion}", metric)
    elif result.sign < 0:
        reason = f"its control {name} has the better {metric} ({result.text}){losses}"
        yield Finding("control", FLAG, reason, metric)
    elif not result.sign:
        reason = f"{metric} is not {side(lower)} that of its control {name} ({result.text})"
        reason += f": {conclusion}{losses}"
        yield Finding("control", NOTE, reason, metric)


def _is_below(scores: Sequence[float], level: float, lower_is_better: bool) -> bool:
    """Return whether scores are worse than a level, such as chance, by more than their spread."""
    difference = compare(scores, level, lower_is_better)
    return difference is not None and difference.sign < 0


@gate(CONTROLS, {"guessing": "not above a guess"}, GAIN)
def guessing(row: Row, context: Context) -> Iterator[Finding]:
    """The score is not above that of a guess, such as the most frequent class, or of counts.

    The score has to be above it by more than the spread over seeds, see `differences`.
    """
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
                yield Finding("guessing", action, reason, metric)


@gate(
    CONTROLS,
    {"part below chance": "a part of the mean is below chance, so the mean hides a reversal"},
    GAIN,
)
def part_below_chance(row: Row, context: Context) -> Iterator[Finding]:
    """A part of a mean is below chance: the mean hides that the row follows a contradicted rule.

    Such a part falls as the model learns the contradicted rule, for example agreement with the
    nearest noun, so a higher mean need not mean a better model.
    """
    for metric in context.metrics:
        for part in row.parts(metric):
            scores, chance = row.scores(part), references(row.scored, part).get("chance")
            lower = metric_of(part, row.runs).lower_is_better
            if part != metric and chance is not None and _is_below(scores, chance, lower):
                reason = (
                    f"{part} is {number(float(np.mean(scores)))}, {side(not lower)} chance, "
                    f"{number(chance)}: the model follows a rule that these items contradict, "
                    f"which {metric} hides"
                )
                yield Finding("part below chance", FLAG, reason, metric)


@gate(CONTROLS)
def loss_without_score(row: Row, context: Context) -> Iterator[Finding]:
    """The loss improves on that of the untrained model while a score falls below it."""
    result = compare(_best_losses(row.scored), _best_losses(row.untrained), True)
    if result is None or result.mean >= result.other:
        return
    falling = []
    for metric in context.metrics:
        lower = context.lower_is_better(metric)
        score = compare(row.scores(metric), seed_scores(row.untrained, metric), lower)
        if score is not None and score.sign < 0:
            falling.append(metric)
    if falling:
        yield Finding(
            "loss without score",
            NOTE,
            f"the validation loss improves on the untrained model's ({number(result.mean)} against "
            f"{number(result.other)}) while {', '.join(falling)} falls below it: this loss is no "
            "guide to them",
        )
