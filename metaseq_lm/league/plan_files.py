"""Reading the files of plans: YAML, whose keys docs/how_to/league.md describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from metaseq_lm.config.entries import as_text
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.plain_yaml import naming_place
from metaseq_lm.core.registry import nearest
from metaseq_lm.core.structured import read_structured
from metaseq_lm.league.plan import (
    BENCHMARKS,
    FOLDERS,
    PROBE,
    PROBE_TEST,
    TEXT,
    Comparison,
    Controls,
    Ladder,
    Objective,
    Plan,
    Tuning,
    map_paths,
)
from metaseq_lm.sweeps.definition import absolute_path, read_mapping, text_of

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
# The sets that a labelled file gives, by the ending of its name: of words, else of texts.
UPOS, RELATION, TAGS, LABELLED = "upos", "relation", "tags", "labels"
_WORDS = {".conllu": (UPOS, RELATION), **dict.fromkeys((".conll", ".bio", ".iob"), (TAGS,))}
# Frozen and fine-tuned readings of a set of words, and of texts: {set}, and the split {split}.
_OF_WORDS = (
    "probe {set} name={set} split={split} train=500 test=800",
    "adapt {set} name={set}_tuned split={split} test=800 updates=100 lr=[1e-3]",
)
_OF_TEXTS = (
    "probe {set} name={set} split={split} train=2000 test=1000",
    "finetune {set} name={set}_tuned split={split} train=500 epochs=4 batch_size=16 lr=1e-3 "
    "frozen=false",
)
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
    text: Any = ""
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
    return read_plan(file)[0].hash


def archive_beside(plan: Path) -> Path | None:
    """Return the archive of runs next to a plan: PLAN.jsonl.gz or PLAN.jsonl; None without one."""
    files = [plan.with_suffix(ending).absolute() for ending in (".jsonl.gz", ".jsonl")]
    return next((file for file in files if file.exists()), None)


def read_plan(
    path: Path, files: Mapping[str, Any] | None = None, above: tuple[Path, ...] = ()
) -> tuple[Plan, dict[str, Any]]:
    """Return the plan of a file, and its content with absolute paths of the data.

    Its content is merged over the content of its base, another plan.

    Args:
        path: The file.
        files: The files for the keys plan.FILES, for a plan of a text without data.
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
        content = merge(read_plan(file, above=above)[1], content)
    if files:
        located = map_paths(lambda file: absolute_path(file, Path.cwd()), dict(files))
        content["data"] = {**content["data"], **located}
    with naming_place(path, always=True):
        return plan_of(content, path.parent)


def plan_of(content: Mapping[str, Any], base: Path) -> tuple[Plan, dict[str, Any]]:
    """Return the plan of a mapping, and the mapping with all that it leaves to the text's data.

    Paths are made absolute, relative ones resolved against `base`; a plan of a text that names no
    suites has the readings of its labelled file. Raises UsageError.
    """
    data, comparison = content.get("data"), content.get("comparison")
    if isinstance(data, dict):
        data = _parse_data(data, base)
        content = {**content, "data": data}
        if TEXT in data and isinstance(comparison, dict) and "suites" not in comparison:
            content["comparison"] = {**_readings(data), **comparison}
    return parse_plan(content), dict(content)


def merge(base: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
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
            value = list({str(x).partition("=")[0]: x for x in (*base[key], *value)}.values())
        merged[key] = value
    return {key: value for key, value in merged.items() if value is not None}


def probe_sets(file: str) -> tuple[str, ...]:
    """Return the names of the sets that a labelled file gives, by the ending of its name."""
    return _WORDS.get(Path(file.removesuffix(".gz")).suffix, (LABELLED,))


def _readings(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return suites and metrics of the labelled file of a text: frozen, and fine-tuned."""
    sets, split = probe_sets(data[PROBE]), "test" if PROBE_TEST in data else "valid"
    templates = _OF_TEXTS if sets == (LABELLED,) else _OF_WORDS
    pairs = product(templates, sets)
    suites = [template.format(set=name, split=split) for template, name in pairs]
    means = {
        "frozen": [f"{name}.accuracy" for name in sets],
        "tuned": [f"{name}_tuned.accuracy" for name in sets],
        "end_task": ["frozen", "tuned"],
        # The accuracies that choose a layer, by which objectives may be tuned.
        "frozen_valid": [f"{name}.valid_accuracy" for name in sets],
    }
    parts = [*means["frozen"], *means["tuned"]] if len(sets) > 1 else []
    secondary = ["frozen", "tuned", *parts]
    return {"suites": suites, "metric": "end_task", "means": means, "secondary": secondary}


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
    """Return options of preprocess, or a data folder, with paths resolved against `base`."""
    keys = [item.name for item in fields(_DataPaths) if item.name in data]
    paths = read_structured(_DataPaths, {key: data[key] for key in keys}, "data")
    if "folder" in data and len(data) > 1:
        further = ", ".join(data.keys() - {"folder"})
        raise UsageError(f"data: a folder has no further keys; leave out {further}")
    if TEXT in data:
        if PROBE not in data:
            raise UsageError(f"data: a text needs a labelled file, {PROBE}")
        named = [data[TEXT]] if isinstance(data[TEXT], str) else data[TEXT]
        if not (isinstance(named, list) and named and all(isinstance(f, str) for f in named)):
            raise UsageError(f"data.{TEXT}: {data[TEXT]!r} is neither a file nor a list of files")
    if not data.keys() - {FOLDERS, BENCHMARKS}:
        raise UsageError("data: give a folder, a text, or options such as world: quad")
    for key in data.keys() - set(keys):
        text_of(data[key], f"data.{key}")
    if len({Path(path).name for path in paths.folders}) < len(paths.folders):
        raise UsageError(
            f"data.{FOLDERS}: two folders have the same name, by which suites find them"
        )
    located = {key: value for key, value in asdict(paths).items() if key in data}
    return {**data, **map_paths(lambda path: absolute_path(path, base), located)}
