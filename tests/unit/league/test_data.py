"""The data of a league: made once, and not taken for those of other options or files."""

import json
from pathlib import Path
from typing import Any

import pytest
from league_plans import plan_with

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.league import data
from metaseq_lm.league.plan import Plan
from metaseq_lm.league.plan_files import parse_plan

WORLD = {"world": "quad", "world_documents": 20, "world_held_out": 8, "world_labelled": 8}
SENTENCE = """1\tthe\t_\tDET\t_\t_\t2\tdet\t_\t_
2\tcat\t_\tNOUN\t_\t_\t0\troot\t_\t_

"""


def plan_of(**changes: Any) -> Plan:
    return parse_plan(plan_with(data={**WORLD, "world_pairs": 4, **changes}))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "corpus.txt").write_text("".join(f"the cat sees {n}\n" for n in range(120)))
    (tmp_path / "probe.conllu").write_text(SENTENCE * 3)
    names = {"text": "corpus.txt", "probe": "probe.conllu", "probe_test": "probe.conllu"}
    return {key: str(tmp_path / name) for key, name in names.items()}


def plan_of_text(files: dict[str, str]) -> Plan:
    return parse_plan(plan_with(data={**files, "vocab_size": 300, "task_tokens": 1}))


def test_data_of_other_options_are_refused(tmp_path: Path) -> None:
    folder = data.make_data(plan_of(), tmp_path / "data")
    before = Manifest.load(folder).data_hash
    assert data.make_data(plan_of(), folder) == folder
    with pytest.raises(UsageError, match="world_documents"):
        data.make_data(plan_of(world_documents=30), folder)
    assert Manifest.load(folder).data_hash == before
    # Data of a version without the record are those of the plan.
    data._record_of(folder).unlink()
    assert data.has_data(plan_of(), folder) and data.make_data(plan_of(), folder) == folder


def test_data_whose_making_was_stopped_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = data._make

    def stop(*arguments: Any) -> None:
        make(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "_make", stop)
    with pytest.raises(KeyboardInterrupt):
        data.make_data(plan_of(), tmp_path / "data")
    assert not data.has_data(plan_of(), tmp_path / "data")
    monkeypatch.setattr(data, "_make", make)
    folder = data.make_data(plan_of(world_documents=30), tmp_path / "data")
    assert data.has_data(plan_of(), folder)
    assert Manifest.load(folder).splits["train"]["documents"] == 30


def test_another_text_of_the_same_name_is_refused(files: dict[str, str], tmp_path: Path) -> None:
    folder = data.make_data(plan_of_text(files), tmp_path / "data")
    other = tmp_path / "other"
    other.mkdir()
    (other / "corpus.txt").write_text("".join(f"a dog runs {n}\n" for n in range(120)))
    plan = plan_of_text(files | {"text": str(other / "corpus.txt")})
    assert plan.hash == plan_of_text(files).hash
    with pytest.raises(UsageError, match="other text"):
        data.make_data(plan, folder)
    Path(files["text"]).unlink()  # what was made of it stays
    assert data.make_data(plan_of_text(files), folder) == folder


def test_a_probe_may_be_mended_before_its_sets_are_there(
    files: dict[str, str], tmp_path: Path
) -> None:
    Path(files["probe"]).write_text(SENTENCE.replace("DET", "_").replace("NOUN", "_"))
    with pytest.raises(MetaseqError, match=r"probe.conllu: .* '_'"):
        data.make_data(plan_of_text(files), tmp_path / "data")
    corpus = (tmp_path / "data" / "manifest.json").stat().st_mtime_ns
    Path(files["probe"]).write_text(SENTENCE * 3)
    folder = data.make_data(plan_of_text(files), tmp_path / "data")
    assert data.has_data(plan_of_text(files), folder)
    assert (folder / "manifest.json").stat().st_mtime_ns == corpus


@pytest.mark.parametrize(
    "change, message",
    [
        ({"world_docs": 3}, "world_docs"),
        ({"world_documents": "many"}, "'many' is not a whole number"),
        ({"world": "qud"}, "quad"),
    ],
)
def test_options_that_preprocess_does_not_take_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        data.make_data(plan_of(**change), tmp_path / "data")


def test_a_text_in_another_encoding_is_refused(files: dict[str, str], tmp_path: Path) -> None:
    lines = "".join(f"die Katze fällt {n}\n" for n in range(120))
    Path(files["text"]).write_bytes(lines.encode("latin-1"))
    with pytest.raises(MetaseqError, match="UTF-8"):
        data.make_data(plan_of_text(files), tmp_path / "data")


def test_a_probe_is_of_one_kind(files: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "labels.tsv").write_text("text\tlabel\nthe cat\tgood\n")
    plan = plan_of_text(files | {"probe_test": str(tmp_path / "labels.tsv")})
    with pytest.raises(UsageError, match="probe.conllu and .*labels.tsv"):
        data.make_data(plan, tmp_path / "data")


def test_a_missing_file_is_seen_first(files: dict[str, str], tmp_path: Path) -> None:
    plan = plan_of_text(files | {"probe_test": str(tmp_path / "nix.conllu")})
    with pytest.raises(UsageError, match=r"nix\.conllu"):
        data.make_data(plan, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def with_folders(tmp_path: Path, base: str, suite: str = "blimp") -> Plan:
    """Return a plan with a folder of a suite and one of a benchmark in `base`."""
    source = tmp_path / base / "cola"
    source.mkdir(parents=True)
    rows = "".join(f"x\t{n % 2}\t*\tthe cat sees {n}\n" for n in range(6))
    for split in ("train", "dev"):
        (source / f"{split}.tsv").write_text(rows)
    (tmp_path / base / suite).mkdir()
    (tmp_path / base / suite / "pairs.jsonl").write_text(base)
    folders = [str(tmp_path / base / suite)]
    return plan_of(folders=folders, benchmarks={"glue/CoLA": str(source)})


def test_folders_of_suites_are_linked_and_benchmarks_are_made(tmp_path: Path) -> None:
    first, second = with_folders(tmp_path, "a"), with_folders(tmp_path, "b")
    folder = data.make_data(first, tmp_path / "data")
    assert (folder / "blimp" / "pairs.jsonl").read_text() == "a"
    assert Manifest.load(folder / "CoLA").splits["train"]["rows"] == 6
    written = (folder / "CoLA" / "manifest.json").stat().st_mtime_ns
    # The same plan in another place: the folder is that one's, what is made of equal files stays.
    data.make_data(second, folder)
    assert (folder / "blimp" / "pairs.jsonl").read_text() == "b"
    assert (folder / "CoLA" / "manifest.json").stat().st_mtime_ns == written
    (tmp_path / "b" / "cola" / "dev.tsv").write_text("x\t1\t*\tthe cat\n")
    with pytest.raises(UsageError, match="other benchmarks"):
        data.make_data(second, folder)


@pytest.mark.parametrize("name", ["blimp", "cola"])
def test_a_missing_folder_is_seen_first(name: str, tmp_path: Path) -> None:
    plan = with_folders(tmp_path, "a")
    (tmp_path / "a" / name).rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=f"{name}: no such folder"):
        data.make_data(plan, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_folder_with_the_name_of_a_set_is_refused(tmp_path: Path) -> None:
    plan = with_folders(tmp_path, "a", suite="CoLA")
    with pytest.raises(UsageError, match=r"CoLA: .*rename"):
        data.make_data(plan, tmp_path / "data")
    assert [file.name for file in (tmp_path / "a" / "CoLA").iterdir()] == ["pairs.jsonl"]


def test_a_changed_record_is_damaged(tmp_path: Path) -> None:
    folder = data.make_data(plan_of(), tmp_path / "data")
    record = json.loads(data._record_of(folder).read_text())
    data._record_of(folder).write_text(json.dumps(record | {"source": {}}))
    with pytest.raises(MetaseqError, match="damaged"):
        data.make_data(plan_of(), folder)
