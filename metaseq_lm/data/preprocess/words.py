"""Sentences of words: unlabelled text to a data folder with a vocabulary of words."""

import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import option, with_default
from metaseq_lm.core.output import show
from metaseq_lm.data.preprocess.hold_out import HeldOutLines
from metaseq_lm.data.preprocess.options import (
    DocumentOptions,
    PlainTextOptions,
    VocabularyOptions,
    WordColumnOptions,
)
from metaseq_lm.data.preprocess.pipeline import (
    TRAIN,
    VALID,
    Columns,
    Pipeline,
    Record,
    Request,
    Split,
    batches,
    register_dataset_kind,
)
from metaseq_lm.data.preprocess.tokenizer import TokenizerOptions, describe_tokenizer
from metaseq_lm.data.records.file_kinds import PLAIN, check_kind, is_conllu
from metaseq_lm.data.records.record import signed_reader
from metaseq_lm.data.storage.indexed import smallest_dtype
from metaseq_lm.data.words.columns import SentenceReader
from metaseq_lm.data.words.overlap import dropped_sentences, evaluation_overlap, words_reader
from metaseq_lm.data.words.running_text import SPLITTING, TextReader
from metaseq_lm.data.words.sets import KINDS, missing_breaks
from metaseq_lm.data.words.vocabulary import (
    SPECIAL_WORDS,
    SubwordVocabulary,
    WordVocabulary,
    characters_of,
    count_words,
    frequent_words,
    read_vectors,
    vector_table,
)

_BATCH = 8192  # sentences
WORDS = "words"  # the kind of the manifest
# The counts of the manifest, with their names in the summary of a split.
_COUNTED = {
    "blank": "blank lines",
    "documents": "lines of documents passed over",
    "comments": "comments passed over",
    "header": "header rows passed over",
    "multi_word": "multi-word tokens passed over",
    "empty_nodes": "empty nodes passed over",
    "bad_utf8": "with invalid UTF-8",
    "skipped": "skipped",
    "dropped_overlap": "dropped, they occur in an evaluation split",
}


@dataclass(frozen=True)
class _WordsOptions(WordColumnOptions, VocabularyOptions, DocumentOptions, PlainTextOptions):
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
        "words: what the vocabulary holds, words of the text, all words of the file of vectors, or "
        "both",
        choices=("text", "vectors", "both"),
    )
    labelled_corpus: tuple[Path, ...] = option(
        (), "words: files in CoNLL columns, or .conllu, whose words count for the vocabulary too"
    )
    split_text: str = option(
        "lines",
        "words: a line is a sentence (lines), several sentences (sentences), or running text that "
        "rules for English cut into words and sentences (raw); --documents blank joins lines up to "
        "a blank one",
        choices=SPLITTING,
    )
    vocab_size: int | None = with_default(
        TokenizerOptions, "vocab_size", None, "at most this many words (default: all)"
    )


class _WordForms(dict[str, int]):
    """Numbers of the different words as the text spells them, in order of appearance.

    `ids` are their places in the vocabulary.
    """

    def __init__(self, vocabulary: WordVocabulary | SubwordVocabulary) -> None:
        super().__init__()
        self.ids = array.array("i")
        self._vocabulary = vocabulary

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        self.ids.append(self._vocabulary.index(word))
        return number


class SentencePipeline(Pipeline[Record, Columns]):
    """Numbers words by the vocabulary and by their form; for unlabelled text, tags and trees.

    `word_column` is the column of the words in `labelled_files`.
    """

    unit = "sentences"
    vocabulary: WordVocabulary | SubwordVocabulary

    def __init__(
        self, request: Request, word_column: int | None, labelled_files: Iterable[Path]
    ) -> None:
        super().__init__(request)
        files = (request.text_file(path) for path in labelled_files if path.is_file())
        if word_column is not None and all(map(is_conllu, files)):
            raise UsageError("--word-column is that of files in CoNLL columns, and none is given")
        self.word_column = word_column or 0
        self.remarks: list[str] = []

    def labelled_reader(self, path: Path) -> SentenceReader:
        """Return a reader of a labelled file for its words alone."""
        return words_reader(self.request.text_file(path), self.word_column)

    def describe_vocabulary(self) -> dict[str, Any]:
        """Return the description of the vocabulary in the manifest."""
        vocabulary = self.vocabulary
        if isinstance(vocabulary, SubwordVocabulary):
            return describe_tokenizer(vocabulary.tokenizer)
        return {"name": WORDS, "hash": vocabulary.hash, "vocab_size": len(vocabulary)}

    def encode(self, split: Split, records: Iterator[Record]) -> Iterator[Columns]:
        forms = self._forms = _WordForms(self.vocabulary)
        self._lengths, self._unknown = [np.zeros(0, np.int64)], 0
        for batch in batches(records, _BATCH):
            sentences = list(map(self.words_of, batch))
            sizes = np.fromiter(map(len, sentences), np.int64, len(sentences))
            words = map(forms.__getitem__, chain.from_iterable(sentences))
            numbers = np.fromiter(words, np.int32, int(sizes.sum()))
            ids = np.frombuffer(forms.ids, np.int32)[numbers] if len(numbers) else numbers
            self._lengths.append(sizes)
            self._unknown += int(np.count_nonzero(ids == self.vocabulary.unknown))
            yield {
                "": (ids.astype(smallest_dtype(len(self.vocabulary))), sizes),
                "surface": (numbers, sizes),
                **{part: (column, sizes) for part, column in self.label_columns(batch).items()},
            }
        codes = np.frombuffer("".join(forms).encode("utf-32-le"), "<i4")
        yield {"forms": (codes, np.fromiter(map(len, forms), np.int64, len(forms)))}

    def words_of(self, record: Record) -> Sequence[str]:
        """Return the words of a sentence."""
        raise NotImplementedError

    def label_columns(self, batch: list[Record]) -> dict[str, np.ndarray]:
        """Return the columns of a batch with a number for each word, apart from the words."""
        return {}

    def write(self, split: Split, encoded: Iterator[Columns]) -> None:
        words = self.write_columns(split, encoded)[""]
        lengths = np.concatenate(self._lengths)
        counts = {"sentences": len(lengths), "words": words, "unknown": self._unknown}
        split.counts = {**counts, "forms": len(self._forms), **split.counts}
        if reason := missing_breaks(lengths, KINDS[self.kind]):
            self.remarks.append(f"{split}: {reason}")

    def warnings(self) -> list[str]:
        """Return the remarks as lines for the end of the run."""
        return [f"warning: {remark}" for remark in self.remarks]

    def summary(self, split: Split) -> str:
        counts = split.counts
        share = 100 * counts["unknown"] / max(counts["words"], 1)
        text = (
            f"{split.name}: {counts['sentences']:,} sentences, {counts['words']:,} words "
            f"({share:.1f} % unknown)"
        )
        for name, meaning in _COUNTED.items():
            if counts.get(name):
                text += f", {counts[name]:,} {meaning}"
        return text


@register_dataset_kind("words", _WordsOptions)
class _WordsPipeline(SentencePipeline[list[str]]):
    """Unlabelled sentences; without any split it makes the vocabulary only."""

    kind = WORDS
    holds_out = True
    vocabulary: WordVocabulary
    _held: HeldOutLines | None = None

    def __init__(self, options: _WordsOptions, request: Request) -> None:
        labelled_files = [*options.labelled_corpus, *map(Path, options.drop_overlap_with)]
        super().__init__(request.expanded().with_valid(), options.word_column, labelled_files)
        if options.word_places != "text" and options.word_vectors is None:
            raise UsageError(f"--word-places {options.word_places} needs --word-vectors FILE")
        if options.documents != "lines" and options.split_text == "lines":
            raise UsageError(
                f"--documents {options.documents} joins lines of running text; with --words it "
                "needs --split-text sentences or raw"
            )
        if options.documents == "file":
            raise UsageError("--documents file: sentences of words are no documents; give blank")
        self.options = options

    def input_files(self) -> Iterable[Path]:
        options = self.options
        files = [*options.tokenizer_corpus, *options.labelled_corpus]
        if options.word_vectors:
            files.append(options.word_vectors)
        if self.request.splits or options.tokenizer_from:
            return [*super().input_files(), *files]
        return files

    def check_file(self, path: Path) -> None:
        if path in self.options.labelled_corpus and signed_reader(self.request.text_file(path)):
            return
        super().check_file(path)
        labelled_or_vectors = [*self.options.labelled_corpus, self.options.word_vectors]
        if path not in labelled_or_vectors and not self.options.plain_text:
            check_kind(self.request.text_file(path), PLAIN, "plain text")

    def is_read_first(self, path: Path) -> bool:
        options = self.options
        learns = [*self.request.splits.get(TRAIN, []), *options.tokenizer_corpus]
        return options.tokenizer_from is None and path in [*learns, *options.labelled_corpus]

    def prepare(self) -> dict[str, Any]:
        options, request = self.options, self.request
        if request.hold_out is not None:
            files = {path: request.text_file(path).blocks() for path in request.splits[TRAIN]}
            self._held = HeldOutLines.of_documents(files, request.hold_out, options.documents)
        if options.tokenizer_from is not None:
            self.vocabulary = WordVocabulary.load(options.tokenizer_from)
        else:
            self.vocabulary = self._make_vocabulary()
        self._overlap = evaluation_overlap(
            options.drop_overlap_with, self.request.destdir, self.labelled_reader
        )
        return self.describe_vocabulary()

    def _make_vocabulary(self) -> WordVocabulary:
        """Return the vocabulary of the train split and the other files that the options name.

        For "text" it holds the normalised words that occur `min_frequency` times, at most the
        `vocab_size` most frequent ones; for "vectors" all words of the file of vectors; for "both"
        the former, then the latter.
        """
        options, forms = self.options, Counter[str]()
        open_file = self.request.text_file
        readers = [self._text_reader(path, TRAIN) for path in self.request.splits.get(TRAIN, [])]
        readers += [TextReader(open_file(path)) for path in options.tokenizer_corpus]
        for reader in readers:
            for words in reader:
                forms.update(words)
        for path in options.labelled_corpus:
            for sentence in self.labelled_reader(path):
                forms.update(sentence.words)
        if not forms:
            raise UsageError(
                "there is no text to take words from; give --trainpref, --tokenizer-corpus (plain "
                "text) or --labelled-corpus (CoNLL columns or .conllu)"
            )
        counts = count_words(forms)
        words = []
        if options.word_places != "vectors":
            words = frequent_words(counts, options.min_frequency, options.vocab_size)
        table = None
        if options.word_vectors is None:
            words = [*SPECIAL_WORDS, *words]
        else:
            frequent = set(words)
            # A file of vectors may hold millions of words, so only those of the text are kept.
            needed = frequent if options.word_places == "text" else None
            vectors = read_vectors(open_file(options.word_vectors), needed)
            words = [*SPECIAL_WORDS, *words, *(word for word in vectors if word not in frequent)]
            table = vector_table(words, vectors)
            show(
                f"{len(words):,} words, {len(vectors):,} of them with a vector in "
                f"{options.word_vectors}"
            )
        return WordVocabulary(words, characters_of(forms), [counts[word] for word in words], table)

    def _text_reader(self, path: Path, split: str) -> TextReader:
        file, blocks = self.request.text_file(path), None
        if self._held is not None and split in (TRAIN, VALID):
            blocks = self._held.part(path, file.blocks(), split == VALID)
        paragraphs = self.options.documents != "lines"
        return TextReader(file, self.options.split_text, paragraphs, blocks)

    def read(self, split: Split) -> Iterator[list[str]]:
        """Yield the sentences; train without sentences of evaluation splits, which are counted."""
        counts = split.counts
        counts["dropped_overlap"] = 0
        for path in split.sources:
            reader = self._text_reader(path, split.name)
            for words in reader:
                if split.name == TRAIN and words in self._overlap:
                    counts["dropped_overlap"] += 1
                else:
                    yield words
            counts.update(reader.counts)

    def words_of(self, record: list[str]) -> list[str]:
        return record

    def nothing(self, split: Split) -> str:
        return f"{split}: no text{dropped_sentences(split.counts['dropped_overlap'])}"

    def finish(self, splits: list[Split]) -> dict[str, Any]:
        self.shared_files = self.vocabulary.save(self.folder)
        return {"least": self.options.min_frequency, "places": self.options.word_places}

    def report(self) -> str:
        text = f"{self.request.destdir}: {len(self.vocabulary):,} words, {self.vocabulary.hash}"
        return "\n".join([text, *self.warnings()])
