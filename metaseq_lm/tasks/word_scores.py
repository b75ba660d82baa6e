"""Predictions for labelled sets of words, their official scores, and files of them.

Shapes: B rows, S positions, C classes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from metaseq_lm.core.batch import Logs, WordBatch
from metaseq_lm.data.words.columns import conllu_text
from metaseq_lm.data.words.sets import TREES, WordSet
from metaseq_lm.data.words.tags import bio_tags
from metaseq_lm.evaluation.chunks import conlleval_report, conlleval_spans
from metaseq_lm.evaluation.words import score_tags, score_trees, tag_names
from metaseq_lm.models.words.prediction_modules import heads_of

# Number of a sentence, and the predictions for its words: classes, or relations and heads.
Predicted = tuple[int, list[list[int]]]


def predictions_of(data: WordSet, scores: Tensor, batch: WordBatch) -> list[Predicted]:
    """Return the best classes of the words of a batch, or relations and heads, as plain numbers.

    `scores` are (B, S, C). The class of tags that training lacks is never predicted.
    """
    if data.unseen is not None and data.form != TREES:
        scores = scores.clone()
        scores[..., data.unseen] = -float("inf")
    best = scores.argmax(-1)
    parts = [best]
    if data.form == TREES:
        heads, relations = heads_of(best, len(data.label_names))
        parts = [relations, heads]
    columns = [part.tolist() for part in parts]
    lengths = batch.lengths.tolist()
    assert batch.samples is not None
    return [
        (sample, [column[row][1 : lengths[row] + 1] for column in columns])
        for row, sample in enumerate(batch.samples.tolist())
    ]


def set_scores(data: WordSet, predictions: Sequence[Predicted]) -> Logs:
    """Return the scores of a split of which all predictions are known, the main one first.

    That is "f1" of spans, "accuracy" of other tags, "las" of trees; all are from 0 to 1.
    """
    ordered = sorted(predictions)
    samples = [sample for sample, _ in ordered]
    parts = [[columns[i] for _, columns in ordered] for i in range(len(ordered[0][1]))]
    if data.form == TREES:
        scores, main = score_trees(data, samples, parts[1], parts[0]), "las"
    else:
        scores, main = score_tags(data, samples, parts[0]), "f1" if data.spans else "accuracy"
    return {main: scores[main], **scores}


def prediction_rows(
    name: str, data: WordSet, predictions: Sequence[Predicted]
) -> list[dict[str, Any]]:
    """Return of each sentence "index", "set", its "words", and "gold" and "predicted" label names.

    Of trees "gold_heads" and "predicted_heads" too: places of words, 1 for the first, 0 for the root.
    """
    rows = []
    assert data.labels is not None
    for sample, columns in predictions:
        gold = data.labels[sample].tolist()
        row: dict[str, Any] = {
            "index": sample,
            "set": name,
            "words": data.surface(np.array([sample]))[0],
            "gold": tag_names(data, [gold])[0],
            "predicted": tag_names(data, columns[:1])[0],
        }
        if data.heads is not None:
            row |= {"gold_heads": data.heads[sample].tolist(), "predicted_heads": columns[1]}
        rows.append(row)
    return rows


def prediction_files(name: str, data: WordSet, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the predictions of a split as one file: CoNLL columns word, gold, predicted, or CoNLL-U.

    Tags of spans are written in BIO, which every version of conlleval reads, so that its F1 of the file
    is "conlleval_f1". NAME.SPLIT.conlleval.txt has the output of conlleval for the file.
    """
    sentences = sorted((row for row in rows if row["set"] == name), key=lambda row: row["index"])
    if data.form == TREES:
        trees = (conllu_text(r["words"], r["predicted_heads"], r["predicted"]) for r in sentences)
        return {f"{name}.{data.split}.conllu": "".join(trees)}
    lines: list[str] = []
    gold_tags, predicted_tags = [], []
    for row in sentences:
        words = ["_".join(word.split()) for word in row["words"]]  # CoNLL-U has words with blanks
        tags = [row["gold"], row["predicted"]]
        if data.spans:
            tags = [bio_tags(conlleval_spans(column), len(column)) for column in tags]
        lines += ["\t".join(part) for part in zip(words, *tags)]
        lines.append("")
        gold_tags.append(tags[0])
        predicted_tags.append(tags[1])
    files = {f"{name}.{data.split}.conll": "".join(line + "\n" for line in lines)}
    if data.spans:
        report = conlleval_report(gold_tags, predicted_tags)
        files[f"{name}.{data.split}.conlleval.txt"] = report
    return files
