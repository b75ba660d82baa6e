"""What every registered criterion must satisfy on several processes; runs beside test_battery."""

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
        (case, parallel, [*more, f"engine.parallel={parallel}"])
        for case, parallel in battery.REPLICATED[processes]
    ]
    nodes = processes // 2
    real_runs.on_replicas(
        processes, battery.replicated, str(data), str(out), nodes, runs, seconds=900
    )
    return [torch.load(out / f"weights.{r}.pt", weights_only=True) for r in range(processes)]


@pytest.mark.parametrize(
    "processes, case, parallel",
    [(n, *run) for n, runs in battery.REPLICATED.items() for run in runs],
    ids=lambda x: f"{x[0]}-{x[1]}" if isinstance(x, tuple) else str(x),
)
def test_replicas_change_nothing(
    processes: int, case: battery.Case, parallel: str, whole: battery.Whole, replicas: Replicas
) -> None:
    """Six updates on 1, 2 and 4 processes end in the same weights, wherever the parameters rest."""
    first, *others = replicas[processes]
    for other in others:
        assert battery.difference(first[case, parallel], other[case, parallel]) == 0
    assert battery.difference(whole(case), first[case, parallel]) <= 1e-12
