"""Print the scores of the majority class of each labelled set as JSON lines.

  python baseline.py DATA [SET ...] [--split test]

Of the tasks of SuperGLUE, or of the labelled sets of DATA that are named. Of ReCoRD the answer is
the entity that the passage mentions most often, the first of equals. The last line is the mean of
the scores. A set without the splits that it takes is named and skipped.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from metaseq_lm.data.benchmarks.as_text import AS_TEXT
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.evaluation.official import answer_scores
from metaseq_lm.tasks.finetuning import labelled_metrics

ENTITY = re.compile(r"\*([^*]+)\*")


def most_frequent_class(folder: Path, split: str) -> dict[str, float]:
    """Return the metrics of the class that is most frequent in training, the main one first."""
    labels, scored = LabelledSet(folder, "train").labels, LabelledSet(folder, split)
    counts = np.bincount(labels, minlength=len(scored.label_names))
    scores = np.tile(counts == counts.max(), (len(scored), 1)).astype(float)
    return labelled_metrics(scored, np.arange(len(scored)), scores)


def most_frequent_entity(data: Path, split: str) -> dict[str, float]:
    """Return F1 and EM of the most frequent entity, their mean first."""
    scored, tokenizer = LabelledSet(data / "ReCoRD", split), load_tokenizer(data)
    answers = []
    for row in range(len(scored)):
        found = Counter(ENTITY.findall(tokenizer.decode(scored.inputs[1][row].tolist())))
        answers.append(found.most_common(1)[0][0] if found else "")
    found = answer_scores(answers, scored.rows)
    return {"score": found["mean"], **found}


def missing(folder: Path, splits: list[str]) -> str:
    """Return what is not there, or an empty text."""
    if not folder.is_dir():
        return f"no folder {folder}"
    there = Manifest.load(folder).splits
    return ", ".join(f"no {split} split" for split in splits if split not in there)


def main(data: Path, sets: Sequence[str] = (), split: str = "valid") -> None:
    """Print a line for each of the sets, or of the tasks of SuperGLUE that DATA has."""
    means = []
    for name in sets or [task.split("/")[1] for task in AS_TEXT]:
        ours = name == "ReCoRD"
        reason = missing(data / name, [split] if ours else ["train", split])
        if reason:
            print(f"skipped {name}: {reason}", file=sys.stderr)
            continue
        found = (
            most_frequent_entity(data, split) if ours else most_frequent_class(data / name, split)
        )
        means.append(found["score"])
        print(json.dumps({"task": name, **found}))
    if means:
        print(json.dumps({"task": "mean", "score": float(np.mean(means)), "tasks": len(means)}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("sets", nargs="*", help="labelled sets (default: the tasks of SuperGLUE)")
    parser.add_argument("--split", default="valid")
    main(**vars(parser.parse_args()))
