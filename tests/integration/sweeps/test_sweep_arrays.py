"""What a sweep submits to Slurm, seen by programs that take the place of Slurm's."""

import os
import re
from pathlib import Path

import pytest
from sweeping import SHORT, sweep

from metaseq_lm.sweeps.folder import SweepFolder
from metaseq_lm.sweeps.states import Slurm

# An sbatch that refuses what comes after LIMIT jobs, keeps the scripts and counts the jobs from
# 101.
SBATCH = """#!/bin/sh
cd "$(dirname "$0")"
number=$(($(cat count 2>/dev/null || echo 100) + 1))
[ $number -le ${LIMIT:-999} ] || { echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }
echo $number >count
cp "$1" $number.sh
echo Submitted batch job $number
"""
SCONTROL = "#!/bin/sh\necho 'MaxArraySize            = 3'\n"


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a Slurm first on the path whose arrays have three jobs at most."""
    place = tmp_path / "bin"
    place.mkdir()
    for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL), ("srun", "#!/bin/sh\n")):
        (place / name).write_text(text)
        (place / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    return place


def scripts(place: Path) -> list[dict[str, str]]:
    """Return the options of each script that was submitted, in order."""
    directives = [
        re.findall(r"^#SBATCH --([\w-]+)=(.*)$", f.read_text(), re.M) for f in numbered(place)
    ]
    return [dict(options) for options in directives]


def numbered(place: Path) -> list[Path]:
    return sorted(place.glob("1*.sh"))


def launch(moons: Path, out: Path, *more: str) -> int:
    slurm = ["--executor", "slurm", "--seeds", "1,2,3,4,5,6,7"]
    return sweep(moons, "--out", out, *slurm, *more, *SHORT)


def jobs(out: Path) -> list[tuple[str, str]]:
    return [(r["run"], r["job"]) for r in SweepFolder(out).rows() if r["kind"] == "submit"]


def test_an_array_larger_than_the_clusters_limit(
    bin_folder: Path, moons: Path, tmp_path: Path
) -> None:
    """Seven runs in arrays of three, three and one, each with its number; a job alone
    is no array.
    """
    out = tmp_path / "out"
    assert launch(moons, out) == 0
    numbers = ["101_0", "101_1", "101_2", "102_0", "102_1", "102_2", "103"]
    assert jobs(out) == [(f"seed={i}", job) for i, job in enumerate(numbers, start=1)]
    submitted = scripts(bin_folder)
    assert [script.get("array") for script in submitted] == ["0-2%3", "0-2%3", None]
    assert not any("dependency" in script for script in submitted)
    assert all((out / "jobs" / "0001" / f"{job}_submitted.pkl").is_file() for job in numbers)


def test_without_scontrol_arrays_have_the_default_limit_of_slurm(
    bin_folder: Path, moons: Path, tmp_path: Path
) -> None:
    (bin_folder / "scontrol").unlink()
    assert launch(moons, tmp_path / "out") == 0
    assert [script.get("array") for script in scripts(bin_folder)] == ["0-6%7"]


def test_arrays_with_a_limit_follow_each_other(
    bin_folder: Path, moons: Path, tmp_path: Path
) -> None:
    assert launch(moons, tmp_path / "out", "--max-parallel", "2") == 0
    submitted = scripts(bin_folder)
    assert [script.get("array") for script in submitted] == ["0-2%2", "0-2%2", None]
    assert [s.get("dependency") for s in submitted] == [None, "afterany:101", "afterany:102"]


def test_arrays_before_a_refused_one_are_recorded(
    bin_folder: Path, moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The next command submits the others only."""
    out = tmp_path / "out"
    monkeypatch.setenv("LIMIT", "102")
    assert launch(moons, out) == 1
    message = capsys.readouterr().err
    assert "(6 of 7 runs" in message
    assert "Traceback" not in message and len(jobs(out)) == 6


def test_the_script_of_several_nodes(bin_folder: Path, moons: Path, tmp_path: Path) -> None:
    """One task on each node; `srun` gives it its CPUs and ends all if one is killed."""
    more = ["--nodes", "2", "--nproc", "4", "--cpus", "8", "--gpus", "4", "--mem", "16"]
    assert launch(moons, tmp_path / "out", *more) == 0
    options = scripts(bin_folder)[0]
    names = ("nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "mem")
    assert [options[name] for name in names] == ["2", "1", "8", "4", "16GB"]
    command = numbered(bin_folder)[0].read_text()
    assert "--cpus-per-task=8 --kill-on-bad-exit=1 --wait=0" in command


@pytest.mark.parametrize(
    "accounting, controller, state, starts, reason",
    [
        ([], "PENDING|Resources", "PENDING", 0, "Slurm: Resources"),
        (["RUNNING"], "RUNNING|None", "RUNNING", 1, ""),
        (["NODE_FAIL"], "COMPLETING|None", "COMPLETING", 1, ""),
        # The accounting does not have the second start yet, then it does.
        (
            ["NODE_FAIL"],
            "PENDING|BeginTime",
            "PENDING",
            2,
            "Slurm: BeginTime, requeued after NODE_FAIL",
        ),
        (["NODE_FAIL", "RUNNING"], "RUNNING|None", "RUNNING", 2, "Slurm: requeued after NODE_FAIL"),
        (["REQUEUED"], "RUNNING|None", "RUNNING", 2, ""),
        (["PREEMPTED", "COMPLETED"], "", "COMPLETED", 2, "Slurm: requeued after PREEMPTED"),
    ],
)
def test_starts_of_a_job(
    bin_folder: Path, accounting: list[str], controller: str, state: str, starts: int, reason: str
) -> None:
    rows = "\n".join(f"12_3|{name}|0:0" for name in accounting)
    for name, text in (("sacct", rows), ("squeue", controller and f"12_3|{controller}")):
        (bin_folder / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (bin_folder / name).chmod(0o755)
    slurm = Slurm(["12_3"])
    assert slurm.states["12_3"] == state
    assert (slurm.lives["12_3"], slurm.reason("12_3")) == (starts, reason)
