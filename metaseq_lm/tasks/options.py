"""Options that several tasks share, each declared once.

The options of a task derive from those it has, and declare one again by `with_default` where its
default differs. Fields of the last base come first in a configuration.
"""

from dataclasses import dataclass

from metaseq_lm.core.options import option, with_default
from metaseq_lm.data.corpus.units import TOKEN, UNITS


@dataclass
class BatchConfig:
    """The size of a batch, which is that of an update."""

    batch_size: int = option(32, "rows of a batch", at_least=1)


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
        "eos: a line is a row; none: windows of the stream, across documents",
        choices=("eos", "none"),
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
