"""A Markov chain whose conditionals are known exactly, and what Electric and ELECTRA make of it.

Rows have n symbols of V. The symbol V stands for what lies outside of a row, so that a context
(left, right) is a pair out of V + 1 symbols, and p(x_t | all others) depends on the context alone.
Tables are float64 arrays: p and q (left, right, symbol), energies (left, symbol, right).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from math import comb, log

import numpy as np
import torch
from torch.nn import functional as F


class Chain:
    """A chain of `length` of `symbols` symbols, from `seed`; `sharpness` spreads its odds."""

    def __init__(self, symbols: int = 6, length: int = 10, seed: int = 1, sharpness: float = 1.2):
        rng = np.random.default_rng(seed)
        self.symbols, self.length, outside = symbols, length, symbols
        self.start = softmax(sharpness * rng.standard_normal(symbols))
        self.move = softmax(sharpness * rng.standard_normal((symbols, symbols)))
        first, inside, last = np.zeros((3, symbols + 1, symbols + 1))
        first[outside, :symbols] = self.start
        inside[:symbols, :symbols], inside[outside, outside] = self.move, 1
        last[:, outside] = 1
        # steps[s] leads from position s - 2 to s - 1; positions 0 to n - 1 are inside.
        silent = np.zeros_like(first)
        silent[:, outside] = 1
        self.steps = [silent, first, *[inside] * (length - 1), last, silent]
        self.here = [np.eye(symbols + 1)[outside]]
        for step in self.steps:
            self.here.append(self.here[-1] @ step)
        joint = self.triples()
        total = joint.sum(1, keepdims=True)
        shares = np.divide(joint, total, out=np.full_like(joint, 1 / symbols), where=total > 0)
        self.p = shares.transpose(0, 2, 1)

    def triples(self) -> np.ndarray:
        """Return the share of positions at which (left, symbol, right) are adjacent."""
        joint = 0.0
        for t in range(self.length):
            m, before, after = self.here[t + 1], self.steps[t + 1], self.steps[t + 2]
            joint = joint + np.einsum("l,lx,xr->lxr", m, before, after)
        return joint[:, : self.symbols] / self.length

    def draw(self, count: int, seed: int) -> np.ndarray:
        """Return `count` rows, int64 (count, n)."""
        rng = np.random.default_rng(seed)
        rows = np.empty((count, self.length), np.int64)
        for t in range(self.length):
            odds = self.start[None] if t == 0 else self.move[rows[:, t - 1]]
            rows[:, t] = choose(odds, rng.random(count))
        return rows

    def contexts(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what stands left and right of each position."""
        wide = np.pad(rows, ((0, 0), (1, 1)), constant_values=self.symbols)
        return wide[:, :-2], wide[:, 2:]

    def log_p(self, rows: np.ndarray) -> np.ndarray:
        """Return log p(x_t | all others) of every position, (count, n)."""
        left, right = self.contexts(rows)
        return np.log(self.p[left, right, rows])

    def blurred(self, share: float) -> np.ndarray:
        """Return a noise distribution: the exact conditionals, mixed with a uniform `share`."""
        return (1 - share) * self.p + share / self.symbols


def softmax(x: np.ndarray) -> np.ndarray:
    """Return exp(x) over its sum along the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def choose(odds: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Return the symbols drawn by uniform numbers `u` from distributions `odds` (..., V)."""
    return (odds.cumsum(-1) < u[..., None]).sum(-1).clip(max=odds.shape[-1] - 1)


@dataclass
class Cells:
    """A weighted logistic regression: what was seen, log q, label, and how often (all (N,)).

    `seen` (3, N) indexes the energies: left, symbol, right. `constant` is added to all logits.
    """

    seen: torch.Tensor
    log_q: torch.Tensor
    label: torch.Tensor
    weight: torch.Tensor
    constant: float

    def loss(self, energy: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of P(noise) = sigmoid(E + log q + constant)."""
        logits = energy[tuple(self.seen)] + self.log_q + self.constant
        losses = F.binary_cross_entropy_with_logits(logits, self.label, reduction="none")
        return (losses * self.weight).sum()


def cells(counts: np.ndarray, q: np.ndarray, constant: float) -> Cells:
    """Make Cells of `counts` by (seen left, symbol, seen right, true left, true right, label)."""
    at = np.nonzero(counts)
    seen_left, symbol, seen_right, left, right, label = at
    return Cells(
        torch.tensor(np.stack([seen_left, symbol, seen_right])),
        torch.tensor(np.log(q[left, right, symbol])),
        torch.tensor(label.astype(float)),
        torch.tensor(counts[at]),
        constant,
    )


def empty(chain: Chain) -> np.ndarray:
    """Return counts of nothing."""
    v = chain.symbols + 1
    return np.zeros((v, chain.symbols, v, v, v, 2))


def naive(chain: Chain, q: np.ndarray, k: int) -> Cells:
    """Algorithm 1, expected: all n positions, and k noise tokens each alone in a row of its own."""
    counts, joint = empty(chain), chain.triples()
    left, symbol, right = np.indices(joint.shape)
    at = (left, symbol, right, left, right)
    counts[(*at, 0)] = joint
    counts[(*at, 1)] = k / chain.length * joint.sum(1, keepdims=True) * q.transpose(0, 2, 1)
    return cells(counts, q, log(k / chain.length))


def naive_sample(chain: Chain, q: np.ndarray, k: int, rows: int, seed: int) -> Cells:
    """Algorithm 1 on `rows` drawn rows, with k drawn noise tokens each."""
    x, rng = chain.draw(rows, seed), np.random.default_rng(seed + 1)
    left, right = chain.contexts(x)
    counts = empty(chain)
    np.add.at(counts, (left, x, right, left, right, 0), 1.0)
    row, t = np.arange(rows).repeat(k), rng.integers(chain.length, size=rows * k)
    left, right = left[row, t], right[row, t]
    noise = choose(q[left, right], rng.random(len(t)))
    np.add.at(counts, (left, noise, right, left, right, 1), 1.0)
    return cells(counts / (rows * chain.length), q, log(k / chain.length))


def efficient(chain: Chain, q: np.ndarray, k: int) -> Cells:
    """Algorithm 2, expected: k of n tokens are replaced at once, given the original row.

    The energy sees the replaced neighbours, log q the original ones.
    """
    v, n = chain.symbols + 1, chain.length
    noise = np.zeros((v, v, v))
    noise[..., : v - 1] = q
    same, counts = np.eye(v), empty(chain)
    for t in range(n):
        s, m = chain.steps, chain.here[t]
        five = np.einsum("a,al,lx,xr,rb->alxrb", m, s[t], s[t + 1], s[t + 2], s[t + 3])
        real = 1 + (t > 0) + (t < n - 1)
        for before, own, after in product((0, 1), repeat=3):
            if (before and t == 0) or (after and t == n - 1):
                continue
            picked = before + own + after
            chance = comb(n - real, k - picked) / comb(n, k) if 0 <= k - picked else 0.0
            if not chance:
                continue
            parts = [five, noise if before else same, noise if own else same]
            parts.append(noise if after else same)
            left, middle = "axL" if before else "lL", "lrX" if own else "xX"
            right = "xbR" if after else "rR"
            spelled = f"alxrb,{left},{middle},{right}->LXRlr"
            found = np.einsum(spelled, *parts, optimize=True)[:, : v - 1]
            counts[..., own] += chance / n * found
    return cells(counts, q, log(k / (n - k)))


def minimise(task: Cells, chain: Chain, steps: int = 150) -> np.ndarray:
    """Return the table of energies with the least loss (a convex problem)."""
    v = chain.symbols + 1
    energy = torch.full((v, v - 1, v), log(v - 1), dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [energy], max_iter=steps, tolerance_grad=1e-10, tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> torch.Tensor:
        solver.zero_grad()
        loss = task.loss(energy)
        loss.backward()
        return loss

    solver.step(closure)
    return energy.detach().numpy()


def judge(energy: np.ndarray, chain: Chain) -> dict[str, float]:
    """Compare a table with -log p, weighted by how often the data shows a context and a symbol."""
    joint, wanted = chain.triples(), -np.log(chain.p.transpose(0, 2, 1))
    context = joint.sum(1)
    z = np.exp(-energy).sum(1)
    return {
        "error": float((joint * abs(energy - wanted)).sum()),
        "bias": float((joint * (energy - wanted)).sum()),
        "correlation": correlation(energy, wanted, joint),
        "Z": float((context * z).sum()),
        "Z_error": float((context * abs(z - 1)).sum()),
    }


def correlation(a: np.ndarray, b: np.ndarray, weight: np.ndarray | None = None) -> float:
    """Return Pearson's correlation of two arrays, weighted if asked."""
    weight = np.ones_like(a) if weight is None else weight
    weight = weight / weight.sum()
    a, b = a - (weight * a).sum(), b - (weight * b).sum()
    spread = (weight * a * a).sum() * (weight * b * b).sum()
    return float((weight * a * b).sum() / spread**0.5)


def best_with_context_noise(
    chain: Chain, k: int, rows: np.ndarray, q: np.ndarray | None = None
) -> np.ndarray:
    """Return the energies (count, n) that Algorithm 2 aims at if the net may see the whole row.

    For each row: over all originals it may have come from and all k of n positions that may have
    been replaced, with noise q (the exact conditionals if not given), the mean of
    sigmoid(E + log q + constant) equals the chance that the position was replaced. Not -log p,
    because a strange neighbour makes a token less likely to be noise of its own.
    """
    q = chain.p if q is None else q
    n, count, v = chain.length, len(rows), chain.symbols
    weights, logs, picked = [], [], []
    for where in combinations(range(n), k):
        for originals in product(range(v), repeat=k):
            x = rows.copy()
            x[:, where] = originals
            left, right = chain.contexts(x)
            log_q = np.log(q[left, right, rows])
            log_x = np.log(chain.start[x[:, 0]]) + np.log(chain.move[x[:, :-1], x[:, 1:]]).sum(1)
            weights.append(log_x + log_q[:, where].sum(1))
            logs.append(log_q)
            picked.append([t in where for t in range(n)])
    posterior = softmax(np.stack(weights, -1))  # (count, cases)
    log_q, fake = np.stack(logs, -1), np.array(picked).T  # (count, n, cases), (n, cases)
    wanted = np.einsum("cs,ns->cn", posterior, fake.astype(float))
    low, high = np.full((count, n), -20.0), np.full((count, n), 20.0)
    for _ in range(40):
        middle = (low + high) / 2
        logits = middle[..., None] + log_q + log(k / (n - k))
        mean = np.einsum("cs,cns->cn", posterior, 1 / (1 + np.exp(-logits)))
        low, high = np.where(mean < wanted, middle, low), np.where(mean < wanted, high, middle)
    return (low + high) / 2


def electra_logit(p: np.ndarray, q: np.ndarray, rate: float) -> np.ndarray:
    """Return the best logit for "replaced" where a lucky sample counts as real."""
    return np.log(rate * q * (1 - p)) - np.log(p * (1 - rate + rate * q))


def inversions(logit: np.ndarray, q: np.ndarray, rate: float) -> dict[str, np.ndarray]:
    """Return log p by the dissertation, with log(k / n), with log(k / (n - k)), and corrected."""
    log_ratio = np.log(rate * q / (1 - rate + rate * q)) - logit
    return {
        "log q + log(k/n) - l": np.log(q) + log(rate) - logit,
        "log q + log(k/(n-k)) - l": np.log(q) + log(rate / (1 - rate)) - logit,
        "corrected": -np.logaddexp(0, -log_ratio),
    }
