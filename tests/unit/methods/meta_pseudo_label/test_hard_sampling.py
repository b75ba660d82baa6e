"""Sampling of pseudo pairs: from the teacher's softmax, everywhere, with its dropout masks."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hard_reference import watch
from meta_pseudo_bench import Bench
from scipy import stats
from test_hard_update import SMALL, check, dropout
from torch import Tensor

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import CopiesBatch
from metaseq_lm.forward.passes import ForwardContext, Noise, current_context, use_context
from metaseq_lm.methods.meta_pseudo_label.criterion import draw
from metaseq_lm.methods.meta_pseudo_label.episodes import pseudo_batch

LOGITS = torch.tensor([0.3, -1.0, 2.0, 0.0, -4.0, 1.1, 0.7])


def drawn(logits: Tensor, root: int, rows: int = 1) -> Tensor:
    """Sample from logits whose first axis is rows."""
    noise = Noise(random_streams.key("sampling", root), np.arange(rows))
    with use_context(ForwardContext(noise)):
        return draw(logits)


def test_samples_follow_softmax() -> None:
    samples = drawn(LOGITS.expand(1, 200_000, 7), 0)
    counts = np.bincount(samples.flatten(), minlength=7)
    wanted = LOGITS.double().softmax(-1).numpy() * 200_000
    assert stats.chisquare(counts, wanted).pvalue > 1e-3
    assert stats.chisquare(counts, np.roll(wanted, 1)).pvalue < 1e-9


def test_neighbouring_samples_are_independent() -> None:
    samples = drawn(LOGITS.expand(100, 1000, 7), 1, rows=100).numpy()
    for one, other in (
        (samples[:, :-1], samples[:, 1:]),
        (samples[:-1], samples[1:]),
        (samples, drawn(LOGITS.expand(100, 1000, 7), 2, rows=100).numpy()),
    ):
        table = np.zeros((7, 7))
        np.add.at(table, (one.ravel(), other.ravel()), 1)
        assert stats.chi2_contingency(table).pvalue > 1e-3


def test_sampling_never_draws_probability_zero() -> None:
    logits = LOGITS.clone()
    logits[[0, 4, 6]] = -torch.inf
    samples = drawn(logits.expand(1, 50_000, 7), 3)
    assert set(samples.flatten().tolist()) == {1, 2, 3, 5}


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_unit_interval(u: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((1, 1, 7), -torch.inf)
    logits[..., [2, 5]] = 0.0
    fixed = lambda self, shape, dtype: torch.full(shape, u, dtype=dtype)
    monkeypatch.setattr(Noise, "uniform", fixed)
    assert drawn(logits, 0).item() == (2 if u == 0 else 5)


def test_first_and_last_position_are_sampled_and_padding_is_copied(ragged: Path) -> None:
    bench = Bench(ragged, "hard", "task.batches_per_update=8")
    taken = watch(bench)
    batches = bench.batches(0)
    bench.update(0)
    (batch,) = batches["unlabelled"][0]
    pads, text = batch.padding, batch.original
    assert pads.any()
    last = (~pads).sum(-1, keepdim=True) - 1
    for sampled in taken.pairs[0]:
        assert (sampled[pads] == 0).all()
        assert sampled.max() < 407 and sampled.min() >= 0
        # An untrained teacher is near uniform over 407 tokens: hardly any token stays the same.
        for same in (
            sampled[..., 0] == text[..., 0],
            sampled.gather(-1, last) == text.gather(-1, last),
            (sampled == text)[~pads],
        ):
            assert same.double().mean() < 0.1


def test_both_heads_are_sampled_from_the_masked_forward_pass(even: Path) -> None:
    """x and y come from their own heads, with the dropout masks that the loss sees later."""
    bench = Bench(even, "hard", *SMALL[:4], *dropout(0.3))
    teacher = bench.model["teacher"]
    for name, factor in (("x", 60.0), ("y", 90.0)):
        with torch.no_grad():
            teacher.heads[name].weight.mul_(factor)
    batches = bench.batches(0)
    taken = watch(bench)
    start = {n: p.detach().clone() for n, p in teacher.named_parameters()}
    bench.update(0)
    teacher.load_state_dict(start)
    (batch,) = batches["unlabelled"][0]
    for c in range(2):
        with bench.replay(batch.rows[c], 0, "teacher"):
            hidden = teacher.encoder(batch.original[c])
            probabilities = [teacher.predict(hidden, head=n).softmax(-1) for n in ("x", "y")]
            noise = current_context().noise
            assert noise is not None
            uniforms = [noise.uniform(p.shape[:2], torch.float64) for p in probabilities]
        for pair, p, u in zip(taken.pairs[0], probabilities, uniforms):
            below = (p.detach().cumsum(-1) <= u.unsqueeze(-1)).sum(-1)
            assert torch.equal(pair[c], below)


def test_a_sampled_pad_becomes_padding() -> None:
    x = torch.tensor([[5, 0, 9, 4], [0, 0, 0, 0]])
    y = torch.tensor([[0, 7, 0, 3], [4, 4, 4, 4]])
    unlabelled = CopiesBatch(tokens=x[None], rows=np.arange(2)[None])
    made = pseudo_batch(unlabelled, x, y, 0, 0)
    assert made.padding.tolist() == [[False, True, False, False], [True] * 4]
    assert made.targets.tolist() == [[0, -1, 0, 3], [-1] * 4], "a [PAD] target is a target"
    assert made.sizes["targets"] == 3


@pytest.mark.parametrize(("head", "bias"), [("x", 3.0), ("y", 3.0), ("y", 60.0)])
def test_update_with_sampled_pads(ragged: Path, head: str, bias: float) -> None:
    bench = Bench(ragged, "hard", *SMALL, *dropout(0.1))
    with torch.no_grad():
        bench.model["teacher"].heads[head].bias[0] = bias
    batch = bench.batches(0)["unlabelled"][0][0]
    taken = watch(bench)
    check(bench, 0)
    inside = ~batch.padding
    share = (taken.pairs[0][head == "y"][inside] == 0).double().mean()
    assert share > 0.01


def test_rows_of_nothing_but_pads(even: Path) -> None:
    """All positions sampled as [PAD]: no NaN, and nothing learned but the auxiliary losses."""
    bench = Bench(even, "hard", *SMALL[:4])
    with torch.no_grad():
        bench.model["teacher"].heads["x"].bias[0] = 200.0
    taken = watch(bench)
    logs = bench.update(0)
    assert (taken.pairs[0][0] == 0).all()
    assert logs["pseudo"] == 0
    for value in logs.values():
        assert torch.isfinite(value)
    for parameter in bench.model.parameters():
        assert torch.isfinite(parameter).all()
