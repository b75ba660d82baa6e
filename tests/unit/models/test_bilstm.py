"""The language model of LSTMs: what each direction sees, padding, gradients, its way into
fine-tuning.
"""

import pytest
import torch
from torch import Tensor, nn

from metaseq_lm.config.models import BiLSTMConfig
from metaseq_lm.core.batch import Layout
from metaseq_lm.core.errors import UsageError
from metaseq_lm.forward.passes import ForwardContext, Noise, use_context
from metaseq_lm.models.bilstm import BiLSTM, BiLSTMLM, reverse

SIZES = BiLSTMConfig(encoder_layers=2, encoder_embed_dim=4, encoder_hidden_dim=6, dropout=0.0)
WORDS = 11


def encoder(dropout: float = 0.0) -> BiLSTM:
    torch.manual_seed(3)
    sizes = BiLSTMConfig(2, SIZES.encoder_embed_dim, SIZES.encoder_hidden_dim, dropout)
    return BiLSTM(sizes, WORDS).double()


def rows(count: int = 3, length: int = 7) -> Tensor:
    return torch.randint(1, WORDS, (count, length), generator=torch.Generator().manual_seed(1))


def test_a_direction_knows_one_side_only() -> None:
    """Another token at t changes forward states from t on and backward ones up to t."""
    net, tokens = encoder(), rows()
    other = tokens.clone()
    at = 3
    other[:, at] = tokens[:, at] % (WORDS - 1) + 1
    assert (other[:, at] != tokens[:, at]).all()
    ahead, back = net.states(tokens)
    changed_ahead, changed_back = net.states(other)
    assert len(ahead) == len(back) == 3
    assert torch.equal(ahead[0], back[0]) and torch.equal(ahead[0], net.tokens(tokens))
    for layer in (1, 2):
        moved = (ahead[layer] != changed_ahead[layer]).any(-1).all(0)
        assert moved.tolist() == [False] * at + [True] * 4
        moved = (back[layer] != changed_back[layer]).any(-1).all(0)
        assert moved.tolist() == [True] * (at + 1) + [False] * 3


def test_bilstm_equals_torch_lstm_with_a_residual() -> None:
    """Row by row, without padding, and the backward direction on the row read backwards."""
    net, tokens = encoder(), rows()
    padding = torch.zeros_like(tokens, dtype=torch.bool)
    padding[0, 5:] = padding[1, 2:] = True
    ahead, back = net.states(tokens, Layout(padding))
    for number, length in enumerate((5, 2, 7)):
        x = net.tokens(tokens[number : number + 1, :length])
        for found, stack, turned in ((ahead, net.ahead, False), (back, net.back, True)):
            start = x.flip(1) if turned else x
            first = stack[0](start)[0]
            second = stack[1](first)[0] + first
            for wanted, states in zip((start, first, second), found):
                wanted = wanted.flip(1) if turned else wanted
                assert (states[number, :length] - wanted[0]).abs().max() < 1e-15


@pytest.mark.parametrize("more", [1, 9])
def test_padding_changes_nothing(more: int) -> None:
    """Neither states nor logits nor the weights' gradients."""
    torch.manual_seed(0)
    net = BiLSTMLM(SIZES, WORDS).double()
    tokens = rows()
    wide = torch.cat([tokens, torch.full((3, more), 5)], 1)
    padding = torch.arange(wide.shape[1]).expand(wide.shape) >= 7
    plain = net.directions(tokens)
    padded = tuple(x[:, :6] for x in net.directions(wide, Layout(padding)))
    assert all((a - b).abs().max() < 1e-15 for a, b in zip(plain, padded))
    grads = [
        torch.autograd.grad(sum((x**2).sum() for x in found), list(net.parameters()))
        for found in (plain, padded)
    ]
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(*grads))
    whole = net.encoder(wide, Layout(padding))[:, :7]
    assert (net.encoder(tokens) - whole).abs().max() < 1e-15


def test_the_first_state_is_the_end_of_both_directions() -> None:
    net, tokens = encoder(), rows()
    padding = torch.zeros_like(tokens, dtype=torch.bool)
    padding[0, 5:] = True
    found = net(tokens, Layout(padding))
    ahead, back = (states[-1] for states in net.states(tokens, Layout(padding)))
    assert found.shape == (3, 7, 8)
    last = torch.stack([ahead[0, 4], ahead[1, 6], ahead[2, 6]])
    assert torch.equal(found[:, 0], torch.cat([last, back[:, 0]], -1))
    assert torch.equal(found[:, 1:], torch.cat([ahead, back], -1)[:, 1:])
    several = net(tokens.view(1, 3, 7), Layout(padding.view(1, 3, 7)))
    assert torch.equal(several, found.unsqueeze(0))
    layout = Layout(torch.ones(1, 7, dtype=torch.bool))  # a candidate less
    assert net(tokens[:1], layout).isfinite().all()


def test_reverse_turns_within_the_lengths() -> None:
    x = torch.arange(8.0).view(2, 4, 1)
    lengths = torch.tensor([3, 0])
    assert reverse(x, lengths)[:, :, 0].tolist() == [[2, 1, 0, 3], [4, 5, 6, 7]]
    assert torch.equal(reverse(reverse(x, lengths), lengths), x)


def test_second_derivatives() -> None:
    """Along random directions, which a wrong entry changes too."""
    net = encoder()
    tokens = rows(1, 3)
    names = [n for n, _ in net.named_parameters() if "0" in n]

    def loss(*weights: Tensor) -> Tensor:
        named = dict(zip(names, weights))
        return torch.func.functional_call(net, named, (tokens,)).pow(2).sum()

    inputs = [net.get_parameter(n).detach().clone().requires_grad_() for n in names]
    with use_context(ForwardContext(None, double_backward=True)):
        assert torch.autograd.gradgradcheck(loss, inputs, atol=1e-6, fast_mode=True)


def test_dropout_follows_the_rows_and_not_torchs_generator() -> None:
    net, tokens = encoder(0.5).train(), rows()
    keys = torch.arange(3).numpy()

    def run(chosen: slice) -> Tensor:
        with use_context(ForwardContext(Noise(7, keys[chosen]))):
            return net(tokens[chosen])

    before = torch.random.get_rng_state()
    whole = run(slice(None))
    assert torch.equal(before, torch.random.get_rng_state())
    assert (whole - torch.cat([run(slice(0, 1)), run(slice(1, 3))])).abs().max() < 1e-15
    assert (whole - encoder(0.0)(tokens)).abs().max() > 0.01


def test_sizes_and_start() -> None:
    """Parameters by the formula; forget gates start open; too large a width is refused."""
    net = BiLSTMLM(SIZES, WORDS)
    lstm = 4 * 6 * (4 + 4) + 8 * 6 + 4 * 6
    assert sum(p.numel() for p in net.parameters()) == WORDS * 4 + 4 * lstm + WORDS * 4 + WORDS
    assert SIZES.width == 8 and isinstance(net.encoder.ahead[0], nn.LSTM)
    biases = net.encoder.ahead[0].bias_ih_l0 + net.encoder.ahead[0].bias_hh_l0
    assert biases.tolist() == [0.0] * 6 + [1.0] * 6 + [0.0] * 12
    with pytest.raises(UsageError, match="encoder_hidden_dim"):
        BiLSTM(BiLSTMConfig(1, 4, 4), WORDS)
