"""BERT pre-training on pairs of segments: masked LM and next-sentence prediction."""

from dataclasses import dataclass
from functools import partial

from omegaconf import DictConfig
from torch import nn

from metaseq_lm.core.config import option
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import register_task
from metaseq_lm.criterions.bert_pretraining import NEXT_SENTENCE
from metaseq_lm.data.corpus.packing import SEGMENTS
from metaseq_lm.data.corpus.pairs import Pairs, pair_batch
from metaseq_lm.data.streams import Stream
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.models.transformer.encoder import SentenceHead, TransformerLM, initialise
from metaseq_lm.tasks import Task
from metaseq_lm.tasks.masked_lm import (
    MaskedLMConfig,
    build_transformer,
    masked_lm_flops,
    masking_of,
    text_stream,
)


@dataclass
class SentencePairsConfig(MaskedLMConfig):
    """The options of masked_lm; rows are always made of sentences."""

    sample_break_mode: str = option(
        SEGMENTS, "segments: two of them, the second often another text", choices=(SEGMENTS,)
    )


@register_task("sentence_pairs", dataclass=SentencePairsConfig)
class SentencePairsTask(Task):
    """One stream of masked pairs, one model with two heads, the default update.

    The parameters are those of masked_lm's model, encoder.* and heads.lm.*, and
    heads.next_sentence.*, BERT's pooler and classifier. The criterion may be masked_lm, too: the
    same rows without next-sentence prediction.
    """

    def __init__(self, config: SentencePairsConfig, run_config: DictConfig) -> None:
        super().__init__(config, run_config)
        self.vocabulary = Vocabulary.load(self.data / "dict.txt")

    def build_streams(self, split: str) -> dict[str, Stream]:
        length, seed = self.config.tokens_per_sample, self.run_config.seed
        pairs = Pairs(self.data, split, self.vocabulary, length, seed)
        collate = partial(pair_batch, pairs, masking_of(self.config, self.vocabulary))
        return {split: text_stream(self.run_config, split, pairs.row_lengths, collate)}

    def build_model(self) -> nn.Module:
        model, options = build_transformer(self.run_config, self.vocabulary), self.run_config.model
        if not isinstance(model, TransformerLM):
            raise UsageError(f"task sentence_pairs needs model transformer, got {options._name}")
        head = SentenceHead(options.encoder_embed_dim, 2, options.dropout, pooled=True)
        initialise(head, options.init)
        model.heads[NEXT_SENTENCE] = head
        return model

    def flops_by_rule(self) -> float | None:
        """Return those of masked_lm: the rules count no next-sentence head, one vector a row."""
        return masked_lm_flops(self.run_config, self.vocabulary)
