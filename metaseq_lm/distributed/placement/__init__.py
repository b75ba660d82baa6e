"""The placement of a model's parameters over processes, a module for each."""

from __future__ import annotations

import os

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from metaseq_lm.core.errors import UsageError
from metaseq_lm.distributed import process_group
from metaseq_lm.distributed.placement.bilevel import Bilevel
from metaseq_lm.distributed.placement.protocol import Placement
from metaseq_lm.distributed.placement.replicated import Replicated
from metaseq_lm.distributed.vectors import REPLICAS, SHARDS


def build_mesh(parallel: str, device: str) -> DeviceMesh | None:
    """Return the mesh (shards,) or (replicas, shards) of engine.parallel; None without sharding.

    "shard" divides every parameter among all processes, "hybrid" among the processes of a node
    (LOCAL_WORLD_SIZE), with a replica on each node if there are several. Raises UsageError if nodes
    have different numbers of processes.
    """
    world = process_group.world_size()
    if parallel == "replicate" or world == 1:
        return None
    shards = world
    if parallel == "hybrid":
        shards = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if set(process_group.gather_objects(shards)) != {shards} or world % shards:
        raise UsageError(
            f"engine.parallel=hybrid needs as many processes on every node; there are {world} in "
            f"all and {shards} on this node"
        )
    shape = (world // shards, shards) if shards < world else (shards,)
    with process_group.name_missing_replicas():
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
    if mesh is None:
        return Replicated()
    if second_derivatives:
        return Bilevel(model, mesh, by_block)
    # Late: the import takes a second, and a run without shards does not need it.
    from metaseq_lm.distributed.placement.fully_sharded import FullySharded

    return FullySharded(model, mesh, by_block, low)
