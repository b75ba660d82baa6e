"""The record of the plan that a run belongs to."""

from pathlib import Path

import pytest

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.reporting import archive
from metaseq_lm.reporting.runs import read_run
from metaseq_lm.runs.records import PLAN_FILE, read_plan_hash, write_plan

HASH = "0123456789abcdef"


def test_a_run_keeps_the_hash_of_its_plan_in_its_folder_and_in_archives(tmp_path: Path) -> None:
    for name in ("of_a_plan", "alone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("seed: 1\nlabel: one\n")
    write_plan(tmp_path / "of_a_plan", HASH)
    runs = [read_run(tmp_path / name) for name in ("of_a_plan", "alone")]
    assert [run.plan for run in runs] == [HASH, ""]
    archive.write(tmp_path / "runs.jsonl", runs)
    assert [run.plan for run in archive.read(tmp_path / "runs.jsonl")] == [HASH, ""]


@pytest.mark.parametrize(
    "content", ["", "[]", '{"plan": "x"}', '{"plan": "0123456789abcdef", "checksum": "0"}']
)
def test_a_damaged_record_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / PLAN_FILE).write_text(content)
    with pytest.raises(MetaseqError, match=PLAN_FILE):
        read_plan_hash(tmp_path)
