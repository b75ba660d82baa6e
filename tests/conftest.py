"""Fixtures that tests of several folders share: one thread, the registered methods, small data."""

import functools
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import bam_bench
import bam_data
import battery
import composing
import image_data
import parallel_data
import pytest
import sharing
import squad_data
import tartan_bench
import torch
import wnli_data
import word_data
from hypothesis import settings
from meta_pseudo_data import make_even, make_ragged
from superglue_data import make_superglue

from metaseq_lm.cli import main
from metaseq_lm.core import plugins

ROOT = Path(__file__).resolve().parents[1]
# A busy machine is no failure: no test has a time limit of its own.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models are fastest on one thread, and tests must not fight for cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def remembered_compositions() -> Iterator[None]:
    """Configurations of the same names are composed once."""
    with composing.remembered():
        yield


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    """Every built-in name is registered, and the example plug-in with them."""
    plugins.load_all(str(ROOT / "user_dir"))


@pytest.fixture(scope="session")
def moons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A binarised Two Moons folder: 600 + 100 lines, which_moon_20, questions, WNLI."""
    text = tmp_path_factory.mktemp("text")
    command = [sys.executable, str(ROOT / "examples/meta_pseudo_label/two_moons.py"), str(text)]
    subprocess.run(command, check=True)
    for split, count in (("train", 600), ("valid", 100)):
        kept = (text / f"{split}.txt").read_text().splitlines()[:count]
        (text / f"{split}.txt").write_text("\n".join(kept) + "\n")
    data = tmp_path_factory.mktemp("data") / "moons"
    corpus = ["--trainpref", f"{text}/train.txt", "--validpref", f"{text}/valid.txt"]
    tokenizer = ["--tokenizer-corpus", f"{text}/tokenizer.txt", "--vocab-size", "512"]
    assert main(["preprocess", *corpus, *tokenizer, "--destdir", str(data)]) == 0
    name = "which_moon_20"
    files = [f"--{s}pref={text}/{name}/{s}.tsv" for s in ("train", "valid", "test")]
    assert main(["preprocess", "--labelled", name, *files, "--destdir", str(data)]) == 0
    binarise_documents(text, data.parent / "documents")
    add_pairs(text, data)
    bam_data.write_outputs(data, data.parent / "teacher", ("pairs", "scores"))
    image_data.write(data.parent / "images")
    image_data.write(data.parent / "larger_images", size=16)
    parallel_data.binarise(text, data.parent / "parallel")
    word_data.binarise(text, data.parent / "words")
    word_data.language_model(data.parent / "words", data.parent / "elmo")
    squad_data.binarise(data, "squad", {"train": 6, "valid": 2})
    assert main(wnli_data.arguments(wnli_data.write(text / "wnli", 15), data)) == 0
    return data


@pytest.fixture(scope="session")
def whole(moons: Path, tmp_path_factory: pytest.TempPathFactory) -> battery.Whole:
    """The weights of a case after six updates on whole batches."""

    @functools.cache
    def weights(case: battery.Case) -> dict[str, torch.Tensor]:
        def train(place: Path) -> None:
            config = battery.configure(moons, place / "run", case, *battery.dropped())
            torch.save(battery.train_uncounted(config), place / "weights.pt")

        folder = sharing.once(tmp_path_factory, f"whole/{case[0]}-{case[1]}", train)
        return torch.load(folder / "weights.pt", weights_only=True)

    return weights


@pytest.fixture(scope="session")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder of words: text, the tagged sets "chunk" and "pos", the treebank "dep"."""
    folder = tmp_path_factory.mktemp("sentences")
    word_data.binarise(folder, folder / "data")
    return folder / "data"


@pytest.fixture(scope="session")
def bam_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with three small labelled sets."""
    return bam_bench.make_data(tmp_path_factory.mktemp("bam") / "data")


@pytest.fixture(scope="session")
def teacher_runs(bam_sets: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The run folders of a teacher of two sets and of one of the third."""
    place = tmp_path_factory.mktemp("teachers")
    return [
        bam_bench.teacher(place, bam_sets, "words", "values"),
        bam_bench.teacher(place, bam_sets, "few"),
    ]


@pytest.fixture(scope="session")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data like Two Moons: every line has 34 tokens."""
    return make_even(tmp_path_factory.mktemp("even"))


@pytest.fixture(scope="session")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data with lines of 6 to 34 tokens, so that batches are padded."""
    return make_ragged(tmp_path_factory.mktemp("ragged"))


@pytest.fixture(scope="session")
def superglue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of sentences, and MultiRC, ReCoRD and CB as text."""
    return make_superglue(tmp_path_factory.mktemp("superglue"))


@pytest.fixture(scope="session")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a labelled set "topic" and the splits "train" and "long" of its domain."""
    return tartan_bench.make_data(tmp_path_factory.mktemp("topics"))


def binarise_documents(text: Path, data: Path) -> None:
    """Make a corpus of documents: 60 + 12 of 4 to 9 sentences of 3 to 7 words each."""
    draw = random.Random(1)
    for split, count in (("train", 60), ("valid", 12)):
        lines = []
        for _ in range(count):
            for _ in range(draw.randint(4, 9)):
                lines.append(" ".join(draw.choices("abcdefghijklm", k=draw.randint(3, 7))))
            lines.append("")
        (text / f"documents.{split}").write_text("\n".join(lines) + "\n")
    files = [f"--{split}pref={text}/documents.{split}" for split in ("train", "valid")]
    options = ["--documents", "blank", "--tokenizer", "word", "--destdir", str(data)]
    assert main(["preprocess", *files, *options]) == 0


def add_pairs(text: Path, data: Path) -> None:
    """Add "pairs", whose label is which of two numbers is larger, and "scores", by how much."""
    rng = random.Random(1)
    numbers = [(rng.randint(0, 99), rng.randint(0, 99)) for _ in range(40)]
    lines = {
        "pairs": [f"{a} {a}\t{b}\t{'less' if a < b else 'more'}" for a, b in numbers],
        "scores": [f"{a} {a}\t{b}\t{(a - b) / 50 + 1}" for a, b in numbers],
    }
    for name, rows in lines.items():
        files = []
        for split, part in (("train", rows[:20]), ("valid", rows[20:])):
            file = text / f"{name}.{split}.tsv"
            file.write_text("\n".join(["text_a\ttext_b\tlabel", *part]) + "\n")
            files.append(f"--{split}pref={file}")
        more = ["--regression"] if name == "scores" else []
        set_of = ["preprocess", "--labelled", name, *files, *more]
        assert main([*set_of, "--destdir", str(data)]) == 0
