import json

import pytest
from synthetic import make_run

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.reporting.folders import find_plan, pick_stage, read_runs


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
    runs, notes = pick_stage(read_runs(paths), find_plan(paths), paths, stage)
    return ["/".join(run.path.parts[-2:]) for run in runs], notes


def test_the_last_stage_is_tabulated_and_the_others_counted(tmp_path):
    for seed, name in enumerate("ab"):
        for stage in ("pretrain", "finetune"):
            make_run(tmp_path / name / stage, seed=seed, label=stage)
    make_run(tmp_path / "extra" / "x")
    plan(tmp_path)
    names, notes = picked(tmp_path)
    assert names == ["a/finetune", "b/finetune", "extra/x"]
    assert notes == ["Not in the table: 2 runs of the stage pretrain (--stage pretrain)."]
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
    assert notes[:3] == [
        "Missing: a, stage finetune (never started; stage pretrain diverged after 7 updates).",
        "Missing: b (never started).",
        "Missing: c, stage finetune (never started).",
    ]


def test_a_run_outside_the_given_folder_is_not_missing(tmp_path):
    for name in "ab":
        for stage in ("pretrain", "finetune"):
            make_run(tmp_path / name / stage)
    plan(tmp_path, ("a", "b", "c"))
    names, notes = picked(tmp_path / "a")
    assert names == ["a/finetune"] and notes[0] == "Missing: c (never started)."
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
    assert len(names) == 1 and notes == ["Missing: b (never started)."]


@pytest.mark.parametrize("folder", ["../store/run", "a/../../store/run", "/", "{store}/run"])
def test_a_plan_that_leads_out_of_the_sweep_is_refused(tmp_path, folder):
    make_run(tmp_path / "store" / "run")
    sweep = tmp_path / "sweep"
    make_run(sweep / "a")
    folder = folder.format(store=tmp_path / "store")
    runs = [{"name": "a", "stages": [{"name": "", "folder": folder}]}]
    (sweep / "sweep.json").write_text(json.dumps({"runs": runs}))
    with pytest.raises(MetaseqError, match="leads out of the sweep"):
        picked(sweep)


def test_a_damaged_plan_and_an_unknown_stage_are_errors(tmp_path):
    make_run(tmp_path / "a")
    with pytest.raises(UsageError, match="no sweep.json"):
        picked(tmp_path, stage="finetune")
    plan(tmp_path)
    with pytest.raises(UsageError, match="Did you mean 'finetune'.*Stages: pretrain, finetune"):
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
