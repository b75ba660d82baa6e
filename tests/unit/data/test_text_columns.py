"""A corpus of one column of JSON lines, tables, Parquet and Arrow files is that of
the plain text.
"""

import csv
import gzip
import io
import json

import pytest
from outcomes import expect

from metaseq_lm.cli import main
from metaseq_lm.data.records import arrow_files
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.tokenizers.loading import load_tokenizer

TEXTS = [
    'The cat said: "miau", and left.',
    "Le café était fermé à Noël; on dort.",
    "Under the tree, the dogs sleep | eat.",
    '"Quoted," she said.',
    "漢字 and 1,000 numbers",
    "The end.",
] * 20
PLAIN = "".join(f"{text}\n" for text in TEXTS)


def table(delimiter: str, **options) -> str:
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter, **options)
    writer.writerow(["id", "text", "meta"])
    writer.writerows([i, text, "x"] for i, text in enumerate(TEXTS))
    return file.getvalue()


JSONL = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS))
FORMS = {
    "c.jsonl": JSONL,
    "c.json": "".join(json.dumps({"text": t}, ensure_ascii=False) + "\r\n" for t in TEXTS),
    "named.txt": JSONL,
    "c.jsonl.gz": gzip.compress(JSONL.encode()),
    "c.csv": table(","),
    "all.csv": table(",", quoting=csv.QUOTE_ALL),
    "semicolons.csv": table(";"),
    "c.tsv": table("\t"),
    "plain.tsv": "id\ttext\n" + "".join(f"{i}\t{text}\n" for i, text in enumerate(TEXTS)),
}


@pytest.fixture
def run(tmp_path, capsys):
    """Preprocess a file; return (exit code, output, data folder)."""

    def call(content, *options, name="c.jsonl", dest="data", column="text"):
        if content is not None:
            (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        folder = tmp_path / dest
        arguments = ["--trainpref", f"{tmp_path}/{name}", "--destdir", str(folder)]
        arguments += ["--vocab-size", "400", *(["--text-column", column] if column else [])]
        code = main(["preprocess", *arguments, *options])
        return code, "".join(capsys.readouterr()), folder

    return call


def token_bytes(folder):
    return [(folder / f"train.{suffix}").read_bytes() for suffix in ("bin", "idx")]


def documents(folder):
    tokenizer, data = load_tokenizer(folder), IndexedDataset(folder / "train")
    return [tokenizer.decode(data[i].tolist()) for i in range(len(data))]


@pytest.fixture
def plain(run):
    return token_bytes(run(PLAIN, name="plain.txt", dest="plain", column="")[2])


@pytest.mark.parametrize("name", FORMS)
def test_every_form_makes_the_same_corpus(run, plain, name):
    code, output, folder = run(FORMS[name], name=name)
    assert code == 0, output
    assert token_bytes(folder) == plain
    assert Manifest.load(folder).splits["train"]["documents"] == len(TEXTS)


def test_workers_make_the_same_corpus(run, plain):
    code, output, folder = run(JSONL, "--workers", "2")
    assert code == 0 and token_bytes(folder) == plain


def test_columns_name_those_of_a_table_without_header(run, plain):
    rows = "".join(f"{i}\t{text}\n" for i, text in enumerate(TEXTS))
    code, output, folder = run(rows, "--columns", "id,text", name="c.tsv")
    assert code == 0 and token_bytes(folder) == plain, output


def test_a_record_is_a_document(run):
    rows = ['{"text": "one\\ntwo\\r\\n\\nthree\\n"}', '{"text": "four"}', '{"text": ""}']
    code, output, folder = run("\n".join(rows))
    assert code == 0 and documents(folder) == ["one two  three", "four"]
    code, output, folder = run("\n".join(rows), "--documents", "blank", dest="sentences")
    assert code == 0 and documents(folder) == ["one", "two", "three", "four"]
    assert Manifest.load(folder).splits["train"]["documents"] == 2


def test_damaged_records_are_counted_and_skipped(run):
    content = JSONL.encode() + b'{"text": "caf\xe9 one"}\n'
    code, output, folder = run(content)
    assert code == 0 and "1 with invalid" in output
    assert documents(folder)[-1] == "caf\ufffd one"
    code, output, folder = run(content, "--on-bad-utf8", "skip", dest="skip")
    assert code == 0 and documents(folder)[-1] == TEXTS[-1]
    code, output, _ = run(content, "--on-bad-utf8", "fail", dest="fail")
    assert code == 1 and f"c.jsonl:{len(TEXTS) + 1}: invalid UTF-8" in output
    latin = table(",").replace("漢字", "").encode("latin-1")
    expect(run(latin, name="l.csv", dest="latin"), 1, "--encoding latin-1")
    assert run(latin, "--encoding", "latin-1", name="l.csv", dest="latin")[0] == 0


@pytest.mark.parametrize(
    "name, content, options, code, message",
    [
        ("c.jsonl", JSONL, ["--text-column", "txt"], 1, "no column 'txt'. Did you mean 'text'?"),
        ("c.csv", table(","), ["--text-column", "body"], 1, "There are: id, text, meta."),
        ("c.jsonl", JSONL, ["--text-column", "id"], 1, "c.jsonl:1: field 'id' is not a text"),
        ("c.jsonl", JSONL + '{"id": 1}\n', [], 1, f"c.jsonl:{len(TEXTS) + 1}: no field 'text'"),
        ("c.jsonl", JSONL + "{broken\n", [], 1, f"c.jsonl:{len(TEXTS) + 1}: not valid JSON"),
        ("c.json", json.dumps(["a", "b"]), [], 1, "an object for each row"),
        ("c.csv", 'text,n\n"never closed,1\n', [], 1, "quotation mark is not closed"),
        ("c.csv", "text,n\na,1\nb\n", [], 1, "c.csv:3: 1 fields, expected 2 (text, n)"),
        ("c.txt", PLAIN, [], 1, "no column 'text'"),
        ("c.jsonl", JSONL, ["--plain-text"], 2, "--plain-text"),
        ("c.jsonl", b"PAR1 is no sign alone PAR1", [], 1, "c.jsonl: "),
        ("c.jsonl", JSONL.encode("utf-16"), [], 1, "is UTF-16; convert it with --encoding utf-16"),
    ],
)
def test_what_cannot_be_read_is_named(run, name, content, options, code, message):
    actual, output, folder = run(content, *options, name=name)
    assert (actual, message in output) == (code, True), output
    assert not folder.exists()


def test_columns_without_a_text_column(run):
    code, output, _ = run(JSONL, "--text-columns", "text", column="", dest="plural")
    assert code == 0, output
    expect(run(JSONL, "--text-columns", "text,id", column=""), 2, "has one column")
    expect(run(JSONL, "--columns", "a,b", column=""), 2, "give --text-column")
    expect(run(JSONL, column=""), 1, "with --text-column")


# ---------------------------------------------------------------- Parquet and Arrow


def arrow_file(form: str, texts: list) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    rows = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    sink = io.BytesIO()
    if form == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(rows, sink, row_group_size=50)
        return sink.getvalue()
    new = pyarrow.ipc.new_file if form == "file" else pyarrow.ipc.new_stream
    with new(sink, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=70)
    return sink.getvalue()


@pytest.mark.parametrize("form", ["parquet", "file", "stream"])
def test_arrow_forms_make_the_same_corpus(run, plain, monkeypatch, form):
    content = arrow_file(form, TEXTS)
    monkeypatch.setattr(arrow_files, "ROWS", 7)
    code, output, folder = run(content, name="c.data")
    assert code == 0, output
    assert token_bytes(folder) == plain
    expect(run(content, name="c.data", column="txt", dest="other"), 1, "'txt'", "'text'")
    expect(run(content, name="c.data", column="id", dest="other"), 1, "'id'", "whole number")
    expect(run(content, name="c.data", column="", dest="other"), 1, "--text-column NAME")
    code, output, folder = run(content[: len(content) // 2], name="cut.data", dest="cut")
    assert code == 1 and "cut.data: damaged" in output and not folder.exists()


def test_an_arrow_stream_without_end_mark_is_damaged(run):
    code, output, folder = run(arrow_file("stream", TEXTS)[:-8], name="c.arrow")
    assert code == 1 and "c.arrow: damaged" in output and not folder.exists()


def test_saved_datasets_folders(run, plain, tmp_path):
    """As datasets saves them: Arrow streams in one folder, or in one for each split."""
    train = tmp_path / "saved" / "train"
    train.mkdir(parents=True)
    for number, texts in enumerate((TEXTS[:50], TEXTS[50:])):
        (train / f"data-0000{number}-of-00002.arrow").write_bytes(arrow_file("stream", texts))
    for name in ("state.json", "dataset_info.json"):
        (train / name).write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    code, output, folder = run(None, name="saved/train")
    assert code == 0 and token_bytes(folder) == plain, output
    expect(run(None, name="saved", dest="other"), 1, "several splits", str(train))


def test_rows_without_text_are_blank(run):
    content = arrow_file("parquet", ["one", None, "", "two"])
    code, output, folder = run(content, name="c.parquet")
    assert code == 0 and "2 blank" in output and documents(folder) == ["one", "two"]


def test_arrow_without_pyarrow(run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    code, output, folder = run(b"PAR1" + bytes(50), name="c.parquet")
    assert code == 1 and "metaseq-lm[arrow]" in output and not folder.exists()
