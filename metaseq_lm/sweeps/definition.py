"""A sweep's definition: read from a YAML file and the command line, and checked."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hydra.errors import HydraException

from metaseq_lm.core.config import SWEEP, names_runs, why_set
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import Compositions, format_value, quote
from metaseq_lm.core.plain_yaml import naming_place, read_yaml
from metaseq_lm.core.registry import nearest
from metaseq_lm.core.structured import read_structured, read_values

KEY = re.compile(r"([A-Za-z][\w-]*:)?[A-Za-z_][\w./@-]*")
STAGE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,49}")
# {name}, but not OmegaConf's ${name} and not Hydra's {key: value}.
PLACEHOLDER = re.compile(r"(?<!\$)\{([^{}:,\s]+)\}")
# An item of a list as Hydra reads it: commas inside quotes do not separate.
_LIST_ITEM = re.compile(r"""(?:'[^']*'|"[^"]*"|[^,'"])+""")
LARGEST_SEED = 999_999_999
_RESERVED_STAGES = ("code", "jobs", "seed", "train")


@dataclass(frozen=True)
class Stage:
    """A stage of every run; the name is "" if the sweep lists no stages.

    Attributes:
        name: Its name, also the name of its folder in OUT.
        config_name: The config in the sweep's config_dir; None for the base config.
        overrides: key=value options of `train`, with {placeholders}.
    """

    name: str
    config_name: str | None = None
    overrides: list[str] = field(default_factory=list)


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
    stages: list[Stage]
    grid: dict[str, list[Any]]
    alternatives: list[dict[str, Any]]
    seeds: list[int]
    overrides: list[str]

    @cached_property
    def compositions(self) -> Compositions:
        """The compositions so far, with the plug-in; see `load_config`."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone: a job unpickles them before it loads the plug-in."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The settings: all of the grid x the list."""
        settings = []
        for values in itertools.product(*self.grid.values()):
            for chosen in self.alternatives or [{}]:
                settings.append(dict(zip(self.grid, values)) | chosen)
        return settings

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Definition:
        """Return the definition stored in a sweep.json."""
        values = {**content, "alternatives": content["list"]}
        values["stages"] = [
            Stage(row["name"], row["config_name"], row["overrides"]) for row in content["stages"]
        ]
        return cls(**{item.name: values[item.name] for item in fields(cls)})

    def as_json(self) -> dict[str, Any]:
        """Return the definition for sweep.json."""
        return {"list" if k == "alternatives" else k: v for k, v in asdict(self).items()}


@dataclass
class _StageRow:
    """A stage in a sweep file; it stands for a stage per combination of the values of `each`."""

    name: str
    each: dict[str, list[Any]] = field(default_factory=dict)
    config_name: str | None = None
    overrides: list[str] | None = None


@dataclass
class _SweepFile:
    """The keys of a sweep file, and `user_dir` from the command line."""

    data: str | None = None
    config_dir: str | None = None
    config_name: str | None = None
    user_dir: str | None = None
    stages: list[dict[str, Any]] | None = None
    grid: dict[str, list[Any]] = field(default_factory=dict)
    alternatives: list[dict[str, Any]] = field(default_factory=list, metadata={"key": "list"})
    seeds: list[int] = field(default_factory=lambda: [1])
    overrides: list[str] = field(default_factory=list)
    search: dict[str, Any] = field(default_factory=dict)
    launch: dict[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------- reading


def read_file(path: Path) -> dict[str, Any]:
    """Return the content of a sweep file with absolute paths. Raises UsageError."""
    content = {key: value for key, value in read_mapping(path).items() if value is not None}
    with naming_place(path, always=True):
        if "user_dir" in content:
            raise UsageError("user_dir: a plug-in is loaded only if --user-dir names it")
        read_values(_SweepFile, content, fixed=("user_dir",))
        for key in content.keys() & {"data", "config_dir"}:
            content[key] = absolute_path(str(content[key]), path.parent)
    return dict(absolute_sources(content, path.parent))


def read_mapping(path: Path) -> dict[Any, Any]:
    """Return the content of a YAML file; UsageError unless it is a mapping."""
    try:
        content = read_yaml(path)
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such file") from None
    except ValueError as error:
        raise UsageError(f"{path}: not readable as YAML: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path}: not a mapping of keys to values")
    return content


def absolute_path(path: str, base: Path) -> str:
    """Return a path given by the user as an absolute path."""
    return os.path.abspath(base / Path(require_printable(path, "path")).expanduser())


def absolute_sources(content: Any, base: Path, key: str = "") -> Any:
    """Return (part of) a sweep's content with absolute paths in options that name other runs.

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
        return content if content[:1] in ("", "{", "$", "/") else absolute_path(content, base)
    option, equals, value = content.partition("=")
    if key != "overrides" or not names_runs(option) or value in ("", "null"):
        return content
    if value.startswith("["):
        items = [item.strip().strip("'\"") for item in _LIST_ITEM.findall(value[1:].rstrip("]"))]
        paths = absolute_sources(items, base, option)
        return content if paths == items else f"{option}=[{','.join(map(_quote_item, paths))}]"
    bare = value[1:-1] if value[0] in "'\"" and value[0] == value[-1] else value
    path = absolute_sources(bare, base, option)
    return content if path == bare else f"{option}={path}"  # train takes paths as typed


def _quote_item(item: str) -> str:
    """Return a list entry, quoted if necessary; `fill` quotes entries with a {placeholder}."""
    return item if item.startswith("{") else quote(item)


def plugin_path(name: str, base: Path) -> str:
    """Return a --user-dir as an absolute path, or unchanged if it names an installed module."""
    path = absolute_path(name, base)
    return path if os.sep in name or Path(path).exists() else name


def parse_grid(text: str) -> tuple[str, list[Any]]:
    """Return key and values of KEY=A,B,C in Hydra's grammar; raises UsageError."""
    key, equals, _ = text.partition("=")
    if not equals or not KEY.fullmatch(key):
        raise UsageError(
            f"--grid {require_printable(text, '--grid')}: not of the form KEY=VALUE,VALUE"
        )
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
        return [_unquoted(value) for value in values]
    except HydraException as error:
        raise UsageError(f"{source}: {str(error).splitlines()[0]}") from error


def _unquoted(value: Any) -> Any:
    """Return a parsed value without Hydra's quotes."""
    if isinstance(value, QuotedString):
        return value.text
    return [_unquoted(item) for item in value] if isinstance(value, list) else value


# ---------------------------------------------------------------- checking


def normalise(content: dict[str, Any], patterns: Sequence[str] = ()) -> Definition:
    """Return the checked definition; raises UsageError if it is invalid.

    `patterns` select stages by name, along with the stages that these start from.
    """
    file = read_structured(_SweepFile, content)
    if not file.data:
        raise UsageError("no DATA folder given; see 'metaseq-lm sweep --help'")
    if not Path(file.data).is_dir():
        raise UsageError(f"{file.data}: there is no such data folder; make it: 'preprocess'")
    stages = [Stage("", file.config_name)]
    if file.stages is not None:
        if file.config_name is not None:
            raise UsageError("config_name: set it in each stage, not along with stages")
        check_filled(file.stages, "stages")
        stages = []
        for i, row in enumerate(file.stages):
            stages += _read_stage(row, f"stages[{i}]")
    names = [stage.name for stage in stages]
    if len(set(names)) < len(names):
        raise UsageError(f"stages: two have the same name ({', '.join(names)})")
    definition = Definition(
        data=file.data,
        config_dir=file.config_dir,
        user_dir=file.user_dir,
        stages=_select_stages(stages, patterns),
        grid=file.grid,
        alternatives=file.alternatives,
        seeds=file.seeds,
        overrides=file.overrides,
    )
    _check_definition(definition)
    return definition


def _read_stage(content: Any, place: str) -> list[Stage]:
    row = read_structured(_StageRow, content, place)
    choices = []
    for key, values in row.each.items():
        where = f"{place}.each.{key}"
        check_filled(values, where)
        choices.append([text_of(value, where) for value in values])
    stages = []
    for chosen in itertools.product(*choices):
        filled = dict(zip(row.each, chosen))
        name = substitute(row.name, filled)
        if not STAGE.fullmatch(name) or name in _RESERVED_STAGES:
            raise UsageError(
                f"{place}.name: {name!r} names a folder, so use at most 50 letters, digits, _ and "
                f"- (not {', '.join(_RESERVED_STAGES)})"
            )
        if row.config_name == "":
            raise UsageError(f"{place}.config_name: '' is not the name of a config")
        overrides = substitute(row.overrides or [], filled)
        check_overrides(overrides, f"{place}.overrides")
        stages.append(Stage(name, substitute(row.config_name, filled), overrides))
    return stages


def substitute(value: Any, values: dict[str, str]) -> Any:
    """Return a string, or a list of them, with {name} replaced by `values`; unknown names stay."""
    if isinstance(value, list):
        return [substitute(item, values) for item in value]
    if not isinstance(value, str):
        return value
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), value)


def _select_stages(stages: list[Stage], patterns: Sequence[str]) -> list[Stage]:
    """Return the stages that match a pattern and those they start from; all if no pattern."""
    names = [stage.name for stage in stages]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            problem = (
                f"there is no such stage.{nearest(pattern, names)} Stages: {', '.join(names)}."
            )
            if names == [""]:
                problem = "the sweep has no stages; leave --stages out, or list them in SWEEP.yaml"
            raise UsageError(f"--stages {require_printable(pattern, '--stages')}: {problem}")
    chosen = set() if patterns else set(names)
    for pattern in patterns:
        chosen |= {name for name in names if fnmatchcase(name, pattern)}
    for stage in reversed(stages):
        if stage.name in chosen:
            for text in (stage.config_name or "", *stage.overrides):
                chosen.update(PLACEHOLDER.findall(text))
    return [stage for stage in stages if stage.name in chosen]


def _check_definition(definition: Definition) -> None:
    """Raise UsageError for wrong seeds and overrides, and for axes without or with equal values."""
    check_seeds(definition.seeds, "seeds")
    check_overrides(definition.overrides, "overrides")
    alternatives = definition.alternatives
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
    for key in itertools.chain(*alternatives[:1], definition.grid):
        _check_axis(key, definition)
    for key, values in definition.grid.items():
        check_filled(values, f"grid.{key}")
        for value in values:
            text_of(value, f"grid.{key}")
        check_different(values, f"grid.{key}")
    check_different(alternatives, "list")
    for item in alternatives:
        for key, value in item.items():
            text_of(value, f"list: {key}")


def _check_axis(key: str, definition: Definition) -> None:
    stage, colon, option = key.rpartition(":")
    stages = [stage.name for stage in definition.stages]
    place = f"grid.{key}" if key in definition.grid else "list"
    if not KEY.fullmatch(key) or (colon and stage not in stages):
        raise UsageError(
            f"{place}: {require_printable(key, 'key')!r} is neither a key nor <stage>:<key>"
        )
    if key in stages:
        raise UsageError(f"{place}: {key!r} is the name of a stage and of a value; rename one")
    if reason := why_set(option, SWEEP):
        raise UsageError(f"{place}: {key} cannot be varied: {reason}")
    if key in definition.grid and key in itertools.chain(*definition.alternatives):
        raise UsageError(f"{place}: {key} is in grid and in list; keep one")


def check_filled(values: Sequence[Any], place: str) -> None:
    """Raise UsageError for an empty list."""
    if not values:
        raise UsageError(f"{place}: the list is empty")


def check_different(values: Sequence[Any], place: str) -> None:
    """Raise UsageError if two values of one type are equal."""
    repeats = [text for text, count in Counter(map(repr, values)).items() if count > 1]
    if repeats:
        is_truth = repeats[0] in ("True", "False")
        hint = "; YAML reads yes, on, no and off as truth values, so quote words" * is_truth
        raise UsageError(f"{place}: {repeats[0]} is given twice{hint}")


def check_seeds(seeds: Sequence[int], place: str) -> None:
    """Raise UsageError unless there are seeds, all in range and distinct."""
    check_filled(seeds, place)
    for seed in seeds:
        if not 0 <= seed <= LARGEST_SEED:
            raise UsageError(f"{place}: {seed} is not a whole number from 0 to {LARGEST_SEED}")
    check_different(seeds, place)


def check_overrides(overrides: Sequence[str], place: str, *setters: str) -> None:
    """Raise UsageError for overrides that are not key=value, or that the sweep or `setters` set."""
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals:
            raise UsageError(f"{place}: {text!r} is not key=value")
        if not KEY.fullmatch(key) or ":" in key:
            raise UsageError(
                f"{place}: '{text}': keys can be set (key=value), not added or removed"
            )
        if reason := why_set(key, SWEEP, *setters):
            raise UsageError(f"{place}: '{text}': {reason}")


def require_printable(text: str, name: str) -> str:
    """Return `text`; raises UsageError if it has control characters or line breaks."""
    if not text.isprintable():
        raise UsageError(f"{name}: {text!r} has characters that cannot be printed")
    return text


# ---------------------------------------------------------------- values


def text_of(value: Any, name: str) -> str:
    """Return a value as the string that replaces a placeholder; raises UsageError."""
    if isinstance(value, str):
        return require_printable(value, name)
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


def list_differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Return the differences between two definitions, one a line; stages are compared by name."""
    if where == "stages" and isinstance(old, list) and isinstance(new, list) and old != new:
        old = {stage["name"]: stage for stage in old}
        new = {stage["name"]: stage for stage in new}
        lines = [f"stage {n} only there" for n in old if n not in new]
        lines += [f"stage {n} only here" for n in new if n not in old]
        shared = [n for n in old if n in new]
        lines += list_differences({n: old[n] for n in shared}, {n: new[n] for n in shared}, where)
        return lines or ["the stages are in a different order"]
    if isinstance(old, dict) and isinstance(new, dict):
        names = [n for n in (*old, *new) if old.get(n) != new.get(n)]
        lines = []
        for name in dict.fromkeys(names):
            lines += list_differences(old.get(name), new.get(name), f"{where}.{name}".lstrip("."))
        return lines
    return [] if old == new else [f"{where} is {old!r} there, {new!r} here"]
