import json
import os
import socket
import time
from functools import partial

import pytest
from synthetic import make_run

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.league.folder import LeagueFolder
from metaseq_lm.reporting import watch
from metaseq_lm.reporting.watch import _files_below, follow, runs_go_on
from metaseq_lm.sweeps.folder import SweepFolder
from metaseq_lm.sweeps.lock_file import process_start


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(watch, "INTERVAL", 0.01)


def test_files_are_written_when_results_change_and_a_last_time(tmp_path):
    make_run(tmp_path / "a")
    looks, calls = iter(range(6)), []

    def goes_on():
        look = next(looks)
        if look == 3:
            make_run(tmp_path / "b")
        return look < 5

    follow(calls.append, [tmp_path], goes_on)
    assert calls == [0.01, 0.01, 0]


def test_checkpoints_and_hidden_files_are_no_results(tmp_path):
    make_run(tmp_path / "a")
    state = _files_below([tmp_path])
    for name in ("checkpoints/results.json", "code/log.jsonl", ".x/log.jsonl", "notes.txt"):
        path = tmp_path / "a" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    assert _files_below([tmp_path]) == state
    (tmp_path / "a" / "suites").mkdir()
    (tmp_path / "a" / "suites" / "pairs.json").write_text("{}")
    assert _files_below([tmp_path]) != state


def test_a_page_that_is_interrupted_no_longer_reloads_itself(tmp_path):
    calls = []

    def goes_on():
        if calls:
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt):
        follow(calls.append, [tmp_path], goes_on)
    assert calls == [0.01, 0]


def test_an_error_is_said_once_while_runs_go_on_and_raised_at_the_end(tmp_path, capsys):
    looks = iter([True, True, False])

    def write(reload):
        (tmp_path / "results.json").write_text(str(time.monotonic()))
        print("a table")
        raise MetaseqError("no run has started yet")

    with pytest.raises(MetaseqError, match="no run has"):
        follow(write, [tmp_path], partial(next, looks))
    shown = capsys.readouterr()
    assert shown.err.count("no run has") == 1
    assert shown.out.count("a table") == 1  # the last time


def test_writing_takes_a_tenth_of_the_time_at_most(tmp_path, monkeypatch):
    pauses, looks = [], iter([True, False])
    monkeypatch.setattr(watch.time, "sleep", pauses.append)
    monkeypatch.setattr(watch.time, "monotonic", partial(next, iter([100.0, 104.0])))
    follow(lambda reload: None, [tmp_path], partial(next, looks))
    assert pauses == [40.0]


def test_when_runs_of_no_sweep_are_over(tmp_path):
    make_run(tmp_path / "ended")
    assert not runs_go_on([tmp_path])
    make_run(tmp_path / "runs", None)
    assert runs_go_on([tmp_path])
    an_hour_ago = time.time() - 3700
    os.utime(tmp_path / "runs" / "log.jsonl", (an_hour_ago, an_hour_ago))
    assert not runs_go_on([tmp_path])


def test_a_sweep_goes_on_while_its_command_does(tmp_path):
    """Runs that were never started wait for the command; with that they are over."""
    definition = {"data": "/d", "config_dir": None, "user_dir": None, "grid": {}, "list": []}
    definition |= {
        "stages": [{"name": "", "config_name": None, "overrides": []}],
        "seeds": [1],
        "overrides": [],
    }
    stage = {"name": "", "folder": "a", "arguments": ["/d"]}
    run = {"name": "a", "folder": "a", "values": {}, "seed": 1, "stages": [stage]}
    content = {"version": 1, "out": str(tmp_path), "definition": definition, "launch": {}}
    (tmp_path / "sweep.json").write_text(json.dumps(content | {"runs": [run]}))
    assert not runs_go_on([tmp_path])
    folder, pid = SweepFolder(tmp_path), os.getpid()
    folder.append("command", pid=pid, start=process_start(pid) - 1, host=socket.gethostname())
    assert not runs_go_on([tmp_path])
    folder.append("command", pid=pid, start=process_start(pid), host=socket.gethostname())
    assert runs_go_on([tmp_path])
    make_run(tmp_path / "a")
    assert not runs_go_on([tmp_path])


def test_a_league_runs_while_a_command_holds_its_lock(tmp_path):
    folder = LeagueFolder(tmp_path)
    assert not folder.is_running()
    with folder.lock():
        assert folder.is_running()
    assert not folder.is_running()


def test_the_command_ends_with_a_page_that_stays(tmp_path, monkeypatch, capsys):
    """Exit code 0 when the runs are over, 130 at Ctrl-C; only a watched page reloads itself."""
    make_run(tmp_path / "runs" / "a", None)
    page, pages = tmp_path / "o" / "report.html", []
    command = ["report", str(tmp_path / "runs"), "--out", str(page.parent), "--format", "html"]

    def end(seconds):
        pages.append(page.read_text())
        if len(pages) == 2:
            raise KeyboardInterrupt
        make_run(tmp_path / "new")
        (tmp_path / "new" / "results.json").rename(tmp_path / "runs" / "a" / "results.json")

    monkeypatch.setattr(watch.time, "sleep", end)
    assert main([*command, "--watch"]) == 0
    make_run(tmp_path / "runs" / "b", None)
    assert main([*command, "--watch"]) == 130
    assert all("data-watch" in text for text in pages) and len(pages) == 2
    assert "data-watch" not in page.read_text() and "85.00" in page.read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["report", "runs", "--watch"],
        ["report", "runs", "--watch", "--out", "o", "--archive", "a.jsonl"],
        ["report", "runs", "--watch", "--json"],
        ["league", "report", "--watch"],
        ["league", "--out", "L", "--watch"],
    ],
)
def test_watch_needs_a_page_and_something_that_runs(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert "--watch" in capsys.readouterr().err
