"""SuperGLUE as plain texts on the real files: texts, label tokens, answers, each written out once
more.

A tokenizer without merges has a token for each byte, so that a row can be written out as bytes.
"""

import json
import lzma
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metaseq_lm.cli import main
from metaseq_lm.data.benchmarks.as_text import find_text_form
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.labelled.token_labels import TokenLabels
from metaseq_lm.data.tokenizers.byte_bpe import _byte_symbols
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary

HERE = os.environ.get("METASEQ_LM_DATA", "")
LINES = {"MultiRC": 15}  # of a file that are read, 150 of the others; one has some 60 rows here
ROOM = 1 << 16  # tokens, so that every row is one window
TRUTH = ["false", "true"]
# Their tokens are [SEP], [CLSn] and [MASK], n the number here.
CLASSES = {
    "BoolQ": (2, TRUTH),
    "CB": (3, ["contradiction", "entailment", "neutral"]),
    "COPA": (4, ["0", "1"]),
    "MultiRC": (5, ["0", "1"]),
    "ReCoRD": (6, ["0", "1"]),
    "RTE": (7, ["not_entailment", "entailment"]),
    "WiC": (8, TRUTH),
    "WSC": (9, TRUTH),
}
# First text, second text, class; of ReCoRD instead which characters of the second text are answers.
Written = tuple[str, str, Any]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of bytes: 33 special symbols, 256 bytes, no merges."""
    folder = tmp_path_factory.mktemp("words")
    (folder / "train.txt").write_text("the cat sat on the mat\n")
    arguments = ["preprocess", "--trainpref", f"{folder}/train.txt", "--destdir", f"{folder}/data"]
    assert main([*arguments, "--vocab-size", "289"]) == 0
    return folder / "data"


def real(words: Path, task: str) -> tuple[Path, list[dict]]:
    """Preprocess rows of a real set, once; return (its folder, the objects of its file)."""
    source = Path(HERE) / f"superglue-{task}{'-part' * (task == 'ReCoRD')}"
    if not HERE or not source.is_dir():
        pytest.skip(f"no {source.name} in METASEQ_LM_DATA ({HERE or 'not set'})")
    file = source / ("dev32.jsonl" if task == "ReCoRD" else "val.jsonl")
    if file.is_file():
        text = file.read_text("utf-8")
    else:
        with lzma.open(f"{file}.xz", "rt", encoding="utf-8") as packed:
            text = packed.read()
    lines = text.splitlines()[: LINES.get(task, 150)]
    if not (words / task).exists():
        part = words.parent / f"{task}.jsonl"
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = ["preprocess", "--benchmark", f"superglue/{task}", "--as-text"]
        assert main([*command, "--validpref", str(part), "--destdir", str(words)]) == 0
    return words / task, [json.loads(line) for line in lines]


def starred(text: str, spans: list[tuple[int, int]]) -> str:
    """Return the text with an asterisk at each border of the different spans."""
    borders = [border for span in set(spans) for border in span]
    stars = ["*" * borders.count(place) for place in range(len(text) + 1)]
    return "".join(star + character for star, character in zip(stars, [*text, ""]))


def answer_characters(text: str, spans: list[tuple[int, int]], answers: set) -> list[bool]:
    """Return of each character of `starred(text, spans)` whether it is within an answer."""
    borders = [border for span in set(spans) for border in span]
    found = []
    for place in range(len(text) + 1):
        found += [any(s < place < e for s, e in answers)] * borders.count(place)
        found += [any(s <= place < e for s, e in answers)] * (place < len(text))
    return found


def span_of(text: str, word: int, phrase: str) -> tuple[int, int] | None:
    """Return where a phrase stands that begins with a word of that number, None if it does not."""
    start = len(" ".join(text.split(" ")[:word])) + (word > 0)
    right = text[start:].lower().startswith(phrase.lower())
    return (start, start + len(phrase)) if right else None


def written_out(task: str, fields: dict) -> Iterator[Written | None]:
    """Yield the rows of an object; None for one of WSC whose index is not that of its phrase."""
    if task == "MultiRC":
        for question in fields["passage"]["questions"]:
            for answer in question["answers"]:
                asked = f"Question: {question['question']} Answer: {answer['text']}"
                yield asked, fields["passage"]["text"], str(answer["label"])
        return
    if task == "ReCoRD":
        text = fields["passage"]["text"]
        entities = [(e["start"], e["end"] + 1) for e in fields["passage"]["entities"]]
        for query in fields["qas"]:
            answers = {(a["start"], a["end"] + 1) for a in query["answers"]}
            kept = answer_characters(text, entities, answers)
            yield query["query"], starred(text, entities), kept
        return
    label = str(fields["label"])
    if task == "BoolQ":
        first, second = fields["question"], fields["passage"]
    elif task in ("CB", "RTE"):
        first, second = fields["hypothesis"], fields["premise"]
    elif task == "COPA":
        first = fields["premise"] + " " + fields["question"]
        second = f"0: {fields['choice1']} 1: {fields['choice2']}"
    elif task == "WiC":
        first, second = (
            starred(fields[f"sentence{n}"], [(fields[f"start{n}"], fields[f"end{n}"])])
            for n in "12"
        )
    else:
        about, text = fields["target"], fields["text"]
        spans = [span_of(text, about[f"span{n}_index"], about[f"span{n}_text"]) for n in "12"]
        if None in spans:
            yield None
            return
        first = f"{about['span1_text']} = {about['span2_text']}"
        second = starred(text, [span for span in spans if span])
    yield first, second, label.lower()


def rows_of(words: Path, task: str) -> tuple[LabelledSet, list[Written | None]]:
    folder, objects = real(words, task)
    data = LabelledSet(folder, "valid")
    rows = [row for fields in objects for row in written_out(task, fields)]
    assert len(data) == len(rows) and len(rows) >= 32
    return data, rows


@pytest.mark.parametrize("task", CLASSES)
def test_real_texts(words: Path, task: str) -> None:
    """Both texts of every row, its class, and the classes in their order."""
    data, rows = rows_of(words, task)
    tokenizer = load_tokenizer(words)
    assert data.label_names == CLASSES[task][1] == list(find_text_form(f"superglue/{task}").labels)
    for number, row in enumerate(rows):
        if row is None:
            continue
        assert [tokenizer.decode(column[number]) for column in data.inputs] == list(row[:2])
        if task != "ReCoRD":
            assert data.label_names[data.labels[number]] == row[2]
    assert sum(row is None for row in rows) <= len(rows) // 50


@pytest.mark.parametrize("task", CLASSES)
def test_real_label_tokens(words: Path, task: str) -> None:
    """`[CLSn] A [SEP] B [SEP]` byte by byte, and at every place its label token."""
    data, rows = rows_of(words, task)
    number, names = CLASSES[task]
    vocabulary, symbol = Vocabulary.load(words / "dict.txt"), _byte_symbols()
    labels = TokenLabels(data.folder, "valid", vocabulary, number, ROOM)
    assert len(labels.sample) == len(data), "every row is one window"
    for at, row in enumerate(rows):
        if row is None:
            continue
        first, second = ([symbol[byte] for byte in text.encode()] for text in row[:2])
        tokens, lengths, targets = labels.rows(np.array([at]))
        found = [[vocabulary.symbols[i] for i in ids[0].tolist()] for ids in (tokens, targets)]
        assert found[0] == [f"[CLS{number}]", *first, "[SEP]", *second, "[SEP]"]
        assert lengths.tolist() == [len(found[0])]
        if task == "ReCoRD":
            kept = [k for k, c in zip(row[2], row[1], strict=True) for _ in c.encode()]
            answers = [byte if k else "[SEP]" for k, byte in zip(kept, second, strict=True)]
            wanted = ["[SEP]"] * (len(first) + 2) + [*answers, "[SEP]"]
        else:
            label = ["[SEP]", f"[CLS{number}]", "[MASK]"][names.index(row[2])]
            wanted = [label] * len(found[0])
        assert found[1] == wanted


def test_real_coreference(words: Path) -> None:
    """Both spans stand between asterisks also where the index is not that of the phrase."""
    folder, objects = real(words, "WSC")
    data, tokenizer = LabelledSet(folder, "valid"), load_tokenizer(words)
    assert len(data) == len(objects) == 104
    for row, fields in enumerate(objects):
        second = tokenizer.decode(data.inputs[1][row])
        target = fields["target"]
        assert second.replace("*", "") == fields["text"].replace("*", "")
        assert second.count("*") == 4 + fields["text"].count("*")
        for name in ("span1_text", "span2_text"):
            start = target[name].split()[0].lower()
            assert f"*{start}" in second.lower(), (second, target)


def test_real_answers(words: Path) -> None:
    """The tokens that keep their ids are those of the answers, in windows of any length."""
    folder, objects = real(words, "ReCoRD")
    vocabulary, tokenizer = Vocabulary.load(words / "dict.txt"), load_tokenizer(words)
    data = TokenLabels(folder, "valid", vocabulary, 6, 4096)
    assert len(data) == len(objects) == 32 and len(data.sample) == 32
    for row, fields in enumerate(objects):
        (query,) = fields["qas"]
        _, _, targets = data.rows(np.array([row]))
        kept = tokenizer.decode(t for t in targets[0] if t not in (-1, vocabulary.sep))
        text = fields["passage"]["text"]
        spans = sorted({(a["start"], a["end"] + 1) for a in query["answers"]})
        assert kept == "".join(text[start:end] for start, end in spans)
    cut = TokenLabels(folder, "valid", vocabulary, 6, 512, stride=0)
    whole = [set(np.flatnonzero(r > 2)) for r in data.rows(np.arange(32))[2]]
    tokens, _, targets = cut.rows(np.arange(len(cut.sample)))
    seen = [0] * 32
    for window, sample in enumerate(cut.sample):
        answer = targets[window] > vocabulary.sep
        assert (targets[window][answer] == tokens[window][answer]).all()
        seen[sample] += int(answer.sum()) if cut.starts[window, 0] == 0 else 0
    assert seen == [len(places) for places in whole]
