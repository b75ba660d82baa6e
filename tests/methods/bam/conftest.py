"""Data of the tests of BAM."""

from pathlib import Path

import bam_bench
import pytest


@pytest.fixture(scope="session")
def bam_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with three small labelled sets."""
    return bam_bench.make_data(tmp_path_factory.mktemp("bam") / "data")


@pytest.fixture(scope="session")
def teacher_runs(bam_sets: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The run folders of a teacher of two sets and of one of the third."""
    place = tmp_path_factory.mktemp("teachers")
    return [
        bam_bench.teacher(place, bam_sets, "words", "values"),
        bam_bench.teacher(place, bam_sets, "few"),
    ]
