"""Writing the files of a split of sentences."""

import array
import contextlib
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from metaseq_lm.data.storage.indexed import IndexedWriter, smallest_dtype
from metaseq_lm.data.words.sets import part_name
from metaseq_lm.data.words.vocabulary import UNKNOWN, WordVocabulary

BATCH = 8192  # sentences


class _Forms(dict):
    """Numbers of words as they stand in the text, in order of appearance; `fresh` are the last new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh: list[str] = []

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        self.fresh.append(word)
        return number


class SentenceWriter:
    """Writes the words of a split, and labels and heads if `labels` (how many) is given.

    A context manager; nothing stands under the final names before a clean end. `sentences`, `words`
    and `unknown` (words without a place in the vocabulary) count what was written.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        vocabulary: WordVocabulary,
        labels: int = 0,
        heads: bool = False,
    ) -> None:
        self.sentences = self.words = self.unknown = 0
        self._vocabulary = vocabulary
        self._forms, self._ids = _Forms(), array.array("i")
        types = {"": smallest_dtype(len(vocabulary)), "surface": np.dtype("<i4")}
        types |= {"labels": smallest_dtype(labels)} if labels else {}
        types |= {"heads": np.dtype("<i4")} if heads else {}
        self._prefixes = {part: folder / part_name(split, part) for part in (*types, "forms")}
        self._writers = {part: IndexedWriter(self._prefixes[part], t) for part, t in types.items()}
        self._stack = contextlib.ExitStack()

    @property
    def names(self) -> list[str]:
        """The names of the files."""
        return [f"{p.name}.{suffix}" for p in self._prefixes.values() for suffix in ("bin", "idx")]

    @property
    def forms(self) -> int:
        """How many different words there are, as they stand in the text."""
        return len(self._forms)

    def __enter__(self) -> "SentenceWriter":
        with contextlib.ExitStack() as stack:
            for writer in self._writers.values():
                stack.enter_context(writer)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *about: object) -> None:
        if about[0] is None:
            with IndexedWriter(self._prefixes["forms"], "<i4") as writer:
                codes = np.frombuffer("".join(self._forms).encode("utf-32-le"), "<u4")
                sizes = np.fromiter(map(len, self._forms), np.int64, len(self._forms))
                writer.extend(codes, sizes)
        self._stack.__exit__(*about)  # type: ignore[arg-type]

    def extend(
        self,
        sentences: Sequence[Sequence[str]],
        labels: np.ndarray | None = None,
        heads: np.ndarray | None = None,
    ) -> None:
        """Append sentences with the labels and heads of their words end to end."""
        sizes = np.fromiter(map(len, sentences), np.int64, len(sentences))
        words = list(map(self._forms.__getitem__, chain.from_iterable(sentences)))
        numbers = np.array(words, np.int32)
        self._ids.extend(map(self._vocabulary.index, self._forms.fresh))
        self._forms.fresh.clear()
        ids = np.frombuffer(self._ids, np.int32)[numbers] if len(numbers) else numbers
        columns = {"": ids, "surface": numbers, "labels": labels, "heads": heads}
        for part, writer in self._writers.items():
            values = columns[part]
            assert values is not None
            writer.extend(values, sizes)
        self.sentences += len(sizes)
        self.words += len(numbers)
        self.unknown += int(np.count_nonzero(ids == UNKNOWN))
