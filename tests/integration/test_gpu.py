"""On a CUDA device: the same training as on the CPU, and bf16 near fp32."""

from pathlib import Path

import battery
import pytest
import torch

from metaseq_lm.training.parts import build_parts, evaluate_split

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CASES = [
    ("masked_lm", 0),
    ("bert_pretraining", 0),
    ("electra_rtd", 0),
    ("electra_rtd", 1),
    ("electric_nce", 0),
    ("electra_adversarial", 0),
]
IDS = [f"{name}-{number}" for name, number in CASES]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_same_weights_as_on_the_cpu(case: battery.Case, moons: Path, tmp_path: Path) -> None:
    """Ten updates in float64 with dropout: masks and samples come from counters, not from devices."""
    more = battery.exact("model.dropout=0.1", "model.attention_dropout=0.1")
    found = []
    for device in ("cpu", "cuda"):
        place = tmp_path / device
        config = battery.configure(moons, place, case, *more, f"engine.device={device}")
        found.append({name: weight.cpu() for name, weight in battery.train(config).items()})
    assert battery.difference(*found) < 1e-8


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_bf16_is_near_fp32(case: battery.Case, moons: Path, tmp_path: Path) -> None:
    """Losses of validation before any training, where nothing has grown apart yet."""
    found = []
    for precision in ("fp32", "bf16"):
        more = ["engine.device=cuda", f"engine.precision={precision}"]
        run = build_parts(battery.configure(moons, tmp_path / precision, case, *more))
        found.append(evaluate_split(run, "valid").metrics)
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=0.02)
