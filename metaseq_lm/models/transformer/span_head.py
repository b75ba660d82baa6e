"""Heads that point at a span of a row, and say whether there is one (SQuAD).

Shapes: B rows, S length, D hidden width, K starts or ends of a beam, H hidden width of a head.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.models.layers import Linear, full_precision
from metaseq_lm.models.transformer.encoder import Encoder, TransformerConfig, initialise, select

HIDDEN = 512
MASKED = 1000.0


class Beam(NamedTuple):
    """The best spans of each row: starts (B, K) and ends (B, K, K) with their log-probabilities.

    `null` (B,) is the logit of "there is no answer".
    """

    starts: Tensor
    start_scores: Tensor
    ends: Tensor
    end_scores: Tensor
    null: Tensor


def masked(logits: Tensor, mask: Tensor) -> Tensor:
    """Return logits, in full precision, less 1000 where the boolean `mask` is false."""
    logits = full_precision(logits)
    return logits - MASKED * (~mask).to(logits.dtype)


class SpanHead(nn.Module):
    """A linear start score, and an end score that looks at the start (Clark et al. 2020, code).

    The end score of position j is a linear unit on a GELU layer of H units on the states of the
    start and of j. In training the start is the gold one.
    """

    def __init__(self, width: int, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.start = Linear(width, 1)
        self.end_dense = Linear(2 * width, hidden)
        self.end = Linear(hidden, 1)
        self.glorot = [self.start, self.end_dense, self.end]

    def forward(self, x: Tensor, mask: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Return start logits and end logits (B, S) for given `starts` (B,); states x (B, S, D)."""
        ends = self._ends(x, mask, starts[:, None])[0]
        return self.start_logits(x, mask), ends

    def start_logits(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the start logits (B, S)."""
        return masked(self.start(x).squeeze(-1), mask)

    def _ends(self, x: Tensor, mask: Tensor, starts: Tensor) -> list[Tensor]:
        """Return the end logits (B, S) for each of K starts (B, K)."""
        # The layer on (start, j) is the sum of a layer on each; the second is the same for all K.
        width = x.shape[-1]
        weight = self.end_dense.weight
        every = F.linear(x, weight[:, width:], self.end_dense.bias)
        chosen = F.linear(select(x, starts), weight[:, :width])
        hidden = (F.gelu(every + part.unsqueeze(1)) for part in chosen.unbind(1))
        return [masked(self.end(part).squeeze(-1), mask) for part in hidden]

    def beam(self, x: Tensor, mask: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the `size` likeliest starts and for each the likeliest ends, as `Beam` has them."""
        size = min(size, x.shape[1])
        start_scores, starts = self.start_logits(x, mask).log_softmax(-1).topk(size)
        every = self._ends(x, mask, starts)
        scores, ends = zip(*(logits.log_softmax(-1).topk(size) for logits in every))
        return starts, start_scores, torch.stack(ends, 1), torch.stack(scores, 1)


class AnswerabilityHead(nn.Module):
    """The logit of "there is no answer", from [CLS] and the mean state under the start probabilities."""

    def __init__(self, width: int, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.dense = Linear(2 * width, hidden)
        self.out = Linear(hidden, 1)
        self.glorot = [self.dense, self.out]

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        """Return logits (B,) of states (B, S, D) and start logits (or log-probabilities) (B, S)."""
        mixed = torch.einsum("bs,bsd->bd", starts.softmax(-1).to(x.dtype), x)
        logits = self.out(F.gelu(self.dense(torch.cat([x[:, 0], mixed], -1)))).squeeze(-1)
        return full_precision(logits)


class SpanModel(nn.Module):
    """An encoder with a span head and an answerability head.

    The encoder's weights are called `encoder.*`, as in every model that pre-trains one.
    """

    def __init__(self, config: TransformerConfig, vocab_size: int, padding_idx: int = 0) -> None:
        super().__init__()
        self.encoder = Encoder(config, vocab_size, padding_idx)
        width = config.encoder_embed_dim
        self.heads = nn.ModuleDict(
            {"span": SpanHead(width), "answerability": AnswerabilityHead(width)}
        )
        initialise(self, config.init)

    def forward(
        self, tokens: Tensor, padding: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Return the states (B, S, D) of ids (B, S) for the heads."""
        states: Tensor = self.encoder(tokens, padding, segments)
        return states

    def best_spans(self, x: Tensor, mask: Tensor, size: int) -> Beam:
        """Return the beam of states (B, S, D); `null` are the logits of the answerability head."""
        span: SpanHead = self.heads["span"]  # type: ignore[assignment]
        null = self.heads["answerability"](x, span.start_logits(x, mask))
        return Beam(*span.beam(x, mask, size), null)
