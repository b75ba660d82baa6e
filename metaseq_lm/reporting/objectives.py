"""Which metrics are of the objective itself, and whether runs compute the same function.

A loss is a number of one criterion on one set of rows: between two criterions, vocabularies, data
folders or ways of masking the smaller one is not the better one. Such values stand in tables, but no
best is marked, tested, chosen or drawn among them.
"""

import re
from collections.abc import Iterable, Sequence

from metaseq_lm.reporting.numbers import words_of
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Setting, distinct, show

LOSSES = {"loss", "losses", "entropy", "ppl", "perplexity", "nll", "bits", "bpc", "bpb"}
# The config keys that make another function, besides the weights and the like of a criterion.
FUNCTION = (
    *("task._name", "criterion._name", "data_hash"),
    *("task.mask_prob", "task.mask_rounding", "task.random_token_prob"),
    *("task.leave_unmasked_prob", "task.mlm_label_mask", "task.vocab_size", "task.min_frequency"),
)
WEIGHTS = re.compile(r"criterion\.(.*_)?(weights?|smoothing|temperature)")
REMEDY = "compare a metric of an end task (--metric)"
SUITE_REMEDY = "score all runs with the same data and options"
OF_SUITES = "suites."  # how keys begin that are no config keys but of the results of a suite


def is_of_objective(metric: str, run: Run) -> bool:
    """Return whether a metric measures what the run was trained for, not an end task.

    That is a loss, or what a run on masked text gives for a split, such as the accuracy of tokens.
    """
    split, _, bare = metric.rpartition(".")
    if words_of(bare) & LOSSES or bare in run.losses:
        return True
    values = run.values
    splits = (values.get("trainer.valid_split", "valid"), *values.get("trainer.final_splits", ()))
    return "task.mask_prob" in values and not values.get("task.labelled") and split in splits


def other_functions(metric: str, runs: Iterable[Run]) -> dict[str, str]:
    """Return the keys, with their values, by which runs have other functions of the name `metric`.

    Empty where all compute the same one, or where the metric is one of an end task in all of them. A
    value that a run does not have, such as the hash of its data, is not told apart.
    """
    runs = list(runs)
    if differing := other_suites(metric, runs):
        return differing
    if not any(is_of_objective(metric, run) for run in runs):
        return {}
    keys = dict.fromkeys(key for run in runs for key in run.values)
    keys = dict.fromkeys([*FUNCTION, *(key for key in keys if WEIGHTS.fullmatch(key))])
    values = {
        key: distinct(v for run in runs if (v := run.values.get(key)) is not None) for key in keys
    }
    return {key: ", ".join(map(show, some)) for key, some in values.items() if len(some) > 1}


def other_suites(metric: str, runs: Sequence[Run]) -> dict[str, str]:
    """Return in what the suite differs that a metric is of: its data, or options, with the values.

    Options that results of an earlier version lack are not told apart.
    """
    suites = [suite for run in runs if (suite := run.suite_of(metric)) is not None]
    facts = [{"suite": s.suite, "data": s.data, **s.options} for s in suites]
    keys = dict.fromkeys(key for values in facts for key in values)
    by_key = {key: distinct(f[key] for f in facts if key in f) for key in keys}
    return {
        f"{OF_SUITES}{metric.partition('.')[0]}.{key}": ", ".join(map(show, some))
        for key, some in by_key.items()
        if len(some) > 1
    }


def scored_functions(metric: str, settings: Sequence[Setting | None]) -> dict[str, str]:
    """Return `other_functions` of the scored runs of settings or cells."""
    return other_functions(metric, (run for s in settings if s for run in s.scored(metric)))


def describe(metric: str, differing: dict[str, str]) -> str:
    """Return why values of a metric are not compared, in words, without the full stop."""
    keys = "; ".join(f"{key}: {values}" for key, values in differing.items())
    return f"{metric} is another function for each of these ({keys})"


def remedy(differing: dict[str, str]) -> str:
    """Return what can be compared instead."""
    return SUITE_REMEDY if any(key.startswith(OF_SUITES) for key in differing) else REMEDY
