"""The runs of a sweep against `metaseq-lm train` for each: the cost of starting a run.

The runs train the laptop division's model in its small world with masked LM, for one update and for
400. The start of the sweep counts and is shared by its runs.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from timing import Figure, Measured, cost

PROGRAM = [sys.executable, "-m", "metaseq_lm"]
WORLD = ["--world", "quad", "--world-seed", "11", "--world-documents", "2000"]
MODEL = [
    *("task=masked_lm", "criterion=masked_lm", "model=modern", "model.encoder_layers=2"),
    *("model.encoder_embed_dim=64", "model.encoder_ffn_embed_dim=96", "model.max_positions=64"),
    *("model.encoder_attention_heads=4", "task.sample_break_mode=eos", "task.batch_size=8"),
    *(
        "task.tokens_per_sample=40",
        "task.valid_size=256",
        "schedule=wsd",
        "schedule.decay_ratio=.3",
    ),
    *("schedule.warmup_ratio=0.1", "trainer.save_interval_updates=0", "engine.tensorboard=false"),
]


def call(commands: Sequence[Sequence[str]], folder: Path) -> dict[str, Any]:
    """Run commands one after the other in an empty folder; return their CPU seconds and time."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    for command in commands:
        subprocess.run([*PROGRAM, *command], cwd=folder, stdout=subprocess.DEVNULL, check=True)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu": cpu, "wall": wall}


def figures(folder: Path, given: Path | None, quick: bool) -> Iterator[Figure]:
    """Yield the CPU seconds of a run in a sweep as shares of `train`'s."""
    data, out = folder / "world", folder / "sweep"
    call([["preprocess", *WORLD, "--destdir", str(data)]], out)
    runs = 4 if quick else 16
    seeds = [str(seed) for seed in range(1, runs + 1)]
    for updates, target in ((1, 0.4), (400, 0.75)):
        words = [str(data), *MODEL, f"trainer.max_update={updates}"]
        sweep = [["sweep", *words, "--out", "sweep", "--seeds", ",".join(seeds)]]
        single = [["train", *words, "--save-dir", seed, "--seed", seed] for seed in seeds]
        rounds = [(call(sweep, out), call(single, out)) for _ in range(1 if quick else 3)]
        ours, reference = (
            Measured([{"amount": runs, **result} for result in results], 0)
            for results in zip(*rounds)
        )
        note = f"{runs} runs of {updates} updates, the start of the sweep among them"
        yield cost(f"sweep_run_{updates}", ours, reference, "s", target, note)
