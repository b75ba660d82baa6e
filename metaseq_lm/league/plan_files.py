"""Reading the files of plans: YAML, whose keys docs/how_to/league.md describes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metaseq_lm.config.entries import as_text
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import parse_override
from metaseq_lm.core.plain_yaml import naming_place
from metaseq_lm.league.choice import FEWEST
from metaseq_lm.league.plan import (
    BENCHMARKS,
    FILES,
    FOLDERS,
    TEXT,
    Comparison,
    Controls,
    Ladder,
    Objective,
    Plan,
    Tuning,
    is_number,
)
from metaseq_lm.reporting.numbers import Metric
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
_PLANS = Path(__file__).parent
LAPTOP, OBJECTIVES, EPOCHS, BALANCED, TEXT_ARM = (
    _PLANS / f"{name}.yaml" for name in ("laptop", "objectives", "epochs", "balanced", "text")
)
SHIPPED = (LAPTOP, OBJECTIVES, EPOCHS, BALANCED)  # with an archive
# A command line may name them.
_NAMED = tuple(plan for plan in sorted(_PLANS.glob("*.yaml")) if plan != TEXT_ARM)
_KINDS = {"world", "folder", TEXT}  # of data
CONLLU = (".conllu", ".conllu.gz")
LABELLED = "labels"  # the set of a table of labelled texts
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,49}")
_SET_BY_LEAGUE = {
    "label": "the league labels runs by their objective",
    "data": "give the plan's `data`",
    "task.shuffle_tokens": "give `controls: {shuffled: ...}`",
    "trainer.max_flops": "give the plan's `budgets`",
    "trainer.max_update": "runs end with their budget",
    "trainer.max_words": "runs end with their budget",
    "trainer.final_suites": "give `comparison: {suites: ...}`",
}


_KEYS = (
    *("base", "name", "data", "options", "objectives", "budgets", "usual_budgets", "seeds"),
    *("tuning", "controls", "comparison"),
)
_TUNING_KEYS = ("grid", "budgets", "seeds", "metric", "widen", "plausible", "once", "noise")
_CONTROL_KEYS = ("untrained", "shuffled", "seeds", "shifted_valid")
_COMPARISON_KEYS = (
    *("baseline", "suites", "metric", "means", "secondary", "smallest_effect", "level", "solved"),
    "bounds",
    "items",
)
_OBJECTIVE_KEYS = ("options", "grid", "control", "note", "metric")


def named_plan(word: str) -> Path:
    """Return the path of a file or folder, or the plan of this name that ships with the package."""
    path = Path(word)
    if path.exists():
        return path
    return next((plan for plan in _NAMED if plan.stem == word), path)


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


def read_plan(
    path: Path, files: Mapping[str, str] | None = None, above: tuple[Path, ...] = ()
) -> tuple[Plan, dict[str, Any]]:
    """Return the plan of a file, and its content with absolute paths of the data.

    That is the content of its base, another plan, with its own in place of what both have.

    Args:
        path: The file.
        files: The files of FILES, for the plan of a text that has none.
        above: The plans whose base it is.

    Raises:
        UsageError: It is wrong; the message names the file.
    """
    content = read_mapping(path, "a plan", _KEYS)
    if (base := content.pop("base", None)) is not None:
        word = text_of(base, f"{path}: base")
        file = next((plan for plan in _NAMED if plan.stem == word), path.parent / word).resolve()
        if file in (above := (*above, path.resolve())):
            raise UsageError(f"{path}: base: {file} is a base of itself")
        content = _merge(read_plan(file, above=above)[1], content)
    if files:
        content = _with_text(content, {k: absolute(file, Path.cwd()) for k, file in files.items()})
    with naming_place(path, always=True):
        if isinstance(content.get("data"), dict):
            content["data"] = _parse_data(content["data"], path.parent)
        return parse_plan(content), content


def _merge(base: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a plan over that of its base.

    Mappings are merged, one level deep, and options by their keys; data of another kind, other
    lists and values are replaced. null takes out what the base has.
    """
    merged = dict(base)
    for key, value in content.items():
        is_replaced = key == "data" and not _KINDS.isdisjoint(value or ())
        if isinstance(value, dict) and isinstance(base.get(key), dict) and not is_replaced:
            value = {**base[key], **value}
            value = {name: part for name, part in value.items() if part is not None}
        elif key == "options" and isinstance(value, list) and isinstance(base.get(key), list):
            value = list({_option_key(option): option for option in (*base[key], *value)}.values())
        merged[key] = value
    return {key: value for key, value in merged.items() if value is not None}


def _option_key(option: Any) -> str:
    """Return the key of an option, key=value."""
    return str(option).partition("=")[0]


def _with_text(content: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
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
        "tuning": _TUNING_KEYS,
        "controls": _CONTROL_KEYS,
        "comparison": _COMPARISON_KEYS,
    }
    for key, known in sections.items():
        check_keys(mapping(content[key], key), known, key)
    budgets = _parse_budgets(content["budgets"], "budgets")
    tuning, controls = content["tuning"], content["controls"]
    seeds = _parse_seeds(content["seeds"], "seeds")
    shuffled = controls.get("shuffled", [])
    if isinstance(shuffled, bool):
        shuffled = list(budgets) if shuffled else []
    grid = _parse_grid(tuning.get("grid", {}))
    objectives = mapping(content["objectives"], "objectives")
    plan = Plan(
        name=text_of(content.get("name", "league"), "name"),
        data=_parse_data(content["data"], Path()),
        options=_parse_options(content.get("options", []), "options"),
        objectives=tuple(parse_objective(name, objectives[name], grid) for name in objectives),
        ladder=Ladder(
            budgets,
            _parse_budgets(content.get("usual_budgets", list(budgets)), "usual_budgets"),
            seeds,
        ),
        tuning=_parse_tuning(tuning, list(budgets), grid),
        controls=Controls(
            untrained=_parse_switch(controls.get("untrained", True), "controls.untrained"),
            shuffled=_parse_budgets(shuffled, "controls.shuffled"),
            seeds=_parse_seeds(controls.get("seeds", list(seeds[:3])), "controls.seeds"),
            shifted_valid=_parse_switch(
                controls.get("shifted_valid", False), "controls.shifted_valid"
            ),
        ),
        comparison=_parse_comparison(content["comparison"]),
    )
    _check_plan(plan)
    return plan


def parse_objective(name: str, content: Any, grid: Mapping[str, tuple[Any, ...]]) -> Objective:
    """Return a checked objective; without a grid of its own it is tuned on `grid`."""
    where = f"objectives.{name}"
    if not NAME.fullmatch(name):
        raise UsageError(
            f"objective {name!r}: it names folders, so use at most 50 letters, digits, _ and -"
        )
    content = mapping(content, where)
    check_keys(dict(content), _OBJECTIVE_KEYS, where)
    control, metric = content.get("control"), content.get("metric")
    options = _parse_options(content.get("options", []), f"{where}.options")
    grid = _parse_grid(content["grid"]) if "grid" in content else grid
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


def _parse_tuning(
    content: Mapping[str, Any], budgets: list[float], grid: Mapping[str, tuple[Any, ...]]
) -> Tuning:
    """Return the checked rules of the choice of options."""
    seeds = _parse_seeds(content.get("seeds"), "tuning.seeds")
    share = _parse_number(content.get("plausible", Tuning.plausible), "tuning.plausible")
    if not 0 <= share <= 0.5:
        raise UsageError("tuning.plausible: a share of draws, from 0 to 0.5, such as 0.1")
    if share and len(seeds) < FEWEST:
        raise UsageError(
            f"tuning.plausible: {len(seeds)} tuning.seeds do not tell which settings are "
            f"plausible; give {FEWEST} or more"
        )
    noise = content.get("noise")
    if noise is not None and not (share and _parse_number(noise, "tuning.noise") > 0):
        raise UsageError("tuning.noise: a positive number, beside tuning.plausible")
    once = sequence(content.get("once", []), "tuning.once", True)
    return Tuning(
        budgets=_parse_budgets(content.get("budgets", budgets), "tuning.budgets"),
        seeds=seeds,
        grid=grid,
        metric=text_of(content.get("metric", Tuning.metric), "tuning.metric"),
        widen=_parse_count(content.get("widen", Tuning.widen), "tuning.widen"),
        plausible=share,
        once=tuple(text_of(key, "tuning.once") for key in once),
        noise=noise,
    )


def _parse_comparison(content: Mapping[str, Any]) -> Comparison:
    """Return the checked metrics and rules."""
    for key in ("baseline", "metric", "smallest_effect"):
        if content.get(key) is None:
            raise UsageError(f"comparison has no {key}")
    suites = [
        as_text(suite) if isinstance(suite, dict) else suite
        for suite in sequence(content.get("suites", []), "comparison.suites", True)
    ]
    secondary = sequence(content.get("secondary", []), "comparison.secondary", True)
    effect = _parse_number(content["smallest_effect"], "comparison.smallest_effect")
    level = _parse_number(content.get("level", Comparison.level), "comparison.level")
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
        solved=_parse_number(content.get("solved", Comparison.solved), "comparison.solved"),
        means=_parse_means(content.get("means", {})),
        bounds=_parse_bounds(content.get("bounds", {})),
        items=_parse_switch(content.get("items", Comparison.items), "comparison.items"),
    )


def _parse_means(content: Any) -> dict[str, tuple[str, ...]]:
    """Return the checked metrics that are means of others."""
    means = {}
    for name, parts in mapping(content, "comparison.means").items():
        where = f"comparison.means.{name}"
        means[name] = tuple(text_of(part, where) for part in sequence(parts, where))
    return means


def _parse_bounds(content: Any) -> dict[str, float]:
    """Return the checked best values of metrics."""
    where = "comparison.bounds"
    items = mapping(content, where).items()
    return {metric: _parse_number(bound, f"{where}.{metric}") for metric, bound in items}


def _check_plan(plan: Plan) -> None:
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
    _check_means(plan.comparison)
    if len(set(plan.metrics)) < len(plan.metrics):
        raise UsageError("comparison.secondary: a metric is named twice")


def _check_means(comparison: Comparison) -> None:
    """Raise UsageError for a mean that is part of itself, or of metrics of opposite directions."""
    for name in comparison.means:
        if cycle := _cycle_from((name,), comparison.means):
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


def _cycle_from(path: tuple[str, ...], means: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return means of which each is a part of the one before and the last the first, () if none.

    Args:
        path: Means that lead to the part which is followed, the last of them.
        means: The parts of each mean.
    """
    for part in means.get(path[-1], ()):
        if part in path:
            return (*path[path.index(part) :], part)
        if cycle := _cycle_from((*path, part), means):
            return cycle
    return ()


def _parse_data(content: Any, base: Path) -> dict[str, Any]:
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


def _parse_options(content: Any, where: str) -> tuple[str, ...]:
    """Return key=value options; raises UsageError for those that the league sets."""
    options = []
    for value in sequence(content, where, True):
        option = parse_override_text(value)
        key = str(parse_override(option).key_or_group)
        if key in _SET_BY_LEAGUE:
            raise UsageError(f"{where}: '{option}': {_SET_BY_LEAGUE[key]}")
        options.append(option)
    return tuple(options)


def _parse_grid(content: Any) -> dict[str, tuple[Any, ...]]:
    """Return the values of each key, numbers ascending."""
    grid = {}
    for key, values in mapping(content, "grid").items():
        _parse_options([f"{key}=0"], "grid")
        items = sequence(values, f"grid of {key}")
        for value in items:
            text_of(value, f"grid of {key}")
        if len(set(map(str, items))) < len(items):
            raise UsageError(f"grid of {key}: a value is given twice")
        grid[key] = tuple(sorted(items)) if all(map(is_number, items)) else tuple(items)
    return grid


def _parse_budgets(content: Any, where: str) -> tuple[float, ...]:
    """Return FLOPs, ascending."""
    budgets = [_parse_number(value, where) for value in sequence(content, where, True)]
    if any(budget <= 0 for budget in budgets) or len(set(budgets)) < len(budgets):
        raise UsageError(f"{where}: different positive FLOPs are needed, such as [2e10, 6e10]")
    if not budgets and where != "controls.shuffled":
        raise UsageError(f"{where}: the list is empty")
    return tuple(sorted(budgets))


def _parse_seeds(content: Any, where: str) -> tuple[int, ...]:
    """Return different seeds."""
    if content is None:
        raise UsageError(f"the plan has no {where}")
    seeds = [parse_seed(seed) for seed in sequence(content, where)]
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"{where}: a seed is given twice")
    return tuple(seeds)


def _parse_number(value: Any, where: str) -> float:
    """Return a finite number."""
    if not is_number(value) or not math.isfinite(value):
        raise UsageError(f"{where}: {value!r} is not a number")
    return float(value)


def _parse_count(value: Any, where: str) -> int:
    """Return a whole number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"{where}: {value!r} is not a whole number from 0 on")
    return value


def _parse_switch(value: Any, where: str) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise UsageError(f"{where}: {value!r} is neither true nor false")
    return value
