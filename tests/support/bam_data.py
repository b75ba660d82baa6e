"""Made-up outputs of a teacher for labelled sets, and sets to learn."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.methods.bam.teachers import SUFFIX, describe, store


def write_outputs(data: Path, folder: Path, names: Sequence[str], seed: int = 0) -> None:
    """Store random outputs of a teacher on the training rows of sets of `data`."""
    draw = np.random.default_rng(seed)
    for name in names:
        found = LabelledSet(data / name, "train")
        outputs = draw.normal(size=(len(found), max(len(found.label_names), 1)))
        store(folder / f"{name}{SUFFIX}", outputs, describe(data / name, found, "made up"))
