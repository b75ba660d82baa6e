"""Two Moons and other small data sets, each made when a test first needs it.

`data` is always the Two Moons folder. It contains the labelled sets of SETS, which share its
tokenizer; all other data are next to it.
"""

import fcntl
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import bam_data
import cloth_data
import image_data
import parallel_data
import squad_data
import wnli_data
import word_data

from metaseq_lm.cli import main

ROOT = Path(__file__).resolve().parents[2]
SETS = ("pairs", "scores", "squad", "tagged", "topics", "WNLI", "CLOTH")


def make_moons(data: Path) -> None:
    """Make `data`: 600 + 100 lines, and the labelled set which_moon_20."""
    text = data.parent / "text"
    command = [sys.executable, str(ROOT / "examples/meta_pseudo_label/two_moons.py"), str(text)]
    subprocess.run(command, check=True)
    for split, count in (("train", 600), ("valid", 100)):
        lines = (text / f"{split}.txt").read_text().splitlines()[:count]
        (text / f"{split}.txt").write_text("\n".join(lines) + "\n")
    corpus = ["--trainpref", f"{text}/train.txt", "--validpref", f"{text}/valid.txt"]
    tokenizer = ["--tokenizer-corpus", f"{text}/tokenizer.txt", "--vocab-size", "512"]
    assert main(["preprocess", *corpus, *tokenizer, "--destdir", str(data)]) == 0
    name = "which_moon_20"
    files = [f"--{s}pref={text}/{name}/{s}.tsv" for s in ("train", "valid", "test")]
    assert main(["preprocess", "--labelled", name, *files, "--destdir", str(data)]) == 0


def ensure(data: Path, name: str) -> Path:
    """Return the folder of a data set, made if missing."""
    place = data / name if name in SETS else data.parent / name
    with open(data.parent / f"{name}.lock", "w") as lock:  # replicas may call this at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            try:
                MAKERS[name](data)
            except BaseException:
                shutil.rmtree(place, ignore_errors=True)
                raise
    return place


def make_documents(data: Path) -> None:
    """Make a corpus of documents: 60 + 12 of 4 to 9 sentences of 3 to 7 words each."""
    text, draw = data.parent / "text", random.Random(1)
    for split, count in (("train", 60), ("valid", 12)):
        lines = []
        for _ in range(count):
            for _ in range(draw.randint(4, 9)):
                lines.append(" ".join(draw.choices("abcdefghijklm", k=draw.randint(3, 7))))
            lines.append("")
        (text / f"documents.{split}").write_text("\n".join(lines) + "\n")
    files = [f"--{split}pref={text}/documents.{split}" for split in ("train", "valid")]
    options = ["--documents", "blank", "--tokenizer", "word"]
    assert main(["preprocess", *files, *options, "--destdir", f"{data.parent}/documents"]) == 0


def make_pairs(data: Path) -> None:
    """Make a set labelled by which of two numbers is larger."""
    rows = [f"{a} {a}\t{b}\t{'less' if a < b else 'more'}" for a, b in numbers()]
    make_labelled(data, "pairs", rows)


def make_scores(data: Path) -> None:
    """Make a set labelled by the difference of two numbers."""
    rows = [f"{a} {a}\t{b}\t{(a - b) / 50 + 1}" for a, b in numbers()]
    make_labelled(data, "scores", rows, "--regression")


def make_topics(data: Path) -> None:
    """Make a set with three classes."""
    rows = [f"{a}\t{b}\t{' '.join(c for c in 'abc' if a % 7 < ord(c) % 7)}" for a, b in numbers()]
    make_labelled(data, "topics", rows, "--label-separator", " ")


def numbers() -> list[tuple[int, int]]:
    """Return pairs of numbers, always the same."""
    draw = random.Random(1)
    return [(draw.randint(0, 99), draw.randint(0, 99)) for _ in range(40)]


def make_labelled(data: Path, name: str, rows: list[str], *options: str) -> None:
    """Make a labelled set of two halves, for training and validation."""
    files = []
    for split, part in (("train", rows[:20]), ("valid", rows[20:])):
        file = data.parent / "text" / f"{name}.{split}.tsv"
        file.write_text("\n".join(["text_a\ttext_b\tlabel", *part]) + "\n")
        files.append(f"--{split}pref={file}")
    command = ["preprocess", "--labelled", name, *files, *options]
    assert main([*command, "--destdir", str(data)]) == 0


def make_wnli(data: Path) -> None:
    """Make WNLI of 15 sentences."""
    files = wnli_data.write(data.parent / "text" / "wnli", 15)
    assert main(wnli_data.arguments(files, data)) == 0


def make_tagged(data: Path) -> None:
    """Make a tagged set for the tokenizer of `data`."""
    word_data.write(data.parent / "text" / "tagged", 20, 10)
    files = [f"--{s}pref={data.parent}/text/tagged/{s}.conll" for s in ("train", "valid")]
    assert main(["preprocess", "--tagged", "tagged", *files, "--destdir", str(data)]) == 0


def make_cloth(data: Path) -> None:
    """Make CLOTH with 10 passages per split."""
    files = cloth_data.write(data.parent / "text" / "cloth")
    assert main(cloth_data.arguments(files, data)) == 0


def make_teacher(data: Path) -> None:
    """Make the outputs of a teacher for "pairs" and "scores"."""
    names = ("pairs", "scores")
    for name in names:
        ensure(data, name)
    bam_data.write_outputs(data, data.parent / "teacher", names)


def make_language_model(data: Path) -> None:
    """Make an untrained language model of the words of "words"."""
    word_data.language_model(ensure(data, "words"), data.parent / "elmo")


MAKERS: dict[str, Callable[[Path], object]] = {
    "CLOTH": make_cloth,
    "documents": make_documents,
    "elmo": make_language_model,
    "images": lambda data: image_data.write(data.parent / "images"),
    "larger_images": lambda data: image_data.write(data.parent / "larger_images", size=16),
    "pairs": make_pairs,
    "parallel": lambda data: parallel_data.binarise(data.parent / "text", data.parent / "parallel"),
    "scores": make_scores,
    "squad": lambda data: squad_data.binarise(data, "squad", {"train": 6, "valid": 2}),
    "tagged": make_tagged,
    "teacher": make_teacher,
    "topics": make_topics,
    "WNLI": make_wnli,
    "words": lambda data: word_data.binarise(data.parent / "text", data.parent / "words"),
}
