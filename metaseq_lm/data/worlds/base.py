"""Worlds: small languages whose every probability is known in closed form.

A world draws documents and computes what a perfect model would: the probability of a document, of
each symbol in a gap, and of the labels of its words. `metaseq-lm preprocess --world NAME` writes a
data folder of one. A plug-in registers its own:

    @register_world("coins", CoinConfig)
    class Coins(World):
        symbols = ("heads", "tails")

        def sample(self, keys: np.ndarray) -> Documents: ...

        def log_probs(self, tokens: np.ndarray) -> np.ndarray: ...

Shapes: N documents, S tokens of the longest, V symbols. Tokens are indices into `symbols`, padded
on the right with -1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from metaseq_lm.core import random_streams
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.interfaces import place_of
from metaseq_lm.core.options import read_words
from metaseq_lm.core.registry import WORLDS

__all__ = ["NO_LABEL", "NO_TOKEN", "Documents", "World"]

# A token behind the last one of a document; no label of a document or token.
NO_TOKEN = -1
NO_LABEL = -1

LEFT, RIGHT, BOTH = "left", "right", "both"  # the side of a word that a reader sees
CHUNK = 1 << 16  # documents or clauses whose probabilities are computed at once


@dataclass(frozen=True)
class Documents:
    """Documents and the labels of each.

    Attributes:
        tokens: Indices into the world's symbols, int64 (N, S), NO_TOKEN after the last.
        labels: For each labelled set, indices into its classes or NO_LABEL: (N,) for labels of
            documents, (N, S) for labels of tokens.
    """

    tokens: np.ndarray
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each document, int64 (N,)."""
        return np.asarray((self.tokens != NO_TOKEN).sum(axis=1))

    def select(self, rows: np.ndarray) -> "Documents":
        """Return some of the documents; `rows` are their indices or a mask."""
        labels = {name: values[rows] for name, values in self.labels.items()}
        return Documents(self.tokens[rows], labels)


class World:
    """Base class of worlds.

    Args:
        config: The options of the world, an instance of the dataclass it is registered with.
        seed: The seed of the documents, and of the constants if they are drawn.

    Attributes:
        name: The name that the world is registered under.
        symbols: The words of the language; none contains white space.
        longest: The maximum number of tokens of a document.
        label_sets: The classes of each labelled set by its name.
        asked_later: Maps a set that asks for the label of a word at a later token, such as the end
            of its clause, to the set that asks at the word.
        pair_kinds: The kinds of minimal pairs.
    """

    name: str = ""
    symbols: Sequence[str] = ()
    longest: int = 0
    label_sets: Mapping[str, Sequence[str]] = {}
    asked_later: Mapping[str, str] = {}
    pair_kinds: Sequence[str] = ()

    def __init__(self, config: Any, seed: int = 0) -> None:
        self.config = config
        self.seed = seed

    def sample(self, keys: np.ndarray) -> Documents:
        """Return one document for each of the keys, uint64 (N,), a function of the key alone.

        Random numbers come from `core.random_streams`, so that documents are the same on every
        machine and in batches of any size.
        """
        raise NotImplementedError

    def sample_labelled(self, name: str, split: str, keys: np.ndarray) -> Documents:
        """Return one document for each of the keys, uint64 (N,), for a split of a labelled set.

        Override it if probes must not be trained on what they are tested on.
        """
        return self.sample(keys)

    def log_probs(self, tokens: np.ndarray) -> np.ndarray:
        """Return the log-probability of each document, (N, S) to (N,), in nats, -inf for none."""
        raise NotImplementedError

    def cloze(self, tokens: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the probability of each symbol in a gap, given all other tokens.

        Each symbol is put into the gap, and the probabilities of the V documents are normalised:
        p(v | others) = p(document with v) / sum over u of p(document with u).

        Args:
            tokens: Documents (N, S).
            rows: The document of each gap, (M,).
            positions: The position of each gap in its document, (M,).

        Returns:
            Probabilities (M, V); NaN where no symbol makes a document of the world.
        """
        size = len(self.symbols)
        log_probs = np.empty((len(rows), size))
        step = max(1, CHUNK // size)
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            filled = np.repeat(tokens[rows[part]], size, axis=0)
            filled[np.arange(len(filled)), np.repeat(positions[part], size)] = np.tile(
                np.arange(size), len(rows[part])
            )
            log_probs[part] = self.log_probs(filled).reshape(-1, size)
        return normalise_probabilities(log_probs)

    def posterior(self, name: str, tokens: np.ndarray, sees: str = BOTH) -> np.ndarray | None:
        """Return the probability of each class of a labelled set, (N, K) or (N, S, K).

        The result is NaN for tokens without a label, and None if the world cannot compute it.

        Args:
            name: One of `label_sets`.
            tokens: Documents (N, S).
            sees: What a reader of a token's label sees: LEFT, the document up to and including the
                token, without how much follows; RIGHT, the mirror image; or BOTH. Labels of
                documents are always read from the whole document.
        """
        return None

    def minimal_pairs(self, kind: str, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return pairs of documents that differ in one token, (M, S) each, the good ones first.

        Each of the keys, uint64 (N,), makes at most one pair, so M is at most N.
        """
        raise NotImplementedError

    def parameters(self) -> dict[str, Any]:
        """Return the constants of the world in a form for JSON."""
        return {}

    def references(self) -> dict[str, Any]:
        """Return further values to compare a model with, next to `measures`, in a form for JSON."""
        return {}

    def keys(self, purpose: str, start: int, count: int) -> np.ndarray:
        """Return keys for documents `start` to `start + count` of a purpose, uint64 (count,)."""
        root = random_streams.key("world", self.name, self.seed, purpose)
        return random_streams.row_keys(root, np.arange(start, start + count))

    def text(self, tokens: np.ndarray) -> str:
        """Return a document, tokens (S,), as words with blanks between them."""
        return " ".join(self.symbols[token] for token in tokens if token != NO_TOKEN)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return texts as tokens (N, S).

        Raises:
            KeyError: A word is not a symbol of the world.
        """
        numbers = {symbol: number for number, symbol in enumerate(self.symbols)}
        tokens = np.full((len(texts), self.longest), NO_TOKEN)
        for row, text in enumerate(texts):
            words = [numbers[word] for word in text.split()]
            tokens[row, : len(words)] = words
        return tokens


def uniforms_for(keys: np.ndarray, purpose: str, count: int) -> np.ndarray:
    """Return `count` uniform numbers for each of the keys and a purpose, (N, count)."""
    return random_streams.uniforms(random_streams.subkeys(keys, purpose), 0, count)


def seeded_uniforms(*parts: str | int, shape: tuple[int, int]) -> np.ndarray:
    """Return uniform numbers of a shape, a function of the parts, such as name and seed alone."""
    keys = random_streams.row_keys(random_streams.key(*parts), np.arange(shape[0]))
    return random_streams.uniforms(keys, 0, shape[1])


def normalise_probabilities(log_probs: np.ndarray) -> np.ndarray:
    """Return exp(log_probs) normalised over the last axis; NaN where all are -inf."""
    largest = log_probs.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        weights = np.exp(log_probs - largest)
        return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def build_world(name: str, seed: int = 0, options: Sequence[str] = ()) -> World:
    """Return the world registered under `name` with options `name=value`.

    Args:
        name: The name.
        seed: The seed of its constants and documents.
        options: The options.

    Raises:
        UsageError: The world or an option is unknown, or a value has a wrong type or is out of
            range.
    """
    entry = WORLDS.entry(name)
    config = read_words(entry.dataclass, options, f"world {name}")
    world: World = entry.value(config, seed)
    world.name = name
    if not len(world.symbols) or any(symbol.split() != [symbol] for symbol in world.symbols):
        raise UsageError(
            f"{place_of(type(world))}: the symbols of world '{name}' have to be words without "
            "white space, at least one"
        )
    return world


def check_documents(world: World, documents: Documents, count: int) -> Documents:
    """Return documents that a world drew for `count` keys; UsageError for wrong shapes or types."""
    tokens, longest, size = documents.tokens, world.longest, len(world.symbols)
    fits = tokens.ndim == 2 and len(tokens) == count and tokens.shape[1] <= longest
    fits = fits and np.issubdtype(tokens.dtype, np.integer)
    fits = fits and bool(((tokens >= NO_TOKEN) & (tokens < size)).all())
    shapes = {name: labels.shape for name, labels in documents.labels.items()}
    if not fits or any(shape not in ((count,), tokens.shape) for shape in shapes.values()):
        raise UsageError(
            f"{place_of(type(world).sample)}: world '{world.name}' drew tokens {tokens.dtype} "
            f"{tokens.shape} and labels {shapes} for {count} keys; tokens have to be whole numbers "
            f"({count}, S) from -1 to {size - 1}, S at most {longest} (`longest`), labels "
            f"({count},) or ({count}, S)"
        )
    return documents


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Return options as words `name=value`, which `build_world` takes."""
    words = []
    for name, value in options.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        words.append(f"{name}={text}")
    return words


def describe(world: World) -> dict[str, Any]:
    """Return the identity of a world: name, seed and options."""
    return {"name": world.name, "seed": world.seed, "options": asdict(world.config)}
