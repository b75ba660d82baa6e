"""Optimizers by their formulas, decay groups, the scheduled wrapper and its state."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers import make_optimizer
from torch import Tensor, nn

from metaseq_lm.core.config import RunConfig, section
from metaseq_lm.core.errors import UsageError
from metaseq_lm.optim import Optimizer
from metaseq_lm.optim.optimizers import with_half_life
from metaseq_lm.optim.states import table_of
from metaseq_lm.plugins import load_all

ADAM = {"lr": 0.03, "weight_decay": 0.1, "betas": [0.9, 0.98], "eps": 1e-6}
COMMON = {"decay_norms_and_biases": True, "clip_norm": 1.0}
FLAT = {"_name": "constant", "warmup_updates": 0}
WARM = {"_name": "inverse_sqrt", "warmup_updates": 3, "lr_is_peak": False}


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"table": (5, 3), "bias": (3,), "scale": ()}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
        for name, shape in shapes.items()
    }


def build(named: dict[str, nn.Parameter], kind: dict, schedule: dict) -> Optimizer:
    return make_optimizer(named.items(), COMMON | kind, schedule)


def slopes(number: int, name: str, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(hash((number, len(name))) % 1000)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype)


def run(named: dict[str, nn.Parameter], optimizer: Optimizer, steps: range) -> None:
    for number in steps:
        for name, parameter in named.items():
            parameter.grad = slopes(number, name, parameter)
        optimizer.step()


def adam(corrected: bool) -> Callable:
    def step(p: Tensor, g: Tensor, state: dict, n: int, lr: float) -> Tensor:
        m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
        v = state["v"] = 0.98 * state.get("v", 0) + 0.02 * g * g
        if corrected:
            m, v = m / (1 - 0.9**n), v / (1 - 0.98**n)
        return p - lr * (m / (v.sqrt() + 1e-6) + 0.1 * p)

    return step


def lamb(p: Tensor, g: Tensor, state: dict, n: int, lr: float) -> Tensor:
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    v = state["v"] = 0.98 * state.get("v", 0) + 0.02 * g * g
    u = m / (1 - 0.9**n) / ((v / (1 - 0.98**n)).sqrt() + 1e-6) + 0.1 * p
    return p - lr * p.norm() / u.norm() * u


def sgd(p: Tensor, g: Tensor, state: dict, n: int, lr: float) -> Tensor:
    state["m"] = 0.5 * state["m"] + g + 0.1 * p if state else g + 0.1 * p
    return p - lr * state["m"]


@pytest.mark.parametrize("schedule", [FLAT, WARM])
@pytest.mark.parametrize(
    ("kind", "formula"),
    [
        ({"_name": "adamw", **ADAM}, adam(True)),
        ({"_name": "adam_uncorrected", **ADAM}, adam(False)),
        ({"_name": "lamb", **ADAM}, lamb),
        ({"_name": "sgd", "lr": 0.03, "weight_decay": 0.1, "momentum": 0.5}, sgd),
    ],
)
def test_steps(kind: dict, formula: Callable, schedule: dict) -> None:
    named = parameters()
    expected = {n: p.detach().clone() for n, p in named.items()}
    states: dict[str, dict] = {n: {} for n in named}
    optimizer = build(named, kind, schedule)
    run(named, optimizer, range(5))
    for number in range(5):
        n = number + 1
        factor = 1.0 if schedule is FLAT else (n**-0.5 if n >= 3 else 3**-0.5 * n / 3)
        for name, value in expected.items():
            gradient = slopes(number, name, value)
            expected[name] = formula(value, gradient, states[name], n, 0.03 * factor)
    assert optimizer.updates == 5
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-12, atol=1e-12)


def test_rates_of_the_next_and_of_the_last_step() -> None:
    named = parameters()
    optimizer = build(named, {"_name": "adamw", **ADAM}, WARM)
    for n in range(1, 6):
        wanted = 0.03 * (n**-0.5 if n >= 3 else 3**-0.5 * n / 3)
        assert optimizer.lr == pytest.approx(wanted)
        run(named, optimizer, range(1))
        assert optimizer.last_lr == pytest.approx(wanted)
        assert optimizer.inner.param_groups[0]["lr"] == pytest.approx(wanted)


@pytest.mark.parametrize("kind", ["adamw", "adam_uncorrected"])
def test_parameters_without_gradient_stay(kind: str) -> None:
    named = parameters()
    before = named["bias"].detach().clone()
    optimizer = build(named, {"_name": kind, **ADAM}, FLAT)
    named["table"].grad = torch.ones_like(named["table"])
    optimizer.step()
    assert torch.equal(named["bias"], before)


def test_momentum_of_a_parameter_that_comes_later() -> None:
    """Its buffer is there from its first gradient on; the others' go on."""
    named = parameters()
    start = {name: p.detach().clone() for name, p in named.items()}
    optimizer = build(
        named, {"_name": "sgd", "lr": 0.03, "momentum": 0.9, "weight_decay": 0.0}, FLAT
    )
    for names in (["table"], ["table", "bias"]):
        for name in names:
            named[name].grad = torch.ones_like(named[name])
        optimizer.step()
        named["table"].grad = None
    # v is 1 and then 0.9 + 1; the rate is 0.03.
    torch.testing.assert_close(named["table"].detach(), start["table"] - 0.03 * 2.9)
    torch.testing.assert_close(named["bias"].detach(), start["bias"] - 0.03)
    assert torch.equal(named["scale"].detach(), start["scale"])


def test_decay_alone() -> None:
    """With gradients of zero only decayed parameters move: p(1 - lr * decay)."""
    for everywhere, moved in ((True, {"table", "bias", "scale"}), (False, {"table"})):
        named = parameters()
        before = {n: p.detach().clone() for n, p in named.items()}
        options = {"_name": "adamw", **ADAM, "decay_norms_and_biases": everywhere}
        optimizer = build(named, options, FLAT)
        for parameter in named.values():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for name, parameter in named.items():
            factor = 1 - 0.03 * 0.1 if name in moved else 1.0
            torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_order_of_the_parameters_is_the_models() -> None:
    named = {"bias": nn.Parameter(torch.ones(2)), "table": nn.Parameter(torch.ones(2, 2))}
    frozen = {"frozen": nn.Parameter(torch.ones(1), requires_grad=False)}
    options = {"_name": "adamw", **ADAM, "decay_norms_and_biases": False}
    optimizer = build(frozen | named, options, FLAT)
    assert [id(p) for p in optimizer.parameters] == [id(p) for p in named.values()]
    assert optimizer.clip_norm == 1.0


def test_lamb_scales_only_what_decays() -> None:
    """Norms and biases take AdamW's steps, and so do parameters and steps of norm 0."""
    one, other = parameters(), parameters()
    with torch.no_grad():
        one["table"].zero_(), other["table"].zero_()
    options = {**ADAM, "decay_norms_and_biases": False}
    run(one, build(one, {"_name": "lamb", **options}, FLAT), range(1))
    run(other, build(other, {"_name": "adamw", **options}, FLAT), range(1))
    for name, parameter in one.items():
        torch.testing.assert_close(parameter, other[name], rtol=1e-12, atol=1e-12)
    still = {"table": nn.Parameter(torch.zeros(2, 2))}
    optimizer = build(still, {"_name": "lamb", **options}, FLAT)
    still["table"].grad = torch.zeros(2, 2)
    optimizer.step()
    assert not still["table"].any()


@pytest.mark.parametrize("kind", ["adamw", "adam_uncorrected", "lamb", "adafactor", "soap"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_state_continues_bitwise(kind: str, everywhere: bool) -> None:
    options: dict[str, Any] = {"_name": kind, **ADAM, "decay_norms_and_biases": everywhere}
    options |= {"frequency": 2} if kind == "soap" else {}
    if kind == "adafactor":
        del options["betas"]
    one = parameters(torch.float32)
    optimizer = build(one, options, WARM)
    run(one, optimizer, range(3))
    other = {n: nn.Parameter(p.detach().clone()) for n, p in one.items()}
    resumed = build(other, options, WARM)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.updates == 3
    for named, some in ((one, optimizer), (other, resumed)):
        run(named, some, range(3, 6))
    assert all(torch.equal(one[n], other[n]) for n in one)
    with pytest.raises(KeyError):
        resumed.load_state_dict({"updates": 3})
    state = optimizer.state_dict()
    assert {*table_of(optimizer.inner)} == {key for s in state["state"].values() for key in s}
    for slots in state["state"].values():
        for key in slots.keys() - {"sides", "bases", "col_var"}:
            with pytest.raises(ValueError, match=key):
                wrong = {n: {**s, key: torch.ones(4, 4)} for n, s in state["state"].items()}
                resumed.load_state_dict({**state, "state": wrong})


def test_soap_turns_what_adam_steps() -> None:
    """Without bases it is AdamW; with them, a basis approaches the eigenvectors of its side."""
    one, other = parameters(), parameters()
    run(one, build(one, {"_name": "soap", **ADAM, "largest": 2}, FLAT), range(4))
    run(other, build(other, {"_name": "adamw", **ADAM}, FLAT), range(4))
    for name, parameter in one.items():
        torch.testing.assert_close(parameter, other[name], rtol=1e-12, atol=1e-12)
    side, basis = torch.diag(torch.tensor([1.0, 2.0, 4.0])) + 0.3, torch.eye(3)
    for _ in range(60):
        basis = sys.modules["user_dir.soap"].turned(basis, side)
    products = basis.mT @ side @ basis
    torch.testing.assert_close(products, torch.diag(products.diagonal()))


@pytest.mark.parametrize("betas", [[0.9], [0.9, 0.98, 0.99], [0.9, 1.0], [-0.1, 0.98]])
@pytest.mark.parametrize("kind", ["adamw", "adam_uncorrected"])
def test_betas_that_cannot_be(kind: str, betas: list[float]) -> None:
    options = {"_name": kind, "lr": 0.1, "weight_decay": 0.0, "betas": betas, "eps": 1e-8}
    options |= {"decay_norms_and_biases": True, "clip_norm": 0.0}
    with pytest.raises(UsageError, match="optimizer.betas must be"):
        make_optimizer(nn.Linear(2, 2).named_parameters(), options, {"_name": "constant"})


def run_config(task: str, optimizer: str = "adamw", **options: Any) -> RunConfig:
    load_all(None)
    settings = {"beta2_half_life": 4096.0, "betas": [0.8, 0.98]} if optimizer != "sgd" else {}
    return RunConfig(
        task=section("task", _name=task, **options),
        optimizer=section("optimizer", _name=optimizer, **settings),
    )


@pytest.mark.parametrize("optimizer", ["adamw", "adam_uncorrected", "muon"])
@pytest.mark.parametrize(("rows", "length"), [(4, 128), (32, 64), (128, 128)])
def test_half_life_in_tokens(optimizer: str, rows: int, length: int) -> None:
    """After that many tokens a squared gradient counts half, whatever the batch."""
    options = {"batch_size": rows, "tokens_per_sample": length}
    config = with_half_life(run_config("masked_lm", optimizer, **options))
    beta1, beta2 = config.optimizer.betas
    assert beta1 == 0.8
    assert beta2 ** (4096 / (rows * length)) == pytest.approx(0.5, rel=1e-12)
    assert with_half_life(config).optimizer.betas == [beta1, beta2]  # as a resumed run has it


def test_half_life_needs_rows_of_tokens() -> None:
    with pytest.raises(UsageError, match="no rows of.*task.tokens_per_sample"):
        with_half_life(run_config("translation"))


def test_the_norm_of_a_gradient_leaves_out_what_has_none() -> None:
    named = parameters()
    optimizer = build(named, {"_name": "adamw", **ADAM}, FLAT)
    gradient = [torch.full_like(named["table"], 2.0), None, torch.tensor(2.0).double()]
    assert optimizer.load_gradient(gradient).item() == pytest.approx(8.0)
    assert [p.grad is None for p in named.values()] == [False, True, False]
