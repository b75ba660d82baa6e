"""Write the Two Moons data of Shen (2021), section 4.2, as text: a corpus and labelled sets.

  python two_moons.py FOLDER        then: metaseq-lm preprocess (see run.sh)

A point is two numbers 0..63. A line of the corpus is 16 points sorted by (x, y). A labelled row is
one point; the labelled sets which_moon_N have N training and N validation rows, 1,000 test rows
("test") and all 4,096 points of the grid ("vis", with a dummy label).
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import make_moons

SIZES = (10, 20, 40, 80, 160)
DRAW, TRAIN, TEST, VALID = 1_000_000, (0, 512_000), (513_000, 514_000), (600_000, 616_000)
POINTS = 16  # per line
GRID = 64


def discretise(points: np.ndarray) -> np.ndarray:
    """Map x in [-1.5, 2.5] and y in [-1, 1.5] to whole numbers 0..63; (N, 2)."""
    low, high = np.array([-1.5, -1.0]), np.array([2.5, 1.5])
    scaled = (points - low) / (high - low) * (GRID - 0.01)
    return np.clip(scaled.astype(np.int64), 0, GRID - 1)


def lines(points: np.ndarray) -> list[str]:
    """Return one line per 16 points, sorted within the line."""
    groups = points.reshape(-1, POINTS, 2)
    return [" ".join(f"{x} {y}" for x, y in sorted(map(tuple, group))) for group in groups]


def rows(points: np.ndarray, labels: np.ndarray) -> list[str]:
    """Return TSV lines with a header."""
    return ["text\tlabel"] + [f"{x} {y}\t{label}" for (x, y), label in zip(points, labels)]


def write(path: Path, text: list[str]) -> None:
    """Write lines of text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text) + "\n", encoding="utf-8")


def main(folder: Path) -> None:
    """Write all files below `folder`."""
    points, labels = make_moons(DRAW, shuffle=True, noise=0.10, random_state=42)
    points = discretise(points)
    train, valid = lines(points[slice(*TRAIN)]), lines(points[slice(*VALID)])
    write(folder / "train.txt", train)
    write(folder / "valid.txt", valid)
    # The tokenizer also sees every number alone and all of them in order, so that each is one
    # token.
    numbers = [str(i) for i in range(GRID)]
    write(folder / "tokenizer.txt", train + numbers + [" ".join(numbers * 2)])
    x, y = np.meshgrid(np.arange(GRID), np.arange(GRID), indexing="ij")
    grid = np.stack([x.ravel(), y.ravel()], axis=1)
    for size in SIZES:
        place = folder / f"which_moon_{size}"
        for split, seed in (("train", 43), ("valid", 44)):
            some, label = make_moons(size, shuffle=True, noise=0.10, random_state=seed)
            write(place / f"{split}.tsv", rows(discretise(some), label))
        write(place / "test.tsv", rows(points[slice(*TEST)], labels[slice(*TEST)]))
        write(place / "vis.tsv", rows(grid, np.zeros(len(grid), np.int64)))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
