"""Translation of parallel text with an LSTM encoder-decoder; BLEU by beam search.

Shapes: B rows, S source and T target positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from metaseq_lm.config.tasks import TranslationConfig
from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Terms
from metaseq_lm.core.config import RunConfig
from metaseq_lm.criterions.translation import Translation
from metaseq_lm.data.parallel.rows import TranslationBatch, TranslationRows, drop_long_sentences
from metaseq_lm.data.parallel.sets import ParallelSet, load_sides
from metaseq_lm.data.streams import Order, Sequential, Stream
from metaseq_lm.data.words.buckets import Bucketed
from metaseq_lm.engine.engine import Engine
from metaseq_lm.evaluation.bleu import check_bleu, corpus_bleu
from metaseq_lm.models.seq2seq import Beam, LSTMEncoderDecoder
from metaseq_lm.tasks import Passes, Scored, Task, model_class
from metaseq_lm.tasks.finetuning import evaluate_predictions
from metaseq_lm.tasks.masked_lm import scored_rows

_Translated = list[tuple[int, str]]  # sentence, its translation
_LENGTH_FACTOR, _LONGER = 2, 10  # a translation has at most LENGTH_FACTOR * source + LONGER tokens


class TranslationTask(Task):
    """One stream of sentence pairs, the default update.

    DATA is the set, DATA/NAME of preprocess.
    """

    criterions = (Translation,)

    def __init__(self, config: TranslationConfig, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        options = self.config
        model_class(run_config, LSTMEncoderDecoder)
        if options.bleu:
            check_bleu(options.bleu_tokenizer)
        self.tokenizers = load_sides(self.data)

    # ---------------------------------------------------------------- data and model

    def labelled_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the training sentences that are used with their translations, and all others.

        The former are a seeded share, at least one, of the sentences within the length limit; the
        others are the rest of these.
        """
        options = self.config
        usable = drop_long_sentences(ParallelSet(self.data, "train"), options.max_length)
        generator = random_streams.generator(options.share_seed, "labelled pairs")
        order = generator.permutation(usable)
        count = max(1, round(options.labelled_share * len(order)))
        return np.sort(order[:count]), np.sort(order[count:])

    def rows(self, split: str) -> TranslationRows:
        """Return the pairs of a split; for "train" only the pairs that are used."""
        data = ParallelSet(self.data, split)
        chosen = self.labelled_pairs()[0] if split == "train" else None
        return TranslationRows(data, self.tokenizers, chosen)

    def build_streams(self, split: str) -> dict[str, Stream]:
        options, seed = self.config, self.run_config.seed
        rows = self.rows(split)
        order: Order
        if split == "train":
            order = Bucketed(rows.lengths, options.batch_size, seed, split, buckets=options.buckets)
        else:
            order = Sequential(scored_rows(self, split, len(rows)), options.batch_size)
        return {split: Stream(split, order, rows.batch, seed, rows.lengths)}

    def build_model(self) -> nn.Module:
        sizes = self.run_config.model
        source, target = (tokenizer.vocabulary for tokenizer in self.tokenizers)
        return LSTMEncoderDecoder(sizes, (len(source), len(target)), source.pad)

    # ---------------------------------------------------------------- translations

    def search(self, model: nn.Module, batch: TranslationBatch) -> Tensor:
        """Return the best translation of each source row, ids (B, L) padded behind [SEP]."""
        vocabulary = self.tokenizers[1].vocabulary
        beam = Beam(
            self.config.beam_size,
            start=vocabulary.cls(),
            end=vocabulary.sep,
            pad=vocabulary.pad,
            length_penalty=self.config.length_penalty,
            banned=tuple(sorted(vocabulary.unwritten - {vocabulary.sep})),
        )
        # The source's length bounds the translation's, so it does not depend on other rows.
        lengths = batch.layout.lengths(batch.tokens) - 1
        limits = lengths * _LENGTH_FACTOR + _LONGER
        best: Tensor = model.translate(batch.tokens, batch.layout, limits, beam)[0]  # type: ignore[operator]
        return best

    def translations(self, model: nn.Module, batch: TranslationBatch) -> _Translated:
        """Return the number of each sentence of a micro-batch and its translation as text."""
        tokenizer = self.tokenizers[1]
        texts = [tokenizer.decode(row) for row in self.search(model, batch).tolist()]
        assert batch.samples is not None
        return list(zip(batch.samples.tolist(), texts))

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return the loss per target token, accuracy and perplexity, with task.bleu translations.

        With translations, BLEU is the first metric, and rows have "index", "gold" (the reference)
        and "predicted".
        """
        ((split, batches),) = passes.items()
        bleu = self.config.bleu

        def judge(batch: TranslationBatch) -> tuple[Terms, _Translated]:
            terms = self.criterion(model, batch)
            return terms, self.translations(model, batch) if bleu else []

        logs, translated = evaluate_predictions(engine, batches, judge)
        # numpy's exp of a diverged loss is infinite, not an error.
        if "loss" in logs:
            logs["perplexity"] = float(np.exp(np.float64(logs["loss"])))
        if not bleu:
            return Scored(logs)
        references = ParallelSet(self.data, split).references
        gold = [references[number] for number, _ in translated]
        score = corpus_bleu(gold, [text for _, text in translated], self.config.bleu_tokenizer)

        def rows() -> list[dict[str, Any]]:
            return [
                {"index": n, "gold": references[n], "predicted": text} for n, text in translated
            ]

        return Scored({"bleu": score, **logs}, rows)

    def submissions(self, split: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Return the translations as plain lines, in the order of the source."""
        ordered = sorted(rows, key=lambda row: row["index"])
        return {f"translations.{split}.txt": "".join(row["predicted"] + "\n" for row in ordered)}
