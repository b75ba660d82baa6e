"""Rows of span corruption for one Transformer, or for an encoder-decoder.

Shapes: B rows, S length, N targets.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from torch import Tensor, nn

from metaseq_lm.core.batch import Layout, ScoredBatch, as_tensor
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.criterions.masked_lm import LM
from metaseq_lm.data.corpus.packing import open_corpus
from metaseq_lm.data.corpus.rows import Samples, layout_of
from metaseq_lm.data.streams import Stream
from metaseq_lm.methods.span_corruption.corruption import (
    MODES,
    Corruption,
    Denoiser,
    text_length,
)
from metaseq_lm.methods.span_corruption.criterion import CorruptedBatch, SpanCorruption
from metaseq_lm.methods.span_corruption.model import EncoderDecoder
from metaseq_lm.methods.span_corruption.options import DecoderConfig, SpanCorruptionConfig
from metaseq_lm.models.transformer.encoder import TransformerLM
from metaseq_lm.models.transformer.flops_rules import (
    Sizes,
    encoder_decoder,
    has_rule,
    has_ruled_parts,
    masked_lm,
)
from metaseq_lm.tasks import TextTask
from metaseq_lm.tasks.masked_lm import build_transformer, changes_size, text_stream

_NONE = -1  # no target
# The number of targets is a multiple of this, so that batches have few different shapes, because
# the FLOPs of each shape are counted once.
_MULTIPLE = 16


def _denoisers_of(config: SpanCorruptionConfig) -> tuple[Denoiser, ...]:
    """Return the denoisers in the options; UsageError if one is malformed."""
    if config.denoisers:
        return tuple(Denoiser.parse(text) for text in config.denoisers)
    return (Denoiser(config.noise_density, config.mean_span),)


@dataclass(frozen=True)
class _CorruptedRows:
    """The batches of a corpus.

    Attributes:
        corpus: The texts, rows `[CLS] x [SEP]`.
        corruption: How they are corrupted.
        starts: The id of the token at the start of a row, by denoiser.
        has_decoder: Whether the targets are rows of a decoder.
    """

    corpus: Samples
    corruption: Corruption
    starts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    has_decoder: bool = False

    def batch(self, samples: np.ndarray, keys: np.ndarray, width: int = 0) -> CorruptedBatch:
        """Return the texts `samples` (B,), corrupted by `keys` (B,); `width` is the widest text.

        The sizes are "targets" and "rows".
        """
        rows, lengths = self.corpus.rows(samples, width=width)
        chosen = self.corruption.choose(keys)
        corrupted = self.corruption(rows[:, 1:-1], lengths - 2, keys, chosen)
        prefix = 1 + corrupted.input_lengths
        inputs = np.concatenate([self.starts[chosen][:, None], corrupted.inputs], 1)
        targets = corrupted.targets
        at = np.arange(targets.shape[1])
        row, column = np.nonzero(at < corrupted.target_lengths[:, None])
        if self.has_decoder:
            ends = np.full((len(rows), 1), self.corruption.end)
            tokens, decoder_tokens = inputs, np.concatenate([ends, targets], 1)
            layout = layout_of(prefix, inputs.shape[1])
            positions = row * decoder_tokens.shape[1] + column + 1
        else:
            length = 1 + self.corruption.joint_length(rows.shape[1] - 2)
            tokens = np.full((len(rows), length), self.corruption.pad)
            tokens[:, : inputs.shape[1]] = inputs
            target_column = prefix[row] + column
            tokens[row, target_column] = targets[row, column]
            padding = layout_of(prefix + corrupted.target_lengths, tokens.shape[1]).padding
            layout = Layout(padding, reach="prefix", prefix=as_tensor(prefix))
            decoder_tokens, positions = None, row * tokens.shape[1] + target_column
        count = len(row)
        missing = -count % _MULTIPLE
        return CorruptedBatch(
            tokens=as_tensor(tokens),
            layout=layout,
            decoder_tokens=as_tensor(decoder_tokens),
            positions=as_tensor(np.pad(positions, (0, missing))),
            targets=as_tensor(np.pad(targets[row, column], (0, missing), constant_values=_NONE)),
            sizes={"targets": count, "rows": len(rows)},
        )


class SpanCorruptionTask(TextTask):
    """One stream of corrupted texts, one model, the default update.

    Texts are rows of a corpus without [CLS] and [SEP]. Sentinels are the last task tokens of the
    vocabulary, starting from the last one in each text. The first task tokens start rows: [CLS0],
    or [CLS1] to [CLS3] for the modes R, S and X of denoisers.
    """

    exported = True
    in_mixtures = True
    criterion: SpanCorruption
    criterions = (SpanCorruption,)

    def __init__(self, config: SpanCorruptionConfig, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        self.denoisers = _denoisers_of(config)
        self.text_token = MODES[self.denoisers[0].mode]

    @classmethod
    def prepare(cls, config: RunConfig) -> RunConfig:
        """Return the configuration with tokens_per_sample for inputs of inputs_length tokens."""
        options = config.task
        if not options.inputs_length:
            return config
        if options.inputs_length < 4:
            raise UsageError(
                f"task.inputs_length is {options.inputs_length}: inputs of two tokens with a "
                "sentinel and [SEP] have at least 4"
            )
        lengths = [
            text_length(options.inputs_length, d.density, d.mean_span).tokens
            for d in _denoisers_of(options)
            if d.mean_span
        ]
        # In mode S the noise leaves the inputs shorter.
        length = min(lengths, default=options.inputs_length)
        return replace(config, task=replace(options, tokens_per_sample=length + 2))

    @cached_property
    def corruption(self) -> Corruption:
        """How texts are corrupted; UsageError if the vocabulary has too few task tokens."""
        vocabulary, text = self.vocabulary, np.array(max(self.config.tokens_per_sample - 2, 2))
        spans = max(int(denoiser.counts(text)[1]) for denoiser in self.denoisers)
        sentinels = max(spans, 1)  # scoring of sentences needs one
        starts = 1 + max(MODES[denoiser.mode] for denoiser in self.denoisers)
        if vocabulary.task_tokens < starts + sentinels:
            raise UsageError(
                f"task {self.run_config.task._name} needs {sentinels} sentinels for texts of "
                f"{text} tokens, and {starts} symbols to start rows; both are task tokens [CLSn], "
                f"of which the vocabulary has {vocabulary.task_tokens}. Preprocess again with "
                f"--task-tokens {starts + sentinels}, or lower task.tokens_per_sample"
            )
        ids = [vocabulary.cls(vocabulary.task_tokens - 1 - k) for k in range(sentinels)]
        ends = (vocabulary.sep, vocabulary.pad)
        return Corruption(self.denoisers, np.array(ids), *ends, self.config.random_roll)

    @property
    def has_decoder(self) -> bool:
        """Whether the model is an encoder-decoder."""
        return isinstance(self.run_config.model, DecoderConfig)

    def rows(self, corpus: Samples) -> _CorruptedRows:
        """Return the batches of a corpus."""
        starts = [self.vocabulary.cls(MODES[denoiser.mode]) for denoiser in self.denoisers]
        return _CorruptedRows(corpus, self.corruption, np.array(starts), self.has_decoder)

    def build_streams(self, split: str) -> dict[str, Stream]:
        corpus = open_corpus(self.data, split, self.vocabulary, self.config, self.run_config.seed)
        rows = self.rows(corpus)
        return {split: text_stream(self.run_config, split, corpus, rows.batch)}

    def build_model(self) -> nn.Module:
        model = build_transformer(self.run_config, self.vocabulary, heads=(LM,))
        options = self.run_config.model
        if not isinstance(model, TransformerLM | EncoderDecoder):
            raise UsageError(
                f"task {self.run_config.task._name} needs a Transformer, got {options._name}"
            )
        longest = max(self.widths)
        if longest > options.max_positions:
            raise UsageError(
                f"texts of {self.config.tokens_per_sample - 2} tokens become rows of up to "
                f"{longest}, but model.max_positions is {options.max_positions}; raise it to "
                f"{longest}, or lower task.tokens_per_sample"
            )
        return model

    @property
    def widths(self) -> tuple[int, ...]:
        """The longest row, or the longest of encoder and decoder."""
        text = self.config.tokens_per_sample - 2
        inputs, targets = self.corruption.row_lengths(text)
        if self.has_decoder:
            return 1 + inputs, 1 + targets
        return (1 + self.corruption.joint_length(text),)

    def flops_by_rule(self) -> float | None:
        """Return the FLOPs of an update by the rules of flops_rules.py; None for other networks.

        We take the longest kind of texts and pad rows to the longest one. As in these rules,
        attention counts every pair of tokens, even if they do not see each other.
        """
        if changes_size(self.run_config) or not has_ruled_parts(self.run_config.model):
            return None
        options, vocabulary = self.run_config.model, len(self.vocabulary)
        text = np.array(self.config.tokens_per_sample - 2)
        mean = float(np.mean([denoiser.row_lengths(text)[1] for denoiser in self.denoisers]))
        rows = [Sizes.of(options, vocabulary, width) for width in self.widths]
        if isinstance(options, DecoderConfig):
            decoder = replace(rows[1], layers=options.decoder_depth)
            row = encoder_decoder(rows[0], decoder, mean / rows[1].length)
        elif has_rule(options):
            row = masked_lm(rows[0], mean / rows[0].length)
        else:
            return None
        return float(self.config.batch_size * row)

    def token_log_probs(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """Return the log-probabilities of tokens that the first sentinel replaces, (B, S)."""
        sentinel = int(self.corruption.sentinels[0])
        return self.criterion.token_log_probs(model, batch.replace(mask_id=sentinel))
