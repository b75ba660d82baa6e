"""A full disk (R7), a replica that dies or hangs (R15): a message, an end, nothing lost."""

import os
import random
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from real_runs import REPEATS, Started, command, faults, final, reached, rows, until

from metaseq_lm.runs import checkpoint, manifests

counts = pytest.mark.parametrize("count", [1, 2])


def nproc(count: int) -> list[str]:
    return ["--nproc", str(count)] if count > 1 else []


def start(data: Path, save: Path, *more: str, count: int = 1, **environment: str) -> Started:
    """Start a run whose printing goes to a file beside its folder."""
    limit = int(environment.pop("file_limit", 0))
    arguments = command(data, save, *more, *nproc(count))
    return Started(arguments, save.with_suffix(".err"), environment, file_limit=limit)


# ---------------------------------------------------------------- R7: a full disk


@counts
@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_file_that_cannot_be_written(policy, count, moons, tmp_path):
    """A limit on the size of files, between that of the weights and that of the moments."""
    save = tmp_path / "run"
    more = ["trainer.save_interval_updates=2", f"trainer.on_save_error={policy}"]
    assert start(moons, save, *more, "trainer.max_update=2", count=count).wait() == 0
    first = manifests.folder_of(save / "checkpoints", 2)
    before = {file.name: file.read_bytes() for file in first.iterdir()}
    limit = (len(before["model.safetensors"]) + len(before["state.safetensors"])) // 2
    run = start(moons, save, *more, "trainer.max_update=6", count=count, file_limit=str(limit))
    code, text = run.wait(30), run.text()
    assert not run.members() and "Traceback" not in text
    assert "replica" not in text  # all know why they stop: none misses another
    assert {file.name: file.read_bytes() for file in first.iterdir()} == before
    assert checkpoint.load(first).state["update"] == 2
    assert not list((save / "checkpoints").glob(".tmp-*"))
    said = [line for line in text.splitlines() if "cannot write checkpoint" in line]
    assert said and "File too large" in said[0] and "bytes needed" in said[0] and "free" in said[0]
    assert str(save / "checkpoints" / "update_000000004") in said[0]
    # Going on helps the training, but an end without its result is none.
    assert code == 1 and reached(save) == (4 if policy == "stop" else 6)
    # Twice for each of two: before the validation of the update and after it.
    assert len(said) == (1 if policy == "stop" else 4)
    events = [e for e in rows(save, "event") if "cannot write checkpoint" in e["message"]]
    assert [e["update"] for e in events] == ([] if policy == "stop" else [4, 4, 6])
    # With room again it goes on from the checkpoint that was left.
    assert start(moons, save, *more, "trainer.max_update=6", count=count).wait() == 0
    assert final(save)[1]["update"] == 6 and "at update 2" in rows(save, "event")[-1]["message"]


def test_a_signal_does_not_claim_a_checkpoint_that_failed(moons, tmp_path):
    save = tmp_path / "run"
    more = ["trainer.save_interval_updates=2", "trainer.on_save_error=continue"]
    environment = {"METASEQ_LM_SLOW_UPDATE": "0.02"}
    run = start(moons, save, *more, file_limit="20000", **environment)
    until(lambda: run.code is not None or reached(save) >= 3, 60, "update 3")
    run.send(signal.SIGTERM)
    assert run.wait() == 1
    assert "checkpoint is saved" not in run.text() and "File too large" in run.text()


@counts
def test_no_room_is_noticed_before_the_first_update(count, moons, tmp_path):
    save = tmp_path / "run"
    run = start(moons, save, count=count, METASEQ_LM_FREE_BYTES="1000")
    assert run.wait() == 1 and not run.members()
    text = run.text()
    assert text.count("room for checkpoints") == 1 and "Traceback" not in text
    assert str(save) in text and "1,000 are free" in text
    assert not rows(save, "train")


def test_a_small_disk_that_fills_up(moons, tmp_path):
    """A file system of its own, with room for two checkpoints, but not for one written again."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root only")
    try:
        more = ["trainer.save_interval_updates=2", "trainer.max_update=6", "trainer.keep_last=9"]
        save = disk / "run"
        arguments = command(moons, save, *more)
        assert Started([*arguments, "trainer.max_update=2"], tmp_path / "err").wait() == 0
        first = manifests.folder_of(save / "checkpoints", 2)
        used = sum(file.stat().st_size for file in first.iterdir())
        room = shutil.disk_usage(disk).free - int(1.9 * used)
        assert room > 0
        (disk / "other").write_bytes(bytes(room))
        run = Started(arguments, tmp_path / "err")
        assert run.wait(30) == 1 and "Traceback" not in run.text()
        assert re.search("No space left|no room", run.text())
        assert final(save)[1]["update"] == 4
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# ---------------------------------------------------------------- R15: a replica dies or hangs

PLACES = ["forward", "backward", "collective", "validate", "save"]
WAYS = ["kill", "raise", "exit", "loop"]
ALL = [(what, where) for what in WAYS for where in PLACES]
FEW = [("kill", "forward"), ("raise", "backward"), ("exit", "validate"), ("loop", "save")]
# All twenty combinations as often as asked for, each on a rank of its own drawing.
DRAWN = (ALL * (REPEATS // 5 + 1))[: 4 * REPEATS] if REPEATS > 1 else FEW
TIMEOUT = 4


def broken(save: Path, run: Started, *updates: int) -> str:
    """Check the end of a broken run, whose last checkpoint is of one of `updates`; returns its
    text.
    """
    code = run.wait(TIMEOUT + 30 + 30)  # the last 30: until the fault
    text = run.text()
    assert code == 1 and not run.members(), text
    last = checkpoint.load(manifests.resolve(str(save)))
    assert last.state["update"] in updates
    return text


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
@pytest.mark.parametrize("number", range(len(DRAWN)))
def test_a_replica_that_dies_or_hangs_ends_all(number, parallel, moons, tmp_path):
    """All within engine.timeout + 30 s; its rank is named, and its place if known."""
    what, where = DRAWN[number]
    save = tmp_path / "run"
    chance = random.Random(REPEATS + number)
    count = 4 if REPEATS > 1 or number == 0 else 2
    rank = chance.randrange(count)
    fault = {"what": what, "where": where, "rank": rank, "update": 6, "code": number % 2}
    more = ["trainer.save_interval_updates=3", "trainer.validate_interval_updates=3"]
    # Nothing waits for a process that is gone; with a longer time-out not all learn of it soon.
    timeout = 60 if what == "kill" else TIMEOUT
    more += [f"engine.timeout={timeout}", "trainer.max_update=12", f"engine.parallel={parallel}"]
    run = start(moons, save, *more, count=count, **faults(fault))
    # Without the others the first replica may have written a checkpoint before it misses them.
    saved = ([3, 6] if rank else [3]) if where == "save" else [6]
    text = broken(save, run, *saved)
    assert f"replica {rank}" in text
    others = [f"replica {r} " for r in range(count) if r != rank]
    assert not [other for other in others if other in text], text
    if what in ("raise", "loop"):
        assert "faults/__init__.py" in text and "act" in text, text
    if what == "raise":
        assert "an injected fault" in text
    if what == "loop":
        assert "hangs" in text


@pytest.mark.slow
def test_a_replica_that_dies_before_the_others_know_it(moons, tmp_path):
    """The supervisor notices; the other waits for it as long as it would for a slow start."""
    fault = {"what": "kill", "where": "start", "rank": 1, "update": 0}
    run = start(moons, tmp_path / "run", count=2, **faults(fault))
    assert run.wait(60) == 1 and not run.members()
    assert "replica 1 " in run.text() and "killed by SIGKILL" in run.text()


@counts
@pytest.mark.slow
def test_a_loader_that_blocks_is_reported(count, moons, tmp_path):
    save = tmp_path / "run"
    fault = {"what": "block", "where": "loader", "rank": count - 1, "update": 7}
    more = ["trainer.save_interval_updates=3", "engine.workers=2", f"engine.timeout={TIMEOUT}"]
    run = start(moons, save, *more, count=count, **faults(fault))
    text = broken(save, run, 6)
    assert f"replica {count - 1}: worker_" in text and "update 7" in text
    assert "faults/__init__.py" in text and "wait" in text


@pytest.mark.slow
def test_a_killed_replica_of_a_run_as_users_start_it(moons, tmp_path):
    save = tmp_path / "run"
    arguments = command(moons, save, "trainer.save_interval_updates=3", *nproc(2))
    run = Started([*arguments, "trainer.max_update=100000"], tmp_path / "err", fresh=True)
    until(lambda: run.code is not None or reached(save) >= 5, 120, "update 5")
    os.kill(run.replicas()[1], signal.SIGKILL)
    assert run.wait(TIMEOUT + 30) == 1 and not run.members()
    assert "replica 1 " in run.text() and "killed by SIGKILL" in run.text()
    assert final(save)[1]["update"] >= 3
