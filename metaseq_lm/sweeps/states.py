"""The state of every run of a sweep, from its folder, its job's outcome and the scheduler."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.files import is_altered
from metaseq_lm.core.output import count_text, seconds_text
from metaseq_lm.runs.folder import read_config
from metaseq_lm.sweeps.expansion import PlannedRun, StageRun
from metaseq_lm.sweeps.folder import Submission, SweepFolder
from metaseq_lm.sweeps.job import (
    START,
    describe_exit,
    outcome_of,
    part_name,
    read_json_if_valid,
)

_OK_STATES = ("finished", "running", "pending", "waiting")
ACTIVE = ("pending", "running", "unknown")
# States worth another try; a diverged run would diverge again.
RETRYABLE = ("failed", "timeout", "cancelled", "lost", "interrupted")
_ORDER = (*_OK_STATES, *RETRYABLE, "diverged", "unknown")
PENDING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_SLURM_TERMINATED = {"CANCELLED": "cancelled", "TIMEOUT": "timeout", "DEADLINE": "timeout"}
_SLURM_TERMINATED |= {"PREEMPTED": "interrupted", "REVOKED": "cancelled"}
_ENDED = ("COMPLETED", "FAILED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", *_SLURM_TERMINATED)
_FINAL_OUTCOMES = ("failed", "diverged")  # outcomes of a job that is not requeued
WORKER = "search-"  # prefix of the names of a search's jobs, in jobs.jsonl
_LARGEST = 1e18  # largest number of updates and seconds


@dataclass(frozen=True)
class State:
    """One line of `sweep status`."""

    run: str
    stage: str
    state: str
    update: int = 0
    max_update: int = 0
    seconds: float = 0.0
    requeued: int = 0
    job: str = ""
    reason: str = ""

    @property
    def remaining(self) -> float | None:
        """Seconds to a running stage's last update at its speed so far; None if unknown."""
        if self.state != "running" or not 0 < self.update <= self.max_update:
            return None
        return self.seconds / self.update * (self.max_update - self.update)

    @property
    def text(self) -> str:
        """The state in words, for `report`: "failed after 3 of 10 updates: exit code 1"."""
        if self.state == "waiting":
            return "never started"
        updates = f" after {self.update} of {self.max_update or '?'} updates" * bool(self.update)
        return f"{self.state}{updates}{f': {self.reason}' if self.reason else ''}"


class Slurm:
    """Slurm's view of jobs: from the controller, and from the accounting for ended jobs."""

    def __init__(self, jobs: list[str]) -> None:
        self.states: dict[str, str] = {}
        self.codes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}  # why a job waits, or how its last start ended
        self.lives: Counter[str] = Counter()
        self.problem = self.note = ""
        if not jobs:
            return
        ids = ",".join(sorted({job.partition("_")[0] for job in jobs}))
        accounting = ["sacct", "-D", "-X", "-n", "-P", "-o", "JobID,State,ExitCode", "-j", ids]
        rows, self.note = ask(accounting, 3)
        history: dict[str, list[str]] = {}
        for job, state, code in rows:
            history.setdefault(job, []).append(state.split()[0])
            self.codes[job] = code
        controller = ["squeue", "-h", "-r", "-t", "all", "-o", "%i|%T|%r", "-j", ids]
        rows, self.problem = ask(controller, 3)
        present = {job: state for job, state, _ in rows}
        for job, starts in history.items():
            # The accounting lags by seconds, so it may lack the last start.
            if present.get(job) in (*PENDING, "RUNNING") and starts[-1] in (*_ENDED, "REQUEUED"):
                starts.append("PENDING")
            self.lives[job] = len(starts)
            if len(starts) > 1 and starts[-2] != "REQUEUED":
                self.reasons[job] = f"requeued after {starts[-2]}"
        # For the same reason only the controller decides that a job is not over.
        self.states = {job: starts[-1] for job, starts in history.items() if starts[-1] in _ENDED}
        self.states |= present
        for job, state, reason in rows:
            if state in PENDING and reason != "None":
                self.reasons[job] = ", ".join(filter(None, (reason, self.reasons.get(job))))

    def reason(self, job: str) -> str:
        """Return why a job waits and how its last start ended, "" if unknown."""
        return f"Slurm: {self.reasons[job]}" if job in self.reasons else ""


def ask(command: list[str], columns: int) -> tuple[list[list[str]], str]:
    """Return the rows that a Slurm command prints on single jobs, and its error or ""."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"{command[0]}: {error}"
    problem = ""
    if done.returncode and "Invalid job id" not in done.stderr:  # long forgotten: no problem
        problem = f"{command[0]}: {done.stderr.strip() or done.returncode}"
    rows = [line.split("|") for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == columns and "[" not in row[0]], problem


def read_states(folder: SweepFolder, runs: list[PlannedRun] | None = None) -> list[State]:
    """Return the state of every run, in the order of the sweep."""
    runs = folder.runs() if runs is None else runs
    folder.check_inside(runs)
    last = folder.submissions()
    todo = [last[run.name] for run in runs if run.name in last and unfinished_stages(folder, run)]
    slurm = Slurm([entry.job for entry in todo if entry.executor == "slurm"])
    return [_state_of(folder, run, last.get(run.name), slurm) for run in runs]


def active_workers(folder: SweepFolder) -> dict[str, str]:
    """Return the jobs of a search that are pending, running or unknown, with their state."""
    last = folder.submissions()
    names = {run.name for run in folder.runs()}
    workers = {name: entry for name, entry in last.items() if name not in names}
    slurm = Slurm([entry.job for entry in workers.values() if entry.executor == "slurm"])
    known = {}
    for name, entry in workers.items():
        if name.startswith(WORKER) and (state := _activity_of(entry, slurm)):
            known[name] = state
    return known


def unfinished_stages(folder: SweepFolder, run: PlannedRun) -> list[StageRun]:
    """Return the stages of a run that still have to be trained, in order.

    Finished stages do not count, nor does a stage that only finished stages start from, because its
    folder may have been deleted.
    """
    open_stages: list[StageRun] = []
    for at, stage in reversed(list(enumerate(run.stages))):
        results = read_json_if_valid(folder.path / stage.folder / "results.json")
        if results.get("status") == "finished":
            continue
        users = [later for later in run.stages[at + 1 :] if later.starts_from(stage)]
        if not users or any(user in open_stages for user in users):
            open_stages.insert(0, stage)
    return open_stages


def check_data(folder: SweepFolder, runs: list[PlannedRun]) -> None:
    """Raise MetaseqError if a finished stage was trained on other data than its folder has now.

    Missing data, or results that do not record their data, count as the same.
    """
    from metaseq_lm.data.storage.manifest import fingerprint_of_run

    present: dict[str, str | None] = {}
    stages = {}
    for run in runs:
        for stage in run.stages:
            stages[folder.path / stage.folder] = stage
    for run_folder, stage in stages.items():
        results = read_json_if_valid(run_folder / "results.json")
        trained_on = results.get("data")
        if results.get("status") != "finished" or not trained_on:
            continue
        config: Any = read_config(run_folder / "config.yaml")
        data, options = stage.arguments[0], config.get("task")
        key = json.dumps([data, options], default=str)
        if key not in present:
            try:
                present[key] = fingerprint_of_run(data, options)
            except (MetaseqError, OSError):
                present[key] = None
        if present[key] not in (None, trained_on):
            raise MetaseqError(
                f"{run_folder} is finished, but was trained on other data than {data} holds now "
                f"({trained_on} then, {present[key]} now); choose another --out, or delete the run "
                "to train it again"
            )


def same_data(old: str, new: str) -> bool:
    """Return whether two folders hold the same data and sets, if the first still exists."""
    from metaseq_lm.data.storage.manifest import MANIFEST_FILE, fingerprint_of_run

    if not Path(old).exists():
        return True
    names = [path.parent.name for path in Path(old).glob(f"*/{MANIFEST_FILE}")]
    try:
        return fingerprint_of_run(old, names) == fingerprint_of_run(new, names)
    except MetaseqError:
        return False


def _state_of(folder: SweepFolder, run: PlannedRun, last: Submission | None, slurm: Slurm) -> State:
    stages = unfinished_stages(folder, run)
    stage = stages[0] if stages else run.stages[-1]
    run_folder = folder.path / stage.folder
    update, max_update, seconds = read_progress(run_folder)
    common: dict[str, Any] = {
        "run": run.name,
        "stage": stage.name or "train",
        "update": update,
        "max_update": max_update,
        "seconds": seconds,
        "job": last.job if last else "",
        "requeued": _count_requeues(folder, last, slurm),
    }
    if not stages:
        altered = is_altered(read_json_if_valid(run_folder / "results.json"))
        reason = "results.json was changed after it was written" * altered
        return State(state="finished", reason=reason, **common)
    if last is None:
        return State(state="waiting", **common)
    activity = _activity_of(last, slurm)
    if activity == "unknown" or last.parts > 1:
        outcome = _outcome_of_run(folder, last).get("state")
        if outcome in _FINAL_OUTCOMES:
            activity = ""  # its job itself reports that it is over
        elif activity == "running" and last.part and not outcome:
            activity = "pending"
    if activity:
        reason = slurm.problem if activity == "unknown" else slurm.reason(last.job)
        if activity == "unknown" and last.executor == "local":
            reason = f"it was started on {last.host}; ask there"
        return State(state=activity, reason=reason, **common)
    added = not run_folder.exists() and any((folder.path / s.folder).exists() for s in run.stages)
    state, reason = _describe_end(folder, last, slurm, added)
    results = run_folder / "results.json"
    if not read_json_if_valid(results) and run_folder.exists():
        fault = "results.json is not readable" if results.exists() else "no results.json"
        reason = f"{fault}; {reason}" if reason else fault
    return State(state=state, reason=reason, **common)


def read_progress(run_folder: Path) -> tuple[int, int, float]:
    """Return the done and total updates and the seconds of a run, from its log and config."""
    update, seconds = 0, 0.0
    log = run_folder / "log.jsonl"
    if log.is_file():
        with open(log, "rb") as file:
            # The last lines are enough, and status reads the logs of all runs.
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            lines = file.read().splitlines()
        for line in reversed(lines):
            try:
                row = json.loads(line)
                update, seconds = int(row["update"]), float(row["seconds"])
                break
            except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
                # A line that is torn, or cut by the seek.
                continue
    source = run_folder / "results.json"
    results = read_json_if_valid(source)
    max_update = _read_number(results, "max_update", 0, source)
    max_update = max_update or _configured(run_folder / "config.yaml")
    done = _read_number(results, "updates", update, source)
    return int(done), int(max_update), float(_read_number(results, "seconds", seconds, source))


def _configured(config: Path) -> float:
    if not config.exists():
        return 0
    content: Any = read_config(config)  # references in it are not followed
    options = content.get("trainer")
    return _read_number(options if isinstance(options, dict) else {}, "max_update", 0, config)


def _read_number(content: dict[str, Any], key: str, default: float, file: Path) -> float:
    """Return a number from a run's file, or `default`; MetaseqError for another value."""
    value = default if content.get(key) is None else content[key]
    if not isinstance(value, (int, float)) or not abs(value) < _LARGEST:
        raise MetaseqError(
            f"{file}: {key} is {str(value)[:40]!r}, not a number. Delete the file: the run, "
            "started again, writes it anew"
        )
    return value


def _count_requeues(folder: SweepFolder, last: Submission | None, slurm: Slurm) -> int:
    """Return how often the last job of a run was requeued."""
    if last is None:
        return 0
    lives = slurm.lives[last.job]
    log = _log_file(folder, last, "out")
    if lives == 0 and log.is_file():
        with open(log, errors="replace") as lines:
            lives = sum(line.rstrip() == f"{START} {last.run}" for line in lines)
    return max(0, lives - 1)


def _activity_of(last: Submission, slurm: Slurm) -> str:
    """Return pending, running, unknown, or "" for an ended job."""
    if last.executor == "local":
        if last.host != socket.gethostname():
            return "unknown"
        return "running" if last.is_alive() else ""
    state = slurm.states.get(last.job)
    if state is None:
        return "unknown" if slurm.problem else ""
    if state in PENDING:
        return "pending"
    return "" if state in _ENDED else "running"


def _describe_end(
    folder: SweepFolder, last: Submission, slurm: Slurm, added: bool
) -> tuple[str, str]:
    """Return the state of an unfinished run after the end of its job, and the reason.

    `added` is set if a stage has not begun, for example one added to the sweep after the job.
    """
    if last.cancelled:
        return "cancelled", ""
    outcome = _outcome_of_run(folder, last)
    outcome_state = str(outcome.get("state", ""))
    slurm_state = slurm.states.get(last.job, "")
    where = _log_file(folder, last, "err")
    if slurm_state in _SLURM_TERMINATED and outcome_state not in _FINAL_OUTCOMES:
        return _SLURM_TERMINATED[slurm_state], f"Slurm: {slurm_state}, {where}"
    if outcome_state in ("failed", "diverged", "timeout", "interrupted"):
        code = outcome.get("exit_code") if outcome_state in _FINAL_OUTCOMES else None
        code_text = f"{describe_exit(code)}: " if isinstance(code, int) else ""
        message = str(outcome.get("message", "")).removeprefix("metaseq-lm: ")
        shortened = textwrap.shorten(message, 120, placeholder=" ...")
        return outcome_state, f"{code_text}{shortened} [{where}]"
    if outcome_state == "finished" and added:
        return "waiting", ""
    if outcome_state == "finished":
        return "lost", "the job ended well, but its results are not there"
    if slurm_state:
        code = slurm.codes.get(last.job, "?")
        return "failed", f"Slurm: {slurm_state}, exit code {code} [{where}]"
    return "lost", f"job {last.job} is gone without a trace {slurm.note} [{where}]"


def _outcome_of_run(folder: SweepFolder, last: Submission) -> dict[str, Any]:
    return outcome_of(folder.path / last.folder, part_name(last.job, last.part))


def _log_file(folder: SweepFolder, last: Submission, kind: str) -> Path:
    return folder.path / last.folder / f"{last.job}_0_log.{kind}"


def format_summary(states: list[State]) -> str:
    """Return the counts of all states as one line."""
    counts = Counter(state.state for state in states)
    parts = [f"{counts[name]} {name}" for name in _ORDER if counts[name]]
    return f"{count_text(len(states), 'run')}{': ' * bool(parts)}{', '.join(parts)}"


def states_document(states: list[State]) -> dict[str, Any]:
    """Return the states for JSON: runs with the attributes of `State`, and counts by state."""
    runs = [{**asdict(state), "remaining": state.remaining} for state in states]
    return {"runs": runs, "counts": dict(Counter(state.state for state in states))}


def lines(states: list[State]) -> list[str]:
    """Return one line per run, in columns."""
    rows = []
    for s in states:
        updates = f"{s.update}/{s.max_update}" if s.max_update else str(s.update or "")
        row = [s.run, s.stage, s.state, updates, f"{s.seconds:.0f} s"]
        row.append("" if s.remaining is None else f"{seconds_text(s.remaining)} left")
        row += [f"requeued {s.requeued}" * bool(s.requeued), f"job {s.job}" * bool(s.job)]
        rows.append([*row, s.reason])
    columns = []
    for column in zip(*rows):
        width = max(map(len, column))
        columns.append([text.ljust(width) for text in column])
    # Empty columns are left out, but for the last one, the reason.
    columns = [column for column in columns[:-1] if column[0]] + columns[-1:]
    return ["  ".join(row).rstrip() for row in zip(*columns)]
