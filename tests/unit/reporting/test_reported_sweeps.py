import json
import re

import pytest
from sweeping import record_outcome
from synthetic import make_run

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.reporting.folders import find_plan, find_runs, pick_stage
from metaseq_lm.sweeps.definition import normalise
from metaseq_lm.sweeps.expansion import expand
from metaseq_lm.sweeps.folder import SweepFolder


def plan(tmp_path, names=("a", "b")):
    runs = [
        {
            "name": name,
            "folder": f"{name}",
            "stages": [
                {"name": "pretrain", "folder": f"{name}/pretrain"},
                {"name": "finetune", "folder": f"{name}/finetune"},
            ],
        }
        for name in names
    ]
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": runs}))


def picked(*paths, stage=None):
    runs, notes = pick_stage(find_runs(paths), find_plan(paths), paths, stage)
    return ["/".join(run.path.parts[-2:]) for run in runs], notes


def test_the_last_stage_is_tabulated_and_the_others_counted(tmp_path):
    for seed, name in enumerate("ab"):
        for stage in ("pretrain", "finetune"):
            make_run(tmp_path / name / stage, seed=seed, label=stage)
    make_run(tmp_path / "extra" / "x")
    plan(tmp_path)
    names, notes = picked(tmp_path)
    assert names == ["a/finetune", "b/finetune", "extra/x"]
    assert len(notes) == 1 and "2 runs" in notes[0] and "--stage pretrain" in notes[0]
    names, notes = picked(tmp_path, stage="pretrain")
    assert names == ["a/pretrain", "b/pretrain", "extra/x"] and "finetune" in notes[0]
    # From inside the sweep it is the same; the folder of a stage is meant as it is.
    assert picked(tmp_path / "a")[0] == ["a/finetune"]
    assert picked(tmp_path / "a" / "pretrain") == (["a/pretrain"], [])


def test_missing_runs_and_stages_are_named_with_the_reason(tmp_path):
    make_run(tmp_path / "a" / "pretrain", results={"status": "diverged", "updates": 7})
    make_run(tmp_path / "c" / "pretrain")
    (tmp_path / "c" / "finetune").mkdir()
    plan(tmp_path, ("a", "b", "c"))
    names, notes = picked(tmp_path)
    assert names == []
    missing = [
        "a, stage finetune .never started; stage pretrain diverged after 7",
        "b .never started",
        "c, stage finetune .never started",
    ]
    for note, fact in zip(notes[:3], missing, strict=True):
        assert re.match(f"Missing: {fact}", note), note


def test_a_run_outside_the_given_folder_is_not_missing(tmp_path):
    for name in "ab":
        for stage in ("pretrain", "finetune"):
            make_run(tmp_path / name / stage)
    plan(tmp_path, ("a", "b", "c"))
    names, notes = picked(tmp_path / "a")
    assert names == ["a/finetune"] and "Missing: c (" in notes[0]
    assert not any("b" in note.split() for note in notes)


@pytest.mark.parametrize(
    "sweep",
    [[], {}, {"runs": None}, {"runs": [1, {}, {"name": "n"}, {"stages": [{}]}]}],
)
def test_absent_keys_are_tolerated(tmp_path, sweep):
    make_run(tmp_path / "a")
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    assert find_plan([tmp_path]) == []
    assert len(picked(tmp_path)[0]) == 1


def test_planned_run_outside_the_sweep_folder_is_named(tmp_path):
    make_run(tmp_path / "a")
    runs = [
        {"name": "a", "stages": [{"name": "", "folder": "a"}]},
        {"stages": [{"name": "", "folder": str(tmp_path / "b")}]},
    ]
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": runs}))
    names, notes = picked(tmp_path)
    assert len(names) == len(notes) == 1 and "Missing: b (" in notes[0]


@pytest.mark.parametrize("folder", ["../store/run", "a/../../store/run", "/", "{store}/run"])
def test_a_plan_that_leads_out_of_the_sweep_is_refused(tmp_path, folder):
    make_run(tmp_path / "store" / "run")
    sweep = tmp_path / "sweep"
    make_run(sweep / "a")
    folder = folder.format(store=tmp_path / "store")
    runs = [{"name": "a", "stages": [{"name": "", "folder": folder}]}]
    (sweep / "sweep.json").write_text(json.dumps({"runs": runs}))
    with pytest.raises(MetaseqError, match="out of the"):
        picked(sweep)


def test_a_damaged_plan_and_an_unknown_stage_are_errors(tmp_path):
    make_run(tmp_path / "a")
    with pytest.raises(UsageError, match="no sweep.json"):
        picked(tmp_path, stage="finetune")
    plan(tmp_path)
    with pytest.raises(UsageError, match="'finetune'.*Stages: pretrain, finetune"):
        picked(tmp_path, stage="fintune")
    for text in ('{"runs": ', "[" * 100_000):
        (tmp_path / "sweep.json").write_text(text)
        with pytest.raises(MetaseqError, match="sweep.json"):
            picked(tmp_path)


def test_a_run_that_ends_where_another_begins_is_tabulated(tmp_path):
    make_run(tmp_path / "pre")
    make_run(tmp_path / "fine", score=0.9)
    short = {"name": "short", "stages": [{"name": "pretrain", "folder": "pre"}]}
    stages = [*short["stages"], {"name": "finetune", "folder": "fine"}]
    text = json.dumps({"runs": [{"name": "long", "stages": stages}, short]})
    (tmp_path / "sweep.json").write_text(text)
    assert [name.split("/")[-1] for name in picked(tmp_path)[0]] == ["fine", "pre"]


def test_report_and_status_tell_the_same_of_runs_without_a_score(tmp_path, capsys):
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    grid = {"criterion": ["rtd", "replace", "wrong", "killed", "later"]}
    definition = normalise({"data": str(data), "grid": grid})
    out.mkdir()
    runs = expand(definition, out)
    SweepFolder(out).adopt(definition, runs, {})
    names = {run.values["criterion"]: run.name for run in runs}
    for seed, name in enumerate(("rtd", "replace")):
        make_run(out / names[name], label=name, seed=seed)
    message = "metaseq-lm: task 'electra' needs criterion=electra_rtd, not 'wrong'"
    record_outcome(out, names["wrong"], "failed", message, 2)  # in its job, before any folder
    make_run(out / names["killed"], score=None, label="killed")
    record_outcome(out, names["killed"], "failed", "out of memory", -9)
    assert main(["report", str(out)]) == 0
    report = capsys.readouterr().out.splitlines()
    assert main(["sweep", "status", str(out)]) == 0
    status = capsys.readouterr().out.splitlines()
    reasons = {"wrong": "exit code 2: task 'electra' needs", "killed": "killed by SIGKILL: out of"}
    for name, reason in reasons.items():
        (line,) = [line for line in status if names[name] in line]
        (note,) = [note for note in report if names[name] in note]
        assert line.partition("job 1  ")[2] in note and reason in line and "failed" in note
    assert f"Missing: {names['later']} (never started)." in report
    assert main(["sweep", "status", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["counts"] == {"finished": 2, "failed": 2, "waiting": 1}
    by_name = {run["run"]: run for run in document["runs"]}
    assert by_name[names["wrong"]]["reason"] in next(x for x in report if names["wrong"] in x)
    assert any("400 of 400" in line and "no results.json" in line for line in report)
