"""Sharded parameters for first derivatives: torch's fully_shard.

It silently drops second derivatives, gives no gradients to autograd.grad or backward(inputs=), and
gathers only for calls of the modules that it was applied to. So every pass is the forward pass of
our own outermost module (`_Outermost`), and gradients are read from the shards.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Logs
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.distributed import process_group
from metaseq_lm.distributed.placement.bilevel import Slot, blocks_of, install
from metaseq_lm.distributed.placement.protocol import Placement
from metaseq_lm.distributed.reduction import Gradients, Losses, Reduction, Tensors
from metaseq_lm.distributed.shards import OTHER_ORDER, gather_whole, to_shard
from metaseq_lm.distributed.vectors import REPLICAS, SHARDS, Vector, is_dtensor, local_part, rows_of

T = TypeVar("T")
# Nothing that follows an LSTM changes its output in place.
warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(FSDPLSTM\) returned a view")


class _Outermost(nn.Module):
    """Runs a function as the forward pass of the whole model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], T]) -> T:
        return function()


class FullySharded(Placement):
    """The parameters of a model that fully_shard has sharded.

    All methods are collective calls. Replicas must call the same blocks in the same order, except
    inside `whole`.

    Args:
        model: The model; parameters on the meta device get memory before `prepare`.
        mesh: Replicas and shards. fully_shard only gets the shards, because its sum over replicas
            would block the backward pass on a CPU.
        by_block: Whether each block (see `blocks_of`) is gathered when it is called; otherwise
            everything is gathered together.
        low: Whether gradients are rounded to bfloat16 and summed in it.

    Attributes:
        shards: The sharded parameters, a tied one once.
        full: The full parameters gathered so far, by the ids of the shards. They have memory only
            while they are gathered.
        present: The ids of the shards that the losses of this pass have depended on so far.
        calls: The numbers of the blocks that were gathered since `take_calls`.
    """

    has_second_derivatives = False

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, by_block: bool = True, low: bool = False
    ) -> None:
        self.model, self.mesh = model, mesh[SHARDS]
        self.outermost = _Outermost(model)
        numbers = {p for p in model.parameters() if not p.dim()}  # fully_shard refuses them
        reduce_dtype = torch.bfloat16 if low else None
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        shard = partial(fully_shard, mesh=self.mesh, mp_policy=policy, ignored_params=numbers)
        self.blocks = blocks_of(model) if by_block else []
        for block in reversed(self.blocks):
            shard(block, reshard_after_forward=True)
        shard(self.outermost, reshard_after_forward=False)
        for unit in self.units:  # the outermost unit does not pass the setting on to inner ones
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        self._summed: list[int] = []  # numbers of units, in this backward pass
        self._waits: list[Callable[[], None]] = []  # for sums that are on their way
        if mesh.ndim > 1:
            replicas = mesh[REPLICAS].get_group()
            for number, unit in enumerate(self.units):
                unit.set_all_reduce_hook(partial(self._start_sum, replicas, number, low))
        # Replicas may use different heads, but must send the same number of gradients.
        self._fills_in = not hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # torch < 2.13
        if not self._fills_in:
            self.units[0].set_reduce_scatter_unused_params(True)
        self.slots: list[Slot] = []
        self.shards: list[nn.Parameter] = []
        self.full: dict[int, nn.Parameter] = {}
        self.outer: list[int] = []  # the ids of the shards outside the blocks
        self.present: set[int] = set()
        self.is_attached = False
        self.calls: list[int] = []
        self._noted: set[int] = set()  # blocks whose full parameters are known
        for number, block in enumerate(self.blocks):
            block.register_forward_pre_hook(partial(self._note_call, number))
        self.is_whole = False
        if not any(parameter.is_meta for parameter in model.parameters()):
            self.prepare()

    @property
    def units(self) -> list[FSDPModule]:
        """The modules that gather their parameters, the outermost first."""
        return [cast(FSDPModule, module) for module in (self.outermost, *self.blocks)]

    def prepare(self) -> None:
        if self.slots:
            return
        self._shard_numbers()
        for module in self.model.modules():
            for name, shard in module.named_parameters(recurse=False):
                self.slots.append((module, name, shard))
        self.shards = list({id(shard): shard for _, _, shard in self.slots}.values())
        with torch.no_grad():
            # fully_shard takes the first module that is called as the outermost one.
            self.outermost(self._note_gathered)
        self.units[0].reshard()
        self.outer = [id(shard) for shard in self.shards if shard.dim() and id(shard) in self.full]

    def _shard_numbers(self) -> None:
        """Give parameters without axes, which every process holds, a placement like the others."""
        numbers: dict[int, nn.Parameter] = {}
        for module in self.model.modules():
            for name, number in list(module.named_parameters(recurse=False)):
                if not is_dtensor(number):
                    if id(number) not in numbers:
                        shard = to_shard(number.detach(), self.mesh)
                        numbers[id(number)] = nn.Parameter(shard, number.requires_grad)
                        self._note(numbers[id(number)], nn.Parameter(local_part(shard)))
                    setattr(module, name, numbers[id(number)])

    def _note_gathered(self, block: nn.Module | None = None) -> None:
        """Record the full parameters that are gathered now, of a block or of all modules."""
        inside = None if block is None else set(map(id, block.modules()))
        for module, name, shard in self.slots:
            if inside is None or id(module) in inside:
                full = module._parameters[name]
                if full is not None and not is_dtensor(full):
                    self._note(shard, full)

    def _note(self, shard: nn.Parameter, full: nn.Parameter) -> None:
        """Record the full parameter of a shard, and from now on whether losses depend on it."""
        number = id(shard)
        if number not in self.full:
            self.full[number] = full
            full.requires_grad_().register_post_accumulate_grad_hook(
                lambda _: self.present.add(number)
            )
            full.requires_grad_(shard.requires_grad)

    def _note_call(self, number: int, block: nn.Module, *_: object) -> None:
        if not self.is_whole:
            self.calls.append(number)
        if number not in self._noted:
            self._noted.add(number)
            self._note_gathered(block)

    def take_calls(self) -> list[int]:
        """Return the blocks gathered since the last call, for replicas to compare."""
        # Blocks of equal shapes that are called in different orders would be mixed silently.
        calls, self.calls = self.calls, []
        return calls

    def refresh(self, parameters: Iterable[Tensor]) -> None:
        stale = [p for p in parameters if self.is_whole and id(p) in self.full]
        with torch.no_grad():
            for shard, tensor in zip(stale, gather_whole(stale)):
                self.full[id(shard)].copy_(tensor)

    @contextlib.contextmanager
    def whole(self, write: bool = False) -> Iterator[None]:
        """Gather full parameters inside the context; `write` copies changes back to the shards.

        Inside, calls of modules gather nothing.
        """
        if self.is_whole:
            yield
            return
        with self._numbers():
            try:
                self._keep(True)
                self._note_gathered()
                yield
                if write:
                    with torch.no_grad():
                        for shard in self.shards:
                            local_part(shard).copy_(rows_of(self.full[id(shard)], shard))
            finally:
                self._keep(False)

    def _keep(self, is_whole: bool) -> None:
        self.is_whole = is_whole
        for unit in self.units:
            unit.set_reshard_after_backward(not is_whole, recurse=False)
            if unit is not self.units[0]:
                unit.set_reshard_after_forward(not is_whole, recurse=False)
            with process_group.collective_guard():
                if is_whole:
                    unit.unshard()
                else:
                    unit.reshard()

    @contextlib.contextmanager
    def _numbers(self) -> Iterator[None]:
        """Let modules hold the full parameters without axes inside the context."""
        numbers = [shard for shard in self.shards if not shard.dim()]
        install(self.slots, {id(shard): self.full[id(shard)] for shard in numbers})
        try:
            yield
        finally:
            install(self.slots, {id(shard): shard for shard in numbers})

    @contextlib.contextmanager
    def in_pass(self) -> Iterator[None]:
        """Prepare passes, inside `call`, in which blocks are gathered when they are called."""
        if self.is_whole:
            yield
            return
        self._forget_order()
        with self._numbers():
            try:
                yield
            finally:
                self.units[0].reshard()

    def _forget_order(self) -> None:
        # A backward pass prefetches in the order of all forward passes since the last one. These
        # include passes inside `whole`, which may differ in number between replicas.
        if hasattr(FSDPModule, "reset_iter_state"):
            self.units[0].reset_iter_state()
            return
        for unit in self.units:  # torch < 2.13
            state = unit._get_fsdp_state()
            state._comm_ctx.post_forward_order.clear()
            if state._fsdp_param_group is not None:
                state._fsdp_param_group._post_forward_indices.clear()

    def call(self, function: Callable[[], T]) -> T:
        if self.is_whole:
            return function()
        return self._call(function)

    def _call(self, function: Callable[[], T]) -> T:
        """Return function(), a forward pass of the outermost module.

        Raises MetaseqError if a gradient inside it has released parameters.
        """
        try:
            with process_group.collective_guard():
                result: T = self.outermost(function)
        except RuntimeError as error:
            if "DTensor" in str(error):
                raise MetaseqError(
                    "a loss that contains a gradient needs all parameters at once; start with "
                    "engine.gather=model, and set `differentiates` of the criterion"
                ) from error
            raise
        return result

    def differentiate(self, losses: Losses, leaves: Tensors, wrt: Tensors, low: bool) -> Gradients:
        with self._differentiating(wrt):
            for number, loss in enumerate(losses):
                mean = self._call(partial(self._attached, loss))
                self._backward(mean, number == len(losses) - 1)
        return _FullyShardedGradients(self, wrt)

    @contextlib.contextmanager
    def _differentiating(self, wrt: Sequence[Tensor]) -> Iterator[None]:
        """Let only the shards in `wrt` require gradients inside the context."""
        self.present.clear()
        chosen = set(map(id, wrt))
        others = [s for s in self.shards if s.requires_grad and id(s) not in chosen]
        self._require_gradients(others, False)
        try:
            yield
        finally:
            self._require_gradients(others, True)

    def _require_gradients(self, shards: Sequence[nn.Parameter], required: bool) -> None:
        for shard in shards:
            shard.requires_grad_(required)
        for shard in self.shards:
            if id(shard) in self.full:
                self.full[id(shard)].requires_grad_(shard.requires_grad)

    def _attached(self, function: Callable[[], Tensor]) -> Tensor:
        """Return function(), a loss, with a graph, so that all replicas can run it backward."""
        loss = function()
        self.is_attached = not loss.requires_grad
        root = [self.full[number] for number in self.outer if self.full[number].requires_grad]
        if root and self.is_attached:
            return loss + 0.0 * root[0].sum()
        return loss

    def _backward(self, loss: Tensor, is_last: bool) -> None:
        """Accumulate the gradients of a loss; sum them at the last one of a global batch."""
        self.units[0].set_is_last_backward(is_last)
        self.units[0].set_requires_gradient_sync(is_last)
        # Parameters outside the blocks are not gathered again for each micro-batch.
        self.units[0].set_reshard_after_backward(is_last and not self.is_whole, recurse=False)
        present = set(self.present)
        if self._fills_in and is_last:
            for full in self.full.values():
                if full.requires_grad and full.dim() and full.grad is None:
                    full.grad = torch.zeros_like(full)
        if loss.requires_grad:
            with process_group.collective_guard():
                loss.backward()
            self._finish_sums()
            self._summed.clear()
        if self.is_attached:
            self.present = present

    def _start_sum(self, replicas: dist.ProcessGroup, number: int, low: bool, part: Tensor) -> None:
        """Start summing a unit's gradients, which will be views of `part`, over the replicas."""
        self._waits.append(process_group.start_sum(part, replicas))
        # A rounded part is copied next; a part from another call of the unit is added to.
        if low or number in self._summed:
            self._finish_sums()
        self._summed.append(number)

    def _finish_sums(self) -> None:
        for wait in self._waits:
            wait()
        self._waits.clear()

    def take_gradients(self, wrt: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the summed gradients of some shards, and reset the gradients of all."""
        grads = [shard.grad for shard in wrt]
        for shard in self.shards:
            shard.grad = None
        return grads


class _FullyShardedGradients(Gradients):
    """Gradients that fully_shard has summed; flags and the order of blocks are still compared."""

    def __init__(self, placement: FullySharded, wrt: Sequence[Tensor]) -> None:
        super().__init__()
        self.placement, self.wrt = placement, wrt

    def finish(self, logs: Logs, are_alike: bool = True) -> Vector:
        placement = self.placement
        numbers = [parameter for parameter in self.wrt if not parameter.dim()]
        sharded = [parameter for parameter in self.wrt if parameter.dim()]
        present: Sequence[float] = [id(parameter) in placement.present for parameter in self.wrt]
        # A number of 20 bits, so that squares add up exactly.
        order = random_streams.key(*placement.take_calls()) % (1 << 20)
        leaves = [placement.full[id(number)] for number in numbers]
        sums = Reduction(leaves, numbers, [order, order**2, *present])
        grads = dict(zip(map(id, numbers), sums.finish(logs, are_alike)))
        grads |= zip(map(id, sharded), placement.take_gradients(sharded))
        total, square = sums.totals[:2]
        # The variance is 0 if and only if the numbers are equal.
        agree = total**2 == process_group.world_size() * square
        if agree.is_cuda:  # so that the host does not wait for it
            self.required.append(torch.where(agree, 0.0, float("nan")))
        elif not agree:
            raise MetaseqError(OTHER_ORDER)
        if not all(present):  # otherwise a GPU need not be waited for
            present = sums.totals[2:].tolist()
        return [grads[id(p)] if has_it else None for p, has_it in zip(self.wrt, present)]
