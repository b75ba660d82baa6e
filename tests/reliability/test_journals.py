"""Journals of runs, sweeps, leagues and searches: torn, damaged, on full disks, of many writers."""

import errno
import json
import math
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from search_studies import A, loss, run_all, studies_in
from test_full_disk_logs import room

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.files import checksum
from metaseq_lm.core.journal import Journal
from metaseq_lm.core.loading import load_config
from metaseq_lm.league import predictions
from metaseq_lm.league.predictions import Prediction, Registered
from metaseq_lm.reporting.runs import read_log
from metaseq_lm.runs.folder import RunFolder
from metaseq_lm.sweeps import lock_file
from metaseq_lm.sweeps.folder import SweepFolder, process_start
from metaseq_lm.sweeps.lock_file import LockFile
from metaseq_lm.sweeps.studies import Studies
from metaseq_lm.sweeps.trials import FAILED

JOB = {"executor": "slurm", "job": "1_2", "folder": "jobs/0001", "code": "0" * 16}
PREDICTION = Prediction("mlm", 1e9, "a", "line", (1e7, 1e8), 0.5, (0.4, 0.6), {"last": 0.3})


def write_job(folder: Path, number: int) -> None:
    SweepFolder(folder).append("submit", run=f"r{number}", **JOB)


def read_jobs(folder: Path) -> list[Any]:
    return [row["run"] for row in SweepFolder(folder).rows()]


def write_log(folder: Path, number: int) -> None:
    run = RunFolder(load_config([f"save_dir={folder}"]))
    run.log("train", number, 1.0, {"loss": math.inf})
    run._held.close()


def read_updates(folder: Path) -> list[Any]:
    lines = read_log(folder / "log.jsonl", [])
    assert all(line["loss"] == math.inf and "checksum" not in line for line in lines)
    return [line["update"] for line in lines]


def write_prediction(folder: Path, number: int) -> None:
    registered = Registered(PREDICTION, f"2026-01-0{number}T00:00:00+00:00", "p", "c")
    predictions.add_predictions(folder, [registered])


def read_times(folder: Path) -> list[Any]:
    return [item.time for item in predictions.read_predictions(folder)]


KINDS = {
    "jobs.jsonl": (write_job, read_jobs),
    "log.jsonl": (write_log, read_updates),
    "predictions.jsonl": (write_prediction, read_times),
}
kinds = pytest.mark.parametrize("name", KINDS)
Writer = Callable[[Path, int], None]


def written(folder: Path, name: str) -> tuple[Path, Writer, Callable[[Path], list[Any]]]:
    """Write two lines of a kind of journal."""
    write, read = KINDS[name]
    for number in (1, 2):
        write(folder, number)
    assert len(read(folder)) == 2
    return folder / name, write, read


@kinds
def test_cut_at_every_byte(name, tmp_path, capsys):
    """Complete lines are kept, with or without their line break, and the journal goes on."""
    file, write, read = written(tmp_path, name)
    content, values = file.read_bytes(), read(tmp_path)
    first = content.index(b"\n")
    for size in range(len(content) + 1):
        for tail in (b"", b"\0" * 9) if size % 40 == 0 else (b"",):
            file.write_bytes(content[:size] + tail)
            complete = values[: (size >= first) + (size >= len(content) - 1)]
            torn = bool(tail) or size not in (0, first, first + 1, len(content) - 1, len(content))
            capsys.readouterr()
            assert read(tmp_path) == complete
            if size % 9 == 0 or not torn:
                write(tmp_path, 3)
                warnings = capsys.readouterr().err.count("the last line is incomplete")
                assert bool(warnings) == torn
                assert len(read(tmp_path)) == len(complete) + 1 and file.read_bytes()[-1:] == b"\n"


@kinds
@pytest.mark.parametrize("damage", [b"\0", b"\n", b'"', b"7", b"\xff", b""])
def test_damage_before_the_end_is_named(name, damage, tmp_path):
    file, _, read = written(tmp_path, name)
    content = bytearray(file.read_bytes())
    at = content.index(b"checksum") - 9
    content[at : at + 1] = damage
    file.write_bytes(content)
    with pytest.raises(MetaseqError, match=rf"{name}:[12]: damaged .*(Delete|R)"):
        read(tmp_path)


@kinds
def test_lines_without_checksums_are_read(name, tmp_path):
    file, write, read = written(tmp_path, name)
    if name == "predictions.jsonl":
        return  # had them from the start
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**row, "checksum": 0}) + "\n" for row in rows))
    with pytest.raises(MetaseqError, match=":1: "):
        read(tmp_path)
    for row in rows:
        del row["checksum"]
    file.write_text("\n\n".join(map(json.dumps, rows)))
    write(tmp_path, 3)
    assert len(read(tmp_path)) == 3


@pytest.mark.parametrize("spare", [0, 1, 60, 150])
def test_no_room_leaves_the_journal_as_it_was(tmp_path, spare):
    for name in ("jobs.jsonl", "predictions.jsonl"):
        file, write, read = written(tmp_path, name)
        content = file.read_bytes()
        with room(len(content) + spare), pytest.raises(MetaseqError, match=f"{name}: File too"):
            write(tmp_path, 3)
        assert file.read_bytes() == content
        write(tmp_path, 3)
        assert len(read(tmp_path)) == 3


def test_a_full_file_system(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a file system")
    try:
        journal = Journal(disk / "j.jsonl")
        written_rows = 0
        with pytest.raises(MetaseqError, match="j.jsonl: No space") as raised:
            for _ in range(1000):
                journal.append([{"text": "x" * 1000}] * 3)
                written_rows += 3
        assert isinstance(raised.value.__cause__, OSError)
        assert raised.value.__cause__.errno == errno.ENOSPC
        assert len(list(journal.rows())) == written_rows > 0 and not journal.torn
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_many_write_at_a_time(tmp_path):
    def write(number: int) -> None:
        journal = Journal(tmp_path / "j.jsonl", sync=False)
        for i in range(50):
            journal.append([{"writer": number, "i": i, "text": "x" * 5000}])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = [row for _, row in Journal(tmp_path / "j.jsonl").rows()]
    for number in range(4):
        assert [row["i"] for row in rows if row["writer"] == number] == list(range(50))


# ---------------------------------------------------------------- locks


def owner_of(**changed: Any) -> str:
    place = dict(zip(("host", "boot", "space"), lock_file._place().split(" ")))
    words = {**place, "pid": os.getpid(), "start": process_start(os.getpid()), "key": "x"}
    return " ".join(map(str, {**words, **changed}.values()))


@pytest.mark.parametrize("changed", [{"pid": 1 << 30}, {"start": 1}, {"boot": "before"}])
def test_the_lock_of_a_dead_process_is_taken_at_once(tmp_path, changed):
    lock = LockFile(tmp_path / "lock")
    lock.path.write_text(owner_of(**changed))
    with lock.hold():
        assert lock.path.read_text().split(" ")[3] == str(os.getpid())
    assert not lock.path.exists()


@pytest.mark.parametrize(
    "owner, name",
    [
        (owner_of(host="far"), "process [0-9]+ on far"),
        (owner_of(), socket.gethostname()),
        (owner_of(space="pid:[1]"), "process"),
        ("", "unknown"),
    ],
    ids=["host", "boot", "container", "empty"],
)
def test_the_lock_of_another_is_waited_for(owner, name, tmp_path, monkeypatch, capsys):
    """That of a process that can be seen for ever, of others until the time is over."""
    monkeypatch.setattr(lock_file, "PATIENCE", 0.0)
    monkeypatch.setattr(lock_file, "GRACE", 0.2)
    lock = LockFile(tmp_path / "lock")
    lock.path.write_text(owner)
    is_here = owner == owner_of()
    timer = threading.Timer(1.0, lock.path.unlink) if is_here else None
    if timer:
        timer.start()
    with lock.hold():
        if timer:
            timer.join()
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and name.split("[")[0].split(" ")[0] in text


# ---------------------------------------------------------------- searches


def go_on(folder: Path, **rules: Any) -> list[Any]:
    """Continue a search as the command does, and return its trials."""
    studies = studies_in(folder, **rules)
    for trial in studies.running():
        studies.end(trial, FAILED, 0.0, "its process died")
    run_all(studies)
    return studies.trials("a")


def test_a_search_cut_anywhere_goes_on(tmp_path):
    """Each change of the account is a line, so what is left is the search at some time before.

    Every byte of the last line is an end, and some of those before.
    """
    rules = {"flops": 150.0, "sampler": "random"}
    (tmp_path / "whole").mkdir()
    whole = go_on(tmp_path / "whole", **rules)
    content = (tmp_path / "whole" / "journal.jsonl").read_bytes()
    lines = [json.loads(line) for line in content.splitlines()]
    assert [line["line"] for line in lines] == list(range(1, len(lines) + 1))
    file = tmp_path / "journal.jsonl"
    breaks = {i for i, byte in enumerate(content) if byte == 10}
    last = content[:-1].rindex(b"\n")
    some = sorted(breaks)[::11]
    goes_on = {0, *some, *(size + 1 for size in some), *range(0, len(content), 2999)}
    for size in sorted(goes_on | set(range(last, len(content) + 1))):
        file.write_bytes(content[:size])
        search = studies_in(tmp_path / "whole", **rules).search
        read = Studies(tmp_path, search)
        if size in goes_on:
            kept = content[:size].count(b"\n") + (size in breaks)
            assert len(read.journal.records) == sum(len(row["records"]) for row in lines[:kept])
            trials = go_on(tmp_path, **rules)
            assert [t.values for t in trials][: len(whole)] == [t.values for t in whole][
                : len(trials)
            ]


def test_a_search_on_a_full_disk(tmp_path):
    studies = studies_in(tmp_path)
    trial = studies.begin("search-1")
    file = tmp_path / "journal.jsonl"
    content = file.read_bytes()
    for spare in (0, 100, 300):
        with room(len(content) + spare), pytest.raises(MetaseqError, match="File too large"):
            studies.report(trial, 1.0, 25.0)
        assert file.read_bytes() == content and not (tmp_path / "account.lock").exists()
    run_all(studies, most=0)
    assert studies.report(trial, 1.0, 25.0).share == 0.5
    assert studies.trials("a") == Studies(tmp_path, studies.search).trials("a")


def forge(file: Path, code: int, key: str, value: Any) -> None:
    """Change a value of the first record of a kind, with a right checksum."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    records = [record for row in rows for record in row["records"]]
    found = next(r for r in records if r["op_code"] == code and (key in r or key in str(r)))
    (found if key in found else found["user_attr"])[key] = value
    for row in rows:
        del row["checksum"]
        row["checksum"] = checksum(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    "code, key, value",
    [
        (0, "study_name", "../../../x"),
        (0, "study_name", 5),
        (0, "directions", [7]),
        (0, "worker_id", None),
        (2, "study_id", -1),
        (2, "study_id", 3),
        (2, "run_flops", "x"),
        (2, "run_flops", 10**400),
        (2, "values", {"user_dir": "evil.py"}),
        (4, "datetime_start", "yesterday"),
        (5, "trial_id", 1 << 20),
        (5, "param_name", "user_dir"),
        (5, "param_value_internal", math.nan),
        (5, "param_value_internal", 10**400),
        (5, "param_value_internal", 7.0),
        (5, "distribution", "[" * 10_000),
        (6, "state", 9),
        (6, "values", None),
        (6, "values", ["x"]),
        (6, "values", [math.nan]),
        (7, "step", -4),
        (7, "intermediate_value", math.nan),
        (7, "intermediate_value", "low"),
        (8, "share", 0.3),
        (8, "flops", -1.0),
        (8, "flops", math.inf),
        (8, "ended", "well"),
        (8, "op_code", 10),
        (9, "system_attr", {"completed_rung_0": "x"}),
    ],
)
def test_wrong_values_of_a_search_are_named(code, key, value, tmp_path):
    studies = studies_in(tmp_path)
    run_all(studies, loss, most=2)
    forge(tmp_path / "journal.jsonl", code, key, value)
    told = key if key != "system_attr" else "completed_rung_0"
    with pytest.raises(MetaseqError, match=rf"journal\.jsonl:[0-9]+: damaged .*{told}"):
        Studies(tmp_path, studies.search)


def test_lines_of_a_search_that_were_removed_or_repeated(tmp_path):
    studies = studies_in(tmp_path)
    run_all(studies, most=2)
    file = tmp_path / "journal.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    for changed in ([*lines[:2], *lines[3:]], [*lines[:2], lines[1], *lines[2:]]):
        file.write_text("".join(changed))
        with pytest.raises(MetaseqError, match=r"journal\.jsonl:3: damaged"):
            Studies(tmp_path, studies.search)


def test_a_journal_of_an_earlier_version_goes_on(tmp_path):
    """It has a record in a line, without checksum; a kill could tear a change."""
    studies = studies_in(tmp_path, sampler="tpe")
    run_all(studies, most=3)
    wanted = studies.trials("a")
    file = tmp_path / "journal.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [json.dumps(record) + "\n" for row in rows for record in row["records"]]
    for count in range(len(lines) + 1):
        file.write_text("".join(lines[:count]))
        Studies(tmp_path, studies.search).settings()
        if count % 5 == 0:
            go_on(tmp_path)
    file.write_text("".join(lines))
    assert Studies(tmp_path, studies.search).trials("a") == wanted
    assert Studies(tmp_path, studies.search).settings() == [A]
