"""`metaseq-lm doctor` on parallel text, images, tagged sets and treebanks, sound and damaged."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import image_data
import numpy as np
import parallel_data
import pytest
import word_data
from mutations import resign

from metaseq_lm.cli import main
from metaseq_lm.data.doctor.examine import STANDS_ALONE, examine
from metaseq_lm.data.doctor.findings import checks_of
from metaseq_lm.data.images import FILE, IMAGES, Images, save_images
from metaseq_lm.data.parallel.sets import PARALLEL, ParallelSet
from metaseq_lm.data.preprocess.corpus import CorpusPipeline
from metaseq_lm.data.preprocess.labelled import LabelledPipeline
from metaseq_lm.data.preprocess.squad import SquadPipeline
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.words.sets import KINDS

ALL = "manifest.json agrees with every checksum"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders "toy" (parallel text), "images" and "words"."""
    root = tmp_path_factory.mktemp("sound")
    parallel_data.binarise(root / "text", root / "toy")
    image_data.write(root / "images")
    word_data.binarise(root / "text", root / "words")
    return root


@pytest.fixture
def data(sound: Path, tmp_path: Path) -> Path:
    """A copy of them that a test may damage."""
    return shutil.copytree(sound, tmp_path / "data", ignore=shutil.ignore_patterns("text"))


def look(folder: Path, full: bool = True) -> list[str]:
    """Return the lines of the report, without the machine's."""
    return [f"{found.level} {found.text}" for found in examine(folder, full)]


def every_line_is_ok(folder: Path, *patterns: str) -> None:
    """The lines of the report are of level ok and hold `patterns`, one each."""
    for line, pattern in zip(look(folder), patterns, strict=True):
        assert re.match(f"ok {re.escape(str(folder))}: {pattern}", line), line


def has_line(lines: list[str], beginning: str, *facts: str) -> bool:
    """Tell whether one of the lines has this beginning and all of `facts`."""
    selected = [line for line in lines if line.startswith(beginning)]
    return any(all(fact in line for fact in facts) for line in selected)


def only_error(folder: Path, words: str) -> list[str]:
    """Return the lines of the report; there must be one error, with `words` in it."""
    lines = look(folder)
    wrong = [line for line in lines if line.startswith("error ")]
    assert len(wrong) == 1 and words in wrong[0], lines
    return lines


def rewrite(prefix: Path, rows: Iterable, dtype: type = np.int32) -> None:
    """Put other rows into a pair of files, which the manifest agrees with."""
    with IndexedWriter(prefix, dtype) as writer:
        for row in rows:
            writer.add(np.asarray(row))
    resign(prefix.parent)


# -------------------------------------------------------------------- parallel text


def test_parallel_text(data: Path) -> None:
    toy = data / "toy"
    every_line_is_ok(
        toy,
        re.escape(ALL),
        "source text: word, 13 symbols .*source.dict.txt",
        "target text: word, 13 symbols .*target.dict.txt",
        "train has 48 pairs, .*3.7 tokens of en .*3.7 of vi",
        "unlabelled has 40 sentences of en .*3.6 tokens",
        "valid has 12 pairs, .*3.6 tokens of en .*3.6 of vi",
        r"0 of 12 pairs of valid \(0.0 %\) .*in train",
    )
    assert main(["doctor", str(toy)]) == 0


def test_pairs_of_train_in_other_splits(data: Path) -> None:
    """A pair counts if both sides are the same, not if one is, nor if they changed places."""
    toy = data / "toy"
    train, valid = ParallelSet(toy, "train"), ParallelSet(toy, "valid")
    assert train.target is not None and valid.target is not None
    source = [train.source[i] for i in (0, 1, 2)] + [train.target[3]]
    target = [train.target[i] for i in (0, 1)] + [valid.target[2], train.source[3]]
    source += [valid.source[i] for i in range(4, 12)]
    target += [valid.target[i] for i in range(4, 12)]
    rewrite(toy / "valid.source", source)
    rewrite(toy / "valid.target", target)
    assert has_line(look(toy), f"warning {toy}:", "2 of 12", "valid (16.7 %)", "in train")


@pytest.mark.parametrize("side, size", [("source", 13), ("target", 16)])
def test_ids_of_each_side_have_their_vocabulary(tmp_path: Path, side: str, size: int) -> None:
    text = parallel_data.write(tmp_path / "text")
    with open(text / "train.vi", "a") as file:
        file.write("X Y Z\n")
    with open(text / "train.en", "a") as file:
        file.write("a b c\n")
    every = ["--target-min-frequency", "1"]
    assert main(parallel_data.arguments(text, tmp_path / "toy", *every)) == 0
    toy = tmp_path / "toy"
    rows = [[6, 7]] * 12
    rewrite(toy / f"valid.{side}", [*rows[1:], [size - 1, 6]])
    assert not [line for line in look(toy) if line.startswith("error")]
    rewrite(toy / f"valid.{side}", [*rows[1:], [size, 6]])
    lines = only_error(toy, f"valid.{side}.bin: token id {size}, but")
    assert has_line(lines, "error", f" {size - 1}")


@pytest.mark.parametrize("side", ["source", "target"])
def test_rows_of_parallel_text_that_cannot_be(data: Path, side: str) -> None:
    toy = data / "toy"
    rewrite(toy / f"valid.{side}", [[6]] * 4 + [[]] + [[7]] * 6 + [[]])
    assert has_line(look(toy), f"warning {toy}/valid.{side}: 2 rows", "first row 5")
    rewrite(toy / f"valid.{side}", [[np.nan, 7.0]] * 12, np.float32)
    lines = only_error(toy, f"valid.{side}.bin: holds float32, not tokens")
    assert not any("in train" in line for line in lines)
    rewrite(toy / f"valid.{side}", [[]] * 12)
    only_error(toy, f"valid.{side}: 12 documents, 0 tokens")
    rewrite(toy / f"valid.{side}", [[6]] * 11)
    lines = only_error(toy, "do not belong together")
    assert any("48 pairs" in line for line in lines)
    assert not any("pairs of valid" in line for line in lines)


def test_damaged_references(data: Path) -> None:
    path = data / "toy" / "valid.references.txt"
    text = path.read_bytes()
    path.write_bytes(text[: text.rstrip().rfind(b"\n") + 1])
    resign(data / "toy")
    only_error(data / "toy", "valid.references.txt: 11 lines but")
    path.write_bytes(b"\xff" + text[1:])
    resign(data / "toy")
    only_error(data / "toy", "valid.references.txt:1: invalid UTF-8")


def test_tokenizers_of_parallel_text(data: Path) -> None:
    path = data / "toy" / "target.dict.txt"
    text = path.read_text()
    path.write_text(text.replace("\nA ", "\nZ "))
    resign(data / "toy")
    lines = only_error(data / "toy", "target tokenizer is not the one")
    path.write_text(text[:3])
    resign(data / "toy")
    lines = only_error(data / "toy", "target.dict.txt")
    assert any("source text: word" in line for line in lines)
    assert any("12 pairs" in line for line in lines)
    manifest = Manifest.load(data / "toy")
    del manifest.details["target"]
    manifest.save(data / "toy")
    only_error(data / "toy", "manifest.json: unknown content: KeyError('target')")


def test_a_missing_file_is_told_once(data: Path) -> None:
    (data / "toy" / "valid.target.bin").unlink()
    only_error(data / "toy", "valid.target.bin: missing")


def test_sets_that_need_no_corpus(data: Path) -> None:
    """The folder that they lie in is sound; with a set that needs a corpus it is not."""
    shutil.rmtree(data / "words")
    lines = look(data, full=False)
    assert {line.split()[0] for line in lines} == {"ok"}
    assert any("12 pairs" in line for line in lines)
    assert any("80 images" in line for line in lines)
    manifest = Manifest.load(data / "images")
    manifest.kind = "another"
    manifest.save(data / "images")
    assert has_line(look(data), f"error {data}:", "(.bin and .idx)")


# -------------------------------------------------------------------- images


def test_images(data: Path) -> None:
    images = data / "images"
    shares = "labels a 25.0 %, b 25.0 %, c 25.0 %, d 25.0 %"
    every_line_is_ok(
        images,
        re.escape(ALL),
        f"train has 160 images of 8 x 8 pixels .*3 channels; {shares}",
        f"test has 80 images of 8 x 8 pixels .*3 channels; {shares}",
        r"0 of 80 images of test \(0.0 %\) .*in train",
    )
    assert main(["doctor", str(images)]) == 0


def store(folder: Path, **arrays: np.ndarray) -> Path:
    """Write train and test as `image_data` makes them, but for `arrays`, and return the folder."""
    content = {"names": np.array(image_data.NAMES)}
    for split, count in (("train", 4), ("test", 2)):
        made = image_data.make(count, count)
        content |= {f"{split}_images": made.images, f"{split}_labels": made.labels}
    np.savez(folder / FILE, **(content | arrays))
    resign(folder)
    return folder


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("test_images", np.zeros((8, 8, 8, 3)), "test: images of type float64"),
        ("test_images", np.zeros((8, 8, 9, 3), np.uint8), "test has images of 8 x 9 pixels"),
        ("test_images", np.zeros((8, 8, 8, 1), np.uint8), "in 1 channel, but train"),
        ("test_images", np.zeros((7, 8, 8, 3), np.uint8), "one whole number for each"),
        ("test_labels", np.arange(8), "test: labels from 0 to 7, but"),
        ("test_labels", np.array([None] * 8), "Object arrays cannot be loaded"),
    ],
)
def test_wrong_images(data: Path, name: str, value: np.ndarray, words: str) -> None:
    lines = only_error(store(data / "images", **{name: value}), words)
    assert any("16 images" in line for line in lines)


def test_labels_and_copies_of_images(data: Path) -> None:
    images = image_data.make(2, 2).images
    images[5] = image_data.make(4, 4).images[11]
    train = np.arange(16) % 3
    lines = look(store(data / "images", test_images=images, train_labels=train))
    place = f"warning {data}/images:"
    assert has_line(lines, f"{place} 1 of 8", "test (12.5 %)", "in train")
    assert has_line(lines, f"{place} train has", "example of d")
    assert has_line(lines, f"{place} test has labels", "of: d")


def test_many_classes(tmp_path: Path) -> None:
    """Not one number for each, but the least and the greatest."""
    names = [f"class {i}" for i in range(30)]
    labels = np.concatenate([np.arange(30), [7, 7]])
    made = Images(np.zeros((32, 2, 2, 1), np.uint8), labels, tuple(names))
    save_images(tmp_path, {"train": made}, names)
    line = look(tmp_path)[1]
    assert re.search("32 images.*2.x.2.*1.channel", line)
    assert re.search(r"30 classes.*0 3\.1.*7 9\.4", line)


def change_pixel(content: bytearray) -> None:
    content[content.index(b"NUMPY") + 1000] ^= 1


def break_header(content: bytearray) -> None:
    """Leave a bracket open: Python's own tokenizer complains."""
    at = content.index(b"), }", content.index(b"train_images.npy"))
    content[at : at + 1] = b" "


def encrypt(content: bytearray) -> None:
    """Mark the first entry of the directory as encrypted."""
    content[content.index(b"PK\x01\x02") + 8] |= 1


@pytest.mark.parametrize("damage", [change_pixel, break_header, encrypt])
def test_damaged_images(data: Path, damage: Callable[[bytearray], None]) -> None:
    """An error without --verify, and no exception."""
    path = data / "images" / FILE
    content = bytearray(path.read_bytes())
    damage(content)
    path.write_bytes(content)
    lines = look(data / "images", full=False)
    assert any(line.startswith(f"error {path}: damaged") for line in lines), lines


# -------------------------------------------------------------------- sentences of words


def test_word_sets_of_a_folder_without_manifest(data: Path) -> None:
    """Their readers go over all rows there too."""
    words = data / "words"
    (words / "manifest.json").unlink()
    lines = look(words)
    assert has_line(lines, f"ok {words}/dep: train", "40 sentences", "474 words")
    assert has_line(lines, f"ok {words}/chunk:", "0 of 10", "valid")
    path = words / "dep" / "train.heads.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    resign(words / "dep")
    only_error(words, "train.heads.bin: a number outside")


def test_a_damaged_manifest_does_not_hide_the_other_sets(data: Path) -> None:
    (data / "words" / "chunk" / "manifest.json").write_text("{")
    lines = only_error(data / "words", "chunk/manifest.json: damaged")
    assert has_line(lines, f"ok {data}/words/pos: valid", "10 sentences")


def test_doctor_without_torch_names_the_remedy(data: Path) -> None:
    """The readers need it; what the doctor says of the machine is then the news."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from metaseq_lm.cli import main\n"
        "sys.exit(main(['doctor', sys.argv[1]]))"
    )
    command = [sys.executable, "-c", program, str(data / "toy")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search("error +torch", done.stdout) and "pip install" in done.stdout


def test_every_kind_has_a_check() -> None:
    kinds = {pipeline.kind for pipeline in (CorpusPipeline, LabelledPipeline, SquadPipeline)}
    assert all(checks_of(kind) for kind in kinds | {PARALLEL, IMAGES, *KINDS})
    assert STANDS_ALONE == {PARALLEL, IMAGES}
