"""An option of a plug-in that changes what it says it does not change is found by a dry run."""

import pytest
from battery import CASES, TINY
from real_runs import Started

from metaseq_lm.cli import main

PLUG_IN = """
from dataclasses import dataclass
from metaseq_lm.core.batch import Term
from metaseq_lm.core.options import option
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions.masked_lm import MaskedLM, cross_entropy

@dataclass
class FocalConfig:
    gamma: float = option(2.0, "how much less easy tokens count", affects="AFFECTS")
    text: str = option("", "no other value is known", affects="nothing")

@register_criterion("focal", dataclass=FocalConfig)
class Focal(MaskedLM):
    def __call__(self, model, batch):
        loss = cross_entropy(model(batch.tokens, batch.layout, batch.positions), batch.targets)
        gamma = USED
        return {"focal": Term(((1 - (-loss).exp()) ** gamma * loss).sum(), "targets")}
"""
GAMMA, IN_TRAINING = "self.config.gamma", "self.config.gamma * model.training"


@pytest.mark.parametrize(
    ("effect", "used", "changed"),
    [
        ("nothing", GAMMA, "valid"),
        ("weights", GAMMA, "valid"),
        ("speed", IN_TRAINING, "train"),
        ("nothing", f"2 + 1e-4 * {GAMMA}", "valid"),
        ("weights", IN_TRAINING, ""),
        ("speed", f"2 + 1e-4 * {GAMMA}", ""),
        ("nothing", "2", ""),
        ("loss", GAMMA, ""),
    ],
)
def test_false_effects(effect, used, changed, moons, tmp_path):
    plug_in = tmp_path / "focal.py"
    plug_in.write_text(PLUG_IN.replace("AFFECTS", effect).replace("USED", used))
    options = [*CASES["masked_lm"][0], *TINY, "criterion=focal", "--dry-run"]
    words = ["train", str(moons), "--user-dir", str(plug_in), *options, "trainer.max_update=2"]
    started = Started(words, tmp_path / "err")
    assert started.wait() == (2 if changed else 0)
    text = started.text()
    assert (f"{plug_in}:" in text and f"({changed})" in text) == bool(changed)
    assert ("criterion.gamma" in text) == bool(changed) and "Traceback" not in text
    assert bool(changed) or "criterion.text" in text


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_dry_run_says_what_steps_which_parameters(optimizer, moons, tmp_path, capsys):
    case = [*CASES["masked_lm"][0], *TINY, "criterion=masked_lm", f"optimizer={optimizer}"]
    assert main(["train", str(moons), *case, "trainer.max_update=2", "--dry-run", "--quiet"]) == 0
    text = "".join(capsys.readouterr())
    (line,) = [row for row in text.split("\n") if "optimizer main" in row] or [""]
    # Four matrices in each of two layers.
    assert ("(hidden) by Muon" in line and " by AdamW" in line) == ("muon" in optimizer)
