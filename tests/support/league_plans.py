"""A small plan for tests of leagues, and training of its runs in the test's process."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from sweeping import TINY

from metaseq_lm.cli import main
from metaseq_lm.league import runner
from metaseq_lm.sweeps.expansion import PlannedRun
from metaseq_lm.sweeps.folder import SweepFolder
from metaseq_lm.sweeps.options import Launch
from metaseq_lm.sweeps.submit import RunBatch

# An update of TINY on Two Moons costs 4.98e6 FLOPs with mask_prob=0.15, 7.50e6 with 0.4: six or
# four updates spend the small budget. Other shares of targets leave too much of it unspent.
SMALL, LARGE = 3e7, 6e7
PLAN: dict[str, Any] = {
    "name": "small",
    "options": [*TINY, "schedule=constant", "trainer.valid_split=valid", "task.valid_size=32"],
    "objectives": {
        "masked": {"options": ["task.mask_prob=0.15"]},
        "dense": {"options": ["task.mask_prob=0.4"], "control": "masked", "note": "more targets"},
    },
    "budgets": [SMALL, LARGE],
    "usual_budgets": [SMALL],
    "seeds": [1, 2],
    "tuning": {
        "grid": {"optimizer.lr": [0.0001, 0.001]},
        "budgets": [SMALL],
        "seeds": [101],
        "widen": 1,
    },
    "controls": {"untrained": True, "shuffled": [SMALL], "seeds": [1]},
    "comparison": {"baseline": "masked", "metric": "valid.mlm", "smallest_effect": 0.05},
}


def plan_with(**changes: Any) -> dict[str, Any]:
    """Return the plan with other values of "section.key" or "key"; None removes one."""
    plan = copy.deepcopy(PLAN) | {"data": {"world": "quad"}}
    for name, value in changes.items():
        section, _, key = name.rpartition("__")
        target = plan[section] if section else plan
        target[key] = value
        if value is None:
            del target[key]
    return plan


def write_plan(file: Path, data: Path, **changes: Any) -> Path:
    """Write the plan on a data folder as YAML and return its path."""
    content = plan_with(data={"folder": str(data)}, **changes)
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def in_process(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[PlannedRun], None] = lambda run: None
) -> list[str]:
    """Train runs of leagues in this process; return a list of their names in order.

    `before` is called with each run, and may raise.
    """
    trained: list[str] = []

    def work(
        batches: Sequence[RunBatch],
        launch: Launch,
        report: Callable[[SweepFolder, PlannedRun], None],
    ) -> None:
        for batch in batches:
            for run in batch.runs:
                before(run)
                (stage,) = run.stages
                main(["train", *stage.arguments, "--quiet"])  # the plug-in is loaded
                phase, objective = batch.folder.path.parts[-2:]
                trained.append(f"{phase}/{objective}/{run.name}")
                report(batch.folder, run)

    monkeypatch.setattr(runner, "run_locally", work)
    return trained
