"""Tagged sentences as rows of subword tokens."""

import os

import numpy as np
import pytest
from outcomes import expect_error

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.data.words.subwords import TaggedRows, tagged_rows
from metaseq_lm.data.words.vocabulary import WordVocabulary
from metaseq_lm.evaluation.chunks import conlleval_spans

SENTENCES = [
    [("Ada", "B-PER"), ("Lovelace", "I-PER"), ("wrote", "O"), ("to", "O"), ("Babbage", "B-PER")],
    [("London", "B-LOC"), ("Ada", "B-PER"), (".", "O")],
    [("\u200b", "O"), ("London", "B-LOC")],
]
CONLL = "\n".join("".join(f"{w} {t}\n" for w, t in sentence) for sentence in SENTENCES)


@pytest.fixture(scope="module", params=["byte_bpe", "wordpiece", "sentencepiece_bpe"])
def data(request, tmp_path_factory):
    """A folder with a tokenizer and, in another one, the set made with it."""
    folder = tmp_path_factory.mktemp("subwords")
    (folder / "text.txt").write_text("Ada wrote a letter to London. Lovelace and Babbage\n" * 5)
    (folder / "train.conll").write_text(CONLL)
    size = {"byte_bpe": 330, "wordpiece": 70, "sentencepiece_bpe": 60}[request.param]
    kind = ["--tokenizer", request.param, "--vocab-size", str(size)]
    text = ["--trainpref", f"{folder}/text.txt", *kind, "--destdir", f"{folder}/corpus"]
    assert main(["preprocess", *text]) == 0
    tagged = ["--tagged", "ner", "--trainpref", f"{folder}/train.conll"]
    place = ["--tokenizer-from", f"{folder}/corpus", "--destdir", f"{folder}/data"]
    assert main(["preprocess", *tagged, *place]) == 0
    return folder / "data"


def test_rows_are_running_text(data):
    rows, tokenizer = TaggedRows(data / "ner", "train", 100), load_tokenizer(data)
    vocabulary, classes = tokenizer.vocabulary, rows.classes
    assert classes == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    batch = rows.batch(np.arange(2), np.zeros(2, np.uint64))
    for sentence, tokens, targets in zip(SENTENCES, batch.tokens, batch.targets):
        ids = tokenizer.encode_batch([" ".join(word for word, _ in sentence)])[0]
        ids = [vocabulary.cls(), *ids, vocabulary.sep]
        assert tokens.tolist() == ids + [vocabulary.pad] * (len(tokens) - len(ids))
        assert [classes[i] for i in targets.tolist() if i >= 0] == [tag for _, tag in sentence]
        assert targets[0] == -1 and targets[1] >= 0
    assert batch.sizes == {"rows": 2, "words": 8}


def test_rows_are_encoded_again_when_a_file_has_changed(data):
    rows = tagged_rows(data / "ner", "train", 100)
    assert tagged_rows(data / "ner", "train", 100) is rows
    assert tagged_rows(data / "ner", "train", 7) is not rows
    for file in (data / "ner" / "manifest.json", data / "tokenizer.json"):
        if file.exists():
            os.utime(file, (0, 0))
            changed = tagged_rows(data / "ner", "train", 100)
            assert changed is not rows
            rows = changed


def test_long_sentences_are_several_rows(data):
    whole, short = TaggedRows(data / "ner", "train", 100), TaggedRows(data / "ner", "train", 7)
    assert len(short) > len(whole) == 3 and short.lengths.max() <= 7
    words, classes = 0, []
    for row in range(len(short)):
        batch = short.batch(np.array([row]), np.zeros(1, np.uint64))
        words += batch.sizes["words"]
        classes += [int(i) for i in batch.targets.ravel() if i >= 0]
    assert words == 10
    assert [short.classes[i] for i in classes] == [tag for s in SENTENCES for _, tag in s]


def test_classes_of_spans_become_labels(data):
    rows = TaggedRows(data / "ner", "train", 100)
    gold = [rows.classes.index(tag) for _, tag in SENTENCES[0]]
    names = [rows.data.label_names[i] for i in rows.labels(conlleval_spans, 0, gold)]
    assert names == ["B-PER", "E-PER", "O", "O", "S-PER"]


def test_what_does_not_fit_is_said(data, capsys):
    with pytest.raises(UsageError, match="at least 3"):
        TaggedRows(data / "ner", "train", 2)
    with pytest.raises(MetaseqError, match="token_classification"):
        WordVocabulary.load(data)
    treebank = ["--treebank", "t", "--trainpref", f"{data}/../train.conll", "--destdir", str(data)]
    expect_error(capsys, main(["preprocess", *treebank]), 2, "words.txt: no such")


def test_labelled_sets_take_the_classes_of_tags(data, tmp_path):
    (tmp_path / "rows.tsv").write_text("text\tlabel\nAda wrote\tO\nLondon\tS-LOC\n")
    options = ["--labels-from", str(data / "ner"), "--destdir", str(data)]
    rows = ["--labelled", "rows", "--trainpref", str(tmp_path / "rows.tsv"), "--overwrite"]
    assert main(["preprocess", *rows, *options]) == 0
    ner, labelled = (Manifest.load(data / name).details["labels"] for name in ("ner", "rows"))
    assert labelled == ner
