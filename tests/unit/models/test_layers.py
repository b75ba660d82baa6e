"""Layers with stacked parameters against a loop over copies, soft input."""

from collections.abc import Callable

import pytest
import torch
from second_order import derivatives, double_backward, stacked
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from metaseq_lm.forward.passes import ForwardContext, Noise, use_context
from metaseq_lm.models import layers
from metaseq_lm.models.layers import Dropout, Embedding, LayerNorm, Linear

COPIES, BATCH, LENGTH, WIDTH = 3, 2, 5, 8


@pytest.fixture(autouse=True)
def fixed() -> None:
    torch.manual_seed(0)


def compare(module: nn.Module, inputs: list[Tensor], rest: tuple = ()) -> None:
    """Expect output, gradient and double backward of copies at once to equal those of a loop."""
    module = module.double()
    parameters = stacked(module, COPIES)
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


def test_linear_copies():
    compare(Linear(WIDTH, 6), [hidden()])


def test_layer_norm_copies():
    compare(LayerNorm(WIDTH), [hidden()])


@pytest.mark.parametrize("padding_idx", [None, 0, 3])
def test_embedding_copies_of_ids(padding_idx):
    tokens = torch.randint(0, 7, (COPIES, BATCH, LENGTH))
    tokens[:, 0, 0] = 0 if padding_idx is None else padding_idx
    module = Embedding(7, WIDTH, padding_idx=padding_idx)
    parameters = stacked(module, COPIES)
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
def test_embedding_copies_of_probabilities(padding_idx):
    scores = torch.randn(COPIES, BATCH, LENGTH, 7, dtype=torch.float64)
    soft = scores.softmax(-1).requires_grad_()
    compare(Embedding(7, WIDTH, padding_idx=padding_idx), [soft])


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 0, 3])
def test_one_hot_input_is_the_lookup(padding_idx, copies):
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
def test_no_gradient_reaches_the_padding_row(soft, copies):
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


def test_dropout():
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


def test_dropout_of_many_numbers_stores_a_byte_each(monkeypatch):
    """Output and gradient are those of few numbers, which store the multipliers."""
    x = torch.randn(4, 1000, requires_grad=True)
    along, results = torch.randn(4, 1000), []
    for many, size in ((0, 1), (1 << 18, 4)):
        monkeypatch.setattr(layers, "MEMORY_SAVING_NUMEL", many)
        context = ForwardContext(Noise(9, torch.arange(4).numpy()))
        with use_context(context):
            output, stored_bytes = stored(lambda: Dropout(0.25)(x), [x])
        assert stored_bytes == size * x.numel()
        results.append([output, *torch.autograd.grad((output * along).sum(), x)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gelu_linear_stores_its_input_alone(dtype, bias, monkeypatch):
    """Output and gradients are bitwise those of GELU and a linear layer; gelu(x) is not stored."""
    monkeypatch.setattr(layers, "MEMORY_SAVING_NUMEL", 0)
    layer = Linear(32, 8, bias).to(torch.float64 if dtype == torch.float64 else torch.float32)
    x = torch.randn(3, 5, 32).to(dtype).requires_grad_()
    inputs = [x, *layer.parameters()]
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


@pytest.mark.parametrize("bias", [True, False])
def test_gelu_linear_has_second_derivatives(bias, monkeypatch):
    monkeypatch.setattr(layers, "MEMORY_SAVING_NUMEL", 0)
    layer = Linear(6, 4, bias).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    inputs = [x, *layer.parameters()]
    ours = derivatives(layers.gelu_linear(x, layer.weight, layer.bias), inputs)
    for one, other in zip(ours, derivatives(layer(F.gelu(x)), inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
