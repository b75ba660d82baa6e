"""Reading the files of plans: YAML, whose keys docs/how_to/league.md describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from metaseq_lm.config.entries import as_text
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.plain_yaml import naming_place
from metaseq_lm.core.registry import nearest
from metaseq_lm.core.structured import read_structured
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
)
from metaseq_lm.sweeps.definition import absolute, read_mapping, text_of

# The plans that ship with the package; the plan of a text gets its data from the command line.
_PLANS = Path(__file__).parent
LAPTOP, OBJECTIVES, EPOCHS, BALANCED, TEXT_ARM = (
    _PLANS / f"{name}.yaml" for name in ("laptop", "objectives", "epochs", "balanced", "text")
)
# A command line may name them.
_NAMED = tuple(plan for plan in sorted(_PLANS.glob("*.yaml")) if plan != TEXT_ARM)
SHIPPED = tuple(
    plan for plan in _NAMED if plan.with_suffix(".jsonl.gz").exists()
)  # with an archive
_KINDS = {"world", "folder", TEXT}  # keys that name the kind of data
CONLLU = (".conllu", ".conllu.gz")
LABELLED = "labels"  # name of the set made from a table of labelled texts
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,49}")


@dataclass
class _PlanFile:
    """The keys of a file; its `base` is read first."""

    data: dict[str, Any]
    objectives: dict[str, dict[str, Any]]
    budgets: tuple[float, ...]
    seeds: tuple[int, ...]
    tuning: dict[str, Any]
    controls: dict[str, Any]
    comparison: dict[str, Any]
    name: str = "league"
    options: tuple[str, ...] = ()
    usual_budgets: tuple[float, ...] | None = None
    base: str = ""


@dataclass
class _DataPaths:
    """The keys of data that are paths."""

    folder: str = ""
    text: str = ""
    probe: str = ""
    probe_test: str = ""
    folders: list[str] = field(default_factory=list)
    benchmarks: dict[str, str] = field(default_factory=dict)


def named_plan(word: str) -> Path:
    """Return the path of a file or folder, or of the plan of this name in the package.

    Raises:
        UsageError: A word without a dot or slash is none of these.
    """
    path, plans = Path(word), {plan.stem: plan for plan in _NAMED}
    if path.exists() or not NAME.fullmatch(word):
        return path
    if word not in plans:
        raise UsageError(
            f"{word}: neither a file or folder nor a plan that ships: {', '.join(plans)}."
            f"{nearest(word, plans)}"
        )
    return plans[word]


def shipped_archive(plan: Plan) -> Path | None:
    """Return the archive of a plan of the package, None for another plan."""
    for file in SHIPPED:
        if _hash_of_shipped(file) == plan.hash:
            return archive_beside(file)
    return None


@cache
def _hash_of_shipped(file: Path) -> str:
    """Return the hash of a plan of the package."""
    return read_plan(file)[0].hash


def archive_beside(plan: Path) -> Path | None:
    """Return the archive of runs next to a plan: PLAN.jsonl.gz or PLAN.jsonl; None without one."""
    files = [plan.with_suffix(ending).absolute() for ending in (".jsonl.gz", ".jsonl")]
    return next((file for file in files if file.exists()), None)


def read_plan(
    path: Path, files: Mapping[str, str] | None = None, above: tuple[Path, ...] = ()
) -> tuple[Plan, dict[str, Any]]:
    """Return the plan of a file, and its content with absolute paths of the data.

    Its content is merged over the content of its base, another plan.

    Args:
        path: The file.
        files: The files for the keys FILES, for a plan of a text without data.
        above: The plans that use it as a base.

    Raises:
        UsageError: It is invalid; the message names the file.
    """
    content = read_mapping(path)
    if (base := content.pop("base", None)) is not None:
        file = next((plan for plan in _NAMED if plan.stem == base), path.parent / str(base))
        file = file.resolve()
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
    """Return the content of a plan merged over the content of its base.

    Mappings are merged one level deep, and options by key. Data of another kind, other lists and
    values are replaced. null removes a value of the base.
    """
    merged = dict(base)
    for key, value in content.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            if key != "data" or _KINDS.isdisjoint(value):
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

    If the probe is a table, the metric is the accuracy of its labels.
    """
    content = {**content, "data": {**content.get("data", {}), **files}}
    if not files["probe"].endswith(CONLLU):
        suites = [f"probe {LABELLED} name={LABELLED}"]
        # Objectives may be tuned by the mean of the accuracies that select a layer.
        means = {"probes_valid": [f"{LABELLED}.valid_accuracy"]}
        metrics = {"metric": f"{LABELLED}.accuracy", "means": means, "secondary": []}
        content["comparison"] = {**content["comparison"], "suites": suites, **metrics}
    return content


def parse_plan(content: Mapping[str, Any]) -> Plan:
    """Return the checked plan; raises UsageError."""
    file = read_structured(_PlanFile, dict(content))
    if not file.objectives:
        raise UsageError("objectives: there is none")
    tuning = {"grid": {}, "budgets": list(file.budgets), **file.tuning}
    shuffled = file.controls.get("shuffled", False)
    if isinstance(shuffled, bool):  # true: all budgets, false: none
        file.controls["shuffled"] = list(file.budgets) if shuffled else []
    controls = {"untrained": True, "seeds": list(file.seeds[:3]), **file.controls}
    comparison = {"suites": [], "secondary": [], **file.comparison}
    if isinstance(comparison["suites"], list):
        texts = [as_text(item) if isinstance(item, dict) else item for item in comparison["suites"]]
        comparison["suites"] = texts
    rules = read_structured(Tuning, tuning, "tuning")
    objectives = [parse_objective(*item, rules.grid) for item in file.objectives.items()]
    usual = file.budgets if file.usual_budgets is None else file.usual_budgets
    return Plan(
        name=file.name,
        data=_parse_data(file.data, Path()),
        options=file.options,
        objectives=tuple(objectives),
        ladder=Ladder(file.budgets, usual, file.seeds),
        tuning=rules,
        controls=read_structured(Controls, controls, "controls"),
        comparison=read_structured(Comparison, comparison, "comparison"),
    )


def parse_objective(name: str, content: dict[str, Any], grid: dict[str, list[Any]]) -> Objective:
    """Return a checked objective; without its own grid it is tuned on `grid`."""
    place = f"objectives.{name}"
    if not NAME.fullmatch(name):
        raise UsageError(f"{place}: it names folders, so use at most 50 letters, digits, _ and -")
    content = {"options": [], "grid": grid, **content}
    if content.get("note", "") is None:
        content["note"] = "null"  # as in earlier versions, because hashes include it
    return read_structured(Objective, content, place, name=name)


def _parse_data(data: dict[str, Any], base: Path) -> dict[str, Any]:
    """Return options of preprocess, or the path of a data folder.

    Returned paths are absolute; relative ones are resolved against `base`.
    """
    keys = [item.name for item in fields(_DataPaths) if item.name in data]
    paths = read_structured(_DataPaths, {key: data[key] for key in keys}, "data")
    if "folder" in data and len(data) > 1:
        further = ", ".join(data.keys() - {"folder"})
        raise UsageError(f"data: a folder has no further keys; leave out {further}")
    if TEXT in data and not all(key in data for key in FILES):
        raise UsageError(f"data: a text needs {', '.join(FILES)}")
    if not data.keys() - {FOLDERS, BENCHMARKS}:
        raise UsageError("data: give a folder, a text, or options such as world: quad")
    for key in data.keys() - set(keys):
        text_of(data[key], f"data.{key}")
    if len({Path(path).name for path in paths.folders}) < len(paths.folders):
        raise UsageError(
            f"data.{FOLDERS}: two folders have the same name, by which suites find them"
        )
    return {**data, **{key: _locate(asdict(paths)[key], base) for key in keys}}


def _locate(paths: Any, base: Path) -> Any:
    """Return a path, or the paths in a list or mapping, as absolute paths."""
    if isinstance(paths, dict):
        return {key: _locate(path, base) for key, path in paths.items()}
    if isinstance(paths, list):
        return [_locate(path, base) for path in paths]
    return absolute(paths, base)
