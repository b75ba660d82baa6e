"""The modern encoder: equal to the transformers library's, by distance, packed, of second order."""

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from second_order import derivatives, double_backward
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from metaseq_lm.config.transformer import ModernConfig
from metaseq_lm.core.batch import REACHES, Layout
from metaseq_lm.core.errors import UsageError
from metaseq_lm.forward.passes import ForwardContext, use_context
from metaseq_lm.methods.meta_pseudo_label.model import VirtualModel
from metaseq_lm.models.layers import LayerNorm, RMSNorm
from metaseq_lm.models.transformer.attention import Rotation, SelfAttention, Visibility
from metaseq_lm.models.transformer.encoder import TransformerLM, _farthest
from metaseq_lm.models.transformer.flops_rules import Sizes, masked_lm
from metaseq_lm.runs.flops import Counter

VOCABULARY, LENGTH, HALF = 50, 40, 4
SIZES = ModernConfig(
    encoder_layers=4,
    encoder_embed_dim=32,
    encoder_ffn_embed_dim=48,
    encoder_attention_heads=4,
    local_window=2 * HALF,
    global_theta=160_000.0,
)
LENGTHS = torch.tensor([40, 29, 7])
TOKENS = torch.randint(5, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
PADDING = torch.arange(LENGTH) >= LENGTHS[:, None]

NAMES = (
    ("encoder.embeddings.tokens", "model.embeddings.tok_embeddings"),
    ("encoder.embeddings.norm", "model.embeddings.norm"),
    ("encoder.stack.norm", "model.final_norm"),
    ("encoder.stack.layers", "model.layers"),
    ("attention.in_proj", "attn.Wqkv"),
    ("attention.out_proj", "attn.Wo"),
    ("attention_norm", "attn_norm"),
    ("fc1", "mlp.Wi"),
    ("fc2", "mlp.Wo"),
    ("ffn_norm", "mlp_norm"),
    ("heads.lm.bias", "decoder.bias"),
)


def spread(model: nn.Module) -> nn.Module:
    """Return the model with weights so large that each part of it shows in the logits."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.2 * noise)
    return model.eval()


def build(**changes: Any) -> TransformerLM:
    """Return a small model with large weights."""
    model = spread(TransformerLM(replace(SIZES, **changes), VOCABULARY))
    assert isinstance(model, TransformerLM)
    return model


def foreign(model: TransformerLM, config: ModernConfig, causal: bool) -> nn.Module:
    """Return the library's model with the weights of ours."""
    transformers = pytest.importorskip("transformers")
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": config.encoder_embed_dim,
        "intermediate_size": config.encoder_ffn_embed_dim,
        "num_hidden_layers": config.encoder_layers,
        "num_attention_heads": config.encoder_attention_heads,
        "hidden_activation": config.gate,
        "local_attention": config.local_window,
        "layer_types": [
            "sliding_attention" if config.scope(n).window else "full_attention"
            for n in range(config.encoder_layers)
        ],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": config.global_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": config.local_theta},
        },
        **dict.fromkeys(("bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id"), 1),
        "pad_token_id": 0,
        "attn_implementation": "sdpa",
    }
    kind = "ModernBertDecoder" if causal else "ModernBert"
    head = "ForCausalLM" if causal else "ForMaskedLM"
    made = getattr(transformers, f"{kind}Config")(**options)
    net: nn.Module = getattr(transformers, f"{kind}{head}")(made).eval()
    weights = model.state_dict()
    theirs = {}
    for name, weight in weights.items():
        for ours, other in NAMES:
            name = name.replace(ours, other)
        name = name.replace("heads.lm", "lm_head" if causal else "head")
        if "Wqkv" in name and causal:
            parts = zip("qkv", weight.chunk(3))
            theirs |= {name.replace("Wqkv", f"{part}_proj"): rows for part, rows in parts}
        else:
            theirs[name] = weight
    theirs["decoder.weight"] = theirs["model.embeddings.tok_embeddings.weight"]
    net.load_state_dict(theirs)
    return net


@pytest.mark.parametrize("gate", ["gelu", "silu"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("context", [ForwardContext, double_backward])
@torch.no_grad()
def test_logits_are_those_of_the_library(gate: str, causal: bool, context: Any) -> None:
    """The longest row has five local windows."""
    model = build(gate=gate)
    theirs = foreign(model, replace(SIZES, gate=gate), causal)
    layout = Layout(PADDING, reach="causal" if causal else "both")
    with use_context(context()):
        logits = model(TOKENS, layout)
    expected = theirs(input_ids=TOKENS, attention_mask=(~PADDING).long()).logits
    assert expected.std() > 1
    torch.testing.assert_close(logits[~PADDING], expected[~PADDING], atol=1e-5, rtol=1e-5)


def test_a_step_is_that_of_the_library() -> None:
    """The logits after a step of gradient descent on masked language modelling."""
    model = build()
    theirs = foreign(model, SIZES, causal=False)
    chosen = ~PADDING & (torch.arange(LENGTH) % 3 == 0)
    mask = (~PADDING).long()
    labels = TOKENS.where(chosen, -100)
    for net, logits in (
        (model, model(TOKENS, Layout(PADDING))),
        (theirs, theirs(input_ids=TOKENS, attention_mask=mask).logits),
    ):
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        torch.optim.SGD(net.parameters(), lr=0.05).step()
    after = model(TOKENS, Layout(PADDING))[~PADDING]
    expected = theirs(input_ids=TOKENS, attention_mask=mask).logits[~PADDING]
    assert (expected - build()(TOKENS, Layout(PADDING))[~PADDING]).abs().max() > 0.1
    torch.testing.assert_close(after, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gate", ["gelu", "silu"])
def test_counting_changes_no_gradient(gate: str) -> None:
    results = []
    for counter in (contextlib.nullcontext, Counter):
        model = build(gate=gate)
        with counter():
            model(TOKENS, Layout(PADDING)).pow(2).sum().backward()
        results.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results))


CONTEXTS = pytest.mark.parametrize("context", [ForwardContext, double_backward])
STYLES = pytest.mark.parametrize(
    "style",
    [
        {},
        {"norm": "rms", "qk_norm": True, "gate": "silu"},
        {"token_embed_dim": 8, "segments": 2},
        {"positions": "learned", "gate": "none"},
    ],
)
INSIDE = torch.zeros(2, 13, dtype=torch.bool)
INSIDE[0, 3], INSIDE[1, 9:] = True, True
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 4, [4] * 2 + [5] * 5 + [6] * 6])
RANKS = torch.stack([torch.arange(13) // 3, torch.arange(13) * 5 % 13])
DISTANCE = 2
LOCAL = {
    f"{reach}, {'padding' if padded else 'no padding'}, {'packed' if packed else 'whole'}": Layout(
        INSIDE if padded else None,
        DOCUMENTS if packed else None,
        reach,
        torch.tensor([3, 0]),
        RANKS,
    )
    for reach in REACHES
    for padded in (False, True)
    for packed in (False, True)
}


def sees(layout: Layout, row: int, query: int, key: int) -> bool:
    """Say whether a token of a local layer sees another one, by definition."""
    if layout.padding is not None and layout.padding[row, key]:
        return query == key
    first = 0
    if layout.documents is not None:
        numbers = layout.documents[row].tolist()
        if numbers[key] != numbers[query]:
            return False
        first = numbers.index(numbers[key])
    if layout.reach == "ranked":
        above = int(layout.ranks[row, query] - layout.ranks[row, key])
        return above >= 0 and abs(query - key) <= DISTANCE - (above > 0)
    in_prefix = layout.prefix is not None and key - first < int(layout.prefix[row])
    if layout.reach == "both" or (layout.reach == "prefix" and in_prefix):
        return abs(query - key) <= DISTANCE
    ahead = key - query if layout.reach == "anticausal" else query - key
    return 0 <= ahead < DISTANCE


@pytest.mark.parametrize("name", LOCAL)
def test_local_attention_sees_what_is_near(name: str) -> None:
    """In the mask; and unpacked documents, which have masks of their own, give the same states."""
    layout, attention = LOCAL[name], SelfAttention(8, 2, 0.0).double()
    visibility = Visibility.of(layout, 13, torch.device("cpu"), DISTANCE)
    assert visibility.mask is not None
    mask = visibility.mask.expand(2, 1, 13, 13)[:, 0]
    wanted = [[[sees(layout, r, i, j) for j in range(13)] for i in range(13)] for r in range(2)]
    assert torch.equal(mask, torch.tensor(wanted))
    x = torch.randn(2, 13, 8, dtype=torch.float64)
    both = "packed" in name and layout.reach in ("both", "causal")
    assert (visibility.unpacking is not None) is both
    with use_context(double_backward()):
        masked = attention(x, visibility)
    real = ~layout.padding_of(x[..., 0])
    torch.testing.assert_close(attention(x, visibility)[real], masked[real])


@pytest.mark.parametrize(("reach", "keys"), [("both", range(11, 20)), ("causal", range(12, 16))])
def test_the_window_of_a_query(reach: str, keys: range) -> None:
    """ModernBERT's window of 8 is 9 keys, ModernBertDecoder's 4."""
    model = build(global_every=2, encoder_layers=2)
    layer, x = model.encoder.stack.layers[1], torch.randn(1, LENGTH, 32, requires_grad=True)
    scope = SIZES.scope(1)
    visibility = Visibility.of(Layout(reach=reach), LENGTH, x.device, _farthest(scope, LENGTH))
    rotation = Rotation.of(Layout(), x, scope.theta, 8)
    (grad,) = torch.autograd.grad(layer(x, visibility, rotation)[0, 15].sum(), x)
    assert grad[0].any(-1).nonzero().flatten().tolist() == list(keys)


@torch.no_grad()
def test_rows_longer_than_windows_only_have_masks() -> None:
    assert _farthest(SIZES.scope(1), HALF) == 0 and _farthest(SIZES.scope(1), HALF + 1) == HALF
    assert _farthest(SIZES.scope(0), 10**6) == 0
    model = build()
    wide = build(local_window=100)
    assert torch.equal(model(TOKENS[:, :HALF]), wide(TOKENS[:, :HALF]))
    assert not torch.allclose(model(TOKENS[:, :9]), wide(TOKENS[:, :9]))


def test_rotated_products_depend_on_distance() -> None:
    x = torch.zeros(1, LENGTH, 1, dtype=torch.float64)
    rotation = Rotation.of(Layout(), x, 10_000.0, 8)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(-1, -1, -1, LENGTH, -1)
    products = (rotation(q) @ rotation(k).mT)[0, 0]
    for offset in (-3, 0, 5):
        diagonal = products.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand(LENGTH - abs(offset)))
    assert products.diagonal(5)[0] != products.diagonal(4)[0]
    torch.testing.assert_close(rotation(q).norm(dim=-1), q.norm(dim=-1))
    assert torch.equal(rotation(q)[..., 0, :], q[..., 0, :])


def test_positions_start_in_each_document() -> None:
    """Angles of large positions are less exact, so packed rows have those of rows alone."""
    x = torch.zeros(1, 6, 1)
    packed = Rotation.of(Layout(documents=torch.tensor([[0, 0, 0, 0, 3, 3]])), x, 100.0, 8)
    alone = Rotation.of(Layout(), x, 100.0, 8)
    for one, other in ((packed.cos, alone.cos), (packed.sin, alone.sin)):
        assert torch.equal(one[0, 0], other[0, 0, [0, 1, 2, 3, 0, 1]])


@CONTEXTS
@STYLES
@pytest.mark.parametrize("reach", REACHES)
@torch.no_grad()
def test_packed_rows_are_rows_alone(reach: str, style: dict[str, Any], context: Any) -> None:
    lengths = (17, 1, 9, 11)
    model, row = build(**style).double(), TOKENS[0, : sum(lengths)]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    prefix, ranks = torch.tensor([5]), torch.arange(len(row)) // 3
    with use_context(context()):
        packed = model(row[None], Layout(None, documents[None], reach, prefix, ranks[None]))[0]
        parts = zip(row.split(lengths), ranks.split(lengths))
        alone = [
            model(part[None], Layout(reach=reach, prefix=prefix, ranks=of_part[None]))[0]
            for part, of_part in parts
        ]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-10, atol=1e-10)
    leaking = model(row[None], Layout(None, None, reach, prefix, ranks[None]))[0]
    assert not torch.allclose(packed, leaking)


@STYLES
@pytest.mark.parametrize("soft", [True, False])
def test_copies_of_a_model(soft: bool, style: dict[str, Any]) -> None:
    """Two models at once: output, gradient and double backward of each by itself."""
    changes = {"encoder_layers": 2, "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 8, **style}
    virtual = VirtualModel(build(**changes, local_window=4).double())
    vector = virtual.vector() + 0.1 * torch.randn(2, len(virtual.vector()))
    vector = vector.double().requires_grad_()
    tokens, padding = TOKENS[:, :7].expand(2, -1, -1), torch.zeros(2, 3, 7, dtype=torch.bool)
    padding[1, :, 5:] = True
    given = (0.5 * F.one_hot(tokens, VOCABULARY) + 0.01).double() if soft else tokens
    with use_context(double_backward()):
        at_once = virtual(vector, given, Layout(padding))
        loop = [virtual(vector[c], given[c], Layout(padding[c])) for c in range(2)]
        results = [derivatives(x, [vector]) for x in (at_once, torch.stack(loop))]
    for one, other in zip(*results, strict=True):
        scale = other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10 * scale)


@STYLES
@pytest.mark.parametrize("reach", ["both", "causal"])
def test_second_derivatives_are_differences_of_gradients(reach: str, style: dict[str, Any]) -> None:
    """Those of the pass by itself, not of the fused kernel, which has none."""
    changes = {"encoder_layers": 2, "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 8, **style}
    virtual = VirtualModel(build(**changes, local_window=4).double())
    start = virtual.vector().double()
    direction = torch.randn(len(start), generator=torch.Generator().manual_seed(2)).double()
    layout = Layout(PADDING[:, :9] | (torch.arange(9) > 6), reach=reach)

    def gradient(vector: Tensor, context: ForwardContext) -> Tensor:
        with use_context(context):
            logits = virtual(vector, TOKENS[:, :9], layout)
            loss = F.cross_entropy(logits[:, :6].flatten(0, 1), TOKENS[:, 1:7].flatten())
        return torch.autograd.grad(loss, vector, create_graph=context.double_backward)[0]

    vector = start.clone().requires_grad_()
    first = gradient(vector, double_backward())
    (found,) = torch.autograd.grad(first @ direction, vector)
    step = 1e-6
    ahead, back = (
        gradient((start + sign * step * direction).requires_grad_(), ForwardContext())
        for sign in (1, -1)
    )
    wanted = (ahead - back) / (2 * step)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6 * wanted.abs().max().item())


@pytest.mark.filterwarnings("error")
@STYLES
@pytest.mark.parametrize("context", [ForwardContext, double_backward])
def test_mixed_precision(context: Any, style: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = TransformerLM(replace(SIZES, **style), VOCABULARY)
    whole = model(TOKENS, Layout(PADDING))
    with use_context(context()), torch.autocast("cpu", torch.bfloat16):
        rounded = model(TOKENS, Layout(PADDING))
    rounded.float().pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert rounded.dtype == torch.bfloat16
    assert (whole - rounded).abs().max() < 0.03 * whole.abs().max()


def test_initial_weights() -> None:
    """Normal, cut at two standard deviations: the realised one is 0.8796 of the one stated."""
    config = replace(SIZES, encoder_layers=8, encoder_embed_dim=128, encoder_ffn_embed_dim=192)
    torch.manual_seed(0)
    for name, parameter in TransformerLM(config, 500).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.dim() == 1:
            assert (parameter == 1).all(), name
        else:
            is_output = any(part in name for part in ("out_proj", "fc2", "heads.lm.dense"))
            std = 0.02 / 4 if is_output else 0.02
            assert parameter.std().item() == pytest.approx(0.8796 * std, rel=0.02), name
            assert parameter.abs().max() <= 2 * std


def test_parts() -> None:
    model = build(norm="rms", qk_norm=True, vocab_multiple=64)
    names = {name for name, _ in model.named_parameters()}
    assert {name for name in names if name.endswith("bias")} == {"heads.lm.bias"}
    assert not any("layers.0.attention_norm" in name or "positions" in name for name in names)
    assert "encoder.stack.layers.1.attention_norm.weight" in names
    assert {type(m) for m in model.modules() if isinstance(m, (LayerNorm, RMSNorm))} == {RMSNorm}
    assert model.encoder.stack.layers[0].attention.q_norm.weight.shape == (8,)
    assert model.encoder.embeddings.tokens.weight.shape == (64, 32)
    assert model(TOKENS).shape == (3, LENGTH, 64)
    # The norm of the embeddings is not the last thing before layer 0.
    assert "encoder.stack.layers.0.attention_norm.weight" in dict(
        build(token_embed_dim=8).named_parameters()
    )


def test_parts_of_2018() -> None:
    """An ablation takes the gate or rotary positions away and leaves the rest as it is."""
    model, rotary = build(gate="none", positions="learned"), build()
    inner, width = SIZES.encoder_ffn_embed_dim, SIZES.encoder_embed_dim
    assert model.encoder.stack.layers[0].fc1.weight.shape == (inner, width)
    assert rotary.encoder.stack.layers[0].fc1.weight.shape == (2 * inner, width)
    assert model.encoder.embeddings.positions.weight.shape == (SIZES.max_positions, width)
    learned = replace(SIZES, positions="learned")
    assert {learned.scope(n).theta for n in range(4)} == {0.0}
    assert [learned.scope(n).window for n in range(4)] == [SIZES.scope(n).window for n in range(4)]


def test_heads_of_odd_width_are_refused() -> None:
    with pytest.raises(UsageError, match="9 wide.*encoder_attention_heads"):
        build(encoder_embed_dim=36)


@pytest.mark.parametrize(
    "changes", [{}, {"token_embed_dim": 8}, {"vocab_multiple": 64}, {"gate": "none"}]
)
def test_flops_by_rule_are_counted_ones(changes: dict[str, Any]) -> None:
    """Of training with an explicit attention, on rows of which 10 of 40 positions are predicted."""
    config = replace(SIZES, **changes)
    with torch.device("meta"):
        model, tokens = TransformerLM(config, VOCABULARY), torch.zeros(3, LENGTH, dtype=torch.long)
        with FlopCounterMode(display=False) as counter, use_context(double_backward()):
            model(tokens, positions=tokens[:, :10]).sum().backward()
    rule = masked_lm(Sizes.of(config, VOCABULARY, LENGTH), share=0.25)
    assert counter.get_total_flops() == 3 * rule


@pytest.mark.parametrize(
    ("length", "forward"), [(128, 307_789_824), (512, 333_742_080), (1024, 368_345_088)]
)
def test_flops_of_a_token_of_modern_bert(length: int, forward: int) -> None:
    base = ModernConfig(
        encoder_layers=22,
        encoder_embed_dim=768,
        encoder_ffn_embed_dim=1152,
        encoder_attention_heads=12,
    )
    assert masked_lm(Sizes.of(base, 50_368, length), share=1.0) == 3 * length * forward
