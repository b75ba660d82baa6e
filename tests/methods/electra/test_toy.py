"""The example with exactly known conditionals: its tables recover -log p, and by how much not."""

import subprocess
import sys
from itertools import product
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "electric"


@pytest.fixture(scope="module")
def toy() -> ModuleType:
    """The exact part of the example, chain.py."""
    sys.path.insert(0, str(FOLDER))
    try:
        import chain
    finally:
        sys.path.remove(str(FOLDER))
    return chain


def every_row(chain: object) -> tuple[np.ndarray, np.ndarray]:
    """Return all rows of a short chain and their probabilities."""
    v, n = chain.symbols, chain.length  # type: ignore[attr-defined]
    rows = np.array(list(product(range(v), repeat=n)))
    chances = chain.start[rows[:, 0]]  # type: ignore[attr-defined]
    for t in range(1, n):
        chances = chances * chain.move[rows[:, t - 1], rows[:, t]]  # type: ignore[attr-defined]
    return rows, chances


def test_conditionals_by_enumeration(toy: ModuleType) -> None:
    """p(x_t | all others) from the joint distribution of whole rows."""
    chain = toy.Chain(3, 5, seed=4)
    rows, chances = every_row(chain)
    assert chances.sum() == pytest.approx(1)
    table = chances.reshape((3,) * 5)
    for t in range(5):
        conditional = table / table.sum(t, keepdims=True)
        np.testing.assert_allclose(np.exp(chain.log_p(rows))[:, t], conditional.ravel(), rtol=1e-10)
    left, right = chain.contexts(rows)
    joint = np.zeros((4, 3, 4))
    for t in range(5):
        np.add.at(joint, (left[:, t], rows[:, t], right[:, t]), chances / 5)
    np.testing.assert_allclose(chain.triples(), joint, atol=1e-12)


def test_efficient_counts_by_enumeration(toy: ModuleType) -> None:
    """Algorithm 2's expected counts, by listing rows, replaced positions and samples."""
    chain = toy.Chain(2, 4, seed=4)
    q, counts = chain.blurred(0.4), toy.empty(chain)
    for row, chance in zip(*every_row(chain)):
        left, right = (c[0] for c in chain.contexts(row[None]))
        for where in ((a, b) for a in range(4) for b in range(a)):
            for samples in product(range(2), repeat=2):
                seen, weight = row.copy(), chance / 6
                for t, symbol in zip(where, samples):
                    seen[t] = symbol
                    weight *= q[left[t], right[t], symbol]
                before, after = (c[0] for c in chain.contexts(seen[None]))
                for t in range(4):
                    at = (before[t], seen[t], after[t], left[t], right[t], int(t in where))
                    counts[at] += weight / 4
    wanted, found = toy.cells(counts, q, 0.0), toy.efficient(chain, q, 2)
    energy = torch.randn(3, 2, 3, dtype=torch.float64)
    found.constant = 0.0
    assert found.loss(energy).item() == pytest.approx(wanted.loss(energy).item(), rel=1e-10)
    assert found.weight.sum().item() == pytest.approx(1)


def test_no_gradient_at_minus_log_p(toy: ModuleType) -> None:
    """The sign and the constant of noise-contrastive estimation, in expectation."""
    chain = toy.Chain()
    energy = torch.tensor(-np.log(chain.p.transpose(0, 2, 1)), requires_grad=True)
    for blur in (0.1, 0.5, 1.0):
        for k in (1, 3):
            task = toy.naive(chain, chain.blurred(blur), k)
            (grad,) = torch.autograd.grad(task.loss(energy), energy)
            assert grad.abs().max() < 1e-10
    (grad,) = torch.autograd.grad(toy.naive(chain, chain.blurred(0.3), 2).loss(-energy), energy)
    assert grad.abs().max() > 1e-3


def test_the_naive_estimator_recovers_minus_log_p(toy: ModuleType) -> None:
    chain = toy.Chain()
    q = chain.blurred(0.3)
    found = toy.judge(toy.minimise(toy.naive(chain, q, 2), chain), chain)
    assert found["error"] < 1e-4 and found["Z_error"] < 1e-4
    sampled = toy.naive_sample(chain, q, 2, 100_000, 3)
    found = toy.judge(toy.minimise(sampled, chain), chain)
    assert found["error"] < 0.05 and found["Z"] == pytest.approx(1, abs=0.02)
    assert found["Z_error"] < 0.02


def test_the_efficient_estimator_is_biased_by_context_noise(toy: ModuleType) -> None:
    """More replaced neighbours, more bias; correlation stays high."""
    chain = toy.Chain()
    q = chain.blurred(0.3)
    found = [toy.judge(toy.minimise(toy.efficient(chain, q, k), chain), chain) for k in (1, 2, 4)]
    errors = [f["error"] for f in found]
    assert 0.05 < errors[0] < errors[1] < errors[2] < 0.3
    assert [f["Z"] for f in found] == sorted(f["Z"] for f in found)
    assert all(f["correlation"] > 0.95 for f in found)


def test_the_aim_of_the_efficient_estimator_by_enumeration(toy: ModuleType) -> None:
    """Its energies make the expected gradient vanish at every whole noised row."""
    chain, k = toy.Chain(2, 4, seed=4), 2
    rows, chances = every_row(chain)
    aim = toy.best_with_context_noise(chain, k, rows)
    number = {tuple(row): i for i, row in enumerate(rows)}
    gradient = np.zeros_like(aim)
    for row, chance in zip(rows, chances):
        left, right = (c[0] for c in chain.contexts(row[None]))
        for where in ((a, b) for a in range(4) for b in range(a)):
            for samples in product(range(2), repeat=k):
                seen, weight = row.copy(), chance / 6
                for t, symbol in zip(where, samples):
                    seen[t] = symbol
                    weight *= chain.p[left[t], right[t], symbol]
                at = number[tuple(seen)]
                logit = aim[at] + np.log(chain.p[left, right, seen]) + np.log(k / (4 - k))
                fake = np.array([t in where for t in range(4)])
                gradient[at] += weight * (1 / (1 + np.exp(-logit)) - fake)
    assert abs(gradient).max() < 1e-9
    assert abs(aim + chain.log_p(rows)).max() > 0.05


@pytest.mark.parametrize("p, q, biased, exact", [(0.3, 0.2, 0.444, 0.3), (0.9, 0.7, 10.1, 0.9)])
def test_reading_probabilities_from_electra(
    toy: ModuleType, p: float, q: float, biased: float, exact: float
) -> None:
    """The published numbers have k / (n - k) in the dissertation's formula."""
    rate, one, other = 0.15, np.array(p), np.array(q)
    logit = toy.electra_logit(one, other, rate)
    # The logit is the minimum of the expected loss with labels by equality.
    real, fake = p * (1 - rate + rate * q), rate * q * (1 - p)
    slope = (real + fake) / (1 + np.exp(-logit)) - fake
    assert abs(slope) < 1e-12
    found = toy.inversions(logit, other, rate)
    assert np.exp(found["corrected"]) == pytest.approx(exact, rel=1e-12)
    assert np.exp(found["log q + log(k/(n-k)) - l"]) == pytest.approx(biased, rel=2e-3)
    printed = np.exp(found["log q + log(k/n) - l"])
    assert printed == pytest.approx((1 - rate) * biased, rel=2e-3)


def test_the_program_without_transformers(tmp_path: Path) -> None:
    """Parts (a) to (c) as a reader runs them."""
    program = [sys.executable, str(FOLDER / "toy.py"), str(tmp_path), "--exact"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "naive, expected" in done.stdout and "corrected" in done.stdout
    assert (tmp_path / "toy.json").stat().st_size > 100
