"""Fine-tuning of the student on one labelled set: its LM head predicts label tokens.

Shapes: B batch, S length, V vocabulary, K classes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import Logs, Term, Terms, number_of
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.criterions import Criterion
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.labelled.token_labels import TokenLabelBatch, TokenLabels
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.streams import Order, Sequential, Shuffled, Stream, sorted_pass
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.engine.engine import Engine
from metaseq_lm.methods.meta_pseudo_label.options import TokenLabelsConfig
from metaseq_lm.models.layers import cross_entropy
from metaseq_lm.tasks import Passes, Scored
from metaseq_lm.tasks.finetuning import (
    LabelledSetTask,
    chosen_rows,
    evaluate_predictions,
    labelled_folder,
    labelled_split,
)
from metaseq_lm.tasks.masked_lm import build_transformer

_MINI = "mini"
_LARGEST_BATCH = 256  # rows of an evaluation batch
_LARGEST_LOGITS = 1 << 26  # numbers


class TokenLabelCriterion(Criterion):
    """Cross-entropy of the label token at every position, and the accuracy of the class it implies.

    For sets with tokens as answers, the accuracy is over positions.
    """

    exported = (
        "it names classes by words at every position of rows that begin with a task token, which "
        "no class of transformers does; fine-tune with task sentence_prediction "
        "to export a classifier"
    )

    def __call__(self, model: nn.Module, batch: TokenLabelBatch) -> Terms:
        return self.terms(model(batch.tokens, batch.layout), batch)  # (B, S, V)

    def terms(self, logits: Any, batch: TokenLabelBatch) -> Terms:
        """Return the terms of logits (B, S, V)."""
        assert batch.targets is not None
        loss = Term(cross_entropy(logits, batch.targets).sum(), "targets")
        if batch.token_level:
            correct = number_of(logits.detach().argmax(-1) == batch.targets)
            return {"labels": loss, "accuracy": Term(correct, "targets", 0.0)}
        correct = number_of(_class_scores(logits.detach(), batch).argmax(-1) == batch.classes)
        return {"labels": loss, "accuracy": Term(correct, "rows", 0.0)}


class TokenLabelsTask(LabelledSetTask):
    """The student of a meta_pseudo_label run (or any model of its shape) on one labelled set.

    Training uses one window of a long row, drawn each time; evaluation uses all of its windows.
    """

    exported = True
    criterion: TokenLabelCriterion
    criterions = (TokenLabelCriterion,)

    def __init__(self, config: TokenLabelsConfig, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        self._splits: dict[str, TokenLabels] = {}

    def labelled(self, split: str) -> TokenLabels:
        """Return the rows of a split, read once; "mini" is a part of "valid"."""
        folder, options = labelled_folder(self.run_config), self.config
        if split == _MINI and _MINI not in Manifest.load(folder).splits:
            split = "valid"
        if split not in self._splits:
            number, length = options.task_token, options.tokens_per_sample
            self._splits[split] = TokenLabels(
                folder, split, self.vocabulary, number, length, options.stride
            )
        return self._splits[split]

    # ---------------------------------------------------------------- data and model

    def build_streams(self, split: str) -> dict[str, Stream]:
        options, seed = self.config, self.run_config.seed
        data = self.labelled(split)
        if split == "train":
            if data.labels is None:
                raise MetaseqError(f"{data.data.folder}: '{split}' has no labels to train on")
            order: Order = _Cyclic(len(data), options.batch_size)
            if options.shuffle:
                order = Shuffled(len(data), options.batch_size, seed, "train")

            def training(samples: np.ndarray, keys: np.ndarray, width: int) -> TokenLabelBatch:
                return data.batch(data.random_windows(samples, keys), keys, width)

            return {split: Stream(split, order, training, seed, data.longest)}
        windows = data.windows_of(self.chosen(split, len(data)))
        per_row = options.tokens_per_sample * len(self.vocabulary)
        size = max(1, min(_LARGEST_BATCH, _LARGEST_LOGITS // per_row))
        return {split: sorted_pass(split, windows, data.lengths, data.batch, size, seed)}

    def chosen(self, split: str, count: int) -> np.ndarray:
        """Return the used rows of a split."""
        limit = self.config.valid_size
        limited = split in (self.run_config.trainer.valid_split, _MINI)
        if not limited or not count > limit > 0:
            return np.arange(count)
        # The authors' draw of the small validation set: Python's generator, seed 42.
        shuffled = list(range(count))
        random.Random(42).shuffle(shuffled)
        return np.array(shuffled[:limit])

    def build_model(self) -> nn.Module:
        return build_transformer(self.run_config, self.vocabulary)

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Load the student of a pair, or all weights if there is no pair."""
        student = {n[len("student.") :]: w for n, w in weights.items() if n.startswith("student.")}
        return student or weights

    # ---------------------------------------------------------------- scores

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return the metrics of the set, main one first, then the loss; none without labels.

        Rows have the text, gold and predicted label, and class scores or the answer.
        """
        ((split, batches),) = passes.items()
        rows = self.labelled(split)

        def judge(batch: TokenLabelBatch) -> tuple[Terms, list[_WindowAnswer]]:
            logits = model(batch.tokens, batch.layout)
            terms = {} if rows.labels is None else self.criterion.terms(logits, batch)
            return terms, _window_answers(logits, batch)

        # The windows of a row may lie on several replicas.
        logs, answers = evaluate_predictions(engine, batches, judge)
        tokenizer = load_tokenizer(self.data)
        if rows.token_level:
            scored = _answer_split(rows.data, _best_answers(answers, tokenizer), logs)
        else:
            scored = labelled_split(rows.data, _mean_scores(answers), logs)

        def rows_with_text() -> list[dict[str, Any]]:
            result = []
            for row in scored.rows():
                ids = (column[row["index"]].tolist() for column in rows.data.inputs)
                result.append(row | {"text": [tokenizer.decode(tokens) for tokens in ids]})
            return result

        return Scored(scored.metrics, rows_with_text)

    def facts(self) -> dict[str, Any]:
        """Return no facts: classes are words of the vocabulary, independent of their order."""
        return {}

    def submissions(self, split: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Return the benchmark's leaderboard file for a test split."""
        data = self.labelled(split)
        split = data.data.split  # "mini" is a part of "valid"
        if data.token_level:
            return _record_file(data.data, split, rows)
        return super().submissions(split, rows)

    def ensemble(
        self, split: str, members: Sequence[Sequence[dict[str, Any]]]
    ) -> tuple[Logs, Sequence[dict[str, Any]]]:
        """Return metrics and predictions from the mean of the runs' class scores."""
        data = self.labelled(split)
        if data.token_level:
            raise UsageError(f"{data.data.folder}: answers that are texts have no mean")
        return super().ensemble(split, members)


class _Cyclic(Sequential):
    """The same order in every epoch."""

    def batch(self, number: int) -> np.ndarray:
        return super().batch(number % len(self))


# ------------------------------------------------------------------------ answers

# Sample and number of a window, and its class scores or (log-probability, answer tokens).
_WindowAnswer = tuple[int, int, tuple[Any, ...]]


def _class_scores(logits: Tensor, batch: TokenLabelBatch) -> Tensor:
    """Return the mean raw logit of each class token over a row, (B, K); padding counts as 0."""
    scores = logits[..., batch.class_tokens].double()
    if batch.padding is not None:
        scores = scores.masked_fill(batch.padding.unsqueeze(-1), 0.0)
    # The row counts as padded to the longest window of its own sample, so that the scores of a
    # sample do not depend on its batch; the authors' code divides by the width of the batch.
    return scores.sum(-2) / batch.longest.unsqueeze(-1)


def _best_runs(logits: Tensor, batch: TokenLabelBatch) -> list[tuple[float, list[int]]]:
    """Return (log-probability, predicted tokens) of the most probable answer in each row.

    Each position predicts its likeliest token. Answers are the longest runs of tokens other than
    [SEP] (class 0), outside padding; the best answer contains the largest single log-probability,
    the first of equals. A row without an answer has minus infinity and no tokens.
    """
    best, predicted = logits.log_softmax(-1).max(-1)  # (B, S)
    answers = predicted != batch.class_tokens[0]
    if batch.padding is not None:
        answers &= ~batch.padding
    best = best.masked_fill(~answers, -torch.inf)
    runs: list[tuple[float, list[int]]] = []
    for row, inside, tokens in zip(best.tolist(), answers.tolist(), predicted.tolist()):
        at = int(np.argmax(row))
        if not inside[at]:
            runs.append((-float("inf"), []))
            continue
        first, end = at, at + 1
        while first and inside[first - 1]:
            first -= 1
        while end < len(inside) and inside[end]:
            end += 1
        runs.append((row[at], tokens[first:end]))
    return runs


def _window_answers(logits: Tensor, batch: TokenLabelBatch) -> list[_WindowAnswer]:
    answers: Iterable[tuple[Any, ...]]
    if batch.token_level:
        answers = _best_runs(logits, batch)
    else:
        answers = map(tuple, _class_scores(logits, batch).tolist())
    assert batch.samples is not None
    return list(zip(batch.samples.tolist(), batch.windows.tolist(), answers))


def _by_sample(answers: Iterable[_WindowAnswer]) -> dict[int, list[tuple[Any, ...]]]:
    """Return the answers of each sample's windows, in order and each window once."""
    windows = {(sample, window): answer for sample, window, answer in answers}
    samples: dict[int, list[tuple[Any, ...]]] = {}
    for (sample, _), answer in sorted(windows.items(), key=lambda item: item[0]):
        samples.setdefault(sample, []).append(answer)
    return samples


def _mean_scores(answers: Iterable[_WindowAnswer]) -> list[tuple[int, list[float]]]:
    return [(s, np.mean(windows, 0).tolist()) for s, windows in _by_sample(answers).items()]


def _best_answers(answers: Iterable[_WindowAnswer], tokenizer: Tokenizer) -> dict[int, str]:
    """Return the most probable answer of each sample over all its windows, "" without one."""
    texts = {}
    for sample, windows in _by_sample(answers).items():
        _, tokens = max(windows, key=lambda answer: answer[0])
        texts[sample] = tokenizer.decode(tokens).strip()
    return texts


def _answer_split(data: LabelledSet, texts: dict[int, str], logs: Logs) -> Scored:
    """Return F1 and EM of ReCoRD with their mean as "score" first, the other `logs`, and the rows.

    Rows have "index", "gold" (a list; None in a split without labels) and "predicted".
    """
    from metaseq_lm.evaluation.official import answer_scores

    set_rows = chosen_rows(data, list(texts))
    metrics: Logs = {}
    if data.labels is not None:
        scores = answer_scores(list(texts.values()), set_rows)
        metrics = {"score": next(iter(scores.values())), **scores}
        metrics |= {name: value for name, value in logs.items() if name not in metrics}
    rows = [
        {"index": sample, "gold": row.get("answers"), "predicted": text}
        for (sample, text), row in zip(texts.items(), set_rows or [{}] * len(texts))
    ]
    return Scored(metrics, lambda: rows)


def _record_file(data: LabelledSet, split: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the file of answers for SuperGLUE's leaderboard on a test split of ReCoRD."""
    if split.partition("_")[0] in ("train", "valid") or data.rows is None or data.benchmark is None:
        return {}
    lines = [{"idx": data.rows[row["index"]]["idx"], "label": row["predicted"]} for row in rows]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return {data.benchmark.leaderboard_file(split): text}
