"""Sharded parameters for second derivatives: passes gather them in the graph.

Between passes a parameter is a DTensor: each process holds its rows, and only their optimizer
moments. In a pass that differentiates, the graph itself gathers the parameters it needs (see
distributed.gathering); in other passes modules hold ordinary tensors (`Bilevel.whole`).

torch's fully_shard is not used, because it silently drops second derivatives.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

from metaseq_lm.distributed.gathering import (
    ShardedWeights,
    Slots,
    UnitPool,
    active_weights,
    use_weights,
)
from metaseq_lm.distributed.placement.protocol import Placement
from metaseq_lm.distributed.reduction import Gradients, Losses, Tensors, differentiate
from metaseq_lm.distributed.shards import gather_whole, to_shard
from metaseq_lm.distributed.vectors import SHARDS, local_part, part, rows_of

Slot = tuple[nn.Module, str, nn.Parameter]  # module, name and shard of a parameter


class Bilevel(Placement):
    """The sharded parameters of a model.

    All methods are collective calls.

    Args:
        model: The model.
        mesh: Replicas and shards.
        by_block: Whether a block (see `blocks_of`) is gathered when it is called.

    Attributes:
        shards: The sharded parameters, a tied one once.
        pool: The units that passes gather: the blocks, and the direct parameters of any other
            module; unless `by_block`, all parameters are one unit.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, by_block: bool = True) -> None:
        self.slots: list[Slot] = []
        self.leaves: dict[int, nn.Parameter] = {}  # by the id of the shard, inside `whole`
        blocks = blocks_of(model) if by_block else []
        self._shard(model, mesh)
        self.shards = list({id(shard): shard for _, _, shard in self.slots}.values())
        units = self._units(blocks) if by_block else [self.shards]
        self.pool = UnitPool(units, mesh[SHARDS].get_group())

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        shards: dict[int, nn.Parameter] = {}  # a tied parameter has several slots
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in shards:
                    shard = to_shard(parameter.detach(), mesh)
                    shards[id(parameter)] = nn.Parameter(shard, parameter.requires_grad)
                self.slots.append((module, name, shards[id(parameter)]))
            if module._parameters:
                module._parameters = Slots(module._parameters)
            if isinstance(module, nn.RNNBase):
                module.register_forward_pre_hook(_read_flat_weights)
                module.register_forward_hook(_forget_flat_weights, always_call=True)
        install(self.slots, {id(shard): shard for shard in shards.values()})

    def _units(self, blocks: Iterable[nn.Module]) -> list[list[nn.Parameter]]:
        block_of = {id(m): id(block) for block in blocks for m in block.modules()}
        units: dict[int, dict[int, nn.Parameter]] = {}  # by the id of the block or module
        units_of: dict[int, int] = {}
        for module, _, shard in self.slots:  # a tied parameter belongs to its first owner
            key = units_of.setdefault(id(shard), block_of.get(id(module), id(module)))
            units.setdefault(key, {})[id(shard)] = shard
        return [list(unit.values()) for unit in units.values()]

    @property
    def is_whole(self) -> bool:  # type: ignore[override]
        return bool(self.leaves)

    def refresh(self, parameters: Iterable[Tensor]) -> None:
        stale = [p for p in parameters if id(p) in self.leaves]
        with torch.no_grad():
            for shard, tensor in zip(stale, gather_whole(stale)):
                self.leaves[id(shard)].copy_(tensor)

    @contextlib.contextmanager
    def whole(self, write: bool = False) -> Iterator[None]:
        if self.leaves:
            yield
            return
        self.leaves = leaves = {
            id(shard): nn.Parameter(tensor, shard.requires_grad)
            for shard, tensor in zip(self.shards, gather_whole(self.shards))
        }
        install(self.slots, self.leaves)
        try:
            yield
        finally:
            self.leaves = {}
            install(self.slots, {id(shard): shard for shard in self.shards})
        if write:
            with torch.no_grad():
                for shard in self.shards:
                    local_part(shard).copy_(rows_of(leaves[id(shard)], shard))

    @contextlib.contextmanager
    def in_pass(self) -> Iterator[ShardedWeights]:
        """Let modules read weights that the graph gathers inside the context.

        All replicas must run the same graph. Raises MetaseqError if they do not.
        """
        assert not self.leaves, "derivatives are not taken inside Engine.whole"
        leaves, parts = {}, {}
        for shard in self.shards:
            leaf = local_part(shard.detach()).requires_grad_(shard.requires_grad)
            leaves[id(shard)] = parts[id(shard)] = leaf
            if not shard.dim():
                parts[id(shard)] = leaf.reshape(1)[: len(part(shard))]
        weights = ShardedWeights(self.pool, parts, leaves)
        with use_weights(weights), self.pool.in_pass():
            yield weights

    def differentiate(self, losses: Losses, leaves: Tensors, wrt: Tensors, low: bool) -> Gradients:
        # The graph has its own sums, which must not interleave with these.
        return differentiate(losses, leaves, wrt, low, overlaps=False)

    def bind(self, module: nn.Module) -> Callable[..., Any]:
        numbers = [id(parameter) for parameter in module.parameters()]

        def call(values: Tensors, constants: dict[str, Tensor], *inputs: Any) -> Any:
            weights = ShardedWeights(self.pool, dict(zip(numbers, values)))
            with use_weights(*active_weights(), weights):
                return functional_call(module, constants, *inputs)

        return call


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered one at a time, inner ones after outer ones.

    These are the modules with a class that sets `is_gathered_alone`, except modules that share
    parameters or modules with others.
    """

    def uses(root: nn.Module) -> Counter[int]:
        counts: Counter[int] = Counter()
        for module in root.modules():
            counts.update(map(id, module.children()))
            counts.update(id(p) for p in module._parameters.values() if p is not None)
        return counts

    def is_apart(block: nn.Module) -> bool:
        has_axes = any(parameter.dim() for parameter in block.parameters())
        return has_axes and uses(block).items() <= everywhere.items()

    everywhere = uses(model)
    blocks = [module for module in model.modules() if getattr(module, "is_gathered_alone", False)]
    return list(filter(is_apart, blocks))


def install(slots: Iterable[Slot], parameters: dict[int, nn.Parameter]) -> None:
    """Let modules hold other parameters, given by the ids of their shards."""
    for module, name, shard in slots:
        if id(shard) in parameters:
            # Not into module._parameters: an LSTM keeps a second list of its weights.
            setattr(module, name, parameters[id(shard)])


def _read_flat_weights(module: nn.RNNBase, args: Any) -> None:
    """Give a recurrent layer the weights of this call: it computes with its own list of them."""
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def _forget_flat_weights(module: nn.RNNBase, args: Any, output: Any) -> None:
    """Reset that list to the layer's parameters between calls."""
    # `get`, unlike attribute access, gathers nothing: see Slots.
    module._flat_weights = [module._parameters.get(name) for name in module._flat_weights_names]
