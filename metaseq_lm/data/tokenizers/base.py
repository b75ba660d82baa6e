"""The interface of tokenizers: text to ids, without special symbols or templates, and back."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.files import write_atomic
from metaseq_lm.data.storage.indexed import smallest_dtype
from metaseq_lm.data.tokenizers.vocabulary import TASK_TOKENS, Vocabulary, special_symbols

__all__ = ["Tokenizer"]

OPTIONS_FILE = "tokenizer_options.json"
DICT_FILE = "dict.txt"
OPTIONS_VERSION = 1

# Token ids, and where each token starts and ends in the original text.
Offsets = tuple[list[int], list[int], list[int]]


class Tokenizer(ABC):
    """Text to ids and back; subclasses are registered with `register_tokenizer(name)`."""

    name: ClassVar[str]
    model_file: ClassVar[str | None] = None
    has_unk: ClassVar[bool] = True
    alphabet: ClassVar[tuple[int, str]] = 1, "one more"  # the fewest other symbols, in words too
    vocabulary: Vocabulary

    @classmethod
    def train(
        cls,
        lines: Iterable[str],
        vocab_size: int,
        task_tokens: int = TASK_TOKENS,
        min_frequency: int = 1,
        **options: Any,
    ) -> Self:
        """Learn from `lines`; `vocab_size` counts the special symbols and is an upper bound.

        `options` are passed to `learn`. Raises UsageError if `vocab_size` is too small for the
        kind.
        """
        specials = special_symbols(task_tokens, cls.has_unk)
        least = len(specials) + cls.alphabet[0]
        if vocab_size < least:
            raise UsageError(
                f"--vocab-size {vocab_size} is too small for {cls.name}: at least {least}, "
                f"{len(specials)} special symbols and {cls.alphabet[1]}"
            )
        return cls.learn(lines, specials, vocab_size, min_frequency, **options)

    @classmethod
    @abstractmethod
    def learn(
        cls, lines: Iterable[str], specials: list[str], vocab_size: int, min_frequency: int
    ) -> Self:
        """Learn from `lines`, until `vocab_size` or nothing new occurs `min_frequency` times."""

    @abstractmethod
    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of each line; text that looks like a special symbol stays text."""

    @abstractmethod
    def encode_with_offsets(self, text: str) -> Offsets:
        """Return the ids of `text`, as `encode_batch` gives them, and where each token stands.

        The second and third list are the start and the end (exclusive) of each token, counted in
        characters of `text`; neither ever decreases. A token excludes its leading white space
        unless it is all white space; a token for a part of a character covers that character; a
        token for no character of the text (a mark of a word's beginning) is empty, start = end.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, leaving out special symbols except [UNK].

        Ids beyond the vocabulary are left out as well: a model whose embedding has been padded to a
        multiple may draw one.
        """
        symbols, unwritten = self.vocabulary.symbols, self.vocabulary.unwritten
        return self.join(symbols[i] for i in ids if i < len(symbols) and i not in unwritten)

    @abstractmethod
    def join(self, symbols: Iterable[str]) -> str:
        """Return the text of symbols that are not special."""

    def begins_word(self, symbol: str) -> bool:
        """Return whether a symbol that is not special begins a word in any context."""
        return True

    @property
    def word_starts(self) -> np.ndarray:
        """Which symbols begin a word, boolean (V,); special ones do."""
        is_start = np.array([self.begins_word(symbol) for symbol in self.vocabulary.symbols])
        is_start[self.vocabulary.specials] = True
        return is_start

    def word_numbers(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the number of the word of each token of each text, int64 (tokens,).

        The numbers ascend along a text. A word is a unit that the tokenizer cuts into tokens
        separately: it ends at white space and, for kinds that cut there, at punctuation.
        """
        starts = self.word_starts
        return [np.cumsum(starts[np.array(ids, np.int64)]) for ids in self.encode_batch(texts)]

    def model_bytes(self) -> bytes:
        """Return the content of the model file; empty for kinds that need only `dict.txt`."""
        return b""

    @classmethod
    @abstractmethod
    def restore(cls, model: bytes, vocabulary: Vocabulary | None, options: dict[str, Any]) -> Self:
        """Rebuild a tokenizer from the files of `save`; ValueError if the model is malformed.

        `vocabulary` is None when the folder has a model file but no `dict.txt`.
        """

    @property
    def options(self) -> dict[str, Any]:
        """Further arguments of `restore` in addition to the model and the vocabulary."""
        return {}

    @property
    def dtype(self) -> np.dtype:
        """The type tokens of this vocabulary are stored in."""
        return smallest_dtype(len(self.vocabulary))

    def encode_packed(self, lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all lines end to end (in `dtype`) and int64 sizes (lines,)."""
        encoded = self.encode_batch(lines)
        sizes = np.fromiter(map(len, encoded), np.int64, len(encoded))
        flat = chain.from_iterable(encoded)
        return np.fromiter(flat, self.dtype, int(sizes.sum())), sizes

    def encode_with_words(self, lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ids and sizes as `encode_packed` does, and how many words begin in each token.

        A word is text between white space, as in `str.split`. It begins in the first token that
        covers one of its characters. A word without a token, such as a lone accent that is
        stripped, begins in the token after it, or the last of its line. int32 (tokens,).
        """
        values, sizes = self.encode_packed(lines)
        words = self._words_by_symbols(values, sizes)
        ends = np.cumsum(sizes)
        total = np.append(0, np.cumsum(words))
        counted = total[ends] - total[ends - sizes]
        for line, first, end, count in zip(lines, ends - sizes, ends, counted.tolist()):
            # Too few words begin where spaces between symbols are not in the symbols.
            if count != len(line.split()) or not self.is_spelled(line):
                words[first:end] = self.words_by_offsets(line)
        return values, sizes, words

    def text_of(self, symbol: str) -> str | None:
        """Return the text of a symbol with its white space, None if symbols do not include it."""
        return None

    def is_spelled(self, line: str) -> bool:
        """Return whether the symbols of a line, by `text_of`, include all of its white space."""
        return line.isprintable()  # a space is the only printable white space

    def words_by_offsets(self, line: str) -> np.ndarray:
        """Return how many words begin in each token of a line, int32 (tokens,)."""
        ends = np.array(self.encode_with_offsets(line)[2], np.int64)
        if not len(ends):
            return np.zeros(0, np.int32)
        words = [match.start() for match in re.finditer(r"\S+", line)]
        at = np.minimum(np.searchsorted(ends, words, side="right"), len(ends) - 1)
        return np.bincount(at, minlength=len(ends)).astype(np.int32)

    def _words_by_symbols(self, values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        inside, opens, closes = self._spaces
        follows = np.ones(len(values), bool)  # white space, or the start of a line
        follows[1:] = closes[values[:-1]]
        follows[np.cumsum(sizes)[:-1][sizes[1:] > 0]] = True
        return np.asarray(inside[values] + (follows & ~opens[values]))

    @cached_property
    def _spaces(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Words after white space, int32, leading and trailing white space, bool, by symbol."""
        unwritten = set(self.vocabulary.specials.tolist())
        symbols = enumerate(self.vocabulary.symbols)
        texts = ["" if i in unwritten else self.text_of(symbol) or "" for i, symbol in symbols]
        opens = np.array([text[:1].isspace() for text in texts])
        counts = [len(text.split()) for text in texts]
        inside = np.array(counts, np.int32) - (~opens & (np.array(counts) > 0))
        return inside, opens, np.array([text[-1:].isspace() for text in texts])

    @property
    def fingerprint(self) -> str:
        """A short hash of what determines the ids: kind, options, model, symbols, no counts."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (self.name, json.dumps(self.options, sort_keys=True), *self.vocabulary.symbols):
            digest.update(part.encode("utf-8") + b"\0")
        digest.update(self.model_bytes())
        return digest.hexdigest()

    def save(self, folder: str | Path, prefix: str = "") -> list[str]:
        """Write the tokenizer into an existing folder and return the names of its files.

        The names begin with `prefix`, for a folder that has several tokenizers.
        """
        folder = Path(folder)
        options = {"tokenizer": self.name, "version": OPTIONS_VERSION, **self.options}
        text = json.dumps(options, indent=2, sort_keys=True) + "\n"
        names = [prefix + name for name in (OPTIONS_FILE, DICT_FILE, self.model_file) if name]
        write_atomic(folder / names[0], text.encode("utf-8"))
        self.vocabulary.save(folder / names[1])
        if self.model_file:
            write_atomic(folder / names[2], self.model_bytes())
        return names


def token_span(starts: np.ndarray, ends: np.ndarray, first: int, end: int) -> tuple[int, int]:
    """Return (first token, token after the last) that share a character with [first, end).

    `starts` and `ends` (tokens,) are from `encode_with_offsets`. (0, 0) if there is none.
    """
    inside = np.flatnonzero((starts < end) & (ends > first) & (starts < ends))
    if not len(inside):
        return 0, 0
    return int(inside[0]), int(inside[-1]) + 1


def characters_of_bytes(text: str) -> np.ndarray:
    """Return the number of the character that each byte of the UTF-8 form of `text` belongs to."""
    widths = [len(character.encode("utf-8", "replace")) for character in text]
    return np.repeat(np.arange(len(text)), widths)


def after_space(text: str, start: int, end: int) -> int:
    """Return where text[start:end] begins without its leading white space, `start` if it is all."""
    if words := text[start:end].lstrip():
        return end - len(words)
    return start
