"""Sharded layers, gathered one at a time in passes without second derivatives.

The leaves of a layer have memory only while the layer computes, forward or backward: when it is
called, and when the backward pass asks for a tensor that was saved of a weight. Such a tensor is
saved as its place in the layer, so that nothing else keeps the weights of all layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Slot = tuple[nn.Module, str, nn.Parameter]  # a module, the name of a parameter in it, its shard
TOGETHER = (
    2  # layers that are whole at the same time: one may still be in use when the next is asked for
)


NONE = -1  # no layer
# The layer that follows the last two, with and without gradients; NONE if that varied.
Order = dict[tuple[bool, int, int], int]


class SavedWeight:
    """A tensor saved for the backward pass: size, strides and offset in a layer's leaf."""

    def __init__(self, layer: int, leaf: Tensor, saved: Tensor) -> None:
        self.layer, self.leaf = layer, leaf.detach()
        self.view = saved.size(), saved.stride(), saved.storage_offset()


class LayersInTurn:
    """Fills the leaves of a model's layers, at most TOGETHER at a time; a context of one pass.

    While a layer computes, the one that follows is gathered, if earlier passes have shown which
    that is. All replicas must run the layers in the same order: each gather is a call of all of
    them.

    Args:
        layers: Each layer's module and the slots of its parameters.
        leaves: The leaves by the id of their shards, without memory.
        gather: Begins to gather the shards of a layer; its result waits for their whole values.
        order: The order of layers in earlier passes, which this one extends.
    """

    def __init__(
        self,
        layers: Sequence[tuple[nn.Module, list[Slot]]],
        leaves: Mapping[int, nn.Parameter],
        gather: Callable[[Sequence[Tensor], int], Callable[[], list[Tensor]]],
        order: Order,
    ) -> None:
        self.layers, self.leaves, self.gather, self.order = layers, leaves, gather, order
        self.shards: list[list[nn.Parameter]] = []
        self.storages: dict[int, tuple[int, Tensor]] = {}
        for number, (_, slots) in enumerate(layers):
            shards = list({id(shard): shard for _, _, shard in slots}.values())
            self.shards.append(shards)
            for shard in shards:
                leaf = leaves[id(shard)]
                self.storages[leaf.untyped_storage()._cdata] = (number, leaf)
        self.filled: list[int] = []
        self.recent = (torch.is_grad_enabled(), NONE, NONE)
        # The layer that is expected next, on its way.
        self.ahead: tuple[int, Callable[[], list[Tensor]]] | None = None
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> LayersInTurn:
        for number, (module, _) in enumerate(self.layers):
            before = module.register_forward_pre_hook(self._before(number))
            after = module.register_forward_hook(self._after(number), always_call=True)
            self.stack.callback(before.remove)
            self.stack.callback(after.remove)
        self.stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))
        self._look_ahead()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: Any) -> None:
        # Forgets the hooks: they refer to this object, and would keep all leaves with it.
        self.stack.close()
        self._learn(NONE)
        ahead, self.ahead = self.ahead, None
        if ahead is not None and kind is None:
            ahead[1]()  # it was not used

    def _before(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._fill(number)
            for owner, name, shard in self.layers[number][1]:
                # functional_call may have put other tensors there.
                if owner._parameters[name] is shard:
                    setattr(owner, name, self.leaves[id(shard)])

        return hook

    def _after(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for owner, name, shard in self.layers[number][1]:
                if owner._parameters[name] is self.leaves[id(shard)]:
                    setattr(owner, name, shard)

        return hook

    def _fill(self, number: int) -> None:
        """Fill the leaves of a layer, and free the memory of another layer's."""
        if number in self.filled:
            return
        self._learn(number)
        if len(self.filled) == TOGETHER:
            for shard in self.shards[self.filled.pop(0)]:
                self.leaves[id(shard)].untyped_storage().resize_(0)
        self._write(number)
        self.filled.append(number)
        self._look_ahead()

    def _write(self, number: int) -> None:
        ahead, self.ahead = self.ahead, None
        if ahead is not None and ahead[0] != number:
            ahead[1]()  # it will not be used
            ahead = None
        wait = ahead[1] if ahead is not None else self.gather(self.shards[number], number)
        for shard, value in zip(self.shards[number], wait()):
            leaf = self.leaves[id(shard)].detach()
            leaf.untyped_storage().resize_(leaf.numel() * leaf.element_size())
            leaf.copy_(value)

    def _learn(self, number: int) -> None:
        """Note which layer, or the end of the pass, comes after the last two."""
        if self.order.setdefault(self.recent, number) != number:
            self.order[self.recent] = NONE
        self.recent = (self.recent[0], self.recent[2], number)

    def _look_ahead(self) -> None:
        """Start gathering the layer that has always been next."""
        number = self.order.get(self.recent, NONE)
        if number != NONE and number not in self.filled:
            self.ahead = number, self.gather(self.shards[number], number)

    def _pack(self, tensor: Tensor) -> Tensor | SavedWeight:
        if tensor.layout != torch.strided:
            return tensor
        at = self.storages.get(tensor.untyped_storage()._cdata)
        return tensor if at is None else SavedWeight(*at, tensor)

    def _unpack(self, saved: Tensor | SavedWeight) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._fill(saved.layer)
        return saved.leaf.as_strided(*saved.view)


def without_memory(shape: torch.Size, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a tensor without allocated memory."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor
