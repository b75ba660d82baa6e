"""The plan of a league: its comparison and rules, fixed before anything runs.

Its hash is in every report, so a plan that was changed after a look at the results is visible as
another plan. These dataclasses are the sections of plan files, which `plan_files` reads.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from metaseq_lm.core.config import LEAGUE
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.files import is_number
from metaseq_lm.core.loading import parse_override
from metaseq_lm.core.options import option
from metaseq_lm.reporting.numbers import Metric
from metaseq_lm.reporting.runs import leaves_of
from metaseq_lm.runs.suite_results import entry_name
from metaseq_lm.sweeps.definition import (
    check_different,
    check_filled,
    check_overrides,
    check_seeds,
    text_of,
)

# Keys of the data of a text: its files, the labelled file, and the one that is scored, if any.
TEXT, PROBE, PROBE_TEST = FILES = ("text", "probe", "probe_test")
FEWEST = 3  # tuning seeds that make a choice part of the experiment
# Folders of the user: suites, and official files by benchmark.
FOLDERS, BENCHMARKS = "folders", "benchmarks"


@dataclass(frozen=True)
class Objective:
    """An objective: options of `train`, and the grid that they are tuned on.

    Attributes:
        name: Its name, also used for its folders.
        options: key=value options, in addition to those of all objectives.
        grid: The values of each tuned option; all combinations are tried. Empty: not tuned.
        control: The objective that is its matched control; None without one.
        note: One line for reports.
        metric: The metric that tunes it; None: the metric of the plan's tuning.
    """

    name: str
    options: tuple[str, ...]
    grid: dict[str, list[Any]] = field(default_factory=dict)
    control: str | None = None
    note: str = ""
    metric: str | None = None

    def __post_init__(self) -> None:
        _check_options(self.options)
        _sort_grid(self)
        for text in self.options:
            if (key := str(parse_override(text).key_or_group)) in self.grid:
                raise UsageError(
                    f"options: {key} is tuned, so '{text}' would have no effect; leave it out, or "
                    "give the objective a grid without it"
                )
        if self.metric is not None and not self.grid:
            raise UsageError("metric: nothing is tuned by it; give a grid, or leave it out")

    @property
    def keys(self) -> frozenset[str]:
        """The keys of its options and of its grid; for a choice such as model=modern, the group."""
        chosen = (str(parse_override(option).key_or_group) for option in self.options)
        return frozenset((*chosen, *self.grid))

    @property
    def first(self) -> dict[str, Any]:
        """The first value of each key of the grid."""
        return {key: values[0] for key, values in self.grid.items()}

    @property
    def trials(self) -> int:
        """The number of combinations in the grid, before it is widened."""
        return math.prod(map(len, self.grid.values())) if self.grid else 0


@dataclass(frozen=True)
class Ladder:
    """The budgets and seeds of the runs that are compared.

    Attributes:
        budgets: FLOPs of a run, ascending.
        usual: The budgets that run by default.
        seeds: The seeds for each objective at each budget.
    """

    budgets: tuple[float, ...]
    usual: tuple[float, ...]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        _sort_budgets(self, "budgets")
        _sort_budgets(self, "usual", "usual_budgets")
        check_seeds(self.seeds, "seeds")
        _check_among("usual_budgets", self.usual, self.budgets)


@dataclass(frozen=True)
class Tuning:
    """How options are tuned.

    Attributes:
        budgets: FLOPs of a trial, ascending; a run has the values of the nearest of them.
        grid: The grid of objectives without their own.
        seeds: The seeds of each trial, which may not be seeds of the final runs.
        metric: The metric of the trial that chooses, for objectives that name no other.
        widen: How often a grid gets a value beyond its end when the end is the best value.
        plausible: Final seeds run at every setting that is best in at least this share of draws of
            the tuning seeds; 0: they run only at the best setting.
        once: The options of a grid that are chosen at the middle budget for all budgets.
        noise: The sd over seeds of a trial, in units of the primary metric; None: unknown.
    """

    budgets: tuple[float, ...]
    seeds: tuple[int, ...]
    grid: dict[str, list[Any]]
    metric: str = "valid.loss"
    widen: int = option(2, "values beyond an end of a grid", at_least=0)
    plausible: float = option(0.0, "share of draws, such as 0.1", at_least=0, at_most=0.5)
    once: tuple[str, ...] = ()
    noise: float | int | None = option(None, "sd of a trial", above=0)  # hashed as written

    def __post_init__(self) -> None:
        _sort_budgets(self, "budgets")
        check_seeds(self.seeds, "seeds")
        _sort_grid(self)
        if self.plausible and len(self.seeds) < FEWEST:
            raise UsageError(
                f"plausible: {len(self.seeds)} tuning.seeds do not tell which settings are "
                f"plausible; give {FEWEST} or more"
            )
        if self.noise is not None and not self.plausible:
            raise UsageError("noise: it goes with tuning.plausible")

    @property
    def middle(self) -> float:
        """The budget at which the options of `once` are chosen."""
        return self.budgets[len(self.budgets) // 2]

    def nearest(self, budget: float) -> float:
        """Return the tuned budget whose ratio to `budget` is nearest to 1."""
        return min(self.budgets, key=lambda tuned: abs(math.log(tuned / budget)))


@dataclass(frozen=True)
class Controls:
    """The controls of every objective.

    Attributes:
        untrained: Whether the model without training is scored.
        shuffled: The budgets at which the objective is trained on shuffled tokens.
        seeds: The seeds of controls.
        shifted_valid: Whether the valid split is meant to be of another domain than train.
    """

    untrained: bool
    shuffled: tuple[float, ...]
    seeds: tuple[int, ...]
    shifted_valid: bool = False

    def __post_init__(self) -> None:
        _sort_budgets(self, "shuffled", is_optional=True)
        check_seeds(self.seeds, "seeds")


@dataclass(frozen=True)
class Comparison:
    """The metrics, and the rules of the verdict.

    Attributes:
        baseline: The objective that all others are compared with.
        suites: Entries of trainer.final_suites.
        metric: The primary metric, which decides.
        secondary: Further metrics, which are shown.
        smallest_effect: The smallest difference of the primary metric that matters.
        level: The level of the tests.
        solved: The score at which a seed counts as having solved a task.
        means: Metrics that are means of other metrics or means, by name.
        bounds: The best possible value of metrics, such as an entropy, by name.
        items: Whether the standard error of a difference includes the error of the test items.
        attempts: How many objectives may be added to the plan; None: any number.
    """

    baseline: str
    suites: tuple[str, ...]
    metric: str
    secondary: tuple[str, ...]
    smallest_effect: float = option(MISSING, "difference that matters", above=0)
    level: float = option(0.05, "of the tests", above=0, below=0.5)
    solved: float = 0.9
    means: dict[str, list[str]] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    items: bool = False
    attempts: int | None = option(None, "objectives that may be added", at_least=0)

    def __post_init__(self) -> None:
        for name, parts in self.means.items():
            check_filled(parts, f"means.{name}")
            if cycle := _cycle_from((name,), self.means):
                raise UsageError(f"means.{name}: a mean is part of itself: {', '.join(cycle)}")
        for name in self.means:
            leaves = self.parts_of(name)
            if len({Metric.of(leaf, ()).lower_is_better for leaf in leaves}) > 1:
                raise UsageError(
                    f"means.{name}: of {', '.join(leaves)} some are better when smaller, others "
                    "when larger; their mean says nothing"
                )
        for name, bound in self.bounds.items():
            if not math.isfinite(bound):
                raise UsageError(f"bounds.{name}: {bound} is not finite")
        if len({self.metric, *self.secondary}) <= len(self.secondary):
            raise UsageError("secondary: a metric is named twice")

    def parts_of(self, metric: str) -> tuple[str, ...]:
        """Return the non-mean metrics that a metric averages; itself if it is not a mean."""
        return leaves_of(metric, self.means)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The means of kinds of labels, if the primary metric is a mean of such means, else ().

        Parts of the primary metric come first, then others among the secondary metrics.
        """
        outer = set()
        for name, parts in self.means.items():
            if not self.means.keys().isdisjoint(parts):
                outer.add(name)
        if self.metric not in outer:
            return ()
        kinds, ahead = [], [self.metric, *(name for name in self.secondary if name in self.means)]
        while ahead:
            name, *ahead = ahead
            if name in outer:
                ahead = [*self.means[name], *ahead]
            else:
                kinds.append(name)
        return tuple(dict.fromkeys(kinds))


@dataclass(frozen=True)
class Plan:
    """A league's plan.

    Attributes:
        name: Its name in reports.
        data: Options of preprocess by name, such as `world`; or `folder`, the path of existing
            data; or a `text`, a file or several, with `probe` and perhaps `probe_test`, see the
            module `data`. Data that the league makes may have `folders` of suites, and
            `benchmarks`, folders of official files by benchmark.
        options: key=value options of every run.
        objectives: The objectives to compare.
        ladder: Budgets and seeds.
        tuning: How options are tuned.
        controls: The controls of every objective.
        comparison: Metrics and rules of the verdict.
    """

    name: str
    data: Mapping[str, Any]
    options: tuple[str, ...]
    objectives: tuple[Objective, ...]
    ladder: Ladder
    tuning: Tuning
    controls: Controls
    comparison: Comparison

    def __post_init__(self) -> None:
        _check_options(self.options)
        names = [objective.name for objective in self.objectives]
        if len({name.lower() for name in names}) < len(names):
            raise UsageError(f"objectives: two have the same name ({', '.join(names)})")
        named = [("comparison.baseline", self.comparison.baseline, names)]
        for objective in self.objectives:
            if objective.control is not None:
                others = [name for name in names if name != objective.name]
                named.append((f"objectives.{objective.name}.control", objective.control, others))
        for place, name, known in named:
            if name not in known:
                raise UsageError(f"{place}: '{name}' is none of the objectives {', '.join(known)}")
        _check_among("controls.shuffled", self.controls.shuffled, self.ladder.budgets)
        if shared := sorted(set(self.tuning.seeds) & set(self.ladder.seeds)):
            raise UsageError(
                f"tuning.seeds: {shared[0]} is also one of the seeds; values that were chosen by a "
                "seed's luck must be compared on other seeds"
            )
        for key in self.tuning.once:
            if not any(key in objective.grid for objective in self.objectives):
                raise UsageError(f"tuning.once: {key} is in no grid")

    @property
    def hash(self) -> str:
        """A hash of the content of the plan, 16 hexadecimal digits.

        Files and folders of data count only by name: every run records a fingerprint of their
        content. Default values do not count, so that a later version with further keys gives the
        same hash.
        """
        content = without_defaults(self)
        data = content["data"] = dict(content["data"])
        for key in {"folder", *FILES, FOLDERS, BENCHMARKS} & data.keys():
            data[key] = map_paths(lambda path: Path(path).name, data[key])
        text = json.dumps(content, sort_keys=True, default=list)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics, the primary one first."""
        return (self.comparison.metric, *self.comparison.secondary)

    @property
    def comparisons(self) -> int:
        """The number of verdicts if every row has one, which Holm's correction counts."""
        return max(1, (len(self.objectives) - 1) * len(self.ladder.budgets))

    def objective(self, name: str) -> Objective:
        """Return an objective by its name."""
        return next(objective for objective in self.objectives if objective.name == name)

    def once(self, objective: Objective) -> list[str]:
        """Return the options of an objective that are tuned only at the middle budget."""
        return [key for key in objective.grid if key in self.tuning.once]

    def trials(self, objective: Objective, budget: float) -> int:
        """Return the number of trials of an objective at a budget, before a grid is widened."""
        count = objective.trials * len(self.tuning.seeds)
        if budget != self.tuning.middle:
            count //= math.prod(len(objective.grid[key]) for key in self.once(objective))
        return count

    def tuning_metric(self, objective: Objective) -> str:
        """Return the metric that tunes an objective."""
        return objective.metric or self.tuning.metric

    def tuning_suites(self, objective: Objective) -> list[str]:
        """Return the suite entries that trials of an objective need for their metric."""
        parts = self.comparison.parts_of(self.tuning_metric(objective))
        names = {part.partition(".")[0] for part in parts}
        return [entry for entry in self.comparison.suites if entry_name(entry) in names]


def files_of(data: Mapping[str, Any], key: str) -> list[str]:
    """Return the files that a key of the data names: one, several, or none without the key."""
    named = data.get(key, [])
    return [named] if isinstance(named, str) else list(named)


def map_paths(change: Callable[[str], str], paths: Any) -> Any:
    """Return a path, or paths in a list or mapping, each as `change` returns it."""
    if isinstance(paths, dict):
        return {key: map_paths(change, path) for key, path in paths.items()}
    if isinstance(paths, (list, tuple)):
        return [map_paths(change, path) for path in paths]
    return change(paths)


def without_defaults(value: Any) -> Any:
    """Return a dataclass, at any depth, as a mapping without fields at their default."""
    if isinstance(value, tuple):
        return [without_defaults(item) for item in value]
    if not is_dataclass(value):
        return value
    content = {}
    for item in fields(value):
        default = item.default
        if item.default_factory is not MISSING:
            default = item.default_factory()
        if getattr(value, item.name) != default:
            content[item.name] = without_defaults(getattr(value, item.name))
    return content


def budget_text(budget: float) -> str:
    """Return FLOPs in the form of an option, such as 6e10, which keeps names of runs short."""
    mantissa, _, exponent = f"{budget:.10e}".partition("e")
    text = f"{float(mantissa):g}e{int(exponent)}"
    return text if float(text) == budget else repr(budget)


def _check_among(place: str, budgets: Sequence[float], known: Sequence[float]) -> None:
    if other := sorted(set(budgets) - set(known)):
        listed = ", ".join(f"{budget:g}" for budget in known)
        raise UsageError(f"{place}: {other[0]:g} is not one of the budgets, {listed}")


def _check_options(options: Sequence[str]) -> None:
    # The league sets some options, and Hydra cannot parse all texts.
    check_overrides(options, "options", LEAGUE)
    for text in options:
        parse_override(text)


def _sort_budgets(section: Any, name: str, key: str = "", is_optional: bool = False) -> None:
    """Sort the budgets of a section; raises UsageError unless they are positive and distinct."""
    budgets, key = getattr(section, name), key or name
    if not is_optional:
        check_filled(budgets, key)
    if min(budgets, default=1) <= 0 or len(set(budgets)) < len(budgets):
        raise UsageError(f"{key}: different positive FLOPs are needed, such as [2e10, 6e10]")
    object.__setattr__(section, name, tuple(sorted(budgets)))


def _sort_grid(section: Objective | Tuning) -> None:
    """Sort the numbers of each key; raises UsageError for keys and values that cannot be tuned."""
    ordered = {}
    for key, values in section.grid.items():
        place = f"grid.{key}"
        check_overrides([f"{key}=0"], place, LEAGUE)
        check_filled(values, place)
        check_different([text_of(value, place) for value in values], place)
        ordered[key] = sorted(values) if all(map(is_number, values)) else list(values)
    object.__setattr__(section, "grid", ordered)


def _cycle_from(path: tuple[str, ...], means: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return a cycle of means behind a path, each a part of the previous one, closed; or ()."""
    for part in means.get(path[-1], ()):
        if part in path:
            return (*path[path.index(part) :], part)
        if cycle := _cycle_from((*path, part), means):
            return cycle
    return ()
