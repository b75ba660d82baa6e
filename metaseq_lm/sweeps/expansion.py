"""From a definition to its runs: names, folders, and the arguments of `train` for every stage."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metaseq_lm.core.config import names_runs
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import quote, quote_path
from metaseq_lm.core.registry import nearest
from metaseq_lm.sweeps.definition import (
    PLACEHOLDER,
    Definition,
    hydra_text,
    override_values,
    substitute,
    text_of,
)

NAME_LENGTH = 120


@dataclass(frozen=True)
class StageRun:
    """One stage of a run: its folder, relative to OUT, and the arguments of `train`."""

    name: str
    folder: str
    arguments: tuple[str, ...]

    def configuration(self) -> tuple[str | None, list[str]]:
        """Return the name of the config, None for the base config, and all options as key=value."""
        data, *words = self.arguments
        name = None
        if words[0] == "--config-name":
            name, words = words[1], words[2:]
        _, folder, *options = words  # --save-dir
        return name, [f"save_dir={quote_path(folder)}", f"data={quote_path(data)}", *options]

    def starts_from(self, earlier: StageRun) -> bool:
        """Return whether an option of this stage names the folder of an earlier one of its run."""
        return any(f"/{earlier.folder}" in argument for argument in self.arguments)


@dataclass(frozen=True)
class PlannedRun:
    """One run: a value for every axis, a seed, and its stages."""

    name: str
    folder: str  # folder of the last stage
    values: dict[str, Any]
    seed: int
    stages: tuple[StageRun, ...]

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> PlannedRun:
        """Return the run stored in an entry of sweep.json."""
        stages = tuple(
            StageRun(s["name"], s["folder"], tuple(s["arguments"])) for s in row["stages"]
        )
        return cls(row["name"], row["folder"], row["values"], row["seed"], stages)


def expand(definition: Definition, out: Path) -> list[PlannedRun]:
    """Return the runs: all of the grid x the list for the first seed, then for the next seed.

    In this order an unfinished sweep already has settings to compare. Raises UsageError for
    templates that cannot be filled.
    """
    ordered = itertools.product(definition.seeds, definition.settings)
    pairs = [(values, seed) for seed, values in ordered]
    runs = []
    for (values, seed), name in zip(pairs, run_names(pairs)):
        folders = {s.name: os.path.join(s.name, name) for s in definition.stages}
        arguments = arguments_of(definition, values, seed, folders, out)
        stages = tuple(
            StageRun(stage.name, folders[stage.name], tuple(words))
            for stage, words in zip(definition.stages, arguments)
        )
        runs.append(PlannedRun(name, stages[-1].folder, values, seed, stages))
    return runs


def arguments_of(
    definition: Definition,
    values: dict[str, Any],
    seed: int,
    folders: dict[str, str],
    out: Path,
) -> list[list[str]]:
    """Return `train`'s arguments for every stage of a run, except --config-dir and --user-dir."""
    templates = list(definition.overrides)
    for stage in definition.stages:
        templates += [stage.config_name or "", *stage.overrides]
    used = set(PLACEHOLDER.findall("\n".join(templates)))
    filled = {key: text_of(value, key) for key, value in values.items()} | {"seed": str(seed)}
    paths: dict[str, str] = {}
    every = []
    for stage in definition.stages:
        name = stage.name
        overrides = [*definition.overrides, *stage.overrides]
        written = len(overrides)
        for key, value in values.items():
            only, _, bare = key.rpartition(":")
            if key not in used and only in ("", name):
                overrides.append(f"{bare}={hydra_text(value, key)}")
        arguments = [definition.data]
        if stage.config_name is not None:
            arguments += ["--config-name", fill(stage.config_name, filled, {})]
        folder = str(out / folders[name])
        arguments += ["--save-dir", folder, f"seed={seed}"]
        arguments += [fill(o, filled, paths) for o in overrides[:written]] + overrides[written:]
        for argument in arguments[1:]:
            _check_path(argument)
        every.append(arguments)
        paths[name] = folder
    return every


def _check_path(argument: str) -> None:
    """Raise UsageError for a relative path, since jobs may run from another folder."""
    key, _, value = argument.partition("=")
    if key != "data" and not names_runs(key):
        return
    if value.startswith("["):
        lists = [x for x in override_values(argument, f"'{argument}'") if isinstance(x, list)]
        paths = list(map(str, itertools.chain.from_iterable(lists)))
    else:
        paths = [value.strip("'\"")]
    if any(path not in ("", "null") and not os.path.isabs(path) for path in paths):
        raise UsageError(f"'{argument}': give an absolute path, or one from a stage: {{stage}}/...")


def fill(template: str, values: dict[str, str], paths: dict[str, str]) -> str:
    """Replace the {placeholders}; a value with a path is quoted, in a list item by item."""
    names = PLACEHOLDER.findall(template)
    for name in names:
        if name not in values and name not in paths:
            placeholders = [*values, *(p for p in paths if p)]
            raise UsageError(
                f"'{template}': nothing is named {{{name}}}.{nearest(name, placeholders)} "
                f"Placeholders here: {', '.join(placeholders)}."
            )
    key, equals, value = template.partition("=")
    inside = bool(equals) and any(n in paths for n in names)
    if inside and value.startswith("[") and value.endswith("]"):
        items = [substitute(item.strip(), values | paths) for item in value[1:-1].split(",")]
        return f"{substitute(key, values)}=[{','.join(map(quote, items))}]"
    text = substitute(template, values | paths)
    key, equals, value = text.partition("=")
    return f"{key}={quote(value)}" if inside else text


# ---------------------------------------------------------------- naming


def run_names(pairs: list[tuple[dict[str, Any], int]]) -> list[str]:
    """Return a readable name for every (values, seed): `lr=0.001-seed=1`, safe in any file system.

    Long names are cut. Cut names, and names that differ only in capitals, get a hash.
    """
    keys = list(pairs[0][0])
    short = {key: key.replace(":", ".").replace("/", ".").rpartition(".")[2] for key in keys}
    counts = Counter([*short.values(), "seed"])
    names = []
    for values, seed in pairs:
        parts = [
            f"{clean(short[key] if counts[short[key]] == 1 else key)}={clean(value)}"
            for key, value in values.items()
        ]
        names.append("-".join([*parts, f"seed={seed}"]))
    same = Counter(name.lower() for name in names)
    return [
        name if len(name) <= NAME_LENGTH and same[name.lower()] == 1 else _hashed(name, pair)
        for name, pair in zip(names, pairs)
    ]


def clean(value: Any) -> str:
    """Return a value with only letters, digits and ._- in it."""
    text = value if isinstance(value, str) else hydra_text(value, "").replace("e+", "e")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")


def _hashed(name: str, pair: tuple[dict[str, Any], int]) -> str:
    """Return a cut name, with a hash of its values and its seed at the end."""
    digest = hashlib.sha256(repr(pair).encode()).hexdigest()[:8]
    head = name.rpartition("-seed=")[0] or name
    return f"{head[: NAME_LENGTH - 30]}-{digest}-seed={pair[1]}"
