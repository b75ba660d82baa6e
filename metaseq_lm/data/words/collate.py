"""Sentences of words to arrays: a row is `<start> words <end>`, with characters and labels beside.

Shapes: B sentences, S positions of a row (words, start and end), M characters of a word.
"""

import numpy as np

from metaseq_lm.core.batch import WordBatch, as_tensor
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.words.sets import WordSet
from metaseq_lm.data.words.vocabulary import CHARACTERS, LONGEST_WORD, WordVocabulary


def word_rows(data: WordSet, sentences: np.ndarray, width: int = 0) -> WordBatch:
    """Return the `token_rows` of `sentences` (B,) with characters, and the labels of a labelled set.

    A word's characters are padding, word start, its first 20 characters, word end, padding. Start and
    end of a row have no characters, padding is all padding.
    """
    rows = np.asarray(sentences, np.int64)
    batch = token_rows(data, rows, width)
    scored, lengths = batch.scored.numpy(), batch.lengths.numpy()

    def by_position(column: IndexedDataset | None) -> np.ndarray | None:
        if column is None:
            return None
        return _spread(scored, column.gather(rows, 0)[0][_inside(lengths)], -1)

    return batch.replace(
        characters=_characters(data, rows, scored, lengths),
        labels=by_position(data.labels),
        heads=by_position(data.heads),
    )


def token_rows(data: WordSet, sentences: np.ndarray, width: int = 0) -> WordBatch:
    """Return `sentences` (B,) as rows of at least `width` words, S = width + 2.

    Sizes: "rows" and "words".
    """
    rows = np.asarray(sentences, np.int64)
    lengths = data.lengths[rows]
    at = np.arange(max(width, int(lengths.max(initial=0))) + 2)
    # A word i, from 1, stands at position i, so heads need no shift.
    scored = (at >= 1) & (at <= lengths[:, None])
    tokens = _spread(scored, data.words.gather(rows, 0)[0][_inside(lengths)], WordVocabulary.PAD)
    tokens[:, 0] = WordVocabulary.START
    tokens[np.arange(len(rows)), lengths + 1] = WordVocabulary.END
    return WordBatch(
        tokens=as_tensor(tokens),
        padding=as_tensor(at > lengths[:, None] + 1),
        scored=as_tensor(scored),
        lengths=as_tensor(lengths),
        sizes={"rows": len(rows), "words": int(lengths.sum())},
    )


def _spread(scored: np.ndarray, values: np.ndarray, fill: int) -> np.ndarray:
    out = np.full(scored.shape, fill, np.int64)
    out[scored] = values
    return out


def _inside(lengths: np.ndarray) -> np.ndarray:
    return np.arange(int(lengths.max(initial=0))) < lengths[:, None]


def _characters(
    data: WordSet, rows: np.ndarray, scored: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    forms, form_of_word = np.unique(data.form_numbers(rows), return_inverse=True)
    ids, counts = data.characters(forms, LONGEST_WORD)
    spelled = np.zeros((len(forms), CHARACTERS), np.int64)
    spelled[:, 2:-2] = ids
    spelled[:, 1] = WordVocabulary.WORD_START
    spelled[np.arange(len(forms)), counts + 2] = WordVocabulary.WORD_END
    out = np.zeros((*scored.shape, CHARACTERS), np.int64)
    out[scored] = spelled[form_of_word.ravel()]
    ends = np.arange(len(rows)), lengths + 1
    for place in ((slice(None), 0), ends):
        out[place[0], place[1], 1] = WordVocabulary.WORD_START
        out[place[0], place[1], 2] = WordVocabulary.WORD_END
    return out
