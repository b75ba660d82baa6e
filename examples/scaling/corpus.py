"""Measure text-to-batch throughput on a large corpus and a simulated one of 25 billion tokens.

    python examples/scaling/corpus.py --megabytes 300 --out measured_corpus.jsonl

1. Words of a Zipf law (or the files of --text, repeated) are written and binarised.
2. A tiny model is trained on them, and trained again with a SIGKILL at a random update and a
   resume, in each number of processes; batches, losses and weights are compared.
3. Processes that read sparse files of --billions of tokens make their first batch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm import plugins
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.storage.indexed import MAGIC
from metaseq_lm.data.streams import Shard
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary, special_symbols
from metaseq_lm.runs import manifests
from metaseq_lm.training.parts import build_task

PLUGIN = Path(__file__).with_name("record_batches.py")
MODEL = ["model.encoder_layers=1", "model.encoder_embed_dim=16", "model.encoder_ffn_embed_dim=32"]
MODEL += ["model.encoder_attention_heads=1", "model.max_positions=64"]
ROWS = ["task.tokens_per_sample=64", "task.batch_size=16"]
SAVE_INTERVAL = 5  # updates between checkpoints
DOCUMENT = 1000  # tokens of each simulated document


def write_words(path: Path, size: int, seed: int = 1) -> None:
    """Write lines of 5 to 40 of 50,000 made-up words whose frequencies follow Zipf's law."""
    rng = np.random.default_rng(seed)
    letters = rng.integers(97, 123, (50_000, 9), dtype=np.uint8)
    words = [bytes(row[: 2 + i % 8]).decode() for i, row in enumerate(letters)]
    shares = np.cumsum(1 / np.arange(1, len(words) + 1))
    with open(path, "w") as file:
        while file.tell() < size:
            drawn = iter(np.searchsorted(shares / shares[-1], rng.random(100_000)).tolist())
            for length in rng.integers(5, 41, 4000).tolist():
                file.write(" ".join(words[i] for i in itertools.islice(drawn, length)) + "\n")


def repeat_files(path: Path, sources: list[Path], size: int) -> None:
    """Write the content of `sources` one after the other, again and again up to `size` bytes."""
    with open(path, "wb") as file:
        while file.tell() < size:
            for source in sources:
                file.write(source.read_bytes())


def memory_of(process: int | str, kind: str = "VmHWM") -> int:
    """Return a process's peak memory in bytes, or another line of its status; 0 if it has ended.

    Not getrusage: what it says begins with the peak of the process that started this one.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if kind in line)


def run(arguments: list[str], killed: bool = False, **environment: str) -> tuple[float, int]:
    """Run metaseq-lm, which must succeed unless it is `killed`; return seconds and peak memory."""
    began, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "metaseq_lm", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        while process.poll() is None:
            peak = max(peak, memory_of(process.pid))
            time.sleep(0.05)
        errors.seek(0)
        if killed != (process.returncode != 0):
            sys.exit(f"metaseq-lm ended with status {process.returncode}:\n{errors.read()}")
    return time.perf_counter() - began, peak


class Run:
    """A training run in a folder, and what is compared of it."""

    def __init__(self, data: Path, folder: Path, processes: int, updates: int) -> None:
        self.folder, self.batches = folder, folder.with_name(f"{folder.name}_batches")
        self.batches.mkdir()
        self.command = ["train", str(data), "--save-dir", str(folder), "--nproc", str(processes)]
        self.command += ["--user-dir", str(PLUGIN), "--task", "recorded_masked_lm", *MODEL, *ROWS]
        self.command += [
            f"trainer.max_update={updates}",
            f"trainer.save_interval_updates={SAVE_INTERVAL}",
        ]
        self.command += ["trainer.valid_split=''", "trainer.log_interval=1"]
        self.command += ["engine.tensorboard=false", "engine.threads=1", "engine.device=cpu"]

    def train(self, kill_at: int = -1) -> float:
        """Train to the end, after a SIGKILL at update `kill_at` if any; return the seconds."""
        if kill_at >= 0:
            run(self.command, True, BATCHES=str(self.batches), KILL_AT=str(kill_at))
        return run(self.command, BATCHES=str(self.batches))[0]

    def rows(self) -> dict[int, set[tuple[int, int]]]:
        """Return the rows of each batch, over all processes and attempts."""
        rows: dict[int, set[tuple[int, int]]] = {}
        for path in self.batches.iterdir():
            for line in map(json.loads, path.read_text().splitlines()):
                rows.setdefault(line["number"], set()).update(map(tuple, line["rows"]))
        return rows

    def losses(self) -> dict[int, set[float]]:
        """Return the loss of each update; of one that was made twice both, if they differ."""
        losses: dict[int, set[float]] = {}
        for line in map(json.loads, (self.folder / "log.jsonl").read_text().splitlines()):
            if line["kind"] == "train":
                losses.setdefault(line["update"], set()).add(line["loss"])
        return losses

    def weights(self) -> bytes:
        last = manifests.resolve(str(self.folder), "last")
        return (last / "model.safetensors").read_bytes()


def compare(data: Path, folder: Path, counts: list[int], updates: int) -> list[dict[str, Any]]:
    """Train in each number of processes, undisturbed and killed; return what is equal."""
    figures, first = [], None
    for processes in counts:
        whole = Run(data, folder / f"whole{processes}", processes, updates)
        seconds = whole.train()
        killed = Run(data, folder / f"killed{processes}", processes, updates)
        kill_at = random.randrange(SAVE_INTERVAL + 1, updates)
        killed.train(kill_at)
        first = first or whole
        losses, others = first.losses(), killed.losses()
        figures.append(
            {
                "kind": "kill",
                "processes": processes,
                "updates": updates,
                "seconds": seconds,
                "killed_at": kill_at,
                "same_batches": first.rows() == whole.rows() == killed.rows(),
                "same_losses": whole.losses() == killed.losses(),
                "same_weights": whole.weights() == killed.weights(),
                "loss_difference": max(abs(max(losses[i]) / min(others[i]) - 1) for i in losses),
            }
        )
    return figures


def write_sparse(folder: Path, documents: int) -> None:
    """Write a corpus of `documents` documents whose tokens, all 0, take no room on the disk."""
    symbols = [*special_symbols(), *(f"w{i}" for i in range(30_000))]
    Vocabulary(symbols).save(folder / "dict.txt")
    with open(folder / "train.bin", "wb") as file:
        file.truncate(2 * DOCUMENT * documents)
    with open(folder / "train.idx", "wb") as file:
        file.write(MAGIC + struct.pack("<QBQQ", 1, 8, documents, documents + 1))
        np.full(documents, DOCUMENT, "<i4").tofile(file)
        (np.arange(documents, dtype="<i8") * 2 * DOCUMENT).tofile(file)
        file.truncate(file.tell() + 8 * (documents + 1))


def make_batch(data: Path, mode: str, shard: Shard) -> dict[str, float]:
    """Build the task, its stream and the first batch; return seconds and memory then."""
    config = load_config([f"data={data}", f"task.sample_break_mode={mode}", *MODEL, *ROWS])
    began, cpu = time.perf_counter(), time.process_time()
    stream = build_task(config).build_streams("train")["train"]
    stream.micro_batches(0, shard)
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "peak_bytes": memory_of("self"),
        "own_bytes": memory_of("self", "RssAnon"),
    }


def first_batch(small: Path, large: Path, mode: str, rank: int, world: int) -> None:
    """Print what the first batch of `large` costs a process that has made one of `small`.

    Bytes are those beyond `small`'s; own ones are without the pages of files that lie in memory.
    """
    plugins.load_all()
    shard = Shard(rank, world, 0)
    make_batch(small, mode, shard)
    before, figure = make_batch(small, mode, shard), make_batch(large, mode, shard)
    figure["small_cpu_seconds"] = before["cpu_seconds"]
    for name in ("peak_bytes", "own_bytes"):
        figure[f"further_{name}"] = figure.pop(name) - before[name]
    print(json.dumps(figure))


def simulate(folder: Path, counts: list[int], tokens: float) -> list[dict[str, Any]]:
    """Return what the first batch of a corpus of sparse files costs each of some processes."""
    small, large = folder / "small", folder / "large"
    for data, documents in ((small, 100), (large, int(tokens) // DOCUMENT)):
        data.mkdir()
        write_sparse(data, documents)
    figures = []
    for mode, world in itertools.product(("none", "eos"), counts):
        started = []
        for rank in range(world):
            arguments = [str(small), str(large), mode, str(rank), str(world)]
            command = [sys.executable, __file__, "--first-batch", *arguments]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for rank, process in enumerate(started):
            output, _ = process.communicate()
            assert process.returncode == 0
            figure = {"kind": "first batch", "break_mode": mode, "processes": world, "rank": rank}
            figures.append({**figure, "tokens": int(tokens), **json.loads(output)})
    return figures


def main() -> None:
    """Measure all three; print and keep the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=300, help="of text")
    parser.add_argument("--text", type=Path, nargs="+", help="repeat these files as the text")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--billions", type=float, default=25, help="of simulated tokens")
    parser.add_argument("--folder", type=Path, help="for temporary files")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--first-batch", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_batch:
        small, large, mode, *place = options.first_batch
        first_batch(Path(small), Path(large), mode, *map(int, place))
        return
    lines = []

    def report(figures: list[dict[str, Any]]) -> None:
        lines.extend(figures)
        print("\n".join(map(json.dumps, figures)), flush=True)

    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        text, data, size = folder / "text.txt", folder / "data", int(options.megabytes * 1e6)
        if options.text:
            repeat_files(text, options.text, size)
        else:
            write_words(text, size)
        command = ["preprocess", "--trainpref", str(text), "--destdir", str(data)]
        seconds, peak = run(command)
        tokens = (data / "train.bin").stat().st_size // 2
        figure = {"kind": "preprocess", "text_bytes": text.stat().st_size, "tokens": tokens}
        report([{**figure, "seconds": seconds, "peak_bytes": peak}])
        report(compare(data, folder, options.processes, options.updates))
        report(simulate(folder, options.processes, options.billions * 1e9))
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
