"""Export fine-tuned runs and compare predictions with transformers on the whole dev set.

    exported.py RUN... --source FOLDER --out DIR --results FILE
    exported.py --table FILE

FOLDER holds the official files as glue-CoLA, glue-MRPC and so on: transformers gets their texts and
cuts them into tokens itself. DIR gets exports and predictions, FILE a line of JSON for each RUN.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from metaseq_lm import plugins
from metaseq_lm.cli import main as metaseq_lm
from metaseq_lm.core.errors import MetaseqError, run_script
from metaseq_lm.data.benchmarks import find_benchmark
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.interop.check import import_transformers
from metaseq_lm.tasks.finetuning import labelled_metrics
from metaseq_lm.training.restore import open_run

BATCH = 32


def dev_texts(name: str, folder: Path) -> list[tuple[str, ...]]:
    """Return the texts of the dev set of a GLUE task, a tuple for each row."""
    benchmark = find_benchmark(f"glue/{name}")
    file = folder / benchmark.files["valid"]
    rows = [line.split("\t") for line in file.read_text("utf-8-sig").splitlines()]
    header = list(benchmark.header or rows.pop(0))
    columns = [header.index(text) for text in benchmark.texts]
    return [tuple(row[column] for column in columns) for row in rows]


@torch.no_grad()
def predict(folder: Path, texts: list[tuple[str, ...]]) -> np.ndarray:
    """Return the logits (N, K) of an exported classifier for texts of one or two columns."""
    transformers = import_transformers("the comparison")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    order = sorted(range(len(texts)), key=lambda row: sum(map(len, texts[row])))
    logits = np.zeros((len(texts), model.config.num_labels))
    for first in range(0, len(order), BATCH):
        rows = order[first : first + BATCH]
        columns = map(list, zip(*(texts[row] for row in rows)))
        inputs = tokenizer(*columns, padding=True, truncation=True, return_tensors="pt")
        logits[rows] = model(**inputs).logits.double().numpy()
    return logits


def majority(data: LabelledSet, train: LabelledSet) -> float | None:
    """Return the score of the most frequent class of the training split; None for real values."""
    if data.regression:
        return None
    scores = np.zeros((len(data.labels), len(data.label_names)))
    scores[:, np.bincount(train.labels).argmax()] = 1.0
    return labelled_metrics(data, np.arange(len(scores)), scores)["score"]


def compare(run: str, source: Path, out: Path) -> dict[str, Any]:
    """Export and evaluate a run; return how its predictions differ from those of transformers."""
    plugins.load_all()
    config = open_run(run).config
    name = config.task.labelled
    place = out / f"{name}-{config.label}-{config.seed}"
    if not (place / "hf").exists() and metaseq_lm(
        ["export", run, "--out", str(place / "hf"), "--check"]
    ):
        raise MetaseqError(f"{run}: the export failed")
    if metaseq_lm(["evaluate", run, "--split", "valid", "--out", str(place)]):
        raise MetaseqError(f"{run}: the evaluation failed")
    lines = (place / "predictions.valid.jsonl").read_text("utf-8").splitlines()
    ours = sorted(map(json.loads, lines), key=lambda row: row["index"])
    logits = predict(place / "hf", dev_texts(name, source / f"glue-{name}"))
    data, train = (LabelledSet(Path(config.data, name), split) for split in ("valid", "train"))
    scores = np.array([row["scores"] for row in ours])
    if data.regression:
        theirs = logits
        n_equal = int((np.abs(scores - theirs) < 1e-4).sum())
    else:
        odds = np.exp(logits - logits.max(1, keepdims=True))
        theirs = odds / odds.sum(1, keepdims=True)
        n_equal = int((scores.argmax(1) == theirs.argmax(1)).sum())
    return {
        "set": name,
        "label": config.label,
        "seed": config.seed,
        "rows": len(ours),
        "equal": n_equal,
        "largest_difference": float(np.abs(scores - theirs).max()),
        "score": labelled_metrics(data, np.arange(len(ours)), scores)["score"],
        "library_score": labelled_metrics(data, np.arange(len(ours)), theirs)["score"],
        "majority": majority(data, train),
    }


def table(file: Path) -> str:
    """Return what was compared as a table in Markdown."""
    sets = defaultdict(list)
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        sets[row["set"]].append(row)
    lines = ["| set | runs | predictions | equal | largest difference | majority class |"]
    lines += ["|---|---|---|---|---|---|"]
    for name, rows in sets.items():
        n_rows, n_equal = (sum(row[key] for row in rows) for key in ("rows", "equal"))
        difference = max(row["largest_difference"] for row in rows)
        constant = rows[0]["majority"]
        last = "-" if constant is None else f"{100 * constant:.1f}"
        lines.append(f"| {name} | {len(rows)} | {n_rows} | {n_equal} | {difference:.1e} | {last} |")
    return "\n".join(lines)


def main() -> None:
    """Compare the runs, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="fine-tuned run folders")
    parser.add_argument(
        "--source", type=Path, metavar="FOLDER", help="folder of the official files"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for exports and predictions"
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="file that gets the results")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print what FILE holds")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
        return
    if not (args.runs and args.source and args.out and args.results):
        parser.error("give RUN, --source, --out and --results, or --table")
    import_transformers("the comparison")
    results = [compare(run, args.source, args.out) for run in args.runs]
    args.results.write_text("".join(json.dumps(row) + "\n" for row in results), encoding="utf-8")
    print(table(args.results))


if __name__ == "__main__":
    run_script(main)
