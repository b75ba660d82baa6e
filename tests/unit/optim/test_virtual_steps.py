"""Steps as functions: equal to torch's, and differentiable, at a second moment of zero too."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from optimizers import make_optimizer
from torch import Tensor, nn

from metaseq_lm.core.errors import UsageError
from metaseq_lm.methods.meta_pseudo_label.model import Moments, adamw_step, moments_of, sgd_step
from metaseq_lm.optim import Optimizer

OPTIONS = {
    "_name": "adamw",
    "lr": 0.3,
    "weight_decay": 0.1,
    "betas": [0.9, 0.98],
    "eps": 1e-6,
    "clip_norm": 0.0,
    "decay_norms_and_biases": True,
}
SCHEDULE = {"_name": "inverse_sqrt", "warmup_updates": 3}
SHAPES = [(4, 3), (3,), (2, 2)]


def trained(steps: int, **options: object) -> Optimizer:
    """Return an optimizer after some steps; row 0 of its first parameter never had a gradient."""
    generator = torch.Generator().manual_seed(2)
    named = [
        (f"p{i}", nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)))
        for i, s in enumerate(SHAPES)
    ]
    optimizer = make_optimizer(named, OPTIONS | options, SCHEDULE)
    for _ in range(steps):
        for _, p in named:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        named[0][1].grad[0] = 0  # type: ignore[index]
        optimizer.step()
    return optimizer


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def gradient() -> Tensor:
    grad = torch.randn(19, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    grad[:3] = 0
    return grad


def split(vector: Tensor) -> list[Tensor]:
    sizes = [torch.Size(s).numel() for s in SHAPES]
    return [p.view(s) for p, s in zip(vector.split(sizes), SHAPES)]


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_adamw_is_torchs(steps: int, everywhere: bool) -> None:
    optimizer = trained(steps, decay_norms_and_biases=everywhere)
    theta, grad = flat(optimizer.parameters), gradient()
    state = copy.deepcopy(optimizer.state_dict())
    after, moments = adamw_step(theta, grad, moments_of(optimizer))
    assert torch.equal(flat(optimizer.parameters), theta), "nothing is written back"
    for name, value in optimizer.state_dict()["state"].items():
        assert all(torch.equal(v, state["state"][name][k]) for k, v in value.items())
    again, _ = adamw_step(after, 2 * grad, moments)
    for number in (1, 2):
        for p, g in zip(optimizer.parameters, split(number * grad)):
            p.grad = g
        before = optimizer.updates
        # The second virtual step keeps the rate of the first.
        optimizer.updates = steps
        optimizer.step()
        optimizer.updates = before + 1
        wanted = after if number == 1 else again
        torch.testing.assert_close(flat(optimizer.parameters), wanted, rtol=1e-12, atol=1e-14)
        if number == 1:
            now = moments_of(optimizer)
            torch.testing.assert_close(moments.first, now.first)
            torch.testing.assert_close(moments.second, now.second)
            assert moments.step == now.step == steps + 1


@pytest.mark.parametrize("steps", [0, 2])
def test_a_step_without_bias_correction(steps: int) -> None:
    optimizer, grad = trained(steps, _name="adam_uncorrected"), gradient()
    after, _ = adamw_step(flat(optimizer.parameters), grad, moments_of(optimizer))
    for p, g in zip(optimizer.parameters, split(grad)):
        p.grad = g
    optimizer.step()
    torch.testing.assert_close(flat(optimizer.parameters), after, rtol=1e-7, atol=0)


def test_moments_are_copies() -> None:
    optimizer = trained(2)
    moments = moments_of(optimizer)
    moments.first.zero_()
    moments.second.zero_()
    assert moments_of(optimizer).second.sum() > 0
    assert (moments.step, moments.lr) == (2, optimizer.lr)
    assert (moments.betas, moments.eps, moments.weight_decay) == ((0.9, 0.98), 1e-6, 0.1)


def test_other_optimizers_have_no_moments() -> None:
    p = nn.Parameter(torch.zeros(1))
    options = {"_name": "sgd", "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0}
    common = {"clip_norm": 0.0, "decay_norms_and_biases": True}
    with pytest.raises(UsageError, match="optimizer=adamw.*FusedSGD"):
        moments_of(make_optimizer([("p", p)], options | common, SCHEDULE))


def written_out(theta: Tensor, grad: Tensor, moments: Moments) -> tuple[Tensor, Tensor, Tensor]:
    """The step in operations that autograd differentiates."""
    (beta1, beta2), number = moments.betas, moments.step + 1
    first = beta1 * moments.first + (1 - beta1) * grad
    second = beta2 * moments.second + (1 - beta2) * grad**2
    root = torch.where(second > 0, torch.where(second > 0, second, 1.0).sqrt(), 0.0)
    change = first / (1 - beta1**number) / (root / (1 - beta2**number) ** 0.5 + moments.eps)
    theta = theta * (1 - moments.lr * moments.weight_decay) - moments.lr * change
    return theta, first, second


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_derivatives_are_those_of_autograd(steps: int, everywhere: bool) -> None:
    """First and second ones, in every input, at zero gradients and moments too, for two copies."""
    moments = moments_of(trained(steps, decay_norms_and_biases=everywhere))
    theta, grads = gradient() / 2, torch.stack([gradient(), -2 * gradient()])
    inputs = [theta, grads, moments.first, moments.second]
    weights = [torch.randn_like(grads, requires_grad=True) for _ in range(3)]

    def derivatives(step: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        after = step(*leaves[:2], replace(moments, first=leaves[2], second=leaves[3]))
        once = torch.autograd.grad(after, leaves, weights, create_graph=True)
        twice = torch.autograd.grad([(x**2).sum() for x in once], [*leaves[1:], *weights])
        return [*after, *once, *twice]

    def closed_form(theta: Tensor, grad: Tensor, moments: Moments) -> tuple[Tensor, Tensor, Tensor]:
        theta, moments = adamw_step(theta, grad, moments)
        return theta, moments.first, moments.second

    for ours, wanted in zip(derivatives(closed_form), derivatives(written_out), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("steps", [0, 3])
def test_derivatives_by_differences(steps: int) -> None:
    """gradcheck and gradgradcheck, away from the root of zero, where differences say nothing."""
    moments = moments_of(trained(steps))
    inputs = gradient(), gradient(), moments.first, moments.second + 1
    leaves = [x[3:].clone().requires_grad_() for x in inputs]

    def step(theta: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        after, rest = adamw_step(theta, grad, replace(moments, first=first, second=second))
        return after, rest.first, rest.second

    assert torch.autograd.gradcheck(step, leaves)
    assert torch.autograd.gradgradcheck(step, leaves)


def test_derivative_where_nothing_has_moved() -> None:
    """At g = 0 and zero moments a step is g / (|g| + eps): its slope is finite, 1 / eps."""
    moments = Moments(*(torch.zeros(3, dtype=torch.float64),) * 2, 0, 0.01, (0.9, 0.98), 1e-6, 0.0)
    grad = torch.tensor([0.0, 1e-9, 1.0], dtype=torch.float64, requires_grad=True)
    after, _ = adamw_step(torch.zeros(3, dtype=torch.float64), grad, moments)
    (slope,) = torch.autograd.grad(after.sum(), grad)
    size = torch.tensor([0.0, 1e-9, 1.0], dtype=torch.float64)
    torch.testing.assert_close(slope, -0.01 * 1e-6 / (size + 1e-6) ** 2)


def test_copies_share_moments() -> None:
    optimizer = trained(3)
    theta, moments = flat(optimizer.parameters), moments_of(optimizer)
    grads = torch.stack([gradient(), -2 * gradient()])
    after, _ = adamw_step(theta, grads, moments)
    for one, grad in zip(after, grads):
        torch.testing.assert_close(one, adamw_step(theta, grad, moments)[0])


def test_sgd() -> None:
    theta, grad = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -4.0])
    torch.testing.assert_close(sgd_step(theta, grad, 0.1), torch.tensor([0.7, 2.4]))
