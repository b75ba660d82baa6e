"""Print the scores of the most frequent class on the validation split of each task, as JSON lines.

  python baseline.py DATA

Of ReCoRD the answer is the entity that the passage mentions most often, the first of equals. The
last line is the mean of the scores. A task without the splits that it takes is named and skipped.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from metaseq_lm.data.benchmarks.as_text import AS_TEXT
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.evaluation.benchmarks import answer_scores
from metaseq_lm.tasks.finetuning import labelled_metrics

ENTITY = re.compile(r"\*([^*]+)\*")


def most_frequent_class(folder: Path) -> dict[str, float]:
    """Return the metrics of the class that is most frequent in training, the main one first."""
    labels, valid = LabelledSet(folder, "train").labels, LabelledSet(folder, "valid")
    counts = np.bincount(labels, minlength=len(valid.label_names))
    scores = np.tile(counts == counts.max(), (len(valid), 1)).astype(float)
    return labelled_metrics(valid, np.arange(len(valid)), scores)


def most_frequent_entity(data: Path) -> dict[str, float]:
    """Return F1 and EM of the most frequent entity, their mean first."""
    valid, tokenizer = LabelledSet(data / "ReCoRD", "valid"), load_tokenizer(data)
    answers = []
    for row in range(len(valid)):
        found = Counter(ENTITY.findall(tokenizer.decode(valid.inputs[1][row].tolist())))
        answers.append(found.most_common(1)[0][0] if found else "")
    found = answer_scores(answers, valid.rows)
    return {"score": found["mean"], **found}


def missing(folder: Path, splits: list[str]) -> str:
    """Return what is not there, or an empty text."""
    if not folder.is_dir():
        return f"no folder {folder}"
    there = Manifest.load(folder).splits
    return ", ".join(f"no {split} split" for split in splits if split not in there)


def main(data: Path) -> None:
    """Print a line for each task that DATA has."""
    means = []
    for name in (task.split("/")[1] for task in AS_TEXT):
        ours = name == "ReCoRD"
        reason = missing(data / name, ["valid"] if ours else ["train", "valid"])
        if reason:
            print(f"skipped {name}: {reason}", file=sys.stderr)
            continue
        found = most_frequent_entity(data) if ours else most_frequent_class(data / name)
        means.append(found["score"])
        print(json.dumps({"task": name, **found}))
    if means:
        print(json.dumps({"task": "mean", "score": float(np.mean(means)), "tasks": len(means)}))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
