"""Text files to a data folder: tokenizer, token files, manifest.

Nothing appears under its final name before all of it is written.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.corpus.encode import Counts, Encoded, encode_blocks
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.storage.manifest import CORPUS, Manifest
from metaseq_lm.data.storage.staging import publish, staging
from metaseq_lm.data.storage.text_files import (
    Block,
    blocks,
    check_policy,
    check_text_file,
    training_lines,
)
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.tokenizers.loading import load_tokenizer, tokenizer_class
from metaseq_lm.data.tokenizers.vocabulary import TASK_TOKENS

PLAIN_PROGRESS_SECONDS = 30.0
DOCUMENTS = ("lines", "blank")


@dataclass(frozen=True)
class TokenizerChoice:
    """Which tokenizer to train, or (`source`) the folder of the one to take over.

    `corpus` is what it learns from, the train split if empty; `options` are of its kind only.
    """

    name: str = "byte_bpe"
    vocab_size: int = 30000
    task_tokens: int = TASK_TOKENS
    min_frequency: int = 1
    corpus: tuple[Path, ...] = ()
    source: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """What every kind of preprocessing needs to know.

    `documents` is "lines", where every line is a document, or "blank", where blank lines (and the
    ends of files) end them and every other line is a sequence, a sentence say; corpora only.
    """

    destdir: Path
    splits: dict[str, list[Path]]
    on_bad_utf8: str = "replace"
    workers: int = 1
    overwrite: bool = False
    command: str = ""
    documents: str = "lines"

    def check(self) -> None:
        """Raise before anything is written if an option or a file cannot be used."""
        check_policy(self.on_bad_utf8)
        if self.workers < 1:
            raise UsageError(f"--workers {self.workers}: at least 1")
        if self.documents not in DOCUMENTS:
            raise UsageError(f"--documents {self.documents}: choose one of {', '.join(DOCUMENTS)}")
        if not self.splits:
            raise UsageError("nothing to do; give --trainpref, --validpref, --testpref or --split")
        for paths in self.splits.values():
            for path in paths:
                check_text_file(path)


class Progress:
    """A bar on a terminal, else a line now and then; in bytes of the files of one split."""

    def __init__(self, name: str, paths: Sequence[Path]) -> None:
        self.name = name
        self.total = sum(path.stat().st_size for path in paths)
        self.done = 0
        self._next = time.monotonic() + PLAIN_PROGRESS_SECONDS
        self._bar = tqdm(
            total=self.total, unit="B", unit_scale=True, desc=name, disable=not sys.stderr.isatty()
        )

    @property
    def fraction(self) -> float:
        """The share of the input that is done."""
        return self.done / self.total

    def at(self, done: int) -> None:
        """Say how many bytes are done."""
        self._bar.update(done - self.done)
        self.done = done
        if self._bar.disable and time.monotonic() > self._next:
            self._next += PLAIN_PROGRESS_SECONDS
            print(f"{self.name}: {100 * self.fraction:.0f} %", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the bar."""
        self._bar.close()


def make_tokenizer(choice: TokenizerChoice, job: Job) -> Tokenizer:
    """Train the tokenizer of `choice`, or load the one of its source folder."""
    if choice.source is not None:
        return load_tokenizer(choice.source)
    kind = tokenizer_class(choice.name)
    paths = list(choice.corpus) or job.splits.get("train", [])
    if not paths:
        raise UsageError(
            "there is no text to train a tokenizer on; give --trainpref, --tokenizer-corpus or "
            "--tokenizer-from"
        )
    for path in paths:
        check_text_file(path)
    print(f"training {choice.name} on {', '.join(map(str, paths))}", file=sys.stderr, flush=True)
    return kind.train(
        training_lines(paths, job.on_bad_utf8),
        choice.vocab_size,
        choice.task_tokens,
        choice.min_frequency,
        **choice.options,
    )


def describe(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what a manifest says of a tokenizer."""
    return {
        "name": tokenizer.name,
        "hash": tokenizer.fingerprint,
        "vocab_size": len(tokenizer.vocabulary),
        "task_tokens": tokenizer.vocabulary.task_tokens,
    }


def preprocess_corpus(job: Job, choice: TokenizerChoice) -> Manifest:
    """Binarise a corpus into `job.destdir` and return its manifest.

    MetaseqError for input that cannot be used or a full disk; then the folder is as it was.
    """
    job.check()
    with staging(job.destdir, job.overwrite) as folder:
        tokenizer = make_tokenizer(choice, job)
        tokenizer.save(folder)
        manifest = Manifest(CORPUS, describe(tokenizer), {}, job.command)
        names = []
        for split in job.splits:
            counts, frequencies = binarise(job, split, tokenizer, folder)
            manifest.splits[split] = {**vars(counts), "sources": list(map(str, job.splits[split]))}
            names += [f"{split}.bin", f"{split}.idx"]
            if split == "train":
                tokenizer.vocabulary = tokenizer.vocabulary.with_counts(frequencies.tolist())
            print(summary(split, counts, job.on_bad_utf8), flush=True)
        manifest.add_files(folder, [*tokenizer.save(folder), *names])
        publish(folder, job.destdir, manifest)
    return manifest


def _all_blocks(paths: Sequence[Path]) -> Iterator[Block]:
    """Yield the blocks of several files; `read` counts on from one to the next."""
    before = 0
    for path in paths:
        for block in blocks(path):
            yield replace(block, read=before + block.read)
        before += path.stat().st_size


class _Sink:
    """Takes encoded blocks in order, writes them, and counts."""

    def __init__(
        self, writer: IndexedWriter, vocab_size: int, skip_bad: bool, blank_ends: bool
    ) -> None:
        self.counts = Counts()
        self.frequencies = np.zeros(vocab_size, np.int64)
        self._writer = writer
        self._skip_bad = skip_bad
        self._blank_ends = blank_ends
        self._line = np.zeros(vocab_size, np.int64)
        self._text = self._bad = False

    def take(self, part: Encoded) -> None:
        """Write the sequences of a block, or a piece of one."""
        seen = np.bincount(part.values, minlength=len(self.frequencies))
        before = len(self._writer)
        if part.piece:
            self._take_piece(part, seen)
        else:
            self.frequencies += seen
            self.counts.add(part.counts)
            self._writer.extend(part.values, part.sizes)
        if self._blank_ends:
            self._writer.end_documents(np.asarray(part.breaks, np.int64) + before)
        self.counts.documents = self._writer.documents

    def _take_piece(self, part: Encoded, seen: np.ndarray) -> None:
        self._writer.part(part.values)
        self._line += seen
        self._text |= part.text
        self._bad |= part.bad
        if part.more:
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
        else:
            counts.sequences += 1
            counts.tokens += self._writer.end_parts()
            self.frequencies += self._line
        self._line[:] = 0
        self._text = self._bad = False


def binarise(job: Job, split: str, tokenizer: Tokenizer, folder: Path) -> tuple[Counts, np.ndarray]:
    """Write the token files of one split; return its counts and int64 (vocabulary,) frequencies."""
    paths, policy = job.splits[split], job.on_bad_utf8
    progress = Progress(split, paths)
    blank_ends = job.documents == "blank"
    files = IndexedWriter(folder / split, tokenizer.dtype, documents=blank_ends)
    with contextlib.closing(progress), files as writer:
        sink = _Sink(writer, len(tokenizer.vocabulary), policy == "skip", blank_ends)
        encoded = encode_blocks(_all_blocks(paths), tokenizer, folder, policy, job.workers)
        # Closed at once on an error, so that no worker outlives the message.
        with contextlib.closing(encoded):
            for part in encoded:
                sink.take(part)
                progress.at(part.read)
                writer.fraction = progress.fraction
        if not sink.counts.sequences:
            raise MetaseqError(
                f"{', '.join(map(str, paths))}: no text in {sink.counts.lines} lines: "
                f"{reasons(sink.counts, policy)}"
            )
    return sink.counts, sink.frequencies


def reasons(counts: Counts, policy: str) -> str:
    """Return in words what became of the lines that are not sequences, and of bad bytes."""
    words = [f"{counts.blank:,} blank"]
    if counts.bad_utf8:
        done = "skipped" if policy == "skip" else "replaced"
        words.append(f"{counts.bad_utf8:,} with invalid UTF-8 ({done})")
    if counts.no_tokens:
        words.append(f"{counts.no_tokens:,} without any token")
    return ", ".join(words)


def summary(split: str, counts: Counts, policy: str) -> str:
    """Return the line of a split for the end of the run."""
    sentences = f"{counts.sequences:,} sequences in " if counts.sequences > counts.documents else ""
    return (
        f"{split}: {counts.lines:,} lines -> {sentences}{counts.documents:,} documents, "
        f"{counts.tokens:,} tokens; {reasons(counts, policy)}"
    )
