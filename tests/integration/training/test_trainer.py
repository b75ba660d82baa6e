"""The calendar: what is logged, saved, kept and when it stops."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from battery import configure, train

from metaseq_lm import __version__
from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import TASKS
from metaseq_lm.runs.manifests import CheckpointError
from metaseq_lm.training import checkpointing, run

CASE = ("masked_lm", 0)


def lines(path: Path, kind: str) -> list[dict]:
    rows = [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def test_intervals(moons, tmp_path):
    more = "log_interval=3 validate_interval_updates=4 save_interval_updates=5 keep_last=9".split()
    train(
        configure(moons, tmp_path, CASE, "trainer.max_update=11", *(f"trainer.{m}" for m in more))
    )
    assert [row["update"] for row in lines(tmp_path, "train")] == [3, 6, 9, 11]
    assert [row["update"] for row in lines(tmp_path, "valid")] == [4, 8, 11]
    saved = {int(p.name[-9:]) for p in (tmp_path / "checkpoints").glob("update_*")}
    assert {5, 10, 11} <= saved
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["status"] == "finished" and results["updates"] == 11
    assert results["metrics"]["valid"] == {
        k: v
        for k, v in lines(tmp_path, "valid")[-1].items()
        if k not in ("kind", "update", "seconds", "checksum")
    }


def test_streams_without_names_are_a_mistake_that_is_named(moons, tmp_path, monkeypatch):
    config = configure(moons, tmp_path, CASE)
    task = TASKS.entry("masked_lm").value
    streams = task.build_streams
    monkeypatch.setattr(task, "build_streams", lambda *args: list(streams(*args).values()))
    with pytest.raises(UsageError, match="'masked_lm'.*list.*dict"):
        train(config)


def test_best_is_the_best_and_patience_stops(moons, tmp_path):
    """With a rate of 0 nothing gets better than the first validation."""
    more = ["trainer.max_update=50", "trainer.validate_interval_updates=2", "trainer.patience=3"]
    train(configure(moons, tmp_path, CASE, *more, "optimizer.lr=0"))
    assert [row["update"] for row in lines(tmp_path, "valid")] == [2, 4, 6, 8]
    assert (tmp_path / "checkpoints" / "best").resolve().name == "update_000000002"
    assert json.loads((tmp_path / "results.json").read_text())["updates"] == 8


@pytest.mark.parametrize("splits", ["[]", "[valid]"])
def test_results_are_of_the_best_checkpoint(splits, moons, tmp_path):
    """Its validation counts, whether or not further splits are scored."""
    more = [
        "trainer.max_update=8",
        "trainer.validate_interval_updates=2",
        f"trainer.final_splits={splits}",
    ]
    # The worst of all is called the best: it is not the last.
    more += ["trainer.best_checkpoint_metric=loss", "trainer.maximize_best_checkpoint_metric=true"]
    train(configure(moons, tmp_path, CASE, *more))
    losses = [row["loss"] for row in lines(tmp_path, "valid")]
    assert max(losses) > losses[-1]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["metrics"]["valid"]["loss"] == pytest.approx(max(losses), abs=1e-9)


@pytest.mark.parametrize("option", ["valid_split=dev", "final_splits=[valid,dev]"])
def test_a_split_that_is_not_there_costs_no_training(option, moons, tmp_path):
    with pytest.raises(MetaseqError, match="'dev'.*train, valid"):
        train(configure(moons, tmp_path, CASE, f"trainer.{option}"))
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "log.jsonl").exists()


def test_the_latest_of_equals_can_be_the_best(moons, tmp_path):
    """Then patience begins anew with each of them."""
    more = ["trainer.max_update=8", "trainer.validate_interval_updates=2", "trainer.patience=2"]
    train(configure(moons, tmp_path, CASE, *more, "trainer.ties=latest", "optimizer.lr=0"))
    assert [row["update"] for row in lines(tmp_path, "valid")] == [2, 4, 6, 8]
    assert (tmp_path / "checkpoints" / "best").resolve().name == "update_000000008"


def test_best_checkpoint_can_be_the_initial_one(moons, tmp_path):
    """validate_first: one validation more, before the first update, which it does not change."""
    more = ["trainer.max_update=6", "trainer.validate_interval_updates=2", "trainer.keep_last=1"]
    worse = ["optimizer.lr=30", "schedule=constant", "trainer.validate_first=true"]
    train(configure(moons, tmp_path / "first", CASE, *more, *worse))
    assert [row["update"] for row in lines(tmp_path / "first", "valid")] == [0, 2, 4, 6]
    best = tmp_path / "first" / "checkpoints" / "best"
    assert best.resolve().name == "update_000000000" and (best / "manifest.json").exists()
    weights = [
        train(configure(moons, tmp_path / str(i), CASE, *more, f"trainer.validate_first={first}"))
        for i, first in enumerate(("true", "false"))
    ]
    assert all((weights[0][n] == weights[1][n]).all() for n in weights[0])


def test_a_run_killed_after_the_first_validation_resumes(moons, tmp_path):
    """The validation at update 0 is not made twice; that at 2, after the checkpoint, is dropped."""
    more = ["trainer.validate_first=true", "trainer.keep_last=3"]
    train(configure(moons, tmp_path, CASE, *more, "trainer.max_update=2"))
    for name in ("update_000000002", "last"):
        path = tmp_path / "checkpoints" / name
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    (tmp_path / "results.json").unlink()
    train(configure(moons, tmp_path, CASE, *more, "trainer.max_update=4"))
    assert [row["update"] for row in lines(tmp_path, "valid")] == [0, 4]
    assert "at update 0" in lines(tmp_path, "event")[0]["message"]


def test_a_longer_run_goes_on_from_a_finished_one(moons, tmp_path):
    train(configure(moons, tmp_path, CASE, "trainer.max_update=3"))
    train(configure(moons, tmp_path, CASE, "trainer.max_update=5"))
    assert [row["update"] for row in lines(tmp_path, "train")] == [1, 2, 3, 4, 5]
    assert "resumed" in lines(tmp_path, "event")[0]["message"]


def time_on(day: str) -> str:
    return f"2026-11-{day}T00:00:00+00:00"


def test_results_say_when_and_with_what_a_run_was_made(moons, tmp_path, monkeypatch):
    """A run that is resumed has its first start, one of an earlier version has none."""
    spans = []
    for day, updates in (("01", 2), ("02", 4), ("03", 6)):
        for module in (checkpointing, run):
            monkeypatch.setattr(module, "present_time", lambda day=day: time_on(day))
        if day == "03":
            newest = (tmp_path / "checkpoints" / "last" / "manifest.json").resolve()
            manifest = json.loads(newest.read_text())
            assert manifest.pop("started") == time_on("01")
            newest.write_text(json.dumps({k: v for k, v in manifest.items() if k != "checksum"}))
        train(configure(moons, tmp_path, CASE, f"trainer.max_update={updates}"))
        results = json.loads((tmp_path / "results.json").read_text())
        spans.append((results["started"], results["ended"]))
    assert [start for start, _ in spans] == [time_on("01"), time_on("01"), None]
    assert [end for _, end in spans] == [time_on("01"), time_on("02"), time_on("03")]
    assert results["versions"]["torch"] == torch.__version__
    assert results["versions"]["metaseq-lm"] == __version__
    assert results["threads"] == torch.get_num_threads() and results["architecture"]


def test_damaged_newest_checkpoint_is_passed_over(moons, tmp_path):
    straight = train(configure(moons, tmp_path / "straight", CASE, "trainer.max_update=4"))
    more = ["trainer.save_interval_updates=1", "trainer.keep_last=5"]
    train(configure(moons, tmp_path / "cut", CASE, "trainer.max_update=3", *more))
    file = tmp_path / "cut" / "checkpoints" / "update_000000003" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 8
    file.write_bytes(data)
    resumed = train(configure(moons, tmp_path / "cut", CASE, "trainer.max_update=4", *more))
    messages = [row["message"] for row in lines(tmp_path / "cut", "event")]
    assert any("damaged" in m for m in messages) and any("update 2" in m for m in messages)
    assert all((straight[n] == resumed[n]).all() for n in straight)


def test_other_data_under_the_same_name_is_refused(moons, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(moons, data)
    train(configure(data, tmp_path / "run", CASE, "trainer.max_update=2"))
    manifest = data / "manifest.json"
    shutil.rmtree(data)
    text = tmp_path / "text"
    text.write_text("1 2 3\n4 5 6\n" * 40)
    files = ["--trainpref", str(text), "--validpref", str(text), "--tokenizer-from", str(moons)]
    assert main(["preprocess", *files, "--destdir", str(data)]) == 0 and manifest.exists()
    with pytest.raises(CheckpointError, match="other data.*--save-dir"):
        train(configure(data, tmp_path / "run", CASE, "trainer.max_update=3"))


def test_a_finish_that_was_missed_is_made_up(moons, tmp_path):
    """Killed after the last checkpoint, before the results: the next start writes them."""
    train(configure(moons, tmp_path, CASE, "trainer.max_update=2"))
    wanted = json.loads((tmp_path / "results.json").read_text())
    (tmp_path / "results.json").unlink()
    train(configure(moons, tmp_path, CASE, "trainer.max_update=2"))
    assert json.loads((tmp_path / "results.json").read_text())["metrics"] == wanted["metrics"]


def test_cost_of_fine_tuning_includes_all_before(moons, tmp_path):
    chain = ["trainer.max_update=2"]
    train(configure(moons, tmp_path / "a", CASE, *chain))
    train(configure(moons, tmp_path / "b", CASE, *chain, f"init_from={tmp_path}/a"))
    tuned = ("token_labels", 0)
    train(configure(moons, tmp_path / "c", tuned, *chain, f"init_from={tmp_path}/b"))
    cost = {n: json.loads((tmp_path / n / "results.json").read_text()) for n in "abc"}
    assert cost["c"]["pretraining"]["flops"] == cost["a"]["flops"] + cost["b"]["flops"]
    assert cost["c"]["pretraining"]["updates"] == 4
