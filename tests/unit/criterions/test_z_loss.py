"""The z-loss by its invariances, and where it counts."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import Terms, TokenBatch, weighted_loss
from metaseq_lm.core.config import section
from metaseq_lm.core.registry import CRITERIONS
from metaseq_lm.criterions import Criterion

WEIGHT = 0.01


class Fixed(nn.Module):
    """A model whose logits are its parameter, whatever it reads."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        return self.logits


def batch_of(logits: Tensor) -> TokenBatch:
    rows, length, symbols = logits.shape
    tokens = torch.arange(rows * length).reshape(rows, length) % symbols
    targets = tokens.roll(1, 1)
    targets[:, 0] = -1
    # Of the causal loss as many have a next token.
    sizes = {"targets": rows * (length - 1), "rows_with_targets": rows}
    return TokenBatch(
        tokens=tokens, positions=torch.zeros_like(tokens), targets=targets, sizes=sizes
    )


def criterion_of(name: str, weight: float) -> Criterion:
    options = section("criterion", _name=name, z_loss=weight)
    criterion: Criterion = CRITERIONS.build(name, options)
    return criterion


def terms_of(name: str, logits: Tensor, weight: float = WEIGHT, train: bool = True) -> Terms:
    criterion = criterion_of(name, weight)
    return criterion(Fixed(logits).train(train), batch_of(logits))


def mean_of(terms: Terms, name: str, logits: Tensor) -> float:
    return float(terms[name].sum.detach()) / batch_of(logits).sizes["targets"]


def logits_of() -> Tensor:
    return torch.randn(3, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def counted(name: str, values: Tensor) -> Tensor:
    """Return the values (B, S) at the positions with a target."""
    return values[:, 1:] if name == "masked_lm" else values[:, :-1]


NAMES = pytest.mark.parametrize(
    ("name", "loss"), [("masked_lm", "mlm"), ("causal_lm", "next_token")]
)


@NAMES
def test_a_constant_changes_the_z_loss_only(name: str, loss: str) -> None:
    """Adding c to all logits adds 2 c mean(lse) + c^2; where lse is 0 there is none."""
    logits, c = logits_of(), 1.5
    before, after = terms_of(name, logits), terms_of(name, logits + c)
    mean = float(counted(name, logits.logsumexp(-1)).mean())
    grown = mean_of(after, "z_loss", logits) - mean_of(before, "z_loss", logits)
    assert grown == pytest.approx(2 * c * mean + c * c, rel=1e-12)
    assert mean_of(after, loss, logits) == pytest.approx(mean_of(before, loss, logits), rel=1e-12)
    normal = terms_of(name, logits.log_softmax(-1))
    assert mean_of(normal, "z_loss", logits) == pytest.approx(0.0, abs=1e-25)


@NAMES
def test_gradient(name: str, loss: str) -> None:
    """2 weight lse softmax, a mean over targets, and nothing elsewhere."""
    logits = logits_of()
    gradients = []
    for weight in (WEIGHT, 0.0):
        model = Fixed(logits)
        terms = criterion_of(name, weight)(model, batch_of(logits))
        weighted_loss(terms, batch_of(logits).sizes, {}).backward()
        gradients.append(model.logits.grad)
    difference = counted(name, gradients[0] - gradients[1])
    scale = 2 * WEIGHT / batch_of(logits).sizes["targets"]
    expected = scale * logits.logsumexp(-1, keepdim=True) * logits.softmax(-1)
    torch.testing.assert_close(difference, counted(name, expected), rtol=1e-10, atol=1e-14)
    assert (gradients[0] - gradients[1]).abs().sum() == pytest.approx(difference.abs().sum())


@NAMES
def test_neither_an_evaluation_nor_a_weight_of_0_has_it(name: str, loss: str) -> None:
    logits = logits_of()
    assert "z_loss" not in terms_of(name, logits, train=False)
    assert "z_loss" not in terms_of(name, logits, weight=0.0)
    default = CRITERIONS.build(name, section("criterion", _name=name))
    assert "z_loss" not in default(Fixed(logits), batch_of(logits))
