"""WordPiece (Devlin et al. 2019) of the `tokenizers` library behind a cache of whole words.

A word is normalised, cut at punctuation and then, from the left, into the longest pieces of the
vocabulary; pieces inside a word begin with "##". A word that cannot be cut that way is [UNK].
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count, repeat
from typing import Self

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from metaseq_lm.core.registry import register_tokenizer
from metaseq_lm.data.tokenizers.base import Offsets
from metaseq_lm.data.tokenizers.byte_bpe import Cache, Json, PackedTokenizer, symbols_in_order
from metaseq_lm.data.tokenizers.vocabulary import UNK

_INSIDE = "##"
_LONGEST_WORD = 200  # characters, as in BERT's and ELECTRA's code
_LEAST_ALPHABET = 1000  # least number of characters with a piece of their own
_WORDS_PER_LINE = 1 << 10
_PRIVATE = 0xF0000  # the first of 131,068 characters that no text has after BERT's normaliser


def wordpiece_library(
    ids: dict[str, int], longest: int, cased: bool, accents: bool | None = None, cjk: bool = True
) -> tokenizers.Tokenizer:
    """Return BERT's tokenizer for a vocabulary; words of more than `longest` characters are [UNK].

    `accents` says whether to strip accents, None as for case. `cjk` puts spaces around ideographs.
    """
    model = models.WordPiece(ids, unk_token=UNK, max_input_chars_per_word=longest)
    library = tokenizers.Tokenizer(model)
    library.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=cjk, strip_accents=accents, lowercase=not cased
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    return library


@register_tokenizer("wordpiece")
class WordPiece(PackedTokenizer):
    """BERT's tokenizer; what it cannot write is [UNK]."""

    name = "wordpiece"

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        if not isinstance(library.model, models.WordPiece):
            raise ValueError("it is not WordPiece")
        super().__init__(library)
        # Text that looks like a special symbol stays text, and every text is whole.
        library.encode_special_tokens = True
        library.no_truncation()
        library.no_padding()
        if self.vocabulary.unk is None:
            raise ValueError(f"{UNK} is missing among the special symbols")
        specials = {self.vocabulary.symbols[i] for i in self.vocabulary.specials}
        added = [token.content for token in library.get_added_tokens_decoder().values()]
        if others := [symbol for symbol in added if symbol not in specials]:
            raise ValueError(
                f"it has the added tokens {', '.join(others[:4])}, which are not BERT's"
            )
        self._words = Cache(self._encode)

    def begins_word(self, symbol: str) -> bool:
        return not symbol.startswith(_INSIDE)

    @classmethod
    def learn(
        cls,
        lines: Iterable[str],
        specials: list[str],
        vocab_size: int,
        min_frequency: int,
        cased: bool = False,
    ) -> Self:
        """Learn pieces from `lines`; the distinct words are held in memory.

        Pairs are merged by frequency, as in the library's own trainer, until
        `vocab_size` or no pair occurs `min_frequency` times; `cased` keeps case and accents.
        """
        ids = {symbol: i for i, symbol in enumerate(specials)}
        library = wordpiece_library(ids, _LONGEST_WORD, cased)
        words = _count_words(lines, library)
        pieces = _learn_pieces(words, vocab_size - len(specials), min_frequency)
        ids = {symbol: i for i, symbol in enumerate([*specials, *pieces])}
        library = wordpiece_library(ids, _LONGEST_WORD, cased)
        library.add_special_tokens(specials)
        return cls(library)

    def encode_with_offsets(self, text: str) -> Offsets:
        encoding = self._library.encode(_without_lone_surrogates(text), add_special_tokens=False)
        offsets = encoding.offsets
        return encoding.ids, [start for start, _ in offsets], [end for _, end in offsets]

    def _line(self, line: str) -> bytes:
        # A space always ends a word, and nothing that is done to words looks beyond it.
        return b"".join(map(self._words.__getitem__, line.split(" ")))

    def encode_with_words(self, lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        split = [line.split(" ") for line in lines]
        packed = list(map(self._words.__getitem__, chain.from_iterable(split)))
        counts = np.fromiter(map(len, packed), np.int64, len(packed)) // self.dtype.itemsize
        values = np.frombuffer(b"".join(packed), self.dtype)
        pieces = np.fromiter(map(len, split), np.int64, len(split))
        sizes = np.add.reduceat(counts, np.cumsum(pieces) - pieces) if split else pieces
        ends, line = np.cumsum(sizes), np.repeat(np.arange(len(split)), pieces)
        is_word = np.fromiter(map(bool, chain.from_iterable(split)), bool, len(packed))
        first = np.minimum(np.cumsum(counts) - counts, ends[line] - 1)
        words = np.bincount(first[is_word & (sizes[line] > 0)], minlength=len(values))
        words = words.astype(np.int32)
        for text, parts, begin, end in zip(lines, split, ends - sizes, ends):
            if [part for part in parts if part] != text.split():  # other white space
                words[begin:end] = self.words_by_offsets(text)
        return values, sizes, words

    def _encode(self, text: str) -> bytes:
        return self._packed(
            self._library.encode(_without_lone_surrogates(text), add_special_tokens=False).ids
        )

    def join(self, symbols: Iterable[str]) -> str:
        """Return the words, as they were normalised, with a space between them."""
        words: list[str] = []
        for symbol in symbols:
            if symbol.startswith(_INSIDE) and symbol != _INSIDE and words:
                words[-1] += symbol.removeprefix(_INSIDE)
            else:
                words.append(symbol)
        return " ".join(words)

    @classmethod
    def check_json(cls, content: Json, split: Json, model: Json) -> None:
        normalizer = content.get("normalizer")
        bert = isinstance(normalizer, dict) and normalizer.get("type") == "BertNormalizer"
        if not bert or split.get("type") != "BertPreTokenizer":
            raise ValueError("it is not WordPiece with BERT's normaliser and pre-tokeniser")
        if model.get("continuing_subword_prefix") != _INSIDE or model.get("unk_token") != UNK:
            raise ValueError(f"its pieces do not begin with {_INSIDE} or its unknown is not {UNK}")


def _without_lone_surrogates(text: str) -> str:
    """Replace halves of surrogate pairs, which the library refuses, each by one character."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _count_words(lines: Iterable[str], library: tokenizers.Tokenizer) -> Counter[str]:
    texts: Counter[str] = Counter()
    for line in lines:
        texts.update(line.split(" "))
    words: Counter[str] = Counter()
    for text, times in texts.items():
        normal = library.normalizer.normalize_str(text)
        for word, _ in library.pre_tokenizer.pre_tokenize_str(normal):
            if len(word) <= _LONGEST_WORD:
                words[word] += times
    return words


def _learn_pieces(words: Counter[str], room: int, min_frequency: int) -> list[str]:
    """Return at most `room` pieces in the order they were learnt.

    The library's WordPiece trainer takes the pieces of single characters in a random order, on
    which the rest depends. Its BPE trainer does not, so it is used here, on words with marks in
    place of the characters after the first.
    """
    # Code point -> the private character that stands for it inside a word.
    marks: dict[int, int] = defaultdict(count(_PRIVATE).__next__)
    marked = {word: word[0] + word[1:].translate(marks) for word in sorted(words)}
    frequency: Counter[str] = Counter()
    for word, text in marked.items():
        for character in text:
            frequency[character] += words[word]
    ranked = sorted(frequency, key=lambda c: (-frequency[c], c))
    alphabet = set(ranked[: min(room, max(_LEAST_ALPHABET, room // 4))])
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=room, min_frequency=min_frequency, show_progress=False)
    counted = ((text, words[word]) for word, text in marked.items() if alphabet.issuperset(text))
    library.train_from_iterator(_repeated(counted), trainer)
    original = {chr(mark): chr(point) for point, mark in marks.items()}
    learnt = symbols_in_order(library)
    symbols = []
    for symbol in learnt:
        text = "".join(original.get(character, character) for character in symbol)
        if symbol[0] in original:
            text = _INSIDE + text
        symbols.append(text)
    return symbols


def _repeated(words: Iterable[tuple[str, int]]) -> Iterator[str]:
    for word, times in words:
        while times > 0:
            yield " ".join(repeat(word, min(times, _WORDS_PER_LINE)))
            times -= _WORDS_PER_LINE
