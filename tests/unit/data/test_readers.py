"""Records of files by registered readers, and a reader that a plug-in registers."""

import io
import json
import tarfile
from pathlib import Path

import pytest
from outcomes import expect_error

from metaseq_lm.cli import main
from metaseq_lm.data.records import TextFile, record, records
from metaseq_lm.data.records.conll import FIELDS
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.tokenizers.loading import load_tokenizer

PLUG_IN = Path(__file__).resolve().parents[3] / "user_dir" / "archives.py"
SENTENCE = {"0": ["a", "b"], "1": ["X", "Y"]}


@pytest.fixture(autouse=True)
def builtin_readers():
    """Forget the readers that a test registers."""
    tables = (record.READERS, record._SIGNS)
    before = list(map(dict, tables))
    yield
    for table, content in zip(tables, before):
        table.clear()
        table.update(content)


@pytest.mark.parametrize(
    ("name", "content", "expected", "found"),
    [
        ("t.txt", b"a\nb\xff\n", "lines", [("1", {"text": "a"}), ("2", {"text": "b\ufffd"})]),
        ("t.json", b'{"a": 1}\n\n{"a": 2}', "table", [("1", {"a": 1}), ("3", {"a": 2})]),
        ("t.txt", b'[{"a": [1]}, {"a": null}]', "table", [("1", {"a": [1]}), ("2", {"a": None})]),
        ("t.csv", b'a,b\n"x\ny",1\nz,2\n', "table", [("2", {"a": "x\ny", "b": "1"}),
            ("4", {"a": "z", "b": "2"})]),
        ("t.txt", b"a X\nb Y\n\n", "columns", [("1", SENTENCE)]),
        ("t.conllu", b"1\ta\tb\tc\td\te\t0\tf\tg\th\n", "columns", [("1", dict(zip(FIELDS,
            map(list, "1abcde0fgh"))))]),
    ],
)  # fmt: skip
def test_records_of_each_kind(tmp_path, name, content, expected, found):
    (tmp_path / name).write_bytes(content)
    actual = list(records(TextFile(tmp_path / name), expected=expected))
    assert [(r.where.rpartition(":")[2], r.fields) for r in actual] == found
    assert [r.is_bad for r in actual] == ["\ufffd" in str(fields) for _, fields in found]


def pack(path: Path, texts: dict[str, bytes], mode: str = "w") -> None:
    with tarfile.open(path, mode) as archive:
        for name, content in texts.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_archives_of_a_plug_in(tmp_path, capsys):
    texts = {"a.txt": b"one\ntwo", "b/c.txt": b"three caf\xe9", "d": b""}
    pack(tmp_path / "t.tar", texts)
    pack(tmp_path / "t.tar.gz", texts, "w:gz")
    common = ["--user-dir", str(PLUG_IN), "--tokenizer", "char", "--destdir"]
    for name in ("t.tar", "t.tar.gz"):
        source = ["preprocess", "--trainpref", f"{tmp_path}/{name}"]
        assert main([*source, *common, f"{tmp_path}/d_{name}"]) == 0
        assert "1 with invalid UTF-8" in capsys.readouterr().out
        tokenizer, data = (
            load_tokenizer(tmp_path / f"d_{name}"),
            IndexedDataset(tmp_path / f"d_{name}" / "train"),
        )
        found = [tokenizer.decode(data[i].tolist()) for i in range(len(data))]
        assert found == ["one two", "three caf\ufffd"]
    labelled = ["--labelled", "x", "--label-column", "name", "--trainpref", f"{tmp_path}/t.tar"]
    options = ["--user-dir", str(PLUG_IN), "--destdir", f"{tmp_path}/d_t.tar"]
    assert main(["preprocess", *labelled, *options]) == 0
    manifest = json.loads((tmp_path / "d_t.tar" / "x" / "manifest.json").read_text())
    assert manifest["splits"]["train"]["rows"] == 3
    content = (tmp_path / "t.tar.gz").read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(content[: len(content) // 2])
    source = ["preprocess", "--trainpref", f"{tmp_path}/cut.tar.gz"]
    expect_error(capsys, main([*source, *common, f"{tmp_path}/cut"]), 1, "cut.tar.gz: damaged")
    words = ["preprocess", "--words", "--trainpref", f"{tmp_path}/t.tar", *options]
    expect_error(capsys, main([*words, "--overwrite"]), 1, "not plain text")
