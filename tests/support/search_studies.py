"""Studies of a search with trials that cost nothing."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metaseq_lm.sweeps.search import Search
from metaseq_lm.sweeps.studies import Setting, Studies
from metaseq_lm.sweeps.trials import StudyTrial

RULES: dict[str, Any] = {
    "space": {"optimizer.lr": "log 1e-5..1e-1", "task.batch_size": [8, 16], "model.layers": "1..4"},
    "flops": 600.0,
}
RUN = 100.0  # FLOPs of a run
A = Setting("a", {}, RUN)


def loss(trial: StudyTrial) -> float:
    """Return a loss that falls over a run and is smallest at a rate of 1e-3."""
    return (math.log10(trial.values["optimizer.lr"]) + 3) ** 2 + 1 / trial.share


def run_all(
    studies: Studies, score: Callable[[StudyTrial], float] = loss, most: int = 1000
) -> None:
    """Run trials from rung to rung, each charged for its share."""
    for _ in range(most):
        trial = studies.begin("search-1")
        if trial is None:
            return
        while trial.state == "running":
            trial = studies.report(trial, score(trial), trial.share * RUN)


def studies_in(folder: Path, *settings: Setting, **rules: Any) -> Studies:
    studies = Studies(folder, Search.from_json(RULES | rules))
    studies.create(settings or [A])
    return studies
