"""`sweep --search`: mistakes, the dry run, and a real search that is killed in between."""

import json
import os
import pickle
import signal
import sys
from pathlib import Path

import pytest
from agreement import make_data, make_pairs
from outcomes import expect, expect_facts
from real_runs import Started
from sweeping import TINY, processes, start_sweep, states_of, sweep, wait_until

pytest.importorskip("optuna")

from metaseq_lm.cli import main
from metaseq_lm.reporting.folders import read_run
from metaseq_lm.sweeps import searching
from metaseq_lm.sweeps.configs import check_configs
from metaseq_lm.sweeps.definition import normalise
from metaseq_lm.sweeps.expansion import expand
from metaseq_lm.sweeps.folder import SweepFolder

RATE = "optimizer.lr=log 1e-3..1e-1"
RUN = 2.5e8  # FLOPs: 50 updates
BUDGET = ["trainer.max_update=0", f"trainer.max_flops={RUN:.0f}"]
SEARCH = ["--search", RATE, "--search-flops", f"{1.5 * RUN:.0f}", *BUDGET, *TINY]


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--search", "optimizer.rate=1e-3..1e-1"], "optimizer.rate"),
        (["--search", "optimizer.lr=1e-1..1e-3"], "is empty"),
        (["--search", "optimizer.lr=log 0..1e-3"], "no logarithm"),
        (["--search", "task.mask_prob=0.5..1.5"], "task.mask_prob"),
        (["--search", RATE, "--search-metric", "valid.lose"], "Did you mean 'valid.loss'"),
        (["--search", RATE, "--search-metric", "valid.f1"], "no metric 'valid.f1'"),
        (["--search", RATE, "--seeds", "1,101"], "seed 101"),
        (["--search", RATE, "--search-flops", "1e8"], "more than"),
        (["--search", RATE, "trainer.max_update=10"], "--max-flops"),
        (["--search", RATE, "--grid", "optimizer.lr=1,2"], "in grid or list"),
        (["--search", RATE, "--search-first-rung", "0.1"], "first_rung"),
        ([], "give --search"),
    ],
)
def test_a_mistake_is_one_message(
    arguments: list[str],
    problem: str,
    moons: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    out = tmp_path / "out"
    flops = ["--search-flops", "1e9"]
    assert sweep(moons, "--out", out, *flops, *BUDGET, *TINY, *arguments) == 2
    message = capsys.readouterr().err
    assert problem in message and "Traceback" not in message
    assert not out.exists()


def test_optuna_is_an_extra(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "find_spec", lambda name: None)
    assert sweep(moons, "--out", tmp_path / "out", *SEARCH) == 2
    assert "metaseq-lm[search]" in capsys.readouterr().err


def test_a_dry_run_says_trials_flops_and_hours(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        f"data: {moons}\n"
        "grid: {task.mask_prob: [0.15, 0.3]}\n"
        "seeds: [1, 2, 3]\n"
        f"search: {{space: {{optimizer.lr: log 1e-3..1e-1}}, flops: {4 * RUN}}}\n"
    )
    out = tmp_path / "out"
    assert sweep(file, "--out", out, "--dry-run", "--rate", "1e9", *BUDGET, *TINY) == 0
    shown = capsys.readouterr().out
    expect_facts(shown, "mask_prob=0.15: search 1e+09", "0.00028 hours", "4 trials", "16 if all")
    expect_facts(shown, "6 runs", "3.5e+09 FLOPs", "0.00097 hours")
    assert not out.exists()


@pytest.mark.slow
def test_a_killed_search_goes_on_and_counts_what_was_lost(moons: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [moons, "--out", out, "--seeds", "1", *SEARCH]
    first = start_sweep(tmp_path / "first.txt", *command)
    trial = out / "search" / "all" / "0001"
    wait_until(lambda: (trial / "log.jsonl").exists() and updates(trial) >= 3, 600)
    (worker,) = processes("metaseq-job", str(out))
    os.kill(worker, signal.SIGKILL)
    expect((first.wait(600), first.text()), 1, "goes on")

    second = start_sweep(tmp_path / "second.txt", *command)
    assert second.wait(600) == 0, second.text()
    assert "trial 1 failed:" in second.text()
    trials = [json.loads(f.read_text()) for f in sorted(out.glob("search/all/*/trial.json"))]
    assert [t["state"] for t in trials][:2] == ["finished", "failed"]
    assert trials[0]["flops"] == pytest.approx(RUN, rel=0.03)
    assert 0 < trials[1]["flops"] <= 0.3 * RUN
    spent = sum(t["flops"] for t in trials)
    assert 1.25 * RUN < spent < 1.53 * RUN
    check_final_runs(out, trials[0], spent)

    third: Started = start_sweep(tmp_path / "third.txt", *command)
    assert third.wait(600) == 0 and "nothing to launch" in third.text()
    runs = sorted(out.glob("*seed=1*"))
    (out / "search" / "journal.jsonl").write_text("")
    fourth = start_sweep(tmp_path / "fourth.txt", *command)  # the search begins anew
    assert fourth.wait(600) == 0 and "Traceback" not in fourth.text(), fourth.text()
    assert sorted(out.glob("*seed=1*"))[: len(runs)] == runs
    assert sweep(moons, "--out", out, *BUDGET, *TINY) == 2


def test_a_part_of_a_suite_chooses_and_the_rest_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = make_data(tmp_path, valid=20), tmp_path / "out"
    (data / "pairs").mkdir()
    make_pairs(data / "pairs" / "near.jsonl", 30, 7)
    entries = ["pairs pairs name=dev first=10", "pairs pairs skip=10"]
    search = ["--search", "optimizer.lr=1e-3,1e-1", "--search-flops", f"{2.1 * RUN:.0f}", *BUDGET]
    search += ["--search-prune", "none", *TINY, "--seeds", "1"]

    def searched(metric: str, suites: list[str], *more: str) -> str:
        words = ["--search-metric", metric, f"trainer.final_suites={json.dumps(suites)}"]
        assert sweep(data, "--out", out, *search, *words, *more) == 0
        return capsys.readouterr().out

    dry = ["--dry-run", "--rate", "1e9"]
    for metric, suites in (
        ("pairs.soft_accuracy", entries[1:]),
        ("pairs.soft_accuracy", entries),
        ("dev.soft_accuracy", [entries[0], "pairs pairs skip=9"]),
    ):
        note = f"note: {metric} chooses values by items on which reports compare the runs"
        assert note in searched(metric, suites, *dry)
    assert "note:" not in searched("dev.soft_accuracy", entries[:1], *dry)
    assert "note:" not in searched("valid.loss", entries[1:], *dry)
    assert "note:" not in searched("dev.soft_accuracy", entries, *dry)

    shown = searched("dev.soft_accuracy", entries)
    trials = [file.parent for file in sorted(out.glob("search/all/*/trial.json"))]
    records = [json.loads((trial / "trial.json").read_text()) for trial in trials]
    assert len(trials) == 2 and {r["metric"] for r in records} == {"dev.soft_accuracy"}
    for trial, record in zip(trials, records):
        assert record["score"] == read_run(trial).metrics["dev.soft_accuracy"]
    best = max(records, key=lambda record: record["score"])
    (run,) = SweepFolder(out).runs()
    assert run.values == best["values"]
    final = read_run(out / run.name)
    assert final.metrics["dev.n"] == 10 and final.metrics["pairs.n"] == 20
    # Of two numbers each is an end.
    rate = best["values"]["optimizer.lr"]
    end = "lower" if rate == 1e-3 else "upper"
    assert final.tuning["edges"] == {"optimizer.lr": end}
    expect_facts(shown, f"optimizer.lr={rate} lies", f"{end} end", "[0.001, 0.1]")
    assert "note:" not in shown
    # Only a search itself needs Optuna.
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert sweep("status", out) == 0 and "(2 finished)" in capsys.readouterr().out
    for words in ([], ["--expected-best"], ["--choose", "optimizer.lr", "--choose-by", "dev.n"]):
        assert main(["report", str(out), *words]) == 0


def test_a_job_names_no_class_of_a_plug_in(moons: Path, tmp_path: Path) -> None:
    """It is unpickled before the plug-in is loaded, of which the checked options have classes."""
    definition = normalise({"data": str(moons), "overrides": [*BUDGET, *TINY]})
    before = pickle.dumps(definition)
    check_configs(expand(definition, tmp_path), definition)
    assert definition.compositions and pickle.dumps(definition) == before


def test_a_snapshot_of_an_earlier_version_is_not_used(tmp_path: Path) -> None:
    """It would not read the journal as it is written now."""
    folder = SweepFolder(tmp_path)
    assert not searching._has_earlier_code(folder)
    job = {"executor": "local", "job": "1", "folder": "jobs/0001", "code": "0" * 16}
    folder.append("submit", run="search-1", **job)
    assert searching._has_earlier_code(folder)
    package = tmp_path / "code" / job["code"] / "metaseq_lm" / "sweeps"
    package.mkdir(parents=True)
    (package / "optuna_records.py").touch()
    assert not searching._has_earlier_code(folder)


def updates(folder: Path) -> int:
    lines = (folder / "log.jsonl").read_text().splitlines()
    return sum('"train"' in line for line in lines)


def check_final_runs(out: Path, best: dict, spent: float) -> None:
    """Of the chosen value, on the fresh seed, with the record of what choosing it cost."""
    (name,) = states_of(out)
    (run,) = SweepFolder(out).runs()
    assert run.seed == 1 and run.values == best["values"]
    tuning = json.loads((out / name / "tuning.json").read_text())
    assert tuning["flops"] == pytest.approx(spent) and tuning["values"] == best["values"]
    results = json.loads((out / name / "results.json").read_text())
    assert results["seed"] == 1 and results["flops"] == pytest.approx(RUN, rel=0.03)
