"""Heads of fine-tuned models in the form that the classes of the transformers library have.

Shapes: D hidden width, K outputs.
"""

from math import sqrt

import torch
from torch import Tensor, nn

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.models.transformer.encoder import SentenceHead
from metaseq_lm.models.transformer.span_head import SpanHead

SENTENCE, SPAN = "heads.sentence.", "heads.span."
LABEL_RANGE = "label_range"
# tanh(x * LINEAR) / LINEAR is x up to rounding for the states of a layer norm; a power of two is exact.
LINEAR = 2.0**-13
# From here on, gelu(x) is x in fp32.
GELU_LINEAR = 6.0


def add_fine_tuned_heads(heads: nn.ModuleDict, weights: dict[str, Tensor]) -> None:
    """Add to a net the heads for whole rows and for spans that `weights` hold."""
    if f"{SENTENCE}out.bias" in weights:
        outputs, width = weights[f"{SENTENCE}out.weight"].shape
        pooled = f"{SENTENCE}pooler.weight" in weights
        heads["sentence"] = SentenceHead(width, outputs, 0.0, pooled)
    if f"{SPAN}out.bias" in weights:
        heads["span"] = SpanHead(weights[f"{SPAN}out.weight"].shape[1])


def to_library_form(weights: dict[str, Tensor], base: str, place: object) -> dict[str, Tensor]:
    """Return weights whose sentence head has the layers of the library's class; the outputs are equal.

    The library has a tanh layer below the output layer (ELECTRA: a GELU layer). Where our head has
    none, that layer becomes the identity: within the linear part of tanh or GELU. The scale of
    real-valued labels goes into the output layer.

    Raises:
        MetaseqError: The library has no such head.
    """
    if f"{SENTENCE}out.weight" not in weights:
        return weights
    weights = dict(weights)
    label_range = weights.pop(LABEL_RANGE, None)
    out, bias = (weights[f"{SENTENCE}out.{kind}"].double() for kind in ("weight", "bias"))
    width = weights["encoder.stack.layers.0.ffn_norm.bias"].shape[0]
    if out.shape[1] != width:
        raise MetaseqError(
            f"{place}: its head sees two spans of a row, which no class of transformers does"
        )
    if label_range is not None:
        least, scale = label_range.double()
        out, bias = out * scale, bias * scale + least
    pooled = f"{SENTENCE}pooler.weight" in weights
    identity = torch.eye(width, dtype=out.dtype, device=out.device)
    if base == "electra" and pooled:
        raise MetaseqError(
            f"{place}: an ElectraForSequenceClassification has no tanh layer; train with "
            "task.pooled=false to export it"
        )
    if base == "electra":
        shift = largest_states(weights).to(out) + GELU_LINEAR
        weights |= {f"{SENTENCE}dense.weight": identity, f"{SENTENCE}dense.bias": shift}
        bias = bias - out @ shift
    elif not pooled:
        weights[f"{SENTENCE}pooler.weight"] = identity * LINEAR
        weights[f"{SENTENCE}pooler.bias"] = identity.new_zeros(width)
        out = out / LINEAR
    weights |= {f"{SENTENCE}out.weight": out, f"{SENTENCE}out.bias": bias}
    return {name: weight.float() for name, weight in weights.items()}


def largest_states(weights: dict[str, Tensor]) -> Tensor:
    """Return a bound (D,) of the states of a post-LN encoder, from its last layer norm."""
    last = max(int(n.split(".")[3]) for n in weights if n.startswith("encoder.stack.layers."))
    scale, shift = (
        weights[f"encoder.stack.layers.{last}.ffn_norm.{kind}"] for kind in ("weight", "bias")
    )
    return scale.abs() * sqrt(len(scale)) + shift.abs()
