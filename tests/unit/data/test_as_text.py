"""SuperGLUE as plain texts: the forms of Shen 2021, on made rows (real ones:
test_real_superglue).
"""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.benchmarks.as_text import _searched_span, marked
from metaseq_lm.data.benchmarks.superglue import _find_words
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.labelled.token_labels import TokenLabels
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary

ANN = [{"start": 0, "end": 2}, {"start": 8, "end": 10}, {"start": 8, "end": 10}]
ROWS = {
    "BoolQ": {"idx": 3, "question": "is it", "passage": "a - b", "label": True},
    "CB": {"idx": 3, "premise": "a", "hypothesis": "b", "label": "neutral"},
    "COPA": {
        "idx": 3,
        "premise": "It fell.",
        "question": "effect",
        "choice1": "a",
        "choice2": "b",
        "label": 1,
    },
    "MultiRC": {
        "idx": 3,
        "passage": {
            "text": "p",
            "questions": [
                {"idx": 9, "question": "q?", "answers": [{"text": "yes", "idx": 4, "label": 1}]}
            ],
        },
    },
    "ReCoRD": {
        "idx": 3,
        "passage": {"text": "Ann met Bob.", "entities": ANN},
        "qas": [
            {
                "query": "@placeholder met Bob",
                "idx": 7,
                "answers": [{"start": 0, "end": 2, "text": "Ann"}],
            }
        ],
    },
    "RTE": {"idx": 3, "premise": "a", "hypothesis": "b", "label": "entailment"},
    "WiC": {
        "idx": 3,
        "word": "run",
        "sentence1": "I ran.",
        "sentence2": "He runs it",
        "start1": 2,
        "end1": 5,
        "start2": 3,
        "end2": 7,
        "label": False,
    },
    "WSC": {
        "idx": 3,
        "text": "Ann's dog barked; she fed it.",
        "label": True,
        "target": {"span1_text": "Ann", "span1_index": 0, "span2_text": "she", "span2_index": 3},
    },
}
TEXTS = {
    "BoolQ": ["is it", "a - b"],
    "CB": ["b", "a"],
    "COPA": ["It fell. effect", "0: a 1: b"],
    "MultiRC": ["Question: q? Answer: yes", "p"],
    "ReCoRD": ["@placeholder met Bob", "*Ann* met *Bob*."],
    "RTE": ["b", "a"],
    "WiC": ["I *ran*.", "He *runs* it"],
    "WSC": ["Ann = she", "*Ann*'s dog barked; *she* fed it."],
}
# The place of the label among the classes, of which [SEP], [CLSn], [MASK] are the tokens.
LABELS = {"BoolQ": 1, "CB": 2, "COPA": 1, "MultiRC": 1, "ReCoRD": 1, "RTE": 1, "WiC": 0, "WSC": 1}
FACTS = {
    "MultiRC": {"idx": 4, "passage": 3, "question": 9},
    "ReCoRD": {"idx": 7, "passage": 3, "answers": ["Ann"]},
}
NUMBER = {task: 2 + n for n, task in enumerate(ROWS)}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder that holds a character tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_text("".join(map(chr, range(32, 127))) + "\n")
    arguments = ["preprocess", "--trainpref", f"{folder}/train.txt", "--destdir", f"{folder}/data"]
    assert main([*arguments, "--tokenizer", "char"]) == 0
    return folder / "data"


def make(corpus, source, task, files, *options):
    """Write files and preprocess them as text; return (exit code, folder)."""
    for name, objects in files.items():
        text = "".join(json.dumps(fields) + "\n" for fields in objects)
        (source / name).write_text(text)
    name = f"{task}-{source.name}".replace("_", "-")
    command = ["preprocess", "--benchmark", f"superglue/{task}", "--as-text", "--labelled", name]
    command += ["--source", str(source), "--destdir", str(corpus), *options]
    return main(command), corpus / name


def texts(data, corpus, row=0):
    tokenizer = load_tokenizer(corpus)
    return [tokenizer.decode(column[row]) for column in data.inputs]


@pytest.mark.parametrize("task", ROWS)
def test_form(corpus, tmp_path, task):
    code, folder = make(corpus, tmp_path, task, {"train.jsonl": [ROWS[task]]})
    assert code == 0
    data = LabelledSet(folder, "train")
    assert texts(data, corpus) == TEXTS[task]
    assert data.labels.tolist() == [LABELS[task]]
    assert data.rows == [FACTS.get(task, {"idx": 3})]
    assert data.benchmark.name == f"superglue/{task}"
    assert Manifest.load(folder).details["as_text"] is True
    assert main(["doctor", str(folder)]) == 0


def test_equal_entities_are_marked_as_often_as_the_author_does(corpus, tmp_path):
    """Bob stands twice among the entities; the answer's characters stay the answer's."""
    row = json.loads(json.dumps(ROWS["ReCoRD"]))
    row["qas"][0]["answers"] = [{"start": 8, "end": 10, "text": "Bob"}]
    for form, wanted in (("own", "*Ann* met *Bob*."), ("author", "*Ann* met **Bob**.")):
        folder = tmp_path / form
        folder.mkdir()
        code, made = make(corpus, folder, "ReCoRD", {"train.jsonl": [row]}, "--as-text", form)
        data = LabelledSet(made, "train")
        assert code == 0 and texts(data, corpus)[1] == wanted
        assert Manifest.load(made).details["spans"] == form
        (place,) = data.places.tolist()
        assert wanted[place[2] : place[3]] == "Bob"


@pytest.mark.parametrize(
    "words, index, own, author",
    [
        ("she", 3, "Ann's dog barked; *she* fed it.", "Ann's dog barked; *she* fed it."),
        ("DOG", 1, "Ann's *dog* barked; she fed it.", "Ann's *dog* barked; she fed it."),
        # Not there: the nearest place with these words, or words of the span further on.
        ("she", 4, "Ann's dog barked; *she* fed it.", "**Ann's dog barked; she fed it."),
        ("dog it", 0, "*Ann's dog* barked; she fed it.", "Ann's *dog barked; she fed it.*"),
        ("a cat", 2, "Ann's dog *barked; she* fed it.", "**Ann's dog barked; she fed it."),
    ],
)
def test_wsc_spans_are_found_by_words(words, index, own, author):
    text = "Ann's dog barked; she fed it."
    start, end, _ = _find_words(text, words, index)
    assert marked(text, [(start, end)])[0] == own
    assert marked(text, [_searched_span(text, words, index)], every=True)[0] == author


def test_wsc_as_the_author_marks_it(corpus, tmp_path):
    row = json.loads(json.dumps(ROWS["WSC"]))
    row["target"]["span2_index"] = 4
    code, folder = make(corpus, tmp_path, "WSC", {"train.jsonl": [row]}, "--as-text", "author")
    assert code == 0
    marked = "***Ann*'s dog barked; she fed it."
    assert texts(LabelledSet(folder, "train"), corpus) == ["Ann = she", marked]


@pytest.mark.parametrize("task", ROWS)
def test_label_tokens(corpus, tmp_path, task):
    """The label token at every position; in ReCoRD the answer's own tokens, else [SEP]."""
    _, folder = make(corpus, tmp_path, task, {"train.jsonl": [ROWS[task]]})
    vocabulary = Vocabulary.load(corpus / "dict.txt")
    data = TokenLabels(folder, "train", vocabulary, NUMBER[task], 64)
    tokens, lengths, targets = data.rows(np.arange(1), 70)
    symbols = [vocabulary.symbols[i] for i in tokens[0]]
    first, second = (list(text) for text in TEXTS[task])
    row = [f"[CLS{NUMBER[task]}]", *first, "[SEP]", *second, "[SEP]"]
    assert [s.replace("▁", " ") for s in symbols] == row + ["[PAD]"] * (70 - len(row))
    assert lengths.tolist() == [len(row)]
    token = {0: "[SEP]", 1: f"[CLS{NUMBER[task]}]", 2: "[MASK]"}[LABELS[task]]
    wanted = [token] * len(row)
    if task == "ReCoRD":
        wanted = ["[SEP]"] * len(row)
        at = len(first) + 3
        wanted[at : at + 3] = ["A", "n", "n"]
    ids = targets[0][: len(row)]
    assert [vocabulary.symbols[i] for i in ids] == wanted
    assert (targets[0][len(row) :] == -1).all()


def test_class_one_has_the_task_token(corpus, tmp_path):
    row = {**ROWS["CB"], "label": "entailment"}
    _, folder = make(corpus, tmp_path, "CB", {"train.jsonl": [row]})
    vocabulary = Vocabulary.load(corpus / "dict.txt")
    data = TokenLabels(folder, "train", vocabulary, 3, 64)
    tokens, _, targets = data.rows(np.arange(1))
    assert vocabulary.symbols[tokens[0, 0]] == "[CLS3]"
    assert {vocabulary.symbols[i] for i in targets[0]} == {"[CLS3]"}
    assert [vocabulary.symbols[i] for i in data.class_tokens] == ["[SEP]", "[CLS3]", "[MASK]"]


def test_the_test_split_has_no_labels(corpus, tmp_path):
    bare = json.loads(json.dumps(ROWS["ReCoRD"]))
    del bare["qas"][0]["answers"]
    _, folder = make(corpus, tmp_path, "ReCoRD", {"test.jsonl": [bare]})
    data = TokenLabels(folder, "test", Vocabulary.load(corpus / "dict.txt"), 6, 64)
    assert data.labels is None and data.data.rows == [{"idx": 7, "passage": 3}]
    assert (data.rows(np.arange(1))[2] == -1).all()


@settings(deadline=None)
@given(
    st.text("ab ", min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 12)), max_size=4),
)
def test_marks(text, pairs):
    """Without its asterisks the text is as before, and each character is where `moved` says."""
    spans = [(i, min(i + j, len(text))) for i, j in pairs if i < len(text)]
    shown, moved = marked(text, spans)
    assert shown.replace("*", "") == text
    assert shown.count("*") == 2 * len(set(spans))
    for place, character in enumerate(text):
        assert shown[moved(place)] == character
    for start, end in spans:
        assert shown[moved(start) - 1] == "*" == shown[moved(end - 1) + 1]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--benchmark", "superglue/AX-b"], "superglue/AX-b has no such form"),
        (["--benchmark", "glue/RTE"], "glue/RTE has no such form"),
        (["--benchmark", "superglue/WIC"], "no benchmark 'superglue/WIC'. Did you mean"),
        (["--labelled", "x", "--trainpref", "y"], "--as-text does not"),
    ],
)
def test_wrong_options(corpus, tmp_path, capsys, options, message):
    command = ["preprocess", *options, "--as-text", "--destdir", str(corpus)]
    assert main([*command, *(["--source", str(tmp_path)] if len(options) == 2 else [])]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, message",
    [
        ({"passage": {"text": "Ann", "entities": ANN}}, "passage.entities[1] from 8 to 10"),
        (
            {"qas": [{"query": "@placeholder", "idx": 1, "answers": [{"start": 9, "end": 99}]}]},
            "qas[0].answers[0]",
        ),
        ({"qas": [{"query": "no", "idx": 1}]}, "has no @placeholder"),
        ({"qas": [{"query": "@placeholder", "idx": 1}]}, "no field 'label'"),
    ],
)
def test_wrong_rows(corpus, tmp_path, capsys, change, message):
    code, folder = make(corpus, tmp_path, "ReCoRD", {"train.jsonl": [{**ROWS["ReCoRD"], **change}]})
    captured = capsys.readouterr()
    assert code == 1 and message in captured.err and "train.jsonl:1" in captured.err
    assert not folder.exists()


def test_damaged_places(corpus, tmp_path):
    """A place outside its text, and a file of another set, are found when the set is opened."""
    _, folder = make(corpus, tmp_path, "ReCoRD", {"train.jsonl": [ROWS["ReCoRD"]]})
    assert LabelledSet(folder, "train").places.tolist() == [[0, 1, 1, 4]]
    places = folder / "train.spans.bin"
    for values in ([1, 1, 99], [2, 1, 4], [1, 4, 4]):
        places.write_bytes(np.array(values, "<i4").tobytes())
        with pytest.raises(MetaseqError, match=r"row 1\b.*span"):
            LabelledSet(folder, "train")
