"""Following unfinished runs: files are written anew when results change."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

from metaseq_lm.core.errors import MetaseqError, say
from metaseq_lm.core.output import show_progress
from metaseq_lm.reporting.folders import (
    SKIPPED_FOLDERS,
    SNAPSHOT,
    find_plan,
    run_folders,
    sweep_files,
)
from metaseq_lm.runs import suite_results

INTERVAL = 10  # seconds between two checks, and between reloads of a page
_SHARE = 10  # pause between two writes, as a multiple of the time of writing
_STALE = 3600.0  # seconds without a log line after which a run of no sweep counts as dead
FILES = ("config.yaml", "log.jsonl", "results.json", "sweep.json", "jobs.jsonl", "league.json")

Result = TypeVar("Result")


def follow(
    write: Callable[[int], object], paths: Iterable[Path], goes_on: Callable[[], bool]
) -> None:
    """Write files whenever results change, until the runs are over, then a last time.

    `write` is called with the seconds after which its page reloads itself. Its output is
    suppressed; a MetaseqError, such as no run having started yet, is printed once. The last call is
    with 0, also at KeyboardInterrupt, which is raised again. `goes_on` says if any run is not over.
    """
    paths, seen, last_problem = list(paths), None, ""
    try:
        while _quietly(goes_on):
            pause, present = float(INTERVAL), _files_below(paths)
            if present != seen:
                started, problem = time.monotonic(), ""
                try:
                    _quietly(partial(write, INTERVAL))
                except MetaseqError as error:
                    problem = str(error)
                if problem not in ("", last_problem):
                    say(f"metaseq-lm: {problem}")
                done = "written; Ctrl-C ends the watch"
                show_progress("waiting for results" if problem else done)
                seen, last_problem = present, problem
                pause = max(pause, _SHARE * (time.monotonic() - started))
            time.sleep(pause)
    except KeyboardInterrupt:
        with contextlib.suppress(MetaseqError):
            write(0)
        raise
    write(0)


def _quietly(call: Callable[[], Result]) -> Result:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return call()


def _files_below(paths: Iterable[Path]) -> dict[str, tuple[int, int]]:
    """Return time and size of the files that reports read, by path."""
    state = {}
    skipped = {*SKIPPED_FOLDERS, SNAPSHOT} - {suite_results.FOLDER}
    for root in paths:
        files = [root]
        for folder, children, names in os.walk(root):
            children[:] = [d for d in children if d not in skipped and not d.startswith(".")]
            is_suites = Path(folder).name == suite_results.FOLDER
            files += [Path(folder, name) for name in names if is_suites or name in FILES]
        for file in files:
            with contextlib.suppress(OSError):  # replaced meanwhile
                status = file.stat()
                if not file.is_dir():
                    state[str(file)] = status.st_mtime_ns, status.st_size
    return state


def runs_go_on(paths: Iterable[Path]) -> bool:
    """Return whether any run at or below some paths, or in their sweeps, is not over.

    A run of a sweep is over if `sweep status` says so, or if it waits for a command that has ended;
    any other run is over if it has results, or if its log is an hour old.
    """
    from metaseq_lm.sweeps.states import ACTIVE

    paths = list(paths)
    planned = find_plan(paths)
    states = {item.state.state for item in planned if item.state}
    if not states.isdisjoint(ACTIVE):
        return True
    if "waiting" in states and any(_has_command(file.parent) for file in sweep_files(paths)):
        return True
    of_sweeps = set[Path]().union(*(item.stages.values() for item in planned))
    for path in filter(Path.is_dir, paths):
        if any(map(_is_running, set(run_folders(path, {})) - of_sweeps)):
            return True
    return False


def _has_command(sweep: Path) -> bool:
    from metaseq_lm.sweeps.folder import SweepFolder
    from metaseq_lm.sweeps.lock_file import process_start

    host = socket.gethostname()
    commands = SweepFolder(sweep).commands()
    return any(x["host"] != host or process_start(x["pid"]) == x["start"] for x in commands)


def _is_running(folder: Path) -> bool:
    """Return whether a run of no sweep seems to be running: no results yet, but a recent log."""
    log = folder / "log.jsonl"
    if (folder / "results.json").exists() or not log.exists():
        return False
    return time.time() - log.stat().st_mtime < _STALE
