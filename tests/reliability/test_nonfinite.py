"""What is not finite: nothing of such an update stays, on any replica, and a policy decides."""

import json
import re
from pathlib import Path

import pytest
import torch
from real_runs import Started, command, faults, records, rows

from metaseq_lm.runs import checkpoint, manifests

RECORD = {"METASEQ_LM_RECORD": "1"}
KINDS = [(what, where) for what in ("nan", "inf", "-inf") for where in ("loss", "gradient")]
KINDS += [(what, where) for what in ("nan", "inf", "-inf") for where in ("weight", "activation")]
counts = pytest.mark.parametrize("count", [1, 2])


def train(data: Path, save: Path, count: int, each: list[dict], *more: str, **other) -> Started:
    """Run to the end with faults, in four micro-batches on each of `count` replicas."""
    options = [f"engine.micro_batch_size={4 // count}", *more]
    options += ["--nproc", str(count)] if count > 1 else []
    arguments = command(data, save, *options, **other)
    run = Started(arguments, save.with_suffix(".err"), RECORD | faults(*each))
    run.wait()
    assert not run.members()
    return run


def results(save: Path) -> dict:
    return json.loads((save / "results.json").read_text())


def lines(save: Path, count: int) -> list[list[dict]]:
    """Return the records of each update by all replicas."""
    return list(zip(*(records(save, rank) for rank in range(count)), strict=True))


def check(save: Path, count: int, refused: set[int]) -> None:
    """Of a refused update nothing stays on any replica; any other changes all of them alike."""
    for replicas in lines(save, count):
        update = replicas[0]["update"]
        assert len({tuple(line["after"]) for line in replicas}) == 1
        for line in replicas:
            assert bool(line["refused"]) == (update in refused)
            unchanged = [a == b for a, b in zip(line["before"], line["after"])]
            assert all(unchanged) if update in refused else not any(unchanged), update
    events = [e for e in rows(save, "event") if "is not finite" in e["message"]]
    assert [e["update"] for e in events] == sorted(refused)
    for event in events:
        numbers = [line["samples"] for line in lines(save, count)[event["update"]]]
        assert event["samples"] == numbers
        assert f"update {event['update'] + 1}" in event["message"]


@counts
def test_skip(count, moons, tmp_path):
    """NaN, +Inf, -Inf in loss, gradient, weight, activation of a replica, at micro-batch 1 of 4."""
    save = tmp_path / "run"
    each = [
        {"what": what, "where": where, "update": 2 * i + 1, "slot": 1, "rank": i % count}
        for i, (what, where) in enumerate(KINDS)
    ]
    more = ["trainer.on_nonfinite=skip", f"trainer.max_update={2 * len(KINDS) + 1}"]
    run = train(moons, save, count, each, *more, "trainer.save_interval_updates=1")
    assert run.code == 0, run.text()
    check(save, count, {fault["update"] for fault in each})
    found = [row["update"] for row in rows(save, "train")]
    assert found == list(range(1, 2 * len(KINDS) + 2))


@counts
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[-1]], ids="-".join)
def test_stop(kind, count, moons, tmp_path):
    save = tmp_path / "run"
    fault = {"what": kind[0], "where": kind[1], "update": 5, "slot": 1, "rank": count - 1}
    more = ["trainer.max_update=8", "trainer.save_interval_updates=2"]
    run = train(moons, save, count, [fault], *more)
    text = run.text()
    assert run.code == 3 and results(save)["status"] == "diverged", text
    assert len(re.findall("metaseq-lm: update 6: .*main", text)) == 1
    assert ("loss of replica" in text) == (count == 2)
    assert "Traceback" not in text
    check(save, count, {5})
    last = checkpoint.load(manifests.resolve(str(save)))
    assert last.state["update"] == 4
    # The advice that the message gives works.
    run = train(moons, save, count, [fault], *more, "trainer.on_nonfinite=skip")
    assert run.code == 0 and results(save)["updates"] == 8, run.text()


@pytest.mark.parametrize("many, code", [(2, 0), (3, 3)])
def test_skip_beyond_max_nonfinite_stops_the_run(many, code, moons, tmp_path):
    """With saves in between: they do not begin the count anew."""
    save = tmp_path / "run"
    updates = [2, *range(4, 4 + many)]
    each = [{"what": "nan", "where": "loss", "update": u, "slot": 1} for u in updates]
    more = ["trainer.on_nonfinite=skip", "trainer.max_nonfinite=2", "trainer.max_update=8"]
    run = train(moons, save, 1, each, *more, "trainer.save_interval_updates=1")
    assert run.code == code, run.text()
    check(save, 1, set(updates))
    assert code == 0 or "(3 times in" in run.text()


@pytest.mark.parametrize("where", ["student", "teacher"])
def test_skip_with_two_optimizers(where, moons, tmp_path):
    """Four steps of the student are undone when the teacher's gradient is bad."""
    save = tmp_path / "run"
    fault = {"what": "nan", "where": "gradient", "update": 3, "slot": None}
    fault["of"] = f"{where}.encoder.stack.layers.0.fc1.weight"
    more = ["trainer.on_nonfinite=skip", "trainer.max_update=6", "trainer.valid_split=''"]
    run = train(moons, save, 1, [fault], *more, case=("meta_pseudo_label_hard", 0))
    assert run.code == 0, run.text()
    check(save, 1, {3})


@counts
def test_rollback(count, moons, tmp_path):
    """Weights and moments are those of the last checkpoint, the data those that come next."""
    save = tmp_path / "run"
    fault = {"what": "nan", "where": "weight", "update": 7, "rank": count - 1, "once": True}
    more = ["trainer.on_nonfinite=rollback", "trainer.max_update=10", "trainer.valid_split=''"]
    run = train(
        moons, save, count, [fault | {"stays": True}], *more, "trainer.save_interval_updates=3"
    )
    assert run.code == 0, run.text()
    every = lines(save, count)
    assert [r[0]["update"] for r in every] == [*range(8), *range(6, 10)]
    for rank in range(count):
        mine = [replicas[rank] for replicas in every]
        assert mine[8]["before"] == mine[6]["before"]
        seen = [tuple(s for part in line["samples"]["train"] for s in part) for line in mine]
        assert len(set(seen)) == len(seen)  # no batch twice
    assert results(save)["updates"] == 10
    assert "update_000000006 at" in rows(save, "event")[-1]["message"]


def test_rollbacks_to_one_place_end(moons, tmp_path):
    save = tmp_path / "run"
    fault = {"what": "inf", "where": "loss", "update": 4}
    more = ["trainer.on_nonfinite=rollback", "trainer.max_nonfinite=2"]
    run = train(moons, save, 1, [fault], *more, "trainer.save_interval_updates=3")
    assert run.code == 3 and "(3 times in" in run.text()
    assert [line["update"] for line in records(save)].count(4) == 3


def test_rollback_before_the_first_save(moons, tmp_path):
    save = tmp_path / "run"
    fault = {"what": "nan", "where": "weight", "update": 0, "once": True, "stays": True}
    more = ["trainer.on_nonfinite=rollback", "trainer.max_update=3"]
    run = train(moons, save, 1, [fault], *more)
    assert run.code == 0 and results(save)["updates"] == 3, run.text()


@counts
def test_a_poisoned_checkpoint_is_never_written(count, moons, tmp_path):
    """A weight that no loss sees, spoilt on one replica: all stop at the save, at once."""
    save = tmp_path / "run"
    fault = {"what": "nan", "where": "weight", "of": "encoder.embeddings.positions.weight"}
    fault |= {"update": 3, "rank": count - 1, "stays": True}
    more = ["trainer.save_interval_updates=2", "trainer.valid_split=''", "engine.timeout=20"]
    run = train(moons, save, count, [fault], *more, "model.max_positions=40")
    assert run.code == 3 and run.text().count("encoder.embeddings.positions.weight is not") == 1
    assert "Traceback" not in run.text() and results(save)["status"] == "diverged"
    saved = manifests.all_updates(save / "checkpoints")
    assert [path.name[-1] for path in saved] == ["2"]
    assert all(torch.isfinite(w).all() for w in checkpoint.load(saved[0]).weights.values())


@counts
def test_a_weight_that_stays_spoilt_ends_a_run_that_skips(count, moons, tmp_path):
    save = tmp_path / "run"
    fault = {"what": "nan", "where": "weight", "update": 3, "rank": count - 1, "stays": True}
    more = ["trainer.on_nonfinite=skip", "trainer.save_interval_updates=2", "engine.timeout=20"]
    run = train(moons, save, count, [fault], *more)
    assert run.code == 3, run.text()
    assert checkpoint.load(manifests.resolve(str(save))).state["update"] == 2
