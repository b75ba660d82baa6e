"""Generated questions: official SQuAD files of random numbers, and their data folders."""

import json
import random
from pathlib import Path
from typing import Any

from metaseq_lm.data.preprocess.pipeline import Request, preprocess
from metaseq_lm.data.preprocess.squad import SquadPipeline
from metaseq_lm.data.tokenizers.loading import load_tokenizer


def paragraph(draw: random.Random, name: str, questions: int, impossible: bool) -> dict[str, Any]:
    """Return a context of 40 distinct numbers and questions about which number follows another.

    If `impossible`, every third question is about a number that is not in the context.
    """
    numbers = draw.sample(range(100, 999), 50)
    words = [str(n) for n in numbers[:40]]
    context, qas = " ".join(words), []
    for number in range(questions):
        if impossible and number % 3 == 2:
            about, answers = str(numbers[40 + number]), []
        else:
            at = draw.randrange(39)
            about, text = words[at], " ".join(words[at + 1 : at + 1 + draw.randint(1, 3)])
            start = context.index(words[at]) + len(words[at]) + 1
            answers = [{"text": text, "answer_start": start}]
        node = {"id": f"{name}-{number}", "question": f"after {about} ?", "answers": answers}
        qas.append(node | {"is_impossible": not answers} if impossible else node)
    return {"context": context, "qas": qas}


def official(seed: str, paragraphs: int, questions: int = 3, impossible: bool = True) -> dict:
    """Return the content of an official file of one article."""
    draw = random.Random(seed)
    every = [paragraph(draw, f"{seed}{i}", questions, impossible) for i in range(paragraphs)]
    version = "v2.0" if impossible else "1.1"
    return {"version": version, "data": [{"title": "Numbers", "paragraphs": every}]}


def write(path: Path, content: Any) -> Path:
    """Write JSON to a file and return its path."""
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def binarise(
    data: Path, name: str, paragraphs: dict[str, int], impossible: bool = True, seed: str = ""
) -> Path:
    """Make DATA/NAME from generated files with `paragraphs` per split; return the folder.

    The splits differ unless there is a `seed`.
    """
    splits = {}
    for split, count in paragraphs.items():
        content = official(seed or split, count, impossible=impossible)
        splits[split] = [write(data.parent / f"{name}.{split}.json", content)]
    version = "v2.0" if impossible else "v1.1"
    preprocess(SquadPipeline(Request(data / name, splits), version, load_tokenizer(data)))
    return data / name
