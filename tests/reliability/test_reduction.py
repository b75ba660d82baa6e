"""Gradients summed over replicas in many small buckets, some of which nothing arrives for."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from real_runs import on_replicas
from torch import Tensor

from metaseq_lm.core.batch import Batch, Term
from metaseq_lm.distributed import process_group, shards
from metaseq_lm.distributed.reduction import GlobalCount, Reduction, fillers_of
from metaseq_lm.engine.engine import Engine

WIDTHS = [3, 7, 2, 8, 5]
UPDATES = 3
ROWS = 12


def parameters() -> list[Tensor]:
    """Return the leaves: a chain of matrices, then one used in rows 0-2 only, one nowhere."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(a, b) for a, b in itertools.pairwise(WIDTHS)] + [(3,), (4,)]
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    # In the middle, so that buckets after theirs are complete before them.
    order = [0, 4, 1, 5, 2, 3]
    return [leaves[i].requires_grad_() for i in order]


@dataclass(kw_only=True)
class RowBatch(Batch):
    x: Tensor
    number: Tensor


def loss_of(leaves: list[Tensor], batch: RowBatch) -> dict[str, Term]:
    first, some, second, _, third, fourth = leaves
    x = batch.x
    loss = (x @ first @ second @ third @ fourth).tanh().sum()
    early = x[batch.number < 3]
    if len(early):
        loss = loss + (early * some).pow(2).sum()
    return {"loss_term": Term(loss, "rows")}


def gradients(rank: int, world: int, size: int) -> list[dict]:
    """Return gradients and logs of a replica's share of the rows, in micro-batches of `size`."""
    engine, found = Engine({}), []
    for update in range(UPDATES):
        generator = torch.Generator().manual_seed(update)
        rows = torch.randn(ROWS, WIDTHS[0], generator=generator, dtype=torch.float64)
        mine = range(ROWS * rank // world, ROWS * (rank + 1) // world)
        numbers = [list(mine[at : at + size]) for at in range(0, len(mine), size)]
        batches = [
            RowBatch(x=rows[n], number=torch.tensor(n), sizes={"rows": len(n)}) for n in numbers
        ]
        leaves = parameters()
        engine.begin(update)
        grads, logs = engine.gradients(lambda batch: loss_of(leaves, batch), batches, leaves)
        assert all(leaf.grad is None for leaf in leaves)
        values = [None if g is None else g.tolist() for g in grads]
        found.append({"grads": values, "loss": float(logs["loss"])})
    return found


# By the bytes of a bucket, the sums of an update: one of sizes, and one for each bucket, of which
# the last says which gradients there are.
SUMS = {1: 1 + 6, 100: 1 + 4, 1 << 20: 1 + 1}


def replica(size: int, out: str) -> None:
    """Be one replica."""
    process_group.initialise("cpu", 30)
    sent: list[int] = []
    real = process_group.start_sum
    process_group.start_sum = lambda *a: (sent.append(a[0].numel()), real(*a))[1]
    found = {}
    for shards.BUCKET_BYTES in SUMS:
        sent.clear()
        made = gradients(process_group.rank(), process_group.world_size(), size)
        found[shards.BUCKET_BYTES] = {"made": made, "sums": len(sent) / UPDATES}
    Path(out, f"{process_group.rank()}.json").write_text(json.dumps(found))
    process_group.finish()


@pytest.mark.parametrize("world, size", [(2, 2), (3, 2), (2, 100)])
def test_buckets_change_nothing(world: int, size: int, tmp_path: Path) -> None:
    """To 1e-12 in float64; None only where it is None on all replicas."""
    on_replicas(world, replica, size, str(tmp_path))
    every = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    single = gradients(0, 1, ROWS)
    for bucket_bytes, sums in SUMS.items():
        replicas = [found[str(bucket_bytes)] for found in every]
        assert all(found == replicas[0] for found in replicas)
        assert replicas[0]["sums"] == sums
        for one, many in zip(single, replicas[0]["made"], strict=True):
            assert many["loss"] == pytest.approx(one["loss"], abs=1e-12)
            for at, (a, b) in enumerate(zip(one["grads"], many["grads"], strict=True)):
                assert (a is None) == (b is None) == (at == 3)
                if a is not None:
                    assert (torch.tensor(a) - torch.tensor(b)).abs().max() <= 1e-12


# By replica: how many micro-batches it has, and their sizes.
COUNTS = {
    "equal": [(2, {"a": 3.0, "b": 1.0}), (2, {"a": 4.0, "b": 0.0})],
    "more": [(1, {"a": 3.0}), (2, {"a": 4.0})],
    "other": [(1, {"a": 3.0}), (1, {"b": 4.0})],
    "none": [(0, {}), (3, {"a": 4.0, "copies": torch.tensor([1.0, 2.0])})],
}
KNOWN = {  # are_alike, are_equal, totals
    "equal": (True, True, {"a": 7.0, "b": 1.0}),
    "more": (True, False, {"a": 7.0}),
    "other": (False, True, {"a": 3.0, "b": 4.0}),
    "none": (False, False, {"a": 4.0, "copies": [1.0, 2.0]}),
}


def counter(out: str) -> None:
    """Be a replica that counts, and one that sums gradients of a batch the other has not."""
    process_group.initialise("cpu", 30)
    rank, found = process_group.rank(), {}
    for name, counts in COUNTS.items():
        number, sizes = counts[rank]
        count = GlobalCount(number, sizes, torch.device("cpu"), [rank + 1.0])
        totals = {n: total.tolist() for n, total in count.totals.items()}
        own = [RowBatch(x=torch.full((1,), rank), number=torch.zeros(1))] * number
        filled = [int(batch.x) for batch in fillers_of(own)]
        found[name] = [count.are_alike, count.are_equal, totals, count.others, filled]
    leaf = torch.ones(2, requires_grad=True)
    with Reduction([leaf], [leaf]) as reduction:
        (leaf * 3).sum().backward()
    logs = {"ab"[rank]: torch.tensor(2.0), "all": torch.tensor(5.0)}
    (grad,) = reduction.finish(logs, are_alike=False)
    found["logs"] = [{n: float(v) for n, v in logs.items()}, grad.tolist()]
    Path(out, f"{rank}.json").write_text(json.dumps(found))
    process_group.finish()


def test_what_replicas_count_of_unlike_batches(tmp_path: Path) -> None:
    on_replicas(2, counter, str(tmp_path))
    every = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    filled = {"equal": [[], []], "more": [[0], []], "other": [[], []], "none": [[1] * 3, []]}
    for rank, found in enumerate(every):
        assert found.pop("logs") == [{"a": 2.0, "b": 2.0, "all": 10.0}, [6.0, 6.0]]
        for name, values in found.items():
            assert values == [*KNOWN[name], [3.0], filled[name][rank]], name
