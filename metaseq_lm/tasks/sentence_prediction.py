"""Fine-tuning on a labelled set of sentences or pairs: GLUE, SuperGLUE, and sets of the same forms.

As Clark et al. 2020 (ELECTRA) do it: the pre-trained encoder, a fresh linear layer on the state of
[CLS], no pooler. The encoder is a Transformer or, with --model bilstm_lm, a BiLSTM, whose state of
[CLS] is the last one of each direction. Shapes: N samples, K classes or candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from omegaconf import DictConfig
from torch import Tensor, nn

from metaseq_lm.core.batch import Terms
from metaseq_lm.core.config import option
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.registry import register_task
from metaseq_lm.criterions.labelled import SentencePrediction
from metaseq_lm.data.labelled.sentence_rows import SentenceBatch, SentenceRows
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.streams import Shuffled, Stream, sorted_pass
from metaseq_lm.engine.engine import Engine
from metaseq_lm.models.transformer.classifiers import SentencePredictor
from metaseq_lm.models.transformer.encoder import SentenceHead, SpanPairHead
from metaseq_lm.runs import checkpoint
from metaseq_lm.tasks import Passes, Scored
from metaseq_lm.tasks.finetuning import (
    LabelledSetTask,
    OneSetConfig,
    encoder_weights,
    label_range,
    labelled_folder,
    labelled_scores,
    row_encoder_sizes,
    sentence_rows,
)
from metaseq_lm.tasks.masked_lm import scored_rows
from metaseq_lm.tasks.protocols import facts_of

HEAD = "heads.sentence."


@dataclass
class SentencePredictionConfig(OneSetConfig):
    """Which labelled set, how it is batched, and the head (defaults: Clark et al. 2020)."""

    validate_epochs: float = option(0.0, "epochs between validations (0 = unused)", at_least=0)
    tokens_per_sample: int = option(128, "longest row with its special tokens; longer rows are cut")
    group_by_length: bool = option(False, "make training batches of rows of similar length")
    pooled: bool = option(False, "put BERT's tanh layer before the linear layer")
    head_dropout: float = option(0.1, "dropout before the linear layer", at_least=0, below=1)
    pooler_dropout: bool = option(False, "dropout before the tanh layer too (RoBERTa)")
    keep_head: bool = option(False, "load the head of init_from too; by default the head is new")
    valid_size: int = option(0, "rows of the validation split that are used (0 = all)", at_least=0)


@register_task("sentence_prediction", dataclass=SentencePredictionConfig)
class SentencePredictionTask(LabelledSetTask):
    """A pre-trained encoder and a head on one labelled set.

    Forms of sets: single sentences, pairs, choices (candidates for a context, each scored by one
    linear unit, softmax over them) and spans (two of them, see SpanPairHead); classes or real values.
    """

    criterion: SentencePrediction
    criterions = (SentencePrediction,)

    def __init__(self, config: SentencePredictionConfig, run_config: DictConfig) -> None:
        super().__init__(config, run_config)
        self.fresh = ("label_range",) if self.config.keep_head else ("heads.", "label_range")
        self.labelled = lru_cache(maxsize=None)(self._labelled)

    def _labelled(self, split: str) -> SentenceRows:
        folder = labelled_folder(self.run_config)
        return sentence_rows(folder, split, self.vocabulary, self.config.tokens_per_sample)

    # ---------------------------------------------------------------- data and model

    def build_streams(self, split: str) -> dict[str, Stream]:
        options, seed = self.config, self.run_config.seed
        rows = self.labelled(split)
        if split != "train":
            samples = np.arange(scored_rows(self, split, len(rows)))
            size = options.batch_size
            return {split: sorted_pass(split, samples, rows.lengths, rows.batch, size, seed)}
        if rows.data.labels is None:
            raise MetaseqError(f"{rows.data.folder}: '{split}' has no labels to train on")
        lengths = rows.lengths if options.group_by_length else None
        order = Shuffled(len(rows), options.batch_size, seed, "train", lengths)
        return {split: Stream(split, order, rows.batch, seed, rows.lengths)}

    def build_model(self) -> nn.Module:
        sizes, options = row_encoder_sizes(self.run_config), self.config
        folder = labelled_folder(self.run_config)
        data = LabelledSet(folder, sorted(Manifest.load(folder).splits)[0])
        width, dropout = sizes.width, options.head_dropout
        outputs = 1 if data.regression or data.form == "choices" else len(data.label_names)
        head: nn.Module
        if data.form == "spans":
            head = SpanPairHead(width, outputs, dropout)
        else:
            head = SentenceHead(width, outputs, dropout, options.pooled, options.pooler_dropout)
        scale = label_range(folder) if data.regression else None
        return SentencePredictor(sizes, len(self.vocabulary), self.vocabulary.pad, head, scale)

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Take the encoder of any model that calls it so, and with task.keep_head the head."""
        chosen = encoder_weights(weights, self.run_config)
        if self.config.keep_head:
            chosen |= {name: weight for name, weight in weights.items() if name.startswith(HEAD)}
        return chosen

    def check_facts(self, facts: dict[str, Any], source: object) -> None:
        """Raise UsageError if a kept head is for other classes or another order."""
        if self.config.keep_head and "labels" in facts:
            labels = checkpoint.labels_of(facts, source)
            checkpoint.check_heads(source, labels, facts_of(self)["labels"])

    # ---------------------------------------------------------------- scores

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return the metrics of the set, the main one first, the loss, and rows: see `labelled_split`."""
        ((split, batches),) = passes.items()

        def scored(batch: SentenceBatch) -> tuple[Tensor, Terms]:
            scores = self.criterion.scores(model, batch)
            terms: Terms = {}
            if batch.targets is not None:
                terms = self.criterion.terms(model, scores, batch.targets)
            return self._outputs(model, scores), terms

        return labelled_scores(engine, self.labelled(split).data, batches, scored)

    def _outputs(self, model: nn.Module, scores: Tensor) -> Tensor:
        """Return probabilities (B, K), or values on the scale of the labels (B, 1), as float64."""
        if isinstance(model.label_range, Tensor):
            values: Tensor = model.unscaled(scores.double())  # type: ignore[operator]
            return values
        return scores.double().softmax(-1)
