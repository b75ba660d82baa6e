"""`metaseq-lm preprocess --documents blank`: sentences, and where documents end."""

import gzip
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from outcomes import expect_facts

from metaseq_lm.cli import main
from metaseq_lm.data.doctor.findings import document_hashes
from metaseq_lm.data.preprocess.corpus import CorpusPipeline, _CorpusOptions
from metaseq_lm.data.preprocess.pipeline import Request, Split, _write_split
from metaseq_lm.data.records import text_files
from metaseq_lm.data.storage.indexed import IndexedDataset, IndexedWriter
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.storage.word_starts import WordStarts
from metaseq_lm.data.tokenizers.loading import load_tokenizer, tokenizer_class

Documents = list[list[str]]


def documents(folder: Path, split: str = "train") -> Documents:
    """Return the text of a split, as documents of sentences."""
    tokenizer, data = load_tokenizer(folder), IndexedDataset(folder / split)
    ends = data.documents.tolist()
    return [[tokenizer.decode(data[i]) for i in range(a, b)] for a, b in itertools.pairwise(ends)]


def binarise(tmp_path: Path, files: list[bytes], *options: str, dest: str = "data") -> Path:
    """Run the command on train files of these contents; return the data folder."""
    names = []
    for i, content in enumerate(files):
        names.append(str(tmp_path / (f"{i}.gz" if content.startswith(b"\x1f\x8b") else f"{i}.txt")))
        Path(names[-1]).write_bytes(content)
    arguments = ["--destdir", str(tmp_path / dest), "--tokenizer", "char", "--trainpref", *names]
    assert main(["preprocess", *arguments, *options]) == 0
    return tmp_path / dest


def test_blank_lines_and_files_end_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        b"\n\na b\nc\n \t\r\nd\r\n\n\n",
        b"e\nf",
        gzip.compress(b"g\n\n\n"),
        b"h\n",
    ]
    folder = binarise(tmp_path, files, "--documents", "blank")
    assert documents(folder) == [["a b", "c"], ["d"], ["e", "f"], ["g"], ["h"]]
    counts = Manifest.load(folder).splits["train"]
    assert (counts["sequences"], counts["documents"], counts["blank"]) == (7, 5, 7)
    expect_facts(capsys.readouterr().out, "7 sequences", "5 documents")
    # The same tokens, in documents of one sequence.
    lines = binarise(tmp_path, files, dest="lines")
    assert documents(lines) == [[s] for document in documents(folder) for s in document]
    assert Manifest.load(lines).splits["train"]["documents"] == 7
    assert (lines / "train.bin").read_bytes() == (folder / "train.bin").read_bytes()
    assert "--documents blank" in Manifest.load(folder).command


def test_doctor_speaks_of_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = b"a b c\nd\n\n" * 3 + b"d\n"
    folder = binarise(tmp_path, [text], "--documents", "blank")
    assert main(["doctor", str(folder), "--verify"]) == 0
    output = capsys.readouterr().out
    expect_facts(output, "7 sequences", "4 documents", "13 words", "19 tokens", "longest 6")
    expect_facts(output, "50.0 %", "repeat")


def test_hashes_of_documents_are_those_of_their_text(tmp_path: Path) -> None:
    """However it is cut into sentences."""
    for name, ends in (("a", [2, 4]), ("b", [1, 3])):
        with IndexedWriter(tmp_path / name, np.uint16, documents=True) as writer:
            for sentence in ([1, 2], [3], [4], [5, 6]) if name == "a" else ([1, 2, 3], [4, 5], [6]):
                writer.add(sentence)
            writer.end_documents(ends)
    one, other = (IndexedDataset(tmp_path / name) for name in "ab")
    assert (document_hashes(one, one.documents) == document_hashes(other, other.documents)).all()
    assert len(document_hashes(one)) == 4 and len(document_hashes(one, one.documents)) == 2


def test_documents_option_is_for_corpora_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = binarise(tmp_path, [b"a\n"])
    labelled = ["--labelled", "x", "--trainpref", "x.tsv", "--destdir", str(folder)]
    assert main(["preprocess", *labelled, "--documents", "blank"]) == 2
    expect_facts(capsys.readouterr().err, "--documents", "labelled")
    for name in ("glue/CoLA", "squad/v1.1"):
        benchmark = ["--benchmark", name, *labelled[2:]]
        assert main(["preprocess", *benchmark, "--documents", "blank"]) == 2
        expect_facts(capsys.readouterr().err, "--documents", "benchmarks")


def test_lines_of_squad_cannot_be_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = binarise(tmp_path, [b"a\n"])
    benchmark = ["--benchmark", "squad/v2.0", "--trainpref", "x.json", "--destdir", str(folder)]
    assert main(["preprocess", *benchmark, "--on-bad-utf8", "skip"]) == 2
    expect_facts(capsys.readouterr().err, "--on-bad-utf8 skip", "squad/v2.0")


def test_every_number_of_workers_writes_the_same_bytes(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    text = "".join("\n" if draw.random() < 0.2 else f"{draw.random()}\n" for _ in range(120_000))
    # A first line that does not fit a block, and bad bytes.
    content = b"long " * 300_000 + b"\n" + text.encode() + b"\xff\n"
    folders = [
        binarise(tmp_path, [content, b"z\n"], "--documents", "blank", "--workers", n, dest=n)
        for n in ("1", "2")
    ]
    for name in ("train.bin", "train.idx", "train.words"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    wanted = 1 + sum(bool(part.strip("\n")) for part in text.split("\n\n"))
    # The bad line goes on with the last document, unless a blank line stands before it.
    data = IndexedDataset(folders[0] / "train")
    assert len(data.documents) - 1 in (wanted, wanted + 1) and len(data.documents) > 10_000


def expected(content: bytes, policy: str) -> Documents:
    """Return the documents of one file, decided line by line."""
    found: Documents = [[]]
    for raw in content.removesuffix(b"\n").split(b"\n"):
        line = raw.removesuffix(b"\r").decode("utf-8", "replace")
        if "\ufffd" in line and policy == "skip":
            continue
        if not line or line.isspace():
            found.append([])
        else:
            found[-1].append(line)
    return [document for document in found if document]


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    contents=st.lists(
        st.lists(
            st.sampled_from([b"\n", b"\n", b"\r\n", b" ", b"a", b"bc", b"\xc3\xa9", b"\xff"])
        ).map(b"".join),
        min_size=1,
        max_size=3,
    ),
    size=st.integers(1, 7),
    policy=st.sampled_from(["replace", "skip"]),
)
@example([b"abc abc abc abc abc\n\nx\n", b"abc abc abc abc abc"], 1, "skip")
@example([b"                              \nx\n"], 1, "replace")
def test_borders_do_not_depend_on_the_block_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contents: list[bytes], size: int, policy: str
) -> None:
    monkeypatch.setattr(text_files, "PIECE", 4)
    tokenizer = tokenizer_class("char").train(["abcxé\ufffd"], 50, 1)
    paths = [tmp_path / str(i) for i in range(len(contents))]
    for path, content in zip(paths, contents):
        path.write_bytes(b"x\n" + content)
    wanted = [d for content in contents for d in expected(b"x\n" + content, policy)]
    for block_size in (size, 1000):
        monkeypatch.setattr(text_files, "BLOCK", block_size)
        pipeline = CorpusPipeline(_CorpusOptions(documents="blank"), Request(tmp_path, {}, policy))
        pipeline.folder, pipeline.tokenizer = tmp_path, tokenizer
        split = Split("train", paths)
        _write_split(pipeline, split)
        data = IndexedDataset(tmp_path / "train")
        found = np.split(data.sizes, data.documents[1:-1])
        assert [d.tolist() for d in found] == [list(map(len, d)) for d in wanted]
        assert split.counts["documents"] == len(wanted)
        assert split.counts["sequences"] == sum(map(len, wanted))
        words = WordStarts(data.prefix, len(data.tokens)).count(data.starts, data.sizes)
        assert words.tolist() == [
            len(line.split()) for line in itertools.chain.from_iterable(wanted)
        ]
        assert split.counts["words"] == words.sum()


def test_the_writer_keeps_borders_in_order(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", np.uint16, documents=True) as writer:
        writer.end_documents([0, 0])
        assert writer.documents == 0
        writer.extend(np.arange(6, dtype=np.uint16), np.array([1, 2, 3]))
        assert writer.documents == 1
        writer.end_documents([1, 1, 3])
        writer.end_documents([])
        assert writer.documents == 2
        with pytest.raises(AssertionError):
            writer.end_documents([2])
        writer.add([7])
        assert writer.documents == 3
    assert IndexedDataset(tmp_path / "a").documents.tolist() == [0, 1, 3, 4]
    with IndexedWriter(tmp_path / "b", np.uint16, documents=True):
        pass
    assert IndexedDataset(tmp_path / "b").documents.tolist() == [0]
