"""Labelled sets from TSV and JSONL: what arrives, and what each wrong row is called."""

import csv
import gzip
import io
import json
import re

import numpy as np
import pytest
from outcomes import expect

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.labelled.files import RowReader, TableColumns
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.records.text_files import TextFile
from metaseq_lm.data.storage.manifest import Manifest, verify
from metaseq_lm.data.tokenizers.loading import load_tokenizer

TRAIN = 'text\tlabel\n"a b"\tyes\nc\tno\n\nd e f\tyes\n'


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder that holds a character tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_text('the quick brown "fox" jumps over lazy dogs 0123456789\n')
    dest = folder / "data"
    arguments = ["preprocess", "--trainpref", f"{folder}/train.txt", "--destdir", f"{dest}"]
    assert main([*arguments, "--tokenizer", "char", "--task-tokens", "2"]) == 0
    return dest


@pytest.fixture
def run(corpus, tmp_path, capsys):
    """Write files and preprocess them as the set NAME; return (exit code, output, folder)."""

    def call(files, *options, splits=("train", "valid", "test"), name=None):
        name = name or tmp_path.name.replace("_", "-")
        arguments = ["preprocess", "--labelled", name, "--destdir", str(corpus), "--overwrite"]
        arguments += options
        for file, content in files.items():
            path = tmp_path / file
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
            split = file.split(".")[0]
            if split in splits:
                arguments += [f"--{split}pref", str(path)]
            else:
                arguments += ["--split", f"{split}={path}"]
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out + captured.err, corpus / name

    return call


def texts(data, tokenizer):
    return [[tokenizer.decode(column[i]) for column in data.inputs] for i in range(len(data))]


def test_tsv(run, corpus):
    files = {"train.tsv": TRAIN, "valid.tsv": "label\ttext\nno\tq\n", "vis.tsv": TRAIN}
    code, output, folder = run(files)
    assert code == 0, output
    assert all(fact in output for fact in ("3 rows", "11 tokens", "1 blank", "no 1", "yes 2"))
    data = LabelledSet(folder, "train")
    assert data.label_names == ["no", "yes"] and not data.regression
    assert data.labels.tolist() == [1, 0, 1] and data.labels.dtype == np.int64
    assert texts(data, load_tokenizer(corpus)) == [['"a b"'], ["c"], ["d e f"]]
    assert len(data) == 3
    assert LabelledSet(folder, "valid").labels.tolist() == [0]
    assert len(LabelledSet(folder, "vis")) == 3
    assert verify(folder) == []
    assert sorted(p.name for p in folder.iterdir())[:3] == [
        "manifest.json",
        "train.input0.bin",
        "train.input0.idx",
    ]


def test_jsonl_pairs_with_given_labels(run, corpus):
    rows = [{"text_a": "the", "text_b": "fox\n0", "label": i % 2 == 0} for i in range(3)]
    content = "\n".join(json.dumps(row) for row in rows)
    code, output, folder = run({"train.jsonl": content}, "--labels", "true,false")
    assert code == 0, output
    data = LabelledSet(folder, "train")
    assert data.labels.tolist() == [0, 1, 0]
    assert texts(data, load_tokenizer(corpus))[0] == ["the", "fox[UNK]0"]
    assert [len(column) for column in data.inputs] == [3, 3]


def test_columns_without_header_and_chosen_names(run, corpus):
    options = ["--columns", "id,gold,s1,s2", "--text-columns", "s2,s1", "--label-column", "gold"]
    code, output, folder = run({"train.tsv": "7\t10\tfox\tthe\n8\t9\tbrown\tquick\n"}, *options)
    assert code == 0, output
    data = LabelledSet(folder, "train")
    assert data.label_names == ["9", "10"]
    assert data.labels.tolist() == [1, 0]
    assert texts(data, load_tokenizer(corpus)) == [["the", "fox"], ["quick", "brown"]]


def test_regression(run):
    code, output, folder = run(
        {
            "train.tsv": "text\tlabel\nfox\t3.800\nthe\t-1e-3\n",
            "valid.jsonl": '{"text":"a","label":2}',
        },
        "--regression",
    )
    assert code == 0, output
    data = LabelledSet(folder, "train")
    assert data.regression and data.label_names == []
    assert data.labels.tolist() == [3.8, -1e-3] and data.labels.dtype == np.float64
    assert LabelledSet(folder, "valid").labels.tolist() == [2.0]


def test_texts_longer_than_a_piece(run, corpus):
    long = "fox " * 50_000 + "the"
    code, output, folder = run({"train.tsv": f"text\tlabel\n{long}\tx\nfox\ty\n"})
    assert code == 0, output
    data = LabelledSet(folder, "train")
    assert data.inputs[0].sizes.tolist() == [len(long), 3]


def test_bad_bytes(run):
    files = {"train.tsv": b"text\tlabel\nfo\xffx\tx\nfox\ty\n"}
    assert "1 bad_utf8" in run(files)[1]
    code, output, folder = run(files, "--on-bad-utf8", "skip")
    assert re.search("1 rows, 3 .*1 bad_utf8.*1.skipped", output)
    expect(run(files, "--on-bad-utf8", "fail"), 1, "train.tsv:2: invalid UTF-8")


def labels(*counts):
    """Return a table with a row for each time that a label is to occur."""
    rows = [f"{i}\t{label}\n" for label, count in counts for i in range(count)]
    return "text\tlabel\n" + "".join(rows)


J = '{"text": "a", "label": "x"}\n'


@pytest.mark.parametrize(
    "files, options, code, message",
    [
        ({"train.tsv": "text\tlabel\na\n"}, (), 1, "train.tsv:2: 1 fields, expected 2"),
        ({"train.tsv": "text\tlabel\na\tx\tb\n"}, (), 1, "train.tsv:2: 3 fields, expected 2"),
        ({"train.tsv": "txt\tlabel\na\tx\n"}, (), 1, "mean 'txt'"),
        ({"train.tsv": "text\tlabl\na\tx\n"}, (), 1, "no column 'label'. Did you mean 'labl'?"),
        ({"train.tsv": "text\ttext\na\tx\n"}, (), 1, "train.tsv:1: a column name occurs twice"),
        ({"train.tsv": "text\tlabel\n\n"}, (), 1, "train.tsv: no rows (1 blank lines"),
        ({"train.tsv": ""}, (), 1, "train.tsv: is empty"),
        ({"train.tsv": "text\tlabel\na\t \n"}, (), 1, "1 rows without label"),
        ({"train.jsonl": J + '{"text": "a", "label": NaN}\n'}, (), 1, "train.jsonl:2: label nan"),
        ({"train.tsv": TRAIN, "valid.tsv": TRAIN + "a\tyse\n"}, (), 1, "valid.tsv:6: label 'yse'"),
        ({"train.tsv": TRAIN}, ("--labels", "yes"), 1, "train.tsv:3: label 'no' is not one of"),
        ({"train.tsv": TRAIN}, ("--regression",), 1, "train.tsv:2: label 'yes' is not a number"),
        ({"train.tsv": labels(("3,5", 1))}, ("--regression",), 1, "'3,5' is not a number"),
        ({"train.tsv": labels(("1_0", 1))}, ("--regression",), 1, "'1_0' is not a number"),
        ({"train.tsv": TRAIN}, ("--labels", "a,a"), 2, "labels must be different"),
        ({"train.tsv": TRAIN}, ("--labels", "a", "--regression"), 2, "exclude each other"),
        ({"train.tsv": TRAIN}, ("--vocab-size", "9"), 2, "--vocab-size does not apply to labelled"),
        ({"train.jsonl": J}, ("--columns", "text,label"), 2, "CSV and TSV"),
        ({"train.tsv": TRAIN}, ("--text-columns", "a,b,c"), 2, "--text-columns takes one column"),
        ({"train.tsv": TRAIN}, ("--tokenizer-from", "/nowhere"), 2, "/nowhere: no tokenizer here"),
        ({"valid.tsv": TRAIN}, (), 2, "without --trainpref the classes"),
        ({"train.csv": "text,label\n"}, (), 1, "train.csv: no rows"),
        ({"train.csv": 'text,label\na,x\n"b""c,y\nd,z\n'}, (), 1, "train.csv:3: a quotation"),
        ({"train.csv": 'text,label\na,x\n"b"c,y\n'}, (), 1, "train.csv:3: ',' expected after '\"'"),
        ({"train.csv": "text,label\na,x,y\n"}, (), 1, "(text, label) with ',' between them"),
        ({"train.tsv": "text\tlabel\ra\tx\rb\ty\r"}, (), 1, "end in CR"),
        ({"train.csv": "text,label\ra,x\rb,y"}, (), 1, "end in CR"),
        ({"train.jsonl": J.replace("\n", "\r") * 3}, (), 1, "end in CR"),
        (
            {"train.json": '{"text": {"0": "a"}, "label": {"0": "x"}}'},
            (),
            1,
            "train.json: is JSON,",
        ),
        ({"train.tsv": "\t".join(f"c{i}" for i in range(99))}, (), 1, "c8, c9 and 89 more. Choose"),
        ({"train.tsv": f"{'word ' * 99}\tx\n"}, (), 1, "word ..., x. Choose"),
        (
            {"train.csv": "text,label\na,1\nb,0", "valid.csv": "text,label\na,true"},
            (),
            1,
            "Is it '1'?",
        ),
        ({"train.jsonl": J + "{\n"}, (), 1, "train.jsonl:2: not valid JSON"),
        ({"train.jsonl": J + "[1]\n"}, (), 1, "train.jsonl:2: not a JSON object"),
        ({"train.jsonl": J + "[" * 100_000}, (), 1, "train.jsonl:2: not valid JSON"),
        ({"train.jsonl": J + '{"label": "x"}'}, (), 1, "train.jsonl:2: no field 'text'"),
        ({"train.jsonl": J + '{"text": "x"}'}, (), 1, "train.jsonl:2: no field 'label'"),
        ({"train.jsonl": '{"text": 3, "label": "x"}'}, (), 1, ":1: field 'text' is not a text"),
        ({"train.jsonl": '{"text": "", "label": {"a": 1}}'}, (), 1, ":1: label {'a': 1}"),
        ({"train.jsonl": '{"text": "", "label": NaN}'}, ("--regression",), 1, "is not finite"),
        (
            {"train.jsonl": '{"text_a": "a", "text_b": "b", "label": "x"}', "test.jsonl": J},
            (),
            1,
            "number of text",
        ),
        (
            {"train.jsonl": J + '{"text_a": "a", "text_b": "b", "label": "x"}\n'},
            (),
            1,
            "no field 'text'",
        ),
    ],
)
def test_wrong_input(run, corpus, files, options, code, message):
    found, output, folder = run(files, *options, name="wrong")
    assert message in output
    assert found == code
    assert not folder.exists()
    assert "Traceback" not in output


@pytest.mark.parametrize("order", [("one", "two"), ("two", "one")])
def test_files_of_a_split_with_other_columns(run, corpus, tmp_path, order):
    """Their second text is neither dropped nor missed."""
    (tmp_path / "one.tsv").write_text("text\tlabel\na\tx\n")
    (tmp_path / "two.tsv").write_text("text_a\ttext_b\tlabel\na\tb\tx\n")
    files = [str(tmp_path / f"{name}.tsv") for name in order]
    command = ["preprocess", "--labelled", "mixed", "--trainpref", *files, "--destdir", str(corpus)]
    assert main(command) == 1
    assert not (corpus / "mixed").exists()


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "", ".", "..", "a\n", "-x", "x" * 300])
def test_names_stay_inside(run, corpus, name):
    before = sorted(corpus.parent.rglob("*"))
    if name:
        code, output, _ = run({"train.tsv": TRAIN}, name=name)
        assert code in (1, 2), output
        assert sorted(p for p in corpus.parent.rglob("*")) == before


def test_half_characters_in_json(run, corpus):
    code, output, folder = run({"train.jsonl": '{"text": "fox\\ud800", "label": "x"}'})
    assert code == 0, output


def test_files_that_do_not_belong_together(run):
    _, _, folder = run({"train.tsv": TRAIN, "valid.tsv": "text\tlabel\nfox\tyes\n"})
    with pytest.raises(MetaseqError, match="'test'.*train, valid"):
        LabelledSet(folder, "test")
    for suffix in ("bin", "idx"):
        (folder / f"valid.label.{suffix}").rename(folder / f"train.label.{suffix}")
    with pytest.raises(MetaseqError, match="1 rows.*has 3"):
        LabelledSet(folder, "train")
    manifest = Manifest.load(folder)
    manifest.details["labels"] = ["one"]
    for suffix in ("bin", "idx"):
        (folder / f"train.label.{suffix}").rename(folder / f"valid.label.{suffix}")
    manifest.save(folder)
    with pytest.raises(MetaseqError, match=r"label outside 0\.\.0"):
        LabelledSet(folder, "valid")


def test_a_corpus_is_not_a_labelled_set(corpus):
    with pytest.raises(MetaseqError, match="a corpus, not"):
        LabelledSet(corpus, "train")


ROWS = [("fox, the", "yes"), ('he said "no"', "no"), ("two\nlines", "yes"), ("tab\there", "no")]


def written(delimiter="\t", quoting=csv.QUOTE_MINIMAL, end="\r\n", header=("text", "label")):
    """Return ROWS as Python's csv module writes them."""
    stream = io.StringIO()
    csv.writer(stream, delimiter=delimiter, quoting=quoting, lineterminator=end).writerows(
        [header, *ROWS] if header else ROWS
    )
    return stream.getvalue()


@pytest.mark.parametrize(
    "name, content, options",
    [
        ("train.csv", written(","), ()),
        ("train.csv", "\ufeff" + written(",", csv.QUOTE_ALL, "\n"), ()),
        ("train.csv", written(",").replace("text,label", "text, label"), ()),
        ("train.csv", written(";"), ()),
        ("train.csv", "sep=;\r\n" + written(";"), ()),
        ("train.csv", written("\t"), ()),
        ("train.csv", written(",", header=None), ("--columns", "text,label")),
        (
            "train.csv",
            written(",", header=("Review", "Gold")),
            ("--text-column", "Review", "--label-column", "Gold"),
        ),
        ("train.txt", written(","), ()),
        ("train.tsv", written(), ()),
        ("train.tsv", written(quoting=csv.QUOTE_ALL, end="\n"), ()),
        ("train.csv.gz", gzip.compress(written(",").encode(), mtime=0), ()),
        ("train.txt", "\n".join(json.dumps({"text": t, "label": x}) for t, x in ROWS), ()),
    ],
)
def test_quotes_and_delimiters(run, corpus, name, content, options):
    """One table in every form in which programs write it."""
    code, output, folder = run({name: content}, *options)
    assert code == 0, output
    data, tokenizer = LabelledSet(folder, "train"), load_tokenizer(corpus)
    expected = list(map(tokenizer.decode, tokenizer.encode_batch([text for text, _ in ROWS])))
    assert [text for (text,) in texts(data, tokenizer)] == expected
    assert data.label_names == ["no", "yes"] and data.labels.tolist() == [1, 0, 1, 0]
    assert ("as JSON" in output) == (content[:1] == "{")


@pytest.mark.parametrize(
    "rows, options, expected, remark",
    [
        # pandas would have quoted d "e" too
        ('"a ""b"" c"\tx\nd "e"\ty\n', (), '"a ""b"" c"', ""),
        ('"a b"\tx\n', (), '"a b"', "read as text"),
        ('"a b"\tx\nb\ty\nc\ty\n', (), '"a b"', ""),
        ('"a ""b"" c"\tx\n', ("--quoting", "none"), '"a ""b"" c"', ""),
        ('"a ""b"" c"\tx\n', (), 'a "b" c', "read without the quotes"),
        ('"a b"\tx\n', ("--quoting", "csv"), "a b", ""),
        ('"a\tx\n"b"" ""c"\ty\n', (), '"a', ""),
    ],
)
def test_quotation_marks_in_tsv_are_text_unless_all_are_syntax(
    run, corpus, rows, options, expected, remark
):
    code, output, folder = run({"train.tsv": "text\tlabel\n" + rows}, *options)
    assert code == 0, output
    assert texts(LabelledSet(folder, "train"), load_tokenizer(corpus))[0] == [expected]
    assert remark in output and ("warning" in output) == bool(remark)


DIALOGUE = [f"line {i}\tneg" for i in range(9)]


@pytest.mark.parametrize(
    "name, lines, expected, remark",
    [
        # Quotes that open in one row and close in another, in rows of one width.
        (
            "a.tsv",
            ['"I never.\tpos', 'I did."\tneg', *DIALOGUE],
            ['"I never.', 'I did."'],
            "as text",
        ),
        ("a.tsv", ['"A "" b.\tpos', 'I did."\tneg', *DIALOGUE], ['"A "" b.', 'I did."'], "as text"),
        ("a.tsv", ['"I never.\tpos', *DIALOGUE], ['"I never.', "line 0"], ""),
        ("a.tsv", ['5" pipe\tpos', '6"" pipe\tneg'], ['5" pipe', '6"" pipe'], ""),
        ("a.tsv", ["'I never.\tpos", "I did.'\tneg"], ["'I never.", "I did.'"], ""),
        # Without quotes the rows have no common width.
        ("a.tsv", ['"two', 'lines"\tpos', "b\tneg"], ["two\nlines", "b"], "without the quotes"),
        ("a.tsv", ['"a ""b""', 'c"\tpos', "b\tneg"], ['a "b"\nc', "b"], "without the quotes"),
        ("a.csv", ['"a, ""b"",', 'c",pos', "b,neg"], ['a, "b",\nc', "b"], ""),
        ("a.csv", [" a,pos", '"b ""c"" ",neg', ' "d", "neg"'], [" a", 'b "c" ', "d"], ""),
        # Of CSV quotes are syntax, but what they join may be named.
        (
            "a.csv",
            ['"I never.,pos', 'I did.",neg', "b,neg"],
            ["I never.,pos\nI did.", "b"],
            "in line 2",
        ),
        (
            "a.tsv",
            ['"I never.\tpos', 'I did."\tneg', '"b', 'c"\tpos'],
            ["I never.\tpos\nI did.", "b\nc"],
            "in line 2 quotation marks join lines",
        ),
    ],
)
def test_quoting_is_decided_by_all_of_a_file(tmp_path, name, lines, expected, remark):
    path = tmp_path / name
    delimiter = "\t" if path.suffix == ".tsv" else ","
    path.write_text("\n".join([f"text{delimiter}label", *lines]))
    reader = RowReader(TextFile(path), TableColumns())
    assert [row.texts[0] for row in reader][: len(expected)] == expected
    assert any(remark in text for text in reader.reading.remarks) == bool(remark)


def test_rows_without_text_are_left_out(run, corpus, capsys):
    """As rows without label are: null in JSON, a cell that pandas reads as missing in a table."""
    rows = [{"text": text, "label": "x"} for text in ("a", None, "", "None")]
    code, output, folder = run({"train.jsonl": "\n".join(map(json.dumps, rows))})
    assert code == 0 and len(LabelledSet(folder, "train")) == 3
    assert "row 2" in output and "'text' is null" in output
    code, output, folder = run({"train.csv": "text,label\na,x\n,x\nNaN,x\nNone,x\nnan b,y\n"})
    assert code == 0 and re.search("2 rows, 6 .*3.no_text", output)
    assert texts(LabelledSet(folder, "train"), load_tokenizer(corpus)) == [["a"], ["nan b"]]
    assert main(["doctor", str(folder)]) == 0
    assert "train: 3 rows" in capsys.readouterr().out
    pair = [
        {"text_a": "a", "text_b": None, "label": "x"},
        {"text_a": "a", "text_b": "b", "label": "y"},
    ]
    code, output, folder = run({"train.json": json.dumps(pair)})
    assert code == 0 and len(LabelledSet(folder, "train")) == 1
    expect(run({"train.csv": "text,label\n,x\n"}, name="no-text"), 1, "1 without text")


def test_columns_joined_to_one_text(run, corpus):
    rows = [("the fox", "lazy", "a"), ("", "dog", "b"), (None, "jumps", "a"), (None, None, "b")]
    content = "".join(json.dumps(dict(zip(("Title", "body", "Label"), row))) + "\n" for row in rows)
    options = ["--text-columns", "title,body", "--text-separator", " over "]
    code, output, folder = run({"train.jsonl": content}, *options)
    assert code == 0 and "1 no_text" in output
    data = LabelledSet(folder, "train")
    expected = [["the fox over lazy"], [" over dog"], ["jumps"]]
    assert texts(data, load_tokenizer(corpus)) == expected and data.labels.tolist() == [0, 1, 0]
    code, output, _ = run({"train.jsonl": content}, "--text-separator", " ")
    assert code == 2 and "--text-separator" in output and "--text-columns" in output


def test_near_names_are_offered(run):
    expect(run({"train.csv": "id,review,stars\n1,a,5\n"}, name="near"), 1, "'text'", "'review'")
    expect(run({"train.csv": "text,TEXT,stars\na,b,5\n"}, name="near"), 1, "'label'", "'stars'")
    expect(run({"train.csv": "Text,TEXT,label\na,b,5\n"}, name="near"), 1, "no column 'text'")


def test_numbers_of_a_column_of_floats_are_those_of_another_split(run):
    whole, floats = labels(("1", 2), ("0", 2)), labels(("1.0", 2), ("0.0", 2), ("-1.0", 1))
    for train, valid, names in (
        (whole, floats, ["0", "1"]),
        (labels(("1.0", 2), ("0.0", 2)), whole, ["0.0", "1.0"]),
    ):
        code, output, folder = run({"train.tsv": train, "valid.tsv": valid})
        assert code == 0, output
        for split in ("train", "valid"):
            data = LabelledSet(folder, split)
            assert data.label_names == names and data.labels.tolist() == [1, 1, 0, 0]
    code, output, folder = run({"train.tsv": floats}, "--labels", "bad,good")
    assert code == 0 and LabelledSet(folder, "train").labels.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
    "row, message",
    [
        ('{"text": "a", "label": "x", "text": "b"}', "the key 'text'"),
        ('{"text": "a", "label": "x", "label": "x"}', ""),
    ],
)
def test_repeated_keys_of_json(run, row, message):
    code, output, _ = run({"train.jsonl": J + row}, name="repeated")
    assert (code, message in output) == (bool(message), True)


@pytest.mark.parametrize(
    "counts, names, message",
    [
        ([("0.5", 1), ("2.25", 1), ("3", 1)], ["0.5", "2.25", "3"], "numbers from 0.5 to 3;"),
        ([("0.5", 1), ("2.25", 1), ("nan", 1)], None, "numbers from 0.5 to 2.25;"),
        ([(str(7 * i), 1) for i in range(30)], None, "preprocess with --regression"),
        ([("1", 2), ("1.0", 3), ("0", 2)], ["0", "1"], ""),
        ([("1", 2), ("true", 3), ("false", 2)], None, "'1' (2 rows), 'true' (3 rows) are 2"),
        ([("True", 2), ("true", 3)], None, "'True' (2 rows), 'true' (3 rows) are 2"),
        ([("not_x", 2), ("not-x", 3)], None, "'not-x' (3 rows), 'not_x' (2 rows) are 2"),
        ([("pos ", 2), ("pos", 2), (" neg", 3)], ["neg", "pos"], "5 stripped_labels"),
        ([("a", 9), ("b", 9), ("c", 1)], ["a", "b", "c"], "1 of 3 classes have one row: c"),
        ([("a", 9), ("nan", 2)], ["a", "nan"], "'nan' (2 rows): a class"),
        ([("a", 2), ("-", 2), ("b", 2)], ["a", "b"], "train.tsv:4: label '-'"),
        ([("+", 2), ("-", 2), ("=", 2)], ["+", "-", "="], ""),
        ([("0", 30), ("1", 30), ("-1", 1)], ["0", "1"], "1 no_gold_label"),
        ([("0", 3), ("1", 3), ("-1", 3)], ["-1", "0", "1"], "'-1' (3 rows): a class; if it"),
        ([("a", 2), ("", 2), ("b", 2)], ["a", "b"], "2 no_gold_label"),
        ([("1", 2), ("-1", 3)], ["-1", "1"], ""),
        ([(str(i), 9) for i in range(30)], None, ""),
        ([("5", 2), ("10", 3)], ["5", "10"], ""),
    ],
)
def test_labels_that_look_wrong(run, capsys, counts, names, message):
    code, output, folder = run({"train.tsv": labels(*counts)})
    assert code == 0, output
    assert message in output
    assert bool(message) == ("warning" in output or "stripped" in output)
    if names is not None:
        assert LabelledSet(folder, "train").label_names == names


def test_doctor_warns_of_labels_too(run, capsys):
    _, _, folder = run({"train.tsv": labels(("0.5", 1), ("2.25", 1))})
    assert main(["doctor", str(folder)]) == 0
    assert "warning" in (out := capsys.readouterr().out) and "--regression" in out


def test_rows_without_gold_label(run):
    """A test split without any is unlabelled; in any split single ones are left out."""
    hidden = "text\tlabel\na\t-1\nb\t-1\n"
    files = {"train.tsv": labels(("0", 2), ("1", 2)), "valid.tsv": labels(("0", 1), ("-", 2))}
    code, output, folder = run(files | {"test.tsv": hidden})
    assert code == 0, output
    assert "1 rows, 1" in output and "2 no_gold_label" in output
    assert "test: 2 rows," in output and "; no labels" in output
    assert LabelledSet(folder, "test").labels is None and len(LabelledSet(folder, "valid")) == 1
    code, output, folder = run({"train.tsv": labels(("a", 2), ("-", 2))}, "--labels", "a,-")
    assert LabelledSet(folder, "train").labels.tolist() == [0, 0, 1, 1]
    code, output, folder = run({"train.tsv": labels(("0.5", 2), ("", 2))}, "--regression")
    assert LabelledSet(folder, "train").labels.tolist() == [0.5, 0.5]


def test_repeated_header(run):
    code, output, folder = run({"train.tsv": TRAIN + TRAIN})
    assert code == 0 and "1 repeated_header" in output
    assert "in line 6" in output
    assert len(LabelledSet(folder, "train")) == 6
    code, output, folder = run({"train.csv": "text,label\na,x\n"}, "--columns", "text,label")
    assert LabelledSet(folder, "train").label_names == ["x"]


def test_null_labels_of_json(run):
    rows = [{"text": "a", "label": value} for value in ("x", None, "y")]
    code, output, folder = run({"train.jsonl": "\n".join(map(json.dumps, rows))})
    assert code == 0 and "1 no_gold_label" in output
    assert LabelledSet(folder, "train").labels.tolist() == [0, 1]


def test_names_of_numbers(run):
    """Exports of `datasets` have numbers for classes; --labels has their names in order."""
    rows = [{"text": "a", "label": value} for value in (1, 0, 1)]
    content = "\n".join(map(json.dumps, rows))
    code, output, folder = run({"train.jsonl": content}, "--labels", "world,sports")
    assert code == 0, output
    data = LabelledSet(folder, "train")
    assert data.label_names == ["world", "sports"] and data.labels.tolist() == [1, 0, 1]
    code, output, folder = run({"train.jsonl": content}, "--labels", "1,0")
    assert LabelledSet(folder, "train").labels.tolist() == [0, 1, 0]


ABC = "A,B,C"


@pytest.mark.parametrize(
    "splits, options, expected",
    [
        ({"train": "0 2 1"}, ABC, [0, 2, 1]),
        ({"train": "1 3 2"}, ABC, [0, 2, 1]),
        ({"train": "1 3.0 2"}, ABC, [0, 2, 1]),
        ({"train": "1 2"}, ABC, 2),
        ({"train": "1 2"}, f"{ABC} --first-label 0", [1, 2]),
        ({"train": "1 2"}, f"{ABC} --first-label 1", [0, 1]),
        ({"train": "1 2", "valid": "3"}, ABC, [0, 1]),
        ({"train": "1 2", "test": "0 1"}, ABC, [1, 2]),
        ({"train": "1 2", "test": "3"}, ABC, [0, 1]),
        ({"train": "1 2", "test": "0 0"}, ABC, 2),
        ({"train": "1 3", "test": "0 0"}, ABC, [0, 2]),
        ({"train": "1 3", "test": "-1 -1"}, ABC, [0, 2]),
        ({"train": "0 1 2", "test": "0 0"}, ABC, [0, 1, 2]),
        ({"train": "-1 0 1"}, ABC, 2),
        ({"train": "-1 0 1"}, f"{ABC} --first-label -1", [0, 1, 2]),
        ({"train": "-1 0 1"}, f"{ABC} --first-label 0", [0, 1]),
        ({"train": "-1 0 1", "valid": "2"}, ABC, [0, 1]),
        ({"train": "-1 1", "valid": "1"}, "A,B", 2),
        ({"train": "-1 1"}, "A,B --first-label -1", 1),
        ({"train": "0 1", "test": "-1 0 -1"}, ABC, [0, 1]),
        ({"train": "A 2 B"}, ABC, 2),
        ({"train": "A 3 B"}, ABC, [0, 2, 1]),
        ({"train": "A B C"}, ABC, [0, 1, 2]),
        ({"train": "0 3"}, ABC, 1),
        ({"train": "1 2 4"}, ABC, 1),
        ({"train": "1 2"}, "A,B --first-label 0", 1),
        ({"train": "1 2"}, "1,2 --first-label 0", 2),
    ],
)
@pytest.mark.parametrize("form", ["tsv", "jsonl"])
def test_numbers_are_named_from_0_or_1(run, splits, options, expected, form):
    """By the labels of all splits; what could be either is refused."""
    files = {}
    for split, words in splits.items():
        lines = ["text\tlabel", *(f"a\t {word}" for word in words.split())]
        if form == "jsonl":
            values = [word if word.isalpha() else json.loads(word) for word in words.split()]
            lines = [json.dumps({"text": "a", "label": value}) for value in values]
        files[f"{split}.{form}"] = "\n".join(lines) + "\n"
    code, output, folder = run(files, "--labels", *options.split())
    if isinstance(expected, int):
        assert code == expected and "Traceback" not in output, output
        return
    assert code == 0, output
    assert LabelledSet(folder, "train").labels.tolist() == expected
    zeros = splits.get("test") in ("0 0", "-1 -1") and "0" not in splits["train"]
    assert not zeros or LabelledSet(folder, "test").labels is None


def test_labels_of_minus_one_and_one_are_names_of_their_own(run):
    files = {"train.tsv": "text\tlabel\na\t-1\nb\t1\n"}
    expect(run(files, "--labels", "neg,pos"), 2, "give --labels=-1,1")
    code, _, folder = run(files, "--labels=-1,1")
    assert code == 0 and LabelledSet(folder, "train").labels.tolist() == [0, 1]
