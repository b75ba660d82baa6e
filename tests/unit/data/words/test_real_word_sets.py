"""The readers on real data, in the folder named by METASEQ_LM_DATA; counts as published."""

import os
from pathlib import Path

import numpy as np
import pytest

from metaseq_lm.cli import main
from metaseq_lm.data.records.text_files import TextFile
from metaseq_lm.data.words.columns import ColumnReader
from metaseq_lm.data.words.sets import WordSet
from metaseq_lm.evaluation.words import score_tags, score_trees

FOLDER = os.environ.get("METASEQ_LM_DATA")
# Files of a set, sentences and words of its first split, and its scheme or None for trees.
SETS = {
    "conll2000-chunking": (["test.txt"], 2012, 47377),
    "scibert-ner-NCBI-disease": (["dev.txt", "test.txt"], 923, 23969),
    "scibert-ner-JNLPBA": (["dev.txt"], 1739, 47461),
    "ud-english-ewt": (["en_ewt-ud-dev.conllu.xz"], 2001, 25147),
}


@pytest.mark.parametrize("name", sorted(SETS))
def test_real_sets(name, words):
    if not FOLDER or not (Path(FOLDER) / name).is_dir():
        pytest.skip(f"METASEQ_LM_DATA names no folder with {name}")
    files, sentences, count = SETS[name]
    paths = [str(Path(FOLDER) / name / file) for file in files]
    kind = "--treebank" if paths[0].endswith(".conllu.xz") else "--tagged"
    command = ["preprocess", kind, name, "--trainpref", paths[0], "--testpref", paths[-1]]
    assert main([*command, "--destdir", str(words)]) == 0
    data = WordSet(words / name, "train")
    assert (len(data), int(data.lengths.sum())) == (sentences, count)
    rows = np.arange(len(data))
    labels = [data.labels[i] for i in rows]
    if kind == "--treebank":
        scores = score_trees(data, rows, [data.heads[i] for i in rows], labels)
    else:
        assert data.spans and data.surface(rows) == [
            s.words for s in ColumnReader(TextFile(Path(paths[0])))
        ]
        scores = score_tags(data, rows, labels)
    assert set(scores.values()) == {1.0}
