"""Turn a checkpoint into a folder that the transformers library opens.

examples:
  metaseq-lm export runs/bert --out exported/bert --check
  metaseq-lm export runs/electra --part generator --out exported/generator
  metaseq-lm export runs/bam --head RTE --out exported/rte --check
  metaseq-lm export runs/cola --out exported/cola --check --push me/bert-cola
  metaseq-lm export runs/gpt-bert criterion.read=causal_lm --out exported/gpt --check
A post-LN encoder becomes a BERT, RoBERTa or ELECTRA, a pre-LN one a MegatronBERT. The head
of a language model, a classifier or a span model (task.joint=false task.answerability=false) is
exported with it.
"""

import argparse
import shutil
from pathlib import Path

from metaseq_lm.core.documents import show_result, sizes_in
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.output import show

HELP = "export a checkpoint as a transformers folder"
OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("checkpoint", help="checkpoint, or run folder (its best one, else its last)")
    add("--out", required=True, metavar="HF_DIR", help="folder to make")
    net = "which network of ELECTRA (default: %(default)s)"
    add("--part", choices=("main", "generator"), default="main", help=net)
    head = "labelled set whose head to export, if the model has several (task bam)"
    add("--head", metavar="SET", default="", help=head)
    add("--data", metavar="DIR", help="folder of its tokenizer (default: its training data)")
    add("--user-dir", help="plug-in the run was trained with")
    check = (
        "compare the logits, tokens and losses with those of transformers, which must be installed"
    )
    add("--check", action="store_true", help=check)
    add("--push", metavar="REPO", help="upload the folder to this private repository of the Hub")
    add("--public", action="store_true", help="with --push: make a public repository, or use one")


def run(args: argparse.Namespace) -> int:
    """Export, and compare if asked."""
    from metaseq_lm import plugins
    from metaseq_lm.runs import manifests

    source = manifests.resolve(args.checkpoint, prefer="best")
    from metaseq_lm.interop.check import check, import_transformers
    from metaseq_lm.interop.exporting import export_checkpoint, longest_input
    from metaseq_lm.interop.hub import push, require_hub
    from metaseq_lm.interop.objective import check_objective
    from metaseq_lm.interop.parts import KEY
    from metaseq_lm.runs import checkpoint

    if args.public and not args.push:
        raise UsageError("--public needs --push REPO")
    if args.push:
        require_hub(args.push)
    if args.check:
        import_transformers()
    plugins.load_all(args.user_dir)
    stored = checkpoint.load(source)
    data, out = Path(args.data) if args.data else None, Path(args.out)
    config = manifests.reopened_config(stored.path, stored.manifest, args.user_dir, args.overrides)
    part, tokenizer = export_checkpoint(stored, config, out, args.part, data, args.head)
    show(f"{out}: exported from {stored.path}")
    if part.omitted:
        heads = ", ".join(part.omitted)
        show(f"{out}: without {heads}, which criterion {config.criterion._name} does not export")
    if " " in longest_input(part, config).removesuffix(" tokens"):
        show(f"{out}: longest input: {longest_input(part, config)}")
    if args.check:
        try:
            show(check(part, tokenizer, out))
            if part.main and KEY not in stored.manifest:
                run = (str(stored.path), args.data, args.user_dir)
                show(check_objective(part, out, *run, args.head, args.overrides))
        except MetaseqError as error:
            shutil.rmtree(out, ignore_errors=True)
            raise type(error)(f"{error}; the folder was removed") from error
    address = push(out, args.push, args.public) if args.push else None
    if address:
        show(f"{address}: uploaded from {out}")
    about = {"folder": str(out), "checkpoint": str(stored.path), "address": address}
    content = {"files": sizes_in(out), "omitted": list(part.omitted), "is_checked": args.check}
    show_result("export", {**about, **content})
    return 0
