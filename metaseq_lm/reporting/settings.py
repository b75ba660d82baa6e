"""Settings: groups of runs that differ in nothing but their seed.

A loss belongs to one criterion on one set of rows: between two criterions, vocabularies, data
folders or ways of masking, the smaller loss is not the better one. Tables show such values, but no
best is marked, tested, chosen or drawn among them; `differing_functions` detects them.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain
from typing import Any

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.files import is_number
from metaseq_lm.core.metric_names import is_loss
from metaseq_lm.core.registry import nearest
from metaseq_lm.reporting.numbers import Metric
from metaseq_lm.reporting.runs import Run, bare_key, identity, natural
from metaseq_lm.runs.suite_results import SuiteResults
from metaseq_lm.sweeps.trials import Shares, sd_of_choice

__all__ = ["Row"]

REMEDY = "compare a metric of an end task (--metric)"
_SUITE_REMEDY = "score all runs with the same data and options"
# Prefix of keys that are not config keys but options in the results of a suite.
_SUITE_PREFIX = "suites."


@dataclass(frozen=True, eq=False)
class TuningRecord:
    """How the options of a row were tuned.

    Attributes:
        grid: The values tried for each option in all rounds; an option was tuned if it has several.
        chosen: The value of each option that the row has.
        runs: The trials.
        budget: The FLOPs of a trial, which differ from the row's budget if tuned at another one.
        shares: The plausible values, most frequent first, if the choice is part of the experiment;
            () if final seeds run only with the best ones.
    """

    grid: Mapping[str, Sequence[Any]]
    chosen: Mapping[str, Any]
    runs: tuple[Run, ...] = field(default=(), repr=False)
    budget: float = 0.0
    shares: Shares = ()

    @property
    def flops(self) -> float:
        """The FLOPs that all trials spent, without those of pre-trained models."""
        return spent_flops(self.runs)


@dataclass(frozen=True, eq=False)
class Row:
    """Runs that differ in nothing but their seed, with controls if a league has them.

    Attributes:
        runs: The runs, including failed ones.
        values: Their common values of the label and of the keys that differ between rows.
        shown: The keys that are enough to tell rows apart; they form the name.
        budget: The FLOPs of a run; 0 if rows have none.
        untrained: Runs of the same model with one update at rate 0.
        shuffled: Runs of the same objective at this budget on shuffled rows (task.shuffle_tokens).
        control: The row of the matched control, another objective of the plan, at this budget; None
            if the plan names no control.
        tuning: How its options were chosen; None if they were not tuned.
        control_name: The name of the control, "" without one.
        added: Whether the objective was added to a frozen plan.
        shipped: Whether its runs shipped with the plan and were not made here.
    """

    runs: Sequence[Run] = field(repr=False)
    values: Mapping[str, Any]
    shown: tuple[str, ...] = ("label",)
    budget: float = 0.0
    untrained: tuple[Run, ...] = field(default=(), repr=False)
    shuffled: tuple[Run, ...] = field(default=(), repr=False)
    control: "Row | None" = field(default=None, repr=False)
    tuning: TuningRecord | None = field(default=None, repr=False)
    control_name: str = ""
    added: bool = False
    shipped: bool = False

    @property
    def objective(self) -> str:
        """The label, in a league the name of the objective."""
        return str(self.values["label"])

    @property
    def name(self) -> str:
        """The label and the shown keys, such as `soft, labelled=which_moon_10`."""
        return self.name_without()

    def name_without(self, *keys: str | None) -> str:
        """Return the name without `keys`, which names the series in which only these vary."""
        remaining = [key for key in self.shown if key not in keys]
        ends = [key.removesuffix("._name").rpartition(".")[2] for key in remaining]
        parts = []
        for key, end in zip(remaining, ends):
            short = key if ends.count(end) > 1 else end
            named = f"{short}=" * (key != "label")
            parts.append(f"{named}{show(self.values[key])}")
        return ", ".join(parts) or "all runs"

    def identity(self, keys: Iterable[str]) -> tuple[Any, ...]:
        """Return the runs' common values of `keys`, in a form for comparing and hashing."""
        return tuple(self.runs[0].identity_of(key) for key in keys)

    @cached_property
    def content(self) -> tuple[Any, ...]:
        """Config and results of the runs without labels: equal for the same runs."""
        keys = [key for key in self.values if bare_key(key) != "label"]
        return (self.identity(keys), *sorted(run.outcome for run in self.runs))

    @cached_property
    def scored(self) -> list[Run]:
        """The runs that finished."""
        return finished(self.runs)

    def scored_by(self, metric: str) -> list[Run]:
        """Return the finished runs with a finite value of `metric`."""
        return [run for run in self.runs if run.why_unscored(metric) is None]

    def unscored(self, metric: str) -> list[tuple[Run, str]]:
        """Return the other runs, each with the reason for its missing score."""
        return [(run, reason) for run in self.runs if (reason := run.why_unscored(metric))]

    def run_scores(self, metric: str) -> list[float]:
        """Return the value of `metric` of each scored run."""
        return [run.metrics[metric] for run in self.scored_by(metric)]

    def repeated_seeds(self, metric: str) -> dict[Any, list[Run]]:
        """Return the scored runs of each seed that has several."""
        by_seed = _by_seed(self.scored_by(metric))
        return {seed: runs for seed, runs in by_seed.items() if len(runs) > 1}

    def parts(self, metric: str) -> Sequence[str]:
        """Return the non-mean metrics that a metric averages; itself if it is not a mean."""
        return self.runs[0].parts_of(metric) if self.runs else (metric,)

    @property
    def settings(self) -> list[tuple[float, Sequence[Run]]]:
        """The plausible settings: the share of draws that choose each, and its runs.

        A single setting has all runs.
        """
        shares = self.tuning.shares if self.tuning else ()
        if len(shares) < 2:
            return [(1.0, self.runs)]
        settings: list[tuple[float, Sequence[Run]]] = []
        for values, share in shares:
            runs = [run for run in self.runs if values.items() <= run.values.items()]
            settings.append((share, runs))
        return settings

    def scores(self, metric: str) -> list[float]:
        """Return the score of each seed, by seed; only finite scores of finished runs.

        With several plausible settings it is the expected score, the mean over draws of the tuning
        seeds that choose again, for the seeds that have a score at every setting.
        """
        if len(self.settings) < 2:
            return seed_scores(self.runs, metric)
        by_seed = [(share, seed_means(runs, metric)) for share, runs in self.settings]
        mixed = []
        for seed in by_seed[0][1]:
            if all(seed in means for _, means in by_seed):
                mixed.append(math.fsum(share * means[seed] for share, means in by_seed))
        return mixed

    def sd_of_choice(self, metric: str) -> float | None:
        """Return the sd of the expected score over draws of the tuning seeds that choose again.

        Each setting counts with its mean over final seeds, so this is the spread of the choice
        alone, 0 with one plausible setting. Return None if the choice is unknown or not part of the
        experiment.
        """
        scores = [seed_scores(runs, metric) for _, runs in self.settings]
        if not (self.tuning and self.tuning.shares and all(scores)):
            return None
        means = [math.fsum(of_setting) / len(of_setting) for of_setting in scores]
        return sd_of_choice(means, [share for share, _ in self.settings])


def _keys_of(runs: Sequence[Run]) -> dict[str, None]:
    keys: dict[str, None] = {}
    for run in runs:
        keys |= dict.fromkeys(run.values)
    return keys


def runs_of(rows: Iterable[Row]) -> list[Run]:
    """Return the runs of all rows."""
    return list(chain.from_iterable(row.runs for row in rows))


def finished(runs: Iterable[Run]) -> list[Run]:
    """Return the runs that finished."""
    return [run for run in runs if run.why_unended() is None]


def spent_flops(runs: Iterable[Run]) -> float:
    """Return the FLOPs that runs spent themselves, without those of pre-trained models."""
    return math.fsum(run.costs["own_flops"] or 0.0 for run in runs)


def _by_seed(runs: Iterable[Run]) -> dict[Any, list[Run]]:
    by_seed: dict[Any, list[Run]] = {}
    for run in runs:
        by_seed.setdefault(run.seed, []).append(run)
    return by_seed


def seed_means(runs: Iterable[Run], metric: str) -> dict[Any, float]:
    """Return the mean score of each seed, ascending; only finite scores of finished runs."""
    by_seed = _by_seed(run for run in runs if run.why_unscored(metric) is None)
    means = {}
    for seed in sorted(by_seed, key=lambda seed: seed or 0):
        means[seed] = math.fsum(run.metrics[metric] for run in by_seed[seed]) / len(by_seed[seed])
    return means


def seed_scores(runs: Iterable[Run], metric: str) -> list[float]:
    """Return the values of `seed_means`."""
    return list(seed_means(runs, metric).values())


def group(runs: Sequence[Run], keys: Iterable[str] = ()) -> list[Row]:
    """Group runs into settings by label, `keys` (even excluded ones) and all keys that differ.

    Data at different paths count as equal if their fingerprints are.
    Settings come sorted by their shown keys, numbers by size. Raises UsageError for a key that no
    run has.
    """
    for key in keys:
        _require_key(runs, key)
    differing = _differing_keys(runs)
    data_keys = [key for key in differing if bare_key(key) == "data" and key not in keys]
    other_keys = [key for key in differing if key not in data_keys]
    telling = list(dict.fromkeys(["label", *keys, *other_keys]))
    mixed = [setting.runs for setting in group_by(runs, telling)]
    for key in data_keys:
        if any(_have_other_data(key, same) for same in mixed):
            telling.append(key)
    return group_by(runs, telling)


def _have_other_data(key: str, runs: Sequence[Run]) -> bool:
    """Return whether the paths of `key` differ and their data are not known to be equal."""
    if len({run.values.get(key) for run in runs}) == 1:
        return False
    hashes = {run.values.get(f"{key}_hash") for run in runs if run.results is not None}
    return len(hashes) > 1 or None in hashes


def group_by(runs: Sequence[Run], keys: Iterable[str]) -> list[Row]:
    """Group runs by exactly these keys, ignoring all others."""
    keys = list(keys)
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(run.identity_of(key) for key in keys), []).append(run)
    shown = _telling_keys(list(groups), keys)
    settings = []
    for same in groups.values():
        settings.append(Row(same, {key: same[0].value(key) for key in keys}, shown))
    return sorted(settings, key=lambda setting: [order(setting.values[key]) for key in shown])


def _differing_keys(runs: Sequence[Run]) -> list[str]:
    """Return the config keys that differ between the runs and affect results, in config order."""
    sources = frozenset().union(*(run.sources for run in runs))
    differing = []
    for key in _keys_of(runs):
        is_same = key in sources or len({run.identity_of(key) for run in runs}) == 1
        if not is_same and any(run.is_compared(key) for run in runs if key in run.values):
            differing.append(key)
    return differing


def _telling_keys(identities: list[tuple[Any, ...]], keys: list[str]) -> tuple[str, ...]:
    """Return the first key, and each later key that separates further settings."""
    chosen: list[int] = []
    distinct = 0
    for i in range(len(keys)):
        count = len({tuple(row[j] for j in (*chosen, i)) for row in identities})
        if not chosen or count > distinct:
            chosen.append(i)
            distinct = count
    return tuple(keys[i] for i in chosen)


def hidden_keys(settings: Sequence[Row]) -> list[str]:
    """Return the keys that vary within a label, but only together with a shown key."""
    if not settings:
        return []
    labels: dict[Any, list[Row]] = {}
    for setting in settings:
        labels.setdefault(setting.values.get("label"), []).append(setting)
    hidden = []
    for key in settings[0].values:
        if key not in settings[0].shown and any(varies(key, same) for same in labels.values()):
            hidden.append(key)
    return hidden


def varies(key: str, settings: Sequence[Row]) -> bool:
    """Return whether settings have several values of a key."""
    return len({setting.identity([key]) for setting in settings}) > 1


def where(runs: Sequence[Run], conditions: Iterable[str], option: str = "--where") -> list[Run]:
    """Return the runs that meet `KEY=VALUE` conditions, any one of the values for each key.

    Raises UsageError for a malformed condition, an unknown key, or a value that no run has.
    """
    allowed: dict[str, set[str]] = {}
    for condition in conditions:
        key, equals, value = condition.partition("=")
        if not equals:
            raise UsageError(f"{option} {condition}: write it as KEY=VALUE, e.g. label=soft")
        _require_key(runs, key)
        existing = {show(run.values.get(key)) for run in runs}
        if _canonical(value) not in existing:
            raise UsageError(
                f"{option} {condition}: no run has that value.{nearest(value, sorted(existing))} "
                f"Values of {key}: {', '.join(sorted(existing, key=natural))}."
            )
        allowed.setdefault(key, set()).add(_canonical(value))
    matching = list(runs)
    for key, values in allowed.items():
        matching = [run for run in matching if show(run.values.get(key)) in values]
    if not matching:
        raise UsageError(f"no run meets all {option} conditions together; drop one of them.")
    return matching


def repeated(settings: Sequence[Row]) -> list[list[Row]]:
    """Return groups of settings that consist of the same runs under several labels."""
    by_content: dict[tuple[Any, ...], list[Row]] = {}
    for setting in settings:
        by_content.setdefault(setting.content, []).append(setting)
    return [same for same in by_content.values() if len(same) > 1]


def _require_key(runs: Sequence[Run], key: str) -> None:
    """Raise UsageError with the nearest names unless some run has the config key."""
    if any(key in run.values for run in runs):
        return
    known = sorted(set().union(*(run.values for run in runs)))
    differing = dict.fromkeys(["label", *_differing_keys(runs)])
    raise UsageError(
        f"no run has the config key '{key}'.{suggestion(key, known)} "
        f"Keys that differ: {', '.join(differing)}."
    )


def require_logged(runs: Sequence[Run], metric: str) -> list[str]:
    """Return the logged metrics that match `metric`, a name or a pattern, in natural order.

    Raises UsageError listing the logged metrics if none matches.
    """
    known = sorted(set().union(*(run.logged for run in runs)), key=natural)
    matching = [name for name in known if name == metric or fnmatchcase(name, metric)]
    if not matching:
        raise UsageError(
            f"no log has the metric '{metric}'.{nearest(metric, known)} "
            f"Logged: {', '.join(known) or 'nothing'}."
        )
    return matching


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return a hint with the dotted names that end in `name`, or with the nearest one."""
    if ends := [full for full in known if full.rpartition(".")[2] == name]:
        return f" Did you mean {' or '.join(map(repr, ends))}?"
    return nearest(name, list(known))


def order(value: Any) -> tuple[int, float, list[tuple[int, Any]]]:
    """Return a sort key for config values: numbers, then text in natural order, then None."""
    if is_number(value):
        return (0, float(value), [])
    if value is None:
        return (2, 0.0, [])
    return (1, 0.0, natural(show(value)))


def distinct(values: Iterable[Any]) -> list[Any]:
    """Return the distinct config values in order."""
    return sorted({identity(value): value for value in values}.values(), key=order)


def show(value: Any) -> str:
    """Return a config value as it is written on the command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str)


def _canonical(value: str) -> str:
    """Return a value typed by the user in the form of `show`: 5e-4 as 0.0005, null as none."""
    if re.fullmatch(r"\[.*\]", value):
        return f"[{','.join(_canonical(part.strip()) for part in value[1:-1].split(','))}]"
    # Quotes around a text belong to the override, such as label='k = 3'.
    if re.fullmatch(r"'.+'|\".+\"", value):
        return value[1:-1]
    try:
        return show(int(value) if re.fullmatch(r"[-+]?\d+", value) else float(value))
    except ValueError:
        return "none" if value == "null" else value


def axis_numbers(values: Sequence[Any]) -> tuple[list[float], str] | None:
    """Return the numbers in config values and their common prefix, or None.

    `["which_moon_10", "which_moon_20"]` gives `([10.0, 20.0], "which_moon_")`.
    """
    if all(is_number(v) for v in values):
        return [float(v) for v in values], ""
    numbers, prefixes = [], set()
    for value in values:
        match = isinstance(value, str) and re.fullmatch(r"(.*?)(\d+(?:\.\d+)?)", value)
        if not match:
            return None
        prefixes.add(match[1])
        numbers.append(float(match[2]))
    if len(prefixes) != 1 or not all(map(math.isfinite, numbers)):
        return None
    return numbers, prefixes.pop()


# ---------------------------------------------------------------- functions of a metric


def metric_of(name: str, runs: Sequence[Run], better: str | None = None) -> Metric:
    """Return a metric with its direction and unit, those of its parts if it is a mean.

    `better` ("higher", "lower") is the direction. By default it is that of the name, or else the
    one in which the best checkpoint was chosen by it; a loss term is better if it is smaller.
    """
    parts = next((run.parts_of(name) for run in runs if name in run.means), (name,))
    described = [_describe_metric(part, runs, better) for part in parts]
    lower = all(part.lower_is_better for part in described)
    guessed = any(part.guessed for part in described)
    return Metric(name, all(part.percent for part in described), lower, guessed)


def _describe_metric(name: str, runs: Sequence[Run], better: str | None) -> Metric:
    values = [run.metrics[name] for run in runs if name in run.metrics]
    metric = Metric.of(name, values, better)
    if not metric.guessed:
        return metric
    bare, maximize = name.partition(".")[2], None
    for run in runs:
        if run.values.get("trainer.best_checkpoint_metric") == bare:
            maximize = run.values.get("trainer.maximize_best_checkpoint_metric")
    if maximize is None and not any(bare in run.losses for run in runs):
        return metric
    return Metric.of(name, values, "higher" if maximize else "lower")


def _is_of_objective(metric: str, run: Run) -> bool:
    """Return whether a metric measures the training objective of a run, not an end task."""
    split, _, bare = metric.rpartition(".")
    if is_loss(bare) or bare in run.losses:
        return True
    # So do metrics on a split of masked text, such as the accuracy of tokens.
    values = run.values
    splits = (values.get("trainer.valid_split", "valid"), *values.get("trainer.final_splits", ()))
    return "task.mask_prob" in values and not values.get("task.labelled") and split in splits


def differing_functions(metric: str, runs: Iterable[Run]) -> dict[str, str]:
    """Return the keys, with their values, that give runs different functions for `metric`.

    Return {} if all runs compute the same function, or if the metric belongs to an end task in all
    of them. A missing value, such as the hash of a run's data, does not count.
    """
    runs = list(runs)
    if any(metric in run.means for run in runs):
        parts = distinct(", ".join(run.parts_of(metric)) for run in runs)
        if len(parts) > 1:
            return {f"means.{metric}": "; ".join(parts)}
    if differing_suites := differing_suite_options(metric, runs):
        return differing_suites
    if not any(_is_of_objective(metric, run) for run in runs):
        return {}
    keys = ["data_hash"]
    keys += [key for key in _keys_of(runs) if key.startswith(("task.", "criterion."))]
    # Criterions with several names may declare one function for their evaluated losses.
    names = {run.values.get("criterion._name") for run in runs}
    if len({run.evaluates_as for run in runs}) == 1 < len(names):
        keys = [key for key in keys if not key.endswith("._name")]
    differing = {}
    for key in keys:
        if len({run.identities.get(key) for run in runs}) == 1:
            continue
        values = distinct(run.values[key] for run in runs if run.values.get(key) is not None)
        if len(values) > 1 and any(run.determines_loss(key) for run in runs):
            differing[key] = ", ".join(map(show, values))
    return differing


def differing_suite_options(metric: str, runs: Sequence[Run]) -> dict[str, str]:
    """Return the data or options, with values, that differ in the results of a metric's suite.

    For a mean, the suites of all of its parts count. Options that results of earlier versions lack
    are not compared, except that these skipped no items and fine-tuned at one learning rate.
    """

    def scored_as(results: SuiteResults) -> dict[str, Any]:
        earlier: dict[str, Any] = {"skip": 0} if "first" in results.options else {}
        earlier |= {"lr_choices": []} if "lr" in results.options else {}
        return {"suite": results.suite, "data": results.data, **earlier, **results.options}

    return _differing_facts(metric, runs, scored_as)


def differing_suite_code(metric: str, runs: Sequence[Run]) -> dict[str, str]:
    """Return the hashes of the code that scored a metric's suite, if they differ.

    For a mean, the suites of all of its parts count. Results without a hash are not compared. Other
    code may compute the same function, so it is only a reason for a note.
    """
    return _differing_facts(metric, runs, lambda s: {"code": s.code} if s.code else {})


def _differing_facts(
    metric: str, runs: Sequence[Run], facts_of: Callable[[SuiteResults], Mapping[str, Any]]
) -> dict[str, str]:
    """Return the facts, with values, that differ between the results of a metric's suites."""
    differing = {}
    mean = [run for run in runs if metric in run.means]
    parts = dict.fromkeys(chain.from_iterable(run.parts_of(metric) for run in mean))
    for part in parts or [metric]:
        suites = [suite for run in runs if (suite := run.suite_of(part)) is not None]
        facts = list(map(facts_of, suites))
        for key in dict.fromkeys(chain.from_iterable(facts)):
            values = distinct(f[key] for f in facts if key in f)
            if len(values) > 1:
                name = part.partition(".")[0]
                differing[f"{_SUITE_PREFIX}{name}.{key}"] = ", ".join(map(show, values))
    return differing


def scored_functions(metric: str, settings: Sequence[Row | None]) -> dict[str, str]:
    """Return `differing_functions` of the scored runs in settings or cells."""
    scored = (row.scored_by(metric) for row in settings if row)
    return differing_functions(metric, chain.from_iterable(scored))


def describe(metric: str, differing: dict[str, str]) -> str:
    """Return the reason why values of a metric are not compared, without a full stop."""
    keys = "; ".join(f"{key}: {values}" for key, values in differing.items())
    return f"{metric} is another function for each of these ({keys})"


def remedy(differing: dict[str, str]) -> str:
    """Return advice on what to compare instead."""
    is_suite = any(key.startswith(_SUITE_PREFIX) for key in differing)
    return _SUITE_REMEDY if is_suite else REMEDY
