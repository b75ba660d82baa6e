"""Encoders of words: sizes by formula, what each view knows, padding, characters, word vectors."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.config.models import CNNBiLSTMConfig, TransformerViewsConfig, WordEmbeddingConfig
from metaseq_lm.core.batch import Layout
from metaseq_lm.core.config import section
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.models.layers import Dropout
from metaseq_lm.models.words import word_embedding
from metaseq_lm.models.words.encoders import CNNBiLSTM, TransformerViews, _sinusoids
from metaseq_lm.models.words.word_embedding import (
    WordEmbedding,
    _CharacterCNN,
    _MeanVariance,
    _unique_rows,
)
from metaseq_lm.models.words.word_model import ViewsEncoder

WORDS, CHARACTERS, LONGEST = 17, 9, 8
EMBEDDING = {"word_embed_dim": 6, "char_embed_dim": 3, "char_filters": 2}
LSTM = CNNBiLSTMConfig(
    **EMBEDDING, encoder_hidden_dim=7, second_hidden_dim=4, projection_dim=5, dropout=0.0
)
TRANSFORMER = TransformerViewsConfig(
    **EMBEDDING,
    encoder_embed_dim=8,
    encoder_ffn_embed_dim=8,
    encoder_attention_heads=2,
    encoder_layers=1,
    directed_layers=2,
    max_positions=12,
    dropout=0.0,
    attention_dropout=0.0,
)


def build(kind: str) -> ViewsEncoder:
    torch.manual_seed(3)
    if kind == "lstm":
        return CNNBiLSTM(LSTM, WORDS, CHARACTERS).double()
    return TransformerViews(TRANSFORMER, WORDS, CHARACTERS).double()


def rows(count: int = 3, length: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, WORDS, (count, length), generator=draw)
    characters = torch.randint(0, CHARACTERS, (count, length, LONGEST), generator=draw)
    return tokens, characters, torch.zeros(count, length, dtype=torch.bool)


KINDS = pytest.mark.parametrize("kind", ["lstm", "transformer"])


@KINDS
def test_each_view_knows_its_side_only(kind: str) -> None:
    """Another word at t: forward states change from t on, backward ones up to t."""
    net, (tokens, characters, padding) = build(kind), rows()
    at = 3
    before = net(tokens, characters, Layout(padding))
    other, spelled = tokens.clone(), characters.clone()
    other[:, at] = tokens[:, at] % (WORDS - 1) + 1
    spelled[:, at] = (characters[:, at] + 1) % CHARACTERS
    for changed in (net(other, characters, Layout(padding)), net(tokens, spelled, Layout(padding))):
        moved = [(a != b).any(-1).all(0).tolist() for a, b in zip(before[:3], changed)]
        assert moved[0] == [False] * at + [True] * 4
        assert moved[1] == [True] * (at + 1) + [False] * 3
        assert all(moved[2])
    still = (
        (before.ahead[:, :at] - net(other, characters, Layout(padding)).ahead[:, :at]).abs().max()
    )
    assert still == 0


@KINDS
def test_padding_changes_nothing(kind: str) -> None:
    """A row alone, and the same row padded with anything at its end beside a longer one."""
    net, (tokens, characters, padding) = build(kind), rows()
    padding[1, 4:] = True
    together = net(tokens, characters, Layout(padding))
    alone = net(tokens[1:2, :4], characters[1:2, :4], Layout(padding[1:2, :4]))
    for a, b in zip(together[:3], alone):
        assert (a[1, :4] - b[0]).abs().max() < 1e-14
        assert torch.isfinite(a).all()


@KINDS
def test_a_shift_is_added_to_word_embeddings(kind: str) -> None:
    net, (tokens, characters, padding) = build(kind), rows()
    table = net.embedding.words.weight
    shift = table[5] - table[tokens]
    everywhere = net(torch.full_like(tokens, 5), characters, Layout(padding))
    for a, b in zip(net(tokens, characters, Layout(padding), shift)[:3], everywhere):
        assert (a - b).abs().max() < 1e-13


@pytest.mark.parametrize("width", [8, 7])
def test_positions_start_as_sinusoids_of_which_neighbours_differ_alike(width: int) -> None:
    """Vaswani et al. 2017: column 2i is sin(t / 10000^(2i / width)), the next its cosine."""
    table = _sinusoids(12, width)
    for t, column in [(0, 0), (0, 1), (5, 0), (5, 1), (11, 2), (11, 5), (7, 6)]:
        angle = t / 10000 ** (column // 2 * 2 / width)
        expected = math.cos(angle) if column % 2 else math.sin(angle)
        assert abs(float(table[t, column]) - expected) < 1e-6
    net = TransformerViews(TRANSFORMER, WORDS, CHARACTERS)
    assert torch.equal(net.positions.weight, _sinusoids(12, 8))
    products = (_sinusoids(12, 8) @ _sinusoids(12, 8).T).diagonal(1)
    assert (products - products[0]).abs().max() < 1e-6


def lstm_parameters(inputs: int, cells: int, width: int) -> int:
    """Return what a layer of one direction has: four gates with torch's two biases, a
    projection.
    """
    return 4 * cells * (inputs + width + 2) + (cells * width if width < cells else 0)


@pytest.mark.parametrize("size", ["small", "base", "large"])
def test_parameter_counts_follow_the_formula(size: str) -> None:
    """Of the model configs; the paper's cells are 1024 and 512, "large" 4096 and 2048."""
    config = load_config([f"model=cnn_bilstm_{size}", "save_dir=x", "data=x"])
    sizes = config.model
    cells = {"small": (256, 128), "base": (1024, 512), "large": (4096, 2048)}[size]
    assert (sizes.encoder_hidden_dim, sizes.second_hidden_dim) == cells
    widths = [min(c, 512) for c in cells]
    with torch.device("meta"):
        net = CNNBiLSTM(sizes, 1000, 90)
    characters = 90 * 50 + sum(100 * (50 * width + 1) for width in (2, 3, 4))
    layers = lstm_parameters(600, cells[0], widths[0]) + lstm_parameters(
        2 * widths[0], cells[1], widths[1]
    )
    wanted = 1000 * 300 + 1 + characters + 2 * layers
    assert sum(p.numel() for p in net.parameters()) == wanted
    assert net.widths("full") == [2 * widths[0], 2 * widths[1]]
    assert net.widths("ahead") == net.widths("back") == [widths[0]]


def test_layers_are_torchs_lstms_on_rows_as_they_stand() -> None:
    """Forget gates begin open; the second layer reads both directions of the first."""
    net, (tokens, characters, padding) = build("lstm"), rows(1)
    x = net.embedding(tokens, characters)
    views = net(tokens, characters, Layout(padding))

    def turned(layer: nn.Module, states: Tensor) -> Tensor:
        return layer(states.flip(1))[0].flip(1)

    ahead, back = net.ahead[0](x)[0], turned(net.back[0], x)
    first = torch.cat([ahead, back], -1)
    both = torch.cat([net.ahead[1](first)[0], turned(net.back[1], first)], -1)
    for found, wanted in zip(views, (ahead, back, both)):
        assert (found - wanted).abs().max() < 1e-15
    assert net.ahead[0].proj_size == 5 and net.ahead[1].proj_size == 0
    for layer in (*net.ahead, *net.back):
        bias = layer.bias_ih_l0 + layer.bias_hh_l0
        assert bias.view(4, -1).tolist() == [[value] * layer.hidden_size for value in (0, 1, 0, 0)]


@pytest.mark.parametrize("combine", ["concat", "sum"])
def test_characters_are_a_convolution_and_a_maximum(combine: str) -> None:
    """Against a loop over words, widths and places, the padding among them; and the scale."""
    torch.manual_seed(1)
    config = WordEmbeddingConfig(**EMBEDDING, combine=combine)
    net = WordEmbedding(config, WORDS, CHARACTERS, Dropout(0.0)).double()
    with torch.no_grad():
        net.scale.fill_(1.5)
    tokens, characters, _ = rows(2, 3)
    characters[1] = characters[0]
    out = net(tokens, characters)
    for row in range(2):
        for at in range(3):
            letters = net.characters.embedding.weight[characters[row, at]]
            found = []
            for layer in net.characters.filters:
                width = layer.kernel_size[0]
                places = [
                    (layer.weight * letters[i : i + width].T).sum((1, 2)) + layer.bias
                    for i in range(LONGEST - width + 1)
                ]
                found.append(torch.stack(places).relu().amax(0))
            word, spelled = 1.5 * net.words.weight[tokens[row, at]], torch.cat(found)
            wanted = word + spelled if combine == "sum" else torch.cat([word, spelled])
            assert (out[row, at] - wanted).abs().max() < 1e-14


def test_the_filters_are_torchs_convolution() -> None:
    """What is multiplied out for each character gives the values and gradients of nn.Conv1d."""
    torch.manual_seed(1)
    cnn = _CharacterCNN(WordEmbeddingConfig(char_embed_dim=5, char_filters=4), 9).double()
    words = torch.randint(0, 9, (7, 8))
    x = cnn.embedding(words).transpose(1, 2)
    plain = torch.cat([layer(x).amax(-1) for layer in cnn.filters], -1).relu()
    ours = cnn(words.view(7, 1, 8)).view(7, -1)
    weights = list(cnn.parameters())
    assert len(weights) == 1 + 3 * 2
    torch.testing.assert_close(ours, plain)
    found = [torch.autograd.grad(y.pow(2).sum(), weights) for y in (ours, plain)]
    torch.testing.assert_close(*found)


def test_different_rows() -> None:
    """Each row is there once, as torch.unique finds them."""
    table = torch.tensor([[3, -1], [0, 2], [3, -1], [0, 3], [256, 0], [0, 2]])
    rows, where = _unique_rows(table)
    assert torch.equal(rows[where], table)
    assert sorted(rows.tolist()) == torch.unique(table, dim=0).tolist()
    rows, where = _unique_rows(table.t())
    assert torch.equal(rows[where], table.t()) and len(rows) == 2


def test_word_vectors_are_the_start() -> None:
    vectors = np.random.default_rng(1).normal(size=(WORDS, 6)).astype(np.float32)
    config = WordEmbeddingConfig(**EMBEDDING)
    with_them = WordEmbedding(config, WORDS, CHARACTERS, Dropout(0.0), vectors)
    assert torch.equal(with_them.words.weight, torch.from_numpy(vectors))
    without = WordEmbedding(
        replace(config, word_vectors=False), WORDS, CHARACTERS, Dropout(0.0), vectors
    )
    assert not torch.equal(without.words.weight, with_them.words.weight)
    # Nothing may ever train the row of <unk>: it says nothing, unless the vectors have one.
    assert not without.words.weight[:2].any() and without.words.weight[2:].all()
    assert with_them.words.weight[1].all()
    with pytest.raises(UsageError, match="word_embed_dim.* 6 numbers"):
        wrong = replace(config, word_embed_dim=7)
        WordEmbedding(wrong, WORDS, CHARACTERS, Dropout(0.0), vectors)


def test_normalised_words_have_mean_0_and_variance_1_by_frequency() -> None:
    config = WordEmbeddingConfig(**EMBEDDING, normalize_words=True)
    net = WordEmbedding(config, WORDS, CHARACTERS, Dropout(0.0)).double()
    counts = torch.arange(WORDS).double()
    net.frequencies.copy_(counts / counts.sum())
    table = net.embed_words(torch.arange(WORDS))
    drawn = table.repeat_interleave(counts.long(), 0)
    assert drawn.mean(0).abs().max() < 1e-12
    assert (drawn.var(0, unbiased=False) - 1).abs().max() < 1e-4
    tokens, characters, _ = rows()
    assert torch.equal(net(tokens, characters)[..., :6], F.embedding(tokens, table))


def test_the_moments_have_the_gradient_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over blocks of rows, the last a short one; of each moment alone, too."""
    monkeypatch.setattr(word_embedding, "BLOCK", 3)
    table = torch.randn(7, 4, dtype=torch.double, requires_grad=True)
    shares = torch.rand(7, dtype=torch.double)
    shares /= shares.sum()
    mean = shares @ table
    wanted = mean, shares @ (table - mean).square()
    for found, plain in zip(_MeanVariance.apply(table, shares), wanted):
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-14)
        to = torch.randn(4, dtype=torch.double)
        (gradient,) = torch.autograd.grad(found, table, to, retain_graph=True)
        (other,) = torch.autograd.grad(plain, table, to, retain_graph=True)
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"combine": "mean"}, "Choices: concat, sum"),
        ({"combine": "sum", "char_filters": 3}, "as many filters"),
        ({"char_widths": []}, "char_widths"),
        ({"char_widths": [2, 0]}, "char_widths"),
        ({"char_widths": [2, 25]}, r"char_widths .*at most 24, got \[2, 25\]"),
        ({"word_embed_dim": 0}, "model.word_embed_dim .*at least 1"),
        ({"char_filters": -1}, "model.char_filters .*at least 0"),
        ({"projection_dim": 0}, "at least 1"),
        ({"dropout": 1.0}, "below 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options = section("model", **{"_name": "cnn_bilstm", **vars(LSTM), **change})
        CNNBiLSTM(options, WORDS, CHARACTERS)


def test_a_sentence_longer_than_the_positions_is_told() -> None:
    with pytest.raises(MetaseqError, match="11 words.*model.max_positions"):
        build("transformer")(*rows(1, 13))
