"""Forward passes: parameters, random numbers and precision with which a model computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Batch, Logs, Terms, weighted_loss
from metaseq_lm.distributed.gathering import ShardedWeights
from metaseq_lm.distributed.placement import is_fully_sharded
from metaseq_lm.engine.reduction import GlobalCount, LocalCount
from metaseq_lm.forward.context import (
    ForwardContext,
    Noise,
    TracedNoise,
    current_context,
    use_context,
)

if TYPE_CHECKING:
    from metaseq_lm.distributed.placement import Placement

T = TypeVar("T")
LossFn = Callable[[Any], Terms]  # of a Batch of some kind
RngKey = int | str


@dataclass(frozen=True)
class GlobalLoss:
    """The mean loss of a global batch, as a function of the parameters.

    Attributes:
        loss_fn: Returns the terms of a micro-batch.
        batches: This replica's micro-batches; there may be none.
        rng_key: Key of the random numbers of its passes.
        count: The sizes of the global batch.
        fillers: How many of the last micro-batches count nothing: all processes run as many.
    """

    loss_fn: LossFn
    batches: list[Batch]
    rng_key: RngKey
    count: GlobalCount | LocalCount
    fillers: int = 0


@dataclass
class LossRecord:
    """Statistics of the losses of a run.

    Attributes:
        loss_terms: The kind of each term that is part of a loss, by name: lower is better.
        has_items: Whether a loss that was differentiated has had an item, such as a target; None
            before any.
    """

    loss_terms: dict[str, str] = field(default_factory=dict)
    has_items: bool | None = None

    def add(self, terms: Terms, totals: Mapping[str, Any] | None = None) -> None:
        """Record terms; `totals` are the sizes of a global batch whose loss is differentiated."""
        losses = {name: term for name, term in terms.items() if term.is_loss}
        self.loss_terms |= {name: term.kind for name, term in losses.items()}
        if totals is not None and losses and not self.has_items:
            counts = [totals.get(term.per, 1) if term.per else 1 for term in losses.values()]
            self.has_items = any(bool(torch.as_tensor(count).any()) for count in counts)


class ForwardPasses:
    """Starts the forward passes of a run.

    Args:
        seed: Seed of all random numbers inside passes.
        device: Device that the passes compute on.
        is_low: Whether passes run under autocast to bfloat16.
        placement: The model's sharded parameters; None if they rest whole in every process.
        recompute: Whether to compute the activations inside blocks again in the backward pass.
        compiled: Whether `ForwardPass.terms` runs losses through torch.compile.

    Attributes:
        record: What the losses of these passes have shown.
        update: Number of the update; -1 outside updates.
    """

    def __init__(
        self,
        seed: int,
        device: torch.device,
        is_low: bool,
        placement: Placement | None,
        recompute: bool,
        compiled: bool,
    ) -> None:
        self.seed, self.device, self.is_low = seed, device, is_low
        self.placement = placement
        self.recompute = recompute
        # Lengths differ from batch to batch; a part that cannot be compiled is an error.
        self.compiled_terms = (
            torch.compile(traced_terms, fullgraph=True, dynamic=True) if compiled else None
        )
        self.record = LossRecord()
        self.update = 0
        self.words = 0  # number of random words that the last pass used
        self._calls = 0  # of verbs without a key, in this update

    def begin(self, update: int) -> None:
        """Start an update; its random numbers depend only on the seed and its number."""
        self.update, self._calls = update, 0

    @contextlib.contextmanager
    def outside_updates(self) -> Iterator[None]:
        """Make random numbers inside depend on the seed alone."""
        saved = self.update, self._calls
        self.update, self._calls = -1, 0
        try:
            yield
        finally:
            self.update, self._calls = saved

    def key(self, rng_key: RngKey | None) -> RngKey:
        """Return a key of random numbers, a new one for None."""
        # Counted only without a key: a method that calls another must not shift later draws.
        if rng_key is not None:
            return rng_key
        self._calls += 1
        return self._calls

    @contextlib.contextmanager
    def start(
        self,
        rng_key: RngKey,
        are_equal: bool = False,
        full_precision: bool = False,
        double_backward: bool = False,
    ) -> Iterator[ForwardPass]:
        """Set the parameters of a pass inside the context; a collective call if sharded.

        Args:
            rng_key: Key of the random numbers.
            are_equal: Whether all replicas run equally many micro-batches, and so gather sharded
                parameters where they are used; otherwise before the pass.
            full_precision: Whether the gradient is part of second derivatives, or of differences
                in their place: no autocast.
            double_backward: Whether the gradient will itself be differentiated; such a pass has
                full precision.
        """
        # bfloat16 is too coarse for second derivatives and differences of gradients.
        is_low = self.is_low and not (double_backward or full_precision)
        placement = self.placement
        with contextlib.ExitStack() as stack:
            weights = None
            if placement is None:
                pass
            elif not are_equal:
                stack.enter_context(placement.whole())
            elif is_fully_sharded(placement):
                stack.enter_context(placement.in_pass())
            else:
                weights = stack.enter_context(placement.in_graph())
            yield ForwardPass(self, rng_key, is_low, double_backward, weights)

    def whole(self, write: bool = False) -> contextlib.AbstractContextManager[None]:
        """Gather full parameters inside the context; `write` copies changes back to the shards."""
        return contextlib.nullcontext() if self.placement is None else self.placement.whole(write)

    def refresh(self, parameters: Sequence[Tensor]) -> None:
        """Copy changed shards into the whole parameters of the current pass, if there is one."""
        if self.placement is not None:
            self.placement.refresh(parameters)


@dataclass
class ForwardPass:
    """A pass over micro-batches with its parameters set; made by `ForwardPasses.start`.

    Attributes:
        passes: The settings of all passes.
        rng_key: Key of the random numbers.
        is_low: Whether the pass runs under autocast to bfloat16.
        double_backward: Whether the gradient will itself be differentiated.
        weights: The sharded parameters that the graph gathers, if it does.
    """

    passes: ForwardPasses
    rng_key: RngKey
    is_low: bool
    double_backward: bool = False
    weights: ShardedWeights | None = None

    def leaves(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the leaves of the graph for parameters.

        These are the parameters themselves, or where the graph gathers them the rows that this
        process holds.
        """
        return parameters if self.weights is None else list(map(self.weights.leaf, parameters))

    def call(self, function: Callable[[], T]) -> T:
        """Return function(), in which the model computes."""
        placement = self.passes.placement
        if placement is None or placement.is_whole or not is_fully_sharded(placement):
            return function()
        return placement.call(function)

    @contextlib.contextmanager
    def over(self, batch: Batch) -> Iterator[None]:
        """Set up the random numbers and the precision of a micro-batch inside."""
        passes = self.passes
        root = random_streams.key(passes.seed, "noise", passes.update, self.rng_key)
        noise = None if batch.rows is None else Noise(root, batch.rows, passes.device)
        context = ForwardContext(noise, self.double_backward, passes.words, passes.recompute)
        autocast = torch.autocast(passes.device.type, torch.bfloat16)
        with use_context(context), autocast if self.is_low else contextlib.nullcontext():
            yield
        if noise is not None and noise.position:
            passes.words = noise.position

    def terms(self, loss_fn: LossFn, batch: Batch) -> Terms:
        """Return the terms of a loss, inside `over`.

        Not compiled where operations are counted, or for second derivatives.
        """
        compiled = self.passes.compiled_terms
        if compiled is None or self.double_backward or _get_current_dispatch_mode() is not None:
            return loss_fn(batch)
        noise = current_context().noise
        keys = None if noise is None else noise.traced_keys()
        terms: Terms = compiled(loss_fn, batch, keys)
        return terms

    def mean_loss(self, loss: GlobalLoss, number: int, logs: Logs) -> Tensor:
        """Return a micro-batch's part of a global mean loss, and add its terms to `logs`."""
        batch, totals = loss.batches[number], loss.count.totals
        is_filler = number >= len(loss.batches) - loss.fillers
        with self.over(batch):
            terms = self.terms(loss.loss_fn, batch)
            mean = weighted_loss(terms, totals, {} if is_filler else logs)
        self.passes.record.add(terms, totals)
        return mean * 0.0 if is_filler else mean


def traced_terms(loss_fn: LossFn, batch: Batch, keys: Tensor | None) -> Terms:
    """Return the terms of a loss with the random numbers of TracedNoise(keys); it is compiled."""
    noise = None if keys is None else TracedNoise(keys)
    with use_context(ForwardContext(noise)):
        return loss_fn(batch)
