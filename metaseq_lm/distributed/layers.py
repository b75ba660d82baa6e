"""Layer-by-layer gathering of sharded parameters, for passes without second derivatives.

The full parameters (leaves) of a layer are allocated only while the layer computes: when it is
called in the forward pass, and when the backward pass unpacks a saved tensor that is a view of one
of its weights. Such a tensor is saved as a description of the view (`SavedWeight`), so that the
autograd graph does not keep the weights of all layers in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Slot = tuple[nn.Module, str, nn.Parameter]  # (module, parameter name, shard)
# Layers that are gathered at the same time: one may still be in use when the next is requested.
MAX_GATHERED = 2
NO_LAYER = -1
# Maps (grad enabled, last layer but one, last layer) to the next layer; NO_LAYER if it varied.
Order = dict[tuple[bool, int, int], int]


class SavedWeight:
    """A tensor saved for the backward pass, as size, strides and offset of a view of a leaf."""

    def __init__(self, layer: int, leaf: Tensor, saved: Tensor) -> None:
        self.layer, self.leaf = layer, leaf.detach()
        self.view = saved.size(), saved.stride(), saved.storage_offset()


class LayerwiseGather:
    """Context manager of one pass that gathers the parameters of at most MAX_GATHERED layers.

    While a layer computes, the next one is prefetched if earlier passes have shown which it is. All
    replicas must run the layers in the same order, because each gather is a collective operation.

    Args:
        layers: Each layer's module and the slots of its parameters.
        leaves: The full parameters, without allocated storage, by the id of their shards.
        gather: Starts gathering the shards of a layer; the function that it returns waits for the
            full values.
        order: The order of layers in earlier passes; updated in place.
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
        self.gathered: list[int] = []
        # (grad enabled, last layer but one, last layer), a key of `order`.
        self.history = (torch.is_grad_enabled(), NO_LAYER, NO_LAYER)
        # The layer that is expected next, and the function that waits for its values.
        self.prefetched: tuple[int, Callable[[], list[Tensor]]] | None = None
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> LayerwiseGather:
        for number, (module, _) in enumerate(self.layers):
            before = module.register_forward_pre_hook(self._make_pre_hook(number))
            after = module.register_forward_hook(self._make_post_hook(number), always_call=True)
            self.stack.callback(before.remove)
            self.stack.callback(after.remove)
        self.stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))
        self._prefetch()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: Any) -> None:
        # Remove the hooks: they refer to this object and would keep all leaves alive.
        self.stack.close()
        self._record_order(NO_LAYER)
        prefetched, self.prefetched = self.prefetched, None
        if prefetched is not None and kind is None:
            prefetched[1]()  # finish the unused gather

    def _make_pre_hook(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._ensure_gathered(number)
            for owner, name, shard in self.layers[number][1]:
                # functional_call may have put other tensors there.
                if owner._parameters[name] is shard:
                    setattr(owner, name, self.leaves[id(shard)])

        return hook

    def _make_post_hook(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for owner, name, shard in self.layers[number][1]:
                if owner._parameters[name] is self.leaves[id(shard)]:
                    setattr(owner, name, shard)

        return hook

    def _ensure_gathered(self, number: int) -> None:
        """Gather the leaves of a layer, freeing those of the oldest layer if there are too many."""
        if number in self.gathered:
            return
        self._record_order(number)
        if len(self.gathered) == MAX_GATHERED:
            for shard in self.shards[self.gathered.pop(0)]:
                self.leaves[id(shard)].untyped_storage().resize_(0)
        self._copy_gathered(number)
        self.gathered.append(number)
        self._prefetch()

    def _copy_gathered(self, number: int) -> None:
        prefetched, self.prefetched = self.prefetched, None
        if prefetched is not None and prefetched[0] != number:
            prefetched[1]()  # finish the unused gather
            prefetched = None
        wait = prefetched[1] if prefetched is not None else self.gather(self.shards[number], number)
        for shard, value in zip(self.shards[number], wait()):
            leaf = self.leaves[id(shard)].detach()
            leaf.untyped_storage().resize_(leaf.numel() * leaf.element_size())
            leaf.copy_(value)

    def _record_order(self, number: int) -> None:
        """Record that layer `number` (NO_LAYER for the end of the pass) follows the last two."""
        if self.order.setdefault(self.history, number) != number:
            self.order[self.history] = NO_LAYER
        self.history = (self.history[0], self.history[2], number)

    def _prefetch(self) -> None:
        """Start gathering the layer that has always followed the last two."""
        number = self.order.get(self.history, NO_LAYER)
        if number != NO_LAYER and number not in self.gathered:
            self.prefetched = number, self.gather(self.shards[number], number)

    def _pack(self, tensor: Tensor) -> Tensor | SavedWeight:
        if tensor.layout != torch.strided:
            return tensor
        layer_and_leaf = self.storages.get(tensor.untyped_storage()._cdata)
        return tensor if layer_and_leaf is None else SavedWeight(*layer_and_leaf, tensor)

    def _unpack(self, saved: Tensor | SavedWeight) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._ensure_gathered(saved.layer)
        return saved.leaf.as_strided(*saved.view)


def empty_without_storage(shape: torch.Size, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the given shape whose storage has size 0."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor
