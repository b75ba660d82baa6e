"""examples/cvt/claims.py: runs of one set and of several, differences by set over the seeds."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from imported import imported
from synthetic import make_run

SCRIPT = Path(__file__).resolve().parents[4] / "examples" / "cvt" / "claims.py"


@pytest.fixture
def claims() -> ModuleType:
    return imported(SCRIPT)


def write(
    folder: Path, label: str, sets: list[str], share: float, seed: int, **test: float
) -> None:
    config = {"task.labelled": sets, "task.label_fraction": share}
    place = folder / f"{label}-{len(sets)}-{sets[0]}-{share}-{seed}"
    raw = test.pop("raw", None)
    make_run(place, seed=seed, label=label, config=config, results={"metrics": {"test": test}})
    if raw is not None:  # two validations, of which the last counts
        with open(place / "log.jsonl", "a") as file:
            for update, score in ((10, 0.1), (20, test["score"])):
                line = {
                    "kind": "valid",
                    "update": update,
                    "seconds": 1,
                    "score": score,
                    "raw_score": raw,
                }
                file.write(json.dumps(line) + "\n")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """CVT above supervised training in five of six seeds of two sets at 5 %, in both of one set at
    100 %.
    """
    for number, (name, seed) in enumerate((n, s) for n in ("chunk", "pos") for s in (1, 2, 3)):
        base = 0.8 + seed / 100
        for label, score in (("supervised", base), ("CVT", base + (0.02 if number else -0.01))):
            write(tmp_path, label, [name], 0.05, seed, score=score, raw=score - 0.001)
    for seed in (1, 2):
        write(tmp_path, "supervised", ["chunk"], 1.0, seed, score=0.9)
        write(tmp_path, "CVT", ["chunk"], 1.0, seed, score=0.91 + seed / 100)
        several = {"score": 0.5, "chunk_f1": 0.95, "chunk_accuracy": 0.1, "pos_accuracy": 0.7}
        write(
            tmp_path, "CVT", ["chunk", "pos", "dep"], 1.0, seed, **several, dep_las=0.6, dep_uas=0.9
        )
    write(tmp_path, "CVT", ["chunk"], 0.25, 1, score=0.89)
    return tmp_path


def test_the_tables(claims, runs, capsys):
    make_run(runs / "died", label="CVT", score=None, config={"task.labelled": ["chunk"]})
    claims.main([str(runs)])
    out = capsys.readouterr().out
    one = "+2.50 [+2.00, +3.00] | - | 1 of 1 | - | - |"
    none = "- | 0 of 1 | - | - |"
    wanted = [
        "| 5 % of the labels | chunk | pos |",
        "| 100 % of the labels | chunk | dep | pos |",
        "| supervised | 82.00 ± 1.00 (3) | 82.00 ± 1.00 (3) |",
        "| CVT, 3 sets | 95.00 ± 0.00 (2) | 60.00 ± 0.00 (2) | 70.00 ± 0.00 (2) |",
        "| CVT | 92.50 ± 0.71 (2) | - | - |",
        "| CVT > supervised | 5 % | +1.00 [-1.00, +2.00] | +2.00 [+2.00, +2.00] | 2 of 2 | - | - |",
        f"| 4.2 | CVT > supervised | 100 % | {one}",
        f"| 4.2 | CVT, 3 sets > CVT | 100 % | {one}",
        f"| CVT with 25 % > supervised with all |  | -1.00 [-1.00, -1.00] | {none}",
        f"| CVT - supervised, with 5 % > with all |  | -2.00 [-3.00, -1.00] | {none}",
        "| supervised | 6 | +0.10 | 6 | 1.00 | 1.00 |",
    ]
    assert not [row for row in wanted if row not in out], out
    assert "below 0.250" in out and "died" in out


def test_sets_are_the_evidence_not_seeds(claims, tmp_path, capsys):
    """Four sets that agree have p 1/16 with any seeds; sets of one model are not tested."""
    names = ("chunk", "dep", "ncbi", "pos")
    for seed in (1, 2, 3):
        for name in names:
            for label, score in (("CVT", 0.5), ("supervised", 0.4)):
                write(tmp_path, label, [name], 0.05, seed, score=score)
        several = {"chunk_f1": 0.53, "pos_accuracy": 0.54, "dep_las": 0.55}
        write(tmp_path, "CVT", ["chunk", "pos", "dep"], 0.05, seed, **several)
    claims.main([str(tmp_path)])
    out = capsys.readouterr().out
    tenth = " | ".join(["+10.00 [+10.00, +10.00]"] * 4)
    single = f"| CVT > supervised | 5 % | {tenth} | 4 of 4 | 0.062 | 0.062 |"
    several = "| +5.00 [+5.00, +5.00] | - | +4.00 [+4.00, +4.00] | 3 of 3 | - | - |"
    assert single in out and several in out and "below 0.062" in out


def test_the_stage_that_counts(claims, tmp_path, capsys):
    """The last of a sweep: encoders of the same sets for several probes do not collide."""
    runs = []
    for probed in ("chunk", "pos"):
        stages = []
        for stage, label, sets in (
            ("multi", "CVT", ["dep", "tags"]),
            ("probe", "frozen encoder", [probed]),
        ):
            found = {"metrics": {"test": {"score": 0.9, "dep_las": 0.8, "tags_accuracy": 0.7}}}
            config = {"task.labelled": sets}
            make_run(tmp_path / stage / probed, label=label, config=config, results=found)
            stages.append({"name": stage, "folder": f"{stage}/{probed}", "arguments": []})
        place = {"name": probed, "folder": f"probe/{probed}"}
        runs.append({**place, "values": {}, "seed": 1, "stages": stages})
    content = {"version": 1, "out": str(tmp_path), "launch": {}, "runs": runs}
    content["definition"] = {"config_dir": None, "user_dir": None}
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    claims.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert "| frozen encoder | 90.00 (1) | 90.00 (1) |" in out and "2 sets" not in out


def test_a_difference_of_nothing_is_no_sign(claims):
    assert claims.sign_test({"chunk": 1.0, "dep": 0.0, "pos": 2.0}) == 0.25
    assert claims.sign_test({"chunk": 0.0}) == 1.0


def test_a_score_that_is_there_twice(claims, runs):
    config = {"task.labelled": ["chunk"], "task.label_fraction": 0.25}
    found = {"metrics": {"test": {"score": 0.9}}}
    make_run(runs / "again", label="CVT", seed=1, config=config, results=found)
    with pytest.raises(claims.MetaseqError, match="CVT has chunk.*25.*1"):
        claims.main([str(runs)])


def test_claims_with_a_closed_pipe_is_no_error_and_mistakes_are_one_line(runs, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, str(SCRIPT)]
    left = subprocess.run([*command, str(runs)], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (left.returncode, left.stderr) == (0, b"")
    wrong = subprocess.run([*command, str(tmp_path / "none")], capture_output=True, text=True)
    assert wrong.returncode and wrong.stderr.startswith("claims.py: ")
    assert len(wrong.stderr.splitlines()) == 1
