"""Labelled sets from TSV and JSONL: what arrives, and what each wrong row is called."""

import json

import numpy as np
import pytest

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.labelled.sets import LabelledSet
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
    assert "train: 3 rows, 11 tokens, 1 blank; no 1, yes 2" in output
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
    assert "1 rows, 3 tokens, 1 bad_utf8, 1 skipped" in output
    code, output, folder = run(files, "--on-bad-utf8", "fail")
    assert code == 1 and "train.tsv:2: invalid UTF-8" in output


J = '{"text": "a", "label": "x"}\n'


@pytest.mark.parametrize(
    "files, options, code, message",
    [
        ({"train.tsv": "text\tlabel\na\n"}, (), 1, "train.tsv:2: 1 fields, expected 2"),
        ({"train.tsv": "text\tlabel\na\tx\tb\n"}, (), 1, "train.tsv:2: 3 fields, expected 2"),
        (
            {"train.tsv": "txt\tlabel\na\tx\n"},
            (),
            1,
            "train.tsv:1: no column 'text'. Did you mean 'txt'",
        ),
        ({"train.tsv": "text\tlabl\na\tx\n"}, (), 1, "no column 'label'. Did you mean 'labl'?"),
        ({"train.tsv": "text\ttext\na\tx\n"}, (), 1, "train.tsv:1: a column name occurs twice"),
        ({"train.tsv": "text\tlabel\n\n"}, (), 1, "train.tsv: no rows (1 blank lines"),
        ({"train.tsv": ""}, (), 1, "train.tsv: is empty"),
        ({"train.tsv": TRAIN + "a\t \n"}, (), 1, "train.tsv:6: the label is empty"),
        (
            {"train.jsonl": J + '{"text": "a", "label": NaN}\n'},
            (),
            1,
            "train.jsonl:2: label nan is not finite",
        ),
        ({"train.tsv": TRAIN, "valid.tsv": TRAIN + "a\tyse\n"}, (), 1, "valid.tsv:6: label 'yse'"),
        ({"train.tsv": TRAIN}, ("--labels", "yes"), 1, "train.tsv:3: label 'no' is not one of"),
        ({"train.tsv": TRAIN}, ("--regression",), 1, "train.tsv:2: label 'yes' is not a number"),
        ({"train.tsv": TRAIN}, ("--labels", "a,a"), 2, "labels must be different"),
        ({"train.tsv": TRAIN}, ("--labels", "a", "--regression"), 2, "exclude each other"),
        ({"train.tsv": TRAIN}, ("--vocab-size", "9"), 2, "--vocab-size does not apply to labelled"),
        ({"train.jsonl": J}, ("--columns", "text,label"), 2, "--columns names those of TSV files"),
        ({"train.tsv": TRAIN}, ("--text-columns", "a,b,c"), 2, "--text-columns takes one column"),
        ({"train.tsv": TRAIN}, ("--tokenizer-from", "/nowhere"), 1, "/nowhere: no tokenizer here"),
        ({"valid.tsv": TRAIN}, (), 2, "without --trainpref the classes must be given"),
        ({"train.csv": "text,label\n"}, (), 1, "comma-separated files are not read"),
        ({"train.jsonl": J + "{\n"}, (), 1, "train.jsonl:2: not valid JSON"),
        ({"train.jsonl": J + "[1]\n"}, (), 1, "train.jsonl:2: not a JSON object"),
        ({"train.jsonl": J + "[" * 100_000}, (), 1, "train.jsonl:2: not valid JSON"),
        ({"train.jsonl": J + '{"label": "x"}'}, (), 1, "train.jsonl:2: no field 'text'"),
        ({"train.jsonl": J + '{"text": "x"}'}, (), 1, "train.jsonl:2: no field 'label'"),
        ({"train.jsonl": '{"text": 3, "label": "x"}'}, (), 1, ":1: field 'text' is not a text"),
        ({"train.jsonl": '{"text": "", "label": [1]}'}, (), 1, ":1: label [1] is not a single"),
        ({"train.jsonl": '{"text": "", "label": NaN}'}, ("--regression",), 1, "is not finite"),
        (
            {"train.jsonl": '{"text_a": "a", "text_b": "b", "label": "x"}', "test.jsonl": J},
            (),
            1,
            "the splits differ in the number of text columns",
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
    with pytest.raises(MetaseqError, match="no split 'test'; there are train, valid"):
        LabelledSet(folder, "test")
    for suffix in ("bin", "idx"):
        (folder / f"valid.label.{suffix}").rename(folder / f"train.label.{suffix}")
    with pytest.raises(MetaseqError, match="1 labels but .* has 3 rows"):
        LabelledSet(folder, "train")
    manifest = Manifest.load(folder)
    manifest.details["labels"] = ["one"]
    for suffix in ("bin", "idx"):
        (folder / f"train.label.{suffix}").rename(folder / f"valid.label.{suffix}")
    manifest.save(folder)
    with pytest.raises(MetaseqError, match=r"a label outside 0\.\.0"):
        LabelledSet(folder, "valid")


def test_a_corpus_is_not_a_labelled_set(corpus):
    with pytest.raises(MetaseqError, match="a corpus, not a labelled set"):
        LabelledSet(corpus, "train")
