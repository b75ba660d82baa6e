"""A student that goes on has the teachers that it began with, wherever they are."""

import shutil
from pathlib import Path

import bam_bench
import pytest
from bam_bench import NAMES, copied, given, stored

from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.runs.manifests import CheckpointError


def test_a_student_keeps_its_teachers(teacher_runs, bam_sets, tmp_path):
    """Wherever they are when it goes on; others are refused, those that went on too."""
    copies = copied(teacher_runs, tmp_path)
    student = tmp_path / "student"

    def go(save: Path, teaching: list[Path], updates: int) -> None:
        more = ["criterion.total_updates=3", f"trainer.max_update={updates}"]
        bam_bench.train(bam_sets, save, given(teaching), *more)

    go(student, copies, 1)
    moved = [path.rename(tmp_path / f"moved_{path.name}") for path in copies]
    go(student, moved, 2)
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    for file in stored(moved).values():
        shutil.copy(file, outputs)
    go(student, [outputs], 3)
    straight = tmp_path / "straight"
    go(straight, moved, 3)
    last = "checkpoints/last/model.safetensors"
    assert (student / last).read_bytes() == (straight / last).read_bytes()
    others = [
        bam_bench.teacher(tmp_path / "others", bam_sets, name, more=["seed=9"]) for name in NAMES
    ]
    for teaching in (others, []):
        with pytest.raises(CheckpointError, match="with other teachers"):
            go(student, teaching, 4)


def test_a_split_more_changes_no_outputs(teacher_runs, bam_sets, tmp_path):
    """They are of the training rows; other data of the set does not matter."""
    copies = copied(teacher_runs, tmp_path)
    bam_bench.train(bam_sets, tmp_path / "one", given(copies), "trainer.max_update=1")
    data = tmp_path / "data"
    shutil.copytree(bam_sets, data)
    manifest = Manifest.load(data / "few")
    for suffix in (
        "label.bin",
        "label.idx",
        "input0.bin",
        "input0.idx",
        "input1.bin",
        "input1.idx",
    ):
        shutil.copy(data / "few" / f"valid.{suffix}", data / "few" / f"other.{suffix}")
    manifest.splits["other"] = manifest.splits["valid"]
    manifest.add_files(data / "few", [path.name for path in (data / "few").glob("other.*")])
    manifest.save(data / "few")
    before = {file: file.stat().st_mtime_ns for file in stored(copies).values()}
    bam_bench.train(data, tmp_path / "two", given(copies), "trainer.max_update=1")
    assert {file: file.stat().st_mtime_ns for file in stored(copies).values()} == before
