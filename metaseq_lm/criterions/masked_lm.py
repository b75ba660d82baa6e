"""Masked language modelling: cross-entropy of the original tokens at the chosen positions.

And BERT's objective: masked LM and next-sentence prediction (Devlin et al. 2019).

Shapes: B batch, S length, M chosen positions (padded with target -1), V vocabulary; C copies may
lead.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import Layout, ScoredBatch, Term, Terms, TokenBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.metric_names import CLOZE_NLL
from metaseq_lm.criterions import Criterion, Exported
from metaseq_lm.data.corpus.pairs import NextSentenceBatch
from metaseq_lm.forward.passes import copy_sums, full_precision
from metaseq_lm.models.layers import IGNORE, cross_entropy
from metaseq_lm.models.transformer.encoder import TransformerLM

__all__ = ["LM", "MaskedLM", "labelled_terms", "row_accuracy"]

# Names of heads.
LM, NEXT_SENTENCE = "lm", "next_sentence"
TOKENS_PER_PASS = 8192


@torch.no_grad()
def row_accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return each row's share of correct positions, 0 for a row without targets; float64 (...)."""
    counted = targets != IGNORE
    hits = ((logits.argmax(-1) == targets) & counted).sum(-1)
    return hits.double() / counted.sum(-1).clamp(min=1)


def smoothing_of(config: Any, model: nn.Module) -> float:
    """Return the label smoothing of `label_smoothing` in training, 0 in evaluations.

    0 also if `config` has no such option.
    """
    if not model.training:
        return 0.0
    return float(getattr(config, "label_smoothing", 0.0))


def labelled_terms(logits: Tensor, batch: TokenBatch, label_smoothing: float = 0.0) -> Terms:
    """Return the mean loss over targets, and the mean over rows with targets of their accuracy."""
    assert batch.targets is not None
    losses = cross_entropy(logits, batch.targets, label_smoothing)
    accuracies = row_accuracy(logits, batch.targets)
    return {
        "mlm": Term(copy_sums(losses, batch), "targets", kind=CLOZE_NLL),
        "accuracy": Term(copy_sums(accuracies, batch), "rows_with_targets", weight=0.0),
    }


def z_terms(config: Any, model: nn.Module, logits: Tensor, batch: Any) -> Terms:
    """Return the term of ZLossConfig for logits (..., V) at the batch's targets (...), if any."""
    weight = getattr(config, "z_loss", 0.0)
    # Evaluation losses are compared between runs with and without it.
    if not weight or not model.training:
        return {}
    squares = full_precision(logits).logsumexp(-1).square()
    squares = squares.masked_fill(batch.targets == IGNORE, 0.0)
    return {"z_loss": Term(copy_sums(squares, batch), "targets", weight)}


class MaskedLM(Criterion):
    """The masked-LM loss (Devlin et al. 2019) on batches of masked rows (data.corpus.rows)."""

    exported = Exported(heads=("lm",))
    calls = ("tokens", "layout", "positions", "*", "segments")

    def __call__(self, model: nn.Module, batch: TokenBatch) -> Terms:
        logits = model(  # (B, M, V)
            batch.tokens, batch.layout, batch.positions, segments=batch.segments
        )
        terms = labelled_terms(logits, batch, smoothing_of(self.config, model))
        return terms | z_terms(self.config, model, logits, batch)

    def token_log_probs(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """One pass per scored token, with only that token masked (Salazar et al. 2020, 2)."""

        def predict(rows: TargetRows) -> Tensor:
            logits: Tensor = model(rows.tokens, rows.layout, rows.columns, segments=rows.segments)
            return logits

        return single_mask_log_probs(batch, predict)


class TargetRows(NamedTuple):
    """Rows (R, S) with masked tokens; the tokens at `columns` (R, 1) are predicted."""

    tokens: Tensor
    layout: Layout
    columns: Tensor
    segments: Tensor | None


@torch.no_grad()
def single_mask_log_probs(batch: ScoredBatch, predict: Callable[[TargetRows], Tensor]) -> Tensor:
    """Return the log-probability of each scored token if only it is masked, (B, S).

    If the batch has `words`, the later tokens of its word are also masked (Kauf and Ivanova 2023,
    "within_word_l2r"). `predict` returns the logits (R, 1, V) of the tokens at `columns` of rows.
    The rows go through the model in chunks of about batch_tokens. Rows that are equal once they are
    masked, as in a minimal pair, take one pass.
    """
    tokens, segments = batch.tokens, batch.segments
    rows, columns = batch.scored.nonzero(as_tuple=True)
    step = max(1, batch.batch_tokens // tokens.shape[1])
    parts = [torch.zeros(0, device=tokens.device)]
    for row, column in zip(rows.split(step), columns.unsqueeze(1).split(step)):
        targets = tokens[row].gather(1, column)  # (R, 1)
        hidden = tokens[row].scatter(1, column, batch.mask_id)  # (R, S)
        if batch.words is not None:
            words = batch.words[row]
            is_later = torch.arange(tokens.shape[1], device=tokens.device) > column
            hidden.masked_fill_(is_later & (words == words.gather(1, column)), batch.mask_id)
        kinds = [hidden, column]
        if segments is not None:
            kinds.append(segments[row])
        different, kind = torch.cat(kinds, 1).unique(dim=0, return_inverse=True)  # (R,)
        first = kind.new_empty(len(different))
        first[kind] = torch.arange(len(kind), device=kind.device)  # a row of each kind
        layout = batch.layout.rows(row[first])
        masked = TargetRows(hidden[first], layout, column[first], None)
        if segments is not None:
            masked = masked._replace(segments=segments[row[first]])
        logits = predict(masked)
        parts.append(-cross_entropy(logits[kind], targets).squeeze(1))
    log_probs = torch.cat(parts)
    return log_probs.new_zeros(tokens.shape).masked_scatter(batch.scored, log_probs)


class BertPretraining(Criterion):
    """The masked-LM loss, a mean over targets, plus the next-sentence loss, a mean over rows.

    The model is a TransformerLM with heads "lm" and "next_sentence", the batch a NextSentenceBatch,
    as task sentence_pairs has them; others are a UsageError.
    """

    exported = Exported(heads=("lm", "next_sentence"))

    def __call__(self, model: nn.Module, batch: TokenBatch) -> Terms:
        if not isinstance(batch, NextSentenceBatch) or not isinstance(model, TransformerLM):
            raise UsageError("criterion bert_pretraining is for task sentence_pairs only")
        x = model.encoder(batch.tokens, batch.layout, batch.segments)  # (B, S, D)
        tokens = model.predict(x, batch.positions, LM)  # (B, M, V)
        # One target per row, so that the accuracy of a row is 0 or 1.
        labels = batch.next_sentence.unsqueeze(-1)  # (B, 1)
        scores = model.heads[NEXT_SENTENCE](x).unsqueeze(-2)  # (B, 1, 2)
        return {
            **labelled_terms(tokens, batch, smoothing_of(self.config, model)),
            **z_terms(self.config, model, tokens, batch),
            "next_sentence": Term(cross_entropy(scores, labels).sum(), "rows"),
            "next_sentence_accuracy": Term(row_accuracy(scores, labels).sum(), "rows", weight=0.0),
        }

    def token_log_probs(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """Return the values of masked_lm; for the head "lm", a sentence is a first segment."""
        return MaskedLM().token_log_probs(model, batch)
