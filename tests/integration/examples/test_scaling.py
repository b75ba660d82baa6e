"""The scripts of examples/scaling on small inputs: a corpus before and after a kill, the model's
formulas.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCALING = Path(__file__).resolve().parents[3] / "examples" / "scaling"
CORPUS = SCALING / "corpus.py"


@pytest.fixture(scope="module")
def model() -> Any:
    """The module examples/scaling/model.py."""
    spec = importlib.util.spec_from_file_location("scaling_model", SCALING / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_formulas_of_a_model(model: Any) -> None:
    """Shards hold a part, gathers and sums move what the placement asks for."""
    sizes = {"encoder_layers": 2, "encoder_embed_dim": 64, "encoder_ffn_embed_dim": 256}
    network = model.build_network(sizes, bf16=False)
    assert network.weights == 4 * network.parameters and network.casts == 0
    assert network.layer == 4 * (12 * 64 * 64 + 13 * 64) and network.row > 128 * 64 * 4 * 20
    assert network.sent == network.layer and network.other_casts == 0
    low = model.build_network(sizes, bf16=True)
    # At least the matrices in bfloat16, of the layers and of the output.
    assert low.casts > 0.9 * network.weights / 2
    # The layer norms are gathered in fp32; of the casts those of the layers go.
    assert low.sent == low.layer / 2 + 2 * 4 * 64 and low.layer == network.layer
    assert low.casts - low.other_casts == 2 * 2 * 12 * 64 * 64
    plans = {p: model.Plan(network, model.H200, 64, p, 4) for p in ("replicate", "shard", "hybrid")}
    held = {p: plan.held / network.weights for p, plan in plans.items()}
    assert held == {"replicate": 4, "shard": 4 / 64, "hybrid": 4 / 8}
    assert plans["replicate"].gathered == plans["replicate"].scattered == plans["shard"].summed == 0
    assert plans["shard"].scattered == network.weights * 63 / 64
    assert plans["hybrid"].summed == 2 * 7 / 8 * network.weights / 8
    assert plans["replicate"].peak_layer == plans["replicate"].peak_model
    deep = model.Plan(
        model.build_network(sizes | {"encoder_layers": 8}, False), model.H200, 8, "shard", 1
    )
    assert deep.peak_model - deep.peak_layer == 5 * network.layer
    assert deep.seconds() < deep.seconds(ahead=False) and deep.seconds() <= deep.seconds(
        overlap=False
    )


def test_measured_memory_is_that_of_the_formulas(model: Any) -> None:
    """In the archive of the page."""
    rows = [line.split() for line in model.check(SCALING / "memory.jsonl")][1:]
    assert len(rows) >= 5 and {row[0] for row in rows} == {"1", "2", "4"}
    assert all(0.95 < float(row[5]) < 1.05 for row in rows)


def test_tables_of_lines(tmp_path: Path) -> None:
    """Rates are of as many single processes; a kind without lines has no table."""
    one = {"kind": "update", "overlap": True, "processes": 1, "wait": 0.0, "spread": [0.5, 2.0]}
    one |= {"seconds": 1.0, "tokens_per_second": 1000.0}
    two = one | {"processes": 2, "parallel": "shard", "gather": "layer", "overlap": False}
    sums = {"kind": "link", "processes": 2, "bytes": 4096, "seconds": 0.0025}
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(map(json.dumps, [one, two, sums])))
    command = [sys.executable, str(SCALING / "tables.py"), str(file)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line for line in lines if line.startswith("| ") and line[2].isdigit()]
    spread = "1.000 (0.500-2.000) | 0.000 | 1,000"
    assert rows == [
        f"| 1 | replicate | - | buckets | {spread} | 100% |",
        f"| 2 | shard | layer | at the end | {spread} | 50% |",
        "| 2 | 4,096 | 2.50 |",
    ]
    assert sum("---" in line for line in lines) == 2


def test_a_small_corpus(tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    sizes = ["--megabytes", "1", "--billions", "0.001", "--processes", "1", "--updates", "8"]
    command = [sys.executable, str(CORPUS), *sizes, "--folder", str(tmp_path), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    assert [json.loads(line) for line in out.read_text().splitlines()] == figures
    text, kill, *batches = figures
    assert text["kind"] == "preprocess" and text["text_bytes"] >= 1e6 and text["peak_bytes"] > 1e6
    assert kill["same_batches"] and kill["same_losses"] and kill["same_weights"]
    assert kill["loss_difference"] == 0 and 5 < kill["killed_at"] < 8
    assert [figure["break_mode"] for figure in batches] == ["none", "eos"]
    assert {figure["tokens"] for figure in batches} == {1_000_000}
