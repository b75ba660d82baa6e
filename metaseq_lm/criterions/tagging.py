"""Cross-entropy of the classes of words: tags, or pairs of a head and a relation.

Shapes: B rows, S positions, C classes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import Batch, Term, Terms
from metaseq_lm.core.config import option
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions import Criterion
from metaseq_lm.criterions.masked_lm import IGNORE, cross_entropy
from metaseq_lm.models.words.parsing_heads import ParsingModule, classes_of
from metaseq_lm.models.words.prediction_modules import PRIMARY, next_to
from metaseq_lm.models.words.views import Views
from metaseq_lm.models.words.word_model import WordNet


@dataclass
class TaggingConfig:
    """The target of a word."""

    label_smoothing: float = option(
        0.1,
        "share of a tag's target that is spread over all classes, in training; never of a tree's",
        at_least=0,
        below=1,
    )


@register_criterion("tagging", dataclass=TaggingConfig)
class WordLabels(Criterion):
    """The mean over words of the primary module's cross-entropy; batch["set"] names the labelled set.

    UsageError for a smoothing outside [0, 1).
    """

    tasks: tuple[str, ...] = ("tagging", "cvt")

    config: TaggingConfig

    def __call__(self, model: nn.Module, batch: Batch) -> Terms:
        assert isinstance(model, WordNet)
        return self.gold_terms(model, model.views(batch), batch)

    def gold_terms(
        self, model: WordNet, views: Views, batch: Batch, module: str = PRIMARY
    ) -> Terms:
        """Return the terms of one module, given the views of the rows: cross-entropy and accuracy."""
        scores = model.scores(views, batch["scored"], batch["set"], module)
        return self.terms(model, scores, batch, module)

    def terms(self, model: WordNet, scores: Tensor, batch: Batch, module: str = PRIMARY) -> Terms:
        """Return the terms of scores (B, S, C) of a module; the accuracy is the primary one's only."""
        name = batch["set"]
        shift = model.shift_of(name, module)
        targets = targets_of(model, batch)
        if shift:
            targets = (next_to(targets - IGNORE, shift) + IGNORE).where(batch["scored"], IGNORE)
        smoothing = 0.0 if "heads" in batch or not model.training else self.config.label_smoothing
        loss = cross_entropy(scores, targets, smoothing).sum()
        terms = {model.label(name, module): Term(loss, "pairs" if shift else "words")}
        if module == PRIMARY:
            with torch.no_grad():
                right = (scores.argmax(-1) == targets).sum().to(loss.dtype)
            terms[model.label(name, "accuracy")] = Term(right, "words", weight=0.0)
        return terms


def targets_of(model: WordNet, batch: Batch) -> Tensor:
    """Return the class of each word of a batch (B, S), IGNORE where no word stands."""
    if "heads" not in batch:
        return batch["labels"]
    primary = model.module(batch["set"], PRIMARY)
    assert isinstance(primary, ParsingModule)
    classes = classes_of(batch["heads"], batch["labels"], primary.relations)
    return classes.where(batch["scored"], IGNORE)
