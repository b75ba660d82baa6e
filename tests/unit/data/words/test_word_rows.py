"""Rows of words and characters, and orders of batches by length."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metaseq_lm.config.models import CHARACTERS
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.streams import Shard, Stream
from metaseq_lm.data.words.buckets import Bucketed, _cuts
from metaseq_lm.data.words.collate import word_rows
from metaseq_lm.data.words.sets import WordSet
from metaseq_lm.data.words.vocabulary import END, PAD, START, UNKNOWN


def spelled(data, word):
    """The characters of a word as the fact sheet has them, by hand."""
    known = {c: i for i, c in enumerate(data.vocabulary.characters)}
    ids = [0, 2, *(known.get(c, UNKNOWN) for c in word[:20]), 3, 0]
    return ids + [0] * (CHARACTERS - len(ids))


def test_a_row_of_text(words):
    data = WordSet(words, "train")
    batch = word_rows(data, np.array([2, 0]), 8)
    assert batch.tokens.shape == (2, 10) and batch.tokens.dtype == torch.int64
    the, cat = data.vocabulary.index("the"), data.vocabulary.index("cat")
    assert batch.tokens[0].tolist() == [START, the, the, the, END, *[PAD] * 5]
    assert batch.tokens[1, :3].tolist() == [START, the, cat]
    assert batch.padding[0].tolist() == [False] * 5 + [True] * 5
    assert batch.scored[0].tolist() == [False, *[True] * 3, *[False] * 6]
    assert batch.characters[1, 2].tolist() == spelled(data, "cat")
    assert batch.characters[0, [0, 4]].tolist() == [spelled(data, "")] * 2
    assert not batch.characters[0, 5:].any()
    assert batch.sizes == {"rows": 2, "words": 10} and batch.lengths.tolist() == [3, 7]
    assert batch.labels is None and batch.heads is None


def test_long_words_and_brackets(run, tmp_path):
    word = "abcdefghijklmnopqrstuvwxyz"
    assert run(f"{word} -LRB- Z (\n", "--words", dest="long")[0] == 0
    data = WordSet(tmp_path / "long", "train")
    found = word_rows(data, np.array([0])).characters[0]
    assert found[1:5].tolist() == [spelled(data, w) for w in (word, "(", "Z", "(")]
    assert data.surface([0]) == [[word, "-LRB-", "Z", "("]]
    assert "-" not in data.vocabulary.characters


def test_a_row_of_a_tree(words):
    data = WordSet(words / "trees", "train")
    batch = word_rows(data, np.array([1, 0]))
    assert batch.heads.tolist() == [[-1, 2, 0, *[-1] * 5], [-1, 4, 4, 4, 0, 4, 4, -1]]
    root = data.label_names.index("root")
    assert batch.labels[0, 2] == batch.labels[1, 4] == root
    assert (batch.labels >= 0).tolist() == batch.scored.tolist()


@given(st.permutations(range(4)), st.integers(0, 3), st.integers(0, 9))
def test_a_row_does_not_depend_on_the_others(words, order, split, width):
    data = WordSet(words / "chunk", "train")
    whole = word_rows(data, np.array(order), 9)
    for part in (slice(0, split), slice(split, 4)):
        if order[part]:
            alone = word_rows(data, np.array(order[part]), 9)
            for name in ("tokens", "characters", "labels", "scored", "padding"):
                expected = getattr(whole, name)[part]
                assert torch.equal(getattr(alone, name), expected), name


def test_through_a_stream(words):
    data = WordSet(words / "chunk", "train")
    order = Bucketed(data.lengths, 2, 1, "chunk")
    stream = Stream("chunk", order, lambda s, _, w: word_rows(data, s, w), 1, data.lengths)
    (whole,) = stream.micro_batches(0, Shard())
    parts = stream.micro_batches(0, Shard(micro_batch_size=1))
    for name in ("tokens", "characters", "labels", "rows"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        assert np.array_equal(getattr(whole, name), joined)


LENGTHS = st.lists(st.integers(0, 120), min_size=1, max_size=300).map(np.array)


@given(
    LENGTHS,
    st.integers(1, 20),
    st.integers(0, 3),
    st.sampled_from([0, 20, 100]),
    st.sampled_from([[], [15, 40], list(range(2, 40, 2))]),
)
def test_an_epoch_holds_each_sentence_once(lengths, batch_size, seed, chunk, buckets):
    usable = np.flatnonzero((lengths > 0) & (lengths < 100))
    if not len(usable):
        with pytest.raises(UsageError, match=r" 1 word\b.* 100\b"):
            Bucketed(lengths, batch_size, seed, "text", chunk=chunk, longest=100)
        return
    order = Bucketed(lengths, batch_size, seed, "text", chunk=chunk, longest=100, buckets=buckets)
    assert order.count == len(usable)
    for epoch in (0, 1):
        numbers = range(epoch * order.per_epoch, (epoch + 1) * order.per_epoch)
        batches = [order.batch(number) for number in numbers]
        assert min(map(len, batches)) >= order.smallest >= 1
        assert sorted(np.concatenate(batches).tolist()) == usable.tolist()


def test_batches_have_about_the_same_sum_of_roots():
    lengths = np.random.default_rng(0).geometric(0.04, 20_000)
    order = Bucketed(lengths, 64, 1, "text", chunk=10_000, longest=100)
    used = lengths[lengths < 100]
    wanted = 64 * np.sqrt(used).mean()
    batches = [order.batch(number) for number in range(order.per_epoch)]
    sums = np.array([np.sqrt(lengths[batch]).sum() for batch in batches])
    assert (abs(sums / wanted - 1) < 0.1).all()
    assert abs(np.mean([len(batch) for batch in batches]) - 64) < 1
    for batch in batches:
        assert len(set(np.digitize(lengths[batch], [15, 40]))) == 1
    assert {tuple(b) for b in batches[:9]} != {
        tuple(order.batch(order.per_epoch + n)) for n in range(9)
    }


def test_pieces_are_drawn_from_the_whole_text():
    """Of three texts in a row a run sees all from the beginning."""
    texts = [np.random.default_rng(i).poisson(mean, 10_000) for i, mean in enumerate((9, 18, 30))]
    lengths = np.concatenate(texts)
    order = Bucketed(lengths, 64, 1, "text", chunk=1000)
    early = np.concatenate([order.batch(number) for number in range(order.per_epoch // 20)])
    shares = np.bincount(early // 10_000, minlength=3) / len(early)
    assert abs(shares - 1 / 3).max() < 0.06
    # One plan of a piece at a time, and what an epoch holds does not depend on the order asked for.
    again = Bucketed(lengths, 64, 1, "text", chunk=1000)
    for number in (400, 3, 250, order.per_epoch + 3):
        assert np.array_equal(again.batch(number), order.batch(number))
    other = Bucketed(lengths, 64, 2, "text", chunk=1000)
    assert set(other.batch(0)) != set(order.batch(0))


def test_more_buckets_save_more_padding():
    """With one for each few lengths hardly any is left; a batch is of one bucket."""
    lengths = np.random.default_rng(0).gamma(2, 12, 20_000).astype(int) + 1
    fine = list(range(3, 100, 3))
    made = [Bucketed(lengths, 16, 1, "text", chunk=10_000, buckets=b) for b in ((15, 40), fine)]
    batches = [[order.batch(n) for n in range(order.per_epoch)] for order in made]
    assert padded(lengths, batches[0]) > 0.25 and padded(lengths, batches[1]) < 0.07
    inside = [np.ptp(np.digitize(lengths[batch], fine)) for batch in batches[1]]
    assert np.mean(np.array(inside) > 0) < 0.1  # those of buckets that joined a neighbour
    assert sorted(np.concatenate(batches[1]).tolist()) == list(range(20_000))
    for wrong in ([0, 4], [5, 5], [9, 3]):
        with pytest.raises(UsageError, match="task.buckets"):
            Bucketed(lengths, 16, 1, "text", buckets=wrong)


@pytest.mark.parametrize("step", [1, 3, 10])
def test_few_sentences_meet_others_in_each_epoch(step):
    """Buckets of one batch each would be the same batches for ever."""
    lengths = np.random.default_rng(0).gamma(2, 12, 372).astype(int) + 1
    order = Bucketed(lengths, 16, 1, "chunk", buckets=list(range(3, 100, step)))
    batches = [
        [set(order.batch(epoch * order.per_epoch + n)) for n in range(order.per_epoch)]
        for epoch in range(2)
    ]
    again = [max(len(a & b) / len(a) for b in batches[1]) for a in batches[0]]
    assert np.mean(again) < 0.5
    places = [padded(lengths, [np.array(list(b)) for b in epoch]) for epoch in batches]
    assert max(places) < 0.36


def test_equal_sentences_make_equal_batches():
    assert _cuts(np.ones(4), 2).tolist() == [2]
    assert _cuts(np.ones(64), 4).tolist() == [16, 32, 48]
    assert _cuts(np.array([3.0, 1.0, 1.0, 1.0]), 2).tolist() == [1]


def padded(lengths, batches):
    """The share of the places of batches that is padding."""
    places = sum(len(batch) * lengths[batch].max() for batch in batches)
    return 1 - sum(lengths[batch].sum() for batch in batches) / places


def test_buckets_save_padding():
    """By pieces as much as over the whole text, and much beside batches drawn at random."""
    lengths = np.random.default_rng(0).gamma(2, 12, 20_000).astype(int) + 1
    made = {chunk: Bucketed(lengths, 64, 1, "text", chunk=chunk) for chunk in (0, 5000)}
    found = {c: padded(lengths, [o.batch(n) for n in range(o.per_epoch)]) for c, o in made.items()}
    drawn = np.random.default_rng(1).permutation(len(lengths))
    assert found[5000] < 1.03 * found[0] and found[5000] < 0.7 * padded(
        lengths, np.array_split(drawn, 300)
    )


def test_an_order_follows_from_seed_and_name():
    lengths = np.arange(1, 60)
    made = [Bucketed(lengths, 4, *about) for about in ((1, "a"), (1, "a"), (2, "a"), (1, "b"))]
    first = [[order.batch(n).tolist() for n in (5, 0, 30)] for order in made]
    assert first[0] == first[1] and first[0] != first[2] and first[0] != first[3]
    chosen = Bucketed(lengths, 4, 1, "a", samples=np.array([3, 5, 8]))
    batches = [chosen.batch(n) for n in range(chosen.per_epoch)]
    assert sorted(np.concatenate(batches).tolist()) == [3, 5, 8]


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=30).map(np.array), st.data())
def test_cuts_leave_no_run_empty(weights, data):
    batches = data.draw(st.integers(1, len(weights)))
    runs = np.split(np.arange(len(weights)), _cuts(weights, batches))
    assert len(runs) == batches and all(len(run) for run in runs)
