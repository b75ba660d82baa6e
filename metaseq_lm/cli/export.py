"""Turn a checkpoint into a folder that the transformers library opens.

examples:
  metaseq-lm export runs/bert --out exported/bert --check
  metaseq-lm export runs/electra --part generator --out exported/generator
A post-LN encoder becomes a BERT, RoBERTa or ELECTRA, a pre-LN one a MegatronBERT; with it goes the
head of a language model, a classifier or a span model (task.joint=false task.answerability=false).
"""

import argparse
from pathlib import Path

HELP = "export a checkpoint as a transformers folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("checkpoint", help="checkpoint, or run folder (its best one, else its last)")
    add("--out", required=True, metavar="HF_DIR", help="folder to make")
    net = "which net of ELECTRA (default: %(default)s)"
    add("--part", choices=("main", "generator"), default="main", help=net)
    add("--data", metavar="DIR", help="folder of its tokenizer (default: where it was trained on)")
    add("--check", action="store_true", help="compare with transformers, which must be installed")


def run(args: argparse.Namespace) -> int:
    """Export, and compare if asked."""
    from metaseq_lm.data.tokenizers.loading import load_tokenizer
    from metaseq_lm.interop.check import check, library
    from metaseq_lm.interop.exporting import export_checkpoint, export_part, tokenizer_folder
    from metaseq_lm.runs import checkpoint
    from metaseq_lm.training.restore import stored_config

    if args.check:
        library()
    stored = checkpoint.load(checkpoint.resolve(args.checkpoint, prefer="best"))
    config = stored_config(stored)
    data, out = Path(args.data) if args.data else None, Path(args.out)
    export_checkpoint(stored, config, out, args.part, data)
    print(f"{out}: exported from {stored.path}")
    if args.check:
        tokenizer = load_tokenizer(data or tokenizer_folder(stored, config))
        part = export_part(stored, config, tokenizer.vocabulary, args.part)
        print(check(part, tokenizer, out))
    return 0
