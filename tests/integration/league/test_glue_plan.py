"""The plan of examples/league/glue.yaml: fine-tuned and frozen scores side by side."""

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml
from agreement import make_data, write_labelled_pairs
from league_plans import in_process

from metaseq_lm.cli import main
from metaseq_lm.league.folder import LeagueFolder
from metaseq_lm.league.plan_files import read_plan

PLAN = Path(__file__).resolve().parents[3] / "examples" / "league" / "glue.yaml"


def small_plan(file: Path, data: Path) -> dict[str, Any]:
    """Write the plan with a data folder, shorter rows and a small budget."""
    content: dict[str, Any] = yaml.safe_load(PLAN.read_text())
    content["data"] = {"folder": str(data)}
    content["options"] += ["task.tokens_per_sample=12", "model.max_positions=12"]
    content["options"] += ["task.sample_break_mode=eos", "engine.threads=1", "optimizer.lr=1e-3"]
    content |= {"budgets": [1e10], "seeds": [1], "controls": {"untrained": False}}
    suites = content["comparison"]["suites"]
    content["comparison"]["suites"] = [
        f"{entry} epochs=1" if entry.startswith("finetune") else entry for entry in suites
    ]
    file.write_text(yaml.safe_dump(content))
    return content


def test_scores_of_both_kinds_stand_in_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = read_plan(PLAN)
    assert len(plan.comparison.suites) == 4
    data = make_data(tmp_path, valid=64)
    source = tmp_path / "challenge"
    source.mkdir()
    for split, count in (("train", 40), ("valid", 20)):
        write_labelled_pairs(source / f"rte.{split}.jsonl", count, count, (0, 1))
        write_labelled_pairs(source / f"mrpc.{split}.jsonl", count, count + 1, (0, 1))
    for task, name in (("RTE", "RTE"), ("MRPC", "WSC")):  # any set serves as the second one
        command = ["preprocess", "--benchmark", f"babylm/{task}", "--source", str(source)]
        assert main([*command, "--destdir", str(data), "--labelled", name]) == 0
    content = small_plan(tmp_path / "plan.yaml", data)
    in_process(monkeypatch)
    folder = LeagueFolder(tmp_path / "L")
    assert main(["league", str(tmp_path / "plan.yaml"), "--out", str(folder.path)]) == 0
    for run in folder.runs():
        names = {results.name for results in run.suites}
        assert names == {"rte", "wsc", "rte_tuned", "wsc_tuned"}
        assert run.results is not None and run.results["flops"] < 1.1e10  # without fine-tuning
        (tuned,) = (results for results in run.suites if results.name == "rte_tuned")
        assert tuned.facts["flops"] > 0
    rows = csv.DictReader((folder.path / "report" / "standings.csv").read_text().splitlines())
    rows_by_name = {row["objective"]: row for row in rows}
    assert rows_by_name.keys() == {"masked_15", "causal"}
    for row in rows_by_name.values():
        for metric in content["comparison"]["secondary"]:
            assert 0 <= float(row[metric]) <= 1
        parts = [float(row[f"{name}_tuned.accuracy"]) for name in ("rte", "wsc")]
        assert float(row["tuned"]) == pytest.approx(sum(parts) / 2)
