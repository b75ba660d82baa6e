"""Process groups: how they are found, how they are shared out, and that replicas stay equal."""

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import battery
import numpy as np
import pytest
import torch
from real_runs import Started, on_replicas
from torch import nn
from torch.distributed import TCPStore

from metaseq_lm.cli import main
from metaseq_lm.core.batch import Batch, Layout, TokenBatch
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.distributed import gate, launcher, messages, process_group, shards
from metaseq_lm.distributed.process_group import _choose_gpu, _join_step
from metaseq_lm.distributed.step import HOST, Meeting, Step, _tasks_per_node, step_of

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


def test_slurm_step_with_several_tasks() -> None:
    several = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1,3", "SLURM_NODEID": "1"}
    step = step_of(STEP | several | {"MASTER_ADDR": "here"})
    numbers = {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 3}
    assert step.variables() == numbers and step.host() == "here"
    assert step_of(STEP | several | {"SLURM_STEP_NUM_NODES": "1"}).host() == HOST
    assert all(1024 < port < 65536 for port in step.ports)


def join_as_task(job: str, folder: str) -> None:
    """As one of two tasks of a step, which is in the environment as Slurm gives it,
    join the group.
    """
    number = os.environ["RANK"]
    for name in [
        n for n in os.environ if n.startswith(("MASTER", "TORCHELASTIC", "WORLD", "RANK"))
    ]:
        del os.environ[name]
    os.environ |= STEP | {"SLURM_JOB_ID": job, "SLURM_PROCID": number, "SLURM_LOCALID": number}
    os.environ |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    os.environ |= {"MASTER_ADDR": HOST}
    process_group.initialise("cpu", 60, folder)
    assert process_group.gather_objects(process_group.rank()) == [0, 1]
    process_group.finish()


def test_a_step_whose_first_port_is_taken(tmp_path: Path) -> None:
    """Its tasks take another, without a launcher too."""
    job = str(os.getpid())
    several = STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": job}
    first, *_ = step_of(several).ports
    with socket.socket() as taken:
        with contextlib.suppress(OSError):  # by another program
            taken.bind((HOST, first))
            taken.listen()
        on_replicas(2, join_as_task, job, str(tmp_path))


def test_tasks_of_each_node() -> None:
    assert _tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert _tasks_per_node("4") == [4]


def test_processes_of_a_task() -> None:
    """The second of two nodes starts three processes: numbers go on, the node has its own."""
    step = Step(number=1, tasks=2)
    variables = launcher._environment_of(2, 3, step, {"MASTER_PORT": "9"})
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    assert [variables[name] for name in names] == ["5", "2", "6", "3", "9"]


def test_tasks_meet_in_spite_of_a_taken_port(tmp_path: Path) -> None:
    """The first task takes the next port, the second passes over a store of another step."""
    theirs = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    ports = (theirs.port, theirs.port + 1, theirs.port + 2)
    meetings: dict[int, Meeting] = {}

    def join(number: int) -> None:
        step = Step(number=number, tasks=2, name="7.0", ports=ports)
        meetings[number] = Meeting(step, ["train"], [], str(tmp_path / "run"))
        assert meetings[number].complete()

    threads = [threading.Thread(target=join, args=(number,)) for number in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    first, second = meetings[0], meetings[1]
    # Who only reaches the port gets no store.
    entrance = next(port for port in ports[1:] if not gate.find(HOST, [port], b"guessed"))
    with socket.create_connection((HOST, entrance)) as stranger:
        stranger.sendall(bytes(64))
        sent = b"".join(iter(lambda: stranger.recv(100), b""))
    assert len(sent) == 64 and (tmp_path / "run" / gate.FILE).stat().st_mode & 0o777 == 0o600
    killed = (1, "replica 1 was killed")
    assert second.report(*killed) == killed and first.report(1, "") == killed
    first.last_look = 0.0  # it asks once a second
    assert first.outcome() == killed
    second.leave()
    first.leave()


def test_a_signal_ends_the_waiting_for_other_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gate.SECRET, "known to both")
    signals: list[int] = []
    meeting = Meeting(Step(tasks=2, ports=(0,)), ["train"], signals)
    threading.Timer(0.5, signals.append, [15]).start()
    assert not meeting.complete()
    assert not Meeting(Step(number=1, tasks=2, ports=(1,)), ["train"], signals).complete()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},
        # A batch script or a shell of salloc: nobody else would come.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    ],
)
def test_no_group_outside_a_step_of_several(environment: dict[str, str]) -> None:
    assert _join_step(environment) == {}


def test_choose_gpu_is_by_local_rank() -> None:
    """Its own of those that all see, or the only one that srun --gpus-per-task=1 shows it."""
    assert _choose_gpu({}, 1) == 0
    assert _choose_gpu({"LOCAL_RANK": "3"}, 4) == 3
    assert _choose_gpu({"LOCAL_RANK": "3", "SLURM_STEP_NUM_TASKS": "4"}, 4) == 3
    step = STEP | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"}
    assert _choose_gpu(step | {"LOCAL_RANK": "3"}, 1) == 0
    with pytest.raises(UsageError, match=r"process 1\b.* 1\b"):  # one task on each node
        _choose_gpu(step | {"LOCAL_RANK": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, 1)
    with pytest.raises(UsageError, match=r"process 1\b.* 1\b"):  # --nproc 2 in a step of one
        _choose_gpu({"LOCAL_RANK": "1", "SLURM_STEP_NUM_TASKS": "1"}, 1)
    with pytest.raises(UsageError, match=r"process 2\b.* 2;.* 2\b"):
        _choose_gpu({"LOCAL_RANK": "2"}, 2)


def test_cores_are_those_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    assert launcher._environment_of(0, 2, Step(), {})["OMP_NUM_THREADS"] == "2"


def test_buckets_hold_every_leaf_once_from_the_last() -> None:
    leaves = [torch.zeros(n, dtype=t) for n, t in ((9_000_000, torch.float32), (5, torch.float64))]
    leaves += [nn.Parameter(torch.zeros(7_000_000)), nn.Parameter(torch.zeros(3))]
    assert shards.group_into_buckets(reversed(range(4)), leaves) == [[3, 2], [1], [0]]


def check_replicas() -> None:
    """As one of two replicas, compare weights that are equal, then weights that are not."""
    process_group.initialise("cpu", 60)
    weights = {"a": torch.ones(5), "b": torch.arange(6), "c": torch.zeros(3, dtype=torch.bfloat16)}
    process_group.check_equal(weights, 4)
    if process_group.rank() == 1:
        weights["b"][2] += 1
        weights["c"][0] = -0.0
    with pytest.raises(MetaseqError, match="update 5.*b, c"):
        process_group.check_equal(weights, 5)
    process_group.finish()


def test_replicas_that_differ_in_one_bit_are_noticed() -> None:
    on_replicas(2, check_replicas)


def test_replicas_of_torchrun_find_each_other(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from metaseq_lm.distributed import process_group\n"
        "process_group.initialise('cpu', 60)\n"
        "ranks = process_group.gather_objects(process_group.rank())\n"
        "assert ranks == [0, 1] and process_group.world_size() == 2\n"
        "process_group.finish()\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(program)],
        env=os.environ | {"PYTHONPATH": str(battery.ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_bfloat16_on_two_processes(moons: Path, tmp_path: Path) -> None:
    """The same run in bf16 on one and on two processes: losses agree to bfloat16's rounding."""
    case = [*battery.CASES["masked_lm"][0], *battery.TINY, "criterion=masked_lm"]
    losses = []
    for count in (1, 2):
        save = tmp_path / str(count)
        arguments = ["train", str(moons), "--nproc", str(count), "--save-dir", str(save), *case]
        arguments += ["engine.precision=bf16", "trainer.max_update=8"]
        if count == 1:
            assert main(arguments) == 0
        else:
            started = Started(arguments, tmp_path / "errors")
            assert started.wait() == 0, started.text()
        lines = [json.loads(line) for line in (save / "log.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if line["kind"] == "train"])
        assert json.loads((save / "results.json").read_text())["replicas"] == count
    assert losses[0] == pytest.approx(losses[1], rel=2e-2) and len(losses[0]) == 8


@pytest.mark.parametrize("world", [1, 2, 4, 6, 7, 12, 90, 1024])
def test_hosts_sum_along_the_axes_of_a_grid(world: int) -> None:
    """All axes in turn reach every process, each in groups of a prime number of processes."""
    reached = [{rank} for rank in range(world)]
    axes = [process_group.axes_through(rank, world) for rank in range(world)]
    for number, first in enumerate(axes[0]):
        groups = {tuple(mine[number]) for mine in axes}
        assert sorted(itertools.chain(*groups)) == list(range(world))
        assert all(len(group) == len(first) for group in groups)
        assert all(len(first) % factor for factor in range(2, len(first)))
        reached = [set().union(*(reached[r] for r in axes[rank][number])) for rank in range(world)]
    assert all(ranks == set(range(world)) for ranks in reached)


def sum_of_thirds(out: str) -> None:
    """As one of the replicas write sums of numbers whose rounding depends on the order."""
    process_group.initialise("cpu", 30)
    rank = process_group.rank()
    sums = process_group.sum_of_hosts([1.0, rank, *(1 / (3 + rank + n) for n in range(40))])
    Path(out, f"{rank}.json").write_text(json.dumps(sums))
    process_group.finish()


def test_sums_of_hosts_are_the_same_bits_everywhere(tmp_path: Path) -> None:
    on_replicas(6, sum_of_thirds, str(tmp_path))
    first, *others = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(6))
    assert first[:2] == [6, 15]
    assert first[2:] == pytest.approx([sum(1 / (3 + r + n) for r in range(6)) for n in range(40)])
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    "value",
    [
        {1: (2.5, None, [True, "\udcff"]), "tensor": {}},
        float("inf"),
        torch.tensor([[1.5, -0.0]], dtype=torch.bfloat16),
        torch.zeros(0, 3, dtype=torch.bool),
        np.array([2**63], dtype=np.uint64),
        TokenBatch(
            tokens=torch.ones(2, 3, dtype=torch.int64).T,
            layout=Layout(torch.zeros(3, 2, dtype=torch.bool), reach="causal"),
            sizes={"rows": 3, "targets": torch.tensor(2.0)},
            rows=np.arange(3, dtype=np.uint64),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_messages_come_back_as_they_were(value: Any) -> None:
    kinds = [*messages.all_subclasses(Batch), Layout]
    back = messages.decode(messages.encode(value, kinds), kinds)
    assert type(back) is type(value) and repr(back) == repr(value)


def test_messages_name_no_class_that_was_not_expected() -> None:
    with pytest.raises(MetaseqError, match="Layout"):
        messages.encode(Layout())
    with pytest.raises(KeyError):
        messages.decode(messages.encode(Layout(), [Layout]))
