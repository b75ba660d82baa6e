"""Official files of GLUE: what arrives, and what a wrong row is called."""

import gzip
import lzma

import pytest
from benchmark_files import GLUE, HEADERS, glue_files, lines, names_of, texts

from metaseq_lm.data.benchmarks.wnli import facts_of
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.manifest import Manifest, verify


@pytest.mark.parametrize("task", HEADERS)
def test_glue_columns(run, corpus, task):
    """The names in the table are the columns that the sheet gives by number."""
    code, output, folder = run(f"glue/{task}", glue_files(task), *double(task))
    assert code == 0, output
    for split in GLUE[task].files:
        if split == "diagnostic":
            continue
        kind = "test" if split.startswith("test") else split
        data = LabelledSet(folder, split)
        words = "ab"[: len(data.inputs)]
        assert texts(data, corpus) == [
            [f'{"test" if kind == "test" else kind} "{i}{w}' for w in words] for i in range(3)
        ]
        assert data.form == ("pair" if len(words) == 2 else "single")
        assert data.benchmark.name == f"glue/{task}"
        if kind == "test":
            assert data.labels is None
        elif task == "STS-B":
            assert data.labels.tolist() == [0.5, 5.0, 2.0] and data.regression
        else:
            expected = [i % len(GLUE[task].labels) for i in range(3)]
            assert data.labels.tolist() == expected
            assert data.label_names == list(GLUE[task].labels)
        first = 10 if "index" in header(task, kind) or "id" in header(task, kind) else 0
        facts = [{"idx": first + i} for i in range(3)]
        if task == "WNLI":
            facts = [row | facts_of(*both) for row, both in zip(facts, texts(data, corpus))]
        assert data.rows == facts
    assert verify(folder) == []


def double(task):
    return ["--no-double"] if GLUE[task].expand == "swapped" else []


def header(task, kind):
    return names_of(HEADERS[task][1 if kind == "test" else 0])


def test_doubled_train_rows(run, corpus):
    code, output, folder = run("glue/MRPC", glue_files("MRPC"))
    assert code == 0, output
    train = LabelledSet(folder, "train")
    rows = texts(train, corpus)
    assert rows[::2] == [
        ['train "0a', 'train "0b'],
        ['train "1a', 'train "1b'],
        ['train "2a', 'train "2b'],
    ]
    assert rows[1::2] == [row[::-1] for row in rows[::2]]
    assert train.labels.tolist() == [0, 0, 1, 1, 0, 0]
    assert train.rows[:2] == [{"idx": 0}, {"idx": 0, "swapped": True}]
    assert len(LabelledSet(folder, "valid")) == 3
    assert Manifest.load(folder).details["doubled"] is True


def test_packed_bom_and_missing_files(run, corpus):
    files = glue_files("MRPC")
    files["train.tsv.xz"] = lzma.compress(b"\xef\xbb\xbf" + files.pop("train.tsv").encode())
    files["dev.tsv.gz"] = gzip.compress(files.pop("dev.tsv").replace("\n", "\r\n").encode())
    del files["test.tsv"]
    code, output, folder = run("glue/MRPC", files, "--no-double")
    assert code == 0, output
    assert "no test.tsv, so" in output
    assert texts(LabelledSet(folder, "train"), corpus)[0] == ['train "0a', 'train "0b']
    assert texts(LabelledSet(folder, "valid"), corpus)[2] == ['valid "2a', 'valid "2b']
    assert set(Manifest.load(folder).splits) == {"train", "valid"}


def test_malformed_question_pairs_are_named_and_counted(run):
    """Place and fault of the first three, then how many there are."""
    files = glue_files("QQP")
    files["train.tsv"] += "cut\toff\n"
    files["dev.tsv"] += "\none\n\n" + "one\ttoo\tmany\t4\t5\t6\t7\n" + "a\tb\n" * 3
    code, output, folder = run("glue/QQP", files)
    assert code == 0 and "train: 3 rows" in output and "1 malformed" in output
    columns = "6 (id, qid1, qid2, question1, question2, is_duplicate) with tabs between them"
    said = [line.split("/")[-1] for line in output.splitlines() if "left out" in line]
    wanted = [("train.tsv:5", 2), ("dev.tsv:6", 1), ("dev.tsv:8", 7), ("dev.tsv:9", 2)]
    *rows, last = said
    fields = [f"{at}: {n} fields, expected {columns}" for at, n in wanted]
    assert [row.split(";")[0] for row in rows] == fields
    assert "dev.tsv: 5 malformed" in last and "the first 3" in last
    splits = Manifest.load(folder).splits
    assert [splits[name]["malformed"] for name in ("train", "valid")] == [1, 5]


def test_mnli_diagnostic_and_json_subset(run, corpus, tmp_path):
    files = glue_files("MNLI")
    del files["train.tsv"]
    files["diagnostic.tsv"] = "index\tsentence1\tsentence2\n0\td\te\n"
    subset = tmp_path / "train.jsonl"
    subset.write_text(lines({"text_a": "p", "text_b": "h", "label": "entailment"}))
    code, output, folder = run("glue/MNLI", files, "--trainpref", str(subset))
    assert code == 0, output
    assert texts(LabelledSet(folder, "diagnostic"), corpus) == [["d", "e"]]
    assert LabelledSet(folder, "train").labels.tolist() == [1]
    assert len(LabelledSet(folder, "valid_mismatched")) == 3
    names = [GLUE["MNLI"].leaderboard_file(s) for s in ("test", "test_mismatched", "diagnostic")]
    assert names == ["MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"]


R = "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n"


@pytest.mark.parametrize(
    "task, files, options, code, message",
    [
        ("glue/RTE", {"train.tsv": R + "1\ta\tb\n"}, (), 1, "train.tsv:3: 3 fields, expected 4"),
        ("glue/RTE", {"train.tsv": R + "1\ta\tb\tyes\n"}, (), 1, "train.tsv:3: label 'yes' is not"),
        ("glue/RTE", {"train.tsv": R + "0\ta\tb\tentailment\n"}, (), 1, "train.tsv:3: index 0 occ"),
        ("glue/RTE", {"train.tsv": R + "x\ta\tb\tentailment\n"}, (), 1, "train.tsv:3: index 'x'"),
        (
            "glue/RTE",
            {"train.tsv": "index\tsentence1\tsentence2\n"},
            (),
            1,
            "sentence1, sentence2; glue/RTE",
        ),
        (
            "glue/RTE",
            {"train.tsv": "index\tsentence1\tsentence2\n"},
            (),
            1,
            "index, sentence1, sentence2; glue/RTE has sentence1, sentence2, label",
        ),
        ("glue/RTE", {"dev.tsv": "index\tpremise\tlabel\n"}, (), 1, "index, premise, label;"),
        (
            "glue/RTE",
            {"train.tsv": R.encode() + b"1\t\xff\tb\tentailment\n"},
            ("--on-bad-utf8", "fail"),
            1,
            "train.tsv:3: invalid UTF-8",
        ),
        ("glue/STS-B", {"test.tsv": "index\tsentence1\tsentence2\n"}, (), 1, "test.tsv: no rows"),
        (
            "glue/STS-B",
            {"dev.tsv": "index\tsentence1\tsentence2\tscore\n0\ta\tb\tbad\n"},
            (),
            1,
            "dev.tsv:2: label 'bad' is not a number",
        ),
        ("glue/CoLA", {"train.tsv": "gj\t1\tno mark\n"}, (), 1, "source, label, mark"),
        ("glue/RTE", {}, (), 1, "none of the files of glue/RTE: train.tsv"),
        ("glue/QPQ", {}, (), 2, "no benchmark 'glue/QPQ'. Did you mean 'glue/QQP'"),
        ("glue/RTE", {"train.tsv": R}, ("--no-double",), 2, "--no-double does not"),
        ("glue/RTE", {"train.tsv": R}, ("--labels", "a"), 2, "--labels does not"),
        ("glue/RTE", {"train.tsv": R}, ("--vocab-size", "9"), 2, "--vocab-size does not apply"),
    ],
)
def test_wrong_glue_files(run, task, files, options, code, message):
    found, output, folder = run(task, files, *options)
    assert message in output
    assert found == code
    assert not folder.exists()
