"""Suites that a run is scored with when it ends: results, resumption, mistakes."""

import json
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agreement import SIZES, make_data, make_pairs
from outcomes import expect_error

from metaseq_lm.cli import main
from metaseq_lm.core.config import effect
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.core.options import NOTHING
from metaseq_lm.distributed import signals
from metaseq_lm.reporting.folders import read_run
from metaseq_lm.reporting.settings import differing_suite_options
from metaseq_lm.training import suites
from metaseq_lm.training.suites import final_suites

ENTRIES = ["pairs pairs compare=changed", "pairs pairs/far.jsonl name=far first=10"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with minimal pairs in its folder."""
    data = make_data(tmp_path_factory.mktemp("final"))
    (data / "pairs").mkdir()
    for name, seed in (("near", 7), ("far", 8)):
        make_pairs(data / "pairs" / f"{name}.jsonl", 30, seed)
    return data


def train(data: Path, save: Path, entries: list[str], *options: str) -> int:
    command = ["train", str(data), "--criterion", "masked_lm", *SIZES, "--save-dir", str(save)]
    command += ["trainer.max_update=3", f"trainer.final_suites={json.dumps(entries)}"]
    return main([*command, *options])


def results_in(run: Path) -> dict[str, Any]:
    files = (run / "suites").glob("*/update_000000003.json")
    return {file.parent.name: json.loads(file.read_text()) for file in files}


def test_results_are_those_of_score(data, tmp_path):
    run = tmp_path / "run"
    # Whatever the precision of the training, suites are scored in fp32.
    assert train(data, run, ENTRIES, "engine.precision=fp64") == 0
    results = results_in(run)
    assert results.keys() == {"pairs", "far"} and results["far"]["groups"]["far"]["n"] == 10
    shutil.rmtree(run / "suites")  # else they would be printed, not computed
    score = ["score", str(run), "--suite", "pairs", "--data"]
    assert main([*score, f"{data}/pairs", "compare=changed"]) == 0
    assert main([*score, f"{data}/pairs/far.jsonl", "--name", "far", "first=10"]) == 0
    again = results_in(run)
    for record in (*results.values(), *again.values()):
        record["facts"].pop("seconds")
        record.pop("checksum")
    assert again == results and results["pairs"]["options"]["precision"] == "fp32"
    accuracy = results["far"]["groups"]["far"]["metrics"]["accuracy"]
    assert read_run(run).metrics["far.accuracy"] == accuracy


def test_a_finished_run_scores_what_is_missing(data, tmp_path):
    run = tmp_path / "run"
    assert train(data, run, ENTRIES[:1]) == 0
    first = (run / "suites/pairs/update_000000003.json").stat().st_mtime_ns
    assert train(data, run, ENTRIES) == 0
    assert results_in(run).keys() == {"pairs", "far"}
    assert (run / "suites/pairs/update_000000003.json").stat().st_mtime_ns == first
    finished = json.loads((run / "results.json").read_text())
    assert finished["status"] == "finished" and finished["updates"] == 3
    # Results with other options, or of other data, are no answer.
    near = "pairs pairs/near.jsonl name=far first="
    assert train(data, run, [ENTRIES[0], near + "10"]) == 0
    assert "near" in results_in(run)["far"]["groups"]
    assert train(data, run, [ENTRIES[0], near + "11"]) == 0
    assert results_in(run)["far"]["groups"]["near"]["n"] == 11
    assert (run / "suites/pairs/update_000000003.json").stat().st_mtime_ns == first


def test_results_from_before_an_option_are_an_answer_for_its_default(data, tmp_path):
    run = tmp_path / "run"
    assert train(data, run, ENTRIES[:1]) == 0
    file = run / "suites/pairs/update_000000003.json"
    record = json.loads(file.read_text())
    assert record["options"].pop("skip") == 0 and record.pop("checksum")
    file.write_text(json.dumps(record))
    assert train(data, run, ENTRIES[:1]) == 0
    assert json.loads(file.read_text()) == record
    # With another value they are none, and reports tell the two apart.
    (old,) = read_run(run).suites
    assert train(data, run, ["pairs pairs compare=changed skip=1"]) == 0
    (new,) = read_run(run).suites
    assert new.groups["overall"]["n"] == old.groups["overall"]["n"] - 2
    runs = [replace(read_run(run), suites=(results,)) for results in (old, new)]
    differing = differing_suite_options("pairs.accuracy", runs)
    assert differing == {"suites.pairs.skip": "0, 1"}


def test_results_of_other_code_stay_and_are_named(data, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    assert train(data, run, ENTRIES) == 0
    capsys.readouterr()
    assert train(data, run, ENTRIES) == 0
    assert "other code" not in capsys.readouterr().err
    results = results_in(run)
    monkeypatch.setattr(suites, "code_hash", lambda user_dir: "0123")
    assert train(data, run, ENTRIES) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "other code" in line]
    folders = [str(run / "suites" / name) for name in ("pairs", "far")]
    assert "pairs, far." in line and f"delete {' '.join(folders)} and" in line
    assert results_in(run) == results
    shutil.rmtree(folders[0])
    expect_error(capsys, train(data, run, ENTRIES), 0, "other code: far.")
    again = results_in(run)
    assert again["pairs"]["facts"]["code"] == "0123" and again["far"] == results["far"]


def test_an_interrupted_run_scores_the_rest_when_it_goes_on(data, tmp_path, monkeypatch):
    run, scored = tmp_path / "run", []
    score_suite = suites.score_suite

    def interrupted(request: suites.SuiteRequest, *args: Any, **more: Any) -> Any:
        scored.append(request.name)
        if len(scored) == 2:
            raise signals.make_interruption(signal.SIGTERM, "while scoring")
        return score_suite(request, *args, **more)

    monkeypatch.setattr(suites, "score_suite", interrupted)
    assert train(data, run, ENTRIES) != 0
    assert scored == ["pairs", "far"] and results_in(run).keys() == {"pairs"}
    status = json.loads((run / "results.json").read_text())["status"]
    assert status == "interrupted"
    assert train(data, run, ENTRIES) == 0
    assert scored == ["pairs", "far", "far"] and results_in(run).keys() == {"pairs", "far"}


MISTAKES = [
    ("pears pairs", "pears.*Did you mean"),
    ("pairs", "write {suite: SUITE"),
    ("pairs 'pairs", "quotation"),
    ("pairs pairs compar=changed", "Did you mean 'compare'"),
    ("pairs nowhere", "nowhere: no such folder"),
    ("pairs pairs name=valid", "--name valid"),
    ("pairs pairs too_long=never", "too_long=never"),
    ("pairs pairs pll=none", "pll=none.*within_word_l2r"),
    ("pairs pairs optional=perhaps", "optional=perhaps"),
    ("labelled pairs", "predictions for a labelled set"),
]


@pytest.mark.parametrize("entry, reason", MISTAKES)
def test_mistakes_end_the_run_before_it_starts(data, tmp_path, entry, reason, capsys):
    assert train(data, tmp_path / "run", [entry]) == 2
    assert re.search(rf"trainer.final_suites.*{reason}", capsys.readouterr().err)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_an_optional_suite_is_left_out_where_the_run_does_not_give_it(data, tmp_path, capsys):
    replaced = ["task=electra", "model=electra", "criterion=replace_mlm"]
    assert train(data, tmp_path / "refused", ENTRIES[:1], *replaced) == 2
    assert "gives no probabilities" in capsys.readouterr().err
    entries = ["pairs pairs compare=changed optional=true"]
    expect_error(capsys, train(data, tmp_path / "run", entries, *replaced), 0, "with suite pairs")
    assert not results_in(tmp_path / "run")
    assert train(data, tmp_path / "masked", entries) == 0
    assert results_in(tmp_path / "masked").keys() == {"pairs"}
    assert train(data, tmp_path / "missing", ["pairs nowhere optional=true"]) == 2


def test_two_results_of_a_name_are_refused(data):
    entries = json.dumps(["pairs pairs", "pairs pairs/far.jsonl"])
    with pytest.raises(UsageError, match="them a name"):
        final_suites(load_config([f"data={data}", f"trainer.final_suites={entries}"]))


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_dry_runs_name_a_mistake(data, tmp_path, command, capsys):
    of_sweep = ["--seeds", "1", "--out", str(tmp_path / "sweep")]
    words = [command, str(data), "--criterion", "masked_lm", *SIZES, "--dry-run"]
    words += of_sweep if command == "sweep" else []
    assert main([*words, 'trainer.final_suites=["pairs nowhere"]']) == 2
    assert re.search("final_suites.*no such folder", capsys.readouterr().err)


def test_they_make_no_setting():
    assert effect("trainer.final_suites", {}) == NOTHING
