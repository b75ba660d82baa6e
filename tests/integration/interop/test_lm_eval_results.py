"""`import FILE --run RUN`: results of lm-evaluation-harness beside those of suites."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from agreement import make_data, make_run
from lm_eval_files import write_results
from outcomes import expect_error

from metaseq_lm.cli import main
from metaseq_lm.reporting import archive
from metaseq_lm.reporting.runs import read_run
from metaseq_lm.runs.suite_results import read_all

ACC = {"acc,none": 0.5}
COUNTS = {name: {"effective": 9} for name in ("near", "a/b", "a-b")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a run, each with the folder that it was exported to."""
    folder = tmp_path_factory.mktemp("lm_eval")
    run = make_run(make_data(folder), folder / "run", 2, "trainer.save_interval_updates=1")
    for name in ("update_000000001", "update_000000002"):
        words = ["export", str(run / "checkpoints" / name), "--out", str(folder / name)]
        assert main([*words, "--data", str(folder / "data")]) == 0
    return folder


@pytest.fixture
def place(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "copy", symlinks=True)


def import_results(place: Path, file: Path, run: str = "run", *more: str) -> int:
    return main(["import", str(file), "--run", str(place / run), *more])


def test_results_are_kept_reported_and_archived(place: Path, capsys: Any) -> None:
    file = write_results(place / "results.json", str(place / "update_000000002"))
    assert import_results(place, file) == 0 and "nothing tells" not in capsys.readouterr().err
    pairs, sums = read_all(place / "run")[0]
    assert pairs.metrics == {
        "lm_eval-pairs.acc": 0.7,
        "lm_eval-pairs.n": 40,
        "lm_eval-pairs.near.acc": 0.75,
        "lm_eval-pairs.near.n": 30,
        "lm_eval-pairs.far.acc": 0.55,
        "lm_eval-pairs.far.n": 10,
    }
    assert sums.groups["overall"]["metrics"] == {
        "exact_match-strict": 0.5,
        "exact_match-flexible": 0.6,
    }
    assert pairs.facts["standard_errors"] == {
        "overall": {"acc": 0.1},
        "near": {"acc": 0.1},
        "far": {},
    }
    words = ["report", str(place / "run"), "--metric", "lm_eval-pairs.near.acc"]
    assert main([*words, "--archive", str(place / "a.jsonl")]) == 0
    assert "75.00" in capsys.readouterr().out
    assert archive.read(place / "a.jsonl")[0].metrics == read_run(place / "run").metrics


def test_items_and_options_but_not_the_model_tell_results_apart(place: Path) -> None:
    def read(**changes: Any) -> tuple[str, Any]:
        assert import_results(place, write_results(place / "r.json", **changes)) == 0
        pairs = read_all(place / "run")[0][0]
        return pairs.data, pairs.options

    first = read()
    assert read(model="other/model") == first
    assert read(config={"limit": 8.0}) != first and read(versions={"pairs": 2}) != first
    content = json.loads((place / "r.json").read_text())
    content["configs"]["far"]["dataset_path"] = "me/others"
    assert read(configs=content["configs"])[0] != first[0]


def test_a_group_without_a_mean_leaves_its_tasks(place: Path) -> None:
    content = json.loads(write_results(place / "r.json").read_text())
    content["results"]["pairs"] = {"alias": "pairs"}
    # A group that is in itself, as a damaged file may say.
    changes = {"results": content["results"], "group_subtasks": {"pairs": ["pairs", "near"]}}
    assert import_results(place, write_results(place / "r.json", **changes)) == 0
    names = [results.name for results in read_all(place / "run")[0]]
    assert names == ["lm_eval-far", "lm_eval-near", "lm_eval-sums"]


def test_an_exported_folder_tells_its_checkpoint(place: Path, capsys: Any) -> None:
    file = write_results(place / "r.json", str(place / "update_000000001"))
    expect_error(capsys, import_results(place, file), 2, "update_000000001", "--run")
    assert not (place / "run" / "suites").exists()
    assert import_results(place, file, "run/checkpoints/update_000000001") == 0
    assert read_all(place / "run")[0][0].update == 1
    # Of a name on the Hub nothing is known.
    assert import_results(place, write_results(place / "r.json")) == 0
    assert "me/model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes, code, named",
    [
        ({"results": []}, 1, "results"),
        ({"configs": None}, 1, "configs"),
        ({"n-samples": {"near": {"effective": -1}}}, 1, "effective"),
        ({"n-samples": {}}, 2, "n-samples"),
        ({"results": {"near": {"acc": 0.5}}}, 2, "metric"),
        ({"results": {"near": ACC, "a/b": ACC, "a-b": ACC}, "n-samples": COUNTS}, 2, "a/b"),
    ],
)
def test_other_content_is_refused(
    changes: dict[str, Any], code: int, named: str, place: Path, capsys: Any
) -> None:
    file = write_results(place / "r.json", **changes)
    expect_error(capsys, import_results(place, file), code, "r.json", named)
    assert not (place / "run" / "suites").exists()


def test_mistakes_of_the_command(place: Path, capsys: Any) -> None:
    file = write_results(place / "r.json")
    (place / "samples.jsonl").write_text('{"doc_id": 0}\n{"doc_id": 1}\n')
    assert import_results(place, place / "samples.jsonl") == 1
    assert import_results(place, place / "none.json") == 2
    assert import_results(place, file, "run", "--check") == 2
    assert import_results(place, file, "data") == 2
    assert main(["import", str(file), "--out", "x", "--run", str(place / "run")]) == 2
    assert "Traceback" not in capsys.readouterr().err
