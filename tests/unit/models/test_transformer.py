"""The encoder against torch's, padding, copies of whole models, heads, initialisation."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.config.transformer import TransformerConfig
from metaseq_lm.core.batch import Layout
from metaseq_lm.forward.passes import ForwardContext, Noise, use_context
from metaseq_lm.methods.meta_pseudo_label.model import VirtualModel
from metaseq_lm.models.transformer import attention
from metaseq_lm.models.transformer.encoder import TransformerLM

VOCABULARY = 23


@pytest.fixture(autouse=True)
def fixed() -> None:
    torch.manual_seed(0)


def build(before: bool = True, dropout: float = 0.0, **options: object) -> TransformerLM:
    config = TransformerConfig(
        *(2, 8, 16, 2),
        encoder_normalize_before=before,
        max_positions=12,
        dropout=dropout,
        attention_dropout=dropout,
    )
    return TransformerLM(config, VOCABULARY, **options).double()  # type: ignore[arg-type]


def enlarged(model: TransformerLM) -> TransformerLM:
    """Return the model with weights of size 1, so that mistakes are large."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.7)
    return model


def tokens_and_padding() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, VOCABULARY, (3, 7))
    padding = torch.arange(7) >= torch.tensor([7, 4, 1])[:, None]
    return tokens.masked_fill(padding, 0), padding


def test_training_uses_the_fused_kernel_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout of attention weights, which it cannot have, is a choice."""
    calls = []
    fused = attention._fused_attention
    monkeypatch.setattr(attention, "_fused_attention", lambda *a: calls.append(1) or fused(*a))
    for config, number in [
        (TransformerConfig(2, 8, 16, 2), 2),
        (replace(TransformerConfig(2, 8, 16, 2), attention_dropout=0.1), 0),
    ]:
        calls.clear()
        model = TransformerLM(config, VOCABULARY).train()
        model(tokens_and_padding()[0])
        assert config.dropout == 0.1 and len(calls) == number


def torch_encoder(model: TransformerLM) -> list[nn.TransformerEncoderLayer]:
    """Return torch's layers with the model's weights."""
    layers = []
    for ours in model.encoder.stack.layers:
        theirs = nn.TransformerEncoderLayer(
            *(8, 2, 16, 0.0, F.gelu),
            batch_first=True,
            norm_first=model.encoder.embeddings.norm is None,
            dtype=torch.float64,
        )
        pairs = {
            "self_attn.in_proj_": ours.attention.in_proj,
            "self_attn.out_proj.": ours.attention.out_proj,
            "linear1.": ours.fc1,
            "linear2.": ours.fc2,
            "norm1.": ours.attention_norm,
            "norm2.": ours.ffn_norm,
        }
        weights = {}
        for name, layer in pairs.items():
            weights |= {f"{name}weight": layer.weight.data, f"{name}bias": layer.bias.data}
        theirs.load_state_dict(weights)
        layers.append(theirs)
    return layers


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("double_backward", [True, False])
def test_encoder_is_torchs(before: bool, double_backward: bool) -> None:
    model = enlarged(build(before))
    encoder = model.encoder
    tokens, padding = tokens_and_padding()
    table, places = encoder.embeddings.tokens.weight, encoder.embeddings.positions.weight
    x = F.embedding(tokens, table) + places[:7]
    norm = encoder.stack.norm if before else encoder.embeddings.norm
    x = x if before else norm(x)
    for layer in torch_encoder(model):
        x = layer(x, src_key_padding_mask=padding)
    x = norm(x) if before else x
    with use_context(ForwardContext(None, double_backward)):
        found = encoder(tokens, Layout(padding))
    torch.testing.assert_close(found[~padding], x[~padding], rtol=1e-10, atol=1e-10)


def test_head() -> None:
    model = enlarged(build())
    tokens, padding = tokens_and_padding()
    head, weight = model.heads["lm"], model.encoder.embeddings.tokens.weight
    h = F.gelu(F.linear(model.encoder(tokens, Layout(padding)), head.dense.weight, head.dense.bias))
    h = F.layer_norm(h, (8,), head.norm.weight, head.norm.bias, 1e-5)
    wanted = F.linear(h, weight, head.bias)
    torch.testing.assert_close(model(tokens, Layout(padding)), wanted)
    positions = torch.tensor([[0, 6], [3, 3], [0, 0]])
    some = model(tokens, Layout(padding), positions)
    for row in range(3):
        torch.testing.assert_close(some[row], wanted[row, positions[row]])


def test_named_heads() -> None:
    model = build(heads=("x", "y"), tied=False)
    tokens, _ = tokens_and_padding()
    x, y = (model(tokens, head=name) for name in ("x", "y"))
    assert not torch.allclose(x, y)
    hidden = model.encoder(tokens)
    assert torch.equal(model.predict(hidden, head="y"), y)
    own = F.linear(
        model.heads["y"].norm(F.gelu(model.heads["y"].dense(hidden))),
        model.heads["y"].weight,
        model.heads["y"].bias,
    )
    torch.testing.assert_close(y, own)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("double_backward", [True, False])
def test_more_padding_changes_nothing(before: bool, double_backward: bool) -> None:
    model = enlarged(build(before))
    tokens, padding = tokens_and_padding()
    wide, wide_padding = F.pad(tokens, (0, 4)), F.pad(padding, (0, 4), value=True)
    grads = []
    with use_context(ForwardContext(None, double_backward)):
        for given, mask in ((tokens, padding), (wide, wide_padding)):
            logits = model(given, Layout(mask))[:, :7][~padding]
            loss = logits.square().sum()
            grads.append([logits, *torch.autograd.grad(loss, list(model.parameters()))])
    for narrow, wide_one in zip(*grads):
        torch.testing.assert_close(narrow, wide_one, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("double_backward", [True, False])
def test_encoder_ignores_tokens_in_padding(double_backward: bool) -> None:
    model = enlarged(build())
    tokens, padding = tokens_and_padding()
    other = torch.where(padding, torch.randint(1, VOCABULARY, tokens.shape), tokens)
    with use_context(ForwardContext(None, double_backward)):
        found, wanted = model(other, Layout(padding)), model(tokens, Layout(padding))
        unmasked = model(other)
    torch.testing.assert_close(found[~padding], wanted[~padding])
    assert not torch.allclose(unmasked[~padding], wanted[~padding])


@pytest.mark.parametrize("double_backward", [True, False])
def test_a_row_of_padding_is_finite(double_backward: bool) -> None:
    model = build()
    tokens, padding = tokens_and_padding()
    tokens[1], padding[1] = 0, True
    with use_context(ForwardContext(None, double_backward)):
        logits = model(tokens, Layout(padding))
        grads = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
    assert torch.isfinite(logits).all() and all(torch.isfinite(g).all() for g in grads)
    alone = model(tokens[[0, 2]], Layout(padding[[0, 2]]))
    torch.testing.assert_close(alone[~padding[[0, 2]]], logits[[0, 2]][~padding[[0, 2]]])


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("soft", [True, False])
def test_copies_of_a_model(before: bool, soft: bool) -> None:
    """Three models at once: output, gradient and double backward of each by itself."""
    model = enlarged(build(before))
    virtual = VirtualModel(model)
    vector = (virtual.vector() + 0.3 * torch.randn(3, virtual.vector().numel())).double()
    vector.requires_grad_()
    tokens = torch.randint(1, VOCABULARY, (3, 2, 7))
    padding = torch.arange(7) >= torch.tensor([[7, 5], [6, 7], [2, 7]])[..., None]
    given = F.one_hot(tokens, VOCABULARY).double() if soft else tokens
    if soft:
        given = (0.5 * given + 0.5 / VOCABULARY).requires_grad_()
    with use_context(ForwardContext(None, double_backward=True)):
        at_once = virtual(vector, given, Layout(padding))
        loop = torch.stack([virtual(vector[c], given[c], Layout(padding[c])) for c in range(3)])
        leaves = [vector, given] if soft else [vector]
        results = []
        for output in (at_once, loop):
            first = torch.autograd.grad(output.pow(3).mean(), leaves, create_graph=True)
            second = torch.autograd.grad(first[0].square().sum(), leaves)
            results.append([output, *first, *second])
    for found, wanted in zip(*results):
        scale = wanted.abs().max().item()
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10 * scale)


def test_copies_see_the_dropout_of_their_rows() -> None:
    model = build(dropout=0.3)
    virtual = VirtualModel(model)
    vector = virtual.vector().expand(3, -1)
    tokens = torch.randint(1, VOCABULARY, (3, 2, 7))
    rows = torch.arange(6).view(3, 2).numpy()
    with use_context(ForwardContext(Noise(4, rows), True)):
        at_once = virtual(vector, tokens)
    for c in range(3):
        with use_context(ForwardContext(Noise(4, rows[c]), True)):
            torch.testing.assert_close(model(tokens[c]), at_once[c])


def test_virtual_model() -> None:
    model = build()
    virtual = VirtualModel(model)
    vector = virtual.vector()
    assert vector.numel() == sum(p.numel() for p in model.parameters()) and not vector.requires_grad
    for piece, parameter in zip(virtual.split(vector), model.parameters()):
        assert torch.equal(piece, parameter)
    tokens, padding = tokens_and_padding()
    assert torch.equal(virtual(vector, tokens, Layout(padding)), model(tokens, Layout(padding)))
    before = model(tokens, Layout(padding)).clone()
    other = (vector * 1.5).requires_grad_()
    virtual(other, tokens, Layout(padding)).sum().backward()
    assert other.grad is not None and all(p.grad is None for p in model.parameters())
    # A tied table is one part of the vector: changing it moves input and output.
    assert torch.equal(model(tokens, Layout(padding)), before)
    assert len(virtual.parameters) == len(list(model.parameters()))


def test_initialisation() -> None:
    config = TransformerConfig(2, 64, 128, 2)
    for tied in (True, False):
        model = TransformerLM(config, 500, tied=tied)
        names = dict(model.named_parameters())
        for name, parameter in names.items():
            if name.endswith("bias"):
                assert (parameter == 0).all(), name
            elif "norm" in name:
                assert (parameter == 1).all(), name
            elif "in_proj" in name:
                bound = math.sqrt(6 / (64 + 3 * 64))
                assert 0.95 * bound < parameter.abs().max() <= bound, name
                assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
            else:
                assert parameter[1:].std().item() == pytest.approx(0.02, rel=0.05), name
        zero = (names["encoder.embeddings.tokens.weight"][0] == 0).all()
        assert bool(zero) is not tied
        assert ("heads.lm.weight" in names) is not tied


def test_a_long_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="13 tokens.*12 positions"):
        build()(torch.ones(1, 13, dtype=torch.long))
