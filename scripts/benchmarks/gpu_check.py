"""Stages of scripts/gpu-check: each in a process of its own with a limit, its rows beside what was
predicted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import gpu_model
import numpy as np
import torch
import torch.distributed as dist
from gpu_model import H100, Card, Counts
from gpu_speed import copy_rate, launch_seconds, matmul_rate, measured, share_of
from timing import versions
from training import build, fetched, made_up_corpus, made_up_lines, train

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ARCHIVE = HERE / "measured_gpu.jsonl"
COUNTED = HERE / "counted_gpu.jsonl"
FITTED = "ead9730f"  # the commit with the archived rows that predictions are fitted to
VOCAB = 30522
TIME = 480  # seconds for all stages

BERT = ["task=masked_lm", "model=bert_base", "task.mask_rounding=nearest"]
ELECTRA = ["task=electra", "criterion=electra_rtd", "model=electra_base"]
MODERN = ["task=masked_lm", "model=modern_base", "task.mask_rounding=nearest"]
SIZES = ["task.batch_size=32", "task.tokens_per_sample=512", "engine.precision=bf16"]
# 2,048 tokens an update, as in the leagues that shared a GPU (docs/results/speed.md).
SMALL = ["task=masked_lm", "model=modern_tiny", "task.mask_rounding=nearest"]
SMALL += ["task.batch_size=16", "task.tokens_per_sample=128"]
NO_DROPOUT = ["model.dropout=0", "model.attention_dropout=0"]
COMPILED = "engine.compile=true"
CASES: dict[str, list[str]] = {
    "gpu_mlm": [*BERT, *SIZES],
    "gpu_mlm_no_dropout": [*BERT, *SIZES, *NO_DROPOUT],
    "gpu_modern_no_dropout": [*MODERN, *SIZES, *NO_DROPOUT],
    "gpu_modern_packed": [*MODERN, *SIZES, *NO_DROPOUT, "task.sample_break_mode=documents"],
    "gpu_electra": [*ELECTRA, *SIZES],
    "gpu_electra_no_dropout": [*ELECTRA, *SIZES, *NO_DROPOUT],
    "gpu_mlm_compiled": [*BERT, *SIZES, *NO_DROPOUT, COMPILED],
    "gpu_electra_compiled": [*ELECTRA, *SIZES, *NO_DROPOUT, COMPILED],
    "gpu_modern_compiled": [*MODERN, *SIZES, *NO_DROPOUT, COMPILED],
}
SIDE_BY_SIDE = (1, 8)  # processes


@dataclass(frozen=True)
class Row:
    """A row of the report.

    Attributes:
        name: Its name.
        unit: The unit of its values; "" for a row on correctness.
        predicted: The predicted value; 1 for "passes".
        value: The measured value; None before the measurement.
        note: Further information.
    """

    name: str
    unit: str
    predicted: float
    value: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Stage:
    """A part of the check.

    Attributes:
        name: Its name.
        limit: Its limit in seconds.
        text: What it does.
        rows: Returns its rows, with predictions for a card.
        run: Yields its rows with values, in a separate process; takes the card.
    """

    name: str
    limit: int
    text: str
    rows: Callable[[Card], list[Row]]
    run: Callable[[Card], Iterator[dict[str, Any]]]


# -------------------------------------------------------------------- predictions


def archived(path: Path = ARCHIVE, commit: str = FITTED) -> dict[str, float]:
    """Return the tokens/s of the archived rows of a commit, by name."""
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return {line["name"]: line["ours"] for line in lines if line.get("commit") == commit}


def counted(path: Path = COUNTED) -> dict[str, Counts]:
    """Return the counts of all cases' updates, as written by `--count`."""
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return {line.pop("name"): Counts(**line) for line in lines}


def factor_of(name: str) -> float:
    """Return the factor for a case, from its family's archived row without dropout.

    A family without such a row, or with changed code, takes the median of the others.
    """
    counts, kind = counted(), "_compiled" if name.endswith("_compiled") else "_no_dropout"
    families = ("gpu_mlm", "gpu_electra")
    matching = [family for family in families if name.startswith(family)]
    rows = [family + kind for family in matching or families]
    speeds = archived()
    return gpu_model.fitted(H100, [(counts[row], speeds[row]) for row in rows])


def predictions(name: str, card: Card) -> list[Row]:
    """Return the rows of a case: speed and memory."""
    counts = counted()[name]
    speed = counts.tokens / card.seconds(counts, factor_of(name))
    note = (
        f"{counts.launches} kernels, {counts.bytes / 1e9:.1f} GB, {counts.flops / 1e12:.1f} TFLOP"
    )
    return [
        Row(name, "tokens/s", speed, note=note),
        Row(f"{name}_memory", "GB", counts.peak / 1e9),
    ]


def side_by_side_rows(card: Card) -> list[Row]:
    """Return the rows of small models, limited by the host per process and by the card in total."""
    counts, factor = counted()["small"], factor_of("small")
    one = counts.tokens / card.seconds(counts, factor)
    most = counts.tokens / (factor * card.floor(counts))
    return [
        Row(f"gpu_small_{number}", "tokens/s", min(number * one, most)) for number in SIDE_BY_SIDE
    ]


# -------------------------------------------------------------------- stages


def row(name: str, value: float, note: str = "") -> dict[str, Any]:
    """Return a measured row."""
    return {"name": name, "value": value, "note": note}


def card_rows(card: Card) -> list[Row]:
    return [
        Row("card_rate", "TFLOP/s", card.rate / 1e12),
        Row("card_bandwidth", "TB/s", card.bandwidth / 1e12),
        Row("card_launch", "µs", card.launch * 1e6),
    ]


def run_card(card: Card) -> Iterator[dict[str, Any]]:
    """Measure the rates of the card and its host."""
    yield row("card_rate", matmul_rate("cuda", 8192, 5) / 1e12, "of an 8192 x 8192 bf16 product")
    yield row("card_bandwidth", copy_rate("cuda", 1 << 30, 10) / 1e12, "of a copy of 1 GiB")
    yield row("card_launch", launch_seconds("cuda", 5000) * 1e6, "of the host for x.add_(1)")


def pytest_stage(name: str, chosen: str) -> Callable[[Card], Iterator[dict[str, Any]]]:
    """Return a function that runs the tests marked gpu that match a pytest expression."""

    def run(card: Card) -> Iterator[dict[str, Any]]:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-k", chosen, "tests"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout, file=sys.stderr)
        lines = done.stdout.strip().splitlines() or ["no output"]
        yield row(name, float(done.returncode == 0), lines[-1])

    return run


def data_of(name: str, folder: Path) -> Path:
    """Write made-up text for a case and return its folder."""
    if name.endswith("_packed"):
        lengths = np.random.default_rng(2).integers(16, 256, 16000)
        return made_up_lines(folder / name, VOCAB, lengths)
    return made_up_corpus(folder / name, VOCAB, 510 * 4000)


def run_cases(*names: str) -> Callable[[Card], Iterator[dict[str, Any]]]:
    """Return a function that measures cases."""

    def run(card: Card) -> Iterator[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                torch.cuda.reset_peak_memory_stats()
                overrides = [*CASES[name], "engine.device=cuda"]
                rounds = measured(data_of(name, Path(folder)), overrides, 3, 10)
                memory = torch.cuda.max_memory_allocated() / 1e9
                figure = share_of(name, rounds, card.rate, ", ".join(CASES[name]))
                yield figure.as_json() | row(name, figure.ours, figure.note)
                yield row(f"{name}_memory", memory)
                torch.cuda.empty_cache()

    return run


def small_updates(
    folder: Path, overrides: list[str], barrier: Any, seconds: float, results: Any
) -> None:
    """Put the tokens/s of a run that starts together with others and goes on for some seconds."""
    torch.set_num_threads(1)
    run = build(folder, overrides)
    run.model.train()
    source = fetched(run)
    for _ in range(5):
        train(run, *next(source))
    barrier.wait()
    began, tokens = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        update, batches = next(source)
        train(run, update, batches)
        every = (micro for stream in batches.values() for batch in stream for micro in batch)
        tokens += sum(micro.tokens.numel() for micro in every)
        if not update % 20 and run.engine.device.type == "cuda":
            torch.cuda.synchronize()  # otherwise the host would only queue work
    if run.engine.device.type == "cuda":
        torch.cuda.synchronize()
    results.put(tokens / (time.perf_counter() - began))


def side_by_side(folder: Path, overrides: list[str], number: int, seconds: float) -> float:
    """Return the total tokens/s of a number of equal runs, each in its own process."""
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(number), spawn.Queue()
    arguments = (folder, overrides, barrier, seconds, results)
    processes = [spawn.Process(target=small_updates, args=arguments) for _ in range(number)]
    for process in processes:
        process.start()
    total = sum(results.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()
    return total


def run_side_by_side(card: Card) -> Iterator[dict[str, Any]]:
    """Measure small models that share the card."""
    with tempfile.TemporaryDirectory() as folder:
        data = made_up_corpus(Path(folder) / "small", 1000, 126 * 4000)
        for number in SIDE_BY_SIDE:
            speed = side_by_side(data, [*SMALL, "engine.device=cuda"], number, 4.0)
            yield row(f"gpu_small_{number}", speed, f"{os.cpu_count()} cores")


def reduce_between(rank: int, folder: str, device: str, results: Any) -> None:
    """Sum tensors over two processes; put whether sums are correct, and bytes per second."""
    backend = "nccl" if device == "cuda" else "gloo"
    target = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(target)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    right = True
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        parts = [torch.arange(1000, device=target).to(dtype) + number for number in range(2)]
        tensor = parts[rank].clone()
        dist.all_reduce(tensor)
        right = right and torch.equal(tensor, parts[0] + parts[1])
    large = torch.ones(1 << 24, device=target)
    seconds = []
    for _ in range(5):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(large)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    results.put((right, large.nbytes / statistics.median(seconds)))
    dist.destroy_process_group()


def sums_between(device: str) -> tuple[bool, float]:
    """Return whether two processes sum correctly, and the bytes per second of 64 MiB in fp32."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            spawn.Process(target=reduce_between, args=(rank, folder, device, results))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        outcomes = [results.get(timeout=300) for _ in processes]
        for process in processes:
            process.join()
    return all(right for right, _ in outcomes), min(speed for _, speed in outcomes)


def run_nccl(card: Card) -> Iterator[dict[str, Any]]:
    """Sum between two cards, if there are two."""
    if torch.cuda.device_count() < 2:
        print("nccl: one card, skipped", file=sys.stderr)
        return
    right, speed = sums_between("cuda")
    yield row("nccl", float(right), "sums of fp32, bf16 and int64")
    yield row("nccl_speed", speed / 1e9, "64 MiB of fp32 summed over two cards")


def rows_of(*names: str) -> Callable[[Card], list[Row]]:
    """Return a function that returns the rows of cases."""
    return lambda card: [each for name in names for each in predictions(name, card)]


def speed_stage(name: str, limit: int, text: str, *names: str) -> Stage:
    """Return a stage that measures cases."""
    return Stage(name, limit, text, rows_of(*names), run_cases(*names))


STAGES = [
    Stage("card", 20, "rate of a bf16 product, bandwidth, launches", card_rows, run_card),
    Stage(
        "correctness",
        110,
        "tests marked gpu: bits and weights of the CPU, bf16 near fp32, refused updates",
        lambda card: [Row("correctness", "", 1.0)],
        pytest_stage("correctness", "not do_not_wait"),
    ),
    Stage(
        "waits",
        60,
        "tests marked gpu: updates that do not wait for the device, by policy",
        lambda card: [Row("waits", "", 1.0)],
        pytest_stage("waits", "do_not_wait"),
    ),
    speed_stage("bert", 40, "BERT-base, eager", "gpu_mlm", "gpu_mlm_no_dropout"),
    speed_stage("modern", 45, "modern base, eager", "gpu_modern_no_dropout", "gpu_modern_packed"),
    speed_stage("electra", 40, "ELECTRA-base, eager", "gpu_electra", "gpu_electra_no_dropout"),
    Stage("small", 50, "small models side by side", side_by_side_rows, run_side_by_side),
    speed_stage(
        "compiled",
        95,
        "compiled steps without dropout",
        "gpu_mlm_compiled",
        "gpu_electra_compiled",
        "gpu_modern_compiled",
    ),
    Stage(
        "nccl",
        20,
        "sums between two cards, if there are two",
        # Assumed for cards with NVLink; no archive has two cards.
        lambda card: [Row("nccl", "", 1.0), Row("nccl_speed", "GB/s", 100.0)],
        run_nccl,
    ),
]


# -------------------------------------------------------------------- the report


def shown(line: Row) -> str:
    """Return a row as a line of the report."""

    def text(value: float | None) -> str:
        if value is None:
            return "-"
        return f"{value:,.4g} {line.unit}" if line.unit else ("passes" if value else "FAILS")

    ratio = "-" if line.value is None or not line.unit else f"{line.value / line.predicted:.2f}"
    return f"  {line.name:<30}{text(line.value):<22}{text(line.predicted):<22}{ratio:<7}{line.note}"


def dry_run(stages: list[Stage]) -> None:
    """Print stages, limits and predictions for the archive's card."""
    print(f"predicted for {H100.name}; measured: nothing")
    for stage in stages:
        print(f"{stage.name}: at most {stage.limit} s: {stage.text}")
        for line in stage.rows(H100):
            print(shown(line).rstrip())
    print(f"at most {sum(stage.limit for stage in stages)} s, of {TIME}")


def stage_process(stage: Stage, card: Card, limit: float) -> tuple[list[dict[str, Any]], str]:
    """Run a stage in a separate process; return its rows and the error, or ""."""
    command = [sys.executable, str(HERE / "gpu_check.py"), "--stage", stage.name]
    command += ["--card", json.dumps(asdict(card))]
    return limited(command, limit)


def limited(command: list[str], limit: float) -> tuple[list[dict[str, Any]], str]:
    """Run a command that prints a JSON object per line; return the objects and the error, or "".

    At the limit it is ended with all processes that it has started; its output so far counts.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    cut = threading.Event()

    def end() -> None:
        cut.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit, end)
    timer.start()
    assert process.stdout is not None
    rows = [json.loads(line) for line in process.stdout if line.startswith("{")]
    code = process.wait()
    timer.cancel()
    if cut.is_set():
        return rows, f"cut after {limit:.0f} s"
    return rows, f"exit code {code}" if code else ""


def commit() -> str:
    """Return the commit of the checkout, or "unknown"."""
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def report(stage: Stage, rows: list[dict[str, Any]], card: Card, out: Path) -> bool:
    """Print a stage's rows with their predictions, archive them; return whether tests passed."""
    values = {line["name"]: line for line in rows}
    passed = True
    with out.open("a", encoding="utf-8") as archive:
        for line in stage.rows(card):
            if (measured_row := values.get(line.name)) is None:
                print(shown(line), flush=True)
                continue
            line = replace(line, value=measured_row["value"], note=measured_row["note"])
            print(shown(line), flush=True)
            passed = passed and (bool(line.unit) or line.value == 1)
            facts = {"commit": commit(), "card": card.name, "stage": stage.name}
            content = facts | asdict(line) | {"versions": versions()} | measured_row
            print(json.dumps(content), file=archive, flush=True)
    return passed


def check(stages: list[Stage], out: Path, time_limit: float) -> bool:
    """Run stages one after the other; return whether all ended and all tests passed."""
    card, good = replace(H100, name=torch.cuda.get_device_name()), True
    deadline = time.monotonic() + time_limit
    print(f"  {card.name:<30}{'measured':<22}{'predicted':<22}ratio")
    for stage in stages:
        left = deadline - time.monotonic()
        if left < 1:
            print(f"{stage.name}: no time left")
            good = False
            continue
        began = time.monotonic()
        rows, trouble = stage_process(stage, card, min(stage.limit, left))
        good = report(stage, rows, card, out) and not trouble and good
        print(f"{stage.name}: {time.monotonic() - began:.0f} s; {trouble or 'done'}", flush=True)
        if stage.name == "card" and not trouble:
            # From here on, predictions use the measured rates of this card.
            rate, bandwidth, launch = (line["value"] for line in rows)
            card = Card(card.name, rate * 1e12, bandwidth * 1e12, launch / 1e6)
    return good


def count_cases(out: Path) -> None:
    """Write the counts of an update of each case; needs no GPU."""
    with tempfile.TemporaryDirectory() as folder, out.open("w", encoding="utf-8") as file:
        for name, overrides in [*CASES.items(), ("small", SMALL)]:
            is_compiled = COMPILED in overrides
            if name == "small":
                data = made_up_corpus(Path(folder) / "small", 1000, 126 * 4000)
            else:
                data = data_of(name, Path(folder))
            eager = [option for option in overrides if option != COMPILED]
            counts = gpu_model.count(data, eager, is_compiled)
            print(json.dumps({"name": name, **asdict(counts)}), file=file, flush=True)


def main() -> None:
    """Run the command."""
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="STAGE")
    parser.add_argument("--dry-run", action="store_true", help="stages, limits and predictions")
    parser.add_argument("--count", action="store_true", help="count anew what updates do")
    parser.add_argument("--out", type=Path, default=ARCHIVE, help="file that rows are added to")
    parser.add_argument("--stage", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--card", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    stages = [stage for stage in STAGES if stage.name in options.only]
    if options.stage:
        (stage,) = (stage for stage in STAGES if stage.name == options.stage)
        for line in stage.run(Card(**options.card)):
            print(json.dumps(line), flush=True)
    elif options.count:
        count_cases(COUNTED)
    elif options.dry_run:
        dry_run(stages)
    elif not torch.cuda.is_available():
        print("gpu-check: no CUDA device, skipped", file=sys.stderr)
    elif not check(stages, options.out, TIME):
        sys.exit(1)


if __name__ == "__main__":
    main()
