"""Criterions on words: gold labels, or the primary module's predictions on unlabelled sentences.

The teacher is the primary module on the whole sentence, without dropout and gradient. Modules of
the sets in `WordBatch.learners` learn from an unlabelled batch. Details follow Clark et al. 2018
and its code. Shapes: B rows, S positions, C classes, W width of the word embeddings.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.core.batch import Term, Terms, WordBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.criterions.tagging import WordLabels
from metaseq_lm.data.words.sets import TREES
from metaseq_lm.data.words.vocabulary import REMOVED
from metaseq_lm.forward.passes import full_precision, uniform
from metaseq_lm.methods.cvt.model import (
    adversarial_direction,
    auxiliary_options,
    draw_gaussian,
    normalise_rows,
)
from metaseq_lm.methods.cvt.options import (
    CrossViewConfig,
    UnlabelledConfig,
    UnlabelledWeightConfig,
    VATConfig,
    WordDropoutConfig,
)
from metaseq_lm.models.layers import dropout_at
from metaseq_lm.models.words.word_model import (
    PRIMARY,
    ParsingModule,
    Views,
    WordModel,
    WordNet,
    shift_positions,
)


def weight_after(config: UnlabelledWeightConfig, updates: int) -> float:
    """Return the weight (never 0) of an unlabelled batch, `updates` after task.labelled_first."""
    if not config.unlabelled_warmup:
        return config.unlabelled_weight
    return config.unlabelled_weight * min(1.0, max(updates, 1) / config.unlabelled_warmup)


class Unlabelled(WordLabels):
    """The base: students learn the teacher's predictions on unlabelled sentences."""

    tasks = ("cvt",)
    config: UnlabelledConfig

    @property
    def unlabelled(self) -> bool:
        """Whether unlabelled sentences are used."""
        return True

    def modules(self, form: str) -> list[str]:
        """Return the auxiliary modules for sets of a form; UsageError if none would learn."""
        return []

    def __call__(self, model: nn.Module, batch: WordBatch) -> Terms:
        assert isinstance(model, WordModel)
        if batch.labels is not None:
            return self.labelled_terms(model, batch)
        targets = self.targets(model, batch)
        with dropout_at(model, self.config.unlabelled_dropout):
            return self.student_terms(model, batch, targets)

    def labelled_terms(self, model: WordModel, batch: WordBatch) -> Terms:
        """Return the terms of labelled sentences, from the primary module."""
        return super().__call__(model, batch)

    @torch.no_grad()
    def targets(self, model: WordModel, batch: WordBatch) -> dict[str, Tensor]:
        """Return the teacher's probabilities (B, S, C) for each set, 0 at ignored positions."""
        net = model.averaged if self.config.mean_teacher else model
        targets = {}
        with dropout_at(net, 0.0):
            views = net.views(batch)
            for name in batch.learners:
                scores = net.scores(views, batch.scored, name, PRIMARY)
                targets[name] = self._target(full_precision(scores).softmax(-1), batch.scored)
        return targets

    def _target(self, probabilities: Tensor, scored: Tensor) -> Tensor:
        confidence = probabilities.amax(-1)
        if self.config.confidence:
            scored = scored & (confidence >= self.config.confidence)
        if self.config.hard_targets:
            best = probabilities.argmax(-1, keepdim=True)
            probabilities = torch.zeros_like(probabilities).scatter_(-1, best, 1.0)
        weights = scored * confidence if self.config.weigh_confidence else scored
        return probabilities * weights.unsqueeze(-1)

    def student_terms(
        self, model: WordModel, batch: WordBatch, targets: dict[str, Tensor]
    ) -> Terms:
        """Return the terms of the students, given the targets by set."""
        raise NotImplementedError(f"{type(self).__name__} must define student_terms")

    def term(
        self, model: WordNet, views: Views, batch: WordBatch, name: str, module: str, target: Tensor
    ) -> Terms:
        """Return the cross-entropy of a set's module to the target (B, S, C), mean over words."""
        shift = model.shift_of(name, module)
        if shift:  # only pairs of words, because <start> predicts nothing
            target = shift_positions(target, shift) * batch.scored.unsqueeze(-1)
        scores = full_precision(model.scores(views, batch.scored, name, module))
        loss = _soft_cross_entropy(scores, target.to(scores.dtype)).sum()
        label = model.label(name, f"unlabelled_{module}")
        return {label: Term(loss, "pairs" if shift else "words", batch.weight)}


def _soft_cross_entropy(scores: Tensor, target: Tensor) -> Tensor:
    """Return -sum target log softmax(scores) over the last axis (..., C)."""
    flat = F.cross_entropy(scores.flatten(0, -2), target.flatten(0, -2), reduction="none")
    return flat.view(scores.shape[:-1])


class CrossView(Unlabelled):
    """Auxiliary modules with restricted views learn from the primary one, with equal weights.

    On unlabelled sentences the encoder gets a gradient and the primary modules do not.
    """

    config: CrossViewConfig

    def __init__(self, config: CrossViewConfig) -> None:
        super().__init__(config)
        for option_name in ("tagging_auxiliaries", "parsing_auxiliaries"):
            names = list(getattr(config, option_name))
            if len(set(names)) < len(names):
                raise UsageError(f"criterion.{option_name}: {names} names a module twice")

    @property
    def unlabelled(self) -> bool:
        return self.config.use_unlabelled

    def modules(self, form: str) -> list[str]:
        kind = "parsing" if form == TREES else "tagging"
        names: list[str] = list(getattr(self.config, f"{kind}_auxiliaries"))
        if self.unlabelled and not names:
            raise UsageError(
                f"criterion.{kind}_auxiliaries is empty, so no module of a set of {form} would "
                "learn from unlabelled sentences; name some of "
                f"{', '.join(auxiliary_options(form))}, or give criterion.use_unlabelled=false"
            )
        return names

    def labelled_terms(self, model: WordModel, batch: WordBatch) -> Terms:
        if not self.config.gold_auxiliaries:
            return super().labelled_terms(model, batch)
        views = model.views(batch)
        terms: Terms = {}
        for module in (PRIMARY, *model.auxiliary_modules(batch.set_name)):
            terms |= self.gold_terms(model, views, batch, module)
        return terms

    def student_terms(
        self, model: WordModel, batch: WordBatch, targets: dict[str, Tensor]
    ) -> Terms:
        views = model.views(batch)
        terms: Terms = {}
        for name, target in targets.items():
            for module in model.auxiliary_modules(name):
                terms |= self.term(model, views, batch, name, module, target)
        return terms


class WordDropout(Unlabelled):
    """The baseline: the primary module is the student and reads <removed> for some words.

    Their characters are removed with them.
    """

    config: WordDropoutConfig

    def student_terms(
        self, model: WordModel, batch: WordBatch, targets: dict[str, Tensor]
    ) -> Terms:
        views = model.views(self.remove_words(batch))
        terms: Terms = {}
        for name, target in targets.items():
            terms |= self.term(model, views, batch, name, PRIMARY, target)
        return terms

    def remove_words(self, batch: WordBatch) -> WordBatch:
        """Return the batch with random words removed."""
        u = uniform(batch.scored.shape, batch.scored.device, torch.double)
        removed = (u < self.config.rate) & batch.scored
        tokens = batch.tokens.masked_fill(removed, REMOVED)
        assert batch.characters is not None
        characters = batch.characters.masked_fill(removed.unsqueeze(-1), 0)
        return batch.replace(tokens=tokens, characters=characters)


class VirtualAdversarial(Unlabelled):
    """The baseline: the primary module is the student and reads perturbed word embeddings.

    The perturbation is adversarial: one step of power iteration without dropout, which is the
    gradient of the divergence at a small random shift. Each set has its own perturbation and costs
    a pass. Needs model.normalize_words (Miyato et al. 2017).
    """

    config: VATConfig
    differentiates = True

    def student_terms(
        self, model: WordModel, batch: WordBatch, targets: dict[str, Tensor]
    ) -> Terms:
        terms: Terms = {}
        for name, target in targets.items():
            views = model.views(batch, self.perturbation(model, batch, name, target))
            terms |= self.term(model, views, batch, name, PRIMARY, target)
        return terms

    def perturbation(self, model: WordModel, batch: WordBatch, name: str, target: Tensor) -> Tensor:
        """Return the shift of the word embeddings (B, S, W); each row has the set's norm."""
        trees = isinstance(model.module(name, PRIMARY), ParsingModule)
        norm = self.config.parsing_norm if trees else self.config.tagging_norm
        width = model.encoder.embedding.words.embedding_dim
        words = batch.scored.unsqueeze(-1)
        like = target.new_zeros(*batch.tokens.shape, width)

        def loss(step: Tensor) -> Tensor:
            views = model.views(batch, step)
            (term,) = self.term(model, views, batch, name, PRIMARY, target).values()
            return term.sum

        with dropout_at(model, 0.0):
            gradient = adversarial_direction(draw_gaussian(like) * words, self.config.xi, loss)
        return norm * normalise_rows(gradient * words)
