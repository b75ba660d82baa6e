"""Cross-entropy of the classes of words: tags, or pairs of a head and a relation.

Shapes: B rows, S positions, C classes.
"""

import torch
from torch import Tensor, nn

from metaseq_lm.config.criterions import TaggingConfig
from metaseq_lm.core.batch import Term, Terms, WordBatch
from metaseq_lm.criterions import Criterion
from metaseq_lm.models.layers import IGNORE, cross_entropy
from metaseq_lm.models.words.word_model import (
    PRIMARY,
    ParsingModule,
    Views,
    WordNet,
    classes_of,
    shift_positions,
)


class WordLabels(Criterion):
    """The mean over words of the primary module's cross-entropy."""

    general = False
    config: TaggingConfig

    def __call__(self, model: nn.Module, batch: WordBatch) -> Terms:
        assert isinstance(model, WordNet)
        return self.gold_terms(model, model.views(batch), batch)

    def gold_terms(
        self, model: WordNet, views: Views, batch: WordBatch, module: str = PRIMARY
    ) -> Terms:
        """Return the terms of one module on the views: cross-entropy and accuracy."""
        scores = model.scores(views, batch.scored, batch.set_name, module)
        return self.terms(model, scores, batch, module)

    def terms(
        self, model: WordNet, scores: Tensor, batch: WordBatch, module: str = PRIMARY
    ) -> Terms:
        """Return the terms of a module's scores (B, S, C); only the primary one has an accuracy."""
        name = batch.set_name
        shift = model.shift_of(name, module)
        targets = _targets_of(model, batch)
        if shift:
            targets = (shift_positions(targets - IGNORE, shift) + IGNORE).where(
                batch.scored, IGNORE
            )
        smoothed = model.training and batch.heads is None
        smoothing = self.config.label_smoothing if smoothed else 0.0
        loss = cross_entropy(scores, targets, smoothing).sum()
        per = "pairs" if shift else "words"
        terms = {model.label(name, module): Term(loss, per)}
        if module == PRIMARY:
            with torch.no_grad():
                correct = (scores.argmax(-1) == targets).sum().to(loss.dtype)
            terms[model.label(name, "accuracy")] = Term(correct, "words", weight=0.0)
        return terms


def _targets_of(model: WordNet, batch: WordBatch) -> Tensor:
    """Return the class of each word of a batch (B, S), IGNORE elsewhere."""
    assert batch.labels is not None
    if batch.heads is None:
        return batch.labels
    primary = model.module(batch.set_name, PRIMARY)
    assert isinstance(primary, ParsingModule)
    classes = classes_of(batch.heads, batch.labels, primary.relations)
    return classes.where(batch.scored, IGNORE)


class Tagging(WordLabels):
    """The mean over words of the cross-entropy of their tags, or of heads and relations."""


class Parsing(WordLabels):
    """The cross-entropy over all pairs of a head and a relation, mean over words, not smoothed."""

    def __init__(self, config: object = None) -> None:
        super().__init__(TaggingConfig(label_smoothing=0.0))
