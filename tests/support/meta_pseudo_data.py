"""Small data folders in the form of Two Moons, binarised by the command line."""

from pathlib import Path

import numpy as np

from metaseq_lm.cli import main


def points(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return integer points (count, 2) on two half circles, and the half circle of each."""
    label = rng.integers(0, 2, count)
    angle = rng.uniform(0, np.pi, count)
    x = np.where(label, 1 - np.cos(angle), np.cos(angle)) + rng.normal(0, 0.1, count)
    y = np.where(label, 0.5 - np.sin(angle), np.sin(angle)) + rng.normal(0, 0.1, count)
    grid = np.stack([(x + 1.5) / 4 * 64, (y + 1) / 2.5 * 64], axis=1)
    return np.clip(grid.astype(int), 0, 63), label


def line(rng: np.random.Generator, count: int) -> str:
    """Return `count` points in lexicographic order as text."""
    return " ".join(f"{x} {y}" for x, y in sorted(map(tuple, points(rng, count)[0].tolist())))


def write(path: Path, lines: list[str]) -> str:
    """Write lines and return the path as text."""
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def labelled_lines(rng: np.random.Generator, count: int, classes: int, pair: bool) -> list[str]:
    """Return TSV lines with a header; pairs have parts of one to four points."""
    rows = ["text_a\ttext_b\tlabel"] if pair else ["text\tlabel"]
    for number in range(count):
        label = number % classes
        if pair:
            first, second = rng.integers(1, 5, 2)
            rows.append(f"{line(rng, first)}\t{line(rng, second)}\t{label}")
        else:
            (x, y), _ = points(rng, 1)[0][0], None
            rows.append(f"{x} {y}\t{label}")
    return rows


def preprocess(*arguments: str) -> None:
    """Run `metaseq-lm preprocess` and expect success."""
    assert main(["preprocess", *arguments]) == 0


def labelled_set(
    source: Path, data: Path, name: str, count: int, classes: int = 2, pair: bool = False
) -> None:
    """Make a labelled set of `count` training and `count` validation rows."""
    rng = np.random.default_rng([7, count, classes])
    files = {
        split: write(source / f"{name}.{split}.tsv", labelled_lines(rng, count, classes, pair))
        for split in ("train", "valid", "test")
    }
    columns = ["--text-columns", "text_a,text_b"] if pair else []
    preprocess(
        *("--labelled", name, "--trainpref", files["train"], "--validpref", files["valid"]),
        *("--testpref", files["test"], "--destdir", str(data), *columns),
    )


def corpus(source: Path, data: Path, shortest: int, longest: int) -> None:
    """Binarise 300 training and 60 validation lines of `shortest` to `longest` points."""
    rng = np.random.default_rng([8, shortest, longest])
    lines = [line(rng, int(rng.integers(shortest, longest + 1))) for _ in range(360)]
    numbers = [str(number) for number in range(64)]
    train = write(source / "train.txt", lines[:300])
    valid = write(source / "valid.txt", lines[300:])
    learn = write(source / "learn.txt", lines[:300] + numbers + [" ".join(numbers * 2)])
    preprocess(
        *("--trainpref", train, "--validpref", valid, "--destdir", str(data)),
        *("--tokenizer-corpus", learn, "--vocab-size", "512", "--min-frequency", "1"),
    )


def make_even(folder: Path) -> Path:
    """Return a data folder with 16 points in every line, like Two Moons."""
    data = folder / "data"
    corpus(folder, data, 16, 16)
    labelled_set(folder, data, "which_moon_10", 10)
    labelled_set(folder, data, "which_moon_160", 160)
    return data


def make_ragged(folder: Path) -> Path:
    """Return a data folder with lines of 2 to 16 points and a set of pairs in three classes."""
    data = folder / "data"
    corpus(folder, data, 2, 16)
    labelled_set(folder, data, "which_moon_10", 10)
    labelled_set(folder, data, "pairs", 12, classes=3, pair=True)
    return data
