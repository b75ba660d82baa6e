"""The scripts of examples/scaling on small inputs: a corpus before and after a kill, updates beside
torch's, the model's formulas.
"""

import contextlib
import importlib.util
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from imported import imported
from real_runs import Started, on_replicas

SCALING = Path(__file__).resolve().parents[3] / "examples" / "scaling"
KINDS = ("replicate", "shard", "ddp", "fully_shard")


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """The module examples/scaling/model.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCALING))
        spec = importlib.util.spec_from_file_location("scaling_model", SCALING / "model.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


SIZES = {"encoder_layers": 2, "encoder_embed_dim": 64, "encoder_ffn_embed_dim": 256}


def test_formulas_of_memory(model: Any) -> None:
    """Shards hold a part, gathers and sums move what the placement asks for."""
    network = model.build_network(SIZES, bf16=False)
    assert network.weights == 4 * network.parameters and network.casts == 0
    assert network.layer == 4 * (12 * 64 * 64 + 13 * 64) and network.row > 128 * 64 * 4 * 20
    assert network.embedding == 4 * 64 * model.VOCAB and network.rest > network.embedding
    low = model.build_network(SIZES, bf16=True)
    # At least the matrices in bfloat16, of the layers and of the output.
    assert low.casts > 0.9 * network.weights / 2
    machine = model.Machine(1e-6, 1e-5, 1e-5)
    plans = {p: model.Plan(network, machine, 64, p, 4) for p in ("replicate", "shard", "hybrid")}
    held = {p: plan.held / network.weights for p, plan in plans.items()}
    assert held == {"replicate": 4, "shard": 4 / 64, "hybrid": 4 / 8}
    assert plans["replicate"].gathered == plans["replicate"].scattered == plans["shard"].summed == 0
    assert plans["shard"].scattered == network.weights * 63 / 64
    assert plans["shard"].gathered == (network.weights + 2 * network.layer) * 63 / 64
    assert plans["hybrid"].summed == 2 * 7 / 8 * network.weights / 8
    # Of deeper models on many devices only what is held grows, which is little.
    deep = model.build_network(SIZES | {"encoder_layers": 8}, False)
    grown = model.Plan(deep, machine, 64, "shard", 0).peak
    grown -= model.Plan(network, machine, 64, "shard", 0).peak
    assert grown == 6 * network.layer * 4 / 64


def test_formulas_of_time(model: Any) -> None:
    """What computing does not hide is waited for, on the device or on the host."""
    network = model.build_network(SIZES, bf16=False)
    slow_links = model.Machine(0.0, 0.0, 0.0, near=1e6, far=1e6)
    plan = model.Plan(network, slow_links, 8, "shard", 4)
    sent = plan.gathered + plan.scattered
    assert plan.seconds > sent / 1e6 - plan.compute and plan.limit != "hosts' sum"
    slow_hosts = model.Machine(0.0, 0.0, 1.0)
    shard, whole = (model.Plan(network, slow_hosts, 8, p, 4) for p in ("shard", "replicate"))
    assert shard.seconds == whole.seconds == 3 * 2 and shard.limit == "hosts' sum"  # 2 * 2 * 2
    # The forward pass of replicas is launched while the sizes are summed.
    launching = model.Machine(1.0, 0.0, 1.0)
    first, second = (model.Plan(network, launching, 8, p, 4) for p in ("shard", "replicate"))
    assert first.seconds - second.seconds == 6 and first.limit == "launches"
    one = model.Plan(network, slow_links, 1, "replicate", 4)
    assert one.waits.keys() == {"step", "sums", "last sum", "small sums"}
    assert one.seconds == one.compute + one.waits["step"]
    assert sum(network.launches) > 2 * 2 * 20


def test_measured_memory_is_that_of_the_formulas(model: Any) -> None:
    """In the archive of the page."""
    rows = [line.split() for line in model.check(SCALING / "memory.jsonl")][1:]
    assert {row[0] for row in rows} == {"1", "2", "4"}
    assert all(0.99 < float(row[4]) < 1.01 for row in rows)
    # A heap has gaps, the more the larger it may grow; the page says so.
    assert all(1.0 < float(row[7]) < 1.4 for row in rows)


def be_replica(arguments: list[str], out: Path) -> None:
    """Measure as one of a group of processes; the first writes what it prints to a file."""
    sys.argv = ["measure.py", "--replica", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        imported(SCALING / "measure.py").main()
    if printed.getvalue():
        out.write_text(printed.getvalue())


def test_torch_alone_makes_the_same_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the package is compared with computes the same losses.

    The group of the first kind is started as by a user, the others are forked.
    """
    out = tmp_path / "figures.jsonl"
    measure = imported(SCALING / "measure.py")
    start = measure.group

    def group(count: int, arguments: list[str]) -> list[dict[str, Any]]:
        if KINDS[0] in arguments:
            return start(count, arguments)
        on_replicas(count, be_replica, arguments, tmp_path / "printed")
        return [json.loads(line) for line in (tmp_path / "printed").read_text().splitlines()]

    monkeypatch.setattr(measure, "group", group)
    command = ["measure.py", "--processes", "2", "--rows", "2"]
    command += ["--updates", "1", "--out", str(out), "--parallel", *KINDS]
    command += [f"--override=model.{name}={value}" for name, value in SIZES.items()]
    monkeypatch.setattr(sys, "argv", command)
    measure.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    losses = {line["parallel"]: line["loss"] for line in lines}
    assert losses == dict.fromkeys(KINDS, pytest.approx(losses["replicate"], rel=1e-5))
    held = {line["parallel"]: line["held"] / line["parameters"] for line in lines}
    assert held == dict(
        zip(KINDS, [16, pytest.approx(8, rel=0.01), 16, pytest.approx(8, rel=0.01)])
    )
    assert all(line["peak"] > line["held"] and line["cpu"] > 0 for line in lines)


def test_tables_of_lines(tmp_path: Path) -> None:
    """Rates are of as many single processes; a kind without lines has no table."""
    one = {"kind": "update", "parallel": "replicate", "processes": 1, "wait": 0.0}
    one |= {"seconds": 1.0, "tokens_per_second": 1000.0, "spread": [0.5, 2.0], "cpu": 0.9}
    one |= {"held": 16e6, "peak": 20e6}
    two = one | {"processes": 2, "parallel": "ddp", "wait": None}
    sums = {"kind": "link", "processes": 2, "bytes": 4096, "seconds": 0.0025}
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(map(json.dumps, [one, two, sums])))
    command = [sys.executable, str(SCALING / "tables.py"), str(file)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line for line in lines if line.startswith("| ") and line[2].isdigit()]
    spread = "16.0 | 20.0 | 0.900 | 1.000 (0.500-2.000)"
    assert rows == [
        f"| 1 | replicate | {spread} | 0.000 | 1,000 | 100% |",
        f"| 2 | ddp | {spread} | - | 1,000 | 50% |",
        "| 2 | 4,096 | 2.50 |",
    ]
    assert sum("---" in line for line in lines) == 2


def test_a_small_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The runs are forked; the other processes are started as by a user."""
    out = tmp_path / "figures.jsonl"
    corpus = imported(SCALING / "corpus.py")
    start = corpus.run

    def run(arguments: list[str], killed: bool = False, **environment: str) -> tuple[float, int]:
        if arguments[0] != "train":
            return start(arguments)
        run = Started(arguments, tmp_path / "errors", environment)
        assert (run.wait() != 0) == killed, run.text()
        return 1.0, 0

    monkeypatch.setattr(corpus, "run", run)
    sizes = ["--megabytes", "1", "--billions", "0.001", "--processes", "1", "--updates", "8"]
    command = ["corpus.py", *sizes, "--folder", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    corpus.main()
    figures = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [json.loads(line) for line in out.read_text().splitlines()] == figures
    text, kill, *batches = figures
    assert text["kind"] == "preprocess" and text["text_bytes"] >= 1e6 and text["peak_bytes"] > 1e6
    assert kill["same_batches"] and kill["same_losses"] and kill["same_weights"]
    assert kill["loss_difference"] == 0 and 5 < kill["killed_at"] < 8
    assert [figure["break_mode"] for figure in batches] == ["none", "eos"]
    assert {figure["tokens"] for figure in batches} == {1_000_000}
