"""The configuration of a run: dataclasses, Hydra's store filled from the registries, helpful errors."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from yaml import MarkedYAMLError, YAMLError

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import check_options, option
from metaseq_lm.core.registry import ALL, nearest
from metaseq_lm.core.synonyms import answer


@dataclass
class TrainerConfig:
    """When a run logs, validates, saves and stops."""

    max_update: int = option(
        1000, "updates to make (0 = as many as max_flops pays for)", at_least=0
    )
    max_flops: float = option(0.0, "stop after this many FLOPs (0 = no limit)", at_least=0)
    max_seconds: float = option(
        0.0, "stop after this many seconds of training (0 = no limit)", at_least=0
    )
    log_interval: int = option(50, "updates between lines of the log", at_least=0)
    validate_interval_updates: int = option(
        500, "updates between validations (0 = only at the end)", at_least=0
    )
    save_interval_updates: int = option(
        500, "updates between checkpoints (0 = only at the end)", at_least=0
    )
    async_save: bool = option(
        False,
        "write checkpoints while training goes on; a copy of weights and state waits in memory",
    )
    keep_last: int = option(
        2, "checkpoints to keep besides the best one (0 counts as 1)", at_least=0
    )
    best_checkpoint_metric: str = option(
        "loss", "validation metric that chooses the best checkpoint ('' = none is kept)"
    )
    maximize_best_checkpoint_metric: bool = option(False, "whether a larger metric is better")
    ties: str = option(
        "first", "the best of equal validations: first or latest", choices=("first", "latest")
    )
    validate_first: bool = option(
        False, "validate before the first update, so that the initial weights can be the best"
    )
    patience: int = option(
        0, "validations without a better metric before stopping (0 = never stop)", at_least=0
    )
    on_nonfinite: str = option(
        "stop",
        "if a loss or gradient is not finite: stop, skip the update, or rollback",
        choices=("stop", "skip", "rollback"),
    )
    max_nonfinite: int = option(
        5, "non-finite updates in a row (or rollbacks to one checkpoint) allowed", at_least=0
    )
    on_save_error: str = option(
        "stop", "if a checkpoint cannot be written: stop or continue", choices=("stop", "continue")
    )
    valid_split: str = option("valid", "split used for validation ('' = none)")
    final_splits: list[str] = option([], "splits scored at the end with the best checkpoint")


@dataclass
class EngineConfig:
    """Devices, precision and processes.

    Except for the two precisions, nothing here changes results beyond the order of summation.
    """

    device: str = option("auto", "auto, cpu or cuda", choices=("auto", "cpu", "cuda"))
    precision: str = option(
        "fp32", "fp32, bf16 (autocast) or fp64", choices=("fp32", "bf16", "fp64")
    )
    reduce_precision: str = option(
        "fp32",
        "precision in which processes sum gradients: fp32 (fp64 if parameters are) or bf16; what is part "
        "of second derivatives is never summed in bf16",
        choices=("fp32", "bf16"),
    )
    micro_batch_size: int = option(
        0, "rows computed at a time in each process (0 = all)", at_least=0
    )
    workers: int = option(0, "threads that prepare batches ahead", at_least=0)
    threads: int = option(0, "torch threads in each process (0 = torch's own choice)", at_least=0)
    parallel: str = option(
        "replicate",
        "where parameters and moments rest: replicate (whole in each process), shard (divided among all "
        "processes) or hybrid (among those of a node)",
        choices=("replicate", "shard", "hybrid"),
    )
    compile: bool = option(
        False,
        "compile loss and gradient with torch.compile; batches of a new shape run without, to count "
        "their FLOPs, and so do evaluations",
    )
    recompute: str = option(
        "none",
        "activations computed again in the backward pass, for less memory: none, or those inside each "
        "block (Transformer layer)",
        choices=("none", "block"),
    )
    gather: str = option(
        "layer",
        "how a pass puts sharded parameters together: layer by layer, or the whole model at once (more "
        "memory, fewer messages); passes of second derivatives take the model at once",
        choices=("layer", "model"),
    )
    timeout: float = option(
        600.0, "seconds after which a process that does not respond counts as lost", at_least=1
    )
    retain_heap: bool = option(
        True,
        "keep freed CPU memory for the next update: faster, uses a little more memory (not with shards)",
    )
    tensorboard: bool = option(True, "write TensorBoard event files")
    loggers: list[str] = option(
        [],
        "further loggers: trackio, wandb or mlflow, each an extra of its name",
        choices=("trackio", "wandb", "mlflow"),
    )


@dataclass
class RunConfig:
    """The configuration of a run."""

    data: str = option("", "folder of the binarised data (the DATA argument)", movable=True)
    save_dir: str = option("", "run folder; an existing one is resumed", movable=True)
    label: str = option("", "name of the setting in reports ('' = task/criterion)", movable=True)
    seed: int = option(1, "random seed")
    user_dir: str | None = option(None, "folder or file of a plug-in to load first", movable=True)
    init_from: str | None = option(
        None,
        "checkpoint, or run folder (its last checkpoint), whose weights to start from",
        source="pretraining",
        movable=True,  # checkpoints record its weights, wherever it lies
    )
    task: Any = None
    criterion: Any = None
    model: Any = None
    optimizer: Any = None
    schedule: Any = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)


# A folder of YAML only: it has no __init__.py, so `metaseq_lm.core.config` is this module.
FOLDER = Path(__file__).parents[1] / "config"
GROUPS = ("task", "criterion", "model", "optimizer", "schedule")
# Engine options that earlier versions wrote, with the option and the values of today.
OLD_ENGINE = {"shard_optimizer": ("parallel", {False: "replicate", True: "shard"})}
TOP = {item.name for item in fields(RunConfig)}
KEY = re.compile(r"[+~]*[A-Za-z_][\w.@-]*")
PATHS = ("data", "save_dir", "user_dir")  # besides options that name other runs
# What a mistake in a config or in key=value raises: errors of Hydra, OmegaConf and YAML.
MISTAKES = (HydraException, OmegaConfBaseException, YAMLError, RecursionError)


def with_current_names(config: Any) -> Any:
    """Return the stored configuration of a run, in place, with the current names of its options."""
    engine = config.get("engine") if isinstance(config, dict | DictConfig) else None
    for old, (new, values) in OLD_ENGINE.items():
        if isinstance(engine, dict | DictConfig) and isinstance(engine.get(old), bool):
            engine[new] = values[engine.pop(old)]
    return config


def options_with(
    key: str, config: DictConfig | None = None, groups: Sequence[str] = GROUPS
) -> dict[str, Any]:
    """Return the dotted names of the options that have the metadata `key`, with its value.

    Args:
        key: "source" for options that name other runs, whose value is what reports call those;
            "movable" for options that may change when a run is resumed.
        config: a run's configuration, for the options of its classes; None for all registered ones.
        groups: the groups of options to look into, besides those of every run.
    """
    schemas: list[tuple[str, type]] = [("", RunConfig)]
    for group in groups:
        node = None if config is None else config.get(group)
        names = ALL[group].names() if config is None else [node._name] if node else []
        schemas += [(f"{group}.", ALL[group].entry(name).dataclass) for name in names]
    return {
        prefix + item.name: item.metadata[key]
        for prefix, schema in schemas
        for item in fields(schema)
        if key in item.metadata
    }


def names_runs(key: str) -> bool:
    """Return whether the values of an option are paths of other runs."""
    groups = [group for group in GROUPS if key.startswith(f"{group}.")]
    return key in options_with("source", groups=groups)


def typed_options(group: str, node: Mapping[str, Any]) -> Any:
    """Return a group of the configuration as an instance of the dataclass of its options.

    Raises UsageError for a name that is not registered, or a value out of range.
    """
    entry = ALL[group].entry(node["_name"])
    is_config = isinstance(node, DictConfig)
    values = OmegaConf.to_container(node, resolve=True) if is_config else dict(node)
    assert isinstance(values, dict)
    options = entry.dataclass(**{str(k): v for k, v in values.items() if k != "_name"})
    check_options(entry.dataclass, options, f"{group}.")
    return options


def build(group: str, node: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Build the class named in a group of the configuration from its options and further arguments."""
    return ALL[group].build(node["_name"], typed_options(group, node), *args, **kwargs)


@cache
def named(base: type, name: str) -> type:
    """Return dataclass `base` with a field `_name`, the registered name."""
    return make_dataclass(base.__name__, [("_name", str, name)], bases=(base,))


@cache
def schema(base: type, name: str) -> DictConfig:
    """Return the options of a dataclass, and `_name`, as a config with types."""
    options: DictConfig = OmegaConf.structured(named(base, name))
    return options


class StoreNode(ConfigNode):
    """An entry of Hydra's store whose options are read when it is asked for: of all, that takes long."""

    def __init__(self, group: str, name: str) -> None:
        self.options: DictConfig | None = None
        self.registered = name
        super().__init__(f"{name}.yaml", None, group, None, None)  # type: ignore[arg-type]

    @property
    def node(self) -> DictConfig:
        """The options of the registered name."""
        if self.options is None:
            return schema(ALL[str(self.group)].entry(self.registered).dataclass, self.registered)
        return self.options

    @node.setter
    def node(self, options: DictConfig | None) -> None:
        self.options = options


def fill_store() -> None:
    """Add every registered name to Hydra's config groups."""
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig)
    for group in GROUPS:
        store.repo[group] = {f"{name}.yaml": StoreNode(group, name) for name in ALL[group].names()}


def load_config(
    overrides: list[str], config_dir: str | None = None, config_name: str | None = None
) -> DictConfig:
    """Compose a run's configuration.

    `config_dir/config_name.yaml` is the primary config if given (it can name `base` in its
    defaults), else the package's `base`. Raises UsageError that names the nearest key or value.
    """
    overrides = [literal_path(override) for override in overrides]
    folder, name = primary_config(config_dir, config_name)
    # A folder beside the configs, such as data/, would be a config group of this name to Hydra.
    single = TOP - set(GROUPS)
    shadowed = [
        o for o in overrides if (key := o.split("=")[0]) in single and (folder / key).is_dir()
    ]
    try:
        config = compose_unresolved(folder, name, [o for o in overrides if o not in shadowed])
        return resolved(config, shadowed, folder / f"{name}.yaml")
    except (*MISTAKES, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk; it names its file
        words = [*overrides, *search_path(folder)]
        raise UsageError(explain(error, words, folder, name)) from error


class Composer:
    """Composes configurations as `load_config` does, each choice of task, model and so on once.

    Configurations of a sweep differ in few values, and Hydra takes a quarter of a second for each.
    """

    def __init__(self) -> None:
        self.composed: dict[tuple[str, ...], DictConfig] = {}

    def load(
        self, overrides: list[str], config_dir: str | None = None, config_name: str | None = None
    ) -> DictConfig:
        """Return what `load_config` returns, or raise as it does."""
        folder, name = primary_config(config_dir, config_name)
        choices = [o for o in overrides if o.partition("=")[0] in GROUPS]
        values = [literal_path(o) for o in overrides if o not in choices]
        key = (str(folder), name, *choices)
        try:
            if key not in self.composed:
                self.composed[key] = compose_unresolved(folder, name, choices)
            config = copy.deepcopy(self.composed[key])
            return resolved(config, values, folder / f"{name}.yaml")
        except (*MISTAKES, ValueError, OSError, UsageError):
            return load_config(overrides, config_dir, config_name)  # with the message for all


def primary_config(config_dir: str | None, config_name: str | None) -> tuple[Path, str]:
    """Return the folder and the name of the primary config; UsageError if there is none."""
    name = config_name or "base"
    if config_dir is None:
        return FOLDER, name
    folder = Path(config_dir).resolve()
    if not (folder / f"{name}.yaml").is_file():
        configs = sorted(p.stem for p in folder.glob("*.yaml")) if folder.is_dir() else []
        raise UsageError(
            f"{folder / (name + '.yaml')} does not exist.{nearest(name, configs)} "
            f"Configs there: {', '.join(configs) or 'none'}"
        )
    return folder, name


def compose_unresolved(folder: Path, name: str, overrides: list[str]) -> DictConfig:
    """Return what Hydra composes of `folder/name.yaml`, references unresolved."""
    fill_store()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(folder), version_base="1.3"), without_environment():
        return compose(name, [*overrides, *search_path(folder)])


def search_path(folder: Path) -> list[str]:
    """Return the override by which configs in `folder` find those of the package."""
    return [] if folder == FOLDER else [f"hydra.searchpath=[{quote(f'file://{FOLDER}')}]"]


def resolved(config: DictConfig, overrides: Sequence[str], file: Path) -> DictConfig:
    """Return a composed configuration with further values, resolved and checked; `file` is its config.

    Raises UsageError, or as OmegaConf and Hydra do.
    """
    for override in overrides:
        parsed = OverridesParser.create().parse_override(override)
        if parsed.is_sweep_override():
            raise ValueError(f"{override}: several values")
        OmegaConf.update(config, parsed.key_or_group, parsed.value())
    with without_environment():
        OmegaConf.resolve(config)
    if not TOP <= set(config):
        raise UsageError(without_base(file))
    check_values(config)
    OmegaConf.set_struct(config, True)
    return config


def split_overrides(
    words: Sequence[str], keys: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Split words into paths or names, and key=value overrides.

    A word with "=" is a path if what is before "=" is no key, as in runs/lr=0.001-seed=1, or if
    there is such a file, unless it begins with one of `keys`.
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
    try:
        return OverridesParser.create().parse_override(override).value()
    except HydraException:
        return None


def literal_path(override: str) -> str:
    """Return key=value with its value in quotes if the option names paths, else unchanged.

    A path is taken as it is typed, unless it is null, in quotes, or refers to another key (${key}).
    """
    key, equals, value = override.partition("=")
    if not equals or "${" in value or not (key in PATHS or names_runs(key)):
        return override
    try:
        is_valid = bool(OverridesParser.create().parse_override(override))
    except HydraException:
        is_valid = False
    if value.startswith("[") and key not in TOP:
        items = [quote_path(item.strip()) for item in value[1:].rstrip("]").split(",")]
        return override if is_valid else f"{key}=[{','.join(items)}]"
    as_typed = value == "null" or (is_valid and value[:1] in ("'", '"'))
    return override if as_typed else f"{key}={quote_path(value)}"


def overridden(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return the configuration of a run with key=value changes, checked as load_config does.

    Every name in `config` must be registered. Raises UsageError for an unknown key or a wrong value.
    """
    try:
        changes = OmegaConf.from_dotlist(list(overrides))
    except MISTAKES as error:
        raise UsageError(f"{' '.join(overrides)}: a value is no YAML; quote it") from error
    known = [key for key in dotted(config) if not key.endswith("._name")]
    for key in dotted(changes):
        if key not in known:
            hint = answer(key, flag_keys={}) or nearest(key, known)
            raise UsageError(f"'{key}' is no option of this run.{hint}")
    schema = OmegaConf.structured(RunConfig)
    for group in GROUPS:
        name = config[group]._name
        schema[group] = named(ALL[group].entry(name).dataclass, name)
    try:
        with without_environment():
            changed = OmegaConf.merge(config, changes)
            OmegaConf.resolve(changed)
        assert isinstance(changed, DictConfig)
        # A stored config has no types: the schema refuses a wrong one and turns 1 into 1.0.
        for key in dotted(changes):
            OmegaConf.update(schema, key, OmegaConf.select(changed, key))
            OmegaConf.update(changed, key, OmegaConf.select(schema, key))
    except (*MISTAKES, ValueError) as error:
        raise UsageError(explain(error, overrides)) from error
    check_values(changed)
    return changed


@contextmanager
def without_environment() -> Iterator[None]:
    """Refuse ${oc.env:NAME} inside the block: its value, which may be a secret, would be saved."""

    def refuse(name: str, default: Any = None, *, _node_: Any) -> None:
        raise UsageError(
            f"{_node_._get_full_key('')} asks for the environment variable {name}, whose value would "
            "stand in the run folder for all to read; write the value itself, or give key=value"
        )

    OmegaConf.register_new_resolver("oc.env", refuse, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def check_stored(group: str, node: Any) -> None:
    """Check the options of a group of a stored configuration, whose file may be damaged.

    Raises ValueError for an option that its class has not, or a value of a wrong type.
    """
    entry = ALL[group].entries.get(node["_name"]) if node and "_name" in node else None
    if entry is not None:
        try:
            OmegaConf.merge(OmegaConf.structured(named(entry.dataclass, node["_name"])), node)
        except OmegaConfBaseException as error:
            reason = str(error).split("\n")[0]
            raise ValueError(f"{group}.{error.full_key}: {reason}") from error


def check_values(config: DictConfig) -> None:
    """Raise UsageError for a name that is not registered, or a value outside its option's range."""
    check_names(config)
    for prefix, schema in sections(config).items():
        check_options(schema, config[prefix[:-1]] if prefix else config, prefix)


def sections(config: DictConfig) -> dict[str, type]:
    """Return the dataclass of each section of a run's configuration by its prefix, such as "task.".

    Sections of classes that are not registered are left out.
    """
    chosen = {
        f"{group}.": ALL[group].entries[name].dataclass
        for group in GROUPS
        if (name := config[group]._name) in ALL[group].entries
    }
    return {"": RunConfig, "trainer.": TrainerConfig, "engine.": EngineConfig, **chosen}


def check_names(config: DictConfig) -> None:
    """Raise UsageError if a group names something that is not registered."""
    for group in GROUPS:
        node = config.get(group)
        if node is None or "_name" not in node:
            raise UsageError(f"the config has no {group}; choose one with --{group}")
        ALL[group].entry(node._name)


def explain(
    error: Exception, overrides: Sequence[str], folder: Path = FOLDER, name: str = "base"
) -> str:
    """Turn an error of Hydra, OmegaConf or YAML into one line that names the remedy.

    `folder/name.yaml` is the primary config.
    """
    file = folder / f"{name}.yaml"
    source = "key=value" if folder == FOLDER else f"{file} or a config in its defaults"
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem_mark.name}:{error.problem_mark.line + 1}: {error.problem}"
    if isinstance(error, RecursionError):
        return f"{source} names itself, in its defaults, by an alias (*x) or by ${{key}}"
    if isinstance(error, (YAMLError, UnicodeError)) or type(error) is OSError:
        return f"{source} is no YAML of lines 'key: value': {' '.join(str(error).split())}"
    if isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        remedy = f'quote the value, "{key}={quote_path(value)}"' if equals else "write KEY=VALUE"
        return f"{error.override}: not in Hydra's grammar; {remedy}"
    whole = f"{error.__cause__ or ''}\n{error}"
    absent = re.search(r"Could not find '(\w+)/([^']+)'", whole)
    if absent and absent[1] in GROUPS:
        presets = re.findall(r"^\t([\w.-]+)$", whole, re.MULTILINE)
        is_chosen = any(override.startswith(f"{absent[1]}=") for override in overrides)
        return ("" if is_chosen else f"{source}: ") + ALL[absent[1]].describe_unknown(
            absent[2], presets
        )
    unmatched = re.search(r"Could not override '(\w+)'\. No match", whole)
    missing = re.search(r"Key '([^']+)' (?:is not in struct|not in '[^']+')", whole)
    full = re.search(r"full_key: (\S+)", whole)
    key = full[1] if full else missing[1] if missing else ""
    if (missing and key in TOP) or (unmatched and unmatched[1] in GROUPS):
        return without_base(file)
    # Hydra names the config file with the wrong line, but not a wrong key=value.
    wrong = re.match(r"In '([^']+)': \w+ raised while composing config:\s*", str(error))
    location = f"{folder / wrong[1]}.yaml: " if wrong else ""
    if missing:
        return location + unknown_option(key, known_keys(overrides, folder, name))
    text = str(error)[wrong.end() :] if wrong else str(error.__cause__ or "") or str(error)
    text = text.split("\n")[0].removeprefix("UsageError raised while resolving interpolation: ")
    if "is not a ListConfig" in text:
        text = f"give a list, such as '{key}=[A,B]', or '[A]' for one"
    if "is not a subclass of" in text:
        text += "; give keys of it (a task and the like are chosen in defaults)"
    return location + (f"{key}: {text}" if key else text)


def without_base(file: Path) -> str:
    """Return the message for a primary config that lacks keys of a run."""
    return f"{file} lacks keys that every run has; begin it with 'defaults: [base, _self_]'"


def unknown_option(key: str, known: list[str]) -> str:
    """Return the message for a key that is not among the `known` ones."""
    if key.startswith("model.") and "model.changes" in known:
        change = f"{key.removeprefix('model.')}=VALUE"
        return f"unknown option '{key}': with model=inherit it is \"model.changes=['{change}']\""
    name = key.rpartition(".")[2].lower()
    elsewhere = [other for other in known if other.rpartition(".")[2].lower() == name]
    hint = nearest(elsewhere[0], elsewhere) if elsewhere else answer(key, flag_keys={})
    return f"unknown option '{key}'.{hint or nearest(key, known)} '--print-config' shows all."


def known_keys(overrides: Sequence[str], folder: Path, name: str) -> list[str]:
    """Return the dotted keys of a run, including those of the chosen task, criterion and so on.

    They are chosen by `folder/name.yaml` and the groups in `overrides`. Other overrides, one of which
    is wrong, are ignored.
    """
    choices = [o for o in overrides if o.split("=")[0] in (*GROUPS, "hydra.searchpath")]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(folder), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        parts = loader.compute_defaults_list(name, choices, RunMode.RUN).defaults
    keys = [key for key in dotted(OmegaConf.structured(RunConfig)) if key not in GROUPS]
    for part in parts:
        group, _, entry = (part.config_path or "").partition("/")
        if group in GROUPS and entry in ALL[group].entries:
            options = ALL[group].entry(entry).dataclass
            keys += dotted(OmegaConf.structured(options), f"{group}.")
    return keys


def dotted(node: DictConfig, prefix: str = "") -> list[str]:
    """Return the dotted names of all values below `node`."""
    return [prefix + key for key in flatten(OmegaConf.to_container(node))]


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one with dotted keys."""
    if not isinstance(node, dict):
        return {prefix[:-1]: node}
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= flatten(value, f"{prefix}{key}.")
    return flat


def common_config() -> DictConfig:
    """Return the base configuration without the options of its task, criterion and so on.

    Needs none of them, nor torch, whose import takes a second.
    """
    config: DictConfig = OmegaConf.structured(RunConfig)
    for default in OmegaConf.load(FOLDER / "base.yaml").defaults:
        if isinstance(default, DictConfig):
            config.update({group: {"_name": name} for group, name in default.items()})
    return config


def describe(config: DictConfig) -> str:
    """Return one line per key of a configuration: key=value, as on the command line, and its help."""
    helps = dict.fromkeys(GROUPS, "'metaseq-lm list' shows all")
    for prefix, schema in sections(config).items():
        for item in fields(schema):
            helps.setdefault(prefix + item.name, item.metadata.get("help", ""))
    lines = []
    for key in sorted(dotted(config), key=lambda key: not key.endswith("._name")):  # choices first
        value, name = OmegaConf.select(config, key), key.removesuffix("._name")
        if isinstance(value, ListConfig):
            value = OmegaConf.to_container(value)
        lines.append(f"  {f'{name}={format_value(value)}':<48}{helps.get(name, '')}".rstrip())
    return "\n".join(lines)


def format_value(value: Any) -> str:
    """Return a string, number, boolean, None or a list of them in the syntax of a Hydra override."""
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
    """Return a string in quotes, so that Hydra takes no name of a path for a number or a list."""
    return QuotedString(text, Quote.single).with_quotes()
