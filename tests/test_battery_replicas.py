"""What every registered criterion must satisfy on several processes; runs beside test_battery."""

import os
import subprocess
import sys
from pathlib import Path

import battery
import pytest
import torch


@pytest.fixture(scope="module")
def replicas(
    request: pytest.FixtureRequest, moons: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict]:
    """The weights of cases on 2 or 4 processes of several micro-batches each, by replica."""
    out = tmp_path_factory.mktemp("replicas")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [str(Path(battery.__file__)), str(moons), str(out)]
    done = subprocess.run(
        [*launcher, f"--nproc-per-node={request.param}", *command],
        env=dict(os.environ, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(out / f"weights.{r}.pt", weights_only=True) for r in range(request.param)]


@pytest.mark.parametrize(
    "replicas, case, sharded",
    [(n, *run) for n, runs in battery.REPLICATED.items() for run in runs],
    ids=lambda x: (
        f"{x[0]}-{x[1]}" if isinstance(x, tuple) else {True: "sharded", False: "whole"}.get(x)
    ),
    indirect=["replicas"],
)
def test_replicas_change_nothing(
    case: battery.Case, sharded: bool, whole: battery.Weights, replicas: list[dict]
) -> None:
    """10 updates on 1, 2 and 4 processes end in the same weights, with sharded moments too."""
    for other in replicas[1:]:
        assert battery.difference(replicas[0][case, sharded], other[case, sharded]) == 0
    assert battery.difference(whole[case], replicas[0][case, sharded]) <= 1e-12
    assert not sharded or battery.difference(replicas[0][case, True], replicas[0][case, False]) == 0
