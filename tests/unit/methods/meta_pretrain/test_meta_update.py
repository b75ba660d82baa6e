"""The meta update on a small net in float64: what is undone, what is not, and exact gradients."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from metaseq_lm.core.batch import Batch, Term, Terms
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import check_options
from metaseq_lm.distributed import vectors
from metaseq_lm.engine.engine import Engine, copy_nested
from metaseq_lm.methods.meta_pretrain.options import MetaOptions
from metaseq_lm.methods.meta_pretrain.update import meta_update
from metaseq_lm.models.layers import Dropout
from metaseq_lm.optim import Optimizer

Double = Sequence[Sequence[Batch]]


def rate(step: int) -> float:
    """A schedule that no two steps agree on."""
    return 1 / step


def build(clip: float = 0.0, dropout: float = 0.0) -> tuple[nn.Module, Engine]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), Dropout(dropout), nn.Linear(5, 2)).double()
    inner = torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1)
    optimizer = Optimizer(inner, rate, list(net.parameters()), clip)
    return net, Engine({"main": optimizer}, seed=1, precision="fp64")


@dataclass(kw_only=True)
class RowBatch(Batch):
    """Rows of numbers (B, 3)."""

    x: Tensor
    bad: bool = False


def batches(count: int, sizes: Sequence[int] = (6,), seed: int = 0) -> list[list[Batch]]:
    """Return so many global batches, each cut into micro-batches of `sizes` rows."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        x = torch.randn(sum(sizes), 3, generator=g, dtype=torch.float64)
        rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        parts = zip(x.split(list(sizes)), rows)
        found.append([RowBatch(x=p, rows=r, sizes={"rows": len(p)}) for p, r in parts])
    return found


def cost(out: Tensor, x: Tensor) -> Tensor:
    """A loss with curvature, (rows,)."""
    return (out[:, 0] - x.prod(-1)).pow(2) + out[:, 1].exp() * (1 + out[:, 0].sin())


def loss_of(net: Callable[[Tensor], Tensor]) -> Callable[[Batch], Terms]:
    def loss(batch: Batch) -> Terms:
        return {"cost": Term(cost(net(batch.x), batch.x).sum(), "rows")}

    return loss


def state(net: nn.Module, engine: Engine) -> dict:
    """Return all that an update may change: weights, moments, schedule."""
    own = engine.optimizers["main"].local_state()
    return copy_nested({"weights": net.state_dict(), "optimizer": own})


def equal(a: object, b: object) -> bool:
    """Return whether nested containers are equal to the last bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return a == b


def train(options: MetaOptions, every: Double, updates: int = 3, **how: float) -> dict:
    """Return the state after some updates, each on k + 1 of the batches in turn."""
    net, engine = build(**how)
    size = options.inner_steps + 1
    for update in range(updates):
        engine.begin(update)
        chosen = every[update * size : (update + 1) * size]
        meta_update(engine, loss_of(net), chosen, options)
    return state(net, engine)


def plain(every: Double, **how: float) -> dict:
    """Return the state after ordinary updates."""
    net, engine = build(**how)
    for update, batch in enumerate(every):
        engine.begin(update)
        grads, _ = engine.gradients(loss_of(net), batch, engine.parameters("main"))
        engine.step("main", grads)
    return state(net, engine)


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_meta_update_without_inner_steps_is_plain_training(clip):
    every = batches(3, (2, 4))
    found = train(MetaOptions(inner_steps=0), every, clip=clip, dropout=0.3)
    assert equal(found, plain(every, clip=clip, dropout=0.3))


@pytest.mark.parametrize("order", ["none", "exact"])
def test_meta_update_with_inner_rate_zero_is_plain_training(order):
    """On the test batches, with their dropout masks; exact multiplies by (I - 0 H)."""
    every = batches(9, (2, 4))
    how = MetaOptions(2, "sgd", 0.0, order)
    assert equal(train(how, every, dropout=0.3), plain(every[2::3], dropout=0.3))


def test_inner_steps_matter():
    """So that the two tests above can fail."""
    every = batches(9)
    for how in (MetaOptions(2), MetaOptions(2, "sgd", 0.1), MetaOptions(2, "sgd", 0.1, "exact")):
        assert not equal(train(how, every), plain(every[2::3]))


@pytest.mark.parametrize("how", [MetaOptions(3), MetaOptions(3, "sgd", 0.2)], ids=["adam", "sgd"])
@pytest.mark.parametrize("earlier", [0, 2])
def test_the_outer_step_starts_where_the_update_began(how, earlier, monkeypatch):
    """theta_0, moments and schedule are back, bit for bit, when the last step is taken; after it
    they are those of one plain step with that gradient."""
    net, engine = build(clip=0.5)
    for batch in batches(earlier, seed=5):
        meta_update(engine, loss_of(net), [batch], MetaOptions(0))
    before = state(net, engine)
    seen: list[tuple[dict, list[Tensor]]] = []
    step = Engine.step

    def watched(self: Engine, name: str, grads: list[Tensor]) -> bool:
        seen.append((state(net, engine), [g.clone() for g in grads]))
        return step(self, name, grads)

    monkeypatch.setattr(Engine, "step", watched)
    meta_update(engine, loss_of(net), batches(4), how)
    monkeypatch.undo()
    assert len(seen) == (4 if how.inner_optim == "adam" else 1)
    assert equal(seen[-1][0], before)
    if how.inner_optim == "adam":
        assert not equal(seen[1][0], before)
    other, fresh = build(clip=0.5)
    other.load_state_dict(before["weights"])
    fresh.optimizers["main"].load_state_dict(before["optimizer"])
    fresh.step("main", seen[-1][1])
    assert equal(state(net, engine), state(other, fresh))
    assert engine.optimizers["main"].updates == earlier + 1
    assert engine.optimizers["main"].lr == 0.05 * rate(earlier + 2)


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_adam_steps_are_torchs_on_copies(clip):
    """Three updates of a loop in plain torch, whose inner steps use a copy of net and optimizer."""
    every = batches(9)
    found = train(MetaOptions(2), every, clip=clip)["weights"]
    net, _ = build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1)
    for update in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * rate(update + 1)
        virtual, _ = build()
        virtual.load_state_dict(net.state_dict())
        copy = torch.optim.AdamW(virtual.parameters(), lr=0.05, weight_decay=0.1)
        copy.load_state_dict(copy_nested(optimizer.state_dict()))
        for number in range(3):
            (batch,) = every[3 * update + number]
            virtual.zero_grad()
            cost(virtual(batch.x), batch.x).mean().backward()
            if number < 2:
                if clip:
                    nn.utils.clip_grad_norm_(virtual.parameters(), clip)
                copy.step()
        for own, other in zip(net.parameters(), virtual.parameters()):
            own.grad = other.grad
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    for name, weight in net.state_dict().items():
        assert (weight - found[name]).abs().max() < 1e-13


def gradient(how: MetaOptions, every: Double) -> tuple[nn.Module, list[Tensor], dict]:
    """Return the net, the gradient that the outer step of one update gets, and the logs."""
    net, engine = build()
    taken: list[Tensor] = []
    engine.step = lambda name, grads: bool(taken.extend(grads)) or True  # type: ignore[method-assign]
    logs = meta_update(engine, loss_of(net), every, how)
    return net, taken, logs


def unrolled(net: nn.Module, start: dict[str, Tensor], every: Double, lr: float) -> list[Tensor]:
    """Return the losses at theta_0 to theta_k as a graph through the steps of sgd."""
    theta, losses = start, []
    for number, batch in enumerate(every):
        x = torch.cat([micro.x for micro in batch])
        losses.append(cost(functional_call(net, theta, (x,)), x).mean())
        if number < len(every) - 1:
            steps = torch.autograd.grad(losses[-1], list(theta.values()), create_graph=True)
            theta = {n: w - lr * g for (n, w), g in zip(theta.items(), steps)}
    return losses


@pytest.mark.parametrize("sizes", [(6,), (1, 2, 3)])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_second_order_is_autograd_through_the_steps(steps, sizes):
    """To 1e-12 in float64; first order is another vector."""
    every = batches(steps + 1, sizes)
    net, exact, logs = gradient(MetaOptions(steps, "sgd", 0.1, "exact"), every)
    start = {n: w.detach().clone().requires_grad_() for n, w in net.named_parameters()}
    losses = unrolled(net, start, every, 0.1)
    wanted = torch.autograd.grad(losses[-1], list(start.values()))
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(exact, wanted))
    _, first, other = gradient(MetaOptions(steps, "sgd", 0.1), every)
    assert max((a - b).abs().max().item() for a, b in zip(first, wanted)) > 1e-3
    for found in (logs, other):
        named = [found[f"inner_loss_{j}"] for j in range(steps)] + [found["loss"]]
        assert all(abs(a - b.detach()) < 1e-12 for a, b in zip(named, losses))


def test_second_order_is_the_slope_of_the_meta_objective():
    """Along random directions, by finite differences of the loss that the update itself logs."""
    every = batches(4)
    how = MetaOptions(3, "sgd", 0.1, "exact")
    net, exact, _ = gradient(how, every)
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        direction = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in net.parameters()]
        ends = []
        for sign in (1, -1):
            other, engine = build()
            with torch.no_grad():
                for p, d in zip(other.parameters(), direction):
                    p.add_(d, alpha=sign * 1e-5)
            ends.append(meta_update(engine, loss_of(other), every, how)["loss"].item())
        slope = (ends[0] - ends[1]) / 2e-5
        assert slope == pytest.approx(vectors.dot(exact, direction).item(), rel=1e-7)


def test_first_order_is_the_gradient_where_the_steps_lead():
    every = batches(3)
    _, found, _ = gradient(MetaOptions(2, "sgd", 0.1), every)
    net, _ = build()
    for number, (batch,) in enumerate(every):
        net.zero_grad()
        cost(net(batch.x), batch.x).mean().backward()
        if number < 2:
            with torch.no_grad():
                for p in net.parameters():
                    assert p.grad is not None
                    p -= 0.1 * p.grad
    assert all((p.grad - g).abs().max() < 1e-13 for p, g in zip(net.parameters(), found))


def test_sgd_steps_are_not_clipped():
    """The optimizer's clip_norm is for its own steps."""
    net, engine = build(clip=1e-3)
    other, free = build()
    logs = [
        meta_update(e, loss_of(n), batches(3), MetaOptions(2, "sgd", 0.1))
        for n, e in ((net, engine), (other, free))
    ]
    assert logs[0]["loss"] == logs[1]["loss"]
    assert engine.norms["main"] == free.norms["main"] > 1e-3


@pytest.mark.parametrize("how", [MetaOptions(2), MetaOptions(2, "sgd", 0.2)], ids=["adam", "sgd"])
@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_meta_update_that_is_not_finite_changes_nothing(how, bad, what):
    """Be it in an inner batch or in the test batch: weights, moments and schedule stay, and the
    engine says so. A loss may be finite and its gradient not."""
    net, engine = build()
    meta_update(engine, loss_of(net), batches(3, seed=5), how)
    before = state(net, engine)
    every = batches(3)
    every[bad][0].bad = True

    def loss(batch: Batch) -> Terms:
        terms = loss_of(net)(batch)
        if batch.bad:
            weight = net[0].weight  # type: ignore[index]
            spoilt = (weight - weight.detach()).abs().sqrt().sum()  # its slope at 0 is infinite
            terms["cost"].sum = terms["cost"].sum + (math.inf if what == "loss" else spoilt)
        return terms

    engine.begin(1)
    meta_update(engine, loss, every, how)
    assert engine.finite_check.refused == ["main"]
    assert equal(state(net, engine), before)


@pytest.mark.parametrize(
    "options, words",
    [
        (MetaOptions(-1), "inner_steps .*at least 0"),
        (MetaOptions(1, "rmsprop"), "task.inner_optim is 'rmsprop'. Choices: adam, sgd"),
        (MetaOptions(1, "sgd"), "inner_lr is the rate of task.inner_optim=sgd"),
        (MetaOptions(1, "adam", 0.1), "inner_lr is the rate of task.inner_optim=sgd"),
        (MetaOptions(1, "adam", None, "exact"), "second_order=exact needs"),
        (MetaOptions(1, "sgd", 0.1, "approximate"), "second_order is 'approximate'"),
        (MetaOptions(1, "sgd", -0.1), "task.inner_lr .*at least 0, got -0.1"),
    ],
)
def test_mistakes(options, words):
    with pytest.raises(UsageError, match=words):
        check_options(MetaOptions, options, "task.")
        options.check()
