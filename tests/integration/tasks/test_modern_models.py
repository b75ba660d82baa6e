"""Every criterion that trains the classic encoder trains the modern one."""

from pathlib import Path

import battery
import pytest
import torch

from metaseq_lm.config.transformer import ModernConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.methods.electra.options import NoiseModelConfig
from metaseq_lm.models.transformer.encoder import Layer
from metaseq_lm.training.run import TrainingRun

OTHERS = (battery.LSTM, battery.IMAGES, battery.TRANSLATION, battery.LARGER_IMAGES, battery.WORDS)
# The first two of each criterion, but those without a Transformer.
CASES = [
    case
    for case in battery.ALL
    if case[1] < 2 and not any(set(o) <= set(battery.CASES[case[0]][case[1]]) for o in OTHERS)
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
    assert layers and all(layer.parts()[1].gate is not None for layer in layers)


def test_fine_tuning_starts_from_a_modern_encoder(moons: Path, tmp_path: Path) -> None:
    """With the sizes of the checkpoint; an encoder of other windows is refused."""
    first = ["model=modern", "model.local_window=6", "trainer.max_update=1"]
    config = battery.configure(moons, tmp_path / "lm", ("masked_lm", 0), *first)
    trained = battery.train_uncounted(config)
    case = ("sentence_prediction", 0)
    start = [f"init_from={tmp_path / 'lm'}", "trainer.max_update=1"]
    run = TrainingRun(battery.configure(moons, tmp_path / "tuned", case, *start, *first[:2]))
    encoder = {n: w for n, w in battery.weights_of(run).items() if n.startswith("encoder.")}
    assert encoder and all(torch.equal(w, trained[n]) for n, w in encoder.items())
    other = battery.configure(moons, tmp_path / "other", case, *start, "model=modern")
    with pytest.raises(UsageError, match="local_window=6.*128"):
        TrainingRun(other)
