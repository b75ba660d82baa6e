"""Padded and packed rows as sequences of any length, with a stand-in for the flash kernel."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from metaseq_lm.core.batch import Layout
from metaseq_lm.data.corpus.rows import layout_of
from metaseq_lm.forward.passes import ForwardContext, use_context
from metaseq_lm.models.layers import Dropout
from metaseq_lm.models.transformer import attention
from metaseq_lm.models.transformer.attention import Visibility, _Sequences, mix_values
from metaseq_lm.runs.flops import Counter, attention_flops

ROWS, HEADS, LENGTH, WIDTH = 3, 2, 12, 8
PADDED = layout_of(np.array([12, 5, 9]), LENGTH)
DOCUMENTS = torch.tensor(
    [[0, 0, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3], [0] * 12, [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]]
)
PACKED = Layout(documents=DOCUMENTS, sequences=7)
PADDED_DOCUMENTS = replace(PADDED, documents=DOCUMENTS, sequences=20)


def reference_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    starts_of_keys: Tensor,
    longest: int,
    longest_keys: int,
    p: float,
    is_causal: bool,
    debug: bool,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor]:
    """Do what the documentation of flash attention says, a sequence at a time."""
    assert starts is starts_of_keys and longest == longest_keys and not p and not debug
    assert starts.dtype == torch.int32 and starts[0] == 0 and starts[-1] == len(q)
    outputs = []
    for begin, end in zip(starts.tolist(), starts.tolist()[1:]):
        assert end - begin <= longest
        offset = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        seen = torch.ones_like(offset, dtype=torch.bool)
        if window_size_left >= 0:
            seen &= offset <= window_size_left
        if window_size_right >= 0:
            seen &= -offset <= window_size_right
        if is_causal:
            seen &= offset >= 0
        parts = (part[begin:end].transpose(0, 1) for part in (q, k, v))
        outputs.append(F.scaled_dot_product_attention(*parts, attn_mask=seen).transpose(0, 1))
    return (torch.cat(outputs),)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of a GPU, also in fp64."""
    monkeypatch.setattr(attention, "_takes_sequences", lambda device: True)
    monkeypatch.setattr(_Sequences, "take", lambda sequences, q: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", reference_kernel)


@pytest.mark.parametrize("distance", [0, 1, 3])
@pytest.mark.parametrize("reach", ["both", "causal"])
@pytest.mark.parametrize(
    "layout", [Layout(), PADDED, PACKED, PADDED_DOCUMENTS], ids=("rows", "padded", "packed", "all")
)
def test_the_attention_of_masks(layout, reach, distance, on_gpu):
    """Output and gradients at all tokens but padding."""
    torch.manual_seed(1)
    shape = (ROWS, HEADS, LENGTH, WIDTH)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    layout = replace(layout, reach=reach)
    built = Visibility.of(layout, LENGTH, torch.device("cpu"), distance)
    hides = layout.documents is not None or layout.padding is not None or distance > 0
    assert (built.sequences is not None) == hides
    real = ~layout.padding_of(torch.zeros(ROWS, LENGTH))[:, None, :, None]
    results = []
    for visibility in (replace(built, unpacking=None), Visibility(built.mask, built.is_causal)):
        output = mix_values(*inputs, visibility, Dropout(0.1).eval()) * real
        gradients = torch.autograd.grad(output.square().sum(), inputs)
        results.append([output, *gradients])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reach", ["anticausal", "prefix", "ranked"])
def test_other_reaches_use_masks(reach, on_gpu):
    layout = replace(PACKED, prefix=torch.tensor([2, 1, 0]), ranks=DOCUMENTS)
    visibility = Visibility.of(replace(layout, reach=reach), LENGTH, torch.device("cpu"))
    assert visibility.sequences is None and visibility.mask is not None


def test_dropout_and_second_derivatives_use_masks(on_gpu):
    visibility = Visibility.of(PADDED, LENGTH, torch.device("cpu"))
    q = torch.randn(ROWS, HEADS, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    for context, layer in (
        (ForwardContext(), Dropout(0.1)),
        (ForwardContext(double_backward=True), Dropout(0.1).eval()),
    ):
        with use_context(context):
            output = mix_values(q, q, q, visibility, layer)
        (gradient,) = torch.autograd.grad(output.square().sum(), q, create_graph=True)
        assert torch.autograd.grad(gradient.sum(), q)[0].abs().max() > 0


def test_layouts_that_do_not_know_their_sequences_use_masks(on_gpu):
    for layout in (Layout(PADDED.padding), Layout(documents=DOCUMENTS), PACKED.rows([0, 0, 1])):
        assert Visibility.of(layout, LENGTH, torch.device("cpu")).sequences is None


@pytest.mark.parametrize(
    "shape, dtype, takes",
    [
        ((3, 2, LENGTH, 8), torch.bfloat16, True),
        ((3, 2, LENGTH, 8), torch.float32, False),
        ((3, 2, LENGTH, 12), torch.bfloat16, False),
        ((6, 2, LENGTH, 8), torch.bfloat16, False),  # rows that share the mask of three
    ],
)
def test_queries_that_the_kernel_takes(shape, dtype, takes):
    sequences = _Sequences.of(PACKED, LENGTH, False, 0)
    assert sequences is not None and sequences.take(torch.empty(shape, dtype=dtype)) == takes


def test_starts():
    """Those of documents, of padding inside the last one, and past the last sequence the end."""
    sequences = _Sequences.of(PADDED_DOCUMENTS, LENGTH, False, 0)
    assert sequences is not None and sequences.starts is not None
    wanted = [0, 2, 5, 6, 12, 17, 24, 28, 33]
    assert sequences.starts.tolist() == wanted + [36] * (21 - len(wanted))


def test_more_sequences_than_the_layout_says():
    with pytest.raises(RuntimeError):
        _Sequences.of(replace(PACKED, sequences=6), LENGTH, False, 0)
    copied = PACKED.repeated(2)
    assert copied.sequences == 14 and _Sequences.of(copied, LENGTH, False, 0) is not None


def test_cpus_take_none():
    visibility = Visibility.of(PADDED, LENGTH, torch.device("cpu"))
    assert visibility.sequences is None


@pytest.mark.parametrize("starts", [None, torch.empty(9, dtype=torch.int32, device="meta")])
def test_counted_flops_are_those_of_rows(starts):
    """Torch's own kernel, without values: it has a derivative, also with windows."""
    shape: Any = (ROWS, HEADS, LENGTH, WIDTH)
    q, k, v = (
        torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    with Counter() as counter:
        mixed = _Sequences(starts, LENGTH, False, 5).attend(q, k, v)
        assert mixed.shape == shape
        assert counter.total == attention_flops(shape, shape, shape)
        gradients = torch.autograd.grad(mixed.sum(), (q, k, v))
    assert [g.shape for g in gradients] == [shape] * 3
    assert counter.total == 3 * attention_flops(shape, shape, shape)
