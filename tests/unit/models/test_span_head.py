"""The span heads and their loss: by hand, by finite differences, and masked positions."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from metaseq_lm.config.criterions import BatchSumConfig
from metaseq_lm.config.transformer import TransformerConfig
from metaseq_lm.criterions.labelled import SquadCriterion
from metaseq_lm.data.squad.windows import AnswerBatch
from metaseq_lm.models.transformer.span_head import (
    SpanHead,
    SpanModel,
    _AnswerabilityHead,
    _JointSpanHead,
)

WIDTH, ROWS, LENGTH = 4, 3, 7


class Heads(nn.Module):
    """What the criterion needs of a model, without encoder."""

    def __init__(self, joint: bool, answerability: bool, hidden: int = 5) -> None:
        super().__init__()
        span = _JointSpanHead(WIDTH, hidden) if joint else SpanHead(WIDTH)
        self.heads = nn.ModuleDict({"span": span})
        if answerability:
            self.heads["answerability"] = _AnswerabilityHead(WIDTH, hidden)
        draw = torch.Generator().manual_seed(3)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=draw, dtype=torch.float64)


@pytest.fixture
def batch() -> AnswerBatch:
    """Three rows: an answer, an impossible question, a window without the answer."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    mask[:, 1:3] = False
    mask[1, 5:] = False
    return AnswerBatch(
        tokens=torch.zeros(ROWS, LENGTH, dtype=torch.long),
        answer_mask=mask,
        starts=torch.tensor([4, 0, 0]),
        ends=torch.tensor([6, 0, 0]),
        impossible=torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64),
    )


@pytest.fixture
def states() -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, LENGTH, WIDTH, generator=draw, dtype=torch.float64)


def probabilities(scores: list[float], mask: list[bool]) -> list[float]:
    weights = [math.exp(s) * m for s, m in zip(scores, mask)]
    return [w / sum(weights) for w in weights]


def test_loss_by_hand(batch: AnswerBatch, states: Tensor) -> None:
    """(CE of start + CE of end given the gold start) / 2, and 0.5 BCE; sums in training."""
    model = Heads(joint=True, answerability=True)
    span, answerable = model.heads["span"], model.heads["answerability"]
    spans, wrong = 0.0, 0.0
    for row in range(ROWS):
        x, mask = states[row], batch.answer_mask[row].tolist()
        gold, last = int(batch.starts[row]), int(batch.ends[row])
        starts = probabilities([span.start(x[j]).item() for j in range(LENGTH)], mask)
        pairs = [torch.cat([x[gold], x[j]]) for j in range(LENGTH)]
        ends = probabilities([span.end(F.gelu(span.end_dense(p))).item() for p in pairs], mask)
        spans -= (math.log(starts[gold]) + math.log(ends[last])) / 2
        mixed = sum(p * x[j] for j, p in enumerate(starts))
        logit = answerable.out(F.gelu(answerable.dense(torch.cat([x[0], mixed])))).item()
        sure = 1 / (1 + math.exp(-logit))
        wrong -= math.log(sure if batch.impossible[row] else 1 - sure)
    terms = SquadCriterion(BatchSumConfig()).terms(model, states, batch)
    assert terms["span"].sum.item() == pytest.approx(spans, rel=1e-12)
    assert terms["answerability"].sum.item() == pytest.approx(wrong, rel=1e-12)
    assert (terms["span"].weight, terms["answerability"].weight) == (1.0, 0.5)
    assert {(term.per, term.is_summed) for term in terms.values()} == {("rows", True)}
    mean = SquadCriterion(BatchSumConfig(batch_sum=False))
    assert not mean.terms(model, states, batch)["span"].is_summed
    assert not SquadCriterion(BatchSumConfig()).terms(model.eval(), states, batch)["span"].is_summed


@pytest.mark.parametrize("answerability", [True, False])
@pytest.mark.parametrize("joint", [True, False])
def test_gradient(batch: AnswerBatch, states: Tensor, joint: bool, answerability: bool) -> None:
    """All parameters and states, through the start probabilities too, in float64."""
    model = Heads(joint, answerability)
    names = [name for name, _ in model.named_parameters()]
    weights = [p.detach().clone().requires_grad_() for p in model.parameters()]

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            terms = SquadCriterion(BatchSumConfig()).terms(self.model, x, batch)
            return sum(t.sum * t.weight for t in terms.values())

    loss = Loss()

    def function(x: Tensor, *values: Tensor) -> Tensor:
        named = {f"model.{name}": value for name, value in zip(names, values)}
        return functional_call(loss, named, (x,))

    x = states.clone().requires_grad_()
    assert torch.autograd.gradcheck(function, (x, *weights), eps=1e-6, atol=1e-7)


def test_answerability_moves_the_start_head(batch: AnswerBatch, states: Tensor) -> None:
    model = Heads(joint=True, answerability=True)
    terms = SquadCriterion(BatchSumConfig()).terms(model, states, batch)
    terms["answerability"].sum.backward()
    assert model.heads["span"].start.weight.grad.abs().max() > 1e-6


@pytest.mark.parametrize("size", [3, LENGTH, 50])
@pytest.mark.parametrize("joint", [True, False])
def test_beam(batch: AnswerBatch, states: Tensor, joint: bool, size: int) -> None:
    """The best starts in order, for each the best ends given it; scores as in training."""
    head = Heads(joint, False).heads["span"]
    mask = batch.answer_mask
    beam = head.beam(states, mask, size)
    size = min(size, LENGTH)
    assert beam.starts.shape == (ROWS, size) and beam.ends.shape == (ROWS, size, size)
    for row in range(ROWS):
        x, m = states[row : row + 1], mask[row : row + 1]

        def scores(start: int) -> tuple[Tensor, Tensor]:
            starts, ends = head(x, m, torch.tensor([start]))
            return (starts.log_softmax(-1), ends.log_softmax(-1)) if joint else (starts, ends)

        order = scores(0)[0][0].argsort(descending=True)[:size].tolist()
        assert beam.starts[row].tolist() == order
        for k, start in enumerate(order):
            starts, ends = scores(start)
            assert beam.start_scores[row, k].item() == pytest.approx(starts[0, start].item())
            best = ends[0].argsort(descending=True)[:size]
            assert beam.ends[row, k].tolist() == best.tolist()
            assert beam.end_scores[row, k].tolist() == pytest.approx(ends[0, best].tolist())
        starts, ends = scores(0)
        assert beam.null[row].item() == pytest.approx((starts[0, 0] + ends[0, 0]).item())


@pytest.mark.parametrize("joint", [True, False])
def test_masked_positions_are_never_chosen(batch: AnswerBatch, states: Tensor, joint: bool) -> None:
    """However much the head would like them, while there is another."""
    mask = batch.answer_mask
    eager = torch.where(mask.unsqueeze(-1), states, 30 * states)
    beam = Heads(joint, False).heads["span"].beam(eager, mask, 3)
    for row in range(ROWS):
        assert mask[row][beam.starts[row]].all() and mask[row][beam.ends[row]].all()


def test_the_model_and_its_names() -> None:
    """encoder.* and heads.*; Glorot for the heads where ELECTRA's initialisation is asked for."""
    config = TransformerConfig(
        encoder_layers=1, encoder_embed_dim=8, encoder_ffn_embed_dim=8, encoder_attention_heads=2
    )
    config.init, config.segments = "truncated_normal", 2
    model = SpanModel(config, 11)
    assert {name.split(".")[0] for name in model.state_dict()} == {"encoder", "heads"}
    assert model.heads["span"].end_dense.weight.shape == (512, 16)
    assert model.heads["span"].end_dense.weight.std().item() == pytest.approx(
        math.sqrt(2 / (512 + 16)), rel=0.05
    )
    plain = SpanModel(config, 11, joint=False, answerability=False)
    assert sorted(plain.heads) == ["span"] and plain.heads["span"].out.weight.shape == (2, 8)
    tokens = torch.tensor([[3, 5, 2, 6, 7, 2]])
    mask = torch.tensor([[True, False, False, True, True, True]])
    beam = model.eval().best_spans(model(tokens), mask, 2)
    x = model(tokens)
    starts = model.heads["span"].start_logits(x, mask)
    assert torch.equal(beam.null, model.heads["answerability"](x, starts))
