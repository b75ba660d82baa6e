"""Sums over replicas of sizes and gradients; buckets of these leave during the backward pass."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Batch, Logs, to_python
from metaseq_lm.distributed import placement, process_group
from metaseq_lm.distributed.vectors import (
    Vector,
    is_dtensor,
    is_sharded,
    like_shard,
    local,
    rows_each,
)

ON_THE_WAY = 2  # buckets that are summed at the same time


@dataclass(frozen=True)
class GlobalCount:
    """Totals over all replicas' micro-batches of a global batch.

    Attributes:
        totals: Every size summed over them, a number or (C,) per copy.
        are_equal: Whether all replicas have equally many.
        are_alike: Whether every replica has at least one, and all have the same sizes.
    """

    totals: dict[str, Any]
    are_equal: bool
    are_alike: bool


def count_globally(
    sizes: Mapping[str, Any], micro_batches: int, device: torch.device
) -> GlobalCount:
    """Sum the sizes of all replicas' micro-batches; this one has `micro_batches` of `sizes` in all.

    A call of all replicas.
    """
    # A number stays on the host.
    totals = {n: torch.as_tensor(sizes[n], dtype=torch.float64).clone() for n in sorted(sizes)}
    are_equal, are_alike = compare(micro_batches, totals)
    if are_alike:
        process_group.sum_(list(totals.values()))
    else:
        totals = sum_of_sizes(process_group.gather_objects(to_python(totals)), device)
    return GlobalCount(totals, are_equal, are_alike)


def sum_of_sizes(replicas: Sequence[Mapping[str, Any]], device: torch.device) -> dict[str, Any]:
    """Return the sums of the replicas' sizes, of which each may have others."""
    totals: dict[str, Any] = {}
    for sizes in replicas:
        for name, size in sizes.items():
            target = device if isinstance(size, list) else "cpu"
            number = torch.tensor(size, dtype=torch.float64, device=target)
            totals[name] = totals.get(name, 0.0) + number
    return totals


def compare(micro_batches: int, sizes: Iterable[str] = ()) -> tuple[bool, bool]:
    """Compare the micro-batches of the replicas; a call of all.

    Args:
        micro_batches: How many this one has.
        sizes: The names of their sizes.

    Returns:
        Whether all replicas have equally many, and whether each has any and all have the same
        sizes.
    """
    digest = random_streams.key(*sorted(sizes))
    # Of 20 bits: their squares add up exactly.
    values = [micro_batches, digest % (1 << 20), (digest >> 20) % (1 << 20)]
    numbers = [*values, *(value**2 for value in values), micro_batches > 0]
    sums = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    process_group.sum_([sums])
    *totals, having = map(int, sums.tolist())
    replicas = process_group.world_size()
    # Equal numbers, and no others, have the variance 0.
    are_equal, *same = (t**2 == replicas * square for t, square in zip(totals, totals[3:]))
    return are_equal, having == replicas and all(same)


def fillers(batches: Sequence[Batch]) -> list[Batch]:
    """Return micro-batches that give every replica as many as the one with the most has.

    A replica without any gets one of another's. A call of all replicas.
    """
    counts = process_group.gather_objects(len(batches))
    sender = counts.index(max(counts))
    samples = list(batches[:1])
    if min(counts) == 0:
        sent = batches[0].to("cpu") if process_group.rank() == sender else None
        received = process_group.gather_objects(sent)[sender]
        assert received is not None
        samples = samples or [received]
    return samples * (max(counts) - len(batches))


class Reduction:
    """Sums the gradients of `leaves` over the replicas.

    The last backward pass runs inside the with block, and each bucket is sent as soon as its
    gradients are computed. Buckets are filled from the last leaf to the first, the order of the
    backward pass, and are sent in that order on every replica.

    Args:
        leaves: The leaves of the graph.
        wrt: The leaves themselves, or shards of them. The gradient of a shard is a shard.
        low: Whether gradients are rounded to bfloat16 and summed in it; otherwise in the dtype of
            `wrt`.
        are_parts: Whether the leaves of shards are the parts that this process holds, whose
            gradients the graph has summed over the shards already.
    """

    def __init__(
        self,
        leaves: Sequence[Tensor],
        wrt: Sequence[Tensor],
        low: bool = False,
        are_parts: bool = False,
    ) -> None:
        self.leaves, self.wrt, self.low, self.are_parts = leaves, wrt, low, are_parts
        self.buckets = placement.buckets(reversed(range(len(wrt))), wrt)
        if not self.buckets or low or is_sharded(wrt[self.buckets[-1][0]]):
            self.buckets.append([])  # for the logs, which every replica needs
        self.missing = [len(bucket) for bucket in self.buckets]
        self.present = [0.0] * len(leaves)
        self.sums: list[Tensor] = []
        self.waits: list[process_group.Pending] = []  # of the buckets on their way
        self.hooks: list[Any] = []

    def __enter__(self) -> Reduction:
        # The last bucket waits for the end: it carries the logs too.
        for number, bucket in enumerate(self.buckets[:-1]):
            for at in bucket:
                hook = self._count_down(number)
                self.hooks.append(self.leaves[at].register_post_accumulate_grad_hook(hook))
        return self

    def __exit__(self, *exc: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _count_down(self, number: int) -> Callable[[Tensor], None]:
        def hook(leaf: Tensor) -> None:
            self.missing[number] -= 1
            while (
                len(self.sums) < len(self.buckets) - 1
                and not self.missing[len(self.sums)]
                and self._has_room()
            ):
                self._send()

        return hook

    def _has_room(self) -> bool:
        """Return whether a bucket can be sent without a wait.

        A backward pass must not wait for a sum: a replica that lacks a gradient of the bucket sends
        it at its end only, and until then may wait for this replica to gather a layer with it.
        """
        return len(self.waits) < ON_THE_WAY or self.waits[0].is_over()

    def _take(self, at: int) -> Tensor:
        """Return a leaf's gradient, zeros if it has none, and forget it."""
        leaf = self.leaves[at]
        self.present[at] = float(leaf.grad is not None)
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        leaf.grad = None
        return grad.detach().to(torch.bfloat16 if self.low else self.wrt[at].dtype)

    def _send(self, numbers: Sequence[Tensor] = ()) -> None:
        """Start the sum of the next bucket, with `numbers` appended."""
        bucket = self.buckets[len(self.sums)]
        if len(self.waits) == ON_THE_WAY:
            self.waits.pop(0)()  # this frees its full gradients
        parts = [self._take(at) for at in bucket]
        like = self.wrt[bucket[0]] if bucket else None
        if is_dtensor(like) and is_sharded(like):
            shards, replicas = (
                like.device_mesh[name].get_group() for name in ("shard", "replicate")
            )
            if self.are_parts:
                flat = torch.cat([part.reshape(-1) for part in parts])
                self.sums.append(flat)
                if replicas.size() > 1:
                    self.waits.append(process_group.start_sum(flat, replicas))
                return
            count = shards.size()
            flat = torch.cat([rows_by_shard(part, count) for part in parts], dim=1)
            part = flat.new_empty(flat.shape[1])
            self.sums.append(part)
            self.waits.append(
                process_group.start_scattered_sum(part, flat.reshape(-1), shards, replicas)
            )
            return
        parts += [torch.as_tensor(n).to(local(self.wrt[0])) for n in numbers]
        flat = torch.cat([part.reshape(-1) for part in parts])
        self.sums.append(flat)
        self.waits.append(process_group.start_sum(flat))

    def finish(self, logs: Logs, are_alike: bool = True) -> Vector:
        """Return the summed gradients and sum the logs.

        A gradient that is None on all replicas stays None. Unless `are_alike`, replicas may have
        other logs, or none, and learn here which there are.
        """
        while len(self.sums) < len(self.buckets) - 1:
            self._send()
        if not are_alike:  # not earlier: the others may have sent all these buckets already
            names = dict.fromkeys(itertools.chain(*process_group.gather_objects(list(logs))))
            values = dict(logs)
            logs.clear()
            logs.update({name: values.get(name, 0.0) for name in names})
        if self.buckets[-1] or logs:
            self._send(list(logs.values()))
        counts = torch.tensor(self.present)  # on the host, which reads it
        self.waits.append(process_group.start_sum(counts))
        grads: list[Tensor | None] = [None] * len(self.leaves)
        for wait in self.waits:
            wait()
        for bucket, flat in zip(self.buckets, self.sums):
            sizes = [self._size(at) for at in bucket]
            for at, piece in zip(bucket, flat[: sum(sizes)].split(sizes)):
                grads[at] = as_gradient(piece.to(self.wrt[at].dtype), self.wrt[at])
        if logs:
            logs.update(zip(logs, flat[sum(sizes) :]))
        return [g if count else None for g, count in zip(grads, counts.tolist())]

    def _size(self, at: int) -> int:
        """Return how many numbers of a summed bucket belong to a leaf."""
        wrt = self.wrt[at]
        if not is_dtensor(wrt) or not is_sharded(wrt) or self.are_parts:
            return self.leaves[at].numel()
        # Not wrt[0].numel(): to index a DTensor gathers it.
        return rows_each(wrt.shape, wrt.device_mesh["shard"].size()) * math.prod(wrt.shape[1:])


def rows_by_shard(tensor: Tensor, shards: int) -> Tensor:
    """Return a whole tensor as (shards, numbers of each), rows of zeros at the end."""
    rows = rows_each(tensor.shape, shards)
    return placement.padded(tensor, torch.Size([rows * shards, *tensor.shape[1:]]), 1).reshape(
        shards, -1
    )


def as_gradient(piece: Tensor, wrt: Tensor) -> Tensor:
    """Return a leaf's part of a summed bucket in the shape, and the placement, of its gradient."""
    if not is_dtensor(wrt):
        return piece.view_as(wrt)
    part = local(wrt)
    return like_shard(piece[: part.numel()].view_as(part), wrt)
