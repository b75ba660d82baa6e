"""Draw and print, by zone, the value of an image's features by position (dissertation, figure 4.7).

  python figure_4_7.py RUN_OR_FOLDER ... --out OUT       measure runs of task cvt_vision
  python figure_4_7.py OUT/figure_4_7.json --out OUT     draw again what was measured

The CNN of a run, with averaged weights, is frozen. Activation: the mean absolute value of the
feature vector at a place over the test images, divided by that of the baseline with the same seed.
Accuracy: of softmax layers that see one feature vector each, trained from scratch on the labelled
training images, on the test images. "untrained" is the CNN of the baseline with the random weights
that it started from. Pictures show means over seeds. The dissertation's baseline is VAT: --baseline
VAT.

Shapes: N images, D features at each of n x n places.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm import plugins
from metaseq_lm.core.batch import as_tensor
from metaseq_lm.core.errors import MetaseqError, UsageError, run_script
from metaseq_lm.core.files import write_atomic
from metaseq_lm.data.images import normalise_images
from metaseq_lm.methods.cvt.vision import CVTVisionTask, PositionHeads
from metaseq_lm.reporting.folders import read_runs
from metaseq_lm.reporting.stats import FEWEST, Test, pooled_sd
from metaseq_lm.training.parts import build_parts
from metaseq_lm.training.restore import open_run

UNTRAINED = "untrained"
ROWS = 250  # images of a pass
PENALTY = 1e-3  # of the squared weights of the softmax layers
ITERATIONS = 100  # of L-BFGS


@dataclass(frozen=True)
class Places:
    """What was measured at the n x n places of one net: nested lists, row by row."""

    label: str
    seed: int
    activation: list[list[float]]
    accuracy: list[list[float]]


@torch.no_grad()
def features_of(net: nn.Module, task: CVTVisionTask, split: str) -> tuple[Tensor, Tensor]:
    """Return features (N, D, n, n) and classes (N,) of the labelled images of a split."""
    images = task.labelled(split)
    net.eval()
    parts = [
        net.features(as_tensor(normalise_images(rows, task.config.mean, task.config.sd)))
        for rows in np.split(images.images, range(ROWS, len(images), ROWS))
    ]
    return torch.cat(parts), torch.from_numpy(images.labels)


def train_probes(features: Tensor, classes: Tensor, count: int) -> PositionHeads:
    """Return softmax layers over `count` classes, each trained on the features of one place."""
    probes = PositionHeads(features[0, 0].numel(), features.shape[1], count)
    nn.init.zeros_(probes.weight)
    optimizer = torch.optim.LBFGS(
        probes.parameters(), max_iter=ITERATIONS, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = probes(features).transpose(1, 2)  # (N, K, P)
        targets = classes.unsqueeze(1).expand(-1, logits.shape[-1])
        entropy = F.cross_entropy(logits, targets, reduction="sum") / len(classes)
        total = entropy + PENALTY * probes.weight.square().sum()
        total.backward()
        return total

    optimizer.step(loss)
    return probes


def measure(net: nn.Module, task: CVTVisionTask, label: str, seed: int) -> Places:
    """Return the activation and the accuracy of a softmax layer at each place of a net."""
    train, train_classes = features_of(net, task, "train")
    test, test_classes = features_of(net, task, "test")
    size = train.shape[-1]
    mean, sd = train.mean(0), train.std(0) + 1e-6
    probes = train_probes((train - mean) / sd, train_classes, len(task.labelled("test").names))
    predicted = probes((test - mean) / sd).argmax(-1)
    accuracy = (predicted == test_classes.unsqueeze(1)).double().mean(0).view(size, size)
    activation = test.abs().mean((0, 1))
    return Places(label, seed, rounded(activation), rounded(accuracy))


def rounded(values: Tensor) -> list[list[float]]:
    """Return values (n, n) as nested lists of five digits."""
    rows: list[list[float]] = values.double().numpy().round(5).tolist()
    return rows


def measure_runs(paths: Sequence[str], baseline: str) -> list[Places]:
    """Return the places of all finished runs, and of the untrained nets of the baseline's seeds.

    Raises MetaseqError for a run of another task.
    """
    plugins.load_all()
    places = []
    for run in read_runs(paths):
        if run.status != "finished":
            print(f"left out: {run.name}, {run.why_unended()}")
            continue
        parts = open_run(str(run.path), overrides=["engine.device=cpu"])
        label, model = str(run.values["label"]), parts.model
        if not isinstance(parts.task, CVTVisionTask):
            raise MetaseqError(
                f"{run.name}: task {parts.config.task._name}; give runs of task cvt_vision"
            )
        places.append(measure(model.averaged, parts.task, label, parts.config.seed))
        if label == baseline:
            fresh = build_parts(parts.config, dry_run=True).model
            places.append(measure(fresh.net, parts.task, UNTRAINED, parts.config.seed))
    return places


def read_places(path: Path) -> list[Places]:
    """Read a figure_4_7.json; MetaseqError if it is none."""
    try:
        return [Places(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise MetaseqError(f"{path}: not a file that figure_4_7.py has written: {error}") from error


# ---------------------------------------------------------------- output


def by_label(places: Sequence[Places], baseline: str) -> dict[str, dict[str, np.ndarray]]:
    """Return accuracy (%) and activation, relative to the baseline's, (seeds, n, n) by label.

    Raises UsageError unless the baseline has every seed, and each label a seed once.
    """
    nets = [(p.label, p.seed) for p in places]
    for label, seed in nets:
        if nets.count((label, seed)) > 1:
            raise UsageError(
                f"{label} has seed {seed} twice; give runs of one setting for each label"
            )
    bases = {p.seed: np.array(p.activation) for p in places if p.label == baseline}
    lacking = sorted({p.seed for p in places} - set(bases))
    if lacking or not places:
        labels = ", ".join(sorted({p.label for p in places})) or "none"
        raise UsageError(
            f"--baseline {baseline}: no run with seed {', '.join(map(str, lacking)) or '1'}; "
            f"labels: {labels}"
        )
    first = {UNTRAINED: 0, baseline: 1}
    maps = {}
    for label in sorted({p.label for p in places}, key=lambda name: (first.get(name, 2), name)):
        same = sorted((p for p in places if p.label == label), key=lambda p: p.seed)
        maps[label] = {
            "accuracy": 100 * np.array([p.accuracy for p in same]),
            "activation": np.array([np.array(p.activation) / bases[p.seed] for p in same]),
        }
    return maps


def zones(size: int) -> dict[str, np.ndarray]:
    """Return which of size x size places are corners, sides without them, and inside."""
    at_border = np.isin(np.arange(size), (0, size - 1)).astype(int)
    borders = at_border[:, None] + at_border
    masks = {"corners": borders == 2, "sides": borders == 1, "inside": borders == 0}
    return {name: mask for name, mask in masks.items() if mask.any()}


def table(maps: dict[str, dict[str, np.ndarray]], baseline: str) -> list[str]:
    """Return a table: mean ± sd over seeds of each zone, and the difference to the baseline.

    In brackets, with 3 seeds and more: the difference at which p of Student's t test, one-sided,
    would fall below 0.05.
    """
    names = zones(maps[baseline]["accuracy"].shape[-1])
    lines = [
        f"| | seeds | {' | '.join(names)} |",
        "|---" * (2 + len(names)) + "|",
    ]
    for title, digits in (("accuracy", 1), ("activation", 2)):
        zonal = {
            label: {zone: kinds[title][:, mask].mean(1) for zone, mask in names.items()}
            for label, kinds in maps.items()
        }
        for label, values in zonal.items():
            seeds = len(maps[label][title])
            cells = [spread(v, digits) for v in values.values()]
            lines.append(f"| {title}, {label} | {seeds} | {' | '.join(cells)} |")
        if title == "activation":
            continue
        for label, values in zonal.items():
            if label == baseline:
                continue
            cells = [difference(v, zonal[baseline][zone]) for zone, v in values.items()]
            lines.append(f"| {title}, {label} - {baseline} | | {' | '.join(cells)} |")
    return lines


def spread(values: np.ndarray, digits: int) -> str:
    """Return the mean of values (seeds,) and, of two or more, their standard deviation."""
    if len(values) == 1:
        return f"{values.mean():.{digits}f}"
    return f"{values.mean():.{digits}f} ± {values.std(ddof=1):.{digits}f}"


def difference(values: np.ndarray, base: np.ndarray) -> str:
    """Return by how much the mean of values (seeds,) is above that of `base`.

    In brackets stands the true difference that a one-sided t test would find with a probability of
    0.8.
    """
    text = f"{values.mean() - base.mean():+.1f}"
    if min(len(values), len(base)) < FEWEST:
        return text
    least = Test("t", sides=1).detectable((len(values), len(base)), pooled_sd(values, base) or 0.0)
    return text if least is None else f"{text} ({least:.1f})"


def draw(maps: dict[str, dict[str, np.ndarray]], baseline: str, path: Path) -> None:
    """Draw the mean maps: accuracy above, activation relative to the baseline's below."""
    figure, axes = plt.subplots(
        2, len(maps), figsize=(2.6 * len(maps) + 0.6, 5.6), squeeze=False, layout="constrained"
    )
    for row, (title, form) in enumerate((("accuracy", "{:.0f}"), ("activation", "{:.2f}"))):
        hidden = (UNTRAINED, baseline) if title == "activation" else ()  # of another kind, and 1
        means = {n: kinds[title].mean(0) for n, kinds in maps.items() if n not in hidden}
        every = np.array(list(means.values()))
        for axis, label in zip(axes[row], maps):
            axis.set(xticks=[], yticks=[])
            if label in hidden:
                axis.set_axis_off()
                continue
            image = axis.imshow(means[label], cmap="viridis", vmin=every.min(), vmax=every.max())
            for (y, x), value in np.ndenumerate(means[label]):
                bright = value > (every.min() + every.max()) / 2
                colour = "black" if bright else "white"
                axis.text(
                    x, y, form.format(value), ha="center", va="center", fontsize=8, color=colour
                )
            above = "accuracy (%)" if title == "accuracy" else f"activation / {baseline}"
            axis.set_title(f"{label}\n{above}", fontsize=9)
        if means:  # of the baseline alone there is no second row
            figure.colorbar(image, ax=axes[row], shrink=0.8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure or read, print the table, write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", metavar="RUN_OR_JSON")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--baseline", default="supervised", metavar="LABEL")
    options: Any = parser.parse_args(arguments)
    if options.paths[0].endswith(".json"):
        places = [p for path in options.paths for p in read_places(Path(path))]
    else:
        places = measure_runs(options.paths, options.baseline)
    maps = by_label(places, options.baseline)
    rows = ",\n".join(json.dumps(asdict(p)) for p in places)
    options.out.mkdir(parents=True, exist_ok=True)
    write_atomic(options.out / "figure_4_7.json", f"[{rows}]\n".encode())
    draw(maps, options.baseline, options.out / "figure_4_7.png")
    print(*table(maps, options.baseline), sep="\n")


if __name__ == "__main__":
    run_script(main)
