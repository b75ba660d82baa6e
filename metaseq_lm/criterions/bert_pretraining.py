"""BERT's objective: masked LM and next-sentence prediction (Devlin et al. 2019).

Shapes: B rows, S length, D width, M chosen positions, V vocabulary.
"""

from torch import Tensor, nn

from metaseq_lm.core.batch import ScoredBatch, Term, Terms, TokenBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions import Criterion
from metaseq_lm.criterions.masked_lm import MaskedLM, cross_entropy, labelled_terms, row_accuracy
from metaseq_lm.data.corpus.pairs import NextSentenceBatch
from metaseq_lm.models.transformer.encoder import TransformerLM

LM, NEXT_SENTENCE = "lm", "next_sentence"


@register_criterion("bert_pretraining")
class BertPretraining(Criterion):
    """The masked-LM loss, a mean over targets, plus the next-sentence loss, a mean over rows.

    The model is a TransformerLM with heads "lm" and "next_sentence", the batch a NextSentenceBatch,
    as task sentence_pairs has them; others are a UsageError.
    """

    def __call__(self, model: nn.Module, batch: TokenBatch) -> Terms:
        if not isinstance(batch, NextSentenceBatch) or not isinstance(model, TransformerLM):
            raise UsageError("criterion bert_pretraining is for task sentence_pairs only")
        x = model.encoder(batch.tokens, batch.padding, batch.segments)  # (B, S, D)
        tokens = model.predict(x, batch.positions, LM)  # (B, M, V)
        # One target per row, so that the accuracy of a row is 0 or 1.
        labels = batch.next_sentence.unsqueeze(-1)  # (B, 1)
        scores = model.heads[NEXT_SENTENCE](x).unsqueeze(-2)  # (B, 1, 2)
        return {
            **labelled_terms(tokens, batch),
            "next_sentence": Term(cross_entropy(scores, labels).sum(), "rows"),
            "next_sentence_accuracy": Term(row_accuracy(scores, labels).sum(), "rows", weight=0.0),
        }

    def token_log_probs(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """Return what masked_lm does: the head "lm" knows the sentence as a first segment."""
        return MaskedLM().token_log_probs(model, batch)
