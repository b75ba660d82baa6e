"""Sweep files that are none, and damaged files in a sweep's folder: each named, with the place."""

import json
from pathlib import Path
from typing import Any

import pytest
from outcomes import expect_facts
from sweeping import SHORT, states_of, sweep

from metaseq_lm.sweeps.definition import normalise
from metaseq_lm.sweeps.expansion import expand
from metaseq_lm.sweeps.folder import SweepFolder

RUN = {"name": "a", "folder": "a", "values": {}, "seed": 1}
STAGE = {"name": "", "folder": "a", "arguments": ["data"]}
SUBMITTED = {"kind": "submit", "run": "seed=1", "job": "1", "folder": "jobs/0001", "code": "c"}


@pytest.fixture
def out(moons: Path, tmp_path: Path) -> Path:
    """The folder of a sweep of one run that was not launched."""
    definition = normalise({"data": str(moons), "overrides": SHORT})
    SweepFolder(tmp_path).adopt(definition, expand(definition, tmp_path), {})
    (tmp_path / "seed=1").mkdir()
    return tmp_path


def damaged(capsys: pytest.CaptureFixture, moons: Path, out: Path, *words: str) -> None:
    """Check that every command ends with one message that has all `words` in it."""
    again = (moons, "--out", out, *SHORT)
    for command in (("status", out), ("cancel", out), ("resubmit", "--failed", out), again):
        assert sweep(*command) == 1, command
        text = capsys.readouterr().err
        assert text.startswith("metaseq-lm: ") and text.count("\n") == 1, text
        assert not [word for word in words if word not in text], text


@pytest.mark.parametrize(
    "change, words",
    [
        ("[]", ("it is no mapping",)),
        ("[" * 100_000, ("not readable as JSON",)),
        ("{}", ("it lacks 'version'",)),
        ({"version": 2}, ("another version",)),
        ({"out": None}, ("out is no text",)),
        ({"launch": []}, ("launch is no mapping",)),
        ({"definition": {}}, ("definition lacks 'data'",)),
        (
            {"definition": {"data": "d", "config_dir": 5, "user_dir": None}},
            ("config_dir is no text",),
        ),
        ({"runs": 5}, ("runs is no list",)),
        ({"runs": []}, ("runs is empty",)),
        ({"runs": [RUN]}, ("of runs lacks 'stages'",)),
        ({"runs": [{**RUN, "stages": []}]}, ("stages is empty",)),
        (
            {"runs": [{**RUN, "stages": [{**STAGE, "arguments": [1]}]}]},
            ("of arguments is no text",),
        ),
        *(
            (
                {"runs": [{**RUN, "stages": [{**STAGE, "arguments": words}]}]},
                ("of 'a' are not those",),
            )
            for words in (
                ["--user-dir=evil.py"],
                ["data", "--user-dir", "evil.py"],
                ["data", "user_dir=evil.py"],
                ["user_dir=evil.py"],
                ["data", "--config-name", "--user-dir=evil.py"],
                ["data", "--save-dir", "/elsewhere"],
                ["data", "save_dir=/elsewhere"],
                ["data", "other"],
            )
        ),
    ],
)
def test_the_record_of_the_sweep(
    change: Any, words: tuple, moons: Path, out: Path, capsys: pytest.CaptureFixture
) -> None:
    file = out / "sweep.json"
    if isinstance(change, dict):
        change = json.dumps({**json.loads(file.read_text()), **change})
    file.write_text(change)
    remedy = () if "another version" in words else ("give the 'sweep' command",)
    damaged(capsys, moons, out, f"{file}: ", *words, *remedy)


@pytest.mark.parametrize(
    "row, word",
    [
        ({"kind": "submit"}, "it lacks 'run'"),
        (SUBMITTED, "it lacks 'executor'"),
        ({**SUBMITTED, "executor": "slurm", "job": 5}, "job is no text"),
        ({**SUBMITTED, "executor": "local", "job": "1_2", "code": "0" * 16}, "job is no process"),
        (
            {**SUBMITTED, "executor": "slurm", "job": "--user=root"},
            "job '--user=root' is not of the form",
        ),
        (
            {**SUBMITTED, "executor": "slurm", "folder": "../.."},
            "folder '../..' is not of the form",
        ),
        (
            {**SUBMITTED, "executor": "slurm", "code": "../evil"},
            "code '../evil' is not of the form",
        ),
        ({"kind": "cancel"}, "it lacks 'run'"),
        ({"kind": "command"}, "it lacks 'pid'"),
        ({"kind": "command", "pid": "x", "host": "h", "start": 1}, "pid is 'x', not a whole"),
        (["submit"], "it is no mapping"),
    ],
)
def test_the_record_of_the_jobs(
    row: Any, word: str, moons: Path, out: Path, capsys: pytest.CaptureFixture
) -> None:
    """The line is named; a torn last one, or one of a kind we do not know, is passed over."""
    file = out / "jobs.jsonl"
    unknown = '{"kind": [], "executor": "local"}\n'
    for torn in ('{"kind": "sub', "[" * 100_000 + "\n", "\0" * 100_000):
        file.write_text(unknown + torn)
        assert states_of(out)["seed=1"].state == "waiting"
        expect_facts(capsys.readouterr().err, f"{file}:2: warning: ", "last line")
        file.write_text(unknown + torn + "\n" + unknown)
        damaged(capsys, moons, out, f"{file}:2: damaged (not readable", "Delete that line")
    file.write_text(unknown + json.dumps(row) + "\n")
    damaged(capsys, moons, out, f"{file}:2: damaged ({word}", "Delete that line")


def test_lines_of_jobs_that_were_changed_or_repeated(
    moons: Path, out: Path, capsys: pytest.CaptureFixture
) -> None:
    file = out / "jobs.jsonl"
    job = {"run": "seed=1", "executor": "slurm", "job": "17_2", "folder": "jobs/0001"}
    SweepFolder(out).append("submit", **job, code="0" * 16)
    line = file.read_text()
    file.write_text(2 * line)
    assert list(SweepFolder(out).submissions()) == ["seed=1"]
    expect_facts(capsys.readouterr().err, f"{file}:2: warning: a line")
    file.write_text(line.replace("17_2", "18_2"))
    damaged(capsys, moons, out, f"{file}:1: damaged (changed after")


@pytest.mark.parametrize(
    "value", ["x", [], float("nan"), float("inf"), pytest.param(10**400, id="huge")]
)
@pytest.mark.parametrize("key", ["max_update", "updates", "seconds"])
def test_numbers_of_a_run(
    key: str, value: Any, moons: Path, out: Path, capsys: pytest.CaptureFixture
) -> None:
    file = out / "seed=1" / "results.json"
    file.write_text(json.dumps({"status": "failed", key: value}))
    damaged(capsys, moons, out, f"{file}: {key} is ", "not a number. Delete")


@pytest.mark.parametrize("text", ["trainer: {max_update: x}", "a: ["])
def test_the_config_of_a_run(
    text: str, moons: Path, out: Path, capsys: pytest.CaptureFixture
) -> None:
    file = out / "seed=1" / "config.yaml"
    file.write_text(text)
    damaged(capsys, moons, out, f"{file}: ")


def test_odd_lines_of_a_log_are_passed_over(out: Path) -> None:
    odd = ["[1]", '{"update": Infinity, "seconds": 1}', "[" * 50_000]
    good = '{"update": 3, "seconds": 2.5}'
    (out / "seed=1" / "log.jsonl").write_text("\n".join([good, *odd]) + "\n")
    state = states_of(out)["seed=1"]
    assert (state.update, state.seconds) == (3, 2.5)


BOMB = b"a0: &a0 [x]\n" + b"\n".join(
    b"a%d: &a%d [%s]" % (i, i, b",".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 9)
)


@pytest.mark.parametrize(
    "content, words",
    [
        (b"grid: {a: [1], a: [2]}", ("line 1, column 16: it has the key a twice",)),
        (b"seeds: [\n", ("line 2, column 1: did not find expected",)),
        (b"grid: {null: [1]}", ("line 1, column 8: a key is null",)),
        (b"label: &x [*x]", ("alias (*name)", "a node that contains it")),
        (b"label: " + b"[" * 3000, ("nest",)),
        (b"seeds: [0x_]", ("not readable as YAML: invalid literal",)),
        (b"label: \xff", ("not readable as YAML", "position 7")),
        (BOMB, ("line 5, column 5: its aliases (*name) make it 13,",)),
        (b"5", ("not a mapping",)),
        (b"- a", ("not a mapping",)),
    ],
)
def test_files_that_are_no_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture, content: bytes, words: tuple
) -> None:
    file = tmp_path / "s.yaml"
    file.write_bytes(content)
    assert sweep(file, "--out", tmp_path / "out") == 2
    text = capsys.readouterr().err
    assert text.startswith(f"metaseq-lm: {file}: ") and text.count("\n") == 1, text
    assert not [word for word in words if word not in text], text
