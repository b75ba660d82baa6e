"""Official files of GLUE and SuperGLUE, generated small: what arrives, and what a wrong row is called."""

import gzip
import json
import lzma
import os
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaseq_lm.cli import main
from metaseq_lm.data.benchmarks import BENCHMARKS, GLUE, leaderboard_file
from metaseq_lm.data.benchmarks.superglue import find_words
from metaseq_lm.data.benchmarks.wnli import facts_of
from metaseq_lm.data.labelled import LabelledSet
from metaseq_lm.data.manifest import Manifest, verify
from metaseq_lm.data.preprocess_labelled import token_span
from metaseq_lm.data.tokenizer import load_tokenizer
from metaseq_lm.errors import MetaseqError

# Header rows as the official files have them, and the places that the fact sheet gives.
HEADERS = {
    "CoLA": ("source label mark sentence", "index sentence", (3,), 1, (1,)),
    "SST-2": ("sentence label", "index sentence", (0,), 1, (1,)),
    "MRPC": (
        "Quality,#1 ID,#2 ID,#1 String,#2 String",
        "index,#1 ID,#2 ID,#1 String,#2 String",
        (3, 4),
        0,
        (3, 4),
    ),
    "STS-B": (
        "index genre filename year old_index source1 source2 sentence1 sentence2 score",
        "index genre filename year old_index source1 source2 sentence1 sentence2",
        (-3, -2),
        -1,
        (-2, -1),
    ),
    "QQP": (
        "id qid1 qid2 question1 question2 is_duplicate",
        "id question1 question2",
        (3, 4),
        5,
        (1, 2),
    ),
    "MNLI": (
        "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse "
        "sentence2_parse sentence1 sentence2 label1 gold_label",
        "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse "
        "sentence2_parse sentence1 sentence2",
        (8, 9),
        -1,
        (8, 9),
    ),
    "QNLI": ("index question sentence label", "index question sentence", (1, 2), 3, (1, 2)),
    "RTE": ("index sentence1 sentence2 label", "index sentence1 sentence2", (1, 2), 3, (1, 2)),
    "WNLI": ("index sentence1 sentence2 label", "index sentence1 sentence2", (1, 2), 3, (1, 2)),
}


def names_of(header):
    return header.split("," if "," in header else " ")


def glue_files(task, rows=3):
    """Return the files of a task by name: texts t0a, t0b, t1a ... and labels in turn."""
    train, test, texts, label, test_texts = HEADERS[task]
    labels = GLUE[task].labels or ("0.5", "5.000", "2")

    def row(header, split, i):
        names = names_of(header)
        fields = [f"x{i}"] * len(names)
        for place, word in zip(texts if split != "test" else test_texts, "ab"):
            fields[place] = f'{split} "{i}{word}'
        if split != "test":
            fields[label] = labels[i % len(labels)]
        for place, name in enumerate(names):
            if name in ("index", "id"):
                fields[place] = str(10 + i)
        return "\t".join(fields)

    files = {}
    for split, name in GLUE[task].files.items():
        kind = "test" if split.startswith("test") else split
        if split == "diagnostic":
            continue
        header = test if kind == "test" else train
        lines = [] if task == "CoLA" and kind != "test" else ["\t".join(names_of(header))]
        lines += [row(header, kind, i) for i in range(rows)]
        files[name] = "\n".join(lines) + "\n"
    return files


def lines(*objects):
    return "".join(json.dumps(o) + "\n" for o in objects)


PASSAGE = {
    "text": "Ann and Bob met Ann.",
    "entities": [{"start": 0, "end": 2}, {"start": 8, "end": 10}, {"start": 16, "end": 18}],
}
QUERY = {
    "idx": 7,
    "query": "@placeholder met Bob",
    "answers": [{"start": 0, "end": 2, "text": "Ann"}],
}
ANSWERS = [{"idx": 4, "text": "yes", "label": 1}, {"idx": 5, "text": "no", "label": 0}]
SUPERGLUE = {
    "BoolQ": {"idx": 3, "passage": "a -- b", "question": "is it", "label": True},
    "CB": {"idx": 3, "premise": "a", "hypothesis": "b", "label": "neutral"},
    "COPA": {
        **{"idx": 3, "premise": "It fell.", "choice1": "a", "choice2": "b"},
        **{"question": "effect", "label": 1},
    },
    "MultiRC": {
        "idx": 3,
        "passage": {"text": "p", "questions": [{"idx": 9, "question": "q?", "answers": ANSWERS}]},
    },
    "ReCoRD": {"idx": 3, "passage": PASSAGE, "qas": [QUERY]},
    "RTE": {"idx": 3, "premise": "a", "hypothesis": "b", "label": "not_entailment"},
    "WiC": {
        **{"idx": 3, "word": "run", "sentence1": "I ran.", "sentence2": "He runs it"},
        **{"start1": 2, "end1": 5, "start2": 3, "end2": 7, "label": False},
    },
    "WSC": {
        **{"idx": 3, "text": "Ann's dog barked; she fed it.", "label": True},
        "target": {"span1_text": "Ann", "span1_index": 0, "span2_text": "she", "span2_index": 3},
    },
    "AX-b": {"idx": 3, "sentence1": "a", "sentence2": "b", "label": "entailment", "logic": "x"},
    "AX-g": {"idx": 3, "premise": "a", "hypothesis": "b", "label": "entailment", "pair_id": 5},
}


def changed(task, **fields):
    return {**SUPERGLUE[task], **fields}


def without(task, *names):
    return {k: v for k, v in SUPERGLUE[task].items() if k not in names}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder that holds a character tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_text("".join(map(chr, range(32, 127))) + "\n")
    arguments = ["preprocess", "--trainpref", f"{folder}/train.txt", "--destdir", f"{folder}/data"]
    assert main([*arguments, "--tokenizer", "char", "--task-tokens", "2"]) == 0
    return folder / "data"


@pytest.fixture
def run(corpus, tmp_path, capsys):
    """Write official files and preprocess them; return (exit code, output, folder)."""

    def call(benchmark, files, *options):
        source = tmp_path / "source"
        source.mkdir(exist_ok=True)
        for name, content in files.items():
            (source / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        name = tmp_path.name.replace("_", "-")
        arguments = ["preprocess", "--benchmark", benchmark, "--source", str(source)]
        arguments += ["--destdir", str(corpus), "--labelled", name, "--overwrite", *options]
        code = main(arguments)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return code, captured.out + captured.err, corpus / name

    return call


def texts(data, corpus):
    tokenizer = load_tokenizer(corpus)
    return [[tokenizer.decode(column[i]) for column in data.inputs] for i in range(len(data))]


# ------------------------------------------------------------------------ GLUE


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
        assert data.benchmark == f"glue/{task}"
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
    return ["--no-double"] if GLUE[task].doubled else []


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
    assert "no test.tsv, so there will be no test split" in output
    assert texts(LabelledSet(folder, "train"), corpus)[0] == ['train "0a', 'train "0b']
    assert texts(LabelledSet(folder, "valid"), corpus)[2] == ['valid "2a', 'valid "2b']
    assert set(Manifest.load(folder).splits) == {"train", "valid"}


def test_malformed_question_pairs_are_counted(run):
    files = glue_files("QQP")
    files["train.tsv"] += "cut\toff\n"
    code, output, folder = run("glue/QQP", files)
    assert code == 0 and "train: 3 rows" in output and "1 malformed" in output
    assert Manifest.load(folder).splits["train"]["malformed"] == 1


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
    names = [leaderboard_file("glue/MNLI", s) for s in ("test", "test_mismatched", "diagnostic")]
    assert names == ["MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"]


R = "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n"


@pytest.mark.parametrize(
    "task, files, options, code, message",
    [
        ("glue/RTE", {"train.tsv": R + "1\ta\tb\n"}, (), 1, "train.tsv:3: 3 fields, expected 4"),
        ("glue/RTE", {"train.tsv": R + "1\ta\tb\tyes\n"}, (), 1, "train.tsv:3: label 'yes' is not"),
        ("glue/RTE", {"train.tsv": R + "0\ta\tb\tentailment\n"}, (), 1, "train.tsv:3: index 0 occ"),
        (
            "glue/RTE",
            {"train.tsv": R + "x\ta\tb\tentailment\n"},
            (),
            1,
            "train.tsv:3: index 'x' is",
        ),
        (
            "glue/RTE",
            {"train.tsv": "index\tsentence1\tsentence2\n"},
            (),
            1,
            ":1: no column 'label'",
        ),
        (
            "glue/RTE",
            {"train.tsv": "index\tsentence1\tsentence2\n"},
            (),
            1,
            "not the official file",
        ),
        (
            "glue/RTE",
            {"dev.tsv": "index\tpremise\tlabel\n"},
            (),
            1,
            "dev.tsv:1: no column 'sentence1",
        ),
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
        (
            "glue/CoLA",
            {"train.tsv": "gj\t1\tno mark\n"},
            (),
            1,
            "train.tsv:1: 3 fields, expected 4",
        ),
        ("glue/RTE", {}, (), 1, "holds none of the files of glue/RTE: train.tsv"),
        ("glue/QPQ", {}, (), 2, "no benchmark 'glue/QPQ'. Did you mean 'glue/QQP'"),
        (
            "glue/RTE",
            {"train.tsv": R},
            ("--no-double",),
            2,
            "--no-double does not apply to glue/RTE",
        ),
        ("glue/RTE", {"train.tsv": R}, ("--labels", "a"), 2, "--labels and --benchmark exclude"),
        ("glue/RTE", {"train.tsv": R}, ("--vocab-size", "9"), 2, "--vocab-size does not apply"),
    ],
)
def test_wrong_glue_files(run, task, files, options, code, message):
    found, output, folder = run(task, files, *options)
    assert message in output
    assert found == code
    assert not folder.exists()


# ------------------------------------------------------------------------ SuperGLUE

EXPECTED = {
    "BoolQ": ([["a -- b", "is it"]], [1], [{"idx": 3}]),
    "CB": ([["a", "b"]], [2], [{"idx": 3}]),
    "COPA": ([["It fell. What happened as a result?", "a", "b"]], [1], [{"idx": 3}]),
    "MultiRC": (
        [["p", "q? yes"], ["p", "q? no"]],
        [1, 0],
        [{"idx": 4, "passage": 3, "question": 9}, {"idx": 5, "passage": 3, "question": 9}],
    ),
    "ReCoRD": (
        [["Ann and Bob met Ann.", "Ann met Bob"], ["Ann and Bob met Ann.", "Bob met Bob"]],
        [1, 0],
        [{"idx": 7, "passage": 3, "answers": ["Ann"], "entity": e} for e in ("Ann", "Bob")],
    ),
    "RTE": ([["a", "b"]], [1], [{"idx": 3}]),
    "WiC": ([["I ran.", "He runs it"]], [0], [{"idx": 3}]),
    "WSC": ([["Ann's dog barked; she fed it."]], [1], [{"idx": 3}]),
    "AX-b": ([["a", "b"]], [0], [{"idx": 3}]),
    "AX-g": ([["a", "b"]], [0], [{"idx": 3, "pair_id": 5}]),
}
FORMS = {"COPA": "choices", "WiC": "spans", "WSC": "spans"}


@pytest.mark.parametrize("task", EXPECTED)
def test_superglue(run, corpus, task):
    name = list(BENCHMARKS[f"superglue/{task}"].files.values())[0]
    code, output, folder = run(f"superglue/{task}", {name: lines(SUPERGLUE[task])})
    assert code == 0, output
    data = LabelledSet(folder, "test" if task.startswith("AX") else "train")
    expected, labels, rows = EXPECTED[task]
    assert texts(data, corpus) == expected
    assert data.labels.tolist() == labels
    assert data.rows == rows
    assert data.form == FORMS.get(task, "pair")
    assert verify(folder) == []
    assert main(["doctor", str(folder)]) == 0


@pytest.mark.parametrize("task", ["BoolQ", "COPA", "MultiRC", "ReCoRD", "WSC"])
def test_superglue_test_split_without_labels(run, corpus, task):
    bare = json.loads(json.dumps(without(task, "label")))
    if task == "MultiRC":
        for answer in bare["passage"]["questions"][0]["answers"]:
            del answer["label"]
    if task == "ReCoRD":
        del bare["qas"][0]["answers"]
    code, output, folder = run(f"superglue/{task}", {"test.jsonl": lines(bare)})
    assert code == 0 and "no labels" in output
    data = LabelledSet(folder, "test")
    assert data.labels is None and texts(data, corpus) == EXPECTED[task][0]
    assert main(["doctor", str(folder)]) == 0
    code, output, _ = run(f"superglue/{task}", {"val.jsonl": lines(bare)})
    assert code == 1 and "val.jsonl:1: no field 'label'" in output


def test_spans_are_tokens(run):
    """With one token per character, token spans are character spans."""
    _, _, folder = run("superglue/WiC", {"train.jsonl": lines(SUPERGLUE["WiC"])})
    data = LabelledSet(folder, "train")
    assert data.spans.dtype == np.int64
    assert data.spans.tolist() == [[[0, 2, 5], [1, 3, 7]]]
    _, _, folder = run("superglue/WSC", {"train.jsonl": lines(SUPERGLUE["WSC"])})
    assert LabelledSet(folder, "train").spans.tolist() == [[[0, 0, 3], [0, 18, 21]]]


@pytest.mark.parametrize(
    "wanted, index, found, remark",
    [
        ("the dog", 1, "The  dog", ""),
        ("dog", 2, "dog", ""),
        ("Ann", 5, "Ann", ""),
        ("bit", 4, "bit", "the words there are 'and', not 'bit'; the nearest is word 3"),
        ("cat", 4, "and", "these are taken"),
        ("Ann twice today", 6, "twice.", "these are taken"),
        ("dog", 7, "", "the text has 7 words, the span 1"),
        ("", 0, "", "the text has 7 words, the span 0"),
        ("dog", -1, "", "the text has 7 words, the span 1"),
    ],
)
def test_find_words(wanted, index, found, remark):
    text = "So The  dog bit\tand Ann's twice."
    start, end, said = find_words(text, wanted, index)
    assert text[start:end] == found
    assert said.endswith(remark) and bool(said) == bool(remark)


def test_the_nearest_of_several_places_is_taken():
    assert find_words("it saw us and he saw it run", "it", 5)[:2] == (21, 23)
    assert find_words("it saw us and he saw it run", "it", 2)[:2] == (0, 2)


def test_span_text_elsewhere_is_a_remark_with_its_place(run):
    target = {"span1_text": "dog", "span1_index": 2, "span2_text": "she", "span2_index": 3}
    record = changed("WSC", target=target)
    code, output, folder = run("superglue/WSC", {"train.jsonl": "\n" + lines(record)})
    assert code == 0
    assert "train.jsonl:2: target.span1_index 2: the words there are 'barked;', not 'dog'" in output
    assert "1 span_text_elsewhere" in output
    assert LabelledSet(folder, "train").spans[0, 0].tolist() == [0, 6, 9]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.data())
def test_token_span_holds_exactly_the_tokens_that_share_a_character(widths, data):
    ends = np.cumsum(widths)
    starts = ends - widths
    total = int(ends[-1])
    first = data.draw(st.integers(0, max(total - 1, 0)))
    end = data.draw(st.integers(first + 1, total + 1))
    wanted = set(range(first, end))
    touching = [i for i in range(len(widths)) if wanted & set(range(starts[i], ends[i]))]
    begin, stop = token_span(starts, ends, first, end)
    inside = [i for i in range(begin, stop) if widths[i]]
    assert inside == touching
    assert not touching or (widths[begin] and widths[stop - 1])


def broken(task, path, value):
    record = json.loads(json.dumps(SUPERGLUE[task]))
    at = record
    for key in path[:-1]:
        at = at[key]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return lines(record)


@pytest.mark.parametrize(
    "task, content, message",
    [
        ("BoolQ", "{\n", "train.jsonl:1: not valid JSON"),
        ("BoolQ", "[1]\n", "train.jsonl:1: not a JSON object"),
        ("BoolQ", lines(SUPERGLUE["BoolQ"]) * 2, "train.jsonl:2: idx 3 occurs twice"),
        ("BoolQ", lines(without("BoolQ", "label")), "train.jsonl:1: no field 'label'"),
        (
            "BoolQ",
            lines(changed("BoolQ", label="maybe")),
            "train.jsonl:1: label 'maybe' is not one",
        ),
        ("BoolQ", lines(changed("BoolQ", label=[1])), "train.jsonl:1: label [1] is not a single"),
        ("BoolQ", lines(changed("BoolQ", passage=3)), ":1: field 'passage' is not a text"),
        ("BoolQ", lines(changed("BoolQ", idx="3")), ":1: field 'idx' is not a whole number"),
        ("COPA", lines(changed("COPA", question="why")), ":1: question 'why' is not 'cause' or"),
        ("COPA", lines(changed("COPA", label=2)), "train.jsonl:1: label '2' is not one of 0, 1"),
        ("MultiRC", broken("MultiRC", ("passage", "text"), None), "no field 'passage.text'"),
        (
            "MultiRC",
            broken("MultiRC", ("passage", "questions", 0, "answers", 1, "text"), None),
            ":1: no field 'passage.questions[0].answers[1].text'",
        ),
        ("MultiRC", broken("MultiRC", ("passage", "questions"), [1]), "does not hold objects only"),
        (
            "MultiRC",
            broken("MultiRC", ("passage", "questions", 0, "answers", 1, "idx"), 4),
            ":1: passage 3, question 9, idx 4 occurs twice",
        ),
        (
            "ReCoRD",
            broken("ReCoRD", ("passage", "entities", 1, "end"), 99),
            ":1: passage.entities[1] from 8 to 99, but the passage has 20 characters",
        ),
        ("ReCoRD", broken("ReCoRD", ("qas", 0, "query"), "who"), "query has no @placeholder"),
        ("WiC", lines(changed("WiC", end1=99)), ":1: no word from character 2 to 99 of sentence1"),
        (
            "WiC",
            lines(changed("WiC", start2=2, end2=3)),
            "no word from character 2 to 3 of sentence2",
        ),
        (
            "WSC",
            broken("WSC", ("target", "span2_index"), 40),
            ":1: target.span2_index 40: the text has",
        ),
        ("WSC", broken("WSC", ("target",), "x"), ":1: field 'target' is not an object"),
    ],
)
def test_wrong_superglue_files(run, task, content, message):
    code, output, folder = run(f"superglue/{task}", {"train.jsonl": content})
    assert message in output
    assert code == 1
    assert not folder.exists()


def test_span_without_a_token(run, corpus, tmp_path):
    """A word pattern can leave characters out; a span of nothing else is named."""
    (tmp_path / "train.txt").write_text("ran run\n")
    words = tmp_path / "words"
    arguments = ["preprocess", "--trainpref", f"{tmp_path}/train.txt", "--destdir", str(words)]
    assert main([*arguments, "--tokenizer", "word", "--word-pattern", "[a-z]+"]) == 0
    record = changed("WiC", sentence1="run !", start1=4, end1=5)
    options = ("--tokenizer-from", str(words))
    code, output, _ = run("superglue/WiC", {"train.jsonl": lines(record)}, *options)
    assert code == 1
    assert "train.jsonl:1: no token holds '!' (characters 4 to 5 of text 1)" in output


# ------------------------------------------------------------------------ damage


@pytest.fixture
def wsc(run):
    """A set with spans and facts, split train of two rows."""
    rows = [SUPERGLUE["WSC"], changed("WSC", idx=4)]
    code, output, folder = run("superglue/WSC", {"train.jsonl": lines(*rows)})
    assert code == 0, output
    return folder


def test_damaged_facts(wsc, capsys):
    path = wsc / "train.rows.jsonl"
    whole = path.read_bytes()
    for content, message in (
        (b"x" + whole[1:], "train.rows.jsonl:1: damaged"),
        (whole.replace(b"}\n{", b"} {"), "train.rows.jsonl:1: damaged"),
        (whole.replace(b"{", b"[").replace(b"}", b"]"), "train.rows.jsonl:1: damaged"),
        (whole[:10] + b" " * 11 + b"\n", "1 lines but .* has 2"),
    ):
        path.write_bytes(content)
        assert len(content) == len(whole)
        data = LabelledSet(wsc, "train")  # facts are read when asked for
        with pytest.raises(MetaseqError, match=message):
            data.rows
        assert main(["doctor", str(wsc)]) == 1
    os.truncate(path, len(whole) - 1)
    with pytest.raises(MetaseqError, match="train.rows.jsonl: .* bytes instead of"):
        LabelledSet(wsc, "train")
    path.unlink()
    with pytest.raises(MetaseqError, match="train.rows.jsonl: missing"):
        LabelledSet(wsc, "train")


@pytest.mark.parametrize("values", [(0, 0, 99), (1, 0, 1), (0, 2, 2), (0, -1, 3), (-1, 0, 3)])
def test_damaged_spans(wsc, values):
    path = wsc / "train.spans.bin"
    spans = np.fromfile(path, "<i4")
    spans[6:9] = values
    spans.tofile(path)
    with pytest.raises(MetaseqError, match="train.spans.bin: row 2 has a span outside its text"):
        LabelledSet(wsc, "train")


def test_unknown_form(wsc):
    manifest = Manifest.load(wsc)
    for form, inputs in (("tree", 1), ("pair", 1), (3, 1), ("choices", 2), ("single", 0)):
        manifest.details |= {"form": form, "inputs": inputs}
        manifest.save(wsc)
        with pytest.raises(MetaseqError, match="a set of form .* text columns"):
            LabelledSet(wsc, "train")


def test_a_replaced_set_leaves_nothing_behind(run, wsc):
    code, _, folder = run("superglue/CB", {"train.jsonl": lines(SUPERGLUE["CB"])})
    assert code == 0 and folder == wsc
    assert not (folder / "train.spans.bin").exists()


def test_some_rows_without_label(run):
    code, output, _ = run(
        "superglue/CB", {"test.jsonl": lines(SUPERGLUE["CB"], {**without("CB", "label"), "idx": 4})}
    )
    assert code == 1 and "test.jsonl:2: no label, but other rows of the split have one" in output


def test_plain_files_without_labels(corpus, tmp_path, capsys):
    """A generic test file without label column gives a split without labels; train must have one."""
    (tmp_path / "train.tsv").write_text("text\tlabel\na\tx\nb\ty\n")
    (tmp_path / "test.tsv").write_text("text\tid\nc\t1\n")
    (tmp_path / "test.jsonl").write_text(lines({"text": "c"}, {"text": "d", "label": "x"}))
    call = ["preprocess", "--labelled", "plain", "--destdir", str(corpus), "--overwrite"]
    call += ["--trainpref", f"{tmp_path}/train.tsv"]
    assert main([*call, "--testpref", f"{tmp_path}/test.tsv"]) == 0
    data = LabelledSet(corpus / "plain", "test")
    assert data.labels is None and data.rows is None and data.spans is None and len(data) == 1
    assert (data.form, data.benchmark) == ("single", "")
    assert main([*call, "--testpref", f"{tmp_path}/test.jsonl"]) == 1
    assert "test.jsonl:2: a label, but the rows before have none" in capsys.readouterr().err
    assert main([*call, "--validpref", f"{tmp_path}/test.tsv"]) == 1
    assert "test.tsv:1: no column 'label'" in capsys.readouterr().err


# ------------------------------------------------------------------------ command line


@pytest.mark.parametrize(
    "name, version, folder",
    [("v1.1", "v1.1", "SQuAD-1"), ("v2.0", "v2.0", "SQuAD-2"), ("mrqa", "mrqa", "MRQA")],
)
def test_question_answering_has_a_reader_of_its_own(corpus, monkeypatch, name, version, folder):
    seen = []
    module = types.ModuleType("metaseq_lm.data.squad")
    monkeypatch.setattr(module, "preprocess_squad", lambda *call: seen.append(call), raising=False)
    monkeypatch.setitem(sys.modules, "metaseq_lm.data.squad", module)
    call = ["preprocess", "--benchmark", f"squad/{name}", "--destdir", str(corpus)]
    assert main([*call, "--trainpref", "train.json"]) == 0
    ((job, given_version, tokenizer),) = seen
    assert given_version == version and job.destdir == corpus / folder
    assert tokenizer.fingerprint == load_tokenizer(corpus).fingerprint
    assert main([*call, "--source", "x"]) == 2


@pytest.mark.parametrize(
    "options, message",
    [
        (["--source", "x"], "--source only applies to benchmarks"),
        (["--no-double"], "--no-double only applies to benchmarks"),
        (["--benchmark", "glue/CoLA"], "--benchmark needs --source DIR"),
        (["--benchmark", "glue/CoLA", "--labelled", "a/b", "--source", "x"], "--labelled 'a/b'"),
    ],
)
def test_wrong_options(corpus, capsys, options, message):
    assert main(["preprocess", "--destdir", str(corpus), *options]) == 2
    assert message in capsys.readouterr().err


def test_the_folder_is_named_after_the_task(corpus, tmp_path):
    (tmp_path / "train.jsonl").write_text(lines(SUPERGLUE["AX-g"]))
    call = ["preprocess", "--benchmark", "superglue/CB", "--trainpref", f"{tmp_path}/train.jsonl"]
    assert main([*call, "--destdir", str(corpus)]) == 0
    assert len(LabelledSet(corpus / "CB", "train")) == 1
    assert main([*call[:3], "--source", "/nowhere", "--destdir", str(corpus)]) == 1
