"""A job of a sweep: the code snapshot that it runs from, and the callable given to submitit.

submitit calls a `Job`, which runs `metaseq-lm train` from the snapshot as a child process, one
stage after the other. It forwards every signal to the child, waits until the child has saved, and
only then asks submitit to requeue. The outcome of a job is written to a small file next to
submitit's logs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Protocol

from submitit import JobEnvironment
from submitit.core.utils import UncompletedJobError
from submitit.helpers import DelayedSubmission

from metaseq_lm.core.errors import NO_HINTS, DivergedError, Interrupted, MetaseqError, UsageError
from metaseq_lm.core.files import (
    check_folder,
    read_bounded,
    read_json,
    temporary_name,
    write_atomic,
)
from metaseq_lm.core.output import show
from metaseq_lm.distributed import signals
from metaseq_lm.distributed.signals import SIGNALS
from metaseq_lm.distributed.step import node_name
from metaseq_lm.sweeps.server import Forked

START = "metaseq-lm: starts"
_MAX_SOURCE_BYTES = 64 << 20  # bytes of one file of a snapshot
_FIRST_TASK_TIMEOUT = 60.0  # seconds that a failed task waits for the first task to end
_MAX_FOLDERS = 10_000  # folders in a plug-in or a folder of configs

# ---------------------------------------------------------------- the snapshot


@dataclass(frozen=True)
class Code:
    """A copy of the package, the plug-in and the configs, in a folder named after its hash."""

    folder: Path
    user_dir: str | None
    config_dir: str | None

    def arguments(self) -> list[str]:
        """Return the options of `train` with the paths of the copies."""
        words = []
        for option, path in (("--config-dir", self.config_dir), ("--user-dir", self.user_dir)):
            if path:
                words += [option, path]
        return words


class Snapshot:
    """The current files that the runs of a sweep depend on."""

    def __init__(self, out: Path, user_dir: str | None, config_dir: str | None) -> None:
        self.out, self.user_dir, self.config_dir = out, user_dir, config_dir
        package = Path(__file__).parents[1]
        self.files = sources(package, "metaseq_lm", (".py", ".yaml"), out)
        self.files |= _plugin_files(user_dir, out)
        if config_dir:
            self.files |= sources(Path(config_dir), "config", (".yaml", ".yml"), out)
        self.hash = _content_hash(self.files)

    def take(self) -> Code:
        """Copy the files to OUT/code/<hash>, unless that exists, and return the copy."""
        folder = self.out / "code" / self.hash
        check_folder(folder)
        if not folder.is_dir():
            temporary = temporary_name(folder)
            for name, path in self.files.items():
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, temporary / name)
            temporary.rename(folder)
        return code_at(folder, self.user_dir, self.config_dir)


def _plugin_files(user_dir: str | None, out: Path) -> dict[str, Path]:
    """Return the files of a plug-in by name; none for an installed module, which is not copied."""
    plugin = Path(user_dir or "")
    if user_dir and plugin.is_file():
        return {f"plugin/{plugin.name}": plugin}
    if not user_dir or not plugin.is_dir():
        return {}
    return sources(plugin, f"plugin/{plugin.name}", (".py", ".yaml", ".yml", ".json"), out)


def is_same_plugin(snapshot: Path, user_dir: str) -> bool:
    """Return whether a plug-in has the same content as its copy in a snapshot."""
    copied = {name: p for name, p in _copied_files(snapshot).items() if name.startswith("plugin/")}
    present = _plugin_files(user_dir, snapshot.parents[1])
    return bool(copied) and _content_hash(copied) == _content_hash(present)


def code_at(folder: Path, user_dir: str | None, config_dir: str | None) -> Code:
    """Return the copy in `folder`; raises MetaseqError if it is gone or was changed."""
    check_folder(folder)
    if not (folder / "metaseq_lm").is_dir():
        raise MetaseqError(f"{folder}: the snapshot of the code is gone; use --new-code")
    try:
        intact = _content_hash(_copied_files(folder)) == folder.name
    except ValueError:
        intact = False
    if not intact:
        raise MetaseqError(
            f"{folder}: the snapshot of the code was changed after it was made (its name is the "
            "hash of its content), so it is not run; delete it and use --new-code"
        )
    plugin = folder / "plugin" / Path(user_dir).name if user_dir else None
    copied = str(plugin) if plugin is not None and plugin.exists() else user_dir
    return Code(folder, copied, str(folder / "config") if config_dir else None)


def _content_hash(files: dict[str, Path]) -> str:
    """Return a hash of the names and contents of files; ValueError if one is not source code."""
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = read_bounded(path, _MAX_SOURCE_BYTES)
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def _copied_files(folder: Path) -> dict[str, Path]:
    """Return all files of a snapshot by name; ValueError for links and compiled files."""
    files: dict[str, Path] = {}
    for root, folders, names in os.walk(folder):
        root_folder = Path(root)
        if any((root_folder / name).is_symlink() for name in (*folders, *names)):
            raise ValueError("a link")
        # Python would run compiled files in place of the sources, whose hash is checked.
        if "__pycache__" in folders:
            folders.remove("__pycache__")
            shutil.rmtree(root_folder / "__pycache__", ignore_errors=True)
            if (root_folder / "__pycache__").exists() and not os.access(
                root_folder / "__pycache__", os.W_OK
            ):
                raise ValueError("compiled files")
        folders[:] = [name for name in folders if name[0] != "."]  # cannot be imported
        paths = [root_folder / name for name in names if name[0] != "."]
        files |= {str(path.relative_to(folder)): path for path in paths}
    return files


def sources(root: Path, name: str, kinds: tuple[str, ...], out: Path) -> dict[str, Path]:
    """Return the files in `root` with suffixes `kinds`, outside `out`, by name/relative path."""
    if not root.is_dir():
        raise UsageError(f"{root}: there is no such folder")
    files = {}
    for count, (root_folder, folders, names) in enumerate(os.walk(root)):
        if count == _MAX_FOLDERS:
            raise UsageError(
                f"{root}: more than {count:,} folders below it; name one with code only"
            )
        folder = Path(root_folder)
        folders[:] = sorted(d for d in folders if d[0] != "." and (folder / d).resolve() != out)
        for file in sorted(names):
            if file[0] != "." and file.endswith(kinds) and (folder / file).is_file():
                files[f"{name}/{(folder / file).relative_to(root)}"] = folder / file
    return files


# ---------------------------------------------------------------- the job


Stages = list[tuple[str, str, list[str]]]  # name, run folder and arguments of `train` of each stage


@dataclass
class Job:
    """A job of runs, by name with their stages, one after the other; pickled by submitit.

    `threads` is OMP_NUM_THREADS of each process. `lock` is a file locked by the waiting `sweep`
    command of the local executor; the job stops when that lock is released.
    """

    runs: dict[str, Stages]
    code: str
    threads: int = 1
    lock: str | None = None

    def __call__(self) -> None:
        """Run all runs; raises MetaseqError if one failed, and requeues if one is preempted."""
        runner = JobRunner(self)
        runner.start()
        if len(self.runs) > 1:
            JobRunner.import_all()
        failure = None
        for part, (name, stages) in enumerate(self.runs.items()):
            runner.begin(name, part)
            try:
                _train_stages(runner, stages)
            except MetaseqError as error:
                if runner.signals:
                    raise
                failure = error
        if failure:
            raise failure

    def checkpoint(self) -> DelayedSubmission:
        """Return this job to requeue, because `train` resumes from its last checkpoint."""
        return DelayedSubmission(self)


def _train_stages(runner: JobRunner, stages: Stages) -> None:
    for stage, folder, arguments in stages:
        code, results = runner.train(Path(folder), arguments)
        if is_interruption(code):
            if runner.task:
                return
            runner.interrupted(stage, code, results.get("signal"))
        if code:
            state = "diverged" if code == DivergedError.exit_code else "failed"
            runner.fail(state, stage, code, str(results["message"]))
    if not runner.task:
        runner.record("finished", "", 0, "")


class _Launched(Protocol):
    """The attributes of a job that a `JobRunner` needs; see `Job`."""

    code: str
    threads: int
    lock: str | None


def _unset() -> None:
    raise AssertionError("set by metaseq_lm.cli.jobs, as this room cannot import the command line")


class JobRunner:
    """Runs `train` for a job in the process that submitit starts on each node.

    All tasks train; only the first links the code and requeues the job.

    Signal handlers interrupt the main thread anywhere, so they only record the signal and forward
    it; the caller of `train` does everything else.
    """

    program: ClassVar[Callable[[], None]] = staticmethod(_unset)
    import_all: ClassVar[Callable[[], None]] = staticmethod(_unset)

    def __init__(self, job: _Launched) -> None:
        self.job = job
        self.environment = JobEnvironment()
        self.on_slurm = self.environment.name() == "slurm"
        self.task = self.environment.global_rank
        self.signals: list[int] = []
        self.child = 0
        self.part = 0  # the number of the run in the job
        self.lock = 0  # descriptor of the job's lock file
        self.requeue: Any = None  # submitit's handler, which requeues the job

    def start(self) -> None:
        """Handle signals."""
        signals.name_process("metaseq-job")
        self.requeue = signal.getsignal(getattr(signal, f"SIG{JobEnvironment.USR_SIG}"))
        for number in signals.handled_signals():
            signal.signal(number, self.on_signal)
        if self.job.lock is not None:  # Slurm itself cleans up after a dead step
            signals.follow_parent()
            self.lock = os.open(self.job.lock, os.O_RDONLY)

    def begin(self, name: str, part: int = 0) -> None:
        """Begin a run of the job, and forget the outcome of an earlier attempt."""
        self.part = part
        self.outcome_file(self.task).unlink(missing_ok=True)
        if part:
            self.record("running", "", 0, "")
        show(f"{START} {name}")

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Record a signal and forward it to the child, once."""
        is_first = number not in self.signals
        self.signals.append(number)
        if self.lock:
            # If the sweep command died, a new one must not start before this run has saved.
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self.lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if self.child and is_first:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child, number)

    def train(self, folder: Path, arguments: list[str]) -> tuple[int, dict[str, Any]]:
        """Train in a child process; return its exit code (-signal) and its results.

        After a signal the child is not started and counts as interrupted.
        """
        if self.signals:
            return Interrupted.exit_code, {}
        if not self.task:
            _link_code(folder, Path(self.job.code))
        log = self.environment.paths.stderr
        before = log.stat().st_size if log.exists() else 0
        started = time.time()
        child = Forked(self._begin_training, arguments)
        self.child = child.pid
        for number in dict.fromkeys(self.signals):  # received while the child was starting
            os.kill(child.pid, number)
        # Not child.wait(): the child's pid cannot be reused until it is reaped below.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        self.child = 0
        code = child.wait()
        results = read_json_if_valid(folder / "results.json", since=started)
        if code not in (0, Interrupted.exit_code) and not results.get("message"):
            results["message"] = _last_lines(log, before) or f"on {node_name()}"
        return code, results

    def _begin_training(self, arguments: list[str]) -> None:
        os.environ |= {
            signals.PARENT_DIES: str(os.getppid()),
            "OMP_NUM_THREADS": str(self.job.threads),
            NO_HINTS: "1",
        }
        paths = (self.job.code, os.environ.get("PYTHONPATH"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        signals.name_process("metaseq-run")
        sys.argv[1:] = ["train", *arguments]
        type(self).program()

    def interrupted(self, stage: str, code: int, reported: int | None) -> None:
        """Requeue the job after a preemption or time-out; otherwise raise MetaseqError.

        `reported` is the signal named in results.json.
        """
        number = -code if code < 0 else reported
        received = {number} if number else set()
        deadline = time.monotonic() + signals.SECOND_SIGNAL
        while self.on_slurm and time.monotonic() < deadline:
            if (received | set(self.signals)) != {signal.SIGTERM}:
                break
            time.sleep(0.1)
        received |= set(self.signals)
        names = " and ".join(_signal_name(n) for n in sorted(received)) or "a signal"
        message = f"interrupted by {names}"
        self.record("interrupted", stage, code, message)
        stop_signals = {signal.SIGTERM, signal.SIGINT}
        not_cancelled = bool(received - {signal.SIGTERM}) or not received
        if callable(self.requeue) and (
            not_cancelled if self.on_slurm else received and not received & stop_signals
        ):
            try:
                self.requeue(signal.SIGUSR2, None)  # does not return: the process ends
            except UncompletedJobError as error:
                self.record("timeout", stage, code, str(error))
                raise
        raise MetaseqError(f"stage {stage or 'train'}: {message}, and not requeued")

    def fail(self, state: str, stage: str, code: int, message: str) -> None:
        """Record how the job ended, and raise MetaseqError."""
        self.record(state, stage, code, message)
        self.wait_for_first_task()
        raise MetaseqError(f"stage {stage or 'train'}: {describe_exit(code)}\n{message}")

    def record(self, state: str, stage: str, code: int, message: str) -> None:
        """Write the outcome of this attempt to the file that `sweep status` reads."""
        outcome = {"state": state, "stage": stage, "exit_code": code, "message": message}
        write_atomic(self.outcome_file(self.task), json.dumps(outcome).encode())

    def outcome_file(self, task: int) -> Path:
        """Return the outcome file of one task of this job."""
        name = part_name(self.environment.job_id, self.part)
        return _outcome_file(self.environment.paths.folder, name, task)

    def wait_for_first_task(self) -> None:
        """Wait for the first task to end, as Slurm kills all tasks when one exits with an error."""
        deadline = time.monotonic() + _FIRST_TASK_TIMEOUT
        while self.task and not self.outcome_file(0).exists() and time.monotonic() < deadline:
            time.sleep(0.2)


def part_name(job_id: str, part: int) -> str:
    """Return the name of a run's files in a job; the first run has the job's name."""
    return f"{job_id}.{part}" if part else job_id


def _outcome_file(folder: Path, name: str, task: int = 0) -> Path:
    """Return the outcome file of a run in a job; each task (node) has its own."""
    return folder / f"{name}_{f'{task}_' if task else ''}outcome.json"


def outcome_of(folder: Path, name: str) -> dict[str, Any]:
    """Return the outcome of a run: the first task's if final, else that of another failed task."""
    first = read_json_if_valid(_outcome_file(folder, name))
    others = map(read_json_if_valid, sorted(folder.glob(f"{name}_*_outcome.json")))
    if first.get("state") in ("failed", "diverged", "finished"):
        return first
    return next((other for other in others if other), first)


def read_json_if_valid(file: Path, since: float = 0.0) -> dict[str, Any]:
    """Return a JSON object, or {} if the file is missing, older than `since` or damaged."""
    try:
        return {} if file.stat().st_mtime < since - 1 else read_json(file)
    except (OSError, ValueError):
        return {}


def _last_lines(log: Path, start: int) -> str:
    """Return the last lines of a log after byte `start`; retry, because srun writes late."""
    text = ""
    for _ in range(10):
        if log.exists():
            text = log.read_bytes()[start:].decode(errors="replace").strip()
        if text:
            break
        time.sleep(0.2)
    lines = text.splitlines()
    # Our own messages are enough; other output ends with the error.
    return "\n".join([x for x in lines if x.startswith("metaseq-lm: ")] or lines[-5:])


def _link_code(folder: Path, code: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "code"
    target = os.path.relpath(code, folder)
    if not (link.is_symlink() and os.readlink(link) == target):
        link.unlink(missing_ok=True)
        link.symlink_to(target)


def _signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL for 9."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def is_interruption(code: int) -> bool:
    """Return whether an exit code means that a signal stopped the run."""
    return code == Interrupted.exit_code or -code in SIGNALS


def describe_exit(code: int) -> str:
    """Return an exit code in words."""
    return f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
