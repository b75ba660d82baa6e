"""The fixtures of the tests that need a real Slurm."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "slurm-local"
CANNOT_RUN_HERE = 77


@pytest.fixture(scope="session")
def slurm():
    """Bring Slurm up, and leave it up; skip where it cannot run unless REQUIRE_SLURM is set."""
    done = subprocess.run([SCRIPT, "up"], capture_output=True, text=True, timeout=600)
    if done.returncode == CANNOT_RUN_HERE and not os.environ.get("REQUIRE_SLURM"):
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(autouse=True)
def logs_of_jobs(tmp_path: Path) -> Iterator[None]:
    """Print the ends of the logs of jobs, which pytest shows if the test fails."""
    yield
    for log in sorted(tmp_path.rglob("jobs/*/*_log.err")):
        print(f"--- end of {log}", log.read_text(errors="replace")[-2000:], sep="\n")
