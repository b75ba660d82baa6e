"""The mix of a language model's layers, by its formula, and encoders of words that read it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax
from test_word_encoders import CHARACTERS, KINDS, LSTM, TRANSFORMER, WORDS, rows

from metaseq_lm.config.models import BiLSTMConfig
from metaseq_lm.core.batch import Layout
from metaseq_lm.forward.passes import ForwardContext, Noise, use_context
from metaseq_lm.models.bilstm import BiLSTM
from metaseq_lm.models.layers import ScalarMix
from metaseq_lm.models.words.encoders import CNNBiLSTM, TransformerViews
from metaseq_lm.models.words.word_model import FULL, Views

numbers = st.floats(-3, 3)


@given(st.lists(numbers, min_size=1, max_size=4), numbers)
def test_equation_1(weights: list[float], scale: float) -> None:
    """scale * sum_j softmax(weights)_j h_j."""
    mix = ScalarMix(len(weights), 5, 0.0).double()
    layers = np.random.default_rng(1).normal(size=(len(weights), 2, 3, 5))
    found = mix(list(torch.from_numpy(layers)))
    assert np.abs(found.detach().numpy() - layers.mean(0)).max() < 1e-15  # the start
    with torch.no_grad():
        mix.weights.copy_(torch.tensor(weights))
        mix.scale.fill_(scale)
    shares = softmax(mix.weights.detach().numpy())
    wanted = mix.scale.item() * np.einsum("l,lbsx->bsx", shares, layers)
    assert np.abs(mix(list(torch.from_numpy(layers))).detach().numpy() - wanted).max() < 1e-14


def test_layers_must_be_as_many_as_weights() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ScalarMix(3, 5, 0.0)([torch.zeros(1, 2, 5)] * 2)


def test_dropout_belongs_to_the_rows() -> None:
    mix, layers = ScalarMix(2, 6, 0.5).train(), [torch.ones(4, 3, 6)] * 2

    def run(chosen: slice) -> torch.Tensor:
        with use_context(ForwardContext(Noise(7, np.arange(4)[chosen]))):
            return mix([states[chosen] for states in layers])

    whole = run(slice(None))
    assert torch.equal(whole, torch.cat([run(slice(0, 1)), run(slice(1, 4))]))
    assert set(whole.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(mix.eval()(layers), layers[0])


@KINDS
def test_encoders_read_the_mix_beside_the_embeddings(kind: str) -> None:
    """It stands behind the embedding of each word, and what follows padding changes nothing."""
    torch.manual_seed(3)
    mix = ScalarMix(3, 8, 0.0)
    sizes, config = (CNNBiLSTM, LSTM) if kind == "lstm" else (TransformerViews, TRANSFORMER)
    net = sizes(config, WORDS, CHARACTERS, None, mix).double()
    lm = BiLSTM(BiLSTMConfig(2, 4, 6, 0.0), WORDS).double()
    tokens, characters, padding = rows()
    padding[1, 4:] = True

    def layers(tokens: torch.Tensor, padding: torch.Tensor) -> list[torch.Tensor]:
        return [torch.cat(pair, -1) for pair in zip(*lm.states(tokens, Layout(padding)))]

    read = layers(tokens, padding)
    embedded = net.embedding(tokens, characters, None, read)
    width = config.embedded_width
    assert net.embedding.width == width + 8 == embedded.shape[-1]
    assert torch.equal(embedded[..., width:], mix(read))
    net.embedding.mix = None
    assert torch.equal(embedded[..., :width], net.embedding(tokens, characters))
    net.embedding.mix = mix
    together = net(tokens, characters, Layout(padding), None, read)
    short = tokens[1:2, :4], padding[1:2, :4]
    alone = net(short[0], characters[1:2, :4], Layout(short[1]), None, layers(*short))
    for a, b in zip(together[:3], alone[:3]):
        assert (a[1, :4] - b[0]).abs().max() < 1e-13
    other = net(tokens, characters, Layout(padding), None, [2 * states for states in read])
    assert all((a != b).any() for a, b in zip(together[:3], other[:3]))


def test_only_the_full_view_has_what_heads_get() -> None:
    views = Views(*torch.randn(3, 2, 4, 5))
    assert len(views.of(FULL)) == 2
    extra = torch.randn(2, 4, 7)
    more = views._replace(extra=extra)
    assert more.of(FULL)[2] is extra and len(more.of("ahead")) == len(more.of("back")) == 1
