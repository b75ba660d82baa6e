"""Rows of a different length in each phase of a run, from a set of samples for each phase.

The sample numbers of phase p begin at p * PHASE. All samples of a batch are of one phase.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

from metaseq_lm.data.corpus.rows import Samples
from metaseq_lm.data.streams import PHASE, Lengths


class _HasLengths(Protocol):
    """The rows of a phase."""

    @property
    def row_lengths(self) -> Lengths: ...


_P = TypeVar("_P", bound=_HasLengths)


def of_phase(parts: Sequence[_P], samples: np.ndarray) -> tuple[_P, np.ndarray]:
    """Return the part of the phase that samples belong to, and their numbers in it."""
    phase = int(samples.max(initial=0)) // PHASE
    return parts[phase], samples - phase * PHASE


class PhasedLengths:
    """The lengths of the rows of each phase, `phases`."""

    def __init__(self, parts: Sequence[_HasLengths]) -> None:
        self.parts = parts
        self.phases = [part.row_lengths for part in parts]

    def __len__(self) -> int:
        return sum(map(len, self.phases))

    def __getitem__(self, samples: np.ndarray) -> np.ndarray:
        part, numbers = of_phase(self.parts, samples)
        return np.asarray(part.row_lengths[numbers])


class PhasedSamples(Samples):
    """The rows of a corpus in each phase."""

    def __init__(self, parts: Sequence[Samples]) -> None:
        self.parts = parts
        self.data, self.vocabulary = parts[0].data, parts[0].vocabulary

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def row_lengths(self) -> Lengths:
        return PhasedLengths(self.parts)

    def rows(
        self, samples: np.ndarray, cls: int = 0, width: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        part, numbers = of_phase(self.parts, samples)
        return part.rows(numbers, cls, width)

    def read(self, samples: np.ndarray, cls: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        part, numbers = of_phase(self.parts, samples)
        return part.read(numbers, cls, width)

    def runs(self, samples: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        part, numbers = of_phase(self.parts, samples)
        return part.runs(numbers, width)

    def segments(self, samples: np.ndarray, width: int) -> np.ndarray | None:
        part, numbers = of_phase(self.parts, samples)
        return part.segments(numbers, width)

    def documents(self, samples: np.ndarray, width: int) -> np.ndarray | None:
        part, numbers = of_phase(self.parts, samples)
        return part.documents(numbers, width)
