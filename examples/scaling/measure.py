"""Measure the cost of data parallelism on this machine: updates at 1, 2, ... processes, and links.

    python examples/scaling/measure.py --processes 1 2 --out measured.jsonl
    python examples/scaling/measure.py --processes 2 --parallel shard fully_shard --repeat 3

Each count is a fresh group of processes that train the masked-LM task of the package on made-up
tokens, the same number of rows in each process (weak scaling). "ddp" and "fully_shard" are torch's
own, in a plain loop around the same model, rows, random numbers and optimizer. "wait" is the time
in which an update does nothing but wait for other processes, "cpu" the CPU seconds of an update,
the mean of the processes.
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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Work
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from metaseq_lm import plugins
from metaseq_lm.config.transformer import TransformerConfig
from metaseq_lm.core.config import RunConfig, build, options_of
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.streams import Shard
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary, special_symbols
from metaseq_lm.distributed import process_group
from metaseq_lm.distributed.placement.bilevel import blocks_of
from metaseq_lm.distributed.placement.replicated import Replicated
from metaseq_lm.distributed.vectors import local_part
from metaseq_lm.forward.passes import ForwardPasses, weighted_loss
from metaseq_lm.models.transformer.encoder import TransformerLM
from metaseq_lm.training.parts import (
    Parts,
    build_model,
    build_parts,
    build_task,
    peak_memory,
    set_heap,
)
from metaseq_lm.training.prefetch import Prefetcher

VOCAB, LENGTH = 30522, 128
OURS = ("replicate", "shard", "hybrid")
REFERENCES = ("ddp", "fully_shard", "fully_shard_mapped")
KINDS = (*OURS, *REFERENCES, "link", "numbers", "host")


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
    """Adds up the seconds in which Python waits for collectives."""

    def __init__(self) -> None:
        self.seconds = 0.0
        wait = Work.wait

        def timed(work: Work, *args: Any) -> Any:
            began = time.perf_counter()
            result = wait(work, *args)
            self.seconds += time.perf_counter() - began
            return result

        Work.wait = timed


class Ours:
    """The updates of a run of the package."""

    def __init__(self, config: RunConfig) -> None:
        self.run = build_parts(config)
        self.task, self.model = self.run.task, self.run.model
        self.size = sum(p.numel() for p in self.model.parameters())

    def update(self, number: int, batches: Any) -> Tensor:
        """Make an update; return its loss, of all processes."""
        placed = self.run.to_device(batches)
        self.run.engine.begin(number)
        return self.task.update(self.run.engine, self.model, placed)["loss"]

    @property
    def held(self) -> int:
        """The bytes that are held between updates."""
        return held_by(self.run)


class Reference:
    """The same updates in a plain loop around torch's own data parallelism.

    Args:
        config: The configuration of the run that it is compared with.
        kind: "ddp" or "fully_shard", of each block and then of the model; "fully_shard_mapped" with
            the package's setting of the heap for shards.
    """

    def __init__(self, config: RunConfig, kind: str) -> None:
        torch.set_num_threads(config.engine.threads)
        if kind == "fully_shard_mapped":
            set_heap(1 << 20)
        process_group.initialise("cpu")
        self.task = build_task(config)
        self.passes = ForwardPasses(
            config.seed, torch.device("cpu"), False, Replicated(), False, False
        )
        self.model = build_model(self.task, config, "cpu")
        self.size = sum(p.numel() for p in self.model.parameters())
        if kind == "ddp":
            self.model: nn.Module = DistributedDataParallel(self.model)
        else:
            for block in blocks_of(self.model):
                fully_shard(block)
            fully_shard(self.model)
        options = config.optimizer
        settings = {"lr": options.lr, "betas": tuple(options.betas), "eps": options.eps}
        settings |= {"weight_decay": options.weight_decay, "fused": True}
        self.clip_norm = options.clip_norm
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **settings)
        rate = build("schedule", config.schedule)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: rate(n + 1))

    def update(self, number: int, batches: Any) -> Tensor:
        """Make an update of one micro-batch; return this process's loss."""
        [[[batch]]] = batches.values()
        self.passes.begin(number)
        with self.passes.start(self.passes.key(None)) as forward, forward.over(batch):
            loss = weighted_loss(self.task.criterion(self.model, batch), batch.sizes, {})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.detach()

    @property
    def held(self) -> int:
        """The bytes that are held between updates."""
        return held_bytes(list(self.model.parameters()), [self.optimizer])


def median_seconds(function: Callable[[], object], count: int) -> float:
    """Return how long a function takes that all processes call together, the median of some."""
    times = []
    for _ in range(count + 1):
        process_group.from_first(None)
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def links(sizes: list[int]) -> list[dict[str, Any]]:
    """Return the seconds of sums of so many bytes."""
    world = process_group.world_size()
    tensors = {size: torch.zeros(size // 4) for size in sizes}
    return [
        {"kind": "link", "processes": world, "bytes": size}
        | {"seconds": median_seconds(partial(sum_once, tensor), 5)}
        for size, tensor in tensors.items()
    ]


def numbers() -> dict[str, Any]:
    """Return the seconds of a sum of 40 numbers, along the axes of a grid and around all."""
    tensor = torch.zeros(40, dtype=torch.float64)
    times: dict[str, list[float]] = {"grid": [], "ring": []}
    for _ in range(20):  # in turn, so that both meet the same other work
        for name, start in zip(times, (process_group.start_sum_of_hosts, process_group.start_sum)):
            times[name].append(median_seconds(lambda start=start: start(tensor)(), 20))
    seconds = {name: statistics.median(values) for name, values in times.items()}
    return {"kind": "numbers", "processes": process_group.world_size(), **seconds}


def sum_once(tensor: Tensor) -> None:
    """Sum a tensor over the processes and wait for it."""
    process_group.start_sum(tensor)()


def held_bytes(parameters: Sequence[Tensor], optimizers: Sequence[Any]) -> int:
    """Return the bytes of parameters, gradients and moments of this process between passes."""
    states = [s for optimizer in optimizers for s in optimizer.state.values()]
    moments = [local_part(m) for state in states for m in state.values() if m.dim()]
    # A gradient leaves a pass in the placement of its parameter.
    tensors = [*map(local_part, parameters), *map(local_part, parameters), *moments]
    return sum(t.numel() * t.element_size() for t in tensors)


def held_by(run: Parts) -> int:
    """Return the bytes that a run holds between passes."""
    optimizers = run.engine.optimizers.values()
    parameters = [p for optimizer in optimizers for p in optimizer.local]
    return held_bytes(parameters, [optimizer.inner for optimizer in optimizers])


def updates(data: Path, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Make updates after two to warm up; return medians over them, of one kind of training."""
    world = int(os.environ["WORLD_SIZE"])
    overrides = [f"data={data}", "model=bert_small", "model.token_embed_dim=0", "model.segments=0"]
    overrides += [f"task.batch_size={options.rows * world}", "optimizer=adamw"]
    overrides += [f"task.tokens_per_sample={LENGTH}", "trainer.valid_split=''"]
    overrides += ["task.mask_rounding=nearest"]
    overrides += ["engine.threads=1", "engine.tensorboard=false", *options.override]
    narrow_pass(narrow_model())  # libraries take memory when they are first used
    base = peak_memory(torch.device("cpu"))
    trained: Ours | Reference
    if kind in REFERENCES:
        config = load_config(overrides)
        trained = Reference(config, kind)
    else:
        config = load_config([*overrides, f"engine.parallel={kind}"])
        trained = Ours(config)
    waiting = Waiting()
    shard = Shard(process_group.rank(), world, config.engine.micro_batch_size)
    prefetcher = Prefetcher(trained.task.needs, trained.task.build_streams("train"), {}, shard)
    trained.model.train()
    seconds, waits, cpu = [], [], []
    for number, batches in prefetcher.updates(0, options.updates + 2):
        waiting.seconds, began, busy = 0.0, time.perf_counter(), time.process_time()
        loss = trained.update(number, batches)
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - busy)
        waits.append(waiting.seconds)
    peak = peak_memory(torch.device("cpu")) - base  # base: before the model was built
    everyone = process_group.gather_objects((statistics.median(cpu[2:]), peak, float(loss)))
    processes, peaks, losses = zip(*everyone)
    return {
        "kind": "update",
        "parallel": kind,
        "processes": world,
        "rows": options.rows,
        "parameters": trained.size,
        "seconds": statistics.median(seconds[2:]),
        "spread": [min(seconds[2:]), max(seconds[2:])],
        "cpu": statistics.mean(processes),
        # Those of DDP, in C++, are not seen.
        "wait": None if kind == "ddp" else statistics.median(waits[2:]),
        "tokens_per_second": options.rows * world * LENGTH / statistics.median(seconds[2:]),
        "gather": config.engine.gather,
        "model": options_of(config.model),
        "held": trained.held,
        "peak": max(peaks),
        "loss": statistics.mean(losses),
    }


def replica(options: argparse.Namespace) -> None:
    """Measure in this process, one of a group; the first prints a line of JSON for each figure."""
    plugins.load_all()
    [kind] = options.parallel
    if kind == "host":
        lines = [host()]
    elif kind == "link":
        process_group.initialise("cpu")
        lines = links([1 << 12, 1 << 16, 1 << 20, 25 << 20, 100 << 20])
    elif kind == "numbers":
        process_group.initialise("cpu")
        lines = [numbers()]
    else:
        lines = [updates(options.data, kind, options)]
    if process_group.rank() == 0:
        print("\n".join(map(json.dumps, lines)), flush=True)
    process_group.finish()


class Launches(TorchDispatchMode):
    """Counts operations that compute, which are kernels on a GPU; views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [result.alias_info for result in func._schema.returns]
        is_view = any(alias and not alias.is_write for alias in aliases)
        self.count += func.namespace == "aten" and not is_view
        return func(*args, **kwargs or {})


def narrow_model() -> TransformerLM:
    """Return a deep model without width."""
    sizes = {"encoder_layers": 20, "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 32}
    return TransformerLM(TransformerConfig(**sizes, encoder_attention_heads=2), 64).train()


def narrow_pass(model: nn.Module) -> None:
    """Compute gradients of that model and forget them."""
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model(tokens, positions=tokens).sum().backward()
    model.zero_grad()


def host() -> dict[str, Any]:
    """Return the least that a core takes for an operation, and for a collective of fully_shard.

    Of a narrow model, in a group of this process alone.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = narrow_model()
    run = partial(narrow_pass, model)

    def cpu_seconds() -> float:
        times = []
        for _ in range(60):
            began = time.process_time()
            run()
            times.append(time.process_time() - began)
        return min(times)

    with Launches() as launches:
        run()
    unsharded = cpu_seconds()
    blocks = blocks_of(model)
    for module in (*blocks, model):
        fully_shard(module)
    collectives = 3 * len(blocks) + 2  # the outermost one stays gathered
    sharded = cpu_seconds()
    dist.destroy_process_group()
    figures = {
        "launch": unsharded / launches.count,
        "collective": (sharded - unsharded) / collectives,
    }
    return {"kind": "host", "launches": launches.count, **figures}


def group(count: int, arguments: list[str]) -> list[dict[str, Any]]:
    """Run this program in `count` processes; return what the first printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={count}", __file__, "--replica", *arguments]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def median_of(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of lines of equal runs."""
    result = dict(lines[0])
    for key in ("seconds", "cpu", "wait", "tokens_per_second", "peak"):
        if result.get(key) is not None:
            result[key] = statistics.median(line[key] for line in lines)
    if "spread" in result:
        lows, highs = zip(*(line["spread"] for line in lines))
        result["spread"] = [min(lows), max(highs)]
    return result | {"runs": len(lines)}


def kinds_of(count: int, options: argparse.Namespace) -> list[str]:
    """Return what to measure in a group of so many processes, in turn."""
    alone = [kind for kind in options.parallel if kind in ("replicate", "host")]
    return (options.parallel if count > 1 else alone or ["replicate"]) * options.repeat


def main() -> None:
    """Measure every count of processes; print and keep the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, default=8, help="rows of 128 tokens in each process")
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument(
        "--parallel",
        nargs="+",
        choices=KINDS,
        default=["replicate", "link", "host"],
        help="of several processes; of one only replicate and host",
    )
    parser.add_argument(
        "--repeat", type=int, default=1, help="runs of each kind, in turn; medians of them"
    )
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        help="of the configuration, such as model=bert_base",
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--replica", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica:
        replica(options)
        return
    archive: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = corpus(Path(folder), 4000)
        for count in options.processes:
            arguments = ["--rows", str(options.rows), "--updates", str(options.updates)]
            arguments += [f"--override={override}" for override in options.override]
            # A group for each: the peak of memory is that of a process's whole life.
            runs: dict[str, list[list[dict[str, Any]]]] = {}
            for kind in kinds_of(count, options):
                lines = group(count, [*arguments, "--data", str(data), "--parallel", kind])
                runs.setdefault(kind, []).append(lines)
                print(*map(json.dumps, lines), sep="\n", flush=True)
            archive += [median_of(lines) for groups in runs.values() for lines in zip(*groups)]
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in archive))


if __name__ == "__main__":
    main()
