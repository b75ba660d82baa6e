"""Heads that predict a span of a row, and whether there is one (SQuAD).

Shapes: B rows, S length, D hidden width, K starts or ends of a beam, H hidden width of a head.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.config.transformer import EncoderConfig
from metaseq_lm.core.batch import ALL_VISIBLE, Layout
from metaseq_lm.core.roles import Role
from metaseq_lm.forward.passes import full_precision
from metaseq_lm.models.layers import Heads, Linear, select
from metaseq_lm.models.transformer.encoder import Encoder, initialise

HIDDEN = 512
_MASKED = 1000.0


class _SpanBeam(NamedTuple):
    """The best spans of each row: starts with scores (B, K), ends with scores (B, K, K).

    `null` (B,) is the score of the span from position 0 to position 0.
    """

    starts: Tensor
    start_scores: Tensor
    ends: Tensor
    end_scores: Tensor
    null: Tensor


def _mask_logits(logits: Tensor, mask: Tensor) -> Tensor:
    """Return logits in full precision, minus 1000 where the boolean `mask` is false."""
    logits = full_precision(logits)
    return logits - _MASKED * (~mask).to(logits.dtype)


class _JointSpanHead(nn.Module):
    """A linear start score, and an end score given the start (Clark et al. 2020, code).

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
        return _mask_logits(self.start(x).squeeze(-1), mask)

    def _ends(self, x: Tensor, mask: Tensor, starts: Tensor) -> list[Tensor]:
        """Return the end logits (B, S) for each of K starts (B, K)."""
        # The layer on (start, j) is the sum of a layer on each; the second is the same for all K.
        width = x.shape[-1]
        weight = self.end_dense.weight
        every = F.linear(x, weight[:, width:], self.end_dense.bias)
        chosen = F.linear(select(x, starts), weight[:, :width])
        hidden = (F.gelu(every + part.unsqueeze(1)) for part in chosen.unbind(1))
        return [_mask_logits(self.end(part).squeeze(-1), mask) for part in hidden]

    def beam(self, x: Tensor, mask: Tensor, size: int) -> _SpanBeam:
        """Return the `size` likeliest starts, each with its likeliest ends; log-probabilities."""
        size = min(size, x.shape[1])
        all_starts = self.start_logits(x, mask).log_softmax(-1)
        start_scores, starts = all_starts.topk(size)
        first = torch.zeros_like(starts[:, :1])
        every = self._ends(x, mask, torch.cat([starts, first], 1))
        scores, ends = zip(*(logits.log_softmax(-1).topk(size) for logits in every[:-1]))
        null = all_starts[:, 0] + every[-1].log_softmax(-1)[:, 0]
        return _SpanBeam(starts, start_scores, torch.stack(ends, 1), torch.stack(scores, 1), null)


class SpanHead(nn.Module):
    """Two independent linear scores (Devlin et al. 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = Linear(width, 2)
        self.glorot = [self.out]

    def forward(self, x: Tensor, mask: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Return start logits and end logits (B, S) of states (B, S, D); `starts` are not used."""
        first, last = self.out(x).unbind(-1)
        return _mask_logits(first, mask), _mask_logits(last, mask)

    def start_logits(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the start logits (B, S)."""
        starts: Tensor = self(x, mask, mask)[0]
        return starts

    def beam(self, x: Tensor, mask: Tensor, size: int) -> _SpanBeam:
        """Return the `size` best starts and ends by their logits."""
        size = min(size, x.shape[1])
        all_starts, all_ends = self(x, mask, mask)
        start_scores, starts = all_starts.topk(size)
        end_scores, ends = (t.unsqueeze(1).expand(-1, size, -1) for t in all_ends.topk(size))
        null = all_starts[:, 0] + all_ends[:, 0]
        return _SpanBeam(starts, start_scores, ends, end_scores, null)


class _AnswerabilityHead(nn.Module):
    """The no-answer logit, from [CLS] and the mean state under the start probabilities."""

    def __init__(self, width: int, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.parameter_roles = {"dense": Role.HEAD_HIDDEN}
        self.dense = Linear(2 * width, hidden)
        self.out = Linear(hidden, 1)
        self.glorot = [self.dense, self.out]

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        """Return logits (B,) of states (B, S, D) and start logits (or log-probabilities) (B, S)."""
        mixed = torch.einsum("bs,bsd->bd", starts.softmax(-1).to(x.dtype), x)
        logits = self.out(F.gelu(self.dense(torch.cat([x[:, 0], mixed], -1)))).squeeze(-1)
        return full_precision(logits)


class SpanModel(nn.Module):
    """An encoder with a span head, and optionally an answerability head.

    The encoder's weights are called `encoder.*`, as in every pre-training model.
    """

    def __init__(
        self,
        config: EncoderConfig,
        vocab_size: int,
        padding_idx: int = 0,
        joint: bool = True,
        answerability: bool = True,
    ) -> None:
        super().__init__()
        self.encoder = Encoder(config, vocab_size, padding_idx)
        width = config.encoder_embed_dim
        self.heads = Heads({"span": _JointSpanHead(width) if joint else SpanHead(width)})
        if answerability:
            self.heads["answerability"] = _AnswerabilityHead(width)
        initialise(self, config.init)

    def forward(
        self, tokens: Tensor, layout: Layout = ALL_VISIBLE, segments: Tensor | None = None
    ) -> Tensor:
        """Return the states (B, S, D) of ids (B, S) for the heads."""
        states: Tensor = self.encoder(tokens, layout, segments)
        return states

    def best_spans(self, x: Tensor, mask: Tensor, size: int) -> _SpanBeam:
        """Return the beam of states (B, S, D); an answerability head's logit becomes `null`."""
        span: _JointSpanHead | SpanHead = self.heads["span"]  # type: ignore[assignment]
        beam = span.beam(x, mask, size)
        if "answerability" not in self.heads:
            return beam
        return beam._replace(null=self.heads["answerability"](x, span.start_logits(x, mask)))
