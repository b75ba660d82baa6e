"""Records for other sites, against the rules of their forms in our own words."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from league_rows import make_run, suite

from metaseq_lm.cli import main
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.files import FINITE, schema_error
from metaseq_lm.reporting import archive
from metaseq_lm.reporting.exchange import eval_records, hub_entries
from metaseq_lm.reporting.settings import group

TEXTS = {"*": str}
ONE_OF = "documentation|evaluation_run", "first_party|third_party|collaborative|other"
DATASET = {"dataset_name": str, "additional_details?": TEXTS}
# The keys that Every Eval Ever 0.3.0 requires, and those we write (docs/reference/files.md).
RECORD = {
    "schema_version": re.compile(r"0\.3\.0"),
    "evaluation_id": str,
    "retrieved_timestamp": re.compile(r"\d+\.\d+"),
    "source_metadata": {
        "source_type": re.compile(ONE_OF[0]),
        "source_organization_name": str,
        "evaluator_relationship": re.compile(ONE_OF[1]),
    },
    "eval_library": {"name": str, "version": str},
    "model_info": {
        "name": str,
        "id": re.compile(r"[^/]+/[^/]+"),
        "inference_engine?": TEXTS,
        "additional_details": {
            "deployment_type": re.compile("self_deployed|externally_managed|unknown"),
            "model_availability": re.compile("open_weights|closed_weights|unknown"),
            **TEXTS,
        },
    },
    "evaluation_results": [
        {
            "evaluation_name": str,
            "source_data": (
                {"source_type": re.compile("other"), **DATASET},
                {"source_type": re.compile("hf_dataset"), "hf_repo": str, **DATASET},
            ),
            "metric_config": {
                "lower_is_better": bool,
                "score_type?": re.compile("continuous"),  # which requires both bounds
                "min_score?": FINITE,
                "max_score?": FINITE,
                "additional_details?": TEXTS,
            },
            "score_details": {
                "score": FINITE,
                "details": TEXTS,
                "uncertainty?": {
                    "standard_error": {"value": FINITE, "method?": str},
                    "confidence_interval": {"lower": FINITE, "upper": FINITE, "method?": str},
                    "standard_deviation": FINITE,
                    "num_samples": int,
                },
            },
            "generation_config?": {"additional_details?": TEXTS},
        }
    ],
}
HUB = [{"dataset": {"id": re.compile(r"[^/]+/[^/]+"), "task_id": str}, "value": FINITE}]


def scored(seeds: range = range(1, 4), **top: Any) -> list[Any]:
    """Runs with results of two suites, one of them of lm_eval."""
    runs = []
    for seed in seeds:
        run = make_run(seed, [2.0], **top)
        mine = suite("blimp", "far.end", accuracy=0.5 + seed / 100, layer=2.0)
        other = replace(suite("lm_eval-arc", "easy", acc=0.25), suite="lm_eval/arc")
        facts = {"lm_eval": "0.4.13", "dataset": "allenai/ai2_arc", "split": "test"}
        facts |= {"higher_is_better": {"acc": False}}
        runs.append(replace(run, suites=(mine, replace(other, facts=facts)), means={}))
    return runs


def checked(runs: list[Any], model: str = "me/tiny") -> dict[str, dict[str, Any]]:
    """The records of runs by the name of the library, which fit RECORD."""
    records, omitted = eval_records(group(runs), model)
    assert omitted == ["layer"]
    for path, record in records.items():
        assert not schema_error(record, RECORD) and record.keys() <= RECORD.keys()
        ids = [result["evaluation_result_id"] for result in record["evaluation_results"]]
        assert len(set(ids)) == len(ids)
        for result in record["evaluation_results"]:
            config = result["metric_config"]
            score = result["score_details"]["score"]
            assert len({"score_type", "min_score", "max_score"} & config.keys()) in (0, 3)
            assert config.get("min_score", score) <= score <= config.get("max_score", score)
        uuid = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
        assert re.fullmatch(rf"data/[^/]+/{record['model_info']['id']}/{uuid}\.json", path)
    return {record["eval_library"]["name"]: record for record in records.values()}


def test_a_record_has_the_mean_over_seeds_and_its_uncertainty() -> None:
    records = checked(scored(init_from="/my/place/base"))
    assert records["lm_eval"]["model_info"]["additional_details"]["init_from"] == "base"
    results = {r["evaluation_result_id"]: r for r in records["metaseq-lm"]["evaluation_results"]}
    assert list(results) == ["blimp.accuracy", "blimp.far.end.accuracy"]
    inner = results["blimp.far.end.accuracy"]
    assert inner["evaluation_name"] == "blimp.far.end"
    assert inner["metric_config"]["metric_id"] == "accuracy"
    assert inner["metric_config"]["max_score"] == 1.0
    details = inner["score_details"]
    assert details["score"] == pytest.approx(0.52)
    assert details["uncertainty"]["standard_error"]["value"] == pytest.approx(0.01 / 3**0.5)
    assert details["uncertainty"]["confidence_interval"]["upper"] == pytest.approx(0.5448, abs=1e-4)
    assert details["details"] == {
        "items": "500",
        "seed 1": "0.51",
        "seed 2": "0.52",
        "seed 3": "0.53",
    }
    assert inner["source_data"]["additional_details"]["hash"] == "d1"
    (of_lm_eval, _) = records["lm_eval"]["evaluation_results"]
    assert of_lm_eval["source_data"]["hf_repo"] == "allenai/ai2_arc"
    assert of_lm_eval["metric_config"]["lower_is_better"]
    assert records["lm_eval"]["eval_library"]["version"] == "0.4.13"
    (single, _) = checked(scored(range(1, 2)))["metaseq-lm"]["evaluation_results"]
    assert "uncertainty" not in single["score_details"]


def test_equal_results_have_equal_paths_and_settings_names_of_their_own() -> None:
    assert list(eval_records(group(scored()), "me/x")[0]) == list(
        eval_records(group(scored()), "me/x")[0]
    )
    runs = [*scored(), *scored(label="other/name")]
    names = {record["model_info"]["id"] for record in eval_records(group(runs), "me/x")[0].values()}
    assert names == {"me/x-row", "me/x-other-name"}


def test_what_makes_no_record_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="suite"):
        eval_records(group([replace(run, suites=()) for run in scored()]), "me/tiny")
    first, *others = scored()
    first = replace(first, suites=(replace(first.suites[0], data="d2"),))
    with pytest.raises(UsageError, match=r"suites\.blimp\.data"):
        eval_records(group([first, *others]), "me/tiny")


@pytest.mark.parametrize(
    "benchmark, count, named",
    [
        ("blimp.accuracy", 1, "METRIC="),
        ("blimp.accuracy=blimp:all", 1, "METRIC="),
        ("blimp.acuracy=me/blimp:all", 1, "'blimp.accuracy'"),
        ("blimp.accuracy=me/blimp:all", 3, "3"),
    ],
)
def test_entries_of_the_hub_are_of_one_run(benchmark: str, count: int, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        hub_entries(group(scored(range(1, count + 1))), [benchmark])


def test_report_writes_both_forms_from_an_archive(tmp_path: Path, capsys: Any) -> None:
    archive.write(tmp_path / "a.jsonl", scored())
    out, tested = tmp_path / "out", "me/arc:easy"
    report = ["report", str(tmp_path / "a.jsonl"), "--metric", "blimp.accuracy", "--out", str(out)]
    eee = [*report, "--format", "eee", "--model", "me/tiny"]
    assert main(eee) == 0 and main(eee) == 0  # the same files again
    files = list(out.rglob("*.json"))
    assert len(files) == 2 and not any(out.glob("*.*"))
    assert not any(schema_error(json.loads(file.read_text()), RECORD) for file in files)
    hub = [*report, "--format", "hf", "--where", "seed=2", "--benchmark"]
    assert main([*hub, f"lm_eval-arc.easy.acc={tested}", f"blimp.accuracy={tested}"]) == 0
    entries = yaml.safe_load((out / ".eval_results" / "metaseq-lm.yaml").read_text())
    assert not schema_error(entries, HUB) and [e["value"] for e in entries] == [0.25, 0.52]
    parse = pytest.importorskip("huggingface_hub").parse_eval_result_entries
    assert [(e.dataset_id, e.task_id) for e in parse(entries)] == [("me/arc", "easy")] * 2
    capsys.readouterr()
    of_options = (eee[:-2], hub[:-1], [*report, "--model", "me/x"], [*eee, "--watch"])
    for mistake in (*of_options, [*eee, "--model", "../x"], [*hub, "blimp.accuracy=x"]):
        assert main(mistake) == 2 and not capsys.readouterr().out
    assert "Traceback" not in capsys.readouterr().err
