"""The token file reader and writer: both layouts, damage of every kind, offsets past 4 GiB."""

import copy
import os
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.storage.indexed import IndexedDataset, IndexedWriter, smallest_dtype

DOCUMENTS = [[5, 6, 7], [], [8], [9, 10, 11, 12, 13]]
documents_strategy = st.lists(st.lists(st.integers(0, 65535), max_size=6), min_size=1, max_size=6)
same_folder = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def index_bytes(sizes, itemsize, code, fairseq, version=1):
    """An index, byte by byte."""
    head = b"MMIDIDX\x00\x00" + struct.pack("<Q", version) + struct.pack("<B", code)
    head += struct.pack("<Q", len(sizes))
    if not fairseq:
        head += struct.pack("<Q", len(sizes) + 1)
    pointers = [sum(sizes[:i]) * itemsize for i in range(len(sizes))]
    body = b"".join(struct.pack("<i", s) for s in sizes)
    body += b"".join(struct.pack("<q", p) for p in pointers)
    if not fairseq:
        body += b"".join(struct.pack("<q", i) for i in range(len(sizes) + 1))
    return head + body


def write_pair(prefix, documents, dtype="<u2", code=8, fairseq=False):
    flat = [token for document in documents for token in document]
    (prefix.parent / f"{prefix.name}.bin").write_bytes(np.array(flat, dtype).tobytes())
    sizes = [len(document) for document in documents]
    index = index_bytes(sizes, np.dtype(dtype).itemsize, code, fairseq)
    (prefix.parent / f"{prefix.name}.idx").write_bytes(index)
    return prefix


def contents(data):
    return [data[i].tolist() for i in range(len(data))]


@pytest.mark.parametrize("fairseq", [False, True])
def test_both_layouts_are_read(tmp_path, fairseq):
    data = IndexedDataset(write_pair(tmp_path / "a.input0", DOCUMENTS, fairseq=fairseq))
    assert contents(data) == DOCUMENTS
    assert data.sizes.dtype == data.starts.dtype == np.int64
    assert data.starts.tolist() == [0, 3, 3, 4]
    assert data.tokens.tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert data.documents.tolist() == [0, 1, 2, 3, 4]
    assert data[-1].tolist() == DOCUMENTS[-1]
    with pytest.raises(ValueError):
        data.tokens[0] = 1
    with pytest.raises(IndexError):
        data[4]


@pytest.mark.parametrize(
    "fairseq, code, dtype",
    [
        *[(f, c, d) for f in (0, 1) for c, d in ((1, "u1"), (2, "i1"), (3, "i2"), (4, "i4"))],
        *[(f, c, d) for f in (0, 1) for c, d in ((5, "i8"), (6, "f8"), (8, "u2"))],
        *[(0, 7, "f4"), (1, 7, "f8"), (1, 9, "u4"), (1, 10, "u8")],
    ],
)
def test_type_codes_mean_what_each_program_means(tmp_path, fairseq, code, dtype):
    data = IndexedDataset(write_pair(tmp_path / "a", [[1, 2], [3]], dtype, code, bool(fairseq)))
    assert data.dtype == np.dtype(dtype)
    assert contents(data) == [[1, 2], [3]]


@pytest.mark.parametrize("fairseq, code", [(False, 9), (False, 10), (False, 0), (True, 11)])
def test_unknown_type_code(tmp_path, fairseq, code):
    write_pair(tmp_path / "a", [[1], [2]], "<u4", code, fairseq)
    with pytest.raises(MetaseqError, match=f"a.idx:.*type code {code}"):
        IndexedDataset(tmp_path / "a")


def test_writer_writes_the_megatron_layout(tmp_path):
    with IndexedWriter(tmp_path / "w", np.uint16) as writer:
        writer.add(DOCUMENTS[0])
        writer.extend(np.array(DOCUMENTS[2], np.uint16), np.array([0, 1]))
        writer.add(np.array(DOCUMENTS[3][:2]))
        writer.extend(np.array([], np.int64), np.array([], np.int64), joins=True)
        writer.extend(np.array(DOCUMENTS[3][2:]), np.array([len(DOCUMENTS[3]) - 2]), joins=True)
        assert not (tmp_path / "w.bin").exists()
    write_pair(tmp_path / "x", DOCUMENTS)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"w.{suffix}").read_bytes() == (tmp_path / f"x.{suffix}").read_bytes()
    assert len(os.listdir(tmp_path)) == 4


def test_nothing_remains_of_a_failed_write(tmp_path):
    with pytest.raises(RuntimeError):
        with IndexedWriter(tmp_path / "w", np.int32) as writer:
            writer.add([1])
            raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_killed_between_the_renames_no_mixed_pair_opens(tmp_path, monkeypatch):
    write_pair(tmp_path / "w", [[1, 2], [3]])

    def replace(source, target):
        if str(target).endswith(".idx"):
            raise KeyboardInterrupt
        real(source, target)

    real = os.replace
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        with IndexedWriter(tmp_path / "w", np.uint16) as writer:
            writer.extend(np.array([4, 5, 6]), np.array([1, 2]))
    with pytest.raises(MetaseqError, match="w.idx: no such"):
        IndexedDataset(tmp_path / "w")


@pytest.mark.parametrize("dtype, token", [(np.uint16, 65536), (np.uint16, -1), (np.int32, 2**31)])
def test_a_token_that_does_not_fit_is_refused(tmp_path, dtype, token):
    with pytest.raises(ValueError, match="does not fit"):
        with IndexedWriter(tmp_path / "w", dtype) as writer:
            writer.add(np.array([token], np.int64))
    assert os.listdir(tmp_path) == []


def test_a_document_beyond_int32_is_refused(tmp_path):
    with pytest.raises(MetaseqError, match="2147483648 tokens"):
        with IndexedWriter(tmp_path / "w", np.uint8) as writer:
            # The check comes first, so this huge view of one byte is never written.
            huge = np.broadcast_to(np.zeros(1, np.uint8), (2**31,))
            writer.extend(huge, np.array([2**31]))


def test_smallest_dtype():
    assert smallest_dtype(65499) == np.uint16
    assert smallest_dtype(65500) == np.int32


@pytest.mark.parametrize("fairseq", [False, True])
def test_empty_token_file(tmp_path, fairseq):
    data = IndexedDataset(write_pair(tmp_path / "a", [], fairseq=fairseq))
    assert len(data) == len(data.tokens) == 0
    data = IndexedDataset(write_pair(tmp_path / "b", [[], []], fairseq=fairseq))
    assert contents(data) == [[], []]
    values, lengths = data.gather([0, 1], 7, 0)
    assert values.shape == (2, 0) and lengths.tolist() == [0, 0]
    assert not data.tokens.flags.writeable


@same_folder
@given(documents_strategy, st.data(), st.integers(0, 8))
def test_gather_is_what_a_loop_does(tmp_path, documents, data, length):
    opened = IndexedDataset(write_pair(tmp_path / "a", documents))
    rows = data.draw(st.lists(st.integers(-len(documents), len(documents) - 1), max_size=8))
    values, lengths = opened.gather(rows, -1, length)
    wanted = [documents[i][:length] for i in rows]
    assert lengths.tolist() == [len(w) for w in wanted]
    assert values.shape == (len(rows), length) and values.dtype == lengths.dtype == np.int64
    assert values.tolist() == [w + [-1] * (length - len(w)) for w in wanted]


@same_folder
@given(documents_strategy, st.booleans(), st.sampled_from(["bin", "idx"]), st.data())
def test_every_truncation_is_refused(tmp_path, documents, fairseq, suffix, data):
    prefix = write_pair(tmp_path / "a", documents, fairseq=fairseq)
    path = tmp_path / f"a.{suffix}"
    size = path.stat().st_size
    if not size:
        return
    os.truncate(path, data.draw(st.integers(0, size - 1)))
    with pytest.raises(MetaseqError, match=r"\d bytes|an index"):
        IndexedDataset(prefix)


@same_folder
@given(documents_strategy, st.booleans(), st.sampled_from(["bin", "idx"]), st.binary(min_size=1))
def test_every_lengthening_is_refused(tmp_path, documents, fairseq, suffix, extra):
    prefix = write_pair(tmp_path / "a", documents, fairseq=fairseq)
    with open(tmp_path / f"a.{suffix}", "ab") as file:
        file.write(extra)
    with pytest.raises(MetaseqError):
        IndexedDataset(prefix)


@settings(same_folder, max_examples=200)
@given(documents_strategy, st.booleans(), st.data())
def test_a_flipped_bit_of_the_index_changes_no_sequence_silently(
    tmp_path, documents, fairseq, data
):
    prefix = write_pair(tmp_path / "a", documents, fairseq=fairseq)
    path = tmp_path / "a.idx"
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(content))
    try:
        opened = IndexedDataset(prefix)
        opened.sizes, opened.documents
    except MetaseqError:
        return
    # Only a document index (unused for one document per line) or the meaning of an unused type.
    assert opened.sizes.tolist() == [len(document) for document in documents]
    if opened.dtype == np.uint16:
        assert contents(opened) == documents
    else:
        assert not any(documents)


@same_folder
@given(documents_strategy, documents_strategy, st.booleans())
def test_files_that_do_not_belong_together(tmp_path, first, second, fairseq):
    write_pair(tmp_path / "a", first, fairseq=fairseq)
    write_pair(tmp_path / "b", second, fairseq=fairseq)
    os.replace(tmp_path / "b.idx", tmp_path / "a.idx")
    if sum(map(len, first)) != sum(map(len, second)):
        with pytest.raises(MetaseqError, match="belong together"):
            IndexedDataset(tmp_path / "a")


def test_swapped_bin_and_idx(tmp_path):
    write_pair(tmp_path / "a", DOCUMENTS)
    os.replace(tmp_path / "a.idx", tmp_path / "x")
    os.replace(tmp_path / "a.bin", tmp_path / "a.idx")
    os.replace(tmp_path / "x", tmp_path / "a.bin")
    with pytest.raises(MetaseqError, match="index of tokens"):
        IndexedDataset(tmp_path / "a")


@pytest.mark.parametrize("claimed, code", [("<i4", 4), ("<u1", 1), ("<i8", 5)])
def test_another_type_than_the_tokens_have(tmp_path, claimed, code):
    write_pair(tmp_path / "a", DOCUMENTS)
    write_pair(tmp_path / "b", DOCUMENTS, claimed, code)
    os.replace(tmp_path / "b.idx", tmp_path / "a.idx")
    with pytest.raises(MetaseqError, match="belong together"):
        IndexedDataset(tmp_path / "a")


def test_one_layout_is_never_taken_for_the_other(tmp_path):
    # The header of one with the tables of the other, as a reader of the wrong kind would see it.
    sizes = [5, 7, 9]
    (tmp_path / "a.bin").write_bytes(bytes(2 * 21))
    right = index_bytes(sizes, 2, 8, fairseq=True)
    for wrong in (right[:26] + struct.pack("<Q", 4) + right[26:], right[:26] + right[34:]):
        (tmp_path / "a.idx").write_bytes(wrong)
        with pytest.raises(MetaseqError):
            IndexedDataset(tmp_path / "a")


def test_clear_words_for_missing_version_and_overflow(tmp_path):
    with pytest.raises(MetaseqError, match="a.idx: no such"):
        IndexedDataset(tmp_path / "a")
    write_pair(tmp_path / "a", DOCUMENTS)
    (tmp_path / "a.idx").write_bytes(index_bytes([3], 2, 8, False, version=2))
    with pytest.raises(MetaseqError, match="format version 2"):
        IndexedDataset(tmp_path / "a")
    good = bytearray(index_bytes([3, 0, 1, 5], 2, 8, True))
    struct.pack_into("<q", good, 26 + 16 + 24, -(2**31))
    (tmp_path / "a.idx").write_bytes(bytes(good))
    with pytest.raises(MetaseqError, match=r"pointer 3 .*-2147483648\b.*\b8\b"):
        IndexedDataset(tmp_path / "a")


@pytest.mark.parametrize("fairseq", [False, True])
def test_offsets_past_4_gib(tmp_path, fairseq):
    sizes = [900_000_000, 3, 1_500_000_000, 4]
    starts = np.cumsum([0, *sizes])
    (tmp_path / "a.idx").write_bytes(index_bytes(sizes, 2, 8, fairseq))
    with open(tmp_path / "a.bin", "wb") as file:
        for start, tokens in ((0, [1, 2]), (starts[1], [3, 4, 5]), (starts[3], [6, 7, 8, 9])):
            file.seek(2 * int(start))
            file.write(np.array(tokens, "<u2").tobytes())
    if os.stat(tmp_path / "a.bin").st_blocks * 512 > 1 << 30:
        pytest.skip("this file system has no sparse files")
    assert 2 * starts[3] > 2**32
    data = IndexedDataset(tmp_path / "a")
    assert data[0][:3].tolist() == [1, 2, 0]
    assert data[1].tolist() == [3, 4, 5]
    assert data[3].tolist() == [6, 7, 8, 9]
    values, lengths = data.gather([3, 1, 0], 0, length=4)
    assert values.tolist() == [[6, 7, 8, 9], [3, 4, 5, 0], [1, 2, 0, 0]]
    assert lengths.tolist() == [4, 3, 4]
    assert data.tokens[starts[3] - 1 :][:3].tolist() == [0, 6, 7]


def test_pointers_written_past_4_gib(tmp_path):
    with IndexedWriter(tmp_path / "w", np.uint16) as writer:
        writer._sizes.extend([2_000_000_000, 1_000_000_000, 7])
    content = (tmp_path / "w.idx").read_bytes()
    assert struct.unpack_from("<3q", content, 34 + 12) == (0, 4_000_000_000, 6_000_000_000)


def test_another_process_opens_the_files_again(tmp_path):
    data = IndexedDataset(write_pair(tmp_path / "a", [[1] * 100_000]))
    assert data.__reduce__() == (IndexedDataset, (str(tmp_path / "a"),))
    assert contents(copy.deepcopy(data)) == contents(data)
