"""Train any registered objective; an existing run folder is resumed.

examples:
  metaseq-lm train data/wiki --task masked_lm --save-dir runs/mlm --lr 1e-3 --max-update 10000
  metaseq-lm train data/wiki --config recipes/gpt_bert --model modern_nano --save-dir runs/gpt_bert
  metaseq-lm train data/moons --config-dir my/configs --config-name soft --save-dir runs/2 seed=2

Any option of the configuration is set by key=value (Hydra's grammar), which wins over a flag.
`metaseq-lm train --task T --criterion C --help` lists all keys of that choice with their defaults.
"""

import argparse
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from metaseq_lm.core.documents import show_result
from metaseq_lm.core.errors import DivergedError, Interrupted, MetaseqError, UsageError, hint, say
from metaseq_lm.core.memory import memory_error
from metaseq_lm.core.options import add_options, option, read_options
from metaseq_lm.core.output import show
from metaseq_lm.core.registry import nearest

if TYPE_CHECKING:
    from metaseq_lm.core.config import RunConfig
    from metaseq_lm.training.parts import Parts

PROGRESS = True
HELP = "train an objective (resumes by itself)"
OVERRIDES = True

_STATUS = {DivergedError: "diverged", Interrupted: "interrupted"}
# fairseq's flags and the keys that they stand for.
FLAGS = {
    "objective": "objective",
    "task": "task",
    "criterion": "criterion",
    "model": "model",
    "optimizer": "optimizer",
    "schedule": "schedule",
    "save-dir": "save_dir",
    "init-from": "init_from",
    "branch-from": "branch_from",
    "label": "label",
    "seed": "seed",
    "lr": "optimizer.lr",
    "clip-norm": "optimizer.clip_norm",
    "weight-decay": "optimizer.weight_decay",
    "warmup-updates": "schedule.warmup_updates",
    "batch-size": "task.batch_size",
    "max-update": "trainer.max_update",
    "max-flops": "trainer.max_flops",
    "max-seconds": "trainer.max_seconds",
    "max-words": "trainer.max_words",
    "log-interval": "trainer.log_interval",
    "validate-interval-updates": "trainer.validate_interval_updates",
    "save-interval-updates": "trainer.save_interval_updates",
    "best-checkpoint-metric": "trainer.best_checkpoint_metric",
    "patience": "trainer.patience",
    "device": "engine.device",
    "precision": "engine.precision",
    "num-workers": "engine.workers",
}


@dataclass(frozen=True)
class ConfigOptions:
    """The sources of a configuration and a plug-in."""

    config: str | None = option(
        None, "a published recipe, such as recipes/bert (see 'metaseq-lm list recipes'), or a file"
    )
    config_dir: str | None = option(None, "folder with configs of your own")
    config_name: str | None = option(None, "config in --config-dir (default: base)")
    user_dir: str | None = option(None, "plug-in folder or file to load")

    def primary(self) -> tuple[str | None, str | None]:
        """Return folder and name of the primary config; None if not given.

        Raises UsageError if both kinds of options are given, or if the recipe or file is missing.
        """
        if not self.config:
            return self.config_dir, self.config_name
        if self.config_dir or self.config_name:
            raise UsageError("--config names a whole configuration; leave --config-dir and -name")
        from metaseq_lm.core.loading import config_file

        return config_file(self.config)


@dataclass(frozen=True)
class _TrainOptions(ConfigOptions):
    """The options of `train` that are not keys of the configuration."""

    data: str | None = option(
        None, "folder made by preprocess", positional=True, nargs="?", metavar="DATA"
    )
    keys: tuple[str, ...] = option(
        (), "configuration overrides", positional=True, nargs="*", metavar="key=value"
    )
    reset: tuple[str, ...] = option(
        (),
        "continue the run with other options, and start these parts anew: schedule, optimizer, "
        "data",
        metavar="A,B",
    )
    nproc: int | None = option(
        None, "processes on this machine, or in each task of srun (default: 1)", at_least=1
    )
    dry_run: bool = option(
        False,
        "make one update (of each kind, if the task has several; on a CPU with a part of the "
        "rows), validate one batch, print the cost (FLOPs, time of the whole run, memory), and "
        "write nothing",
    )
    print_config: bool = option(False, "print the configuration and stop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_options(parser, _TrainOptions)
    add_key_flags(parser)
    # Not argparse's own help, because the keys to list depend on the other flags.
    keys = (
        "show this help and all keys; with --task, --criterion and so on the keys of that choice, "
        "too"
    )
    parser.add_argument("-h", "--help", action="store_true", help=keys)


def add_key_flags(parser: Any, without: Collection[str] = ()) -> None:
    """Declare the flags that stand for keys of the configuration, on a parser or group."""
    for flag, key in FLAGS.items():
        if flag not in without:
            text = "a criterion with its task" if key == "objective" else f"the same as {key}=V"
            parser.add_argument(f"--{flag}", metavar="V", help=text)


def flag_values(args: argparse.Namespace) -> dict[str, str]:
    """Return the values of the passed flags by the keys that they stand for."""
    values = {key: getattr(args, flag.replace("-", "_"), None) for flag, key in FLAGS.items()}
    return {key: value for key, value in values.items() if value is not None}


def _overrides_of(args: argparse.Namespace) -> list[str]:
    """Return flags and key=value arguments as overrides; a choice of a group comes first."""
    from metaseq_lm.core.config import PATHS, TOP
    from metaseq_lm.core.loading import quote, quote_path, split_overrides

    words = ([args.data] if args.data else []) + args.keys + args.overrides
    data, overrides = split_overrides(words, TOP)
    if len(data) > 1:
        raise UsageError(f"more than one DATA folder: {', '.join(data)}; options are key=value")
    quotes = dict.fromkeys((*PATHS, "init_from", "branch_from"), quote_path) | {
        "objective": str,
        "task": str,
        "criterion": str,
    }
    flags = []
    for key, value in flag_values(args).items():
        # Quoted, null would be a text.
        text = value if value == "null" else quotes.get(key, quote)(value)
        flags.append(f"{key}={text}")
    flags += [f"data={quote_path(folder)}" for folder in data]
    if args.user_dir:
        flags.append(f"user_dir={quote_path(args.user_dir)}")
    return flags + overrides


def run(args: argparse.Namespace) -> int:
    """Compose the configuration, then train."""
    from metaseq_lm.distributed import signals

    signals.end_with_parent()
    with signals.listen():
        return prepare(args)


def prepare(args: argparse.Namespace) -> int:
    """Carry out the options: print, check or train."""
    from metaseq_lm import plugins
    from metaseq_lm.core.config import as_dict
    from metaseq_lm.core.files import as_numbers, read_json
    from metaseq_lm.core.loading import common_config, describe
    from metaseq_lm.distributed import launcher
    from metaseq_lm.distributed.step import step_of

    if args.argv[1:] in (["-h"], ["--help"]):
        show(f"{args.parser.format_help()}\nkeys of every run:\n{describe(common_config())}")
        return 0
    options = read_options(_TrainOptions, vars(args))
    plugins.load_all(options.user_dir)
    config = compose(args, options)
    entries = (*getattr(config.task, "objectives", ()), *config.trainer.final_suites)
    if any(isinstance(entry, str) for entry in entries):
        hint(
            "earlier versions wrote entries of task.objectives and trainer.final_suites as "
            "text; write {task: NAME, weight: W, OPTION: VALUE} and {suite: NAME, folder: F}"
        )
    if args.help:
        show(args.parser.format_help() + "\nkeys, with the values this command gives them:")
        show(describe(config))
        return 0
    if options.print_config:
        content = as_dict(config)
        if not args.json:
            sys.stdout.write(OmegaConf.to_yaml(content))  # escaped by YAML
        show_result("config", {"config": content})
        return 0
    is_launched = "RANK" in os.environ
    if options.nproc and not is_launched and options.nproc * step_of(os.environ).tasks > 1:
        return launcher.run(options.nproc, args.argv, config.save_dir)
    code = train(config, options.dry_run, _reset_parts(options.reset))
    if args.json and not options.dry_run and os.environ.get("RANK", "0") == "0":
        results = as_numbers(read_json(Path(config.save_dir) / "results.json"))
        show_result("train", {"folder": config.save_dir, "results": results})
    return code


def compose(args: argparse.Namespace, options: _TrainOptions) -> "RunConfig":
    """Return the configuration; UsageError if it or another argument is wrong."""
    from metaseq_lm import plugins
    from metaseq_lm.core.config import require_data_folder
    from metaseq_lm.core.loading import load_config

    overrides = _overrides_of(args)
    config_dir, config_name = options.primary()
    if not (config_dir or config_name):
        overrides = _with_stored(overrides)
    config = load_config(overrides, config_dir, config_name)
    plugins.check_named(config, options.user_dir)
    if options.user_dir and (config_dir or config_name):
        alone = [override for override in overrides if not override.startswith("user_dir=")]
        plugins.check_named(load_config(alone, config_dir, config_name), options.user_dir)
    _reset_parts(options.reset)
    if args.help or options.print_config:
        return config
    if not config.data:
        no_run = f", and {config.save_dir} holds no run to go on with" if config.save_dir else ""
        raise UsageError(f"no DATA folder given{no_run}; see 'metaseq-lm train --help'")
    require_data_folder(config.data)
    if not config.save_dir and not options.dry_run:
        raise UsageError("no --save-dir given; name the folder of the run (or use --dry-run)")
    return config


def _with_stored(overrides: list[str]) -> list[str]:
    """Return `overrides` after the options of an existing run in their save_dir or branch_from."""
    from metaseq_lm.core.config import GROUPS
    from metaseq_lm.runs.folder import check_hidden, read_config, stored_overrides

    keys = [override.partition("=")[0] for override in overrides]
    # A choice of a task, a criterion and so on describes a whole run.
    if any(key in GROUPS and key != "schedule" for key in keys):
        return overrides
    for folder in _stored_folders(overrides):
        if stored := stored_overrides(folder):
            file = folder / "config.yaml"
            check_hidden(file, read_config(file), overrides)
            chosen = [override for override in overrides if override.startswith("schedule=")]
            # Options of the stored schedule do not fit another one.
            if chosen and chosen[-1] not in stored:
                stored = [key for key in stored if not key.startswith(("schedule=", "schedule."))]
            return stored + overrides
    return overrides


def _stored_folders(overrides: list[str]) -> list[Path]:
    """Return the run folders named by save_dir and branch_from in overrides, if any."""
    from metaseq_lm.core.loading import literal_path, override_value

    folders = []
    for key in ("save_dir", "branch_from"):
        paths = [literal_path(o) for o in overrides if o.startswith(f"{key}=")]
        if paths and (path := override_value(paths[-1])):
            folders.append(Path(path))
    if folders[1:]:  # or to a checkpoint
        folders.append(folders[1].resolve().parent.parent)
    return folders


def _reset_parts(parts: Sequence[str]) -> list[str]:
    from metaseq_lm.runs.folder import RESETS

    for part in parts:
        if part not in RESETS:
            raise UsageError(
                f"--reset has '{part}'.{nearest(part, RESETS)} Parts: {', '.join(RESETS)}"
            )
    return [part for part in RESETS if part in parts]


def train(config: "RunConfig", dry_run: bool = False, reset: Collection[str] = ()) -> int:
    """Train the configured run in this process; return the exit code. Raises MetaseqError.

    The parts of an existing run in `reset` start anew.
    """
    from metaseq_lm.distributed import process_group
    from metaseq_lm.training import effects, price
    from metaseq_lm.training.run import TrainingRun

    run = None
    try:
        if dry_run:
            parts, content = price.dry_run(config)
            _say_if_not_exported(parts)
            if untried := effects.check_effects(config):
                hint(f"the effect on results was not tried for {', '.join(untried)}")
            if process_group.rank() == 0:
                show_result("dry-run", {**content, "untried_effects": untried})
        else:
            run = TrainingRun(config, reset)
            _say_if_not_exported(run.parts)
            run.train()
    except Exception as error:
        error = memory_error(error) or error
        known = error if isinstance(error, MetaseqError) else MetaseqError(repr(error))
        status = _STATUS.get(type(known), "failed")
        if status == "failed":  # the other replicas do not know it
            process_group.fail(known)
            if known is not error and process_group.world_size() > 1:
                say(f"metaseq-lm: replica {process_group.rank()} failed:")
        else:  # all stop for the same reason, which the first reports
            known.is_printed = process_group.rank() > 0
        if run is not None:
            try:
                run.record(status, known)
            except MetaseqError as unrecorded:  # the first error is the relevant one
                if str(unrecorded) != str(known):
                    say(f"metaseq-lm: {unrecorded}")
        raise error
    process_group.finish()
    return 0


def _say_if_not_exported(parts: "Parts") -> None:
    """Print one line if `metaseq-lm export` has no transformers class for the model of a run."""
    from metaseq_lm.data.tokenizers.base import DICT_FILE
    from metaseq_lm.distributed import process_group
    from metaseq_lm.interop.exporting import why_not_exportable

    weights, task = parts.model.state_dict(), parts.task
    vocabulary = None
    # A word language model inherits `vocabulary`, but its data folder has no tokens.
    if (task.data / DICT_FILE).is_file():
        vocabulary = getattr(task, "vocabulary", None)
    if not process_group.rank() and (
        reason := why_not_exportable(weights, parts.config, vocabulary)
    ):
        hint(f"cannot be exported to transformers: {reason}")
