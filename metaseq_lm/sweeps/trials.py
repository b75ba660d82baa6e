"""The settings and trials of a search, for its workers and readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# States of trials.
STATES = "finished pruned unpaid diverged failed".split()
FINISHED, PRUNED, UNPAID, DIVERGED, FAILED = STATES
RUNNING, INTERRUPTED = "running", "interrupted"


@dataclass(frozen=True)
class Setting:
    """A setting of the sweep that the search tunes.

    Attributes:
        name: Its name, also the name of its study and of its folder of trials.
        values: The values of the grid and the list.
        run_flops: The budget of a run.
    """

    name: str
    values: Mapping[str, Any]
    run_flops: float


@dataclass(frozen=True)
class Trial:
    """A trial of a setting.

    Attributes:
        setting: The name of the setting.
        number: Its number, from 0.
        values: The values of the searched options.
        state: finished, pruned, unpaid (the FLOPs left did not pay the next rung), diverged,
            failed, running or interrupted.
        flops: Its spent FLOPs.
        share: The part of a run's budget that it may spend, or was told to spend.
        score: Its last score, at the end or at a rung; None without a score.
        worker: The job that runs it.
        message: The reason for its failure.
    """

    setting: str
    number: int
    values: Mapping[str, Any]
    state: str = RUNNING
    flops: float = 0.0
    share: float = 1.0
    score: float | None = None
    worker: str = ""
    message: str = ""
