"""`train` as the tasks of a Slurm step: the process group is found in Slurm's environment."""

import subprocess
import sys
from pathlib import Path

import battery
import pytest
import torch

from metaseq_lm.runs import checkpoint

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("slurm")]


SRUN = ["srun", "-N2", "--ntasks-per-node=1"]


def train(moons: Path, save: Path, start: list[str], *more: str) -> dict[str, torch.Tensor]:
    """Train in float64 and return the weights."""
    command = [*start, sys.executable, "-m", "metaseq_lm", "train", str(moons)]
    options = [*battery.CASES["masked_lm"][0], *battery.TINY, *battery.exact()]
    arguments = ["criterion=masked_lm", "--save-dir", str(save), *options, *more]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return checkpoint.load(save / "checkpoints" / "last").weights


@pytest.fixture(scope="module")
def one_process(moons: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return train(moons, tmp_path_factory.mktemp("one"), [])


@pytest.mark.parametrize(
    "more, count",
    [((), 2), (("--nproc", "2", "engine.parallel=hybrid"), 4)],
    ids=["a task each", "hybrid"],
)
def test_two_nodes_equal_one_process(
    moons: Path, tmp_path: Path, one_process: dict, more: tuple[str, ...], count: int
) -> None:
    """One task on each of two nodes, in float64: the same weights as one process, to 1e-12."""
    weights = train(moons, tmp_path, SRUN, *more)
    assert f'"replicas": {count}' in (tmp_path / "results.json").read_text()
    # Of four replicas in two nodes, two hold different rows: they write a part each.
    parts = len(list((tmp_path / "checkpoints" / "last").glob("part_*.safetensors")))
    assert parts == (2 if more else 0)
    assert max((one_process[n] - weights[n]).abs().max().item() for n in weights) <= 1e-12
