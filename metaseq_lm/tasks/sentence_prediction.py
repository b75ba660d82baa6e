"""Fine-tuning on a labelled set of sentences or pairs: GLUE, SuperGLUE, and sets of the same forms.

As in Clark et al. 2020 (ELECTRA): the pre-trained encoder, a fresh linear layer on the state of
[CLS], no pooler. An encoder that was pre-trained causally stays causal, and the head reads its last
token. The encoder is a Transformer or, with --model bilstm_lm, a BiLSTM; its state of [CLS] is the
last state of each direction. Shapes: N samples, K classes or candidates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from metaseq_lm.config.tasks import (
    AUTO,
    BOTH,
    CAUSAL,
    SentencePredictionConfig,
)
from metaseq_lm.core.batch import Terms
from metaseq_lm.core.config import RunConfig, flatten, options_of
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import CRITERIONS, TASKS
from metaseq_lm.criterions import Exported
from metaseq_lm.criterions.labelled import SentencePrediction
from metaseq_lm.data.labelled.sentence_rows import SentenceBatch, SentenceRows
from metaseq_lm.data.labelled.sets import MULTI_LABEL, LabelledSet, held_out_from
from metaseq_lm.data.storage.manifest import Manifest, labels_in
from metaseq_lm.data.streams import Shuffled, Stream, sorted_pass
from metaseq_lm.engine.engine import Engine
from metaseq_lm.models.transformer.classifiers import SentencePredictor
from metaseq_lm.models.transformer.encoder import SentenceHead, SpanPairHead
from metaseq_lm.runs import manifests
from metaseq_lm.runs.facts import check_heads, labels_of
from metaseq_lm.runs.folder import has_started, read_config
from metaseq_lm.tasks import Passes, Scored
from metaseq_lm.tasks.finetuning import (
    LabelledSetTask,
    label_range,
    labelled_folder,
    labelled_scores,
    row_encoder_sizes,
    sentence_rows,
)
from metaseq_lm.tasks.masked_lm import limited_count, scored_rows
from metaseq_lm.tasks.protocols import IsReadAs, facts_of, read_as

HEAD = "heads.sentence."
HELD_OUT = "held_out"  # a split taken from train
_TANH = "tanh"


def _with_reach(config: RunConfig) -> RunConfig:
    """Return `config` with task.reach=causal in place of "auto" if its source is causal."""
    if config.task.reach != AUTO:
        return config
    folder, reach = Path(config.save_dir), BOTH
    # A run that has started keeps its reach; a run older than the option sees both sides.
    if config.save_dir and has_started(folder):
        reach = flatten(read_config(folder / "config.yaml")).get("task.reach", BOTH)
    elif config.init_from:
        reach = _reach_of_manifest(manifests.read_manifest(manifests.resolve(config.init_from)))
    if reach != CAUSAL:
        return config
    return replace(config, task=replace(config.task, reach=CAUSAL))


def _reach_of_manifest(manifest: Mapping[str, Any]) -> str:
    """Return what a token sees in the run of a checkpoint, by its task or its criterion.

    "both" if neither the checkpoint nor a registered class says it.
    """
    values = flatten(manifest.get("config") or {})
    if (reach := values.get("task.reach")) in (BOTH, CAUSAL):
        return str(reach)
    task = TASKS.entries.get(values.get("task._name"))  # type: ignore[arg-type]
    if task is not None and issubclass(task.value, IsReadAs):
        config = read_as(manifests.config_of(manifest, Path("init_from")))
        values["criterion._name"] = config.criterion._name
    entry = CRITERIONS.entries.get(values.get("criterion._name"))  # type: ignore[arg-type]
    exported = getattr(entry and entry.value, "exported", None)
    return exported.reach if isinstance(exported, Exported) else BOTH


def parts_of_train(data: LabelledSet, options: SentencePredictionConfig) -> tuple[int, int]:
    """Return the number of rows of train to train on, and their number with held-out rows."""
    count = limited_count(len(data), options.train_size)
    if not options.held_out:
        return count, count
    return held_out_from(data, count, math.ceil(count * options.held_out)), count


class SentencePredictionTask(LabelledSetTask):
    """A pre-trained encoder and a head on one labelled set.

    Forms of sets: single sentences, pairs, choices (candidates for a context, each scored by one
    linear unit, softmax over them) and spans (two of them, see SpanPairHead); classes or real
    values. If a row may have any number of classes, each has a sigmoid.
    """

    exported = True
    criterion: SentencePrediction
    criterions = (SentencePrediction,)

    def __init__(self, config: SentencePredictionConfig, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        self.fresh = ("label_range",) if self.config.keep_head else ("heads.", "label_range")
        self.labelled = lru_cache(maxsize=None)(self._labelled)

    def _labelled(self, split: str) -> SentenceRows:
        folder = labelled_folder(self.run_config)
        name = "train" if self._is_held_out(split) else split
        return sentence_rows(folder, name, self.vocabulary, self.config.tokens_per_sample)

    def _is_held_out(self, split: str) -> bool:
        return split == HELD_OUT and self.config.held_out > 0

    # ---------------------------------------------------------------- data and model

    @classmethod
    def prepare(cls, config: RunConfig) -> RunConfig:
        return super().prepare(_with_reach(config))

    @classmethod
    def n_examples(cls, config: RunConfig) -> int:
        first, _ = parts_of_train(LabelledSet(labelled_folder(config), "train"), config.task)
        return first

    def build_streams(self, split: str) -> dict[str, Stream]:
        if split != "train":
            return self.single_pass(split)
        options, seed, rows = self.config, self.run_config.seed, self.labelled(split)
        if rows.data.labels is None:
            raise MetaseqError(f"{rows.data.folder}: '{split}' has no labels to train on")
        lengths = rows.lengths if options.group_by_length else None
        count, _ = parts_of_train(rows.data, options)
        order = Shuffled(count, options.batch_size, seed, "train", lengths)
        return {split: Stream(split, order, rows.batch, seed, rows.lengths)}

    def single_pass(self, split: str) -> dict[str, Stream]:
        """Return one pass over the rows of a split."""
        rows, size, seed = self.labelled(split), self.config.batch_size, self.run_config.seed
        first, stop = 0, len(rows)
        if split == "train":
            stop, _ = parts_of_train(rows.data, self.config)
        elif self._is_held_out(split):
            first, stop = parts_of_train(rows.data, self.config)
        samples = np.arange(first, first + scored_rows(self, split, stop - first))
        return {split: sorted_pass(split, samples, rows.lengths, rows.batch, size, seed)}

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
            layer = options.pooled, options.pooler_dropout, options.pooler_activation
            head = SentenceHead(width, outputs, dropout, *layer)
        scale = label_range(folder) if data.regression else None
        words = len(self.vocabulary), self.vocabulary.pad
        model = SentencePredictor(sizes, *words, head, scale)
        model.is_causal = options.reach == CAUSAL
        return model

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Load the encoder of any model, and with task.keep_head the head."""
        chosen = super().pretrained(weights)
        if self.config.keep_head:
            chosen |= {name: weight for name, weight in weights.items() if name.startswith(HEAD)}
        return chosen

    def facts(self) -> dict[str, Any]:
        """Return the classes of the set, and whether a row may have any number of them."""
        folder = Path(self.data, self.config.labelled)
        multi_label = Manifest.load(folder).details.get("form") == MULTI_LABEL
        facts: dict[str, Any] = {"labels": labels_in(self.data, options_of(self.config))}
        if multi_label:
            facts["multi_label"] = True
        if self._activation != _TANH:
            facts["pooler_activation"] = self._activation
        return facts

    @property
    def _activation(self) -> str:
        return self.config.pooler_activation if self.config.pooled else _TANH

    def check_facts(self, facts: dict[str, Any], source: object) -> None:
        """Raise UsageError if a kept head has another activation or other (ordered) classes."""
        activation = facts.get("pooler_activation", _TANH)
        if self.config.keep_head and activation != self._activation:
            raise UsageError(
                f"task.keep_head: the head of {source} has a layer with {activation}; give "
                f"task.pooled=true task.pooler_activation={activation}"
            )
        if self.config.keep_head and "labels" in facts:
            labels = labels_of(facts, source)
            check_heads(source, labels, facts_of(self)["labels"])

    # ---------------------------------------------------------------- scores

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return the metrics, the main one first, the loss, and the rows of `labelled_split`."""
        ((split, batches),) = passes.items()
        data = self.labelled(split).data

        def scored(batch: SentenceBatch) -> tuple[Tensor, Terms]:
            scores = self.criterion.scores(model, batch)
            terms: Terms = {}
            if batch.targets is not None:
                terms = self.criterion.terms(model, scores, batch.targets)
            return self._outputs(model, scores, data.multi_label), terms

        return labelled_scores(engine, data, batches, scored)

    def _outputs(self, model: nn.Module, scores: Tensor, multi_label: bool) -> Tensor:
        """Return probabilities (B, K), or values on the scale of the labels (B, 1), as float64."""
        if isinstance(model.label_range, Tensor):
            values: Tensor = model.unscaled(scores.double())  # type: ignore[operator]
            return values
        if multi_label:
            return scores.double().sigmoid()
        return scores.double().softmax(-1)
