"""All-reduces sizes and gradients over replicas; gradients in buckets during the backward pass."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Batch, Layout, Logs, to_python
from metaseq_lm.distributed import process_group, shards
from metaseq_lm.distributed.messages import all_subclasses
from metaseq_lm.distributed.vectors import (
    Vector,
    is_dtensor,
    is_sharded,
    like_shard,
    local_part,
    replicas_of,
)

Losses = Sequence[Callable[[], Tensor]]
Tensors = Sequence[Tensor]
_MOST_NUMBERS = 24  # sizes in the message that compares the replicas


@dataclass(frozen=True)
class LocalCount:
    """The summed sizes of a batch that lies in one process.

    Attributes:
        totals: Every size summed over the micro-batches, a number or (C,) per copy.
        are_alike: Whether there is a micro-batch.
    """

    totals: dict[str, Any]
    are_alike: bool
    are_equal: bool = True


class GlobalCount:
    """The sizes of a global batch, summed over all replicas.

    The constructor starts the all-reduce. The first access waits for it, and is a collective call.

    Args:
        micro_batches: How many micro-batches this replica has.
        sizes: Their sizes, summed over them.
        device: The device of sizes per copy.
        others: Further numbers to all-reduce in the same message; the same count on every replica.
    """

    def __init__(
        self,
        micro_batches: int,
        sizes: Mapping[str, Any],
        device: torch.device,
        others: Sequence[float] = (),
    ) -> None:
        self.device = device
        # Plain numbers stay on the host.
        self.sizes = {n: torch.as_tensor(sizes[n], dtype=torch.float64) for n in sorted(sizes)}
        digest = random_streams.key(*self.sizes)
        # Numbers of 20 bits, so that their squares add up exactly.
        values = [micro_batches, digest % (1 << 20), (digest >> 20) % (1 << 20)]
        mine = [*values, *(value**2 for value in values), micro_batches > 0, *others]
        self._numbers_before = len(mine)
        numbers = [float(self.sizes[n]) for n in self._sent]
        numbers += [0.0] * (_MOST_NUMBERS - len(numbers))
        self._sums = torch.tensor([*mine, *numbers], dtype=torch.float64, device="cpu")
        self._wait = process_group.start_sum_of_hosts(self._sums)

    @property
    def _sent(self) -> list[str]:
        """The names of the sizes in the message that compares the replicas."""
        numbers = [n for n, size in self.sizes.items() if not size.dim() and not size.is_cuda]
        return numbers[:_MOST_NUMBERS]

    @cached_property
    def _values(self) -> list[float]:
        self._wait()
        return self._sums.tolist()

    def _is_same(self, at: int) -> bool:
        # The variance is 0 if and only if the numbers are equal.
        total, square = self._values[at], self._values[at + 3]
        return total**2 == process_group.world_size() * square

    @property
    def are_equal(self) -> bool:
        """Whether all replicas have the same number of micro-batches."""
        return self._is_same(0)

    @property
    def are_alike(self) -> bool:
        """Whether every replica has a micro-batch, and all have sizes of the same names."""
        replicas = process_group.world_size()
        return self._values[6] == replicas and self._is_same(1) and self._is_same(2)

    @property
    def others(self) -> list[float]:
        """The sums of `others`."""
        return self._values[7 : self._numbers_before]

    @cached_property
    def totals(self) -> dict[str, Any]:
        """Every size summed over the replicas, a number or (C,) per copy."""
        if not self.are_alike:
            return _sum_of_sizes(process_group.gather_objects(to_python(self.sizes)), self.device)
        sums = dict(zip(self._sent, self._values[self._numbers_before :]))
        others = {n: size.clone() for n, size in self.sizes.items() if n not in sums}
        process_group.sum_(list(others.values()))
        totals = others | {n: torch.tensor(number).double() for n, number in sums.items()}
        return {n: totals[n] for n in self.sizes}


def _sum_of_sizes(replicas: Sequence[Mapping[str, Any]], device: torch.device) -> dict[str, Any]:
    """Return the sums of the replicas' sizes; a replica may lack some names."""
    totals: dict[str, Any] = {}
    for sizes in replicas:
        for name, size in sizes.items():
            target = device if isinstance(size, list) else "cpu"
            number = torch.tensor(size, dtype=torch.float64, device=target)
            totals[name] = totals.get(name, 0.0) + number
    return totals


def fillers_of(batches: Sequence[Batch]) -> list[Batch]:
    """Return the micro-batches that this replica lacks to the largest number on any replica.

    A replica without micro-batches receives another's. A collective call.
    """
    counts = process_group.gather_objects(len(batches))
    sender = counts.index(max(counts))
    samples = list(batches[:1])
    if min(counts) == 0:
        sent = None
        if process_group.rank() == sender:
            sent = batches[0].to("cpu")
        kinds = [*all_subclasses(Batch), Layout]
        received = process_group.gather_objects(sent, kinds)[sender]
        assert received is not None
        samples = samples or [received]
    return samples * (max(counts) - len(batches))


class Gradients:
    """The gradients of several processes.

    Attributes:
        required: Values that must be finite, or the steps of the update are refused.
    """

    def __init__(self) -> None:
        self.required: list[Tensor] = []

    def finish(self, logs: Logs, are_alike: bool = True) -> Vector:
        """Return the gradients, reset those of the leaves, and sum the logs over replicas.

        A gradient that is None on all replicas stays None. Unless `are_alike`, replicas may have
        different logs, or none, and exchange their names here.
        """
        raise NotImplementedError


class Reduction(Gradients):
    """Sums the gradients of `leaves` over the replicas.

    The last backward pass runs inside the with block, and each bucket is sent as soon as its
    gradients are computed. Buckets are filled from the last leaf to the first, the order of the
    backward pass, and are sent in that order on every replica. The last one also carries the logs
    and a flag per gradient: whether this replica has it.

    Args:
        leaves: The leaves of the graph. A leaf of a shard is the part that this process holds; its
            gradient is already summed over the shards.
        wrt: The leaves themselves, or the shards. The gradient of a shard is a shard.
        others: Further numbers to sum.
        low: Whether gradients are rounded to bfloat16 and summed in it; otherwise in the dtype of
            `wrt`.

    Attributes:
        present: Whether this replica has each gradient; after `finish`, whether any replica has.
        totals: The sums of `others`, set by `finish`.
    """

    def __init__(
        self,
        leaves: Sequence[Tensor],
        wrt: Sequence[Tensor],
        others: Sequence[float] = (),
        low: bool = False,
    ) -> None:
        super().__init__()
        self.leaves, self.wrt, self.low = leaves, wrt, low
        self.buckets = shards.group_into_buckets(reversed(range(len(wrt))), wrt)
        if not self.buckets or low or others or is_sharded(wrt[self.buckets[-1][0]]):
            self.buckets.append([])  # for the numbers, which every replica needs
        self.missing = [len(bucket) for bucket in self.buckets]
        self.present = [False] * len(leaves)
        self.others, self.totals = others, torch.zeros(0)
        self.sums: list[Tensor] = []
        self.waits: list[Callable[[], None]] = []
        self.hooks: list[Any] = []

    def __enter__(self) -> Reduction:
        # The last bucket waits for the end.
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
            while len(self.sums) < len(self.buckets) - 1 and not self.missing[len(self.sums)]:
                self._send()

        return hook

    def _take(self, at: int) -> Tensor:
        """Return a leaf's gradient, zeros if it has none, and reset it."""
        leaf = self.leaves[at]
        self.present[at] = leaf.grad is not None
        if leaf.grad is None:
            leaf.grad = torch.zeros_like(leaf)
        grad, leaf.grad = leaf.grad.detach(), None
        return grad.to(torch.bfloat16 if self.low else self.wrt[at].dtype)

    def _send(self, logs: Sequence[Tensor] | None = None) -> None:
        """Start the sum of the next bucket; the last one takes `logs` and `present` along."""
        bucket = self.buckets[len(self.sums)]
        parts = [self._take(at) for at in bucket]
        group, is_part = None, False
        if bucket and is_sharded(shard := self.wrt[bucket[0]]):
            group, is_part = replicas_of(shard), True
        if logs is not None:
            like = parts[0] if parts else self._numbers_like()
            values = (*logs, *self.others, *self.present)
            numbers = [torch.as_tensor(n).to(like).reshape(1) for n in values]
            if numbers:
                parts.append(torch.cat(numbers))
        flat = torch.zeros(0)
        if parts:
            flat = torch.cat([part.reshape(-1) for part in parts])
        self.sums.append(flat)
        if flat.numel() and (group or not is_part):
            self.waits.append(process_group.start_sum(flat, group))

    def _numbers_like(self) -> Tensor:
        device = local_part(self.wrt[0]).device if self.wrt else "cpu"
        return torch.zeros((), dtype=torch.float64, device=device)

    def finish(self, logs: Logs, are_alike: bool = True) -> Vector:
        while len(self.sums) < len(self.buckets) - 1:
            self._send()
        if not are_alike:  # not earlier: the others may have sent all these buckets already
            names = dict.fromkeys(itertools.chain(*process_group.gather_objects(list(logs))))
            values = dict(logs)
            logs.clear()
            logs.update({name: values.get(name, 0.0) for name in names})
        self._send(list(logs.values()))
        for wait in self.waits:
            wait()
        grads: list[Tensor | None] = [None] * len(self.leaves)
        for bucket, flat in zip(self.buckets, self.sums):
            sizes = [self.leaves[at].numel() for at in bucket]
            for at, piece in zip(bucket, flat[: sum(sizes)].split(sizes)):
                wrt = self.wrt[at]
                grad = piece.to(wrt.dtype).view_as(local_part(wrt))
                grads[at] = like_shard(grad, wrt) if is_dtensor(wrt) else grad
        numbers = flat[sum(sizes) :]
        logs.update(zip(logs, numbers))
        self.totals, counts = numbers[len(logs) :].split([len(self.others), len(self.leaves)])
        if not all(self.present):  # otherwise a GPU need not be waited for
            self.present = [count > 0 for count in counts.tolist()]
        return [grad if present else None for grad, present in zip(grads, self.present)]


def differentiate(
    losses: Losses, leaves: Tensors, wrt: Tensors, low: bool, overlaps: bool
) -> Gradients:
    """Run each loss forward and backward; if it `overlaps`, the sum starts in the last one."""
    sums = Reduction(leaves, wrt, low=low)
    for number, loss in enumerate(losses):
        mean = loss()
        is_last = overlaps and number == len(losses) - 1
        if mean.requires_grad:
            with sums if is_last else contextlib.nullcontext():
                mean.backward(inputs=leaves)
    return sums
