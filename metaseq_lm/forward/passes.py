"""Forward passes: the parameters, random numbers and precision of a model's computation.

The engine starts passes and models read their context: neither imports the other.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Batch, Logs, Term, Terms, TokenBatch, on_device
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.metric_names import KINDS
from metaseq_lm.core.random_streams import FACTORS, GOLDEN, SHIFTS, row_keys, uniforms, words
from metaseq_lm.distributed.gathering import ShardedWeights, active_weights, use_weights
from metaseq_lm.distributed.placement.protocol import Placement
from metaseq_lm.distributed.vectors import is_dtensor
from metaseq_lm.runs.flops import uncounted

__all__ = ["full_precision"]

T = TypeVar("T")
LossFn = Callable[[Any], Terms]  # the argument is a Batch of some kind
RngKey = int | str

# Words generated ahead per refill at most; more only costs cache misses.
_BLOCK_WORDS = 1 << 17


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_COUNTER_STEP = _signed(GOLDEN)


def _torch_words(keys: Tensor, at: Tensor, golden: int | Tensor = _COUNTER_STEP) -> Tensor:
    """Return words number `at` (N,) of `random_streams.words`, as int64 (rows, N)."""
    z = keys[:, None] + (at + 1) * golden
    for shift, factor in zip(SHIFTS, (*FACTORS, None)):
        # torch shifts int64 arithmetically; the mask makes it the logical shift of the definition.
        z = z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))
        if factor is not None:
            z = z * _signed(factor)
    return z


@functools.cache
def cuda_kernels(device_type: str) -> ModuleType | None:
    """Return the Triton kernels for row noise; None without a CUDA device or Triton."""
    if device_type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from metaseq_lm.forward import cuda_noise

    return cuda_noise


class Noise:
    """The random numbers of a pass over one micro-batch, drawn in the order of the model's calls.

    Each row has its own sequence, so a row sees the same numbers in whatever batch it stands. The
    leading dimensions of a tensor that needs numbers must hold the rows.

    Attributes:
        kernels: The module of kernels that draw the numbers where they are used; None if torch's
            operations draw them, which is the reference.
        position: Number of words drawn from each row so far.
    """

    def __init__(self, root: int, rows: np.ndarray, device: torch.device | str = "cpu") -> None:
        self.rows = int(np.size(rows))
        self.keys = row_keys(root, np.ravel(rows))
        self.device = torch.device(device)
        self.kernels = cuda_kernels(self.device.type)
        self.position = 0
        self._device_keys: Tensor | None = None
        self._block: tuple[int, int] = (0, 0)
        self._lanes: Tensor | None = None
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}

    def tensor(self) -> Tensor:
        """Return the keys of the rows (rows,), as int64 on the device."""
        if self._device_keys is None:
            keys = torch.from_numpy(self.keys.view(np.int64))
            self._device_keys = on_device(keys, self.device)
        return self._device_keys

    def traced_keys(self) -> Tensor:
        """Return the argument of TracedNoise, for the numbers from `position` on."""
        keys = self.tensor()
        return torch.cat([keys, keys.new_tensor([_COUNTER_STEP, self.position])])

    def _take(self, shape: Sequence[int], per_word: int) -> tuple[int, int]:
        """Return (numbers, words) that a tensor of `shape` needs from each row."""
        total, rows = math.prod(shape), max(self.rows, 1)
        if total % rows:
            raise ValueError(
                f"a tensor of shape {tuple(shape)} cannot be spread over the {self.rows} rows of "
                "this pass; give the batch a 'rows' entry with one number per row "
                "of what the model sees"
            )
        numbers = total // rows
        return numbers, -(-numbers // per_word)

    def _refill(self, count: int, ahead: int) -> None:
        count = max(count, min(ahead, _BLOCK_WORDS // max(self.rows, 1)))
        if self.device.type == "cpu":
            lanes = words(self.keys, self.position, count).view(np.uint16)
            # torch compares int16 faster than uint16; the offset keeps the order.
            self._lanes = torch.from_numpy((lanes ^ np.uint16(0x8000)).view(np.int16))
        else:
            keys = self.tensor()
            at = torch.arange(self.position, self.position + count, device=self.device)
            z = _torch_words(keys, at)
            lanes16 = torch.stack([(z >> s) & 0xFFFF for s in (0, 16, 32, 48)], dim=-1)
            self._lanes = (lanes16.flatten(1) - 0x8000).to(torch.int16)
        self._block = (self.position, self.position + count)
        self._masks = {}

    def at(self, position: int) -> Noise:
        """Return the noise from `position` on; a copy unless it is the current position."""
        if position == self.position:
            return self
        noise = copy.copy(self)
        noise.position, noise._lanes = position, None
        return noise

    def keep(self, shape: Sequence[int], p: float, dtype: torch.dtype, ahead: int = 0) -> Tensor:
        """Return a dropout multiplier: 0 with probability `p`, else 1 / (1 - p).

        With torch.bool it is a mask instead, false with probability `p`.

        `p` is rounded to 1/65536. `ahead` is how many words the pass is expected to need; it
        changes speed only.
        """
        numbers, count = self._take(shape, per_word=4)
        threshold = round(p * 65536)
        if self._lanes is None or self.position + count > self._block[1]:
            self._refill(count, ahead)
        mask = self._masks.get((threshold, dtype))
        if mask is None:
            assert self._lanes is not None
            mask = _mask_scale(self._lanes >= threshold - 32768, p, dtype)
            self._masks[threshold, dtype] = mask
        at = (self.position - self._block[0]) * 4
        self.position += count
        return mask[:, at : at + numbers].reshape(shape)

    def dropout(self, x: Tensor, p: float, residual: Tensor | None = None) -> Tensor:
        """Return x times `keep` plus the residual, computed by `kernels`, which must be set."""
        assert self.kernels is not None
        _, count = self._take(x.shape, per_word=4)
        start, self.position = self.position, self.position + count
        dropped: Tensor = self.kernels.dropout(x, residual, self.tensor(), start, round(p * 65536))
        return dropped

    def uniform(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return numbers in [0, 1), spread over the rows like `keep`."""
        numbers, count = self._take(shape, per_word=1)
        if self.kernels is not None:
            drawn = self.kernels.uniforms(self.tensor(), self.position, count)
        elif self.device.type == "cpu":
            drawn = torch.from_numpy(uniforms(self.keys, self.position, count))
        else:
            keys = self.tensor()
            at = torch.arange(self.position, self.position + count, device=self.device)
            drawn = _torch_uniforms(keys, at)
        self.position += count
        self._lanes = None
        return _below_1(drawn[:, :numbers].reshape(shape), dtype)


def scale_of(p: float) -> float:
    """Return 1 / (1 - p), p rounded to 1/65536."""
    return 65536 / (65536 - round(p * 65536))


def _mask_scale(mask: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """Return the multiplier, of a dtype, of the entries that a mask keeps."""
    if dtype == torch.bool:
        return mask
    return mask.to(dtype) * scale_of(p)


def _torch_uniforms(keys: Tensor, at: Tensor, golden: int | Tensor = _COUNTER_STEP) -> Tensor:
    return ((_torch_words(keys, at, golden) >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def _below_1(drawn: Tensor, dtype: torch.dtype) -> Tensor:
    # Rounding to a shorter type may reach 1.
    return drawn.to(dtype).clamp(max=1 - torch.finfo(dtype).eps / 2)


class TracedNoise(Noise):
    """The numbers of Noise as operations of a graph that torch.compile traces.

    `keys` (rows + 2,) are int64: the row keys, GOLDEN (the compiler would multiply a constant by
    positions in unbounded integers), and the number of the first word.

    Attributes:
        position: Number of words drawn from each row, counted from that one.
    """

    def __init__(self, keys: Tensor) -> None:
        self.row_keys, self.golden, self.first = keys[:-2], keys[-2], keys[-1]
        self.kernels = None
        self.position = 0

    def _advance(self, shape: Sequence[int], per_word: int) -> Tensor:
        """Return the positions of each row's next numbers, enough for a tensor of `shape`."""
        numbers = math.prod(shape) // self.row_keys.shape[0]
        start, self.position = self.position, self.position - (-numbers // per_word)
        at = start * per_word + torch.arange(numbers, device=self.row_keys.device)
        return at + self.first * per_word

    def keep(self, shape: Sequence[int], p: float, dtype: torch.dtype, ahead: int = 0) -> Tensor:
        at = self._advance(shape, per_word=4)
        lanes = (_torch_words(self.row_keys, at // 4, self.golden) >> at % 4 * 16) & 0xFFFF
        return _mask_scale(lanes >= round(p * 65536), p, dtype).reshape(shape)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        at = self._advance(shape, per_word=1)
        drawn = _torch_uniforms(self.row_keys, at, self.golden)
        return _below_1(drawn.reshape(shape), dtype)


@dataclass(frozen=True)
class ForwardContext:
    """The settings of the current forward pass that layers read; set by the engine.

    Attributes:
        noise: The random numbers of the pass.
        double_backward: Whether the gradient will itself be differentiated.
        ahead: How many random words the pass is expected to need.
        recompute: Whether the activations inside blocks are computed again in the backward pass.
    """

    noise: Noise | None = None
    double_backward: bool = False
    ahead: int = 0
    recompute: bool = False


_current = ForwardContext()  # not a ContextVar, which torch.compile cannot trace


def current_context() -> ForwardContext:
    """Return the context that the calling layer runs in."""
    return _current


@contextlib.contextmanager
def use_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make `context` the current one inside the with block."""
    global _current
    outer, _current = _current, context
    try:
        yield context
    finally:
        _current = outer


def uniform(
    shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return numbers in [0, 1) of the current pass, drawn by row; torch's own outside a pass."""
    noise = current_context().noise
    if noise is None:
        return torch.rand(shape, dtype=dtype, device=device)
    return noise.uniform(shape, dtype)


def draw_index(cumulative: Tensor) -> Tensor:
    """Draw an index (...,) from cumulative weights (..., V) in float64, by row."""
    # Inverting the distribution takes one random number per draw, where Gumbel noise needs V.
    u = uniform(cumulative.shape[:-1], cumulative.device, cumulative.dtype)
    # The last weight is their sum only up to rounding, so u is scaled to it.
    index = torch.searchsorted(cumulative, (u * cumulative[..., -1]).unsqueeze(-1), right=True)
    return index.squeeze(-1).clamp(max=cumulative.shape[-1] - 1)


def full_precision(x: Tensor) -> Tensor:
    """Return x in fp32 if it is in half precision, too coarse for a softmax over many classes."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return x.float()
    return x


def apply_block(block: nn.Module, *inputs: Any) -> Tensor:
    """Return block(*inputs); with `recompute` the graph keeps only the inputs."""
    context = current_context()
    if not (context.recompute and torch.is_grad_enabled()):
        output: Tensor = block(*inputs)
        return output
    # Each call of the block gathers the shards.
    active = active_weights()
    # The backward pass runs the block again with the same weights and random numbers. The weights
    # are arguments, because the block holds others by then under functional_call, or between passes
    # on sharded parameters.
    weights = {n: w for n, w in block.named_parameters() if not is_dtensor(w)}
    start = 0 if context.noise is None else context.noise.position
    runs = 0

    def run(*tensors: Any) -> Tensor:
        nonlocal runs
        runs += 1
        noise = None if context.noise is None else context.noise.at(start)
        named: dict[str, Any] = dict(zip(weights, tensors[len(inputs) :]))
        counting = uncounted() if runs > 1 else contextlib.nullcontext()
        with use_context(replace(context, noise=noise)), use_weights(*active), counting:
            result: Tensor = functional_call(block, named, tensors[: len(inputs)])
        return result

    # The state of torch's generator is not needed: blocks draw from the noise of the pass.
    recomputed: Tensor = checkpoint(
        run, *inputs, *weights.values(), use_reentrant=False, preserve_rng_state=False
    )
    return recomputed


@dataclass
class _LossRecord:
    """Statistics of the losses of a run.

    Attributes:
        loss_terms: The kind of each term that is part of a loss, by name: lower is better.
        has_items: Whether any differentiated loss had an item, such as a target; None before the
            first.
    """

    loss_terms: dict[str, str] = field(default_factory=dict)
    has_items: bool | None = None

    def add(self, terms: Terms, totals: Mapping[str, Any] | None = None) -> None:
        """Record terms; `totals` are the global batch's sizes if its loss is differentiated."""
        losses = {name: term for name, term in terms.items() if _is_optimized(term)}
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
        placement: The placement of the model's parameters.
        recompute: Whether to compute the activations inside blocks again in the backward pass.
        compiled: Whether `ForwardPass.terms` runs losses through torch.compile.

    Attributes:
        record: Statistics of the losses of these passes.
        update: Number of the update; -1 outside updates.
    """

    def __init__(
        self,
        seed: int,
        device: torch.device,
        is_low: bool,
        placement: Placement,
        recompute: bool,
        compiled: bool,
    ) -> None:
        self.seed, self.device, self.is_low = seed, device, is_low
        self.placement = placement
        self.recompute = recompute
        self.compiled_terms: Callable[..., Terms] | None = None
        if compiled:
            # dynamic: lengths differ between batches; fullgraph: other code is an error.
            self.compiled_terms = torch.compile(_traced_terms, fullgraph=True, dynamic=True)
        self.record = _LossRecord()
        self.update = 0
        self.words = 0  # number of random words that the last pass used
        self._calls = 0  # calls without a key in this update

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
        """Return the key of a pass's random numbers, a new one for None."""
        # Only calls without a key count: a method that calls another must not shift later draws.
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
            are_equal: Whether all replicas run the same number of micro-batches, and can so gather
                sharded parameters where they are used; otherwise they gather before the pass.
            full_precision: Whether the gradient is part of second derivatives, or of finite
                differences in their place: no autocast.
            double_backward: Whether the gradient will itself be differentiated; such a pass has
                full precision.
        """
        # bfloat16 is too coarse for second derivatives and differences of gradients.
        is_low = self.is_low and not (double_backward or full_precision)
        if not self.placement.gathers:
            yield ForwardPass(self, rng_key, is_low, double_backward)
            return
        gathering = self.placement.in_pass() if are_equal else self.placement.whole()
        with gathering as weights:
            yield ForwardPass(self, rng_key, is_low, double_backward, weights)


@dataclass
class ForwardPass:
    """A pass over micro-batches with its parameters set; made by `ForwardPasses.start`.

    Attributes:
        passes: The settings of all passes.
        rng_key: Key of the random numbers.
        is_low: Whether the pass runs under autocast to bfloat16.
        double_backward: Whether the gradient will itself be differentiated.
        weights: The sharded parameters that the graph gathers; None if it does not.
    """

    passes: ForwardPasses
    rng_key: RngKey
    is_low: bool
    double_backward: bool = False
    weights: ShardedWeights | None = None

    def leaves(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the leaves of the graph for parameters.

        These are the parameters themselves; if the graph gathers them, the rows that this process
        holds.
        """
        if self.weights is None:
            return parameters
        return list(map(self.weights.leaf, parameters))

    def call(self, function: Callable[[], T]) -> T:
        """Return function(), which runs the model, with the hooks of fully sharded parameters."""
        placement = self.passes.placement
        if not placement.gathers:
            return function()
        return placement.call(function)

    @contextlib.contextmanager
    def over(self, batch: Batch) -> Iterator[None]:
        """Set up the random numbers and the precision of a micro-batch inside."""
        passes = self.passes
        noise = None
        if batch.rows is not None:
            root = random_streams.key(passes.seed, "noise", passes.update, self.rng_key)
            noise = Noise(root, batch.rows, passes.device)
        context = ForwardContext(noise, self.double_backward, passes.words, passes.recompute)
        autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.is_low:
            autocast = torch.autocast(passes.device.type, torch.bfloat16)
        with use_context(context), autocast:
            yield
        if noise is not None and noise.position:
            passes.words = noise.position

    def terms(self, loss_fn: LossFn, batch: Batch) -> Terms:
        """Return the terms of a loss, inside `over`."""
        compiled = self.passes.compiled_terms
        # They are not compiled while operations are counted, nor for second derivatives.
        if compiled is None or self.double_backward or _get_current_dispatch_mode() is not None:
            return loss_fn(batch)
        noise = current_context().noise
        keys = None if noise is None else noise.traced_keys()
        return compiled(loss_fn, batch, keys)

    def mean_loss(
        self, loss_fn: LossFn, batch: Batch, totals: dict[str, Any], logs: Logs
    ) -> Tensor:
        """Return a micro-batch's part of a mean loss, and add its terms to `logs`.

        `totals` are the sizes of the global batch.
        """
        with self.over(batch):
            terms = self.terms(loss_fn, batch)
            mean = weighted_loss(terms, totals, logs)
        self.passes.record.add(terms, totals)
        return mean


def _traced_terms(loss_fn: LossFn, batch: Batch, keys: Tensor | None) -> Terms:
    """Return the terms of a loss with the random numbers of TracedNoise(keys); to be compiled."""
    noise = None if keys is None else TracedNoise(keys)
    with use_context(ForwardContext(noise)):
        return loss_fn(batch)


# ---------------------------------------------------------------- sums of terms


def _is_optimized(term: Term) -> bool:
    """Return whether a term counts in the loss; a tensor as its weight always does."""
    return isinstance(term.weight, Tensor) or term.weight != 0


def check_terms(terms: Any, sizes: dict[str, Any]) -> None:
    """Raise MetaseqError unless terms are a dictionary of `Term`, with sums shaped as their sizes.

    Any other shape would be summed for the gradient, but averaged for the log.
    """
    if not isinstance(terms, dict):
        terms = {"its result": terms}
    for name, term in terms.items():
        if not isinstance(term, Term):
            raise MetaseqError(
                f"the criterion returned a {type(term).__name__} as {name}; return "
                "{name: Term(sum, per)}: a sum, which the engine divides by the size `per`"
            )
        if term.kind not in KINDS:
            raise MetaseqError(
                f"the kind of the criterion's term '{name}' is {term.kind!r}; take one of "
                "metaseq_lm.core.metric_names: CAUSAL_NLL, CLOZE_NLL, NLL or DETECTION"
            )
        if not hasattr(term.sum, "shape"):
            raise MetaseqError(
                f"the sum of the criterion's term '{name}' is a {type(term.sum).__name__}; give "
                "Term a tensor"
            )
        if term.sum.shape not in ((), getattr(sizes.get(term.per or ""), "shape", ())):
            raise MetaseqError(
                f"the sum of the criterion's term '{name}' has the shape {tuple(term.sum.shape)}; "
                "give Term the sum over the micro-batch, a scalar"
            )


def weighted_loss(terms: Terms, totals: dict[str, Any], logs: Logs) -> Tensor:
    """Return the weighted sum of the terms' means, and add their means to `logs`."""
    check_terms(terms, totals)
    total: Any = 0.0
    excess: Any = 0.0  # of differentiated sums over the logged ones
    for name, term in terms.items():
        if term.per is None:
            mean = term.sum
        elif term.per in totals:
            size = totals[term.per]
            count = size.clamp(min=1) if isinstance(size, Tensor) else max(size, 1)
            mean = term.sum / count
        else:
            raise MetaseqError(
                f"the criterion's term '{name}' is per '{term.per}', but batch.sizes has "
                f"{', '.join(sorted(totals)) or 'nothing'}; name one of these in Term(sum, per), "
                "or let the task count that one"
            )
        logs[name] = logs.get(name, 0.0) + mean.detach().mean()
        if _is_optimized(term):
            part = term.sum if term.is_summed else mean
            total = total + (part * term.weight).sum()
            if term.is_summed:
                excess = excess + ((term.sum - mean).detach() * term.weight).sum()
    loss = torch.as_tensor(total)
    logs["loss"] = logs.get("loss", 0.0) + loss.detach() - excess
    return loss


def _has_loss(terms: Terms) -> bool:
    """Return whether a term counts in the loss."""
    return any(_is_optimized(term) for term in terms.values())


def average_terms(replicas: list[Any]) -> Logs:
    """Return the means of the terms summed by the replicas' `evaluate`, and the weighted "loss".

    A term without items has no mean and is left out, and so is a loss of only such terms.
    """
    terms: Terms = {}
    sizes: dict[str, Any] = {}
    for parts, counts in replicas:
        for name, (total, per, weight) in parts.items():
            total = torch.tensor(total, dtype=torch.float64)
            if name in terms:
                total = terms[name].sum + total
            if isinstance(weight, list):
                weight = torch.tensor(weight, dtype=torch.float64)
            terms[name] = Term(total, per, weight)
        for name, count in counts.items():
            sizes[name] = sizes.get(name, 0.0) + torch.tensor(count, dtype=torch.float64)
    logs: Logs = {}
    counted = {n: t for n, t in terms.items() if t.per not in sizes or sizes[t.per].any()}
    if counted:
        weighted_loss(counted, sizes, logs)
    if _has_loss(terms) and not _has_loss(counted):
        logs.pop("loss", None)
    return {name: value.item() for name, value in logs.items()}


def copy_sums(items: Tensor, batch: TokenBatch) -> Tensor:
    """Sum `items` to a scalar or to (C,); its leading axes are the axes of batch.tokens."""
    if batch.tokens.dim() == 3:
        return items.flatten(1).sum(1)
    return items.sum()
