"""Arrays from sentences of words, apart from the sets, which `preprocess` reads without torch.

Shapes: B sentences, S positions of a row (words, start and end), M characters of a word.
"""

import numpy as np

from metaseq_lm.config.models import CHARACTERS
from metaseq_lm.core.batch import Layout, WordBatch, as_tensor
from metaseq_lm.data.words.sets import WordSet
from metaseq_lm.data.words.vocabulary import END, PAD, START, WORD_END, WORD_START


def token_rows(data: WordSet, sentences: np.ndarray, width: int = 0) -> WordBatch:
    """Return `sentences` (B,) as rows `<start> words <end>` of `width` words, S = width + 2.

    Sizes: "rows" and "words".
    """
    rows = np.asarray(sentences, np.int64)
    lengths = data.lengths[rows]
    at = np.arange(max(width, int(lengths.max(initial=0))) + 2)
    # A word i, from 1, stands at position i, so heads need no shift.
    scored = (at >= 1) & (at <= lengths[:, None])
    tokens = _at_words(scored, data.flat(data.words, rows), PAD)
    tokens[:, 0] = START
    tokens[np.arange(len(rows)), lengths + 1] = END
    return WordBatch(
        tokens=as_tensor(tokens),
        layout=Layout(as_tensor(at > lengths[:, None] + 1)),
        scored=as_tensor(scored),
        lengths=as_tensor(lengths),
        sizes={"rows": len(rows), "words": int(lengths.sum())},
    )


def word_rows(data: WordSet, sentences: np.ndarray, width: int = 0) -> WordBatch:
    """Return the `token_rows` of `sentences` (B,) with characters (B, S, M) and labels, if any.

    A word's characters are padding, word start, its first 20 characters, word end, padding. Start
    and end of a row have no characters, padding is all padding.
    """
    rows = np.asarray(sentences, np.int64)
    batch = token_rows(data, rows, width)
    scored, lengths = batch.scored.numpy(), batch.lengths.numpy()
    forms, form_of_word = np.unique(data.form_numbers(rows), return_inverse=True)
    ids, counts = data.characters(forms)
    of_forms = np.zeros((len(forms), CHARACTERS), np.int64)
    of_forms[:, 2:-2] = ids
    of_forms[:, 1] = WORD_START
    of_forms[np.arange(len(forms)), counts + 2] = WORD_END
    characters = np.zeros((*scored.shape, CHARACTERS), np.int64)
    characters[scored] = of_forms[form_of_word.ravel()]
    for column in (0, lengths + 1):
        characters[np.arange(len(rows)), column, 1:3] = [WORD_START, WORD_END]
    labels = heads = None
    if data.labels is not None:
        labels = _at_words(scored, data.flat(data.labels, rows), -1)
    if data.heads is not None:
        heads = _at_words(scored, data.flat(data.heads, rows), -1)
    return batch.replace(characters=characters, labels=labels, heads=heads)


def _at_words(scored: np.ndarray, values: np.ndarray, fill: int) -> np.ndarray:
    table = np.full(scored.shape, fill, np.int64)
    table[scored] = values
    return table
