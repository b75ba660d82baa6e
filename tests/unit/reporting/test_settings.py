from dataclasses import replace

import pytest
from synthetic import make_run

from metaseq_lm.cli import main
from metaseq_lm.core.errors import UsageError
from metaseq_lm.reporting.folders import find_runs
from metaseq_lm.reporting.settings import axis_numbers, group, hidden_keys, where

ELMO = {"task.elmo": "language_model"}
TEACHERS = {"task.teachers": "teachers"}


def runs_of(tmp_path, *options):
    for i, option in enumerate(options):
        make_run(tmp_path / f"run{i}", **option)
    return find_runs([tmp_path])


def test_seed_paths_and_engine_do_not_make_a_setting(tmp_path):
    runs = runs_of(
        tmp_path,
        {"seed": 1, "engine": {"device": "cpu"}, "user_dir": "/a"},
        {"seed": 2, "engine": {"device": "cuda"}, "user_dir": "/b"},
    )
    (setting,) = group(runs)
    assert len(setting.runs) == 2 and list(setting.values) == ["label"]


def test_the_precision_makes_a_setting(tmp_path):
    runs = runs_of(tmp_path, *({"engine": {"precision": p}} for p in ("fp32", "bf16")))
    assert len(group(runs)) == 2


def test_an_option_that_earlier_runs_lack_makes_no_setting_at_its_default(tmp_path):
    tasks = [{"_name": "causal_lm", **more} for more in ({}, {"shuffle_tokens": False})]
    runs_of(tmp_path / "lm", *({"task": task} for task in tasks))
    starts = [{"init_from": str(tmp_path / f"lm/run{i}")} for i in range(2)]
    assert len(group(runs_of(tmp_path / "tuned", *starts))) == 1
    assert len(group(find_runs([tmp_path / "lm"]))) == 1
    make_run(tmp_path / "lm" / "shuffled", task={"_name": "causal_lm", "shuffle_tokens": True})
    assert len(group(find_runs([tmp_path / "lm"]))) == 2


def test_bookkeeping_does_not_make_a_setting(tmp_path):
    trainers = [{"max_update": 400, "keep_last": n, "log_interval": n} for n in (1, 2)]
    assert len(group(runs_of(tmp_path, *({"trainer": t} for t in trainers)))) == 1


def test_a_language_model_counts_by_its_config(tmp_path):
    """Each seed may have one of its own; one of another length makes another setting."""
    for name, seed, updates in (("a", 1, 400), ("b", 2, 400), ("c", 1, 4000)):
        lm = make_run(tmp_path / "lm" / name, seed=seed, trainer={"max_update": updates})
        task = {"_name": "tagging", "elmo": str(lm)}
        make_run(tmp_path / "runs" / name, seed=seed, task=task, label="elmo", sources=ELMO)
    settings = group(find_runs([tmp_path / "runs"]))
    assert sorted(len(setting.runs) for setting in settings) == [1, 2]


def test_settings_ignore_teacher_paths(tmp_path):
    """Each seed of a student has teachers of its own; a run that started from it, too."""
    for seed in (1, 2):
        places = [f"/runs/{name}/seed={seed}" for name in "ab"]
        for name, teachers in (("student", places), ("alone", [])):
            task = {"_name": "bam", "labelled": ["a", "b"], "teachers": teachers}
            make_run(tmp_path / f"{name}{seed}", seed=seed, task=task, label=name, sources=TEACHERS)
            start = {"seed": seed, "init_from": str(tmp_path / f"{name}{seed}")}
            make_run(tmp_path / f"{name}{seed}_tuned", **start, label=f"{name} tuned")
    settings = group(find_runs([tmp_path]))
    assert [(s.values["label"], len(s.runs)) for s in settings] == [
        ("alone", 2),
        ("alone tuned", 2),
        ("student", 2),
        ("student tuned", 2),
    ]
    # Without labels, too, it is told whether there are teachers.
    unnamed = [replace(run, values=run.values | {"label": "x"}) for run in find_runs([tmp_path])]
    runs = [run for run in unnamed if not run.values["init_from"]]
    assert [(s.values["teachers"], len(s.runs)) for s in group(runs)] == [(0, 2), (2, 2)]
    command = ["report", *(str(run.path) for run in runs), "--metric", "valid.accuracy"]
    assert main([*command, "--baseline", "label=alone"]) == 0


def test_whole_numbers_and_floats_are_one_value(tmp_path):
    assert len(group(runs_of(tmp_path, {"clip": 1}, {"clip": 1.0}))) == 1


def test_true_is_not_one(tmp_path):
    assert len(group(runs_of(tmp_path, {"clip": 1}, {"clip": True}))) == 2


def test_names_hold_what_tells_settings_apart_and_no_more(tmp_path):
    runs = runs_of(
        tmp_path,
        {"label": "soft", "config": {"optimizer.lr": 1e-3, "trainer.max_update": 10}},
        {"label": "soft", "config": {"optimizer.lr": 1e-4, "trainer.max_update": 20}},
        {"label": "hard", "config": {"criterion._name": "other"}},
    )
    settings = group(runs)
    assert [s.name for s in settings] == ["hard, lr=0.001", "soft, lr=0.0001", "soft, lr=0.001"]
    assert hidden_keys(settings) == ["trainer.max_update"]
    assert settings[1].name_without("optimizer.lr") == "soft"


def test_a_requested_key_is_kept_even_if_excluded(tmp_path):
    settings = group(runs_of(tmp_path, {"seed": 2}, {"seed": 10}), ["seed"])
    assert [s.values["seed"] for s in settings] == [2, 10]


def test_an_unknown_key_names_the_nearest(tmp_path):
    runs = runs_of(tmp_path, {})
    with pytest.raises(UsageError, match="mean 'task.labelled'"):
        group(runs, ["labelled"])
    with pytest.raises(UsageError, match="mean 'optimizer.lr'"):
        group(runs, ["optimiser.lr"])


def test_where_selects_by_values_as_typed(tmp_path):
    runs = runs_of(
        tmp_path,
        *({"optimizer": {"lr": lr}, "seed": s} for lr in (1e-3, 1e-4, 1e-5) for s in (1, 2)),
    )
    assert len(where(runs, [])) == 6
    assert len(where(runs, ["optimizer.lr=1e-4"])) == 2
    assert len(where(runs, ["optimizer.lr=1e-4", "optimizer.lr=0.001", "seed=2"])) == 2
    assert len(where(runs, ["init_from=null"])) == 6
    assert len(where(runs, ["optimizer.lr='0.001'"])) == len(where(runs, ["optimizer.lr=0.001"]))
    with pytest.raises(UsageError, match="seed: 1, 2"):
        where(runs, ["seed=3"])
    with pytest.raises(UsageError, match="KEY=VALUE"):
        where(runs, ["seed"])


def test_lists_are_written_as_on_the_command_line(tmp_path):
    several = {"task": {"labelled": ["chunk", "pos"], "buckets": [3, 0.5]}}
    runs = runs_of(tmp_path, several, {"task": {"labelled": ["chunk"], "buckets": [3]}})
    assert sorted(s.name for s in group(runs, ["task.labelled"]))[0].endswith("[chunk,pos]")
    for typed in ("[chunk,pos]", "[chunk, 'pos']"):
        assert len(where(runs, [f"task.labelled={typed}"])) == 1
    assert len(where(runs, ["task.buckets=[3, 5e-1]"])) == 1
    with pytest.raises(UsageError, match=r"task.labelled: \[chunk,pos\], \[chunk\]"):
        where(runs, ["task.labelled=[pos]"])


def test_scores_and_duplicate_seeds(tmp_path):
    runs = runs_of(
        tmp_path,
        {"score": 0.5, "seed": 1},
        {"score": 0.6, "seed": 2},
        {"score": 0.7, "seed": 2},
        {"score": None, "seed": 1},
    )
    (setting,) = group(runs)
    assert setting.run_scores("test.accuracy") == [0.5, 0.6, 0.7]
    assert list(setting.repeated_seeds("test.accuracy")) == [2]


def test_numbers_behind_a_common_prefix():
    assert axis_numbers(["which_moon_10", "which_moon_200"]) == ([10.0, 200.0], "which_moon_")
    assert axis_numbers([1, 2.5]) == ([1.0, 2.5], "")
    assert axis_numbers(["moon_10", "sun_20"]) is None
    assert axis_numbers(["moon_10", "moon_all"]) is None
    assert axis_numbers([1, None]) is None
    assert axis_numbers([True, False]) is None
