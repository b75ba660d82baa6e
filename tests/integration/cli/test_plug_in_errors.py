"""What a criterion of a plug-in does wrong is one message with its line, a term or a weight."""

from pathlib import Path

import pytest
from battery import CASES, TEXT, TINY
from real_runs import Started

PLUG_IN = """
import torch
from metaseq_lm.core.batch import Term
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions.masked_lm import MaskedLM


@register_criterion("odd")
class Odd(MaskedLM):
    def __call__(self, model, batch):
        terms = super().__call__(model, batch)
        weight = model.heads["lm"].dense.weight
        return terms | {"extra": Term(LINE, "targets")}
"""
LINES = {
    "torch.ones(2, 3) @ torch.ones(2, 3)": (1, "odd.py:13: "),
    "[weight][4].sum()": (1, "odd.py:13: "),
    "model.encoder(batch.tokens.float(), batch.layout).sum()": (1, "odd.py:13: "),
    "weight.sum() * float('nan')": (3, "term extra"),
    "(weight * 0).sqrt().sum()": (3, "heads.lm.dense.weight"),
}


@pytest.mark.parametrize("line", LINES)
def test_the_place_is_named(line: str, moons: Path, tmp_path: Path) -> None:
    code, place = LINES[line]
    plug_in = tmp_path / "odd.py"
    plug_in.write_text(PLUG_IN.replace("LINE", line))
    places = [str(moons), "--save-dir", str(tmp_path / "run"), "--user-dir", str(plug_in)]
    words = ["train", *places, *CASES["masked_lm"][0], *TINY, "criterion=odd", "--quiet"]
    started = Started(words, tmp_path / "err")
    assert started.wait() == code
    text = started.text()
    assert place in text and "Traceback" not in text
    if code == 1:
        again = Started(words, tmp_path / "again", {"METASEQ_LM_TRACEBACK": "1"})
        assert again.wait() == 1 and "Traceback" in again.text()


MODEL = """
from torch import nn
from metaseq_lm.config.optimizers import OptimizerConfig
from metaseq_lm.config.tasks import MaskedLMConfig
from metaseq_lm.core.batch import Term
from metaseq_lm.core.registry import *
from metaseq_lm.criterions.masked_lm import MaskedLM
from metaseq_lm.tasks.masked_lm import MaskedLMTask

@register_model("mine")
class Mine(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.scores = nn.Embedding(size, size)
    def forward(self, tokens, layout, positions, segments=None):
        return self.scores(tokens.gather(1, positions))

@register_task("mine", dataclass=MaskedLMConfig)
class MineTask(MaskedLMTask):
    def build_model(self):
        return Mine(len(self.vocabulary))

@register_criterion("mine")
class MineLM(MaskedLM):
    def __call__(self, model, batch):
        return super().__call__(model, batch)

@register_schedule("mine")
def schedule(config):
    return lambda step: 1.0

@register_optimizer("mine", dataclass=OptimizerConfig)
def optimizer(config, parameters):
    from torch.optim import SGD
    return SGD(config.groups(parameters))
"""
# By a replacement in it the exit code, the beginning of the named line, words of the message.
MISTAKES = {
    ("", ""): (0, "", ""),
    (", segments=None", ""): (2, "class Mine(", "'segments'"),
    ("return self.scores(tokens", "self.scores(tokens"): (1, "class Mine(", "model 'mine'"),
    (".gather(1, positions)", ""): (1, "class Mine(", "the logits"),
    ("return super().__call__(model, batch)", "return {}"): (1, "class MineLM(", "criterion mine"),
    ("return lambda step: 1.0", "return 1.0"): (2, "def schedule", "schedule 'mine'"),
    ("lambda step:", "lambda:"): (2, "def schedule", "schedule 'mine'"),
    ("return SGD(", "SGD("): (2, "def optimizer", "optimizer mine"),
    ("def build_model(", "def needs(self, _): return {'x': 1}\n    def build_model("): (
        1,
        "    def needs",
        "'x'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_of_other_classes_have_a_place(
    mistake: tuple[str, str], moons: Path, tmp_path: Path
) -> None:
    code, line, words = MISTAKES[mistake]
    plug_in = tmp_path / "mine.py"
    source = MODEL.replace(*mistake) if code else MODEL
    plug_in.write_text(source)
    chosen = [f"{group}=mine" for group in ("task", "model", "schedule", "optimizer")]
    chosen.append(f"criterion={'mine' if 'super' in mistake[0] else 'masked_lm'}")
    places = [str(moons), "--save-dir", str(tmp_path / "run"), "--user-dir", str(plug_in)]
    options = [*TEXT, "engine.tensorboard=false", "trainer.max_update=2", "--quiet"]
    started = Started(["train", *places, *chosen, *options], tmp_path / "err")
    assert started.wait() == code, started.text()
    text = started.text()
    assert words in text and "Traceback" not in text
    # Python counts a class or function from its decorator or from its own line.
    number = next(i for i, row in enumerate(source.split("\n"), 1) if row.startswith(line))
    assert not code or any(f"{plug_in}:{n}" in text for n in (number, number - 1))
