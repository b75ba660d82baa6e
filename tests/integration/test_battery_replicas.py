"""What every registered criterion must satisfy on several processes; runs beside test_battery."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import battery
import pytest
import real_runs
import torch

Weights = dict[tuple[battery.Case, str], dict[str, torch.Tensor]]
# Gives the weights of each replica of the cases of so many processes that rest in this place.
Replicas = Callable[[int, str], list[Weights]]


@pytest.fixture(scope="module")
def replicas(
    request: pytest.FixtureRequest, moons: Path, tmp_path_factory: pytest.TempPathFactory
) -> Replicas:
    """Train the selected cases of a number of processes together, when one of them is asked for."""
    selected: dict[tuple[int, str], list[battery.Case]] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.function is test_replicas_change_nothing:
            processes, parallel, case = item.callspec.params["run"]
            selected.setdefault((processes, parallel), []).append(case)

    @functools.cache
    def trained(processes: int, parallel: str) -> list[Weights]:
        out = tmp_path_factory.mktemp("replicas")
        return trained_on(processes, parallel, selected[processes, parallel], moons, out)

    return trained


def trained_on(
    processes: int, parallel: str, cases: Sequence[battery.Case], data: Path, out: Path
) -> list[Weights]:
    """Train cases with micro-batches of three rows, or one; return the weights of each replica.

    The first of four has no rows.
    """
    runs = []
    for case in cases:
        rows = 1 if battery.has_few_rows(case) else 3
        more = [f"engine.micro_batch_size={rows}", f"engine.parallel={parallel}"]
        runs.append((case, parallel, battery.dropped(*more, *battery.few_rows(case))))
    return real_runs.train_on_replicas(processes, processes // 2, runs, data, out, processes == 2)


def param(processes: int, parallel: str, case: battery.Case) -> Any:
    """Return the parameter of a run; one that four processes in hybrid groups cover is exhaustive:
    there parameters rest in shards, and rows are divided by all.
    """
    covered = case in battery.TASKS and (processes, parallel) in [(2, "shard"), (4, "replicate")]
    marks = [pytest.mark.exhaustive] * covered
    name = f"{processes}-{parallel}-{case[0]}-{case[1]}"
    return pytest.param((processes, parallel, case), marks=marks, id=name)


@pytest.mark.parametrize(
    "run", [param(*where, case) for where, cases in battery.REPLICATED.items() for case in cases]
)
def test_replicas_change_nothing(run, whole, replicas):
    """Five updates on 1, 2 and 4 processes end in the same weights, wherever parameters rest."""
    processes, parallel, case = run
    first, *others = replicas(processes, parallel)
    for other in others:
        assert battery.difference(first[case, parallel], other[case, parallel]) == 0
    assert battery.difference(whole(case), first[case, parallel]) <= 1e-12


def test_batches_of_fewer_rows_than_processes(moons, tmp_path):
    """Training and validation batches of three rows on four processes, the last of one row."""
    case = ("masked_lm", 0)
    more = battery.dropped("task.batch_size=3", "task.valid_size=7", "engine.micro_batch_size=1")
    alone = battery.train_uncounted(battery.configure(moons, tmp_path / "alone", case, *more))
    runs = [(case, "shard", [*more, "engine.parallel=shard"])]
    weights = real_runs.train_on_replicas(4, 1, runs, moons, tmp_path)[0]
    assert battery.difference(alone, weights[case, "shard"]) <= 1e-12
    scores = [
        json.loads((tmp_path / name / "results.json").read_text())["metrics"]["valid"]
        for name in ("alone", "masked_lm-0-shard")
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-12)
