"""An update of BAM on eight labelled sets, teachers' outputs stored, against plain fine-tuning on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import numpy as np
from timing import Figure, Step, Variant, cost, paired
from training import build, fetched, made_up_corpus, train

from metaseq_lm.data.indexed import IndexedWriter
from metaseq_lm.data.labelled import LabelledSet, input_name, label_name
from metaseq_lm.data.manifest import LABELLED, Manifest
from metaseq_lm.methods.bam.teachers import SUFFIX, describe, store

VOCAB, LENGTH, LAYERS, SETS = 8000, 64, 4, 8
SIZES = [f"model.encoder_layers={LAYERS}", "schedule=constant", f"task.tokens_per_sample={LENGTH}"]
SIZES += ["optimizer.lr=1e-4", "optimizer.layer_decay=0.9", "task.pooled=true"]
PLAIN = ["task=sentence_prediction", "criterion=sentence_prediction", "task.labelled=set0", *SIZES]
NAMES = [f"set{number}" for number in range(SETS)]
BAM = ["task=bam", "criterion=bam_distill", f"task.labelled=[{','.join(NAMES)}]", *SIZES]


def made_up_sets(folder: Path) -> Path:
    """Write labelled sets of random rows, all of full length, and what a teacher says of them."""
    data = made_up_corpus(folder, VOCAB, 1000)
    draw = np.random.default_rng(1)
    for number, name in enumerate(NAMES):
        place, rows, classes = data / name, 400 * (number + 1), 0 if number == SETS - 1 else 2
        place.mkdir()
        manifest = Manifest(LABELLED, {"name": "word", "hash": "0", "size": VOCAB}, {}, "")
        texts = draw.integers(100, VOCAB, (rows, LENGTH - 2))
        gold = draw.integers(0, 2, (rows, 1))
        kinds: dict[str, tuple[Any, type]] = {input_name("train", 0): (texts, np.uint16)}
        kinds[label_name("train")] = (gold, np.int32 if classes else np.float64)
        for prefix, (values, kind) in kinds.items():
            with IndexedWriter(place / prefix, np.dtype(kind)) as writer:
                for row in values:
                    writer.add(row.astype(kind))
            manifest.add_files(place, [f"{prefix}.bin", f"{prefix}.idx"])
        manifest.splits["train"] = {"rows": rows}
        labels = ["no", "yes"][:classes]
        manifest.details = {"labels": labels, "regression": not classes, "inputs": 1}
        manifest.save(place)
        said = draw.normal(size=(rows, max(classes, 1)))
        about = describe(place, LabelledSet(place, "train"), "made up")
        store(folder / "said" / f"{name}{SUFFIX}", said, about)
    return data


def updates(data: Path, overrides: list[str], rows: int) -> Step:
    """Make updates of a task, data included."""
    run = build(data, [*overrides, f"task.batch_size={rows}"])
    run.model.train()
    source = fetched(run)

    def step() -> dict[str, Any]:
        counted = run.trainer.flops.total
        logs = train(run, *next(source))
        flops = run.trainer.flops.total - counted
        return {"amount": 1, "loss": float(logs["loss"]), "flops": flops}

    return step


def figures(folder: Path, given: Optional[Path], quick: bool) -> Iterator[Figure]:
    """Yield what an update costs in updates of plain fine-tuning."""
    rows = 16 if quick else 32
    data = made_up_sets(folder / "bam")
    taught = f"task.teachers=[{data / 'said'}]"
    variants = {
        name: Variant(updates, {"data": data, "overrides": overrides, "rows": rows})
        for name, overrides in (("bam", [*BAM, taught]), ("plain", PLAIN))
    }
    done = paired(variants, rounds=9 if quick else 15, warm_up=3)
    work = done["bam"].rounds[-1]["flops"] / done["plain"].rounds[-1]["flops"]
    note = f"{LAYERS} layers, width 256, {rows} rows of {LENGTH}, {SETS} sets; {work:.3f} times the FLOPs"
    yield cost("bam_step", done["bam"], done["plain"], "s/step", 1.1, note)
