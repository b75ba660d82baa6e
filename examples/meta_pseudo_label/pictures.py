"""Pictures of the Two Moons runs below OUT: decision maps (figures 2, 3).

  python pictures.py OUT

Writes OUT/report/decision_maps_N.png (seed of the first run). The teachers' pairs (table 1) are in
the logs, and in samples.md of `metaseq-lm report --out`.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from omegaconf import OmegaConf

GRID = 64


def read_rows(file: Path) -> list[dict]:
    """Return the rows of a predictions file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def points(rows: list[dict]) -> np.ndarray:
    """Return the two numbers of each row's text, (N, 2)."""
    return np.array([[int(v) for v in row["text"][0].split()] for row in rows])


def margins(rows: list[dict]) -> np.ndarray:
    """Return score of class 1 minus class 0 on the grid, indexed [y, x]."""
    grid = np.zeros((GRID, GRID))
    for (x, y), row in zip(points(rows), rows):
        grid[y, x] = row["scores"][1] - row["scores"][0]
    return grid


def decision_map(axis: plt.Axes, run: Path, label: str) -> None:
    """Draw the decision of one run on the grid, and the test points where it is wrong."""
    grid = margins(read_rows(run / "predictions.vis.jsonl"))
    test = read_rows(run / "predictions.test.jsonl")
    axis.imshow(np.tanh(grid), origin="lower", cmap="RdBu", vmin=-2.4, vmax=2.4)
    axis.contour(grid, levels=[0.0], colors="black", linewidths=0.8)
    where, gold = points(test), np.array([row["gold"] for row in test])
    wrong = gold != np.array([row["predicted"] for row in test])
    for name, colour in (("0", "#8b1a1a"), ("1", "#1a3a6b")):
        chosen = gold == name
        axis.scatter(*where[chosen].T, s=1.5, color=colour, linewidths=0)
    axis.scatter(*where[wrong].T, s=9, facecolors="none", edgecolors="black", linewidths=0.5)
    axis.set_title(f"{label}: {100 * (1 - wrong.mean()):.1f} %", fontsize=9)
    axis.set_xticks([])
    axis.set_yticks([])


def decision_maps(out: Path) -> list[Path]:
    """Draw one picture per number of labelled points, a panel per method, of the first seed."""
    by_size: dict[str, list[tuple[str, Path]]] = {}
    first = sorted((out / "finetune").iterdir())[0]
    for run in sorted(first.iterdir()):
        if (run / "predictions.vis.jsonl").exists():
            config = OmegaConf.load(run / "config.yaml")
            by_size.setdefault(config.task.labelled.split("_")[-1], []).append((config.label, run))
    written = []
    for size, runs in by_size.items():
        figure, axes = plt.subplots(1, len(runs), figsize=(2.5 * len(runs), 2.9), squeeze=False)
        for axis, (label, run) in zip(axes[0], sorted(runs)):
            decision_map(axis, run, label)
        figure.suptitle(
            f"Decision after fine-tuning on {size} points ({first.name}); "
            "circled: wrong test points",
            fontsize=10,
        )
        figure.tight_layout()
        path = out / "report" / f"decision_maps_{size}.png"
        figure.savefig(path, dpi=150)
        plt.close(figure)
        written.append(path)
    return written


def main(out: Path) -> None:
    """Write all pictures."""
    (out / "report").mkdir(exist_ok=True)
    for path in decision_maps(out):
        print(path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
