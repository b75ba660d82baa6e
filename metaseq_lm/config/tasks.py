"""Options of the tasks, and parts that several tasks share."""

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np

from metaseq_lm.config.models import ROOTS, AveragingConfig
from metaseq_lm.core.config import LEAGUE
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import DATA, WEIGHTS, option, with_default
from metaseq_lm.core.registry import TASKS

__all__ = [
    "SPAN",
    "BatchConfig",
    "BreakModeConfig",
    "EpochsConfig",
    "EvaluationConfig",
    "HeadConfig",
    "LabelledSetConfig",
    "LanguageModelingConfig",
    "MaskRatesConfig",
    "MaskedCorpusConfig",
    "MaskedLMConfig",
    "MaskingConfig",
    "RowsConfig",
    "SentenceHeadConfig",
    "UnpackedConfig",
    "WarmupConfig",
]

DOCUMENTS = "documents"
SEGMENTS = "segments"
UNIFORM, BELL = "uniform", "bell"

# Values of `mask_unit`.
TOKEN, WORD, SPAN, SHORT_SPAN = "token", "word", "span", "short_span"
_UNITS = (TOKEN, WORD, SPAN, SHORT_SPAN)
WORDS, TOKENS = "words", "tokens"
ROWS = "rows"
_TOLERANCE = 1e-9  # for shares that must sum to 1
STRIDE = 64
UNLABELLED = "unlabelled"
BUCKETS = (15, 40)
LONGEST = 100  # unlabelled sentences are shorter
NULL_THRESHOLD = -2.75  # as in ELECTRA's code
W = TypeVar("W", bound="WarmupConfig")
AUTO, BOTH, CAUSAL = "auto", "both", "causal"


@dataclass
class _BucketsConfig:
    """Which sentences form a batch (default: Clark et al. 2018, code)."""

    buckets: list[int] = option(
        list(BUCKETS),
        "lengths of sentences in tokens (for pairs, of the longer side) at which a new bucket "
        "begins; a training batch comes from one bucket, so more buckets save padding",
        affects=WEIGHTS,
    )


@dataclass
class EvaluationConfig:
    """The part of the validation split that is used."""

    valid_size: int = option(
        0,
        "rows of the validation split to use (0 = all)",
        at_least=0,
        affects=DATA,
        reset="data",
    )


@dataclass
class RowsConfig:
    """The length of rows."""

    tokens_per_sample: int = option(
        128, "longest row, with its special tokens", affects=DATA, reset="data"
    )


@dataclass
class ValidateEpochsConfig:
    """The interval of validations in epochs."""

    validate_epochs: float = option(
        0.0,
        "epochs between validations (0 = unused)",
        at_least=0,
        affects=WEIGHTS,
        reset="data",
    )


@dataclass
class EpochsConfig:
    """The length of training in epochs."""

    epochs: float = option(
        0.0,
        "training epochs, which set max_update (0 = unused)",
        at_least=0,
        affects=WEIGHTS,
        reset="data",
    )


@dataclass
class BatchConfig:
    """The size of the batch of an update."""

    batch_size: int = option(32, "rows of a batch", at_least=1, affects=WEIGHTS, reset="data")


@dataclass
class LabelledSetConfig:
    """One labelled set."""

    labelled: str = option("", "labelled set in DATA", affects=DATA)


@dataclass
class OneSetConfig(EpochsConfig, BatchConfig, LabelledSetConfig):
    """The labelled set, its batches and the length of training."""


@dataclass
class ClozeConfig(EvaluationConfig, RowsConfig, ValidateEpochsConfig, OneSetConfig):
    """The set and its batches: a sample is a blank."""

    tokens_per_sample: int = with_default(
        RowsConfig,
        "tokens_per_sample",
        128,
        "longest row; a longer passage is cut to the window around the blank",
    )


@dataclass
class WarmupConfig:
    """Batches, and rows, that change their size during training.

    In a warm-up they grow linearly to their full size; its length is a number of updates or a share
    of the run, whichever is longer. Instead, rows can have another length in each phase of a run.
    """

    batch_warmup_updates: int = option(
        0,
        "updates over which the rows of a batch rise from batch_start to batch_size",
        at_least=0,
        affects=WEIGHTS,
    )
    batch_warmup_ratio: float = option(
        0.0, "the same as a share of the run", at_least=0, at_most=1, affects=WEIGHTS
    )
    batch_start: float = option(
        0.25,
        "rows of the first batch, as a share of batch_size",
        above=0,
        at_most=1,
        affects=WEIGHTS,
    )
    length_warmup_updates: int = option(
        0,
        "updates over which rows are cut, at length_start first, later at greater lengths",
        at_least=0,
        affects=WEIGHTS,
    )
    length_warmup_ratio: float = option(
        0.0,
        "the same as a share of the run",
        at_least=0,
        at_most=1,
        affects=WEIGHTS,
    )
    length_start: float = option(
        0.25,
        "longest row of the first batch, as a share of tokens_per_sample",
        above=0,
        at_most=1,
        affects=WEIGHTS,
    )
    row_lengths: list[int] = option(
        [],
        "longest training row in each phase, instead of tokens_per_sample, such as [128,256,512]",
        at_least=5,  # two segments of one token
        affects=WEIGHTS,
        reset="data",
    )
    length_phases: list[float] = option(
        [],
        "share of length_updates for each of row_lengths",
        above=0,
        affects=WEIGHTS,
        reset="data",
    )
    length_updates: int = option(
        0,
        "updates of all phases of row_lengths together (0 = trainer.max_update)",
        at_least=0,
        affects=WEIGHTS,
        reset="data",
    )
    length_keeps: str = option(
        TOKENS,
        "what stays the same in batches of shorter rows, as in batch_size full rows",
        choices=(TOKENS, ROWS),
        affects=WEIGHTS,
        reset="data",
    )

    @property
    def has_phases(self) -> bool:
        """Whether rows have another length in each phase."""
        return bool(self.row_lengths or self.length_phases)

    def in_phases(self: W) -> list[W]:
        """Return the options of each phase of row_lengths; without phases, only these options.

        Raises UsageError for lengths and shares that do not fit each other or other options.
        """
        if not self.has_phases:
            return [self]
        options: Any = self
        whole, lengths, shares = options.tokens_per_sample, self.row_lengths, self.length_phases
        setting = f"task.row_lengths is {lengths}"
        if len(lengths) != len(shares) or abs(sum(shares) - 1) > _TOLERANCE:
            raise UsageError(
                f"{setting}: give task.length_phases a share of the updates for each length, 1 "
                f"together, not {shares}"
            )
        if max(lengths) > whole:
            raise UsageError(
                f"{setting}: no row is longer than task.tokens_per_sample={whole}, the length in "
                "validations; lower the lengths or raise that"
            )
        if self.length_warmup_updates or self.length_warmup_ratio:
            raise UsageError(
                f"{setting}: leave it out, or task.length_warmup_updates and length_warmup_ratio"
            )
        phases = []
        for length in lengths:
            factor = whole / length if self.length_keeps == TOKENS else 1.0
            rows = max(1, round(options.batch_size * factor))
            sized = replace(options, tokens_per_sample=length, batch_size=rows)
            phases.append(replace(sized, row_lengths=[], length_phases=[]))
        return phases

    def warmup_lengths(self, total_updates: int) -> tuple[int, int]:
        """Return the updates of a run's warm-ups of the batch and of the length."""
        batch = max(self.batch_warmup_updates, round(self.batch_warmup_ratio * total_updates))
        length = max(self.length_warmup_updates, round(self.length_warmup_ratio * total_updates))
        return batch, length

    def without_warmup(self: W) -> W:
        """Return the options with batches and rows of full size from the beginning."""
        names = [item.name for item in fields(WarmupConfig) if "_warmup_" in item.name]
        off: dict[str, Any] = dict.fromkeys(names, 0)
        return replace(self, **off)

    def sizes(self, total_updates: int) -> np.ndarray:
        """Return rows times their length in each update of a run (updates,), relative to the full
        size of its phase.
        """
        at = np.arange(total_updates)
        starts = (self.batch_start, self.length_start)
        sizes = np.ones(total_updates)
        for start, length in zip(starts, self.warmup_lengths(total_updates)):
            if length:
                sizes *= np.minimum(1.0, start + (1.0 - start) * at / length)
        return sizes


@dataclass
class BreakModeConfig:
    """The rows of a corpus."""

    sample_break_mode: str = option(
        "none",
        "eos: a line is a row; none: windows of the stream, across documents; documents: whole "
        "documents, several to a row, which do not see each other",
        choices=("eos", "none", "documents"),
        affects=DATA,
    )
    shuffle_tokens: bool = option(
        False,
        "permute the tokens of each training row, as a control: word order is lost",
        affects=WEIGHTS,
        set_by={LEAGUE: "give `controls: {shuffled: ...}`"},
    )


@dataclass
class LanguageModelingConfig(
    WarmupConfig, EvaluationConfig, BreakModeConfig, RowsConfig, BatchConfig
):
    """The rows of the corpus."""


@dataclass
class _WordLanguageModelingConfig(EvaluationConfig, _BucketsConfig, BatchConfig):
    """Batches and the model's words: the softmax over them is most of the cost."""

    batch_size: int = with_default(
        BatchConfig, "batch_size", 64, "mean number of sentences of a batch"
    )
    min_frequency: int = option(2, "words that occur less often become <unk>", at_least=1)
    vocab_size: int = option(0, "most frequent words to know besides <unk> (0 = all)", at_least=0)
    longest: int = option(LONGEST, "leave out sentences of so many words (0 = none)", at_least=0)


@dataclass
class MaskRatesConfig:
    """A share of targets that changes in training."""

    mask_rates: list[float] = option(
        [],
        "in training, instead of mask_prob: shares between which it changes linearly over the "
        "updates, such as [0.3,0.15]",
        at_least=0,
        at_most=1,
        affects=WEIGHTS,
    )
    mask_phases: list[float] = option(
        [],
        "share of mask_updates for each of mask_rates ([] = linear)",
        above=0,
        affects=WEIGHTS,
    )
    mask_updates: int = option(
        0,
        "updates over which mask_rates change (0 = trainer.max_update)",
        at_least=0,
        affects=WEIGHTS,
    )


@dataclass
class DrawingConfig(MaskRatesConfig):
    """The choice of targets."""

    legacy_duplicates: bool = option(
        False, "draw targets with replacement (ELECTRA's code)", affects=WEIGHTS
    )
    mask_rarity: float = option(
        0.0,
        "in training draw targets in proportion to count ** -this (0: all tokens alike)",
        at_least=0,
        affects=WEIGHTS,
    )


@dataclass
class MaskingConfig:
    """Masks: 15 % of the tokens, 10 % of these random and 10 % unchanged (Devlin et al. 2019)."""

    mask_prob: float = option(0.15, "share of the tokens that are targets", at_least=0, at_most=1)
    random_token_prob: float = option(
        0.1, "share of targets made random tokens", at_least=0, at_most=1
    )
    leave_unmasked_prob: float = option(0.1, "share of unchanged targets", at_least=0, at_most=1)
    mask_unit: str = option(
        TOKEN,
        "what is masked as a whole: token; word: all its pieces; span: several words (SpanBERT); "
        "short_span: 1 to 3 tokens (GPT-BERT)",
        choices=_UNITS,
    )
    mean_span: float = option(
        5.0, "mean words of a span before longest_span applies (geometric)", at_least=1
    )
    longest_span: int = option(10, "most words of a span", at_least=1)
    span_anchors: str = option(
        WORDS,
        "the first word of a span is drawn among words (SpanBERT's paper), or as the word of a "
        "token drawn among tokens (its code; spans that touch are then replaced alike)",
        choices=(WORDS, TOKENS),
    )


@dataclass
class MaskedCorpusConfig(
    WarmupConfig,
    EvaluationConfig,
    DrawingConfig,
    MaskingConfig,
    BreakModeConfig,
    RowsConfig,
    BatchConfig,
):
    """Options of the rows of a corpus and of the choice of target tokens."""

    sample_break_mode: str = with_default(
        BreakModeConfig,
        "sample_break_mode",
        "none",
        "eos: a line is a row; none: windows of the stream; documents: whole documents, several to "
        "a row; segments: sentences packed into two segments, as for BERT and ELECTRA",
        choices=("eos", "none", DOCUMENTS, SEGMENTS),
    )


@dataclass
class MaskedLMConfig(MaskedCorpusConfig):
    """Options of rows and masks; the defaults are BERT's (Devlin et al. 2019)."""

    mask_rounding: str = option(
        "random",
        "rounding of the number of targets, random: up or down, exact on average; nearest: at "
        "least 1 (ELECTRA)",
        choices=("random", "nearest"),
    )


@dataclass
class SentencePairsConfig(MaskedLMConfig):
    """The options of masked_lm; rows are always pairs of segments."""

    sample_break_mode: str = with_default(
        BreakModeConfig,
        "sample_break_mode",
        SEGMENTS,
        "segments: two of them, the second often another text",
        choices=(SEGMENTS,),
    )


@dataclass
class MixtureConfig(LanguageModelingConfig):
    """The objectives, and the rows that they share."""

    objectives: list[Any] = option(
        [],
        "objectives, each as "
        "{task: TASK, criterion: CRITERION, name: NAME, weight: W or [W, ...], OPTION: VALUE}, "
        "of which only the task is required; options are those of the task and the criterion; "
        "the weights, one for each phase or one for all, are divided by their sum",
    )
    phases: list[float] = option(
        [], "lengths of the phases in proportion to each other, such as [4,16,4]", above=0
    )
    phase_updates: int = option(
        0,
        "updates of all phases together (0 = trainer.max_update)",
        at_least=0,
        affects=WEIGHTS,
        reset="schedule",
    )


@dataclass
class _TrainSizeConfig:
    """The part of the training split that is used."""

    train_size: int = option(
        0,
        "only the first rows (of a tagged set: sentences) of train (0 = all)",
        at_least=0,
        affects=WEIGHTS,
    )


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
class LengthGroupsConfig:
    """Training batches of rows of similar length."""

    group_by_length: bool = option(
        False, "make training batches of rows of similar length", affects=WEIGHTS
    )


@dataclass
class LabelledSetsConfig:
    """Several labelled sets."""

    labelled: list[str] = option([], "labelled sets in DATA, each with its own head", affects=DATA)


@dataclass
class HeadConfig:
    """A linear head."""

    head_dropout: float = option(
        0.1, "dropout before the linear layer", at_least=0, below=1, affects=WEIGHTS
    )


@dataclass
class SentenceHeadConfig(HeadConfig):
    """A head on [CLS]."""

    pooled: bool = option(False, "put BERT's tanh layer before the linear layer")
    keep_head: bool = option(
        False, "load the head of init_from too; by default the head is new", affects=WEIGHTS
    )


@dataclass
class ChannelsConfig:
    """Normalisation of images (defaults: CIFAR-10)."""

    mean: list[float] = option([0.4914, 0.4822, 0.4465], "mean by channel")
    sd: list[float] = option([0.2023, 0.1994, 0.2010], "standard deviation by channel", above=0)


@dataclass
class _CorpusConfig(WarmupConfig, EvaluationConfig, BreakModeConfig, RowsConfig, BatchConfig):
    """Rows of a corpus."""


@dataclass
class UnpackedConfig(WarmupConfig, EvaluationConfig, BreakModeConfig, RowsConfig, BatchConfig):
    """Rows of one document each, or windows: no rows that pack several documents."""

    sample_break_mode: str = with_default(
        BreakModeConfig,
        "sample_break_mode",
        "none",
        "eos: a line is a row; none: windows of the stream, across documents",
        choices=("eos", "none"),
    )


@dataclass
class MaskedNextTokenConfig(MaskRatesConfig, MaskingConfig, _CorpusConfig):
    """Rows and their masks."""


@dataclass
class MaskedDiffusionTaskConfig(_CorpusConfig):
    """Rows and their noise."""

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


@dataclass
class SentencePredictionConfig(
    EvaluationConfig,
    _TrainSizeConfig,
    SentenceHeadConfig,
    LengthGroupsConfig,
    CutRowsConfig,
    ValidateEpochsConfig,
    OneSetConfig,
):
    """The labelled set, its batches and the head (defaults: Clark et al. 2020)."""

    reach: str = option(
        AUTO,
        "tokens that a token sees: both (sides), read at [CLS]; causal (those before it), read at "
        "the last one; or auto: causal if the objective of init_from is, else both",
        choices=(AUTO, BOTH, CAUSAL),
    )
    held_out: float = option(
        0.0,
        "share of train, its last rows, that becomes the split held_out and is not trained on; "
        "trainer.valid_split=held_out chooses the best checkpoint by it",
        at_least=0,
        below=1,
    )
    pooler_dropout: bool = option(
        False, "also apply dropout before the tanh layer (RoBERTa)", affects=WEIGHTS
    )
    pooler_activation: str = option(
        "tanh",
        "activation of the layer that task.pooled adds (gelu: ELECTRA)",
        choices=("tanh", "gelu", "silu", "relu"),
    )


@dataclass
class SquadConfig(RowsConfig, OneSetConfig):
    """Windows, head and decoding (defaults: Clark et al. 2020, code)."""

    tokens_per_sample: int = with_default(
        RowsConfig, "tokens_per_sample", 512, "longest row; longer texts are cut into windows"
    )
    max_query_length: int = option(64, "tokens of a question; longer ones are cut", at_least=0)
    doc_stride: int = option(128, "tokens from the start of a window to the next", at_least=1)
    joint: bool = option(
        True,
        "score the end of an answer given its start; false: BERT's head, start "
        "and end by themselves",
    )
    answerability: bool = option(
        True,
        "a head for questions without an answer; false: their answer is the span "
        "from [CLS0] to [CLS0]",
    )
    beam: int = option(20, "number of starts, and of ends for each start, in decoding", at_least=1)
    n_best: int = option(20, "answers of a question in the predictions file", at_least=1)
    max_answer_length: int = option(30, "longest answer in tokens", at_least=1)
    null_threshold: float = option(
        NULL_THRESHOLD, "odds of no answer above which the prediction is empty"
    )


@dataclass
class TokenClassificationConfig(
    EvaluationConfig,
    HeadConfig,
    LengthGroupsConfig,
    RowsConfig,
    _TrainSizeConfig,
    ValidateEpochsConfig,
    OneSetConfig,
):
    """The tagged set, its batches and the head."""

    labelled: str = with_default(
        LabelledSetConfig,
        "labelled",
        "",
        "tagged set in DATA (preprocess --tagged NAME --tokenizer-from DIR)",
    )
    tokens_per_sample: int = with_default(
        RowsConfig,
        "tokens_per_sample",
        128,
        "longest row with its special tokens; longer sentences become several rows",
    )


@dataclass
class TranslationConfig(EvaluationConfig, _BucketsConfig, BatchConfig):
    """Batches, the share of the labels, beam search and scoring."""

    batch_size: int = with_default(
        BatchConfig, "batch_size", 64, "mean number of sentence pairs of a batch"
    )
    max_length: int = option(100, "longest training sentence in tokens (0 = no limit)", at_least=0)
    labelled_share: float = option(1.0, "share of the training pairs to use", above=0, at_most=1)
    share_seed: int = option(1, "seed of this share; a smaller share is a subset of a larger one")
    beam_size: int = option(10, "width of the beam; 1 is greedy search", at_least=1)
    length_penalty: float = option(0.0, "power of (5 + length) / 6 that divides log p", at_least=0)
    bleu: bool = option(True, "translate each scored split and compute BLEU; needs sacrebleu")
    bleu_tokenizer: str = option("none", "sacrebleu's: none (tokenised text), 13a, intl or char")


@dataclass
class WordTaskConfig(EvaluationConfig, AveragingConfig, _BucketsConfig, BatchConfig):
    """Batches, heads, averaged weights (defaults: Clark et al. 2018), a language model's states.

    The layers of a frozen language model (ELMo, Peters et al. 2018) are mixed with learned weights:
    one mix for all sets feeds the encoder, one for each set feeds its heads.
    """

    elmo: str = option(
        "",
        "run of task word_language_modeling on DATA; its states are added to the input ('' = none)",
        source="language_model",
    )
    elmo_dropout: float = option(0.5, "dropout of the mixed states", at_least=0, below=1)
    elmo_sizes: list[int] = option([], "sizes of that model, taken from its run")
    batch_size: int = with_default(
        BatchConfig, "batch_size", 64, "mean number of sentences of a batch"
    )
    label_fraction: float = option(1.0, "share of the training sentences used", above=0, at_most=1)
    fraction_seed: int | None = option(1, "seed of this share (null = the run's seed)")
    hidden_dim: int = option(512, "hidden units of the heads", at_least=1)
    freeze_encoder: bool = option(False, "train the heads only, on the encoder of init_from")


@dataclass
class ParserConfig:
    """The parser's heads."""

    parser_dim: int = option(128, "units of the parser's bilinear scores", at_least=1)
    root: str = option(
        "linear",
        "scores of ROOT: linear, a layer on the dependent (the code), or a learned vector",
        choices=ROOTS,
    )


@dataclass
class _TaggingTaskConfig(WordTaskConfig, LabelledSetConfig):
    """The tagged set, batches, heads and averaged weights."""

    labelled: str = with_default(
        LabelledSetConfig, "labelled", "", "tagged set in DATA (preprocess --tagged NAME)"
    )


@dataclass
class _ParsingTaskConfig(ParserConfig, WordTaskConfig, LabelledSetConfig):
    """The treebank, batches, heads and averaged weights."""

    labelled: str = with_default(
        LabelledSetConfig, "labelled", "", "treebank in DATA (preprocess --treebank NAME)"
    )


TASKS.declare("masked_lm", MaskedLMConfig, "metaseq_lm.tasks.masked_lm.MaskedLMTask")
TASKS.declare("sentence_pairs", SentencePairsConfig, "metaseq_lm.tasks.masked_lm.SentencePairsTask")
TASKS.declare("cloze", ClozeConfig, "metaseq_lm.tasks.cloze.ClozeTask", takes=("cloze",))
TASKS.declare(
    "language_modeling",
    LanguageModelingConfig,
    "metaseq_lm.tasks.language_modeling.LanguageModelingTask",
)
TASKS.declare(
    "causal_lm",
    LanguageModelingConfig,
    "metaseq_lm.tasks.language_modeling.CausalLMTask",
    takes=("causal_lm",),
)
TASKS.declare(
    "word_language_modeling",
    _WordLanguageModelingConfig,
    "metaseq_lm.tasks.language_modeling.WordLanguageModelingTask",
)
TASKS.declare("mixture", MixtureConfig, "metaseq_lm.tasks.mixture.MixtureTask", takes=("mixture",))
TASKS.declare(
    "prefix_lm", _CorpusConfig, "metaseq_lm.tasks.predictions.PrefixLMTask", takes=("prefix_lm",)
)
TASKS.declare(
    "masked_next_token",
    MaskedNextTokenConfig,
    "metaseq_lm.tasks.predictions.MaskedNextTokenTask",
    takes=("masked_next_token",),
)
TASKS.declare(
    "masked_diffusion",
    MaskedDiffusionTaskConfig,
    "metaseq_lm.tasks.predictions.MaskedDiffusionTask",
    takes=("masked_diffusion",),
)
TASKS.declare(
    "sentence_prediction",
    SentencePredictionConfig,
    "metaseq_lm.tasks.sentence_prediction.SentencePredictionTask",
    takes=("sentence_prediction",),
)
TASKS.declare("squad", SquadConfig, "metaseq_lm.tasks.squad.SquadTask", takes=("squad",))
TASKS.declare(
    "tagging", _TaggingTaskConfig, "metaseq_lm.tasks.words.TaggingTask", takes=("tagging",)
)
TASKS.declare(
    "parsing", _ParsingTaskConfig, "metaseq_lm.tasks.words.ParsingTask", takes=("parsing",)
)
TASKS.declare(
    "token_classification",
    TokenClassificationConfig,
    "metaseq_lm.tasks.token_classification.TokenClassificationTask",
    takes=("token_classification",),
)
TASKS.declare(
    "translation",
    TranslationConfig,
    "metaseq_lm.tasks.translation.TranslationTask",
    takes=("translation",),
)
