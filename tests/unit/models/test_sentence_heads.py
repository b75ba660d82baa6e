"""Heads of sentence predictors and their losses: gradients, means over spans, candidates."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.func import functional_call
from torch.nn import functional as F

from metaseq_lm.config.criterions import BatchSumConfig
from metaseq_lm.config.transformer import ModernConfig, TransformerConfig
from metaseq_lm.core.batch import Layout
from metaseq_lm.criterions.labelled import SentencePrediction
from metaseq_lm.data.labelled.sentence_rows import SentenceBatch
from metaseq_lm.models.transformer.classifiers import SentencePredictor
from metaseq_lm.models.transformer.encoder import SentenceHead, SpanPairHead

WIDTH = 4
SPANS = torch.tensor([[[1, 2], [2, 5]], [[3, 5], [1, 4]], [[0, 1], [4, 5]]])


def states() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(3, 5, WIDTH, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["plain", "pooled", "spans", "regression"])
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    """Of the criterion's sum by all weights of the head and by the states, in float64."""
    outputs = 1 if kind == "regression" else 3
    if kind == "spans":
        head: torch.nn.Module = SpanPairHead(WIDTH, outputs, 0.0)
    else:
        head = SentenceHead(WIDTH, outputs, 0.0, kind == "pooled")
    head.double()
    net = predictor(head, (1.0, 5.0) if kind == "regression" else None)
    targets = torch.tensor([2, 0, 1])
    if kind == "regression":
        targets = torch.tensor([1.5, 5.0, 1.0], dtype=torch.float64)
    names = [name for name, _ in head.named_parameters()]

    def loss(x: Tensor, *weights: Tensor) -> Tensor:
        extra = (SPANS,) if kind == "spans" else ()
        scores = functional_call(head, dict(zip(names, weights)), (x, *extra))
        terms = SentencePrediction(BatchSumConfig(batch_sum=True)).terms(net, scores, targets)
        return next(iter(terms.values())).sum

    inputs = [states(), *(p.detach().clone() for p in head.parameters())]
    assert gradcheck(loss, [x.requires_grad_() for x in inputs], eps=1e-6, atol=1e-7)


def predictor(head: torch.nn.Module, known: tuple[float, float] | None = None) -> SentencePredictor:
    sizes = TransformerConfig(
        encoder_layers=1,
        encoder_embed_dim=WIDTH,
        encoder_ffn_embed_dim=8,
        encoder_attention_heads=2,
        segments=2,
        max_positions=8,
        dropout=0.0,
        attention_dropout=0.0,
    )
    torch.manual_seed(5)
    return SentencePredictor(sizes, 9, 0, head, known).double()


def test_span_head_is_the_literal_mean() -> None:
    head = SpanPairHead(WIDTH, 2, 0.0).double()
    x = states()
    for row in range(3):
        parts = [x[row, 0]] + [x[row, a:b].mean(0) for a, b in SPANS[row].tolist()]
        wanted = F.linear(torch.cat(parts), head.out.weight, head.out.bias)
        torch.testing.assert_close(head(x, SPANS)[row], wanted)


def batch(tokens: Tensor, targets: Tensor, **fields: Tensor) -> SentenceBatch:
    segments, padding, sizes = torch.zeros_like(tokens), tokens == 0, {"rows": len(tokens)}
    return SentenceBatch(
        tokens=tokens,
        segments=segments,
        layout=Layout(padding),
        targets=targets,
        sizes=sizes,
        **fields,
    )


def test_candidates_are_scored_each_alone() -> None:
    """(B, K) scores are those of the K rows one by one; a candidate that is not there has none."""
    net = predictor(SentenceHead(WIDTH, 1, 0.0, False))
    tokens = torch.tensor([[[3, 4, 2, 5], [3, 4, 2, 0]], [[3, 6, 2, 7], [3, 6, 2, 0]]])
    made = batch(tokens, torch.tensor([1, 0]), absent=torch.tensor([[False, False], [False, True]]))
    criterion = SentencePrediction(BatchSumConfig())
    scores = criterion.scores(net, made)
    for row, candidate in ((0, 0), (0, 1), (1, 0)):
        one = tokens[row, candidate][None]
        alone = net(one, Layout(one == 0), torch.zeros_like(one))
        torch.testing.assert_close(scores[row, candidate], alone[0, 0])
    assert scores.shape == (2, 2) and scores[1, 1] == -torch.inf
    terms = criterion(net, made)
    wanted = F.cross_entropy(scores[:1], made.targets[:1], reduction="sum")  # the other is sure
    torch.testing.assert_close(terms["cross_entropy"].sum, wanted)
    terms["cross_entropy"].sum.backward()
    assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)


@pytest.mark.parametrize("batch_sum", [True, False])
def test_the_sum_is_of_training_only(batch_sum: bool) -> None:
    net = predictor(SentenceHead(WIDTH, 2, 0.0, False))
    made = batch(torch.tensor([[3, 4, 2], [3, 5, 2]]), torch.tensor([1, 0]))
    criterion = SentencePrediction(BatchSumConfig(batch_sum))
    assert criterion(net, made)["cross_entropy"].is_summed == batch_sum
    assert not criterion(net.eval(), made)["cross_entropy"].is_summed


def test_real_values_are_scaled_by_the_range_of_training() -> None:
    net = predictor(SentenceHead(WIDTH, 1, 0.0, False), (1.0, 5.0))
    labels = torch.tensor([1.0, 3.0, 5.0], dtype=torch.float64)
    assert net.scaled(labels).tolist() == [0.0, 0.4, 0.8]
    torch.testing.assert_close(net.unscaled(net.scaled(labels)), labels)
    scores = torch.tensor([[0.5], [0.4], [0.6]], dtype=torch.float64)
    terms = SentencePrediction(BatchSumConfig())(net, batch(torch.tensor([[3, 4, 2]] * 3), labels))
    assert set(terms) == {"squared_error"}
    found = SentencePrediction(BatchSumConfig()).terms(net, scores, labels)["squared_error"].sum
    assert found.item() == pytest.approx(0.25 + 0.0 + 0.04)
    assert "label_range" in net.state_dict()


def test_dropout_before_the_pooler_too() -> None:
    """Of states of ones, zeros and 1 / (1 - p) reach the tanh layer, or all ones."""
    for twice in (False, True):
        head = SentenceHead(64, 2, 0.5, True, pooler_dropout=twice)
        seen = []
        assert head.pooler is not None
        head.pooler.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        head(torch.ones(8, 3, 64))
        assert set(seen[0].unique().tolist()) == ({0.0, 2.0} if twice else {1.0})


# ---------------------------------------------------------------- causal encoders


def causal_net(spans: bool = False) -> SentencePredictor:
    """A predictor with rotary positions, to which only distances matter."""
    torch.manual_seed(2)
    sizes = {"encoder_layers": 2, "encoder_embed_dim": 8, "encoder_ffn_embed_dim": 12}
    config = ModernConfig(**sizes, encoder_attention_heads=2)
    head = SpanPairHead(8, 3, 0.0) if spans else SentenceHead(8, 3, 0.0, pooled=True)
    net = SentencePredictor(config, 20, 0, head).double().eval()
    net.is_causal = True
    return net


def padded(rows: list[list[int]], left: bool) -> tuple[Tensor, Layout]:
    """Return rows with their padding on one side, and their layout."""
    longest = max(map(len, rows))
    full = [
        [0] * (longest - len(row)) + row if left else row + [0] * (longest - len(row))
        for row in rows
    ]
    tokens = torch.tensor(full)
    return tokens, Layout(tokens == 0)


ROWS = [[2, 7, 8, 3], [2, 9, 3], [2, 4, 5, 6, 11, 12, 3]]


@pytest.mark.parametrize("left", [True, False])
def test_a_causal_encoder_is_read_at_the_last_token(left: bool) -> None:
    """Each row's scores are those of the row alone, whichever side its padding is on."""
    net = causal_net()
    tokens, layout = padded(ROWS, left)
    scores = net(tokens, layout, None)
    for row, score in zip(ROWS, scores):
        alone = net(torch.tensor([row]), Layout(), None)[0]
        torch.testing.assert_close(score, alone, rtol=0, atol=1e-12)
        states = net.encoder(torch.tensor([row]), Layout(reach="causal"))
        expected = net.heads["sentence"](states[:, -1:])[0]
        torch.testing.assert_close(alone, expected, rtol=0, atol=1e-12)


def test_every_token_counts_in_a_causal_row() -> None:
    """At the first token none of the later ones would."""
    net = causal_net()
    scores = [net(torch.tensor([[2, *words, 3]]), Layout(), None) for words in ([7, 8], [9, 8])]
    assert (scores[0] - scores[1]).abs().max() > 1e-6
    net.is_causal = False
    two_sided = net(torch.tensor([[2, 7, 8, 3]]), Layout(), None)
    assert (scores[0] - two_sided).abs().max() > 1e-6


def test_spans_in_a_causal_row() -> None:
    """The last state takes the place of the first beside the means of the spans."""
    net, spans = causal_net(spans=True), torch.tensor([[[1, 2], [2, 3]]])
    tokens = torch.tensor([ROWS[0]])
    states = net.encoder(tokens, Layout(reach="causal"))
    parts = [states[:, -1], states[:, 1], states[:, 2]]
    expected = net.heads["sentence"].out(torch.cat(parts, -1))
    torch.testing.assert_close(net(tokens, Layout(), None, spans), expected)


def test_the_last_token_of_candidates() -> None:
    tokens = torch.tensor([[[2, 5, 0], [0, 2, 3]], [[2, 5, 3], [2, 0, 0]]])
    assert Layout(tokens == 0).last(tokens).tolist() == [[1, 2], [2, 0]]
    assert Layout().last(tokens).tolist() == [[2, 2], [2, 2]]
