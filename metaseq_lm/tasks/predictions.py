"""Prefix LM, masked next token and masked diffusion, the last two alone or mixed with a causal LM.

Rows are made by data/corpus/predictions.py. They are lines or windows `[CLS] x [SEP]` of a corpus,
or documents beside each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import nn

from metaseq_lm.core.batch import Batch
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import option
from metaseq_lm.core.registry import register_task
from metaseq_lm.criterions.predictions import (
    BOTH,
    CAUSAL,
    MaskedDiffusion,
    MaskedNextToken,
    PrefixLM,
)
from metaseq_lm.data.corpus.masking import Masking
from metaseq_lm.data.corpus.packing import open_corpus
from metaseq_lm.data.corpus.predictions import (
    BELL,
    LEAST_TIME,
    UNIFORM,
    Noise,
    denoising_batch,
    draw_times,
    mean_causal_rows,
    next_token_batch,
    prefix_batch,
)
from metaseq_lm.data.corpus.rows import Samples
from metaseq_lm.data.streams import Stream
from metaseq_lm.models.transformer.encoder import TransformerLM
from metaseq_lm.models.transformer.flops_rules import RULED, Sizes, masked_lm
from metaseq_lm.tasks import TextTask
from metaseq_lm.tasks.masked_lm import build_transformer, masking_of, text_stream, units_of
from metaseq_lm.tasks.options import CorpusConfig, MaskingConfig


class PredictionTask(TextTask):
    """The base of these tasks: one stream of rows, one Transformer, the default update."""

    def build_model(self) -> nn.Module:
        model = build_transformer(self.run_config, self.vocabulary)
        if not isinstance(model, TransformerLM):
            task, name = self.run_config.task._name, self.run_config.model._name
            raise UsageError(f"task {task} needs --model transformer or modern, got {name}")
        return model

    def predicted_share(self, length: int) -> float:
        """Return the expected share of the positions of a row that predict something."""
        raise NotImplementedError

    def flops_by_rule(self) -> float | None:
        """Return the expected FLOPs of an update by flops_rules.py; None for other networks.

        The head counts at the positions that predict something, attention for all pairs of tokens.
        """
        sizes, length = self.run_config.model, self.config.tokens_per_sample
        if sizes._name not in RULED:
            return None
        row = Sizes.of(sizes, len(self.vocabulary), length)
        flops: float = self.config.batch_size * masked_lm(row, self.predicted_share(length))
        return flops


@register_task("prefix_lm", dataclass=CorpusConfig)
class PrefixLMTask(PredictionTask):
    """Rows of which a random prefix is seen from both sides, and the rest is predicted."""

    criterions = (PrefixLM,)
    exported = True

    def build_streams(self, split: str) -> dict[str, Stream]:
        corpus = open_corpus(self.data, split, self.vocabulary, self.config, self.run_config.seed)
        plan, collate = partial(draw_times, 0.0), partial(prefix_batch, corpus)
        return {split: text_stream(self.run_config, split, corpus, collate, plan)}

    def predicted_share(self, length: int) -> float:
        return 0.5  # the mean of 1 to length - 1 targets


@dataclass
class MixtureConfig(CorpusConfig):
    """Rows of two kinds."""

    causal_share: float = option(
        0.0,
        "share of the causal LM in the loss, and of causal rows in a batch (at least one of each "
        "kind, if there are both)",
        at_least=0,
        at_most=1,
    )


class MixtureTask(PredictionTask):
    """The base of tasks whose rows are masked or causal.

    Raises UsageError if the criterion is to read rows in a way in which none is trained.
    """

    config: MixtureConfig
    criterion: MaskedNextToken | MaskedDiffusion

    def __init__(self, config: MixtureConfig, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        share, read = config.causal_share, self.criterion.config.read
        if share == (0 if read == CAUSAL else 1):
            other = BOTH if read == CAUSAL else CAUSAL
            raise UsageError(
                f"criterion.read={read}, but with task.causal_share={share:g} no row is trained "
                f"so; set criterion.read={other}"
            )

    def stream(self, split: str, corpus: Samples, collate: Callable[..., Batch]) -> Stream:
        """Return the stream of a split whose collate function gets times, see `draw_times`."""
        plan = partial(draw_times, self.config.causal_share)
        return text_stream(self.run_config, split, corpus, collate, plan)

    def mixed_share(self, masked: float, length: int) -> float:
        """Return the share of the positions of rows of `length` that predict something.

        `masked` is that of the tokens but [CLS] and [SEP] of masked rows.
        """
        rows = self.config.batch_size
        share = mean_causal_rows(self.config.causal_share, rows) / rows
        return (share * (length - 1) + (1 - share) * masked * (length - 2)) / length


@dataclass
class MaskedNextTokenConfig(MaskingConfig, MixtureConfig):
    """Rows of two kinds, and the masks of one."""


@register_task("masked_next_token", dataclass=MaskedNextTokenConfig)
class MaskedNextTokenTask(MixtureTask):
    """Masked next tokens, or with task.causal_share a mixture with a causal LM (GPT-BERT)."""

    config: MaskedNextTokenConfig
    criterions = (MaskedNextToken,)
    exported = True

    def build_streams(self, split: str) -> dict[str, Stream]:
        options = self.config
        corpus = open_corpus(self.data, split, self.vocabulary, options, self.run_config.seed)
        units = units_of(options, self.data)
        masking = masking_of(options, self.vocabulary, split, units=units)
        collate = partial(next_token_batch, corpus, masking, options.causal_share)
        return {split: self.stream(split, corpus, collate)}

    def predicted_share(self, length: int) -> float:
        return self.mixed_share(self.config.mask_prob, length)


@dataclass
class MaskedDiffusionTaskConfig(MixtureConfig):
    """Rows of two kinds, and the noise of one."""

    times: str = option(
        UNIFORM,
        "distribution of the times in training, uniform, or bell: density 6 t (1 - t)",
        choices=(UNIFORM, BELL),
    )
    weights: str = option(
        "elbo",
        "weights of the losses of masked tokens in training: elbo, 1 / t, whose mean over uniform "
        "times bounds the negative log-likelihood, or flat, 1",
        choices=("elbo", "flat"),
    )


@register_task("masked_diffusion", dataclass=MaskedDiffusionTaskConfig)
class MaskedDiffusionTask(MixtureTask):
    """Masked diffusion, or with task.causal_share a mixture with a causal LM.

    Whatever the times and weights in training, other splits give the bound on the negative
    log-likelihood, from uniform numbers of masked tokens.
    """

    config: MaskedDiffusionTaskConfig
    criterion: MaskedDiffusion
    criterions = (MaskedDiffusion,)
    exported = True

    def build_streams(self, split: str) -> dict[str, Stream]:
        options = self.config
        corpus = open_corpus(self.data, split, self.vocabulary, options, self.run_config.seed)
        noise = Noise(
            options.times,
            is_flat=options.weights == "flat",
            by_count=split != "train",
            is_shifted=self.criterion.config.shifted,
            causal_share=options.causal_share,
        )
        masking = Masking(self.vocabulary.mask, spared=np.asarray(self.vocabulary.specials))
        collate = partial(denoising_batch, corpus, masking, noise)
        return {split: self.stream(split, corpus, collate)}

    def predicted_share(self, length: int) -> float:
        # The mean of (1 - LEAST_TIME) t; both distributions of u in (0, 1] have the mean 1/2.
        mean = LEAST_TIME + (1 - LEAST_TIME) / 2
        return self.mixed_share((1 - LEAST_TIME) * mean, length)
