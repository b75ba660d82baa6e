"""Blocks of text to ids, in this process or in several, with the same result."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain, pairwise
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.storage.text_files import PIECE, Block, pieces
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
    """The token ids of a block, or of a piece of one line."""

    values: np.ndarray  # the ids end to end
    sizes: np.ndarray  # the size of each sequence
    words: np.ndarray  # how many words begin in each token
    read: int  # how many bytes of the files on disk are consumed
    counts: Counts = field(default_factory=Counts)  # counts of the lines; of whole lines only
    piece: bool = False  # whether it is a piece of a line
    continues: bool = False  # whether the line of the piece goes on in the next block
    text: bool = False  # whether the piece has any text
    bad: bool = False  # whether the piece held invalid UTF-8
    opens_inside: bool = False  # whether the piece begins without white space
    closes_inside: bool = False  # whether the piece ends without white space
    # The sequences, ascending, that follow a blank line or the start of a file.
    breaks: Sequence[int] | np.ndarray = ()


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
    values, sizes, words = tokenizer.encode_with_words(parts)
    if len(parts) > len(documents):
        starts, at = np.cumsum(sizes) - sizes, 0
        for document in documents:
            for left, right in pairwise(range(at, at + len(document))):
                if _is_inside(parts[left][-1:]) and _is_inside(parts[right][:1]):
                    join_words(words[starts[right] : starts[right] + sizes[right]])
            at += len(document)
    return values, _sizes_of_documents(documents, sizes), words


def _sizes_of_documents(documents: Sequence[Sequence[str]], sizes: np.ndarray) -> np.ndarray:
    """Return the sizes of documents from the sizes of their parts, int64."""
    ends = np.cumsum([len(parts) for parts in documents], dtype=np.int64)
    total = np.concatenate([[0], np.cumsum(sizes)])[np.concatenate([[0], ends])]
    return np.asarray(np.diff(total))


def _is_inside(character: str) -> bool:
    """Return whether a text's first or last character, "" if it has none, is not white space."""
    return bool(character) and not character.isspace()


def join_words(words: np.ndarray) -> None:
    """Remove the first word of a text from `words` (tokens,), the words that begin in each token.

    It is the rest of a word that began in the previous text.
    """
    words[np.flatnonzero(words)[:1]] -= 1


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of `texts` end to end and int64 sizes; long texts go in pieces."""
    if max(map(len, texts), default=0) * 4 <= PIECE:
        return tokenizer.encode_packed(texts)
    documents = []
    for text in texts:
        documents.append([piece.decode("utf-8") for piece in pieces(text.encode("utf-8"))])
    return _encode_documents(tokenizer, documents)


def encode_block(tokenizer: Tokenizer, block: Block) -> Encoded:
    """Encode a block; invalid UTF-8 is treated as the file says."""
    if block.piece:
        return _encode_piece(tokenizer, block)
    lines = _decoded(block)
    counts = Counts(lines=len(lines))
    documents: list[list[str]] = []
    breaks = _file_start(block)
    for number, line in enumerate(lines, block.line):
        if isinstance(line, bytes):
            decoded = [block.file.decode(p, number) for p in pieces(line)]
            parts, bad = [text for text, _ in decoded], any(bad for _, bad in decoded)
            counts.bad_utf8 += bad
            if bad and block.file.skips_bad:
                counts.skipped += 1
                continue
        else:
            parts = [line]
        if any(part and not part.isspace() for part in parts):
            documents.append(parts)
        else:
            counts.blank += 1
            breaks.append(len(documents))
    values, sizes, words = _encode_with_words(tokenizer, documents)
    filled = sizes > 0
    counts.no_tokens = len(sizes) - int(np.count_nonzero(filled))
    sizes = sizes[filled]
    counts.sequences, counts.tokens, counts.words = len(sizes), len(values), int(words.sum())
    before = np.concatenate([[0], np.cumsum(filled)])[breaks]
    return Encoded(values, sizes, words, block.read, counts, breaks=before)


def _file_start(block: Block) -> list[int]:
    # A new file ends the document of the previous one; each piece of a long first line repeats it.
    return [0] if block.line == 1 else []


def _decoded(block: Block) -> Sequence[str | bytes]:
    """Return the lines as text if all are short and valid UTF-8, the usual case, else as bytes."""
    lines = block.data.removesuffix(b"\n").split(b"\n")
    if max(map(len, lines)) <= PIECE:
        try:
            text = block.data.decode("utf-8").removesuffix("\n").split("\n")
        except UnicodeDecodeError:
            pass  # some line is bad; it is found later, when each is decoded by itself
        else:
            return [line.removesuffix("\r") for line in text] if b"\r" in block.data else text
    return [line.removesuffix(b"\r") for line in lines]


def _encode_piece(tokenizer: Tokenizer, block: Block) -> Encoded:
    line = block.data
    if not block.continues:
        line = line.removesuffix(b"\n").removesuffix(b"\r")
    decoded = [block.file.decode(part, block.line) for part in pieces(line)]
    texts = [text for text, _ in decoded]
    values, sizes, words = _encode_with_words(tokenizer, [texts])
    return Encoded(
        values,
        sizes,
        words,
        block.read,
        piece=True,
        continues=block.continues,
        text=any(text and not text.isspace() for text in texts),
        bad=any(bad for _, bad in decoded),
        opens_inside=_is_inside("".join(texts)[:1]),
        closes_inside=_is_inside("".join(texts)[-1:]),
        breaks=_file_start(block),
    )


_worker: Tokenizer | None = None


def _start_worker(folder: Path) -> None:
    global _worker
    # Ctrl-C reaches the whole process group; the parent alone answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _worker = load_tokenizer(folder)


def _leave_with_parent() -> None:
    # A parent killed with -9 cannot tell its workers to stop; they would wait for work for ever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _work(block: Block) -> Encoded:
    assert _worker is not None
    return encode_block(_worker, block)


def encode_blocks(
    blocks: Iterable[Block], tokenizer: Tokenizer, folder: Path, workers: int
) -> Generator[Encoded, None, None]:
    """Yield the encoded blocks in order; `folder` holds the saved `tokenizer` for the workers.

    At most a few blocks per worker are in memory. MetaseqError if a worker is killed.
    """
    if workers == 1:
        for block in blocks:
            yield encode_block(tokenizer, block)
        return
    # Not fork: the tokenizer library has running threads in this process after training.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (folder,))
    waiting: deque[Future[Encoded]] = deque()
    try:
        for block in blocks:
            waiting.append(pool.submit(_work, block))
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
