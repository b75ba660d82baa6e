"""Options that several tasks share, each declared once.

The options of a task derive from those it has, and declare one again by `with_default` where its
default differs. Fields of the last base come first in a configuration.
"""

from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np

from metaseq_lm.core.options import option, with_default
from metaseq_lm.data.corpus.units import TOKEN, UNITS

W = TypeVar("W", bound="WarmupConfig")


@dataclass
class BatchConfig:
    """The size of a batch, which is that of an update."""

    batch_size: int = option(32, "rows of a batch", at_least=1)


@dataclass
class WarmupConfig:
    """Batches, and rows, that are smaller at the beginning and grow linearly to their full size.

    A warm-up has a number of updates or a share of the run, whichever is longer.
    """

    batch_warmup_updates: int = option(
        0, "updates in which the rows of a batch rise from batch_start to batch_size", at_least=0
    )
    batch_warmup_ratio: float = option(0.0, "the same as a share of the run", at_least=0, at_most=1)
    batch_start: float = option(
        0.25, "rows of the first batch, as a share of batch_size", above=0, at_most=1
    )
    length_warmup_updates: int = option(
        0, "updates in which rows are cut, at length_start first, later at longer ones", at_least=0
    )
    length_warmup_ratio: float = option(
        0.0, "the same as a share of the run", at_least=0, at_most=1
    )
    length_start: float = option(
        0.25, "longest row of the first batch, as a share of tokens_per_sample", above=0, at_most=1
    )

    def warmup_lengths(self, total_updates: int) -> tuple[int, int]:
        """Return the updates of the warm-up of the batch and of the length, of a run's total."""
        batch = max(self.batch_warmup_updates, round(self.batch_warmup_ratio * total_updates))
        length = max(self.length_warmup_updates, round(self.length_warmup_ratio * total_updates))
        return batch, length

    def without_warmup(self: W) -> W:
        """Return the options with batches and rows of full size from the beginning."""
        names = [item.name for item in fields(WarmupConfig) if "_warmup_" in item.name]
        return replace(self, **dict.fromkeys(names, 0))

    def mean_size(self, total_updates: int) -> float:
        """Return the mean over a run of rows times their length, relative to the full size."""
        at = np.arange(total_updates)
        starts = (self.batch_start, self.length_start)
        sizes = np.ones(total_updates)
        for start, length in zip(starts, self.warmup_lengths(total_updates)):
            if length:
                sizes *= np.minimum(1.0, start + (1.0 - start) * at / length)
        return float(sizes.mean())


@dataclass
class EvaluationConfig:
    """The part of the validation split that is used."""

    valid_size: int = option(0, "rows of the validation split that are used (0 = all)", at_least=0)


@dataclass
class TrainSizeConfig:
    """The part of the training split that is used."""

    train_size: int = option(
        0, "only the first rows (of a tagged set: sentences) of train (0 = all)", at_least=0
    )


@dataclass
class RowsConfig:
    """The length of rows."""

    tokens_per_sample: int = option(128, "longest row, with its special tokens")


@dataclass
class CutRowsConfig(RowsConfig):
    """The length of rows that are whole samples."""

    tokens_per_sample: int = with_default(
        RowsConfig,
        "tokens_per_sample",
        128,
        "longest row with its special tokens; longer rows are cut",
    )


@dataclass
class BreakModeConfig:
    """The rows of a corpus."""

    sample_break_mode: str = option(
        "none",
        "eos: a line is a row; none: windows of the stream, across documents; documents: whole "
        "documents, several to a row, which do not see each other",
        choices=("eos", "none", "documents"),
    )
    shuffle_tokens: bool = option(
        False, "permute the tokens of each training row, as a control: word order is lost"
    )


@dataclass
class MaskingConfig:
    """Masks: 15 % of the tokens, of those 10 % random and 10 % left (Devlin et al. 2019)."""

    mask_prob: float = option(0.15, "share of the tokens that are targets", at_least=0, at_most=1)
    random_token_prob: float = option(0.1, "share of targets made random", at_least=0, at_most=1)
    leave_unmasked_prob: float = option(0.1, "share of targets left as is", at_least=0, at_most=1)
    mask_unit: str = option(
        TOKEN,
        "what is masked as a whole: token; word: all its pieces; span: several words (SpanBERT)",
        choices=UNITS,
    )
    mean_span: float = option(
        5.0, "mean words of a span if none were too long (geometric)", at_least=1
    )
    longest_span: int = option(10, "no span has more words", at_least=1)


@dataclass
class DrawingConfig:
    """The choice of targets."""

    mask_rates: list[float] = option(
        [],
        "in training, in place of mask_prob: shares between which it changes linearly over the "
        "updates, such as [0.3,0.15]",
        at_least=0,
        at_most=1,
    )
    mask_phases: list[float] = option(
        [], "shares of mask_updates in which each of mask_rates holds ([] = linear)", above=0
    )
    mask_updates: int = option(
        0, "updates over which mask_rates change (0 = trainer.max_update)", at_least=0
    )
    legacy_duplicates: bool = option(False, "draw targets with replacement (ELECTRA's code)")
    mask_rarity: float = option(
        0.0, "in training draw targets by count ** -this (0: all tokens alike)", at_least=0
    )


@dataclass
class EpochsConfig:
    """The length of training in epochs."""

    epochs: float = option(0.0, "training epochs, which set max_update (0 = unused)", at_least=0)


@dataclass
class ValidateEpochsConfig:
    """The interval of validations in epochs."""

    validate_epochs: float = option(0.0, "epochs between validations (0 = unused)", at_least=0)


@dataclass
class LengthGroupsConfig:
    """Training batches of rows of similar length."""

    group_by_length: bool = option(False, "make training batches of rows of similar length")


@dataclass
class LabelledSetConfig:
    """One labelled set."""

    labelled: str = option("", "labelled set in DATA")


@dataclass
class LabelledSetsConfig:
    """Several labelled sets."""

    labelled: list[str] = option([], "labelled sets in DATA, each with its own head")


@dataclass
class HeadConfig:
    """A linear head."""

    head_dropout: float = option(0.1, "dropout before the linear layer", at_least=0, below=1)


@dataclass
class SentenceHeadConfig(HeadConfig):
    """A head on [CLS]."""

    pooled: bool = option(False, "put BERT's tanh layer before the linear layer")
    keep_head: bool = option(False, "load the head of init_from too; by default the head is new")


@dataclass
class ChannelsConfig:
    """Normalisation of images (defaults: CIFAR-10)."""

    mean: list[float] = option([0.4914, 0.4822, 0.4465], "mean by channel")
    sd: list[float] = option([0.2023, 0.1994, 0.2010], "standard deviation by channel", above=0)


@dataclass
class CorpusConfig(EvaluationConfig, BreakModeConfig, RowsConfig, BatchConfig):
    """Rows of a corpus."""


@dataclass
class UnpackedConfig(EvaluationConfig, BreakModeConfig, RowsConfig, BatchConfig):
    """Rows of one document each, or windows: their batches have no documents beside each other."""

    sample_break_mode: str = with_default(
        BreakModeConfig,
        "sample_break_mode",
        "none",
        "eos: a line is a row; none: windows of the stream, across documents",
        choices=("eos", "none"),
    )
