"""Options that name other runs: declared beside the option, noted in the run folder, read by
reports.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from battery import configure

from metaseq_lm.core.config import options_with
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.runs.folder import RunFolder, read_sources

OWN = {"init_from": "pretraining", "branch_from": "plateau"}


def test_options_with_finds_all_registered_and_those_of_a_run(moons: Path, tmp_path: Path) -> None:
    every = options_with("source")
    assert OWN | {"task.elmo": "language_model", "task.teachers": "teachers"} == every
    config = configure(moons, tmp_path, ("masked_lm", 0))
    assert options_with("source", config) == OWN
    movable = {"save_dir", "data", "label", "user_dir", "init_from", "branch_from"}
    assert movable == set(options_with("movable", config))


def test_run_folder_notes_the_sources_of_its_task(moons: Path, tmp_path: Path) -> None:
    RunFolder(configure(moons, tmp_path / "plain", ("masked_lm", 0)))
    assert not (tmp_path / "plain" / "sources.json").exists()
    assert read_sources(tmp_path / "plain") == OWN
    RunFolder(configure(moons, tmp_path / "words", ("cvt_aux", 0)))
    assert read_sources(tmp_path / "words") == OWN | {"task.elmo": "language_model"}


@pytest.mark.parametrize("text", ["[", "[1]", '{"task.elmo": 1}', '{"a b": "x"}', '{"a": "../x"}'])
def test_damaged_sources_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "sources.json").write_text(text)
    with pytest.raises(MetaseqError, match="sources.json is damaged"):
        read_sources(tmp_path)


def test_movable_options_may_change_on_resume_and_others_not(moons: Path, tmp_path: Path) -> None:
    config = configure(moons, tmp_path, ("masked_lm", 0))
    RunFolder(config)
    (tmp_path / "log.jsonl").write_text(json.dumps({"kind": "train", "update": 1}) + "\n")
    moved = replace(config, label="other", engine=replace(config.engine, threads=2))
    RunFolder(moved)
    with pytest.raises(UsageError, match="seed is 1.*2"):
        RunFolder(replace(config, seed=2))


def test_a_configuration_is_written_when_it_differs(moons: Path, tmp_path: Path) -> None:
    config = configure(moons, tmp_path, ("masked_lm", 0))
    folder, file = RunFolder(config), tmp_path / "config.yaml"
    file.unlink()
    folder.write_config(config)
    assert not file.exists()
    folder.write_config(replace(config, label="other"))
    assert "label: other" in file.read_text()
