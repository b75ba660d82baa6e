"""Measure the cost of data parallelism on this machine: updates at 1, 2, ... processes, and links.

    python examples/scaling/measure.py --processes 1 2 --out measured.json

Each count is a fresh group of processes that train the masked-LM task of the package on made-up
tokens, the same number of rows in each process (weak scaling). "wait" is the time in which an
update does nothing but wait for a sum over the processes; "one message" has no overlap.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from metaseq_lm import plugins
from metaseq_lm.core.config import options_of
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary, special_symbols
from metaseq_lm.distributed import placement, process_group
from metaseq_lm.distributed.process_group import Pending
from metaseq_lm.training.parts import Parts, build_parts, peak_memory
from metaseq_lm.training.prefetch import Prefetcher

VOCAB, LENGTH = 30522, 128


def corpus(folder: Path, rows: int, size: int = VOCAB) -> Path:
    """Write random tokens as one document, and their vocabulary of a size."""
    specials = special_symbols()
    words = [f"w{i}" for i in range(size - len(specials))]
    Vocabulary([*specials, *words]).save(folder / "dict.txt")
    with IndexedWriter(folder / "train", "<u2") as writer:
        tokens = np.random.default_rng(1).integers(len(specials), size, rows * LENGTH, dtype="<u2")
        writer.add(tokens)
    return folder


class Waiting:
    """Adds up the seconds in which the main thread waits for sums over the processes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        wait = Pending.__call__

        def timed(pending: Pending) -> None:
            began = time.perf_counter()
            wait(pending)
            self.seconds += time.perf_counter() - began

        Pending.__call__ = timed


class Forgetful(dict):
    """Takes the place of the order of layers, and never knows which is next."""

    def get(self, key: Any, default: Any = None) -> Any:
        return default


def link(sizes: list[int]) -> list[dict[str, float]]:
    """Return seconds of an all-reduce of so many bytes, the median of five."""
    found = []
    for size in sizes:
        flat = torch.zeros(size // 4)
        times = []
        for _ in range(6):
            process_group.from_first(None)
            began = time.perf_counter()
            process_group.start_sum(flat)()
            times.append(time.perf_counter() - began)
        found.append({"bytes": size, "seconds": statistics.median(times[1:])})
    return found


def held_bytes(run: Parts) -> dict[str, int]:
    """Return the bytes of parameters, gradients and moments of this process between passes."""
    optimizers = run.engine.optimizers.values()
    parameters = [p for o in optimizers for p in o.local]
    states = [s for o in optimizers for s in o.local_state()["state"].values()]
    moments = [m for state in states for m in state.values() if m.dim()]
    size = sum(p.numel() * p.element_size() for p in parameters)
    # A gradient leaves a pass in the placement of its parameter.
    return {
        "parameters": size,
        "gradients": size,
        "moments": sum(m.numel() * m.element_size() for m in moments),
    }


def sizes_of(run: Parts) -> dict[str, Any]:
    """Return the options of the model."""
    return options_of(run.config.model)


def updates(
    data: Path, rows: int, precision: str, count: int, in_turn: bool, further: Sequence[str]
) -> dict[str, Any]:
    """Make `count` updates after two to warm up; return medians over them."""
    world = int(os.environ["WORLD_SIZE"])
    options = [f"data={data}", "model=bert_small", "model.token_embed_dim=0", "model.segments=0"]
    options += [f"task.batch_size={rows * world}", *further]
    options += [f"task.tokens_per_sample={LENGTH}", "trainer.valid_split=''"]
    options += [f"engine.precision={precision}", "engine.threads=1", "engine.tensorboard=false"]
    base = peak_memory(torch.device("cpu"))
    run = build_parts(load_config(options))
    if in_turn:
        run.engine.placement.order = Forgetful()
    waiting = Waiting()
    prefetcher = Prefetcher(run.task.needs, run.task.build_streams("train"), {}, run.shard)
    run.model.train()
    seconds, waits = [], []
    for update, batches in prefetcher.updates(0, count + 2):
        waiting.seconds, began = 0.0, time.perf_counter()
        placed = {n: [run.engine.to_device(b) for b in s] for n, s in batches.items()}
        run.engine.begin(update)
        run.task.update(run.engine, run.model, placed)
        seconds.append(time.perf_counter() - began)
        waits.append(waiting.seconds)
    parameters = sum(p.numel() for p in run.model.parameters())
    return {
        "processes": world,
        "rows": rows,
        "precision": precision,
        "parameters": parameters,
        "bytes": 4 * parameters,
        "seconds": statistics.median(seconds[2:]),
        "spread": [min(seconds[2:]), max(seconds[2:])],
        "wait": statistics.median(waits[2:]),
        "tokens_per_second": rows * world * LENGTH / statistics.median(seconds[2:]),
        "gather": run.config.engine.gather,
        "model": sizes_of(run),
        "held": held_bytes(run),
        "base": base,  # before the model was built
        "peak": peak_memory(run.engine.device),
    }


def replica(options: argparse.Namespace) -> None:
    """Measure in this process, one of a group; the first prints a line of JSON for each figure."""
    plugins.load_all()
    data = Path(options.data)
    lines = []
    for buckets in (True, False):
        if not buckets:
            placement.BUCKET_BYTES = 1 << 60
        for precision in options.precisions:
            settings = (precision, options.updates, options.in_turn, options.override)
            figure = updates(data, options.rows, *settings)
            lines.append({"kind": "update", "overlap": buckets, **figure})
        if process_group.world_size() == 1 or options.no_link:
            break
    if process_group.world_size() > 1 and not options.no_link:
        sizes = [1 << 12, 1 << 16, 1 << 20, 25 << 20, 100 << 20]
        lines += [
            {"kind": "link", "processes": process_group.world_size(), **f} for f in link(sizes)
        ]
    if process_group.rank() == 0:
        print("\n".join(map(json.dumps, lines)), flush=True)
    process_group.finish()


def group(count: int, arguments: list[str]) -> list[dict[str, Any]]:
    """Run this program in `count` processes; return what the first printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={count}", __file__, "--replica", *arguments]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    """Measure every count of processes; print and keep the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, default=8, help="rows of 128 tokens in each process")
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--precisions", nargs="+", default=["fp32"])
    parser.add_argument("--parallel", nargs="+", default=["replicate"], help="placements")
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        help="of the configuration, such as model=bert_base",
    )
    parser.add_argument("--no-link", action="store_true", help="do not measure the link")
    parser.add_argument("--in-turn", action="store_true", help="gather layers when they are called")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--replica", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica:
        replica(options)
        return
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        data = corpus(Path(folder), 4000)
        for count in options.processes:
            arguments = ["--rows", str(options.rows), "--updates", str(options.updates)]
            arguments += ["--precisions", *options.precisions, "--data", str(data)]
            arguments += [f"--override={override}" for override in options.override]
            # A group for each placement: the peak of memory is that of a process's whole life.
            for turn, parallel in enumerate(options.parallel if count > 1 else ["replicate"]):
                more = [f"--override=engine.parallel={parallel}"]
                more += ["--no-link"] * (options.no_link or turn > 0)
                more += ["--in-turn"] * options.in_turn
                for line in group(count, [*arguments, *more]):
                    print(json.dumps({"parallel": parallel, **line}), flush=True)
                    lines.append({"parallel": parallel, **line})
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
