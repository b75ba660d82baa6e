"""The configuration of a run: a dataclass with a typed section for each choice, trainer and engine.

`core.loading` makes it; its readers see only plain values of the declared types.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, make_dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.metric_names import is_loss
from metaseq_lm.core.options import (
    DATA,
    FUNCTION,
    LOSS,
    NOTHING,
    SPEED,
    WEIGHTS,
    check_options,
    option,
)
from metaseq_lm.core.registry import ALL

__all__ = ["EngineConfig", "RunConfig", "TrainerConfig"]

# These set some options of their runs, so their files cannot: `set_by` of an option says why.
SWEEP, SEARCH, LEAGUE = "sweep", "search", "league"


@dataclass
class TrainerConfig:
    """When a run logs, validates, saves and stops."""

    max_update: int = option(
        1000,
        "updates to make (0 = as many as max_flops pays for, or as see max_words)",
        at_least=0,
        set_by={LEAGUE: "runs end with their budget", SEARCH: "trials end with their budget"},
    )
    max_flops: float = option(
        0.0,
        "stop after this many FLOPs (0 = no limit)",
        at_least=0,
        set_by={LEAGUE: "give the plan's `budgets`", SEARCH: "it is the budget of every trial"},
    )
    pause_flops: float = option(
        0.0,
        "stop after this many FLOPs, with the schedule of the whole run, so that it can go on: as "
        "a search does at its rungs (0 = no limit)",
        at_least=0,
        set_by={SEARCH: "the search stops trials with it"},
        affects=NOTHING,
    )
    max_seconds: float = option(
        0.0, "stop after this many seconds of training (0 = no limit)", at_least=0
    )
    max_words: float = option(
        0.0,
        "stop when this many words of the corpus were seen, with repetition (0 = no limit)",
        at_least=0,
        set_by={LEAGUE: "runs end with their budget"},
    )
    average_decay: float = option(
        0.0,
        "decay of a moving average of the weights by update, which is what is validated, saved and "
        "exported (0 = the weights themselves)",
        at_least=0,
        below=1,
    )
    log_interval: int = option(50, "updates between lines of the log", at_least=0, affects=NOTHING)
    validate_interval_updates: int = option(
        500, "updates between validations (0 = only at the end)", at_least=0
    )
    save_interval_updates: int = option(
        500,
        "updates between checkpoints (0 = only at the end)",
        at_least=0,
        affects=NOTHING,
    )
    save_words: list[str] = option(
        [],
        "numbers of words at which a checkpoint is saved that stays, as words_7M, the first time "
        "that so many were seen: such as [20000,7M]; strict-small and strict are BabyLM's",
        affects=NOTHING,
    )
    async_save: bool = option(
        False,
        "write checkpoints while training goes on; a copy of weights and state waits in memory",
        affects=SPEED,
    )
    keep_last: int = option(
        2,
        "checkpoints to keep besides the best one (0 counts as 1)",
        at_least=0,
        affects=NOTHING,
    )
    best_checkpoint_metric: str = option(
        "loss", "validation metric that chooses the best checkpoint ('' = none is kept)"
    )
    maximize_best_checkpoint_metric: bool | None = option(
        None, "whether a larger metric is better (default: as its name says, such as accuracy)"
    )
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
        "stop",
        "if a checkpoint cannot be written: stop or continue",
        choices=("stop", "continue"),
        affects=NOTHING,
    )
    valid_split: str = option("valid", "split used for validation ('' = none)")
    final_splits: list[str] = option(
        [], "splits scored at the end with the best checkpoint", affects=NOTHING
    )
    final_suites: list[Any] = option(
        [],
        "suites that the best checkpoint is scored with at the end, each as {suite: SUITE, folder: "
        "FOLDER, name: NAME, too_long: fail, pll: original, optional: true, OPTION: VALUE}, of "
        "which suite and folder are needed; the folder is in the data folder or absolute; a run "
        "that does not give what an optional one takes goes without it",
        affects=NOTHING,
        set_by={LEAGUE: "give `comparison: {suites: ...}`"},
    )


@dataclass
class EngineConfig:
    """Devices, precision and processes.

    Except for the two precisions, nothing here changes results beyond the order of summation.
    """

    device: str = option("auto", "auto, cpu or cuda", choices=("auto", "cpu", "cuda"))
    precision: str = option(
        "fp32",
        "fp32, bf16 (autocast) or fp64",
        choices=("fp32", "bf16", "fp64"),
        affects=WEIGHTS,
    )
    reduce_precision: str = option(
        "fp32",
        "precision in which processes sum gradients: fp32 (fp64 if parameters are) or bf16; what "
        "is part of second derivatives is never summed in bf16",
        choices=("fp32", "bf16"),
        affects=WEIGHTS,
    )
    micro_batch_size: int = option(
        0, "rows computed at a time in each process (0 = all)", at_least=0
    )
    workers: int = option(0, "threads that prepare batches ahead", at_least=0)
    threads: int = option(0, "torch threads in each process (0 = torch's own choice)", at_least=0)
    parallel: str = option(
        "replicate",
        "where parameters and moments rest: replicate (whole in each process), shard (divided "
        "among all processes) or hybrid (among those of a node)",
        choices=("replicate", "shard", "hybrid"),
    )
    compile: bool = option(
        False,
        "compile loss and gradient with torch.compile; batches of a new shape run without, to "
        "count their FLOPs, and so do evaluations",
    )
    recompute: str = option(
        "none",
        "activations computed again in the backward pass, for less memory: none, or those inside "
        "each block (Transformer layer)",
        choices=("none", "block"),
    )
    gather: str = option(
        "layer",
        "how a pass puts sharded parameters together: layer by layer, or the whole model at once "
        "(more memory, fewer messages)",
        choices=("layer", "model"),
    )
    timeout: float = option(
        600.0, "seconds after which a process that does not respond counts as lost", at_least=1
    )
    retain_heap: bool = option(
        True,
        "keep freed CPU memory for the next update: faster, uses a little more memory (not with "
        "shards)",
    )
    tensorboard: bool = option(True, "write TensorBoard event files")
    loggers: list[str] = option(
        [],
        "further loggers: trackio, wandb or mlflow, each an extra of its name",
        choices=("trackio", "wandb", "mlflow"),
    )


@dataclass
class RunConfig:
    """The configuration of a run.

    The sections `task` to `schedule` are instances of the dataclass that their class is registered
    with; `_name` is the registered name.
    """

    data: str = option(
        "",
        "folder of the binarised data (the DATA argument)",
        movable=True,
        affects=DATA,
        set_by={LEAGUE: "give the plan's `data`"},
    )
    save_dir: str = option(
        "",
        "run folder; an existing one is resumed",
        movable=True,
        affects=NOTHING,
        set_by={SWEEP: "the sweep names the folders"},
    )
    label: str = option(
        "",
        "name of the setting in reports ('' = task/criterion)",
        movable=True,
        set_by={LEAGUE: "the league labels runs by their objective"},
    )
    seed: int = option(
        1, "random seed", affects=WEIGHTS, set_by={SWEEP: "give seeds (--seeds 1,2,3)"}
    )
    user_dir: str | None = option(
        None,
        "folder or file of a plug-in to load first",
        movable=True,
        affects=NOTHING,
        set_by={SWEEP: "give --user-dir"},
    )
    init_from: str | None = option(
        None,
        "checkpoint, or run folder (its last checkpoint), whose weights to start from",
        source="pretraining",
        movable=True,  # checkpoints record its weights' hash, wherever it lies
    )
    branch_from: str | None = option(
        None,
        "checkpoint, or run folder (its last one), that a new run goes on from with moments, data "
        "and counts, under a schedule or an end of its own",
        source="plateau",
        movable=True,  # the run has its own checkpoint before its first update
    )
    task: Any = None
    criterion: Any = None
    model: Any = None
    optimizer: Any = None
    schedule: Any = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)


# The folder of presets and of the base configuration.
FOLDER = Path(__file__).parents[1] / "config"
RECIPES = "recipes"  # subfolder of primary configs
GROUPS = ("task", "criterion", "model", "optimizer", "schedule")
TOP = {item.name for item in fields(RunConfig)}
PATHS = ("data", "save_dir", "user_dir")  # besides options that name other runs


@cache
def named(base: type, name: str) -> type:
    """Return dataclass `base` with a field `_name`, the registered name."""
    return make_dataclass(base.__name__, [("_name", str, name)], bases=(base,))


def section(group: str, _name: str, **options: Any) -> Any:
    """Return the section of a registered name with some options, the others at their defaults.

    Raises UsageError for a name that is not registered, or a value out of range.
    """
    values = named(ALL[group].entry(_name).dataclass, _name)(**options)
    check_options(type(values), values, f"{group}.")
    return values


def untyped_section(values: dict[str, Any]) -> Any:
    """Return a section with the options of a class that is not registered, of any types."""
    section = SimpleNamespace()
    vars(section).update(values)
    return section


def as_dict(config: RunConfig) -> dict[str, Any]:
    """Return a configuration as nested plain values, the form of config.yaml and checkpoints."""
    values = vars(config).items()
    return {key: copy.deepcopy(getattr(value, "__dict__", value)) for key, value in values}


def options_of(section: Any) -> dict[str, Any]:
    """Return the options of a section, without its registered name."""
    return {name: value for name, value in vars(section).items() if name != "_name"}


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one with dotted keys."""
    if not isinstance(node, dict):
        return {prefix[:-1]: node}
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= flatten(value, f"{prefix}{key}.")
    return flat


def build(group: str, options: Any, *args: Any, **kwargs: Any) -> Any:
    """Build the class named by a section of the configuration from it and further arguments."""
    return ALL[group].build(options._name, options, *args, **kwargs)


def section_classes(config: RunConfig) -> dict[str, type]:
    """Return the dataclass of each section of a configuration by its prefix, such as "task.".

    Sections of classes that are not registered are left out.
    """
    classes: dict[str, type] = {"": RunConfig, "trainer.": TrainerConfig, "engine.": EngineConfig}
    for group in GROUPS:
        entry = ALL[group].entries.get(getattr(config, group)._name)
        if entry is not None:
            classes[f"{group}."] = entry.dataclass
    return classes


def options_with(
    key: str, config: RunConfig | None = None, groups: Sequence[str] = GROUPS
) -> dict[str, Any]:
    """Return the dotted names of the options that have the metadata `key`, with its value.

    Args:
        key: "source" for options that name other runs (the value is the runs' name in reports);
            "movable" for options that may change when a run is resumed.
        config: A run's configuration, for the options of its classes; None for all registered ones.
        groups: The groups of options to search, besides the options that every run has.
    """
    schemas: list[tuple[str, type]] = [("", RunConfig), ("trainer.", TrainerConfig)]
    for group in groups:
        names = ALL[group].names()
        if config is not None:
            names = [getattr(config, group)._name]
        schemas += [(f"{group}.", ALL[group].entry(name).dataclass) for name in names]
    values = {}
    for prefix, schema in schemas:
        for name, item in _fields_of(schema).items():
            if key in item.metadata:
                values[prefix + name] = item.metadata[key]
    return values


# What an option affects if its declaration does not say so, by section.
_USUAL_EFFECTS = {
    **dict.fromkeys(("task", "criterion"), LOSS),
    "model": FUNCTION,
    **dict.fromkeys(("optimizer", "schedule", "trainer"), WEIGHTS),
    "engine": NOTHING,
}


def declaration(key: str, values: Mapping[str, Any]) -> Field[Any] | None:
    """Return the field that declares an option; None if its class is not registered.

    Args:
        key: The dotted name.
        values: The flat configuration of the run, which names the class of each section.
    """
    section, _, name = key.rpartition(".")
    classes = {"": RunConfig, "trainer": TrainerConfig, "engine": EngineConfig}
    if section in GROUPS:
        entry = ALL[section].entries.get(str(values.get(f"{section}._name")))
        if entry is not None:
            classes[section] = entry.dataclass
    return _fields_of(classes[section]).get(name) if section in classes else None


@lru_cache(maxsize=512)
def _fields_of(schema: type) -> dict[str, Field[Any]]:
    return {item.name: item for item in fields(schema)}


def effect(key: str, values: Mapping[str, Any], recorded: Mapping[str, str] | None = None) -> str:
    """Return the effect of an option, as in `option`: LOSS, DATA, ..., NOTHING.

    Args:
        key: The dotted name.
        values: The flat configuration of the run.
        recorded: Effects of options of classes that are not registered, by dotted names.
    """
    declared = declaration(key, values)
    usual = _USUAL_EFFECTS.get(key.partition(".")[0], LOSS)
    if declared is None:
        return (recorded or {}).get(key, usual)
    return str(declared.metadata.get("affects", usual))


def describe_tuned_loss(keys: Iterable[str], metric: str, config: RunConfig) -> str:
    """Return why a metric should not choose the values of options; "" if it may.

    A loss cannot choose an option that changes its function.
    """
    values = flatten(as_dict(config))
    changing = [key for key in keys if effect(key, values) in (LOSS, DATA)]
    if not changing or not is_loss(metric):
        return ""
    return (
        f"{metric} is another function for other values of {', '.join(changing)}, so the smallest "
        "is not the best one; choose by a metric of an end task"
    )


def effects_of_plug_ins(config: RunConfig) -> dict[str, str]:
    """Return the effects of the options that classes of plug-ins declare, by dotted names.

    A run records them for reports that do not import its plug-in.
    """
    effects = {}
    for group in GROUPS:
        entry = ALL[group].entry(getattr(config, group)._name)
        if entry.is_of_package:
            continue
        for item in fields(entry.dataclass):
            effects[f"{group}.{item.name}"] = item.metadata.get("affects", _USUAL_EFFECTS[group])
    return effects


def names_runs(key: str) -> bool:
    """Return whether the values of an option are paths of other runs."""
    groups = [group for group in GROUPS if key.startswith(f"{group}.")]
    return key in options_with("source", groups=groups)


def why_set(key: str, *setters: str) -> str:
    """Return why files of SWEEP, SEARCH or LEAGUE cannot set an option; "" if they can."""
    groups = [group for group in GROUPS if key.startswith(f"{group}.")]
    reasons = options_with("set_by", groups=groups).get(key, {})
    return next((reasons[setter] for setter in setters if setter in reasons), "")


def check_values(config: RunConfig) -> None:
    """Raise UsageError for a name that is not registered, or a value outside its option's range."""
    check_names(config)
    for prefix, schema in section_classes(config).items():
        check_options(schema, getattr(config, prefix[:-1]) if prefix else config, prefix)


def require_data_folder(folder: str | Path) -> None:
    """Raise UsageError if there is no such folder."""
    if not Path(folder).is_dir():
        raise UsageError(
            f"{folder}: there is no such data folder; make it with 'preprocess', or name another "
            "(DATA of train and sweep, --data of other commands)"
        )


def check_names(config: RunConfig) -> None:
    """Raise UsageError if a group has a name that is not registered."""
    for group in GROUPS:
        name = getattr(getattr(config, group), "_name", None)
        if not isinstance(name, str):
            raise UsageError(f"the config has no {group}; choose one with --{group}")
        ALL[group].entry(name)
