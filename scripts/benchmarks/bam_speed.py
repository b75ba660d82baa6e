"""BAM on eight labelled sets, with stored teacher outputs, against fine-tuning on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from timing import Figure, Variant, cost, paired
from training import made_up_corpus, made_up_set, updates

from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.methods.bam.teachers import SUFFIX, describe, store

VOCAB, LENGTH, LAYERS, SETS = 8000, 64, 4, 8
SIZES = [f"model.encoder_layers={LAYERS}", "schedule=constant", f"task.tokens_per_sample={LENGTH}"]
SIZES += [
    "model.attention_dropout=0.1",
    "optimizer.lr=1e-4",
    "optimizer.layer_decay=0.9",
    "task.pooled=true",
]
PLAIN = ["task=sentence_prediction", "criterion=sentence_prediction", "task.labelled=set0", *SIZES]
NAMES = [f"set{number}" for number in range(SETS)]
BAM = ["task=bam", "criterion=bam_distill", f"task.labelled=[{','.join(NAMES)}]", *SIZES]


def made_up_sets(folder: Path) -> Path:
    """Write labelled sets of random full-length rows, and outputs of a teacher on them."""
    data = made_up_corpus(folder, VOCAB, 1000)
    draw = np.random.default_rng(1)
    for number, name in enumerate(NAMES):
        place, rows, classes = data / name, 400 * (number + 1), 0 if number == SETS - 1 else 2
        made_up_set(place, VOCAB, LENGTH - 2, {"train": rows}, number, classes)
        said = draw.normal(size=(rows, max(classes, 1)))
        about = describe(place, LabelledSet(place, "train"), "made up")
        store(folder / "said" / f"{name}{SUFFIX}", said, about)
    return data


def figures(folder: Path, given: Path | None, quick: bool) -> Iterator[Figure]:
    """Yield the cost of an update in updates of plain fine-tuning."""
    rows = 16 if quick else 32
    data = made_up_sets(folder / "bam")
    taught = f"task.teachers=[{data / 'said'}]"
    variants = {
        name: Variant(updates, {"data": data, "overrides": overrides, "rows": rows})
        for name, overrides in (("bam", [*BAM, taught]), ("plain", PLAIN))
    }
    done = paired(variants, rounds=9 if quick else 15, warm_up=3)
    work = done["bam"].rounds[-1]["flops"] / done["plain"].rounds[-1]["flops"]
    note = (
        f"{LAYERS} layers, width 256, {rows} rows of {LENGTH}, {SETS} sets; {work:.3f} times "
        "the FLOPs"
    )
    yield cost("bam_step", done["bam"], done["plain"], "s/step", 1.1, note)
