"""The sizes that `list` and the pages state are those of the presets."""

import re

import pytest
import torch
from torch import nn

from metaseq_lm.core.config import FOLDER
from metaseq_lm.core.loading import load_config
from metaseq_lm.methods.electra.model import Electra
from metaseq_lm.models.transformer.encoder import TransformerLM

CLASSES: dict[str, type[nn.Module]] = {
    "electra": Electra,
    "modern": TransformerLM,
    "transformer": TransformerLM,
}
STATED = re.compile(r"([\d,]+) parameters .*?with ([\d,]+) symbols")
# What a preset says in its first line, and what else the pages say.
SIZES = [
    (file.stem, *match.groups())
    for file in sorted((FOLDER / "model").glob("*.yaml"))
    if (match := STATED.search(file.read_text(encoding="utf-8").split("\n")[0]))
] + [("transformer_tiny", "687,952", "2,000")]


@pytest.mark.parametrize(("preset", "stated", "symbols"), SIZES)
def test_stated_sizes(preset: str, stated: str, symbols: str) -> None:
    config = load_config([f"model={preset}"]).model
    with torch.device("meta"):
        model = CLASSES[config._name](config, int(symbols.replace(",", "")))
    assert f"{sum(p.numel() for p in model.parameters()):,}" == stated


@pytest.mark.parametrize(
    ("preset", "exact"), [("modern_base", 149_655_232), ("modern_large", 395_881_664)]
)
def test_sizes_are_those_of_modern_bert(preset: str, exact: int) -> None:
    """By the closed form, where the final norm stands for the one that layer 0 lacks."""
    config = load_config([f"model={preset}"]).model
    symbols, h, i = 50_368, config.encoder_embed_dim, config.encoder_ffn_embed_dim
    layer = 4 * h * h + 3 * h * i + 2 * h
    head = h * h + h + symbols
    assert symbols * h + h + config.encoder_layers * layer + head == exact
    assert f"{exact:,}" in {stated for name, stated, _ in SIZES if name == preset}
    with torch.device("meta"):
        rounded = TransformerLM(config, symbols - 63)
    assert sum(p.numel() for p in rounded.parameters()) == exact


def test_the_smallest_preset_states_its_size() -> None:
    assert ("transformer_tiny", "945,952", "4,000") in SIZES
