"""The loss of span corruption, and the scores of sentences.

Shapes: B rows, S length, T tokens of the decoder, N targets, R scored rows, D width, V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.core.batch import ScoredBatch, SequenceBatch, Term, Terms, number_of
from metaseq_lm.core.errors import UsageError
from metaseq_lm.criterions import Criterion
from metaseq_lm.criterions.masked_lm import (
    LM,
    TargetRows,
    single_mask_log_probs,
    smoothing_of,
    z_terms,
)
from metaseq_lm.data.corpus.predictions import source_of
from metaseq_lm.methods.span_corruption.model import EncoderDecoder
from metaseq_lm.models.layers import cross_entropy
from metaseq_lm.models.transformer.encoder import TransformerLM


@dataclass(kw_only=True)
class CorruptedBatch(SequenceBatch):
    """Inputs and the targets that follow them, in the same rows or in a decoder's rows.

    Attributes:
        tokens: `[CLSn] inputs targets` (B, S), or `[CLSn] inputs` for an encoder-decoder.
        layout: The prefix of a row is `[CLSn] inputs`.
        decoder_tokens: `[SEP] targets` (B, T) for an encoder-decoder, where the [SEP] that ends the
            inputs also starts the decoder; else None.
        positions: Positions of the targets in the rows that predict them, as indices into all B S
            or B T positions (N,).
        targets: The tokens there (N,), -1 for none.
    """

    decoder_tokens: Tensor | None = None
    positions: Tensor
    targets: Tensor


class SpanCorruption(Criterion):
    """The mean loss of the tokens of the targets, with sentinels and [SEP] (Raffel et al. 2020)."""

    general = False
    exported = (
        "it predicts what follows inputs that are read from both sides, which no class of the "
        "transformers library with these layers does"
    )

    def __call__(self, model: nn.Module, batch: CorruptedBatch) -> Terms:
        if batch.decoder_tokens is None:
            assert isinstance(model, TransformerLM)
            states = model.encoder(batch.tokens, batch.layout)
        else:
            assert isinstance(model, EncoderDecoder)
            states = model.decode(batch.tokens, batch.layout, batch.decoder_tokens)
        # A position without a target may be 0, and the first token has no state before it.
        sources = source_of(batch.positions).clamp(min=0)
        logits = model.predict(states.flatten(0, 1).index_select(0, sources), head=LM)  # (N, V)
        losses = cross_entropy(logits, batch.targets, smoothing_of(self.config, model))
        with torch.no_grad():
            correct = (logits.argmax(-1) == batch.targets) & (batch.targets >= 0)
        return {
            "target_token": Term(losses.sum(), "targets"),
            "accuracy": Term(number_of(correct), "targets", weight=0.0),
            **z_terms(self.config, model, logits, batch),
        }

    def token_log_probs(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """Return the log-probability of each scored token if it alone is noise, (B, S).

        A sentinel, `mask_id`, replaces it in the inputs, and the targets begin with the sentinel
        and the token. Only the token's probability given the sentinel counts, so the model's belief
        about the length of the span does not.

        Raises:
            UsageError: Later tokens of a word should be hidden as well, which a sentinel for one
                token cannot do.
        """
        if batch.words is not None:
            raise UsageError(
                "criterion span_corruption hides one token at a time; score it with --pll original"
            )

        def predict(rows: TargetRows) -> Tensor:
            lengths = (~rows.layout.padding_of(rows.tokens)).sum(-1, keepdim=True)  # (R, 1)
            sentinel = torch.full_like(lengths, batch.mask_id)
            if isinstance(model, EncoderDecoder):
                inputs = torch.cat([rows.tokens.gather(1, lengths - 1), sentinel], 1)
                states = model.decode(rows.tokens, rows.layout, inputs)
                return model.predict(states[:, source_of(torch.tensor([2]))], LM)
            tokens = F.pad(rows.tokens, (0, 1)).scatter(1, lengths, sentinel)
            at = torch.arange(tokens.shape[1], device=tokens.device)
            layout = replace(
                rows.layout, padding=at > lengths, reach="prefix", prefix=lengths.squeeze(1)
            )
            logits: Tensor = model(tokens, layout, source_of(lengths + 1))
            return logits

        return single_mask_log_probs(batch, predict)
