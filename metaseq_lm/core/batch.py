"""Typed batches, and the terms that a criterion computes from one.

Shapes: B rows, S positions of the longest row, M chosen positions, C copies.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from metaseq_lm.core.errors import UsageError

__all__ = [
    "Batch",
    "CopiesBatch",
    "Layout",
    "Logs",
    "ScoredBatch",
    "SequenceBatch",
    "Term",
    "Terms",
    "TokenBatch",
    "WordBatch",
    "count_targets",
]

B = TypeVar("B", bound="Batch")
C = TypeVar("C", bound="CopiesBatch")
# Tokens visible to a token of a row: all, itself and earlier ones, itself and later ones, a
# bidirectional prefix and earlier ones, or the tokens of its own and lower ranks. A tensor of
# reaches holds indices into this.
REACHES = ("both", "causal", "anticausal", "prefix", "ranked")


def _map_fields(instance: Layout | Batch, function: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the tensors and arrays among the fields, with a function applied to each."""
    values = {item.name: getattr(instance, item.name) for item in dataclasses.fields(instance)}
    return {n: function(v) for n, v in values.items() if isinstance(v, (Tensor, np.ndarray))}


@dataclass(frozen=True, eq=False)
class Layout:
    """Visibility between the tokens of rows (..., S); attention derives its masks from it.

    Attributes:
        padding: True at padding, which is not attended to, boolean (..., S); None without padding.
        documents: Number of each token's document (..., S), rising along a row, if rows pack
            several documents: tokens see only their document, and its positions start at 0. None
            for one document per row.
        reach: One of REACHES for all rows, or an index into it for each row, (...,).
        prefix: Number of tokens of each document that are seen from both sides, (...,), or (..., S)
            with the number of each token's document if they differ; for rows of reach "prefix".
        ranks: Rank of each token (..., S), for rows of reach "ranked": a token sees the tokens of
            its own and lower ranks. With group numbers as ranks, it sees its own group from both
            sides and the groups before it.

    Raises:
        ValueError: The reach is unknown, "prefix" without `prefix`, or "ranked" without `ranks`.
    """

    padding: Tensor | None = None
    documents: Tensor | None = None
    reach: str | Tensor = "both"
    prefix: Tensor | None = None
    ranks: Tensor | None = None
    sequences: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.reach, str):
            return
        if self.reach not in REACHES:
            raise ValueError(f"reach {self.reach!r}: one of {', '.join(REACHES)}")
        if self.reach == "prefix" and self.prefix is None:
            raise ValueError("a layout whose reach is 'prefix' needs the length of the prefix")
        if self.reach == "ranked" and self.ranks is None:
            raise ValueError("a layout whose reach is 'ranked' needs the ranks of the tokens")

    def map(self, function: Callable[[Any], Any]) -> Layout:
        """Return a copy with a function applied to each tensor."""
        mapped = _map_fields(self, function)
        return dataclasses.replace(self, **mapped) if mapped else self

    def rows(self, chosen: Any) -> Layout:
        """Return the layout of some rows, chosen by an index into the leading axes."""
        # A row may be chosen twice.
        return dataclasses.replace(self.map(lambda tensor: tensor[chosen]), sequences=0)

    def repeated(self, count: int) -> Layout:
        """Return the layout of rows (..., count, S) that repeat each row `count` times."""
        repeated: dict[str, Any] = {"sequences": count * self.sequences}
        of_prefix = -2 if self.prefix_by_document else -1
        axes = {"padding": -2, "documents": -2, "ranks": -2, "reach": -1, "prefix": of_prefix}
        for name, axis in axes.items():
            value = getattr(self, name)
            if isinstance(value, Tensor):
                repeated[name] = torch.stack([value] * count, dim=axis)
        return dataclasses.replace(self, **repeated)

    @property
    def prefix_by_document(self) -> bool:
        """Whether `prefix` has a number for each token, of its document, rather than each row."""
        if self.prefix is None or self.documents is None:
            return False
        return self.prefix.dim() == self.documents.dim()

    def padding_of(self, tokens: Tensor) -> Tensor:
        """Return the padding of rows of token ids (..., S), boolean (..., S)."""
        if self.padding is None:
            return torch.zeros_like(tokens, dtype=torch.bool)
        return self.padding

    def last(self, tokens: Tensor) -> Tensor:
        """Return the position of the last token (...,) of rows (..., S), wherever padding is."""
        at = torch.arange(tokens.shape[-1], device=tokens.device)
        return at.masked_fill(self.padding_of(tokens), 0).amax(-1)

    def lengths(self, tokens: Tensor) -> Tensor:
        """Return the lengths (N,) of rows (..., S) with padding at their ends, all rows flattened.

        For networks that read whole rows; UsageError if the layout packs documents or restricts
        which tokens are visible.
        """
        if self.documents is not None or not isinstance(self.reach, str) or self.reach != "both":
            raise UsageError(
                "a recurrent network reads whole rows in both directions, but this objective packs "
                "rows or restricts what tokens see; use a Transformer"
            )
        return (~self.padding_of(tokens)).flatten(0, -2).sum(-1)


ALL_VISIBLE = Layout()


@dataclass(kw_only=True)
class Batch:
    """A micro-batch, which a stream yields and a criterion takes.

    Each kind of batch is a subclass; its fields are tensors, numbers, names or None. Arrays become
    tensors, except `rows` and `samples`, which stay on the host.

    Attributes:
        sizes: Denominators of the terms by name, such as {"targets": 97, "rows": 16}; numbers, or
            tensors (C,) for C independent copies.
        rows: Number of each row, (B,) or (C, B), unsigned: the row's dropout masks and samples are
            drawn from it. The stream sets it if the collate function has not.
        samples: Index of each row's sample in the data set (B,); the stream sets it if the collate
            function has not.
        stream: Name of the stream that yielded the batch.
    """

    sizes: dict[str, Any] = field(default_factory=dict)
    rows: np.ndarray | None = None
    samples: np.ndarray | None = None
    stream: str = ""

    def __post_init__(self) -> None:
        self._map_tensors(lambda tensor: tensor)

    def to(self: B, device: torch.device | str, dtype: torch.dtype | None = None) -> B:
        """Return a copy with its tensors on a device, floating-point ones as `dtype`."""

        def place(tensor: Tensor) -> Tensor:
            # Ids and masks keep their type.
            return on_device(tensor, device, dtype if tensor.is_floating_point() else None)

        placed = copy.copy(self)
        placed._map_tensors(place)
        return placed

    def replace(self: B, **changes: Any) -> B:
        """Return a copy with some fields changed; an unknown field is a TypeError."""
        return dataclasses.replace(self, **changes)

    def _map_tensors(self, function: Callable[[Tensor], Tensor]) -> None:
        def apply(value: Any) -> Any:
            if isinstance(value, Layout):
                return value.map(apply)
            if isinstance(value, Batch):
                value = copy.copy(value)
                value._map_tensors(function)
                return value
            if isinstance(value, np.ndarray):
                value = torch.from_numpy(value)
            return function(value) if isinstance(value, Tensor) else value

        for item in dataclasses.fields(self):
            if item.name not in ("rows", "samples"):
                setattr(self, item.name, apply(getattr(self, item.name)))
        self.sizes = {name: apply(size) for name, size in self.sizes.items()}


@overload
def as_tensor(array: np.ndarray) -> Tensor: ...
@overload
def as_tensor(array: np.ndarray | None) -> Tensor | None: ...
def as_tensor(array: np.ndarray | None) -> Tensor | None:
    """Return a tensor that shares the memory of `array`; None for None."""
    return None if array is None else torch.from_numpy(array)


def on_device(
    tensor: Tensor, device: torch.device | str, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a tensor on a device, as `dtype`; the host does not wait for a copy to a GPU."""
    device = torch.device(device)
    if device.type == "cuda" and tensor.device.type == "cpu":
        # Otherwise the host would wait for the copy.
        tensor = tensor.pin_memory()
    return tensor.to(device, dtype, non_blocking=True)


@dataclass(kw_only=True)
class SequenceBatch(Batch):
    """Rows of tokens and the visibility between them.

    Attributes:
        tokens: Token ids (B, S), masked for a masked objective.
        layout: Padding, and which tokens see each other.
    """

    tokens: Tensor
    layout: Layout = ALL_VISIBLE

    @property
    def padding(self) -> Tensor | None:
        """True at padding, boolean (B, S); None without padding."""
        return self.layout.padding


@dataclass(kw_only=True)
class TokenBatch(SequenceBatch):
    """Rows of tokens for a masked, causal or labelled objective.

    Attributes:
        segments: Segment of each token, 0 or 1, (B, S); None for one segment.
        positions: Chosen positions (B, M), padded with 0.
        targets: The target tokens at the chosen positions (B, M) or at every position (B, S), -1
            for none; or the class or real value of each row (B,).
        head: Name of the head that the batch is for, if the model has several.
    """

    segments: Tensor | None = None
    positions: Tensor | None = None
    targets: Tensor | None = None
    head: str | None = None


@dataclass(kw_only=True)
class ScoredBatch(TokenBatch):
    """Unmasked rows of tokens, for a criterion that computes the tokens' probabilities.

    Attributes:
        scored: The positions to score, boolean (B, S).
        mask_id: Id of [MASK].
        batch_tokens: Approximate number of tokens in a forward pass.
        words: Number of each token's word (B, S), to hide the later tokens of the word together
            with a scored token; None to hide only the scored token.
    """

    scored: Tensor
    mask_id: int
    batch_tokens: int
    words: Tensor | None = None


@dataclass(kw_only=True)
class CopiesBatch(TokenBatch):
    """Rows of tokens for C independent copies of a model, such as virtual students, side by side.

    All tensors, `rows` and `samples` have a leading axis C, and each size is a tensor (C,).

    Attributes:
        copies: Number of all copies, if the batch holds only some of them; else 0.
    """

    copies: int = 0

    @property
    def copy_count(self) -> int:
        """The number of all copies."""
        return self.copies or len(self.tokens)

    def map_arrays(self: C, function: Callable[[Any], Any]) -> C:
        """Return a copy with a function applied to each tensor, and to `rows` and `samples`."""
        return self.replace(layout=self.layout.map(function), **_map_fields(self, function))

    def some_copies(self: C, chosen: slice) -> C:
        """Return the batch of some of the copies."""
        copies = len(self.tokens)
        if chosen == slice(0, copies):
            return self
        sizes = {name: size[chosen] for name, size in self.sizes.items()}
        return self.map_arrays(lambda array: array[chosen]).replace(sizes=sizes, copies=copies)


@dataclass(kw_only=True)
class ImageBatch(Batch):
    """Images (B, channels, height, width), classes (B,) if labelled, and the name of a head."""

    images: Tensor
    targets: Tensor | None = None
    head: str | None = None


@dataclass(kw_only=True)
class WordBatch(SequenceBatch):
    """Sentences of words as rows `<start> words <end>`; M are the characters of a word.

    Attributes:
        scored: True at words, boolean (B, S).
        lengths: Number of words of each sentence (B,).
        characters: Character ids (B, S, M); None if the model does not read them.
        labels: Label of each word (B, S), -1 where there is no word; None without labels.
        heads: Position of each word's head (B, S), 0 for the root, -1 where there is no word;
            None unless the labels are of trees.
        set_name: Name of the labelled set of the sentences.
        learners: Names of the sets with heads that learn from unlabelled sentences.
        weight: Weight of the loss on unlabelled sentences.
        layers: States (B, S, X) of each layer of a frozen language model; None until computed.
    """

    scored: Tensor
    lengths: Tensor
    characters: Tensor | None = None
    labels: Tensor | None = None
    heads: Tensor | None = None
    set_name: str = ""
    learners: tuple[str, ...] = ()
    weight: float | Tensor = 1.0
    layers: list[Tensor] | None = None


@dataclass
class Term:
    """One term of a loss.

    Attributes:
        sum: The sum over items: a scalar, or (C,) for C independent copies, each with its own size.
        per: Name of the denominator in `Batch.sizes`, which the engine sums over all micro-batches
            and replicas; None for a sum over the global batch.
        weight: A number or (C,); 0 for a term that is only logged.
        is_summed: Whether to differentiate the sum instead of the mean. Logs show the mean.
        kind: What the mean measures, for gates. CAUSAL_NLL and CLOZE_NLL are cross-entropies over
            the vocabulary of unseen tokens, given the tokens before them or all other tokens; an
            exact loss of a world bounds them from below. NLL is another cross-entropy, DETECTION
            the binary one of a discriminator, "" anything else.
    """

    sum: Tensor
    per: str | None
    weight: float | Tensor = 1.0
    is_summed: bool = False
    kind: str = ""


# Terms by their names.
Terms = dict[str, Term]


def number_of(mask: Tensor) -> Tensor:
    """Return the number of true items of a boolean tensor as a float64 scalar."""
    # The precision of the logits would not do: bfloat16, under autocast, cannot count beyond 256.
    return mask.sum().double()


def count_targets(targets: Any) -> dict[str, Any]:
    """Return the sizes of targets (..., B, M), -1 for none: their number, and rows with targets.

    Sizes of an array are integers, sizes of a tensor have its leading axes.
    """
    counts = (targets >= 0).sum(-1)
    sizes = {"targets": counts.sum(-1), "rows_with_targets": (counts > 0).sum(-1)}
    if isinstance(targets, Tensor):
        return sizes
    return {name: int(size) for name, size in sizes.items()}


# Metrics, sizes and texts by their names.
Logs = dict[str, Any]


def to_python(value: Any) -> Any:
    """Return nested containers with each tensor as a float or a list of floats."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {k: to_python(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(to_python, value))
    return value
