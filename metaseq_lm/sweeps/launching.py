"""Launching the open runs of one sweep, or of several at a time."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from metaseq_lm.core.errors import Interrupted, UsageError
from metaseq_lm.core.output import show
from metaseq_lm.sweeps.configs import compose_runs
from metaseq_lm.sweeps.definition import Definition
from metaseq_lm.sweeps.expansion import PlannedRun
from metaseq_lm.sweeps.folder import SweepFolder
from metaseq_lm.sweeps.job import Code, Snapshot, code_at, is_same_plugin
from metaseq_lm.sweeps.lock_file import process_start
from metaseq_lm.sweeps.options import Launch
from metaseq_lm.sweeps.states import RETRYABLE, State, check_data, read_states, same_data
from metaseq_lm.sweeps.submit import LocalRuns, RunBatch

OPEN = (*RETRYABLE, "waiting")  # states of runs that a sweep's command launches


def adopt(
    folder: SweepFolder, definition: Definition, runs: list[PlannedRun], launch: Launch
) -> list[State]:
    """Write sweep.json and return the state of every run; the caller holds the lock.

    Raises:
        UsageError: The folder holds another sweep.
        MetaseqError: A finished run was trained on other data.
    """
    folder.require_same(definition, runs, relocated_paths(folder, definition))
    check_data(folder, runs)
    folder.adopt(definition, runs, launch.non_default())
    return read_states(folder, runs)


def relocated_paths(folder: SweepFolder, definition: Definition) -> dict[str, str]:
    """Return the stored paths of a sweep that moved without a change of content."""
    if not (folder.path / "sweep.json").exists():
        return {}
    stored = folder.definition()
    last = folder.last_code()
    snapshot = folder.path / "code" / last if last else None
    comparisons: dict[str, Callable[[str, str], bool]] = {
        "data": same_data,
        "user_dir": lambda _, new: snapshot is None or is_same_plugin(snapshot, new),
        "config_dir": lambda _, new: (
            snapshot is None or _same_configs(folder, snapshot, definition)
        ),
    }
    pairs = {key: (getattr(stored, key), getattr(definition, key)) for key in comparisons}
    return {
        key: old
        for key, (old, new) in pairs.items()
        if old and new and old != new and comparisons[key](old, new)
    }


def _same_configs(folder: SweepFolder, snapshot: Path, definition: Definition) -> bool:
    """Return whether stored runs have equal configurations in snapshot and definition."""
    runs = folder.runs()
    copied = replace(definition, config_dir=str(snapshot / "config"))
    try:
        pairs = zip(compose_runs(runs, copied), compose_runs(runs, definition))
        return all(old[-1] == new[-1] for old, new in pairs)
    except UsageError:  # a config that exists in only one place
        return False


def take_code(folder: SweepFolder, new: bool = False) -> Code:
    """Return the snapshot that the sweep runs from: the last one, or a new one if `new`."""
    definition = folder.definition()
    folders = definition.user_dir, definition.config_dir
    last = folder.last_code()
    if last is None or new:
        return Snapshot(folder.path, *folders).take()
    try:
        same = Snapshot(folder.path, *folders).hash == last
    except (OSError, UsageError):  # a plug-in or config that is gone
        same = False
    if not same:
        show(f"the code has changed since; the runs go on with code/{last} (see --new-code)")
    return code_at(folder.path / "code" / last, *folders)


def run_locally(
    batches: Sequence[RunBatch], launch: Launch, report: Callable[[SweepFolder, PlannedRun], None]
) -> None:
    """Run sweeps on this machine and wait; the caller holds their locks.

    `report` is called for a run that started or ended, and now and then for active runs. Raises
    Interrupted after a signal, once the runs have saved.
    """
    pid = os.getpid()
    for batch in batches:
        batch.folder.append("command", pid=pid, start=process_start(pid), host=socket.gethostname())
    if LocalRuns(launch).work(batches, report):
        raise Interrupted(
            "the runs were stopped and have saved; the same command goes on with them"
        )
