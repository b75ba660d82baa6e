import json
import math
import shutil

import pytest
from outcomes import expect_facts
from synthetic import make_run

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.reporting.folders import find_runs
from metaseq_lm.reporting.runs import read_run


def write_log(folder, lines):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "log.jsonl").write_text(text)


def valid(update, accuracy):
    return {"kind": "valid", "update": update, "seconds": 1.0, "accuracy": accuracy}


def test_runs_are_found_once_and_in_natural_order(tmp_path):
    for seed in (10, 9, 1):
        make_run(tmp_path / "a" / f"seed{seed}", seed=seed)
    copied = tmp_path / "a" / "seed1" / "checkpoints" / "step_100"
    copied.mkdir(parents=True)
    for name in ("config.yaml", "log.jsonl"):
        (copied / name).write_bytes((tmp_path / "a" / "seed1" / name).read_bytes())
    runs = find_runs([tmp_path, tmp_path / "a" / "seed9"])
    assert [run.seed for run in runs] == [1, 9, 10]


def test_links_to_runs_are_followed_once(tmp_path):
    make_run(tmp_path / "a" / "seed1", seed=1)
    make_run(tmp_path / "b" / "seed2", seed=2)
    chosen = tmp_path / "chosen"
    chosen.mkdir()
    for name, place in (("one", "a/seed1"), ("two", "b/seed2"), ("again", "b/seed2")):
        (chosen / name).symlink_to(tmp_path / place)
    (tmp_path / "a" / "seed1" / "loop").symlink_to(tmp_path)
    assert [run.seed for run in find_runs([chosen])] == [1, 2]
    assert [run.seed for run in find_runs([tmp_path])] == [1, 2]


def test_the_code_of_a_run_is_no_matter_for_a_warning(tmp_path, capsys):
    """A sweep links it into each run; a report of one stage finds it outside of that folder."""
    (tmp_path / "code" / "hash").mkdir(parents=True)
    make_run(tmp_path / "stage" / "seed1", seed=1)
    (tmp_path / "stage" / "seed1" / "code").symlink_to(tmp_path / "code" / "hash")
    make_run(tmp_path / "stage" / "code", seed=2)
    assert [run.seed for run in find_runs([tmp_path / "stage"])] == [2, 1]
    assert not capsys.readouterr().err


def test_a_folder_without_runs_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no runs found"):
        find_runs([tmp_path])
    with pytest.raises(UsageError, match="no such folder"):
        find_runs([tmp_path / "nowhere"])


def test_label_comes_from_the_user_or_from_task_and_criterion(tmp_path):
    assert read_run(make_run(tmp_path / "a")).values["label"] == "label_tokens/cross_entropy"
    assert read_run(make_run(tmp_path / "b", label="soft")).values["label"] == "soft"


def test_of_two_lines_for_one_update_the_later_counts(tmp_path):
    folder = make_run(tmp_path / "a")
    write_log(folder, [valid(1, 0.1), valid(2, 0.2), valid(3, 0.3), valid(2, 0.25), valid(3, 0.35)])
    assert read_run(folder).series("valid.accuracy") == ([1, 2, 3], [0.1, 0.25, 0.35])


def test_a_torn_last_line_is_left_out_and_said(tmp_path):
    folder = make_run(tmp_path / "a", score=None)
    write_log(folder, [valid(1, 0.1), '{"kind": "valid", "upd'])
    run = read_run(folder)
    assert run.last_update == 1
    assert "log.jsonl:2" in run.notes[0] and "incomplete" in run.notes[0]


@pytest.mark.parametrize("bad", ['{"kind": "valid", "upd', "[1]", '{"update": 2}', "\x00\x00"])
def test_any_other_bad_line_is_an_error_with_its_number(tmp_path, bad):
    folder = make_run(tmp_path / "a")
    write_log(folder, [valid(1, 0.1), bad, valid(3, 0.1)])
    with pytest.raises(MetaseqError, match=r"log\.jsonl:2: damaged"):
        read_run(folder)


def test_non_finite_numbers_are_read_and_never_counted(tmp_path):
    folder = make_run(tmp_path / "a", score=math.nan)
    write_log(folder, [valid(1, 0.5), valid(2, math.nan), valid(3, math.inf)])
    run = read_run(folder)
    assert run.series("valid.accuracy")[1][2] == math.inf
    assert run.why_unscored("test.accuracy") == "test.accuracy is nan"


def test_why_a_run_has_no_score(tmp_path):
    unfinished = read_run(make_run(tmp_path / "a", score=None))
    expect_facts(unfinished.why_unscored("test.accuracy"), "400 of 400")
    diverged = read_run(make_run(tmp_path / "b", results={"status": "diverged", "updates": 7}))
    expect_facts(diverged.why_unscored("test.accuracy"), "diverged", "7 updates")
    text = "x" * 200 + "\nTraceback"
    failed = {"status": "failed", "message": text, "exit_code": 1, "updates": 3}
    why = read_run(make_run(tmp_path / "d", results=failed)).why_unscored("test.accuracy")
    expect_facts(why, "failed", "3 updates")
    assert why.endswith(f"(exit code 1): {'x' * 119}…")
    finished = read_run(make_run(tmp_path / "c"))
    assert finished.why_unscored("test.accuracy") is None
    expect_facts(finished.why_unscored("test.f1"), "results.json", "test.f1")


def test_a_run_that_died_before_its_first_line_is_found(tmp_path):
    folder = make_run(tmp_path / "a", score=None)
    (folder / "log.jsonl").unlink()
    (folder / "command.txt").write_text("metaseq-lm train")
    (run,) = find_runs([tmp_path])
    assert run.status == "unfinished" and "no log.jsonl" in run.notes[0]


def test_damaged_files_are_named(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder / "results.json").write_text('{"status": ')
    with pytest.raises(MetaseqError, match="results.json"):
        read_run(folder)
    for part in ("metrics", "pretraining"):
        (folder / "results.json").write_text(json.dumps({"status": "finished", part: ["x"]}))
        with pytest.raises(MetaseqError, match=f"results.json.*{part} is no mapping"):
            read_run(folder)
    (folder / "results.json").unlink()
    (folder / "config.yaml").write_text("a: [1")
    with pytest.raises(MetaseqError, match="config.yaml"):
        read_run(folder)


def test_cost_includes_pretraining(tmp_path):
    before = {"seconds": 100.0, "flops": 5e12, "updates": 10, "run": "pre"}
    run = read_run(make_run(tmp_path / "a", results={"pretraining": before}))
    assert run.costs["flops"] == 6e12 and run.costs["own_flops"] == 1e12
    assert run.costs["seconds"] == 160.0 and run.costs["own_seconds"] == 60.0
    assert run.costs["words"] is None
    results = {"words_seen": 5, "pretraining": before | {"words": 700}}
    assert read_run(make_run(tmp_path / "c", results=results)).costs["words"] == 705
    lacking = read_run(make_run(tmp_path / "b", results={"pretraining": {"seconds": 1.0}}))
    assert lacking.costs["flops"] is None


def test_config_of_the_pretraining_run_belongs_to_the_setting(tmp_path, monkeypatch):
    make_run(tmp_path / "pre", label="electra", optimizer={"lr": 5e-4})
    checkpoint = tmp_path / "pre" / "checkpoints" / "step_400"
    checkpoint.mkdir(parents=True)
    run = read_run(make_run(tmp_path / "fine" / "a", init_from=str(checkpoint)))
    assert run.values["pretraining.label"] == "electra"
    assert run.values["pretraining.optimizer.lr"] == 5e-4
    # A relative path is found from a folder above the run, too.
    run = read_run(make_run(tmp_path / "fine" / "b", init_from="pre"))
    assert run.values["pretraining.label"] == "electra"
    # Of a tree beside this one, not from the run of that name here.
    here = tmp_path / "here"
    make_run(here / "pre", label="another")
    monkeypatch.chdir(here)
    assert read_run(tmp_path / "fine" / "b").values["pretraining.label"] == "electra"
    lost = read_run(make_run(tmp_path / "fine" / "c", init_from="/nowhere/pre"))
    assert lost.values["pretraining.label"] == "unknown" and "/nowhere/pre" in lost.notes[0]


def test_runs_that_start_from_each_other_end(tmp_path):
    make_run(tmp_path / "a", init_from=str(tmp_path / "b"))
    make_run(tmp_path / "b", init_from=str(tmp_path / "a"))
    values = read_run(tmp_path / "a").values
    assert values["pretraining.pretraining.label"] == "unknown"


def test_a_copied_run_counts_once(tmp_path):
    shutil.copytree(make_run(tmp_path / "a"), tmp_path / "copy")
    make_run(tmp_path / "again", results={"seconds": 61.0})
    make_run(tmp_path / "died", score=None)
    shutil.copytree(tmp_path / "died", tmp_path / "died_copy")  # may be two that both died
    runs = find_runs([tmp_path])
    assert [run.path.name for run in runs] == ["a", "again", "died", "died_copy"]
    (note,) = [note for run in runs for note in run.notes if "copy" in note]
    assert "once" in note and str(tmp_path / "copy") in note
