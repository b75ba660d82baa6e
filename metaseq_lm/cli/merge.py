"""Merge the shards of a corpus that several machines preprocessed, in the order given.

    metaseq-lm preprocess --trainpref part0.txt --tokenizer-from TOKENIZER --destdir shards/0
    metaseq-lm preprocess --trainpref part1.txt --tokenizer-from TOKENIZER --destdir shards/1
    metaseq-lm merge shards/0 shards/1 --destdir DATA
DATA gets the files that one machine would write: preprocess --trainpref part0.txt part1.txt ...
"""

import argparse
from pathlib import Path

from metaseq_lm.core.secrets import masked

PROGRESS = True
HELP = "merge the shards of a corpus"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("shards", nargs="+", type=Path, metavar="SHARD", help="data folders with one tokenizer")
    add("--destdir", required=True, type=Path, metavar="D", help="data folder to fill")
    add("--overwrite", action="store_true", help="replace a data set that is already there")


def run(args: argparse.Namespace) -> int:
    """Merge."""
    from metaseq_lm.data.preprocess.pipeline import Request, make_dataset
    from metaseq_lm.data.preprocess.token_files import merge_shards

    command = masked(["metaseq-lm", *args.argv])
    request = Request(args.destdir, {}, overwrite=args.overwrite, command=command)
    make_dataset(merge_shards(args.shards, request))
    return 0
