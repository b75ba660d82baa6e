"""A search on a real Slurm: jobs that share its studies, one of which is preempted."""

import json
from pathlib import Path

import pytest
from sweeping import SLOW, TINY, states_of, sweep, wait_until
from test_sweep_on_slurm import ON_SLURM, preempt

pytest.importorskip("optuna")

from metaseq_lm.sweeps.folder import SweepFolder
from metaseq_lm.sweeps.states import active_workers

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]
RUN = 2.5e8  # FLOPs: 50 updates


def test_two_jobs_share_a_search(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The preempted job goes on with its trial, and the account is one."""
    out = tmp_path / "out"
    search = ["--search", "optimizer.lr=log 1e-3..1e-1", "--search-flops", f"{2 * RUN:.0f}"]
    budget = ["trainer.max_update=0", f"trainer.max_flops={RUN:.0f}"]
    command = [moons, "--out", out, *search, *budget, *TINY, *SLOW, *ON_SLURM]
    command += ["--max-parallel", "2"]
    assert sweep(*command) == 0
    wait_until(lambda: len(list(out.glob("search/all/*/log.jsonl"))) == 2, 180)
    assert sweep(*command) == 0
    assert "the search goes on in search-1, search-2" in capsys.readouterr().out
    preempt(SweepFolder(out).submissions()["search-1"].job)
    wait_until(lambda: not active_workers(SweepFolder(out)), 300, interval=1)
    trials = [json.loads(f.read_text()) for f in sorted(out.glob("search/all/*/trial.json"))]
    assert {trial["state"] for trial in trials} <= {"finished", "pruned", "unpaid"}
    assert 1.7 * RUN < sum(trial["flops"] for trial in trials) < 2.05 * RUN
    assert sweep(*command) == 0
    wait_until(lambda: [s.state for s in states_of(out).values()] == ["finished"], 120, interval=1)
