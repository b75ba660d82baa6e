"""The command: phases, growth, what is refused; runs are trained in this process, but for one."""

import csv
import json
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from league_plans import LARGE, PLAN, SMALL, in_process, plan_with, write_plan
from outcomes import expect_facts
from real_runs import Started
from sweeping import states_of, wait_until

from metaseq_lm.cli import main
from metaseq_lm.core.errors import Interrupted
from metaseq_lm.league import forecast, runner
from metaseq_lm.league.assembly import read_league_runs
from metaseq_lm.league.folder import LeagueFolder
from metaseq_lm.runs.records import write_plan as write_plan_hash
from metaseq_lm.sweeps import submit as submit_module
from metaseq_lm.sweeps.expansion import PlannedRun
from metaseq_lm.sweeps.folder import SweepFolder
from metaseq_lm.sweeps.job import Code
from metaseq_lm.sweeps.launching import take_code
from metaseq_lm.sweeps.options import Launch
from metaseq_lm.sweeps.states import State
from metaseq_lm.sweeps.trials import Trials

PLUG_IN = '''
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions.masked_lm import MaskedLM

@register_criterion("twice")
class Twice(MaskedLM):
    """Masked LM under another name."""
'''


def league(*arguments: object) -> int:
    return main(["league", *map(str, arguments)])


@pytest.fixture(scope="module")
def played(moons: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a league that has run, the plan beside it."""
    folder = tmp_path_factory.mktemp("league")
    with pytest.MonkeyPatch.context() as monkeypatch:
        trained = in_process(monkeypatch)
        assert league(write_plan(folder / "plan.yaml", moons), "--out", folder / "L") == 0
    (folder / "trained.json").write_text(json.dumps(trained))
    return folder


def copy_of(played: Path, place: Path) -> Path:
    """Return a copy of the league's folder at the same path: sweeps know theirs."""
    shutil.copytree(played, place, symlinks=True)
    for file in place.glob("L/*/*/sweep.json"):
        text = file.read_text().replace(str(played), str(place))
        content = {key: v for key, v in json.loads(text).items() if key != "checksum"}
        file.write_text(json.dumps(content))
    return place / "L"


def test_the_phases_run_in_order_on_the_seeds_of_the_plan(played: Path) -> None:
    trained = json.loads((played / "trained.json").read_text())
    phases = [name.split("/")[0] for name in trained]
    assert list(dict.fromkeys(phases)) == ["untrained", "tune", "final", "shuffled"]
    seeds = {}
    for name in trained:
        seeds.setdefault(name.split("/")[0], set()).add(re.search(r"seed=(\d+)", name)[1])
    assert seeds == {"untrained": {"1"}, "tune": {"101"}, "final": {"1", "2"}, "shuffled": {"1"}}
    records = list(played.glob("L/final/*/*/tuning.json"))
    assert len(records) == sum(name.startswith("final/") for name in trained)
    costs = {(f.parts[-3], json.loads(f.read_text())["flops"]) for f in records}
    trials = [json.loads(f.read_text()) for f in played.glob("L/tune/*/*/results.json")]
    assert sum(cost for _, cost in costs) == pytest.approx(sum(t["flops"] for t in trials))
    # The larger rate is the best here, so each grid got one value more, once.
    rates = [re.search(r"lr=([\d.e-]+)-", n)[1] for n in trained if n.startswith("tune/masked")]
    assert rates == ["0.0001", "0.001", "0.01"]
    assert not [name for name in trained if "max_flops=6e7" in name]


def test_runs_have_the_chosen_rate_and_what_the_phase_sets(played: Path) -> None:
    runs = LeagueFolder(played / "L").runs()
    trials = [run for run in runs if run.values["label"] == "dense, tuning"]
    best = min(trials, key=lambda run: run.metrics["valid.loss"]).values["optimizer.lr"]
    for run in runs:
        label = run.values["label"]
        if not label.startswith("dense") or label.endswith("tuning"):
            continue
        is_untrained = label == "dense, untrained"
        assert run.values["optimizer.lr"] == (0 if is_untrained else best)
        assert run.values["task.shuffle_tokens"] == (label == "dense, shuffled")
        assert (run.results["updates"] == 1) == is_untrained
        assert run.results["flops"] <= 1.1 * SMALL
    start, end = (
        next(r for r in runs if r.values["label"] == f"dense{s}") for s in (", untrained", "")
    )
    assert start.metrics["valid.mlm"] > end.metrics["valid.mlm"]


def test_its_parts_are_ordinary_sweeps(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "status", str(played / "L/final/dense")]) == 0
    expect_facts(capsys.readouterr().out, "2 runs:", "2 finished")
    assert {s.state for s in states_of(played / "L/tune/dense").values()} == {"finished"}


def test_the_report_has_rows_controls_and_the_hash(
    played: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert league("report", played / "L") == 0
    shown = capsys.readouterr().out
    contents = LeagueFolder(played / "L").read()
    assert contents.plan.hash in shown
    assert "3.0e7 FLOPs, beside masked: " in shown and "6.0e7 FLOPs, beside" not in shown
    assert re.search(r"^masked +2 ", shown, re.M) and re.search(r"^dense +2 ", shown, re.M)
    assert f"in {played / 'L' / 'report'}:\nstandings.txt" in shown
    page = (played / "L" / "report" / "standings.txt").read_text()
    expect_facts(page, "dense 3 trials", "1 of them beyond")
    files = {file.name for file in (played / "L/report").iterdir()}
    assert {"standings.txt", "standings.csv", "standings.html", "standings.png"} <= files


def test_the_same_command_runs_nothing_again_and_a_larger_budget_only_what_is_new(
    played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_of(played, tmp_path / "copy")
    trained = in_process(monkeypatch)
    assert league(played / "plan.yaml", "--out", folder) == 0
    assert trained == []
    assert league("--out", folder, "--budgets", "6e7", "--objectives", "dense") == 0
    assert {name.partition("-")[0] for name in trained} == {"final/dense/max_flops=6e7"}
    assert len(trained) == 2
    assert (folder / "report" / "standings.csv").read_text().count("dense") == 1
    assert league("report", folder) == 0 and (folder / "report" / "ladder.png").exists()
    assert (folder / "report" / "standings.csv").read_text().count("dense") == 2
    assert league("report", folder, "--budgets", "5e7") == 2
    assert league("--out", folder, "--budgets", "3e7") == 0  # the larger budget stays
    assert not (folder / "report" / "ladder.png").exists()
    assert len(trained) == 2 and len(states_of(folder / "final/dense")) == 4


def test_runs_record_their_plan_and_those_of_another_are_refused_by_name(
    played: Path,
    moons: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As where league.json was lost and another plan began in the folder."""
    folder = copy_of(played, tmp_path / "copy")
    runs = LeagueFolder(folder).runs()
    plan_hash = LeagueFolder(folder).read().plan.hash
    assert runs and {run.plan for run in runs} == {plan_hash}
    trained = in_process(monkeypatch)
    (folder / "league.json").unlink()
    other = write_plan(tmp_path / "other.yaml", moons, comparison__smallest_effect=0.1)
    capsys.readouterr()
    assert league(other, "--out", folder) == 2
    message = capsys.readouterr().err
    assert plan_hash in message and f"{folder}/untrained/" in message and "another plan" in message
    assert f"{len(runs) - 1} more" in message
    assert not trained and not (folder / "league.json").exists()
    # With its own plan it goes on, also where a run does not say whose it is.
    (runs[0].path / "plan.json").unlink()
    assert league(played / "plan.yaml", "--out", folder) == 0
    write_plan_hash(runs[0].path, "f" * 16)
    assert league("report", folder) == 2
    assert str(runs[0].path) in capsys.readouterr().err


def test_an_interrupted_league_goes_on(
    moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = write_plan(tmp_path / "plan.yaml", moons)
    count = 0

    def stop(run: PlannedRun) -> None:
        nonlocal count
        count += 1
        if count == 6:
            raise Interrupted("stopped")

    first = in_process(monkeypatch, stop)
    assert league(plan, "--out", tmp_path / "L") == 75
    rest = in_process(monkeypatch)
    assert league(plan, "--out", tmp_path / "L") == 0
    assert len(first) == 5
    assert not set(first) & set(rest)
    assert len(first + rest) == len(set(first + rest)) == 2 + 6 + 4 + 2


def test_an_objective_of_a_plug_in_is_placed_among_the_rows(
    played: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copy_of(played, tmp_path / "copy")
    (tmp_path / "twice.py").write_text(PLUG_IN)
    trained = in_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    mine = ["--with", "criterion=twice", "task.mask_prob=0.4", "--control", "masked"]
    grid = ["--grid", "optimizer.lr=1e-3,1e-4", "--name", "twice", "--tune-by", "valid.mlm"]
    assert league("--out", folder, *mine, *grid, "--user-dir", "twice.py") == 0
    shown = capsys.readouterr().out
    assert {name.split("/")[1] for name in trained} == {"twice"}
    contents = LeagueFolder(folder).read()
    assert f"plan {contents.plan.hash} + twice" in shown
    assert re.search(r"^dense +2 ", shown, re.M) and re.search(r"^twice +2 ", shown, re.M)
    assert contents.extended.objective("twice").control == "masked"
    assert contents.extended.objective("twice").metric == "valid.mlm"
    before = len(trained)
    assert league("--out", folder, *mine, *grid, "--user-dir", "twice.py") == 0
    assert len(trained) == before
    # Code is run only if the command line names it, and a name stands for one objective.
    assert league("--out", folder, "--objectives", "twice") == 2
    assert league("--out", folder, "--with", "task.mask_prob=0.2", "--name", "twice") == 2
    assert league("--out", folder, "--with", "task.mask_prob=0.2", "--name", "dense") == 2
    assert league("--out", folder, "--with", "lr", "--name", "other") == 2
    assert len(trained) == before


def test_a_plug_in_that_changed_after_its_runs_is_said(
    played: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copy_of(played, tmp_path / "copy")
    (tmp_path / "thrice.py").write_text(PLUG_IN.replace("twice", "thrice"))
    trained = in_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    mine = ["--with", "criterion=thrice", "--name", "thrice", "--user-dir", "thrice.py"]
    mine += ["--grid", "optimizer.lr=1e-3,1e-4"]
    assert league("--out", folder, *mine) == 0
    take_code(SweepFolder(folder / "final/thrice"))  # runs in processes take it
    jobs = {"job": "1", "folder": "jobs/0001", "executor": "local", "run": "x"}
    code = next((folder / "final/thrice/code").iterdir()).name
    SweepFolder(folder / "final/thrice").append("submit", code=code, **jobs)
    capsys.readouterr()
    assert league("--out", folder, *mine) == 0
    assert "has changed since" not in capsys.readouterr().err
    (tmp_path / "thrice.py").write_text(PLUG_IN.replace("twice", "thrice") + "# other\n")
    before = len(trained)
    assert league("--out", folder, *mine) == 0
    assert "thrice.py has changed" in capsys.readouterr().err
    assert len(trained) == before


def test_a_task_without_shuffled_tokens_is_seen_before_anything_runs(
    moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = in_process(monkeypatch)
    options = ["task=sentence_prediction", "task.labelled=which_moon_20"]
    options += ["criterion=sentence_prediction"]
    content = plan_with(data={"folder": str(moons)})
    shared = [o for o in content["options"] if not o.startswith("task")]
    plan = write_plan(
        tmp_path / "plan.yaml",
        moons,
        options=shared,
        objectives={"masked": {"options": options}},
        comparison__metric="valid.accuracy",
    )
    assert league(plan, "--out", tmp_path / "L") == 2
    assert "task.shuffle_tokens" in capsys.readouterr().err
    assert not trained


def test_a_grid_is_not_widened_beyond_the_range_of_its_option(
    moons: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The largest share of targets is 1, so only the rate gets a further value."""
    grid = {"task.mask_prob": [0.4, 0.9], "optimizer.lr": [1e-4, 1e-3]}
    objectives = {"masked": {"grid": grid}}
    plan = write_plan(
        tmp_path / "plan.yaml",
        moons,
        objectives=objectives,
        tuning__metric="valid.accuracy",
        controls__untrained=False,
        controls__shuffled=False,
    )
    trained = in_process(monkeypatch)
    monkeypatch.setattr(Trials, "best", lambda of: max(of, key=lambda t: [*t.values.values()]))
    assert league(plan, "--out", tmp_path / "L") == 0
    assert "not widened: " in capsys.readouterr().out
    assert len([name for name in trained if name.startswith("tune")]) == 2 * 3
    assert [name for name in trained if name.startswith("final")] == [
        f"final/masked/max_flops=3e7-mask_prob=0.9-lr=0.01-seed={seed}" for seed in (1, 2)
    ]


def test_an_objective_is_tuned_by_the_suites_of_its_own_metric(
    moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suites = [f"probe which_moon_20 name={name}" for name in ("moon", "other")]
    plan = write_plan(
        tmp_path / "plan.yaml",
        moons,
        objectives={"masked": {}, "dense": {"metric": "probes"}},
        seeds=[1],
        tuning__widen=0,
        controls__shuffled=False,
        comparison__suites=suites,
        comparison__means={"probes": ["moon.accuracy", "valid.accuracy"]},
    )
    in_process(monkeypatch)
    assert league(plan, "--out", tmp_path / "L") == 0
    folder = LeagueFolder(tmp_path / "L")
    runs = read_league_runs(folder, folder.read()).runs
    scored = {}
    for run in runs:
        scored.setdefault(run.values["label"], []).append([suite.name for suite in run.suites])
    assert scored.pop("masked, tuning") == [[], []]
    assert scored.pop("dense, tuning") == [["moon"]] * 2
    assert all(names == ["moon", "other"] for of_label in scored.values() for names in of_label)
    trials = [run for run in runs if run.values["label"] == "dense, tuning"]
    best = max(trials, key=lambda run: run.metrics["probes"])
    (final,) = (run for run in runs if run.values["label"] == "dense")
    assert final.values["optimizer.lr"] == best.values["optimizer.lr"]
    page = (folder.path / "report" / "standings.txt").read_text()
    expect_facts(page, "by valid.loss", "seed 101: masked 2", "dense, by probes, 2")


def test_an_archive_beside_the_plan_stands_in_for_its_runs(
    played: Path,
    moons: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    archive = tmp_path / "plan.jsonl.gz"
    assert league("report", played / "L", "--archive", archive) == 0
    plan = write_plan(tmp_path / "plan.yaml", moons)
    trained = in_process(monkeypatch)
    mine = ["--with", "task.mask_prob=0.4", "--name", "mine"]
    capsys.readouterr()
    assert league(plan, "--out", tmp_path / "L", *mine) == 0
    shown = capsys.readouterr().out
    assert {name.split("/")[1] for name in trained} == {"mine"}
    for name in ("masked", "dense", "mine"):
        assert re.search(rf"^{name} +2 ", shown, re.M)
    assert "dense 3 trials" in (tmp_path / "L" / "report" / "standings.txt").read_text()
    expect_facts(shown, "mine at 3.0e7", "all other rows ship")
    # Without a folder the rows of the archive are judged alike, by what it says of the data.
    assert league("report", plan, "--out", tmp_path / "page") == 0
    assert "All rows ship" in capsys.readouterr().out
    findings = []
    for folder in (played / "L" / "report", tmp_path / "page"):
        with open(folder / "standings.csv", newline="") as file:
            findings.append(
                [(r["objective"], r["findings"], r["mean"]) for r in csv.DictReader(file)]
            )
    assert findings[0] == findings[1] and "word frequencies" in findings[0][0][1]
    # Runs of another plan are no rows of this one.
    other = write_plan(tmp_path / "other.yaml", moons, seeds=[1, 2, 3])
    archive.rename(tmp_path / "other.jsonl.gz")
    assert league(other, "--out", tmp_path / "L2", *mine) == 0
    shown = capsys.readouterr()
    assert "another plan" in shown.err and not re.search("^masked ", shown.out, re.M)


def test_a_dry_run_says_what_it_takes_and_leaves_nothing(
    moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decay = [*PLAN["options"], "schedule=linear"]
    plan = write_plan(tmp_path / "plan.yaml", moons, seeds=list(range(1, 9)), options=decay)
    trained = in_process(monkeypatch)
    assert main(["sweep", "--plan", str(plan)]) == 0
    by_sweep = capsys.readouterr().out
    assert league(plan, "--out", tmp_path / "L", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert by_sweep.splitlines()[:5] == shown.splitlines()[:5]
    assert re.search(r"tune +4 runs +1\.2e8 FLOPs", shown)
    assert re.search(r"final +16 runs +4\.8e8 FLOPs", shown)
    assert re.search(r"all +24 runs", shown) and "80 % power" in shown
    assert not trained and not (tmp_path / "L").exists()
    assert league(plan, "--budgets", f"{SMALL},{LARGE}", "--dry-run") == 0
    assert "learning rate" not in capsys.readouterr().out  # each run reaches its last one
    for added, count in (([], 2), (["--with", "task.mask_prob=0.4"], 4)):  # added ones count, too
        assert league(plan, *added, "--dry-run") == 0
        assert f"among {count} comparisons" in capsys.readouterr().out


WRONG = {
    "an unknown budget": (["--budgets", "5e7"], "5e\\+07"),
    "an unknown objective": (["--objectives", "rtd"], "'rtd'"),
    "an unknown option": (["--with", "task.mask_porb=1"], "mask_porb"),
    "an unknown control": (["--with", "task.mask_prob=1", "--control", "rtd"], "rtd"),
    "an archive": (["--archive", "x.jsonl"], "report"),
    "a name for nothing": (["--name", "mine"], "--name.*--with"),
    "a grid for nothing": (["--grid", "optimizer.lr=1,2"], "--grid.*--with"),
    "a metric for nothing": (["--tune-by", "valid.mlm"], "--tune-by.*--with"),
    "a control for nothing": (["--control", "dense"], "--control.*--with"),
    "an option that is tuned": (["--with", "optimizer.lr=0.1"], "optimizer.lr is tuned"),
    "a budget in words": (["--budgets", "large"], "'large' is not a number"),
}


@pytest.mark.parametrize("words, message", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_command_is_refused_before_anything_runs(
    words: list[str],
    message: str,
    moons: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained = in_process(monkeypatch)
    plan = write_plan(tmp_path / "plan.yaml", moons)
    assert league(plan, "--out", tmp_path / "L", *words) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not trained and not (tmp_path / "L").exists()


def test_a_metric_that_no_run_has_is_seen_before_tuning(
    moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = write_plan(tmp_path / "plan.yaml", moons, comparison__metric="valid.mlmm")
    trained = in_process(monkeypatch)
    assert league(plan, "--out", tmp_path / "L") == 2
    assert "'valid.mlm'" in capsys.readouterr().err
    assert {name.split("/")[0] for name in trained} == {"untrained"}


def test_an_objective_whose_untrained_models_fail_is_not_tuned(
    moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    too_long = {"sentence_good": "0 " * 60, "sentence_bad": "1 " * 60, "UID": "long"}
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "long.jsonl").write_text(json.dumps(too_long) + "\n")
    suites = [f"pairs {tmp_path / 'pairs'}"]
    plan = write_plan(tmp_path / "plan.yaml", moons, comparison__suites=suites)
    trained = in_process(monkeypatch)
    assert league(plan, "--out", tmp_path / "L") == 1
    message = capsys.readouterr().err
    expect_facts(message, "untrained models of masked", "tokens")
    assert {name.split("/")[0] for name in trained} == {"untrained"}


@pytest.mark.parametrize(
    "changes, message, phases",
    [
        ({"tuning__metric": "valid.lss"}, "Did you mean 'valid.loss'", {"untrained"}),
        ({"comparison__means": {"valid.mlm": ["valid.loss"]}}, "of this name", {"untrained"}),
        (
            {"tuning__metric": "s.acuracy", "comparison__suites": ["probe which_moon_20 name=s"]},
            "Did you mean 's.accuracy'",
            {"untrained"},
        ),
        (
            {name: [1e3] for name in ("budgets", "usual_budgets", "tuning__budgets")}
            | {"controls__shuffled": False},
            "nothing to run",
            set(),
        ),
    ],
)
def test_plans_that_cannot_be_followed_are_seen_before_final_runs(
    changes: dict[str, Any],
    message: str,
    phases: set[str],
    moons: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained = in_process(monkeypatch)
    plan = write_plan(tmp_path / "plan.yaml", moons, **changes)
    assert league(plan, "--out", tmp_path / "L") == 2
    assert message in capsys.readouterr().err
    assert {name.split("/")[0] for name in trained} - {"tune"} == phases


def test_a_dry_run_refuses_a_budget_below_an_update(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = write_plan(tmp_path / "plan.yaml", moons, budgets=[1e3, SMALL], controls__shuffled=[])
    assert league(plan, "--dry-run", "--budgets", "1e3") == 2
    expect_facts(capsys.readouterr().err, "nothing to run", "1.0e3 FLOPs: masked, dense")


def test_a_budget_that_whole_updates_do_not_spend_is_left_out(
    moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 2.5e7 FLOPs dense makes three updates of 7.5e6, which leave a tenth; the others go on."""
    too_little = 2.5e7
    sentence = "Not at 2.5e7 FLOPs: dense, whose updates are so large"
    plan = write_plan(
        tmp_path / "plan.yaml",
        moons,
        budgets=[too_little, SMALL],
        usual_budgets=[too_little, SMALL],
        seeds=[1],
        tuning__widen=0,
        controls={"untrained": False, "shuffled": True, "seeds": [1]},
    )
    assert league(plan, "--out", tmp_path / "L", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert sentence in shown and re.search(r"final +3 runs", shown)
    assert re.search(r"shuffled +3 runs", shown)
    trained = in_process(monkeypatch)
    assert league(plan, "--out", tmp_path / "L") == 0
    assert sentence in capsys.readouterr().out.split("tune/")[0]
    final = [name.partition("-")[0] for name in trained if not name.startswith("tune")]
    assert sorted(final) == [
        *("final/dense/max_flops=3e7", "final/masked/max_flops=2.5e7"),
        *("final/masked/max_flops=3e7", "shuffled/dense/max_flops=3e7"),
        *("shuffled/masked/max_flops=2.5e7", "shuffled/masked/max_flops=3e7"),
    ]
    assert sentence in (tmp_path / "L" / "report" / "standings.md").read_text()
    assert league("report", tmp_path / "L", "--archive", tmp_path / "plan.jsonl.gz") == 0
    capsys.readouterr()
    assert league("report", plan) == 0
    assert sentence in " ".join(capsys.readouterr().out.split())
    # The price is known now: nothing is measured or trained again.
    monkeypatch.setattr(forecast, "_estimate_update", None)
    before = len(trained)
    assert league(plan, "--out", tmp_path / "L") == 0 and len(trained) == before


def test_one_command_at_a_time_runs_a_league(
    played: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = LeagueFolder(copy_of(played, tmp_path / "copy"))
    mine = ["--with", "task.mask_prob=0.4"]
    with folder.lock():
        assert league("--out", folder.path, *mine) == 1
        assert "another 'league' command" in capsys.readouterr().err
        assert league("report", folder.path) == 0
    assert folder.read().added == ()


def test_the_verdict_takes_a_smaller_loss_for_the_better_one(played: Path) -> None:
    """The name of the primary metric, valid.mlm, does not say so; the losses of runs do."""
    folder = LeagueFolder(played / "L")
    metric = read_league_runs(folder, folder.read()).standings().primary
    assert metric.name == "valid.mlm" and metric.lower_is_better and not metric.guessed


def test_data_that_are_gone_are_said(played: Path) -> None:
    folder = LeagueFolder(played / "L")
    runs = replace(read_league_runs(folder, folder.read()), corpus=None)
    assert any("ceiling and plateau" in note for note in runs.standings().notes)


def test_a_folder_is_of_one_plan_and_of_one_hash(
    played: Path, moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_plan(tmp_path / "plan.yaml", moons, comparison__level=0.01)
    assert league(other, "--out", played / "L") == 2
    assert "another plan" in capsys.readouterr().err
    assert league("report", tmp_path) == 2
    file = copy_of(played, tmp_path / "copy") / "league.json"
    text = file.read_text()
    file.write_text(text.replace("0.05", "0.01"))
    assert league("report", file.parent) == 1
    assert "changed after" in capsys.readouterr().err


def test_on_slurm_each_sweep_is_an_array_and_phases_wait(
    moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = []

    def submit(
        folder: SweepFolder, runs: list[PlannedRun], launch: Launch, code: Code
    ) -> list[str]:
        for run in runs:
            assert main(["train", *run.stages[0].arguments, "--quiet"]) == 0
        arrays.append(("/".join(folder.path.parts[-2:]), len(runs), launch.partition))
        return []

    monkeypatch.setattr(submit_module, "need_slurm", lambda: None)
    monkeypatch.setattr(runner, "submit_slurm", submit)
    plan = write_plan(tmp_path / "plan.yaml", moons, controls__shuffled=False, tuning__widen=0)
    launch = ["--executor", "slurm", "--partition", "cpu"]
    assert league(plan, "--out", tmp_path / "L", *launch) == 0
    assert arrays == [
        *(("untrained/masked", 1, "cpu"), ("untrained/dense", 1, "cpu")),
        *(("tune/masked", 2, "cpu"), ("tune/dense", 2, "cpu")),
        *(("final/masked", 2, "cpu"), ("final/dense", 2, "cpu")),
    ]


def test_a_league_on_slurm_ends_with_a_message_if_slurm_stays_silent(
    moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = []

    def unknown(folder: SweepFolder, runs: list[PlannedRun]) -> list[State]:
        looks.append(folder)
        return [State(run.name, "", "unknown", job="17_0", reason="squeue: down") for run in runs]

    monkeypatch.setattr(submit_module, "need_slurm", lambda: None)
    monkeypatch.setattr(runner, "submit_slurm", lambda *arguments: [])
    monkeypatch.setattr(runner, "read_states", unknown)
    monkeypatch.setattr(runner, "WAIT", 0.01)
    monkeypatch.setattr(runner, "SILENCE", 0.05)
    plan = write_plan(tmp_path / "plan.yaml", moons, objectives={"masked": {}})
    assert league(plan, "--out", tmp_path / "L", "--executor", "slurm", "--partition", "cpu") == 1
    assert re.search(r"1 jobs, such as 17_0 .*squeue: down.*same command", capsys.readouterr().err)
    assert 5 <= len(looks) <= 7


@pytest.mark.slow
def test_a_league_in_the_small_world_is_stopped_and_goes_on(tmp_path: Path) -> None:
    """Real processes, the world and a suite; after SIGTERM the same command ends it.

    Seven updates spend the budget.
    """
    budgets = {key: [3.2e7] for key in ("budgets", "usual_budgets", "tuning__budgets")}
    content = plan_with(
        data={"world": "quad", "world_documents": 400, "world_held_out": 50, "world_pairs": 10},
        comparison__suites=["pairs pairs compare=changed"],
        comparison__metric="pairs.brackets.accuracy",
        objectives={"masked": {}},
        seeds=[1],
        controls__shuffled=[3.2e7],
        **budgets,
    )
    content["options"] = [o for o in content["options"] if "tokens_per_sample" not in o]
    content["options"] = [o for o in content["options"] if "max_positions" not in o]
    content["options"] += ["task.tokens_per_sample=64", "model.max_positions=64"]
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump(content, sort_keys=False))
    process = Started(["league", str(plan), "--out", str(tmp_path / "L")], tmp_path / "shown")
    try:
        wait_until(lambda: list(tmp_path.glob("L/tune/*/*/results.json")), 300)
    finally:
        process.send(signal.SIGTERM)
    assert process.wait() == 75, process.text()
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("L/*/*/*/results.json")}
    finished = [f for f in before if json.loads(f.read_text())["status"] == "finished"]
    assert len(finished) < 6
    assert league(plan, "--out", tmp_path / "L", "--max-parallel", "2") == 0
    assert all(file.stat().st_mtime_ns == before[file] for file in finished)
    runs = LeagueFolder(tmp_path / "L").runs()
    assert len(runs) == 1 + 3 + 1 + 1
    scored = [run for run in runs if "pairs.brackets.accuracy" in run.metrics]
    labels = [{run.values["label"] for run in chosen} for chosen in (runs, scored)]
    assert labels[0] - labels[1] == {"masked, tuning"}
    codes = {run.results["code"] for run in runs}
    assert len(codes) == 1


def test_data_that_are_no_world_are_not_taken_for_that_of_the_plan(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(moons, tmp_path / "L" / "data")
    assert league("--out", tmp_path / "L") == 2
    assert "holds other data" in capsys.readouterr().err
