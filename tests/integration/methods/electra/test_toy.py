"""The example with exactly known conditionals: its tables recover -log p, and by how much not."""

import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from types import ModuleType
from typing import Any

import electra_bench
import numpy as np
import pytest
import torch
from imported import imported
from torch import Tensor

from metaseq_lm.core.registry import CRITERIONS
from metaseq_lm.methods.electra import criterion as criterions

FOLDER = Path(__file__).resolve().parents[4] / "examples" / "electric"


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


def test_conditionals_by_enumeration(toy):
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


def test_efficient_counts_by_enumeration(toy):
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


def test_no_gradient_at_minus_log_p(toy):
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


def test_the_naive_estimator_recovers_minus_log_p(toy):
    chain = toy.Chain()
    q = chain.blurred(0.3)
    found = toy.judge(toy.minimise(toy.naive(chain, q, 2), chain), chain)
    assert found["error"] < 1e-4 and found["Z_error"] < 1e-4
    sampled = toy.naive_sample(chain, q, 2, 100_000, 3)
    found = toy.judge(toy.minimise(sampled, chain), chain)
    assert found["error"] < 0.05 and found["Z"] == pytest.approx(1, abs=0.02)
    assert found["Z_error"] < 0.02


def test_the_efficient_estimator_is_biased_by_context_noise(toy):
    """More replaced neighbours, more bias; correlation stays high."""
    chain = toy.Chain()
    q = chain.blurred(0.3)
    found = [toy.judge(toy.minimise(toy.efficient(chain, q, k), chain), chain) for k in (1, 2, 4)]
    errors = [f["error"] for f in found]
    assert 0.05 < errors[0] < errors[1] < errors[2] < 0.3
    assert [f["Z"] for f in found] == sorted(f["Z"] for f in found)
    assert all(f["correlation"] > 0.95 for f in found)


def test_the_aim_of_the_efficient_estimator_by_enumeration(toy):
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
def test_reading_probabilities_from_electra(toy, p, q, biased, exact):
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


def test_the_best_discriminator_by_counting(toy):
    """Real and fake tokens counted over all rows, chosen positions and samples, labels by equality.

    The corrected formula reads p from their odds, the dissertation's too much by a factor of
    (1 - m + m q) / ((1 - m) (1 - p)).
    """
    m, chain = 0.3, toy.Chain(3, 4, seed=4)
    rows, chances = every_row(chain)
    number = {tuple(row): i for i, row in enumerate(rows)}
    q = chain.blurred(0.4)
    left, right = chain.contexts(rows)
    real, fake = np.zeros(rows.shape), np.zeros(rows.shape)
    for i, t in product(range(len(rows)), range(4)):
        real[i, t] += chances[i] * (1 - m)
        for symbol in range(3):
            seen = (*rows[i, :t], symbol, *rows[i, t + 1 :])
            counts = real if symbol == rows[i, t] else fake
            counts[number[seen], t] += chances[i] * m * q[left[i, t], right[i, t], symbol]
    logit = np.log(fake / real)
    table = chances.reshape((3,) * 4)
    shares = [(table / table.sum(t, keepdims=True)).ravel() for t in range(4)]
    p, q_here = np.stack(shares, 1), q[left, right, rows]
    np.testing.assert_allclose(toy.electra_logit(p, q_here, m), logit, rtol=1e-9)
    found = toy.inversions(logit, q_here, m)
    np.testing.assert_allclose(np.exp(found["corrected"]), p, rtol=1e-9)
    factor = (1 - m + m * q_here) / ((1 - m) * (1 - p))
    biased = np.exp(found["log q + log(k/(n-k)) - l"])
    np.testing.assert_allclose(biased, p * factor, rtol=1e-9)
    assert factor.min() > 1 and factor.max() > 2
    for formula, wanted in (("corrected", p), ("dissertation", p * factor)):
        batch = batch_of(rows)
        model = tabulated(batch, torch.tensor(logit), chain.contexts(rows), q)
        how = electra_bench.criterion("electra_rtd", pll_formula=formula, noise_rate=m)
        said = how.token_log_probs(model, batch)[:, 1:-1].exp()
        np.testing.assert_allclose(said.numpy(), wanted, rtol=1e-9)


# ---------------------------------------------------------------- the criterions themselves


@pytest.fixture(scope="module")
def program(toy: ModuleType) -> Iterator[ModuleType]:
    """The example's program, toy.py, with its criterion; the registry is as before afterwards."""
    yield imported(FOLDER / "toy.py", "electric_toy")
    del CRITERIONS.entries["electric_naive"]


def batch_of(rows: np.ndarray) -> electra_bench.Rows:
    """Return rows of symbols as tokens between [CLS] and [SEP], (B, n + 2)."""
    tokens = np.pad(rows + electra_bench.FIRST, ((0, 0), (1, 1)))
    tokens[:, 0], tokens[:, -1] = electra_bench.CLS, electra_bench.SEP
    inside = np.zeros(tokens.shape, bool)
    inside[:, 1:-1] = True
    places = np.zeros((len(tokens), 0), np.int64)
    return electra_bench.Rows(
        tokens=tokens,
        masked=tokens,
        positions=places,
        targets=places,
        candidates=inside,
        scored=inside,
    )


def tabulated(batch: electra_bench.Rows, energy: Any, contexts: Any, q: np.ndarray) -> Any:
    """Return a model of tables: noise q (left, right, symbol), and a logit of every seen token.

    `energy` is those logits (B, n), or a function from the seen tokens (N, n + 2) to all (N, n +
    2).
    """
    model: Any = electra_bench.build(noise="two_tower")
    log_q = torch.full((*batch.tokens.shape, electra_bench.VOCABULARY), -1e4).double()
    symbols = slice(electra_bench.FIRST, electra_bench.FIRST + q.shape[-1])
    log_q[:, 1:-1, symbols] = torch.tensor(np.log(q[contexts]))
    model.heads["rtd"] = torch.nn.Identity()
    model.cloze_noise = lambda batch: log_q
    if isinstance(energy, Tensor):
        model.hidden = lambda tokens, batch: torch.nn.functional.pad(energy, (1, 1))
    else:
        model.hidden = lambda tokens, batch: energy(tokens)
    return model


def expected_gradient(
    how: Any, sampler: Any, chain: Any, q: np.ndarray, k: int, energies: np.ndarray
) -> np.ndarray:
    """Return the expected gradient of a criterion for the energy of every token of every row.

    Over all rows, k chosen positions and samples of noise q; `energies` (rows, n) by seen row.
    `sampler` is (monkeypatch, module): what it draws is prescribed.
    """
    rows, chances = every_row(chain)
    n, v = rows.shape[1], chain.symbols
    number = {tuple(row): i for i, row in enumerate(rows + electra_bench.FIRST)}
    masks = list(combinations(range(n), k))
    cases = list(product(range(len(rows)), masks, product(range(v), repeat=k)))
    at = np.array([i for i, _, _ in cases])
    where, drawn = (np.array([case[part] for case in cases]) for part in (1, 2))
    contexts = chain.contexts(rows[at])
    case = np.arange(len(cases))[:, None]
    weights = chances[at] / len(masks)
    weights = weights * q[contexts[0][case, where], contexts[1][case, where], drawn].prod(1)
    batch = batch_of(rows[at])
    positions = torch.tensor(where + 1)
    batch = batch.replace(positions=positions, targets=batch.tokens.gather(1, positions))
    leaves: list[tuple[Tensor, list[int]]] = []

    def energy(tokens: Tensor) -> Tensor:
        seen = [number[tuple(row)] for row in tokens[:, 1:-1].tolist()]
        leaf = torch.tensor(energies[seen], requires_grad=True)
        leaves.append((leaf, seen))
        return torch.nn.functional.pad(leaf, (1, 1))

    monkeypatch, module = sampler
    samples = torch.tensor(drawn + electra_bench.FIRST)
    monkeypatch.setattr(module, "sample", lambda *given: samples)
    how(tabulated(batch, energy, contexts, q), batch)["discriminator"].sum.backward()
    ((leaf, seen),) = leaves
    assert leaf.grad is not None
    # The naive criterion sees each original row and k noisy ones of it.
    grads = leaf.grad.numpy() * weights.repeat(len(seen) // len(cases))[:, None]
    total = np.zeros(rows.shape)
    np.add.at(total, seen, grads)
    return total


@pytest.mark.parametrize("k", [1, 3])
def test_the_naive_criterion_is_at_rest_at_minus_log_p(k, toy, program, monkeypatch):
    """Algorithm 1 as the example trains it: sign, labels and constant, with noise that is not p."""
    chain = toy.Chain(2, 4, seed=4)
    rows, _ = every_row(chain)
    q, energies = chain.blurred(0.4), -chain.log_p(rows)
    how = electra_bench.criterion("electric_naive", discriminator_weight=1.0)
    sampler = (monkeypatch, program)
    grads = expected_gradient(how, sampler, chain, q, k, energies)
    assert abs(grads).max() < 1e-12
    for wrong in (-energies, energies + 0.1):
        assert abs(expected_gradient(how, sampler, chain, q, k, wrong)).max() > 1e-4


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("k", [1, 3])
def test_electric_nce_is_at_rest_at_its_aim(k, exact, toy, monkeypatch):
    """Algorithm 2: the energies that the replaced neighbours allow, not quite -log p."""
    chain = toy.Chain(2, 4, seed=4)
    rows, _ = every_row(chain)
    q = chain.blurred(0.4)
    aim = toy.best_with_context_noise(chain, k, rows, q)
    how = electra_bench.criterion("electric_nce", noise_rate=k / 4, exact_counts=exact)
    sampler = (monkeypatch, criterions)
    assert abs(expected_gradient(how, sampler, chain, q, k, aim)).max() < 1e-9
    for wrong in (-aim, aim + 0.1, -chain.log_p(rows)):
        assert abs(expected_gradient(how, sampler, chain, q, k, wrong)).max() > 1e-4


def test_the_program_without_transformers(tmp_path):
    """Parts (a) to (c) as a reader runs them."""
    program = [sys.executable, str(FOLDER / "toy.py"), str(tmp_path), "--exact"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "naive, expected" in done.stdout and "corrected" in done.stdout
    assert (tmp_path / "toy.json").stat().st_size > 100
