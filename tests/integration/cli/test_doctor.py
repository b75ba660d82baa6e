"""`metaseq-lm doctor` on sound and on damaged data folders."""

import json
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metaseq_lm.cli import main
from metaseq_lm.data.doctor import findings
from metaseq_lm.data.storage import manifest
from metaseq_lm.data.storage.indexed import IndexedDataset, IndexedWriter
from metaseq_lm.data.storage.manifest import Manifest


@pytest.fixture
def data(tmp_path):
    """A sound folder: corpus with train and valid, and the labelled set `set`."""
    files = {
        "train.txt": "".join(f"line {i} of the text\n" for i in range(40)),
        "valid.txt": "line 100 of the text\n",
        "train.tsv": "text\tlabel\nline 1\ta\nline 2\tb\nline 3\ta\n",
        "test.tsv": "text\tlabel\nline 4\tb\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    preprocess(tmp_path, "train.txt", "--validpref", f"{tmp_path}/valid.txt", "--tokenizer", "char")
    preprocess(tmp_path, "train.tsv", "--testpref", f"{tmp_path}/test.tsv", "--labelled", "set")
    return tmp_path / "data"


def preprocess(folder, train, *options):
    arguments = ["preprocess", "--trainpref", f"{folder}/{train}", "--destdir", f"{folder}/data"]
    assert main([*arguments, "--overwrite", *options]) == 0


@pytest.fixture
def look(capsys):
    """Run the command; return (exit code, list of lines)."""

    def call(folder, *options):
        capsys.readouterr()
        code = main(["doctor", str(folder), *options])
        return code, capsys.readouterr().out.splitlines()

    return call


def has(lines, level, *facts):
    """Tell whether one of the lines is of the level and holds all of `facts`."""
    selected = [line for line in lines if line.startswith(level)]
    return any(all(fact in line for fact in facts) for line in selected)


def test_sound_folder(data, look):
    code, lines = look(data, "--verify")
    assert code == 0
    assert all(line.startswith("ok ") or "GiB free" in line for line in lines[:-1]), lines
    assert has(lines, "ok", "Python 3.") and has(lines, "ok", "torch ")
    assert has(lines, "ok", "GiB free", str(data))
    assert has(lines, "ok", "every checksum")
    assert has(lines, "ok", "train: 40 documents, ")
    assert has(lines, "ok", "0 of 1 documents", "valid (0.0 %)", "in train")
    assert has(lines, "ok", "3 rows", "a 66.7 %", "b 33.3 %")
    assert lines[-1].startswith("0 errors, ")
    assert look(data / "set", "--verify")[0] == 0


def test_several_folders(data, look, tmp_path):
    code, lines = look(data, str(data / "set"), str(tmp_path / "nothing"))
    assert (
        code == 2 and lines[-1].startswith("1 error, ") and has(lines, "error", "nothing: no such")
    )
    assert sum("train" in line and "3 rows" in line for line in lines) == 2
    assert sum("torch " in line for line in lines) == 1


def test_flipped_bit_of_a_large_set_needs_verify(data, look, monkeypatch):
    """Small sets are always verified."""
    path = data / "train.bin"
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(bytes(content))
    code, lines = look(data)
    assert code == 1 and has(lines, "error", "train.bin: block 0")
    monkeypatch.setattr(manifest, "ALWAYS_VERIFIED", 0)
    assert look(data)[0] == 0
    code, lines = look(data, "--verify")
    assert code == 1 and has(lines, "error", "train.bin: block 0")


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "dict.txt", "set/test.label.bin"])
def test_cut_and_missing_files(data, look, name):
    os.truncate(data / name, (data / name).stat().st_size - 1)
    code, lines = look(data)
    assert code == 1 and has(lines, "error", name.split("/")[-1])
    (data / name).unlink()
    code, lines = look(data)
    assert code == 1 and has(lines, "error", name.split("/")[-1])


def test_damaged_or_missing_manifest(data, look):
    (data / "manifest.json").write_text("{")
    code, lines = look(data)
    assert code == 1 and has(lines, "error", "manifest.json: damaged")
    (data / "manifest.json").unlink()
    code, lines = look(data)
    assert code == 0 and has(lines, "warning", "no manifest.json")


@pytest.mark.parametrize("link", [False, True])
def test_a_set_without_its_manifest_is_named(data, look, link):
    manifest_file = data / "set" / "manifest.json"
    manifest_file.unlink()
    if link:
        manifest_file.symlink_to("nowhere")
    (data / "notes").mkdir()
    for options in ([], ["--verify"]):
        code, lines = look(data, *options)
        assert code == 1 and has(lines, "error", f"{data / 'set'}")
        assert not any("notes" in line for line in lines)


def test_folders_without_data(tmp_path, look):
    code, lines = look(tmp_path / "nothing")
    assert code == 2 and has(lines, "error", "nothing: no such")
    code, lines = look(tmp_path)
    assert code == 1 and has(lines, "error", "no token files")


def rewrite(data, split, documents, dtype=np.uint16):
    """Put other token files into a folder that stays sound otherwise."""
    with IndexedWriter(data / split, dtype) as writer:
        for document in documents:
            writer.add(document)
    for name in (f"{split}.words", "manifest.json"):
        (data / name).unlink(missing_ok=True)


def test_ids_beyond_the_vocabulary(data, look):
    rewrite(data, "train", [[34, 35], [1000]])
    code, lines = look(data)
    assert code == 1 and has(lines, "error", "train.bin:", "id 1000")


@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("token", [-1, 2**31 - 1])
def test_splits_with_ids_beyond_the_vocabulary_are_not_compared(data, look, split, token):
    rewrite(data, split, [[34, token]], np.int32)
    code, lines = look(data)
    assert code == 1 and has(lines, "error", f"{split}.bin: token id {token}, but")
    assert not any("passages" in line for line in lines)


def test_numbers_that_are_no_tokens(data, look):
    rewrite(data, "train", [np.array([34.0, np.nan])], np.float32)
    code, lines = look(data)
    assert code == 1 and has(lines, "error", "train.bin:", "float32")


def test_empty_documents_duplicates_and_overlap(data, look):
    rewrite(data, "train", [[34, 35], [], [34, 35], [36]])
    rewrite(data, "valid", [[34, 35], [35, 34]])
    code, lines = look(data)
    assert code == 0
    assert has(lines, "warning", "train:", "1 empty")
    assert has(lines, "warning", "train:", "33.3 %", "repeat")
    assert has(lines, "warning", "1 of 2", "valid (50.0 %)", "in train")


@pytest.mark.parametrize(
    "share, level, code", [(0, "ok", 0), (60, "warning", 0), (440, "warning", 0), (450, "error", 1)]
)
def test_passages_in_both_splits(data, look, share, level, code):
    """Documents of 45 tokens, cut anew, so that no document is the same."""
    draw = np.random.default_rng(0)
    train, valid = draw.integers(34, 54, (2, 900))
    valid[:share] = train[100 : 100 + share]
    rewrite(data, "train", train.reshape(-1, 45))
    rewrite(data, "valid", np.array_split(valid, 19))
    result, lines = look(data)
    assert result == code and has(lines, "ok", "0 of 19 documents", "valid")
    text = f"{share / 9:.1f} % of its tokens, in passages of 50, also stand in train"
    assert has(lines, level, text)


@pytest.mark.parametrize("train, valid, small", [(50, 25, False), (50, 24, True), (49, 25, True)])
def test_a_split_that_is_too_small_to_tell_its_domain_says_so(data, look, train, valid, small):
    """Of documents of 40 tokens: 1,000 tokens of valid are enough, and 2,000 of train."""
    draw = np.random.default_rng(0)
    rewrite(data, "train", draw.integers(34, 54, (train, 40)))
    rewrite(data, "valid", draw.integers(34, 54, (valid, 40)))
    lines = look(data)[1]
    assert has(lines, "ok", "valid", "fewer than 1,000") == small
    assert has(lines, "ok", "valid is of", "of train: ") != small


def test_short_documents_in_both_splits_are_a_warning(data, look):
    """In a small language they may be the same by chance."""
    rows = np.random.default_rng(0).integers(34, 54, (40, 20))
    rewrite(data, "train", rows)
    rewrite(data, "valid", rows[::-1])
    code, lines = look(data)
    assert code == 0 and has(lines, "warning", "40 of 40 documents", "valid", "in train")
    assert has(lines, "ok", "0.0 %", "passages of 50")


def test_another_tokenizer_than_the_labelled_sets(data, look, tmp_path):
    preprocess(tmp_path, "train.txt", "--tokenizer", "word")
    code, lines = look(data)
    assert code == 1 and has(lines, "error", "set:", "another tokenizer")


def test_tokenizer_of_other_token_files(data, look):
    content = (data / "dict.txt").read_text()
    (data / "dict.txt").write_text(content.replace("\nx ", "\nX "))
    code, lines = look(data)
    assert code == 1 and has(lines, "error", "dict.txt", "tokenizer")


def test_labelled_set_warnings(data, look, tmp_path):
    (tmp_path / "train.tsv").write_text("text\tlabel\nline one\ta\n")
    rows = [{"text": "line one", "label": "b"}, {"text": "", "label": "a"}]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    test = f"{tmp_path}/test.jsonl"
    preprocess(tmp_path, "train.tsv", "--testpref", test, "--labelled", "set", "--labels", "a,b,c")
    code, lines = look(data)
    assert code == 0
    assert has(lines, "warning", "train", "of b, c")
    assert has(lines, "warning", "test", "of: b")
    assert has(lines, "warning", "1 of 2", "test (50.0 %)", "in train")
    assert has(lines, "warning", "test.input0: 1 rows", "row 2")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 2), max_size=7)), st.integers(1, 9))
def test_hashes_are_equal_for_equal_documents_only(tmp_path, monkeypatch, documents, chunk):
    monkeypatch.setattr(findings, "CHUNK", chunk)
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        for document in documents:
            writer.add(document)
    hashes = findings.document_hashes(IndexedDataset(tmp_path / "a")).tolist()
    expected = [documents.index(document) for document in documents]
    assert [hashes.index(h) for h in hashes] == expected


def test_a_set_of_another_kind_is_compared_with_its_manifest(data, look):
    manifest = Manifest.load(data / "set")
    manifest.kind = "another"
    manifest.save(data / "set")
    assert look(data, "--verify")[0] == look(data / "set")[0] == 0
    os.truncate(data / "set/test.label.bin", 1)
    code, lines = look(data)
    assert code == 1 and has(lines, "error", "test.label.bin: 1 bytes", " 4")


CHECK = """
from metaseq_lm.data.doctor.findings import ERROR, Finding, check


@check("rhymes", "poems")
def rhymes(subject):
    yield Finding(ERROR, f"{subject.folder.name}: {len(subject.splits)} splits do not rhyme")
"""


def test_checks_of_a_plug_in(data, look):
    """Those of its kind run after the checks of every folder, and decide the exit code."""
    poems = Manifest.load(data / "set")
    poems.kind = "poems"
    poems.save(data / "set")
    assert look(data / "set")[0] == 0
    (data / "rhyming.py").write_text(CHECK)
    code, lines = look(data / "set", "--user-dir", str(data / "rhyming.py"))
    assert code == 1 and has(lines, "ok", "set: manifest.json agrees")
    assert has(lines, "error", "set: 2 splits do not rhyme")
