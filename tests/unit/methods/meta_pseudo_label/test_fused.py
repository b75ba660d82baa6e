"""The written-out derivatives of the cross-entropies against torch's own, and finite
differences.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from metaseq_lm.methods.meta_pseudo_label import criterion
from metaseq_lm.models import layers
from metaseq_lm.models.layers import cross_entropy


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor counts as large, and is cut into blocks of three rows."""
    monkeypatch.setattr(layers, "LARGE", 0)
    monkeypatch.setattr(layers, "BLOCK", 21)


def numbers(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def hard(logits: Tensor, _: Tensor) -> Tensor:
    targets = torch.tensor([[3, -1, 0, 6], [-1, -1, 2, 2]])
    losses = cross_entropy(logits, targets)
    assert (losses[targets < 0] == 0).all()
    return losses


def hard_reference(logits: Tensor, _: Tensor) -> Tensor:
    targets = torch.tensor([3, -1, 0, 6, -1, -1, 2, 2])
    losses = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-1, reduction="none")
    return losses.view(2, 4)


def soft(logits: Tensor, scores: Tensor) -> Tensor:
    return criterion._soft_cross_entropy(logits, scores.softmax(-1))


def soft_reference(logits: Tensor, scores: Tensor) -> Tensor:
    return -(scores.softmax(-1) * logits.log_softmax(-1)).sum(-1)


@pytest.mark.parametrize("ours, reference", [(hard, hard_reference), (soft, soft_reference)])
def test_two_derivatives(ours, reference) -> None:
    """Loss, gradient, and the derivative of the gradient's product with a vector."""
    found = []
    for loss in (ours, reference):
        logits, scores = (numbers(seed, 2, 4, 7).mul(3).requires_grad_() for seed in (1, 2))
        weights = numbers(3, 2, 4).requires_grad_()
        value = loss(logits, scores)
        leaves = [logits, scores, weights]
        first = torch.autograd.grad(
            (value * weights).sum(), leaves, create_graph=True, allow_unused=True
        )
        parts = [g for g in first if g is not None and g.requires_grad]
        product = sum((g * numbers(4 + i, *g.shape)).sum() for i, g in enumerate(parts))
        second = torch.autograd.grad(product, leaves, allow_unused=True)
        found.append([value, *first, *second])
    for one, other in zip(*found):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_finite_differences() -> None:
    """torch's own check of first and second derivatives, in float64."""
    inputs = tuple(numbers(seed, 2, 4, 7).requires_grad_() for seed in (5, 6))
    for loss in (hard, soft):
        assert torch.autograd.gradcheck(loss, inputs)
        assert torch.autograd.gradgradcheck(loss, inputs)


def test_a_certain_target_is_a_hard_one() -> None:
    logits = numbers(7, 2, 4, 7)
    targets = torch.tensor([[3, 1, 0, 6], [5, 4, 2, 2]])
    certain = F.one_hot(targets, 7).double()
    torch.testing.assert_close(
        criterion._soft_cross_entropy(logits, certain), cross_entropy(logits, targets)
    )


def test_great_logits() -> None:
    """No overflow where a logit is far from the others."""
    logits = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1]))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.item() == 1e4 and gradient.tolist() == [[1.0, -1.0, 0.0]]


def test_small_logits_take_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "LARGE", 57)
    logits, targets = numbers(8, 2, 4, 7), torch.zeros(2, 4, dtype=torch.long)
    assert cross_entropy(logits, targets).tolist() == [
        row.tolist()
        for row in F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(
            2, 4
        )
    ]
