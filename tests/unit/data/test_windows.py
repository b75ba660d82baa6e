"""Windows of documents are found without a table of all of them; the reference is that table."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.corpus import windows
from metaseq_lm.data.corpus.windows import BLOCK, DocumentWindows
from metaseq_lm.data.storage.indexed import IndexedDataset, IndexedWriter


def write(folder: Path, sizes: np.ndarray) -> IndexedDataset:
    """Write documents of `sizes` whose tokens are 0."""
    with IndexedWriter(folder / "train", "<u2") as writer:
        writer.extend(np.zeros(int(sizes.sum()), np.uint16), sizes)
    return IndexedDataset(folder / "train")


def table(sizes: np.ndarray, room: int) -> list[tuple[int, int]]:
    """Return start and length of all windows, one document after the other."""
    starts = np.cumsum(sizes) - sizes
    return [
        (int(start) + at, min(room, int(size) - at))
        for start, size in zip(starts, sizes)
        for at in range(0, int(size), room)
    ]


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 1000])
@pytest.mark.parametrize("room", [1, 7, 64, 1 << 40])
def test_windows_are_those_of_the_table(tmp_path, monkeypatch, count, room):
    monkeypatch.setattr(windows, "CHUNK", 2 * BLOCK)
    generator = np.random.default_rng(count)
    sizes = generator.integers(0, 40, count) * generator.integers(0, 2, count)
    sizes[-1] = 11
    in_blocks, expected = DocumentWindows(write(tmp_path, sizes), room), table(sizes, room)
    assert len(in_blocks) == len(expected)
    samples = generator.permutation(len(expected))
    pairs = zip(in_blocks.starts(samples).tolist(), in_blocks[samples].tolist())
    assert list(pairs) == [expected[i] for i in samples]
    owner = np.repeat(np.arange(len(expected)), [length for _, length in expected])
    tokens = generator.permutation(len(owner))
    assert in_blocks.sample_at(tokens).tolist() == owner[tokens].tolist()


def test_no_memory_for_each_document(tmp_path):
    """Two million documents take less than a byte each beside what is read at once."""
    data = write(tmp_path, np.full(2_000_000, 3))
    tracemalloc.start()
    in_blocks = DocumentWindows(data, 2)
    in_blocks[np.arange(0, len(in_blocks), 100_000)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(in_blocks) == 4_000_000
    assert peak < 2_000_000 * 4


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (34 + 4 * 5, -1, "sequence 5 has a negative size"),
        (34 + 4 * 5, 9, "add up to 3006 tokens"),
        (34 + 4 * 1000 + 8 * 5, 7, "pointer 5 is 7"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, place, value, message):
    write(tmp_path, np.full(1000, 3))
    index = bytearray((tmp_path / "train.idx").read_bytes())
    index[place : place + 4] = value.to_bytes(4, "little", signed=True)
    (tmp_path / "train.idx").write_bytes(index)
    with pytest.raises(MetaseqError, match=message):
        DocumentWindows(IndexedDataset(tmp_path / "train"), 10).starts(np.arange(1000))
