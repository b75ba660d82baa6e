"""Who sees whom in a layout, by its definition, in both kernels; packed rows; copies;
soft inputs.
"""

import math

import pytest
import torch
from second_order import derivatives, double_backward, stacked
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from metaseq_lm.config.models import BiLSTMConfig
from metaseq_lm.config.transformer import TransformerConfig
from metaseq_lm.core.batch import REACHES, Layout
from metaseq_lm.core.errors import UsageError
from metaseq_lm.forward.passes import ForwardContext, use_context
from metaseq_lm.methods.meta_pseudo_label.model import VirtualModel
from metaseq_lm.models.bilstm import BiLSTM
from metaseq_lm.models.transformer.attention import (
    SelfAttention,
    Visibility,
    _document_positions,
    _reach_mask,
    _Unpacking,
)
from metaseq_lm.models.transformer.encoder import TransformerLM

ROWS, LENGTH, WIDTH, VOCABULARY = 4, 7, 8, 11
PADDING = {
    "no padding": None,
    "at the end": torch.arange(LENGTH) >= torch.tensor([7, 5, 4, 7])[:, None],
    "inside": torch.arange(LENGTH) == torch.tensor([1, 3, 2, 5])[:, None],
}
DOCUMENTS = {
    "one document": None,
    "packed": torch.tensor(
        [[0, 0, 0, 1, 1, 1, 1], [3, 3, 4, 4, 4, 4, 4], [0, 1, 2, 3, 4, 5, 6], [9] * 7]
    ),
}
BY_ROW = torch.tensor([1, 0, 3, 2])
RANKED_BY_ROW = torch.tensor([4, 2, 4, 1])
REACH = {**dict(zip(REACHES, REACHES)), "by row": BY_ROW, "ranked by row": RANKED_BY_ROW}
PREFIX = torch.tensor([2, 0, 3, 7])
# Groups of two, a permutation, groups that interleave, one group.
RANKS = torch.tensor(
    [[0, 0, 1, 1, 2, 2, 3], [3, 0, 6, 1, 5, 2, 4], [1, 0, 1, 0, 1, 0, 1], [5] * LENGTH]
)
KERNELS = pytest.mark.parametrize("context", [ForwardContext, double_backward])


# That of each token's document.
PREFIXES = torch.tensor(
    [[2, 2, 2, 1, 1, 1, 1], [0, 0, 5, 5, 5, 5, 5], [1, 0, 1, 1, 0, 1, 1], [4] * 7]
)


def layouts() -> dict[str, Layout]:
    """Return layouts of ROWS rows by name."""
    by_document = {
        f"{reach} by document, {padding}, packed": Layout(
            PADDING[padding], DOCUMENTS["packed"], REACH[reach], PREFIXES
        )
        for reach in ("prefix", "by row")
        for padding in PADDING
    }
    return by_document | {
        f"{reach}, {padding}, {documents}": Layout(
            PADDING[padding], DOCUMENTS[documents], REACH[reach], PREFIX, RANKS
        )
        for reach in REACH
        for padding in PADDING
        for documents in DOCUMENTS
    }


LAYOUTS = layouts()


@pytest.fixture(autouse=True)
def fixed() -> None:
    torch.manual_seed(0)


def sees(layout: Layout, row: int, query: int, key: int) -> bool:
    """Say whether a token sees another one, as the docstring of Layout defines it."""
    if layout.padding is not None and layout.padding[row, key]:
        return False
    position = key
    if layout.documents is not None:
        numbers = layout.documents[row].tolist()
        if numbers[key] != numbers[query]:
            return False
        position = key - numbers.index(numbers[key])
    reach = layout.reach if isinstance(layout.reach, str) else REACHES[layout.reach[row]]
    if reach == "both":
        return True
    if reach == "anticausal":
        return key >= query
    if reach == "ranked":
        return bool(layout.ranks[row, key] <= layout.ranks[row, query])
    prefix = layout.prefix[row, key] if layout.prefix.dim() == 2 else layout.prefix[row]
    in_prefix = reach == "prefix" and position < prefix
    return key <= query or bool(in_prefix)


def real(layout: Layout, row: int) -> list[int]:
    """Return the positions of a row that are no padding."""
    if layout.padding is None:
        return list(range(LENGTH))
    return [at for at in range(LENGTH) if not layout.padding[row, at]]


def build() -> TransformerLM:
    """Return a model of two layers whose weights are large, so that mistakes are."""
    config = TransformerConfig(
        *(2, WIDTH, 16, 2), max_positions=12, dropout=0.0, attention_dropout=0.0
    )
    model = TransformerLM(config, VOCABULARY).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.7)
    return model


@KERNELS
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_model_sees_what_the_layout_says(name, context):
    """Of soft inputs, by the derivative of each output by each input."""
    model, layout = build(), LAYOUTS[name]
    inputs = torch.rand(ROWS, LENGTH, VOCABULARY, dtype=torch.float64).requires_grad_()
    with use_context(context()):
        outputs = model(inputs, layout)
    assert outputs.isfinite().all()
    for query in range(LENGTH):
        (slope,) = torch.autograd.grad(outputs[:, query].sum(), inputs, retain_graph=True)
        for row in range(ROWS):
            if query not in real(layout, row):
                continue
            moved = (slope[row].abs().sum(-1) > 0).tolist()
            assert moved == [sees(layout, row, query, key) for key in range(LENGTH)]


def naive_attention(module: SelfAttention, x: Tensor, layout: Layout) -> Tensor:
    """Return attention written with loops over rows, heads and queries; 0 at padding."""
    q, k, v = F.linear(x, module.in_proj.weight, module.in_proj.bias).chunk(3, -1)
    size = WIDTH // module.heads
    out = torch.zeros_like(x)
    for row in range(ROWS):
        for at in real(layout, row):
            seen = [key for key in range(LENGTH) if sees(layout, row, at, key)]
            for head in range(module.heads):
                part = slice(head * size, (head + 1) * size)
                scores = [(q[row, at, part] @ k[row, s, part]) / math.sqrt(size) for s in seen]
                weights = torch.stack(scores).softmax(0)
                out[row, at, part] = sum(w * v[row, s, part] for w, s in zip(weights, seen))
    return module.out_proj(out)


@KERNELS
@pytest.mark.parametrize("name", LAYOUTS)
def test_attention_written_out(name, context):
    module, layout = SelfAttention(WIDTH, 2, 0.0).double(), LAYOUTS[name]
    x = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    with torch.no_grad(), use_context(context()):
        mixed = module(x, Visibility.of(layout, LENGTH, x.device))
        wanted = naive_attention(module, x, layout)
    for row in range(ROWS):
        at = real(layout, row)
        torch.testing.assert_close(mixed[row, at], wanted[row, at], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LAYOUTS)
def test_both_kernels_have_the_same_gradients(name):
    module, layout = SelfAttention(WIDTH, 2, 0.0).double(), LAYOUTS[name]
    x = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64).requires_grad_()
    visibility = Visibility.of(layout, LENGTH, x.device)
    results = []
    for context in (ForwardContext(), double_backward()):
        with use_context(context):
            output = module(x, visibility)
        gradients = torch.autograd.grad(output.square().sum(), [x, *module.parameters()])
        results.append([output, *gradients])
    for fused, explicit in zip(*results):
        torch.testing.assert_close(fused, explicit, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("reach", REACHES)
def test_packed_rows_are_rows_alone(reach, soft):
    """Outputs, first and second derivatives by all weights, and by soft inputs."""
    model, lengths = build(), (4, 1, 3)
    row = torch.randint(1, VOCABULARY, (sum(lengths) + 2,))
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor([*lengths, 2]))
    tokens = row
    if soft:
        tokens = torch.rand(len(row), VOCABULARY, dtype=torch.float64).requires_grad_()
    leaves = [*model.parameters(), *([tokens] if soft else [])]
    prefix, ranks = torch.tensor([2]), torch.arange(len(row)) // 2
    padding = (torch.arange(len(row)) >= sum(lengths))[None]
    packed = Layout(padding, documents[None], reach, prefix, ranks[None])
    results = []
    with use_context(double_backward()):
        together = model(tokens[None], packed)[0, : sum(lengths)]
        results.append(derivatives(together, leaves))
        parts = zip(tokens.split([*lengths, 2])[:-1], ranks.split([*lengths, 2]))
        alone = [
            model(part[None], Layout(reach=reach, prefix=prefix, ranks=of_part[None]))[0]
            for part, of_part in parts
        ]
        results.append(derivatives(torch.cat(alone), leaves))
    for one, other in zip(*results, strict=True):
        scale = max(1.0, other.abs().max().item())
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "prefix by document, at the end, packed",
        "by row, at the end, one document",
        "ranked, at the end, one document",
    ],
)
def test_copies_of_a_model_have_their_layouts(name, soft):
    """Two models with two rows each: output, gradient and double backward of each by itself."""
    model, copies = build(), 2
    layout = LAYOUTS[name].map(lambda tensor: tensor.unflatten(0, (copies, -1)))
    virtual = VirtualModel(model)
    vector = virtual.vector() + 0.3 * torch.randn(copies, len(virtual.vector()))
    vector = vector.double().requires_grad_()
    tokens = torch.randint(1, VOCABULARY, (copies, ROWS // copies, LENGTH))
    if soft:
        tokens = torch.rand(*tokens.shape, VOCABULARY, dtype=torch.float64)
    with use_context(double_backward()):
        at_once = virtual(vector, tokens, layout)
        loop = [virtual(vector[c], tokens[c], layout.rows(c)) for c in range(copies)]
        results = [derivatives(x, [vector]) for x in (at_once, torch.stack(loop))]
    for one, other in zip(*results, strict=True):
        scale = other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10 * scale)


@pytest.mark.parametrize("name", LAYOUTS)
def test_repeated_rows_have_the_layout_of_each(name):
    model, layout = build(), LAYOUTS[name]
    tokens = torch.randint(1, VOCABULARY, (ROWS, 2, LENGTH))
    together = model(tokens, layout.repeated(2))
    for number in range(2):
        alone = model(tokens[:, number], layout)
        torch.testing.assert_close(together[:, number], alone, rtol=1e-12, atol=1e-12)


def test_positions_start_in_each_document():
    documents = torch.tensor([[[1, 1, 2, 2, 2, 3], [0, 1, 1, 1, 5, 5]]])
    assert _document_positions(documents).tolist() == [[[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 0, 1]]]


def test_a_row_of_padding_sees_something():
    padding = torch.tensor([[False, True], [True, True]])
    visibility = Visibility.of(Layout(padding), 2, padding.device)
    assert visibility.mask is not None
    assert visibility.mask.tolist() == [[[[True, False]]], [[[True, True]]]]


def test_an_unknown_reach_is_named():
    with pytest.raises(ValueError, match="'left': .*causal, anticausal"):
        Layout(reach="left")
    with pytest.raises(ValueError, match="of the prefix"):
        Layout(reach="prefix")
    with pytest.raises(ValueError, match="the ranks"):
        Layout(reach="ranked")


@pytest.mark.parametrize("distance", [0, 3])
@pytest.mark.parametrize("reach", ["both", "causal", "anticausal", "prefix"])
def test_ranks_stand_for_every_reach(reach, distance):
    """In local layers, but for the prefix: tokens after it see it at the whole distance."""
    at = torch.arange(LENGTH).expand(ROWS, -1)
    ranks = {
        "both": torch.zeros_like(at),
        "causal": at,
        "anticausal": -at,
        "prefix": (at - PREFIX[:, None] + 1).clamp(min=0),
    }
    ranked = _reach_mask(Layout(reach="ranked", ranks=ranks[reach]), LENGTH, at.device, distance)
    wanted = _reach_mask(Layout(reach=reach, prefix=PREFIX), LENGTH, at.device, distance)
    is_equal = torch.equal(ranked, wanted.expand(ROWS, -1, -1))
    assert is_equal is not (reach == "prefix" and distance > 0)


@pytest.mark.parametrize("name", ["causal, no padding, one document", "both, no padding, packed"])
def test_recurrent_networks_refuse_what_they_cannot_follow(name):
    net = BiLSTM(BiLSTMConfig(1, 4, 6, 0.0), VOCABULARY)
    with pytest.raises(UsageError, match="recurrent network"):
        net(torch.ones(ROWS, LENGTH, dtype=torch.long), LAYOUTS[name])


def mask_of(*lengths: int) -> Tensor:
    """Return which keys may be seen, (rows, 1, 1, LENGTH)."""
    return (torch.arange(LENGTH) < torch.tensor(lengths)[:, None])[:, None, None]


@pytest.mark.parametrize("mask", [None, mask_of(LENGTH, 3, 2, 1, 4, 5)])
def test_attention_copies(mask):
    module, copies, rows = SelfAttention(WIDTH, 2, 0.0).double(), 3, 2
    parameters = stacked(module, copies)
    x = torch.randn(copies, rows, LENGTH, WIDTH, dtype=torch.float64).requires_grad_()
    with use_context(double_backward()):
        at_once = functional_call(module, parameters, (x, Visibility(mask)))
        loop = []
        for c in range(copies):
            part = None if mask is None else mask[c * rows : (c + 1) * rows]
            weights = {n: p[c] for n, p in parameters.items()}
            loop.append(functional_call(module, weights, (x[c], Visibility(part))))
        leaves = [*parameters.values(), x]
        results = [derivatives(output, leaves) for output in (at_once, torch.stack(loop))]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def noted_kernel(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Return a list to which each call of torch's kernel adds its keywords."""
    calls: list[dict] = []
    kernel = F.scaled_dot_product_attention

    def noted(*arguments: Tensor, **more: Tensor) -> Tensor:
        calls.append(more)
        return kernel(*arguments, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    return calls


def test_the_fused_kernel_is_used_where_it_can_be(monkeypatch):
    calls = noted_kernel(monkeypatch)
    x = torch.randn(ROWS, LENGTH, WIDTH)
    dropping, plain = SelfAttention(WIDTH, 2, 0.1), SelfAttention(WIDTH, 2, 0.0)
    for module, training, this, wanted in (
        (plain, True, ForwardContext(), 1),
        (dropping, True, ForwardContext(), 0),
        (dropping, False, ForwardContext(), 1),
        (plain, True, double_backward(), 0),
        (plain, False, double_backward(), 0),
    ):
        calls.clear()
        with use_context(this):
            module.train(training)(x, Visibility())
        assert len(calls) == wanted


def test_causal_rows_need_no_mask(monkeypatch):
    """So that the kernel may skip what nobody sees."""
    calls = noted_kernel(monkeypatch)
    model = build().eval()
    model(torch.ones(ROWS, LENGTH, dtype=torch.long), Layout(reach="causal"))
    assert [call["is_causal"] and call["attn_mask"] is None for call in calls] == [True, True]


SHORT_DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [5, 5, 6, 6, 6, 7, 7]])


def test_documents_are_unpacked_as_in_the_docstring():
    """Two documents of one row; in the second case the padding of a row is left out."""
    documents = torch.tensor([[1, 1, 2, 2, 3, 3]])
    unpacking = _Unpacking.of(documents, None, is_causal=True)
    assert unpacking.tokens.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert unpacking.slots.tolist() == [0, 1, 2, 3, 4, 5]
    padding = torch.tensor([[False, True, False, False, True, True]])
    unpacking = _Unpacking.of(documents, padding, is_causal=True)
    assert unpacking.tokens.tolist() == [[0, 0], [2, 3], [0, 0]]
    assert unpacking.slots.tolist() == [0, 6, 2, 3, 6, 6]
    for longer in ([[1, 1, 1]], [[1, 1, 1, 2]]):  # as many computations as the row, or more
        assert _Unpacking.of(torch.tensor(longer * 2), None, is_causal=True) is None


@pytest.mark.parametrize(
    "padded", [[], [(0, 6), (1, 6)], [(0, 1), (1, 3)], [(1, 2), (1, 3), (1, 4)]]
)
@pytest.mark.parametrize("reach", ["both", "causal"])
def test_unpacked_documents_are_masked_rows(reach, padded, monkeypatch):
    """Outputs and gradients at real tokens, padding at an end, inside, and of a whole document."""
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    for at in padded:
        padding[at] = True
    layout = Layout(padding, SHORT_DOCUMENTS, reach)
    model, tokens = build(), torch.randint(1, VOCABULARY, (2, LENGTH))
    calls, results = noted_kernel(monkeypatch), []
    for is_unpacked in (True, False):
        if not is_unpacked:
            monkeypatch.setattr(_Unpacking, "of", lambda *_: None)
        calls.clear()
        output = model(tokens, layout)[~padding]
        assert ([call["attn_mask"] is None for call in calls] == [True] * 2) is (
            is_unpacked and reach == "causal"
        )
        gradients = torch.autograd.grad(output.square().sum(), list(model.parameters()))
        results.append([output, *gradients])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_a_mask_is_made_once_for_all_layers(monkeypatch):
    calls = noted_kernel(monkeypatch)
    model = build().eval()
    model(torch.ones(ROWS, LENGTH, dtype=torch.long), LAYOUTS["causal, at the end, packed"])
    first, second = calls
    assert first["attn_mask"] is second["attn_mask"] is not None


def test_fused_attention_of_a_cpu_is_in_full_precision(monkeypatch):
    """In bf16 the states keep their type, but the kernel gets fp32, and its derivative too."""
    seen: list[torch.dtype] = []
    fused = F.scaled_dot_product_attention

    def noted(q: Tensor, *args: Tensor, **more: Tensor) -> Tensor:
        mixed = fused(q, *args, **more)
        seen.extend([q.dtype, mixed.dtype])
        mixed.register_hook(lambda grad: seen.append(grad.dtype))
        return mixed

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    attention = SelfAttention(8, 2, 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = attention(torch.randn(3, 5, 8), Visibility())
    mixed.sum().backward()
    assert mixed.dtype == torch.bfloat16
    assert seen == [torch.float32] * 3


def test_width_and_heads_must_fit():
    with pytest.raises(UsageError, match=r"\b8\b.*divisible.*\b3\b"):
        SelfAttention(8, 3, 0.0)
