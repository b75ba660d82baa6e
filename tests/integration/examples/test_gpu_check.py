"""scripts/gpu-check without a GPU: stages, limits, what updates do, and what that predicts."""

import importlib
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

ROOT = Path(__file__).parents[3]
PROGRAMS = ROOT / "scripts" / "benchmarks"
TINY = [
    *("model.encoder_layers=1", "model.encoder_embed_dim=16", "model.encoder_ffn_embed_dim=32"),
    *("model.encoder_attention_heads=2", "model.max_positions=16", "task.batch_size=4"),
    *("task.tokens_per_sample=16", "model.token_embed_dim=0"),
]


@pytest.fixture(scope="module")
def modules() -> Iterator[tuple[ModuleType, ModuleType]]:
    sys.path.insert(0, str(PROGRAMS))
    yield importlib.import_module("gpu_check"), importlib.import_module("gpu_model")
    sys.path.remove(str(PROGRAMS))


@pytest.fixture
def check(modules: tuple[ModuleType, ModuleType]) -> ModuleType:
    return modules[0]


@pytest.fixture
def model(modules: tuple[ModuleType, ModuleType]) -> ModuleType:
    return modules[1]


def test_dry_run(check, monkeypatch, capsys):
    """Every stage with its limit, every row with a prediction, and nothing measured."""
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--dry-run"])
    check.main()
    out = capsys.readouterr().out
    limits = [int(limit) for limit in re.findall(r"^\w+: at most (\d+) s: ", out, re.M)]
    assert len(limits) == len(check.STAGES) and sum(limits) <= check.TIME == 480
    assert out.endswith(f"at most {sum(limits)} s, of 480\n")
    rows = re.findall(r"^  (\S+) +(-) +(\S+)", out, re.M)
    assert len(rows) == sum(len(stage.rows(check.H100)) for stage in check.STAGES)
    assert {name for name, _, _ in rows} >= {*check.CASES, "correctness", "waits", "gpu_small_8"}
    assert all(value == "passes" or float(value.replace(",", "")) > 0 for _, _, value in rows)


def test_without_a_gpu(check, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu-check"])
    check.main()
    assert "no CUDA device" in capsys.readouterr().err


def test_a_command_is_cut_at_its_limit(check, tmp_path):
    """What it has printed counts, and the processes that it has started end, too."""
    alive = tmp_path / "alive"
    child = f"import time\nwhile True: open({str(alive)!r}, 'a').write('x'); time.sleep(0.05)"
    program = (
        "import json, subprocess, sys, time\n"
        "print(json.dumps({'name': 'a', 'value': 1.0}), flush=True)\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "time.sleep(60)"
    )
    began = time.monotonic()
    rows, trouble = check.limited([sys.executable, "-c", program], 3.0)
    assert rows == [{"name": "a", "value": 1.0}] and trouble == "cut after 3 s"
    assert time.monotonic() - began < 30
    size = alive.stat().st_size
    time.sleep(1)
    assert alive.stat().st_size == size
    assert check.limited([sys.executable, "-c", "exit(3)"], 60) == ([], "exit code 3")


@pytest.mark.parametrize("passes", [True, False])
def test_report(passes, check, tmp_path, capsys):
    """Rows are archived with the card's name and what was predicted; absent ones are not."""
    predicted = [check.Row("a", "tokens/s", 50.0), check.Row("b", "GB", 2.0), check.Row("c", "", 1)]
    stage = check.Stage("x", 1, "", lambda card: predicted, lambda card: iter(()))
    rows = [check.row("a", 100.0, "a note") | {"ratio": 0.3}, check.row("c", float(passes))]
    card = replace(check.H100, name="a card")
    assert check.report(stage, rows, card, tmp_path / "out.jsonl") == passes
    out = capsys.readouterr().out
    assert re.search(r"a +100 tokens/s +50 tokens/s +2\.00 +a note", out)
    assert re.search(r"b +- +2 GB", out) and ("FAILS" in out) == (not passes)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["a", "c"]
    for line in lines:
        assert line["card"] == "a card" and line["stage"] == "x" and line["versions"]["torch"]
    assert lines[0]["predicted"] == 50 and lines[0]["value"] == 100 and lines[0]["ratio"] == 0.3


def test_stages_one_after_the_other(check, tmp_path, monkeypatch):
    """What the card gives is measured first, and predictions are for that from there on."""
    limits, cards = [], []

    def process(stage: Any, card: object, limit: float) -> tuple[list, str]:
        limits.append((stage.name, limit))
        cards.append(card)
        values = {"card_rate": 500.0, "card_bandwidth": 2.0, "card_launch": 7.0}
        rows = [check.row(name, value) for name, value in values.items()]
        return (rows, "") if stage.name == "card" else ([], "cut after 1 s")

    monkeypatch.setattr(check, "stage_process", process)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    assert not check.check(check.STAGES[:3], tmp_path / "out", 100.0)
    assert [name for name, _ in limits] == ["card", "correctness", "waits"]
    assert limits[0][1] == 20 and 90 < limits[1][1] <= 100
    assert cards[0] == replace(check.H100, name="a card")
    assert cards[1] == check.Card("a card", 500e12, 2e12, pytest.approx(7e-6))
    assert not check.check(check.STAGES[:3], tmp_path / "out", 0.0) and len(limits) == 3


def test_rows_of_cases(check, tmp_path, monkeypatch):
    """Speed with the share of the card's rate, and memory, under the names of the predictions."""
    rounds = [importlib.import_module("gpu_speed").Round(1000, 2e9, 4.0)]
    monkeypatch.setattr(check, "measured", lambda *args: rounds)
    monkeypatch.setattr(check, "data_of", lambda name, folder: folder)
    for name, value in (("reset_peak_memory_stats", 0), ("max_memory_allocated", 5e9)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    names = ("gpu_mlm", "gpu_modern_packed")
    card = replace(check.H100, rate=1e9)
    rows = list(check.run_cases(*names)(card))
    predicted = check.rows_of(*names)(card)
    assert [line["name"] for line in rows] == [line.name for line in predicted]
    assert [line["value"] for line in rows] == [250.0, 5.0] * 2
    assert rows[0]["ratio"] == 0.5 and rows[0]["unit"] == "tokens/s"
    stage = check.speed_stage("x", 1, "", *names)
    assert check.report(stage, rows, card, tmp_path / "out")
    assert len((tmp_path / "out").read_text().splitlines()) == 4


def test_rows_of_the_card(check, monkeypatch):
    for name, value in (("matmul_rate", 7e14), ("copy_rate", 3e12), ("launch_seconds", 5e-6)):
        monkeypatch.setattr(check, name, lambda *args, value=value: value)
    rows = list(check.run_card(check.H100))
    assert [line["value"] for line in rows] == pytest.approx([700, 3, 5])
    assert [line["name"] for line in rows] == [line.name for line in check.card_rows(check.H100)]


# ---------------------------------------------------------------- what predicts


@pytest.mark.parametrize("suffix", ["_no_dropout", "_compiled"])
def test_the_archived_rows_are_explained(suffix, check):
    """Speeds by one factor within a fifth, peak memory within a tenth, FLOPs within a hundredth."""
    lines = [json.loads(line) for line in check.ARCHIVE.read_text().splitlines()]
    archived = {line["name"]: line for line in lines if line.get("commit") == check.FITTED}
    counts = check.counted()
    pairs = [
        (counts[family + suffix], archived[family + suffix])
        for family in ("gpu_mlm", "gpu_electra")
    ]
    factor = check.gpu_model.fitted(check.H100, [(each, line["ours"]) for each, line in pairs])
    for each, line in pairs:
        speed = each.tokens / check.H100.seconds(each, factor)
        assert line["ours"] == pytest.approx(speed, rel=0.2)
        peak = float(re.search(r"peak ([\d.]+) GB", line["note"])[1])
        if suffix == "_no_dropout":
            assert peak == pytest.approx(each.peak / 1e9, rel=0.1)
        rate = float(re.search(r"([\d.]+) of [\d.]+ TFLOP/s", line["note"])[1]) * 1e12
        assert rate * each.tokens / line["ours"] == pytest.approx(each.flops, rel=0.01)


def traced(model: ModuleType, function: object, *shapes: tuple[int, ...]) -> list:
    """Return the kernels of a function of tensors of bf16, forward and backward."""
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
        with model.Tracer() as tracer:
            function(*inputs)  # type: ignore[operator]
    return tracer.kernels


def test_bytes_and_flops_of_kernels(model):
    def function(x: Tensor, w: Tensor, table: Tensor) -> None:
        with torch.no_grad():
            y = x.view(10, 6) @ w  # 10 x 6 times 6 x 4
            y += 1.0
            y.copy_(y.t().contiguous().t() * y.sum(0, keepdim=True).expand(10, 4))
            torch.nn.functional.embedding(torch.zeros(3, dtype=torch.long), table)

    kernels = traced(model, function, (2, 5, 6), (6, 4), (1000, 8))
    by_name = {kernel.name: kernel for kernel in kernels}
    assert by_name["mm"].flops == 2 * 10 * 6 * 4
    assert by_name["mm"].bytes == 2 * (60 + 24 + 40)
    assert by_name["add"].bytes == 2 * (40 + 40)
    assert by_name["sum"].bytes == 2 * (40 + 4)
    assert by_name["mul"].bytes == 2 * (40 + 4 + 40)  # the expanded sum is read once
    assert by_name["copy"].bytes == 2 * (40 + 40)
    assert by_name["embedding"].bytes == 3 * 8 + 2 * 2 * 3 * 8
    assert not {"view", "t", "expand", "detach"} & set(by_name)


def test_fused_kernels(model):
    """What lies between two products is one kernel; nothing inside is read or written."""

    def function(x: Tensor, w: Tensor) -> None:
        with torch.no_grad():
            y = (x @ w).relu() * 2.0 + 1.0
            _ = y @ w

    kernels = traced(model, function, (8, 4), (4, 4))
    assert [kernel.name for kernel in kernels] == ["mm", "relu", "mul", "add", "mm"]
    merged = model.fused(kernels)
    assert [kernel.name for kernel in merged] == ["mm", "fused", "mm"]
    assert merged[1].bytes == 2 * (32 + 32)


def test_fused_dropout_reads_and_writes_once(model):
    def function(x: Tensor, residual: Tensor) -> None:
        keys = torch.zeros(4, dtype=torch.long)
        dropped = model.Kernels.dropout(x, residual, keys, 0, 100)
        dropped.backward(torch.empty_like(dropped))

    kernels = [k for k in traced(model, function, (4, 100), (4, 100)) if k.name == "dropout"]
    assert [kernel.bytes for kernel in kernels] == [2 * 3 * 400 + 32, 2 * 2 * 400 + 32]


def test_predicted_seconds(model):
    """By FLOPs, by bytes, and by what the host needs for the launches."""
    card = model.Card("x", rate=100.0, bandwidth=10.0, launch=0.5)
    counts = model.Counts(tokens=60, kernels=[[1000, 10, 2], [0, 50, 4]], peak=7)
    assert (counts.flops, counts.bytes, counts.launches) == (2000, 220, 6)
    assert card.floor(counts) == 2 * 10 + 4 * 5
    assert card.seconds(counts, 1.5) == 60
    assert replace(card, launch=20.0).seconds(counts, 1.5) == 120
    assert model.fitted(card, [(counts, 1.0), (counts, 0.5), (counts, 3.0)]) == 60 / 40


@pytest.mark.parametrize("kind", ["BERT", "MODERN", "ELECTRA"])
def test_counted_updates(kind, check, model, tmp_path):
    """The FLOPs of the trainer's own update, on tensors without values; a compiler moves less."""
    training = importlib.import_module("training")
    data = training.made_up_corpus(tmp_path / "data", 100, 14 * 40)
    overrides = [*getattr(check, kind), *TINY]
    run = training.build(data, overrides)
    training.train(run, *next(training.fetched(run)))
    overrides.append("engine.precision=bf16")
    counts, fused = model.count(data, overrides), model.count(data, overrides, True)
    assert counts.tokens == fused.tokens == 64
    assert counts.flops == fused.flops == run.flops.total
    assert fused.bytes < counts.bytes and fused.launches < counts.launches
    weights = sum(p.numel() for p in run.model.parameters())
    assert counts.peak > 4 * 3 * weights  # with both moments


# ---------------------------------------------------------------- stages of several processes


@pytest.mark.slow
def test_runs_side_by_side(check, tmp_path):
    training = importlib.import_module("training")
    data = training.made_up_corpus(tmp_path / "data", 100, 14 * 40)
    assert check.side_by_side(data, [*check.BERT, *TINY], 2, 0.5) > 0


@pytest.mark.slow
def test_sums_between_processes(check):
    right, speed = check.sums_between("cpu")
    assert right and speed > 0
