"""Turn text into a data folder that training reads.

A corpus: one document per line, blank lines are skipped, .gz, .xz, .bz2 and .zst are unpacked.
    metaseq-lm preprocess --trainpref train.txt --validpref valid.txt --destdir DATA
    metaseq-lm preprocess --trainpref train.jsonl --text-column text --destdir DATA
With --documents blank, a line is a sentence and a blank line ends a document. Wrapped lines are
joined by --documents paragraphs or file. --hold-out 5% takes a valid split out of train.
A labelled set (CSV or TSV with a header row, or JSONL), with the tokenizer of DATA, into DATA/NAME:
    metaseq-lm preprocess --labelled NAME --trainpref train.tsv --validpref dev.tsv --destdir DATA
A task of GLUE or SuperGLUE from the folder of its official files, into DATA/CoLA:
    metaseq-lm preprocess --benchmark glue/CoLA --source CoLA --destdir DATA
A task of SuperGLUE as plain texts, for a model that answers with its LM head (--task token_labels):
    metaseq-lm preprocess --benchmark superglue/WiC --as-text --source WiC --destdir DATA
Parallel text, train.en and train.vi line by line, with a vocabulary for each side, into DATA/NAME:
    metaseq-lm preprocess --parallel NAME --trainpref train --validpref dev --source-lang en \\
        --target-lang vi --destdir DATA
Documents of a small language with exact answers, with labelled sets and minimal pairs (no files):
    metaseq-lm preprocess --world quad --world-seed 11 --world-documents 50000 --destdir DATA
Sentences of whole words, for taggers and parsers, and sets of them with D's vocabulary:
    metaseq-lm preprocess --words --trainpref text.txt --destdir DATA
    metaseq-lm preprocess --tagged chunk --trainpref train.txt --validpref dev.txt --destdir DATA
    metaseq-lm preprocess --treebank ewt --trainpref train.conllu --destdir DATA
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import metaseq_lm.data.preprocess  # noqa: F401  registers the kinds of datasets
from metaseq_lm import plugins
from metaseq_lm.cli import NOT_OPTIONS
from metaseq_lm.config.suites import BAD_UTF8
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import add_options, flag_of, option, read_options
from metaseq_lm.core.secrets import masked
from metaseq_lm.data.preprocess import pipeline
from metaseq_lm.data.preprocess.hold_out import HoldOut
from metaseq_lm.data.records.text_files import STANDARD_INPUT

PROGRESS = True
HELP = "turn text into a data folder"


def _files_of(split: str) -> str:
    return f"text files of the {split} split; - is standard input"


def load_plugins(argv: Sequence[str]) -> None:
    """Load the plug-ins, since the kinds of datasets that they register have their own options."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--user-dir")
    plugins.load_installed(finder.parse_known_args(argv)[0].user_dir)


@dataclass(frozen=True)
class _PreprocessOptions:
    """The options of all kinds of datasets."""

    destdir: str = option("", "data folder to fill", metavar="D", required=True)
    trainpref: tuple[Path, ...] = option((), _files_of("train"), metavar="F")
    validpref: tuple[Path, ...] = option((), _files_of("valid"), metavar="F")
    testpref: tuple[Path, ...] = option((), _files_of("test"), metavar="F")
    split: tuple[str, ...] = option(
        (), "a further split; may be repeated", metavar="NAME=F", repeated=True
    )
    hold_out: str | None = option(
        None,
        "N random documents of train, or P% of them, become the missing valid split: lines, rows, "
        "pairs, sentences, passages of questions",
        metavar="N",
    )
    hold_out_seed: int | None = option(None, "seed of --hold-out (default: 0)", metavar="S")
    workers: int = option(1, "corpus: processes (default: 1); other data always takes one")
    encoding: str = option(
        "utf-8", "encoding of the text files, such as latin-1 or utf-16", metavar="E"
    )
    on_bad_utf8: str | None = option(
        None,
        "lines with invalid UTF-8: replace the bytes by U+FFFD, skip the line, or fail "
        "(default: replace in files where at most 1 % of the lines have it, and refuse other "
        "files)",
        choices=BAD_UTF8,
    )
    overwrite: bool = option(False, "replace a data set that is already there")
    user_dir: str | None = option(
        None,
        "plug-in with kinds of datasets, files or tokenizers; its options are added here",
        metavar="DIR",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of all kinds, then the options of each kind."""
    add_options(parser, _PreprocessOptions)
    pipeline.add_kinds(parser)


def run(args: argparse.Namespace) -> int:
    """Make the dataset."""
    options = read_options(_PreprocessOptions, vars(args))
    if options.hold_out_seed is not None and options.hold_out is None:
        raise UsageError("--hold-out-seed needs --hold-out N, whose documents it draws")
    kind, kind_options = pipeline.choose_kind(vars(args))
    hold_out = None
    if options.hold_out is not None:
        hold_out = HoldOut(options.hold_out, options.hold_out_seed or 0)
    request = pipeline.Request(
        destdir=Path(options.destdir),
        splits=_splits_of(options),
        on_bad_utf8=options.on_bad_utf8,
        workers=options.workers,
        overwrite=options.overwrite,
        command=_command_line(args),
        encoding=options.encoding,
        hold_out=hold_out,
    )
    pipeline.make_dataset(kind.value(kind_options, request))
    return 0


def _splits_of(options: _PreprocessOptions) -> dict[str, list[Path]]:
    """Return the files of each split; UsageError for a wrong or repeated name."""
    named = {"train": options.trainpref, "valid": options.validpref, "test": options.testpref}
    splits = {split: list(paths) for split, paths in named.items() if paths}
    for text in options.split:
        name, equals, path = text.partition("=")
        if not equals or not path or not pipeline.NAME.fullmatch(name):
            raise UsageError(
                f"--split {text!r}: expected NAME=FILE, NAME of letters, digits, '_' and '-'"
            )
        if name in splits:
            raise UsageError(f"--split {text!r}: there is a split '{name}' already")
        splits[name] = [Path(path)]
    if list(chain.from_iterable(splits.values())).count(Path(STANDARD_INPUT)) > 1:
        raise UsageError("standard input (-) can be the text of one split only; it is named twice")
    return splits


def _command_line(args: argparse.Namespace) -> str:
    words = ["metaseq-lm", "preprocess"]
    for name, value in vars(args).items():
        if name in NOT_OPTIONS or value is None or value is False:
            continue
        option = flag_of(name)
        if name == "split":
            words += chain.from_iterable((option, text) for text in value)
        elif value is True:
            words.append(option)
        else:
            words += [option, *(map(str, value) if isinstance(value, list) else [str(value)])]
    return masked(words)
