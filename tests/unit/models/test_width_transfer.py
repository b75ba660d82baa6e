"""Initial weights and rates that transfer over width: a coordinate check (Yang et al. 2021)."""

from functools import cache

import pytest
import torch
from optimizers import make_optimizer
from torch import Tensor
from torch.nn import functional as F

from metaseq_lm.config.transformer import ModernConfig
from metaseq_lm.core.config import RunConfig, section
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.interop.claims import claimed_export
from metaseq_lm.models.transformer.encoder import ModernLM
from metaseq_lm.optim.optimizers import with_width
from metaseq_lm.plugins import load_all

BASE, WIDTHS = 32, (32, 64, 128, 256)
FLAT = {"_name": "constant", "warmup_updates": 0}
TOKENS = torch.randint(4, 40, (8, 16), generator=torch.Generator().manual_seed(0))


def config_of(width: int, base: int) -> ModernConfig:
    """Heads are equally wide at all widths."""
    sizes = {"encoder_layers": 2, "encoder_embed_dim": width, "encoder_ffn_embed_dim": 2 * width}
    heads = {"encoder_attention_heads": width // 16, "base_width": base}
    config: ModernConfig = section("model", _name="modern", **sizes, **heads)
    return config


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


@cache
def changes(width: int, base: int, optimizer: str, scale: str = "") -> tuple[float, float]:
    """Return by how much the first layer's output, and logits, change in four updates."""
    torch.manual_seed(1)
    config = config_of(width, base)
    model = ModernLM(config, 40)
    options = {"_name": optimizer, "lr": 0.01, "weight_decay": 0.0, "eps": 1e-12}
    options |= {"width_ratio": config.width_ratio} | ({"scale": scale} if scale else {})
    stepper = make_optimizer(model, options, FLAT)

    def outputs() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            embeddings, states, _ = model.encoder.layer_states(TOKENS)
            return states - embeddings, model(TOKENS)

    before = outputs()
    for _ in range(4):
        loss = F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.roll(1, 1).flatten())
        loss.backward()
        stepper.step()
        model.zero_grad()
    states, logits = (rms(b - a) for a, b in zip(before, outputs()))
    return states, logits


def growth(base: int, *optimizer: str) -> list[float]:
    """Return by how much both changes grow from the smallest width to the largest."""
    small, *_, large = (changes(width, base and BASE, *optimizer) for width in WIDTHS)
    return [b / a for a, b in zip(small, large)]


@pytest.mark.parametrize(
    "optimizer", [("adamw",), ("muon", "match_rms_adamw"), ("muon", "original")]
)
def test_changes_do_not_grow_with_the_width(optimizer: tuple[str, ...]) -> None:
    """From width 32 to 256; unscaled, those of the logits do."""
    layer, logits = growth(BASE, *optimizer)
    assert 0.6 < layer < 1.6 and 0.8 < logits < 1.25
    assert growth(0, *optimizer)[1] > 4.0
    if optimizer != ("muon", "original"):  # whose updates of the layers suit every width
        assert growth(0, *optimizer)[0] > 2.0


def test_initial_weights_and_logits_by_width() -> None:
    torch.manual_seed(2)
    wide, plain = (ModernLM(config_of(256, base), 40) for base in (32, 0))
    for name, weight in wide.named_parameters():
        other = dict(plain.named_parameters())[name]
        is_scaled = weight.dim() == 2 and (".layers." in name or name.endswith("dense.weight"))
        if weight.dim() == 2:
            ratio = float((other.std() / weight.std()).detach())
            assert ratio == pytest.approx(8**0.5 if is_scaled else 1.0, rel=0.03), name
    plain.load_state_dict(wide.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(8 * wide(TOKENS), plain(TOKENS), rtol=1e-4, atol=1e-5)


def test_rates_by_width() -> None:
    model = ModernLM(config_of(64, 32), 40)
    names = {id(p): name for name, p in model.named_parameters()}
    options = {"_name": "muon", "lr": 0.1, "hidden_lr": 0.3, "scale": "match_rms_adamw"}
    for name, hidden in (("adamw", 0.05), ("muon", 0.3 / 2**0.5)):
        more = options if name == "muon" else {"_name": "adamw", "lr": 0.1}
        optimizer = make_optimizer(model, more | {"width_ratio": 2.0}, FLAT)
        for group in optimizer.inner.param_groups:
            for parameter in group["params"]:
                path = names[id(parameter)]
                expected = 0.1
                if parameter.dim() == 2 and ".layers." in path:
                    expected = hidden
                elif path == "heads.lm.dense.weight":
                    expected = 0.05
                assert group["lr"] == pytest.approx(expected), path


def run_config(model: str = "modern", optimizer: str = "adamw", **options: object) -> RunConfig:
    load_all(None)
    return RunConfig(
        task=section("task", _name="causal_lm"),
        criterion=section("criterion", _name="causal_lm"),
        model=section("model", _name=model, encoder_embed_dim=96, base_width=32),
        optimizer=section("optimizer", _name=optimizer, **options),
    )


def test_the_ratio_of_a_run() -> None:
    config = with_width(run_config())
    assert config.optimizer.width_ratio == 3.0 and with_width(config).optimizer.width_ratio == 3.0
    for wrong in (run_config("modern_electra"), run_config(optimizer="sgd")):
        with pytest.raises(UsageError, match="base_width"):
            with_width(wrong)
    config = with_width(run_config(layer_decay=0.9))
    with pytest.raises(UsageError, match="layer_decay"):
        config.optimizer.groups([])
    with pytest.raises(MetaseqError, match="base_width scales"):
        claimed_export(run_config(), "run")
