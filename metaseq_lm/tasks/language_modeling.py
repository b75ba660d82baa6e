"""Language modelling in both directions on a binarised corpus."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn

from metaseq_lm.core.batch import TokenBatch, as_tensor
from metaseq_lm.core.config import option, typed_options
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import MODELS, register_task
from metaseq_lm.criterions.language_modeling import LanguageModeling
from metaseq_lm.data.corpus.rows import Corpus, padding_of
from metaseq_lm.data.streams import Stream
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.engine.engine import Engine
from metaseq_lm.models.bilstm import BiLSTMLM
from metaseq_lm.tasks import Passes, Scored, Task
from metaseq_lm.tasks.masked_lm import text_stream


@dataclass
class LanguageModelingConfig:
    """How the corpus is cut into rows."""

    batch_size: int = option(32, "rows of an update", at_least=1)
    tokens_per_sample: int = option(128, "longest row, with [CLS] and [SEP]")
    sample_break_mode: str = option(
        "none",
        "eos: a line is a row; none: windows of the stream, across documents",
        choices=("eos", "none"),
    )
    valid_size: int = option(0, "rows of the validation split that are used (0 = all)", at_least=0)


@register_task("language_modeling", dataclass=LanguageModelingConfig)
class LanguageModelingTask(Task):
    """One stream of rows `[CLS] x [SEP]`, a model of both directions, the default update."""

    criterions = (LanguageModeling,)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens of the data folder."""
        return Vocabulary.load(self.data / "dict.txt")

    def build_streams(self, split: str) -> dict[str, Stream]:
        options = self.config
        longest, mode = options.tokens_per_sample, options.sample_break_mode
        corpus = Corpus(self.data, split, self.vocabulary, longest, mode)
        corpus.check_vocabulary()

        def collate(samples: np.ndarray, keys: np.ndarray, width: int) -> TokenBatch:
            return language_batch(corpus, samples, width)

        return {split: text_stream(self.run_config, split, corpus.row_lengths, collate)}

    def build_model(self) -> nn.Module:
        return self.language_model(len(self.vocabulary), self.vocabulary.pad)

    def language_model(self, *vocabulary: Any) -> nn.Module:
        """Return the configured model; `vocabulary` are its size, the padding, and ids if any."""
        entry = MODELS.entry(self.run_config.model._name)
        if not issubclass(entry.value, BiLSTMLM) or entry.dataclass is None:
            raise UsageError(
                f"task {self.run_config.task._name} needs --model bilstm_lm, got {self.run_config.model._name}"
            )
        sizes = typed_options("model", self.run_config.model)
        model: nn.Module = entry.value(sizes, *vocabulary)
        return model

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return the losses per token, and the perplexity, of their mean over both directions."""
        logs = super().evaluate(engine, model, passes).metrics
        if logs:
            # numpy: exp of a diverged loss is infinite, not an error.
            logs["perplexity"] = float(np.exp(np.float64(logs["loss"])))
        return Scored(logs)


def language_batch(corpus: Corpus, samples: np.ndarray, width: int = 0) -> TokenBatch:
    """Return rows (B, S) and their padding; the size "targets" counts the tokens but the first."""
    rows, lengths = corpus.rows(samples, width=width)
    return TokenBatch(
        tokens=as_tensor(rows),
        padding=as_tensor(padding_of(lengths, rows.shape[1])),
        sizes={"targets": int(lengths.sum()) - len(rows), "rows": len(rows)},
    )
