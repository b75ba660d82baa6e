"""Parts of the training loss that every objective on tokens takes: z-loss and label smoothing."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.core.batch import Layout, Terms, TokenBatch
from metaseq_lm.core.config import section
from metaseq_lm.core.registry import CRITERIONS
from metaseq_lm.criterions import Criterion
from metaseq_lm.data.corpus.predictions import PredictionBatch
from metaseq_lm.forward.passes import weighted_loss
from metaseq_lm.methods.span_corruption.criterion import CorruptedBatch
from metaseq_lm.models.transformer.encoder import TransformerLM

WEIGHT, SMOOTHING = 0.01, 0.1
ROWS, LENGTH, SYMBOLS = 3, 5, 7
MASK = 2  # no target
SOURCES = torch.tensor([1, 3, 4, 8, 12, 0])  # the last one is padding
# By the states at SOURCES, or before them (span corruption).
TARGETS = torch.tensor([4, 0, 6, 1, 3, -1])
LOSSES = {
    "masked_lm": "mlm",
    "causal_lm": "next_token",
    "prefix_lm": "next_token",
    "masked_next_token": "masked_next_token",
    "masked_diffusion": "denoising",
    "span_corruption": "target_token",
}
NAMES = pytest.mark.parametrize("name", LOSSES)


class Fixed(TransformerLM):
    """A model whose logits are its parameter, whatever it reads."""

    def __init__(self, logits: Tensor) -> None:
        nn.Module.__init__(self)
        self.logits = nn.Parameter(logits)

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        return self.logits

    def encoder(self, *arguments: Any) -> Tensor:
        return self.logits

    def predict(self, states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return states


def batch_of(name: str) -> Any:
    tokens = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % SYMBOLS
    if name in ("masked_lm", "causal_lm"):
        targets = tokens.roll(1, 1)
        targets[:, 0] = -1
        # Of the causal loss as many have a next token.
        sizes = {"targets": ROWS * (LENGTH - 1), "rows_with_targets": ROWS}
        positions = torch.zeros_like(tokens)
        return TokenBatch(tokens=tokens, positions=positions, targets=targets, sizes=sizes)
    sizes = {"targets": len(TARGETS) - 1, "tokens": 9, "rows": ROWS}
    shared: Any = {"tokens": tokens, "layout": Layout(), "targets": TARGETS, "sizes": sizes}
    if name == "span_corruption":
        return CorruptedBatch(positions=SOURCES + 1, **shared)
    return PredictionBatch(sources=SOURCES, mask_id=MASK, **shared)


def criterion_of(name: str, **options: float) -> Criterion:
    criterion: Criterion = CRITERIONS.build(name, section("criterion", _name=name, **options))
    return criterion


def terms_of(name: str, logits: Tensor, train: bool = True, **options: float) -> Terms:
    return criterion_of(name, **options)(Fixed(logits).train(train), batch_of(name))


def mean_of(terms: Terms, term: str, name: str) -> float:
    sizes = batch_of(name).sizes
    return float(terms[term].sum.detach()) / sizes[terms[term].per]


def loss_of(name: str, logits: Tensor, **options: float) -> Tensor:
    batch = batch_of(name)
    terms = criterion_of(name, **options)(Fixed(logits), batch)
    return weighted_loss(terms, batch.sizes, {}).detach()


def logits_of() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, LENGTH, SYMBOLS, dtype=torch.float64, generator=generator)


def predicted(name: str, logits: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the logits (N, V) that predict, their targets (N,), and what a loss is divided by."""
    batch = batch_of(name)
    if name == "masked_lm":
        return logits[:, 1:].flatten(0, 1), batch.targets[:, 1:].flatten(), 12
    if name == "causal_lm":
        return logits[:, :-1].flatten(0, 1), batch.tokens[:, 1:].flatten(), 12
    chosen, targets = logits.flatten(0, 1)[SOURCES[:-1]], TARGETS[:-1]
    if name != "masked_diffusion":
        return chosen, targets, 5
    allowed = [symbol for symbol in range(SYMBOLS) if symbol != MASK]
    return chosen[:, allowed], torch.tensor([allowed.index(int(t)) for t in targets]), 9


@NAMES
def test_losses_are_those_of_plain_torch(name: str) -> None:
    logits = logits_of()
    chosen, targets, count = predicted(name, logits)
    hard = F.cross_entropy(chosen, targets, reduction="sum") / count
    uniform = -chosen.log_softmax(-1).mean(-1).sum() / count
    terms = terms_of(name, logits, z_loss=WEIGHT, label_smoothing=SMOOTHING)
    expected = (1 - SMOOTHING) * hard + SMOOTHING * uniform
    assert mean_of(terms, LOSSES[name], name) == pytest.approx(float(expected), rel=1e-12)
    squares = chosen.logsumexp(-1).square().mean()
    assert mean_of(terms, "z_loss", name) == pytest.approx(float(squares), rel=1e-12)
    assert terms["z_loss"].weight == WEIGHT
    without_terms = terms_of(name, logits)
    assert mean_of(without_terms, LOSSES[name], name) == pytest.approx(float(hard), rel=1e-12)


@NAMES
def test_a_constant_changes_the_z_loss_only(name: str) -> None:
    """Adding c to all logits adds 2 c mean(lse) + c^2; where lse is 0 there is none."""
    logits, c, term = logits_of(), 1.5, LOSSES[name]
    options = {"z_loss": WEIGHT, "label_smoothing": SMOOTHING}
    before, after = (terms_of(name, x, **options) for x in (logits, logits + c))
    mean = float(predicted(name, logits)[0].logsumexp(-1).mean())
    grown = mean_of(after, "z_loss", name) - mean_of(before, "z_loss", name)
    assert grown == pytest.approx(2 * c * mean + c * c, rel=1e-12)
    assert mean_of(after, term, name) == pytest.approx(mean_of(before, term, name), rel=1e-12)
    if name != "masked_diffusion":  # whose softmax is that of all symbols but one
        normal = terms_of(name, logits.log_softmax(-1), z_loss=WEIGHT)
        assert mean_of(normal, "z_loss", name) == pytest.approx(0.0, abs=1e-25)


@NAMES
def test_gradient(name: str) -> None:
    """2 weight lse softmax, a mean over targets, and softmax - smoothed target."""
    logits = logits_of().requires_grad_()
    model, batch = Fixed(logits.detach()), batch_of(name)
    criterion = criterion_of(name, z_loss=WEIGHT, label_smoothing=SMOOTHING)
    weighted_loss(criterion(model, batch), batch.sizes, {}).backward()
    chosen, targets, count = predicted(name, logits)
    probabilities = chosen.softmax(-1)
    smoothed = torch.full_like(chosen, SMOOTHING / chosen.shape[1])
    smoothed += (1 - SMOOTHING) * F.one_hot(targets, chosen.shape[1]).to(chosen)
    scale = 2 * WEIGHT / len(targets)
    of_chosen = (probabilities - smoothed) / count
    of_chosen = of_chosen + scale * chosen.logsumexp(-1, keepdim=True) * probabilities
    (expected,) = torch.autograd.grad(chosen, logits, of_chosen.detach())
    assert model.logits.grad is not None
    torch.testing.assert_close(model.logits.grad, expected, rtol=1e-10, atol=1e-14)


@NAMES
def test_gradient_by_differences(name: str) -> None:
    logits, step = logits_of(), 1e-5
    model, batch = Fixed(logits), batch_of(name)
    criterion = criterion_of(name, z_loss=WEIGHT, label_smoothing=SMOOTHING)
    weighted_loss(criterion(model, batch), batch.sizes, {}).backward()
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(logits.shape, dtype=torch.float64, generator=generator)
    sides = [
        float(loss_of(name, logits + s * direction, z_loss=WEIGHT, label_smoothing=SMOOTHING))
        for s in (step, -step)
    ]
    assert model.logits.grad is not None
    slope = float((model.logits.grad * direction).sum())
    assert (sides[0] - sides[1]) / (2 * step) == pytest.approx(slope, rel=1e-7)


@NAMES
def test_neither_an_evaluation_nor_a_weight_of_0_has_them(name: str) -> None:
    logits, term = logits_of(), LOSSES[name]
    without_terms = mean_of(terms_of(name, logits), term, name)
    evaluated = terms_of(name, logits, train=False, z_loss=WEIGHT, label_smoothing=SMOOTHING)
    assert mean_of(evaluated, term, name) == without_terms
    assert "z_loss" not in evaluated
    assert "z_loss" not in terms_of(name, logits)
