"""A corpus: text files to a tokenizer and token files. The default kind."""

import contextlib
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from tqdm import tqdm

from metaseq_lm.core.errors import UsageError, say
from metaseq_lm.core.options import option
from metaseq_lm.core.output import is_quiet
from metaseq_lm.data.corpus.encode import Counts, Encoded, encode_blocks, join_words
from metaseq_lm.data.corpus.text_columns import ColumnFile
from metaseq_lm.data.preprocess.hold_out import HeldOutLines
from metaseq_lm.data.preprocess.options import (
    DocumentOptions,
    PlainTextOptions,
    TableOptions,
    VocabularyOptions,
)
from metaseq_lm.data.preprocess.pipeline import (
    TRAIN,
    VALID,
    Pipeline,
    Record,
    Request,
    Split,
    register_dataset_kind,
)
from metaseq_lm.data.preprocess.tokenizer import TokenizerOptions, describe_tokenizer
from metaseq_lm.data.storage.arrow_files import is_arrow
from metaseq_lm.data.storage.file_kinds import HEAD, PLAIN, RECORDS
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.storage.manifest import CORPUS, WORDS
from metaseq_lm.data.storage.tables import QUOTING
from metaseq_lm.data.storage.text_files import (
    Block,
    TextFile,
    blocks,
    check_text_file,
    source_bytes,
    text_files,
)
from metaseq_lm.data.storage.text_parts import JoinedLines, wrapped_width
from metaseq_lm.data.storage.word_starts import WordStartsWriter
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.data.tokenizers.vocabulary import TASK_TOKENS, Vocabulary

_PLAIN_PROGRESS_SECONDS = 30.0
Written = TypeVar("Written")


@dataclass(frozen=True)
class CorpusOptions(
    TokenizerOptions, DocumentOptions, VocabularyOptions, TableOptions, PlainTextOptions
):
    """Options of a corpus."""

    NOUN: ClassVar[str] = "a corpus"
    UNUSED_WITH: ClassVar[dict[str, str]] = {
        "tokenizer_from": "tokenizer cased vocab_size word_pattern character_coverage task_tokens "
        "min_frequency tokenizer_corpus",
        "plain_text": "text_column text_columns columns quoting",
        "text_column": "text_columns",
    }

    task_tokens: int = option(
        TASK_TOKENS,
        "number of symbols [CLS0], [CLS1], ... (default: 30; of a world: 1)",
        at_least=0,
    )
    text_column: str | None = option(
        None,
        "the column of the text, in files of JSON lines, CSV, TSV, Parquet or Arrow; a record is a "
        "document (of a labelled set: A or A,B, the same as --text-columns)",
        metavar="NAME",
    )


class TokenPipeline(Pipeline[Record, Written]):
    """Writes the token files of each split, and the tokenizer with the counts of its symbols."""

    kind, unit = CORPUS, "sequences"
    reads, expected = PLAIN, "plain text"
    tokenizer: Tokenizer
    train_frequencies: np.ndarray | None = None

    def note(
        self, split: Split, counts: Counts, frequencies: np.ndarray, has_words: bool = True
    ) -> None:
        """Record the counts of a split, and the frequency of each symbol in it."""
        unk = self.tokenizer.vocabulary.unk
        counts.unknown = 0 if unk is None else int(frequencies[unk])
        split.counts = vars(counts)
        suffixes = [".bin", ".idx", *[WORDS] * has_words]
        split.files = [f"{split.name}{suffix}" for suffix in suffixes]
        if split.name == TRAIN:
            self.train_frequencies = frequencies

    def finish(self, splits: list[Split]) -> dict[str, Any]:
        if self.train_frequencies is not None:
            symbols, counts = self.tokenizer.vocabulary.symbols, self.train_frequencies.tolist()
            self.tokenizer.vocabulary = Vocabulary(symbols, counts)
        self.shared_files = self.tokenizer.save(self.folder)
        return {}

    def report(self) -> str:
        symbols = f"{self.tokenizer.name} with {len(self.tokenizer.vocabulary):,} symbols"
        return f"{self.request.destdir}: {symbols}, {self.tokenizer.fingerprint}"


@register_dataset_kind("corpus", CorpusOptions)
class CorpusPipeline(TokenPipeline[Block, Encoded]):
    """Text in blocks, encoded in one or several processes.

    With `options.documents` "blank", blank lines and the ends of files end documents, and every
    other line is a sequence, such as a sentence. With "lines" every line is a document. With
    "paragraphs" the lines up to a blank one are a document; with "file" they are a sequence of the
    document.
    """

    holds_out = True
    _held: HeldOutLines | None = None

    def __init__(self, options: CorpusOptions, request: Request) -> None:
        super().__init__(request.expanded().with_valid())
        if options.text_columns is not None:
            if len(options.text_columns) > 1:
                raise UsageError("--text-columns: a corpus has one column of text")
            options = replace(options, text_column=options.text_columns[0], text_columns=None)
        if options.text_column is None and (options.columns or options.quoting != QUOTING[0]):
            raise UsageError("--columns and --quoting are of tables; give --text-column as well")
        if options.text_column is not None and options.documents not in ("lines", "blank"):
            raise UsageError(
                f"--documents {options.documents} is for plain text; with --text-column a record "
                "is a document"
            )
        self.options = options
        self._blank_ends = options.documents in ("blank", "file")
        has_column = options.text_column is not None
        is_joined = options.documents in ("paragraphs", "file")
        self.holds_lines = has_column or is_joined or request.hold_out is not None
        if has_column:
            self.reads = RECORDS | PLAIN  # a table of one column
            self.expected = "a table or records with a column of text"

    def input_files(self) -> Iterable[Path]:
        return [*super().input_files(), *text_files(self.options.tokenizer_corpus)]

    def text_file(self, path: Path) -> TextFile:
        """Return a file as the options say."""
        file, options = self.request.text_file(path), self.options
        if options.text_column is None and options.documents in ("paragraphs", "file"):
            return JoinedLines(file.path, file.on_bad_utf8, file.encoding, file=file)
        if options.text_column is None:
            return file
        return ColumnFile(
            file.path,
            file.on_bad_utf8,
            file.encoding,
            options.text_column,
            options.columns,
            options.quoting,
            options.documents == "blank",
        )

    def _part(self, path: Path, split: str) -> TextFile:
        """Return the part of a file that belongs to a split."""
        file = self.text_file(path)
        if self._held is None or split not in (TRAIN, VALID):
            return file
        return self._held.part(file, split == VALID)

    def check_file(self, path: Path) -> None:
        file = self.text_file(path)
        if isinstance(file, ColumnFile):
            check_text_file(path, False)
            if not is_arrow(path):
                super().check_file(path)
            next(file.chunks(1), None)  # checks that the column exists
            return
        if self.options.plain_text:
            check_text_file(path, file.is_utf8)
            return
        super().check_file(path)

    def prepare(self) -> dict[str, Any]:
        options, request = self.options, self.request
        train = request.splits.get(TRAIN, [])
        if request.hold_out is not None:
            files = list(map(self.text_file, train))
            # At this point a paragraph is one line.
            documents = options.documents.replace("paragraphs", "lines")
            self._held = HeldOutLines.of_documents(files, request.hold_out, documents)
        if options.tokenizer_from is not None:
            self.tokenizer = load_tokenizer(options.tokenizer_from)
        else:
            files = list(map(self.text_file, text_files(options.tokenizer_corpus)))
            files = files or [self._part(path, TRAIN) for path in train]
            self.tokenizer = options.train(files, options.min_frequency, options.task_tokens)
        self.tokenizer.save(self.folder)  # for the worker processes
        return describe_tokenizer(self.tokenizer)

    def read(self, split: Split) -> Iterator[Block]:
        """Yield the blocks of the files; `read` counts on from one file to the next."""
        before = 0
        for path in split.sources:
            file = self.text_file(path)  # without the numbers of lines, for worker processes
            for block in blocks(self._part(path, split.name)):
                yield replace(block, file=file, read=before + block.read)
            before += source_bytes(path)

    def encode(self, split: Split, records: Iterator[Block]) -> Iterator[Encoded]:
        return encode_blocks(records, self.tokenizer, self.folder, self.request.workers)

    def write(self, split: Split, encoded: Iterator[Encoded]) -> None:
        blank_ends = self._blank_ends
        prefix = self.folder / split.name
        with (
            IndexedWriter(prefix, self.tokenizer.dtype, documents=blank_ends) as writer,
            WordStartsWriter(prefix) as words,
            contextlib.closing(_with_progress(split, encoded)) as parts,
        ):
            skip_bad = self.request.on_bad_utf8 == "skip"
            frequencies = np.zeros(len(self.tokenizer.vocabulary), np.int64)
            counter = _CountingWriter(writer, words, frequencies, skip_bad, blank_ends)
            for part, fraction in parts:
                counter.add(part)
                writer.fraction = fraction
        self.note(split, counter.counts, counter.frequencies)

    def report(self) -> str:
        return "\n".join([super().report(), *self._wrapped_files()])

    def _wrapped_files(self) -> Iterator[str]:
        """Yield a warning for the first file whose lines look wrapped, if each is a document."""
        if self.options.documents != "lines" or self.options.text_column is not None:
            return
        for path in chain.from_iterable(self.request.splits.values()):
            head, _ = next(self.text_file(path).chunks(HEAD))
            if width := wrapped_width(head.decode("utf-8", "replace").splitlines()):
                yield (
                    f"warning: {path}: its lines look wrapped at {width} characters, and each is a "
                    "document; give --documents paragraphs (the lines up to a blank one, joined by "
                    "spaces), file (a file is one document of these) or blank (each line is a "
                    "sentence of a document that a blank line ends)"
                )
                return

    def nothing(self, split: Split) -> str:
        return f"{split}: no text in {split.counts['lines']} lines: {self._passed_over(split)}"

    def summary(self, split: Split) -> str:
        counts = Counts(**split.counts)
        inside = counts.sequences > counts.documents
        sentences = f"{counts.sequences:,} sequences in " if inside else ""
        return (
            f"{split.name}: {counts.lines:,} lines -> {sentences}{counts.documents:,} documents, "
            f"{counts.words:,} words, {counts.tokens:,} tokens; {self._passed_over(split)}"
        )

    def _passed_over(self, split: Split) -> str:
        counts = split.counts
        words = [f"{counts['blank']:,} blank"]
        if counts["bad_utf8"]:
            done = "skipped" if self.request.on_bad_utf8 == "skip" else "replaced"
            words.append(f"{counts['bad_utf8']:,} with invalid UTF-8 ({done})")
        if counts["no_tokens"]:
            words.append(f"{counts['no_tokens']:,} without any token")
        return ", ".join(words)


def _with_progress(
    split: Split, encoded: Iterator[Encoded]
) -> Generator[tuple[Encoded, float], None, None]:
    """Yield each block with the share of the files read so far.

    Shows a bar on a terminal, and elsewhere a line now and then.
    """
    total, done = sum(map(source_bytes, split.sources)), 0
    next_line = time.monotonic() + _PLAIN_PROGRESS_SECONDS
    hidden = is_quiet() or not sys.stderr.isatty()
    with tqdm(total=total, unit="B", unit_scale=True, desc=split.name, disable=hidden) as bar:
        for part in encoded:
            yield part, part.read / total
            bar.update(part.read - done)
            done = part.read
            if hidden and not is_quiet() and time.monotonic() > next_line:
                next_line += _PLAIN_PROGRESS_SECONDS
                say(f"{split.name}: {100 * done / total:.0f} %")


class _CountingWriter:
    """Writes encoded blocks in order, and counts lines and tokens."""

    def __init__(
        self,
        writer: IndexedWriter,
        words: WordStartsWriter,
        frequencies: np.ndarray,
        skip_bad: bool,
        blank_ends: bool,
    ) -> None:
        self.counts = Counts()
        self.frequencies = frequencies
        self._writer, self._words = writer, words
        self._skip_bad = skip_bad
        self._blank_ends = blank_ends
        # Counts of the pieces of the current line.
        self._line = np.zeros_like(frequencies)
        self._line_words = 0
        self._text = self._bad = self._inside = False

    def add(self, part: Encoded) -> None:
        """Write the sequences of a block, or a piece of one."""
        frequencies = np.bincount(part.values, minlength=len(self.frequencies))
        before = len(self._writer)
        if part.piece:
            self._add_piece(part, frequencies)
        else:
            self.frequencies += frequencies
            self.counts.add(part.counts)
            self._writer.extend(part.values, part.sizes)
            self._words.extend(part.words)
        if self._blank_ends:
            self._writer.end_documents(np.asarray(part.breaks, np.int64) + before)
        self.counts.documents = self._writer.documents

    def _add_piece(self, part: Encoded, frequencies: np.ndarray) -> None:
        if self._inside and part.opens_inside:
            join_words(part.words)
        self._writer.part(part.values)
        self._words.extend(part.words)
        self._line += frequencies
        self._line_words += int(part.words.sum())
        self._inside = part.closes_inside
        self._text |= part.text
        self._bad |= part.bad
        if part.continues:
            return
        tokens, counts = int(self._line.sum()), self.counts
        counts.lines += 1
        counts.bad_utf8 += self._bad
        skipped = self._bad and self._skip_bad
        counts.skipped += skipped
        if not skipped and not self._text:
            counts.blank += 1
            if self._blank_ends:
                self._writer.end_documents([len(self._writer)])
        counts.no_tokens += not skipped and self._text and not tokens
        if skipped or not self._text or not tokens:
            self._writer.drop_parts()
            self._words.truncate(self._writer.tokens)
        else:
            counts.sequences += 1
            counts.words += self._line_words
            counts.tokens += self._writer.end_parts()
            self.frequencies += self._line
        self._line[:], self._line_words = 0, 0
        self._text = self._bad = self._inside = False
