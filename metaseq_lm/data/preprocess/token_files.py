"""Existing token files as one corpus: shards of `preprocess`, or files of other programs."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.corpus.encode import Counts
from metaseq_lm.data.preprocess.corpus import TokenPipeline
from metaseq_lm.data.preprocess.pipeline import Request, Split
from metaseq_lm.data.preprocess.tokenizer import describe_tokenizer
from metaseq_lm.data.storage.indexed import (
    IndexedDataset,
    IndexedWriter,
    concatenate_ranges,
    number_outside,
    open_integers,
)
from metaseq_lm.data.storage.manifest import CORPUS, WORDS, Manifest, verify
from metaseq_lm.data.storage.word_starts import WordStartsWriter, open_word_starts
from metaseq_lm.data.tokenizers.base import OPTIONS_FILE, Tokenizer
from metaseq_lm.data.tokenizers.loading import load_tokenizer, tokenizer_class, transformers_source
from metaseq_lm.data.tokenizers.vocabulary import FAMILIES, MASK, PAD, SEP

_CHUNK = 1 << 22  # tokens copied at once
_SUFFIXES = (".bin", ".idx", ".ds")


class _DatatroveFile:
    """Documents as datatrove's DocumentTokenizer writes them: NAME.ds and NAME.ds.index.

    The first file holds the tokens, u16 or u32, the second the end of each document in tokens, u64,
    both little-endian. The class has the members of an IndexedDataset that `TokenFiles` reads.
    Raises MetaseqError if the files do not agree.
    """

    def __init__(self, path: Path) -> None:
        self.prefix = os.fspath(path)
        index = Path(f"{path}.index")
        if not index.is_file() or index.stat().st_size % 8:
            raise MetaseqError(
                f"{index}: the ends of the documents, 8 bytes each, are missing or cut off; write "
                "them with save_index=True"
            )
        ends = np.fromfile(index, "<u8").astype(np.int64)
        size = path.stat().st_size
        total = int(ends[-1]) if len(ends) else 0
        width = size // total if total else 2
        if width not in (2, 4) or size != width * total or (np.diff(ends, prepend=0) < 0).any():
            raise MetaseqError(
                f"{path}: {size} bytes, but {index.name} says {total} tokens of 2 or 4 bytes; the "
                "files do not belong together or one is cut off, copy them again"
            )
        self.sizes = np.diff(ends, prepend=0)
        self.tokens = np.memmap(path, f"<u{width}", "r") if total else np.zeros(0, "<u2")
        self.documents = np.arange(len(ends) + 1)

    def __len__(self) -> int:
        return len(self.sizes)


_TokenFile = IndexedDataset | _DatatroveFile


def _open_token_file(path: Path) -> _TokenFile:
    return _DatatroveFile(path) if path.suffix == ".ds" else open_integers(path)


def token_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files or pairs that `paths` (prefixes, files, folders) name, in order.

    UsageError for other paths.
    """
    files: list[Path] = []
    for path in paths:
        # A shell expands NAME.* to these as well.
        if path.suffix in (".idx", WORDS) and path.with_suffix(".bin") in paths:
            continue
        if path.is_dir():
            inside = [p for p in sorted(path.iterdir()) if p.suffix in (".bin", ".ds")]
        elif path.suffix in _SUFFIXES:
            inside = [path]
        else:
            inside = [Path(f"{path}.bin"), Path(f"{path}.ds")]
        inside = list(filter(Path.is_file, inside))
        if not inside:
            raise UsageError(
                f"{path}: no token files here; give NAME of NAME.bin and NAME.idx, NAME.ds, or a "
                "folder of them"
            )
        for file in inside:
            files.append(file if file.suffix == ".ds" else file.with_suffix(""))
    return files


def foreign_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder; special symbols that it lacks get the ids after its own.

    The symbols are BERT's or RoBERTa's, whichever it has more of; GPT-2's, say, lacks [MASK].
    MetaseqError if it cannot be read.
    """
    if (folder / OPTIONS_FILE).is_file():
        return load_tokenizer(folder)
    source = transformers_source(folder)
    if source.kind not in ("byte_bpe", "wordpiece"):
        return load_tokenizer(folder)
    kind = tokenizer_class(source.kind)
    try:
        library = tokenizers.Tokenizer.from_str(source.model.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception for any malformed content
        raise MetaseqError(f"{source.path}: not a tokenizer: {error}") from error
    symbols = library.get_vocab()
    missing = []
    for family in FAMILIES.values():
        missing.append([symbol for symbol in family if symbol not in symbols])
    has_own = [symbols.get(symbol) for symbol in (PAD, MASK, SEP)] == [0, 1, 2]
    if all(missing) and not has_own:
        library.add_special_tokens(min(missing, key=len))
    # Symbols that it adds around a text are not part of the text.
    content = json.loads(library.to_str()) | {"post_processor": None}
    try:
        return kind.restore(json.dumps(content).encode(), None, source.options)
    except ValueError as error:
        raise MetaseqError(f"{source.path}: not usable as {source.kind}: {error}") from error


# Values end to end, the sizes of their sequences, the sequences before which a document ends, and
# how many words begin in each token.
_Piece = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]


class TokenFiles(TokenPipeline[_TokenFile, _Piece]):
    """Copies token files, whose paths are the sources of the splits, into one corpus.

    The starts of words are copied if all files of a split have them.

    Args:
        request: The destination, and the files of each split.
        tokenizer: The tokenizer that made the files.
        stripped: Special symbols to remove from the beginning and the end of each sequence.
        lines: The counts of lines, blank lines and so on that `preprocess` recorded for each split.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        stripped: Sequence[str] = (),
        lines: dict[str, Counts] | None = None,
    ) -> None:
        super().__init__(request)
        self.tokenizer, self.lines = tokenizer, lines or {}
        unknown = [symbol for symbol in stripped if symbol not in tokenizer.vocabulary.symbols]
        if unknown:
            raise UsageError(f"--strip {unknown[0]}: the tokenizer has no such symbol")
        self.stripped = np.array([tokenizer.vocabulary.index(s) for s in stripped], np.int64)

    def input_files(self) -> Iterable[Path]:
        super().input_files()
        return []

    def prepare(self) -> dict[str, Any]:
        return describe_tokenizer(self.tokenizer)

    def read(self, split: Split) -> Iterator[_TokenFile]:
        return map(_open_token_file, split.sources)

    def encode(self, split: Split, records: Iterator[_TokenFile]) -> Iterator[_Piece]:
        size = len(self.tokenizer.vocabulary)
        for data in records:
            word_starts = open_word_starts(data.prefix, len(data.tokens))
            sizes = np.asarray(data.sizes, np.int64)
            offsets = np.append(0, np.cumsum(sizes))
            first = 0
            while first < len(sizes):
                last = int(np.searchsorted(offsets, offsets[first] + _CHUNK, side="right")) - 1
                # A sequence of more tokens is copied whole.
                last = max(last, first + 1)
                values = np.asarray(data.tokens[offsets[first] : offsets[last]])
                token = number_outside(values, size)
                if token is not None:
                    raise MetaseqError(
                        f"{data.prefix}: token id {token}, but the tokenizer has {size} symbols; "
                        "give the tokenizer that the files were made with by --tokenizer-from"
                    )
                starts = offsets[first:last] - offsets[first]
                starts, lengths = self._strip(values, starts, sizes[first:last])
                words = None
                if word_starts is not None:
                    words = word_starts.read(int(offsets[first]), int(offsets[last]))
                if len(self.stripped):
                    chosen = concatenate_ranges(starts, lengths)
                    values = values[chosen]
                    if words is not None:
                        words = words[chosen]
                filled = lengths > 0
                split.counts["no_tokens"] += int((~filled).sum())
                begin, end = np.searchsorted(data.documents, [first, last])
                breaks = np.append(0, np.cumsum(filled))[data.documents[begin:end] - first]
                yield values, lengths[filled], breaks, words
                first = last

    def _strip(
        self, values: np.ndarray, starts: np.ndarray, sizes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return where sequences start and their sizes, (sequences,), without special symbols."""
        starts, sizes = starts.copy(), sizes.copy()
        for at_end in (False, True):
            filled = np.flatnonzero(sizes)
            places = starts[filled] + at_end * (sizes[filled] - 1)
            chosen = filled[np.isin(values[places], self.stripped)]
            sizes[chosen] -= 1
            starts[chosen] += not at_end
        return starts, sizes

    def write(self, split: Split, encoded: Iterator[_Piece]) -> None:
        frequencies = np.zeros(len(self.tokenizer.vocabulary), np.int64)
        files = list(map(_open_token_file, split.sources))
        # Where each sequence is a document, no ends are stored.
        documents = any(len(data.documents) != len(data) + 1 for data in files)
        prefix, total = self.folder / split.name, 0
        with contextlib.ExitStack() as stack:
            writer = stack.enter_context(IndexedWriter(prefix, self.tokenizer.dtype, documents))
            word_writer = None
            if all(open_word_starts(data.prefix, len(data.tokens)) for data in files):
                word_writer = stack.enter_context(WordStartsWriter(prefix))
            for values, sizes, breaks, words in encoded:
                before = len(writer)
                writer.extend(values, sizes)
                if word_writer is not None and words is not None:
                    word_writer.extend(words)
                    total += int(words.sum())
                if documents:
                    writer.end_documents(breaks + before)
                frequencies += np.bincount(values, minlength=len(frequencies))
            lines = self.lines.get(split.name) or Counts(
                lines=len(writer) + split.counts["no_tokens"], no_tokens=split.counts["no_tokens"]
            )
            lines.sequences, lines.tokens = len(writer), writer.tokens
            lines.documents, lines.words = writer.documents, total
        self.note(split, lines, frequencies, word_writer is not None)

    def nothing(self, split: Split) -> str:
        return f"{split}: holds no tokens"

    def summary(self, split: Split) -> str:
        counts = split.counts
        words = f"{counts['words']:,} words, " if counts["words"] else ""
        return (
            f"{split.name}: {len(split.sources)} files -> {counts['sequences']:,} sequences in "
            f"{counts['documents']:,} documents, {words}{counts['tokens']:,} tokens"
        )


def merge_shards(shards: Sequence[Path], request: Request) -> TokenFiles:
    """Return the pipeline that joins the corpora of `shards`, in order; `request` has no splits.

    Raises UsageError for a folder that is given twice, folders of other data or of several
    tokenizers, MetaseqError for damage.
    """
    splits: dict[str, list[Path]] = {}
    lines: dict[str, Counts] = {}
    hashes, seen = set(), set()
    for shard in shards:
        if shard.resolve() in seen:
            raise UsageError(f"{shard}: given twice; its text would be in the corpus twice")
        seen.add(shard.resolve())
        manifest = Manifest.load(shard)
        if manifest.kind != CORPUS:
            raise UsageError(f"{shard}: holds {manifest.kind} data; only corpora can be merged")
        hashes.add(manifest.tokenizer["hash"])
        if len(hashes) > 1:
            raise UsageError(
                f"{shard}: made with another tokenizer than {shards[0]}; preprocess all shards "
                "with the same --tokenizer-from"
            )
        if faults := verify(shard):
            raise MetaseqError(f"{faults[0]}; copy {shard} again or preprocess it again")
        for name, counts in manifest.splits.items():
            splits.setdefault(name, []).append(shard / name)
            known = vars(Counts()).keys() & counts.keys()
            total = lines.setdefault(name, Counts())
            total.add(Counts(**{key: counts[key] for key in known}))
    request.splits.update(splits)
    return TokenFiles(request, load_tokenizer(shards[0]), lines=lines)
