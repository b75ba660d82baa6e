"""Updates as the trainer makes them, one step at a time; and made-up data to train on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import numpy as np
from omegaconf import DictConfig

from metaseq_lm import plugins
from metaseq_lm.config import load_config
from metaseq_lm.data.indexed import IndexedWriter
from metaseq_lm.data.streams import Shard
from metaseq_lm.data.vocabulary import Vocabulary, special_symbols
from metaseq_lm.engine import Logs
from metaseq_lm.fetcher import Fetcher
from metaseq_lm.run import Run, build_task

ALWAYS = ("engine.device=cpu", "engine.threads=1", "engine.tensorboard=false")


def configured(
    data: Path, overrides: list[str], folder: Optional[Path] = None, config: Optional[str] = None
) -> DictConfig:
    """Return the configuration of a run on the CPU with one thread, if the overrides say nothing else."""
    plugins.load_all()
    options = [f"data={data}", *ALWAYS, *overrides]
    return load_config(options, str(folder) if folder else None, config)


def build(
    data: Path, overrides: list[str], folder: Optional[Path] = None, config: Optional[str] = None
) -> Run:
    """Return a run that writes nothing."""
    return Run(configured(data, overrides, folder, config), dry_run=True)


def first_batches(data: Path, overrides: list[str], count: int) -> list[dict[str, Any]]:
    """Return the first batches of the masked_lm task, without what a run sets up in its process."""
    task = build_task(configured(data, overrides))
    stream = task.build_streams("train")["train"]
    return [stream.micro_batches(number, Shard())[0] for number in range(count)]


def fetched(run: Run) -> Iterator[tuple[int, dict]]:
    """Yield the batches of update after update, as the trainer gets them."""
    trainer = run.trainer
    streams = trainer.task.build_streams("train")
    for update, batches in Fetcher(trainer.task, streams, {}, trainer.shard, 0).updates(0, 1 << 40):
        yield update, {
            name: [trainer.engine.to_device(batch) for batch in stream]
            for name, stream in batches.items()
        }


def train(run: Run, update: int, batches: dict[str, Any], count: bool = True) -> Logs:
    """Make one update like the trainer; with `count` its FLOPs are counted too."""
    trainer = run.trainer
    trainer.engine.begin(update)
    with trainer.flops.count(batches) if count else contextlib.nullcontext():
        return trainer.task.update(trainer.engine, trainer.model, batches)


def made_up_corpus(folder: Path, vocab: int, tokens: int) -> Path:
    """Write random tokens as one document, and their vocabulary; return the folder."""
    folder.mkdir(exist_ok=True)
    specials = special_symbols()
    words = [f"w{i}" for i in range(vocab - len(specials))]
    Vocabulary([*specials, *words]).save(folder / "dict.txt")
    with IndexedWriter(folder / "train", "<u2") as writer:
        writer.add(np.random.default_rng(1).integers(len(specials), vocab, tokens, dtype="<u2"))
    return folder
