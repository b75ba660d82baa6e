"""Score a checkpoint on splits of its data set, and write its predictions.

examples:
  metaseq-lm evaluate runs/finetuned --split test
  metaseq-lm evaluate runs/mlm/checkpoints/last --split valid --data other/data engine.device=cpu
"""

import argparse
import json
from pathlib import Path

from metaseq_lm.errors import UsageError

HELP = "score a checkpoint on a split; writes predictions"
OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "checkpoint", help="checkpoint, or run folder (its best one, else its last)"
    )
    parser.add_argument(
        "--split", nargs="+", default=["test"], metavar="S", help="splits to score (default: test)"
    )
    parser.add_argument("--data", help="data folder (default: the one it was trained on)")
    parser.add_argument("--out", help="folder for predictions and metrics (default: print only)")
    parser.add_argument("--user-dir", help="plug-in the run was trained with")


def run(args: argparse.Namespace) -> int:
    """Load the checkpoint, score each split, print one JSON line per split."""
    from metaseq_lm import checkpoint
    from metaseq_lm.data.manifest import FILE_NAME
    from metaseq_lm.evaluation.predictions import write_predictions
    from metaseq_lm.files import write_atomic
    from metaseq_lm.opened import open_run

    for split in args.split:
        if not FILE_NAME.fullmatch(split):
            raise UsageError(f"--split {split!r}: a name of letters, digits, '_', '-' and '.'")
    path = checkpoint.resolve(args.checkpoint, prefer="best")
    scorer = open_run(str(path), args.data, args.user_dir, args.overrides)
    for split in args.split:
        metrics, rows = scorer.score(split)
        print(json.dumps({"split": split, "checkpoint": str(path), **metrics}))
        if args.out:
            folder = Path(args.out)
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / f"metrics.{split}.json", (json.dumps(metrics) + "\n").encode())
            if rows:
                write_predictions(folder / f"predictions.{split}.jsonl", rows)
    return 0
