"""The folder of a sweep: definition, records of jobs, and a lock for changes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import MetaseqError, UsageError, say
from metaseq_lm.core.files import (
    COUNT,
    FOLDER,
    LARGEST_SWEEP,
    NAME,
    TIME,
    check_folder,
    check_regular,
    is_altered,
    read_bounded,
    remove_leftovers,
    schema_error,
    with_checksum,
    write_atomic,
)
from metaseq_lm.core.journal import Journal
from metaseq_lm.core.output import present_time
from metaseq_lm.sweeps.definition import KEY, Definition, list_differences
from metaseq_lm.sweeps.expansion import PlannedRun
from metaseq_lm.sweeps.lock_file import locked, process_start

_VERSION = 1
_NAMED_FOLDER = {"name": str, "folder": FOLDER}
# The required content of sweep.json and of the lines of jobs.jsonl; see `schema_error`.
_SWEEP_SCHEMA = {
    "version": int,
    "out": str,
    "definition": {
        "data": str,
        "config_dir": (str, type(None)),
        "user_dir": (str, type(None)),
        "stages": [{"name": str, "config_name": (str, type(None)), "overrides": [str, ...]}],
        "grid": {"*": list},
        "list": [dict, ...],
        "seeds": [COUNT],
        "overrides": [str, ...],
    },
    "launch": dict,
    "runs": [
        {
            **_NAMED_FOLDER,
            "values": dict,
            "seed": COUNT,
            "stages": [{**_NAMED_FOLDER, "arguments": [str]}],
        }
    ],
}
_SEARCH_SCHEMA = {"rules": dict, "definition": dict}
# These values end up in Slurm command lines and in paths.
_JOB_ID = re.compile(r"[0-9]{1,18}(_[0-9]{1,9})?")
_JOBS_FOLDER = re.compile(r"jobs/[0-9]{4,9}")
HASH = re.compile(r"[0-9a-f]{16}")
_JOBS_SCHEMA = {
    "submit": {
        "run": NAME,
        "executor": re.compile("local|slurm"),
        "job": _JOB_ID,
        "folder": _JOBS_FOLDER,
        "code": HASH,
        "time?": TIME,
        "host?": str,
        "start?": COUNT,
        "part?": COUNT,
        "parts?": COUNT,
    },
    "cancel": {"run": NAME, "job": _JOB_ID, "folder": _JOBS_FOLDER, "time?": TIME},
    "command": {"pid": COUNT, "host": str, "start": COUNT, "time?": TIME},
}


@dataclass(frozen=True)
class Submission:
    """The last job of a run, from jobs.jsonl.

    `start` is the start time of a local process; the run is number `part` of `parts` in the job.
    """

    run: str
    executor: str
    job: str
    folder: str
    code: str
    host: str = ""
    start: int = 0
    part: int = 0
    parts: int = 1
    cancelled: bool = False

    def is_alive(self) -> bool:
        """Return whether the process of a local submission still runs on this machine."""
        on_this_host = self.host == socket.gethostname()
        return on_this_host and bool(self.start) and process_start(int(self.job)) == self.start

    def send(self, number: int) -> None:
        """Send a signal to a local job that is still running."""
        if self.is_alive():
            os.kill(int(self.job), number)


class SweepFolder:
    """OUT: sweep.json, jobs.jsonl, jobs/ (submitit's), code/ (snapshots) and the run folders."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.lock_file = self.path / ".lock"
        self._warnings: set[str] = set()
        self._jobs = Journal(self.path / "jobs.jsonl", _job_problem)

    def read(self) -> dict[str, Any]:
        """Return sweep.json; UsageError if there is none, MetaseqError if it is damaged."""
        file = self.path / "sweep.json"
        try:
            content = json.loads(read_bounded(file, LARGEST_SWEEP))
            problem = schema_error(content, _schema_of(content)) or _unsafe_arguments(content)
        except FileNotFoundError:
            raise UsageError(f"{self.path}: no sweep here (there is no sweep.json)") from None
        except (ValueError, RecursionError) as error:
            content, problem = None, f"not readable as JSON: {error}"
        if isinstance(content, dict) and content.get("version", _VERSION) != _VERSION:
            raise MetaseqError(f"{file}: written by another version of metaseq-lm; use that one")
        if problem:
            raise MetaseqError(
                f"{file}: damaged ({problem}). Delete it and give the 'sweep' command that wrote "
                "it again: it continues the existing runs"
            )
        if is_altered(content):
            self._warn(f"{file}: warning: changed after a sweep wrote it")
        return dict(content)

    def _warn(self, message: str) -> None:
        if message not in self._warnings:
            self._warnings.add(message)
            say(message)

    def runs(self) -> list[PlannedRun]:
        """Return the runs of the sweep."""
        return [PlannedRun.from_json(row) for row in self.read()["runs"]]

    def require_same(
        self, definition: Definition, runs: list[PlannedRun], relocated: dict[str, Any]
    ) -> None:
        """Raise UsageError if the folder holds a different sweep.

        Seeds, values and stages may be added if the existing runs stay the same. `relocated` maps
        fields of the definition whose paths changed to the stored paths.
        """
        if not (self.path / "sweep.json").exists():
            return
        old = self.read()
        definition = replace(definition, **relocated)
        differing = list_differences(old["definition"], definition.as_json())
        if differing and not _extends(old, definition, runs):
            raise UsageError(
                f"{self.path} holds another sweep ({'; '.join(differing[:5])}); choose another "
                "--out, or continue it with the same definition or one that has all its runs "
                "(data, configs and plug-ins that were moved must be the same)"
            )

    def definition(self) -> Definition:
        """Return the definition of the sweep."""
        return Definition.from_json(self.read()["definition"])

    def stored_search(self) -> dict[str, Any]:
        """Return the rules and the definition of this folder's search, {} without a search."""
        exists = (self.path / "sweep.json").exists()
        return dict(self.read().get("search") or {}) if exists else {}

    def adopt(
        self,
        definition: Definition,
        runs: list[PlannedRun],
        launch: dict[str, Any],
        search: dict[str, Any] | None = None,
    ) -> None:
        """Write sweep.json, so that the folder belongs to this sweep.

        `search` has the rules and the definition of its search, by default the stored ones.
        """
        search = self.stored_search() if search is None else search
        content = {
            "version": _VERSION,
            "out": str(self.path),
            "definition": definition.as_json(),
            **({"search": search} if search else {}),
            "launch": launch,
            "runs": [asdict(run) for run in runs],
        }
        text = json.dumps(with_checksum(content), indent=1) + "\n"
        write_atomic(self.path / "sweep.json", text.encode())

    def check_inside(self, runs: list[PlannedRun]) -> None:
        """Raise UsageError if a run folder is a link that leads out of OUT."""
        for run in runs:
            for stage in run.stages:
                path = (self.path / stage.folder).resolve()
                if not path.is_relative_to(self.path):
                    raise UsageError(f"{self.path / stage.folder}: leads out of the sweep: {path}")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock for submitting runs; MetaseqError if another command holds it."""
        search = self.path / "search"
        for path in (self.path / "jobs", self.path / "code", search, *search.glob("*")):
            check_folder(path, self.path)
        for trial in search.glob("*/*"):
            check_folder(trial, self.path)
        busy = (
            f"{self.path}: another 'sweep' command is running, or the runs of a killed one are "
            "still saving; wait, or use 'metaseq-lm sweep cancel'"
        )
        with locked(self.lock_file, busy):
            remove_leftovers(self.path / "sweep.json")
            yield

    # ---------------------------------------------------------------- jobs.jsonl

    def append(self, kind: str, **values: Any) -> None:
        """Add a line to jobs.jsonl."""
        self._jobs.append([{"kind": kind, "time": present_time(), **values}])

    def rows(self) -> list[dict[str, Any]]:
        """Return the lines of jobs.jsonl without duplicates or a last line torn by a kill.

        Raises MetaseqError for any other line that lacks a value or was changed.
        """
        file = self._jobs.path
        check_regular(file)
        if not (file.exists() and file.stat().st_size) and (self.path / "jobs").is_dir():
            self._warn(f"{file}: warning: no lines, though jobs were submitted")
        rows: list[dict[str, Any]] = []
        for number, row in self._jobs.rows():
            if "checksum" in row and row in rows:
                self._warn(f"{file}:{number}: warning: a line is repeated and left out")
            else:
                rows.append(row)
        self._jobs.warn_of_torn_line()
        return rows

    def submissions(self) -> dict[str, Submission]:
        """Return the last submission of every run that has one."""
        last: dict[str, Submission] = {}
        names = Submission.__dataclass_fields__
        for row in self.rows():
            if row.get("kind") == "submit":
                last[row["run"]] = Submission(**{k: v for k, v in row.items() if k in names})
            elif row.get("kind") == "cancel" and row["run"] in last:
                before = last[row["run"]]
                if before.job == row["job"] and before.folder == row["folder"]:
                    last[row["run"]] = replace(before, cancelled=True)
        return last

    def commands(self) -> list[dict[str, Any]]:
        """Return all waiting `sweep` commands of this sweep."""
        return [row for row in self.rows() if row.get("kind") == "command"]

    def last_code(self) -> str | None:
        """Return the hash of the snapshot used last."""
        used = [row["code"] for row in self.rows() if row.get("kind") == "submit"]
        return used[-1] if used else None

    def new_jobs_folder(self) -> Path:
        """Create a new folder for submitit, because it would find old results in a used one."""
        jobs = self.path / "jobs"
        jobs.mkdir(exist_ok=True)
        for number in itertools.count(len(list(jobs.iterdir())) + 1):
            with contextlib.suppress(FileExistsError):
                (jobs / f"{number:04d}").mkdir()
                break
        return jobs / f"{number:04d}"


def _job_problem(row: dict[str, Any], number: int) -> str:
    problem = schema_error(row, _JOBS_SCHEMA.get(str(row.get("kind")), {}))
    if problem or row.get("kind") != "submit" or row["executor"] != "local":
        return problem
    return "" if row["job"].isdecimal() else "job is no process"


def _schema_of(content: Any) -> dict[str, Any]:
    """Return the schema of a sweep.json; one with a search may have no runs yet."""
    if isinstance(content, dict) and content.get("search") and content.get("runs") == []:
        return {**_SWEEP_SCHEMA, "search": _SEARCH_SCHEMA, "runs": list}
    return {**_SWEEP_SCHEMA, "search?": _SEARCH_SCHEMA}


def _extends(old: dict[str, Any], definition: Definition, runs: list[PlannedRun]) -> bool:
    """Return whether `runs` include every stage of `old` with the same arguments after DATA."""
    for key in ("data", "config_dir", "user_dir"):
        if old["definition"].get(key) != getattr(definition, key):
            return False
    current = {}
    for run in runs:
        for stage in run.stages:
            current[stage.folder] = list(stage.arguments[1:])
    before = itertools.chain.from_iterable(run["stages"] for run in old["runs"])
    return all(current.get(stage["folder"]) == stage["arguments"][1:] for stage in before)


def _unsafe_arguments(content: dict[str, Any]) -> str:
    """Return a description of arguments that no sweep writes into sweep.json, "" without any."""
    # They are run as commands: --user-dir could run code, another --save-dir could write outside
    # the sweep.
    for stage in itertools.chain.from_iterable(run["stages"] for run in content["runs"]):
        data, *words = stage["arguments"]
        names: list[str] = []
        if words[:1] == ["--config-name"]:
            names, words = words[1:2], words[2:]
        if words[:2] == ["--save-dir", os.path.join(content["out"], stage["folder"])]:
            words = words[2:]
        keys = [word.partition("=")[0] if "=" in word else "" for word in words]
        if not data.startswith("/"):  # an absolute path may contain "="
            keys += [data.partition("=")[0]] if "=" in data else []
        if any(word.startswith("-") for word in (data, *names)) or not all(
            KEY.fullmatch(key) and key not in ("user_dir", "save_dir") for key in keys
        ):
            return f"the arguments of {stage['folder']!r} are not those of a sweep"
    return ""
