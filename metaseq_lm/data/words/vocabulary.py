"""Vocabularies of whole words and of the characters in them, for word-level taggers and parsers.

Words are lower case with every digit a 0; characters are taken from the unchanged word (Clark et
al. 2018, code). Files in a data folder: words.txt and characters.txt, "symbol count" per line in id
order, and, if word vectors were given, word_vectors.safetensors.
"""

import contextlib
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from metaseq_lm.core import random_streams
from metaseq_lm.core.errors import MetaseqError, MissingError
from metaseq_lm.core.files import write_atomic
from metaseq_lm.data.records.text_files import TextFile
from metaseq_lm.data.tokenizers.base import OPTIONS_FILE, Tokenizer
from metaseq_lm.data.tokenizers.vocabulary import load_symbols, save_symbols

_WORDS_FILE, _CHARACTERS_FILE = "words.txt", "characters.txt"
_VECTORS_FILE, _VECTORS_NAME = "word_vectors.safetensors", "vectors"
PAD, UNKNOWN, START, END, REMOVED = range(5)
SPECIAL_WORDS = ["<pad>", "<unk>", "<start>", "<end>", "<removed>"]
SPECIAL_CHARACTERS = ["<pad>", "<unk>", "<start>", "<end>"]
WORD_START, WORD_END = 2, 3  # among the characters
# How the Penn Treebank writes the brackets of a text.
BRACKETS = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}"}
_DIGIT = re.compile(r"\d")
_SMALL_BRACKETS = {name.lower(): sign for name, sign in BRACKETS.items()}


def normalise(word: str) -> str:
    """Return a word in lower case, with 0 for digits and signs for Penn Treebank brackets."""
    small = word.lower()
    return _SMALL_BRACKETS.get(small) or _DIGIT.sub("0", small)


class WordVocabulary:
    """Normalised words and single characters; the id of each is its place in its list.

    Args:
        words: The words, SPECIAL_WORDS first.
        characters: The characters, SPECIAL_CHARACTERS first.
        counts: How often each word occurs in the text that the vocabulary was made of, 0 for
            special ones.
        vectors: Word vectors, float32 (words, width) in id order, or None.

    Raises:
        ValueError: The first symbols are not the special ones, or a symbol occurs twice.
    """

    unknown = UNKNOWN

    def __init__(
        self,
        words: Sequence[str],
        characters: Sequence[str],
        counts: Sequence[int] | None = None,
        vectors: np.ndarray | None = None,
    ) -> None:
        self.words, self.characters = list(words), list(characters)
        self.counts = [0] * len(self.words) if counts is None else list(counts)
        self._vectors = vectors
        self._folder: Path | None = None  # the folder of vectors that are not read yet
        for symbols, specials in (
            (self.words, SPECIAL_WORDS),
            (self.characters, SPECIAL_CHARACTERS),
        ):
            if symbols[: len(specials)] != specials:
                raise ValueError(f"the first symbols are {symbols[:5]}, not {specials}")
            if len(set(symbols)) != len(symbols):
                twice = next(s for s, n in Counter(symbols).items() if n > 1)
                raise ValueError(f"the symbol {twice!r} occurs twice")
        first = len(SPECIAL_CHARACTERS)
        if long := [c for c in self.characters[first:] if len(c) != 1]:
            raise ValueError(f"{long[0]!r} is not one character")
        if len(self.counts) != len(self.words):
            raise ValueError(f"{len(self.words)} words but {len(self.counts)} counts")
        if vectors is not None and vectors.shape[:1] != (len(self.words),):
            raise ValueError(f"{len(self.words)} words but vectors of shape {vectors.shape}")
        # A text that holds "<unk>" means an unknown word by it; no text means the other specials.
        self._ids = {word: i for i, word in enumerate(self.words) if i > REMOVED}
        codes = np.array([ord(c) for c in self.characters[first:]], np.int64)
        order = np.argsort(codes)
        # A last entry that no code point reaches, so that a search never leaves the table.
        self._codes = np.append(codes[order], 1 << 30)
        self._code_ids = np.append(order + first, UNKNOWN)

    def __len__(self) -> int:
        return len(self.words)

    def index(self, word: str) -> int:
        """Return the id of a word as it stands in a text, UNKNOWN if it has none."""
        return self._ids.get(normalise(word), UNKNOWN)

    def character_ids(self, code_points: np.ndarray) -> np.ndarray:
        """Return the ids of characters given as code points, int64 of the same shape."""
        at = np.searchsorted(self._codes, code_points)
        return np.where(self._codes[at] == code_points, self._code_ids[at], UNKNOWN)

    @property
    def vectors(self) -> np.ndarray | None:
        """The word vectors, read at first use; MetaseqError if their file is damaged."""
        if self._vectors is not None or self._folder is None:
            return self._vectors
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        path = self._folder / _VECTORS_FILE
        try:
            vectors = load_file(path)[_VECTORS_NAME]
        except (SafetensorError, KeyError, ValueError) as error:
            raise MetaseqError(f"{path}: damaged: {error}; preprocess again") from error
        if vectors.ndim != 2 or len(vectors) != len(self) or vectors.dtype != np.float32:
            raise MetaseqError(
                f"{path}: {vectors.dtype} {vectors.shape}, but the vocabulary has {len(self)} "
                "words; the files do not belong together, preprocess again"
            )
        self._vectors = vectors
        return vectors

    @functools.cached_property
    def hash(self) -> str:
        """A hash of all words and characters in their order; the vectors do not change it."""
        text = "\n".join([*self.words, "", *self.characters])
        return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()

    def save(self, folder: str | Path) -> list[str]:
        """Write the files into `folder` and return their names."""
        folder = Path(folder)
        save_symbols(folder / _WORDS_FILE, self.words, self.counts)
        save_symbols(folder / _CHARACTERS_FILE, self.characters, [0] * len(self.characters))
        if self.vectors is None:
            return [_WORDS_FILE, _CHARACTERS_FILE]
        from safetensors.numpy import save

        write_atomic(folder / _VECTORS_FILE, save({_VECTORS_NAME: self.vectors}))
        return [_WORDS_FILE, _CHARACTERS_FILE, _VECTORS_FILE]

    @classmethod
    def load(cls, folder: str | Path) -> "WordVocabulary":
        """Read the vocabulary of a data folder; MetaseqError with the file if it is damaged."""
        folder = Path(folder)
        if not (folder / _WORDS_FILE).is_file():
            raise MissingError(
                f"{folder / _WORDS_FILE}: no such file; 'metaseq-lm preprocess --words' makes a "
                "data folder with a vocabulary of words (a subword encoder is fine-tuned on tags "
                "by --task token_classification)"
            )
        words, counts = load_symbols(folder / _WORDS_FILE)
        characters, _ = load_symbols(folder / _CHARACTERS_FILE)
        try:
            vocabulary = cls(words, characters, counts)
        except ValueError as error:
            raise MetaseqError(
                f"{folder / _WORDS_FILE}: {error}; it is not a vocabulary of words, preprocess "
                "again"
            ) from error
        if (folder / _VECTORS_FILE).is_file():
            vocabulary._folder = folder
        return vocabulary


def count_words(forms: Mapping[str, int]) -> Counter[str]:
    """Return how often each normalised word occurs, given the counts of the forms of a text."""
    counts: Counter[str] = Counter()
    for form, count in forms.items():
        counts[normalise(form)] += count
    for special in SPECIAL_WORDS:
        counts.pop(special, None)
    return counts


def frequent_words(counts: Mapping[str, int], least: int = 1, most: int | None = None) -> list[str]:
    """Return the `most` frequent words that occur at least `least` times; ties are sorted."""
    words = [word for word, count in counts.items() if count >= least]
    return sorted(words, key=lambda word: (-counts[word], word))[:most]


def characters_of(forms: Iterable[str]) -> list[str]:
    """Return the special characters and all that occur in `forms`, brackets un-escaped, sorted."""
    characters: set[str] = set()
    for form in forms:
        characters.update(BRACKETS.get(form, form))
    return [*SPECIAL_CHARACTERS, *sorted(characters)]


_PUNCTUATION = frozenset("! ... `` { } ( ) [ ] -- - , . '' ` ; : ?".split())


def is_punctuation(word: str) -> bool:
    """Return whether scores of trees leave out a word, as it stands in the text."""
    return normalise(word) in _PUNCTUATION


# -------------------------------------------------------------------- word vectors


def read_vectors(file: TextFile, words: Container[str] | None) -> dict[str, np.ndarray]:
    """Return the vectors, float32 (width,), of the normalised words of a file, in its order.

    The file is of GloVe's format: a word and its numbers per line, single blanks between. Only
    vectors of `words` are kept, or all if it is None. If several words are equal once normalised
    (1990 and 1991), the one that is written in normalised form counts, else the first. A first line
    "COUNT WIDTH", as word2vec writes it, is skipped. Raises MetaseqError with file and line for a
    row with another number of fields or a value that is not a finite number.
    """
    vectors: dict[str, np.ndarray] = {}
    exact: set[str] = set()
    width = rows = 0
    for number, text, bad in file.lines():
        # Some files end their rows with a blank.
        fields = text.rstrip().split(" ")
        if number == 1 and len(fields) == 2 and fields[0].isdecimal() and fields[1].isdecimal():
            width = int(fields[1])
            continue
        if (bad and file.skips_bad) or not text.strip():
            continue
        width = width or len(fields) - 1
        form = " ".join(fields[: len(fields) - width])
        good = width >= 1 and len(fields) > width and bool(form)
        # GloVe has words such as ". . ."; a word and a number is one number too many.
        if not good or (" " in form and _is_number(form.rpartition(" ")[2])):
            raise MetaseqError(
                f"{file}:{number}: {len(fields)} fields, but the rows before are a word and "
                f"{width} numbers with single blanks between them: {text[:40]!r}"
            )
        rows += 1
        word = normalise(form)
        if word in vectors and (word in exact or word != form):
            continue
        if words is None or word in words:
            try:
                vectors[word] = np.array(fields[len(fields) - width :], np.float32)
            except ValueError as error:
                raise MetaseqError(
                    f"{file}:{number}: {error}; expected numbers after the word"
                ) from error
            if not np.isfinite(vectors[word]).all():
                raise MetaseqError(f"{file}:{number}: a number that is not finite")
            if word == form:
                exact.add(word)
    if not rows:
        raise MetaseqError(f"{file}: holds no word vectors")
    for special in SPECIAL_WORDS:
        vectors.pop(special, None)
    return vectors


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False


def vector_table(words: list[str], known: dict[str, np.ndarray]) -> np.ndarray:
    """Return float32 (words, width): the vectors of `known`, 0 for padding and <unk>.

    Other words, and <start>, <end> and <removed>, get random numbers of the same mean square, which
    depend only on the place. MetaseqError if no word is known.
    """
    places = [i for i, word in enumerate(words) if word in known]
    if not places:
        raise MetaseqError("none of the words has a vector; is it a file of another language?")
    vectors = np.stack([known[words[i]] for i in places])
    scale = float(np.sqrt(np.mean(vectors.astype(np.float64) ** 2)))
    # One seed for all runs: the table is a part of the data set.
    random = random_streams.generator(0, "word vectors")
    table = (random.standard_normal((len(words), vectors.shape[1])) * scale).astype(np.float32)
    table[places] = vectors
    table[: UNKNOWN + 1] = 0
    return table


# -------------------------------------------------------------------- subwords


class SubwordVocabulary:
    """A tokenizer used as a vocabulary of words; a word's id is the id of its first token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.unknown = tokenizer.vocabulary.unk
        self.hash = tokenizer.fingerprint

    def __len__(self) -> int:
        return len(self.tokenizer.vocabulary)

    def index(self, word: str) -> int:
        """Return the id of a word as it stands in a text."""
        (ids,) = self.tokenizer.encode_batch([word])
        return ids[0] if ids else self.unknown or 0


def load_vocabulary(folder: Path) -> WordVocabulary | SubwordVocabulary:
    """Read the vocabulary of words of a data folder, or its tokenizer if it has none."""
    if (folder / _WORDS_FILE).is_file() or not (folder / OPTIONS_FILE).is_file():
        return WordVocabulary.load(folder)
    from metaseq_lm.data.tokenizers.loading import load_tokenizer

    return SubwordVocabulary(load_tokenizer(folder))
