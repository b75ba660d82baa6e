"""Loads a run's configuration: key=value words, composed by Hydra, then typed once.

Hydra composes the files and the choices of names, without types. The result, and then the values of
the command line, are set in the schema of the chosen classes, where OmegaConf checks each value.
Then references (${key}) are resolved, and the result becomes a `RunConfig`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, IntegerNode, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from metaseq_lm.core import mistakes
from metaseq_lm.core.config import (
    FOLDER,
    GROUPS,
    PATHS,
    RECIPES,
    TOP,
    RunConfig,
    as_dict,
    check_values,
    flatten,
    named,
    names_runs,
    section_classes,
    untyped_section,
)
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import integer_if_whole
from metaseq_lm.core.plain_yaml import read_yaml
from metaseq_lm.core.registry import ALL, CRITERIONS, TASKS, Entry, is_compatible, nearest

_SECTIONS = (*GROUPS, "trainer", "engine")
KEY = re.compile(r"[+~]*[A-Za-z_][\w.@-]*")  # the key of an override
Compositions = dict[tuple[str, ...], DictConfig]


class _PlainFiles(FileConfigSource):
    """Files of configs; Hydra reads the user's files only after `read_yaml` has accepted them."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Return Hydra's result for a file; UsageError, which names it, if it is not plain."""
        file = Path(self.path) / self._normalize_file_name(config_path)
        try:
            if FOLDER not in file.parents:
                read_yaml(file)
        except ValueError as error:
            raise UsageError(f"{file}: not readable as YAML: {error}") from error
        return super().load_config(config_path)


def load_config(
    overrides: Sequence[str],
    config_dir: str | None = None,
    config_name: str | None = None,
    compositions: Compositions | None = None,
) -> RunConfig:
    """Compose a run's configuration.

    Args:
        overrides: Options as key=value in Hydra's grammar; objective=CRITERION stands for the
            criterion and its task.
        config_dir: Folder with the user's configs; None for the package's.
        config_name: The primary config (it can name `base` in its defaults); None for `base`.
        compositions: Compositions so far, by their choices: a cache for callers that load many
            configurations from one of the user's folders which differ only in values.

    Raises:
        UsageError: An option, name or value is wrong; the message names the nearest.
    """
    folder, name = _primary_config(config_dir, config_name)
    words = [word for override in overrides for word in _pair_of(override)]
    parsed = [parse_override(literal_path(word)) for word in words]
    values = [item for item in parsed if not _is_choice(item, folder)]
    choices = [str(item.input_line) for item in parsed if _is_choice(item, folder)]
    if compositions is None:
        compositions = {}
    key = (str(folder), name, *choices)
    if key not in compositions:
        compositions[key] = _typed(folder, name, tuple(choices))
    config = copy.deepcopy(compositions[key])
    try:
        for item in values:
            _set_value(config, item)
        loaded = resolve_config(config)
    except RecursionError as error:
        raise UsageError(mistakes.names_itself(source_of(folder, name))) from error
    except (OmegaConfBaseException, ValueError) as error:
        known = dotted_names(compositions[key])
        raise UsageError(mistakes.explain_value(error, known)) from error
    check_values(loaded)
    return loaded


def _pair_of(override: str) -> list[str]:
    """Return the task and criterion that objective=CRITERION stands for; other overrides unchanged.

    The task has the criterion's name, or names its class, or is the only one that takes it. Raises
    UsageError for a criterion of several tasks.
    """
    key, _, name = override.partition("=")
    if key != "objective":
        return [override]
    entry = CRITERIONS.entry(str(parse_override(override).value()))
    tasks = [name] * (name in TASKS.entries)
    if not tasks:
        criterion = entry.value
        taking = [
            t for t, entry in TASKS.entries.items() if is_compatible(t, entry.value, criterion)
        ]
        tasks = [t for t in taking if criterion in TASKS.entry(t).value.criterions] or taking
    if len(tasks) != 1:
        raise UsageError(
            f"objective={name}: {' and '.join(sorted(tasks)) or 'no task'} take criterion {name}; "
            f"give task=TASK criterion={name}"
        )
    return [f"task={tasks[0]}", f"criterion={name}"]


def _primary_config(config_dir: str | None, config_name: str | None) -> tuple[Path, str]:
    """Return folder and name of the primary config; UsageError if it does not exist."""
    name = config_name or "base"
    if config_dir is None:
        return FOLDER, name
    folder = Path(config_dir).resolve()
    if not (folder / f"{name}.yaml").is_file():
        configs = sorted(path.stem for path in folder.glob("*.yaml"))
        raise UsageError(
            f"{folder / (name + '.yaml')} does not exist.{nearest(name, configs)} "
            f"Configs there: {', '.join(configs) or 'none'}"
        )
    return folder, name


def _recipe_names() -> list[str]:
    return sorted(f"{RECIPES}/{file.stem}" for file in (FOLDER / RECIPES).glob("*.yaml"))


def config_file(name: str) -> tuple[str, str]:
    """Return folder and name of the primary config that --config names.

    --config takes a recipe of the package, such as recipes/bert, or a YAML file. Raises UsageError
    if it does not exist.
    """
    recipes = _recipe_names()
    file = FOLDER / f"{name}.yaml" if name in recipes else Path(name)
    if file.suffix not in (".yaml", ".yml") or not file.is_file():
        raise UsageError(
            f"--config {name}: there is no such recipe, nor a YAML file of this name."
            f"{nearest(name, recipes)} Recipes: {', '.join(recipes)}"
        )
    if file.suffix != ".yaml":
        raise UsageError(f"--config {name}: call the file {file.stem}.yaml")
    return str(file.parent.resolve()), file.stem


def literal_path(override: str) -> str:
    """Return key=value with its value in quotes if the option names paths, else unchanged.

    A path is taken literally, unless it is null, in quotes, or refers to another key (${key}).
    """
    key, equals, value = override.partition("=")
    if not equals or "${" in value or not (key in PATHS or names_runs(key)):
        return override
    if value == "null" or (value.startswith(("'", '"')) and is_valid(override)):
        return override
    if not value.startswith("[") or key in TOP:
        return f"{key}={quote_path(value)}"
    if is_valid(override):
        return override
    items = [quote_path(item.strip()) for item in value[1:].rstrip("]").split(",")]
    return f"{key}=[{','.join(items)}]"


# ------------------------------------------------------------------------ composing


def _is_choice(override: Override, folder: Path) -> bool:
    """Return whether an override selects a config (Hydra's part) instead of setting a value."""
    key = override.key_or_group
    if key in GROUPS:
        return not isinstance(override.value(), dict)
    # A folder next to the user's configs is a group of configs, unless it has the name of an
    # option.
    return key.startswith("hydra") or (key not in TOP and (folder / key).is_dir())


def _typed(folder: Path, name: str, choices: tuple[str, ...]) -> DictConfig:
    """Return `folder/name.yaml` and choices with the types of the classes they name, unresolved.

    Raises UsageError for a config that is not there, cannot be read, or has a wrong value.
    """
    if folder != FOLDER or any(word.startswith("hydra") for word in choices):
        return _compose_typed(folder, name, choices)
    registered = tuple(entry for group in GROUPS for entry in ALL[group].entries.values())
    return compose_packaged(name, choices, registered)


@lru_cache(maxsize=128)
def compose_packaged(
    name: str, choices: tuple[str, ...], registered: tuple[Entry[Any], ...]
) -> DictConfig:
    """Return a composition of the package's files, which stay the same while a process runs.

    The composition depends on the `registered` classes.
    """
    return _compose_typed(FOLDER, name, choices)


def _compose_typed(folder: Path, name: str, choices: Sequence[str]) -> DictConfig:
    composed = _compose_choices(folder, name, choices)
    _check_sections(composed, folder, name)
    config = schema_of(composed)
    try:
        config.merge_with(_whole_numbers(config, OmegaConf.to_container(composed)))
    except OmegaConfBaseException as error:
        wrong = mistakes.explain_value(error, dotted_names(schema_of(composed)))
        if file := _file_with(error.full_key or "", folder, name, choices):
            wrong = f"{file}: {wrong}"
        raise UsageError(wrong) from error
    return config


def _compose_choices(folder: Path, name: str, choices: Sequence[str]) -> DictConfig:
    """Compose `folder/name.yaml` and choices with Hydra, untyped and unresolved.

    Raises UsageError for a config that is not there, or cannot be read.
    """
    _fill_store()
    Plugins.instance()  # registers Hydra's own sources
    SourcesRegistry.instance().types["file"] = _PlainFiles
    words = list(choices)
    if folder != FOLDER:
        words.append(_search_path())
    # Hydra refuses to be initialised twice.
    GlobalHydra.instance().clear()
    try:
        with (
            initialize_config_dir(str(folder), version_base="1.3"),
            _hydra_choices(any(word.startswith("hydra") for word in words)),
            _without_environment(),
        ):
            return compose(name, words)
    except mistakes.MISTAKES as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk names its file
        if choices and _lacks_groups(folder, name):
            raise UsageError(mistakes.without_base(folder / f"{name}.yaml")) from error
        text = mistakes.explain_composition(error, choices, source_of(folder, name))
        raise UsageError(text) from error


def _search_path() -> str:
    # The configs of the package, for the defaults of a primary config outside.
    return f"hydra.searchpath=[{quote(f'file://{FOLDER}')}]"


def source_of(folder: Path, name: str) -> str:
    """Describe the source of a configuration's values, for messages."""
    if folder == FOLDER:
        return "key=value"
    return f"{folder / name}.yaml or a config in its defaults"


def _fill_store() -> None:
    repository = ConfigStore.instance().repo
    for group in GROUPS:
        repository[group] = {f"{name}.yaml": _name_node(group, name) for name in ALL[group].names()}


@cache
def _name_node(group: str, name: str) -> ConfigNode:
    """Return the config of a registered name that has no file: only the name."""
    return ConfigNode(f"{name}.yaml", OmegaConf.create({"_name": name}), group, None, None)


@contextmanager
def _hydra_choices(whole: bool) -> Iterator[None]:
    """Compose Hydra's own choices (logging, launcher, help) inside the block only if `whole`."""
    store = ConfigStore.instance()
    entries = store.repo["hydra"]
    usual = entries["config.yaml"]
    # They take most of the time of a composition, and nothing reads them.
    if not whole:
        store.store("config", HydraConf(defaults=[]), group="hydra", provider="hydra")
    try:
        yield
    finally:
        entries["config.yaml"] = usual


def _lacks_groups(folder: Path, name: str) -> bool:
    """Return whether a primary config, without choices from the command line, lacks groups."""
    try:
        return not set(GROUPS) <= set(_compose_choices(folder, name, ()))
    except UsageError:
        return False


def _check_sections(composed: DictConfig, folder: Path, name: str) -> None:
    """Raise UsageError if a composition lacks a class name, or has a value instead of a section."""
    file = folder / f"{name}.yaml"
    if not set(GROUPS) <= set(composed):
        raise UsageError(mistakes.without_base(file))
    for key in _SECTIONS:
        content = composed.get(key, {})
        if not isinstance(content, Mapping) or (key in GROUPS and "_name" not in content):
            where = _file_with(key, folder, name, ())
            raise UsageError(f"{where or file}: {mistakes.no_section(key, content)}")


def _file_with(key: str, folder: Path, name: str, choices: Sequence[str]) -> Path | None:
    """Return the config file that sets a key, the last in Hydra's order; None if unset."""
    key = key.partition("[")[0]  # the key of a list, without the index of an entry
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(folder), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        words = [*choices, _search_path()]
        parts = loader.compute_defaults_list(name, words, RunMode.RUN).defaults
    for part in reversed(parts):
        for root in (folder, FOLDER):
            file = root / f"{part.config_path}.yaml"
            if file.is_file():
                prefix = f"{part.package}." if part.package else ""
                content = flatten(OmegaConf.to_container(OmegaConf.load(file)), prefix)
                if any(f"{other}.".startswith(f"{key}.") for other in content):
                    return file
                break
    return None


# ------------------------------------------------------------------------ typing


@cache
def schema(base: type, name: str) -> DictConfig:
    """Return the options of a dataclass, and `_name`, as a config with types."""
    options: DictConfig = OmegaConf.structured(named(base, name))
    for item in fields(base):
        if "follows" in item.metadata:
            options[item.name] = f"${{{item.metadata['follows']}}}"
    return options


def schema_of(values: Mapping[str, Any]) -> DictConfig:
    """Return a typed config with the defaults of the classes that `values` names.

    Sections of unregistered classes have no types.
    """
    chosen = []
    for group in GROUPS:
        section = values.get(group)
        name = section.get("_name") if isinstance(section, Mapping) else None
        if isinstance(name, str) and name in ALL[group].entries:
            chosen.append((group, ALL[group].entry(name).dataclass, name))
    return copy.deepcopy(_schema_of_classes(*chosen))


@cache
def _schema_of_classes(*chosen: tuple[str, type, str]) -> DictConfig:
    """Return the typed config of (group, dataclass, name); cached, because copying is faster."""
    config: DictConfig = OmegaConf.structured(RunConfig)
    for group, base, name in chosen:
        config[group] = schema(base, name)
    return config


def _set_value(config: DictConfig, override: Override) -> None:
    """Set an option in place.

    Raises UsageError for a section or its name, OmegaConfBaseException for a wrong key or value.
    """
    key, value = override.key_or_group, override.value()
    if key in _SECTIONS and not isinstance(value, dict):
        raise UsageError(mistakes.no_section(key, value))
    if key.endswith("._name"):
        group = key.removesuffix("._name")
        raise UsageError(f"'{key}' is no option; choose a {group} with {group}=NAME")
    # Nested like the config, so that each value meets its typed node.
    for part in reversed(key.split(".")):
        value = {part: value}
    value = _whole_numbers(config, value)
    for part in key.split("."):
        value = value[part]
    OmegaConf.update(config, key, value, merge=True)


def _whole_numbers(node: Any, value: Any) -> Any:
    """Return a value with 1e3 as 1000 wherever the typed `node` it will be set in is an integer."""
    if isinstance(value, dict) and isinstance(node, DictConfig):
        changed = dict(value)
        for key in changed.keys() & node.keys():
            changed[key] = _whole_numbers(node._get_node(key), changed[key])
        return changed
    if isinstance(value, list) and isinstance(node, ListConfig):
        return list(map(integer_if_whole, value)) if node._metadata.element_type is int else value
    return integer_if_whole(value) if isinstance(node, IntegerNode) else value


def resolve_config(config: DictConfig) -> RunConfig:
    """Return a config with types as dataclasses of plain values, references resolved."""
    with _without_environment():
        OmegaConf.resolve(config)
    loaded: Any = OmegaConf.to_object(config)
    for group in GROUPS:
        section = getattr(loaded, group)
        if isinstance(section, dict):
            setattr(loaded, group, untyped_section(section))
    assert isinstance(loaded, RunConfig)
    return loaded


@contextmanager
def _without_environment() -> Iterator[None]:
    """Refuse ${oc.env:NAME} inside the block: its value, which may be a secret, would be saved."""

    refusals: list[UsageError] = []  # OmegaConf would wrap them

    def refuse(name: str, default: Any = None, *, _node_: Any) -> None:
        text = (
            f"{_node_._get_full_key('')} asks for the environment variable {name}, whose value "
            "would stand in the run folder for all to read; write the value itself, or give "
            "key=value"
        )
        refusals.append(UsageError(text))
        raise refusals[0]

    OmegaConf.register_new_resolver("oc.env", refuse, replace=True)
    try:
        yield
    except Exception as error:
        if refusals:
            raise refusals[0] from error
        raise
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def dotted_names(node: DictConfig) -> list[str]:
    """Return the dotted names of all values below `node`."""
    return list(flatten(OmegaConf.to_container(node)))


def common_config() -> RunConfig:
    """Return the base configuration without the options of its task, criterion and so on.

    Imports neither these nor torch, which takes a second.
    """
    config = RunConfig()
    for default in OmegaConf.load(FOLDER / "base.yaml").defaults:
        if isinstance(default, Mapping):
            ((group, name),) = default.items()
            setattr(config, group, untyped_section({"_name": name}))
    return config


# ------------------------------------------------------------------------ options as text


@cache
def parser() -> OverridesParser:
    """Return Hydra's parser of overrides; cached, because it takes longer to make than to use."""
    return OverridesParser.create()


@lru_cache(4096)  # for a sweep; callers must not change the results
def parse_override(word: str) -> Override:
    """Parse key=value; UsageError if it is not in Hydra's grammar, or not a single value."""
    try:
        override = parser().parse_override(word)
    except HydraException as error:
        key, equals, value = word.partition("=")
        remedy = f'quote the value, "{key}={quote_path(value)}"' if equals else "write KEY=VALUE"
        raise UsageError(f"{word}: not in Hydra's grammar; {remedy}") from error
    if override.is_sweep_override():
        raise UsageError(f"{word}: several values; a run has one, and several runs are a 'sweep'")
    if override.is_add() or override.is_delete() or override.is_force_add():
        raise UsageError(f"'{word}': keys can be set (key=value), not added or removed")
    return override


def split_overrides(
    words: Sequence[str], keys: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Split words into paths or names, and key=value overrides.

    A word with "=" is a path if the text before "=" is no key, as in runs/lr=0.001-seed=1, or if
    such a file exists, unless the word begins with one of `keys`.
    """

    def is_override(word: str) -> bool:
        key, equals, _ = word.partition("=")
        if not equals or not KEY.fullmatch(key):
            return False
        return key.split(".")[0] in keys or not Path(word).exists()

    overrides = [word for word in words if is_override(word)]
    return [word for word in words if word not in overrides], overrides


def override_value(override: str) -> Any:
    """Return the value of a key=value; None if it is not in Hydra's grammar."""
    if not is_valid(override):
        return None
    return parser().parse_override(override).value()


@lru_cache(4096)
def is_valid(override: str) -> bool:
    """Return whether key=value is in Hydra's grammar."""
    try:
        parser().parse_override(override)
    except HydraException:
        return False
    return True


def format_value(value: Any) -> str:
    """Return a string, number, boolean, None or list of these in the syntax of a Hydra override."""
    if isinstance(value, list):
        return f"[{','.join(map(format_value, value))}]"
    if value is None:
        return "null"
    return quote(value) if isinstance(value, str) else repr(value).lower()


def quote(text: str) -> str:
    """Return a string in quotes if Hydra's syntax needs them."""
    if re.fullmatch(r"[A-Za-z0-9._/+-]+", text):
        return text
    return quote_path(text)


def quote_path(text: str) -> str:
    """Return a string in quotes, so that Hydra does not read a path as a number or a list."""
    return QuotedString(text, Quote.single).with_quotes()


def describe(config: RunConfig) -> str:
    """Return a line for each key of a configuration: key=value, as typed by users, and its help."""
    helps = dict.fromkeys(GROUPS, "'metaseq-lm list' shows all")
    for prefix, schema in section_classes(config).items():
        for item in fields(schema):
            helps.setdefault(prefix + item.name, item.metadata.get("help", ""))
    values = flatten(as_dict(config))
    lines = []
    for key in sorted(values, key=lambda key: not key.endswith("._name")):  # choices first
        name = key.removesuffix("._name")
        setting = f"{name}={format_value(values[key])}"
        lines.append(f"  {setting:<48}{helps.get(name, '')}".rstrip())
    return "\n".join(lines)
