"""Masked language modelling with spans, and a model with the span-boundary head."""

from dataclasses import dataclass
from functools import partial

from torch import nn

from metaseq_lm.config.tasks import SPAN, MaskedLMConfig, MaskingConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import with_default
from metaseq_lm.core.registry import register_task
from metaseq_lm.data.corpus.packing import open_corpus
from metaseq_lm.data.corpus.units import SpanLengths
from metaseq_lm.data.streams import Stream
from metaseq_lm.tasks.masked_lm import MaskedLMTask, build_lm, masked_stream, masking_of

from .model import BOUNDARY, BoundaryHead
from .spans import span_batch


@dataclass
class SpanMaskingConfig(MaskedLMConfig):
    """The options of masked_lm; spans consist of tokens."""

    mask_unit: str = with_default(
        MaskingConfig, "mask_unit", SPAN, "spans that do not touch", choices=(SPAN,)
    )


@register_task("span_masking", dataclass=SpanMaskingConfig)
class SpanMaskingTask(MaskedLMTask):
    """The masked_lm task with span masks and a model with one more head; the default update.

    Fine-tuning takes the encoder (encoder.*) and leaves the heads. With criterion masked_lm there
    is no boundary loss.
    """

    def build_streams(self, split: str) -> dict[str, Stream]:
        options, seed = self.config, self.run_config.seed
        if options.mask_rounding != "random" or options.legacy_duplicates or options.mask_rarity:
            raise UsageError(
                "task span_masking chooses spans, whose number of tokens is random: it has "
                "task.mask_rounding=random, "
                "task.legacy_duplicates=false and task.mask_rarity=0 only"
            )
        corpus = open_corpus(self.data, split, self.vocabulary, options, seed)
        lengths = SpanLengths(options.mean_span, options.longest_span)
        collate = partial(span_batch, corpus, lengths)
        masking = masking_of(options, self.vocabulary)
        return {split: masked_stream(self, split, corpus, masking, collate)}

    def build_model(self) -> nn.Module:
        model, options = build_lm(self.run_config, self.vocabulary), self.run_config.model
        head = BoundaryHead(options, len(self.vocabulary), self.config.longest_span)
        model.add_head(BOUNDARY, head)
        return model

    def flops_by_rule(self) -> None:
        """Return None, because the rules for masked LM do not count the boundary head."""
