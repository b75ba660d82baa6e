"""Sentences of words: unlabelled text to a data folder with a vocabulary of words."""

import array
import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from metaseq_lm.core.config import option
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.preprocess.pipeline import (
    TRAIN,
    Pipeline,
    Request,
    Split,
    batches,
    register_dataset_kind,
)
from metaseq_lm.data.storage.indexed import IndexedWriter, smallest_dtype
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.words.columns import SentenceReader, is_conllu
from metaseq_lm.data.words.overlap import dropped_sentences, evaluation_overlap, words_reader
from metaseq_lm.data.words.running_text import SPLITTING, TextReader
from metaseq_lm.data.words.sets import part_name
from metaseq_lm.data.words.vectors import read_vectors, vector_table
from metaseq_lm.data.words.vocabulary import (
    SPECIAL_WORDS,
    UNKNOWN,
    WordVocabulary,
    characters_of,
    count_words,
    frequent_words,
)

BATCH = 8192  # sentences
WORDS = "words"  # the kind of the manifest
# What the manifest counts, as the summary of a split names it.
COUNTED = {
    "blank": "blank lines",
    "documents": "lines of documents passed over",
    "multi_word": "multi-word tokens passed over",
    "empty_nodes": "empty nodes passed over",
    "bad_utf8": "with invalid UTF-8",
    "skipped": "skipped",
    "dropped_overlap": "dropped, they occur in an evaluation split",
}


@dataclass(frozen=True)
class WordsOptions:
    """Options of unlabelled sentences of words."""

    NOUN: ClassVar[str] = "sentences of words"
    UNUSED_WITH: ClassVar[dict[str, str]] = {
        "tokenizer_from": "word_vectors word_places vocab_size min_frequency tokenizer_corpus "
        "labelled_corpus"
    }

    words: bool = option(
        False,
        "the files are unlabelled sentences, one a line, white space between words; they make D's "
        "vocabulary of words (with --min-frequency, --vocab-size, --tokenizer-corpus)",
    )
    word_vectors: Path | None = option(None, "words: vectors to start from, in GloVe's text format")
    word_places: str = option(
        "text",
        "words: those that get a place, words of the text, all words of the file of vectors, or both",
        choices=("text", "vectors", "both"),
    )
    labelled_corpus: tuple[Path, ...] = option(
        (), "words: files in CoNLL columns, or .conllu, whose words count for the vocabulary too"
    )
    split_text: str = option(
        "lines",
        "words: a line is a sentence, or several sentences of words, or running text to cut into words "
        "and sentences by rules for English; with --documents blank the lines up to a blank one belong "
        "together",
        choices=SPLITTING,
    )
    drop_overlap_with: tuple[str, ...] = option(
        (),
        "leave out training sentences that occur in an evaluation split of these sets of D, or in "
        "these files in CoNLL columns or .conllu; two are the same if their letters and digits run "
        "together are (lower case, every digit a 0), however they are cut into words",
        metavar="SET",
        nargs="+",
    )
    word_column: int | None = option(
        None, "column of the words, from 0, or negative from the right (default: 0)"
    )
    vocab_size: int | None = option(None, "", at_least=1)
    min_frequency: int = option(1, "", at_least=1)
    tokenizer_corpus: tuple[Path, ...] = option((), "")
    tokenizer_from: Path | None = option(None, "")
    documents: str = option("lines", "")

    def check(self) -> None:
        """Raise UsageError for options that cannot be used together."""
        if self.word_places != "text" and self.word_vectors is None:
            raise UsageError(f"--word-places {self.word_places} needs --word-vectors FILE")
        if self.documents == "blank" and self.split_text == "lines":
            raise UsageError(
                "--documents blank joins lines of running text; with --words it needs --split-text "
                "sentences or raw"
            )
        check_word_column(self.word_column, [*self.labelled_corpus, *self.drop_overlap_with])


def check_word_column(column: int | None, files: Iterable[str | Path]) -> None:
    """Raise UsageError if a column is chosen, but every file is CoNLL-U, which has fields."""
    if column is not None and all(is_conllu(Path(file)) for file in files):
        raise UsageError("--word-column is that of files in CoNLL columns, and none is given")


# ---------------------------------------------------------------- encoding and writing


class _Forms(dict[str, int]):
    """Numbers of words as they stand in the text, in order of appearance; `fresh` are the new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh: list[str] = []

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        self.fresh.append(word)
        return number


class SentenceEncoder:
    """Numbers the words of one split, by the vocabulary and by their form.

    `forms` are the different words as they stand in the text.
    """

    def __init__(self, vocabulary: WordVocabulary) -> None:
        self.forms = _Forms()
        self._vocabulary = vocabulary
        self._ids = array.array("i")

    def encode(self, sentences: Sequence[Sequence[str]]) -> "EncodedSentences":
        sizes = np.fromiter(map(len, sentences), np.int64, len(sentences))
        words = list(map(self.forms.__getitem__, chain.from_iterable(sentences)))
        numbers = np.array(words, np.int32)
        self._ids.extend(map(self._vocabulary.index, self.forms.fresh))
        self.forms.fresh.clear()
        ids = np.frombuffer(self._ids, np.int32)[numbers] if len(numbers) else numbers
        return EncodedSentences({"": ids, "surface": numbers}, sizes)


@dataclass
class EncodedSentences:
    """Numbers of the words of a batch of sentences, end to end: a column for each pair of files."""

    columns: dict[str, np.ndarray]
    sizes: np.ndarray


def write_sentences(
    split: Split,
    encoded: Iterator[EncodedSentences],
    folder: Path,
    encoder: SentenceEncoder,
    types: dict[str, np.dtype],
) -> None:
    """Write the files of a split and note its counts.

    Args:
        split: The split.
        encoded: Its sentences.
        folder: Where the files go.
        encoder: Made `encoded`; its forms are written at the end.
        types: The type of each column of the sentences.
    """
    sentences = words = unknown = 0
    with contextlib.ExitStack() as stack:
        writers = {
            part: stack.enter_context(IndexedWriter(folder / part_name(split.name, part), stored))
            for part, stored in types.items()
        }
        for batch in encoded:
            for part, writer in writers.items():
                writer.extend(batch.columns[part], batch.sizes)
            sentences += len(batch.sizes)
            words += len(batch.columns[""])
            unknown += int(np.count_nonzero(batch.columns[""] == UNKNOWN))
        forms = encoder.forms
        with IndexedWriter(folder / part_name(split.name, "forms"), "<i4") as form_writer:
            codes = np.frombuffer("".join(forms).encode("utf-32-le"), "<u4")
            form_writer.extend(codes, np.fromiter(map(len, forms), np.int64, len(forms)))
    names = [part_name(split.name, part) for part in (*types, "forms")]
    split.files = [f"{name}.{suffix}" for name in names for suffix in ("bin", "idx")]
    split.counts = {
        "sentences": sentences,
        "words": words,
        "unknown": unknown,
        "forms": len(forms),
        **split.counts,
    }


def word_types(vocabulary: WordVocabulary) -> dict[str, np.dtype]:
    """Return the types of the columns that every split of sentences has."""
    return {"": smallest_dtype(len(vocabulary)), "surface": np.dtype("<i4")}


def describe_vocabulary(vocabulary: WordVocabulary) -> dict[str, Any]:
    """Return what a manifest says of a vocabulary."""
    return {"name": WORDS, "hash": vocabulary.hash, "vocab_size": len(vocabulary)}


def summarise_sentences(split: Split) -> str:
    """Return the line of a split for the end of the run."""
    counts = split.counts
    share = 100 * counts["unknown"] / max(counts["words"], 1)
    text = (
        f"{split.name}: {counts['sentences']:,} sentences, {counts['words']:,} words "
        f"({share:.1f} % unknown)"
    )
    for name, meaning in COUNTED.items():
        if counts.get(name):
            text += f", {counts[name]:,} {meaning}"
    return text


# ---------------------------------------------------------------- unlabelled text


class WordsPipeline(Pipeline[list[str], EncodedSentences]):
    """Unlabelled sentences; without any split it makes the vocabulary only."""

    kind, unit = WORDS, "sentences"
    vocabulary: WordVocabulary
    encoder: SentenceEncoder

    def __init__(self, options: WordsOptions, request: Request) -> None:
        super().__init__(request)
        options.check()
        self.options = options

    def input_files(self) -> Iterable[Path]:
        options = self.options
        splits = super().input_files() if self.request.splits or options.tokenizer_from else []
        vectors = [options.word_vectors] if options.word_vectors else []
        return [*splits, *options.tokenizer_corpus, *options.labelled_corpus, *vectors]

    def prepare(self) -> dict[str, Any]:
        options = self.options
        if options.tokenizer_from is not None:
            self.vocabulary = WordVocabulary.load(options.tokenizer_from)
        else:
            self.vocabulary = self._make_vocabulary()
        self._overlap = evaluation_overlap(
            options.drop_overlap_with, self.request.destdir, self._labelled_reader
        )
        return describe_vocabulary(self.vocabulary)

    def _make_vocabulary(self) -> WordVocabulary:
        """Return the vocabulary of the train split and the other files that the options name.

        Its places are for "text" the normalised words that occur `min_frequency` times, at most the
        `vocab_size` frequent ones; for "vectors" all words of the file of vectors; for "both" the one
        and then the other.
        """
        options, forms = self.options, Counter[str]()
        open_file = self.request.text_file
        readers = [self._text_reader(path) for path in self.request.splits.get(TRAIN, [])]
        readers += [TextReader(open_file(path)) for path in options.tokenizer_corpus]
        for reader in readers:
            for words in reader:
                forms.update(words)
        for path in options.labelled_corpus:
            for sentence in self._labelled_reader(path):
                forms.update(sentence.words)
        if not forms:
            raise UsageError(
                "there is no text to take words from; give --trainpref, --tokenizer-corpus (plain text) "
                "or --labelled-corpus (CoNLL columns or .conllu)"
            )
        counts = count_words(forms)
        words = []
        if options.word_places != "vectors":
            words = frequent_words(counts, options.min_frequency, options.vocab_size)
        known: dict[str, np.ndarray] = {}
        if options.word_vectors is not None:
            wanted = set(words) if options.word_places == "text" else None
            known = read_vectors(open_file(options.word_vectors), wanted)
            if options.word_places != "text":
                frequent = set(words)
                words += [word for word in known if word not in frequent]
        words = [*SPECIAL_WORDS, *words]
        table = None
        if options.word_vectors is not None:
            table = vector_table(words, known)
            print(
                f"{len(words):,} words, {len(known):,} of them with a vector in {options.word_vectors}"
            )
        return WordVocabulary(words, characters_of(forms), [counts[word] for word in words], table)

    def _text_reader(self, path: Path) -> TextReader:
        paragraphs = self.options.documents == "blank"
        return TextReader(self.request.text_file(path), self.options.split_text, paragraphs)

    def _labelled_reader(self, path: Path) -> SentenceReader:
        return words_reader(self.request.text_file(path), self.options.word_column or 0)

    def read(self, split: Split) -> Iterator[list[str]]:
        """Yield the sentences; of train without those of evaluation splits, which are counted."""
        counts = split.counts
        counts["dropped_overlap"] = 0
        for path in split.sources:
            reader = self._text_reader(path)
            for words in reader:
                if split.name == TRAIN and words in self._overlap:
                    counts["dropped_overlap"] += 1
                else:
                    yield words
            counts.update(reader.counts)

    def encode(self, split: Split, records: Iterator[list[str]]) -> Iterator[EncodedSentences]:
        self.encoder = SentenceEncoder(self.vocabulary)
        return map(self.encoder.encode, batches(records, BATCH))

    def write(self, split: Split, encoded: Iterator[EncodedSentences]) -> None:
        write_sentences(split, encoded, self.folder, self.encoder, word_types(self.vocabulary))

    def nothing(self, split: Split) -> str:
        return f"{split}: no text{dropped_sentences(split.counts['dropped_overlap'])}"

    def finish(self, splits: list[Split]) -> dict[str, Any]:
        self.shared_files = self.vocabulary.save(self.folder)
        return {"least": self.options.min_frequency, "places": self.options.word_places}

    def summary(self, split: Split) -> str:
        return summarise_sentences(split)

    def report(self, manifest: Manifest) -> str:
        about = manifest.tokenizer
        return f"{self.request.destdir}: {about['vocab_size']:,} words, {about['hash']}"


register_dataset_kind("words", WordsOptions)(WordsPipeline)
