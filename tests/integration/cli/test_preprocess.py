"""`metaseq-lm preprocess` on good, odd and hostile text, a full disk, and being killed."""

import functools
import gzip
import hashlib
import importlib.util
import os
import random
import resource
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from outcomes import expect, expect_facts

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.corpus.encode import Counts
from metaseq_lm.data.preprocess.corpus import CorpusPipeline, _CorpusOptions
from metaseq_lm.data.preprocess.pipeline import Request, Split, _write_split, staging
from metaseq_lm.data.records import text_files
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.storage.manifest import Manifest, fingerprint, verify
from metaseq_lm.data.tokenizers.loading import load_tokenizer, tokenizer_class

WORDS = "the of and to in it was that he's she'd 12 1984 café 漢字 ; \" -".split()


def corpus(lines, seed=0, length=12):
    draw = random.Random(seed)
    return "".join(" ".join(draw.choices(WORDS, k=length)) + "\n" for _ in range(lines))


@pytest.fixture
def run(tmp_path, capsys):
    """Call the command on `content` as train file; return (exit code, output, data folder)."""

    def call(content, *options, name="train.txt", dest="data", tokenizer=("--vocab-size", "300")):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        arguments = ["preprocess", "--trainpref", str(path), "--destdir", str(tmp_path / dest)]
        code = main([*arguments, *tokenizer, *options])
        captured = capsys.readouterr()
        return code, captured.out + captured.err, tmp_path / dest

    return call


def documents(folder, split="train"):
    tokenizer, data = load_tokenizer(folder), IndexedDataset(folder / split)
    return [tokenizer.decode(data[i]) for i in range(len(data))]


def digest(folder):
    """What must be equal: everything but the manifest, which holds the command."""
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in folder.iterdir()
        if p.is_file() and p.name != "manifest.json"
    }


def test_a_corpus(run, tmp_path):
    (tmp_path / "valid.txt").write_text("the end\n\nof it", encoding="utf-8")
    train = corpus(50) + "\n  \n"
    valid = str(tmp_path / "valid.txt")
    code, output, folder = run(train, "--validpref", valid, "--split", f"more={valid}")
    assert code == 0, output
    expect_facts(output, "train: 52 lines", "50 documents", "2 blank")
    assert documents(folder) == train.split("\n")[:50]
    assert documents(folder, "valid") == documents(folder, "more") == ["the end", "of it"]
    manifest = Manifest.load(folder)
    tokens = len(IndexedDataset(folder / "train").tokens)
    assert manifest.splits["train"]["tokens"] == tokens
    assert manifest.splits["train"]["documents"] == 50
    assert manifest.tokenizer["hash"] == load_tokenizer(folder).fingerprint
    assert manifest.tokenizer["vocab_size"] == 300
    vocabulary = load_tokenizer(folder).vocabulary
    assert sum(vocabulary.counts) == tokens and vocabulary.counts[0] == 0
    assert verify(folder) == []
    assert manifest.command.startswith("metaseq-lm preprocess --destdir ")
    assert "--vocab-size 300" in manifest.command
    assert sorted(p.name for p in folder.iterdir()) == sorted([*manifest.files, "manifest.json"])


@pytest.mark.parametrize("kind", ["sentencepiece_bpe", "sentencepiece_unigram", "word", "char"])
def test_the_other_tokenizers(run, kind):
    options = ("--tokenizer", kind, "--vocab-size", "90")
    code, output, folder = run(corpus(50), tokenizer=options)
    assert code == 0, output
    tokenizer = load_tokenizer(folder)
    assert tokenizer.name == kind
    assert tokenizer.encode_batch(documents(folder)) == [
        IndexedDataset(folder / "train")[i].tolist() for i in range(50)
    ]


def test_options_of_one_kind(run):
    options = ("--tokenizer", "word", "--word-pattern", r"\w+", "--min-frequency", "3")
    code, output, folder = run("a-b a-a b b c\n", tokenizer=options)
    assert code == 0, output
    assert load_tokenizer(folder).vocabulary.symbols[34:] == ["a", "b"]
    options = ("--tokenizer", "sentencepiece_bpe", "--character-coverage", "1.0")
    code, output, folder = run(corpus(50), "--vocab-size", "90", tokenizer=options, dest="sp")
    assert code == 0 and "▁" in "".join(load_tokenizer(folder).vocabulary.symbols)


def test_tokenizer_of_another_folder_and_of_a_sample(run, tmp_path):
    (tmp_path / "sample.txt").write_text("abcabc abc\n")
    code, output, first = run(corpus(9), "--tokenizer-corpus", str(tmp_path / "sample.txt"))
    assert code == 0 and "abc" in load_tokenizer(first).vocabulary
    arguments = ("--tokenizer-from", str(first))
    code, output, second = run(corpus(9), dest="second", tokenizer=arguments)
    assert code == 0, output
    assert digest(first) == digest(second)
    assert fingerprint(first) == fingerprint(second)
    code, output, _ = run(corpus(9), *arguments, dest="third")
    expect((code, output), 2, "--vocab-size", "--tokenizer-from")


LONG = "long " * 20_000
# Too long for a piece, so it is cut somewhere; é is two bytes, which must stay together.
UNBROKEN = "x" * 60_001 + "é" * 10_000
HOSTILE = (
    "\ufeffone\u2028still one\x85 still\r\n\x00nul \x00\n\n \t\u3000\n\ufefftwo\n".encode()
    + b"bad \xff\xfe bytes\n\xed\xa0\x80 surrogate\n"
    + LONG.encode()
    + b"\xc3\n"
    + UNBROKEN.encode()
    + b"\n\n\nlast without end"
)


@pytest.mark.parametrize(
    "kind, policy",
    [
        *[(kind, policy) for kind in ("byte_bpe", "char") for policy in ("replace", "skip")],
        *[("word", "skip"), ("sentencepiece_bpe", "replace")],
    ],
)
def test_hostile_text(run, policy, kind):
    options = ("--tokenizer", kind, "--vocab-size", "300")
    code, output, folder = run(HOSTILE, "--on-bad-utf8", policy, tokenizer=options)
    assert code == 0, output
    counts = Manifest.load(folder).splits["train"]
    assert counts["lines"] == 12
    assert counts["blank"] == 4
    assert counts["bad_utf8"] == 3
    assert counts["skipped"] == (3 if policy == "skip" else 0)
    parts = ("documents", "blank", "skipped", "no_tokens")
    assert counts["lines"] == sum(counts[name] for name in parts)
    data = IndexedDataset(folder / "train")
    assert len(data) == counts["documents"] and data.sizes.min() > 0
    if kind == "byte_bpe":
        found = documents(folder)
        assert found[:3] == ["one\u2028still one\x85 still", "\x00nul \x00", "\ufefftwo"]
        assert found[-2:] == [UNBROKEN, "last without end"]
        if policy == "replace":
            bad = [
                "bad \ufffd\ufffd bytes",
                "\ufffd\ufffd\ufffd surrogate",
                LONG + "\ufffd",
            ]
            assert found[3:-2] == bad


def test_bad_bytes_can_fail(run):
    code, output, folder = run(b"good\n\nbad \xff\n", "--on-bad-utf8", "fail")
    expect((code, output), 1, "train.txt:3:", "byte 0xff")
    assert not folder.exists()


def test_workers_give_identical_files(run, monkeypatch):
    content = corpus(3000).encode() + HOSTILE + corpus(3000, 1).encode()
    monkeypatch.setattr(text_files, "BLOCK", 20_000)
    _, _, first = run(corpus(100), dest="first")
    digests = []
    for workers in (1, 2, 3):
        options = ("--workers", str(workers), "--tokenizer-from", str(first))
        code, output, folder = run(content, *options, dest=f"w{workers}", tokenizer=())
        assert code == 0, output
        digests.append(digest(folder))
    assert digests[0] == digests[1] == digests[2]


def test_workers_know_the_tokenizer_of_a_plug_in(run, tmp_path):
    plug_in = tmp_path / "capitals.py"
    plug_in.write_text(
        "from metaseq_lm.core.registry import register_tokenizer\n"
        "from metaseq_lm.data.tokenizers.plain import WordTokenizer\n\n\n"
        '@register_tokenizer("capitals")\n'
        "class Capitals(WordTokenizer):\n"
        '    name = "capitals"\n'
    )
    digests, tokenizer = [], ("--tokenizer", "capitals", "--user-dir", str(plug_in))
    for workers in ("1", "2"):
        options = ("--workers", workers)
        code, output, folder = run(corpus(50), *options, dest=workers, tokenizer=tokenizer)
        assert code == 0, output
        digests.append(digest(folder))
    assert digests[0] == digests[1]


def test_workers_report_what_fails(run, monkeypatch):
    monkeypatch.setattr(text_files, "BLOCK", 1000)
    content = corpus(300).encode() + b"\xff\n" + corpus(300).encode()
    options = ("--workers", "2", "--on-bad-utf8", "fail")
    tokenizer = ("--tokenizer", "char")
    code, output, folder = run(content, *options, tokenizer=tokenizer)
    assert code == 1 and "train.txt:301: invalid UTF-8" in output
    assert not folder.exists()


@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.sampled_from([b"\n", b"\r\n", b" ", b"a", b"bc", b"\xc3\xa9", b"\xff", b"\xe2\x80\xa8"])
    ).map(b"".join),
    st.integers(1, 7),
    st.sampled_from(["replace", "skip"]),
)
@example(b"abc abc \xff abc abc abc abc\nx\n", 1, "skip")
@example(b"abc abc \xff abc abc abc abc\nx\n", 1, "replace")
@example(b"                              \nx\n", 1, "replace")
@example(2 * "\u2028".encode(), 1, "replace")
def test_ids_do_not_depend_on_the_block_size(tmp_path, monkeypatch, content, size, policy):
    monkeypatch.setattr(text_files, "PIECE", 4)
    (tmp_path / "f").write_bytes(b"x\n" + content)
    tokenizer = tokenizer_class("char").train(["abcxé"], 50, 1)
    results = []
    for block_size in (size, 1000):
        monkeypatch.setattr(text_files, "BLOCK", block_size)
        pipeline = CorpusPipeline(_CorpusOptions(), Request(tmp_path, {}, policy))
        pipeline.folder, pipeline.tokenizer = tmp_path, tokenizer
        split = Split("train", [tmp_path / "f"])
        _write_split(pipeline, split)
        frequencies = pipeline.train_frequencies
        data = IndexedDataset(tmp_path / "train")
        results.append(
            (data.sizes.tolist(), data.tokens.tolist(), frequencies.tolist(), split.counts)
        )
    assert results[0] == results[1]
    counts = Counts(**results[0][3])
    assert counts.lines == len((b"x\n" + content).removesuffix(b"\n").split(b"\n"))
    assert counts.lines == counts.documents + counts.blank + counts.skipped + counts.no_tokens


def test_several_files_of_which_one_is_packed(run, tmp_path):
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"packed\n", mtime=0))
    options = ("--vocab-size", "300", "--trainpref", f"{tmp_path}/train.txt", f"{tmp_path}/b.gz")
    code, output, folder = run("plain", tokenizer=options)
    assert code == 0 and documents(folder) == ["plain", "packed"]


@pytest.mark.parametrize(
    "content, name, message",
    [
        (b"", "train.txt", "train.txt: is empty (0 bytes)"),
        (b"\n\n \r\n", "train.txt", "train.txt: no text in 3 lines: 3 blank"),
        (None, "missing.txt", "missing.txt: no such file"),
        (None, ".", "is a directory"),
        (gzip.compress(b"text", mtime=0)[:-3], "t.gz", "t.gz: damaged after"),
        (gzip.compress(b"text", mtime=0), "t.txt", "gzip data; give it the suffix .gz"),
        ("text".encode("utf-16"), "t.txt", "t.txt: is UTF-16; convert it"),
        (b"\x28\xb5\x2f\xfd1234", "t.zst", "t.zst: is zstd data")
        if importlib.util.find_spec("zstandard") is None
        else (b"\x28\xb5\x2f\xfd1234", "t.zst", "t.zst: damaged after 0 bytes"),
        (b"plain", "t.xz", "t.xz: damaged after 0 bytes"),
    ],
)
def test_files_that_cannot_be_used(run, content, name, message):
    code, output, folder = run(content, name=name)
    assert code == (2 if content is None and name != "." else 1) and message in output
    assert not folder.exists()


def test_fifo_is_refused(run, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    code, output, _ = run(None, name="fifo")
    expect((code, output), 1, "fifo: is not a")


def test_unreadable_file_is_refused(run, tmp_path):
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0)
    if os.access(tmp_path / "secret", os.R_OK):
        pytest.skip("this user reads everything")
    code, output, _ = run(None, name="secret")
    expect((code, output), 1, "secret: cannot be")


@pytest.mark.parametrize(
    "options, message",
    [
        (["--tokenizer", "byte_bp"], "Did you mean 'byte_bpe'?"),
        (["--vocab-size", "100"], "100 is too small for byte_bpe: at least 289"),
        (["--vocab-size", "0"], "--vocab-size must be at least 1, got 0"),
        (["--workers", "0"], "--workers 0: at least 1"),
        (["--task-tokens", "-1"], "--task-tokens must be at least 0, got -1"),
        (["--split", "more"], "expected NAME=FILE"),
        (["--split", "../x=f"], "expected NAME=FILE"),
        (["--split", "train=f"], "a split 'train' already"),
        (["--labels", "a,b"], "--labels only applies to labelled sets"),
        (["--word-pattern", "x"], "--word-pattern does not apply to --tokenizer byte_bpe"),
        (["--tokenizer", "word", "--word-pattern", "("], "--word-pattern '('"),
        (["--character-coverage", "0.9"], "of sentencepiece only"),
        (["--on-bad-utf8", "ignore"], "invalid choice: 'ignore'"),
        (["--vocab-sise", "300"], "Did you mean '--vocab-size'"),
    ],
)
def test_wrong_usage(run, options, message):
    code, output, folder = run("some text\n", *options, tokenizer=())
    assert message in output
    assert code == 2
    assert not folder.exists()


def test_nothing_to_do_and_destdir_is_a_file(run, tmp_path, capsys):
    assert main(["preprocess", "--destdir", str(tmp_path / "d")]) == 2
    assert "give --trainpref" in capsys.readouterr().err
    (tmp_path / "f").write_text("text")
    assert (
        main(["preprocess", "--destdir", str(tmp_path / "d"), "--testpref", f"{tmp_path}/f"]) == 2
    )
    expect_facts(capsys.readouterr().err, "tokenizer", "--trainpref")
    code, output, _ = run("text", dest="f")
    expect((code, output), 2, "--destdir", "a folder")


def test_overwriting_needs_to_be_asked_for(run, tmp_path):
    code, _, folder = run(corpus(5), "--split", f"old={tmp_path}/train.txt")
    before = fingerprint(folder)
    code, output, _ = run(corpus(6))
    expect((code, output), 2, "already holds", "--overwrite")
    assert fingerprint(folder) == before and verify(folder) == []
    code, output, _ = run(b"\xff", "--overwrite", "--on-bad-utf8", "fail")
    assert code == 1 and fingerprint(folder) == before and verify(folder) == []
    code, output, _ = run(corpus(6), "--overwrite")
    assert code == 0 and len(documents(folder)) == 6
    assert not (folder / "old.bin").exists() and verify(folder) == []


def test_leftovers_are_removed_and_two_at_once_refused(run, tmp_path):
    (tmp_path / "data" / ".preprocess").mkdir(parents=True)
    (tmp_path / "data" / ".preprocess" / "train.bin").write_text("left by a killed run")
    code, output, folder = run(corpus(5))
    assert code == 0 and not (folder / ".preprocess").exists()
    with staging(folder, True), pytest.raises(MetaseqError, match="another preprocess"):
        with staging(folder, True):
            pass
    assert verify(folder) == []


@pytest.mark.parametrize("limit", [1, 5_000, 40_000, 100_000])
def test_full_disk(tmp_path, limit):
    # A limit on the size of files fails the same way as a full disk, and needs no rights.
    (tmp_path / "train.txt").write_text(corpus(20_000), encoding="utf-8")
    command = [sys.executable, "-m", "metaseq_lm", "preprocess", "--vocab-size", "300"]
    command += ["--trainpref", f"{tmp_path}/train.txt", "--destdir", f"{tmp_path}/data"]
    limited = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limited)
    assert done.returncode == 1, done.stderr
    message = done.stderr.splitlines()[-1]
    assert f"{tmp_path}/data/.preprocess/" in message
    expect_facts(message, "bytes are needed", "are free")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path):
    (tmp_path / "train.txt").write_text(corpus(2_000), encoding="utf-8")
    command = [sys.executable, "-m", "metaseq_lm", "preprocess", "--overwrite"]
    command += ["--trainpref", f"{tmp_path}/train.txt", "--validpref", f"{tmp_path}/train.txt"]
    command += ["--vocab-size", "300", "--workers", "2"]
    began = time.monotonic()
    subprocess.run([*command, "--destdir", f"{tmp_path}/whole"], check=True, capture_output=True)
    whole, longest = digest(tmp_path / "whole"), time.monotonic() - began
    draw = random.Random(1)
    for attempt in range(10):
        dest = tmp_path / f"d{attempt % 2}"
        process = subprocess.Popen(
            [*command, "--destdir", str(dest)], stdout=-3, stderr=-3, start_new_session=True
        )
        time.sleep(draw.uniform(0, longest))
        os.kill(process.pid, draw.choice([signal.SIGKILL, signal.SIGTERM]))
        process.wait()
        for split in ("train", "valid"):
            try:
                IndexedDataset(dest / split)
            except MetaseqError:
                continue
            for suffix in ("bin", "idx"):
                assert digest(dest)[f"{split}.{suffix}"] == whole[f"{split}.{suffix}"]
        if (dest / "manifest.json").exists():
            assert verify(dest) == []
    subprocess.run([*command, "--destdir", str(dest)], check=True, capture_output=True)
    assert digest(dest) == whole


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
def test_a_very_long_line_takes_little_memory(tmp_path):
    with open(tmp_path / "train.txt", "w") as file:
        for _ in range(300):
            file.write("never a line break in it " * 4_000)
    # Not getrusage: a child inherits the peak of the process that started it.
    script = (
        "import sys; from metaseq_lm.cli import main; code = main(sys.argv[1:]);"
        "print(open('/proc/self/status').read()); sys.exit(code)"
    )
    (tmp_path / "sample.txt").write_text(corpus(100), encoding="utf-8")
    command = [sys.executable, "-c", script, "preprocess", "--vocab-size", "300"]
    command += [
        "--tokenizer-corpus",
        f"{tmp_path}/sample.txt",
        "--trainpref",
        f"{tmp_path}/train.txt",
        "--destdir",
        f"{tmp_path}/data",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expect_facts(done.stdout, "train: 1 lines", "1 documents")
    peak = next(line for line in done.stdout.splitlines() if line.startswith("VmHWM:"))
    assert int(peak.split()[1]) < 200 << 10
