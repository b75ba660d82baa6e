"""`train -m`: a sweep in Hydra's own way, by its basic launcher or by hydra-submitit-launcher.

  metaseq-lm train -m DATA task=masked_lm seed=1,2,3 --save-dir sweep \\
      hydra/launcher=submitit_slurm hydra.launcher.partition=main hydra.launcher.array_parallelism=2

Every job trains into its own folder, SAVE_DIR/0, SAVE_DIR/1, ... and resumes from there.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from metaseq_lm import plugins, stopping
from metaseq_lm.config import FOLDER, GROUPS, MISTAKES, explain, fill_store, load_config
from metaseq_lm.errors import Interrupted, MetaseqError, UsageError
from metaseq_lm.registry import ALL

# A run folder has its own config and log.
# What Hydra writes down of a composition.
BOOKKEEPING = ("runtime", "job", "overrides", "searchpath", "choices")
QUIET = ("hydra/job_logging=none", "hydra.output_subdir=null")


def run(
    overrides: list[str],
    config_dir: str | None = None,
    config_name: str | None = None,
    user_dir: str | None = None,
) -> int:
    """Run all jobs of a sweep and wait for them; return the largest of their exit codes.

    `save_dir` among the overrides is the folder of the sweep (hydra.sweep.dir). Raises UsageError
    before anything is submitted, MetaseqError if the scheduler refuses or loses a job.
    """
    plugins.load_all(user_dir)
    fill_store()
    folder, name = Path(config_dir).resolve() if config_dir else FOLDER, config_name or "base"
    places = [f"hydra.searchpath=[file://{FOLDER}]"] if config_dir else []
    argv = sys.argv
    try:
        parsed = parse(overrides, folder)
        places += sweep_folder(parsed)
        parsed = [o for o in parsed if o.key_or_group != "save_dir"]
        for job in BasicSweeper.split_arguments([o for o in parsed if not is_hydras(o)], None)[0]:
            config = load_config(job, config_dir, config_name)
            plugins.check_named(config, user_dir)
            if not config.data:
                raise UsageError("no DATA folder given; see 'metaseq-lm train --help'")
        given = {o.key_or_group for o in parsed}
        quiet = [o for o in QUIET if o.split("=")[0] not in given]
        own = [*quiet, *places, *(o.input_line or "" for o in parsed if is_hydras(o))]
        lines = [*own, *(o.input_line or "" for o in parsed if not is_hydras(o))]
        check_hydras(own, lines, folder, name)
        return summary(launch(lines, folder, name))
    except MISTAKES as error:
        message = explain(error, [*overrides, *places], folder, name)
        if "'hydra." in message:
            message = message.split(" Did you mean")[0]  # those are keys of a run
        raise UsageError(message) from error
    except SystemExit as stop:  # of `train_one`
        return int(stop.code or 0)
    finally:
        sys.argv = argv
        GlobalHydra.instance().clear()


def new_hydra(folder: Path) -> Any:
    """Return Hydra's own object for the configs in `folder`."""
    GlobalHydra.instance().clear()
    initialize_config_dir(str(folder), job_name="metaseq-lm", version_base="1.3")
    return GlobalHydra.instance().hydra


def parse(overrides: Sequence[str], folder: Path) -> list[Override]:
    """Return the overrides parsed; raises UsageError if a launcher is not installed."""
    loader = new_hydra(folder).config_loader
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
    for override in parsed:
        if override.key_or_group == "hydra/launcher" and "submitit" in str(override.value()):
            try:
                importlib.import_module("hydra_plugins.hydra_submitit_launcher")
            except ModuleNotFoundError as error:
                raise UsageError(
                    f"{override.input_line} needs hydra-submitit-launcher: "
                    "pip install hydra-submitit-launcher"
                ) from error
    return parsed


def is_hydras(override: Override) -> bool:
    """Return whether an override configures Hydra itself."""
    return override.key_or_group.startswith(("hydra.", "hydra/"))


def sweep_folder(parsed: Sequence[Override]) -> list[str]:
    """Return the override that makes `save_dir` the folder of the sweep, if it is given."""
    for override in reversed(parsed):
        if override.key_or_group == "save_dir":
            if override.is_sweep_override():
                raise UsageError(
                    f"{override.input_line}: a sweep has one folder, with all jobs in it"
                )
            return [f"hydra.sweep.dir={override.get_value_element_as_str()}"]
    return []


def launch(overrides: list[str], folder: Path, name: str) -> Any:
    """Let Hydra's sweeper and launcher run `train_one` for every job; return what they return."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError, UncompletedJobError

    hydra = new_hydra(folder)
    make_store_plain()
    try:
        return hydra.multirun(name, train_one, overrides)
    except (FailedJobError, FailedSubmissionError) as error:
        raise MetaseqError(f"the sweep was not submitted: {error}") from error
    except UncompletedJobError as error:
        raise MetaseqError(f"a job was lost; the others may still run. {error}") from error


def check_hydras(own: list[str], overrides: list[str], folder: Path, name: str) -> None:
    """Raise UsageError if a config file sets something of Hydra itself: it could name code to run.

    `own` are the overrides of Hydra's own keys. Errors of the composition come here, before any file.
    """
    found = []
    for place, primary, lines in ((FOLDER, "base", own), (folder, name, overrides)):
        config = new_hydra(place).compose_config(primary, lines, RunMode.MULTIRUN)
        node = OmegaConf.to_container(config.hydra, resolve=False)
        assert isinstance(node, dict)
        job = {key: node["job"][key] for key in ("chdir", "env_set", "env_copy")}
        found.append({k: v for k, v in node.items() if k not in BOOKKEEPING} | {"job": job})
    wrong = [key for key in found[1] if found[1][key] != found[0].get(key)]
    if wrong:
        raise UsageError(
            f"hydra.{wrong[0]} is set by a config file; give hydra.KEY=VALUE on the command line (a plug-in "
            "is loaded only by --user-dir)"
        )


def make_store_plain() -> None:
    """Replace the groups' dataclasses in Hydra's store by plain values.

    A submitted job gets a copy of the store before it can load the plug-in that a class is from.
    Types have been checked by then, and `train_one` composes with the dataclasses again.
    """
    store = ConfigStore.instance()
    for group in GROUPS:
        for name in ALL[group].entries:
            node = store.load(f"{group}/{name}.yaml").node
            store.store(group=group, name=name, node=OmegaConf.to_container(node))


def summary(batches: Sequence[Sequence[Any]]) -> int:
    """Print the jobs that failed, with folder and exit code; return the largest code."""
    jobs = [job for batch in batches for job in batch]
    for job in jobs:
        if job.return_value:
            place = job.hydra_cfg.hydra.runtime.output_dir
            print(f"metaseq-lm: {place} ended with exit code {job.return_value}", file=sys.stderr)
    codes = [job.return_value for job in jobs]
    print(f"{len(codes)} jobs, {codes.count(0)} finished", flush=True)
    return max(codes, default=0)


# ---------------------------------------------------------------- in the job


def train_one(config: DictConfig) -> int:
    """Train one job, called by a launcher; returns its exit code.

    Where the job is a process of its own, that ends with the code, too: Hydra keeps every exception
    to itself, so that a scheduler would see a failed job as completed.
    """
    hydra = HydraConfig.get()
    submitted = "submitit" in hydra.runtime.choices["hydra/launcher"]
    preempted = False
    code = 0
    try:
        with stopping.listening():
            try:
                code = train(config, hydra)
            finally:
                preempted = submitted and stopping.came(preemption())
    except MetaseqError as error:
        print(f"metaseq-lm: {error}", file=sys.stderr)
        code = error.exit_code
    except Exception:  # a defect; the other jobs go on
        traceback.print_exc()
        code = MetaseqError.exit_code
    if code == Interrupted.exit_code:
        if not submitted:
            raise SystemExit(code)  # the signal meant the whole command
        requeue(preempted)
    if code and submitted:
        # When the interpreter ends, submitit has written the result that the sweep waits for.
        atexit.register(end, code)
    return code


def train(config: DictConfig, hydra: Any) -> int:
    """Train from the configuration that this job's overrides make; see `cli.train.train`."""
    from metaseq_lm.cli import train as command

    plugins.load_all(config.user_dir)
    folder, sweep = (
        os.path.abspath(os.path.join(hydra.runtime.cwd, place))
        for place in (hydra.runtime.output_dir, hydra.sweep.dir)
    )
    if not Path(folder).is_relative_to(sweep):
        raise UsageError(f"hydra.sweep.subdir: {folder} is not inside of the folder of the sweep")
    main = next(s.path for s in hydra.runtime.config_sources if s.provider == "main")
    own = [] if Path(main) == FOLDER else [main, hydra.job.config_name]
    config = load_config(list(hydra.overrides.task), *own)
    config.save_dir = hydra.runtime.output_dir
    # What command.txt shall say: how to run this one again.
    options = [f"--config-dir={own[0]}", f"--config-name={own[1]}"] if own else []
    options += [f"--user-dir={config.user_dir}"] if config.user_dir else []
    keys = [key for key in hydra.overrides.task if not key.startswith("user_dir=")]
    sys.argv = ["metaseq-lm", "train", *options, *keys, f"--save-dir={config.save_dir}"]
    return command.train(config)


def preemption() -> int:
    """Return the signal by which submitit is told of a preemption or a time-out."""
    from submitit import JobEnvironment

    return getattr(signal, f"SIG{JobEnvironment.USR_SIG}")


def requeue(preempted: bool) -> None:
    """Let submitit requeue a job that was preempted or ran out of time; the process ends here then.

    Returns for a job that was cancelled: to requeue it would bring it to life again.
    """
    from submitit.core.utils import UncompletedJobError

    try:
        if preempted:
            signal.raise_signal(preemption())  # submitit's handler is in place again
            raise SystemExit(Interrupted.exit_code)  # not the first task: that one asks for all
        time.sleep(stopping.SECOND_SIGNAL)  # submitit's handler runs in here
    except UncompletedJobError as error:
        print(f"metaseq-lm: {error}", file=sys.stderr)


def end(code: int) -> None:
    """End the process with an exit code when it is about to end anyway."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
