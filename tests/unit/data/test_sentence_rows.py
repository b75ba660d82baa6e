"""Rows of sentences: the rule by which pairs are cut, special tokens, segments,
candidates, spans.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.corpus.rows import cut_pair
from metaseq_lm.data.labelled.sentence_rows import SentenceBatch, SentenceRows
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary

VOCABULARY = Vocabulary(["[PAD]", "[MASK]", "[SEP]", "[CLS0]", *"abcdefghijklmnopqrstuvwxyz"])
PAD, SEP, CLS = 0, 2, 3


class Column:
    """What SentenceRows needs of an IndexedDataset."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.sizes = np.array([len(row) for row in rows], np.int64)
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.tokens = np.array([token for row in rows for token in row], np.int64)


class Made:
    """What SentenceRows needs of a LabelledSet."""

    def __init__(
        self, form: str, columns: list, labels: list | None = None, **more: object
    ) -> None:
        self.form, self.folder, self.split = form, "somewhere", "train"
        self.inputs = [Column(rows) for rows in columns]
        self.labels = None if labels is None else np.array(labels)
        self.spans: np.ndarray | None = None
        self.label_names = ["0", "1"]
        self.__dict__.update(more)

    def __len__(self) -> int:
        return len(self.inputs[0].sizes)


def rows_of(made: Made, room: int = 12) -> SentenceRows:
    return SentenceRows(made, VOCABULARY, room)  # type: ignore[arg-type]


def batch_of(rows: SentenceRows, samples: list[int], width: int = 0) -> SentenceBatch:
    chosen = np.array(samples)
    return rows.batch(chosen, np.zeros(len(chosen), np.uint64), width)


def popped(first: int, second: int, room: int) -> tuple[int, int]:
    """The rule, one token at a time."""
    while first + second > room:
        if first > second:
            first -= 1
        else:
            second -= 1
    return first, second


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_cut_of_a_pair_is_that_of_the_slow_loop(first: int, second: int, room: int) -> None:
    kept = cut_pair(np.array([first]), np.array([second]), room)
    assert (int(kept[0][0]), int(kept[1][0])) == popped(first, second, room)


def test_cut_of_all_small_pairs() -> None:
    first, second = (side.ravel() for side in np.meshgrid(np.arange(15), np.arange(15)))
    for room in range(30):
        kept = np.stack(cut_pair(first, second, room), 1).tolist()
        assert kept == [list(popped(a, b, room)) for a, b in zip(first, second)]


def test_single() -> None:
    rows = rows_of(Made("single", [[[9, 8], [7] * 20, []]], [1, 0, 1]), 6)
    batch = batch_of(rows, [2, 0, 1])
    assert batch.tokens.tolist() == [
        [CLS, SEP, PAD, PAD, PAD, PAD],
        [CLS, 9, 8, SEP, PAD, PAD],
        [CLS, 7, 7, 7, 7, SEP],
    ]
    assert (batch.padding == (batch.tokens == PAD)).all() and not batch.segments.any()
    assert batch.targets.tolist() == [1, 1, 0] and batch.sizes == {"rows": 3}
    assert rows.lengths.tolist() == [4, 6, 2]
    assert batch_of(rows, [1]).padding is None
    assert batch_of(rows, [0], 9).tokens.shape == (1, 9)


@given(st.data())
def test_pairs_against_a_loop(data: st.DataObject) -> None:
    text = st.lists(st.integers(4, 29), max_size=9)
    pairs = data.draw(st.lists(st.tuples(text, text), min_size=1, max_size=4))
    room = data.draw(st.integers(7, 16))
    made = Made("pair", [[list(a) for a, _ in pairs], [list(b) for _, b in pairs]])
    rows = rows_of(made, room)
    samples = list(range(len(pairs)))
    batch = batch_of(rows, samples)
    assert batch.targets is None and len(rows) == len(pairs)
    for sample in samples:
        a, b = pairs[sample]
        x, y = popped(len(a), len(b), room - 3)
        tokens = [CLS, *a[:x], SEP, *b[:y], SEP]
        segments = [0] * (x + 2) + [1] * (y + 1)
        spare = [0] * (batch.tokens.shape[1] - len(tokens))
        assert batch.tokens[sample].tolist() == tokens + spare
        assert batch.segments[sample].tolist() == segments + spare
        assert rows.lengths[sample] == len(tokens) <= room


def test_choices_are_rows_with_the_context_first() -> None:
    context, one, two = [[9], [10, 11]], [[5, 6], [7]], [[8], []]
    rows = rows_of(Made("choices", [context, one, two], [1, 0]))
    batch = batch_of(rows, [0, 1])
    assert batch.tokens.shape == batch.segments.shape == batch.padding.shape == (2, 2, 6)
    assert batch.tokens[0].tolist() == [[CLS, 9, SEP, 5, 6, SEP], [CLS, 9, SEP, 8, SEP, PAD]]
    assert batch.segments[0].tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0]]
    assert batch.absent.tolist() == [[False, False], [False, True]]
    assert batch.targets.tolist() == [1, 0] and rows.lengths.tolist() == [6, 6]


@pytest.mark.parametrize("room", [7, 12])
def test_spans_stay_on_their_words(room: int) -> None:
    """At each span its words stand in the row, or what the cut left of them."""
    first, second = [4, 5, 6, 7], [14, 15, 16, 17]
    spans = np.array([[[0, 1, 3], [1, 0, 3]]])
    rows = rows_of(Made("spans", [[first], [second]], [1], spans=spans), room)
    batch = batch_of(rows, [0])
    found = [batch.tokens[0, a:b].tolist() for a, b in batch.spans[0]]
    assert found == ([[5], [14, 15]] if room == 7 else [[5, 6], [14, 15, 16]])


def test_spans_in_one_text() -> None:
    rows = rows_of(Made("spans", [[[4, 5, 6]]], [1], spans=np.array([[[0, 2, 3], [0, 0, 1]]])))
    assert batch_of(rows, [0]).spans.tolist() == [[[3, 4], [1, 2]]]


def test_a_span_cut_off_is_a_mistake() -> None:
    made = Made("spans", [[[4], [4] * 20]], [1, 0], spans=np.array([[[0, 0, 1]] * 2] * 2))
    made.spans[1, 1] = (0, 15, 17)  # type: ignore[index]
    with pytest.raises(MetaseqError, match="row 2.*'train'.*spans"):
        rows_of(made)


def test_mistakes() -> None:
    with pytest.raises(UsageError, match="tokens_per_sample is 6"):
        rows_of(Made("pair", [[[4]], [[4]]]), 6)
    with pytest.raises(MetaseqError, match="3 candidates.*2 labels"):
        rows_of(Made("choices", [[[4]]] * 4, [0]))
