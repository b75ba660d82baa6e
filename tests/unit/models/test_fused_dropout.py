"""The kernels of row noise against torch's operations: the same bits, by Triton's interpreter."""

import re
from types import ModuleType

import battery
import numpy as np
import pytest
import torch
from interpreted import interpreted_kernels
from second_order import stacked
from torch import Tensor
from torch.func import functional_call

from metaseq_lm.config.transformer import TransformerConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.forward import passes
from metaseq_lm.forward.passes import ForwardContext, Noise, TracedNoise, apply_block, use_context
from metaseq_lm.models.layers import Dropout
from metaseq_lm.models.transformer.attention import Visibility
from metaseq_lm.models.transformer.encoder import Layer

SHAPES = [(5, 7), (3, 2, 11), (2, 1030), (1, 1), (3, 9, 65)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return interpreted_kernels(monkeypatch)


def noise_of(rows: int, kernels: ModuleType | None, position: int = 0) -> Noise:
    """Return noise of some rows at a position, drawn by kernels or by the reference."""
    noise = Noise(3, np.arange(7, 7 + rows))
    noise.kernels, noise.position = kernels, position
    return noise


def dropped(
    p: float, x: Tensor, residual: Tensor | None, kernels: ModuleType | None, position: int
) -> list[Tensor]:
    """Return the output, its gradients along a fixed vector, and the position after it."""
    inputs = [t.clone().requires_grad_() for t in (x, residual) if t is not None]
    noise = noise_of(len(x), kernels, position)
    with use_context(ForwardContext(noise)):
        output = Dropout(p)(*inputs)
    along = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(output.dtype)
    gradients = torch.autograd.grad((output * along).sum(), inputs)
    return [output, *gradients, torch.tensor(noise.position)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_the_reference(shape, dtype, kernels):
    """With and without a residual, at two places of the rows, and rates near 0 and 1."""
    torch.manual_seed(1)
    x = torch.randn(shape).to(dtype)
    for kind in (None, torch.float32, dtype):
        residual = None if kind is None else torch.randn(shape).to(kind)
        for p in (0.1, 1e-6, 65535 / 65536):
            for position in (0, 5):
                wanted = dropped(p, x, residual, None, position)
                results = dropped(p, x, residual, kernels, position)
                for one, other in zip(results, wanted, strict=True):
                    assert one.dtype == other.dtype and torch.equal(one, other)


def test_masks_of_many_rows_and_words(kernels):
    """The bits of three draws one after the other, of an odd number of positions."""
    ours, reference = noise_of(33, kernels), noise_of(33, None)
    for shape in ((33, 2051), (33, 3, 5), (66, 9)):
        wanted = reference.keep(shape, 0.37, torch.bool)
        assert torch.equal(ours.dropout(torch.ones(shape), 0.37) != 0, wanted)
        wanted = reference.uniform(shape, torch.float64)
        assert torch.equal(ours.uniform(shape, torch.float64), wanted)
    assert ours.position == reference.position


def test_first_and_second_derivatives(kernels):
    keys = noise_of(2, None).tensor()
    x, residual = (torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def function(x: Tensor, residual: Tensor) -> Tensor:
        output: Tensor = kernels.dropout(x.sin(), residual.exp(), keys, 2, 30_000)
        return output

    assert torch.autograd.gradcheck(function, (x, residual))
    assert torch.autograd.gradgradcheck(function, (x, residual))


def test_the_graph_stores_the_keys_alone(kernels):
    sizes = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    noise = noise_of(4, kernels)
    x = torch.randn(4, 1000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        noise.dropout(x, 0.1, torch.randn(4, 1000))
    assert sizes == [4]


def test_inputs_and_gradients_that_are_not_contiguous(kernels):
    x = torch.randn(6, 5, 4).transpose(1, 2)[::2].requires_grad_()
    outputs, gradients = [], []
    for chosen in (kernels, None):
        with use_context(ForwardContext(noise_of(3, chosen))):
            outputs.append(Dropout(0.5)(x, x))
        gradients += torch.autograd.grad(outputs[-1].sum(), x)  # an expanded gradient
    assert torch.equal(*outputs) and torch.equal(*gradients)


def test_no_rows_and_no_numbers(kernels):
    for shape in ((0, 5), (3, 0)):
        for chosen in (kernels, None):
            with use_context(ForwardContext(noise_of(shape[0], chosen))):
                assert Dropout(0.5)(torch.ones(shape)).shape == shape


def test_a_residual_of_another_shape(kernels):
    with pytest.raises(ValueError, match=r"\(3,\).*\(2, 3\)"):
        noise_of(2, kernels).dropout(torch.ones(2, 3), 0.1, torch.ones(3))


@pytest.mark.parametrize("p", [-0.1, 1.0, 0.999999])
def test_rates_that_leave_nothing(p):
    with pytest.raises(UsageError, match="65535/65536"):
        Dropout(p)


def test_rate_0_returns_the_input():
    x = torch.randn(3)
    assert Dropout(0.0)(x) is x
    assert torch.equal(Dropout(0.0)(x, x), x + x)


def test_compiled_passes_use_no_kernel(monkeypatch):
    monkeypatch.setattr(passes, "cuda_kernels", lambda kind: pytest)
    assert noise_of(2, pytest).kernels is Noise(3, np.arange(2)).kernels is pytest
    assert TracedNoise(noise_of(2, None).traced_keys()).kernels is None


CONFIG = TransformerConfig(
    encoder_layers=1,
    encoder_embed_dim=8,
    encoder_ffn_embed_dim=12,
    encoder_attention_heads=2,
    dropout=0.3,
    attention_dropout=0.2,
    activation_dropout=0.1,
)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_layer(recompute, autocast, kernels):
    """Attention, residuals and activations: bitwise the reference, also under autocast."""
    torch.manual_seed(3)
    layer, x = Layer(CONFIG), torch.randn(3, 7, 8)
    results = []
    for chosen in (kernels, None):
        settings = ForwardContext(noise_of(3, chosen), recompute=recompute)
        with use_context(settings), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = apply_block(layer, x, Visibility())
        gradients = torch.autograd.grad(output.square().sum(), list(layer.parameters()))
        results.append([output, *gradients])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_copies_of_a_layer(kernels):
    """Stacked weights, whose second derivatives are those of the reference."""
    torch.manual_seed(3)
    layer = Layer(CONFIG).double()
    copies = stacked(layer, 2)
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    results = []
    for chosen in (kernels, None):
        with use_context(ForwardContext(noise_of(6, chosen), double_backward=True)):
            output = functional_call(layer, copies, (x, Visibility()))
        first = torch.autograd.grad(output.square().sum(), [*copies.values()], create_graph=True)
        size = torch.stack([g.square().sum() for g in first]).sum()
        results.append([output, *first, *torch.autograd.grad(size, [*copies.values()])])
    for one, other in zip(*results, strict=True):  # sums of gradients have another order
        assert (one - other).abs().max() <= 1e-13 * other.abs().max()


SECOND_ORDER = pytest.param(("meta_pseudo_label_soft", 0), marks=pytest.mark.slow)


@pytest.mark.parametrize("case", [("masked_lm", 0), SECOND_ORDER], ids=str)
def test_training(case, moons, tmp_path, kernels, monkeypatch):
    """One update; the second case differentiates gradients."""
    weights = []
    for chosen in (kernels, None):
        monkeypatch.setattr(passes, "cuda_kernels", lambda kind: chosen)
        more = battery.dropped("trainer.max_update=1", "trainer.valid_split=''")
        weights.append(battery.train(battery.configure(moons, tmp_path / str(chosen), case, *more)))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_kernels_for_an_h100(kind, with_residual):
    """Compiled without one: several numbers a load, and every product and sum rounded."""
    pytest.importorskip("triton", reason="Triton is missing: pip install triton (300 MB)")
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from metaseq_lm.forward import cuda_noise

    types = {"bf16": tl.bfloat16, "fp32": tl.float32}
    pointers = {"x": f"*{kind}", "out": f"*{kind}", "keys": "*i64"}
    constants = {"DTYPE": types[kind], "WIDE": tl.float32, "SUM": tl.float32, "BLOCK": 256}
    if with_residual:
        pointers |= {"residual": "*fp32", "out": "*fp32"}
    else:
        constants["residual"] = None
    arguments = cuda_noise._dropout_kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32") for name in arguments
    }
    aligned = [i for i, name in enumerate(arguments) if name in pointers or name == "numbers"]
    source = ASTSource(
        cuda_noise._dropout_kernel,
        signature,
        constants,
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"enable_fp_fusion": False}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    # Without a rounding mode an assembler may fuse a product and a sum, which then rounds once.
    assert not re.search(r"\bfma\.|\b(mul|add)\.f(32|64)\b", ptx) and "mul.rn.f32" in ptx
    assert "div.rn.f64" in ptx and ("cvt.rn.bf16.f32" in ptx) == (kind == "bf16")
    width = {"bf16": "v2", "fp32": "v4"}[kind]  # of 32 bits: four numbers, those of a word
    assert f"ld.global.{width}.b32" in ptx and "st.global.v" in ptx
