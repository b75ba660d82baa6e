"""scripts/slurm-local: jobs run, sacct knows them, and its exit codes are those it documents."""

import subprocess
import time
import uuid
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "slurm-local"


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slurm
def test_a_job_runs_and_is_accounted_for(slurm):
    name = uuid.uuid4().hex
    done = run("srun", "--job-name", name, "sh", "-c", "echo $SLURM_JOB_PARTITION")
    assert (done.returncode, done.stdout) == (0, "main\n"), done.stderr
    deadline = time.monotonic() + 30  # sacct lags by some seconds
    state = ""
    while state != "COMPLETED" and time.monotonic() < deadline:
        time.sleep(0.5)
        state = run("sacct", "-X", "-n", "-P", "--name", name, "-o", "State").stdout.strip()
    assert state == "COMPLETED"


@pytest.mark.slurm
def test_up_again_changes_nothing_and_check_agrees(slurm):
    pids = sorted(p.read_text() for p in Path("/var/lib/slurm-local/pid").iterdir())
    assert run(SCRIPT, "up").returncode == 0
    assert sorted(p.read_text() for p in Path("/var/lib/slurm-local/pid").iterdir()) == pids
    assert run(SCRIPT, "check").returncode == 0


@pytest.mark.parametrize("arguments", [(), ("start",), ("up", "--purge"), ("down", "--fresh")])
def test_wrong_usage_is_2(arguments):
    done = run(SCRIPT, *arguments)
    assert done.returncode == 2 and "scripts/slurm-local up" in done.stderr


def test_help_is_not_an_error():
    done = run(SCRIPT, "--help")
    assert done.returncode == 0 and "--fresh" in done.stdout
