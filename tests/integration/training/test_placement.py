"""Parameters that rest as shards: what each process holds, and that nothing else changes."""

import gc
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import battery
import pytest
import torch
from optimizers import make_optimizer
from real_runs import on_replicas
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from metaseq_lm.config.transformer import TransformerConfig
from metaseq_lm.core.batch import Batch, Term
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.distributed import process_group, shards, vectors
from metaseq_lm.distributed.gathering import ShardedWeights, UnitPool, _Gathered
from metaseq_lm.distributed.placement import build_mesh, build_placement
from metaseq_lm.distributed.shards import gather_whole
from metaseq_lm.engine.engine import Engine
from metaseq_lm.models.transformer.encoder import TransformerLM
from metaseq_lm.training.run import TrainingRun

ADAMW = {"_name": "adamw", "lr": 0.1, "clip_norm": 1.0}
CONSTANT = {"_name": "constant", "warmup_updates": 1}


class Block(nn.Module):
    """A layer with a number and a matrix that is used twice, transposed and not."""

    is_gathered_alone = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.map = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.norm(x + self.scale * torch.tanh(self.map(x)) @ self.map.weight)
        return states


class Net(nn.Module):
    """A tied table, an LSTM, which keeps a list of its weights, a number, and rows that 2 and 3 do
    not divide.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.lstm = nn.LSTM(5, 5, batch_first=True)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.single = nn.Parameter(torch.ones(1, 5))
        self.unused = nn.Linear(5, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.shared = nn.ModuleList([Block(), Block()])
        self.shared[1].load_state_dict(self.shared[0].state_dict())
        for name, module in self.shared[0].named_children():
            setattr(self.shared[1], name, module)
        self.shared[1].scale = self.shared[0].scale
        self.order = [0, 1, 2, 1, 3]  # one is used twice, one not at all
        self.head = nn.Linear(5, 7)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.table(tokens) * self.scale + self.single)
        for number in self.order:
            states = self.blocks[number](states)
        states = self.shared[1](self.shared[0](states))
        return self.head(states)


def build(
    parallel: str, by_block: bool = True, second_derivatives: bool = False
) -> tuple[Net, Engine]:
    """Return a net in float64 and its engine."""
    torch.manual_seed(0)
    model = Net().double()
    mesh = build_mesh(parallel, "cpu")
    placement = build_placement(model, mesh, by_block, second_derivatives)
    optimizer = make_optimizer(model.named_parameters(), ADAMW, CONSTANT)
    return model, Engine({"main": optimizer}, precision="fp64", placement=placement)


@dataclass(kw_only=True)
class TokenBatch(Batch):
    """Tokens (B, S)."""

    tokens: Tensor


def batches(seed: int, rank: int, world: int) -> list[TokenBatch]:
    """Return this replica's rows of a global batch of 12, as two micro-batches."""
    tokens = torch.randint(7, (12, 4), generator=torch.Generator().manual_seed(seed))
    parts = tokens[rank::world].chunk(2)
    return [TokenBatch(tokens=part, sizes={"tokens": part.numel()}) for part in parts]


def results(
    parallel: str, rank: int, world: int, by_block: bool = True, second_derivatives: bool = True
) -> dict[str, list[Tensor]]:
    """Return what steps, virtual steps and hypergradients come to, whole."""
    model, engine = build(parallel, by_block, second_derivatives)

    def loss_of(batch: TokenBatch) -> dict[str, Term]:
        logits = model(batch.tokens).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, batch.tokens.flatten(), reduction="sum")
        return {"tokens": Term(loss, "tokens")}

    def present(vector: Sequence[Tensor | None]) -> list[Tensor]:
        return [v.clone() for v in gather_whole([g for g in vector if g is not None])]

    parameters, out = engine.parameters("main"), {}
    for update in range(3):
        engine.begin(update)
        grads, logs = engine.gradients(loss_of, batches(update, rank, world), parameters)
        assert grads[names(model).index("unused.weight")] is None
        out[f"numbers {update}"] = [
            torch.as_tensor(logs["loss"]),
            vectors.norm(grads),
            vectors.dot(grads, vectors.scale(grads, 3.0)),
            vectors.norm([vectors.flat(grads)]),
            vectors.cosine(grads, vectors.add(grads, list(parameters), 0.1)),
        ]
        assert engine.step("main", grads)
    for replay in (False, True) if second_derivatives else ():
        inner = engine.inner(loss_of, batches(7, rank, world)[:1], parameters, replay=replay)
        query, _ = engine.gradients(loss_of, batches(8, rank, world), parameters)
        out[f"hypergradients {replay}"] = present(engine.hypergradients(inner, query, parameters))
    if second_derivatives:
        inner = engine.inner(loss_of, batches(7, rank, world)[:1], parameters)
        with engine.restoring("main"):  # the natural order of a bilevel step
            engine.move("main", inner.value, -0.1)
            query, _ = engine.gradients(loss_of, batches(8, rank, world), parameters)
        out["bilevel"] = present(engine.hypergradients(inner, query, parameters))
    query, _ = engine.gradients(loss_of, batches(8, rank, world), parameters)
    with engine.restoring("main"):
        engine.move("main", query, -0.1)
        moved, _ = engine.gradients(loss_of, batches(9, rank, world), parameters)
        assert engine.step("main", moved)
        out["virtual"] = present(parameters)
        # A step inside of a pass is seen by it.
        with engine.whole():
            assert engine.step("main", query)
            seen = [p.detach().clone() for p in model.parameters()]
        assert all(map(torch.equal, seen, present(parameters)))
    out["parameters"] = present(parameters)
    out["moments"] = engine.optimizers["main"].slots("exp_avg")
    held = sum(vectors.local_part(p).numel() for p in parameters)
    if parallel == "shard":
        assert held <= sum(p.numel() for p in parameters) / world + 40
        check_state(engine)
    return out


def names(model: nn.Module) -> list[str]:
    """Return the names of the parameters, a tied one once."""
    return [name for name, _ in model.named_parameters()]


def check_state(engine: Engine) -> None:
    """Whole moments are saved, and each process takes its rows of them back."""
    optimizer = engine.optimizers["main"]
    saved = optimizer.state_dict()
    shapes = [tuple(p.shape) for p in optimizer.parameters]
    assert {tuple(s["exp_avg"].shape) for s in saved["state"].values()} <= set(shapes)
    before = [m.clone() for m in optimizer.slots("exp_avg_sq")]
    optimizer.load_state_dict({"updates": 3, "state": {}})
    assert all(not m.any() for m in optimizer.slots("exp_avg_sq"))
    optimizer.load_state_dict(saved)
    assert all(map(torch.equal, before, optimizer.slots("exp_avg_sq")))


def compare(parallel: str) -> None:
    """As one of several replicas, compare a placement with one process."""
    process_group.initialise("cpu", 60)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    rank, world = process_group.rank(), process_group.world_size()
    reference = results("replicate", rank, world)
    for by_block, second in itertools.product((True, False), (False, True)):
        shards = results(parallel, rank, world, by_block, second)
        assert second == ("bilevel" in shards)
        for name, values in shards.items():
            for a, b in zip(reference[name], values, strict=True):
                assert not isinstance(b, DTensor)
                assert torch.allclose(a, b, rtol=0, atol=1e-12), name
    process_group.finish()


@pytest.mark.parametrize("parallel, world", [("shard", 2), ("shard", 3), ("hybrid", 4)])
def test_shards_give_the_numbers_of_whole_parameters(parallel: str, world: int) -> None:
    on_replicas(world, compare, parallel)


def loss_on(model: Net, batch: TokenBatch) -> dict[str, Term]:
    """Return a loss that depends on all weights that are used."""
    return {"tokens": Term(model(batch.tokens).square().sum(), "tokens")}


def gather_in_turn() -> None:
    """As one of two replicas, count the blocks with memory in a pass; then run them in another
    order.
    """
    process_group.initialise("cpu", 60)
    rank = process_group.rank()
    model, engine = build("shard")
    parameters, seen = engine.parameters("main"), []
    with engine.whole():
        pass
    full = [engine.placement.full[id(block.map.weight)] for block in model.blocks]

    def count(*_: object) -> None:
        seen.append(sum(weight.untyped_storage().nbytes() > 0 for weight in full))

    def loss(batch: TokenBatch) -> dict[str, Term]:
        return loss_on(model, batch)

    for block in model.blocks:
        block.map.register_forward_hook(count)
        block.map.register_full_backward_hook(count)
    # Of unequal numbers of micro-batches, too.
    for rows in (batches(1, rank, 2), batches(1, rank, 2)[rank:]):
        seen.clear()
        engine.gradients(loss, rows, parameters)
        assert len(seen) == 2 * (5 + 5) and max(seen) <= 2  # one is gathered ahead
    passes = [batches(1, rank, 2), batches(2, rank, 2), batches(3, rank, 2)[rank:]]
    seen.clear()
    logs = engine.evaluate(loss, passes)
    assert len(seen) == 5 * (4 + len(passes[2]))
    assert max(seen[: 4 * 5]) == 1 and min(seen[4 * 5 :]) == 5  # the last are whole at once
    copy, other = build("shard", by_block=False)
    assert logs == other.evaluate(lambda b: loss_on(copy, b), passes)
    assert engine.map(lambda b: model(b.tokens).sum().item(), passes[0]) == other.map(
        lambda b: copy(b.tokens).sum().item(), passes[0]
    )
    assert not any(p.untyped_storage().nbytes() for p in full)
    model.order = copy.order = [1, 0, 2, 1, 3] if rank else [0, 1, 2, 1, 3]
    for verb in (engine.gradients, lambda *args: engine.evaluate(args[0], [args[1]])):
        with pytest.raises(MetaseqError, match=r"engine\.gather=model"):
            verb(loss, batches(1, rank, 2), parameters)
    other.gradients(lambda b: loss_on(copy, b), batches(1, rank, 2), other.parameters("main"))
    with pytest.raises(UsageError, match="takes_second_derivatives"):
        engine.inner(loss, batches(1, rank, 2), parameters)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    process_group.finish()


def test_blocks_are_gathered_in_turn() -> None:
    on_replicas(2, gather_in_turn)


def train_one_part() -> None:
    """As one of two replicas, take gradients of some parameters only, and of none."""
    process_group.initialise("cpu", 60)
    rank = process_group.rank()
    outcomes = []
    for parallel in ("replicate", "shard"):
        model, engine = build(parallel)
        chosen = [model.blocks[1].map.weight, model.blocks[1].scale, model.single]
        loss = partial(loss_on, model)
        part, _ = engine.gradients(loss, batches(1, rank, 2), chosen)
        everything, _ = engine.gradients(loss, batches(1, rank, 2), engine.parameters("main"))
        constant = {"tokens": Term(torch.zeros((), dtype=torch.float64), "tokens")}
        nothing, logs = engine.gradients(lambda b: constant, batches(1, rank, 2), chosen)
        assert nothing == [None] * 3 and float(logs["loss"]) == 0
        with engine.whole():
            inside, _ = engine.gradients(loss, batches(1, rank, 2), chosen)
        present = [g for g in (*part, *everything, *inside) if g is not None]
        outcomes.append([tensor.clone() for tensor in gather_whole(present)])
        assert all(p.requires_grad and p.grad is None for p in model.parameters())
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    process_group.finish()


def test_gradients_of_some_parameters() -> None:
    on_replicas(2, train_one_part)


def use_a_parameter_on_one_replica(older: bool) -> None:
    """As one of two replicas, of which the first alone uses the parameter whose bucket is the
    first.
    """
    if older:
        del FSDPModule.set_reduce_scatter_unused_params
    process_group.initialise("cpu", 30)
    shards.BUCKET_BYTES = 1
    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(4))}).double()
    model["last"] = nn.Linear(5, 5, bias=False).double()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows = torch.randn(2, 3, 5, dtype=torch.float64)

    def loss_on(net: nn.ModuleDict, rank: int) -> Tensor:
        states = rows[rank]
        for block in net["blocks"]:
            states = block(states)
        return (net["last"](states) if rank == 0 else states).pow(3).sum()

    placement = build_placement(model, build_mesh("shard", "cpu"))
    optimizer = make_optimizer(model.named_parameters(), ADAMW, CONSTANT)
    engine = Engine({"main": optimizer}, precision="fp64", placement=placement)
    rank = process_group.rank()
    batch = TokenBatch(tokens=rows[rank], sizes={"tokens": 3})
    for update in range(2):
        engine.begin(update)
        grads, _ = engine.gradients(
            lambda b: {"all": Term(loss_on(model, rank), "tokens")},
            [batch],
            engine.parameters("main"),
        )
        summed = gather_whole(grads)
    twin = nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(4))}).double()
    twin["last"] = nn.Linear(5, 5, bias=False).double()
    twin.load_state_dict(weights)
    ((loss_on(twin, 0) + loss_on(twin, 1)) / 6).backward()
    for grad, parameter in zip(summed, twin.parameters(), strict=True):
        assert grad is not None and parameter.grad is not None
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-12, atol=1e-12)
    process_group.finish()


@pytest.mark.parametrize("older", [False, True])
def test_a_parameter_that_one_replica_uses_does_not_block_layers(older: bool) -> None:
    """Also with a torch that sums only the gradients that a replica has."""
    on_replicas(2, use_a_parameter_on_one_replica, older, seconds=120)


def hypergradients(
    model: Net, engine: Engine, inner_rows: list[TokenBatch], rows: list[TokenBatch]
) -> list[Tensor]:
    """Return an inner gradient and its products with another gradient, whole."""
    parameters = engine.parameters("main")
    engine.begin(1)
    inner = engine.inner(lambda b: loss_on(model, b), inner_rows, parameters)
    query, _ = engine.gradients(lambda b: loss_on(model, b), rows, parameters)
    products = engine.hypergradients(inner, query, parameters)
    present = [v for v in (*inner.value, *products) if v is not None]
    return [tensor.clone() for tensor in gather_whole(present)]


def agree_on_graphs() -> None:
    """As one of two replicas, take second derivatives of unequal micro-batches, and of graphs that
    differ.
    """
    process_group.initialise("cpu", 60)
    rank = process_group.rank()
    for counts in ([2, 0], [1, 2]):
        rows = batches(1, rank, 2)[: counts[rank]], batches(2, rank, 2)[: counts[1 - rank]]
        expected = hypergradients(*build("replicate"), *rows)
        for by_block in (True, False):
            products = hypergradients(*build("shard", by_block, True), *rows)
            for a, b in zip(expected, products, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    rows = batches(1, rank, 2)[:1], batches(2, rank, 2)[:1]
    orders: list[tuple[list[int], list[int]]] = [
        ([0, 1, 2, 1, 3], [1, 0, 2, 1, 3]),
        ([0, 1], [0, 1, 2]),
        ([0, 1, 2], [0, 1]),
    ]
    for order in orders:
        (model, engine), (copy, at_once), (plain, reference) = (
            build("shard", True, True),
            build("shard", False, True),
            build("replicate"),
        )
        model.order = copy.order = plain.order = order[rank]
        with pytest.raises(MetaseqError, match=r"engine\.gather=model"):
            hypergradients(model, engine, *rows)
        products = hypergradients(copy, at_once, *rows)
        for a, b in zip(hypergradients(plain, reference, *rows), products, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    process_group.finish()


def test_second_derivatives_need_equal_graphs_or_one_gather() -> None:
    """A difference is an error, not a wait without end or a wrong sum."""
    on_replicas(2, agree_on_graphs)


def gather_in_the_graph() -> None:
    """As one of two replicas, note which full weights exist in passes of second derivatives."""
    process_group.initialise("cpu", 60)
    rank = process_group.rank()
    model, engine = build("shard", second_derivatives=True)
    pool, parameters = engine.placement.pool, engine.parameters("main")
    storages: list[tuple[StorageWeakRef, int]] = []
    gathered: list[int] = []
    gather = UnitPool._gather

    def weights_in_memory() -> int:
        return sum(size for storage, size in storages if not storage.expired())

    def noted(self: UnitPool, weights: ShardedWeights, number: int) -> _Gathered:
        is_new = (id(weights), number) not in self.gathered
        result = gather(self, weights, number)
        if is_new:
            gathered.append(number)
            new = [value.untyped_storage() for value in result.values]
            storages.extend((StorageWeakRef(storage), storage.nbytes()) for storage in new)
            assert weights_in_memory() <= pool.most
        return result

    patch = pytest.MonkeyPatch()
    patch.setattr(UnitPool, "_gather", noted)
    engine.begin(1)
    gc.disable()
    inner = engine.inner(lambda b: loss_on(model, b), batches(1, rank, 2)[:1], parameters)
    assert gathered and inner.graph is not None
    assert weights_in_memory() == 0  # the graph has none
    assert all(
        v is None or v.shape == vectors.local_part(p).shape for v, p in zip(inner.graph, parameters)
    )
    forward = len(gathered)
    engine.hypergradients(inner, inner.value, parameters)
    assert weights_in_memory() == 0 and len(gathered) < 2 * forward
    used = {id(shard) for number in gathered for shard in pool.shards[number]}
    assert {name for name, p in model.named_parameters() if id(p) not in used} == {
        *(f"unused.{name}" for name, _ in model.unused.named_parameters()),
        *(f"blocks.4.{name}" for name, _ in model.blocks[4].named_parameters()),
    }
    patch.undo()
    process_group.finish()


def test_graphs_keep_no_gathered_weights() -> None:
    on_replicas(2, gather_in_the_graph)


WIDE = TransformerConfig(
    encoder_layers=3, encoder_embed_dim=64, encoder_ffn_embed_dim=128, max_positions=8
)


def lower_precision() -> None:
    """As one of two replicas, compare shards under autocast, and sums in bf16, with whole ones."""
    process_group.initialise("cpu", 60)
    rank = process_group.rank()

    def gradients(
        parallel: str, sums: str = "fp32", full: bool = False, count: int = 1, by_block: bool = True
    ) -> list[Tensor]:
        torch.manual_seed(0)
        model = TransformerLM(WIDE, 40)
        mesh = build_mesh(parallel, "cpu")
        placement = build_placement(model, mesh, by_block, full, sums == "bf16")
        optimizer = make_optimizer(model.named_parameters(), ADAMW, CONSTANT)
        engine = Engine(
            {"main": optimizer}, precision="bf16", placement=placement, reduce_precision=sums
        )
        model.eval()  # no dropout

        def loss(batch: TokenBatch) -> dict[str, Term]:
            return {"tokens": Term(model(batch.tokens).float().square().sum(), "tokens")}

        parameters, rows = engine.parameters("main"), batches(1, rank, 2)[:count]
        grads, _ = engine.gradients(loss, rows, parameters, full_precision=full)
        if full:
            inner = engine.inner(loss, rows, parameters, replay=True)
            grads = engine.hypergradients(inner, grads, parameters)
        assert all(g is not None and g.dtype == torch.float32 for g in grads)
        return gather_whole(grads)

    def same(a: list[Tensor], b: list[Tensor]) -> bool:
        return all(map(torch.equal, a, b))

    def near(a: list[Tensor], b: list[Tensor], tolerance: float) -> bool:
        pairs = zip(a, b, strict=True)
        return all((x - y).norm() <= tolerance * y.norm() for x, y in pairs)

    exact = gradients("replicate", full=True)
    assert near(gradients("shard", full=True), exact, 1e-5)
    for count in (1, 2):
        reference = gradients("replicate", count=count)
        for by_block in (True, False):
            assert same(gradients("shard", count=count, by_block=by_block), reference)
    whole_sums = gradients("replicate")
    assert not same(whole_sums, exact)
    for parallel in ("replicate", "shard"):
        rounded = gradients(parallel, "bf16")
        assert near(rounded, whole_sums, 1e-2) and not same(rounded, whole_sums)
        assert same(gradients(parallel, "bf16", full=True), gradients(parallel, full=True))
    process_group.finish()


def test_lower_precision() -> None:
    """Sharded and whole parameters have the same gradients under autocast to the last bit."""
    on_replicas(2, lower_precision)


def test_sums_in_bf16_are_refused_in_fp64(moons: Path, tmp_path: Path) -> None:
    more = ["engine.precision=fp64", "engine.reduce_precision=bf16"]
    with pytest.raises(UsageError, match=r"reduce_precision=bf16 .* engine\.precision=fp64"):
        TrainingRun(battery.configure(moons, tmp_path, ("masked_lm", 0), *more))


class Gathers(TorchDispatchMode):
    """Notes the collectives that operations on DTensors call by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        if "functional" in op.namespace:
            self.names.append(op.name())
        return op(*args, **(kwargs or {}))


def use_shards_only() -> None:
    """As one of two replicas, see that DTensors gather nothing by themselves, and that nothing
    stays whole.
    """
    process_group.initialise("cpu", 60)
    rank = process_group.rank()
    model, engine = build("shard")
    parameters = engine.parameters("main")

    full = engine.placement.full.items()
    rows = {id(p): p for p in parameters if p.dim()}

    def loss(batch: TokenBatch) -> dict[str, Term]:
        assert any(weight.untyped_storage().nbytes() for n, weight in full if n in rows)
        return loss_on(model, batch)

    def update(number: int) -> None:
        engine.begin(number)
        grads, _ = engine.gradients(loss, batches(number, rank, 2), parameters)
        assert engine.step("main", grads)

    update(0)
    assert not any(weight.untyped_storage().nbytes() for n, weight in full if n in rows)
    assert not any(weight.grad is not None for _, weight in full)
    with Gathers() as gathers:
        _ = model.table.weight[0]
        assert gathers.names
        gathers.names.clear()
        update(1)
    assert not gathers.names
    process_group.finish()


def test_a_pass_leaves_only_shards_behind() -> None:
    on_replicas(2, use_shards_only)


def refuse_uneven_nodes(sizes: list[int]) -> None:
    """As one of the replicas of nodes of these sizes, ask for a replica on each node."""
    process_group.initialise("cpu", 60)
    size = [size for size in sizes for _ in range(size)][process_group.rank()]
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    with pytest.raises(UsageError, match=f"{sum(sizes)} in all and {size} on this node"):
        build_mesh("hybrid", "cpu")
    process_group.finish()


@pytest.mark.parametrize("sizes", [[2, 1], [2, 1, 1]])
def test_hybrid_needs_equal_nodes(sizes: list[int]) -> None:
    on_replicas(sum(sizes), refuse_uneven_nodes, sizes)


def test_one_process_has_whole_parameters() -> None:
    model, engine = build("shard")
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    with engine.whole(write=True):
        pass
