"""Rates by layer: the factors of ELECTRA's code, and the groups made of them."""

from collections.abc import Mapping

import pytest
import torch
from optimizers import make_optimizer
from torch import nn

from metaseq_lm.config.groups import options_of, rates_by_level
from metaseq_lm.config.transformer import TransformerConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.methods.meta_pseudo_label.model import moments_of
from metaseq_lm.models.transformer.classifiers import SentencePredictor
from metaseq_lm.models.transformer.encoder import SentenceHead
from metaseq_lm.optim import Optimizer
from metaseq_lm.optim.roles import assign_roles

ADAM = {"_name": "adam_uncorrected", "lr": 3e-4, "weight_decay": 0.01, "betas": [0.9, 0.999]}
OPTIONS = ADAM | {"eps": 1e-6, "clip_norm": 1.0, "decay_norms_and_biases": False}
FLAT = {"_name": "constant", "warmup_updates": 0}


def model(layers: int = 12, pooled: bool = False, before: bool = False) -> SentencePredictor:
    sizes = TransformerConfig(
        encoder_layers=layers,
        encoder_embed_dim=4,
        encoder_ffn_embed_dim=4,
        encoder_attention_heads=1,
        encoder_normalize_before=before,
        token_embed_dim=2,
        segments=2,
        max_positions=3,
    )
    return SentencePredictor(sizes, 5, 0, SentenceHead(4, 2, 0.1, pooled))


def multipliers_of(net: nn.Module, decay: float) -> dict[str, float]:
    """Return the factor of the rate of each parameter."""
    assign_roles(net)
    rules = rates_by_level(list(net.named_parameters()), 1.0, decay)
    return {name: options_of(name, p, rules)["lr"] for name, p in net.named_parameters()}


def test_multipliers_of_twelve_layers() -> None:
    """decay^(L + 2 - depth) as in the authors' code."""
    multipliers = multipliers_of(model(), 0.8)
    for name, factor in multipliers.items():
        parts = name.split(".")
        if parts[0] == "heads":
            wanted = 1.0
        elif parts[1:3] == ["stack", "layers"]:
            wanted = 0.8 ** (13 - int(parts[3]))
        else:
            assert parts[1] == "embeddings" or parts[1:3] == ["stack", "project"]
            wanted = 0.8**14
        assert factor == pytest.approx(wanted, rel=1e-15), name
    assert multipliers["heads.sentence.out.weight"] == 1.0
    top = "encoder.stack.layers.11.fc1.weight"
    assert multipliers[top] == pytest.approx(0.64, rel=1e-15)


def test_pooler_and_last_norm() -> None:
    """The top layer's square was meant for BERT's pooler; the last norm is of the top."""
    net = model(2, pooled=True, before=True)
    multipliers = multipliers_of(net, 0.5)
    assert multipliers["heads.sentence.pooler.weight"] == 0.5
    last = ("encoder.stack.norm.weight", "encoder.stack.layers.1.fc1.bias")
    assert [multipliers[name] for name in last] == [0.25, 0.25]


def build(net: nn.Module, **more: object) -> Optimizer:
    return make_optimizer(net, OPTIONS | more, FLAT)


def rates(optimizer: Optimizer, net: nn.Module) -> Mapping[str, tuple[float, float]]:
    own = {
        id(p): (base, group["weight_decay"])
        for group, base in zip(optimizer.inner.param_groups, optimizer.base)
        for p in group["params"]
    }
    return {name: own[id(p)] for name, p in net.named_parameters()}


def test_groups_have_one_rate_and_one_decay() -> None:
    net = model(3)
    optimizer = build(net, layer_decay=0.8)
    found = rates(optimizer, net)
    scales = multipliers_of(net, 0.8)
    for name, p in net.named_parameters():
        assert found[name] == (3e-4 * scales[name], 0.01 if p.dim() > 1 else 0.0), name
    assert len(optimizer.inner.param_groups) == 2 * len(set(scales.values())) == 10
    assert optimizer.lr == 3e-4
    assert [id(p) for p in optimizer.parameters] == [id(p) for p in net.parameters()]


def test_the_schedule_scales_every_group() -> None:
    net = model(2)
    optimizer = make_optimizer(net, OPTIONS | {"layer_decay": 0.8}, FLAT | {"warmup_updates": 4})
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    scales = multipliers_of(net, 0.8)
    for name, p in net.named_parameters():
        rate = 3e-4 * scales[name] / 4
        decay = 0.01 if p.dim() > 1 else 0.0
        moved = rate * (0.1 / (0.001**0.5 + 1e-6) + decay * before[name])
        torch.testing.assert_close(before[name] - p.detach(), moved, rtol=1e-3, atol=1e-8)


def test_a_decay_of_one_changes_nothing() -> None:
    net = model(2)
    assert len(build(net, layer_decay=1.0).inner.param_groups) == 2
    assert [list(g) for g in build(net).inner.param_groups] == [
        list(g) for g in build(net, layer_decay=1.0).inner.param_groups
    ]


@pytest.mark.parametrize("decay", [0.0, 1.5, -0.1])
def test_impossible_decays(decay: float) -> None:
    with pytest.raises(UsageError, match="layer_decay.*(above 0|most 1)"):
        build(model(1), layer_decay=decay)


def test_models_without_such_layers() -> None:
    with pytest.raises(UsageError, match="no trained parameter"):
        build(nn.Linear(2, 2), layer_decay=0.9)
    kind = {"_name": "adamw", "layer_decay": 0.9}
    with pytest.raises(UsageError, match="one rate"):
        moments_of(build(model(1), **kind))


def test_first_step_without_bias_correction() -> None:
    """0.1 g / sqrt(0.001 g^2) = 3.16: the step is 3.16 rates long where torch's AdamW takes 1."""
    steps = {}
    for kind in ("adam_uncorrected", "adamw"):
        p = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
        optimizer = make_optimizer([("p", p)], OPTIONS | {"_name": kind, "lr": 1.0}, FLAT)
        g = torch.tensor([[1.0, -2.0], [30.0, -0.5], [7.0, 1e3]], dtype=torch.float64)
        p.grad = g.clone()
        optimizer.step()
        steps[kind] = p.detach()
        exact = 0.1 * g / (0.001**0.5 * g.abs() + 1e-6) if kind == "adam_uncorrected" else g.sign()
        tolerance = 1e-12 if kind == "adam_uncorrected" else 1e-5
        torch.testing.assert_close(-p.detach(), exact, rtol=tolerance, atol=0)
    assert (steps["adam_uncorrected"] / steps["adamw"]).mean().item() == pytest.approx(
        3.16, abs=0.01
    )
