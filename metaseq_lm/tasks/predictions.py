"""Prefix LM, masked next token and masked diffusion.

data/corpus/predictions.py makes the rows. They are lines or windows `[CLS] x [SEP]` of a corpus,
or packed documents.
"""

from functools import partial

import numpy as np
from torch import nn

from metaseq_lm.config.tasks import MaskedDiffusionTaskConfig, MaskedNextTokenConfig
from metaseq_lm.criterions.predictions import (
    MaskedDiffusion,
    MaskedNextToken,
    PrefixLM,
)
from metaseq_lm.data.corpus.masking import Masking
from metaseq_lm.data.corpus.packing import open_corpus
from metaseq_lm.data.corpus.predictions import (
    LEAST_TIME,
    MaskNoise,
    denoising_batch,
    draw_times,
    next_token_batch,
    prefix_batch,
)
from metaseq_lm.data.streams import Stream
from metaseq_lm.models.transformer.flops_rules import Sizes, has_rule, masked_lm
from metaseq_lm.tasks import TextTask
from metaseq_lm.tasks.masked_lm import (
    build_lm,
    changes_size,
    mask_rates,
    masked_stream,
    masking_of,
    text_stream,
    units_of,
)


class _PredictionTask(TextTask):
    """The base of these tasks: one stream of rows, one Transformer, the default update."""

    def build_model(self) -> nn.Module:
        return build_lm(self.run_config, self.vocabulary)

    def predicted_share(self, length: int) -> float:
        """Return the expected share of a row's positions that predict a token."""
        raise NotImplementedError

    def flops_by_rule(self) -> float | None:
        """Return the expected FLOPs of an update by flops_rules.py; None for other networks.

        The head counts only at positions that predict a token, attention for all pairs of tokens.
        """
        sizes, length = self.run_config.model, self.config.tokens_per_sample
        if not has_rule(sizes) or changes_size(self.run_config):
            return None
        row = Sizes.of(sizes, len(self.vocabulary), length)
        flops: float = self.config.batch_size * masked_lm(row, self.predicted_share(length))
        return flops


class PrefixLMTask(_PredictionTask):
    """Rows of which a random prefix is seen from both sides, and the rest is predicted."""

    criterions = (PrefixLM,)
    exported = True
    in_mixtures = True

    def build_streams(self, split: str) -> dict[str, Stream]:
        corpus = open_corpus(self.data, split, self.vocabulary, self.config, self.run_config.seed)
        collate = partial(prefix_batch, corpus)
        return {split: text_stream(self.run_config, split, corpus, collate, draw_times)}

    def predicted_share(self, length: int) -> float:
        return 0.5  # a row has 1 to length - 1 targets, uniformly


class MaskedNextTokenTask(_PredictionTask):
    """Rows of which masked tokens are predicted by the states before them."""

    config: MaskedNextTokenConfig
    criterions = (MaskedNextToken,)
    exported = True
    in_mixtures = True

    def build_streams(self, split: str) -> dict[str, Stream]:
        options = self.config
        corpus = open_corpus(self.data, split, self.vocabulary, options, self.run_config.seed)
        units = units_of(options, self.data)
        masking = masking_of(options, self.vocabulary, split, units=units)
        collate = partial(next_token_batch, corpus)
        return {split: masked_stream(self, split, corpus, masking, collate)}

    def predicted_share(self, length: int) -> float:
        rates = mask_rates(self.config, self.run_config)
        rate: float = self.config.mask_prob if rates is None else rates.mean
        return rate * (length - 2) / length


class MaskedDiffusionTask(_PredictionTask):
    """Rows of which masked tokens are predicted, a random share of each row.

    Whatever the times and weights in training, other splits give the bound on the negative
    log-likelihood, with uniformly drawn numbers of masked tokens.
    """

    config: MaskedDiffusionTaskConfig
    criterion: MaskedDiffusion
    criterions = (MaskedDiffusion,)
    exported = True
    in_mixtures = True

    def build_streams(self, split: str) -> dict[str, Stream]:
        options = self.config
        corpus = open_corpus(self.data, split, self.vocabulary, options, self.run_config.seed)
        noise = MaskNoise(
            options.times,
            is_flat=options.weights == "flat",
            by_count=split != "train",
            is_shifted=self.criterion.config.shifted,
        )
        masking = Masking(self.vocabulary.mask, spared=np.asarray(self.vocabulary.specials))
        collate = partial(denoising_batch, corpus, masking, noise)
        return {split: text_stream(self.run_config, split, corpus, collate, draw_times)}

    def predicted_share(self, length: int) -> float:
        # The mean of (1 - LEAST_TIME) t; both distributions of u in (0, 1] have the mean 1/2.
        mean = LEAST_TIME + (1 - LEAST_TIME) / 2
        return (1 - LEAST_TIME) * mean * (length - 2) / length
