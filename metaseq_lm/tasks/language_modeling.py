"""Language modelling: causal, and in both directions on tokens or on words (ELMo)."""

from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import nn

from metaseq_lm.core.batch import TokenBatch, as_tensor
from metaseq_lm.core.errors import UsageError
from metaseq_lm.criterions import Criterion
from metaseq_lm.criterions.language_modeling import CausalLM, LanguageModeling
from metaseq_lm.data.corpus.packing import open_corpus
from metaseq_lm.data.corpus.rows import Samples, row_layout
from metaseq_lm.data.streams import Stream, sorted_pass
from metaseq_lm.data.words.buckets import CHUNK, Bucketed
from metaseq_lm.data.words.collate import token_rows
from metaseq_lm.data.words.sets import SentenceWords, WordSet
from metaseq_lm.data.words.vocabulary import PAD, SPECIAL_WORDS, UNKNOWN, WordVocabulary
from metaseq_lm.engine.engine import Engine
from metaseq_lm.models.bilstm import BiLSTMLM
from metaseq_lm.models.transformer.flops_rules import Sizes, has_rule, masked_lm
from metaseq_lm.tasks import Passes, Scored, TextTask, model_class
from metaseq_lm.tasks.masked_lm import build_transformer, changes_size, limited_count, text_stream

__all__ = ["CausalLMTask", "LanguageModelingTask"]


class LanguageModelingTask(TextTask):
    """One stream of rows `[CLS] x [SEP]`, a model of both directions, the default update."""

    criterions: tuple[type[Criterion], ...] = (LanguageModeling,)

    def build_streams(self, split: str) -> dict[str, Stream]:
        corpus = open_corpus(self.data, split, self.vocabulary, self.config, self.run_config.seed)

        def collate(samples: np.ndarray, keys: np.ndarray, width: int) -> TokenBatch:
            return _language_batch(corpus, samples, width)

        return {split: text_stream(self.run_config, split, corpus, collate)}

    def build_model(self) -> nn.Module:
        return self.language_model(len(self.vocabulary), self.vocabulary.pad)

    def language_model(self, *vocabulary: Any) -> nn.Module:
        """Return the configured model; `vocabulary` is the size, the padding and optional ids."""
        sizes = self.run_config.model
        model: nn.Module = model_class(self.run_config, BiLSTMLM)(sizes, *vocabulary)
        return model

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return the losses per token, and the perplexity of their mean over both directions."""
        logs = super().evaluate(engine, model, passes).metrics
        if "loss" in logs:
            # numpy's exp of a diverged loss is infinite, not an error.
            logs["perplexity"] = float(np.exp(np.float64(logs["loss"])))
        return Scored(logs)


class CausalLMTask(LanguageModelingTask):
    """One stream of rows `[CLS] x [SEP]` and a causal Transformer."""

    criterions = (CausalLM,)
    exported = True
    in_mixtures = True

    def build_model(self) -> nn.Module:
        return build_transformer(self.run_config, self.vocabulary)

    def flops_by_rule(self) -> float | None:
        """Return the FLOPs of an update by the rules of flops_rules.py; None for other networks.

        As in these rules, attention counts every pair of tokens, visible to each other or not.
        """
        if not has_rule(self.run_config.model) or changes_size(self.run_config):
            return None
        sizes = self.run_config.model
        row = Sizes.of(sizes, len(self.vocabulary), self.config.tokens_per_sample)
        flops: float = self.config.batch_size * masked_lm(row, share=1.0)
        return flops


def _language_batch(corpus: Samples, samples: np.ndarray, width: int = 0) -> TokenBatch:
    """Return rows (B, S) and their layout; "targets" counts tokens but each document's first."""
    rows, lengths = corpus.rows(samples, width=width)
    layout = row_layout(corpus, samples, lengths, rows.shape[1])
    documents = len(rows)
    if layout.documents is not None:
        # Documents are numbered from 0 in each row.
        last = layout.documents[torch.arange(len(rows)), torch.from_numpy(lengths) - 1]
        documents += int(last.sum())
    return TokenBatch(
        tokens=as_tensor(rows),
        layout=layout,
        sizes={"targets": int(lengths.sum()) - documents, "rows": len(rows)},
    )


class WordLanguageModelingTask(LanguageModelingTask):
    """One stream of rows `<start> words <end>` for criterion language_modeling and model bilstm_lm.

    Perplexities are over the model's words, including <unk>.
    """

    @cached_property
    def words(self) -> WordVocabulary:
        """The words of the data folder."""
        return WordVocabulary.load(self.data)

    def build_streams(self, split: str) -> dict[str, Stream]:
        options, seed = self.config, self.run_config.seed
        data = WordSet(self.data, split, self.words)
        collate = partial(_sentence_batch, data)
        if split == "train":
            order = Bucketed(
                data.lengths,
                options.batch_size,
                seed,
                split,
                chunk=CHUNK,
                longest=options.longest,
                buckets=options.buckets,
            )
            words = SentenceWords(data.lengths)
            return {split: Stream(split, order, collate, seed, data.lengths, words=words)}
        samples = np.arange(limited_count(len(data), options.valid_size))
        size = options.batch_size
        return {split: sorted_pass(split, samples, data.lengths, collate, size, seed)}

    def build_model(self) -> nn.Module:
        options = self.config
        ids = _model_ids(self.words, options.min_frequency, options.vocab_size)
        return self.language_model(int(ids.max()) + 1, PAD, torch.from_numpy(ids))


def _sentence_batch(
    data: WordSet, samples: np.ndarray, keys: np.ndarray, width: int = 0
) -> TokenBatch:
    """Return sentences as rows of `token_rows`; the size "targets" counts the words and <end>."""
    rows = token_rows(data, samples, width)
    sizes = {"targets": rows.sizes["words"] + len(samples), **rows.sizes}
    return TokenBatch(tokens=rows.tokens, layout=rows.layout, sizes=sizes)


def _model_ids(vocabulary: WordVocabulary, min_frequency: int, size: int = 0) -> np.ndarray:
    """Return the id of each word (V,) in a language model, int64; special words keep theirs.

    The `size` most frequent words (0: all) that occur at least `min_frequency` times have ids;
    others are <unk>. Raises UsageError if there is none.
    """
    counts = np.asarray(vocabulary.counts)
    order = np.argsort(-counts, kind="stable")
    frequent = order[counts[order] >= min_frequency]  # without special words, which count 0
    if not len(frequent):
        raise UsageError(
            f"no word of the data folder occurs task.min_frequency={min_frequency} times; lower it"
        )
    frequent = frequent[: size or None]
    ids = np.full(len(counts), UNKNOWN, np.int64)
    specials = len(SPECIAL_WORDS)
    ids[:specials] = np.arange(specials)
    ids[frequent] = specials + np.arange(len(frequent))
    return ids
