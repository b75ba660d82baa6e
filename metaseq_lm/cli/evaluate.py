"""Score a checkpoint on splits of its data set, and write its predictions.

examples:
  metaseq-lm evaluate runs/finetuned --split test
  metaseq-lm evaluate runs/mlm/checkpoints/last --split valid --data other/data engine.device=cpu
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from metaseq_lm.errors import UsageError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from metaseq_lm.checkpoint import Checkpoint

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
    from metaseq_lm import checkpoint, plugins
    from metaseq_lm.config import check_names
    from metaseq_lm.data.manifest import FILE_NAME
    from metaseq_lm.evaluation.predictions import write_predictions
    from metaseq_lm.files import write_atomic
    from metaseq_lm.run import Run

    for split in args.split:
        if not FILE_NAME.fullmatch(split):
            raise UsageError(f"--split {split!r}: a name of letters, digits, '_', '-' and '.'")
    plugins.load_all(args.user_dir)
    path = checkpoint.resolve(args.checkpoint, prefer="best")
    found = checkpoint.load(path)
    config = stored_config(found)
    if config.user_dir and not args.user_dir:
        # Code is run only when the person in front of the screen names it, not because a file does.
        raise UsageError(f"this run used a plug-in; repeat --user-dir {config.user_dir} to load it")
    check_names(config)
    try:
        config.merge_with_dotlist(args.overrides)
    except Exception as error:
        raise UsageError(str(error).split("\n")[0]) from error
    config.data = args.data or config.data
    config.init_from = None
    scorer = Run(config, dry_run=True)
    checkpoint.load_into(scorer.model, found.weights, path)
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


def stored_config(found: "Checkpoint") -> "DictConfig":
    """Return the configuration that a checkpoint was trained with; CheckpointError if it is none."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from metaseq_lm.checkpoint import CheckpointError
    from metaseq_lm.config import RunConfig, without_environment

    try:
        with without_environment():
            config = OmegaConf.structured(RunConfig)
            config.merge_with(found.manifest.get("config"))
            OmegaConf.resolve(config)
    except (OmegaConfBaseException, ValueError, RecursionError) as error:
        reason = str(error).split("\n")[0]
        raise CheckpointError(f"{found.path}: its config cannot be used: {reason}") from error
    OmegaConf.set_struct(config, True)
    return config
