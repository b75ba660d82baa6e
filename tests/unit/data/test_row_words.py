"""Words in rows of a corpus: those whose first token is in the row, however rows cut the text."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import TokenBatch, as_tensor
from metaseq_lm.data.corpus.documents import PackedDocuments
from metaseq_lm.data.corpus.packing import Packed
from metaseq_lm.data.corpus.pairs import Pairs
from metaseq_lm.data.corpus.rows import Corpus
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.storage.word_starts import WordStartsWriter
from metaseq_lm.data.streams import Growing, Ramp, Sequential, Shard, Shuffled, Stream
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary, special_symbols

SPECIALS = len(special_symbols(1, unk=True))
TOKENS, LENGTH, SEED = 700, 17, 3
VOCABULARY = Vocabulary([*special_symbols(1, unk=True), *(f"w{i}" for i in range(TOKENS))])
WORDS = np.random.default_rng(0).integers(0, 3, TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of sentences; token i + SPECIALS is the i-th of the corpus, with WORDS[i] words."""
    folder = tmp_path_factory.mktemp("words")
    draw = np.random.default_rng(1)
    with IndexedWriter(folder / "train", np.uint16, documents=True) as writer:
        while writer.tokens < TOKENS:
            size = min(int(draw.integers(1, 12)), TOKENS - writer.tokens)
            writer.add(SPECIALS + writer.tokens + np.arange(size))
            if draw.random() < 0.25:
                writer.end_documents([len(writer)])
    with WordStartsWriter(folder / "train") as words:
        words.extend(WORDS)
    return folder


def words_of(rows: np.ndarray) -> int:
    """Return the words that begin in the tokens of rows."""
    return int(WORDS[rows[rows >= SPECIALS] - SPECIALS].sum())


CORPORA: dict[str, Callable[[Path], Corpus | PackedDocuments]] = {
    "none": lambda folder: Corpus(folder, "train", VOCABULARY, LENGTH, "none"),
    "eos": lambda folder: Corpus(folder, "train", VOCABULARY, LENGTH, "eos"),
    "documents": lambda folder: PackedDocuments(folder, "train", VOCABULARY, LENGTH, SEED),
}


@pytest.mark.parametrize("mode", CORPORA)
def test_every_word_counts_once_in_an_epoch(folder: Path, mode: str) -> None:
    corpus = CORPORA[mode](folder)
    assert not corpus.words.missing
    for epoch in range(3 if mode == "documents" else 1):
        samples = epoch * len(corpus) + np.arange(len(corpus))
        assert corpus.words.count(samples, samples, 0) == WORDS.sum()


@pytest.mark.parametrize("width", [0, 9, 5])
@pytest.mark.parametrize("mode", CORPORA)
def test_words_are_those_of_the_tokens_in_the_row(folder: Path, mode: str, width: int) -> None:
    """Also of rows that are cut, and of documents that have changed places."""
    corpus = CORPORA[mode](folder)
    last = 3 * len(corpus) if mode == "documents" else len(corpus)
    for sample in np.random.default_rng(2).integers(0, last, 30)[:, None]:
        rows, _ = corpus.rows(sample, width=width)
        assert corpus.words.count(sample, sample, width) == words_of(rows)


def test_words_of_two_segments(folder: Path) -> None:
    packed = Packed(folder, "train", VOCABULARY, LENGTH, SEED)
    pairs = Pairs(folder, "train", VOCABULARY, LENGTH, SEED)
    for number in range(20):
        samples = np.random.default_rng(number).integers(0, len(pairs), 4)
        keys = random_streams.row_keys(number, np.arange(4))
        assert pairs.words.count(samples, keys, LENGTH) == words_of(pairs.rows(samples, keys)[0])
        samples = samples[samples < len(packed)]
        assert packed.words.count(samples, keys, 0) == words_of(packed.rows(samples)[0])


def test_words_are_of_the_text_before_it_is_shuffled(folder: Path) -> None:
    corpus = CORPORA["eos"](folder)
    corpus.shuffle_key = 5
    samples = np.arange(len(corpus))
    assert corpus.words.count(samples, samples, 0) == WORDS.sum()


@pytest.mark.parametrize("mode", CORPORA)
@pytest.mark.parametrize("grows", [False, True])
def test_a_stream_counts_what_its_batches_hold(folder: Path, mode: str, grows: bool) -> None:
    """Summed over micro-batches and replicas, with batches and rows that grow."""
    corpus = CORPORA[mode](folder)

    def collate(samples: np.ndarray, keys: np.ndarray, width: int) -> TokenBatch:
        return TokenBatch(tokens=as_tensor(corpus.rows(samples, width=width)[0]))

    order = Growing(len(corpus), Ramp(2, 7, 6), SEED, "train") if grows else None
    order = order or Shuffled(len(corpus), 7, SEED, "train")
    order.by_epoch = mode == "documents"
    widths = Ramp(6, LENGTH, 5) if grows else None
    arguments = (order, collate, SEED, corpus.row_lengths, widths, corpus.words)
    stream = Stream("train", *arguments)
    for number in range(2 * order.per_epoch):
        for world, size in ((1, 0), (2, 2)):
            held = 0
            for rank in range(world):
                for batch in stream.micro_batches(number, Shard(rank, world, size)):
                    held += words_of(batch.tokens.numpy())
            assert stream.count_words(number) == held


def test_data_without_words(folder: Path, tmp_path: Path) -> None:
    for name in ("train.bin", "train.idx"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    words = CORPORA["none"](tmp_path).words
    assert f"--tokenizer-from {tmp_path}" in words.missing and "train.words" in words.missing


def test_epochs_of_a_sequential_order_hold_all_words(folder: Path) -> None:
    corpus = CORPORA["none"](folder)
    order = Sequential(len(corpus), 5)
    arguments = (order, lambda *args: TokenBatch, SEED, corpus.row_lengths, None, corpus.words)
    stream = Stream("valid", *arguments)
    assert sum(map(stream.count_words, range(len(order)))) == WORDS.sum()
