"""Signals: a checkpoint at the next boundary, exit code 75, and no trace of it in the results."""

import os
import random
import signal
import time
from functools import lru_cache
from pathlib import Path

import pytest
from real_runs import REPEATS, Started, command, final, listens, reached, rows, same, until

from metaseq_lm.distributed import signals

UPDATES = 24
SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP]
# Lines of three updates: many of them span a stop.
MORE = [f"trainer.max_update={UPDATES}", "trainer.log_interval=3", "trainer.valid_split=''"]
# So that a run is not through before the signal comes, and a save not before the next one.
SLOW = {"METASEQ_LM_SLOW_SAVE": "0.02", "METASEQ_LM_SLOW_UPDATE": "0.03"}
SLOW |= {"METASEQ_LM_HOLD": str(UPDATES - 4)}


def nproc(count: int) -> list[str]:
    return ["--nproc", str(count)] if count > 1 else []


@pytest.fixture(scope="module")
def straight(moons: Path, tmp_path_factory: pytest.TempPathFactory):
    """Undisturbed runs by number of processes, made when first asked for."""

    @lru_cache
    def make(count: int) -> Path:
        save = tmp_path_factory.mktemp("straight") / "run"
        run = Started(command(moons, save, *MORE, *nproc(count)), save.with_suffix(".err"))
        assert run.wait() == 0, run.text()
        return save

    return make


def is_interrupted(run: Started, save: Path) -> None:
    """Check exit code, message, checkpoint, and that nothing of the run is left."""
    assert run.wait(60) == 75, run.text()
    until(lambda: not run.members(), 10, "the last process to go")
    text = run.text()
    assert text.count("same command again") == 1 and "Traceback" not in text
    last = text.rsplit("after update ", 1)[1].split(";")[0]
    if int(last):
        assert (save / "checkpoints" / "last").resolve().name == f"update_{int(last):09d}"


def goes_on(straight: Path, save: Path, arguments: list[str]) -> None:
    """Start again; log and state must be those of the undisturbed run, to the last bit."""
    run = Started(arguments, save.with_suffix(".err"))
    assert run.wait() == 0, run.text()
    assert rows(save, "train") == rows(straight, "train")
    assert final(save)[0] == final(straight)[0] and same(final(save)[1], final(straight)[1])


# Every pair of a signal and a number of processes, of which a few are drawn.
CASES = [(s, n, w) for n in (1, 2, 4) for s in SIGNALS for w in (0, 2)]
FEW = [(signal.SIGTERM, 1, 0), (signal.SIGINT, 1, 2), (signal.SIGUSR1, 2, 2)]
FEW += [(signal.SIGUSR2, 4, 0), (signal.SIGHUP, 2, 0)]
DRAWN = (CASES * (REPEATS // 6 + 1))[: 4 * REPEATS] if REPEATS > 1 else FEW


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(DRAWN)))
def test_a_signal_at_any_update(number, moons, tmp_path, straight):
    asked, count, workers = DRAWN[number]
    save = tmp_path / "run"
    arguments = command(moons, save, *MORE, f"engine.workers={workers}", *nproc(count))
    chance = random.Random(1000 * REPEATS + number)
    run = Started(arguments, tmp_path / "run.err", SLOW)
    after = chance.randrange(0, UPDATES - 5, 3)  # before the update that waits
    until(lambda: run.code is not None or reached(save) >= after, 120, f"update {after}")
    until(lambda: run.code is not None or (save / "config.yaml").exists(), 120, "a beginning")
    run.send(asked)
    is_interrupted(run, save)
    goes_on(straight(count), save, arguments)


def test_under_nohup_a_hang_up_is_no_signal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.listen():
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signals.last_signal()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with signals.listen():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.last_signal() == signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_a_signal_to_one_replica_stops_all(moons, tmp_path, straight):
    save = tmp_path / "run"
    arguments = command(moons, save, *MORE, *nproc(2))
    run = Started(arguments, tmp_path / "run.err", SLOW)
    until(lambda: run.code is not None or reached(save) >= 3, 120, "update 3")
    run.send(signal.SIGUSR1, run.replicas()[1])
    is_interrupted(run, save)
    assert reached(save) < UPDATES
    goes_on(straight(2), save, arguments)


@pytest.mark.parametrize("count", [1, 2])
def test_more_signals_during_the_save_are_harmless(count, moons, tmp_path, straight):
    save = tmp_path / "run"
    arguments = command(moons, save, *MORE, *nproc(count))
    run = Started(arguments, tmp_path / "run.err", SLOW)
    until(lambda: run.code is not None or reached(save) >= 3, 120, "update 3")
    run.send(signal.SIGTERM)
    checkpoints = save / "checkpoints"
    until(lambda: run.code is not None or list(checkpoints.glob(".tmp-*")), 60, "the save")
    for number in SIGNALS:
        run.send(number)
    is_interrupted(run, save)
    assert not list(checkpoints.glob(".tmp-*"))
    goes_on(straight(count), save, arguments)


@pytest.mark.parametrize("count", [1, 2])
def test_signals_before_the_first_update(count, moons, tmp_path, straight):
    """From the moment on that the program listens, wherever it is in its start."""
    chance = random.Random(REPEATS)
    for number in range(2 * REPEATS):
        save = tmp_path / f"run{number}"
        arguments = command(moons, save, *MORE, *nproc(count))
        errors = save.with_suffix(".err")
        run = Started(arguments, errors, SLOW)
        until(lambda: listens(run.pid), 60, "a handler")
        time.sleep(chance.uniform(0, 0.5))
        run.send(SIGNALS[number % len(SIGNALS)])
        assert run.wait(60) == 75, run.text()
        assert not run.members() and "Traceback" not in run.text()
    goes_on(straight(count), save, arguments)


@pytest.mark.slow
def test_killing_the_supervisor_leaves_no_orphans(moons, tmp_path, straight):
    """Started as a user does; the replicas notice, save and end."""
    save = tmp_path / "run"
    arguments = command(moons, save, *MORE, *nproc(2))
    run = Started([*arguments, "trainer.max_update=100000"], tmp_path / "run.err", fresh=True)
    until(lambda: run.code is not None or reached(save) >= 3, 120, "update 3")
    assert len(run.replicas()) == 2
    run.send(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    until(lambda: not run.members(), 60, "the replicas to go")
    assert "stopped by SIGTERM" in run.text()
    assert reached(save) < 100000 and (save / "checkpoints" / "last").exists()
