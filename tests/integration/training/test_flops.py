"""FLOPs against the closed form, and that counting changes nothing."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from battery import configure, train
from torch.utils.flop_counter import FlopCounterMode

from metaseq_lm.config.groups import NamedParameters
from metaseq_lm.config.optimizers import OptimizerConfig
from metaseq_lm.core.batch import Layout, Term, Terms, TokenBatch
from metaseq_lm.core.config import section
from metaseq_lm.core.registry import ALL, Entry
from metaseq_lm.engine.engine import Engine
from metaseq_lm.models.transformer.encoder import ModernLM
from metaseq_lm.models.transformer.flops_rules import _ModernSizes
from metaseq_lm.runs.flops import LSTMS, Counter, FlopMeter, _shape_signature
from metaseq_lm.training.price import estimate_price


def test_a_linear_layer_costs_what_it_should():
    """Forward 2nio; backward the same for the weight (the input needs no gradient)."""
    layer, x = torch.nn.Linear(7, 5), torch.randn(3, 7)
    meter = FlopMeter()
    for _ in range(4):
        with meter.count([x]):
            layer(x).sum().backward()
    assert meter.total == 4 * (2 * 3 * 7 * 5) * 2
    assert len(meter.known) == 1


def test_signatures_tell_shapes_apart():
    def work(tokens: torch.Tensor) -> dict[str, list[list[TokenBatch]]]:
        return {"s": [[TokenBatch(tokens=tokens)]]}

    assert _shape_signature(work(torch.ones(2, 3))) != _shape_signature(work(torch.ones(3, 2)))
    assert _shape_signature(work(torch.ones(2, 3))) == _shape_signature(work(torch.zeros(2, 3)))


def test_a_masked_lm_run_costs_what_the_sizes_say(moons, tmp_path):
    """16 rows of 34 tokens, 2 layers of width 8: forward by hand, backward twice that."""
    train(configure(moons, tmp_path, ("masked_lm", 0), "trainer.max_update=3", "seed=4"))
    results = json.loads((tmp_path / "results.json").read_text())
    rows, length, width, ffn, vocabulary = 16, 34, 8, 16, 407
    layer = rows * length * (3 * width * width + width * width + 2 * width * ffn)
    attention = 2 * rows * length * length * width
    least = 2 * (2 * (layer + attention) + rows * 5 * width * (width + vocabulary))
    most = 2 * (2 * (layer + attention) + rows * 6 * width * (width + vocabulary))
    # The first layer's input needs a gradient (embeddings), so backward is twice the forward.
    assert 3 * 3 * least <= results["flops"] <= 3 * 3 * most


class Whitened(torch.optim.SGD):
    """Gradient descent whose step also multiplies two square matrices of SIZE rows."""

    SIZE = 50

    def step(self, closure: Any = None) -> None:
        matrix = torch.eye(self.SIZE)
        matrix @ matrix
        super().step()


def whitened(config: OptimizerConfig, parameters: NamedParameters) -> torch.optim.Optimizer:
    return Whitened([p for _, p in parameters], lr=config.lr)


def test_an_update_is_charged_with_what_its_optimizer_computes(moons, tmp_path, monkeypatch):
    """In the run and in its price, where it does not grow with the batch."""
    entry = Entry("whitened", OptimizerConfig, "here.whitened", whitened)
    monkeypatch.setitem(ALL["optimizer"].entries, "whitened", entry)
    spent, prices = {}, {}
    for optimizer in ("sgd", "whitened"):
        more = [f"optimizer={optimizer}", "trainer.max_update=3"]
        folder = tmp_path / optimizer
        train(configure(moons, folder, ("masked_lm", 0), *more))
        spent[optimizer] = json.loads((folder / "results.json").read_text())["flops"]
        config = configure(moons, folder, ("masked_lm", 0), *more)
        prices[optimizer] = [estimate_price(config, divisor) for divisor in (1, 2)]
    step = 2 * Whitened.SIZE**3
    assert spent["whitened"] - spent["sgd"] == 3 * step
    for cheap, dear in zip(prices["sgd"], prices["whitened"], strict=True):
        assert dear.flops - cheap.flops == pytest.approx(step)
        assert dear.first_updates[0] - cheap.first_updates[0] == step


@pytest.mark.parametrize(
    ("case", "is_ruled"),
    [(("causal_lm", 2), True), (("span_corruption", 3), False), (("electra_rtd", 1), False)],
)
def test_flops_by_rule_have_the_steps_of_muon(case, is_ruled, moons, tmp_path):
    """As many as are counted, of the layers of encoder, decoder and generator."""
    spent = {}
    for optimizer in ("adamw", "muon"):
        more = [f"optimizer={optimizer}", "trainer.max_update=3", "task.valid_size=16"]
        folder = tmp_path / optimizer
        train(configure(moons, folder, case, *more))
        spent[optimizer] = json.loads((folder / "results.json").read_text())
    by_rule, counted = (
        spent["muon"][key] - spent["adamw"][key] for key in ("flops_by_rule", "flops")
    )
    assert by_rule == counted > 0
    if is_ruled:  # a causal LM of the modern encoder, all of whose rows are as long
        assert spent["muon"]["flops_by_rule"] == pytest.approx(spent["muon"]["flops"], rel=0.02)


def test_attention_counts_whatever_computes_it():
    """The CPU's fused kernel costs what its two products cost, and backward twice that."""
    q, k, v = (torch.randn(2, 3, size, 8, requires_grad=True) for size in (5, 7, 7))
    fused = FlopMeter()
    with fused.count(q):
        torch.nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()
    unfused = FlopMeter()
    with unfused.count(q):
        (torch.softmax(q @ k.mT / 8**0.5, -1) @ v).sum().backward()
    assert fused.total == unfused.total == 3 * 2 * (2 * 3 * 5 * 7 * 8) * 2


@pytest.mark.parametrize("reach", ["both", "causal", "prefix"])
@pytest.mark.parametrize("recompute", [False, True])
def test_packed_rows_count_attention_of_whole_rows(reach, recompute):
    """As flops_rules.py does, whatever the documents, though a CPU computes less for short ones."""
    torch.manual_seed(1)
    sizes = {"encoder_layers": 3, "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 24}
    config = section("model", _name="modern", **sizes, encoder_attention_heads=2, local_window=8)
    model, tokens = ModernLM(config, 40), torch.randint(5, 40, (4, 32))
    numbers = torch.arange(32) * torch.tensor([2, 3, 4, 7])[:, None] // 32
    padding = (torch.arange(32) >= torch.tensor([32, 30, 28, 32])[:, None]).contiguous()
    spent = set()
    for documents in (None, numbers, torch.arange(32).expand(4, 32) // 4):
        layout = Layout(padding, documents, reach, torch.ones(4, dtype=torch.long))
        batch = TokenBatch(tokens=tokens, layout=layout, sizes={"rows": 4}, rows=np.arange(4))

        def loss(batch: TokenBatch) -> Terms:
            return {"loss": Term(model(batch.tokens, batch.layout).square().sum(), "rows")}

        engine = Engine({}, recompute=recompute)
        with Counter() as counter:
            engine.begin(0)
            engine.gradients(loss, [batch], list(model.parameters()))
        spent.add(counter.total)
    row = _ModernSizes.of(config, 40, 32)
    assert spent == {4 * 3 * (row.blocks() + row.inputs() + row.softmax_head(1.0))}


def test_counting_changes_nothing(moons, tmp_path):
    """A run that counts every update equals one that counts only the first of its shape."""
    case = ("meta_pseudo_label_soft", 0)
    plain = train(configure(moons, tmp_path / "a", case, "trainer.max_update=4"))
    known = FlopMeter.count

    def always(self: FlopMeter, work: object) -> object:
        self.known.clear()
        return known(self, work)

    FlopMeter.count = always  # type: ignore[method-assign,assignment]
    try:
        counted = train(configure(moons, tmp_path / "b", case, "trainer.max_update=4"))
    finally:
        FlopMeter.count = known  # type: ignore[method-assign]
    assert all(torch.equal(plain[n], counted[n]) for n in plain)


def test_lstms_count_whatever_computes_them():
    """oneDNN's kernel is one operation; by formula it costs what torch's own loop does."""
    rows, length, width, cells = 3, 5, 20, 16
    layer = torch.nn.LSTM(width, cells, batch_first=True)
    x = torch.randn(rows, length, width, requires_grad=True)
    found = []
    for enabled in (True, False):
        meter = FlopMeter()
        with torch.backends.mkldnn.flags(enabled=enabled), meter.count(x):
            layer(x)[0].sum().backward()
        found.append(meter.total)
    weights = 4 * cells * (width + cells)
    assert found[0] == 3 * 2 * rows * length * weights
    # The loop has no gradient of the state before the first word.
    assert found[0] - found[1] in (0, 2 * rows * 4 * cells * cells)
    # cuDNN's, by the shapes it is called with.
    shapes = [(4 * cells, width), (4 * cells, cells), (4 * cells,), (4 * cells,)]
    rule = LSTMS[torch.ops.aten._cudnn_rnn]
    assert rule((rows, length, width), shapes, 4, None) == 2 * rows * length * weights


def attend(x: torch.Tensor) -> torch.Tensor:
    """Return something that takes a convolution, attention, matrix products, and an einsum."""
    heads = F.scaled_dot_product_attention(*3 * [x.view(2, 2, 6, 4)])
    seen = F.conv1d(heads.reshape(2, 6, 8), torch.ones(3, 6, 2, dtype=x.dtype))
    return F.linear(seen, torch.ones(5, 7, dtype=x.dtype)).sum() + torch.einsum("ij,kj->", x, x)


def second(x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    (slope,) = torch.autograd.grad(attend(x).pow(2), x, create_graph=True)
    slope.sum().backward()
    return x


@pytest.mark.parametrize("work, train", [(attend, False), (attend, True), (second, True)])
def test_the_counter_agrees_with_torchs(work, train):
    """Also where operations come apart only at the counter: in inference mode."""
    totals = []
    theirs = FlopCounterMode(display=False)
    for counter in (theirs, Counter()):
        with (
            torch.inference_mode(not train),
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        ):
            x = torch.arange(96, dtype=torch.float64).reshape(12, 8).div_(96)
            with counter:
                work(x)  # type: ignore[operator]
        totals.append(counter.total if counter is not theirs else theirs.get_total_flops())
    assert totals[0] == totals[1] > 0


def test_a_choice_of_branches_is_counted():
    """Higher-order operators, as torch counts them: the dearer branch."""
    x = torch.ones(3, 3)
    with torch.no_grad(), Counter() as counter:
        torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x.clone(), (x,))
    assert counter.total == 2 * 27
