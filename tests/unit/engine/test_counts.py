"""Counts and accuracies under bf16 autocast: exact, where bfloat16 would keep 8 bits of them."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from metaseq_lm.core.batch import TokenBatch, number_of
from metaseq_lm.criterions.labelled import class_terms
from metaseq_lm.criterions.masked_lm import labelled_terms
from metaseq_lm.data.labelled.token_labels import TokenLabelBatch
from metaseq_lm.methods.meta_pseudo_label.finetune import TokenLabelCriterion
from metaseq_lm.models.layers import IGNORE

ROWS, SLOTS, CLASSES = 3001, 3, 5


def drawn(*shape: int) -> tuple[Tensor, Tensor]:
    """Return logits (..., K) in bfloat16 and targets (...), of which about half are the argmax."""
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(*shape, CLASSES, generator=g).bfloat16()
    others = torch.randint(0, CLASSES, shape, generator=g)
    return logits, torch.where(torch.rand(shape, generator=g) < 0.5, logits.argmax(-1), others)


def test_a_number_that_bfloat16_rounds() -> None:
    assert number_of(torch.ones(1025, dtype=torch.bool)).item() == 1025
    assert torch.tensor(1025.0).bfloat16().item() != 1025


def test_masked_lm() -> None:
    """The accuracy is a sum of thirds, halves and ones over all rows."""
    logits, targets = drawn(ROWS, SLOTS)
    targets[::5, 2] = IGNORE
    batch = TokenBatch(tokens=torch.zeros(ROWS, 9), targets=targets)
    shares = []
    for said, wanted in zip(logits.float().argmax(-1).tolist(), targets.tolist()):
        counted = [(s, w) for s, w in zip(said, wanted) if w != IGNORE]
        shares.append(Fraction(sum(s == w for s, w in counted), len(counted)))
    found = labelled_terms(logits, batch)["accuracy"].sum.item()
    assert found == pytest.approx(float(sum(shares)), rel=1e-12) and found > 256


def test_classes_of_images_and_tokens() -> None:
    logits, targets = drawn(ROWS)
    right = sum(a == b for a, b in zip(logits.float().argmax(-1).tolist(), targets.tolist()))
    assert class_terms(logits, targets)["accuracy"].sum.item() == right > 256
    assert torch.tensor(float(right)).bfloat16().item() != right
    nothing = torch.zeros(0)
    batch = TokenLabelBatch(
        tokens=targets[None],
        targets=targets[None],
        token_level=True,
        classes=nothing,
        class_tokens=nothing,
        longest=nothing,
        windows=nothing,
    )
    terms = TokenLabelCriterion().terms(logits[None], batch)
    assert terms["accuracy"].sum.item() == right
