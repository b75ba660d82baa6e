"""Windows of long rows: against the tokenizers library, and what training and evaluation take."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from metaseq_lm.cli import main
from metaseq_lm.core import random_streams
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.labelled.token_labels import TokenLabels, _cut_windows, _tokens_per_window
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary

LONG = 40


def library(room: int, stride: int, pair: bool) -> Tokenizer:
    """Return a tokenizer of the library that cuts words as rows are to be cut."""
    words = {"<s>": 0, "</s>": 1, **{f"{side}{i}": 2 + i for side in "ab" for i in range(LONG)}}
    words = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    made.enable_truncation(room + 2 + pair, stride=stride, strategy="longest_first")
    return made


@given(st.integers(1, LONG), st.integers(0, LONG), st.integers(2, 30), st.integers(0, 20))
@settings(max_examples=300, deadline=None)
def test_windows_are_those_of_the_library(first: int, second: int, room: int, stride: int) -> None:
    """Where the stride leaves each window at least a quarter of its own; `second` 0 is no pair."""
    sizes = np.array([[first, second] if second else [first]])
    lengths = _tokens_per_window(sizes, room)[0]
    assume(stride < room)
    # The library stops with an error if a text keeps no more than the stride.
    assume(all(k == s or stride <= k - -(-k // 4) for k, s in zip(lengths, sizes[0])))
    texts = [" ".join(f"{side}{i}" for i in range(n)) for side, n in zip("ab", sizes[0])]
    encoded = library(room, stride, second > 0).encode(*texts)
    wanted = {tuple(part.tokens) for part in [encoded, *encoded.overflowing]}
    row, starts, lengths = _cut_windows(sizes, room, stride)
    found = []
    for start, length in zip(starts, lengths):
        tokens = ["<s>"]
        for side, s, n in zip("ab", start, length):
            tokens += [f"{side}{i}" for i in range(s, s + n)] + ["</s>"]
        found.append(tuple(tokens))
    assert set(found) == wanted and len(found) == len(wanted)
    assert (row == 0).all()


@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=8),
    st.integers(2, 40),
    st.integers(0, 200),
)
@settings(deadline=None)
def test_windows_cover_every_token(rows: list, room: int, stride: int) -> None:
    """Every pair of tokens of the two texts meets in a window, whatever the stride."""
    sizes = np.array(rows)
    row, starts, kept = _cut_windows(sizes, room, stride)
    assert (kept.sum(1) <= room).all() and (starts + kept <= sizes[row]).all()
    assert np.array_equal(np.unique(row), np.arange(len(rows)))
    for i, size in enumerate(rows):
        mine = row == i
        assert len({tuple(s) for s in starts[mine].tolist()}) == mine.sum()
        for text in (0, 1):
            seen = {
                t for s, k in zip(starts[mine, text], kept[mine, text]) for t in range(s, s + k)
            }
            assert seen == set(range(size[text]))
        if sum(size) <= room:
            assert mine.sum() == 1


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set "long" of 3 rows in one text each of 3, 30 and 60 words; "pairs" of 20 and 3 to 60."""
    folder = tmp_path_factory.mktemp("long")
    words = [f"w{i}" for i in range(60)]
    (folder / "train.txt").write_text(" ".join(words) + "\n")
    data = folder / "data"
    corpus = ["--trainpref", f"{folder}/train.txt", "--tokenizer", "word", "--destdir", str(data)]
    assert main(["preprocess", *corpus]) == 0
    texts = [" ".join(words[:n]) for n in (3, 30, 60)]
    lines = {
        "long": ["text\tlabel", *(f"{text}\t{i % 2}" for i, text in enumerate(texts))],
        "pairs": [
            "text_a\ttext_b\tlabel",
            *(f"{' '.join(words[:20])}\t{text}\t{i % 2}" for i, text in enumerate(texts)),
        ],
    }
    for name, rows in lines.items():
        file = folder / f"{name}.tsv"
        file.write_text("\n".join(rows) + "\n")
        files = ["--trainpref", str(file), "--validpref", str(file), "--destdir", str(data)]
        assert main(["preprocess", "--labelled", name, *files]) == 0
    return data


def opened(data: Path, name: str, longest: int, stride: int) -> TokenLabels:
    return TokenLabels(data / name, "train", Vocabulary.load(data / "dict.txt"), 2, longest, stride)


def test_rows_of_windows(long: Path) -> None:
    """22 tokens hold 20 words; windows of 60 words start at 0, 15, 30, 45."""
    data = opened(long, "long", 22, 5)
    assert data.sample.tolist() == [0, 1, 1, 2, 2, 2, 2]
    assert data.first.tolist() == [0, 1, 3, 7]
    assert data.longest.tolist() == [5, 22, 22]
    tokens, lengths, targets = data.rows(np.arange(7))
    symbols = np.array(data.vocabulary.symbols)
    assert lengths.tolist() == [5, 22, 17, 22, 22, 22, 17]
    for row, start in enumerate((0, 0, 15, 0, 15, 30, 45)):
        words = [f"w{i}" for i in range(start, start + lengths[row] - 2)]
        assert symbols[tokens[row, : lengths[row]]].tolist() == ["[CLS2]", *words, "[SEP]"]
        wanted = [2, data.class_tokens[1]][data.labels[data.sample[row]]]
        assert set(targets[row, : lengths[row]]) == {wanted}


def test_windows_of_pairs(long: Path) -> None:
    """Room for 37: 18 of the 20 words of A, 19 of the 60 of B; each window of A with each of B."""
    data = opened(long, "pairs", 40, 5)
    mine = slice(*data.first[2:4])
    wanted = [
        [a, b, m, n]
        for a, m in ((0, 18), (13, 7))
        for b, n in ((0, 19), (14, 19), (28, 19), (42, 18))
    ]
    assert np.hstack([data.starts[mine], data.n_tokens[mine]]).tolist() == wanted
    tokens, lengths, _ = data.rows(np.arange(len(data.sample)))
    assert lengths.max() == 40 and (lengths == data.lengths).all()
    assert ((tokens == data.vocabulary.sep).sum(1) == 2).all()


def test_a_drawn_window_is_uniform(long: Path) -> None:
    data = opened(long, "long", 22, 5)
    keys = random_streams.row_keys(7, np.arange(6000))
    drawn = data.random_windows(np.full(6000, 2), keys)
    assert stats.chisquare(np.bincount(drawn, minlength=7)[3:]).pvalue > 1e-3
    assert (data.random_windows(np.zeros(100, np.int64), keys[:100]) == 0).all()
    assert np.array_equal(drawn[:50], data.random_windows(np.full(50, 2), keys[:50]))
    assert data.windows_of(np.array([2, 0])).tolist() == [3, 4, 5, 6, 0]


def test_no_room(long: Path) -> None:
    for name, longest, stride in (("long", 2, 0), ("pairs", 4, 0), ("long", 22, -1)):
        with pytest.raises(UsageError, match="for.*special tokens"):
            opened(long, name, longest, stride)
