"""Symbols, their ids and counts; `dict.txt` is their form on disk."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from metaseq_lm.core.errors import MetaseqError, MissingError
from metaseq_lm.core.files import write_atomic

PAD, MASK, SEP, UNK = "[PAD]", "[MASK]", "[SEP]", "[UNK]"
TASK_TOKENS = 30
_LONGEST_ROW = 1 << 20  # most bytes of a row of dict.txt

# Padding, mask, separator, class and unknown symbol of the vocabularies of the transformers
# library: Devlin et al. 2019 (and ELECTRA); Liu et al. 2019.
FAMILIES = {
    "bert": (PAD, MASK, SEP, "[CLS]", UNK),
    "roberta": ("<pad>", "<mask>", "</s>", "<s>", "<unk>"),
}


def special_symbols(task_tokens: int = TASK_TOKENS, unk: bool = False) -> list[str]:
    """Return the special symbols in id order: [PAD] [MASK] [SEP] [CLS0] ... and [UNK] if asked."""
    return [PAD, MASK, SEP, *(f"[CLS{n}]" for n in range(task_tokens)), *[UNK] * unk]


# Symbols may hold any character, so the line break, and the sign that escapes it, are escaped.
def _escape(symbol: str) -> str:
    return symbol.replace("\\", "\\\\").replace("\n", "\\n")


def _unescape(text: str) -> str:
    return "\\".join(part.replace("\\n", "\n") for part in text.split("\\\\"))


def save_symbols(path: Path, symbols: Sequence[str], counts: Sequence[int]) -> None:
    """Write `symbol count` per line, a line break inside a symbol as \\\\n and a backslash as two.

    Nothing else is changed. The file is replaced as a whole.
    """
    rows = (f"{_escape(s)} {c}\n" for s, c in zip(symbols, counts))
    write_atomic(path, "".join(rows).encode("utf-8"))


def load_symbols(path: Path) -> tuple[list[str], list[int]]:
    """Read a file of `save_symbols`; a malformed file is a MetaseqError naming the line."""
    if not path.is_file():
        raise MissingError(f"{path}: no such file; 'metaseq-lm preprocess' writes it")
    rows = path.read_bytes().split(b"\n")
    if rows.pop():
        raise MetaseqError(f"{path}: the last line is cut off; preprocess again")
    symbols, counts = [], []
    for number, row in enumerate(rows, 1):
        symbol, space, count = row.rpartition(b" ")
        if not space or not count.isdigit() or len(count) > 18 or len(row) > _LONGEST_ROW:
            raise MetaseqError(f"{path}:{number}: expected 'symbol count', found {row[:80]!r}")
        try:
            symbols.append(_unescape(symbol.decode("utf-8")))
        except UnicodeDecodeError as error:
            raise MetaseqError(f"{path}:{number}: not valid UTF-8 ({error.reason})") from error
        counts.append(int(count))
    return symbols, counts


class Vocabulary:
    """The symbols of a tokenizer in id order, and how often each occurs in the training text.

    In the layout of this package the special symbols come first: [PAD] [MASK] [SEP] [CLS0] ... and
    [UNK]. Otherwise all special symbols of exactly one family must be there, at any ids, and there
    is one task token.

    Attributes:
        symbols: The symbols in id order.
        counts: How often each occurs in the training text.
        layout: "own", or the name of the family.
        specials: The sorted ids of the special symbols.
        unwritten: The ids that decoding leaves out: all special ones except [UNK].

    Raises:
        ValueError: Two symbols are equal, or the layout is neither of these.
    """

    def __init__(self, symbols: Sequence[str], counts: Sequence[int] | None = None) -> None:
        self.symbols = list(symbols)
        self.counts = [0] * len(self.symbols) if counts is None else [int(c) for c in counts]
        if len(self.counts) != len(self.symbols):
            raise ValueError(f"{len(self.symbols)} symbols but {len(self.counts)} counts")
        self._ids = {symbol: i for i, symbol in enumerate(self.symbols)}
        if len(self._ids) != len(self.symbols):
            twice = next(s for i, s in enumerate(self.symbols) if self._ids[s] != i)
            raise ValueError(f"the symbol {twice!r} occurs twice")
        self.layout = "own"
        self.unk: int | None
        if self.symbols[:3] == [PAD, MASK, SEP]:
            self._own_layout()
        else:
            self._family_layout()
        self.unwritten = frozenset(self.specials.tolist()) - {self.unk}

    def _own_layout(self) -> None:
        self.pad, self.mask, self.sep, self._cls = 0, 1, 2, 3
        self.task_tokens = 0
        while self._ids.get(f"[CLS{self.task_tokens}]") == 3 + self.task_tokens:
            self.task_tokens += 1
        after = 3 + self.task_tokens
        self.unk = None
        # A word "[UNK]" further down would be a word of the text, not the special symbol.
        if self._ids.get(UNK) == after:
            self.unk = after
        self.specials = np.arange(after + (self.unk is not None))

    def _family_layout(self) -> None:
        whole = [name for name, family in FAMILIES.items() if self._ids.keys() >= set(family)]
        if len(whole) != 1:
            known = " or ".join(map(" ".join, FAMILIES.values()))
            raise ValueError(
                f"the first symbols are {self.symbols[:3]}, not {[PAD, MASK, SEP]}, and of the "
                f"special symbols {known} {'both sets are' if whole else 'neither set is'} complete"
            )
        self.layout = whole[0]
        ids = [self._ids[symbol] for symbol in FAMILIES[self.layout]]
        self.pad, self.mask, self.sep, self._cls, self.unk = ids
        self.task_tokens = 1
        self.specials = np.array(sorted(ids))

    @property
    def text_counts(self) -> np.ndarray:
        """How often each symbol occurs as a token of the text, (V,), 0 for special ones but [UNK].

        All are 0 if `dict.txt` has no counts.
        """
        counts = np.asarray(self.counts, np.float64)
        counts[list(self.unwritten)] = 0.0
        return counts

    def __len__(self) -> int:
        return len(self.symbols)

    def __contains__(self, symbol: str) -> bool:
        return symbol in self._ids

    def index(self, symbol: str) -> int:
        """Return the id of a symbol; the id of [UNK], or KeyError without one, if unknown."""
        number = self._ids.get(symbol, self.unk)
        if number is None:
            raise KeyError(symbol)
        return number

    def cls(self, n: int = 0) -> int:
        """Return the id of `[CLSn]`; MetaseqError if the vocabulary has fewer task tokens."""
        if n and self.layout != "own":
            raise MetaseqError(
                f"the vocabulary is {self.layout}'s and has one task token, "
                f"{self.symbols[self._cls]}, which stands for [CLS0]; [CLS{n}] needs a tokenizer "
                "that preprocess trained"
            )
        if not 0 <= n < self.task_tokens:
            raise MetaseqError(
                f"the vocabulary has {self.task_tokens} task tokens, [CLS{n}] is not one of them; "
                f"preprocess again with --task-tokens {max(n + 1, TASK_TOKENS)}"
            )
        return self._cls + n

    def save(self, path: str | Path) -> None:
        """Write `symbol count` per line in id order, special symbols included: `save_symbols`."""
        save_symbols(Path(path), self.symbols, self.counts)

    @classmethod
    def load(cls, path: str | Path) -> "Vocabulary":
        """Read a `dict.txt`; a malformed one is a MetaseqError naming the line."""
        path = Path(path)
        symbols, counts = load_symbols(path)
        try:
            return cls(symbols, counts)
        except ValueError as error:
            raise MetaseqError(f"{path}: {error}; it is not a dict.txt of metaseq-lm") from error
