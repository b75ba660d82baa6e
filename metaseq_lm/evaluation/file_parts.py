"""Parts of the files of a suite: the first items, such as for choosing, and those after them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.options import option

Item = TypeVar("Item")


@dataclass
class FilePart:
    """Which items of each file are scored: `first` of those after the first `skip`."""

    first: int = option(0, "only the first items of each file (0 = all)", at_least=0)
    skip: int = option(
        0,
        "items at the beginning of each file to leave out, such as those that a search has chosen "
        "by; `first` counts from there",
        at_least=0,
    )

    def of(self, items: Iterable[Item], file: Path) -> Iterator[Item]:
        """Yield the items of a file that are in the part; MetaseqError if there is none."""
        is_empty = True
        for item in islice(items, self.skip, self.skip + self.first if self.first else None):
            is_empty = False
            yield item
        if is_empty and self.skip:
            raise MetaseqError(f"{file}: skip={self.skip} leaves none of its items.")


def is_apart(one: object, other: object) -> bool:
    """Return whether two suites with these options share no item of the same files.

    They have other splits, or the second begins where the first ends.
    """
    splits = [getattr(config, "split", None) for config in (one, other)]
    return splits[0] != splits[1] or 0 < getattr(one, "first", 0) <= getattr(other, "skip", 0)
