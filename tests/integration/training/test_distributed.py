"""Process groups: how they are found, how they are shared out, and that replicas stay equal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import battery
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from real_runs import Started, on_replicas
from torch import nn

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.distributed import launcher, process_group
from metaseq_lm.distributed.process_group import choose_gpu, slurm_environment
from metaseq_lm.engine.reduction import cut
from metaseq_lm.optim import owners

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


def test_slurm_step_with_several_tasks() -> None:
    found = slurm_environment(STEP | {"SLURM_STEP_NUM_TASKS": "4", "MASTER_ADDR": "here"})
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("3", "4", "1")
    assert 1024 < int(found["MASTER_PORT"]) < 65536


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
    assert slurm_environment(environment) == {}


def test_choose_gpu_is_by_local_rank() -> None:
    """Its own of those that all see, or the only one that srun --gpus-per-task=1 shows it."""
    assert choose_gpu({}, 1) == 0
    assert choose_gpu({"LOCAL_RANK": "3"}, 4) == 3
    assert choose_gpu({"LOCAL_RANK": "3", "SLURM_STEP_NUM_TASKS": "4"}, 1) == 0
    assert choose_gpu({"LOCAL_RANK": "3", "SLURM_STEP_NUM_TASKS": "4"}, 4) == 3
    with pytest.raises(UsageError, match="process 1 .* there are 1"):  # --nproc 2 in a step of one
        choose_gpu({"LOCAL_RANK": "1", "SLURM_STEP_NUM_TASKS": "1"}, 1)
    with pytest.raises(UsageError, match="process 2 .* there are 2; start at most 2 processes"):
        choose_gpu({"LOCAL_RANK": "2"}, 2)


def test_cores_are_those_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    assert launcher.environment_of(0, 2, 1)["OMP_NUM_THREADS"] == "2"


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=60), st.integers(1, 9))
def test_owners_are_balanced(sizes: list[int], count: int) -> None:
    load = [0] * count
    for size, owner in zip(sizes, owners(sizes, count), strict=True):
        load[owner] += size
    assert max(load) - min(load) <= max(sizes)


def test_buckets_hold_every_leaf_once_from_the_last() -> None:
    leaves = [torch.zeros(n, dtype=t) for n, t in ((9_000_000, torch.float32), (5, torch.float64))]
    leaves += [nn.Parameter(torch.zeros(7_000_000)), nn.Parameter(torch.zeros(3))]
    assert cut(leaves) == [[3, 2], [1], [0]]


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
