"""No prediction is no score: losses and accuracies of rows without targets."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from battery import TINY
from synthetic import make_run

from metaseq_lm.cli import main
from metaseq_lm.core.batch import TokenBatch, count_targets
from metaseq_lm.criterions.masked_lm import labelled_terms
from metaseq_lm.engine.engine import Engine
from metaseq_lm.models.layers import IGNORE
from metaseq_lm.reporting.folders import find_runs
from metaseq_lm.reporting.settings import group
from metaseq_lm.reporting.table import choose_metric, setting_table
from metaseq_lm.tasks import masked_lm

TRAIN = ["--task", "masked_lm", *TINY, "task.sample_break_mode=eos", "task.tokens_per_sample=34"]


def batch_of(targets: list[list[int]]) -> TokenBatch:
    array = np.array(targets)
    sizes = {**count_targets(array), "rows": len(array)}
    tokens = torch.zeros(array.shape, dtype=torch.long)
    return TokenBatch(tokens=tokens, targets=torch.from_numpy(array), sizes=sizes)


def evaluated(*batches: TokenBatch) -> dict[str, float]:
    """Return the metrics of a model that always predicts token 1 of 4."""

    def terms(batch: TokenBatch) -> dict:
        logits = torch.zeros(*batch.targets.shape, 4)
        logits[..., 1] = 1.0
        return labelled_terms(logits, batch)

    return Engine({}, 1, "cpu").evaluate(terms, [list(batches)], rng_key=1)


def test_rows_without_targets_have_no_accuracy():
    """Of two rows with targets one is half right; the third row has none."""
    metrics = evaluated(batch_of([[1, 2], [2, IGNORE], [IGNORE, IGNORE]]))
    assert metrics["accuracy"] == pytest.approx(0.25)
    assert set(metrics) == {"mlm", "accuracy", "loss"}


def test_a_split_without_targets_has_no_metrics():
    assert evaluated(batch_of([[IGNORE, IGNORE]]), batch_of([[IGNORE, IGNORE]])) == {}


def test_sizes_of_copies_are_counted_alone():
    targets = torch.tensor([[[1, IGNORE], [IGNORE, IGNORE]], [[2, 3], [1, IGNORE]]])
    counts = count_targets(targets)
    assert counts["targets"].tolist() == [1, 3]
    assert counts["rows_with_targets"].tolist() == [1, 2]


def test_a_run_that_never_has_a_target_stops_and_says_so(moons, tmp_path, capsys):
    words = [*TRAIN, "task.mask_prob=0", "trainer.max_update=2"]
    assert main(["train", str(moons), "--save-dir", str(tmp_path / "run"), *words]) == 1
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("metaseq-lm: ")]
    assert len(lines) == 1 and "in 2 updates" in lines[0] and "mask_prob" in lines[0]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["status"] == "failed" and results["metrics"] == {}
    assert '"kind": "train"' not in (tmp_path / "run" / "log.jsonl").read_text()


def test_a_validation_without_targets_gives_no_score_and_no_best(
    moons, tmp_path, monkeypatch, capsys
):
    run = tmp_path / "run"
    masking = masked_lm.masking_of

    def no_valid_targets(config: Any, vocabulary: Any, split: str, *drawing: Any) -> Any:
        chosen = masking(config, vocabulary, split, *drawing)
        return replace(chosen, rate=0.0) if split == "valid" else chosen

    monkeypatch.setattr(masked_lm, "masking_of", no_valid_targets)
    words = [*TRAIN, "trainer.max_update=2", "trainer.final_splits=[valid]"]
    assert main(["train", str(moons), "--save-dir", str(run), *words]) == 0
    assert "valid has no" in capsys.readouterr().err
    results = json.loads((run / "results.json").read_text())
    assert results["status"] == "finished" and not results["metrics"].get("valid")
    assert not (run / "checkpoints" / "best").exists()
    make_run(tmp_path / "other", label="other")
    runs = find_runs([tmp_path])
    table = setting_table(group(runs), choose_metric(runs, "valid.accuracy"))
    assert not any(cell.best for row in table.rows for cell in row)
    assert any("no valid.accuracy" in note for note in table.notes)
