"""Small parallel text: a sentence of letters, and the same letters in capitals from the last to the
first.
"""

import random
from pathlib import Path

from metaseq_lm.cli import main

LETTERS = "abcdefgh"


def sentences(count: int, seed: int) -> list[list[str]]:
    """Return sentences of 2 to 5 letters."""
    draw = random.Random(seed)
    return [draw.choices(LETTERS, k=draw.randint(2, 5)) for _ in range(count)]


def write(folder: Path, train: int = 48, valid: int = 12) -> Path:
    """Write train, dev (.en, .vi) and mono.txt, which is only source text."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", train, 1), ("dev", valid, 2)):
        rows = sentences(count, seed)
        (folder / f"{name}.en").write_text("".join(" ".join(row) + "\n" for row in rows))
        turned = [[letter.upper() for letter in reversed(row)] for row in rows]
        (folder / f"{name}.vi").write_text("".join(" ".join(row) + "\n" for row in turned))
    mono = "".join(" ".join(row) + "\n" for row in sentences(40, 3))
    (folder / "mono.txt").write_text(mono)
    return folder


def arguments(text: Path, data: Path, *more: str) -> list[str]:
    """Return the command that makes DATA from the text of `write`."""
    files = ["--trainpref", f"{text}/train", "--validpref", f"{text}/dev"]
    languages = ["--source-lang", "en", "--target-lang", "vi"]
    where = ["--parallel", data.name, "--destdir", str(data.parent)]
    return ["preprocess", *files, *languages, *where, *more]


def binarise(text: Path, data: Path, train: int = 48) -> Path:
    """Write a data folder with an unlabelled split."""
    place = write(text / "parallel", train)
    assert main(arguments(place, data, "--unlabelled", f"{place}/mono.txt")) == 0
    return data
