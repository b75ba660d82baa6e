"""The line on how far a long work is: rewritten on a terminal, a few lines in a log."""

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from metaseq_lm.core import output
from metaseq_lm.core.output import Meter, StatusLine, results_only, show
from metaseq_lm.sweeps import progress
from metaseq_lm.sweeps.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(progress, "time", output.time)
    yield now


def test_on_a_terminal_it_is_rewritten_and_gives_way_to_other_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    status = StatusLine()
    for i in range(80):
        status.show(f"{i}/80 runs over, which is a long line", i / 80)
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().split("\r")[-1] == "79/80 runs over, wh"
    show("done")
    blank, line = terminal.getvalue().split("\r")[-2:]
    assert blank == " " * 19 and line == "done\n"


def test_in_a_log_a_line_comes_with_each_tenth_or_minute(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    status = StatusLine()
    for i in range(81):
        status.show(f"{i}", i / 80)
    assert capsys.readouterr().out.split() == [str(i) for i in range(0, 81, 8)]
    for seconds in range(0, 7200, 5):
        clock[0] = seconds
        status.show("still", 0.5)  # a share may fall where work is added
    assert 20 < len(capsys.readouterr().out.split()) < 80


def test_quiet_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    with results_only():
        StatusLine().show("x", 0)
        monkeypatch.setattr("sys.stdout", terminal)
        StatusLine().show("x", 0)
    assert not capsys.readouterr().out and not terminal.getvalue()


def test_a_sweep_counts_runs_and_names_those_that_failed(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"stage": "", "max_update": 10, "seconds": 1.0, "remaining": None, "requeued": 0}
    fields |= {"job": "", "reason": ""}
    told = {"state": "running", "update": 5}
    monkeypatch.setattr(
        progress,
        "read_states",
        lambda _, runs: [SimpleNamespace(run=runs[0].name, **(fields | told))],
    )
    sweep, folder = Progress(4), Path()
    one, two = (SimpleNamespace(name=name) for name in ("lr=1", "lr=2"))
    clock[0] = 10.0
    sweep.report(folder, one)
    assert sweep.text() == "0/4 runs over, 1 active, about 1 min 10 s left (5 updates/s, lr=1)"
    told |= {"state": "finished"}
    sweep.report(folder, one)
    assert sweep.text() == "1/4 runs over, 0 active, about 30.0 s left"
    told |= {"state": "failed", "reason": "exit code 1"}
    sweep.report(folder, two)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "runs over" not in line] == [
        "lr=2  failed  5/10  1 s  exit code 1"
    ]


def test_counted_work_has_its_rate_and_the_time_left_only_on_a_terminal(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meter = Meter("causal", "updates", 1000, 200)
    clock[0] = 10.0
    meter.advance(100)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    meter.note = "loss 3"
    meter.advance(100)
    meter.advance(100)  # at the same time: nothing new to see
    shown = "causal  400/1,000 updates, 20 updates/s, about 30.0 s left  loss 3"
    assert terminal.getvalue() == shown
    show("done")  # on standard output, which may be the same terminal
    assert terminal.getvalue().endswith("\r") and capsys.readouterr().out == "done\n"
