"""The arithmetic of an update, exact under gradient accumulation and over replicas.

The Engine is final: nothing subclasses it. A batch is a list of micro-batches, the part of the
global batch that this replica holds, which may be none. Each verb divides a term by its size summed
over all micro-batches and replicas, so that any way to cut the batch gives the same result, up to
the order of summation.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from metaseq_lm.core.batch import Batch, Logs, check_terms, means, to_python
from metaseq_lm.distributed import placement, process_group, vectors
from metaseq_lm.distributed.placement import Placement
from metaseq_lm.distributed.vectors import Vector
from metaseq_lm.engine import reduction
from metaseq_lm.engine.forward_pass import ForwardPass, ForwardPasses, GlobalLoss, LossFn, RngKey
from metaseq_lm.engine.reduction import GlobalCount, Reduction
from metaseq_lm.optim import Optimizer

T = TypeVar("T")
B = TypeVar("B", bound=Batch)

PRECISIONS = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


@dataclass(eq=False)
class InnerGradient:
    """A gradient that can itself be differentiated; made by `Engine.inner`.

    Without `replay` it belongs to the values of the parameters at its computation.

    Attributes:
        value: The gradient, in the order of `wrt`.
        logs: Means of the terms of the loss.
        loss: The loss, which is enough to build the graph again.
        wrt: The leaves that it was differentiated with respect to.
        graph: The gradient with its graph, where one micro-batch is all; freed by its first use,
            and by the first change of a parameter.
        leaves: The whole parameters that the graph belongs to, by the id of their shards.
        origin: What this process held of the optimizers' parameters, if they have changed since.
    """

    value: Vector
    logs: Logs
    loss: GlobalLoss
    wrt: Sequence[Tensor]
    graph: list[Tensor | None] | None = field(default=None, repr=False)
    leaves: Mapping[int, Tensor] = field(default_factory=dict, repr=False)
    origin: list[Tensor] | None = field(default=None, repr=False)


class FiniteCheck:
    """Refuses the steps of an update in which a loss, a gradient or a required value is not finite.

    Attributes:
        defers: Whether the device itself skips such a step, and `skipped` says so later.
        refused: Names of the optimizers whose steps the host has refused in this update.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.defers = False
        self.refused: list[str] = []
        self._update = 0
        self._sum: Any = 0.0  # of all that must be finite in this update
        # This replica's part of the losses, by update, until the host knows whether it is finite.
        self._local_losses: dict[int, Any] = {}
        self._skipped: dict[str, Tensor] = {}  # the first update whose step was skipped, or -1

    def begin(self, update: int) -> None:
        """Start an update."""
        self._update, self._sum = update, 0.0
        self.refused = []
        if not self.defers:
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

        `skipped` will report it.
        """
        if not self.defers:
            return None
        self._sum = self._sum + norm  # the update's later steps are skipped as well
        bad = ~torch.isfinite(self._sum)
        first = self._skipped.setdefault(name, torch.full((), -1, device=self.device))
        first.masked_fill_(bad & (first < 0), self._update)
        return bad.float()

    def skipped(self) -> tuple[int, list[str]] | None:
        """Return the first update in which the device skipped a step, and the optimizers' names.

        None if there is none. It waits for the device, and forgets what it returns.
        """
        if not self._skipped:
            return None
        firsts = dict(zip(self._skipped, torch.stack(list(self._skipped.values())).tolist()))
        self._skipped = {}
        update = min((first for first in firsts.values() if first >= 0), default=None)
        if update is None:
            self._local_losses.clear()
            return None
        return update, [name for name, first in firsts.items() if first == update]

    def nonfinite_replicas(self, update: int) -> list[int]:
        """Return the replicas whose part of an update's losses was not finite.

        A call of all replicas. The update is the last one, or with `defers` one that `skipped` has
        just returned.
        """
        loss = self._local_losses.pop(update, torch.zeros(()))
        self._local_losses.clear()
        are_finite = process_group.gather_objects(bool(torch.isfinite(loss)))
        return [replica for replica, is_finite in enumerate(are_finite) if not is_finite]


class Weights:
    """The local part of the optimizers' parameters.

    Inner gradients that belong to the current values store them before they change.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer], passes: ForwardPasses) -> None:
        self.optimizers, self.passes = optimizers, passes
        self._inner: weakref.WeakSet[InnerGradient] = weakref.WeakSet()

    def add_(self, parameters: Sequence[Tensor], vector: Vector, scale: float) -> None:
        """Add scale * vector to some parameters."""
        pairs = [
            (vectors.local(p), vectors.local(v))
            for p, v in zip(parameters, vector, strict=True)
            if v is not None
        ]
        torch._foreach_add_([p for p, _ in pairs], [v for _, v in pairs], alpha=scale)
        self.passes.refresh(parameters)

    @torch.no_grad()
    def copy_(self, optimizers: Iterable[Optimizer], values: Sequence[Tensor]) -> None:
        """Set the parameters of some optimizers to copies of `values`."""
        optimizers = list(optimizers)
        torch._foreach_copy_([p for o in optimizers for p in o.local], list(values))
        self.passes.refresh([p for o in optimizers for p in o.parameters])

    def copies(self) -> list[Tensor]:
        """Return copies of the parameters of all optimizers."""
        return [p.detach().clone() for o in self.optimizers.values() for p in o.local]

    def watch(self, inner: InnerGradient) -> None:
        """Attach an inner gradient to the current values of the parameters."""
        self._inner.add(inner)

    def store_origins(self) -> None:
        """Make inner gradients store their parameters before these change."""
        unstored = [inner for inner in self._inner if inner.origin is None]
        origin = self.copies() if unstored else None
        for inner in unstored:
            # Autograd refuses a graph whose parameters have changed in place.
            inner.origin, inner.graph, inner.leaves = origin, None, {}

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
        placement: The model's sharded parameters; None if they rest whole in every process.
        recompute: Whether to compute the activations inside blocks again in the backward pass.
        compiled: Whether `gradients` runs losses through torch.compile.
        reduce_precision: fp32, in which gradients are summed in the dtype of the parameters, or
            bf16; those that are part of second derivatives never are in bf16.

    Attributes:
        passes: The forward passes of all verbs.
        finite_check: The check that refuses steps.
        norms: Gradient norm of the last step of each optimizer, before clipping.
        record: What the losses of the run have shown.
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
        if self.device.type == "cuda":  # the current device is set by thread
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.precision = precision
        self.placement = placement
        self.replicas = process_group.world_size()
        self.reduces_low = reduce_precision == "bf16"
        is_low = precision == "bf16"
        self.passes = ForwardPasses(seed, self.device, is_low, placement, recompute, compiled)
        self.finite_check = FiniteCheck(self.device)
        self.norms: dict[str, Tensor] = {}
        self.record = self.passes.record
        self._weights = Weights(optimizers, self.passes)
        # State of the optimizers inside `restoring`; None until a step changes it.
        self._saved: dict[str, dict[str, Any] | None] = {}

    def begin(self, update: int) -> None:
        """Start an update; its random numbers depend only on the seed and its number."""
        self.passes.begin(update)
        self.finite_check.begin(update)

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
        """Return the exact gradient of the global mean loss, and its logs; a call of all replicas.

        Args:
            loss_fn: Returns the terms of a micro-batch.
            batches: This replica's micro-batches of the global batch; there may be none.
            wrt: The leaves to differentiate with respect to.
            rng_key: Calls with equal keys in one update use the same dropout masks and samples;
                each call without a key uses new ones.
            full_precision: Do not autocast, for a gradient that is differentiated again.

        Returns:
            The gradient in the order of `wrt`, None for leaves that no replica's loss depends on;
            and the means of the terms with their weighted sum, "loss".
        """
        return self._gradients(self._global_loss(loss_fn, batches, rng_key), wrt, full_precision)

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
        built again when it is needed, so that memory is that of one graph.

        The gradient belongs to the current values of the parameters: `move`, `step` and `restoring`
        may precede `hypergradients`, which needs copies of the optimizers' parameters then. With
        `replay` it belongs to the values that the caller has restored by then, without copies.
        """
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
        """Return d<vector, inner gradient>/d wrt over the global batch; a call of all replicas.

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
        has_layers = self.passes.has_layers
        for by_layer, group in itertools.groupby(
            batches,
            lambda micro_batches: has_layers and reduction.compare(len(micro_batches))[0],
        ):
            with self.passes.start(rng_key, by_layer) as forward:
                for batch in itertools.chain.from_iterable(group):
                    with forward.over(batch):
                        terms = loss_fn(batch)
                    check_terms(terms, batch.sizes)
                    self.record.add(terms)
                    add_sizes(sizes, batch)
                    for name, term in terms.items():
                        part = parts.setdefault(name, [0.0, term.per, term.weight])
                        part[0] = part[0] + term.sum.double()
        return means(process_group.gather_objects(to_python((parts, sizes))))

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
        by_layer = self.passes.has_layers and reduction.compare(len(batches))[0]
        with self.passes.start(rng_key, by_layer) as forward:
            for batch in batches:
                with forward.over(batch):
                    results.append(function(batch))
        return results

    # ---------------------------------------------------------------- parameters

    def parameters(self, name: str) -> Sequence[Tensor]:
        """Return the parameters of one optimizer, in its order."""
        return self.optimizers[name].parameters

    def whole(self, write: bool = False) -> contextlib.AbstractContextManager[None]:
        """Gather full parameters inside the context; `write` copies changes back to the shards.

        Every pass does so; a method needs it only to read weights between passes. A call of all
        replicas.
        """
        return self.passes.parameters(write=write)

    def step(self, name: str, grads: Vector) -> bool:
        """Clip the global gradient, in place, and take one scheduled step.

        Returns False, and changes nothing, if the gradient, a loss of this update or a value passed
        to `finite_check.require` is not finite. With `finite_check.defers` the device changes
        nothing then, nor in a later step of the update, and the host, which does not wait for it,
        gets True.
        """
        optimizer = self.optimizers[name]
        if self._saved.get(name, False) is None:
            self._saved[name] = copied(optimizer.local_state())
        if all(g is None for g in grads):
            return True
        norm = optimizer.load_gradient(grads)
        if self.finite_check.refuses(name, norm):
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
        self.passes.refresh(optimizer.parameters)
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

    def _global_loss(
        self, loss_fn: LossFn, batches: Sequence[Batch], rng_key: RngKey | None
    ) -> GlobalLoss:
        """Return the loss of a global batch, with its sizes; a call of all replicas."""
        rng_key = self.passes.key(rng_key)
        sizes: dict[str, Any] = {}
        for batch in batches:
            add_sizes(sizes, batch)
        if self.replicas == 1:
            count = GlobalCount(sizes, are_equal=True, are_alike=bool(batches))
        else:
            count = reduction.count_globally(sizes, len(batches), self.device)
        return GlobalLoss(loss_fn, list(batches), rng_key, count)

    def _gradients(
        self, loss: GlobalLoss, wrt: Sequence[Tensor], full_precision: bool
    ) -> tuple[Vector, Logs]:
        """Return the gradient and the logs of `gradients`."""
        logs: Logs = {}
        total: Vector = [None] * len(wrt)
        by_layer = loss.count.are_equal and self.passes.has_layers
        low_sums = self.reduces_low and not full_precision
        with self.passes.start(loss.rng_key, by_layer, full_precision) as forward:
            leaves = forward.leaves(wrt)
            sums = self._reduction(leaves, wrt, low_sums)
            for number, batch in enumerate(loss.batches):
                mean = forward.mean_loss(loss, batch, logs)
                last = number == len(loss.batches) - 1
                # By layer, whole gradients must not outlive a micro-batch either.
                reduces = by_layer or last
                if mean.requires_grad:
                    with sums if sums and reduces else contextlib.nullcontext():
                        mean.backward(inputs=leaves)
                if sums and by_layer and not last:
                    total = vectors.add(total, sums.finish({}))
                    sums = self._reduction(leaves, wrt, low_sums)
            grads = self._collect(leaves, sums, logs, loss.count.are_alike)
        return vectors.add(total, grads) if by_layer else grads, logs

    def _graph(
        self, loss: GlobalLoss, batch: Batch, forward: ForwardPass, at: Sequence[Tensor], logs: Logs
    ) -> list[Tensor | None]:
        """Return a micro-batch's part of the gradient at `at`, with its graph."""
        mean = forward.mean_loss(loss, batch, logs)
        return list(torch.autograd.grad(mean, list(at), create_graph=True, allow_unused=True))

    def _with_graph(self, loss: GlobalLoss, wrt: Sequence[Tensor]) -> InnerGradient:
        """Return the gradient of a loss of one micro-batch with its graph."""
        logs: Logs = {}
        (batch,) = loss.batches
        with self.passes.start(loss.rng_key, double_backward=True) as forward:
            leaves = forward.leaves(wrt)
            graph = self._graph(loss, batch, forward, leaves, logs)
            for leaf, grad in zip(leaves, graph, strict=True):
                leaf.grad = None if grad is None else grad.detach()
            sums = self._reduction(leaves, wrt)
            value = self._collect(leaves, sums, logs, loss.count.are_alike)
            return InnerGradient(value, logs, loss, wrt, graph, self.passes.leaf_of())

    def _products(self, inner: InnerGradient, vector: Vector, wrt: Sequence[Tensor]) -> Vector:
        """Return d<vector, inner gradient>/d wrt by second derivatives, one graph at a time."""
        if self.placement is not None:
            vector = placement.whole_vector(vector)
        loss, graph = inner.loss, inner.graph
        with self.passes.start(loss.rng_key, double_backward=True) as forward:
            leaf_of = self.passes.leaf_of() if graph is None else inner.leaves
            leaves = [leaf_of.get(id(p), p) for p in wrt]
            for batch in loss.batches:
                if inner.graph is None:
                    graph = self._graph(loss, batch, forward, forward.leaves(inner.wrt), {})
                assert graph is not None
                product = sum(
                    (v * g).sum() for v, g in zip(vector, graph) if v is not None and g is not None
                )
                if isinstance(product, Tensor) and product.requires_grad:
                    product.backward(inputs=leaves)
            inner.graph, inner.leaves = None, {}
            return self._collect(leaves, self._reduction(leaves, wrt), {})

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
            saved = [vectors.local(p.detach()).clone() for p in inner.wrt]
            with torch.no_grad():
                self._weights.add_(inner.wrt, vector, sign * size)
            side, _ = self._gradients(inner.loss, wrt, full_precision=True)
            sides.append(side)
            with torch.no_grad():
                torch._foreach_copy_([vectors.local(p) for p in inner.wrt], saved)
            self.passes.refresh(inner.wrt)
        return vectors.scale(vectors.add(sides[0], sides[1], -1.0), 0.5 / size)

    def _reduction(
        self, leaves: Sequence[Tensor], wrt: Sequence[Tensor], low: bool = False
    ) -> Reduction | None:
        """Return the reduction of the gradients of `leaves` over replicas, if there are several."""
        return Reduction(leaves, wrt, low) if self.replicas > 1 else None

    def _collect(
        self,
        leaves: Sequence[Tensor],
        sums: Reduction | None,
        logs: Logs,
        are_alike: bool = True,
    ) -> Vector:
        """Return the gradients of `leaves` and reset them; sum them and the logs over replicas."""
        if sums is not None:
            if "loss" in logs:
                self.finite_check.add_local_loss(logs["loss"])
            grads: Vector = sums.finish(logs, are_alike)
        else:
            grads = [p.grad for p in leaves]
            for p in leaves:
                p.grad = None
        if "loss" in logs:
            self.finite_check.add_loss(logs["loss"])
        return grads


def add_sizes(sizes: dict[str, Any], batch: Batch) -> None:
    """Add the sizes of a micro-batch to `sizes`."""
    for name, size in batch.sizes.items():
        sizes[name] = sizes[name] + size if name in sizes else size


def copied(state: Any) -> Any:
    """Return a deep copy of nested dicts, lists and tensors."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {k: copied(v) for k, v in state.items()}
    return [copied(v) for v in state] if isinstance(state, list) else state
