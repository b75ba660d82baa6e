"""What a criterion of a plug-in does wrong is one message with its line, a term or a weight."""

from pathlib import Path

import pytest
from battery import CASES, TINY
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
