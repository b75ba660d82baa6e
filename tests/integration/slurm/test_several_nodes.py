"""Runs of two nodes each on a real Slurm: preempted, killed and lost, they end like
those of one.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from outcomes import expect_facts
from real_runs import reached
from sweeping import LONG, SLOW, processes, result_of, states_of, submitted, sweep, wait_until

from metaseq_lm.cli import main
from metaseq_lm.sweeps.states import State

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("slurm")]
TWO_NODES = ("--executor", "slurm", "--time", "30", "--nodes", "2")
RUN = [*LONG, "trainer.save_interval_updates=10"]
SECONDS = 240


@pytest.fixture(scope="module")
def one_node(moons: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[str]]:
    """Weights and curve of seed 1 by two processes of one machine, which nothing interrupts."""
    save = tmp_path_factory.mktemp("one_node") / "run"
    assert main(["train", str(moons), "--save-dir", str(save), "--nproc", "2", "seed=1", *RUN]) == 0
    return result_of(save)


class Watched:
    """The states that `sweep status` showed of a run, one after the other."""

    def __init__(self, out: Path, run: str) -> None:
        self.out, self.run = out, run
        self.seen: list[tuple[str, int]] = []

    def until(self, *wanted: str) -> State:
        """Wait for one of the `wanted` states."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            state = states_of(self.out)[self.run]
            if (state.state, state.requeued) not in self.seen[-1:]:
                self.seen.append((state.state, state.requeued))
            if state.state in wanted:
                return state
            time.sleep(0.4)
        raise AssertionError(f"{self.seen} within {SECONDS} s")


def replicas(out: Path) -> dict[str, int]:
    """Return the processes that train, by their RANK."""
    pids = {}
    for pid in processes(str(out), "--save-dir", "-c"):
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        pids |= {word.partition("=")[2]: pid for word in words if word.startswith("RANK=")}
    return pids


def start(moons: Path, out: Path, *more: str) -> Watched:
    assert sweep(moons, "--out", out, *TWO_NODES, *more, *RUN, *SLOW) == 0
    watched = Watched(out, "seed=1")
    assert watched.until("running").update == 0
    wait_until(lambda: reached(out / "seed=1") >= 30, SECONDS)
    return watched


def test_preempted_on_both_nodes(moons: Path, tmp_path: Path, one_node: tuple) -> None:
    """One checkpoint, one requeue; the end is that of one node, bit for bit."""
    out = tmp_path / "out"
    watched = start(moons, out)
    job = states_of(out)["seed=1"].job
    for number in ("TERM", "USR2"):
        subprocess.run(["scancel", job, "--signal", number], check=True)
    watched.until("pending")
    watched.until("finished")
    later = [pair for pair in watched.seen if pair != ("pending", 0)]
    assert later == [("running", 0), ("pending", 1), ("running", 1), ("finished", 1)]
    assert submitted(out) == ["seed=1"] and result_of(out / "seed=1") == one_node
    wait_until(lambda: not processes(str(out)), 30)


def test_a_killed_process_of_the_second_node(moons: Path, tmp_path: Path, one_node: tuple) -> None:
    """All nodes end, the killed process is named with its node, and `resubmit` goes on."""
    out = tmp_path / "out"
    watched = start(moons, out)
    victim = replicas(out)["1"]
    os.kill(victim, signal.SIGKILL)
    before = time.monotonic()
    state = watched.until("failed", "finished")
    assert watched.seen[-2:] == [("running", 0), ("failed", 0)] and time.monotonic() < before + 60
    expect_facts(state.reason, "replica 1 failed:", f" {victim} on 127.0.0.1", "SIGKILL")
    assert state.update >= 30
    wait_until(lambda: not processes(str(out)), 30)
    assert sweep("resubmit", "--failed", out, *SLOW) == 0
    watched.until("finished")
    assert submitted(out) == ["seed=1", "seed=1"] and result_of(out / "seed=1") == one_node


def test_a_lost_node(
    moons: Path, tmp_path: Path, one_node: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm requeues the job, `status` says after what, and the end is the same."""
    out = tmp_path / "out"
    # Jobs of other tests on the lost node would be lost too, and wait for two minutes.
    monkeypatch.setenv("SBATCH_PARTITION", "spare")
    watched = start(moons, out)
    nodes = subprocess.check_output(
        ["squeue", "-h", "-o", "%N", "-j", states_of(out)["seed=1"].job], text=True
    )
    names = subprocess.check_output(["scontrol", "show", "hostnames", nodes.strip()], text=True)
    lost = names.split()[1]
    jobs = subprocess.check_output(["squeue", "-h", "-o", "%i", "-w", lost], text=True).split()
    assert jobs == [states_of(out)["seed=1"].job]
    node = f"NodeName={lost}"
    # It comes back by itself: its slurmd is well.
    subprocess.run(["scontrol", "update", node, "State=DOWN", "Reason=test"], check=True)
    assert watched.until("pending").update >= 30
    wait_until(lambda: "requeued after NODE_FAIL" in states_of(out)["seed=1"].reason)
    watched.until("running")
    watched.until("finished")
    assert ("running", 1) in watched.seen and watched.seen[-1] == ("finished", 1)
    assert submitted(out) == ["seed=1"] and result_of(out / "seed=1") == one_node
