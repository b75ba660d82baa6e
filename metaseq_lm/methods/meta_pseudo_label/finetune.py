"""Fine-tuning the student on one labelled set in the common format: its LM head predicts label tokens.

Shapes: B batch, S length, V vocabulary, K classes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from omegaconf import DictConfig
from torch import nn

from metaseq_lm.core.batch import Logs, Term, Terms, number_of
from metaseq_lm.core.config import option
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import register_criterion, register_task
from metaseq_lm.criterions import Criterion
from metaseq_lm.criterions.masked_lm import cross_entropy
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.labelled.token_labels import STRIDE, TokenLabelBatch, TokenLabels
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.streams import Order, Sequential, Shuffled, Stream, sorted_pass
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.engine.engine import Engine
from metaseq_lm.methods.meta_pseudo_label.answers import (
    WindowAnswer,
    answer_metrics,
    answer_rows,
    class_metrics,
    class_rows,
    class_scores,
    record_file,
    window_answers,
)
from metaseq_lm.tasks import Passes, Scored, Task, with_epochs
from metaseq_lm.tasks.finetuning import ensemble_of, judged, labelled_folder, leaderboard_files
from metaseq_lm.tasks.masked_lm import build_transformer

MINI = "mini"
LARGEST_BATCH = 256  # rows of an evaluation batch
LARGEST_LOGITS = 1 << 26  # numbers


@register_criterion("token_labels")
class TokenLabelCriterion(Criterion):
    """Cross-entropy of the label token at every position, and the accuracy of the class it implies.

    Of sets whose answers are tokens the accuracy is that of the positions.
    """

    def __call__(self, model: nn.Module, batch: TokenLabelBatch) -> Terms:
        return self.terms(model(batch.tokens, batch.padding), batch)  # (B, S, V)

    def terms(self, logits: Any, batch: TokenLabelBatch) -> Terms:
        """Return the terms of logits (B, S, V)."""
        assert batch.targets is not None
        loss = Term(cross_entropy(logits, batch.targets).sum(), "targets")
        if batch.token_level:
            correct = number_of(logits.detach().argmax(-1) == batch.targets)
            return {"labels": loss, "accuracy": Term(correct, "targets", 0.0)}
        correct = number_of(class_scores(logits.detach(), batch).argmax(-1) == batch.classes)
        return {"labels": loss, "accuracy": Term(correct, "rows", 0.0)}


@dataclass
class TokenLabelsConfig:
    """Which labelled set, and how it is batched (paper table 6)."""

    labelled: str = option("", "labelled set in DATA")
    task_token: int = option(2, "n of the task token [CLSn]; as in pre-training")
    class_token: int = option(-1, "n of the token of class 1 (-1 = task_token); authors' CB: 4")
    batch_size: int = option(4, "rows of a batch", at_least=1)
    epochs: float = option(
        0.0, "sets trainer.max_update from the training set (0 = it is given)", at_least=0
    )
    tokens_per_sample: int = option(34, "longest row, with its special tokens; longer are windows")
    stride: int = option(STRIDE, "tokens that windows of a long row share")
    valid_size: int = option(
        128,
        "rows of the validation split that are used (0 = all); with trainer.valid_split=mini those are "
        "the split 'mini', and 'valid' is whole",
        at_least=0,
    )
    shuffle: bool = option(True, "new order every epoch; the authors' code did not shuffle")
    scored_width: str = option(
        "row",
        "class scores are divided by the longest window of the row, or of the batch (the code, whose "
        "batches are others than these, which are sorted by length)",
        choices=("row", "batch"),
    )


@register_task("token_labels", dataclass=TokenLabelsConfig)
class TokenLabelsTask(Task):
    """The student of a meta_pseudo_label run (or any model of its shape) on one labelled set.

    In training a long row is one window, drawn anew each time; elsewhere all of its windows.
    """

    criterion: TokenLabelCriterion
    criterions = (TokenLabelCriterion,)

    def __init__(self, config: TokenLabelsConfig, run_config: DictConfig) -> None:
        super().__init__(config, run_config)
        self.vocabulary = Vocabulary.load(self.data / "dict.txt")
        self._splits: dict[str, TokenLabels] = {}

    @classmethod
    def prepare(cls, config: DictConfig) -> DictConfig:
        options = config.task
        if not options.epochs:
            return config
        examples = len(LabelledSet(labelled_folder(config), "train"))
        return with_epochs(config, examples, options.batch_size, options.epochs)

    def labelled(self, split: str) -> TokenLabels:
        """Return the rows of a split, read once; "mini" is a part of "valid"."""
        folder, options = labelled_folder(self.run_config), self.config
        if split == MINI and MINI not in Manifest.load(folder).splits:
            split = "valid"
        if split not in self._splits:
            about = (options.tokens_per_sample, options.stride, options.class_token)
            self._splits[split] = TokenLabels(
                folder, split, self.vocabulary, options.task_token, *about
            )
        return self._splits[split]

    # ---------------------------------------------------------------- data and model

    def build_streams(self, split: str) -> dict[str, Stream]:
        options, seed = self.config, self.run_config.seed
        data = self.labelled(split)
        if split == "train":
            if data.labels is None:
                raise MetaseqError(f"{data.data.folder}: '{split}' has no labels to train on")
            kind = Shuffled if options.shuffle else Cyclic
            order: Order = kind(len(data), options.batch_size, seed, "train")

            def training(samples: np.ndarray, keys: np.ndarray, width: int) -> TokenLabelBatch:
                return self.batch(data, data.drawn(samples, keys), keys, width)

            return {split: Stream(split, order, training, seed, data.longest)}
        windows = data.windows_of(self.chosen(split, len(data)))
        per_row = options.tokens_per_sample * len(self.vocabulary)
        size = max(1, min(LARGEST_BATCH, LARGEST_LOGITS // per_row))
        batch = partial(self.batch, data)
        return {split: sorted_pass(split, windows, data.lengths, batch, size, seed)}

    def batch(
        self, data: TokenLabels, windows: np.ndarray, keys: np.ndarray, width: int
    ) -> TokenLabelBatch:
        """Return `windows` as TokenLabels gives them, with the length that class scores are divided by."""
        batch = data.batch(windows, keys, width)
        if self.config.scored_width == "batch":
            return batch.replace(longest=np.full(len(windows), batch.tokens.shape[1]))
        return batch

    def chosen(self, split: str, count: int) -> np.ndarray:
        """Return the rows of a split that are used."""
        most = self.config.valid_size
        if (split != self.run_config.trainer.valid_split and split != MINI) or not count > most > 0:
            return np.arange(count)
        # The authors' draw of the small validation set: Python's generator, seed 42.
        shuffled = list(range(count))
        random.Random(42).shuffle(shuffled)
        return np.array(shuffled[:most])

    def build_model(self) -> nn.Module:
        return build_transformer(self.run_config, self.vocabulary)

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Take the student of a pair, or all weights if there is no pair."""
        student = {n[len("student.") :]: w for n, w in weights.items() if n.startswith("student.")}
        return student or weights

    # ---------------------------------------------------------------- scores

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return the metrics of the set, the main one first, then the loss; none without labels.

        Rows have text, gold and predicted label and class scores, or the answer.
        """
        ((split, batches),) = passes.items()
        rows = self.labelled(split)

        def judge(batch: TokenLabelBatch) -> tuple[Terms, list[WindowAnswer]]:
            logits = model(batch.tokens, batch.padding)
            terms = {} if rows.labels is None else self.criterion.terms(logits, batch)
            return terms, window_answers(logits, batch)

        # The windows of a row may lie on several replicas.
        logs, answers = judged(engine, batches, judge)
        metrics: Logs = {}
        if rows.labels is not None:
            metrics = (
                answer_metrics(rows.data, answers, load_tokenizer(self.data))
                if rows.token_level
                else class_metrics(rows.data, answers)
            )
            metrics |= {name: value for name, value in logs.items() if name not in metrics}
        return Scored(metrics, lambda: self._rows(split, answers))

    def _rows(self, split: str, answers: list[WindowAnswer]) -> list[dict[str, Any]]:
        data, tokenizer = self.labelled(split).data, load_tokenizer(self.data)
        rows = (
            answer_rows(data, answers, tokenizer)
            if self.labelled(split).token_level
            else class_rows(data, answers)
        )
        for row in rows:
            row["text"] = [
                tokenizer.decode(column[row["index"]].tolist()) for column in data.inputs
            ]
        return rows

    def facts(self) -> dict[str, Any]:
        """Return nothing: classes are words of the vocabulary, whatever their order in a set."""
        return {}

    def submissions(self, split: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Return the file that the benchmark's leaderboard wants for a test split."""
        data = self.labelled(split)
        split = data.data.split  # "mini" is a part of "valid"
        if data.token_level:
            return record_file(data.data, split, rows)
        return leaderboard_files(data.data, split, rows)

    def ensemble(
        self, split: str, members: Sequence[Sequence[dict[str, Any]]]
    ) -> tuple[Logs, Sequence[dict[str, Any]]]:
        """Return metrics and predictions of the mean of the runs' class scores."""
        data = self.labelled(split)
        if data.token_level:
            raise UsageError(f"{data.data.folder}: answers that are texts have no mean")
        return ensemble_of(data.data, members)


class Cyclic:
    """The same order in every epoch."""

    def __init__(self, count: int, batch_size: int, seed: int, name: str) -> None:
        self.once = Sequential(count, batch_size)
        self.smallest = self.once.smallest

    def batch(self, number: int) -> np.ndarray:
        return self.once.batch(number % len(self.once))
