"""Journals of runs, sweeps, leagues and searches: torn, damaged, on full disks, of many writers."""

import errno
import json
import math
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from search_studies import RULES, RUN, A, run_all, studies_in
from test_full_disk_logs import room

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.files import checksum
from metaseq_lm.core.journal import Journal
from metaseq_lm.core.loading import load_config
from metaseq_lm.league import predictions
from metaseq_lm.league.predictions import Prediction
from metaseq_lm.reporting.runs import _read_log
from metaseq_lm.runs.folder import RunFolder
from metaseq_lm.sweeps import lock_file
from metaseq_lm.sweeps.folder import SweepFolder
from metaseq_lm.sweeps.lock_file import LockFile, process_start
from metaseq_lm.sweeps.search import Search
from metaseq_lm.sweeps.studies import Studies
from metaseq_lm.sweeps.trials import FAILED, Trials

JOB = {"executor": "slurm", "job": "1_2", "folder": "jobs/0001", "code": "0" * 16}
PREDICTION = Prediction(
    objective="mlm",
    budget=1e9,
    metric="a",
    form="line",
    rungs=(1e7, 1e8),
    value=0.5,
    interval=(0.4, 0.6),
    naive={"last": 0.3},
)


def write_job(folder: Path, number: int) -> None:
    SweepFolder(folder).append("submit", run=f"r{number}", **JOB)


def read_jobs(folder: Path) -> list[Any]:
    return [row["run"] for row in SweepFolder(folder).rows()]


def write_log(folder: Path, number: int) -> None:
    run = RunFolder(load_config([f"save_dir={folder}"]))
    run.log("train", number, 1.0, {"loss": math.inf})
    run._held.close()


def read_updates(folder: Path) -> list[Any]:
    lines = _read_log(folder / "log.jsonl", [])
    assert all(line["loss"] == math.inf and "checksum" not in line for line in lines)
    return [line["update"] for line in lines]


def write_prediction(folder: Path, number: int) -> None:
    made = replace(PREDICTION, time=f"2026-01-0{number}T00:00:00+00:00")
    predictions.add_predictions(folder, [made])


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
def test_cut_at_every_byte(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
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
def test_damage_before_the_end_is_named(name: str, damage: bytes, tmp_path: Path) -> None:
    file, _, read = written(tmp_path, name)
    content = bytearray(file.read_bytes())
    at = content.index(b"checksum") - 9
    content[at : at + 1] = damage
    file.write_bytes(content)
    with pytest.raises(MetaseqError, match=rf"{name}:[12]: damaged \(.*\)\. (Delete|R)"):
        read(tmp_path)


@kinds
def test_lines_without_checksums_are_read(name: str, tmp_path: Path) -> None:
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
def test_no_room_leaves_the_journal_as_it_was(tmp_path: Path, spare: int) -> None:
    for name in ("jobs.jsonl", "predictions.jsonl"):
        file, write, read = written(tmp_path, name)
        content = file.read_bytes()
        with room(len(content) + spare), pytest.raises(MetaseqError, match=f"{name}: File too"):
            write(tmp_path, 3)
        assert file.read_bytes() == content
        write(tmp_path, 3)
        assert len(read(tmp_path)) == 3


def test_a_full_file_system(tmp_path: Path) -> None:
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


def test_many_write_at_a_time(tmp_path: Path) -> None:
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
def test_the_lock_of_a_dead_process_is_taken_at_once(tmp_path: Path, changed: dict) -> None:
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
def test_the_lock_of_another_is_waited_for(
    owner: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
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


def go_on(folder: Path, **rules: Any) -> Trials:
    """Continue a search as the command does, and return its trials."""
    studies = studies_in(folder, **rules)
    for trial in studies.running():
        studies.end(trial, FAILED, 0.0, "its process died")
    run_all(studies)
    return studies.trials("a")


def test_a_search_cut_anywhere_goes_on(tmp_path: Path) -> None:
    """Each change of the account is a line, so what is left is the search at some time before.

    Every byte of the last line is an end, and some of those before.
    """
    rules = {"flops": 150.0, "sampler": "random"}
    (tmp_path / "whole").mkdir()
    values = [trial.values for trial in go_on(tmp_path / "whole", **rules)]
    content = (tmp_path / "whole" / "journal.jsonl").read_bytes()
    lines = [json.loads(line) for line in content.splitlines()]
    assert [line["line"] for line in lines] == list(range(1, len(lines) + 1))
    file = tmp_path / "journal.jsonl"
    breaks = {i for i, byte in enumerate(content) if byte == 10}
    last = content[:-1].rindex(b"\n")
    some = sorted(breaks)[::3]
    goes_on = {0, *some, *(size + 1 for size in some), *range(0, len(content), 299)}
    for size in sorted(goes_on | set(range(last, len(content) + 1))):
        file.write_bytes(content[:size])
        Studies(tmp_path, Search.from_json(RULES | rules))
        if size in goes_on:
            trials = go_on(tmp_path, **rules)
            assert [t.values for t in trials][: len(values)] == values[: len(trials)]


def test_a_search_on_a_full_disk(tmp_path: Path) -> None:
    studies = studies_in(tmp_path)
    trial = studies.begin("search-1")
    file = tmp_path / "journal.jsonl"
    content = file.read_bytes()
    for spare in (0, 100, 250):
        with room(len(content) + spare), pytest.raises(MetaseqError, match="File too large"):
            studies.report(trial, 1.0, 25.0)
        assert file.read_bytes() == content and not (tmp_path / "account.lock").exists()
    assert studies.report(trial, 1.0, 25.0).share == 0.5
    assert studies.trials("a") == Studies(tmp_path, studies.search).trials("a")


def write_sealed(file: Path, rows: list[dict]) -> None:
    """Write lines with right checksums."""
    rows = [{key: row[key] for key in row if key != "checksum"} for row in rows]
    file.write_text("".join(json.dumps({**r, "checksum": checksum(r)}) + "\n" for r in rows))


@pytest.mark.parametrize(
    "kind, key, value",
    [
        ("setting", "name", "../../../x"),
        ("setting", "name", 5),
        ("setting", "run_flops", "x"),
        ("setting", "run_flops", 10**400),
        ("setting", "values", {"user_dir": "evil.py"}),
        ("setting", "more", 1),
        ("trial", "setting", "b"),
        ("trial", "number", 7),
        ("trial", "number", -1),
        ("trial", "values", {"user_dir": 1}),
        ("trial", "values", {"model.layers": 7}),
        ("trial", "values", {"model.layers": 1.5}),
        ("trial", "values", {"optimizer.lr": math.nan}),
        ("trial", "values", {"optimizer.lr": "low"}),
        ("trial", "values", {"task.batch_size": 9}),
        ("trial", "state", "well"),
        ("trial", "at_rungs", [math.nan]),
        ("trial", "at_rungs", ["low"]),
        ("trial", "at_rungs", [1.0] * 4),
        ("trial", "share", 0.3),
        ("trial", "flops", -1.0),
        ("trial", "flops", math.inf),
    ],
)
def test_wrong_values_of_a_search_are_named(
    kind: str, key: str, value: Any, tmp_path: Path
) -> None:
    studies = studies_in(tmp_path)
    run_all(studies, most=2)
    file = tmp_path / "journal.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    next(row for row in rows if kind in row)[kind][key] = value
    write_sealed(file, rows)
    with pytest.raises(MetaseqError, match=r"journal\.jsonl:[12]: damaged "):
        Studies(tmp_path, studies.search)


def test_lines_of_a_search_that_were_removed_or_repeated(tmp_path: Path) -> None:
    studies = studies_in(tmp_path)
    run_all(studies, most=2)
    file = tmp_path / "journal.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    for changed in ([*lines[:2], *lines[3:]], [*lines[:2], lines[1], *lines[2:]]):
        file.write_text("".join(changed))
        with pytest.raises(MetaseqError, match=r"journal\.jsonl:3: damaged"):
            Studies(tmp_path, studies.search)


# ---------------------------------------------------------------- journals of earlier versions


def change_of(trial: int, *scores: float, ended: str = "", **attributes: Any) -> list[dict]:
    """Return the records of Optuna on a trial, the last score being that of its end."""
    common = {"worker_id": "w", "trial_id": trial}
    rungs = scores[:2]
    attributes |= {"ended": ended} if ended else {}
    records = [{"op_code": 8, **common, "user_attr": {k: v}} for k, v in attributes.items()]
    for step, score in zip((16, 32), rungs):
        records.append({"op_code": 7, **common, "step": step, "intermediate_value": score})
    states = {"finished": 1, "failed": 3}
    if ended:
        time = "2026-01-01T00:00:00+00:00"
        end = {"state": states.get(ended, 2), "values": [*scores[-1:]], "datetime_complete": time}
        records.append({"op_code": 6, **common, **end})
    return records


def earlier_changes() -> list[list[dict]]:
    """Return what earlier versions wrote of a setting and five trials, a list for each change."""
    study = {"worker_id": "w", "study_id": 0}
    attributes = {"values": {}, "run_flops": RUN, "tries_from": 0}
    changes = [[{"op_code": 0, "worker_id": "w", "study_name": "a", "directions": [1]}]]
    changes[0] += [{"op_code": 2, **study, "user_attr": {k: v}} for k, v in attributes.items()]
    for number in range(5):
        values = {"optimizer.lr": 0.00116304, "task.batch_size": 1, "model.layers": number % 4 + 1}
        records = [{"op_code": 4, **study, "datetime_start": "2026-01-01T00:00:00+00:00"}]
        for key, value in values.items():
            parameter = {"param_name": key, "param_value_internal": value, "distribution": "{}"}
            records.append({"op_code": 5, "worker_id": "w", "trial_id": number, **parameter})
        changes.append([*records, *change_of(number, worker="search-1", share=0.25)])
    diverged = {"step": 0, "intermediate_value": "Infinity"}
    changes += [
        change_of(0, 4.0, 3.0, 2.0, flops=100.0, ended="finished", share=1.0),
        change_of(1, 5.0, flops=25.0, ended="pruned"),
        change_of(2, flops=10.0, ended="failed", message="it died"),
        [{"op_code": 7, "worker_id": "w", "trial_id": 3, **diverged}],
        change_of(3, flops=20.0, ended="diverged"),
        change_of(4, interrupted=True),
    ]
    return changes


@pytest.mark.parametrize("is_torn", [False, True], ids=["changes", "records"])
def test_a_search_of_an_earlier_version_goes_on(is_torn: bool, tmp_path: Path) -> None:
    """Its journal had Optuna's records, at first one in a line, so a kill could tear a change."""
    changes = earlier_changes()
    rows = [{"line": n, "records": records} for n, records in enumerate(changes, start=1)]
    rows = [record for change in changes for record in change] if is_torn else rows
    file = tmp_path / "journal.jsonl"
    search = Search.from_json(RULES)
    for count in range(0, len(rows) + 1, 5 if is_torn else 1):
        write_sealed(file, rows[:count])
        go_on(tmp_path)
    write_sealed(file, rows)
    read = Studies(tmp_path, search)
    assert read.settings() == [A] and read.trials("a").best().number == 0
    assert [(t.state, t.share, t.flops, t.at_rungs) for t in read.trials("a")] == [
        ("finished", 1.0, 100.0, (4.0, 3.0, 2.0)),
        ("pruned", 0.25, 25.0, (5.0,)),
        ("failed", 0.25, 10.0, ()),
        ("diverged", 0.25, 20.0, ()),
        ("interrupted", 0.25, 0.0, ()),
    ]
    values = {"optimizer.lr": 0.001163, "task.batch_size": 16, "model.layers": 1}
    assert read.trials("a").trials[0].values == values
    assert read.begin("search-2").number == 4
    run_all(read)
    assert Studies(tmp_path, search).trials("a") == read.trials("a")


@pytest.mark.parametrize(
    "code, key, value",
    [
        (0, "study_name", "../../../x"),
        (2, "study_id", -1),
        (2, "study_id", 3),
        (2, "user_attr", {"values": {"user_dir": "evil.py"}}),
        (2, "user_attr", {"run_flops": "x"}),
        (5, "trial_id", 1 << 20),
        (5, "param_name", "user_dir"),
        (5, "param_value_internal", math.nan),
        (5, "param_value_internal", "x"),
        (6, "values", None),
        (6, "values", ["x"]),
        (7, "intermediate_value", math.nan),
        (8, "user_attr", {"share": 0.3}),
        (8, "user_attr", {"flops": -1.0}),
        (8, "user_attr", {"ended": "well"}),
        (8, "user_attr", 5),
        (8, "op_code", 10),
    ],
)
def test_wrong_values_of_an_earlier_version_are_named(
    code: int, key: str, value: Any, tmp_path: Path
) -> None:
    changes = earlier_changes()
    records = [record for change in changes for record in change]
    found = [record for record in records if record["op_code"] == code]
    found[0 if code in (6, 7) else -1][key] = value
    write_sealed(tmp_path / "journal.jsonl", [{"records": change} for change in changes])
    with pytest.raises(MetaseqError, match=r"journal\.jsonl:[0-9]+: damaged "):
        Studies(tmp_path, Search.from_json(RULES))
