"""The options of `preprocess` that make parallel text, and what they do."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import UsageError

ONLY = ("source_lang", "target_lang", "unlabelled", "source_min_frequency", "target_min_frequency")
# Options of other kinds of data that make no sense here.
REFUSED = (
    *("labelled", "columns", "text_columns", "label_column", "labels", "regression"),
    *("benchmark", "source", "no_double", "as_text", "documents"),
    *("tokenizer_from", "tokenizer_corpus", "min_frequency", "task_tokens"),
)
# Words that occur less often are unknown; of the target as in Clark 2021, section 4.3.1.
RARE = {"source": 2, "target": 6}


def add_arguments(add: Any) -> None:
    """Add the options of parallel text."""
    add(
        "--parallel",
        metavar="NAME",
        help="parallel text: files PREF.S and PREF.T, line by line, PREF of --trainpref and the like; "
        "written to D/NAME, a data folder of its own",
    )
    add("--source-lang", metavar="S", help="parallel text: ending of the source files, en say")
    add("--target-lang", metavar="T", help="parallel text: ending of the target files, vi say")
    add(
        "--unlabelled",
        nargs="+",
        metavar="F",
        help="parallel text: files (whole names) of source text without translations",
    )
    add(
        "--source-min-frequency",
        type=int,
        metavar="N",
        help="parallel text: source words or merged pairs occur this often (default: 2 for --tokenizer "
        "word, so that training knows [UNK]; else 1)",
    )
    add(
        "--target-min-frequency",
        type=int,
        metavar="N",
        help="parallel text: the same of the target (default: 6 for --tokenizer word, else 1)",
    )


def run(args: argparse.Namespace, job: Any, kind: str, options: dict[str, Any]) -> None:
    """Write the set; `kind` and `options` are those of the tokenizers of both sides."""
    from metaseq_lm.data.corpus.preprocess import TokenizerChoice
    from metaseq_lm.data.parallel.preprocess import ParallelChoice, preprocess_parallel
    from metaseq_lm.data.parallel.sets import SOURCE, TARGET

    if not (args.source_lang and args.target_lang):
        raise UsageError("--parallel needs --source-lang and --target-lang")
    least = {SOURCE: args.source_min_frequency, TARGET: args.target_min_frequency}
    for side, number in least.items():
        if number is None:
            least[side] = RARE[side] if kind == "word" else 1
        elif number < 1:
            raise UsageError(f"--{side}-min-frequency {number}: at least 1")
    more = {} if args.vocab_size is None else {"vocab_size": args.vocab_size}
    choices = {
        side: TokenizerChoice(
            name=kind, min_frequency=number, task_tokens=1, options=dict(options), **more
        )
        for side, number in least.items()
    }
    languages = (args.source_lang, args.target_lang)
    unlabelled = tuple(Path(name) for name in args.unlabelled or ())
    job = replace(job, destdir=job.destdir / args.parallel)
    manifest = preprocess_parallel(job, ParallelChoice(languages, choices, unlabelled))
    for side, about in manifest.details["tokenizers"].items():
        print(f"{job.destdir}: {side}: {about['name']} with {about['vocab_size']:,} symbols")
