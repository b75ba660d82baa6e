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
