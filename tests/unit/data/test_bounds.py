"""A line, a field and a cell have one bound in every container, and memory stays near it."""

import bz2
import csv
import gzip
import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.labelled.files import RowReader, TableColumns
from metaseq_lm.data.records import arrow_files, text_files
from metaseq_lm.data.records.arrow_files import _arrow_batches
from metaseq_lm.data.records.tables import _TableFormat, table_rows
from metaseq_lm.data.records.text_files import TextFile
from metaseq_lm.data.tokenizers import plain
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary

LIMIT = 1 << 21
LONG = "a bc " * (LIMIT // 4)


@pytest.fixture
def small_limit(monkeypatch):
    monkeypatch.setattr(text_files, "LONGEST", LIMIT)
    monkeypatch.setattr(arrow_files, "LONGEST", LIMIT)
    monkeypatch.setattr(arrow_files, "MOST_BYTES", 2 * LIMIT)
    monkeypatch.setattr(arrow_files, "SLICE", LIMIT // 2)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bounds")
    (folder / "t.txt").write_text("a bc\nlabel\n")
    corpus = ["--trainpref", f"{folder}/t.txt", "--destdir", f"{folder}/data"]
    assert main(["preprocess", *corpus, "--tokenizer", "char"]) == 0
    return folder / "data"


TABLE = f"text\tlabel\n{LONG}\ta\n"
FORMS = {
    "t.tsv": TABLE,
    "t.tsv.gz": gzip.compress(TABLE.encode(), 1),
    "t.tsv.bz2": bz2.compress(TABLE.encode(), 1),
    "t.tsv.xz": lzma.compress(TABLE.encode(), preset=0),
    "t.csv": f'text,label\n"{LONG}",a\n',
    "lines.csv": f'text,label\n"{LONG.replace("a ", "a" + chr(10))}",a\n',
    "open.csv": 'text,label\n"never closed,a\n' + "b c,d\n" * (LIMIT // 4),
    "t.jsonl": json.dumps({"text": LONG, "label": "a"}) + "\n",
    "t.json": json.dumps([{"text": LONG, "label": "a"}]),
    "words.txt": f"a O\nb{LONG.replace(' ', '_')} O\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_one_bound_and_one_message(small_limit, data, tmp_path, capsys, name):
    content = FORMS[name]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    kind = "--tagged" if name == "words.txt" else "--labelled"
    destdir = ["--destdir", str(data), "--overwrite"]
    arguments = ["preprocess", kind, "x", "--trainpref", str(path), *destdir]
    assert main(arguments) == 1
    shown = capsys.readouterr().err
    unit = "field" if name in ("lines.csv", "open.csv") else "line"
    assert f"a {unit} of 2." in shown and "2.0 MiB" in shown, shown
    if kind == "--labelled" and ".tsv" not in name:
        assert main([*arguments[:1], *arguments[3:], "--text-column", "text"]) == 1
        assert "cell may have" in capsys.readouterr().err


def test_a_long_line_of_plain_text_is_read(small_limit, tmp_path):
    (tmp_path / "t.txt").write_text(LONG[: LIMIT - 9])
    corpus = ["--trainpref", f"{tmp_path}/t.txt", "--destdir", f"{tmp_path}/d"]
    assert main(["preprocess", *corpus, "--tokenizer", "char"]) == 0


def write(path: Path, columns, **options) -> TextFile:
    parquet = pytest.importorskip("pyarrow.parquet")
    feather = pytest.importorskip("pyarrow.feather")
    pyarrow = pytest.importorskip("pyarrow")
    writer = parquet.write_table if path.suffix == ".parquet" else feather.write_feather
    writer(pyarrow.table(columns), path, **options)
    return TextFile(path)


def rows(file: TextFile):
    return [row for batch in _arrow_batches(file) for row in batch.to_pylist()]


def repeated(text: str, count: int):
    pyarrow = pytest.importorskip("pyarrow")
    indices = pyarrow.array([0] * count, pyarrow.int32())
    return pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array([text]))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("t.parquet", {"use_dictionary": False}, "row group 1, column 'text': .*2.5 MiB"),
        ("t.parquet", {}, "row group 1, column 'text': .*2.5 MiB"),
        ("t.parquet", {"compression": "zstd"}, "row group 1, column 'text': .*2.5 MiB"),
        ("t.feather", {"compression": "uncompressed"}, "row 2, column 'text': .*2.5 MiB"),
        ("t.feather", {"compression": "zstd"}, "row 2, column 'text': .*2.5 MiB"),
    ],
)
def test_long_cells_are_named(small_limit, tmp_path, name, options, message):
    texts = [LONG] if name == "t.parquet" else ["a", LONG]
    with pytest.raises(MetaseqError, match=message):
        rows(write(tmp_path / name, {"text": texts}, **options))


@pytest.mark.parametrize(
    ("name", "columns", "options", "message"),
    [
        (
            "t.feather",
            lambda: {"text": ["a" * 1000] * 5000},
            {"compression": "zstd"},
            "records of 4.8",
        ),
        (
            "t.parquet",
            lambda: {"text": ["a" * 5000] * 1000},
            {"use_dictionary": False, "compression": "zstd", "data_page_size": 1 << 30},
            "column 'text': 4.8 MiB",
        ),
        ("t.parquet", lambda: {"text": [["a" * 90_000] * 99]}, {}, "row 1, column 'text': a cell"),
    ],
)
def test_what_unpacks_to_very_much_is_refused_before(
    small_limit, tmp_path, name, columns, options, message
):
    pytest.importorskip("pyarrow")
    with pytest.raises(MetaseqError, match=message):
        rows(write(tmp_path / name, columns(), **options))


@pytest.mark.parametrize("name", ["t.parquet", "t.feather"])
def test_repeated_cells_come_a_few_at_a_time(small_limit, tmp_path, name):
    text = LONG[: LIMIT // 3]
    file = write(tmp_path / name, {"text": repeated(text, 100), "n": list(range(100))})
    batches = list(_arrow_batches(file))
    assert max(map(len, batches)) <= 3
    assert [row["n"] for batch in batches for row in batch.to_pylist()] == list(range(100))
    assert batches[-1].to_pylist()[-1]["text"] == text


@given(st.lists(st.sampled_from(["a", '"', '""', ",", "\n", ' "', ',"', '",', "é"]), max_size=14))
def test_quoted_rows_are_those_of_csv(tmp_path_factory, parts):
    text = "a" + "".join(parts)
    file = TextFile(tmp_path_factory.mktemp("csv") / "t.csv")
    file.path.write_text(text)
    lines = (f"{line}\n" for _, line, _ in file.lines())
    try:
        expected = [row or [""] for row in csv.reader(lines, strict=True, skipinitialspace=True)]
    except csv.Error:
        with pytest.raises(MetaseqError, match="t.csv:"):
            list(table_rows(file, _TableFormat(",", True)))
        return
    assert [fields for _, fields, _ in table_rows(file, _TableFormat(",", True))] == expected


def test_very_many_columns(tmp_path):
    names = ["text", "label", *(f"c{i}" for i in range(100_000))]
    (tmp_path / "t.csv").write_text(f"{','.join(names)}\na,b{',' * 100_000}\n")
    (row,) = RowReader(TextFile(tmp_path / "t.csv"), TableColumns())
    assert (row.texts, row.label) == (("a",), "b")


def test_a_pattern_of_words_that_never_ends(monkeypatch):
    monkeypatch.setattr(plain, "PATTERN_SECONDS", 0.05)
    symbols = plain.CharTokenizer.learn(
        ["a"], ["[PAD]", "[MASK]", "[SEP]", "[UNK]"], 9, 1
    ).vocabulary
    tokenizer = plain.WordTokenizer(Vocabulary(symbols.symbols), "(a|aa)+$")
    assert list(tokenizer.units("aaa")) == ["aaa"]
    with pytest.raises(MetaseqError, match="pattern of words"):
        list(tokenizer.units("a" * 60 + "c"))
