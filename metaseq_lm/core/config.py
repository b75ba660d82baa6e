"""The configuration of a run: dataclasses, Hydra's store filled from the registries, helpful errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, make_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Optional

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from yaml import MarkedYAMLError, YAMLError

from metaseq_lm.core.checks import check_least, check_numbers
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import ALL, nearest


def option(default: Any, help: str) -> Any:
    """A dataclass field with a line of help."""
    return field(default=default, metadata={"help": help})


@dataclass
class TrainerConfig:
    """The calendar of a run."""

    max_update: int = option(1000, "updates to make (0 = as many as max_flops pays for)")
    max_flops: float = option(0.0, "stop when this many FLOPs are spent (0 = no limit)")
    max_seconds: float = option(0.0, "stop after so many seconds of training (0 = no limit)")
    log_interval: int = option(50, "updates between lines of the log")
    validate_interval_updates: int = option(
        500, "updates between validations (0 = only at the end)"
    )
    save_interval_updates: int = option(500, "updates between checkpoints (0 = only at the end)")
    keep_last: int = option(2, "checkpoints to keep besides the best one (0 counts as 1)")
    best_checkpoint_metric: str = option(
        "loss", "validation metric that chooses the best checkpoint ('' = none is kept)"
    )
    maximize_best_checkpoint_metric: bool = option(False, "whether a larger metric is better")
    ties: str = option(
        "first", "of equally good validations the first counts as best; latest: the last of them"
    )
    validate_first: bool = option(
        False, "validate before the first update too; what it starts from can then be the best"
    )
    patience: int = option(
        0, "validations without a better metric before stopping (0 = never stop)"
    )
    on_nonfinite: str = option(
        "stop", "a loss or gradient that is not finite: stop, skip the update, or rollback"
    )
    max_nonfinite: int = option(
        5, "such updates in a row (or rollbacks to one place) before stopping"
    )
    on_save_error: str = option("stop", "a checkpoint that cannot be written: stop or continue")
    valid_split: str = option("valid", "split to validate on ('' = none)")
    final_splits: list[str] = field(
        default_factory=list, metadata={"help": "splits scored at the end with the best checkpoint"}
    )


@dataclass
class EngineConfig:
    """How a run is computed; nothing but the precision changes results beyond the order of sums."""

    device: str = option("auto", "auto, cpu or cuda")
    precision: str = option("fp32", "fp32, bf16 (autocast) or fp64")
    micro_batch_size: int = option(0, "rows computed at a time in each process (0 = all)")
    workers: int = option(0, "threads that prepare batches ahead")
    threads: int = option(0, "torch threads in each process (0 = torch's own choice)")
    shard_optimizer: bool = option(False, "each process keeps its share of the moments (ZeRO-1)")
    timeout: float = option(600.0, "seconds before a process that does not answer counts as lost")
    keep_memory: bool = option(
        True, "keep freed CPU memory for the next step: faster, a little more"
    )
    tensorboard: bool = option(True, "write TensorBoard event files")


@dataclass
class RunConfig:
    """One run."""

    data: str = option("", "folder of the binarised data (the DATA argument)")
    save_dir: str = option("", "run folder; an existing one is resumed")
    label: str = option("", "name of the setting in reports ('' = task/criterion)")
    seed: int = option(1, "seed of everything random")
    user_dir: Optional[str] = option(None, "folder or file of a plug-in to load first")
    init_from: Optional[str] = option(
        None, "checkpoint, or run folder (its last checkpoint), whose weights to start from"
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
CHOICES = {
    "trainer.ties": ["first", "latest"],
    "trainer.on_nonfinite": ["stop", "skip", "rollback"],
    "trainer.on_save_error": ["stop", "continue"],
    "engine.device": ["auto", "cpu", "cuda"],
    "engine.precision": ["fp32", "bf16", "fp64"],
}
ENCODER = ("layers", "embed_dim", "ffn_embed_dim", "attention_heads", "hidden_dim")
# The least value of numbers that every run has, or that mean the same wherever they occur. Tasks,
# criterions and models check the others, and those that depend on the data.
LEAST: dict[str, float] = {
    "trainer.max_update": 0,
    "trainer.max_flops": 0,
    "trainer.max_seconds": 0,
    "trainer.log_interval": 0,
    "trainer.validate_interval_updates": 0,
    "trainer.save_interval_updates": 0,
    "trainer.keep_last": 0,
    "trainer.patience": 0,
    "trainer.max_nonfinite": 0,
    "engine.micro_batch_size": 0,
    "engine.workers": 0,
    "engine.threads": 0,
    "engine.timeout": 1,
    **{f"model.encoder_{size}": 1 for size in ENCODER},
    "model.max_positions": 1,
    "model.token_embed_dim": 0,
    "model.segments": 0,
    "task.batch_size": 1,
    "task.valid_size": 0,
    "task.epochs": 0,
    "task.validate_epochs": 0,
    "optimizer.lr": 0,
    "optimizer.weight_decay": 0,
    "optimizer.clip_norm": 0,
    "optimizer.eps": 0,
    "optimizer.momentum": 0,
    "schedule.warmup_updates": 0,
    "schedule.power": 0,
    "schedule.end": 0,
}
GROUPS = ("task", "criterion", "model", "optimizer", "schedule")
TOP = {item.name for item in fields(RunConfig)}
# What a mistake in a config or in key=value raises, whatever reads it.
MISTAKES = (HydraException, OmegaConfBaseException, YAMLError, RecursionError)


@dataclass
class Nothing:
    """The options of something that has none."""


@lru_cache(maxsize=None)
def named(base: type, name: str) -> type:
    """Return dataclass `base` with a field `_name` that says what it configures."""
    return make_dataclass(base.__name__, [("_name", str, name)], bases=(base,))


def fill_store() -> None:
    """Put every registered name into Hydra's config groups, where it is not there yet."""
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig)
    for group in GROUPS:
        for name, entry in ALL[group].entries.items():
            options = named(entry.dataclass or Nothing, name)
            there = store.repo.get(group, {}).get(f"{name}.yaml")
            if there is None or OmegaConf.get_type(there.node) is not options:
                store.store(group=group, name=name, node=options)  # takes milliseconds


def load_config(
    overrides: list[str], config_dir: str | None = None, config_name: str | None = None
) -> DictConfig:
    """Compose a run's configuration.

    `config_dir/config_name.yaml` is the primary config if given (it can name `base` in its
    defaults), else the package's `base`. Raises UsageError that names the nearest key or value.
    """
    fill_store()
    GlobalHydra.instance().clear()
    name = config_name or "base"
    if config_dir is not None:
        folder = Path(config_dir).resolve()
        if not (folder / f"{name}.yaml").is_file():
            found = sorted(p.stem for p in folder.glob("*.yaml")) if folder.is_dir() else []
            raise UsageError(
                f"{folder / (name + '.yaml')} does not exist.{nearest(name, found)} "
                f"Configs there: {', '.join(found) or 'none'}"
            )
        overrides = [*overrides, f"hydra.searchpath=[file://{FOLDER}]"]
    else:
        folder = FOLDER
    try:
        with initialize_config_dir(str(folder), version_base="1.3"), without_environment():
            config = compose(name, overrides)
            OmegaConf.resolve(config)
    except (*MISTAKES, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk; it names its file
        raise UsageError(explain(error, overrides, folder, name)) from error
    if not TOP <= set(config):
        raise UsageError(without_base(folder / f"{name}.yaml"))
    check_values(config)
    OmegaConf.set_struct(config, True)
    return config


def overridden(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return the configuration of a run with key=value changes, checked as load_config does.

    All that `config` names must be registered. Raises UsageError for an unknown key or a wrong value.
    """
    try:
        given = OmegaConf.from_dotlist(list(overrides))
    except MISTAKES as error:
        raise UsageError(f"{' '.join(overrides)}: a value is no YAML; quote it") from error
    known = [key for key in dotted(config) if not key.endswith("._name")]
    for key in dotted(given):
        if key not in known:
            raise UsageError(f"'{key}' is no option of this run.{nearest(key, known)}")
    schema = OmegaConf.structured(RunConfig)
    for group in GROUPS:
        name = config[group]._name
        schema[group] = named(ALL[group].entry(name).dataclass or Nothing, name)
    try:
        with without_environment():
            changed = OmegaConf.merge(config, given)
            OmegaConf.resolve(changed)
        assert isinstance(changed, DictConfig)
        # What a run stored knows no types: the schema refuses a wrong one and turns 1 into 1.0.
        for key in dotted(given):
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


def check_values(config: DictConfig) -> None:
    """Raise UsageError for a name that is not registered, or a value outside CHOICES and LEAST."""
    check_names(config)
    for key, choices in CHOICES.items():
        value = OmegaConf.select(config, key)
        if value not in choices:
            raise UsageError(
                f"{key} is '{value}'.{nearest(str(value), choices)} Choices: {', '.join(choices)}"
            )
    for key, least in LEAST.items():
        value = OmegaConf.select(config, key)
        if isinstance(value, (int, float)):  # not one that is null or that this run does not have
            check_least({key: value}, least)
    check_numbers({key: OmegaConf.select(config, key) for key in dotted(config)})


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
    whole = f"{error.__cause__ or ''}\n{error}"
    absent = re.search(r"Could not find '(\w+)/([^']+)'", whole)
    if absent and absent[1] in GROUPS:
        presets = re.findall(r"^\t([\w.-]+)$", whole, re.MULTILINE)
        given = any(override.startswith(f"{absent[1]}=") for override in overrides)
        return ("" if given else f"{source}: ") + ALL[absent[1]].unknown(absent[2], presets)
    unmatched = re.search(r"Could not override '(\w+)'\. No match", whole)
    missing = re.search(r"Key '([^']+)' (?:is not in struct|not in '[^']+')", whole)
    full = re.search(r"full_key: (\S+)", whole)
    key = full[1] if full else missing[1] if missing else ""
    if (missing and key in TOP) or (unmatched and unmatched[1] in GROUPS):
        return without_base(file)
    # Hydra names the config whose own lines are wrong; of key=value it says nothing.
    wrong = re.match(r"In '([^']+)': \w+ raised while composing config:\s*", str(error))
    place = f"{folder / wrong[1]}.yaml: " if wrong else ""
    if missing:
        return place + unknown_option(key, known_keys(overrides, folder, name))
    text = str(error)[wrong.end() :] if wrong else str(error.__cause__ or "") or str(error)
    text = text.split("\n")[0].removeprefix("UsageError raised while resolving interpolation: ")
    if "is not a ListConfig" in text:
        text = f"give a list, such as '{key}=[A,B]', or '[A]' for one"
    if "is not a subclass of" in text:
        text += "; give keys of it (a task and the like are chosen in defaults)"
    return place + (f"{key}: {text}" if key else text)


def without_base(file: Path) -> str:
    """Return what to say of a primary config that has not all keys of a run."""
    return f"{file} lacks keys that every run has; begin it with 'defaults: [base, _self_]'"


def unknown_option(key: str, known: list[str]) -> str:
    """Return what to say of a key that is not among the known ones."""
    if key.startswith("model.") and "model.changes" in known:
        change = f"{key.removeprefix('model.')}=VALUE"
        return f"unknown option '{key}': with model=inherit it is \"model.changes=['{change}']\""
    return f"unknown option '{key}'.{nearest(key, known)} '--print-config' shows all."


def known_keys(overrides: Sequence[str], folder: Path, name: str) -> list[str]:
    """Return the dotted keys of a run, with those of the tasks and so on that are chosen for it.

    `folder/name.yaml` and the groups in `overrides` choose; their values, one of which is wrong, are
    not looked at.
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
            options = ALL[group].entry(entry).dataclass or Nothing
            keys += dotted(OmegaConf.structured(options), f"{group}.")
    return keys


def dotted(node: DictConfig, prefix: str = "") -> list[str]:
    """Return the dotted names of all values below `node`."""
    keys: list[str] = []
    for key in node:
        value = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index,call-overload]
        name = prefix + str(key)
        keys += dotted(node[key], name + ".") if isinstance(value, dict) else [name]
    return keys


def describe(config: DictConfig) -> str:
    """Return one line per key of a configuration: key=value as it can be given, and the key's help."""
    helps = {group: "'metaseq-lm list' shows all" for group in GROUPS}
    for prefix, schema in (("", RunConfig), ("trainer.", TrainerConfig), ("engine.", EngineConfig)):
        for item in fields(schema):
            helps.setdefault(prefix + item.name, item.metadata.get("help", ""))
    for group in GROUPS:
        for item in fields(ALL[group].entry(config[group]._name).dataclass or Nothing):
            helps[f"{group}.{item.name}"] = item.metadata.get("help", "")
    lines = []
    for key in sorted(dotted(config), key=lambda key: not key.endswith("._name")):  # choices first
        value, name = OmegaConf.select(config, key), key.removesuffix("._name")
        if isinstance(value, ListConfig):
            value = OmegaConf.to_container(value)
        lines.append(f"  {f'{name}={spelled(value)}':<48}{helps.get(name, '')}".rstrip())
    return "\n".join(lines)


def spelled(value: Any) -> str:
    """Return a text, number, truth value, None or a list of them as Hydra's grammar spells it."""
    if isinstance(value, list):
        return f"[{','.join(map(spelled, value))}]"
    if value is None:
        return "null"
    return quote(value) if isinstance(value, str) else repr(value).lower()


def quote(text: str) -> str:
    """Quote a text for Hydra if it holds more than plain characters."""
    if re.fullmatch(r"[A-Za-z0-9._/+-]+", text):
        return text
    return QuotedString(text, Quote.single).with_quotes()
