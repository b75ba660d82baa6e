"""Turn a folder of the transformers library (BERT and the like, RoBERTa, ELECTRA) into a run.

With --run RUN: keep the results that lm-evaluation-harness (lm_eval) wrote for an exported run in
that run, where 'metaseq-lm report --metric lm_eval-TASK.METRIC' finds them.

examples:
  metaseq-lm import bert-base-uncased --out imported/bert --check
  metaseq-lm import electra-discriminator --generator electra-generator --out imported/electra
  metaseq-lm import results_2026-11-30T10-00-00.json --run runs/bert
Then: preprocess --tokenizer-from imported/bert, and train --init-from imported/bert.
"""

import argparse
from pathlib import Path

from metaseq_lm.core.documents import show_result, sizes_in
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.output import show

HELP = "import a transformers folder as a run folder, or results of lm_eval into one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    folder = "folder with config.json, weights and tokenizer files"
    add("source", metavar="HF_DIR", help=f"{folder}; with --run the results_*.json of lm_eval")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", metavar="DIR", help="run folder to make")
    scored = "run folder (its best checkpoint, else its last), or checkpoint, that lm_eval scored"
    target.add_argument("--run", metavar="RUN", help=scored)
    add("--generator", metavar="HF_DIR", help="folder of ELECTRA's generator")
    add("--check", action="store_true", help="compare with transformers, which must be installed")


def run(args: argparse.Namespace) -> int:
    """Import, and compare if asked."""
    if args.run:
        return _import_results(args)
    from metaseq_lm import plugins
    from metaseq_lm.data.tokenizers.loading import load_tokenizer
    from metaseq_lm.interop.check import check, import_transformers
    from metaseq_lm.interop.exporting import export_part
    from metaseq_lm.interop.importing import import_folder
    from metaseq_lm.runs import checkpoint, manifests
    from metaseq_lm.training.restore import stored_config

    plugins.load_all()
    if args.check:
        import_transformers()
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


def _import_results(args: argparse.Namespace) -> int:
    if args.generator or args.check:
        raise UsageError("--run imports results; leave --generator and --check out")
    from metaseq_lm.runs import manifests, suite_results

    checkpoint = manifests.resolve(args.run, prefer="best")
    folder = suite_results.run_folder_of(checkpoint)
    if folder is None:
        raise UsageError(f"--run {args.run}: not in a run folder, which keeps the results")
    from metaseq_lm.interop.lm_eval import read_results

    results = read_results(Path(args.source), checkpoint)
    files = [str(suite_results.write(folder, result)) for result in results]
    metrics: dict[str, float] = {}
    for result in results:
        metrics |= result.metrics
    lines = [f"{name}: {value:g}" for name, value in metrics.items()]
    show("\n".join([*lines, "written:", *files]))
    content = {"checkpoint": str(checkpoint), "files": files, "metrics": metrics}
    show_result("import-results", content)
    return 0
