"""Byte-level BPE of the `tokenizers` library behind a cache of whole words.

The library's own pipeline spends most of its time on words it has seen before, so text is cut
into words here and only new words are merged by its BPE model. The ids are the library's.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, Self

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from metaseq_lm.core.registry import register_tokenizer
from metaseq_lm.data.tokenizers.base import Offsets, Tokenizer, after_space, characters_of_bytes
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary

# The pre-tokenisation of GPT-2 for ASCII text, words first because most pieces are words; what
# its pattern calls \p{L} and \p{N} is [A-Za-z] and [0-9] there.
_ASCII_PIECES = re.compile(
    r" ?[A-Za-z]+|'(?:[stmd]|re|ve|ll)| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII
)
Json = dict[str, Any]

_ASCII_OR_MARK = bytes(range(128)) + b"?" * 128  # for bytes.translate
CACHED_WORDS = 1 << 20
_LONGEST_CACHED = 64


def _byte_symbols() -> list[str]:
    """Return the printable character that stands for each of the 256 bytes (GPT-2's table)."""
    printable, others = {*range(33, 127), *range(161, 173), *range(174, 256)}, count(256)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_SYMBOL_OF_BYTE = dict(enumerate(_byte_symbols()))
_BYTE_OF_SYMBOL = {symbol: byte for byte, symbol in _SYMBOL_OF_BYTE.items()}


def _symbols(piece: str) -> str:
    return piece.encode("utf-8", "replace").decode("latin-1").translate(_SYMBOL_OF_BYTE)


class Cache(dict[str, bytes]):
    """Text -> packed ids, computed on first sight; bounded, and long keys are not kept."""

    def __init__(self, compute: Callable[[str], bytes]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, text: str) -> bytes:
        packed = self._compute(text)
        if len(text) <= _LONGEST_CACHED:
            if len(self) >= CACHED_WORDS:
                self.clear()
            self[text] = packed
        return packed


class PackedTokenizer(Tokenizer):
    """Common part of tokenizers of the library that keep the ids of known words as packed bytes."""

    model_file = "tokenizer.json"

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        self.vocabulary = Vocabulary(symbols_in_order(library))
        self._dtype = self.dtype

    @classmethod
    @abstractmethod
    def check_json(cls, content: Json, split: Json, model: Json) -> None:
        """Raise ValueError unless the parts of a `tokenizer.json` are of this kind."""

    @classmethod
    def restore(cls, model: bytes, vocabulary: Vocabulary | None, options: dict[str, Any]) -> Self:
        """Rebuild from `tokenizer.json`; ValueError if it is damaged or of another kind.

        Its post-processor is removed, because tasks add the special tokens.
        """
        try:
            content = json.loads(model)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        parts: list[Any] = [content]
        if isinstance(content, dict):
            parts += [content.get("pre_tokenizer"), content.get("model")]
        if not all(isinstance(part, dict) for part in parts):
            raise ValueError("not a JSON object with a pre_tokenizer and a model")
        cls.check_json(*parts)
        try:
            library = tokenizers.Tokenizer.from_str(model.decode("utf-8"))
            library.post_processor = None
        except Exception as error:  # the library raises bare Exception for any malformed content
            raise ValueError(str(error)) from error
        return cls(library)

    def model_bytes(self) -> bytes:
        return f"{self._library.to_str(pretty=True)}\n".encode()

    def _packed(self, ids: list[int]) -> bytes:
        return bytes(np.array(ids, self._dtype).tobytes())

    @abstractmethod
    def _line(self, line: str) -> bytes:
        """Return the ids of a line as the bytes of an array of `dtype`."""

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        return [np.frombuffer(self._line(line), self.dtype).tolist() for line in lines]

    def encode_packed(self, lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        packed = [self._line(line) for line in lines]
        sizes = np.fromiter(map(len, packed), np.int64, len(packed)) // self.dtype.itemsize
        return np.frombuffer(b"".join(packed), self.dtype), sizes


def symbols_in_order(library: tokenizers.Tokenizer) -> list[str]:
    """Return the symbols of a library tokenizer, with added ones; ValueError if ids have gaps."""
    symbols = library.get_vocab(with_added_tokens=True)
    by_id = sorted(symbols, key=symbols.__getitem__)
    if [symbols[s] for s in by_id] != list(range(len(by_id))):
        raise ValueError("its ids have gaps")
    return by_id


@register_tokenizer("byte_bpe")
class ByteBpe(PackedTokenizer):
    """Byte-level BPE; every text can be written, so there is no [UNK]."""

    name = "byte_bpe"
    has_unk = False
    alphabet = 256, "256 bytes"

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        if not isinstance(library.model, models.BPE) or library.model.dropout:
            raise ValueError("it is not BPE without dropout")
        super().__init__(library)
        self._model = library.model
        self._split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
        self._pieces = Cache(self._merge)
        self._first = Cache(self._pack)
        self._later = Cache(lambda word: self._pack(" " + word))

    def begins_word(self, symbol: str) -> bool:
        return bytes([_BYTE_OF_SYMBOL[symbol[0]]]).isspace()

    def text_of(self, symbol: str) -> str | None:
        """Return the text of the symbol's bytes, "?" for each that is a part of a character."""
        return bytes(_BYTE_OF_SYMBOL[c] for c in symbol).translate(_ASCII_OR_MARK).decode("ascii")

    @classmethod
    def learn(
        cls, lines: Iterable[str], specials: list[str], vocab_size: int, min_frequency: int
    ) -> Self:
        library = tokenizers.Tokenizer(models.BPE())
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=min_frequency,
            special_tokens=specials,
            initial_alphabet=_byte_symbols(),
            show_progress=False,
        )
        library.train_from_iterator(lines, trainer)
        return cls(library)

    def encode_with_offsets(self, text: str) -> Offsets:
        ids, starts, ends, begin = [], [], [], 0
        characters = characters_of_bytes(text).tolist()
        for piece, _ in self._split(text):
            at, begin = begin, begin + len(piece)  # a symbol that the model lacks gives no token
            for token in self._model.tokenize(piece):
                start, end = characters[at], characters[at + len(token.value) - 1] + 1
                at += len(token.value)
                ids.append(token.id)
                starts.append(after_space(text, start, end))
                ends.append(end)
        return ids, starts, ends

    def word_numbers(self, texts: Sequence[str]) -> list[np.ndarray]:
        numbers = []
        for text in texts:
            words = [text[start:end] for _, (start, end) in self._split(text)]
            sizes = [len(self._pieces[word]) // self.dtype.itemsize for word in words]
            numbers.append(np.repeat(np.arange(len(words)), sizes))
        return numbers

    def _line(self, line: str) -> bytes:
        # The pattern starts a new piece at every single space, so a line whose only white space
        # is single spaces can be cut there. Any other white space is not "printable".
        if "  " in line or not line.isprintable():
            return self._pack(line)
        words = iter(line.split(" "))
        return self._first[next(words)] + b"".join(map(self._later.__getitem__, words))

    def _pack(self, text: str) -> bytes:
        if text.isascii():
            pieces: Iterable[str] = _ASCII_PIECES.findall(text)
        else:
            # Which letters and digits exist depends on the Unicode version: ask the library.
            pieces = (text[start:end] for _, (start, end) in self._split(text))
        return b"".join(map(self._pieces.__getitem__, pieces))

    def _merge(self, piece: str) -> bytes:
        return self._packed([token.id for token in self._model.tokenize(_symbols(piece))])

    def join(self, symbols: Iterable[str]) -> str:
        """Return the text of the bytes; broken UTF-8 becomes U+FFFD."""
        return bytes(_BYTE_OF_SYMBOL[c] for c in "".join(symbols)).decode("utf-8", "replace")

    @classmethod
    def check_json(cls, content: Json, split: Json, model: Json) -> None:
        standard = split.get("type") == "ByteLevel" and not split.get("add_prefix_space")
        # Whole words looked up first could be special symbols; other words, another split.
        standard &= not model.get("ignore_merges") and split.get("use_regex", True) is True
        # The library crashes on an affix that is longer than a symbol.
        affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        if content.get("normalizer") or affixes or not standard:
            raise ValueError(
                "it is not byte-level BPE without normaliser, prefix space and affixes"
            )
