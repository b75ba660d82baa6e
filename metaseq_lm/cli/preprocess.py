"""Turn text into a data folder that training reads.

A corpus: one document per line, blank lines are passed over, .gz, .xz and .bz2 are unpacked.
    metaseq-lm preprocess --trainpref train.txt --validpref valid.txt --destdir DATA
With --documents blank it is one sentence per line, and a blank line ends a document.
A labelled set (TSV with a header row, or JSONL), with the tokenizer of DATA, into DATA/NAME:
    metaseq-lm preprocess --labelled NAME --trainpref train.tsv --validpref dev.tsv --destdir DATA
A task of GLUE or SuperGLUE from the folder of its official files, into DATA/CoLA:
    metaseq-lm preprocess --benchmark glue/CoLA --source CoLA --destdir DATA
A task of SuperGLUE as plain texts, for a model that answers with its LM head (--task token_labels):
    metaseq-lm preprocess --benchmark superglue/WiC --as-text --source WiC --destdir DATA
Parallel text, train.en and train.vi line by line, with a vocabulary for each side, into DATA/NAME:
    metaseq-lm preprocess --parallel NAME --trainpref train --validpref dev --source-lang en \\
        --target-lang vi --destdir DATA
Sentences of whole words, for taggers and parsers, and sets of them with D's vocabulary:
    metaseq-lm preprocess --words --trainpref text.txt --destdir DATA
    metaseq-lm preprocess --tagged chunk --trainpref train.txt --validpref dev.txt --destdir DATA
    metaseq-lm preprocess --treebank ewt --trainpref train.conllu --destdir DATA
"""

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

from metaseq_lm.cli import preprocess_parallel, preprocess_words
from metaseq_lm.core.errors import UsageError

HELP = "binarise a corpus or a labelled set"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
PREFS = {"trainpref": "train", "validpref": "valid", "testpref": "test"}
CORPUS_ONLY = (
    *("tokenizer", "vocab_size", "task_tokens", "min_frequency", "tokenizer_corpus"),
    *("word_pattern", "character_coverage", "cased"),
)
# What the command line adds to the options it parsed.
NOT_OPTIONS = ("command", "run", "parser", "takes_overrides", "takes_words", "overrides", "argv")
LABELLED_ONLY = ("columns", "text_columns", "label_column", "labels", "regression", "labels_from")
BENCHMARK_ONLY = ("source", "no_double", "as_text")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; None as a default means that the option was not given."""
    add = parser.add_argument
    add("--destdir", required=True, metavar="D", help="data folder to fill")
    for pref, split in PREFS.items():
        add(f"--{pref}", nargs="+", metavar="F", help=f"text files of the {split} split")
    add("--split", action="append", metavar="NAME=F", help="a further split; may be repeated")
    add(
        "--documents",
        choices=("lines", "blank"),
        help="corpus: what a document is, a line, or the lines (sentences) up to a blank one "
        "(default: lines)",
    )
    add(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="corpus: processes (default: 1); other data always takes one",
    )
    add(
        "--on-bad-utf8",
        choices=("replace", "skip", "fail"),
        default="replace",
        help="lines with invalid UTF-8: replace the bytes by U+FFFD, skip the line, or fail "
        "(default: replace)",
    )
    add("--overwrite", action="store_true", help="replace a data set that is already there")
    add("--tokenizer-from", metavar="DIR", help="use the tokenizer of this folder")
    _add_tokenizer_arguments(parser.add_argument_group("a new tokenizer (corpus)").add_argument)
    _add_labelled_arguments(parser.add_argument_group("labelled sets").add_argument)
    _add_benchmark_arguments(parser.add_argument_group("benchmarks").add_argument)
    preprocess_parallel.add_arguments(parser.add_argument_group("parallel text").add_argument)
    preprocess_words.add_arguments(parser.add_argument_group("sentences of words").add_argument)


def _add_tokenizer_arguments(add: Any) -> None:
    add(
        "--tokenizer",
        metavar="KIND",
        help="byte_bpe, wordpiece, sentencepiece_bpe, sentencepiece_unigram, word or char "
        "(default: byte_bpe)",
    )
    add(
        "--cased",
        action="store_true",
        default=None,
        help="wordpiece: keep capitals and accents (default: BERT's uncased)",
    )
    add("--vocab-size", type=int, metavar="N", help="at most this many symbols (default: 30000)")
    add("--task-tokens", type=int, metavar="N", help="symbols [CLS0] to [CLSN-1] (default: 30)")
    add(
        "--min-frequency",
        type=int,
        metavar="N",
        help="merge pairs, keep words or characters that occur this often (default: 1)",
    )
    add(
        "--tokenizer-corpus",
        nargs="+",
        metavar="F",
        help="text the tokenizer learns from (default: the train split); sentencepiece holds it "
        "in memory, so give a sample of a large corpus",
    )
    add("--word-pattern", metavar="RE", help="word: what a word is (default: between white space)")
    add(
        "--character-coverage",
        type=float,
        metavar="X",
        help="sentencepiece: share of the characters that must have a symbol (default: 0.9995)",
    )


def _add_labelled_arguments(add: Any) -> None:
    add("--labelled", metavar="NAME", help="the files are a labelled set, written to D/NAME")
    add("--columns", metavar="A,B,...", help="column names of TSV files that have no header row")
    add("--text-columns", metavar="A[,B]", help="default: text, or text_a,text_b")
    add("--label-column", metavar="A", help="default: label")
    add("--labels", metavar="A,B,...", help="the classes in order (default: of train, sorted)")
    add(
        "--labels-from",
        metavar="SET",
        help="the classes of this set, a folder D/NAME, in its order; for --tagged, --treebank too",
    )
    add("--regression", action="store_true", default=None, help="labels are numbers, not classes")


def _add_benchmark_arguments(add: Any) -> None:
    add(
        "--benchmark",
        metavar="NAME",
        help="glue/CoLA, superglue/WiC, squad/v2.0 and so on: official files, written to "
        "D/CoLA or D/NAME of --labelled",
    )
    add(
        "--source",
        metavar="DIR",
        help="folder with the official files, packed or not; --trainpref and the like name others",
    )
    add(
        "--no-double",
        action="store_true",
        default=None,
        help="MRPC, STS-B: no second copy of the train rows with the texts swapped",
    )
    add(
        "--as-text",
        nargs="?",
        const="own",
        choices=("own", "author"),
        help="SuperGLUE: one or two plain texts per row, as meta_pseudo_label and token_labels want "
        "them (choices in one text, *words* between asterisks); author: WSC's words are looked for, and "
        "equal spans of ReCoRD marked more than once, as in the code of Shen 2021 (default: own)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    # Late, so that --help does not load the tokenizer libraries.
    from metaseq_lm.data.corpus.preprocess import Job

    for name, least in {
        "workers": 1,
        "vocab_size": 1,
        "min_frequency": 1,
        "task_tokens": 0,
        "hold_out": 1,
    }.items():
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise UsageError(f"{_flag(name)} {getattr(args, name)}: at least {least}")
    job = Job(
        destdir=Path(args.destdir),
        splits=_splits(args),
        on_bad_utf8=args.on_bad_utf8,
        workers=args.workers,
        overwrite=args.overwrite,
        command=command_line(args),
        documents=args.documents or "lines",
    )
    if preprocess_words.asked(args):
        _run_words(args, job)
        return 0
    _refuse(args, preprocess_words.OPTIONS, "needs --words, --tagged NAME or --treebank NAME")
    if args.parallel is not None:
        _run_parallel(args, job)
        return 0
    _refuse(args, preprocess_parallel.ONLY, "only applies to parallel text; give --parallel NAME")
    if args.benchmark is not None:
        _refuse(args, CORPUS_ONLY, "does not apply to labelled sets; they use D's tokenizer")
        _refuse(args, LABELLED_ONLY, "and --benchmark exclude each other; the benchmark says it")
        _refuse(args, ("documents",), "does not apply to benchmarks")
        _run_benchmark(args, job)
        return 0
    _refuse(args, BENCHMARK_ONLY, "only applies to benchmarks; give --benchmark NAME as well")
    if args.labelled is None:
        _refuse(args, LABELLED_ONLY, "only applies to labelled sets; give --labelled NAME as well")
        _run_corpus(args, job)
    else:
        _refuse(args, CORPUS_ONLY, "does not apply to labelled sets; they use D's tokenizer")
        _refuse(args, ("documents",), "does not apply to labelled sets")
        _run_labelled(args, job)
    return 0


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _refuse(args: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise UsageError(f"{_flag(name)} {why}")


def _splits(args: argparse.Namespace) -> dict[str, list[Path]]:
    splits = {
        split: [Path(p) for p in getattr(args, pref)]
        for pref, split in PREFS.items()
        if getattr(args, pref)
    }
    for text in args.split or []:
        name, equals, path = text.partition("=")
        if not equals or not path or not NAME.fullmatch(name):
            raise UsageError(
                f"--split {text!r}: expected NAME=FILE, NAME of letters, digits, '_' and '-'"
            )
        if name in splits:
            raise UsageError(f"--split {text!r}: there is a split '{name}' already")
        splits[name] = [Path(path)]
    return splits


def _run_words(args: argparse.Namespace, job: Any) -> None:
    other = [name for name in CORPUS_ONLY if name not in preprocess_words.SHARED]
    other += [name for name in LABELLED_ONLY if name not in preprocess_words.SETS_TOO]
    other += ["labelled", "benchmark", *BENCHMARK_ONLY, *preprocess_parallel.ONLY]
    _refuse(args, ("parallel", *other), "does not apply to sentences of words")
    _refuse(args, *preprocess_words.unfit(args))
    name = args.tagged if args.tagged is not None else args.treebank
    preprocess_words.run(args, job if name is None else _inside(job, name))


def _run_corpus(args: argparse.Namespace, job: Any) -> None:
    from metaseq_lm.data.corpus.preprocess import TokenizerChoice, preprocess_corpus

    if args.tokenizer_from is not None:
        _refuse(args, CORPUS_ONLY, "and --tokenizer-from exclude each other")
        choice = TokenizerChoice(source=Path(args.tokenizer_from))
    else:
        given = {n: getattr(args, n) for n in ("vocab_size", "task_tokens", "min_frequency")}
        choice = TokenizerChoice(
            name=args.tokenizer or "byte_bpe",
            corpus=tuple(map(Path, args.tokenizer_corpus or ())),
            options=_kind_options(args),
            **{name: value for name, value in given.items() if value is not None},
        )
    manifest = preprocess_corpus(job, choice)
    kind = manifest.tokenizer
    print(f"{job.destdir}: {kind['name']} with {kind['vocab_size']:,} symbols, {kind['hash']}")


def _kind_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that only one kind of tokenizer has, refusing them for the others."""
    kind, options = args.tokenizer or "byte_bpe", {}
    if args.word_pattern is not None:
        if kind != "word":
            raise UsageError(f"--word-pattern does not apply to --tokenizer {kind}, only to word")
        options["pattern"] = args.word_pattern
    if args.cased is not None:
        if kind != "wordpiece":
            raise UsageError(f"--cased does not apply to --tokenizer {kind}, only to wordpiece")
        options["cased"] = True
    if args.character_coverage is not None:
        if not kind.startswith("sentencepiece") or not 0 < args.character_coverage <= 1:
            raise UsageError(
                "--character-coverage is above 0, at most 1, and of sentencepiece only"
            )
        options["character_coverage"] = args.character_coverage
    return options


def _run_labelled(args: argparse.Namespace, job: Any) -> None:
    from metaseq_lm.data.labelled.files import Columns, is_json
    from metaseq_lm.data.labelled.preprocess import preprocess_labelled
    from metaseq_lm.data.storage.manifest import classes_of
    from metaseq_lm.data.tokenizers.loading import load_tokenizer

    columns = Columns(
        names=_listed(args.columns),
        texts=_listed(args.text_columns),
        label=args.label_column or "label",
        regression=bool(args.regression),
    )
    files = [path for paths in job.splits.values() for path in paths]
    if columns.names is not None and all(map(is_json, files)):
        raise UsageError("--columns names those of TSV files; fields of JSON files have names")
    if args.labels_from is not None:
        _refuse(args, ("labels", "regression"), "and --labels-from exclude each other")
        labels: Any = classes_of(args.labels_from)
    else:
        labels = _listed(args.labels)
    tokenizer = load_tokenizer(args.tokenizer_from or job.destdir)
    job = _inside(job, args.labelled)
    preprocess_labelled(job, columns, None if labels is None else list(labels), tokenizer)


def _run_benchmark(args: argparse.Namespace, job: Any) -> None:
    from dataclasses import replace

    from metaseq_lm.data.benchmarks import SQUAD
    from metaseq_lm.data.tokenizers.loading import load_tokenizer

    if args.benchmark in SQUAD:
        from metaseq_lm.data.squad.sets import preprocess_squad

        _refuse(args, BENCHMARK_ONLY, f"does not apply to {args.benchmark}; give --trainpref F")
        if args.on_bad_utf8 == "skip":
            raise UsageError(
                f"--on-bad-utf8 skip does not apply to {args.benchmark}; choose replace or fail"
            )
        name, version = SQUAD[args.benchmark]
        job = _inside(job, args.labelled or name)
        preprocess_squad(job, version, load_tokenizer(args.tokenizer_from or args.destdir))
        return
    from metaseq_lm.data.benchmarks import find_benchmark
    from metaseq_lm.data.benchmarks.as_text import find_text_form
    from metaseq_lm.data.benchmarks.preprocess import official_files, preprocess_benchmark

    doubled = find_benchmark(args.benchmark).doubled
    if args.as_text:
        find_text_form(args.benchmark)
    if args.no_double and not doubled:
        raise UsageError(f"--no-double does not apply to {args.benchmark}: it is not doubled")
    job = _inside(job, args.labelled or args.benchmark.split("/")[1])
    if args.source is not None:
        files = official_files(args.benchmark, Path(args.source))
        job = replace(job, splits={**files, **job.splits})
    elif not job.splits:
        raise UsageError("--benchmark needs --source DIR, or files with --trainpref and the like")
    tokenizer = load_tokenizer(args.tokenizer_from or args.destdir)
    preprocess_benchmark(job, args.benchmark, tokenizer, not args.no_double, args.as_text)


def _run_parallel(args: argparse.Namespace, job: Any) -> None:
    _refuse(args, preprocess_parallel.REFUSED, "does not apply to parallel text")
    if not NAME.fullmatch(args.parallel):
        raise UsageError(f"--parallel {args.parallel!r}: letters, digits, '_' and '-' only")
    args.tokenizer = args.tokenizer or "word"
    preprocess_parallel.run(args, job, args.tokenizer, _kind_options(args))


def _inside(job: Any, name: str) -> Any:
    """Return the job for a labelled set NAME in the folder of a corpus."""
    from dataclasses import replace

    if not NAME.fullmatch(name):
        raise UsageError(f"name of a set {name!r}: letters, digits, '_' and '-' only")
    return replace(job, destdir=job.destdir / name)


def _listed(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(text.split(","))


def command_line(args: argparse.Namespace) -> str:
    """Return a command that does what `args` say, quoted for a shell."""
    words = ["metaseq-lm", "preprocess"]
    for name, value in vars(args).items():
        if name in NOT_OPTIONS or value is None or value is False:
            continue
        if name == "split":
            words += [word for text in value for word in ("--split", text)]
        elif value is True:
            words.append(_flag(name))
        else:
            words += [_flag(name), *(map(str, value) if isinstance(value, list) else [str(value)])]
    return shlex.join(words)
