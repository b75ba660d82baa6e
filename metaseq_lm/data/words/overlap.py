"""Training sentences that occur in an evaluation split of another set (Clark et al. 2018, 4.3.1).

Two sentences are the same if their letters and digits are equal in lower case, with every digit a 0
and without blanks and signs, so that tokenisation does not matter. Sentences of signs alone are
compared unchanged.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np

from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.records.reading import reader_name
from metaseq_lm.data.records.record import COLUMNS, CONLLU
from metaseq_lm.data.records.text_files import TextFile
from metaseq_lm.data.storage.manifest import MANIFEST_FILE, Manifest
from metaseq_lm.data.words.columns import ColumnReader, ConlluReader, SentenceReader
from metaseq_lm.data.words.sets import KINDS, WordSet
from metaseq_lm.data.words.token_lists import TokenListReader
from metaseq_lm.data.words.vocabulary import normalise

_CHUNK = 4096


class _Overlap:
    """A set of sentences, lists of words."""

    def __init__(self, sentences: Iterable[Sequence[str]]) -> None:
        self._letters = cache(lambda word: "".join(filter(str.isalnum, normalise(word))))
        self._keys = set(map(self._key, sentences))

    def __len__(self) -> int:
        return len(self._keys)

    def _key(self, words: Sequence[str]) -> str:
        return "".join(map(self._letters, words)) or " ".join(words)

    def __contains__(self, words: Sequence[str]) -> bool:
        return bool(self._keys) and self._key(words) in self._keys


def evaluation_overlap(
    names: Sequence[str], data: Path, open_file: Callable[[Path], SentenceReader]
) -> _Overlap:
    """Return the sentences to keep out of training.

    Each name is a set of the data folder (DATA/NAME) or another folder of a set, whose splits
    except train count, or a file in CoNLL columns or CoNLL-U, which `open_file` reads. UsageError
    for anything else.
    """
    return _Overlap(chain.from_iterable(_sentences(name, data, open_file) for name in names))


def _sentences(
    name: str, data: Path, open_file: Callable[[Path], SentenceReader]
) -> Iterator[list[str]]:
    for folder in (data / name, Path(name)):
        if (folder / MANIFEST_FILE).is_file():
            manifest = Manifest.load(folder)
            if manifest.kind not in KINDS:
                raise UsageError(
                    f"--drop-overlap-with {name}: {folder} holds no sentences of words"
                )
            splits = sorted(set(manifest.splits) - {"train"})
            if not splits:
                raise UsageError(
                    f"--drop-overlap-with {name}: {folder} has the split train only, so nothing of "
                    "it is evaluated on; leave it out, or name a file"
                )
            for split in splits:
                content = WordSet(folder, split)
                for first in range(0, len(content), _CHUNK):
                    yield from content.surface(np.arange(first, min(first + _CHUNK, len(content))))
            return
    if not Path(name).is_file():
        raise UsageError(
            f"--drop-overlap-with {name}: neither a set in {data}, nor a folder of one, nor a file "
            "in CoNLL columns or CoNLL-U"
        )
    yield from (sentence.words for sentence in open_file(Path(name)))


def dropped_sentences(dropped: int) -> str:
    """Return the addition to "no sentences" if `dropped` were left out because of an overlap."""
    if not dropped:
        return ""
    return (
        f" but the {dropped:,} that --drop-overlap-with leaves out, as an evaluation split has them"
    )


def words_reader(file: TextFile, word_column: int) -> SentenceReader:
    """Return a reader of a labelled file for its words alone."""
    name = reader_name(file, COLUMNS)
    if name == CONLLU:
        return ConlluReader(file, trees=False)
    if name == COLUMNS:
        return ColumnReader(file, word_column=word_column, label_column=word_column)
    return TokenListReader(file, has_tags=False)
