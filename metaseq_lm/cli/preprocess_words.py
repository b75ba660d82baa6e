"""Options of `metaseq-lm preprocess` for sentences of words: text, tagged sets, treebanks."""

import argparse
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import UsageError

MODES = ("words", "tagged", "treebank")
TEXT_ONLY = ("word_vectors", "word_places", "labelled_corpus", "split_text")
TAGS_ONLY = ("tag_scheme", "unseen_tags")
SETS_ONLY = ("tag_column", "hold_out", "hold_out_seed")
SETS_TOO = ("labels_from",)  # of other labelled sets as well
OPTIONS = (*MODES, *TEXT_ONLY, *TAGS_ONLY, *SETS_ONLY, "word_column", "drop_overlap_with")
# What makes a vocabulary of words; --tokenizer-from takes one over as it is.
VOCABULARY = (
    *("word_vectors", "word_places", "vocab_size", "min_frequency"),
    *("tokenizer_corpus", "labelled_corpus"),
)
# Options of other kinds of data that mean something here too, only for --words.
SHARED = ("vocab_size", "min_frequency", "tokenizer_corpus", "tokenizer_from", "documents")


def add_arguments(add: Any) -> None:
    """Add the options; None as a default means that the option was not given."""
    add(
        "--words",
        action="store_true",
        default=None,
        help="the files are unlabelled sentences, one a line, white space between words; they make "
        "D's vocabulary of words (with --min-frequency, --vocab-size, --tokenizer-corpus)",
    )
    add("--tagged", metavar="NAME", help="the files are words with tags, written to D/NAME")
    add("--treebank", metavar="NAME", help="the files are dependency trees, written to D/NAME")
    _add_text_arguments(add)
    _add_set_arguments(add)


def _add_text_arguments(add: Any) -> None:
    add("--word-vectors", metavar="F", help="words: vectors to start from, in GloVe's text format")
    add(
        "--word-places",
        choices=("text", "vectors", "both"),
        help="words: those that get a place, words of the text, all words of the file of vectors, or "
        "both (default: text)",
    )
    add(
        "--labelled-corpus",
        nargs="+",
        metavar="F",
        help="words: files in CoNLL columns, or .conllu, whose words count for the vocabulary too",
    )
    add(
        "--split-text",
        choices=("lines", "sentences", "raw"),
        help="words: a line is a sentence, or several sentences of words, or running text to cut into "
        "words and sentences by rules for English; with --documents blank the lines up to a blank one "
        "belong together (default: lines)",
    )
    add(
        "--drop-overlap-with",
        nargs="+",
        metavar="SET",
        help="leave out training sentences that occur in an evaluation split of these sets of D, or in "
        "these files in CoNLL columns or .conllu; two are the same if their letters and digits run "
        "together are (lower case, every digit a 0), however they are cut into words",
    )


def _add_set_arguments(add: Any) -> None:
    add(
        "--word-column",
        type=int,
        metavar="N",
        help="column of the words, from 0, or negative from the right (default: 0)",
    )
    add(
        "--tag-column",
        metavar="N",
        help="column of the tags, or of HEAD-RELATION (default: -1, the last); of .conllu files with "
        "--tagged a field such as upos",
    )
    add(
        "--tag-scheme",
        choices=("auto", "iob1", "bio", "bioes", "conlleval", "none"),
        help="tagged: how tags spell spans, which become BIOES; conlleval reads all of them and faulty "
        "ones, none is one class per word (default: auto)",
    )
    add(
        "--unseen-tags",
        choices=("own", "one"),
        help="tagged: tags of words that train lacks are classes of their own, or one class that counts "
        "as wrong whatever is predicted (default: own)",
    )
    add(
        "--hold-out",
        type=int,
        metavar="N",
        help="tagged, treebank: N random sentences of train become the missing valid split",
    )
    add("--hold-out-seed", type=int, metavar="S", help="seed of --hold-out (default: 0)")


def asked(args: argparse.Namespace) -> bool:
    """Return whether the command is about sentences of words."""
    given = [f"--{mode}" for mode in MODES if getattr(args, mode) is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other")
    return bool(given)


def unfit(args: argparse.Namespace) -> tuple[tuple[str, ...], str]:
    """Return the options that the mode in `args` does not know, and why."""
    if args.words:
        return (*TAGS_ONLY, *SETS_ONLY, *SETS_TOO), "does not apply to --words"
    if args.tagged is not None:
        return (*TEXT_ONLY, *SHARED), "does not apply to --tagged; the set uses D's vocabulary"
    return (*TEXT_ONLY, *TAGS_ONLY, *SHARED), "does not apply to --treebank"


def run(args: argparse.Namespace, job: Any) -> None:
    """Preprocess what `args` say; the job of a labelled set is that of its own folder."""
    drop = tuple(args.drop_overlap_with or ())
    if args.word_column is not None and not _columns(args, job):
        raise UsageError("--word-column is that of files in CoNLL columns, and none is given")
    column = args.word_column or 0
    if args.words:
        from metaseq_lm.data.words.preprocess import TextChoice, VocabularyChoice, preprocess_words

        made = [name for name in VOCABULARY if getattr(args, name) is not None]
        if made and args.tokenizer_from is not None:
            option = "--" + made[0].replace("_", "-")
            raise UsageError(f"{option} and --tokenizer-from exclude each other")
        choice = VocabularyChoice(
            least=args.min_frequency or 1,
            most=args.vocab_size,
            places=args.word_places or "text",
            vectors=Path(args.word_vectors) if args.word_vectors else None,
            corpus=tuple(map(Path, args.tokenizer_corpus or ())),
            labelled=tuple(map(Path, args.labelled_corpus or ())),
            word_column=column,
            source=Path(args.tokenizer_from) if args.tokenizer_from else None,
        )
        text = TextChoice(args.split_text or "lines", job.documents == "blank", drop)
        kind = preprocess_words(job, choice, text).tokenizer
        print(f"{job.destdir}: {kind['vocab_size']:,} words, {kind['hash']}")
        return
    from metaseq_lm.data.words.preprocess_sets import SetChoice, preprocess_set

    if args.hold_out_seed is not None and args.hold_out is None:
        raise UsageError("--hold-out-seed needs --hold-out N, whose sentences it draws")
    chosen = SetChoice(
        trees=args.treebank is not None,
        scheme=args.tag_scheme or "auto",
        word_column=column,
        tag_column=args.tag_column or "",
        unseen=args.unseen_tags or "own",
        hold_out=args.hold_out or 0,
        seed=args.hold_out_seed or 0,
        drop=drop,
        classes=Path(args.labels_from) if args.labels_from else None,
    )
    preprocess_set(job, chosen, job.destdir.parent)


def _columns(args: argparse.Namespace, job: Any) -> bool:
    """Return whether a file may be in CoNLL columns: a name of --drop-overlap-with may be of a set."""
    from metaseq_lm.data.words.columns import is_conllu

    files = [*(args.labelled_corpus or ()), *(args.drop_overlap_with or ())]
    if not args.words:
        files += [path for paths in job.splits.values() for path in paths]
    return not all(is_conllu(Path(file)) for file in files)
