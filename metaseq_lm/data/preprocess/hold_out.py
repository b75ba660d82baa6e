"""The choice of documents of train that become valid, and files read without them."""

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from metaseq_lm.core import random_streams
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.records.text_files import Block

_SIZE = re.compile(r"(\d{1,12})|(\d{1,2}(?:\.\d+)?)%")


@dataclass(frozen=True)
class HoldOut:
    """How many documents of train are held out.

    Attributes:
        size: "N" documents, or "P%" of them, drawn with `seed`.
        seed: The seed.
        every: Hold out every `every`-th document, in place of a size.
        most: With `every`, hold out rarer ones of more documents, so that about `most` are; 0: any.
    """

    size: str = ""
    seed: int = 0
    every: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        match = _SIZE.fullmatch(self.size)
        if not self.every and (match is None or not float(self.size.rstrip("%"))):
            raise UsageError(
                f"--hold-out {self.size}: a number of documents, at least 1, or a share such as 5%"
            )

    def choose(self, count: int, unit: str) -> np.ndarray:
        """Return which of `count` documents are held out, bool (count,).

        Raises UsageError, which calls them `unit`, if either split would be empty.
        """
        if self.every:
            if count < 2 * self.every:
                raise UsageError(
                    f"{count} {unit}; every {self.every}th is held out, so {2 * self.every} are "
                    "needed: add some, or break long ones into several"
                )
            step = self.every
            if self.most:
                step = max(step, count // self.most)
            return np.asarray(np.arange(1, count + 1) % step == 0)
        if self.size.endswith("%"):
            share = round(count * float(self.size[:-1]) / 100)
            size = max(1, min(share, count - 1))
        else:
            size = int(self.size)
        if size >= count:
            raise UsageError(f"--hold-out {self.size}: train has {count} {unit}")
        # One order for all sizes: a larger share holds out the documents of a smaller one, too.
        order = random_streams.generator(self.seed, "hold out").permutation(count)
        held = np.zeros(count, bool)
        held[order[:size]] = True
        return held


class HeldOutLines:
    """Marks of the lines of the files of train that belong to held-out documents.

    Every line of a file is HELD_OUT, KEPT or BLANK; a blank line is in neither part.
    """

    HELD_OUT, KEPT, BLANK = 1, 0, -1

    def __init__(self, lines: dict[Path, np.ndarray]) -> None:
        self._lines = lines

    @classmethod
    def of_documents(
        cls, files: Mapping[Path, Iterable[Block]], hold_out: HoldOut, documents: str
    ) -> "HeldOutLines":
        """Return the marks of files in which a document is a line, or as `documents` says.

        A blank line that may end a document belongs to the document before it.
        """
        lines: dict[Path, array[int]] = {}
        count = 0
        for path, blocks in files.items():
            numbers = lines[path] = array("q")
            is_open = False
            for text in chain.from_iterable(block.texts for block in blocks):
                is_text = bool(text.strip())
                count += is_text and not is_open
                is_open = documents != "lines" and (is_text or (is_open and documents == "file"))
                belongs = is_text or (documents != "lines" and count)
                numbers.append(count - 1 if belongs else -1)
        unit = "documents (lines)" if documents == "lines" else "documents"
        parts = np.append(hold_out.choose(count, unit).astype(np.int8), cls.BLANK)
        return cls({path: parts[np.asarray(numbers, int)] for path, numbers in lines.items()})

    def part(self, path: Path, blocks: Iterable[Block], is_held_out: bool) -> Iterator[Block]:
        """Yield the held-out lines of a file of train, or the others, in blocks."""
        keep = self._lines[path] == (self.HELD_OUT if is_held_out else self.KEPT)
        first = 1
        for block in blocks:
            places = np.flatnonzero(keep[block.first - 1 : block.first - 1 + len(block.texts)])
            texts = [block.texts[at] for at in places]
            bad = {new for new, at in enumerate(places.tolist()) if at in block.bad}
            if texts:
                yield Block(texts, first, block.read, bad)
                first += len(texts)

    def holds(self, path: Path, number: int) -> bool:
        """Return whether line `number`, from 1, of a file is held out."""
        return bool(self._lines[path][number - 1] == self.HELD_OUT)
