"""Pre-training as meta-learning on text, on labelled sets, and with a model of LSTMs.

Each task is a task of the core, or its like, whose updates are meta updates (update.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from omegaconf import DictConfig
from torch import nn

from metaseq_lm.core.batch import Logs, TokenBatch
from metaseq_lm.core.config import option
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import register_task
from metaseq_lm.data.labelled.sentence_rows import SentenceRows
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.manifest import require_tokenizer
from metaseq_lm.data.streams import Order, Sequential, Shuffled, Stream
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.engine.engine import Engine
from metaseq_lm.methods.meta_pretrain.criterion import PAIRS, LabelledSets
from metaseq_lm.methods.meta_pretrain.model import labelled_sets_model
from metaseq_lm.methods.meta_pretrain.update import MetaOptions, meta_update
from metaseq_lm.tasks import Batches, Task
from metaseq_lm.tasks.finetuning import different_sets, encoder_sizes, encoder_weights
from metaseq_lm.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from metaseq_lm.tasks.masked_lm import first
from metaseq_lm.tasks.sentence_pairs import SentencePairsConfig, SentencePairsTask


class MetaLearned(Task):
    """Turns the updates of the task that follows it among the bases into meta updates."""

    config: MetaOptions

    def __init__(self, config: MetaOptions, run_config: DictConfig) -> None:
        super().__init__(config, run_config)
        config.check()

    @property
    def sources(self) -> Sequence[str]:
        """The streams; every inner step and the test batch take one batch of each."""
        return ["train"]

    def needs(self, update: int) -> dict[str, int]:
        return dict.fromkeys(self.sources, self.config.inner_steps + 1)

    def flops_by_rule(self) -> float | None:
        """Return those of all gradients of a meta update; there is no rule for second derivatives."""
        once: float | None = getattr(super(), "flops_by_rule", lambda: None)()
        if once is None or self.config.second_order == "exact":
            return None
        return once * (self.config.inner_steps + 1)

    def update(self, engine: Engine, model: nn.Module, batches: Batches) -> Logs:
        mixed = [
            [micro for name in self.sources for micro in batches[name][number]]
            for number in range(self.config.inner_steps + 1)
        ]
        return meta_update(engine, partial(self.criterion, model), mixed, self.config)


@dataclass
class MetaPretrainConfig(MetaOptions, SentencePairsConfig):
    """The options of sentence_pairs, and the inner steps."""


@register_task("meta_pretrain", dataclass=MetaPretrainConfig)
class MetaPretrainTask(MetaLearned, SentencePairsTask):
    """Text as pairs of segments; the criterion is bert_pretraining or masked_lm.

    It may start from a run of masked_lm, whose model has no head for the next sentence.
    """

    fresh = ("heads.next_sentence.",)


@dataclass
class MetaPretrainLSTMConfig(MetaOptions, LanguageModelingConfig):
    """The options of language_modeling, and the inner steps."""


@register_task("meta_pretrain_lstm", dataclass=MetaPretrainLSTMConfig)
class MetaPretrainLSTMTask(MetaLearned, LanguageModelingTask):
    """ELMo's language model; the criterion is language_modeling, the model bilstm_lm."""


@dataclass
class MetaPretrainPairsConfig(MetaOptions):
    """Which labelled sets, how they are batched, and the inner steps."""

    labelled: list[str] = option([], "labelled sets in DATA, each with a head")
    batch_size: int = option(32, "rows of a batch, an equal share from each set", at_least=1)
    tokens_per_sample: int = option(128, "longest row, with its special tokens; others are cut")
    valid_size: int = option(0, "rows of each validation split that are used (0 = all)", at_least=0)


@register_task(PAIRS, dataclass=MetaPretrainPairsConfig)
class MetaPretrainPairsTask(MetaLearned):
    """Several labelled sets of sentences or pairs at once, one stream and one head for each.

    Starting from another run it takes the encoder; heads are fresh.
    """

    config: MetaPretrainPairsConfig
    fresh = ("heads.",)
    criterions = (LabelledSets,)

    def __init__(self, config: MetaPretrainPairsConfig, run_config: DictConfig) -> None:
        super().__init__(config, run_config)
        self.vocabulary = Vocabulary.load(self.data / "dict.txt")
        names, rows = different_sets(self.config.labelled), self.config.batch_size
        if rows % len(names):
            raise UsageError(
                f"task.batch_size is {rows}, which cannot be shared equally by {len(names)} sets; "
                f"make it a multiple of {len(names)}"
            )

    @property
    def sources(self) -> Sequence[str]:
        return list(self.config.labelled)

    def build_streams(self, split: str) -> dict[str, Stream]:
        return {name: self._stream(name, split) for name in self.sources}

    def _stream(self, name: str, split: str) -> Stream:
        options, seed = self.config, self.run_config.seed
        data = LabelledSet(self.data / name, split)
        require_tokenizer(data.folder, data.tokenizer_hash)
        if data.labels is None:
            raise MetaseqError(f"{data.folder}: '{split}' has no labels")
        rows = SentenceRows(data, self.vocabulary, options.tokens_per_sample)
        count = options.batch_size // len(options.labelled)
        order: Order
        if split == "train":
            order = Shuffled(len(rows), count, seed, name)
        else:
            order = Sequential(first(len(rows), options.valid_size), count)
        return Stream(name, order, partial(set_batch, rows, name), seed, rows.lengths)

    def build_model(self) -> nn.Module:
        classes = {}
        for name in self.sources:
            data = LabelledSet(self.data / name, "train")
            if data.regression or data.form not in ("single", "pair"):
                raise UsageError(
                    f"{data.folder} holds {'real values' if data.regression else data.form}; task "
                    f"{PAIRS} is for sentences and pairs with classes"
                )
            classes[name] = len(data.label_names)
        return labelled_sets_model(encoder_sizes(self.run_config), self.vocabulary, classes)

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Take the encoder of any model that calls it so."""
        return encoder_weights(weights, self.run_config)


def set_batch(
    rows: SentenceRows, name: str, samples: np.ndarray, keys: np.ndarray, width: int = 0
) -> TokenBatch:
    """Return rows of the set `name`, for the head `name`; the size that counts them is `name`."""
    return rows.batch(samples, keys, width).replace(head=name, sizes={name: len(samples)})
