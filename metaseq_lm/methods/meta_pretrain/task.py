"""Meta-learned pre-training: on text, on labelled sets, and of a BiLSTM language model.

The tasks prepare their data like ordinary tasks; only the updates differ (update.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from metaseq_lm.config.tasks import WarmupConfig
from metaseq_lm.core.batch import Logs, TokenBatch
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.labelled.sentence_rows import SentenceRows
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.streams import Order, Sequential, Shuffled, Stream
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.engine.engine import Engine
from metaseq_lm.methods.meta_pretrain.criterion import PAIRS, LabelledSets
from metaseq_lm.methods.meta_pretrain.model import labelled_sets_model
from metaseq_lm.methods.meta_pretrain.options import (
    MetaOptions,
    MetaPretrainPairsConfig,
)
from metaseq_lm.methods.meta_pretrain.update import meta_update
from metaseq_lm.tasks import Batches, Task
from metaseq_lm.tasks.finetuning import (
    different_sets,
    encoder_sizes,
    encoder_weights,
    sentence_rows,
)
from metaseq_lm.tasks.language_modeling import LanguageModelingTask
from metaseq_lm.tasks.masked_lm import SentencePairsTask, changes_size, limited_count


class _MetaLearned(Task):
    """Mix-in that replaces the updates of a task by meta updates."""

    config: MetaOptions

    def __init__(self, config: MetaOptions, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        config.check()
        self.takes_second_derivatives = config.second_order == "exact"
        if isinstance(config, WarmupConfig) and changes_size(run_config):
            raise UsageError(
                "a meta update takes several batches, so their size does not change by update; "
                "leave task.batch_warmup_*, task.length_warmup_* and task.row_lengths out"
            )

    @property
    def sources(self) -> Sequence[str]:
        """Names of the streams; each inner step and the test loss use one batch of each."""
        return ["train"]

    def needs(self, update: int) -> dict[str, int]:
        return dict.fromkeys(self.sources, self.config.inner_steps + 1)

    def flops_by_rule(self) -> float | None:
        """Return the FLOPs of inner_steps + 1 gradients; None with exact second derivatives."""
        one_gradient: float | None = getattr(super(), "flops_by_rule", lambda: None)()
        if one_gradient is None or self.takes_second_derivatives:
            return None
        return one_gradient * (self.config.inner_steps + 1)

    def update(self, engine: Engine, model: nn.Module, batches: Batches) -> Logs:
        mixed = []
        for number in range(self.config.inner_steps + 1):
            parts = (batches[name][number] for name in self.sources)
            mixed.append(list(itertools.chain.from_iterable(parts)))
        return meta_update(engine, partial(self.criterion, model), mixed, self.config)

    def eager_reason(self) -> str:
        """Return why torch.compile cannot compile the updates, "" if it can."""
        exact = "task.second_order=exact differentiates gradients again"
        return exact if self.takes_second_derivatives else ""


class MetaPretrainTask(_MetaLearned, SentencePairsTask):
    """Meta-learned BERT on pairs of segments; the criterion is bert_pretraining or masked_lm."""

    exported = True


class MetaPretrainLSTMTask(_MetaLearned, LanguageModelingTask):
    """Meta-learned ELMo: criterion language_modeling, model bilstm_lm."""


class MetaPretrainPairsTask(_MetaLearned):
    """Several labelled sets of sentences or pairs, with one stream and one head for each.

    Only the encoder is initialised from the run named by init_from.
    """

    exported = True
    config: MetaPretrainPairsConfig
    criterions = (LabelledSets,)

    def __init__(self, config: MetaPretrainPairsConfig, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        self.vocabulary = Vocabulary.load(self.data / "dict.txt")
        names, rows = different_sets(self.config.labelled), self.config.batch_size
        if rows % len(names):
            raise UsageError(
                f"task.batch_size is {rows}, which cannot be divided equally among {len(names)} "
                f"sets; make it a multiple of {len(names)}"
            )

    @property
    def sources(self) -> Sequence[str]:
        return list(self.config.labelled)

    def build_streams(self, split: str) -> dict[str, Stream]:
        options, seed = self.config, self.run_config.seed
        rows_per_set = options.batch_size // len(options.labelled)
        streams = {}
        for name in self.sources:
            folder, max_tokens = self.data / name, options.tokens_per_sample
            rows = sentence_rows(folder, split, self.vocabulary, max_tokens)
            if rows.data.labels is None:
                raise MetaseqError(f"{folder}: '{split}' has no labels")
            order: Order
            if split == "train":
                order = Shuffled(len(rows), rows_per_set, seed, name)
            else:
                order = Sequential(limited_count(len(rows), options.valid_size), rows_per_set)
            collate = partial(_set_batch, rows, name)
            streams[name] = Stream(name, order, collate, seed, rows.lengths)
        return streams

    def build_model(self) -> nn.Module:
        classes = {}
        for name in self.sources:
            data = LabelledSet(self.data / name, "train")
            if data.regression or data.form not in ("single", "pair"):
                form = "real values" if data.regression else data.form
                raise UsageError(
                    f"{data.folder} holds {form}; task {PAIRS} is for sentences and pairs with "
                    "classes"
                )
            classes[name] = len(data.label_names)
        return labelled_sets_model(encoder_sizes(self.run_config), self.vocabulary, classes)

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return the weights of the encoder of any pre-trained model."""
        return encoder_weights(weights, self.run_config)


def _set_batch(
    rows: SentenceRows, name: str, samples: np.ndarray, keys: np.ndarray, width: int = 0
) -> TokenBatch:
    return rows.batch(samples, keys, width).replace(head=name, sizes={name: len(samples)})
