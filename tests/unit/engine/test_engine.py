"""The engine against closed forms and plain autograd, in float64."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import Batch, Term, Terms
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.distributed import vectors
from metaseq_lm.distributed.vectors import Vector
from metaseq_lm.engine.engine import Engine, InnerGradient
from metaseq_lm.forward.passes import check_terms
from metaseq_lm.optim import Optimizer


def build(net: nn.Module, lr: float = 0.1, clip: float = 0.0) -> Engine:
    inner = torch.optim.AdamW(net.parameters(), lr=lr)
    optimizer = Optimizer(inner, lambda n: 1 / n, list(net.parameters()), clip)
    return Engine({"main": optimizer}, seed=1, precision="fp64")


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


@dataclass(kw_only=True)
class RowBatch(Batch):
    """Rows of numbers (B, 3), or of copies (C, B, 3) of which a mask (C, B) counts some."""

    x: Tensor
    mask: Tensor | None = None


def batches(sizes: list[int], seed: int = 0) -> list[Batch]:
    """Return micro-batches with so many rows each; the rows are the same however they are cut."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), 3, generator=g, dtype=torch.float64)
    rows = np.arange(sum(sizes))
    parts = zip(x.split(sizes), np.split(rows, np.cumsum(sizes)[:-1]))
    return [RowBatch(x=p, rows=r, sizes={"rows": len(p)}) for p, r in parts]


def squares(net: Callable[[Tensor], Tensor]) -> Callable[[Batch], Terms]:
    def loss(batch: RowBatch) -> Terms:
        out = net(batch.x)
        return {"square": Term((out**2).sum(), "rows"), "mean": Term(out.sum(), "rows", weight=0.0)}

    return loss


def same(a: list, b: list, tolerance: float = 1e-13) -> bool:
    return all((x - y).abs().max() <= tolerance for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("sizes", [[8], [1, 7], [2, 2, 2, 2], [5, 1, 2]])
def test_gradient_is_that_of_the_global_mean(net, sizes):
    engine = build(net)
    whole = torch.cat([b.x for b in batches(sizes)])
    out = net(whole)
    wanted = torch.autograd.grad((out**2).mean(), list(net.parameters()))
    grads, logs = engine.gradients(squares(net), batches(sizes), engine.parameters("main"))
    assert same(grads, wanted)
    assert abs(logs["square"] - (out**2).mean()) < 1e-13
    assert abs(logs["loss"] - (out**2).mean()) < 1e-13 and abs(logs["mean"] - out.mean()) < 1e-13
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("sizes", [[8], [1, 7], [2, 2, 2, 2]])
def test_a_term_per_nothing_is_the_sum(net, sizes):
    """Not divided, whatever the micro-batches; beside a mean it keeps its own scale."""
    engine = build(net)

    def loss(batch: RowBatch) -> Terms:
        out = net(batch.x)
        return {"sum": Term((out**2).sum(), None, 0.5), "mean": Term(out.sum(), "rows")}

    out = net(torch.cat([b.x for b in batches(sizes)]))
    total = 0.5 * (out**2).sum() + out.mean()
    wanted = torch.autograd.grad(total, list(net.parameters()))
    grads, logs = engine.gradients(loss, batches(sizes), engine.parameters("main"))
    assert same(grads, wanted)
    evaluated = engine.evaluate(loss, iter([[b] for b in batches(sizes)]))
    for each in (logs, evaluated):
        assert abs(each["sum"] - (out**2).sum()) < 1e-12 and abs(each["loss"] - total) < 1e-12


@pytest.mark.parametrize("sizes", [[8], [1, 7], [2, 2, 2, 2]])
def test_a_summed_term_is_logged_as_its_mean(net, sizes):
    """The gradient is that of the sum, the log shows the means, whatever the micro-batches."""
    engine = build(net)

    def loss(batch: RowBatch) -> Terms:
        out = net(batch.x)
        summed = Term((out**2).sum(), "rows", 0.5, is_summed=True)
        return {"summed": summed, "mean": Term(out.sum(), "rows")}

    out = net(torch.cat([b.x for b in batches(sizes)]))
    total = 0.5 * (out**2).sum() + out.mean()
    expected = torch.autograd.grad(total, list(net.parameters()))
    grads, logs = engine.gradients(loss, batches(sizes), engine.parameters("main"))
    assert same(grads, expected)
    mean = (out**2).mean()
    assert abs(logs["summed"] - mean) < 1e-12
    assert abs(logs["loss"] - (0.5 * mean + out.mean())) < 1e-12


def test_evaluate_agrees_and_takes_an_iterator(net):
    engine = build(net)
    _, logs = engine.gradients(squares(net), batches([8]), engine.parameters("main"))
    evaluated = engine.evaluate(squares(net), iter([batches([3, 5])]))
    assert evaluated.keys() == logs.keys()
    assert all(abs(evaluated[n] - float(logs[n])) < 1e-13 for n in evaluated)


def test_sizes_and_weights_per_copy(net):
    """Vector terms: each copy is divided by its own size; weights may differ."""
    engine = build(net)
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.float64)
    weight = torch.tensor([0.3, -2.0], dtype=torch.float64)

    def loss(batch: RowBatch) -> Terms:
        items = net(batch.x).squeeze(-1) ** 2 * batch.mask
        return {"square": Term(items.sum(1), "rows", weight)}

    cuts = [[0, 1, 2, 3, 4], [0, 1], [2, 3, 4]]
    micro_batches = [
        RowBatch(x=x[:, c], mask=mask[:, c], sizes={"rows": mask[:, c].sum(1)}) for c in cuts
    ]
    out = (net(x).squeeze(-1) ** 2 * mask).sum(1) / mask.sum(1)
    wanted = torch.autograd.grad((weight * out).sum(), list(net.parameters()))
    for parts in (micro_batches[:1], micro_batches[1:]):
        grads, logs = engine.gradients(loss, parts, engine.parameters("main"))
        assert same(grads, wanted)
        assert abs(logs["square"] - out.mean()) < 1e-13


def test_terms_of_the_loss_are_known(net):
    engine = build(net)

    def loss(batch: RowBatch) -> Terms:
        total = net(batch.x).sum()
        return {"a": Term(total, "rows"), "b": Term(total.detach(), "rows", 0.0)}

    engine.gradients(loss, batches([2]), engine.parameters("main"))
    engine.evaluate(loss, [batches([2])])
    assert engine.record.loss_terms == {"a": ""}


def test_unknown_size_is_explained(net):
    engine = build(net)
    with pytest.raises(MetaseqError, match="'a'.*'tokens'.*rows"):
        engine.gradients(
            lambda b: {"a": Term(net(b.x).sum(), "tokens")}, batches([2]), engine.parameters("main")
        )


@pytest.mark.parametrize(
    "returned, message",
    [
        (lambda x: x.sum(), "a Tensor as its result; return {name: Term"),
        (lambda x: {"a": x.mean()}, "a Tensor as a; return {name: Term"),
        (lambda x: {"a": Term(x, "rows")}, r"'a' has the shape \(2, 1\); .* a scalar"),
        (lambda x: {"a": Term(x.sum(1), None)}, r"'a' has the shape \(2,\); .* a scalar"),
    ],
)
def test_what_is_no_sum_is_explained(net, returned, message):
    """Whether a run begins with an update or with a validation."""
    engine = build(net)
    with pytest.raises(MetaseqError, match=message):
        engine.gradients(lambda b: returned(net(b.x)), batches([2]), engine.parameters("main"))
    with pytest.raises(MetaseqError, match=message):
        engine.evaluate(lambda b: returned(net(b.x)), [batches([2])])


@pytest.mark.parametrize("sizes", [[6], [1, 2, 3]])
@pytest.mark.parametrize("replay", [False, True])
def test_hypergradient_is_autograd_through_the_step(sizes, replay):
    """d<v, g(theta, phi)>/d phi for a loss of inner theta and outer phi."""
    engine = build(nn.Linear(1, 1).double())
    g = torch.Generator().manual_seed(3)
    theta, phi = (
        torch.randn(3, generator=g, dtype=torch.float64).requires_grad_() for _ in range(2)
    )
    v = torch.randn(3, generator=g, dtype=torch.float64)

    def loss(batch: RowBatch) -> Terms:
        return {"l": Term((torch.tanh(batch.x @ (theta * phi)) ** 2).sum(), "rows")}

    x = torch.cat([b.x for b in batches(sizes)])
    whole = (torch.tanh(x @ (theta * phi)) ** 2).mean()
    (inner,) = torch.autograd.grad(whole, theta, create_graph=True)
    wanted = torch.autograd.grad((inner * v).sum(), [phi, theta])
    found = engine.inner(loss, batches(sizes), [theta], replay=replay)
    assert same(found.value, [inner.detach()])
    assert same(engine.hypergradients(found, [v], [phi, theta]), wanted)
    before = theta.detach().clone()
    close = engine.hypergradients(found, [v], [phi, theta], step=1e-6)
    assert same(close, wanted, 1e-9) and torch.equal(theta.detach(), before)


@pytest.mark.parametrize("sizes", [[6], [1, 2, 3]])
@pytest.mark.parametrize("step", [0.0, 1e-6])
def test_hypergradient_belongs_to_where_the_inner_gradient_was_taken(sizes, step, net):
    """Steps, a query and another inner gradient before it change nothing."""
    engine = build(net)
    parameters = engine.parameters("main")
    v = [torch.ones_like(p) for p in parameters]

    def inner() -> InnerGradient:
        return engine.inner(squares(net), batches(sizes), parameters)

    def product(of: InnerGradient) -> Vector:
        return engine.hypergradients(of, v, parameters, step)

    wanted_here = product(inner())
    first = inner()
    with engine.restoring("main"):
        engine.move("main", first.value, -0.3)
        query, _ = engine.gradients(squares(net), batches([4]), parameters)
        moved = [p.detach().clone() for p in parameters]
        wanted_moved = product(inner())
        second = inner()
        assert engine.step("main", query)
        stepped = [p.detach().clone() for p in parameters]
        assert same(product(first), wanted_here) and same(product(second), wanted_moved)
        assert same(list(parameters), stepped, 0.0) and not same(stepped, moved, 1e-3)
    assert same(product(first), wanted_here) and same(product(second), wanted_moved)
    assert not same(wanted_here, wanted_moved, 1e-3)
    # With replay it belongs to the parameters that are there.
    first = engine.inner(squares(net), batches(sizes), parameters, replay=True)
    with engine.restoring("main"):
        engine.move("main", [m - p.detach() for m, p in zip(moved, parameters)], 1.0)
        assert same(product(first), wanted_moved, 1e-8)


def test_unreached_parameters_stay_none_and_are_not_stepped():
    net = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)}).double()
    engine = build(net)
    for used in ("a", "b", "a"):
        before = {n: p.detach().clone() for n, p in net.named_parameters()}
        grads, _ = engine.gradients(squares(net[used]), batches([4]), engine.parameters("main"))
        assert [g is None for g in grads] == [used == "b"] * 2 + [used == "a"] * 2
        engine.step("main", grads)
        moved = {n for n, p in net.named_parameters() if not torch.equal(p, before[n])}
        assert moved == {f"{used}.weight", f"{used}.bias"}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_gradient_changes_nothing(net, bad):
    engine = build(net)
    grads = [torch.ones_like(p) for p in net.parameters()]
    assert engine.step("main", grads)
    before = [p.detach().clone() for p in net.parameters()]
    state = engine.optimizers["main"].state_dict()["state"][0]["exp_avg"].clone()
    grads[1].view(-1)[0] = bad
    assert not engine.step("main", grads)
    assert engine.finite_check.refused == ["main"]
    assert same(list(net.parameters()), before, 0.0)
    assert torch.equal(engine.optimizers["main"].state_dict()["state"][0]["exp_avg"], state)
    assert engine.optimizers["main"].updates == 1


def test_clip_and_schedule(net):
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    optimizer = Optimizer(inner, lambda n: 1 / n, list(net.parameters()), 0.5)
    engine = Engine({"main": optimizer}, precision="fp64")
    for n in (1, 2, 3):
        before = vectors.flat([p.detach() for p in net.parameters()])
        grads = [torch.full_like(p, 2.0) for p in net.parameters()]
        assert optimizer.lr == 1 / n
        engine.step("main", grads)
        step = before - vectors.flat([p.detach() for p in net.parameters()])
        assert abs(step.norm() - 0.5 / n) < 1e-6
        assert abs(engine.norms["main"] - 2.0 * step.numel() ** 0.5) < 1e-12


def test_restoring_undoes_steps_and_moves(net):
    engine = build(net)
    grads = [torch.ones_like(p) for p in net.parameters()]
    engine.step("main", grads)
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(AssertionError, match="inside restoring"):
        engine.move("main", grads, 1.0)
    with engine.restoring("main"):
        engine.move("main", grads, -0.5)
        assert not same(list(net.parameters()), before, 0.1)
        engine.step("main", grads)
        engine.step("main", grads)
    assert same(list(net.parameters()), before, 0.0)
    twin = Engine({"main": engine.optimizers["main"]}, precision="fp64")
    assert engine.optimizers["main"].updates == 1
    twin.step("main", grads)
    state = engine.optimizers["main"].state_dict()["state"][0]
    # Two steps with gradient 1: the first moment is 1 - 0.9^2 after them, not after four.
    assert torch.allclose(state["exp_avg"], torch.full_like(state["exp_avg"], 1 - 0.9**2))


def test_draws_are_counted_alike_whatever_the_verbs_do_inside(net):
    """The third draw of an update is the same whether the first was kept or replayed."""

    def third(replay: bool, sizes: list[int]) -> Tensor:
        engine = build(net)
        engine.begin(7)
        parameters = engine.parameters("main")
        first = engine.inner(squares(net), batches(sizes), parameters, replay=replay)
        engine.hypergradients(first, [torch.ones_like(p) for p in parameters], parameters)
        engine.evaluate(squares(net), [batches(sizes)])
        from metaseq_lm.forward.passes import current_context

        drawn = engine.map(lambda b: current_context().noise.uniform((len(b.x), 2)), batches(sizes))
        return torch.cat(drawn)

    wanted = third(False, [6])
    assert torch.equal(third(True, [6]), wanted) and torch.equal(third(False, [2, 4]), wanted)


def test_a_term_of_an_unknown_kind_is_refused():
    with pytest.raises(MetaseqError, match="'CLOZE_NLL'"):
        check_terms({"mlm": Term(torch.ones(()), None, kind="CLOZE_NLL")}, {})
