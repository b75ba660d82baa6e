"""`train` as the tasks of a Slurm step: the process group is found in Slurm's environment."""

import subprocess
import sys
from pathlib import Path

import battery
import pytest
import safetensors.torch

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("slurm")]


def test_two_nodes_equal_one_process(moons: Path, tmp_path: Path) -> None:
    """One task on each of two nodes, in float64: the same weights as one process, to 1e-12."""
    weights = []
    for name, start in (("one", []), ("two", ["srun", "-N2", "--ntasks-per-node=1"])):
        command = [*start, sys.executable, "-m", "metaseq_lm", "train", str(moons)]
        options = [*battery.CASES["masked_lm"][0], *battery.TINY, *battery.exact()]
        places = ["criterion=masked_lm", "--save-dir", str(tmp_path / name)]
        done = subprocess.run(
            [*command, *places, *options], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        file = tmp_path / name / "checkpoints" / "last" / "model.safetensors"
        weights.append(safetensors.torch.load_file(file))
    assert '"replicas": 2' in (tmp_path / "two" / "results.json").read_text()
    assert max((weights[0][n] - weights[1][n]).abs().max().item() for n in weights[0]) <= 1e-12
