"""Words and characters as they stand; `dict.txt` is the whole model."""

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Self

import numpy as np
import regex

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import register_tokenizer
from metaseq_lm.data.tokenizers.base import Offsets, Tokenizer, after_space
from metaseq_lm.data.tokenizers.vocabulary import UNK, Vocabulary

PATTERN_SECONDS = 10  # limit for one text; a pattern may come with a tokenizer from elsewhere


class PlainTokenizer(Tokenizer):
    """Common part of tokenizers that look up units in the vocabulary; unknown ones are [UNK]."""

    joiner = ""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if vocabulary.unk is None:
            raise ValueError(f"{UNK} is missing after the task tokens")
        self.vocabulary = vocabulary
        # A word of the text that looks like a special symbol must not become it.
        specials = set(vocabulary.specials.tolist())
        self._ids = {s: i for i, s in enumerate(vocabulary.symbols) if i not in specials}

    @abstractmethod
    def spans(self, line: str) -> Iterable[tuple[int, int]]:
        """Return where each word or character of a line starts and ends."""

    def units(self, line: str) -> Iterable[str]:
        """Return the words or characters of a line."""
        return [line[start:end] for start, end in self.spans(line)]

    def encode_with_offsets(self, text: str) -> Offsets:
        unk = self.vocabulary.unk
        assert unk is not None
        spans = list(self.spans(text))
        ids = [self._ids.get(text[start:end], unk) for start, end in spans]
        return ids, [after_space(text, *span) for span in spans], [end for _, end in spans]

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        get, unk = self._ids.get, self.vocabulary.unk
        assert unk is not None
        encoded = []
        for line in lines:
            encoded.append([get(unit, unk) for unit in self.units(line)])
        return encoded

    def join(self, symbols: Iterable[str]) -> str:
        return self.joiner.join(symbols)

    @classmethod
    def learn(
        cls,
        lines: Iterable[str],
        specials: list[str],
        vocab_size: int,
        min_frequency: int,
        **options: Any,
    ) -> Self:
        """Keep the most frequent units; equal counts are in code point order.

        `options` are passed to the constructor.
        """
        tokenizer = cls(Vocabulary(specials), **options)
        counts = Counter(chain.from_iterable(map(tokenizer.units, lines)))
        for special in specials:
            counts.pop(special, None)
        units = [(unit, count) for unit, count in counts.items() if count >= min_frequency]
        units.sort(key=lambda pair: (-pair[1], pair[0]))
        units = [*((special, 0) for special in specials), *units][:vocab_size]
        return cls(Vocabulary(*map(list, zip(*units))), **options)

    @classmethod
    def restore(cls, model: bytes, vocabulary: Vocabulary | None, options: dict[str, Any]) -> Self:
        if vocabulary is None:
            raise ValueError("dict.txt is missing")
        return cls(vocabulary)


@register_tokenizer("word")
class WordTokenizer(PlainTokenizer):
    """Words between white space, or the matches of the regular expression `pattern`."""

    name = "word"
    joiner = " "

    def __init__(self, vocabulary: Vocabulary, pattern: str | None = None) -> None:
        super().__init__(vocabulary)
        self.pattern = pattern
        try:
            self._word = regex.compile(pattern or "")
        except regex.error as error:
            raise UsageError(f"--word-pattern {pattern!r}: {error}") from error

    def spans(self, line: str) -> Iterable[tuple[int, int]]:
        if self.pattern is None:
            # \S of re, not of regex, matches the words of str.split.
            return (match.span() for match in re.finditer(r"\S+", line))
        try:
            matches = list(self._word.finditer(line, timeout=PATTERN_SECONDS))
        except TimeoutError as error:
            raise MetaseqError(
                f"the pattern of words {self.pattern!r} takes more than {PATTERN_SECONDS} seconds "
                f"on the text {line[:40]!r}; use one without repetitions inside repetitions"
            ) from error
        return (match.span() for match in matches if match.group())

    def units(self, line: str) -> Iterable[str]:
        if self.pattern is None:
            return line.split()
        return super().units(line)

    def encode_with_words(self, lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if self.pattern is not None:
            return super().encode_with_words(lines)
        values, sizes = self.encode_packed(lines)
        return values, sizes, np.ones(len(values), np.int32)

    @property
    def options(self) -> dict[str, Any]:
        return {"pattern": self.pattern}

    @classmethod
    def restore(cls, model: bytes, vocabulary: Vocabulary | None, options: dict[str, Any]) -> Self:
        if vocabulary is None:
            raise ValueError("dict.txt is missing")
        pattern = options.get("pattern")
        if not isinstance(pattern, (str, type(None))):
            raise ValueError(f"its pattern is {str(pattern)[:20]!r}, not a text")
        return cls(vocabulary, pattern)


@register_tokenizer("char")
class CharTokenizer(PlainTokenizer):
    """Single characters (code points), white space included."""

    name = "char"

    def begins_word(self, symbol: str) -> bool:
        return symbol.isspace()

    def text_of(self, symbol: str) -> str | None:
        return symbol

    def is_spelled(self, line: str) -> bool:
        return super().is_spelled(line) and (" " in self._ids or " " not in line)

    def units(self, line: str) -> Iterable[str]:
        return line

    def spans(self, line: str) -> Iterable[tuple[int, int]]:
        return ((at, at + 1) for at in range(len(line)))
