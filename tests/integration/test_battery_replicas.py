"""What every registered criterion must satisfy on several processes; runs beside test_battery."""

import json
from pathlib import Path

import battery
import pytest
import real_runs
import torch

Replicas = dict[int, list[dict]]


@pytest.fixture(scope="module")
def replicas(moons: Path, tmp_path_factory: pytest.TempPathFactory) -> Replicas:
    """The weights of cases of several micro-batches each, by number of processes and replica.

    Not parametrized: pytest would train everything again for each test.
    """
    return {
        n: trained_on(n, moons, tmp_path_factory.mktemp("replicas")) for n in battery.REPLICATED
    }


def trained_on(processes: int, data: Path, out: Path) -> list[dict]:
    """Train the cases of this number of processes; return the weights of each replica."""
    more = battery.dropped("engine.micro_batch_size=2")
    runs = [
        (case, parallel, [*more, *battery.few_rows(case), f"engine.parallel={parallel}"])
        for case, parallel in battery.REPLICATED[processes]
    ]
    nodes = processes // 2
    function = battery.replicated if processes == 2 else battery.replicated_without_rows
    real_runs.on_replicas(processes, function, str(data), str(out), nodes, runs, seconds=900)
    return [torch.load(out / f"weights.{r}.pt", weights_only=True) for r in range(processes)]


@pytest.mark.parametrize(
    "processes, case, parallel",
    [(n, *run) for n, runs in battery.REPLICATED.items() for run in runs],
    ids=lambda x: f"{x[0]}-{x[1]}" if isinstance(x, tuple) else str(x),
)
def test_replicas_change_nothing(
    processes: int, case: battery.Case, parallel: str, whole: battery.Whole, replicas: Replicas
) -> None:
    """Six updates on 1, 2 and 4 processes end in the same weights, wherever the parameters rest.

    The first of four has no rows.
    """
    first, *others = replicas[processes]
    for other in others:
        assert battery.difference(first[case, parallel], other[case, parallel]) == 0
    assert battery.difference(whole(case), first[case, parallel]) <= 1e-12


def test_batches_of_fewer_rows_than_processes(moons: Path, tmp_path: Path) -> None:
    """Training and validation batches of three rows on four processes, of which the last has one
    row.
    """
    case = ("masked_lm", 0)
    more = battery.dropped("task.batch_size=3", "task.valid_size=7", "engine.micro_batch_size=1")
    alone = battery.train_uncounted(battery.configure(moons, tmp_path / "alone", case, *more))
    runs = [(case, "shard", [*more, "engine.parallel=shard"])]
    real_runs.on_replicas(4, battery.replicated, str(moons), str(tmp_path), 1, runs)
    weights = torch.load(tmp_path / "weights.0.pt", weights_only=True)
    assert battery.difference(alone, weights[case, "shard"]) <= 1e-12
    scores = [
        json.loads((tmp_path / name / "results.json").read_text())["metrics"]["valid"]
        for name in ("alone", "masked_lm-0-shard")
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-12)
