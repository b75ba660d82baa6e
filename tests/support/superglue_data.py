"""Made-up rows of three tasks of SuperGLUE, binarised as text together with a corpus."""

import json
import random
from pathlib import Path
from typing import Any

from metaseq_lm.cli import main

NAMES = ["Ann", "Bob", "Cid", "Dot"]
WORDS = "the a sun moon tree saw met was in on by red old new big".split()


def sentence(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


def multirc(draw: random.Random, number: int) -> dict:
    questions, at = [], 100 * number
    for question in range(3):
        answers = [
            {"text": sentence(draw, 2), "idx": at + 10 * question + i, "label": draw.randint(0, 1)}
            for i in range(draw.randint(1, 3))
        ]
        questions.append({"question": sentence(draw, 3), "idx": question, "answers": answers})
    passage = {"text": sentence(draw, draw.randint(5, 40)), "questions": questions}
    return {"idx": number, "passage": passage}


def record(draw: random.Random, number: int) -> dict:
    words = [*draw.choices(WORDS + 2 * NAMES, k=draw.randint(10, 40)), "Ann"]
    text, entities = " ".join(words), []
    at = 0
    for word in words:
        if word in NAMES:
            entities.append({"start": at, "end": at + len(word) - 1})
        at += len(word) + 1
    gold = {text[e["start"] : e["end"] + 1] for e in entities[:1]}
    answers = [
        {**e, "text": text[e["start"] : e["end"] + 1]}
        for e in entities
        if text[e["start"] : e["end"] + 1] in gold
    ]
    query = {"idx": number, "query": f"@placeholder {sentence(draw, 3)}", "answers": answers}
    return {"idx": number, "passage": {"text": text, "entities": entities}, "qas": [query]}


def bank(draw: random.Random, number: int) -> dict:
    label = draw.choice(["contradiction", "entailment", "neutral"])
    texts = {"premise": sentence(draw, draw.randint(3, 40)), "hypothesis": sentence(draw, 4)}
    return {"idx": number, "label": label, **texts}


MAKERS = {"MultiRC": (multirc, 5, 8), "ReCoRD": (record, 6, 20), "CB": (bank, 3, 30)}


def make_superglue(folder: Path) -> Path:
    """Return a data folder of sentences and three tasks, about 20 rows each, up to 45 tokens."""
    draw = random.Random(1)
    for split, count in (("train", 200), ("valid", 30)):
        lines = [sentence(draw, draw.randint(4, 30)) + " *Ann* 0: 1:" for _ in range(count)]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    files = [f"--{split}pref={folder}/{split}.txt" for split in ("train", "valid")]
    made = folder / "data"
    options = ["--vocab-size", "320", "--destdir", str(made)]
    assert main(["preprocess", *files, *options]) == 0
    for task, (maker, _, count) in MAKERS.items():
        source = folder / task
        source.mkdir()
        for file in ("train.jsonl", "val.jsonl", "test.jsonl"):
            rows = [maker(draw, number) for number in range(count)]
            if file == "test.jsonl":
                rows = [without_labels(row) for row in rows]
            (source / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = ["preprocess", "--benchmark", f"superglue/{task}", "--as-text"]
        assert main([*command, "--source", str(source), "--destdir", str(made)]) == 0
    return made


def without_labels(node: Any) -> Any:
    if isinstance(node, dict):
        return {k: without_labels(v) for k, v in node.items() if k not in ("label", "answers_")}
    return [without_labels(v) for v in node] if isinstance(node, list) else node
