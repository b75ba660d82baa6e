"""Blocks of text to ids, in this process or in several, with the same result."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain, pairwise
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.registry import LOADERS
from metaseq_lm.data.records.text_files import BLOCK, Block, text_pieces
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.tokenizers.loading import load_tokenizer


@dataclass
class Counts:
    """Counts of lines: lines = sequences + blank + skipped + no_tokens."""

    lines: int = 0
    sequences: int = 0
    # Equal to `sequences` unless blank lines end documents; known only at the end.
    documents: int = 0
    words: int = 0  # words of the sequences, separated by white space
    tokens: int = 0
    blank: int = 0
    bad_utf8: int = 0  # the lines with invalid bytes, whether replaced or skipped
    skipped: int = 0
    no_tokens: int = 0
    unknown: int = 0  # the tokens that are [UNK]; known only at the end

    def add(self, other: "Counts") -> None:
        """Add the numbers of `other` to these."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class Encoded:
    """The token ids of a block."""

    values: np.ndarray  # the ids end to end
    sizes: np.ndarray  # the size of each sequence
    words: np.ndarray  # how many words begin in each token
    read: int  # how many bytes of the files on disk are consumed
    counts: Counts = field(default_factory=Counts)
    # The sequences, ascending, that follow a blank line or the start of a file.
    breaks: Sequence[int] | np.ndarray = ()
    goes_on: bool = False  # whether the first sequence is a part of the one before


def _encode_documents(
    tokenizer: Tokenizer, documents: Sequence[Sequence[str]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of documents given as lists of parts, end to end, and int64 sizes."""
    values, sizes = tokenizer.encode_packed(list(chain.from_iterable(documents)))
    return values, _sizes_of_documents(documents, sizes)


def _encode_with_words(
    tokenizer: Tokenizer, documents: Sequence[Sequence[str]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the results of `_encode_documents`, and how many words begin in each token, int32."""
    parts = list(chain.from_iterable(documents))
    groups = [tokenizer.encode_with_words(group) for group in _cut_into_groups(parts)]
    values, sizes, words = groups[0]
    if len(groups) > 1:
        values, sizes, words = map(np.concatenate, zip(*groups))
    if len(parts) > len(documents):
        starts, at = np.cumsum(sizes) - sizes, 0
        for document in documents:
            for left, right in pairwise(range(at, at + len(document))):
                if _is_inside(parts[left][-1:]) and _is_inside(parts[right][:1]):
                    _join_words(words[starts[right] : starts[right] + sizes[right]])
            at += len(document)
    return values, _sizes_of_documents(documents, sizes), words


def _cut_into_groups(parts: list[str]) -> list[list[str]]:
    """Divide the parts of long lines, because the library's tokens take much memory."""
    size = sum(map(len, parts))
    if size <= 2 * BLOCK:
        return [parts]
    count = -(-len(parts) * BLOCK // size)
    return [parts[start : start + count] for start in range(0, len(parts), count)]


def _sizes_of_documents(documents: Sequence[Sequence[str]], sizes: np.ndarray) -> np.ndarray:
    ends = np.cumsum([len(parts) for parts in documents], dtype=np.int64)
    total = np.concatenate([[0], np.cumsum(sizes)])[np.concatenate([[0], ends])]
    return np.asarray(np.diff(total))


def _is_inside(character: str) -> bool:
    """Return whether a text's first or last character, "" if it has none, is not white space."""
    return bool(character) and not character.isspace()


def _join_words(words: np.ndarray) -> None:
    # The first word of the text is the rest of a word that began in the text before.
    words[np.flatnonzero(words)[:1]] -= 1


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of `texts` end to end and int64 sizes; long texts go in pieces."""
    return _encode_documents(tokenizer, list(map(text_pieces, texts)))


def encode_block(tokenizer: Tokenizer, block: Block, skips_bad: bool = False) -> Encoded:
    """Encode a block; with `skips_bad` without the lines that held invalid UTF-8."""
    goes_on = bool(block.after)
    counts = Counts(lines=len(block.texts) - goes_on, bad_utf8=len(block.bad))
    documents: list[list[str]] = []
    # A new file ends the document of the previous one.
    breaks = [0] if block.first == 1 and not goes_on else []
    texts = block.texts
    if skips_bad and block.bad:
        counts.skipped = len(block.bad)
        texts = [text for at, text in enumerate(texts) if at not in block.bad]
    for text in texts:
        if (text and not text.isspace()) or goes_on:
            documents.append(text_pieces(text))
        else:
            counts.blank += 1
            breaks.append(len(documents))
    values, sizes, words = _encode_with_words(tokenizer, documents)
    if goes_on and _is_inside(block.after) and _is_inside(block.texts[0][:1]):
        _join_words(words)
    filled = sizes > 0
    counts.no_tokens = 0 if goes_on else len(sizes) - int(np.count_nonzero(filled))
    sizes = sizes[filled]
    counts.sequences, counts.tokens, counts.words = len(sizes), len(values), int(words.sum())
    before = np.concatenate([[0], np.cumsum(filled)])[breaks]
    return Encoded(values, sizes, words, block.read, counts, before, goes_on)


_worker: Tokenizer | None = None


def _start_worker(folder: Path, loaders: Sequence[Callable[[], None]]) -> None:
    global _worker
    # Ctrl-C reaches the whole process group; the parent alone answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    for load in loaders:
        load()
    _worker = load_tokenizer(folder)


def _leave_with_parent() -> None:
    # A parent killed with -9 cannot tell its workers to stop; they would wait for work for ever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _encode_in_worker(block: Block, skips_bad: bool) -> Encoded:
    assert _worker is not None
    return encode_block(_worker, block, skips_bad)


def encode_blocks(
    blocks: Iterable[Block], tokenizer: Tokenizer, folder: Path, workers: int, skips_bad: bool
) -> Generator[Encoded, None, None]:
    """Yield the encoded blocks in order, as `encode_block` does it.

    `folder` holds the saved `tokenizer` for the `workers`. At most a few blocks per worker
    are in memory. MetaseqError if a worker is killed.
    """
    if workers == 1:
        for block in blocks:
            yield encode_block(tokenizer, block, skips_bad)
        return
    # Not fork: the tokenizer library has running threads in this process after training.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (folder, LOADERS))
    waiting: deque[Future[Encoded]] = deque()
    try:
        for block in blocks:
            waiting.append(pool.submit(_encode_in_worker, block, skips_bad))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise MetaseqError(
            "a worker process was killed, most likely for lack of memory; use fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
