"""scripts/benchmark runs and prints what it promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_prints_json_lines_and_a_table(tmp_path):
    out = tmp_path / "figures.jsonl"
    command = [sys.executable, ROOT / "scripts" / "benchmarks", "--only", "windows", "--quick"]
    done = subprocess.run(
        [*command, "--out", out], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    assert [json.loads(line) for line in out.read_text().splitlines()] == figures
    assert figures[0]["name"] == "windows"
    for figure in figures:
        assert figure["spread"][0] <= figure["ratio"] <= figure["spread"][1]
        assert figure["ours"] > 0 and figure["reference"] > 0
        assert {"unit", "rounds", "target", "threads", "versions"} <= set(figure)
    assert "windows/s" in done.stderr
