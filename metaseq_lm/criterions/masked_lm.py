"""Masked language modelling: cross-entropy of the original tokens at the chosen positions.

And BERT's objective: masked LM and next-sentence prediction (Devlin et al. 2019).

Shapes: B batch, S length, M chosen positions (padded with target -1), V vocabulary; C copies may
lead.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.core.batch import Layout, ScoredBatch, Term, Terms, TokenBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.metric_names import CLOZE_NLL
from metaseq_lm.criterions import Criterion, Exported
from metaseq_lm.data.corpus.pairs import NextSentenceBatch
from metaseq_lm.forward.context import full_precision
from metaseq_lm.models.transformer.encoder import TransformerLM

IGNORE = -1
LM, NEXT_SENTENCE = "lm", "next_sentence"
TOKENS_PER_PASS = 8192


def copy_sums(items: Tensor, batch: TokenBatch) -> Tensor:
    """Sum `items`, whose leading axes are those of batch.tokens, to a scalar or to (C,)."""
    return items.flatten(1).sum(1) if batch.tokens.dim() == 3 else items.sum()


def cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the loss of each position, 0 where the target is -1; logits (..., V), targets (...).

    With label smoothing e the target is 1 - e of the label and e spread evenly over all V. Raises
    TypeError for logits of a plug-in's model that are not such a tensor.
    """
    if not isinstance(logits, Tensor) or logits.shape[:-1].numel() != targets.numel():
        form = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"the logits are {form}, not {(*targets.shape, 'V')} as the targets need")
    flat = full_precision(logits.flatten(0, -2))
    if is_large(flat) and not label_smoothing:
        losses: Tensor = HardLoss.apply(flat, targets.flatten())  # type: ignore[no-untyped-call]
    else:
        losses = F.cross_entropy(
            flat,
            targets.flatten(),
            ignore_index=IGNORE,
            reduction="none",
            label_smoothing=label_smoothing,
        )
    return losses.view(targets.shape)


@torch.no_grad()
def row_accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return each row's share of correct positions, 0 for a row without targets; float64 (...)."""
    counted = targets != IGNORE
    hits = ((logits.argmax(-1) == targets) & counted).sum(-1)
    return hits.double() / counted.sum(-1).clamp(min=1)


def smoothing_of(config: Any, model: nn.Module) -> float:
    """Return the label smoothing of LabelSmoothingConfig in training, 0 in evaluations.

    A `config` without the option has none.
    """
    return float(getattr(config, "label_smoothing", 0.0)) if model.training else 0.0


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
    """Return the term of ZLossConfig for logits (..., V) at the batch's targets (...), if any.

    The loss of an evaluation, which is compared between runs, does not have it. A `config` without
    the option has no such term.
    """
    weight = getattr(config, "z_loss", 0.0)
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

        def predict(rows: Rows) -> Tensor:
            logits: Tensor = model(rows.tokens, rows.layout, rows.columns, segments=rows.segments)
            return logits

        return single_mask_log_probs(batch, predict)


class Rows(NamedTuple):
    """Rows (R, S) with masked tokens, of which those at `columns` (R, 1) are predicted."""

    tokens: Tensor
    layout: Layout
    columns: Tensor
    segments: Tensor | None


@torch.no_grad()
def single_mask_log_probs(batch: ScoredBatch, predict: Callable[[Rows], Tensor]) -> Tensor:
    """Return the log-probability of each scored token where it alone is masked, (B, S).

    Where the batch has `words`, the later tokens of its word are masked, too (Kauf and Ivanova
    2023, "within_word_l2r"). `predict` returns the logits (R, 1, V) of the tokens at `columns` of
    rows. The rows of the micro-batch go through the model in chunks of about batch_tokens. Rows
    that are equal once they are masked, as those of a minimal pair, take one pass.
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
        kinds = [hidden, column] if segments is None else [hidden, column, segments[row]]
        different, kind = torch.cat(kinds, 1).unique(dim=0, return_inverse=True)  # (R,)
        first = kind.new_empty(len(different))
        first[kind] = torch.arange(len(kind), device=kind.device)  # a row of each kind
        logits = predict(
            Rows(
                hidden[first],
                batch.layout.rows(row[first]),
                column[first],
                None if segments is None else segments[row[first]],
            )
        )
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
        """Return what masked_lm does: the head "lm" knows the sentence as a first segment."""
        return MaskedLM().token_log_probs(model, batch)


# Cross-entropy over a large vocabulary, whose first and second derivatives are written out. With
# 2,048 positions and 30,000 symbols a tensor of logits has 246 MB, and torch's own derivatives of
# log_softmax pass over such tensors several times and store two more. Here each derivative is one
# pass, on a CPU in blocks that stay in the processor's cache, and log-probabilities are never
# stored. Small logits take torch's own functions, which are faster there; which of the two it is
# follows from the micro-batch, so in fp32 its size can change the last digits. Shapes: N positions,
# V vocabulary.

LARGE = 1 << 22  # logits from which on these functions are used
BLOCK = 1 << 18  # numbers of a block


def is_large(logits: Tensor) -> bool:
    """Return whether to use the derivatives below; a compiler derives its own."""
    return logits.numel() >= LARGE and not torch.compiler.is_compiling()


def blocks(logits: Tensor) -> Iterator[slice]:
    """Yield the rows of logits (N, V) in blocks."""
    step = len(logits) if logits.is_cuda else max(1, BLOCK // logits.shape[1])
    for first in range(0, len(logits), step):
        yield slice(first, first + step)


def log_sums(logits: Tensor) -> Tensor:
    """Return the logarithm of the sum of exponentials of each row, (N, 1)."""
    return torch.cat([logits[at].logsumexp(-1, keepdim=True) for at in blocks(logits)])


def softmax_hvp(logits: Tensor, log_sum: Tensor, scale: Tensor, vector: Tensor) -> Tensor:
    """Return the product of the loss's Hessian and a vector, by row.

    That is scale * (diag p - p p^T) vector, where p is the softmax of the row.
    """
    out = torch.empty_like(logits)
    for at in blocks(logits):
        p = torch.sub(logits[at], log_sum[at]).exp_()
        product = torch.mul(p, vector[at], out=out[at])
        product.sub_(p.mul_(product.sum(-1, keepdim=True))).mul_(scale[at])
    return out


class HardLoss(torch.autograd.Function):
    """Cross-entropy of logits (N, V) with targets (N,), -1 for none; (N,)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        log_sum = log_sums(logits)
        ctx.save_for_backward(logits, targets, log_sum)
        chosen = logits.gather(1, targets.clamp(min=0).unsqueeze(1))
        return (log_sum - chosen).squeeze(1).masked_fill(targets < 0, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, targets, log_sum = ctx.saved_tensors
        scale = grads[0].masked_fill(targets < 0, 0.0).unsqueeze(1)
        gradient = HardGradient.apply(logits, targets, log_sum, scale)  # type: ignore[no-untyped-call]
        return gradient, None


class HardGradient(torch.autograd.Function):
    """scale * (softmax - one-hot target), (N, V)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, log_sum: Tensor, scale: Tensor
    ) -> Tensor:
        ctx.save_for_backward(logits, targets, log_sum, scale)
        out = torch.empty_like(logits)
        for at in blocks(logits):
            torch.sub(logits[at], log_sum[at], out=out[at]).exp_().mul_(scale[at])
        return out.scatter_add_(1, targets.clamp(min=0).unsqueeze(1), -scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, Tensor | None]:
        logits, targets, log_sum, scale = ctx.saved_tensors
        hvp = softmax_hvp(logits, log_sum, scale, grads[0])
        if not ctx.needs_input_grad[3]:
            return hvp, None, None, None
        ones = torch.ones_like(scale)
        unscaled = HardGradient.apply(logits, targets, log_sum, ones)  # type: ignore[no-untyped-call]
        return hvp, None, None, (unscaled * grads[0]).sum(-1, keepdim=True)
