"""The trainer's updates, one step at a time, and made-up data to train on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from timing import Step

from metaseq_lm import plugins
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.storage.manifest import LABELLED, Manifest
from metaseq_lm.data.streams import Shard
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary, special_symbols
from metaseq_lm.engine.engine import Logs
from metaseq_lm.runs.flops import FlopMeter
from metaseq_lm.training.parts import Parts, build_parts, build_task
from metaseq_lm.training.prefetch import Prefetcher

ALWAYS = ("engine.device=cpu", "engine.threads=1", "engine.tensorboard=false")


def configured(
    data: Path, overrides: list[str], folder: Path | None = None, config: str | None = None
) -> RunConfig:
    """Return the configuration of a run on the CPU with one thread, unless overridden."""
    plugins.load_all()
    options = [f"data={data}", *ALWAYS, *overrides]
    return load_config(options, str(folder) if folder else None, config)


@dataclass
class MeteredParts:
    """The parts of a run, and a meter for the FLOPs of its updates."""

    parts: Parts
    flops: FlopMeter = field(default_factory=FlopMeter)

    def __getattr__(self, name: str) -> Any:
        """Pass on config, task, model and engine."""
        return getattr(self.parts, name)


def build(
    data: Path, overrides: list[str], folder: Path | None = None, config: str | None = None
) -> MeteredParts:
    """Return a run that writes nothing."""
    return MeteredParts(build_parts(configured(data, overrides, folder, config)))


def first_batches(data: Path, overrides: list[str], count: int) -> list[dict[str, Any]]:
    """Return the first batches of the masked_lm task, without the process setup of a run."""
    task = build_task(configured(data, overrides))
    stream = task.build_streams("train")["train"]
    return [stream.micro_batches(number, Shard())[0] for number in range(count)]


def fetched(run: MeteredParts) -> Iterator[tuple[int, dict]]:
    """Yield the batches of each update as the trainer gets them."""
    streams = run.task.build_streams("train")
    for update, batches in Prefetcher(run.task.needs, streams, {}, run.shard).updates(0, 1 << 40):
        yield (
            update,
            {
                name: [run.engine.to_device(batch) for batch in stream]
                for name, stream in batches.items()
            },
        )


def train(run: MeteredParts, update: int, batches: dict[str, Any], count: bool = True) -> Logs:
    """Make one update like the trainer; with `count`, also count its FLOPs."""
    run.engine.begin(update)
    with run.flops.count(batches) if count else contextlib.nullcontext():
        return run.task.update(run.engine, run.model, batches)


def updates(data: Path, overrides: list[str], rows: int) -> Step:
    """Make updates of a task, data included."""
    run = build(data, [*overrides, f"task.batch_size={rows}"])
    run.model.train()
    source = fetched(run)

    def step() -> dict[str, Any]:
        counted = run.flops.total
        logs = train(run, *next(source))
        flops = run.flops.total - counted
        return {"amount": 1, "loss": float(logs["loss"]), "flops": flops}

    return step


def made_up_set(
    place: Path, vocab: int, length: int, sizes: dict[str, int], seed: int, classes: int = 2
) -> None:
    """Write a labelled set of random texts of `length` tokens; 0 `classes` means real values.

    `sizes` counts the rows of each split.
    """
    place.mkdir()
    draw = np.random.default_rng(seed)
    manifest = Manifest(LABELLED, {"name": "word", "hash": "0", "size": vocab}, {}, "")
    for split, rows in sizes.items():
        texts = draw.integers(len(special_symbols()), vocab, (rows, length))
        gold = draw.integers(0, 2, (rows, 1))
        kinds: dict[str, tuple[Any, type]] = {f"{split}.input0": (texts, np.uint16)}
        kinds[f"{split}.label"] = (gold, np.int32 if classes else np.float64)
        for prefix, (values, kind) in kinds.items():
            with IndexedWriter(place / prefix, np.dtype(kind)) as writer:
                for row in values:
                    writer.add(row.astype(kind))
            manifest.add_files(place, [f"{prefix}.bin", f"{prefix}.idx"])
        manifest.splits[split] = {"rows": rows}
    labels = ["no", "yes"][:classes]
    manifest.details = {"labels": labels, "regression": not classes, "inputs": 1}
    manifest.details |= {"form": "single", "benchmark": ""}
    manifest.save(place)


def made_up_corpus(folder: Path, vocab: int, tokens: int) -> Path:
    """Write random tokens as one document, and their vocabulary; return the folder."""
    folder.mkdir(exist_ok=True)
    specials = special_symbols()
    words = [f"w{i}" for i in range(vocab - len(specials))]
    Vocabulary([*specials, *words]).save(folder / "dict.txt")
    with IndexedWriter(folder / "train", "<u2") as writer:
        writer.add(np.random.default_rng(1).integers(len(specials), vocab, tokens, dtype="<u2"))
    return folder


def made_up_lines(folder: Path, vocab: int, lengths: np.ndarray) -> Path:
    """Write a corpus of random tokens, a document for each of `lengths`; return the folder."""
    made_up_corpus(folder, vocab, 1)
    draw = np.random.default_rng(1)
    with IndexedWriter(folder / "train", "<u2") as writer:
        for length in lengths:
            writer.add(draw.integers(len(special_symbols()), vocab, length, dtype="<u2"))
    return folder


def real_tokens(batch: Any) -> int:
    """Return the number of tokens in a batch other than padding."""
    padding = batch.padding
    return batch.tokens.numel() if padding is None else int((~padding).sum())
