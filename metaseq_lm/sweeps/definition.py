"""A sweep's definition: read from a YAML file and the command line, and checked."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hydra.errors import HydraException

from metaseq_lm.core.config import names_runs
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import format_value, quote
from metaseq_lm.core.plain_yaml import read_yaml
from metaseq_lm.core.registry import nearest

STAGE_KEYS = ("name", "each", "config_name", "overrides")
KEYS = tuple("data config_dir config_name stages grid list seeds overrides search launch".split())
KEY = re.compile(r"([A-Za-z][\w-]*:)?[A-Za-z_][\w./@-]*")
STAGE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,49}")
# {name}, but not OmegaConf's ${name} and not Hydra's {key: value}.
PLACEHOLDER = re.compile(r"(?<!\$)\{([^{}:,\s]+)\}")
# An item of a list as Hydra reads it: commas inside quotes do not separate.
LIST_ITEM = re.compile(r"""(?:'[^']*'|"[^"]*"|[^,'"])+""")
RESERVED = {
    "save_dir": "the sweep names the folders",
    "seed": "give seeds (--seeds 1,2,3)",
    "user_dir": "give --user-dir",
}
NO_PLUGIN = "a plug-in is loaded only if --user-dir names it"
RESERVED_STAGES = ("code", "jobs", "seed", "train")


@dataclass(frozen=True)
class Stage:
    """A stage of every run; its name is "" if the sweep lists no stages.

    Attributes:
        name: Its name, also that of its folder in OUT.
        config_name: The config in the sweep's config_dir; None for the base config.
        overrides: key=value options of `train`, with {placeholders}.
    """

    name: str
    config_name: str | None = None
    overrides: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Stage:
        """Return the stage stored in a row of sweep.json."""
        return cls(row["name"], row["config_name"], tuple(row["overrides"]))

    def as_json(self) -> dict[str, Any]:
        """Return what sweep.json keeps."""
        overrides = list(self.overrides)
        return {"name": self.name, "config_name": self.config_name, "overrides": overrides}


@dataclass(frozen=True)
class Definition:
    """A sweep's definition; all values are checked and all paths are absolute.

    Attributes:
        data: The data folder.
        config_dir: The folder of the sweep's configs; None without one.
        user_dir: The plug-in; None without one.
        stages: The stages of every run, in order.
        grid: The values of each key; all combinations are run.
        alternatives: Groups of values that are set together; `list` in SWEEP.yaml.
        seeds: The seeds of every setting.
        overrides: key=value options of every stage, with {placeholders}.
    """

    data: str
    config_dir: str | None
    user_dir: str | None
    stages: tuple[Stage, ...]
    grid: dict[str, list[Any]]
    alternatives: list[dict[str, Any]]
    seeds: list[int]
    overrides: list[str]

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Definition:
        """Return the definition stored in a sweep.json."""
        values = {key: content[key] for key in ("data", "config_dir", "user_dir", "grid", "seeds")}
        stages = tuple(map(Stage.from_json, content["stages"]))
        return cls(
            **values,
            stages=stages,
            alternatives=content["list"],
            overrides=content["overrides"],
        )

    def as_json(self) -> dict[str, Any]:
        """Return what sweep.json keeps."""
        return {
            "data": self.data,
            "config_dir": self.config_dir,
            "user_dir": self.user_dir,
            "stages": [stage.as_json() for stage in self.stages],
            "grid": self.grid,
            "list": self.alternatives,
            "seeds": self.seeds,
            "overrides": self.overrides,
        }


# ---------------------------------------------------------------- reading


def read_file(path: Path) -> dict[str, Any]:
    """Read a sweep file; its relative paths become absolute. Raises UsageError."""
    content = read_mapping(path, "a sweep file", KEYS, {"user_dir": NO_PLUGIN})
    for key in ("data", "config_dir"):
        if content.get(key) is not None:
            content[key] = absolute(str(content[key]), path.parent)
    absolute_content = absolute_sources(content, path.parent)
    return {str(key): value for key, value in absolute_content.items() if value is not None}


def read_mapping(
    path: Path, noun: str, keys: tuple[str, ...], refused: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the content of a YAML file; UsageError for one with keys that are not in `keys`.

    `noun` is what the file is called in messages; `refused` are reasons against further keys.
    """
    try:
        content = read_yaml(path)
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such file") from None
    except ValueError as error:
        raise UsageError(f"{path}: not readable as YAML: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path}: {noun} is a mapping with the keys {', '.join(keys)}")
    for key, reason in (refused or {}).items():
        if key in content:
            raise UsageError(f"{path}: {key}: {reason}")
    check_keys(content, keys, str(path))
    return {str(key): value for key, value in content.items()}


def absolute(path: str, base: Path) -> str:
    """Return a path given by the user as an absolute path."""
    return os.path.abspath(base / Path(printable(path, "path")).expanduser())


def absolute_sources(content: Any, base: Path, key: str = "") -> Any:
    """Return (part of) a sweep's content with absolute paths in the options that name other runs.

    Relative paths are relative to `base`; paths that begin with a {placeholder} are unchanged.
    `key` is the key that holds the part.
    """
    if isinstance(content, dict):
        return {k: absolute_sources(value, base, str(k)) for k, value in content.items()}
    if isinstance(content, list):
        return [absolute_sources(item, base, key) for item in content]
    if not isinstance(content, str):
        return content
    if names_runs(key.rpartition(":")[2]):
        return content if content[:1] in ("", "{", "$", "/") else absolute(content, base)
    option, equals, value = content.partition("=")
    if key != "overrides" or not names_runs(option) or value in ("", "null"):
        return content
    if value.startswith("["):
        items = [item.strip().strip("'\"") for item in LIST_ITEM.findall(value[1:].rstrip("]"))]
        paths = absolute_sources(items, base, option)
        return content if paths == items else f"{option}=[{','.join(map(quote_item, paths))}]"
    bare = value[1:-1] if value[0] in "'\"" and value[0] == value[-1] else value
    path = absolute_sources(bare, base, option)
    return content if path == bare else f"{option}={path}"  # train takes a path as typed


def quote_item(item: str) -> str:
    """Return a list entry, in quotes if it needs them; `fill` quotes one with a {placeholder}."""
    return item if item.startswith("{") else quote(item)


def plugin(name: str, base: Path) -> str:
    """Return a --user-dir as an absolute path, or unchanged if it names an installed module."""
    path = absolute(name, base)
    return path if os.sep in name or Path(path).exists() else name


def axis(text: str) -> tuple[str, list[Any]]:
    """Return key and values of KEY=A,B,C in Hydra's grammar; raises UsageError."""
    key, equals, _ = text.partition("=")
    if not equals or not KEY.fullmatch(key):
        raise UsageError(f"--grid {printable(text, '--grid')}: not of the form KEY=VALUE,VALUE")
    stage, colon, _ = key.rpartition(":")
    return key, override_values(text[len(stage) + len(colon) :], f"--grid {text}")


def override_values(text: str, source: str) -> list[Any]:
    """Return the values of an override KEY=VALUE,VALUE without Hydra's quotes.

    Raises UsageError whose message begins with `source`.
    """
    try:
        override = OverridesParser.create().parse_override(text)
        swept = override.is_sweep_override()
        values = list(override.sweep_iterator()) if swept else [override.value()]
        return [unquoted(value) for value in values]
    except HydraException as error:
        raise UsageError(f"{source}: {str(error).splitlines()[0]}") from error


def unquoted(value: Any) -> Any:
    """Return a parsed value without Hydra's quotes."""
    if isinstance(value, QuotedString):
        return value.text
    return [unquoted(item) for item in value] if isinstance(value, list) else value


# ---------------------------------------------------------------- checking


def normalise(content: dict[str, Any], patterns: Sequence[str] = ()) -> Definition:
    """Return the checked definition; raises UsageError if it is invalid.

    `patterns` select stages by name, together with the stages that they start from.
    """
    if not content.get("data"):
        raise UsageError("no DATA folder given; see 'metaseq-lm sweep --help'")
    if not Path(content["data"]).is_dir():
        raise UsageError(f"{content['data']}: there is no such data folder; make it: 'preprocess'")
    if "stages" in content and "config_name" in content:
        raise UsageError(
            "config_name cannot be given along with stages: set it in each stage instead"
        )
    single: dict[str, Any] = {
        "name": "",
        "config_name": content.get("config_name"),
        "overrides": [],
    }
    stages: list[Stage] = []
    for stage in sequence(content.get("stages", [single]), "stages"):
        stages += map(parse_stage, expand_each(mapping(stage, "stages")))
    names = [stage.name for stage in stages]
    if len(set(names)) < len(names):
        raise UsageError(f"stages: two have the same name ({', '.join(names)})")
    stages = select_stages(stages, patterns)
    grid = mapping(content.get("grid", {}), "grid")
    overrides = sequence(content.get("overrides", []), "overrides", True)
    alternatives = sequence(content.get("list", []), "list", True)
    definition = Definition(
        data=content["data"],
        config_dir=content.get("config_dir"),
        user_dir=content.get("user_dir"),
        stages=tuple(stages),
        grid={key: sequence(values, f"grid {key}") for key, values in grid.items()},
        alternatives=[mapping(item, "list") for item in alternatives],
        seeds=[parse_seed(seed) for seed in sequence(content.get("seeds", [1]), "seeds")],
        overrides=[parse_override_text(override) for override in overrides],
    )
    check_axes(definition)
    return definition


def expand_each(stage: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one copy of a stage for each value of `each`, which replaces {key} in its strings."""
    each = mapping(stage.get("each", {}), "each")
    choices = [sequence(values, f"each {key}") for key, values in each.items()]
    rest = {key: value for key, value in stage.items() if key != "each"}
    copies = []
    for values in itertools.product(*choices):
        filled = {key: text_of(value, f"each {key}") for key, value in zip(each, values)}
        copies.append({key: substitute(value, filled) for key, value in rest.items()})
    return copies


def substitute(value: Any, values: dict[str, str]) -> Any:
    """Return a string, or a list of them, with {name} replaced by `values`; unknown names stay."""
    if isinstance(value, list):
        return [substitute(item, values) for item in value]
    if not isinstance(value, str):
        return value
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), value)


def select_stages(stages: list[Stage], patterns: Sequence[str]) -> list[Stage]:
    """Return the stages that match a pattern and those they start from; all if no pattern."""
    names = [stage.name for stage in stages]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            problem = (
                f"there is no such stage.{nearest(pattern, names)} Stages: {', '.join(names)}."
            )
            if names == [""]:
                problem = "the sweep has no stages; leave --stages out, or list them in SWEEP.yaml"
            raise UsageError(f"--stages {printable(pattern, '--stages')}: {problem}")
    chosen = set() if patterns else set(names)
    for pattern in patterns:
        chosen |= {name for name in names if fnmatchcase(name, pattern)}
    for stage in reversed(stages):
        if stage.name in chosen:
            for text in (stage.config_name or "", *stage.overrides):
                chosen.update(PLACEHOLDER.findall(text))
    return [stage for stage in stages if stage.name in chosen]


def parse_stage(stage: dict[str, Any]) -> Stage:
    """Return a checked stage."""
    name = stage.get("name")
    check_keys(stage, STAGE_KEYS, f"stage {name}")
    single = name == "" and "overrides" in stage
    if not single and not (
        isinstance(name, str) and STAGE.fullmatch(name) and name not in RESERVED_STAGES
    ):
        raise UsageError(
            f"stage name {name!r}: it names a folder, so use at most 50 letters, digits, _ and - "
            f"(not {', '.join(RESERVED_STAGES)})"
        )
    config_name = stage.get("config_name")
    if config_name is not None and not (isinstance(config_name, str) and config_name):
        raise UsageError(f"config_name {config_name!r}: not the name of a config")
    overrides = sequence(stage.get("overrides") or [], f"overrides of {name}", True)
    if config_name is not None:
        printable(config_name, "config_name")
    return Stage(str(name), config_name, tuple(map(parse_override_text, overrides)))


def check_axes(definition: Definition) -> None:
    """Raise UsageError for axes with unknown keys, conflicts or repeated values."""
    alternatives, grid = definition.alternatives, definition.grid
    stages = [stage.name for stage in definition.stages]
    for key in itertools.chain(grid, *alternatives):
        stage = key.partition(":")[0] if ":" in key else None
        if not KEY.fullmatch(key) or (stage is not None and stage not in stages):
            raise UsageError(f"'{printable(key, 'key')}' is neither a key nor <stage>:<key>")
        if key in stages:
            raise UsageError(f"'{key}' is the name of a stage and of a value; rename one")
        if key.rpartition(":")[2] in RESERVED:
            raise UsageError(f"{key} cannot be varied: {RESERVED[key.rpartition(':')[2]]}")
    for item in alternatives:
        if set(item) != set(alternatives[0]):
            raise UsageError(
                f"list: every alternative needs the same keys, {', '.join(alternatives[0])}; one "
                f"has {', '.join(item) or 'none'}. A method with options of its own is a config "
                "file of its own (config_name: '{method}'), or a sweep of its "
                "own: report reads several folders"
            )
    if alternatives and not alternatives[0]:
        raise UsageError("list: an alternative has no keys")
    for key in alternatives[0] if alternatives else ():
        if key in grid:
            raise UsageError(f"{key} is in grid and in list; keep one")
    for name, values in grid.items():
        for value in values:
            text_of(value, name)
    for item in alternatives:
        for name, value in item.items():
            text_of(value, name)
    axes: dict[str, list[Any]] = {"list": alternatives, "seeds": definition.seeds, **grid}
    for name, values in axes.items():
        repeats = [text for text, count in Counter(map(repr, values)).items() if count > 1]
        if repeats:
            is_truth = repeats[0] in ("True", "False")
            hint = "; YAML takes yes, on, no and off for truth values, quote words" * is_truth
            raise UsageError(f"{name}: {repeats[0]} is given twice{hint}")


def mapping(value: Any, name: str) -> dict[str, Any]:
    """Return `value` if it is a mapping with string keys; raises UsageError."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"{name}: {value!r} is not a mapping of keys to values")
    return value


def sequence(value: Any, name: str, allow_empty: bool = False) -> list[Any]:
    """Return `value` if it is a list, and not empty unless allowed; raises UsageError."""
    if not isinstance(value, list):
        raise UsageError(f"{name}: {value!r} is not a list, such as [1, 2]")
    if not value and not allow_empty:
        raise UsageError(f"{name}: the list is empty")
    return value


def parse_seed(value: Any) -> int:
    """Return `value` as a seed; raises UsageError if it is none."""
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,9}", str(value)):
        raise UsageError(f"seeds: {value!r} is not a whole number from 0 to 999999999")
    return int(value)


def parse_override_text(value: Any) -> str:
    """Return `value` if it is a valid key=value override; raises UsageError."""
    if not isinstance(value, str) or "=" not in value:
        raise UsageError(f"overrides: {value!r} is not key=value")
    printable(value, "overrides")
    key = value.partition("=")[0]
    if key in RESERVED:
        raise UsageError(f"'{value}': {RESERVED[key]}")
    if not KEY.fullmatch(key) or ":" in key:
        raise UsageError(f"'{value}': keys can be set (key=value), not added or removed")
    return value


def check_keys(content: dict[Any, Any], keys: tuple[str, ...], where: str) -> None:
    """Raise UsageError for a key that is not one of `keys`."""
    for key in content:
        if key not in keys:
            hint = nearest(str(key), list(keys))
            raise UsageError(f"{where}: unknown key {key!r}.{hint} Keys: {', '.join(keys)}.")


def printable(text: str, name: str) -> str:
    """Return `text`; raises UsageError if it has control characters or line breaks."""
    if not text.isprintable():
        raise UsageError(f"{name}: {text!r} has characters that cannot be printed")
    return text


# ---------------------------------------------------------------- values


def text_of(value: Any, name: str) -> str:
    """Return a value as the string that replaces a placeholder; raises UsageError."""
    if isinstance(value, str):
        return printable(value, name)
    if value is None or isinstance(value, (bool, int, float, list)):
        return hydra_text(value, name)
    raise UsageError(f"{name}: {value!r} is not a number, a text or a list of them")


def hydra_text(value: Any, name: str) -> str:
    """Return a value as a string that Hydra parses to the same value; errors begin with `name`."""
    if isinstance(value, list):
        return "[" + ",".join(hydra_text(v, name) for v in value) + "]"
    if value is None or isinstance(value, (bool, int, float)):
        return format_value(value)
    return quote(text_of(value, name))


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Return the differences between two definitions, one a line; stages are compared by name."""
    if where == "stages" and isinstance(old, list) and isinstance(new, list) and old != new:
        old = {stage["name"]: stage for stage in old}
        new = {stage["name"]: stage for stage in new}
        lines = [f"stage {n} only there" for n in old if n not in new]
        lines += [f"stage {n} only here" for n in new if n not in old]
        shared = [n for n in old if n in new]
        lines += differences({n: old[n] for n in shared}, {n: new[n] for n in shared}, where)
        return lines or ["the stages are in a different order"]
    if isinstance(old, dict) and isinstance(new, dict):
        names = [n for n in (*old, *new) if old.get(n) != new.get(n)]
        lines = []
        for name in dict.fromkeys(names):
            lines += differences(old.get(name), new.get(name), f"{where}.{name}".lstrip("."))
        return lines
    return [] if old == new else [f"{where} is {old!r} there, {new!r} here"]
