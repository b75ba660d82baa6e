"""The configs of examples/meta_pretrain make an update each, at a tiny size."""

from pathlib import Path

import battery
import pytest
import small_data

from metaseq_lm.core.loading import load_config
from metaseq_lm.training.parts import build_parts, evaluate_split
from metaseq_lm.training.price import estimate_price

CONFIG = Path(__file__).resolve().parents[4] / "examples" / "meta_pretrain" / "config"
TRANSFORMER = ["model=transformer", *(o for o in battery.TINY if o.startswith("model."))]
ROWS = ["task.tokens_per_sample=34", "engine.threads=1", "engine.tensorboard=false"]
# Which data, and what besides: sizes of the model, the sets that stand for the example's.
PAIRS = [*TRANSFORMER, "model.segments=2", "task.labelled=[pairs,which_moon_20]"]
SETTINGS = {
    "text": ("documents", [*TRANSFORMER, "model.segments=2"]),
    "small": ("documents", [*TRANSFORMER, "model.segments=2"]),
    "pairs": ("moons", PAIRS),
    "small_pairs": ("moons", PAIRS),
    "lstm": ("moons", battery.LSTM),
    "small_lstm": ("moons", battery.LSTM),
    "tiny_lstm": ("moons", battery.LSTM),
    "cloze": ("moons", [*TRANSFORMER, "model.segments=2", "task.labelled=CLOTH"]),
    "finetune": ("moons", [*TRANSFORMER, "model.segments=2", "task.labelled=pairs"]),
    "small_finetune": ("moons", [*TRANSFORMER, "model.segments=2", "task.labelled=pairs"]),
}


def test_every_config_has_a_setting() -> None:
    assert {path.stem for path in CONFIG.glob("*.yaml")} == SETTINGS.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_each_config_makes_an_update(name: str, moons: Path, tmp_path: Path) -> None:
    """A dry run: one update with the config's inner steps, and a validation."""
    data, more = SETTINGS[name]
    folder = moons if data == "moons" else small_data.ensure(moons, data)
    if "task.labelled" in str(more):
        small_data.ensure(moons, "CLOTH" if "CLOTH" in str(more) else "pairs")
    places = [f"data={folder}", f"save_dir={tmp_path}"]
    config = load_config([*more, *ROWS, *places], str(CONFIG), name)
    before = build_parts(config).model.state_dict()
    estimate = estimate_price(config)
    assert len(estimate.first_updates) == 1
    run = estimate.parts
    evaluate_split(run, "valid")
    moved = [n for n, w in run.model.state_dict().items() if (w != before[n]).any()]
    assert len(moved) > len(before) / 2
    if "finetune" not in name and name != "cloze":
        assert run.task.config.inner_steps == run.config.task.inner_steps > 0
