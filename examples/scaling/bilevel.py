"""Measure the memory of a bilevel update on this machine, on whole and on sharded parameters.

    python examples/scaling/bilevel.py --processes 1 2 4 > measured.jsonl
    python examples/scaling/bilevel.py --table measured.jsonl

An update of soft labels (meta pseudo labels) differentiates the query loss through two virtual
steps of a student, into its teacher. Each count of processes and placement is a fresh group. The
global batch is the same in all; "differs" is the largest difference between their weights after the
updates and those of the first line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import LENGTH, VOCAB, corpus, held_by

from metaseq_lm import plugins
from metaseq_lm.core.loading import load_config
from metaseq_lm.distributed import process_group
from metaseq_lm.methods.meta_pseudo_label.episodes import UnlabelledBatch
from metaseq_lm.training.parts import build_parts, peak_memory

STREAMS = ("unlabelled", "support", "query")
MASKED = 20  # positions of a row


def rows_of_update(rows: int, vocabulary: int) -> UnlabelledBatch:
    """Return this process's part of `rows` made-up masked rows, one micro-step."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(10, vocabulary, (1, rows, LENGTH), generator=generator)
    positions = torch.stack([torch.randperm(LENGTH, generator=generator) for _ in range(rows)])
    positions = positions[None, :, :MASKED]
    chosen = slice(process_group.rank(), None, process_group.world_size())
    tokens, positions = tokens[:, chosen], positions[:, chosen]
    count = tokens.shape[1]
    return UnlabelledBatch(
        tokens=tokens,
        original=tokens,
        positions=positions,
        targets=tokens.gather(-1, positions),
        sizes={
            "targets": torch.tensor([count * MASKED]),
            "tokens": torch.tensor([count * LENGTH]),
            "rows": torch.tensor([count]),
        },
        rows=np.arange(rows)[chosen][None],
    )


def replica(options: argparse.Namespace) -> None:
    """Measure in this process, one of a group; the first prints a line of JSON."""
    plugins.load_all()
    overrides = [f"data={options.data}", "task=meta_pseudo_label", "task.labelled=[any]"]
    overrides += ["criterion=meta_pseudo_label_soft", "task.batches_per_update=1"]
    overrides += ["trainer.valid_split=''", "engine.threads=1", "engine.tensorboard=false"]
    base = peak_memory(torch.device("cpu"))
    run = build_parts(load_config([*overrides, *options.override]))
    batch = rows_of_update(options.rows, options.vocabulary)
    run.model.train()
    began = time.process_time()
    for update in range(options.updates):
        run.engine.begin(update)
        run.task.update(run.engine, run.model, {name: [[batch]] for name in STREAMS})
    seconds = (time.process_time() - began) / options.updates
    peaks = process_group.gather_objects(peak_memory(run.engine.device) - base)
    with run.engine.whole():
        weights = torch.cat([p.detach().reshape(-1) for p in run.model.parameters()])
    if process_group.rank() == 0:
        first = Path(options.data, "weights.pt")
        if not first.exists():
            torch.save(weights, first)
        line: dict[str, Any] = {"processes": process_group.world_size()}
        line |= {"parallel": run.config.engine.parallel, "parameters": len(weights)}
        line |= {"held": held_by(run), "peak": max(peaks)}
        line["cpu_seconds"] = seconds
        line["differs"] = (weights - torch.load(first, weights_only=True)).abs().max().item()
        print(json.dumps(line), flush=True)
    process_group.finish()


def table(archive: Path) -> Iterator[str]:
    """Yield the lines of a table of what was measured."""
    yield "parameters  processes  placement  held MB  peak MB  CPU s  differs"
    for text in archive.read_text().splitlines():
        line = json.loads(text)
        yield (
            f"{line['parameters']:10,}  {line['processes']:9}  {line['parallel']:9}  "
            f"{line['held'] / 1e6:7.1f}  {line['peak'] / 1e6:7.1f}  {line['cpu_seconds']:5.1f}  "
            f"{line['differs']:7.1e}"
        )


def main() -> None:
    """Measure every count of processes and placement; print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, default=4, help="rows of 128 tokens in all")
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=VOCAB)
    parser.add_argument("--parallel", nargs="+", default=["replicate", "shard"])
    parser.add_argument("--override", action="append", default=[], help="of the configuration")
    parser.add_argument("--table", type=Path, help="print what a file of such lines has")
    parser.add_argument("--replica", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica:
        replica(options)
        return
    if options.table:
        print("\n".join(table(options.table)))
        return
    arguments = ["--rows", str(options.rows), "--updates", str(options.updates)]
    arguments += ["--vocabulary", str(options.vocabulary)]
    arguments += [f"--override={override}" for override in options.override]
    with tempfile.TemporaryDirectory() as folder:
        data = corpus(Path(folder), 100, options.vocabulary)
        for count in options.processes:
            for parallel in options.parallel if count > 1 else ["replicate"]:
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                command += [f"--nproc-per-node={count}", __file__, "--replica"]
                command += [*arguments, "--data", str(data)]
                command += [f"--override=engine.parallel={parallel}"]
                subprocess.run(command, env=dict(os.environ, OMP_NUM_THREADS="1"), check=True)


if __name__ == "__main__":
    main()
