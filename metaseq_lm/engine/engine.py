"""The arithmetic of an update, exact under gradient accumulation and over replicas.

The Engine is final: nothing subclasses it. A batch is a list of micro-batches, this replica's part
of the global batch; it may be empty. Each method divides a term by its size summed over all
micro-batches and replicas, so that any way to cut the batch gives the same result, up to the order
of summation.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from metaseq_lm.core.batch import Batch, Logs, to_python
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.distributed import process_group, vectors
from metaseq_lm.distributed.placement.protocol import Placement
from metaseq_lm.distributed.placement.replicated import Replicated
from metaseq_lm.distributed.reduction import (
    GlobalCount,
    Gradients,
    LocalCount,
    Reduction,
    fillers_of,
)
from metaseq_lm.distributed.shards import OTHER_ORDER
from metaseq_lm.distributed.vectors import Vector
from metaseq_lm.forward.passes import (
    ForwardPass,
    ForwardPasses,
    LossFn,
    RngKey,
    average_terms,
    check_terms,
)
from metaseq_lm.optim import Optimizer

__all__ = ["Engine"]

T = TypeVar("T")
B = TypeVar("B", bound=Batch)

PRECISIONS = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class _GlobalLoss:
    """The mean loss of a global batch, as a function of the parameters.

    Attributes:
        loss_fn: Returns the terms of a micro-batch.
        batches: This replica's micro-batches; there may be none.
        rng_key: Key of the random numbers of its passes.
        count: The sizes of the global batch.
        fillers: How many of the last micro-batches have weight 0: they only give all processes the
            same number.
    """

    loss_fn: LossFn
    batches: list[Batch]
    rng_key: RngKey
    count: GlobalCount | LocalCount
    fillers: int = 0

    def mean(self, forward: ForwardPass, number: int, logs: Logs) -> Tensor:
        """Return a micro-batch's part of the loss, and add its terms to `logs`."""
        batch, totals = self.batches[number], self.count.totals
        if number >= len(self.batches) - self.fillers:
            return forward.mean_loss(self.loss_fn, batch, totals, {}) * 0.0
        return forward.mean_loss(self.loss_fn, batch, totals, logs)


@dataclass(eq=False)
class InnerGradient:
    """A gradient that can itself be differentiated; made by `Engine.inner`.

    Without `replay` it belongs to the parameter values at which it was computed.

    Attributes:
        value: The gradient, in the order of `wrt`.
        logs: Means of the terms of the loss.
        loss: The loss, from which the graph can be built again.
        wrt: The leaves that it was differentiated with respect to.
        graph: This process's part of the gradient with its graph, if there is one micro-batch;
            freed by its first use, and by the first change of a parameter.
        forward: The pass that built the graph.
        origin: This process's part of the optimizers' former parameters, if they have changed.
    """

    value: Vector
    logs: Logs
    loss: _GlobalLoss
    wrt: Sequence[Tensor]
    graph: list[Tensor | None] | None = field(default=None, repr=False)
    forward: ForwardPass | None = field(default=None, repr=False)
    origin: list[Tensor] | None = field(default=None, repr=False)


class _FiniteCheck:
    """Refuses the steps of an update in which a loss, a gradient or a required value is not finite.

    Attributes:
        defers: Whether the device itself skips such a step, and `skipped` says so later.
        refused: Names of the optimizers with steps that the host has refused in this update.
        gradient: Name of their first parameter with a gradient that was not finite here.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.defers = False
        self.refused: list[str] = []
        self.gradient = ""
        self._update = 0
        self._sum: Any = 0.0  # of all values that must be finite in this update
        # This replica's part of the losses, by update, until the host knows whether it is finite.
        self._local_losses: dict[int, Any] = {}
        # Numbers of steps that the device skipped, by update and optimizer, until the host looks.
        self._found_inf: dict[int, dict[str, Tensor]] = {}

    def begin(self, update: int) -> None:
        self._update, self._sum = update, 0.0
        self.refused, self.gradient = [], ""
        if self.defers:
            self._local_losses.pop(update, None)  # from before a rollback
        else:
            self._local_losses.clear()

    def require(self, values: Tensor) -> None:
        """Refuse the update's further steps unless all values are finite.

        They must be equal on all replicas.
        """
        self._sum = self._sum + values.detach().double().sum()

    def add_loss(self, loss: Any) -> None:
        """Require a finite loss of the global batch."""
        self._sum = self._sum + loss

    def add_local_loss(self, loss: Any) -> None:
        """Note this replica's part of a loss, for `nonfinite_replicas`."""
        known = self._local_losses.get(self._update, 0.0)
        self._local_losses[self._update] = known + torch.as_tensor(loss)

    def refuses(self, name: str, norm: Tensor) -> bool:
        """Return whether the host refuses a step with this gradient norm; with `defers` never."""
        if self.defers or torch.isfinite(norm + self._sum):
            return False
        self.refused.append(name)
        return True

    def found_inf(self, name: str, norm: Tensor) -> Tensor | None:
        """Return 1.0 if this update is not finite up to this norm, else 0.0; None without `defers`.

        `skipped` reports it.
        """
        if not self.defers:
            return None
        self._sum = self._sum + norm  # the update's later steps are skipped as well
        found_inf = (~torch.isfinite(self._sum)).float()
        skipped = self._found_inf.setdefault(self._update, {})
        skipped[name] = skipped[name] + found_inf if name in skipped else found_inf
        return found_inf

    def skips(self) -> Tensor:
        """Return whether the device has skipped a step of this update, a boolean scalar."""
        counts = list(self._found_inf.get(self._update, {}).values())
        return torch.stack([torch.zeros((), device=self.device), *counts]).any()

    def skipped(self) -> dict[int, list[str]]:
        """Return the updates in which the device skipped steps, with their optimizers' names.

        Waits for the device. Each skipped step is returned once.
        """
        names: list[tuple[int, str]] = []
        counts: list[Tensor] = []
        for update, count_of in self._found_inf.items():
            names += [(update, name) for name in count_of]
            counts += count_of.values()
        self._found_inf = {}
        skipped: dict[int, list[str]] = {}
        if counts:
            for (update, name), count in zip(names, torch.stack(counts).tolist()):
                if count:
                    skipped.setdefault(update, []).extend([name] * int(count))
        self._local_losses = {u: loss for u, loss in self._local_losses.items() if u in skipped}
        return skipped

    def nonfinite_replicas(self, update: int) -> list[int]:
        """Return the replicas with a part of an update's losses that was not finite.

        A collective call. The update is the last one, or with `defers` one that `skipped` has
        just returned.
        """
        loss = self._local_losses.pop(update, torch.zeros(()))
        are_finite = process_group.gather_objects(bool(torch.isfinite(loss)))
        return [replica for replica, is_finite in enumerate(are_finite) if not is_finite]


class _Weights:
    """This process's part of the optimizers' parameters.

    Inner gradients of the current values store these before they change.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer], placement: Placement) -> None:
        self.optimizers, self.placement = optimizers, placement
        self._inner: weakref.WeakSet[InnerGradient] = weakref.WeakSet()

    def add_(self, parameters: Sequence[Tensor], vector: Vector, scale: float) -> None:
        """Add scale * vector to some parameters."""
        pairs = [
            (vectors.local_part(p), vectors.local_part(v))
            for p, v in zip(parameters, vector, strict=True)
            if v is not None
        ]
        torch._foreach_add_([p for p, _ in pairs], [v for _, v in pairs], alpha=scale)
        self.placement.refresh(parameters)

    @torch.no_grad()
    def copy_(self, optimizers: Iterable[Optimizer], values: Sequence[Tensor]) -> None:
        """Set the parameters of some optimizers to copies of `values`."""
        optimizers = list(optimizers)
        local = itertools.chain(*(optimizer.local for optimizer in optimizers))
        torch._foreach_copy_(list(local), list(values))
        self.placement.refresh(itertools.chain(*(o.parameters for o in optimizers)))

    def copies(self) -> list[Tensor]:
        """Return copies of the parameters of all optimizers."""
        local = itertools.chain(*(optimizer.local for optimizer in self.optimizers.values()))
        return [parameter.detach().clone() for parameter in local]

    def watch(self, inner: InnerGradient) -> None:
        """Attach an inner gradient to the current values of the parameters."""
        self._inner.add(inner)

    def store_origins(self) -> None:
        """Make inner gradients store their parameters before these change."""
        unstored = [inner for inner in self._inner if inner.origin is None]
        if not unstored:
            return
        origin = self.copies()
        for inner in unstored:
            # Autograd refuses a graph if its parameters have changed in place.
            inner.origin, inner.graph, inner.forward = origin, None, None

    @contextlib.contextmanager
    def at_origin(self, inner: InnerGradient) -> Iterator[None]:
        """Restore the parameters of an inner gradient inside the context."""
        if inner.origin is None:
            yield
            return
        self.store_origins()
        current = self.copies()
        self.copy_(self.optimizers.values(), inner.origin)
        try:
            yield
        finally:
            self.copy_(self.optimizers.values(), current)


class Engine:
    """Gradients, second derivatives, evaluation and steps.

    Args:
        optimizers: Optimizers by name.
        seed: Seed of all random numbers inside passes.
        device: Device that batches are moved to.
        precision: fp32, bf16 (autocast) or fp64.
        placement: The placement of the model's parameters; by default every process has all.
        recompute: Whether to compute the activations inside blocks again in the backward pass.
        compiled: Whether `gradients` runs losses through torch.compile.
        reduce_precision: fp32 sums gradients in the dtype of the parameters, bf16 in bfloat16,
            except gradients that are part of second derivatives.

    Attributes:
        passes: The forward passes of all methods.
        finite_check: The check that refuses steps.
        norms: Gradient norm of the last step of each optimizer, before clipping.
        record: Statistics of the run's losses.
    """

    def __init__(
        self,
        optimizers: dict[str, Optimizer],
        seed: int = 1,
        device: str = "cpu",
        precision: str = "fp32",
        placement: Placement | None = None,
        recompute: bool = False,
        compiled: bool = False,
        reduce_precision: str = "fp32",
    ) -> None:
        self.optimizers = optimizers
        self.seed = seed
        self.device = torch.device(device)
        if self.device.type == "cuda":  # each thread has its own current device
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.precision = precision
        self.placement = placement or Replicated()
        self.replicas = process_group.world_size()
        self.reduces_low = reduce_precision == "bf16"
        is_low = precision == "bf16"
        self.passes = ForwardPasses(seed, self.device, is_low, self.placement, recompute, compiled)
        self.finite_check = _FiniteCheck(self.device)
        self.norms: dict[str, Tensor] = {}
        self.record = self.passes.record
        self._weights = _Weights(optimizers, self.placement)
        # State of the optimizers inside `restoring`; None until a step changes it.
        self._saved: dict[str, dict[str, Any] | None] = {}
        self._others: Sequence[float] = ()  # to be sent with the next sizes
        self._carrier: GlobalCount | None = None  # the sizes that they were sent with

    def begin(self, update: int, others: Sequence[float] = ()) -> None:
        """Start an update; its random numbers depend only on the seed and its number.

        The replicas sum `others` in the same message as their first sizes, see `take_sums`.
        """
        self._others, self._carrier = others, None
        self.passes.begin(update)
        self.finite_check.begin(update)

    def take_sums(self) -> list[float] | None:
        """Return the sums of `others` of `begin`, once; None if no sizes were sent since then."""
        carrier, self._carrier = self._carrier, None
        if carrier is None:
            return None
        return carrier.others

    def outside_updates(self) -> contextlib.AbstractContextManager[None]:
        """Make random numbers inside depend on the seed alone, for validation and prediction."""
        return self.passes.outside_updates()

    def to_device(self, batches: Sequence[B]) -> list[B]:
        """Return micro-batches with tensors on the engine's device, floats in its precision."""
        return [batch.to(self.device, PRECISIONS[self.precision]) for batch in batches]

    # ---------------------------------------------------------------- derivatives

    def gradients(
        self,
        loss_fn: LossFn,
        batches: Sequence[Batch],
        wrt: Sequence[Tensor],
        rng_key: RngKey | None = None,
        full_precision: bool = False,
    ) -> tuple[Vector, Logs]:
        """Return the exact gradient of the global mean loss, and its logs; a collective call.

        Args:
            loss_fn: Returns the terms of a micro-batch.
            batches: This replica's micro-batches of the global batch; there may be none.
            wrt: The leaves to differentiate with respect to.
            rng_key: Calls with equal keys in one update use the same dropout masks and samples;
                each call without a key uses new ones.
            full_precision: Do not autocast, for a gradient that is differentiated again.

        Returns:
            The gradient in the order of `wrt`, None for leaves that no replica's loss depends on;
            the means of the terms, and their weighted sum as "loss".
        """
        loss = self._global_loss(loss_fn, batches, rng_key)
        return self._gradients(loss, wrt, full_precision)

    def inner(
        self,
        loss_fn: LossFn,
        batches: Sequence[Batch],
        wrt: Sequence[Tensor],
        rng_key: RngKey | None = None,
        replay: bool = False,
    ) -> InnerGradient:
        """Return a gradient as `gradients` does, in a form that `hypergradients` can differentiate.

        The graph of a single micro-batch is stored. With several, or with `replay`, each graph is
        built again when it is needed, so that memory holds one graph at a time.

        The gradient belongs to the current values of the parameters: `move`, `step` and `restoring`
        may precede `hypergradients`, at the price of a copy of the optimizers' parameters. With
        `replay` no copy is made: the caller must have restored the values by then.
        """
        if not self.placement.has_second_derivatives:
            raise UsageError(
                "second derivatives cannot be taken through torch's fully_shard; a task that takes "
                "them sets takes_second_derivatives"
            )
        loss = self._global_loss(loss_fn, batches, rng_key)
        if replay or len(loss.batches) != 1:
            value, logs = self._gradients(loss, wrt, full_precision=True)
            inner = InnerGradient(value, logs, loss, wrt)
        else:
            inner = self._with_graph(loss, wrt)
        if not replay:
            self._weights.watch(inner)
        return inner

    def hypergradients(
        self, inner: InnerGradient, vector: Vector, wrt: Sequence[Tensor], step: float = 0.0
    ) -> Vector:
        """Return d<vector, inner gradient>/d wrt over the global batch; a collective call.

        Args:
            inner: The inner gradient.
            vector: The vector, in the order of `inner.wrt`.
            wrt: The leaves to differentiate with respect to.
            step: 0 for exact second derivatives; else central finite differences of first
                derivatives, with a displacement of `step` times the norm of the inner parameters.
        """
        with self._weights.at_origin(inner):
            if step:
                return self._differences(inner, vector, wrt, step)
            return self._products(inner, vector, wrt)

    # ---------------------------------------------------------------- without derivatives

    @torch.no_grad()
    def evaluate(
        self, loss_fn: LossFn, batches: Iterable[Sequence[Batch]], rng_key: RngKey | None = None
    ) -> Logs:
        """Return the means of all terms over all batches of all replicas, as numbers.

        Args:
            loss_fn: Returns the terms of a micro-batch.
            batches: For each global batch, this replica's micro-batches of it; there may be none.
            rng_key: As for `gradients`.
        """
        rng_key = self.passes.key(rng_key)
        parts: dict[str, list[Any]] = {}  # term: [sum, name of its size or None, weight]
        sizes: dict[str, Any] = {}
        # Sharded parameters are gathered once for successive batches that need all of them.
        for are_equal, group in itertools.groupby(batches, self._are_equal):
            with self.passes.start(rng_key, are_equal) as forward:
                for batch in itertools.chain.from_iterable(group):
                    with forward.over(batch):
                        terms = forward.call(partial(loss_fn, batch))
                    check_terms(terms, batch.sizes)
                    self.record.add(terms)
                    _add_sizes(sizes, batch)
                    for name, term in terms.items():
                        part = parts.setdefault(name, [0.0, term.per, term.weight])
                        part[0] = part[0] + term.sum.double()
        calls = self.placement.take_calls()
        results = process_group.gather_objects((to_python((parts, sizes)), calls))
        if any(order != calls for _, order in results):
            raise MetaseqError(OTHER_ORDER)
        return average_terms([sums for sums, _ in results])

    @torch.no_grad()
    def map(
        self,
        function: Callable[[Any], T],
        batches: Sequence[Batch],
        rng_key: RngKey | None = None,
    ) -> list[T]:
        """Return `function` of each micro-batch, without gradients; `rng_key` as in `gradients`."""
        rng_key = self.passes.key(rng_key)
        results = []
        with self.passes.start(rng_key, self._are_equal(batches)) as forward:
            for batch in batches:
                with forward.over(batch):
                    results.append(forward.call(partial(function, batch)))
        return results

    # ---------------------------------------------------------------- parameters

    def parameters(self, name: str) -> Sequence[Tensor]:
        """Return the parameters of one optimizer, in its order."""
        return self.optimizers[name].parameters

    def whole(self, write: bool = False) -> contextlib.AbstractContextManager[None]:
        """Gather full parameters inside the context; `write` copies changes back to the shards.

        A method needs it only to read weights between passes. Do not read them from state_dict(),
        which gives shards. A collective call.
        """
        return self.placement.whole(write)

    def step(self, name: str, grads: Vector) -> bool:
        """Clip the global gradient, in place, and take one scheduled step.

        Returns False, and changes nothing, if the gradient, a loss of this update or a value passed
        to `finite_check.require` is not finite. With `finite_check.defers` the device skips such a
        step and the later ones of the update; the host does not wait for it and returns True.
        """
        optimizer = self.optimizers[name]
        if self._saved.get(name, False) is None:
            self._saved[name] = copy_nested(optimizer.local_state())
        if all(g is None for g in grads):
            return True
        norm = optimizer.load_gradient(grads)
        if self.finite_check.refuses(name, norm):
            self.finite_check.gradient = self.finite_check.gradient or optimizer.nonfinite()
            optimizer.forget_gradient()
            self.norms.pop(name, None)
            return False
        self.norms[name] = norm
        # Multiplying by 1 changes nothing, but takes a pass over all gradients.
        if optimizer.clip_norm and (self.finite_check.defers or norm + 1e-6 > optimizer.clip_norm):
            clip_grads_with_norm_(optimizer.local, optimizer.clip_norm, norm)
        self._weights.store_origins()
        optimizer.step(self.finite_check.found_inf(name, norm))
        optimizer.forget_gradient()
        if self.placement.gathers:
            self.placement.refresh(optimizer.parameters)
        return True

    @torch.no_grad()
    def move(self, name: str, vector: Vector, scale: float) -> None:
        """Add scale * vector to the parameters, a virtual step; only inside `restoring`."""
        assert name in self._saved, (
            "move changes parameters for a while; use it inside restoring(name)"
        )
        self._weights.store_origins()
        self._weights.add_(self.parameters(name), vector, scale)

    @contextlib.contextmanager
    def restoring(self, name: str) -> Iterator[None]:
        """Restore an optimizer's parameters, moments and schedule on exit."""
        optimizer = self.optimizers[name]
        saved = [p.detach().clone() for p in optimizer.local]
        assert name not in self._saved, f"restoring('{name}') does not nest"
        self._saved[name] = None  # the moments are copied only if a step is taken
        try:
            yield
        finally:
            state = self._saved.pop(name)
            self._weights.store_origins()
            self._weights.copy_([optimizer], saved)
            if state is not None:
                optimizer.load_local_state(state)

    # ---------------------------------------------------------------- how derivatives are computed

    def _are_equal(self, batches: Sequence[Batch]) -> bool:
        """Return whether sharded parameters can be gathered where these micro-batches use them."""
        if self.placement.is_whole:
            return False
        return GlobalCount(len(batches), {}, self.device).are_equal

    def _global_loss(
        self, loss_fn: LossFn, batches: Sequence[Batch], rng_key: RngKey | None
    ) -> _GlobalLoss:
        """Return the loss of a global batch, with its sizes; a collective call."""
        rng_key = self.passes.key(rng_key)
        sizes: dict[str, Any] = {}
        for batch in batches:
            _add_sizes(sizes, batch)
        count: GlobalCount | LocalCount = LocalCount(sizes, bool(batches))
        if self.replicas > 1:
            count = GlobalCount(len(batches), sizes, self.device, self._others)
            if self._others:
                self._others, self._carrier = (), count
        if not batches or self.placement.gathers:
            _ = count.totals  # before any other collective, as replicas with batches do
        # Each forward pass of a sharded run gathers parameters, so every replica needs as many.
        fillers: list[Batch] = []
        if self.placement.gathers and not count.are_equal:
            fillers = self.to_device(fillers_of(batches))
        return _GlobalLoss(loss_fn, [*batches, *fillers], rng_key, count, len(fillers))

    def _gradients(
        self, loss: _GlobalLoss, wrt: Sequence[Tensor], full_precision: bool
    ) -> tuple[Vector, Logs]:
        logs: Logs = {}
        with self.passes.start(loss.rng_key, True, full_precision) as forward:
            means = [partial(loss.mean, forward, n, logs) for n in range(len(loss.batches))]
            if self.placement.gathers or self.replicas > 1:
                low = self.reduces_low and not full_precision
                sums = self.placement.differentiate(means, forward.leaves(wrt), wrt, low)
                return self._collect(sums, logs, loss.count), logs
            for mean in means:
                if (value := mean()).requires_grad:
                    value.backward(inputs=wrt)
            return self._take(wrt, logs), logs

    def _graph(
        self,
        loss: _GlobalLoss,
        number: int,
        forward: ForwardPass,
        wrt: Sequence[Tensor],
        logs: Logs,
    ) -> list[Tensor | None]:
        """Return a micro-batch's part of the gradient with respect to `wrt`, with its graph."""
        mean = loss.mean(forward, number, logs)
        leaves = list(forward.leaves(wrt))
        return list(torch.autograd.grad(mean, leaves, create_graph=True, allow_unused=True))

    def _with_graph(self, loss: _GlobalLoss, wrt: Sequence[Tensor]) -> InnerGradient:
        """Return the gradient of a loss of one micro-batch with its graph."""
        logs: Logs = {}
        with self.passes.start(loss.rng_key, True, double_backward=True) as forward:
            leaves = forward.leaves(wrt)
            graph = self._graph(loss, 0, forward, wrt, logs)
            for leaf, grad in zip(leaves, graph, strict=True):
                leaf.grad = None if grad is None else grad.detach()
            value = self._sum(leaves, wrt, logs, loss.count)
            return InnerGradient(value, logs, loss, wrt, graph, forward)

    def _products(self, inner: InnerGradient, vector: Vector, wrt: Sequence[Tensor]) -> Vector:
        """Return d<vector, inner gradient>/d wrt by second derivatives, one graph at a time."""
        loss, graph = inner.loss, inner.graph
        with self.passes.start(loss.rng_key, True, double_backward=True) as forward:
            forward = inner.forward or forward
            leaves = forward.leaves(wrt)
            for number in range(len(loss.batches)):
                if inner.graph is None:
                    graph = self._graph(loss, number, forward, inner.wrt, {})
                assert graph is not None
                # Each process differentiates the inner product of its own parts; its part of a
                # sharded parameter is some rows of the sum over shards. The products of all
                # processes add up to the product of the whole vectors, and the graph sums their
                # derivatives as it does the loss's.
                product: Tensor | int = 0
                for v, g in zip(vector, graph, strict=True):
                    if v is not None and g is not None:
                        product = product + (vectors.local_part(v) * g).sum()
                if isinstance(product, Tensor) and product.requires_grad:
                    product.backward(inputs=leaves)
            inner.graph, inner.forward = None, None
            return self._sum(leaves, wrt, {})

    def _differences(
        self, inner: InnerGradient, vector: Vector, wrt: Sequence[Tensor], step: float
    ) -> Vector:
        """Return d<vector, inner gradient>/d wrt by central differences of first derivatives."""
        inner.graph = None
        vector_norm = vectors.norm(vector)
        if vector_norm == 0:
            return [None] * len(wrt)
        parameter_norm = vectors.norm([p.detach() for p in inner.wrt])
        size = (step * parameter_norm / vector_norm).item()
        sides = []
        for sign in (1, -1):
            saved = [vectors.local_part(p.detach()).clone() for p in inner.wrt]
            with torch.no_grad():
                self._weights.add_(inner.wrt, vector, sign * size)
            side, _ = self._gradients(inner.loss, wrt, full_precision=True)
            sides.append(side)
            # Subtracting the step again would not restore the bits.
            with torch.no_grad():
                torch._foreach_copy_([vectors.local_part(p) for p in inner.wrt], saved)
            self.placement.refresh(inner.wrt)
        return vectors.scale(vectors.add(sides[0], sides[1], -1.0), 0.5 / size)

    def _sum(
        self,
        leaves: Sequence[Tensor],
        wrt: Sequence[Tensor],
        logs: Logs,
        count: GlobalCount | LocalCount | None = None,
    ) -> Vector:
        """Return the gradients of leaves; sum them and the logs over replicas."""
        if self.replicas > 1:
            return self._collect(Reduction(leaves, wrt), logs, count)
        return self._take(leaves, logs)

    def _take(self, leaves: Sequence[Tensor], logs: Logs) -> Vector:
        """Return the gradients of leaves in the only process, and reset them."""
        grads: Vector = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        if "loss" in logs:
            self.finite_check.add_loss(logs["loss"])
        return grads

    def _collect(
        self, sums: Gradients, logs: Logs, count: GlobalCount | LocalCount | None = None
    ) -> Vector:
        """Return gradients; sum them and the logs over replicas."""
        if "loss" in logs:
            self.finite_check.add_local_loss(logs["loss"])
        grads = sums.finish(logs, count is None or count.are_alike)
        for values in sums.required:
            self.finite_check.require(values)
        if "loss" in logs:
            self.finite_check.add_loss(logs["loss"])
        return grads


def _add_sizes(sizes: dict[str, Any], batch: Batch) -> None:
    for name, size in batch.sizes.items():
        sizes[name] = sizes.get(name, 0) + size


def copy_nested(state: Any) -> Any:
    """Return a deep copy of nested dicts, lists, tuples and tensors."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {k: copy_nested(v) for k, v in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(copy_nested, state))
    return state
