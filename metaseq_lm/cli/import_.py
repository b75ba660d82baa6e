"""Turn a folder of the transformers library (BERT and the like, RoBERTa, ELECTRA) into a run.

examples:
  metaseq-lm import bert-base-uncased --out imported/bert --check
  metaseq-lm import electra-discriminator --generator electra-generator --out imported/electra
Then: preprocess --tokenizer-from imported/bert, and train --init-from imported/bert.
"""

import argparse
from pathlib import Path

from metaseq_lm.core.documents import show_result, sizes_in
from metaseq_lm.core.output import show

HELP = "import a transformers folder as a run folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("source", metavar="HF_DIR", help="folder with config.json, weights and tokenizer files")
    add("--out", required=True, metavar="DIR", help="run folder to make")
    add("--generator", metavar="HF_DIR", help="folder of ELECTRA's generator")
    add("--check", action="store_true", help="compare with transformers, which must be installed")


def run(args: argparse.Namespace) -> int:
    """Import, and compare if asked."""
    from metaseq_lm import plugins
    from metaseq_lm.data.tokenizers.loading import load_tokenizer
    from metaseq_lm.interop.check import check, library
    from metaseq_lm.interop.exporting import export_part
    from metaseq_lm.interop.importing import import_folder
    from metaseq_lm.runs import checkpoint, manifests
    from metaseq_lm.training.restore import stored_config

    plugins.load_all()
    if args.check:
        library()
    sources = {"main": Path(args.source)}
    if args.generator:
        sources["generator"] = Path(args.generator)
    import_folder(sources["main"], Path(args.out), sources.get("generator"))
    show(f"{args.out}: imported from {' and '.join(map(str, sources.values()))}")
    if args.check:
        stored = checkpoint.load(manifests.resolve(args.out))
        tokenizer = load_tokenizer(args.out)
        for name, folder in sources.items():
            part = export_part(stored, stored_config(stored), tokenizer.vocabulary, name)
            show(check(part, tokenizer, folder))
    content = {"folder": args.out, "files": sizes_in(Path(args.out)), "is_checked": args.check}
    show_result("import", {**content, "sources": {n: str(path) for n, path in sources.items()}})
    return 0
