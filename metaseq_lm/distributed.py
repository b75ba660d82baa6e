"""The process group: from torchrun's or Slurm's environment, or none; and sums over replicas."""

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from metaseq_lm.errors import UsageError


def world_size() -> int:
    """Return the number of replicas, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this replica, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def initialise(device: str, timeout_seconds: float = 600.0) -> None:
    """Join the process group that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Under Slurm the same is read from SLURM_PROCID and SLURM_NTASKS when a master address is set.
    Gloo on CPU, NCCL on GPU. Does nothing in a single process.
    """
    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ and "MASTER_ADDR" in os.environ:
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
        os.environ.setdefault("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or dist.is_initialized():
        return
    missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if missing:
        raise UsageError(
            f"WORLD_SIZE is {world} but {', '.join(missing)} is not set; start with torchrun"
        )
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))


def finish() -> None:
    """Leave the process group, after a clean run only: leaving after an error would wait for the others."""
    if dist.is_initialized():
        dist.destroy_process_group()


def sum_(tensors: Sequence[Tensor]) -> None:
    """Sum each tensor over the replicas, in place, in one collective per dtype."""
    if world_size() == 1 or not tensors:
        return
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        same = [t for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in same])
        dist.all_reduce(flat)
        for tensor, piece in zip(same, flat.split([t.numel() for t in same])):
            tensor.copy_(piece.view_as(tensor))


def gather_objects(value: object) -> list:
    """Return the values of all replicas, in the order of their ranks."""
    if world_size() == 1:
        return [value]
    everyone: list = [None] * world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def barrier() -> None:
    """Wait until every replica is here."""
    if world_size() > 1:
        dist.barrier()
