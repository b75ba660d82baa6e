"""Masked language modelling on a binarised corpus: the baseline every objective is compared with."""

from dataclasses import dataclass
from functools import partial

import numpy as np
from omegaconf import DictConfig
from torch import nn

from metaseq_lm.data.corpus import Corpus, masked_batch
from metaseq_lm.data.masking import Masking
from metaseq_lm.data.streams import Order, Sequential, Shuffled, Stream
from metaseq_lm.data.vocabulary import Vocabulary
from metaseq_lm.errors import UsageError
from metaseq_lm.registry import MODELS, register_task
from metaseq_lm.tasks import Task, options_of


@dataclass
class MaskedLMConfig:
    """Corpus and masks: 15 % of the tokens, 10 % of those random and 10 % kept (Devlin et al. 2019)."""

    batch_size: int = 32
    tokens_per_sample: int = 128
    sample_break_mode: str = "none"
    mask_prob: float = 0.15
    random_token_prob: float = 0.1
    leave_unmasked_prob: float = 0.1
    valid_size: int = 0


def build_transformer(config: DictConfig, vocabulary: Vocabulary, **kwargs: object) -> nn.Module:
    """Build the configured model for a vocabulary; `kwargs` go to its constructor.

    Raises UsageError if the task's rows are longer than the model.
    """
    longest, room = config.task.get("tokens_per_sample", 0), config.model.get("max_positions", 0)
    if room and longest > room:
        raise UsageError(
            f"task.tokens_per_sample is {longest} but model.max_positions is {room}; "
            "a row would not fit the model, make one of them equal the other"
        )
    entry = MODELS.entry(config.model._name)
    assert entry.dataclass is not None
    sizes = entry.dataclass(**options_of(config.model))
    return entry.value(sizes, len(vocabulary), padding_idx=vocabulary.pad, **kwargs)


def masking_of(options: DictConfig, vocabulary: Vocabulary) -> Masking:
    """Return BERT's masking of a task's options: special tokens are neither hidden nor drawn."""
    specials = np.asarray(vocabulary.specials)
    return Masking(
        mask=vocabulary.mask,
        rate=options.mask_prob,
        random=options.random_token_prob,
        keep=options.leave_unmasked_prob,
        replacements=np.setdiff1d(np.arange(len(vocabulary)), specials),
        spared=specials,
    )


def first(count: int, most: int) -> int:
    """Return `count`, or `most` if that is set and smaller."""
    return min(count, most) if most else count


@register_task("masked_lm", dataclass=MaskedLMConfig)
class MaskedLMTask(Task):
    """One stream of masked samples, one model, the default update."""

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.vocabulary = Vocabulary.load(self.data / "dict.txt")

    def build_streams(self, split: str) -> dict[str, Stream]:
        options, seed = self.options, self.config.seed
        corpus = Corpus(
            self.data, split, self.vocabulary, options.tokens_per_sample, options.sample_break_mode
        )
        corpus.check_vocabulary()
        collate = partial(masked_batch, corpus, masking_of(options, self.vocabulary))
        order: Order
        if split == "train":
            order = Shuffled(len(corpus), options.batch_size, seed, "train")
        else:
            order = Sequential(first(len(corpus), options.valid_size), options.batch_size)
        return {split: Stream(split, order, collate, seed, corpus.row_lengths)}

    def build_model(self) -> nn.Module:
        return build_transformer(self.config, self.vocabulary)
