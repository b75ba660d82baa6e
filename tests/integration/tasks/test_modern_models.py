"""Every criterion that trains the classic encoder trains the modern one."""

from pathlib import Path

import battery
import pytest

from metaseq_lm.methods.electra.model import ElectraConfig, NoiseModelConfig
from metaseq_lm.models.transformer.configs import ModernConfig, TransformerConfig
from metaseq_lm.models.transformer.encoder import Layer
from metaseq_lm.training.run import TrainingRun

MODERN = {TransformerConfig: "modern", ElectraConfig: "modern_electra"}
# Of these models: the rest have no Transformer encoder.
CASES = [
    case
    for case in battery.ALL
    if not any(
        set(sizes) <= set(battery.CASES[case[0]][case[1]])
        for sizes in (
            battery.LSTM,
            battery.IMAGES,
            battery.TRANSLATION,
            battery.LARGER_IMAGES,
            battery.WORDS,
        )
    )
    and case[1] in (0, 1)
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_a_criterion_trains_a_modern_model(case: battery.Case, moons: Path, tmp_path: Path) -> None:
    electra = any(o.startswith("model=electra") for o in battery.CASES[case[0]][case[1]])
    kind = "modern_electra" if electra else "modern"
    options = [f"model={kind}", "model.local_window=6", "model.vocab_multiple=8"]
    config = battery.configure(moons, tmp_path, case, *options, "trainer.max_update=2")
    assert isinstance(config.model, ModernConfig)
    assert isinstance(config.model, NoiseModelConfig) is electra
    run = TrainingRun(config)
    before = battery.weights_of(run)
    with battery.uncounted():
        run.train()
    after = battery.weights_of(run)
    assert all(weight.isfinite().all() for weight in after.values())
    assert battery.difference(before, after) > 1e-4
    layers = [module for module in run.model.modules() if isinstance(module, Layer)]
    assert layers and all(layer.gate is not None for layer in layers)
