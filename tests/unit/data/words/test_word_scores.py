"""Scores of a split, from class numbers."""

import numpy as np
import pytest

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.words.sets import WordSet
from metaseq_lm.data.words.tags import read_spans
from metaseq_lm.evaluation.words import _tagging_accuracy, score_tags, score_trees
from metaseq_lm.tasks.words import prediction_files, prediction_rows


def test_accuracy():
    assert _tagging_accuracy([0, 1, 2, 2], [0, 1, 2, 0]) == 0.75
    assert _tagging_accuracy([0, 1, 2, 2], [0, 1, 2, 0], unseen=2) == 0.5
    for gold, predicted in (([0], [0, 1]), ([], [])):
        with pytest.raises(MetaseqError):
            _tagging_accuracy(gold, predicted)


def test_tags(words):
    data = WordSet(words / "chunk", "train")
    number = {name: i for i, name in enumerate(data.label_names)}
    rows = np.array([3, 0, 1])
    tags = [["S-NP"], ["B-NP", "E-VP", "B-NP", "E-NP"], ["S-NP", "O", "S-NP"]]
    predicted = [[number[tag] for tag in row] for row in tags]
    scores = score_tags(data, rows, predicted)
    assert scores["accuracy"] == 5 / 8
    # gold: NP; NP NP; NP VP. Ours: NP; VP(0-2) NP; NP NP. conlleval: NP; NP VP NP; NP NP.
    assert (scores["precision"], scores["recall"]) == (3 / 5, 3 / 5)
    assert scores["f1"] == 3 / 5 and scores["conlleval_f1"] == 6 / 11


def test_the_file_of_spans_is_in_bio_and_has_the_score_of_conlleval(words):
    """Of tags of BIOES that are not well formed, too; tags of words stay as they are."""
    data = WordSet(words / "chunk", "test")
    number = {name: i for i, name in enumerate(data.label_names)}
    tags = [["B-NP", "E-VP", "B-NP", "E-NP"], ["I-NP", "O", "S-NP"], ["O"], ["E-NP"]]
    found = [(i, [[number[tag] for tag in row]]) for i, row in enumerate(tags)]
    files = prediction_files("chunk", data, prediction_rows("chunk", data, found))
    blocks = files["chunk.test.conll"].strip().split("\n\n")
    rows = [[line.split("\t") for line in block.split("\n")] for block in blocks]
    assert [[row[0] for row in block] for block in rows] == data.surface(range(4))
    true, predicted = (
        {
            (i, *span)
            for i, block in enumerate(rows)
            for span in read_spans([row[column] for row in block], "bio")
        }
        for column in (1, 2)
    )
    f1 = 2 * len(true & predicted) / (len(true) + len(predicted))
    assert f1 == score_tags(data, range(4), [row for _, (row,) in found])["conlleval_f1"] == 6 / 11
    assert "FB1:  54.55" in files["chunk.test.conlleval.txt"].splitlines()[1]
    upos = WordSet(words / "upos", "train")
    upos.label_names[:2] = ["S-NP", "E-NP"]  # as if
    rows = prediction_rows("upos", upos, [(1, [[0, 1]])])
    files = prediction_files("upos", upos, rows)
    assert files == {"upos.train.conll": "10_000\tNUM\tS-NP\ncats\tE-NP\tE-NP\n\n"}


def test_tags_of_words_have_an_accuracy_only(words):
    data = WordSet(words / "upos", "train")
    predicted = [np.zeros(6, int), np.array([2, 1])]
    assert score_tags(data, [0, 1], predicted) == {"accuracy": 3 / 8}


def test_trees(words):
    data = WordSet(words / "trees", "train")
    relations = [data.labels[i] for i in (0, 1)]
    heads = [np.array([4, 4, 2, 0, 1, 4]), data.heads[1]]
    scores = score_trees(data, [0, 1], heads, relations)
    assert scores == {"uas": 5 / 6, "las": 5 / 6, "uas_all": 6 / 8, "las_all": 6 / 8}
    # One relation more is wrong, of a word whose head is right and which is no punctuation.
    relations[0] = relations[0].copy()
    relations[0][3] += 1
    scores = score_trees(data, [0, 1], heads, relations)
    assert scores == {"uas": 5 / 6, "las": 4 / 6, "uas_all": 6 / 8, "las_all": 5 / 8}


def test_predictions_must_fit(words):
    tags, trees = WordSet(words / "chunk", "train"), WordSet(words / "trees", "train")
    with pytest.raises(MetaseqError, match="1 sentences.*2 words.*3.words"):
        score_tags(tags, [1], [[0, 0]])
    with pytest.raises(MetaseqError, match="trees, not tags"):
        score_tags(trees, [1], [[0, 0]])
    with pytest.raises(MetaseqError, match="2 sentences.*4 words"):
        score_trees(trees, [1], [[0, 0]], [[0, 0], [0, 0]])
