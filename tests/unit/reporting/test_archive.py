import json
import re
from dataclasses import replace

import pytest
from outcomes import expect_facts
from synthetic import make_run

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.reporting import archive
from metaseq_lm.reporting.folders import find_runs
from metaseq_lm.reporting.settings import group

BEFORE = {"flops": 1e12, "seconds": 5.0}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two settings of two seeds from an encoder, one run without results, in the
    working directory.
    """
    monkeypatch.chdir(tmp_path)
    encoder = make_run(tmp_path / "encoder", label="encoder", data=str(tmp_path / "text"))
    for rate in (1e-3, 2e-3):
        for seed in (1, 2):
            make_run(
                tmp_path / "runs" / f"lr={rate}-seed={seed}",
                score=0.8 + rate + seed / 100 if (rate, seed) != (2e-3, 2) else None,
                config={"optimizer.lr": rate},
                results={
                    "pretraining": {**BEFORE, "run": str(encoder), "runs": {str(encoder): BEFORE}}
                },
                seed=seed,
                data=str(tmp_path / "data"),
                init_from=str(encoder),
            )
    return tmp_path / "runs"


def table(capsys, *words):
    """Return what `report` prints, without the notes that name folders."""
    assert main(["report", *map(str, words)]) == 0
    return capsys.readouterr().out.partition("Left out")[0]


def test_the_table_of_an_archive_is_that_of_its_folders(runs, tmp_path, capsys):
    file = tmp_path / "measured.jsonl"
    before = table(capsys, runs, "--archive", file)
    assert "81.60 ± 0.71" in before and "2.0e12" in before
    assert table(capsys, file) == before
    assert [r.status for r in find_runs([file])].count("unfinished") == 1
    kept, found = find_runs([file]), find_runs([runs])
    assert [r.seed for r in kept] == [r.seed for r in found]
    for a, b in zip(kept, found):
        assert a.series("valid.accuracy") == b.series("valid.accuracy") != ([], [])
        assert a.costs["flops"] == b.costs["flops"]
    assert list(kept[0].values) == [
        key for key in found[0].values if key in found[0].portable_values
    ]


def test_facts_of_another_file_are_refused(tmp_path):
    file = tmp_path / "a.jsonl"
    for content in ("no JSON\n", "[1]\n", ""):
        file.write_text(content)
        with pytest.raises(UsageError, match="not an archive"):
            archive.read_about(file)


def test_an_archive_may_be_packed_and_has_facts_about_its_runs(runs, tmp_path):
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    for file in (plain, packed):
        archive.write(file, find_runs([runs]), {"plan": "0123"})
        assert archive.read_about(file) == {"plan": "0123"}
    assert [r.fingerprint for r in archive.read(packed)] == [
        r.fingerprint for r in archive.read(plain)
    ]
    assert 4 * packed.stat().st_size < plain.stat().st_size
    before = packed.read_bytes()
    archive.write(packed, archive.read(packed), {"plan": "0123"})
    assert packed.read_bytes() == before
    packed.write_bytes(before[:-20])
    with pytest.raises(UsageError, match="not an archive"):
        archive.read(packed)


def test_changes_of_an_archive_are_said(runs, tmp_path, capsys):
    """In its rows and in its first line, also if the checksum of the rows is taken away."""
    file = tmp_path / "measured.jsonl"
    table(capsys, runs, "--archive", file)
    first, *rows = file.read_text().splitlines()
    without = {k: v for k, v in json.loads(first).items() if k != "rows"}
    for changed in ([first, *rows[1:], rows[0]], [json.dumps(without), *rows]):
        file.write_text("".join(f"{line}\n" for line in changed))
        assert main(["report", str(file)]) == 0
        err = capsys.readouterr().err
        assert f"{file}:1: warning" in err and "was changed" in err


def test_an_archive_says_nothing_of_the_machine(runs, tmp_path, monkeypatch):
    """Wherever it is written: neither folders nor those of what runs started from."""
    for place in (tmp_path, tmp_path / "elsewhere"):
        place.mkdir(exist_ok=True)
        monkeypatch.chdir(place)
        archive.write(place / "measured.jsonl", find_runs([runs]))
        text = (place / "measured.jsonl").read_text()
        assert str(tmp_path) not in text and "save_dir" not in text and "init_from" not in text
        assert '"pretraining.data": "text"' in text and '"data": "data"' in text
        assert '"flops": 1000000000000.0, "seconds": 5.0}' in text
        log = find_runs([place / "measured.jsonl"])[0].log
        assert [line["kind"] for line in log] == ["valid", "valid", "train", "valid"], "no events"


def test_later_seeds_join_those_of_an_archive(runs, tmp_path):
    file = tmp_path / "measured.jsonl"
    archive.write(file, find_runs([runs / "lr=0.001-seed=1"]))
    together = find_runs([file, runs / "lr=0.001-seed=2"])
    archive.write(file, together)
    [setting] = group(find_runs([file]))
    assert [run.seed for run in setting.runs] == [1, 2]
    assert sorted(setting.run_scores("test.accuracy")) == pytest.approx([0.811, 0.821])
    # What comes from an archive keeps its name when it is written again.
    assert [run.name for run in setting.runs] == [
        "measured.jsonl/runs/lr=0.001-seed=1",
        "measured.jsonl/runs/lr=0.001-seed=2",
    ]


def test_a_run_counts_once(runs, tmp_path):
    """Though it be in its folder and in archives, and those be given twice."""
    one, two = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    archive.write(one, find_runs([runs]))
    archive.write(two, find_runs([one]))
    found = find_runs([one, two, one, runs])
    assert len(found) == 4 and all(run.path.is_dir() for run in found)
    assert len(find_runs([two, one])) == 4


def test_the_same_data_may_lie_elsewhere(runs, tmp_path, monkeypatch):
    """Of what is known to be the same the place does not count; other data are another setting."""
    monkeypatch.chdir(runs)
    archive.write(tmp_path / "a.jsonl", find_runs(["lr=0.001-seed=1"]))
    monkeypatch.chdir(tmp_path.parent)
    places = [tmp_path / "a.jsonl", runs / "lr=0.001-seed=2"]
    [setting] = group(find_runs(places))
    assert len(setting.runs) == 2 and setting.shown == ("label",)
    results = runs / "lr=0.001-seed=2" / "results.json"
    results.write_text(results.read_text().replace('"d1"', '"d2"'))
    assert [len(setting.runs) for setting in group(find_runs(places))] == [1, 1]


def test_no_run_of_an_archive_is_lost(runs, tmp_path, capsys):
    """What would lose one is refused; a run that went on takes the place of its former state."""
    file = tmp_path / "a.jsonl"
    archive.write(file, find_runs([runs]))
    before = file.read_bytes()
    assert main(["report", str(file), "--where", "seed=1", "--archive", str(file)]) == 2
    expect_facts(capsys.readouterr().err, file.name, "2 runs")
    log = runs / "lr=0.001-seed=1" / "log.jsonl"
    assert main(["report", str(file), "--archive", str(log)]) == 2
    expect_facts(capsys.readouterr().err, "log.jsonl", "not an archive")
    assert main(["report", str(file), "--metric", "nope", "--archive", str(file)]) == 2
    assert file.read_bytes() == before and "valid" in log.read_text()
    unfinished = runs / "lr=0.002-seed=2"
    unfinished.joinpath("results.json").write_text(
        (runs / "lr=0.002-seed=1" / "results.json").read_text()
    )
    archive.write(file, find_runs([runs]))
    assert [r.status for r in find_runs([file])] == 4 * ["finished"]


def test_places_where_no_archive_can_be(runs, tmp_path, capsys):
    for place in ("", ".", str(runs)):
        assert main(["report", str(runs), "--archive", place]) == 2
        assert "name a file" in capsys.readouterr().err
    new = tmp_path / "new" / "folder" / "a.jsonl"
    assert main(["report", str(runs), "--out", str(new.parent), "--archive", str(new)]) == 0
    assert str(new) in capsys.readouterr().out and len(find_runs([new])) == 4


def test_archives_one_after_another_are_one(runs, tmp_path):
    """Each with its own shared values."""
    one, two = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    archive.write(one, find_runs([runs / "lr=0.001-seed=1"]))
    archive.write(two, find_runs([runs / "lr=0.002-seed=1"]))
    both = tmp_path / "c.jsonl"
    both.write_bytes(one.read_bytes() + two.read_bytes())
    assert [r.values["optimizer.lr"] for r in find_runs([both])] == [1e-3, 2e-3]


def test_an_archive_below_a_sweep_stands_for_itself(runs, tmp_path, capsys):
    planned = {"name": "gone", "folder": "gone"}
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": [planned]}))
    archive.write(tmp_path / "a.jsonl", find_runs([runs]))
    assert "Missing" not in table(capsys, tmp_path / "a.jsonl")


def test_the_state_of_a_run_of_a_sweep_is_shown(runs, tmp_path, capsys):
    (run,) = find_runs([runs / "lr=0.001-seed=1"])
    failed = replace(run, results=None, state="failed after 3 of 10 updates")
    archive.write(tmp_path / "a.jsonl", [failed])
    assert main(["report", str(tmp_path / "a.jsonl")]) == 0
    assert failed.state in capsys.readouterr().out


def test_a_number_is_not_taken_for_a_truth(runs, tmp_path):
    one, two = find_runs([runs / "lr=0.001-seed=1", runs / "lr=0.001-seed=2"])
    one = replace(one, values={**one.values, "task.flag": 1, "task.own": None})
    two = replace(two, values={**two.values, "task.flag": True})
    archive.write(tmp_path / "a.jsonl", [one, two])
    found = find_runs([tmp_path / "a.jsonl"])
    assert [r.values["task.flag"] is True for r in found] == [False, True]
    assert [r.values.get("task.own", "absent") for r in found] == [None, "absent"]


@pytest.mark.parametrize("text", ["", "score,mean\n", "[1]\n", '{"kind": "train", "update": 1}\n'])
def test_another_file_is_a_usage_error(text, tmp_path):
    (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(UsageError, match="log.jsonl.* not an archive"):
        find_runs([tmp_path / "log.jsonl"])


@pytest.mark.parametrize("part", ["name", "values", "absent", "log", "notes"])
def test_a_damaged_line_is_named(part, runs, tmp_path):
    file = tmp_path / "measured.jsonl"
    archive.write(file, find_runs([runs]))
    lines = file.read_text().splitlines()
    damaged = json.loads(lines[2])
    del damaged[part]
    file.write_text("\n".join([*lines[:2], json.dumps(damaged), *lines[3:]]))
    with pytest.raises(MetaseqError, match=r"measured\.jsonl:3: not"):
        find_runs([file])
    file.write_text("\n".join([*lines[:4], lines[4][:50]]))
    with pytest.raises(MetaseqError, match=r"measured\.jsonl:5: not"):
        find_runs([file])


@pytest.mark.parametrize(
    "changed",
    [
        {"values": {"label": {}}},
        {"values": {"label": 5}},
        {"values": {"task.batch_size": {"a": 1}}},
        {"log": [{"kind": "valid", "update": "x", "loss": 1.0}]},
        {"log": [{"kind": [], "update": 1}]},
        {"log": ["kind"]},
    ],
)
def test_a_line_with_what_no_run_has_is_damaged(changed, runs, tmp_path):
    file = tmp_path / "measured.jsonl"
    archive.write(file, find_runs([runs]))
    lines = file.read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), **changed})
    file.write_text("\n".join(lines))
    with pytest.raises(MetaseqError, match=r"measured\.jsonl:2: not.*delete"):
        find_runs([file])


def test_an_archive_of_another_version_says_so(runs, tmp_path, capsys):
    file = tmp_path / "measured.jsonl"
    archive.write(file, find_runs([runs]))
    newer = file.read_text().replace(archive.FORMAT, "metaseq-lm runs 2")
    file.write_text(newer)
    for more in ([], [str(runs), "--archive", str(file)]):
        assert main(["report", *(more or [str(file)])]) == 1
        assert re.search(r"measured\.jsonl:1: .*another version: 'metaseq", capsys.readouterr().err)
    assert file.read_text() == newer


def test_an_archive_that_lacks_runs_is_damaged(runs, tmp_path):
    """Cut at the end of a line, by itself or before another one."""
    file = tmp_path / "measured.jsonl"
    archive.write(file, find_runs([runs]))
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, *lines]))
    assert len(archive.read(file)) == 8
    for kept in (lines[:-1], lines[:1], [*lines[:-1], *lines], [*lines, *lines[:-1]]):
        file.write_text("\n".join(kept) + "\n")
        with pytest.raises(MetaseqError, match=r"measured\.jsonl: damaged: .* \d"):
            find_runs([file])


def test_archives_from_before_the_count_are_read(runs, tmp_path):
    file, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    archive.write(new, find_runs([runs]))
    lines = new.read_text().splitlines()
    head = json.loads(lines[0])
    assert head.pop("runs") == 4
    old = [json.dumps(head), *lines[1:]]
    for rows, count in ((old, 4), ([*old, *lines], 8), ([*lines, *old], 8)):
        file.write_text("\n".join(rows))
        assert len(archive.read(file)) == count
    file.write_text(old[0] + "\n")
    with pytest.raises(MetaseqError, match="old.jsonl: .*no runs"):
        find_runs([file])
