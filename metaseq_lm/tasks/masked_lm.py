"""Masked language modelling on a binarised corpus, optionally with BERT's pairs of segments."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import nn

from metaseq_lm.config.tasks import (
    DOCUMENTS,
    SEGMENTS,
    SHORT_SPAN,
    TOKEN,
    TOKENS,
    DrawingConfig,
    MaskingConfig,
    MaskRatesConfig,
    WarmupConfig,
)
from metaseq_lm.config.transformer import ModernConfig
from metaseq_lm.core.batch import Batch
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import MODELS
from metaseq_lm.criterions.masked_lm import NEXT_SENTENCE
from metaseq_lm.data.corpus.masking import Masking
from metaseq_lm.data.corpus.packing import SHORTEST, open_corpus
from metaseq_lm.data.corpus.pairs import Pairs, PhasedPairs, pair_batch
from metaseq_lm.data.corpus.phases import PhasedLengths
from metaseq_lm.data.corpus.rows import Samples, masked_batch
from metaseq_lm.data.corpus.units import MaskRates, SpanLengths, Units
from metaseq_lm.data.streams import (
    Collate,
    Growing,
    Lengths,
    Order,
    PhasedOrder,
    Phases,
    Plan,
    PlannedStream,
    Ramp,
    ScheduledStream,
    Sequential,
    Shuffled,
    Stream,
    Words,
)
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.models.transformer.encoder import SentenceHead, TransformerLM
from metaseq_lm.models.transformer.flops_rules import OUTPUT_SHARE, Sizes, has_rule, masked_lm
from metaseq_lm.tasks import Task, TextTask

__all__ = [
    "MaskedCollate",
    "MaskedLMTask",
    "build_lm",
    "masked_stream",
    "masking_of",
    "text_stream",
]


def check_rows(config: RunConfig) -> None:
    """Raise UsageError if the rows are longer or have more segment types than the model allows."""
    row_length = getattr(config.task, "tokens_per_sample", 0)
    max_positions = getattr(config.model, "max_positions", 0)
    if max_positions and row_length > max_positions:
        raise UsageError(
            f"task.tokens_per_sample is {row_length} but model.max_positions is {max_positions}, "
            "so rows do not fit the model; set both to the same value"
        )
    has_segments = getattr(config.task, "sample_break_mode", "") == SEGMENTS
    if has_segments and getattr(config.model, "segments", None) == 1:
        raise UsageError(
            "model.segments is 1, but rows have 2 segments; use 2, or 0 for no embedding"
        )


def build_transformer(config: RunConfig, vocabulary: Vocabulary, **kwargs: object) -> nn.Module:
    """Build the configured model for a vocabulary; `kwargs` go to its constructor.

    Raises UsageError if the task's rows do not fit the model.
    """
    check_rows(config)
    entry = MODELS.entry(config.model._name)
    assert entry.dataclass is not None
    if entry.value.forward is nn.Module.forward and not kwargs:
        raise UsageError(
            f"task {config.task._name} cannot train model {config.model._name}; choose another "
            "--model, such as transformer"
        )
    args = config.model, len(vocabulary)
    kwargs["padding_idx"] = vocabulary.pad
    try:
        signature(entry.value).bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(
            f"task {config.task._name} cannot train model {config.model._name} ({error}); choose "
            "another --model, such as transformer"
        ) from error
    model: nn.Module = entry.value(*args, **kwargs)
    return model


def build_lm(config: RunConfig, vocabulary: Vocabulary) -> TransformerLM:
    """Build the configured Transformer with a language-model head.

    Raises UsageError for another model, and like `build_transformer`.
    """
    model = build_transformer(config, vocabulary)
    if not isinstance(model, TransformerLM):
        raise UsageError(
            f"task {config.task._name} needs --model transformer or modern, got "
            f"{config.model._name}"
        )
    return model


def masking_of(
    config: Any,
    vocabulary: Vocabulary,
    split: str = "train",
    rounding: str = "random",
    drawing: DrawingConfig | None = None,
    units: Units | None = None,
) -> Masking:
    """Build the masking that a task's options describe; special tokens are never masked or drawn.

    Args:
        config: Options of MaskingConfig and RowsConfig.
        vocabulary: The tokens.
        split: The split; mask_rarity applies only to "train", so that losses on other splits do not
            depend on it.
        rounding: Rounding of the number of targets. With "nearest", which follows ELECTRA's code,
            [UNK] can be a target.
        drawing: How targets are drawn. mask_rarity follows Clark 2021, section 5.5, which gives no
            formula; the power of the count is our choice.
        units: The words or spans that are masked as a whole, see `units_of`.

    Raises:
        UsageError: mask_rarity is above 0 and dict.txt has no counts.
    """
    specials = np.asarray(vocabulary.specials)
    unknown = [] if vocabulary.unk is None else [vocabulary.unk]
    drawing = drawing or DrawingConfig()
    nearest = rounding == "nearest"
    weights = np.zeros(0)
    if drawing.mask_rarity and split == "train":
        if not any(vocabulary.counts):
            raise UsageError(
                "task.mask_rarity needs the counts of dict.txt; binarise the corpus with "
                "'metaseq-lm preprocess --trainpref', which counts them"
            )
        weights = np.maximum(vocabulary.counts, 1.0) ** -drawing.mask_rarity
    return Masking(
        mask=vocabulary.mask,
        rate=config.mask_prob,
        random=config.random_token_prob,
        keep=config.leave_unmasked_prob,
        replacements=np.setdiff1d(np.arange(len(vocabulary)), specials),
        spared=np.setdiff1d(specials, unknown) if nearest else specials,
        rounding=rounding,
        legacy_duplicates=drawing.legacy_duplicates,
        tokens_per_sample=config.tokens_per_sample,
        weights=weights,
        units=units,
    )


def units_of(config: MaskingConfig, folder: Path) -> Units | None:
    """Return the words or spans that are masked as a whole, None to mask single tokens.

    The tokenizer in `folder` says where words begin.
    """
    if config.mask_unit == TOKEN:
        return None
    if config.mask_unit == SHORT_SPAN:
        return Units(SHORT_SPAN, np.zeros(0, bool))
    lengths, by_tokens = SpanLengths(config.mean_span, config.longest_span), config.span_anchors
    return Units(config.mask_unit, load_tokenizer(folder).word_starts, lengths, by_tokens == TOKENS)


def mask_rates(config: MaskRatesConfig, run_config: RunConfig) -> MaskRates | None:
    """Return the shares of targets over the updates of a run; None for a constant share.

    Raises UsageError for phases that do not fit.
    """
    if not config.mask_rates and not config.mask_phases:
        return None
    updates = config.mask_updates or run_config.trainer.max_update
    return MaskRates(tuple(config.mask_rates), updates, tuple(config.mask_phases))


def limited_count(count: int, limit: int) -> int:
    """Return `count`, but at most `limit` unless that is 0."""
    return min(count, limit or count)


def scored_rows(task: Task, split: str, count: int) -> int:
    """Return how many of `count` rows of a split are scored; task.valid_size limits valid_split."""
    if split != task.run_config.trainer.valid_split:
        return count
    return limited_count(count, task.config.valid_size)


class _CorpusRows(Protocol):
    """The rows of a corpus: their lengths, and the words of their text."""

    @property
    def row_lengths(self) -> Lengths: ...

    @property
    def words(self) -> Words: ...


def text_stream(
    config: RunConfig,
    split: str,
    corpus: _CorpusRows,
    collate: Callable[..., Batch],
    plan: Plan | None = None,
) -> Stream:
    """Return a stream of a corpus: shuffled epochs for "train", one pass for another split.

    See Stream, and PlannedStream for a `plan`.
    """
    options, widths, lengths = config.task, None, corpus.row_lengths
    order: Order
    if split != "train":
        order = Sequential(limited_count(len(lengths), options.valid_size), options.batch_size)
    elif isinstance(lengths, PhasedLengths):
        order = _phased_order(config, lengths)
    else:
        sizes, widths = _ramps(config)
        if sizes is None:
            order = Shuffled(len(lengths), options.batch_size, config.seed, "train")
        else:
            order = Growing(len(lengths), sizes, config.seed, "train")
        order.by_epoch = _is_by_epoch(options)
    arguments = split, order, collate, config.seed, lengths, widths, corpus.words
    if plan is None:
        return Stream(*arguments)
    return PlannedStream(*arguments, plan=plan)


def _phased_order(config: RunConfig, lengths: PhasedLengths) -> PhasedOrder:
    """Return shuffled epochs of the rows of each phase of task.row_lengths."""
    options = config.task
    phases = length_phases(config)
    orders = []
    for number, phase in enumerate(options.in_phases()):
        sizes, _ = _ramps(replace(config, task=phase))
        sizes = sizes or Ramp(phase.batch_size, phase.batch_size, 0)
        count, name = len(lengths.phases[number]), f"train, phase {number}"
        orders.append(Growing(count, sizes, config.seed, name, phases.begins[number]))
        orders[-1].by_epoch = _is_by_epoch(options)
    return PhasedOrder(orders, phases)


def length_phases(config: RunConfig) -> Phases:
    """Return the phases of task.row_lengths; a single one if it has none."""
    options = config.task
    shares = tuple(options.length_phases) or (1.0,)
    return Phases(shares, options.length_updates or config.trainer.max_update)


def _is_by_epoch(options: Any) -> bool:
    return getattr(options, "sample_break_mode", "") == DOCUMENTS


def changes_size(config: RunConfig) -> bool:
    """Return whether the size of batches or rows changes between updates."""
    return any(_ramps(config)) or getattr(config.task, "has_phases", False)


def _ramps(config: RunConfig) -> tuple[Ramp | None, Ramp | None]:
    """Return the ramps, by update, of the rows of a batch and of their length; None if constant.

    Raises UsageError for a warm-up of the length of rows of two segments.
    """
    if not isinstance(config.task, WarmupConfig):
        return None, None
    options: Any = config.task
    by_rows, by_length = options.warmup_lengths(config.trainer.max_update)
    if by_length and options.sample_break_mode == SEGMENTS:
        raise UsageError(
            "rows of two segments are not cut; leave task.length_warmup_updates and "
            "task.length_warmup_ratio out, or choose another task.sample_break_mode"
        )
    rows, length = options.batch_size, options.tokens_per_sample
    first_rows = max(1, round(options.batch_start * rows))
    first_length = min(length, max(SHORTEST, round(options.length_start * length)))
    return (
        Ramp(first_rows, rows, by_rows) if by_rows else None,
        Ramp(first_length, length, by_length) if by_length else None,
    )


# (masking, sample numbers, a key per row, width to pad to) -> batch
MaskedCollate = Callable[[Masking, np.ndarray, np.ndarray, int], Batch]


def masked_stream(
    task: Task, split: str, corpus: _CorpusRows, masking: Masking, collate: MaskedCollate
) -> Stream:
    """Return `text_stream` of masked rows; in training, with the options' masking rates.

    The rate is a function of the update number.
    """
    stream = text_stream(task.run_config, split, corpus, partial(collate, masking))
    rates = mask_rates(task.config, task.run_config)
    if split != "train" or rates is None:
        return stream

    def schedule(update: int) -> Collate:
        return partial(collate, replace(masking, rate=rates.at(update)))

    usual = partial(collate, replace(masking, rate=rates.mean))
    return ScheduledStream(**(vars(stream) | {"collate": usual}), schedule=schedule)


class MaskedLMTask(TextTask):
    """Masked language modelling: one stream of masked rows, one model, the default update."""

    exported = True
    in_mixtures = True

    def build_streams(self, split: str) -> dict[str, Stream]:
        corpus = open_corpus(self.data, split, self.vocabulary, self.config, self.run_config.seed)
        collate = self.collate(corpus)
        return {split: masked_stream(self, split, corpus, self.masking(split), collate)}

    def collate(self, corpus: Samples) -> MaskedCollate:
        """Return the function that makes the batches of a corpus."""
        return partial(masked_batch, corpus)

    def masking(self, split: str) -> Masking:
        """Return the masking of a split."""
        options = self.config
        units = units_of(options, self.data)
        return masking_of(options, self.vocabulary, split, options.mask_rounding, options, units)

    def build_model(self) -> nn.Module:
        return build_transformer(self.run_config, self.vocabulary)

    def flops_by_rule(self) -> float | None:
        """Return the FLOPs of an update by the rules of flops_rules.py; None for other networks.

        The rules leave out a next-sentence head, which processes one vector per row. They use the
        paper's share of predicted tokens. For a modern encoder the share comes from the options;
        its mean over the run if it changes.
        """
        if not has_rule(self.run_config.model) or changes_size(self.run_config):
            return None
        sizes = self.run_config.model
        row = Sizes.of(sizes, len(self.vocabulary), self.config.tokens_per_sample)
        share = OUTPUT_SHARE
        if isinstance(sizes, ModernConfig):
            rates = mask_rates(self.config, self.run_config)
            share = self.config.mask_prob if rates is None else rates.mean
        flops: float = self.config.batch_size * masked_lm(row, share)
        return flops


class SentencePairsTask(MaskedLMTask):
    """BERT's pre-training: one stream of masked pairs of segments, one model with two heads.

    The parameters are encoder.* and heads.lm.*, as in masked_lm, and heads.next_sentence.*, BERT's
    pooler and classifier. Criterion masked_lm uses the same rows without next-sentence prediction.
    """

    exported = True

    def build_streams(self, split: str) -> dict[str, Stream]:
        options, seed = self.config, self.run_config.seed
        is_phased = split == "train" and options.has_phases
        phases = []
        for phase in options.in_phases() if is_phased else [options]:
            rows = Pairs(self.data, split, self.vocabulary, phase.tokens_per_sample, seed)
            rows.shuffled = split == "train" and options.shuffle_tokens
            phases.append(rows)
        pairs = PhasedPairs(phases) if is_phased else phases[0]
        collate = partial(pair_batch, pairs)
        return {split: masked_stream(self, split, pairs, self.masking(split), collate)}

    def build_model(self) -> nn.Module:
        model, options = build_lm(self.run_config, self.vocabulary), self.run_config.model
        head = SentenceHead(options.encoder_embed_dim, 2, options.dropout, pooled=True)
        model.add_head(NEXT_SENTENCE, head)
        return model
