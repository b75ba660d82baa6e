"""Reading text in blocks: the lines are the same whatever the size of a block."""

import functools
import gzip
import itertools
import lzma

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.records import text_files
from metaseq_lm.data.records.text_files import TextFile, pieces
from metaseq_lm.data.tokenizers.loading import tokenizer_class

bytes_strategy = st.lists(
    st.sampled_from(
        [b"\n", b"\r\n", b" ", b"a", b"bc", b"\xc3\xa9", b"\xff", b"\xe2\x80\xa8", b"\r"]
    )
    | st.binary(max_size=3),
    min_size=1,
).map(b"".join)
any_file = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150
)


@any_file
@given(bytes_strategy, st.integers(1, 9))
def test_lines_do_not_depend_on_the_block_size(tmp_path, monkeypatch, content, size):
    monkeypatch.setattr(text_files, "BLOCK", size)
    content = b"x" + content
    (tmp_path / "f").write_bytes(content)
    raw = content.removesuffix(b"\n").split(b"\n")
    expected = [line.removesuffix(b"\r").decode("utf-8", "replace") for line in raw]
    file = TextFile(tmp_path / "f")
    lines = list(file.lines())
    assert file.read == len(content)
    assert [t for _, t, _ in lines] == expected
    assert [n for n, _, _ in lines] == list(range(1, len(raw) + 1))
    assert [bad for _, _, bad in lines] == ["\ufffd" in line for line in expected]


@any_file
@given(st.text("a é\u00a0\t1漢"))
def test_pieces_join_to_the_line_and_keep_characters_whole(monkeypatch, line):
    monkeypatch.setattr(text_files, "PIECE", 8)
    cut = pieces(line.encode())
    assert all(0 < len(piece) <= 8 for piece in cut) or not line
    assert "".join(piece.decode() for piece in cut) == line


@any_file
@given(bytes_strategy, st.integers(1, 9), st.integers(4, 9))
def test_pieces_of_long_lines_join_to_the_lines(tmp_path, monkeypatch, content, size, piece):
    (tmp_path / "f").write_bytes(b"x" + content)
    whole = list(TextFile(tmp_path / "f").lines())
    monkeypatch.setattr(text_files, "BLOCK", size)
    monkeypatch.setattr(text_files, "PIECE", piece)
    lines: list[tuple[int, str, bool]] = []
    for block in TextFile(tmp_path / "f").blocks(in_pieces=True):
        assert len(block.texts) == 1 or not block.after
        for at, text in enumerate(block.texts):
            if block.after:
                number, before, bad = lines.pop()
                assert number == block.first and before.endswith(block.after) and before.strip()
                lines.append((number, before + text, bad or at in block.bad))
            else:
                lines.append((block.first + at, text, at in block.bad))
    clean = [(number, text.replace("\ufffd", ""), bad) for number, text, bad in lines]
    assert clean == [(number, text.replace("\ufffd", ""), bad) for number, text, bad in whole]


word = st.sampled_from(["a", "bc", "1", "'s", "-"])


@any_file
@given(st.lists(st.tuples(st.sampled_from([" ", "   ", "    ", "\t ", "\u00a0 "]), word)))
def test_a_line_is_cut_where_tokens_start(monkeypatch, words):
    monkeypatch.setattr(text_files, "PIECE", 8)
    line = "".join(itertools.chain(*words))
    tokenizer = spaced_tokenizer()
    parts = [piece.decode() for piece in pieces(line.encode())]
    encoded = itertools.chain.from_iterable(tokenizer.encode_batch(parts))
    assert list(encoded) == tokenizer.encode_batch([line])[0]


@functools.cache
def spaced_tokenizer():
    """A tokenizer with symbols for several spaces and for tab and space."""
    return tokenizer_class("byte_bpe").train(["a  bc\t   bc\u00a0   's    -"] * 9, 400, 1)


@pytest.mark.parametrize("opener, suffix", [(open, ".txt"), (gzip.open, ".gz"), (lzma.open, ".xz")])
def test_bom_line_ends_and_compression(tmp_path, opener, suffix):
    path = tmp_path / f"f{suffix}"
    with opener(path, "wb") as file:
        file.write("\ufeffone\r\ntwo\u2028\x85 three\n\n\ufefffour".encode())
    expected = [(1, "one"), (2, "two\u2028\x85 three"), (3, ""), (4, "\ufefffour")]
    assert [(n, t) for n, t, _ in TextFile(path, "fail").lines()] == expected


def test_policies(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"good\nba\xffd\ngood")
    assert list(TextFile(path, "skip").lines()) == [
        (1, "good", False),
        (2, "ba\ufffdd", True),
        (3, "good", False),
    ]
    with pytest.raises(MetaseqError, match="f:2: .*UTF-8.*0xff"):
        list(TextFile(path, "fail").lines())


@pytest.mark.parametrize("suffix, opener", [(".gz", gzip.open), (".xz", lzma.open)])
def test_truncated_archives(tmp_path, suffix, opener):
    path = tmp_path / f"f{suffix}"
    with opener(path, "wb") as file:
        file.write(bytes(range(256)) * 1000)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(MetaseqError, match=f"f{suffix}: damaged after"):
        list(TextFile(path).blocks())
    path.write_bytes(b"this is not packed at all")
    with pytest.raises(MetaseqError, match=f"f{suffix}: damaged.*\\b0 bytes"):
        list(TextFile(path).blocks())
