"""The encoder-decoder: its equations, padding, and its search against single steps."""

import pytest
import torch
from torch import Tensor

from metaseq_lm.config.models import EncoderDecoderConfig
from metaseq_lm.core.batch import Layout
from metaseq_lm.core.errors import UsageError
from metaseq_lm.models.seq2seq import PRIMARY, Beam, LSTMEncoderDecoder

SIZES = EncoderDecoderConfig(layers=2, embed_dim=5, hidden_dim=8, output_dim=6, dropout=0.3)


@pytest.fixture
def model() -> LSTMEncoderDecoder:
    torch.manual_seed(1)
    net = LSTMEncoderDecoder(SIZES, (9, 7)).double().eval()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return net


def rows(lengths: list[int], width: int) -> tuple[Tensor, Tensor]:
    """Return tokens and padding (B, width)."""
    torch.manual_seed(2)
    tokens = torch.randint(1, 9, (len(lengths), width))
    padding = torch.arange(width) >= torch.tensor(lengths)[:, None]
    return tokens, padding


def test_attention_is_bilinear(model: LSTMEncoderDecoder) -> None:
    """alpha = softmax(h_j W h_t), a = tanh(W_a [c; h]), softmax(W_s a): written out."""
    tokens, padding = rows([4, 2], 4)
    inputs = torch.tensor([[1, 2, 3], [1, 4, 0]])
    memory = model.encode(tokens, Layout(padding))
    states, _ = model.decode(inputs, memory.first)
    head = model.heads[PRIMARY]
    wanted = torch.empty(2, 3, 7, dtype=torch.float64)
    for b in range(2):
        real = memory.states[b][~padding[b]]
        for t in range(3):
            h = states[b, t]
            alpha = torch.softmax(real @ (head.query.weight @ h), 0)
            a = torch.tanh(head.combine.weight @ torch.cat([alpha @ real, h]))
            wanted[b, t] = head.out.weight @ a + head.out.bias
    torch.testing.assert_close(model(tokens, Layout(padding), inputs), wanted)


def test_padding_changes_nothing(model: LSTMEncoderDecoder) -> None:
    tokens, padding = rows([3, 5], 8)
    inputs = torch.tensor([[1, 2, 3], [1, 4, 5]])
    both = model(tokens, Layout(padding), inputs)
    for i, length in enumerate((3, 5)):
        short = tokens[i : i + 1, :length], Layout(padding[i : i + 1, :length])
        torch.testing.assert_close(both[i : i + 1], model(*short, inputs[i : i + 1]))


def test_the_decoder_starts_from_both_ends_of_the_source(model: LSTMEncoderDecoder) -> None:
    """First and last word reach the decoder's first state; so do states and cells of all layers."""
    tokens, padding = rows([5], 5)
    first = model.encode(tokens, Layout(padding)).first
    assert len(first) == 2 and first[0][0].shape == (1, 1, 6) and first[0][1].shape == (1, 1, 8)
    for place in (0, 4):
        other = tokens.clone()
        other[0, place] = tokens[0, place] % 8 + 1
        changed = model.encode(other, Layout(padding)).first
        for (h, c), (g, d) in zip(first, changed):
            assert not torch.equal(h, g) and not torch.equal(c, d)


def test_a_target_word_changes_only_what_follows(model: LSTMEncoderDecoder) -> None:
    tokens, padding = rows([4], 4)
    inputs = torch.tensor([[1, 2, 3, 4]])
    other = inputs.clone()
    other[0, 2] = 6
    one, two = model(tokens, Layout(padding), inputs), model(tokens, Layout(padding), other)
    assert torch.equal(one[:, :2], two[:, :2]) and not torch.isclose(one[:, 2], two[:, 2]).any()


@pytest.mark.parametrize("size", [1, 3, 5])
def test_search_scores_what_teacher_forcing_scores(model: LSTMEncoderDecoder, size: int) -> None:
    """A found row has the log-probability that the model gives it."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=3.0)
    tokens, padding = rows([4, 2, 5, 3, 5, 1, 4, 5] * 4, 5)
    how = Beam(size, start=1, end=2, pad=0, length_penalty=2.0, banned=(0, 1))
    limits = torch.tensor([9, 3, 9, 9, 7, 8, 9, 9] * 4)
    ids, scores = model.translate(tokens, Layout(padding), limits, how)
    inputs = ids.roll(1, dims=1)
    inputs[:, 0] = 1
    log_probs = model(tokens, Layout(padding), inputs).log_softmax(-1)
    each = log_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    lengths = (ids != 0).sum(1)
    assert int(lengths.max()) > 5
    torch.testing.assert_close(how.worth((each * (ids != 0)).sum(1), lengths), scores)


def test_a_wide_beam_is_never_worse(model: LSTMEncoderDecoder) -> None:
    """Six words, at most 3 tokens: 64 hypotheses hold every sequence there is."""
    tokens, padding = rows([4, 2], 4)
    found = []
    for size in (1, 64):
        how = Beam(size, start=1, end=2, pad=0, banned=(0, 1))
        found.append(model.translate(tokens, Layout(padding), torch.tensor([3, 3]), how)[1])
    assert (found[1] >= found[0] - 1e-12).all()
    words = (3, 4, 5, 6)
    every = [(2,), *((a, 2) for a in words), *((a, b, 2) for a in words for b in words)]
    for i in range(2):
        best = max(
            score(model, tokens[i : i + 1], padding[i : i + 1], sequence) for sequence in every
        )
        assert best == pytest.approx(float(found[1][i]), abs=1e-12)


@torch.no_grad()
def score(model: LSTMEncoderDecoder, tokens: Tensor, padding: Tensor, words: tuple) -> float:
    inputs = torch.tensor([[1, *words[:-1]]])
    log_probs = model(tokens, Layout(padding), inputs).log_softmax(-1)[0]
    return sum(float(log_probs[t, word]) for t, word in enumerate(words))


@pytest.mark.parametrize("sizes", [(1, 7, 6), (1, 8, 5), (1, 4, 6)])
def test_sizes_must_fit(sizes: tuple[int, int, int]) -> None:
    layers, cells, width = sizes
    with pytest.raises(UsageError, match="even numbers"):
        EncoderDecoderConfig(layers=layers, hidden_dim=cells, output_dim=width).check()
