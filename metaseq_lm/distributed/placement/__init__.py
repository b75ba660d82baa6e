"""The placement of a model's parameters over processes: a protocol, one module for each.

Callers ask the placement; none tests which one it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from metaseq_lm.core.errors import UsageError
from metaseq_lm.distributed import process_group
from metaseq_lm.distributed.vectors import REPLICAS, SHARDS

if TYPE_CHECKING:
    from metaseq_lm.distributed.gathering import ShardedWeights
    from metaseq_lm.distributed.reduction import Gradients, Losses, Tensors

T = TypeVar("T")


class Placement:
    """Where the parameters of a model are, and how passes get them.

    The defaults are for full parameters in every process. All methods are collective calls if the
    placement gathers.

    Attributes:
        gathers: Whether each process holds a part of the parameters, and passes gather them. All
            processes then run the same number of micro-batches.
        has_second_derivatives: Whether gradients can be differentiated.
        is_whole: Whether every process holds full parameters now.
    """

    gathers: bool = True
    has_second_derivatives: bool = True
    is_whole: bool = True

    def prepare(self) -> None:
        """Complete the placement once all parameters have memory."""

    def refresh(self, parameters: Iterable[Tensor]) -> None:
        """Copy changed parameters to the full ones, if inside `whole`."""

    def whole(self, write: bool = False) -> AbstractContextManager[None]:
        """Gather full parameters inside the context; `write` copies changes back."""
        return nullcontext()

    def in_pass(self) -> AbstractContextManager[ShardedWeights | None]:
        """Prepare passes that gather parameters where they are used.

        Yields the weights if the graph gathers them, and so has leaves of its own.
        """
        return nullcontext()

    def call(self, function: Callable[[], T]) -> T:
        """Return function(), which runs the model, inside `in_pass` or `whole`."""
        return function()

    def take_calls(self) -> list[int]:
        """Return the numbers of the blocks gathered since the last call, to be compared."""
        return []

    def differentiate(self, losses: Losses, leaves: Tensors, wrt: Tensors, low: bool) -> Gradients:
        """Run each loss forward and backward inside `in_pass`, and start to sum the gradients.

        Args:
            losses: This process's parts of a global loss.
            leaves: The leaves of their graphs.
            wrt: The parameters for these leaves.
            low: Whether gradients may be summed in bfloat16.
        """
        raise NotImplementedError

    def bind(self, module: nn.Module) -> Callable[..., Any]:
        """Return a differentiable call of a module with other values of its parameters.

        It takes the values of this process, in the order of `module.parameters()`, constants by
        name, a tuple of arguments and a dictionary of keywords.
        """
        raise NotImplementedError


def build_mesh(parallel: str, device: str) -> DeviceMesh | None:
    """Return the mesh (shards,) or (replicas, shards) of engine.parallel; None without sharding.

    "shard" divides every parameter among all processes, "hybrid" among the processes of a node
    (LOCAL_WORLD_SIZE), with a replica on each node if there are several. Raises UsageError if nodes
    have different numbers of processes.
    """
    world = process_group.world_size()
    if parallel == "replicate" or world == 1:
        return None
    shards = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if parallel == "hybrid" else world
    if set(process_group.gather_objects(shards)) != {shards} or world % shards:
        raise UsageError(
            f"engine.parallel=hybrid needs as many processes on every node; there are {world} in "
            f"all and {shards} on this node"
        )
    shape = (world // shards, shards) if shards < world else (shards,)
    with process_group.together():
        return init_device_mesh(device, shape, mesh_dim_names=(REPLICAS, SHARDS)[-len(shape) :])


def build_placement(
    model: nn.Module,
    mesh: DeviceMesh | None,
    by_block: bool = True,
    second_derivatives: bool = False,
    low: bool = False,
) -> Placement:
    """Place a model's parameters on a mesh.

    Args:
        model: The model; the caller gives memory to parameters on the meta device before
            `Placement.prepare`.
        mesh: Replicas and shards; None if every process holds all parameters.
        by_block: Whether to gather modules with a class that sets `is_gathered_alone` one at a
            time; otherwise all parameters together.
        second_derivatives: Whether they are taken.
        low: Whether gradients are rounded to bfloat16 and summed in it; without effect if second
            derivatives are taken.
    """
    # Late: fully_shard takes a second to import, and a run without shards does not need it.
    if mesh is None:
        from metaseq_lm.distributed.placement.replicated import Replicated

        return Replicated()
    if second_derivatives:
        from metaseq_lm.distributed.placement.bilevel import Bilevel

        return Bilevel(model, mesh, by_block)
    from metaseq_lm.distributed.placement.fully_sharded import FullySharded

    return FullySharded(model, mesh, by_block, low)
