"""What the LM head answers to rows of a labelled set: a class, or a stretch of text.

Shapes: B rows (windows), S length, V vocabulary, K classes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metaseq_lm.core.batch import Logs
from metaseq_lm.data.benchmarks import leaderboard_file
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.labelled.token_labels import TokenLabelBatch
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.tasks.finetuning import chosen_rows, labelled_metrics, prediction_rows

# Of one window: its sample, its number, and (class scores), or (log-probability, tokens of a run).
WindowAnswer = tuple[int, int, tuple[Any, ...]]


def class_scores(logits: Tensor, batch: TokenLabelBatch) -> Tensor:
    """Return the mean raw logit of each class token over a row, padding counted as 0; (B, K).

    The row counts as padded to the longest window of its own sample, whatever else is in the
    batch; with task.scored_width=batch to the width of the batch, as in the author's code. Within
    one window that changes nothing, for it divides the scores of all classes by one number; but the
    mean over windows then weights those of one sample by the widths of the batches they are in.
    """
    scores = logits[..., batch.class_tokens].double()
    if batch.padding is not None:
        scores = scores.masked_fill(batch.padding.unsqueeze(-1), 0.0)
    return scores.sum(-2) / batch.longest.unsqueeze(-1)


def best_runs(logits: Tensor, batch: TokenLabelBatch) -> list[tuple[float, list[int]]]:
    """Return (log-probability, predicted tokens) of the surest answer in each row.

    Each position predicts its likeliest token. Answers are the longest runs of tokens other than
    [SEP] (class 0), outside padding; the surest is the one with the greatest single
    log-probability, the first of equals. A row without any has minus infinity and no tokens.
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


def window_answers(logits: Tensor, batch: TokenLabelBatch) -> list[WindowAnswer]:
    """Return what each window of a batch answers."""
    answers: Iterable[tuple[Any, ...]]
    if batch.token_level:
        answers = best_runs(logits, batch)
    else:
        answers = map(tuple, class_scores(logits, batch).tolist())
    assert batch.samples is not None
    return list(zip(batch.samples.tolist(), batch.windows.tolist(), answers))


def by_sample(answers: Iterable[WindowAnswer]) -> dict[int, list[tuple[Any, ...]]]:
    """Return the answers of each sample's windows, both in their order, each window once."""
    windows = {(sample, window): answer for sample, window, answer in answers}
    samples: dict[int, list[tuple[Any, ...]]] = {}
    for (sample, _), answer in sorted(windows.items(), key=lambda item: item[0]):
        samples.setdefault(sample, []).append(answer)
    return samples


# ------------------------------------------------------------------------ classes


def mean_scores(answers: Iterable[WindowAnswer]) -> list[tuple[int, list[float]]]:
    """Return (sample, its class scores): the mean over its windows."""
    return [(s, np.mean(windows, 0).tolist()) for s, windows in by_sample(answers).items()]


def class_metrics(data: LabelledSet, answers: Iterable[WindowAnswer]) -> Logs:
    """Return the metrics of a set by its benchmark's own scorer, see `labelled_metrics`."""
    scores = mean_scores(answers)
    samples = np.array([sample for sample, _ in scores])
    return labelled_metrics(data, samples, np.array([row for _, row in scores]))


def class_rows(data: LabelledSet, answers: Iterable[WindowAnswer]) -> list[dict[str, Any]]:
    """Return "index", "gold", "predicted" and "scores" of each sample."""
    return prediction_rows(data, mean_scores(answers))


# ------------------------------------------------------------------------ stretches of text


def best_answers(answers: Iterable[WindowAnswer], tokenizer: Tokenizer) -> dict[int, str]:
    """Return the text of the surest answer over all windows of each sample, "" if there is none."""
    texts = {}
    for sample, windows in by_sample(answers).items():
        _, tokens = max(windows, key=lambda answer: answer[0])
        texts[sample] = tokenizer.decode(tokens).strip()
    return texts


def answer_metrics(
    data: LabelledSet, answers: Iterable[WindowAnswer], tokenizer: Tokenizer
) -> Logs:
    """Return F1 and EM of ReCoRD, their mean first and as "score"."""
    from metaseq_lm.evaluation.benchmarks import answer_scores

    texts = best_answers(answers, tokenizer)
    metrics = answer_scores(list(texts.values()), chosen_rows(data, list(texts)))
    return {"score": next(iter(metrics.values())), **metrics}


def answer_rows(
    data: LabelledSet, answers: Iterable[WindowAnswer], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Return "index", "gold" (a list; None in a split without labels) and "predicted" of each sample."""
    texts = best_answers(answers, tokenizer)
    rows = chosen_rows(data, list(texts)) or [{}] * len(texts)
    return [
        {"index": sample, "gold": row.get("answers"), "predicted": text}
        for (sample, text), row in zip(texts.items(), rows)
    ]


def record_file(data: LabelledSet, split: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the file of answers that SuperGLUE's leaderboard takes for a test split of ReCoRD."""
    if split.partition("_")[0] in ("train", "valid") or data.rows is None or not data.benchmark:
        return {}
    lines = [{"idx": data.rows[row["index"]]["idx"], "label": row["predicted"]} for row in rows]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return {leaderboard_file(data.benchmark, split): text}
