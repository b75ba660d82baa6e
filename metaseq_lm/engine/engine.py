"""The arithmetic of an update, exact under gradient accumulation and over replicas.

The Engine is final: nothing subclasses it. A batch is a list of micro-batches, the part of the global
batch that this replica holds, which may be none. Each method divides a term by its size summed over all
micro-batches and replicas, so that any way to cut the batch gives the same result, up to the order of
summation.
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
from torch.utils._python_dispatch import _get_current_dispatch_mode

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Batch, Logs, Terms, means, to_python, weighted_loss
from metaseq_lm.distributed import placement, process_group, vectors
from metaseq_lm.distributed.placement import Placement
from metaseq_lm.distributed.vectors import Vector
from metaseq_lm.engine.reduction import Reduction
from metaseq_lm.forward.context import (
    ForwardContext,
    Noise,
    TracedNoise,
    current_context,
    use_context,
)
from metaseq_lm.optim import Optimizer

LossFn = Callable[[Any], Terms]  # of a Batch of some kind
T = TypeVar("T")
B = TypeVar("B", bound=Batch)

PRECISIONS = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


@dataclass(eq=False)
class InnerGradient:
    """A gradient that can itself be differentiated; made by `Engine.inner`.

    Without `replay` it belongs to the parameters as they were when it was made.

    Attributes:
        value: The gradient, in the order of `wrt`.
        logs: Means of the terms of the loss.
        loss_fn: The loss; with `batches`, `wrt` and `rng_key` it is enough to build the graph again.
        totals: The sizes of the global batch.
        graph: The gradient with its graph, where one micro-batch is all; freed by its first use, and
            by the first change of a parameter.
        leaves: The whole parameters that the graph belongs to, by the id of their shards.
        origin: What this process held of the optimizers' parameters, if they have changed since.
    """

    value: Vector
    logs: Logs
    loss_fn: LossFn
    batches: list[Batch]
    wrt: Sequence[Tensor]
    rng_key: int | str
    totals: dict[str, Any]
    graph: list[Tensor | None] | None = field(default=None, repr=False)
    leaves: Mapping[int, Tensor] = field(default_factory=dict, repr=False)
    origin: list[Tensor] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class GlobalCount:
    """What all replicas' micro-batches of a global batch have together.

    Attributes:
        totals: Every size summed over them, a number or (C,) per copy.
        are_equal: Whether all replicas have as many.
        is_complete: Whether every replica has at least one.
    """

    totals: dict[str, Any]
    are_equal: bool
    is_complete: bool


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
        reduce_precision: fp32, in which gradients are summed in the dtype of the parameters, or bf16;
            those that are part of second derivatives never are in bf16.
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
        self.placement = placement
        self.replicas = process_group.world_size()
        self.seed = seed
        self.device = torch.device(device)
        if self.device.type == "cuda":  # other threads have a current device of their own
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.precision = precision
        self.recompute = recompute
        self.reduce_precision = reduce_precision
        # Lengths differ from batch to batch; a part that cannot be compiled is an error.
        self._compiled = (
            torch.compile(traced_terms, fullgraph=True, dynamic=True) if compiled else None
        )
        self.norms: dict[str, Tensor] = {}  # of the last step of each optimizer, before clipping
        self.nonfinite: list[str] = []  # optimizers whose last step was refused
        # Whether the device itself skips a step that is not finite, and `skipped` says so later.
        self.defers = False
        self._skipped: dict[str, Tensor] = {}  # the first update whose step was skipped, or -1
        self.loss_terms: set[str] = set()  # parts of a loss: lower is better
        # Whether a loss that was differentiated has had an item, such as a target; None before any.
        self.has_items: bool | None = None
        self._update = 0
        self._calls = 0
        self._saved: dict[str, dict[str, Any] | None] = {}
        self._losses: Any = 0.0  # sum of all that must be finite in this update
        # By update, as long as nobody knows whether it is finite: this replica's part of the losses.
        self._local_losses: dict[int, Tensor] = {}
        self._inner: weakref.WeakSet[InnerGradient] = weakref.WeakSet()  # without replay
        self._ahead = 0  # number of random words that the last forward pass used

    def begin(self, update: int) -> None:
        """Start an update; its random numbers depend only on the seed and the number of the update."""
        self._update, self._calls, self._losses = update, 0, 0.0
        self.nonfinite = []
        if not self.defers:
            self._local_losses.clear()

    @contextlib.contextmanager
    def outside_updates(self) -> Iterator[None]:
        """Make random numbers inside depend on the seed alone, for validation and prediction."""
        saved = self._update, self._calls
        self._update, self._calls = -1, 0
        try:
            yield
        finally:
            self._update, self._calls = saved

    # ---------------------------------------------------------------- batches

    def gradients(
        self,
        loss_fn: LossFn,
        batches: Sequence[Batch],
        wrt: Sequence[Tensor],
        rng_key: int | str | None = None,
        full_precision: bool = False,
    ) -> tuple[Vector, Logs]:
        """Return the exact gradient of the global mean loss, and its logs; a call of all replicas.

        Args:
            loss_fn: Returns the terms of a micro-batch.
            batches: This replica's micro-batches of the global batch; there may be none.
            wrt: The leaves to differentiate with respect to.
            rng_key: Calls with equal keys in one update use the same dropout masks and samples; each
                call without a key uses new ones.
            full_precision: Do not autocast, for a gradient that is differentiated again.

        Returns:
            The gradient in the order of `wrt`, None for leaves that no replica's loss depends on; and
            the means of the terms with their weighted sum, "loss".
        """
        rng_key = self._rng_key(rng_key)
        count = self._count(batches)
        return self._gradients(loss_fn, batches, wrt, rng_key, full_precision, count)

    def _gradients(
        self,
        loss_fn: LossFn,
        batches: Sequence[Batch],
        wrt: Sequence[Tensor],
        rng_key: int | str,
        full_precision: bool,
        count: GlobalCount,
    ) -> tuple[Vector, Logs]:
        logs: Logs = {}
        total: Vector = [None] * len(wrt)
        by_layer = count.are_equal and self._has_layers
        low_sums = self.reduce_precision == "bf16" and not full_precision
        with self._parameters(by_layer, full_precision):
            leaves = self._leaves(wrt)
            reduction = self._reduction(leaves, wrt, low_sums)
            for number, batch in enumerate(batches):
                with self._pass(batch, rng_key, full_precision=full_precision):
                    terms = self._terms(loss_fn, batch)
                    terms = self._record_losses(terms, count.totals)
                    loss = weighted_loss(terms, count.totals, logs)
                last = number == len(batches) - 1
                # By layer, whole gradients must not outlive a micro-batch either.
                reduces = by_layer or last
                if loss.requires_grad:
                    with reduction if reduction and reduces else contextlib.nullcontext():
                        loss.backward(inputs=leaves)
                if reduction and by_layer and not last:
                    total = vectors.add(total, reduction.finish({}))
                    reduction = self._reduction(leaves, wrt, low_sums)
            grads = self._collect(leaves, reduction, logs, count.is_complete)
        return vectors.add(total, grads) if by_layer else grads, logs

    def inner(
        self,
        loss_fn: LossFn,
        batches: Sequence[Batch],
        wrt: Sequence[Tensor],
        rng_key: int | str | None = None,
        replay: bool = False,
    ) -> InnerGradient:
        """Return a gradient as `gradients` does, in a form that `hypergradients` can differentiate.

        The graph of a single micro-batch is stored. With several, or with `replay`, each graph is
        built again when it is needed, so that memory is that of one graph.

        The gradient belongs to the parameters as they are now: `move`, `step` and `restoring` may come
        before `hypergradients`, and then copies of the optimizers' parameters are stored. With
        `replay` it belongs to those that the caller has put in place by then, and nothing is stored.
        """
        rng_key = self._rng_key(rng_key)
        batches = list(batches)
        count = self._count(batches)
        if len(batches) != 1 or replay:
            value, logs = self._gradients(loss_fn, batches, wrt, rng_key, True, count)
            inner = InnerGradient(value, logs, loss_fn, batches, wrt, rng_key, count.totals)
        else:
            logs = {}
            with self.whole():
                leaves = self._leaves(wrt)
                graph = self._graph(loss_fn, batches[0], leaves, rng_key, count.totals, logs)
                for leaf, grad in zip(leaves, graph, strict=True):
                    leaf.grad = None if grad is None else grad.detach()
                value = self._collect(leaves, self._reduction(leaves, wrt), logs, count.is_complete)
                inner = InnerGradient(
                    value,
                    logs,
                    loss_fn,
                    batches,
                    wrt,
                    rng_key,
                    count.totals,
                    graph,
                    self._leaf_of(),
                )
        if not replay:
            self._inner.add(inner)
        return inner

    def hypergradients(
        self, inner: InnerGradient, vector: Vector, wrt: Sequence[Tensor], step: float = 0.0
    ) -> Vector:
        """Return d<vector, inner gradient>/d wrt over the global batch; a call of all replicas.

        Args:
            inner: The inner gradient.
            vector: The vector, in the order of `inner.wrt`.
            wrt: The leaves to differentiate with respect to.
            step: 0 for exact second derivatives; else central finite differences of first derivatives,
                with a displacement of `step` times the norm of the inner parameters.
        """
        with self._at_origin(inner):
            if step:
                return self._differences(inner, vector, wrt, step)
            return self._products(inner, vector, wrt)

    def _products(self, inner: InnerGradient, vector: Vector, wrt: Sequence[Tensor]) -> Vector:
        if self.placement is not None:
            vector = placement.whole_vector(vector)
        with self.whole():
            leaf_of = self._leaf_of() if inner.graph is None else inner.leaves
            leaves = [leaf_of.get(id(p), p) for p in wrt]
            for batch in inner.batches:
                graph = inner.graph
                if graph is None:
                    at = self._leaves(inner.wrt)
                    graph = self._graph(inner.loss_fn, batch, at, inner.rng_key, inner.totals, {})
                product = sum(
                    (v * g).sum() for v, g in zip(vector, graph) if v is not None and g is not None
                )
                if isinstance(product, Tensor) and product.requires_grad:
                    product.backward(inputs=leaves)
            inner.graph, inner.leaves = None, {}
            return self._collect(leaves, self._reduction(leaves, wrt), {})

    @torch.no_grad()
    def evaluate(
        self, loss_fn: LossFn, batches: Iterable[Sequence[Batch]], rng_key: int | str | None = None
    ) -> Logs:
        """Return the means of all terms over all batches of all replicas, as numbers.

        Args:
            loss_fn: Returns the terms of a micro-batch.
            batches: For each global batch, this replica's micro-batches of it; there may be none.
            rng_key: As for `gradients`.
        """
        rng_key = self._rng_key(rng_key)
        parts: dict[str, list[Any]] = {}  # term: [sum, name of its size or None, weight]
        sizes: dict[str, Any] = {}
        has_layers = self._has_layers
        for by_layer, group in itertools.groupby(
            batches, lambda micro_batches: has_layers and self._compare(micro_batches)[0]
        ):
            with self._parameters(by_layer):
                for batch in itertools.chain.from_iterable(group):
                    with self._pass(batch, rng_key):
                        terms = self._record_losses(loss_fn(batch))
                    for name, size in batch.sizes.items():
                        sizes[name] = sizes.get(name, 0) + size
                    for name, term in terms.items():
                        part = parts.setdefault(name, [0.0, term.per, term.weight])
                        part[0] = part[0] + term.sum.double()
        return means(process_group.gather_objects(to_python((parts, sizes))))

    @torch.no_grad()
    def map(
        self,
        function: Callable[[Any], T],
        batches: Sequence[Batch],
        rng_key: int | str | None = None,
    ) -> list[T]:
        """Return `function` of each micro-batch, without gradients, with the random numbers of `rng_key`."""
        rng_key = self._rng_key(rng_key)
        results = []
        by_layer = self._has_layers and self._compare(batches)[0]
        with self._parameters(by_layer):
            for batch in batches:
                with self._pass(batch, rng_key):
                    results.append(function(batch))
        return results

    def require_finite(self, values: Tensor) -> None:
        """Let `step` refuse the rest of this update's steps unless all `values` are finite.

        `values` must be equal on all replicas.
        """
        self._losses = self._losses + values.detach().double().sum()

    # ---------------------------------------------------------------- parameters

    def parameters(self, name: str) -> Sequence[Tensor]:
        """Return the parameters of one optimizer, in its order."""
        return self.optimizers[name].parameters

    def whole(self, write: bool = False) -> contextlib.AbstractContextManager[None]:
        """Let the model hold whole parameters inside; with `write` the shards take their changes.

        Every pass does so; a method needs it only to read weights between passes. A call of all
        replicas.
        """
        return contextlib.nullcontext() if self.placement is None else self.placement.whole(write)

    def step(self, name: str, grads: Vector) -> bool:
        """Clip the global gradient, in place, and take one scheduled step.

        Returns False, and changes nothing, if the gradient, a loss of this update or a value passed to
        `require_finite` is not finite. With `defers` the device changes nothing then, nor in a later
        step of the update, and the host, which does not wait for it, gets True.
        """
        optimizer = self.optimizers[name]
        if self._saved.get(name, False) is None:
            self._saved[name] = copied(optimizer.local_state())
        if all(g is None for g in grads):
            return True
        norm = optimizer.load_gradient(grads)
        found_inf = self._found_inf(name, norm) if self.defers else None
        if found_inf is None and not torch.isfinite(norm + self._losses):
            optimizer.forget_gradient()
            self.norms.pop(name, None)
            self.nonfinite.append(name)
            return False
        self.norms[name] = norm
        # Multiplying by 1 changes nothing, but takes a pass over all gradients.
        if optimizer.clip_norm and (self.defers or norm + 1e-6 > optimizer.clip_norm):
            clip_grads_with_norm_(optimizer.local, optimizer.clip_norm, norm)
        self._store_origins()
        optimizer.step(found_inf)
        optimizer.forget_gradient()
        self._refresh(optimizer.parameters)
        return True

    def _found_inf(self, name: str, norm: Tensor) -> Tensor:
        """Return 1.0 if this update is not finite up to this norm, else 0.0, and note it for `skipped`."""
        self._losses = self._losses + norm  # the update's later steps are skipped as well
        bad = ~torch.isfinite(self._losses)
        first = self._skipped.setdefault(name, torch.full((), -1, device=self.device))
        first.masked_fill_(bad & (first < 0), self._update)
        return bad.float()

    def skipped(self) -> tuple[int, list[str]] | None:
        """Return the first update in which the device skipped a step, and the names of its optimizers.

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
        """Return the replicas whose part of an update's losses was not finite; a call of all replicas.

        The update is the last one, or with `defers` one that `skipped` has just returned.
        """
        loss = self._local_losses.pop(update, torch.zeros(()))
        self._local_losses.clear()
        are_finite = process_group.gather_objects(bool(torch.isfinite(loss)))
        return [replica for replica, is_finite in enumerate(are_finite) if not is_finite]

    @torch.no_grad()
    def move(self, name: str, vector: Vector, scale: float) -> None:
        """Add scale * vector to the parameters, a virtual step; only inside `restoring`."""
        assert name in self._saved, (
            "move changes parameters for a while; use it inside restoring(name)"
        )
        self._store_origins()
        self._add_(self.parameters(name), vector, scale)

    def _add_(self, parameters: Sequence[Tensor], vector: Vector, scale: float) -> None:
        pairs = [
            (vectors.local(p), vectors.local(v))
            for p, v in zip(parameters, vector, strict=True)
            if v is not None
        ]
        torch._foreach_add_([p for p, _ in pairs], [v for _, v in pairs], alpha=scale)
        self._refresh(parameters)

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
            self._store_origins()
            self._write([optimizer], saved)
            if state is not None:
                optimizer.load_local_state(state)

    def _write(self, optimizers: Iterable[Optimizer], values: Sequence[Tensor]) -> None:
        """Set what this process holds of the parameters of some optimizers."""
        optimizers = list(optimizers)
        with torch.no_grad():
            torch._foreach_copy_([p for o in optimizers for p in o.local], list(values))
        self._refresh([p for o in optimizers for p in o.parameters])

    def _held(self) -> list[Tensor]:
        """Return copies of what this process holds of all optimizers' parameters."""
        return [p.detach().clone() for o in self.optimizers.values() for p in o.local]

    def _store_origins(self) -> None:
        """Let inner gradients store the parameters that they belong to, before these change."""
        unstored = [inner for inner in self._inner if inner.origin is None]
        origin = self._held() if unstored else None
        for inner in unstored:
            # Autograd refuses a graph whose parameters have changed in place.
            inner.origin, inner.graph, inner.leaves = origin, None, {}

    @contextlib.contextmanager
    def _at_origin(self, inner: InnerGradient) -> Iterator[None]:
        """Put the parameters that an inner gradient belongs to in place inside."""
        if inner.origin is None:
            yield
            return
        self._store_origins()
        held = self._held()
        self._write(self.optimizers.values(), inner.origin)
        try:
            yield
        finally:
            self._write(self.optimizers.values(), held)

    # ---------------------------------------------------------------- helpers

    def to_device(self, batches: Sequence[B]) -> list[B]:
        """Return the micro-batches with their tensors on the engine's device, floats in its precision."""
        return [batch.to(self.device, PRECISIONS[self.precision]) for batch in batches]

    def _terms(self, loss_fn: LossFn, batch: Batch) -> Terms:
        """Return the terms of a loss inside a pass; not compiled where operations are counted."""
        if self._compiled is None or _get_current_dispatch_mode() is not None:
            return loss_fn(batch)
        noise = current_context().noise
        keys = None if noise is None else noise.traced_keys()
        terms: Terms = self._compiled(loss_fn, batch, keys)
        return terms

    def _record_losses(self, terms: Terms, totals: dict[str, Any] | None = None) -> Terms:
        losses = [term for term in terms.values() if term.is_loss]
        if totals is not None and losses and not self.has_items:
            counts = [totals.get(term.per, 1) if term.per else 1 for term in losses]
            self.has_items = any(bool(torch.as_tensor(count).any()) for count in counts)
        self.loss_terms.update(name for name, term in terms.items() if term.is_loss)
        return terms

    def _rng_key(self, rng_key: int | str | None) -> int | str:
        # Counted only without a key: a method that calls another must not shift later draws.
        if rng_key is not None:
            return rng_key
        self._calls += 1
        return self._calls

    @contextlib.contextmanager
    def _pass(
        self,
        batch: Batch,
        rng_key: int | str,
        double_backward: bool = False,
        full_precision: bool = False,
    ) -> Iterator[None]:
        root = random_streams.key(self.seed, "noise", self._update, rng_key)
        noise = None if batch.rows is None else Noise(root, batch.rows, self.device)
        # Second derivatives and differences of gradients drown in bfloat16's rounding.
        low = self._is_low(double_backward or full_precision)
        context = ForwardContext(noise, double_backward, self._ahead, self.recompute)
        autocast = torch.autocast(self.device.type, torch.bfloat16)
        with use_context(context), autocast if low else contextlib.nullcontext():
            yield
        if noise is not None and noise.position:
            self._ahead = noise.position

    @property
    def _has_layers(self) -> bool:
        """Whether a pass that begins here can gather layers of the model one at a time."""
        sharded = self.placement
        return sharded is not None and bool(sharded.layers) and not sharded.leaves

    def _is_low(self, full_precision: bool = False) -> bool:
        """Whether a pass runs under autocast."""
        return self.precision == "bf16" and not full_precision

    def _parameters(
        self, by_layer: bool, full_precision: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Let the model hold the parameters of a pass, without second derivatives."""
        if self.placement is None:
            return contextlib.nullcontext()
        low = self._is_low(full_precision)
        return self.placement.by_layer(low) if by_layer else self.placement.whole(low=low)

    def _leaf_of(self) -> dict[int, Tensor]:
        """Return the whole parameters of the pass around this call, by the id of their shards."""
        return {} if self.placement is None else dict(self.placement.leaves)

    def _leaves(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what stands for some parameters in the pass around this call."""
        if self.placement is None:
            return parameters
        return [self.placement.leaf(p) for p in parameters]

    def _refresh(self, parameters: Sequence[Tensor]) -> None:
        """Take changed shards into the pass around this call, if there is one."""
        if self.placement is not None:
            self.placement.refresh(parameters)

    def _count(self, batches: Sequence[Batch]) -> GlobalCount:
        """Count the micro-batches of all replicas, and what they hold."""
        sizes: dict[str, Any] = {}
        for batch in batches:
            for name, size in batch.sizes.items():
                sizes[name] = sizes[name] + size if name in sizes else size
        if self.replicas == 1:
            return GlobalCount(sizes, are_equal=True, is_complete=bool(batches))
        # A number stays on the host.
        totals = {n: torch.as_tensor(sizes[n], dtype=torch.float64).clone() for n in sorted(sizes)}
        are_equal, is_complete = self._compare(batches)
        if is_complete:
            process_group.sum_(list(totals.values()))
        else:
            totals = self._summed(process_group.gather_objects(to_python(totals)))
        return GlobalCount(totals, are_equal, is_complete)

    def _summed(self, replicas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the sums of the replicas' sizes, which those without micro-batches lack."""
        totals: dict[str, Any] = {}
        for sizes in replicas:
            for name, size in sizes.items():
                device = self.device if isinstance(size, list) else "cpu"
                number = torch.tensor(size, dtype=torch.float64, device=device)
                totals[name] = totals.get(name, 0.0) + number
        return totals

    def _compare(self, batches: Sequence[Batch]) -> tuple[bool, bool]:
        """Return whether all replicas have as many micro-batches, and whether each has one at least."""
        number = len(batches)
        sums = torch.tensor([number, number**2, number > 0], dtype=torch.float64, device="cpu")
        process_group.sum_([sums])
        total, squares, having = sums.tolist()
        return total**2 == self.replicas * squares, having == self.replicas

    def _graph(
        self,
        loss_fn: LossFn,
        batch: Batch,
        wrt: Sequence[Tensor],
        rng_key: Any,
        totals: Any,
        logs: Logs,
    ) -> list[Tensor | None]:
        with self._pass(batch, rng_key, double_backward=True):
            terms = self._record_losses(loss_fn(batch), totals)
            loss = weighted_loss(terms, totals, logs)
        return list(torch.autograd.grad(loss, list(wrt), create_graph=True, allow_unused=True))

    def _differences(
        self, inner: InnerGradient, vector: Vector, wrt: Sequence[Tensor], step: float
    ) -> Vector:
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
                self._add_(inner.wrt, vector, sign * size)
            side, _ = self.gradients(
                inner.loss_fn, inner.batches, wrt, inner.rng_key, full_precision=True
            )
            sides.append(side)
            with torch.no_grad():
                torch._foreach_copy_([vectors.local(p) for p in inner.wrt], saved)
            self._refresh(inner.wrt)
        return vectors.scale(vectors.add(sides[0], sides[1], -1.0), 0.5 / size)

    def _reduction(
        self, leaves: Sequence[Tensor], wrt: Sequence[Tensor], low: bool = False
    ) -> Reduction | None:
        """Return what sums the gradients of `leaves` over replicas, if there are several."""
        return Reduction(leaves, wrt, low) if self.replicas > 1 else None

    def _collect(
        self,
        leaves: Sequence[Tensor],
        reduction: Reduction | None,
        logs: Logs,
        is_complete: bool = True,
    ) -> Vector:
        """Return the gradients of `leaves` and reset them; sum them and the logs over replicas."""
        if reduction is not None:
            if "loss" in logs:
                known = self._local_losses.get(self._update, 0.0)
                self._local_losses[self._update] = known + torch.as_tensor(logs["loss"])
            grads: Vector = reduction.finish(logs, is_complete)
        else:
            grads = [p.grad for p in leaves]
            for p in leaves:
                p.grad = None
        if "loss" in logs:
            self._losses = self._losses + logs["loss"]
        return grads


def traced_terms(loss_fn: LossFn, batch: Batch, keys: Tensor | None) -> Terms:
    """Return the terms of a loss with the random numbers of TracedNoise(keys); it is compiled."""
    noise = None if keys is None else TracedNoise(keys)
    with use_context(ForwardContext(noise)):
        return loss_fn(batch)


def copied(state: Any) -> Any:
    """Return a deep copy of nested dicts, lists and tensors."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {k: copied(v) for k, v in state.items()}
    return [copied(v) for v in state] if isinstance(state, list) else state
