"""The process group, from torchrun's, Slurm's or our own environment or none, and its collectives.

Every collective goes through `name_missing_replicas`: if a replica dies or hangs, all end with a
message that names it, within the timeout plus 30 s.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from metaseq_lm.core.errors import MetaseqError, ReplicaLost, UsageError
from metaseq_lm.distributed import messages, signals
from metaseq_lm.distributed.step import STORE_FILE, Meeting, step_of

T = TypeVar("T")

GRACE = 5.0  # seconds for the surviving replicas to report why they stop
_store: dist.Store | None = None
_meeting: Meeting | None = None  # of a step's tasks; the first must keep its store until the end
_timeout = 600.0
_armed = 0.0
_axes: list[dist.ProcessGroup | None] = [None]  # axes of the grid over which hosts sum; None: all
# torch 2.13 renamed them, and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def world_size() -> int:
    """Return the number of replicas, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this replica, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


# ---------------------------------------------------------------- joining and leaving


def initialise(device: str, timeout_seconds: float = 600.0, folder: str = "") -> None:
    """Join the process group of the environment: RANK, WORLD_SIZE and the launcher's file or, as
    set by torchrun, MASTER_ADDR and MASTER_PORT.

    In a step of `srun` with several tasks they are read from Slurm, and the secret from the
    `folder` of the run. NCCL sums tensors on GPUs, gloo tensors on hosts: decisions of the hosts
    wait only for hosts, not for GPUs. Does nothing in a single process.
    """
    global _store, _timeout, _axes
    if "WORLD_SIZE" not in os.environ and "SLURM_PROCID" in os.environ:
        os.environ.update(_join_step(os.environ, folder))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or dist.is_initialized():
        return
    file = os.environ.get(STORE_FILE)
    needed = ["RANK"]
    if not file:
        needed += ["MASTER_ADDR", "MASTER_PORT"]
    missing = [n for n in needed if n not in os.environ]
    if missing:
        raise UsageError(
            f"WORLD_SIZE is {world} but {', '.join(missing)} is not set; start with --nproc {world}"
        )
    if device == "cuda":
        torch.cuda.set_device(_choose_gpu(os.environ, torch.cuda.device_count()))
    _timeout = timeout_seconds
    limit = timedelta(seconds=timeout_seconds)
    if file:
        _store, number = dist.FileStore(file), int(os.environ["RANK"])
        _store.set_timeout(limit)
    else:
        _store, number, world = next(iter(rendezvous("env://", timeout=limit)))
    group = dist.PrefixStore("group", _store)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=group, rank=number, world_size=world, timeout=limit)
    _axes = [
        dist.new_group(ranks, limit, "gloo", use_local_synchronization=True)
        for ranks in axes_through(number, world)
    ]


def axes_through(rank: int, world: int) -> list[list[int]]:
    """Return the ranks along each axis through `rank` in a grid of `world`'s prime factors."""
    axes, stride = [], 1
    while stride < world:
        rest = world // stride
        length = next(n for n in range(2, rest + 1) if not rest % n)
        first = rank - rank // stride % length * stride
        axes.append([first + step * stride for step in range(length)])
        stride *= length
    return axes


def _choose_gpu(environment: Mapping[str, str], count: int) -> int:
    """Return the index of this process's GPU among `count`.

    Raises UsageError if there are fewer GPUs than processes.
    """
    number = int(environment.get("LOCAL_RANK", "0"))
    if count == 1 and step_of(environment).local_tasks > 1:
        return 0  # with srun --gpus-per-task=1 a task sees only its own GPU
    if number >= count:
        raise UsageError(
            f"process {number} of this machine has no GPU, there are {count}; start at most "
            f"{count} processes (--nproc), or give engine.device=cpu"
        )
    return number


def _join_step(environment: Mapping[str, str], folder: str = "") -> dict[str, str]:
    """Return torchrun's variables for a task of an `srun` step, {} outside one or with one task.

    The tasks meet at the first free port; the first task holds the store.
    """
    global _meeting
    step = step_of(environment)
    if step.tasks == 1:
        return {}
    _meeting = Meeting(step, sys.argv, [], folder)
    numbers = {name: str(value) for name, value in step.variables().items()}
    return numbers | _meeting.variables()


def finish() -> None:
    """Leave the process group; only after a successful run, because it waits for all replicas."""
    faulthandler.cancel_dump_traceback_later()
    if dist.is_initialized():
        with name_missing_replicas():
            dist.barrier()
        dist.destroy_process_group()


def fail(error: MetaseqError) -> None:
    """Send the error that stops this replica to the others.

    Sets `error.is_printed` if another replica has printed it.
    """
    if world_size() == 1 or isinstance(error, ReplicaLost):
        return
    with contextlib.suppress(RuntimeError):  # the replica with the store has ended
        assert _store is not None
        error.is_printed = _store.add(f"said/{error}", 1) > 1
        _store.set(f"failed/{rank()}", str(error))


def check_peers() -> None:
    """Reset the watchdog: without a call for longer than the timeout, it prints the stack of the
    main thread and ends the process, which the other replicas notice."""
    global _armed
    if world_size() == 1:
        return
    now = time.monotonic()
    if now - _armed > min(1.0, _timeout / 10):
        faulthandler.dump_traceback_later(_timeout + 5, exit=True)
        _armed = now


def _wait(done: Callable[[], bool], seconds: float) -> bool:
    """Return whether `done` becomes true within `seconds`."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def name_missing_replicas() -> Iterator[None]:
    """Turn the failure of a collective into a ReplicaLost that names the missing replicas."""
    try:
        yield
    except RuntimeError as error:
        raise _who_is_missing(str(error)) from error


@contextlib.contextmanager
def collective_guard() -> Iterator[None]:
    """Name missing replicas in passes in which torch calls collectives between other operations."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(n in str(error) for n in ("gloo", "NCCL")):
            raise _who_is_missing(str(error)) from error
        raise


def _who_is_missing(reason: str) -> ReplicaLost:
    """Return an error that names the replicas that failed, hang or are gone."""
    faulthandler.cancel_dump_traceback_later()  # this replica does not hang
    others = [r for r in range(world_size()) if r != rank()]
    remedy = "start the run again, it resumes from the last checkpoint"
    words = {
        "hung": f"hangs (nothing heard of it for {_timeout:.0f} s)",
        "gone": "is gone (killed, or crashed)",
    }
    ending = "hung" if "Timed out" in reason else "gone"
    try:
        assert _store is not None
        store = _store
        store.set(f"waiting/{rank()}", ending)

        def reported(r: int) -> bool:
            return bool(store.check([f"waiting/{r}"]) or store.check([f"failed/{r}"]))

        _wait(lambda: all(map(reported, others)), GRACE)
        waiting = [r for r in others if store.check([f"waiting/{r}"])]
        failed = [r for r in others if store.check([f"failed/{r}"])]
        # A replica that timed out first looks to the others as if it had ended.
        if any(store.get(f"waiting/{r}") == b"hung" for r in waiting):
            ending = "hung"
        parts = [f"replica {r} failed: {store.get(f'failed/{r}').decode()}" for r in failed]
    except RuntimeError:
        return ReplicaLost(f"replica 0 {words[ending]}; {remedy}")
    # A replica that exchanges tensors with none of these may go on waiting, up to the timeout.
    if silent := [str(r) for r in others if r not in waiting + failed]:
        parts.append(f"replica {' or '.join(silent)} {words[ending]}")
    lost = ReplicaLost(f"{'; '.join(parts) or f'a collective failed ({reason})'}; {remedy}")
    # The first waiting replica prints the message; a failed replica prints its message.
    lost.is_printed = any(r < rank() for r in waiting) or len(failed) == len(parts) > 0
    return lost


# ---------------------------------------------------------------- collectives


def start_sum(flat: Tensor, group: dist.ProcessGroup | None = None) -> Callable[[], None]:
    """Start an in-place sum of a tensor over all replicas or a group; call the result to wait."""
    with name_missing_replicas():
        work = dist.all_reduce(flat, group=group, async_op=True)
    return lambda: _finish(work)


def start_sum_of_hosts(numbers: Tensor) -> Callable[[], None]:
    """Start an in-place sum of a few numbers on the hosts; call the result to wait for it."""
    # Gloo's sum goes round all processes of a group, so it takes 2 (N - 1) messages one after the
    # other. Summing along the axes of a grid in turn takes 2 (p - 1) for each prime factor p of N.
    wait = start_sum(numbers, _axes[0])

    def finish() -> None:
        wait()
        for axis in _axes[1:]:
            start_sum(numbers, axis)()

    return finish


def start_scattered_sum(part: Tensor, flat: Tensor, group: dist.ProcessGroup) -> Callable[[], None]:
    """Start summing `flat` over a group; `part` receives this replica's part of the sum.

    Call the result to wait for it.
    """
    with name_missing_replicas():
        work = _reduce_scatter(part, flat, group=group, async_op=True)
    return lambda: _finish(work)


def _finish(work: Any) -> None:
    with name_missing_replicas():
        work.wait()


def sum_within(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Sum a tensor over a group of replicas, in place."""
    with name_missing_replicas():
        dist.all_reduce(tensor, group=group)


def start_gather(gathered: Tensor, part: Tensor, group: dist.ProcessGroup) -> Callable[[], None]:
    """Start filling `gathered` with the `part` of each replica of a group, in rank order.

    Call the result to wait for it.
    """
    with name_missing_replicas():
        work = _all_gather(gathered, part, group=group, async_op=True)
    return lambda: _finish(work)


@contextlib.contextmanager
def _flattened(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield all entries of some tensors as one vector for a collective, then copy it back."""
    flat = torch.cat([t.reshape(-1) for t in tensors])
    with name_missing_replicas():
        yield flat
    for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors])):
        tensor.copy_(piece.view_as(tensor))


def sum_(tensors: Sequence[Tensor]) -> None:
    """Sum each tensor over the replicas, in place, in one collective per dtype and device."""
    if world_size() > 1:
        for kind in dict.fromkeys((t.dtype, t.device) for t in tensors):
            with _flattened([t for t in tensors if (t.dtype, t.device) == kind]) as flat:
                dist.all_reduce(flat)


def sum_of_hosts(numbers: Sequence[float]) -> list[float]:
    """Return the sums of a few numbers over the replicas."""
    if world_size() == 1:
        return list(numbers)
    total = torch.tensor(numbers, dtype=torch.float64)
    start_sum_of_hosts(total)()
    return total.tolist()


def gather_objects(value: T, classes: Sequence[type] = ()) -> list[T]:
    """Return the values of all replicas, in the order of their ranks.

    Values are as `messages.encode` takes them, with instances of the dataclasses in `classes`.
    """
    if world_size() == 1:
        return [value]
    message = torch.frombuffer(bytearray(messages.encode(value, classes)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
    with name_missing_replicas():
        dist.all_gather(sizes, torch.tensor([len(message)]))
    padded = message.new_zeros(int(max(sizes)))
    padded[: len(message)] = message
    received = [torch.empty_like(padded) for _ in sizes]
    with name_missing_replicas():
        dist.all_gather(received, padded)
    parts = [part[:size].numpy().tobytes() for part, size in zip(received, map(int, sizes))]
    return [messages.decode(part, classes) for part in parts]


def from_first(value: T) -> T:
    """Return the first replica's value on all of them; values as for `gather_objects`."""
    return gather_objects(value if rank() == 0 else None)[0]  # type: ignore[return-value]


def stop_if_signalled(progress: str) -> None:
    """Raise Interrupted if any replica received a stop signal; a collective call.

    `progress` is the state of the work, for the message.
    """
    votes = gather_objects(signals.pending_signals())
    if number := signals.agree_on_signal([sum(column) for column in zip(*votes)]):
        raise signals.make_interruption(number, progress)


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as integers; any single changed entry changes it."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().reshape(-1).view(kinds[tensor.element_size()])
    return bits.sum(dtype=torch.int64)


def check_equal(tensors: dict[str, Tensor], update: int) -> None:
    """Raise MetaseqError naming the tensors that are not bitwise equal on all replicas.

    Compares the sums of their bits; for a sharded tensor, a DTensor, the sum over all shards.
    """
    if world_size() == 1:
        return
    sums = torch.stack([_sum_of_bits(getattr(t, "_local_tensor", t)) for t in tensors.values()])
    meshes = [getattr(t, "device_mesh", None) for t in tensors.values()]
    sharded = [mesh is not None and t.dim() > 0 for mesh, t in zip(meshes, tensors.values())]
    if any(sharded):
        parts = sums[sharded]
        sum_within(parts, next(filter(None, meshes))["shard"].get_group())
        sums[sharded] = parts
    least = sums.clone()
    with name_missing_replicas():
        dist.all_reduce(sums, dist.ReduceOp.MAX)
        dist.all_reduce(least, dist.ReduceOp.MIN)
    unequal = [name for name, same in zip(tensors, (sums == least).tolist()) if not same]
    if unequal:
        names = ", ".join(unequal[:4])
        if len(unequal) > 4:
            names += " and others"
        raise MetaseqError(
            f"after update {update} the replicas no longer agree on {names}, so nothing is saved. "
            "Something in the method depends on the replica (or a machine is faulty); resume "
            "from the last checkpoint"
        )
