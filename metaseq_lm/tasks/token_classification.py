"""Fine-tuning on tags of words: a pre-trained subword encoder and a linear layer on its states.

The first token of a word carries the word's tag, the others are ignored (Devlin et al. 2019, 5.3);
spans are predicted in BIO and scored by the official scores of tagged sets. Shapes: B rows, S
positions, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from torch import nn

from metaseq_lm.config.tasks import TokenClassificationConfig
from metaseq_lm.core.batch import Terms, TokenBatch
from metaseq_lm.core.config import RunConfig
from metaseq_lm.criterions.labelled import TokenClassification
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.streams import Shuffled, Stream, sorted_pass
from metaseq_lm.data.words.subwords import TaggedRows, tagged_rows
from metaseq_lm.engine.engine import Engine
from metaseq_lm.evaluation.chunks import conlleval_spans
from metaseq_lm.models.transformer.classifiers import TokenClassifier
from metaseq_lm.models.transformer.encoder import TokenHead
from metaseq_lm.tasks import Passes, Scored
from metaseq_lm.tasks.finetuning import (
    OneSetTask,
    encoder_sizes,
    evaluate_predictions,
    labelled_folder,
)
from metaseq_lm.tasks.masked_lm import limited_count, scored_rows
from metaseq_lm.tasks.words import prediction_files, prediction_rows, set_scores


class TokenClassificationTask(OneSetTask):
    """A pre-trained encoder and a tagged set; scores are F1 of spans, or accuracy."""

    exported = True
    criterion: TokenClassification
    criterions = (TokenClassification,)
    labelled: Callable[[str], TaggedRows]

    def __init__(self, config: TokenClassificationConfig, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        self.labelled = lru_cache(maxsize=None)(lambda split: _tagged_rows(run_config, split))

    @classmethod
    def n_examples(cls, config: RunConfig) -> int:
        return _training_rows(config, _tagged_rows(config, "train"))

    def some_split(self) -> TaggedRows:
        """Return any split of the set; a set without a training split can be evaluated."""
        return self.labelled(sorted(Manifest.load(labelled_folder(self.run_config)).splits)[0])

    def build_streams(self, split: str) -> dict[str, Stream]:
        options, seed = self.config, self.run_config.seed
        rows = self.labelled(split)
        if split != "train":
            n_sentences = scored_rows(self, split, len(rows.data))
            samples = np.flatnonzero(rows.sentence < n_sentences)
            size = options.batch_size
            return {split: sorted_pass(split, samples, rows.lengths, rows.batch, size, seed)}
        lengths = rows.lengths if options.group_by_length else None
        count = _training_rows(self.run_config, rows)
        order = Shuffled(count, options.batch_size, seed, "train", lengths)
        return {split: Stream(split, order, rows.batch, seed, rows.lengths)}

    def build_model(self) -> nn.Module:
        sizes, vocabulary = encoder_sizes(self.run_config), self.vocabulary
        head = TokenHead(sizes.width, len(self.some_split().classes), self.config.head_dropout)
        return TokenClassifier(sizes, len(vocabulary), vocabulary.pad, head)

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return the scores, the main one also as "score", the loss and `prediction_rows`."""
        ((split, batches),) = passes.items()
        rows = self.labelled(split)
        data = rows.data

        def judge(batch: TokenBatch) -> tuple[Terms, list[tuple[int, list[int]]]]:
            assert batch.targets is not None and batch.samples is not None
            scores = self.criterion.scores(model, batch)
            terms = self.criterion.terms(model, scores, batch)
            if data.unseen is not None:
                scores[..., data.unseen] = -float("inf")
            best, is_word = scores.argmax(-1), batch.targets >= 0
            classes = [row[mask].tolist() for row, mask in zip(best, is_word)]
            return terms, list(zip(batch.samples.tolist(), classes))

        logs, predicted = evaluate_predictions(engine, batches, judge)
        sentences: dict[int, list[int]] = {}
        for row, classes in sorted(predicted):
            sentences.setdefault(int(rows.sentence[row]), []).extend(classes)
        # The first batches, as in a dry run, may end within a sentence, which is then not scored.
        absent = np.setdiff1d(np.arange(len(rows.sentence)), [row for row, _ in predicted])
        for sentence in rows.sentence[absent].tolist():
            sentences.pop(sentence, None)
        if not sentences:
            return Scored(logs)
        labels = [(i, [rows.labels(conlleval_spans, i, c)]) for i, c in sentences.items()]
        scores = set_scores(data, labels)
        metrics = {"score": next(iter(scores.values())), **logs, **scores}
        return Scored(metrics, lambda: prediction_rows(self.config.labelled, data, labels))

    def submissions(self, split: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Return NAME.SPLIT.conll (word, gold, predicted; spans in BIO) and conlleval's report."""
        return prediction_files(self.config.labelled, self.labelled(split).data, rows)


def _tagged_rows(config: RunConfig, split: str) -> TaggedRows:
    return tagged_rows(labelled_folder(config), split, config.task.tokens_per_sample)


def _training_rows(config: RunConfig, rows: TaggedRows) -> int:
    """Return the number of rows of train in use, from the first task.train_size sentences."""
    n_sentences = limited_count(len(rows.data), config.task.train_size)
    return int(np.searchsorted(rows.sentence, n_sentences))
