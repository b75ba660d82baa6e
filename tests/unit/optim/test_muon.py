"""Muon by closed forms, against torch's, its groups, its FLOPs and its state."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from optimizers import make_optimizer, with_role
from torch import Tensor, nn

from metaseq_lm.core.config import section
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.roles import Role
from metaseq_lm.models.transformer.encoder import ModernLM
from metaseq_lm.optim import Optimizer, _why_whole
from metaseq_lm.optim.muon import COEFFICIENTS, Muon, _orthogonalise
from metaseq_lm.optim.roles import assign_roles
from metaseq_lm.runs.flops import Counter

FLAT = {"_name": "constant", "warmup_updates": 0}
SIZES = {"encoder_layers": 2, "encoder_embed_dim": 8, "encoder_ffn_embed_dim": 12}


def polynomial(s: float) -> float:
    a, b, c = COEFFICIENTS
    return a * s + b * s**3 + c * s**5


def matrix(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=dtype)


def test_an_orthogonal_matrix_is_scaled_by_the_iterated_polynomial() -> None:
    """r_n is phi, five times, of 1 / sqrt(n)."""
    q = torch.linalg.qr(matrix(48, 48, dtype=torch.float64)).Q
    r = 48**-0.5
    for _ in range(5):
        r = polynomial(r)
    assert r == pytest.approx(0.85667, abs=1e-5)
    torch.testing.assert_close(_orthogonalise(q[None])[0], r * q, rtol=0, atol=1e-12)
    values = torch.linalg.svdvals(_orthogonalise(q.float()[None])[0])
    torch.testing.assert_close(values, torch.full((48,), r), rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (16, 16)])
def test_singular_vectors_stay_and_values_come_near_1(shape: tuple[int, int]) -> None:
    g = matrix(*shape, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(g, full_matrices=False)
    values = s / s.norm()
    for _ in range(5):
        values = torch.tensor([polynomial(x) for x in values.tolist()], dtype=torch.float64)
    expected = u @ torch.diag(values) @ vh
    torch.testing.assert_close(_orthogonalise(g[None])[0], expected, rtol=0, atol=1e-10)
    if shape != (16, 16):
        assert 0.65 < values.min() and values.max() < 1.21


def test_scale_and_zero() -> None:
    """A power of two changes no bit; another factor changes the rounding only."""
    g = matrix(16, 48)[None]
    assert torch.equal(_orthogonalise(g), _orthogonalise(1024 * g))
    low = _orthogonalise(g.bfloat16())
    assert torch.equal(low, _orthogonalise(g.bfloat16() * 4))
    assert 0 < (low - _orthogonalise((3 * g).bfloat16())).abs().max() < 0.02
    assert torch.equal(_orthogonalise(0 * g), 0 * g)
    error = (low.float() - _orthogonalise(g)).norm() / _orthogonalise(g).norm()
    assert error < 0.02


def one_matrix(*shape: int, pieces: int = 1) -> dict[str, nn.Parameter]:
    weight = nn.Parameter(matrix(*(shape or (12, 20))))
    return {"weight": with_role(weight, Role.HIDDEN, pieces=pieces)}


def build(named: dict[str, nn.Parameter], schedule: dict = FLAT, **options: Any) -> Optimizer:
    return make_optimizer(named.items(), {"_name": "muon", **options}, schedule)


def run(named: dict[str, nn.Parameter], optimizer: Any, steps: Sequence[int]) -> None:
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_in_bf16_are_torchs(shape: tuple[int, int], scale: str, nesterov: bool) -> None:
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov}
    named, other = one_matrix(*shape), nn.Parameter(matrix(*shape))
    ours = build(named, scale=scale, iteration="bf16", **options)
    theirs = torch.optim.Muon([other], adjust_lr_fn=scale, **options)
    run(named, ours, range(4))
    run({"other": other}, theirs, range(4))
    (parameter,) = named.values()
    assert torch.equal(parameter, other)


def net(**options: Any) -> ModernLM:
    torch.manual_seed(1)
    model = ModernLM(section("model", _name="modern", **SIZES, **options), 20)
    assign_roles(model)
    return model


def names_by_pieces(model: nn.Module, optimizer: Optimizer) -> dict[int, set[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    groups: dict[int, set[str]] = {}
    for group in optimizer.inner.param_groups:
        members = {names[id(p)] for p in group["params"]}
        groups.setdefault(group.get("pieces", 0), set()).update(members)
    return groups


def test_muon_steps_the_matrices_of_the_layers_and_nothing_else() -> None:
    model = net(qk_norm=True)
    groups = names_by_pieces(model, build(dict(model.named_parameters())))
    layers = [f"encoder.stack.layers.{i}" for i in range(2)]
    assert groups[3] == {f"{layer}.attention.in_proj.weight" for layer in layers}
    assert groups[2] == {f"{layer}.fc1.weight" for layer in layers}
    tails = ("attention.out_proj.weight", "fc2.weight")
    assert groups[1] == {f"{layer}.{tail}" for layer in layers for tail in tails}
    assert {"encoder.embeddings.tokens.weight", "heads.lm.dense.weight"} <= groups[0]
    joint = names_by_pieces(model, build(dict(model.named_parameters()), split=False))
    assert joint.keys() == {0, 1} and joint[1] == groups[1] | groups[2] | groups[3]


def test_pieces_are_stepped_one_by_one() -> None:
    """A joint matrix is stepped as three matrices of their own, a gate's as two."""
    model = net()
    layer = model.encoder.stack.layers[0]
    joint = {
        "stack.layers.0.attention.in_proj.weight": layer.attention.in_proj.weight,
        "stack.layers.0.fc1.weight": layer.fc1.weight,
        "stack.layers.0.fc2.weight": layer.fc2.weight,
    }
    apart = {}
    for name, pieces in zip(joint, (3, 2, 1)):
        for i, part in enumerate(joint[name].detach().chunk(pieces)):
            apart[f"{name}.{i}"] = with_role(nn.Parameter(part.clone()), Role.HIDDEN)
    for named in (joint, apart):
        optimizer = build(named, lr=0.1, scale="original")
        run(named, optimizer, range(1))
    pieces = torch.cat([p.detach() for p in apart.values()][:3])
    torch.testing.assert_close(layer.attention.in_proj.weight.detach(), pieces)
    pieces = torch.cat([p.detach() for p in apart.values()][3:5])
    torch.testing.assert_close(layer.fc1.weight.detach(), pieces)


def test_the_rest_is_stepped_by_adamw() -> None:
    model = net()
    other = copy.deepcopy(model)
    named, twin = dict(model.named_parameters()), dict(other.named_parameters())
    options = {"lr": 0.03, "weight_decay": 0.1, "decay_norms_and_biases": False}
    run(named, build(named, **options), range(3))
    run(twin, make_optimizer(twin.items(), {"_name": "adamw", **options}, FLAT), range(3))
    for name, parameter in named.items():
        is_hidden = ".layers." in name and parameter.dim() == 2
        assert torch.equal(parameter, twin[name]) != is_hidden, name


@pytest.mark.parametrize(
    ("scale", "factor"), [("original", 3**0.5), ("match_rms_adamw", 0.2 * 48**0.5)]
)
def test_scales_of_the_update(scale: str, factor: float) -> None:
    named = one_matrix(48, 16)
    (parameter,) = named.values()
    before = parameter.detach().clone()
    parameter.grad = matrix(48, 16)
    build(named, lr=0.5, hidden_lr=0.1, weight_decay=0.0, scale=scale).step()
    step = (before - parameter.detach()) / 0.1
    torch.testing.assert_close(
        step, factor * _orthogonalise(matrix(48, 16)[None])[0], rtol=1e-4, atol=1e-5
    )


def test_flops_of_a_step() -> None:
    """5 (4 m^2 n + 2 m^3) for each piece, m its smaller side; AdamW's step counts nothing."""
    model = net()
    named = dict(model.named_parameters())
    optimizer = build(named)
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    with Counter() as counter:
        optimizer.step()
    pieces = [(8, 8)] * 3 + [(8, 8)] + 2 * [(8, 12)] + [(8, 12)]
    expected = 2 * sum(5 * (4 * m * m * n + 2 * m**3) for m, n in pieces)
    assert counter.total == optimizer.step_flops == expected


@pytest.mark.parametrize("split", [True, False])
def test_state_continues_bitwise_and_fits_its_parameters(split: bool) -> None:
    schedule = {"_name": "wsd", "total_updates": 8}
    one = net()
    named = dict(one.named_parameters())
    optimizer = build(named, schedule, split=split)
    run(named, optimizer, range(3))
    other = copy.deepcopy(one)
    assign_roles(other)
    twin = dict(other.named_parameters())
    resumed = build(twin, schedule, split=split)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(named, optimizer, range(3, 6))
    run(twin, resumed, range(3, 6))
    assert all(torch.equal(named[name], twin[name]) for name in named)
    shapes = {tuple(p.shape) for p in named.values()}
    for state in optimizer.inner.state.values():
        assert all(not t.dim() or tuple(t.shape) in shapes for t in state.values())


def test_a_parameter_without_gradient_stays() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    build(dict(model.named_parameters())).step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_refused_step_changes_nothing() -> None:
    """As a device refuses one whose gradient is not finite."""
    named = one_matrix()
    (parameter,) = named.values()
    optimizer = build(named)
    run(named, optimizer, range(2))
    before = parameter.detach().clone()
    momentum = optimizer.inner.state[parameter]["momentum_buffer"].clone()
    parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.step(found_inf=torch.ones(()))
    assert torch.equal(parameter, before)
    assert torch.equal(optimizer.inner.state[parameter]["momentum_buffer"], momentum)


class Routed(nn.Module):
    """A plug-in's network: matrices of its own, and torch's layers."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 8)
        self.dense = nn.Linear(8, 8)
        self.experts = nn.Parameter(matrix(*shape))
        self.out = nn.Linear(8, 5)


def test_matrices_without_a_role_are_refused() -> None:
    """As a plug-in may have; the message names them, and what declares a role."""
    model = Routed(8, 8)
    with pytest.raises(UsageError, match=r"experts \(8, 8\).*parameter_roles"):
        make_optimizer(model, {"_name": "muon"}, FLAT)
    model.parameter_roles = {"experts": Role.HIDDEN, "out": Role.HEAD}
    optimizer = make_optimizer(model, {"_name": "muon"}, FLAT)
    assert names_by_pieces(model, optimizer)[1] == {"dense.weight", "experts"}
    run(dict(model.named_parameters()), optimizer, range(1))


def test_hidden_matrices_that_cannot_be_cut_are_refused() -> None:
    model = Routed(2, 8, 8)
    model.parameter_roles = {"experts": Role.HIDDEN}
    with pytest.raises(UsageError, match=r"experts \(2, 8, 8\)"):
        make_optimizer(model, {"_name": "muon"}, FLAT)
    named = one_matrix(16, 8, pieces=3)
    with pytest.raises(UsageError, match=r"weight \(16, 8\)"):
        build(named)
    run(named, build(named, split=False), range(1))


def test_impossible_settings() -> None:
    with pytest.raises(UsageError, match="no trained parameter"):
        build({"weight": with_role(nn.Parameter(matrix(4, 4)), Role.HEAD)})
    named = dict(net().named_parameters())
    with pytest.raises(UsageError, match="layer_decay"):
        build(named, hidden_lr=0.1, layer_decay=0.9)
    assert isinstance(build(named, layer_decay=0.9).inner, Muon)
    assert _why_whole(build(named).inner)
