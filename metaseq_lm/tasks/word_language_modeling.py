"""Language modelling in both directions on sentences of words, whose states help taggers (ELMo)."""

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import nn

from metaseq_lm.core.batch import TokenBatch
from metaseq_lm.core.config import option
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import register_task
from metaseq_lm.data.streams import Stream, sorted_pass
from metaseq_lm.data.words.buckets import CHUNK, LONGEST, Bucketed, BucketsConfig
from metaseq_lm.data.words.collate import token_rows
from metaseq_lm.data.words.sets import WordSet
from metaseq_lm.data.words.vocabulary import SPECIAL_WORDS, WordVocabulary
from metaseq_lm.tasks.language_modeling import LanguageModelingTask
from metaseq_lm.tasks.masked_lm import first


@dataclass
class WordLanguageModelingConfig(BucketsConfig):
    """Batches, and the words that the model knows: its softmax over them is most of the cost."""

    batch_size: int = option(
        64, "sentences of a batch, on average: of long ones it has fewer", at_least=1
    )
    min_frequency: int = option(
        2,
        "words that the text has less often are <unk>, which so has a meaning for unknown ones",
        at_least=1,
    )
    vocab_size: int = option(
        0, "most words that are not <unk>, frequent ones first (0 = all)", at_least=0
    )
    chunk: int = option(
        CHUNK, "random sentences that are put into buckets by length together (0 = all)", at_least=0
    )
    longest: int = option(
        LONGEST, "training sentences with so many words or more are left out (0 = none)", at_least=0
    )
    valid_size: int = option(
        0, "sentences of the validation split that are used (0 = all)", at_least=0
    )


@register_task("word_language_modeling", dataclass=WordLanguageModelingConfig)
class WordLanguageModelingTask(LanguageModelingTask):
    """One stream of rows `<start> words <end>`; the criterion is language_modeling, the model bilstm_lm.

    Perplexities are of the words that the model knows, <unk> being one of them.
    """

    @cached_property
    def words(self) -> WordVocabulary:
        """The words of the data folder."""
        return WordVocabulary.load(self.data)

    def build_streams(self, split: str) -> dict[str, Stream]:
        options, seed = self.config, self.run_config.seed
        data = WordSet(self.data, split, self.words)
        collate = partial(sentence_batch, data)
        if split == "train":
            order = Bucketed(
                data.lengths,
                options.batch_size,
                seed,
                split,
                chunk=options.chunk,
                longest=options.longest,
                buckets=options.buckets,
            )
            return {split: Stream(split, order, collate, seed, data.lengths)}
        kept = np.arange(first(len(data), options.valid_size))
        size = options.batch_size
        return {split: sorted_pass(split, kept, data.lengths, collate, size, seed)}

    def build_model(self) -> nn.Module:
        options = self.config
        ids = model_ids(self.words, options.min_frequency, options.vocab_size)
        return self.language_model(int(ids.max()) + 1, self.words.PAD, torch.from_numpy(ids))


def sentence_batch(
    data: WordSet, samples: np.ndarray, keys: np.ndarray, width: int = 0
) -> TokenBatch:
    """Return sentences as `token_rows` has them; the size "targets" counts the words and <end>."""
    rows = token_rows(data, samples, width)
    sizes = {"targets": rows.sizes["words"] + len(samples), **rows.sizes}
    return TokenBatch(tokens=rows.tokens, padding=rows.padding, sizes=sizes)


def model_ids(vocabulary: WordVocabulary, least: int, most: int = 0) -> np.ndarray:
    """Return what each word (V,) is for a language model, int64: special words stay what they are.

    The `most` frequent words (0: all) that occur `least` times follow, others are <unk>. UsageError
    if there is none.
    """
    counts = np.asarray(vocabulary.counts)
    order = np.argsort(-counts, kind="stable")
    chosen = order[counts[order] >= least]  # no special word: they count 0
    if not len(chosen):
        raise UsageError(
            f"no word of the data folder occurs task.min_frequency={least} times; lower it"
        )
    chosen = chosen[:most] if most else chosen
    ids = np.full(len(counts), vocabulary.UNKNOWN, np.int64)
    specials = len(SPECIAL_WORDS)
    ids[:specials] = np.arange(specials)
    ids[chosen] = specials + np.arange(len(chosen))
    return ids
