"""Blocks that torch.compile compiles one at a time, together with sharding and recomputation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from metaseq_lm.forward.passes import (
    ForwardContext,
    TracedNoise,
    current_context,
    use_context,
)


class _CompiledForward:
    """The forward function of a block, compiled for passes that take gradients."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self.forward = forward

    def __call__(self, *inputs: Any) -> Tensor:
        context = current_context()
        counts = _get_current_dispatch_mode() is not None
        if context.double_backward or counts or not torch.is_grad_enabled():
            return self.forward(*inputs)
        noise = context.noise
        keys = None if noise is None else noise.traced_keys()
        # Blocks of equal configuration share compiled code. Their hooks, which gather shards, run
        # outside it.
        output, drawn = _compiled_block()(self.forward, inputs, keys)
        if noise is not None:
            noise.position += drawn
        return output


@functools.cache
def _compiled_block() -> Callable[..., tuple[Tensor, int]]:
    """Return `_traced_block`, compiled."""
    return torch.compile(_traced_block, fullgraph=True, dynamic=True)


def _traced_block(
    forward: Callable[..., Tensor], inputs: Sequence[Any], keys: Tensor | None
) -> tuple[Tensor, int]:
    """Return the output of a block and the number of random words that each row has drawn."""
    noise = None if keys is None else TracedNoise(keys)
    with use_context(ForwardContext(noise)):
        output = forward(*inputs)
    drawn = 0 if noise is None else noise.position
    return output, drawn


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Replace the forward functions of blocks by compiled ones."""
    for block in blocks:
        block.forward = _CompiledForward(block.forward)
