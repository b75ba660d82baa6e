"""Tiny nets, handwritten batches, and the noise of one pass, for ELECTRA's tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metaseq_lm.core import config as configuration
from metaseq_lm.core.batch import Layout, ScoredBatch, Terms
from metaseq_lm.core.registry import CRITERIONS
from metaseq_lm.forward.passes import ForwardContext, Noise, use_context, weighted_loss
from metaseq_lm.methods.electra.data import ElectraBatch
from metaseq_lm.methods.electra.model import Electra
from metaseq_lm.methods.electra.options import ElectraConfig

PAD, MASK, SEP, CLS = 0, 1, 2, 3
FIRST = 4  # the first symbol that is a word
VOCABULARY = 13
RATE = 0.25
SIZES: dict[str, Any] = {
    "encoder_layers": 2,
    "encoder_embed_dim": 8,
    "encoder_ffn_embed_dim": 32,
    "encoder_attention_heads": 1,
    "max_positions": 16,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "generator_size": 0.5,
}


@dataclass(kw_only=True)
class Rows(ElectraBatch, ScoredBatch):
    """Rows to train on and to score."""

    mask_id: int = MASK
    batch_tokens: int = 1 << 20


def build(heads: tuple[str, ...] = ("rtd",), large: float = 0.5, **options: Any) -> Electra:
    """Return a float64 model with weights of size `large`, so that errors are also large."""
    torch.manual_seed(3)
    frequencies = torch.zeros(VOCABULARY)
    frequencies[FIRST:] = torch.arange(1.0, VOCABULARY - FIRST + 1)
    config = ElectraConfig(**(SIZES | options))
    model = Electra(config, VOCABULARY, PAD, heads, frequencies).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * large)
    return model


def criterion(name: str, **options: Any) -> Any:
    """Return a criterion with its defaults, a noise rate of RATE, and `options`."""
    made: dict[str, Any] = {"noise_rate": RATE}
    names = {field.name for field in fields(CRITERIONS.entry(name).dataclass)}
    chosen = {key: value for key, value in (made | options).items() if key in names}
    return configuration.build("criterion", configuration.section("criterion", name, **chosen))


def make_batch(
    lengths: tuple[int, ...] = (9, 7, 5),
    chosen: list[list[int]] | None = None,
    seed: int = 0,
    width: int = 0,
) -> Rows:
    """Return rows [CLS] words [SEP] of `lengths`; the first `chosen` position stays visible."""
    g = torch.Generator().manual_seed(seed)
    chosen = [[1, 3], [5, 2], [3]] if chosen is None else chosen
    width = max(*lengths, width)
    tokens = torch.full((len(lengths), width), PAD)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(FIRST, VOCABULARY, (length,), generator=g)
        tokens[row, 0], tokens[row, length - 1] = CLS, SEP
    masked = tokens.clone()
    most = max(1, *map(len, chosen))
    positions = torch.zeros(len(lengths), most, dtype=torch.long)
    targets = torch.full_like(positions, -1)
    for row, places in enumerate(chosen):
        for slot, place in enumerate(places):
            positions[row, slot], targets[row, slot] = place, tokens[row, place]
            if slot:
                masked[row, place] = MASK
    padding = torch.arange(width) >= torch.tensor(lengths)[:, None]
    candidates = ~padding & (tokens >= FIRST)
    subset = ~padding & (torch.rand(padding.shape, generator=g) < 0.4)
    return Rows(
        tokens=tokens,
        masked=masked,
        layout=Layout(padding if padding.any() else None),
        positions=positions,
        targets=targets,
        candidates=candidates,
        subset=subset,
        scored=candidates,
        rows=np.arange(len(lengths)),
        sizes={
            "targets": sum(map(len, chosen)),
            "tokens": sum(lengths),
            "candidates": int(candidates.sum()),
            "rows": len(lengths),
            "subset": int(subset.sum()),
        },
    )


@contextmanager
def noise(root: int = 1, rows: Any = (0, 1, 2)) -> Iterator[None]:
    """Draw the random numbers of one pass of `rows`, as the engine does for an update."""
    with use_context(ForwardContext(Noise(root, np.asarray(rows)))):
        yield


class Seen:
    """A pass of a criterion: the `tokens` that the model saw, the `terms` and the `loss`."""

    def __init__(self, model: Electra, how: Any, batch: ElectraBatch, root: int = 1) -> None:
        self.tokens: Tensor = batch.tokens
        original = model.hidden

        def spy(tokens: Tensor, batch: ElectraBatch) -> Tensor:
            self.tokens = tokens
            return original(tokens, batch)

        model.hidden = spy  # type: ignore[method-assign]
        try:
            with noise(root, batch.rows):
                self.terms: Terms = how(model, batch)
        finally:
            del model.hidden
        self.logs: dict[str, Any] = {}
        self.loss = weighted_loss(self.terms, batch.sizes, self.logs)


def chosen_positions(batch: ElectraBatch, row: int) -> list[int]:
    """Return the chosen positions of a row."""
    slots = range(batch.positions.shape[1])
    return [int(batch.positions[row, s]) for s in slots if batch.targets[row, s] >= 0]


def length(batch: ElectraBatch, row: int) -> int:
    """Return the number of tokens in a row other than padding."""
    width = batch.tokens.shape[1]
    return width if batch.padding is None else width - int(batch.padding[row].sum())
