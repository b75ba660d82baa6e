"""The plan of a league: what is compared, and by which rules, fixed before anything runs.

A plan is a YAML file; docs/how_to/league.md describes its keys. It is read, checked and hashed
here. The hash stands in every report, so that a plan that was changed after a look at the results
shows as another plan.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.overrides import parse_override
from metaseq_lm.league.choice import FEWEST
from metaseq_lm.reporting.numbers import Metric
from metaseq_lm.reporting.runs import leaves_of
from metaseq_lm.runs.suite_results import entry_name
from metaseq_lm.sweeps.definition import (
    absolute,
    check_keys,
    mapping,
    parse_override_text,
    parse_seed,
    read_mapping,
    sequence,
    text_of,
)

# The plans that ship with the package; that of a text gets its data from the command line.
LAPTOP, OBJECTIVES, EPOCHS, BALANCED, TEXT_ARM = (
    Path(__file__).with_name(f"{name}.yaml")
    for name in ("laptop", "objectives", "epochs", "balanced", "text")
)
SHIPPED = (LAPTOP, OBJECTIVES, EPOCHS)  # with an archive
NAMED = (*SHIPPED, BALANCED)  # a command line may name them
TEXT = "text"
FILES = (TEXT, "probe", "probe_test")  # of the data of a text
# Folders of the user: of suites, and of official files by benchmark.
FOLDERS, BENCHMARKS = "folders", "benchmarks"
CONLLU = (".conllu", ".conllu.gz")
LABELLED = "labels"  # the set of a table of labelled texts
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,49}")
SET_BY_LEAGUE = {
    "label": "the league labels runs by their objective",
    "data": "give the plan's `data`",
    "task.shuffle_tokens": "give `controls: {shuffled: ...}`",
    "trainer.max_flops": "give the plan's `budgets`",
    "trainer.max_update": "runs end with their budget",
    "trainer.max_words": "runs end with their budget",
    "trainer.final_suites": "give `comparison: {suites: ...}`",
}


@dataclass(frozen=True)
class Objective:
    """An objective: options of `train`, and the grid that they are tuned on.

    Attributes:
        name: Its name, also that of its folders.
        options: key=value options, beside those that all objectives have.
        grid: The values of each tuned option, all combinations are tried; empty: not tuned.
        control: The objective that is its matched control; None without one.
        note: One line for reports.
        metric: The metric that tunes it; None: that of the plan's tuning.
    """

    name: str
    options: tuple[str, ...]
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    control: str | None = None
    note: str = ""
    metric: str | None = None

    @property
    def keys(self) -> frozenset[str]:
        """The keys of its options and of its grid; of a choice such as model=modern the group."""
        chosen = (str(parse_override(option).key_or_group) for option in self.options)
        return frozenset((*chosen, *self.grid))

    @property
    def trials(self) -> int:
        """The number of combinations of the grid, before it is widened."""
        return math.prod(map(len, self.grid.values())) if self.grid else 0


@dataclass(frozen=True)
class Ladder:
    """The budgets and seeds of the runs that are compared.

    Attributes:
        budgets: FLOPs of a run, ascending.
        usual: The budgets that run unless others are asked for.
        seeds: The seeds of each objective at each budget.
    """

    budgets: tuple[float, ...]
    usual: tuple[float, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Tuning:
    """How options are chosen.

    Attributes:
        budgets: FLOPs of a trial, ascending; a run has the values of the nearest of them.
        grid: The grid of objectives that have none of their own.
        seeds: The seeds of each trial; none of those that are compared.
        metric: What chooses, of the run itself, for objectives that name no other.
        widen: How often a grid gets a value beyond its end when that end is the best.
        plausible: The share of draws of the tuning seeds in which a setting has to be the best for
            final seeds to run at it; 0: final seeds run at the best setting alone.
        once: The options of a grid that are chosen at the middle budget for all.
        noise: The sd over seeds of a trial, in units of the primary metric; None: not known.
    """

    budgets: tuple[float, ...]
    seeds: tuple[int, ...]
    grid: Mapping[str, tuple[Any, ...]]
    metric: str = "valid.loss"
    widen: int = 2
    plausible: float = 0.0
    once: tuple[str, ...] = ()
    noise: float | None = None

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


@dataclass(frozen=True)
class Comparison:
    """What is measured, and how a verdict is reached.

    Attributes:
        baseline: The objective that the others are compared with.
        suites: Entries of trainer.final_suites.
        metric: The primary metric, which decides.
        secondary: Further metrics, which are shown.
        smallest_effect: The smallest difference of the primary metric that matters.
        level: Of the tests.
        solved: The score from which on a seed counts as having solved a task.
        means: Metrics that are means of others, or of other means, by their names.
        bounds: The best value that is possible of metrics, such as an entropy, by their names.
        items: Whether the standard error of the test items is part of that of a difference.
    """

    baseline: str
    suites: tuple[str, ...]
    metric: str
    secondary: tuple[str, ...]
    smallest_effect: float
    level: float = 0.05
    solved: float = 0.9
    means: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bounds: Mapping[str, float] = field(default_factory=dict)
    items: bool = False

    def parts_of(self, metric: str) -> tuple[str, ...]:
        """Return the metrics, no means, that a metric is computed from, itself if it is no mean."""
        return leaves_of(metric, self.means)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The means of kinds of labels, if the primary metric is a mean of such means, else ().

        Those that the primary metric comes from, then others among the secondary ones.
        """
        if self._is_innermost(self.metric):
            return ()
        secondary = [name for name in self.secondary if name in self.means]
        kinds = [kind for name in (self.metric, *secondary) for kind in self._innermost(name)]
        return tuple(dict.fromkeys(kinds))

    def _is_innermost(self, metric: str) -> bool:
        """Return whether no part of a metric is a mean."""
        return self.means.keys().isdisjoint(self.means.get(metric, ()))

    def _innermost(self, metric: str) -> list[str]:
        """Return the metrics that a metric is the mean of, down to those without means as parts."""
        if self._is_innermost(metric):
            return [metric]
        return [kind for part in self.means[metric] for kind in self._innermost(part)]


@dataclass(frozen=True)
class Plan:
    """A league's plan.

    Attributes:
        name: Its name in reports.
        data: Options of preprocess by name, such as `world`; `folder`, of data that are there; or a
            `text` with `probe` and `probe_test`, see `texts.make_text`. Data that are made may have
            `folders`, of suites, and `benchmarks`, folders of official files by benchmark.
        options: key=value options of every run.
        objectives: What is compared.
        ladder: Budgets and seeds.
        tuning: How options are chosen.
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

    @property
    def hash(self) -> str:
        """A hash of all that the plan says, 16 hexadecimal digits.

        Of files and folders of data only the names count: their content is compared by the
        fingerprint that every run records. Values that are the default do not count, so that a
        later version with further keys gives a plan the same hash.
        """
        content = stated(self)
        data = content["data"] = dict(content["data"])
        for key in ("folder", *FILES):
            if key in data:
                data[key] = Path(data[key]).name
        if FOLDERS in data:
            data[FOLDERS] = [Path(folder).name for folder in data[FOLDERS]]
        if BENCHMARKS in data:
            sources = data[BENCHMARKS].items()
            data[BENCHMARKS] = {name: Path(source).name for name, source in sources}
        text = json.dumps(content, sort_keys=True, default=list)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics, the primary one first."""
        return (self.comparison.metric, *self.comparison.secondary)

    @property
    def comparisons(self) -> int:
        """How many verdicts there are if every row has one, which Holm's correction is for."""
        return max(1, (len(self.objectives) - 1) * len(self.ladder.budgets))

    def objective(self, name: str) -> Objective:
        """Return an objective by its name."""
        return next(objective for objective in self.objectives if objective.name == name)

    def once(self, objective: Objective) -> list[str]:
        """Return the options of an objective that are tuned at the middle budget alone."""
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
        """Return the entries of suites that trials of an objective need for their metric."""
        parts = self.comparison.parts_of(self.tuning_metric(objective))
        names = {part.partition(".")[0] for part in parts}
        return [entry for entry in self.comparison.suites if entry_name(entry) in names]


def stated(value: Any) -> Any:
    """Return a dataclass, at any depth, as a mapping without the fields that have their default."""
    if isinstance(value, tuple):
        return [stated(item) for item in value]
    if not is_dataclass(value):
        return value
    content = {}
    for item in fields(value):
        default = item.default
        if item.default_factory is not MISSING:
            default = item.default_factory()
        if getattr(value, item.name) != default:
            content[item.name] = stated(getattr(value, item.name))
    return content


KEYS = (
    *("name", "data", "options", "objectives", "budgets", "usual_budgets", "seeds"),
    *("tuning", "controls", "comparison"),
)
TUNING_KEYS = ("grid", "budgets", "seeds", "metric", "widen", "plausible", "once", "noise")
CONTROL_KEYS = ("untrained", "shuffled", "seeds", "shifted_valid")
COMPARISON_KEYS = (
    *("baseline", "suites", "metric", "means", "secondary", "smallest_effect", "level", "solved"),
    "bounds",
    "items",
)
OBJECTIVE_KEYS = ("options", "grid", "control", "note", "metric")


def named_plan(word: str) -> Path:
    """Return the path of a file or folder, or the plan of this name that ships with the package."""
    path = Path(word)
    if path.exists():
        return path
    return next((plan for plan in NAMED if plan.stem == word), path)


def shipped_archive(plan: Plan) -> Path | None:
    """Return the archive of a plan that ships with the package, of another plan None."""
    for file in SHIPPED:
        if read_plan(file)[0].hash == plan.hash:
            return archive_beside(file)
    return None


def archive_beside(plan: Path) -> Path | None:
    """Return the archive of runs beside a plan: PLAN.jsonl.gz or PLAN.jsonl; None without one."""
    files = [plan.with_suffix(ending).absolute() for ending in (".jsonl.gz", ".jsonl")]
    return next((file for file in files if file.exists()), None)


def read_plan(path: Path, files: Mapping[str, str] | None = None) -> tuple[Plan, dict[str, Any]]:
    """Return the plan of a file, and its content with absolute paths of the data.

    Args:
        path: The file.
        files: The files of FILES, for the plan of a text that has none.

    Raises:
        UsageError: It is wrong; the message names the file.
    """
    content = read_mapping(path, "a plan", KEYS)
    if files:
        content = with_text(content, {k: absolute(file, Path.cwd()) for k, file in files.items()})
    try:
        if isinstance(content.get("data"), dict):
            content["data"] = parse_data(content["data"], path.parent)
        plan = parse_plan(content)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    return plan, content


def with_text(content: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of the plan of a text with the files of a user.

    Of a table of labelled texts the labels are the metric.
    """
    content = {**content, "data": {**content.get("data", {}), **files}}
    if not files["probe"].endswith(CONLLU):
        suites = [f"probe {LABELLED} name={LABELLED}"]
        # Objectives may be tuned by the mean of the accuracies that choose a layer.
        means = {"probes_valid": [f"{LABELLED}.valid_accuracy"]}
        metrics = {"metric": f"{LABELLED}.accuracy", "means": means, "secondary": []}
        content["comparison"] = {**content["comparison"], "suites": suites, **metrics}
    return content


def parse_plan(content: Mapping[str, Any]) -> Plan:
    """Return the checked plan; raises UsageError."""
    for key in ("data", "objectives", "budgets", "seeds", "tuning", "controls", "comparison"):
        if key not in content:
            raise UsageError(f"the plan has no {key}")
    sections = {
        "tuning": TUNING_KEYS,
        "controls": CONTROL_KEYS,
        "comparison": COMPARISON_KEYS,
    }
    for key, known in sections.items():
        check_keys(mapping(content[key], key), known, key)
    budgets = parse_budgets(content["budgets"], "budgets")
    tuning, controls = content["tuning"], content["controls"]
    seeds = parse_seeds(content["seeds"], "seeds")
    shuffled = controls.get("shuffled", [])
    if isinstance(shuffled, bool):
        shuffled = list(budgets) if shuffled else []
    grid = parse_grid(tuning.get("grid", {}))
    objectives = mapping(content["objectives"], "objectives")
    plan = Plan(
        name=text_of(content.get("name", "league"), "name"),
        data=parse_data(content["data"], Path()),
        options=parse_options(content.get("options", []), "options"),
        objectives=tuple(parse_objective(name, objectives[name], grid) for name in objectives),
        ladder=Ladder(
            budgets,
            parse_budgets(content.get("usual_budgets", list(budgets)), "usual_budgets"),
            seeds,
        ),
        tuning=parse_tuning(tuning, list(budgets), grid),
        controls=Controls(
            untrained=parse_switch(controls.get("untrained", True), "controls.untrained"),
            shuffled=parse_budgets(shuffled, "controls.shuffled"),
            seeds=parse_seeds(controls.get("seeds", list(seeds[:3])), "controls.seeds"),
            shifted_valid=parse_switch(
                controls.get("shifted_valid", False), "controls.shifted_valid"
            ),
        ),
        comparison=parse_comparison(content["comparison"]),
    )
    check_plan(plan)
    return plan


def parse_objective(name: str, content: Any, grid: Mapping[str, tuple[Any, ...]]) -> Objective:
    """Return a checked objective; without a grid of its own it is tuned on `grid`."""
    where = f"objectives.{name}"
    if not NAME.fullmatch(name):
        raise UsageError(
            f"objective {name!r}: it names folders, so use at most 50 letters, digits, _ and -"
        )
    content = mapping(content, where)
    check_keys(dict(content), OBJECTIVE_KEYS, where)
    control, metric = content.get("control"), content.get("metric")
    options = parse_options(content.get("options", []), f"{where}.options")
    grid = parse_grid(content["grid"]) if "grid" in content else grid
    for option in options:
        if (key := str(parse_override(option).key_or_group)) in grid:
            raise UsageError(
                f"{where}: {key} is tuned, so '{option}' would have no effect; leave it out, or "
                "give the objective a grid without it"
            )
    if metric is not None and not grid:
        raise UsageError(f"{where}.metric: nothing is tuned by it; give a grid, or leave it out")
    return Objective(
        name,
        options,
        grid,
        None if control is None else text_of(control, f"{where}.control"),
        text_of(content.get("note", ""), f"{where}.note"),
        None if metric is None else text_of(metric, f"{where}.metric"),
    )


def parse_tuning(
    content: Mapping[str, Any], budgets: list[float], grid: Mapping[str, tuple[Any, ...]]
) -> Tuning:
    """Return the checked rules of the choice of options."""
    seeds = parse_seeds(content.get("seeds"), "tuning.seeds")
    share = parse_number(content.get("plausible", Tuning.plausible), "tuning.plausible")
    if not 0 <= share <= 0.5:
        raise UsageError("tuning.plausible: a share of draws, from 0 to 0.5, such as 0.1")
    if share and len(seeds) < FEWEST:
        raise UsageError(
            f"tuning.plausible: {len(seeds)} tuning.seeds do not tell which settings are "
            f"plausible; give {FEWEST} or more"
        )
    noise = content.get("noise")
    if noise is not None and not (share and parse_number(noise, "tuning.noise") > 0):
        raise UsageError("tuning.noise: a positive number, beside tuning.plausible")
    once = sequence(content.get("once", []), "tuning.once", True)
    return Tuning(
        budgets=parse_budgets(content.get("budgets", budgets), "tuning.budgets"),
        seeds=seeds,
        grid=grid,
        metric=text_of(content.get("metric", Tuning.metric), "tuning.metric"),
        widen=parse_count(content.get("widen", Tuning.widen), "tuning.widen"),
        plausible=share,
        once=tuple(text_of(key, "tuning.once") for key in once),
        noise=noise,
    )


def parse_comparison(content: Mapping[str, Any]) -> Comparison:
    """Return the checked metrics and rules."""
    for key in ("baseline", "metric", "smallest_effect"):
        if content.get(key) is None:
            raise UsageError(f"comparison has no {key}")
    suites = sequence(content.get("suites", []), "comparison.suites", True)
    secondary = sequence(content.get("secondary", []), "comparison.secondary", True)
    effect = parse_number(content["smallest_effect"], "comparison.smallest_effect")
    level = parse_number(content.get("level", Comparison.level), "comparison.level")
    if not effect > 0:
        raise UsageError("comparison.smallest_effect: it must be positive")
    if not 0 < level < 0.5:
        raise UsageError("comparison.level: it must be between 0 and 0.5")
    return Comparison(
        baseline=text_of(content["baseline"], "comparison.baseline"),
        suites=tuple(text_of(suite, "comparison.suites") for suite in suites),
        metric=text_of(content["metric"], "comparison.metric"),
        secondary=tuple(text_of(metric, "comparison.secondary") for metric in secondary),
        smallest_effect=effect,
        level=level,
        solved=parse_number(content.get("solved", Comparison.solved), "comparison.solved"),
        means=parse_means(content.get("means", {})),
        bounds=parse_bounds(content.get("bounds", {})),
        items=parse_switch(content.get("items", Comparison.items), "comparison.items"),
    )


def parse_means(content: Any) -> dict[str, tuple[str, ...]]:
    """Return the checked metrics that are means of others."""
    means = {}
    for name, parts in mapping(content, "comparison.means").items():
        where = f"comparison.means.{name}"
        means[name] = tuple(text_of(part, where) for part in sequence(parts, where))
    return means


def parse_bounds(content: Any) -> dict[str, float]:
    """Return the checked best values of metrics."""
    where = "comparison.bounds"
    items = mapping(content, where).items()
    return {metric: parse_number(bound, f"{where}.{metric}") for metric, bound in items}


def check_plan(plan: Plan) -> None:
    """Raise UsageError for parts of a plan that contradict each other."""
    names = [objective.name for objective in plan.objectives]
    if not names:
        raise UsageError("objectives: there is none")
    if len({name.lower() for name in names}) < len(names):
        raise UsageError(f"objectives: two have the same name ({', '.join(names)})")
    named = {"comparison.baseline": plan.comparison.baseline}
    for objective in plan.objectives:
        if objective.control is not None:
            named[f"objectives.{objective.name}.control"] = objective.control
        if objective.control == objective.name:
            raise UsageError(f"objectives.{objective.name}.control: it names itself")
    for where, name in named.items():
        if name not in names:
            raise UsageError(
                f"{where}: there is no objective {name!r}. Objectives: {', '.join(names)}."
            )
    for where, budgets in (
        ("usual_budgets", plan.ladder.usual),
        ("controls.shuffled", plan.controls.shuffled),
    ):
        if other := sorted(set(budgets) - set(plan.ladder.budgets)):
            raise UsageError(f"{where}: {other[0]:g} is not one of the budgets")
    if shared := sorted(set(plan.tuning.seeds) & set(plan.ladder.seeds)):
        raise UsageError(
            f"tuning.seeds: {shared[0]} is also one of the seeds; values that were chosen by a "
            "seed's luck must be compared on other seeds"
        )
    for key in plan.tuning.once:
        if not any(key in objective.grid for objective in plan.objectives):
            raise UsageError(f"tuning.once: {key} is in no grid")
    check_means(plan.comparison)
    if len(set(plan.metrics)) < len(plan.metrics):
        raise UsageError("comparison.secondary: a metric is named twice")


def check_means(comparison: Comparison) -> None:
    """Raise UsageError for a mean that is part of itself, or of metrics of opposite directions."""
    for name in comparison.means:
        if cycle := cycle_from((name,), comparison.means):
            raise UsageError(
                f"comparison.means.{name}: a mean is part of itself: {', '.join(cycle)}"
            )
    for name in comparison.means:
        parts = comparison.parts_of(name)
        if len({Metric.of(part, ()).lower_is_better for part in parts}) > 1:
            raise UsageError(
                f"comparison.means.{name}: of {', '.join(parts)} the smaller value of some, and "
                "the larger one of others is the better; their mean says nothing"
            )


def cycle_from(path: tuple[str, ...], means: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return means of which each is a part of the one before and the last the first, () if none.

    Args:
        path: Means that lead to the part which is followed, the last of them.
        means: The parts of each mean.
    """
    for part in means.get(path[-1], ()):
        if part in path:
            return (*path[path.index(part) :], part)
        if cycle := cycle_from((*path, part), means):
            return cycle
    return ()


def parse_data(content: Any, base: Path) -> dict[str, Any]:
    """Return options of preprocess, or the absolute path of a data folder.

    Paths are absolute, relative ones are relative to `base`.
    """
    data = dict(mapping(content, "data"))
    if "folder" in data:
        check_keys(data, ("folder",), "data")
        return {"folder": absolute(text_of(data["folder"], "data.folder"), base)}
    if TEXT in data:
        for key in FILES:
            if key not in data:
                raise UsageError(f"data: a text needs {', '.join(FILES)}")
            data[key] = absolute(text_of(data[key], f"data.{key}"), base)
    folders, benchmarks = data.pop(FOLDERS, None), data.pop(BENCHMARKS, None)
    for key, value in data.items():
        text_of(value, f"data.{key}")
    if not data:
        raise UsageError("data: give a folder, a text, or options such as world: quad")
    if folders is not None:
        where = f"data.{FOLDERS}"
        paths = [absolute(text_of(item, where), base) for item in sequence(folders, where)]
        if len({Path(path).name for path in paths}) < len(paths):
            raise UsageError(f"{where}: two folders have the same name, by which suites find them")
        data[FOLDERS] = paths
    if benchmarks is not None:
        where = f"data.{BENCHMARKS}"
        data[BENCHMARKS] = {
            name: absolute(text_of(path, f"{where}.{name}"), base)
            for name, path in mapping(benchmarks, where).items()
        }
    return data


def parse_options(content: Any, where: str) -> tuple[str, ...]:
    """Return key=value options; raises UsageError for those that the league sets."""
    options = []
    for value in sequence(content, where, True):
        option = parse_override_text(value)
        key = str(parse_override(option).key_or_group)
        if key in SET_BY_LEAGUE:
            raise UsageError(f"{where}: '{option}': {SET_BY_LEAGUE[key]}")
        options.append(option)
    return tuple(options)


def parse_grid(content: Any) -> dict[str, tuple[Any, ...]]:
    """Return the values of each key, numbers ascending."""
    grid = {}
    for key, values in mapping(content, "grid").items():
        parse_options([f"{key}=0"], "grid")
        items = sequence(values, f"grid of {key}")
        for value in items:
            text_of(value, f"grid of {key}")
        if len(set(map(str, items))) < len(items):
            raise UsageError(f"grid of {key}: a value is given twice")
        grid[key] = tuple(sorted(items)) if all(map(is_number, items)) else tuple(items)
    return grid


def parse_budgets(content: Any, where: str) -> tuple[float, ...]:
    """Return FLOPs, ascending."""
    budgets = [parse_number(value, where) for value in sequence(content, where, True)]
    if any(budget <= 0 for budget in budgets) or len(set(budgets)) < len(budgets):
        raise UsageError(f"{where}: different positive FLOPs are needed, such as [2e10, 6e10]")
    if not budgets and where != "controls.shuffled":
        raise UsageError(f"{where}: the list is empty")
    return tuple(sorted(budgets))


def parse_seeds(content: Any, where: str) -> tuple[int, ...]:
    """Return different seeds."""
    if content is None:
        raise UsageError(f"the plan has no {where}")
    seeds = [parse_seed(seed) for seed in sequence(content, where)]
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"{where}: a seed is given twice")
    return tuple(seeds)


def parse_number(value: Any, where: str) -> float:
    """Return a finite number."""
    if not is_number(value) or not math.isfinite(value):
        raise UsageError(f"{where}: {value!r} is not a number")
    return float(value)


def parse_count(value: Any, where: str) -> int:
    """Return a whole number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"{where}: {value!r} is not a whole number from 0 on")
    return value


def parse_switch(value: Any, where: str) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise UsageError(f"{where}: {value!r} is neither true nor false")
    return value


def is_number(value: Any) -> bool:
    """Return whether a value is a number, which true and false are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def budget_text(budget: float) -> str:
    """Return FLOPs as an option has them, such as 6e10: short names of runs."""
    mantissa, _, exponent = f"{budget:.10e}".partition("e")
    text = f"{float(mantissa):g}e{int(exponent)}"
    return text if float(text) == budget else repr(budget)
