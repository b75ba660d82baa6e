"""A main encoder with its heads, and the noise model that corrupts its input.

The noise model is a small masked LM, two causal towers, or a fixed distribution; a net that chooses
the masks may take its place. Shapes: B batch, S length, M chosen positions, V vocabulary, D hidden
width, E embedding width, G width of the noise model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.config.transformer import EncoderConfig
from metaseq_lm.core.batch import TokenBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.forward.passes import draw_index, full_precision
from metaseq_lm.methods.electra.data import ElectraBatch
from metaseq_lm.methods.electra.options import (
    DIFFICULTY,
    NoiseModelConfig,
)
from metaseq_lm.models.layers import Heads, Linear, select
from metaseq_lm.models.transformer.encoder import (
    BinaryHead,
    Embeddings,
    Encoder,
    LMHead,
    Stack,
    initialise,
)


def check_noise(criterion: str, known: Sequence[str], noise: str) -> None:
    """Raise UsageError unless `noise` is one of the kinds that a criterion supports."""
    if noise not in known:
        choices = " or ".join(f"model.noise={name}" for name in known)
        raise UsageError(f"{criterion} cannot be trained with model.noise={noise}; set {choices}")


class _NoiseNet(nn.Module):
    """The base of the noise nets: embeddings of their own, or with `shared` the main encoder's."""

    def __init__(
        self, config: EncoderConfig, vocab_size: int, padding_idx: int, shared: bool
    ) -> None:
        super().__init__()
        self.embeddings = None if shared else Embeddings(config, vocab_size, padding_idx)

    def embeddings_with(self, main: Encoder | None) -> Embeddings:
        if self.embeddings is not None:
            return self.embeddings
        assert main is not None
        return main.embeddings


class MaskedGenerator(_NoiseNet):
    """A masked LM that reads the masked row.

    It may share the stack of the main encoder; its head is never shared.
    """

    def __init__(
        self,
        config: EncoderConfig,
        vocab_size: int,
        padding_idx: int,
        shared: bool,
        shared_stack: bool,
    ) -> None:
        super().__init__(config, vocab_size, padding_idx, shared)
        self.stack = None if shared_stack else Stack(config)
        self.head = LMHead(config, vocab_size)

    def forward(self, main: Encoder | None, batch: ElectraBatch) -> tuple[Tensor, Tensor]:
        """Return logits (B, M, V) at the chosen positions and the states (B, M, G) behind them."""
        embeddings, stack = self.embeddings_with(main), self.stack
        if stack is None:
            assert main is not None
            stack = main.stack
        x = embeddings(batch.masked, batch.layout, batch.segments)
        states = select(stack(x, batch.layout), batch.positions)
        return self.head(states, embeddings.tokens.weight), states


class TwoTowers(_NoiseNet):
    """A left-to-right and a right-to-left Transformer; position t sees all tokens except its own.

    See Clark 2021, section 5.1.5. The state for t concatenates the left tower's state at t - 1 and
    the right tower's state at t + 1, with zeros at the ends of a row (the authors' code wraps
    around, which leaks unless both ends are special tokens).
    """

    def __init__(
        self, config: EncoderConfig, vocab_size: int, padding_idx: int, shared: bool
    ) -> None:
        super().__init__(config, vocab_size, padding_idx, shared)
        self.left = Stack(config)
        self.right = Stack(config)
        self.head = LMHead(config, vocab_size, width=2 * config.encoder_embed_dim)

    def forward(self, main: Encoder | None, batch: TokenBatch) -> Tensor:
        """Return logits (B, S, V) for each token of the original rows."""
        embeddings = self.embeddings_with(main)
        x = embeddings(batch.tokens, batch.layout, batch.segments)
        left = self.left(x, replace(batch.layout, reach="causal"))
        right = self.right(x, replace(batch.layout, reach="anticausal"))
        if batch.padding is not None:
            # The last token of a padded row also has no right neighbour.
            right = right.masked_fill(batch.padding.unsqueeze(-1), 0.0)
        # Shift by a position, with zeros at the ends.
        joined = torch.cat(
            [F.pad(left[:, :-1], (0, 0, 1, 0)), F.pad(right[:, 1:], (0, 0, 0, 1))], -1
        )
        logits: Tensor = self.head(joined, embeddings.tokens.weight)
        return logits


class _Difficulty(_NoiseNet):
    """An encoder of the generator's size that reads the original row and scores each token."""

    def __init__(
        self, config: EncoderConfig, vocab_size: int, padding_idx: int, shared: bool
    ) -> None:
        super().__init__(config, vocab_size, padding_idx, shared)
        self.stack = Stack(config)
        self.head = BinaryHead(config.encoder_embed_dim)

    def forward(self, main: Encoder | None, batch: TokenBatch) -> Tensor:
        """Return logits (B, S) for each token of the original rows."""
        x = self.embeddings_with(main)(batch.tokens, batch.layout, batch.segments)
        logits: Tensor = self.head(self.stack(x, batch.layout))
        return logits


class FixedNoise(nn.Module):
    """The same distribution at every position: uniform, or the corpus frequencies."""

    log_probs: Tensor

    def __init__(self, probabilities: Tensor | None) -> None:
        super().__init__()
        if probabilities is None or not probabilities.sum() > 0:
            raise UsageError(
                "model.noise=unigram needs the counts of dict.txt; binarise the corpus with "
                "'metaseq-lm preprocess --trainpref', which counts them"
            )
        # Finite, because a logit of -inf times a label of 0 would be NaN.
        log_probs = (probabilities / probabilities.sum()).log().clamp(min=-1e4)
        self.register_buffer("log_probs", log_probs)

    def forward(self, positions: Tensor) -> Tensor:
        """Return logits (..., V) for `positions` (...), an expanded view."""
        return self.log_probs.expand(*positions.shape, -1)


@torch.no_grad()
def sample(logits: Tensor, temperature: float = 1.0, never: Tensor | None = None) -> Tensor:
    """Draw a token from softmax(logits / temperature) for each position; (B, M, V) -> (B, M).

    The token `never` (B, M) is not drawn.
    """
    scores = full_precision(logits) / temperature
    if never is not None:
        # Unused positions hold -1.
        scores = scores.scatter(-1, never.clamp(min=0).unsqueeze(-1), float("-inf"))
    # In fp32 a sum of 30,000 small numbers would make rare tokens lose their probability.
    return draw_index(scores.softmax(-1).double().cumsum(-1))


def replaced(batch: ElectraBatch, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Write `samples` (B, M) to the chosen positions; return the rows and the choice, both (B, S).

    All chosen positions are replaced, including those that the masking left visible. A position
    chosen twice (legacy_duplicates) gets the floor of its samples' mean, as in the authors' code.
    """
    used = (batch.targets >= 0).long()
    tokens, positions = batch.tokens, batch.positions
    counts = torch.zeros_like(tokens).scatter_add(1, positions, used)
    sums = torch.zeros_like(tokens).scatter_add(1, positions, samples * used)
    chosen = counts > 0
    return torch.where(chosen, sums // counts.clamp(min=1), tokens), chosen


class Electra(nn.Module):
    """The main `encoder`, its `heads`, and the noise model, `generator`.

    Args:
        heads: The heads that the criterion needs: rtd, lm, copy, contrast, baseline. Without heads
            there is no main encoder, only the noise model.
        frequencies: Counts of the tokens (V,), for unigram noise.
    """

    exported = True

    def __init__(
        self,
        config: NoiseModelConfig,
        vocab_size: int,
        padding_idx: int = 0,
        heads: tuple[str, ...] = ("rtd",),
        frequencies: Tensor | None = None,
    ) -> None:
        super().__init__()
        config.check()
        self.noise = config.noise
        small = config.generator()
        width = config.encoder_embed_dim
        self.encoder = Encoder(config, vocab_size, padding_idx) if heads else None
        builders: dict[str, Callable[[], nn.Module]] = {
            "rtd": lambda: BinaryHead(width),
            "lm": lambda: LMHead(config, vocab_size),
            "copy": lambda: Linear(width, 1),
            "contrast": lambda: Linear(width, 1),
            "baseline": lambda: Linear(small.encoder_embed_dim, 1),
        }
        self.heads = Heads({name: builders[name]() for name in heads})
        self.glorot = [head for head in self.heads.values() if isinstance(head, Linear)]
        shared = self.encoder is not None and config.sharing != "none"
        sizes = (small, vocab_size, padding_idx, shared)
        self.generator: MaskedGenerator | TwoTowers | _Difficulty | FixedNoise
        if config.noise == "mlm":
            self.generator = MaskedGenerator(*sizes, shared_stack=config.sharing == "all")
        elif config.noise == "two_tower":
            self.generator = TwoTowers(*sizes)
        elif config.noise == DIFFICULTY:
            self.generator = _Difficulty(*sizes)
        else:
            uniform = torch.full((vocab_size,), 1 / vocab_size)
            self.generator = FixedNoise(uniform if config.noise == "uniform" else frequencies)
        initialise(self, config.init)
        if config.freeze_generator:
            self.generator.requires_grad_(False)

    def hidden(self, tokens: Tensor, batch: TokenBatch) -> Tensor:
        """Return the main encoder's states (B, S, D) for `tokens` (B, S) instead of the batch's."""
        assert self.encoder is not None
        states: Tensor = self.encoder(tokens, batch.layout, batch.segments)
        return states

    def token_table(self) -> Tensor:
        """Return the main encoder's token embeddings, (V, E)."""
        assert self.encoder is not None
        return self.encoder.embeddings.tokens.weight

    def train(self, mode: bool = True) -> Electra:
        """Set the mode; a frozen generator stays in evaluation mode, without dropout."""
        super().train(mode)
        if not any(p.requires_grad for p in self.generator.parameters()):
            self.generator.eval()
        return self

    def masked_noise(self, batch: ElectraBatch) -> tuple[Tensor, Tensor]:
        """Return the masked LM's logits (B, M, V) at the chosen positions and states (B, M, G)."""
        assert isinstance(self.generator, MaskedGenerator)
        noise: tuple[Tensor, Tensor] = self.generator(self.encoder, batch)
        return noise

    def cloze_noise(self, batch: TokenBatch) -> Tensor:
        """Return logits (B, S, V) of the two towers: position t given all tokens except t."""
        assert isinstance(self.generator, TwoTowers)
        logits: Tensor = self.generator(self.encoder, batch)
        return logits

    def difficulty(self, batch: TokenBatch) -> Tensor:
        """Return logits (B, S) of the difficulty of each token, given the original rows."""
        assert isinstance(self.generator, _Difficulty)
        logits: Tensor = self.generator(self.encoder, batch)
        return logits


class ModernElectra(Electra):
    """A main encoder and a noise model with the layers of ModernBERT (Warner et al. 2025)."""

    exported = True
