"""A corpus: text files to a tokenizer and token files. The default kind."""

import contextlib
import re
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from metaseq_lm.core.errors import UsageError, say
from metaseq_lm.core.options import option
from metaseq_lm.core.output import Meter, hide_status, is_quiet
from metaseq_lm.data.corpus.encode import Counts, Encoded, encode_blocks
from metaseq_lm.data.labelled.files import NO_COLUMN, RowReader, TableColumns
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
from metaseq_lm.data.records.file_kinds import PLAIN, RECORDS, Kind, recognise
from metaseq_lm.data.records.plain_text import blocks_of, paragraphs, wrapped_width
from metaseq_lm.data.records.record import QUOTING, TEXT
from metaseq_lm.data.records.text_content import HEAD
from metaseq_lm.data.records.text_files import (
    Block,
    TextFile,
    check_text_file,
    source_bytes,
    text_files,
)
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.storage.manifest import CORPUS, WORDS
from metaseq_lm.data.storage.word_starts import WordStartsWriter
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.data.tokenizers.vocabulary import TASK_TOKENS, Vocabulary

_PLAIN_PROGRESS_SECONDS = 30.0
_LINE_ENDS = re.compile(r"\r?\n")
Written = TypeVar("Written")


@dataclass(frozen=True)
class _CorpusOptions(
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
        split.files = [f"{split.name}.bin", f"{split.name}.idx"]
        if has_words:
            split.files.append(f"{split.name}{WORDS}")
        if split.name == TRAIN:
            self.train_frequencies = frequencies

    def finish(self, splits: list[Split]) -> dict[str, Any]:
        if self.train_frequencies is not None:
            # Masking by rarity needs the counts of train, whatever the tokenizer learnt from.
            symbols, counts = self.tokenizer.vocabulary.symbols, self.train_frequencies.tolist()
            self.tokenizer.vocabulary = Vocabulary(symbols, counts)
        self.shared_files = self.tokenizer.save(self.folder)
        return {}

    def report(self) -> str:
        symbols = f"{self.tokenizer.name} with {len(self.tokenizer.vocabulary):,} symbols"
        return f"{self.request.destdir}: {symbols}, {self.tokenizer.fingerprint}"


@register_dataset_kind("corpus", _CorpusOptions)
class CorpusPipeline(TokenPipeline[Block, Encoded]):
    """Text in blocks, encoded in one or several processes.

    With `options.documents` "blank", blank lines and the ends of files end documents, and every
    other line is a sequence, such as a sentence. With "lines" every line is a document. With
    "paragraphs" the lines up to a blank one are a document; with "file" they are a sequence of the
    document.
    """

    holds_out = True
    _held: HeldOutLines | None = None

    def __init__(self, options: _CorpusOptions, request: Request) -> None:
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
        self.reads = PLAIN | {Kind.OTHER}
        if options.text_column is not None:
            self.reads_records = True
            self.reads = RECORDS | PLAIN  # a table of one column
            self.expected = "a table or records with a column of text"

    def input_files(self) -> Iterable[Path]:
        return [*super().input_files(), *text_files(self.options.tokenizer_corpus)]

    def _column(self, file: TextFile) -> str | None:
        """Return the column of the text; None if the lines are the text."""
        options = self.options
        # A reader of a plug-in gives its texts as records.
        if (
            options.text_column is None
            and not options.plain_text
            and recognise(file).kind is Kind.OTHER
        ):
            return TEXT
        return options.text_column

    def _blocks(self, path: Path, split: str = "") -> Iterator[Block]:
        """Yield the lines of the part of a file that belongs to a split, "" for all."""
        file = self.request.text_file(path)
        if self._column(file) is not None:
            blocks = blocks_of(file, self._column_texts(file))
        elif self.options.documents in ("paragraphs", "file"):
            blocks = blocks_of(file, paragraphs(file))
        else:
            blocks = file.blocks(in_pieces=self.request.hold_out is None)
        if self._held is not None and split in (TRAIN, VALID):
            return self._held.part(path, blocks, split == VALID)
        return blocks

    def _column_texts(self, file: TextFile) -> Iterator[tuple[str, bool]]:
        """Yield the lines of the column of the text, and whether each held invalid UTF-8.

        If blank lines end documents, the lines of each text are kept, and a blank line follows;
        otherwise a text becomes one line, with spaces in place of its line breaks.
        """
        for row in self._rows(file):
            text = row.texts[0].strip("\r\n")
            if not self._blank_ends:
                yield _LINE_ENDS.sub(" ", text), row.bad
                continue
            for line in filter(str.strip, _LINE_ENDS.split(text)):
                yield line.removesuffix("\r"), row.bad and "\ufffd" in line
            yield "", False

    def _rows(self, file: TextFile) -> RowReader:
        options = self.options
        texts = (self._column(file) or "",)
        columns = TableColumns(
            options.columns, texts, NO_COLUMN, null_is_empty=True, quoting=options.quoting
        )
        return RowReader(file, columns, required=False)

    def check_file(self, path: Path) -> None:
        file = self.request.text_file(path)
        if self.options.plain_text:
            check_text_file(path, file.is_utf8)
            file.is_judged = True
            return
        super().check_file(path)
        if self._column(file) is not None:
            next(iter(self._rows(file)), None)  # checks that the column exists

    def is_read_first(self, path: Path) -> bool:
        options, train = self.options, self.request.splits.get(TRAIN, [])
        learns = [] if options.tokenizer_from else text_files(options.tokenizer_corpus) or train
        return path in learns or (self.request.hold_out is not None and path in train)

    def prepare(self) -> dict[str, Any]:
        options, request = self.options, self.request
        train = request.splits.get(TRAIN, [])
        if request.hold_out is not None:
            # At this point a paragraph is one line.
            documents = options.documents.replace("paragraphs", "lines")
            blocks = {path: self._blocks(path) for path in train}
            self._held = HeldOutLines.of_documents(blocks, request.hold_out, documents)
        if options.tokenizer_from is not None:
            self.tokenizer = load_tokenizer(options.tokenizer_from)
        else:
            paths, split = text_files(options.tokenizer_corpus), ""
            if not paths:
                paths, split = train, TRAIN
            # For train these are its own lines: held-out documents must not shape the tokenizer.
            files = [(request.text_file(path), self._blocks(path, split)) for path in paths]
            self.tokenizer = options.train(files, options.min_frequency, options.task_tokens)
        self.tokenizer.save(self.folder)  # for the worker processes
        return describe_tokenizer(self.tokenizer)

    def read(self, split: Split) -> Iterator[Block]:
        """Yield the blocks of the files; `read` counts on from one file to the next."""
        before = 0
        for path in split.sources:
            for block in self._blocks(path, split.name):
                block.read += before
                yield block
            before += source_bytes(path)

    def encode(self, split: Split, records: Iterator[Block]) -> Iterator[Encoded]:
        request = self.request
        skips_bad = request.on_bad_utf8 == "skip"
        return encode_blocks(records, self.tokenizer, self.folder, request.workers, skips_bad)

    def write(self, split: Split, encoded: Iterator[Encoded]) -> None:
        blank_ends = self._blank_ends
        prefix = self.folder / split.name
        with (
            IndexedWriter(prefix, self.tokenizer.dtype, documents=blank_ends) as writer,
            WordStartsWriter(prefix) as words,
            contextlib.closing(_with_progress(split, encoded)) as parts,
        ):
            frequencies = np.zeros(len(self.tokenizer.vocabulary), np.int64)
            counts, is_open = Counts(), False
            for part, fraction in parts:
                before = len(writer)
                joins = part.goes_on and is_open
                if joins:
                    counts.sequences -= len(part.sizes)
                elif part.goes_on:  # the pieces before had no token
                    counts.no_tokens -= len(part.sizes)
                is_open = joins or len(part.sizes) > 0
                frequencies += np.bincount(part.values, minlength=len(frequencies))
                counts.add(part.counts)
                writer.extend(part.values, part.sizes, joins)
                words.extend(part.words)
                if blank_ends:
                    writer.end_documents(np.asarray(part.breaks, np.int64) + before)
                # If the disk gets full, it tells how much space the rest needs.
                writer.fraction = fraction
            counts.documents = writer.documents
        self.note(split, counts, frequencies)

    def report(self) -> str:
        return "\n".join([super().report(), *self._wrapped_files()])

    def _wrapped_files(self) -> Iterator[str]:
        """Yield a warning for the first file whose lines look wrapped, if each is a document."""
        if self.options.documents != "lines" or self.options.text_column is not None:
            return
        for path in chain.from_iterable(self.request.splits.values()):
            file = self.request.text_file(path)
            if self._column(file) is not None:
                continue
            head = next(file.chunks(HEAD)).decode("utf-8", "replace")
            if width := wrapped_width(head.splitlines()):
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

    Shows it on a terminal, and elsewhere a line now and then.
    """
    total = sum(map(source_bytes, split.sources))
    meter = Meter(split.name, "bytes", total)
    next_line = time.monotonic() + _PLAIN_PROGRESS_SECONDS
    for part in encoded:
        yield part, part.read / total
        meter.advance(part.read - meter.done)
        if not meter.is_visible and not is_quiet() and time.monotonic() > next_line:
            next_line += _PLAIN_PROGRESS_SECONDS
            say(f"{split.name}: {100 * part.read / total:.0f} %")
    hide_status()
