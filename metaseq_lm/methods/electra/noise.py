"""What replaces tokens: a small masked LM, two causal towers or a fixed distribution; drawing samples.

Shapes: B batch, S length, M chosen positions, V vocabulary, E embedding width, G width of the noise
model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import TokenBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.methods.electra.data import ElectraBatch
from metaseq_lm.models.layers import current_context, full_precision
from metaseq_lm.models.transformer.encoder import (
    Embeddings,
    Encoder,
    LMHead,
    Stack,
    TransformerConfig,
    attention_mask,
    select,
)


class MaskedGenerator(nn.Module):
    """A masked LM that reads the corrupted row; with `own` embeddings or the main encoder's.

    Without a `stack` it is the main encoder itself (everything shared but the heads).
    """

    def __init__(
        self, config: TransformerConfig, vocab_size: int, padding_idx: int, own: bool, stack: bool
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(config, vocab_size, padding_idx) if own else None
        self.stack = Stack(config) if stack else None
        sizes = (config.encoder_embed_dim, config.embed_dim, vocab_size)
        self.head = LMHead(*sizes, True, config.norm_eps)

    def forward(self, main: Encoder | None, batch: ElectraBatch) -> tuple[Tensor, Tensor]:
        """Return logits (B, M, V) at the chosen positions and the states (B, M, G) they come from."""
        embeddings, stack = self.embeddings, self.stack
        if main is not None:
            embeddings, stack = embeddings or main.embeddings, stack or main.stack
        assert embeddings is not None and stack is not None
        x = embeddings(batch.masked, batch.segments)
        states = select(stack(x, attention_mask(batch.padding)), batch.positions)
        return self.head(states, embeddings.tokens.weight), states


class TwoTowers(nn.Module):
    """A left-to-right and a right-to-left Transformer; position t sees all tokens but its own.

    Clark 2021, section 5.1.5. The state for t joins the left tower's at t - 1 and the right tower's
    at t + 1; the first and the last position of a row lack one and get zeros instead (the authors'
    code rolls around, which is a leak unless both are special tokens).
    """

    def __init__(
        self, config: TransformerConfig, vocab_size: int, padding_idx: int, own: bool
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(config, vocab_size, padding_idx) if own else None
        self.left = Stack(config)
        self.right = Stack(config)
        sizes = (2 * config.encoder_embed_dim, config.embed_dim, vocab_size)
        self.head = LMHead(*sizes, True, config.norm_eps)

    def forward(self, main: Encoder | None, batch: TokenBatch) -> Tensor:
        """Return logits (B, S, V) of the rows, none of whose tokens is hidden."""
        embeddings = self.embeddings
        if main is not None:
            embeddings = embeddings or main.embeddings
        assert embeddings is not None
        x = embeddings(batch.tokens, batch.segments)
        before, after = causal_masks(batch.padding, x.shape[-2], x.device)
        left, right = self.left(x, before), self.right(x, after)
        if batch.padding is not None:
            # What follows the last token of a padded row is no state either.
            right = right.masked_fill(batch.padding.unsqueeze(-1), 0.0)
        edge = torch.zeros_like(left[:, :1])
        joined = torch.cat(
            [torch.cat([edge, left[:, :-1]], 1), torch.cat([right[:, 1:], edge], 1)], -1
        )
        logits: Tensor = self.head(joined, embeddings.tokens.weight)
        return logits


def causal_masks(
    padding: Tensor | None, length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return which keys may be seen by a left-to-right and a right-to-left tower, (1 or B, 1, S, S).

    Every position sees itself, padding too: softmax over nothing is NaN.
    """
    every = torch.ones(length, length, dtype=torch.bool, device=device)
    before, after = every.tril()[None], every.triu()[None]
    if padding is not None:
        real, itself = ~padding[:, None, :], torch.eye(length, device=device) > 0
        before, after = before & real | itself, after & real | itself
    return before[:, None], after[:, None]


class FixedNoise(nn.Module):
    """The same distribution everywhere: uniform, or the corpus frequencies."""

    log_probs: Tensor

    def __init__(self, probabilities: Tensor | None) -> None:
        super().__init__()
        if probabilities is None or not probabilities.sum() > 0:
            raise UsageError(
                "model.noise=unigram needs the counts of dict.txt; binarise the corpus with "
                "'metaseq-lm preprocess --trainpref', which counts them"
            )
        # Finite: a logit of -inf times a label of 0 would be NaN.
        log_probs = (probabilities / probabilities.sum()).log().clamp(min=-1e4)
        self.register_buffer("log_probs", log_probs)

    def forward(self, positions: Tensor) -> Tensor:
        """Return logits (..., V) for `positions` (...), a view of one row."""
        return self.log_probs.expand(*positions.shape, -1)


@torch.no_grad()
def sample(logits: Tensor, temperature: float = 1.0, never: Tensor | None = None) -> Tensor:
    """Draw a token from softmax(logits / temperature) for each position; (B, M, V) -> (B, M).

    The token `never` (B, M), if given, is not drawn. In at least fp32, by inverting the cumulative
    distribution: one random number per position, where Gumbel noise takes V.
    """
    scores = full_precision(logits) / temperature
    if never is not None:
        # Uncounted positions hold -1.
        scores = scores.scatter(-1, never.clamp(min=0).unsqueeze(-1), float("-inf"))
    # The sum of 30,000 small numbers: fp32 would not keep the rare tokens' shares.
    cumulative = scores.softmax(-1).double().cumsum(-1)
    noise = current_context().noise
    shape = logits.shape[:-1]
    if noise is None:
        u = torch.rand(shape, dtype=torch.double, device=logits.device)
    else:
        u = noise.uniform(shape, torch.double)
    drawn = torch.searchsorted(cumulative, (u * cumulative[..., -1]).unsqueeze(-1), right=True)
    return drawn.squeeze(-1).clamp(max=logits.shape[-1] - 1)


def replaced(batch: ElectraBatch, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Put `samples` (B, M) into the original row; returns it (B, S) and where it was chosen (B, S).

    All chosen positions are replaced, those too that the masking had left visible. A position
    chosen twice (legacy_duplicates) gets the floor of its samples' mean, as in the authors' code.
    """
    counted = (batch.targets >= 0).long()
    tokens, positions = batch.tokens, batch.positions
    times = torch.zeros_like(tokens).scatter_add(1, positions, counted)
    sums = torch.zeros_like(tokens).scatter_add(1, positions, samples * counted)
    chosen = times > 0
    return torch.where(chosen, sums // times.clamp(min=1), tokens), chosen
