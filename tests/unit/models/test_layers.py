"""Layers with stacked parameters against a loop over copies, soft input, attention kernels."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from metaseq_lm.core.errors import UsageError
from metaseq_lm.forward.context import ForwardContext, Noise, use_context
from metaseq_lm.models import layers
from metaseq_lm.models.layers import Dropout, Embedding, LayerNorm, Linear, SelfAttention

COPIES, BATCH, LENGTH, WIDTH = 3, 2, 5, 8


@pytest.fixture(autouse=True)
def fixed() -> None:
    torch.manual_seed(0)


def double_backward() -> ForwardContext:
    return ForwardContext(None, double_backward=True)


def stacked(module: nn.Module) -> dict[str, Tensor]:
    """Return random parameters with a leading axis of copies."""
    return {
        name: torch.randn(COPIES, *p.shape, dtype=torch.float64).requires_grad_()
        for name, p in module.named_parameters()
    }


def derivatives(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return the output, its gradient along a fixed vector, and the gradient of that one's size."""
    generator = torch.Generator().manual_seed(5)
    along = torch.randn(output.shape, generator=generator, dtype=output.dtype)
    first = torch.autograd.grad((output * along).sum(), inputs, create_graph=True)
    size = sum(g.square().sum() for g in first)
    assert isinstance(size, Tensor)
    second = torch.autograd.grad(size, inputs, allow_unused=True)
    zeros = [torch.zeros_like(i) if g is None else g for g, i in zip(second, inputs)]
    return [output, *first, *zeros]


def compare(module: nn.Module, inputs: list[Tensor], rest: tuple = ()) -> None:
    """Expect output, gradient and double backward of copies at once to equal those of a loop."""
    module = module.double()
    parameters = stacked(module)
    leaves = [*parameters.values(), *[i for i in inputs if i.requires_grad]]
    with use_context(double_backward()):
        at_once = functional_call(module, parameters, (*inputs, *rest))
        loop = torch.stack(
            [
                functional_call(
                    module,
                    {n: p[c] for n, p in parameters.items()},
                    (*(i[c] for i in inputs), *rest),
                )
                for c in range(COPIES)
            ]
        )
        assert at_once.shape == loop.shape
        for found, wanted in zip(derivatives(at_once, leaves), derivatives(loop, leaves)):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(at_once[0], at_once[1])


def hidden() -> Tensor:
    return torch.randn(COPIES, BATCH, LENGTH, WIDTH, dtype=torch.float64).requires_grad_()


def test_linear_copies() -> None:
    compare(Linear(WIDTH, 6), [hidden()])


def test_layer_norm_copies() -> None:
    compare(LayerNorm(WIDTH), [hidden()])


@pytest.mark.parametrize("padding_idx", [None, 0, 3])
def test_embedding_copies_of_ids(padding_idx: int | None) -> None:
    tokens = torch.randint(0, 7, (COPIES, BATCH, LENGTH))
    tokens[:, 0, 0] = 0 if padding_idx is None else padding_idx
    module = Embedding(7, WIDTH, padding_idx=padding_idx)
    parameters = stacked(module)
    at_once = functional_call(module, parameters, (tokens,))
    loop = torch.stack(
        [F.embedding(tokens[c], parameters["weight"][c], padding_idx) for c in range(COPIES)]
    )
    assert torch.equal(at_once, loop)
    along = torch.randn(at_once.shape, dtype=torch.float64)
    grads = [
        torch.autograd.grad((o * along).sum(), parameters["weight"])[0] for o in (at_once, loop)
    ]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("padding_idx", [None, 0, 3])
def test_embedding_copies_of_probabilities(padding_idx: int | None) -> None:
    scores = torch.randn(COPIES, BATCH, LENGTH, 7, dtype=torch.float64)
    soft = scores.softmax(-1).requires_grad_()
    compare(Embedding(7, WIDTH, padding_idx=padding_idx), [soft])


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 0, 3])
def test_one_hot_input_is_the_lookup(padding_idx: int | None, copies: bool) -> None:
    lead = (COPIES,) if copies else ()
    module = Embedding(7, WIDTH, padding_idx=padding_idx).double()
    weight = torch.randn(*lead, 7, WIDTH, dtype=torch.float64).requires_grad_()
    tokens = torch.randint(0, 7, (*lead, BATCH, LENGTH))
    tokens[..., 0] = 3
    hot = F.one_hot(tokens, 7).double()
    outputs = [functional_call(module, {"weight": weight}, (i,)) for i in (tokens, hot)]
    assert torch.equal(*outputs)
    grads = [torch.autograd.grad(o.pow(3).sum(), weight)[0] for o in outputs]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_no_gradient_reaches_the_padding_row(soft: bool, copies: bool) -> None:
    lead = (COPIES,) if copies else ()
    module = Embedding(7, WIDTH, padding_idx=3).double()
    weight = torch.randn(*lead, 7, WIDTH, dtype=torch.float64).requires_grad_()
    tokens = torch.randint(0, 7, (*lead, BATCH, LENGTH))
    tokens[..., :2] = 3
    given = torch.rand(*lead, BATCH, LENGTH, 7, dtype=torch.float64) if soft else tokens
    output = functional_call(module, {"weight": weight}, (given,))
    (grad,) = torch.autograd.grad(output.square().sum(), weight)
    assert grad[..., 3, :].abs().max() < 1e-12
    assert grad.abs().max() > 1
    if soft:
        # The row takes part in the output all the same.
        torch.testing.assert_close(output, given @ (weight if not copies else weight.unsqueeze(1)))


def mask_of(*lengths: int) -> Tensor:
    """Return which keys may be seen, (rows, 1, 1, LENGTH)."""
    return (torch.arange(LENGTH) < torch.tensor(lengths)[:, None])[:, None, None]


@pytest.mark.parametrize("mask", [None, mask_of(LENGTH, 3, 2, 1, 4, 5)])
def test_attention_copies(mask: Tensor | None) -> None:
    module = SelfAttention(WIDTH, 2, 0.0).double()
    parameters = stacked(module)
    x = hidden()
    with use_context(double_backward()):
        at_once = functional_call(module, parameters, (x, mask))
        loop = torch.stack(
            [
                functional_call(
                    module,
                    {n: p[c] for n, p in parameters.items()},
                    (x[c], None if mask is None else mask[c * BATCH : (c + 1) * BATCH]),
                )
                for c in range(COPIES)
            ]
        )
        leaves = [*parameters.values(), x]
        for found, wanted in zip(derivatives(at_once, leaves), derivatives(loop, leaves)):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mask", [None, mask_of(5, 3)])
def test_fused_and_explicit_attention_agree(mask: Tensor | None) -> None:
    module = SelfAttention(WIDTH, 2, 0.0).double()
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64).requires_grad_()
    found = []
    for this in (ForwardContext(), double_backward()):
        with use_context(this):
            output = module(x, mask)
        found.append(
            (output, *torch.autograd.grad(output.square().sum(), [x, *module.parameters()]))
        )
    for fused, explicit in zip(*found):
        torch.testing.assert_close(fused, explicit, rtol=1e-10, atol=1e-12)


def naive_attention(module: SelfAttention, x: Tensor, mask: Tensor | None) -> Tensor:
    """Return attention written with loops over rows, heads and queries."""
    q, k, v = F.linear(x, module.in_proj.weight, module.in_proj.bias).chunk(3, -1)
    size = WIDTH // module.heads
    out = torch.zeros_like(x)
    for row in range(x.shape[0]):
        seen = [at for at in range(LENGTH) if mask is None or mask[row, 0, 0, at]]
        for head in range(module.heads):
            part = slice(head * size, (head + 1) * size)
            for at in range(LENGTH):
                scores = [(q[row, at, part] @ k[row, s, part]) / math.sqrt(size) for s in seen]
                weights = torch.stack(scores).softmax(0)
                out[row, at, part] = sum(w * v[row, s, part] for w, s in zip(weights, seen))
    return module.out_proj(out)


@pytest.mark.parametrize("this", [ForwardContext, double_backward])
@pytest.mark.parametrize("mask", [None, mask_of(5, 3)])
def test_attention_written_out(mask: Tensor | None, this: Callable) -> None:
    module = SelfAttention(WIDTH, 2, 0.0).double()
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    with torch.no_grad(), use_context(this()):
        torch.testing.assert_close(module(x, mask), naive_attention(module, x, mask))


def test_the_fused_kernel_is_used_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    kernel = F.scaled_dot_product_attention

    def counted(*arguments: Tensor, **more: Tensor) -> Tensor:
        calls.append(1)
        return kernel(*arguments, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    x = torch.randn(BATCH, LENGTH, WIDTH)
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
            module.train(training)(x, None)
        assert len(calls) == wanted


def test_fused_attention_of_a_cpu_is_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
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
        found = attention(torch.randn(3, 5, 8), None)
    found.sum().backward()
    assert found.dtype == torch.bfloat16
    assert seen == [torch.float32] * 3


def test_dropout() -> None:
    x = torch.ones(4, 1000)
    layer = Dropout(0.25)
    noise = Noise(9, torch.arange(4).numpy())
    with use_context(ForwardContext(noise)):
        one, other = layer(x), layer(x)
    assert one.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert abs((one == 0).double().mean() - 0.25) < 0.03
    assert not torch.equal(one, other)
    assert torch.equal(layer.eval()(x), x) and torch.equal(Dropout(0.0)(x), x)
    torch.testing.assert_close(Dropout(0.5)(x).mean(), torch.tensor(1.0), atol=0.1, rtol=0)


def stored(function: Callable[[], Tensor], inputs: list[Tensor]) -> tuple[Tensor, int]:
    """Return the output of `function` and the bytes that its graph stores besides its inputs."""
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = function()
    at = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    return output, sum(size for start, size in sizes.items() if start not in at)


def test_dropout_of_many_numbers_stores_a_byte_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradient are those of few numbers, which store the multipliers."""
    x = torch.randn(4, 1000, requires_grad=True)
    along, results = torch.randn(4, 1000), []
    for many, size in ((0, 1), (1 << 18, 4)):
        monkeypatch.setattr(layers, "MANY", many)
        context = ForwardContext(Noise(9, torch.arange(4).numpy()))
        with use_context(context):
            output, stored_bytes = stored(lambda: Dropout(0.25)(x), [x])
        assert stored_bytes == size * x.numel()
        results.append([output, *torch.autograd.grad((output * along).sum(), x)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gelu_linear_stores_its_input_alone(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and gradients are bitwise those of GELU and a linear layer; gelu(x) is not stored."""
    monkeypatch.setattr(layers, "MANY", 0)
    layer = Linear(32, 8).to(torch.float64 if dtype == torch.float64 else torch.float32)
    x = torch.randn(3, 5, 32).to(dtype).requires_grad_()
    inputs = [x, layer.weight, layer.bias]
    along = torch.randn(3, 5, 8).to(dtype)
    results, sizes = [], []
    for function in (
        lambda: layers.gelu_linear(x, layer.weight, layer.bias),
        lambda: layer(F.gelu(x)),
    ):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            output, size = stored(function, inputs)
        gradients = torch.autograd.grad((output * along).sum(), inputs)
        results.append([output, *gradients])
        sizes.append(size)
    for ours, separate in zip(*results, strict=True):
        assert ours.dtype == separate.dtype and torch.equal(ours, separate)
    assert sizes[0] == 0 and sizes[1] >= x.numel() * x.element_size()


def test_gelu_linear_has_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MANY", 0)
    layer = Linear(6, 4).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    inputs = [x, layer.weight, layer.bias]
    ours = derivatives(layers.gelu_linear(*inputs), inputs)
    for one, other in zip(ours, derivatives(layer(F.gelu(x)), inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_width_and_heads_must_fit() -> None:
    with pytest.raises(UsageError, match="8 is not divisible by 3"):
        SelfAttention(8, 3, 0.0)
