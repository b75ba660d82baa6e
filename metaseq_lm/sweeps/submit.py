"""Launching runs with submitit, as a Slurm array or on this machine, and cancelling them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.distributed import launcher
from metaseq_lm.distributed.signals import handled_signals
from metaseq_lm.sweeps import states as state_module
from metaseq_lm.sweeps.expansion import PlannedRun
from metaseq_lm.sweeps.folder import Submission, SweepFolder
from metaseq_lm.sweeps.job import Code, Job
from metaseq_lm.sweeps.lock_file import process_start
from metaseq_lm.sweeps.options import Launch, log_parameters, slurm_parameters
from metaseq_lm.sweeps.server import YEAR, ForkExecutor, Server

_SLURMS_ARRAY = 1001  # Slurm's default of MaxArraySize
PROGRESS = 10.0  # seconds between lines on running runs; later a twentieth of the time so far
_SAVING = 600.0  # seconds that `cancel` waits for runs to save


def parts_of_job(
    folder: SweepFolder, launch: Launch, code: Code
) -> tuple[list[str], str, int, str | None]:
    """Return what all jobs have: arguments of `train`, the code, threads and a lock, see `Job`."""
    arguments, lock = code.arguments(), None
    if launch.nodes * launch.nproc > 1:
        arguments += ["--nproc", str(launch.nproc)]
    if launch.executor == "local":
        lock = str(folder.lock_file)
    return arguments, str(code.folder), launch.threads(), lock


def _job_of(folder: SweepFolder, runs: Sequence[PlannedRun], launch: Launch, code: Code) -> Job:
    """Return the job of some runs for submitit to call."""
    common, code_folder, threads, lock = parts_of_job(folder, launch, code)
    todo = {}
    for run in runs:
        stages = state_module.unfinished_stages(folder, run)
        todo[run.name] = [
            (s.name, str(folder.path / s.folder), [*s.arguments, *common]) for s in stages
        ]
    return Job(todo, code_folder, threads, lock)


_MakeJob = Callable[[SweepFolder, Sequence[PlannedRun], Launch, Code], Any]


def _python_command(code: Code) -> str:
    """Return the command with which submitit's script starts Python on the snapshot."""
    start = "from metaseq_lm.cli.jobs import process; process(sys.argv[-1])"
    return shlex.join(launcher.python_command(str(code.folder), start))


def need_slurm() -> None:
    """Raise UsageError without Slurm."""
    if shutil.which("srun") is None or shutil.which("sbatch") is None:
        raise UsageError("--executor slurm: no srun and sbatch here; use --executor local")


def _largest_array() -> int:
    if shutil.which("scontrol") is None:  # as on some login nodes
        return _SLURMS_ARRAY
    done = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True)
    size = re.search(r"^MaxArraySize\s*=\s*(\d+)", done.stdout, re.MULTILINE)
    return max(1, int(size[1])) if size else _SLURMS_ARRAY


def submit_slurm(
    folder: SweepFolder,
    runs: list[PlannedRun],
    launch: Launch,
    code: Code,
    make_job: _MakeJob = _job_of,
) -> list[str]:
    """Submit runs as a Slurm array, or several; return the job id of each. Raises MetaseqError.

    `make_job` returns the job for some runs. If max_parallel limits the jobs at a time, an array
    starts after the previous one has ended.
    """
    jobs_folder = folder.new_jobs_folder()
    executor = submitit.SlurmExecutor(
        jobs_folder, launch.max_timeouts, python=_python_command(code)
    )
    executor.update_parameters(**slurm_parameters(launch, folder.path))
    ids: list[str] = []
    size, each = _largest_array(), launch.runs_per_job
    groups = [runs[start : start + each] for start in range(0, len(runs), each)]
    for start in range(0, len(groups), size):
        part = groups[start : start + size]
        executor.update_parameters(**log_parameters(launch, jobs_folder, len(part) > 1))
        if ids and launch.max_parallel:
            executor.update_parameters(dependency=f"afterany:{ids[-1].partition('_')[0]}")
        callables = [make_job(folder, group, launch, code) for group in part]
        try:
            with redirect_stderr(StringIO()):  # submitit also prints what its error says
                jobs = executor.submit_array(callables)
        except (FailedJobError, FailedSubmissionError, OSError) as error:
            submitted = f" ({len(ids)} of {len(runs)} runs were submitted)" * bool(ids)
            raise MetaseqError(f"sbatch refused the jobs{submitted}: {error}") from error
        for group, job in zip(part, jobs):
            for number, run in enumerate(group):
                entry = _make_submission(folder, run, launch, code, jobs_folder)
                record(folder, replace(entry, job=job.job_id, part=number, parts=len(group)))
                ids.append(job.job_id)
    return ids


def _make_submission(
    folder: SweepFolder, run: PlannedRun, launch: Launch, code: Code, jobs_folder: Path
) -> Submission:
    """Return the submission of a run before its job has a number."""
    return Submission(
        run=run.name,
        executor=launch.executor,
        job="",
        folder=str(jobs_folder.relative_to(folder.path)),
        code=code.folder.name,
        host=socket.gethostname() if launch.executor == "local" else "",
    )


def record(folder: SweepFolder, entry: Submission) -> None:
    """Append a submission to jobs.jsonl."""
    left_out = {"cancelled"} if entry.parts > 1 else {"cancelled", "part", "parts"}
    values = {name: value for name, value in asdict(entry).items() if name not in left_out}
    folder.append("submit", **values)


# ---------------------------------------------------------------- on this machine


@dataclass(frozen=True)
class RunBatch:
    """Runs of a sweep to launch, their code, and the function that makes their jobs."""

    folder: SweepFolder
    runs: list[PlannedRun]
    code: Code
    make_job: _MakeJob = _job_of


@dataclass(frozen=True)
class _Active:
    """A run that is running here, and its slot."""

    batch: RunBatch
    run: PlannedRun
    entry: Submission
    slot: int


class LocalRuns:
    """Runs jobs here, `max_parallel` at a time, until all are over or a signal arrives."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.slots = list(range(launch.max_parallel or 1))
        gpus, count = _visible_gpus() if launch.gpus else [], launch.gpus
        self.gpus = [gpus[at : at + count] for at in range(0, len(gpus), max(1, count))]
        if count and len(gpus) // count * launch.runs_per_gpu < len(self.slots):
            shared = f", {launch.runs_per_gpu} on one," * (launch.runs_per_gpu > 1)
            raise UsageError(
                f"{len(self.slots)} runs at a time with {count} GPUs each{shared} need more than "
                f"the {len(gpus)} GPUs here; lower --max-parallel or --gpus, or see --runs-per-gpu"
            )
        self.running: list[_Active] = []
        self.servers: dict[str, Server] = {}  # by hash of the code
        self.stop: list[int] = []

    def work(
        self, batches: Sequence[RunBatch], report: Callable[[SweepFolder, PlannedRun], None]
    ) -> int:
        """Run all, in order; returns a signal or 0.

        `report` is called for a run that started or ended, and now and then for active runs.
        """
        waiting: list[tuple[RunBatch, PlannedRun]] = []
        for batch in batches:
            waiting += [(batch, run) for run in batch.runs]
        started = shown = time.monotonic()
        ends = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}.intersection(handled_signals())
        before = {n: signal.signal(n, lambda number, frame: self.stop.append(number)) for n in ends}
        last_signal = 0.0
        try:
            while self.running or (waiting and not self.stop):
                while waiting and self.slots and not self.stop:
                    batch, run = waiting.pop(0)
                    self._start(batch, run)
                    report(batch.folder, run)
                for active in list(self.running):
                    if not active.entry.is_alive():
                        self.running.remove(active)
                        self.slots.append(active.slot)
                        report(active.batch.folder, active.run)
                now = time.monotonic()
                if now - shown > max(PROGRESS, (now - started) / 20):
                    shown = now
                    for active in self.running:
                        report(active.batch.folder, active.run)
                if self.stop and now - last_signal > 1:
                    # Sent repeatedly, because a starting job may miss a signal.
                    last_signal = now
                    for active in self.running:
                        active.entry.send(signal.SIGTERM)
                time.sleep(0.1)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            # After an error the servers outlive the command, and stop the remaining runs.
            for server in self.servers.values() if not self.running else ():
                server.close()
        return self.stop[0] if self.stop else 0

    def gpus_of(self, slot: int) -> list[int]:
        """Return the GPUs for the run of a slot; slots take turns if runs share GPUs."""
        return self.gpus[slot % len(self.gpus)] if self.gpus else []

    def _start(self, batch: RunBatch, run: PlannedRun) -> None:
        slot = self.slots.pop(0)
        folder, code = batch.folder, batch.code
        jobs_folder = folder.new_jobs_folder()
        executor = ForkExecutor(jobs_folder, self._server(batch), self.launch.max_timeouts)
        executor.update_parameters(
            timeout_min=self.launch.time or YEAR,
            gpus_per_node=self.launch.gpus,
            visible_gpus=self.gpus_of(slot),
        )
        job = executor.submit(batch.make_job(folder, [run], self.launch, code))
        entry = _make_submission(folder, run, self.launch, code, jobs_folder)
        entry = replace(entry, job=job.job_id, start=process_start(int(job.job_id)))
        record(folder, entry)
        self.running.append(_Active(batch, run, entry, slot))

    def _server(self, batch: RunBatch) -> Server:
        code = batch.code.folder
        if code.name not in self.servers:
            with _terminal_signals_blocked():
                self.servers[code.name] = Server(
                    str(code), self.launch.threads(), batch.folder.lock_file
                )
        return self.servers[code.name]


@contextmanager
def _terminal_signals_blocked() -> Iterator[None]:
    """Block Ctrl-C and hang-up for processes started inside, which save at SIGTERM from us."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _visible_gpus() -> list[int]:
    """Return the numbers of the usable GPUs."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return list(range(torch.cuda.device_count()))
    return [int(part) for part in named.split(",") if part.strip().isdigit()]


# ---------------------------------------------------------------- cancelling


def cancel(folder: SweepFolder) -> list[str]:
    """Cancel all active runs and wait for local ones to save; return the names of the runs.

    Jobs of a search count as runs.
    """
    active = {s.run for s in state_module.read_states(folder) if s.state in state_module.ACTIVE}
    active |= state_module.active_workers(folder).keys()
    last = {name: entry for name, entry in folder.submissions().items() if name in active}
    hostname = socket.gethostname()
    elsewhere = [e for e in last.values() if e.executor == "local" and e.host != hostname]
    if elsewhere:
        raise MetaseqError(f"runs of this sweep were started on {elsewhere[0].host}; cancel there")
    # Recorded first, because Slurm keeps no trace of a cancelled pending array element.
    for name, entry in last.items():
        folder.append("cancel", run=name, job=entry.job, folder=entry.folder)
    on_slurm = [entry.job for entry in last.values() if entry.executor == "slurm"]
    if on_slurm:
        done = subprocess.run(["scancel", *on_slurm], capture_output=True, text=True)
        if done.returncode:
            raise MetaseqError(f"scancel: {done.stderr.strip()}")
    local = [entry for entry in last.values() if entry.executor == "local"]
    commands = [
        Submission("", "local", str(row["pid"]), "", "", row["host"], row["start"])
        for row in folder.commands()
    ]
    # Stop the waiting command first, or it would start the next run in place of a stopped one.
    for entry in commands:
        entry.send(signal.SIGTERM)
    deadline = time.monotonic() + _SAVING
    while remaining := [entry for entry in (*commands, *local) if entry.is_alive()]:
        for entry in remaining:
            if entry not in commands:
                entry.send(signal.SIGTERM)
        if time.monotonic() > deadline:
            raise MetaseqError(f"process {remaining[0].job} does not end; it may hang")
        time.sleep(0.5)
    return list(last)
