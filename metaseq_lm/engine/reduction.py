"""Sums of gradients over replicas, in buckets that are sent during the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from metaseq_lm.core.batch import Logs
from metaseq_lm.distributed import process_group
from metaseq_lm.engine.vectors import Vector

BUCKET_BYTES = 25 << 20  # of one message; a smaller model has a single one, sent at the end


class Reduction:
    """Sums the gradients of `leaves` over the replicas.

    The last backward pass runs inside the with block, and each bucket is sent as soon as its gradients
    are computed. Buckets are filled from the last leaf to the first, the order of the backward pass,
    and are sent in that order on every replica.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self.leaves = leaves
        self.buckets = cut(leaves)
        self.missing = [len(bucket) for bucket in self.buckets]
        self.present = [0.0] * len(leaves)
        self.sent: list[tuple[Tensor, Callable[[], None]]] = []
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
            while not self.missing[len(self.sent)] and len(self.sent) < len(self.buckets) - 1:
                self._send()

        return hook

    def _send(self, numbers: Sequence[Tensor] = ()) -> None:
        """Start the sum of the next bucket, with `numbers` appended."""
        parts = []
        for at in self.buckets[len(self.sent)]:
            leaf = self.leaves[at]
            self.present[at] = float(leaf.grad is not None)
            parts.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            leaf.grad = None
        parts += [torch.as_tensor(n).to(parts[0]) for n in numbers]
        flat = torch.cat([part.detach().reshape(-1) for part in parts])
        self.sent.append((flat, process_group.start_sum(flat)))

    def finish(self, logs: Logs) -> Vector:
        """Return the summed gradients and sum the logs; a gradient that is None on all replicas stays None."""
        while len(self.sent) < len(self.buckets) - 1:
            self._send()
        for at in self.buckets[-1]:
            self.present[at] = float(self.leaves[at].grad is not None)
        self._send([torch.tensor(self.present), *logs.values()])
        grads: list[Tensor | None] = [None] * len(self.leaves)
        for bucket, (flat, wait) in zip(self.buckets, self.sent):
            wait()
            sizes = [self.leaves[at].numel() for at in bucket]
            for at, piece in zip(bucket, flat[: sum(sizes)].split(sizes)):
                grads[at] = piece.view_as(self.leaves[at])
        counts, sums = flat[sum(sizes) :].split([len(self.leaves), len(logs)])
        logs.update(zip(logs, sums))
        return [g if count else None for g, count in zip(grads, counts.tolist())]


def cut(leaves: Sequence[Tensor]) -> list[list[int]]:
    """Return the numbers of the leaves in each bucket, from the last leaf to the first."""
    buckets: list[list[int]] = []
    filled = 0
    for at in reversed(range(len(leaves))):
        leaf = leaves[at]
        if not buckets or filled >= BUCKET_BYTES or leaf.dtype != leaves[buckets[-1][0]].dtype:
            buckets.append([])
            filled = 0
        buckets[-1].append(at)
        filled += leaf.numel() * leaf.element_size()
    return buckets
