"""Labelled sets, benchmarks, questions, tags and trees from Parquet and Arrow are those from JSON
lines.

The files are as the library `datasets` writes them: classes are numbers, whose names the schema
has.
"""

import json

import pytest
from outcomes import expect

from metaseq_lm.cli import main
from metaseq_lm.data.storage.manifest import MANIFEST_FILE, Manifest

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

WORDS = ["the", "dog", "barks", "loud"]
SETS = {  # options, features, rows
    "text": (
        ["--labelled", "s"],
        {"label": {"names": ["neg", "pos"], "_type": "ClassLabel"}},
        [{"text": f"the dog {i} é", "label": i % 2} for i in range(6)],
    ),
    "pair": (
        ["--labelled", "s", "--text-columns", "a,b", "--label-column", "gold"],
        {"gold": {"names": ["no", "yes", "?"], "_type": "ClassLabel"}},
        [{"a": "x", "b": f"y {i}", "gold": i % 4 - 1} for i in range(400)],
    ),
    "values": (
        ["--labelled", "s", "--regression"],
        {},
        [{"text": f"the dog {i}", "label": [0.5, 1.0, float("nan")][i % 3]} for i in range(6)],
    ),
    "glue": (
        ["--benchmark", "glue/RTE", "--labelled", "s"],
        {"label": {"names": ["entailment", "not_entailment"], "_type": "ClassLabel"}},
        [{"sentence1": "a", "sentence2": f"b {i}", "label": i % 2, "idx": i} for i in range(6)],
    ),
    "squad": (
        ["--benchmark", "squad/v2.0", "--labelled", "s"],
        {"answers": {"feature": {"text": {}, "answer_start": {}}, "_type": "Sequence"}},
        [
            {
                "id": str(i),
                "context": "the dog barks",
                "question": "who?",
                "answers": {"text": ["dog"] * (i % 2), "answer_start": [4] * (i % 2)},
            }
            for i in range(4)
        ],
    ),
    "tags": (
        ["--tagged", "s", "--tag-column", "ner"],
        {
            "ner": {
                "feature": {"names": ["O", "B-X", "I-X"], "_type": "ClassLabel"},
                "_type": "List",
            }
        },
        [{"tokens": WORDS, "pos": [1, 2, 3, 4], "ner": [0, 1, 2, 0]} for _ in range(3)],
    ),
    "trees": (
        ["--treebank", "s"],
        {},
        [
            {
                "tokens": ["don't", *WORDS],
                "upos": ["_", *"abcd"],
                "head": ["None", "2", "3", "0", "3"],
                "deprel": ["_", "det", "nsubj", "root", "obl:tmod"],
            }
            for _ in range(3)
        ],
    ),
}


def named(row, features):
    """Return a row with names for numbers of classes, null for NaN."""
    for column, feature in features.items():
        feature = feature.get("feature", feature)
        if feature.get("_type") != "ClassLabel":
            continue
        names = dict(enumerate(feature["names"]))
        value = row[column]
        value = [names[v] for v in value] if isinstance(value, list) else names.get(value, value)
        row = {**row, column: value}
    return {name: None if value != value else value for name, value in row.items()}


def write_arrow(path, rows, features):
    path.parent.mkdir(parents=True, exist_ok=True)
    note = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    columns = pyarrow.Table.from_pylist(rows).replace_schema_metadata(note)
    if path.suffix == ".parquet":
        parquet.write_table(columns, path, row_group_size=100)
        return
    with pyarrow.ipc.new_stream(str(path), columns.schema) as stream:
        stream.write_table(columns)
    (path.parent / "state.json").write_text("{}")
    (path.parent / "dataset_info.json").write_text("{}")


@pytest.fixture
def data(tmp_path, capsys):
    """Return a function that preprocesses into a folder with a tokenizer or vocabulary."""
    (tmp_path / "c.txt").write_text("the dog barks loud don't a b x y é\n" * 30)

    def call(dest, *options):
        folder = tmp_path / dest
        if not folder.exists():
            kind = ["--words"] if "--tagged" in options or "--treebank" in options else []
            text = ["--trainpref", str(tmp_path / "c.txt"), "--destdir", str(folder)]
            assert main(["preprocess", *text, *kind, "--vocab-size", "300"]) == 0
        code = main(["preprocess", "--destdir", str(folder), *map(str, options)])
        return code, "".join(capsys.readouterr()), folder / "s"

    return call


def content(folder):
    """Return the files of a set, and its manifest without what names the source."""
    files = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != MANIFEST_FILE}
    manifest = Manifest.load(folder)
    counts = {split: {**c, "sources": None} for split, c in manifest.splits.items()}
    return files, counts, manifest.details


@pytest.mark.parametrize("kind", SETS)
def test_sets_are_those_of_json_lines(data, tmp_path, kind):
    options, features, rows = SETS[kind]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(named(row, features)) + "\n" for row in rows))
    code, output, folder = data("lines", *options, "--trainpref", lines)
    assert code == 0, output
    expected = content(folder)
    write_arrow(tmp_path / "rows.parquet", rows, features)
    write_arrow(tmp_path / "saved" / "data-00000-of-00001.arrow", rows, features)
    for i, source in enumerate(["rows.parquet", "saved", "saved/data-00000-of-00001.arrow"]):
        code, output, folder = data(f"arrow{i}", *options, "--trainpref", tmp_path / source)
        assert code == 0, output
        assert content(folder) == expected
    assert "data-00000" not in output.replace(str(tmp_path / source), "")


def test_a_saved_benchmark_is_a_source(data, tmp_path):
    options, features, rows = SETS["glue"]
    for split in ("train", "validation", "test"):
        write_arrow(tmp_path / "saved" / split / "data-00000-of-00001.arrow", rows, features)
        write_arrow(tmp_path / "hub" / f"{split}-00000-of-00001.parquet", rows, features)
    contents = []
    for source in ("saved", "hub"):
        code, output, folder = data(f"data-{source}", *options, "--source", tmp_path / source)
        assert code == 0, output
        contents.append(content(folder))
    assert contents[0] == contents[1] and {*contents[0][1]} == {"train", "valid", "test"}


def test_complaints_name_file_and_row(data, tmp_path):
    path = tmp_path / "rows.parquet"
    write_arrow(path, [{"text": 3, "label": 0}], {})
    code, output, folder = data("d", "--labelled", "s", "--trainpref", path)
    assert code == 1 and f"{path}:1: field 'text'" in output and "a whole number" in output
    write_arrow(path, [{"sentence": "a", "label": 1}], {})
    code, output, folder = data("d", "--labelled", "s", "--trainpref", path)
    assert code == 1 and "no column 'text'" in output and "sentence" in output
    path.write_bytes(path.read_bytes()[:-9])
    code, output, folder = data("d", "--labelled", "s", "--trainpref", path)
    expect((code, output), 1, path.name, "row 0")
    write_arrow(tmp_path / "dict" / "train" / "data-00000-of-00001.arrow", [{"text": "a"}], {})
    (tmp_path / "dict" / "dataset_dict.json").write_text("{}")
    code, output, folder = data("d", "--labelled", "s", "--trainpref", tmp_path / "dict")
    expect((code, output), 1, "dict", "give one")
    write_arrow(path, [{"tokens": ["a", "b"], "head": ["0", "1"], "deprel": ["root", "x"]}] * 2, {})
    code, output, folder = data("w", "--treebank", "s", "--trainpref", path)
    assert code == 0
    write_arrow(path, [{"tokens": ["a", "b"], "head": ["2", "1"], "deprel": ["root", "x"]}] * 2, {})
    code, output, folder = data("w", "--treebank", "s", "--trainpref", path, "--overwrite")
    assert code == 1 and f"{path}:1: no word" in output and "has head 0" in output


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_text_of_a_corpus_in_a_field_or_as_bytes(tmp_path, capsys, suffix):
    """A field of a column is named as one inside a JSON object; text may be marked as binary."""
    lines = ["the dog barks", "é loud", ""] * 20
    fields = {"id": pyarrow.array(range(60)), "text": pyarrow.array(lines)}
    doc = pyarrow.StructArray.from_arrays(list(fields.values()), list(fields))
    columns = {
        "doc": doc,
        "doc.raw": pyarrow.array([line.encode() for line in lines]),
        "number": pyarrow.array(range(60)),
    }
    rows, file = pyarrow.table(columns), tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        parquet.write_table(rows, file)
    else:
        with pyarrow.ipc.new_stream(str(file), rows.schema) as stream:
            stream.write_table(rows)
    (tmp_path / "rows.txt").write_text("".join(line + "\n" for line in lines))

    def preprocess(source, *options):
        folder = tmp_path / "-".join(["data", source.name, *options])
        words = ["--trainpref", str(source), "--validpref", str(source), "--tokenizer", "char"]
        code = main(["preprocess", *words, "--destdir", str(folder), *options])
        files = [folder / name for name in ("train.bin", "train.idx", "dict.txt")]
        return code, [path.read_bytes() for path in files if path.exists()]

    expected = preprocess(tmp_path / "rows.txt")
    assert expected[0] == 0
    for column in ("doc.text", "doc.raw"):
        assert preprocess(file, "--text-column", column) == expected, column
    for column, said in {
        "doc": "doc.id, doc.text",
        "doc.txt": "'doc.text'",
        "doc.text.x": "'doc.text.x'",
        "doc.id": "'doc.id'",
        "number.x": "'number.x'",
    }.items():
        capsys.readouterr()
        assert preprocess(file, "--text-column", column) == (1, [])
        assert said in capsys.readouterr().err, column


def write_columns(path, **columns):
    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_binary_columns_are_text(data, tmp_path):
    """Texts, labels, words and tags may be marked as binary, views or dictionaries."""
    words = [["the", "dog"], ["barks"]] * 3
    values = {"text": ["the dog é", "barks"] * 3, "label": ["pos", "neg"] * 3}
    values |= {"tokens": words, "tags": [["O", "B-X"], ["O"]] * 3}

    def binary(value):
        return [*map(binary, value)] if isinstance(value, list) else value.encode()

    plain = write_columns(tmp_path / "plain.parquet", **values)
    encoded = {name: binary(column) for name, column in values.items()}
    encoded["label"] = pyarrow.array(encoded["label"]).dictionary_encode()
    encoded["image"] = [b"\x89PNG\xff\xfe"] * 6
    other = write_columns(tmp_path / "binary.parquet", **encoded)
    for number, kind in enumerate((["--labelled", "s"], ["--tagged", "s", "--tag-column", "tags"])):
        contents = []
        for path in (plain, other):
            code, output, folder = data(f"{number}{path.stem}", *kind, "--trainpref", path)
            assert code == 0, output
            contents.append(content(folder))
        assert contents[0] == contents[1]


def test_invalid_text_of_binary_columns(data, tmp_path):
    """Invalid UTF-8 has the rules that it has in other files; of a column with nothing else the
    type is named.
    """
    texts = [b"a", b"b\xff", *[b"a"] * 300]
    path = write_columns(tmp_path / "one.parquet", text=texts, label=["x", "y"] * 151)
    command = ["--labelled", "s", "--trainpref", path, "--overwrite"]
    code, output, folder = data("d", *command)
    assert code == 0 and "302 rows" in output and "1 bad_utf8" in output
    code, output, folder = data("d", *command, "--on-bad-utf8", "skip")
    assert code == 0 and "301 rows" in output
    code, output, folder = data("d", *command, "--on-bad-utf8", "fail")
    assert code == 1 and "one.parquet:2: invalid UTF-8" in output
    path = write_columns(tmp_path / "one.parquet", text=texts[:2] * 9, label=["x", "y"] * 9)
    code, output, folder = data("d", *command)
    expect((code, output), 1, "9 of 18 lines", "UTF-8")
    latin = ["caf\xe9".encode("latin-1")] * 2
    path = write_columns(tmp_path / "one.parquet", text=latin, label=["x", "y"])
    code, output, folder = data("d", *command)
    expect((code, output), 1, "'text'", "binary")
    code, output, folder = data("d", *command, "--encoding", "latin-1")
    expect((code, output.replace("9 tokens", "8 tokens")), 0, "2 rows", "8 tokens")


def unreadable():
    import datetime

    day = datetime.datetime(2026, 1, 1)
    pairs = pyarrow.map_(pyarrow.string(), pyarrow.string())
    return [
        (pyarrow.array([day]), "timestamp"),
        (pyarrow.array([day.date()]), "date32"),
        (pyarrow.array([[("a", "b")]], pairs), "map<string, string"),
        (pyarrow.array([["a"]]), "a list"),
        (pyarrow.array([{"a": "b"}]), "an object"),
        (pyarrow.array([3]), "a whole number"),
        (pyarrow.array([b"\x89PNG\0"]), "binary"),
    ]


@pytest.mark.parametrize("number", range(7))
def test_types_that_are_no_text_are_named(data, tmp_path, number):
    column, name = unreadable()[number]
    path = write_columns(tmp_path / "x.parquet", text=column, label=["x"], good=["a"])
    command = ["--labelled", "s", "--trainpref", path, "--overwrite"]
    code, output, folder = data("d", *command)
    expect((code, output), 1, "x.parquet:1:", "'text'", name)
    assert data("d", *command, "--text-column", "good")[0] == 0
    if name in ("timestamp", "date32", "binary"):
        code, output, folder = data(
            "d", *command, "--text-column", "good", "--label-column", "text"
        )
        expect((code, output), 1, name, "single text")


def test_columns_of_one_name(data, tmp_path):
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    with pyarrow.ipc.new_stream(str(tmp_path / "x.arrow"), twice.schema) as stream:
        stream.write_table(twice)
    code, output, folder = data("d", "--labelled", "s", "--trainpref", tmp_path / "x.arrow")
    expect((code, output), 1, "x.arrow", "twice: text")
