"""Files of runs are JSON by RFC 8259, which knows no NaN; readers take old files as well."""

import json
import math
from typing import Any

import torch
from battery import CASES, TINY
from synthetic import make_run

from metaseq_lm.cli import main
from metaseq_lm.core.files import as_numbers, to_json
from metaseq_lm.evaluation.predictions import write_predictions
from metaseq_lm.reporting import archive
from metaseq_lm.reporting.runs import read_run
from metaseq_lm.runs import manifests
from metaseq_lm.runs.folder import read_results
from metaseq_lm.training.trainer import Trainer

ODD = {"nan": math.nan, "inf": math.inf, "list": [-math.inf, 1.5, "x"], "n": 3, "text": "nan"}
MLM = [*CASES["masked_lm"][0], *TINY, "trainer.max_update=2", "trainer.log_interval=1"]


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_survive():
    assert repr(as_numbers(strict(to_json(ODD)))) == repr(ODD)
    assert to_json({"a": [1.0, None, True]}) == '{"a": [1.0, null, true]}'
    nested: Any = []
    for _ in range(5000):
        nested = [nested]
    as_numbers(nested)


def test_run_writes_strict_json(moons, tmp_path, monkeypatch):
    """Log, results and checkpoints of a run whose validation is not finite, and its archive."""
    run = tmp_path / "run"
    improves = Trainer._validate

    def validate(trainer: Trainer) -> bool:
        better = improves(trainer)
        trainer.last_valid = {"loss": math.nan, "f1": -math.inf}
        trainer.log.values("valid", trainer.update, trainer.seconds, trainer.last_valid)
        return better

    monkeypatch.setattr(Trainer, "_validate", validate)
    assert main(["train", str(moons), "--save-dir", str(run), *MLM]) == 0
    rows = [strict(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [row["f1"] for row in rows if "f1" in row] == ["-Infinity"]
    assert strict((run / "results.json").read_text())["metrics"]["valid"]["loss"] == "NaN"
    manifest = run / "checkpoints/last/manifest.json"
    assert strict(manifest.read_text())["valid"]["f1"] == "-Infinity"
    assert manifests.read_manifest(manifest.parent)["valid"]["f1"] == -math.inf
    results = read_results(run)
    assert results is not None and math.isnan(results["metrics"]["valid"]["loss"])
    whole = read_run(run)
    assert whole.series("valid.f1")[1] == [-math.inf] and math.isnan(whole.metrics["valid.loss"])
    file = tmp_path / "runs.jsonl"
    archive.write(file, [whole])
    for line in file.read_text().splitlines():
        strict(line)
    (stored,) = archive.read(file)
    assert stored.series("valid.f1")[1] == [-math.inf]
    assert stored.why_unscored("valid.loss") == "valid.loss is nan"
    assert stored.fingerprint == whole.fingerprint


def test_old_files_are_read(tmp_path):
    results = {"metrics": {"test": {"loss": math.nan}}, "flops": math.inf}
    run = make_run(tmp_path / "a", results=results)
    with open(run / "log.jsonl", "a") as log:
        log.write('{"kind": "valid", "update": 900, "seconds": 1, "accuracy": NaN}\n')
    assert "NaN" in (run / "results.json").read_text()
    read = read_run(run)
    assert math.isnan(read.metrics["test.loss"]) and math.isnan(
        read.series("valid.accuracy")[1][-1]
    )


def test_predictions_are_strict(tmp_path):
    rows = [{"index": 0, "scores": torch.tensor([math.nan, 1.0]).tolist()}]
    write_predictions(tmp_path, "valid", rows, {})
    assert strict((tmp_path / "predictions.valid.jsonl").read_text())["scores"] == ["NaN", 1.0]
