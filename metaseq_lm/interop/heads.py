"""Converts heads of fine-tuned models to the form of the transformers library's classes.

Shapes: D hidden width, K outputs.
"""

from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor, nn

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import nearest
from metaseq_lm.interop.names import Architecture
from metaseq_lm.models.transformer.classifiers import POOLER, RANGES, SETS, set_of
from metaseq_lm.models.transformer.encoder import SentenceHead, TokenHead
from metaseq_lm.models.transformer.span_head import SpanHead

SENTENCE, _SPAN, TOKEN = "heads.sentence.", "heads.span.", "heads.token."
LABEL_RANGE = "label_range"
# tanh(x * LINEAR) / LINEAR is x up to rounding for the states of a layer norm; scaling by a power
# of two is exact.
LINEAR = 2.0**-13
# For larger x, gelu(x) is x in fp32.
_GELU_LINEAR = 6.0


def sets_with_heads(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the labelled sets that have a separate head."""
    return sorted({set_of(name, SETS) for name in weights} - {""})


def with_one_head(weights: dict[str, Tensor], name: str, source: object) -> dict[str, Tensor]:
    """Return weights with only the head of the labelled set `name`, as in a model of one set.

    UsageError, which begins with `source`, if there is no such set, or no name for several sets.
    """
    names = sets_with_heads(weights)
    if not names and not name:
        return weights
    if not names:
        raise UsageError(f"{source}: it has no heads of several sets; leave --head away")
    if len(names) == 1 and not name:
        name = names[0]
    if name not in names:
        hint = ""
        if name:
            hint = f"no head for {name!r}.{nearest(name, names)} "
        raise UsageError(f"{source}: {hint}Choose a head with --head: {', '.join(names)}")
    chosen = {}
    for key, weight in weights.items():
        if key.startswith(POOLER):
            chosen[key.replace(POOLER, f"{SENTENCE}pooler.")] = weight
        elif set_of(key, SETS) == name:
            chosen[f"{SENTENCE}out.{key.rpartition('.')[2]}"] = weight
        elif set_of(key, RANGES) == name:
            chosen[LABEL_RANGE] = weight
        elif not key.startswith((SETS, RANGES)):
            chosen[key] = weight
    return chosen


def add_fine_tuned_heads(heads: nn.ModuleDict, weights: dict[str, Tensor], activation: str) -> None:
    """Add the heads for whole rows, tokens and spans in `weights` to a network."""
    if f"{SENTENCE}out.bias" in weights:
        outputs, width = weights[f"{SENTENCE}out.weight"].shape
        pooled = f"{SENTENCE}pooler.weight" in weights
        heads["sentence"] = SentenceHead(width, outputs, 0.0, pooled, activation=activation)
    if f"{TOKEN}out.bias" in weights:
        outputs, width = weights[f"{TOKEN}out.weight"].shape
        heads["token"] = TokenHead(width, outputs, 0.0)
    if f"{_SPAN}out.bias" in weights:
        heads["span"] = SpanHead(weights[f"{_SPAN}out.weight"].shape[1])


def to_library_form(
    weights: dict[str, Tensor], architecture: Architecture, activation: str, source: object
) -> dict[str, Tensor]:
    """Return weights with the sentence head of the library's class; outputs are equal.

    The library has a layer below the output layer, with the architecture's activation; `activation`
    is our head's. If our head has no such layer, it becomes the identity, in the linear range of
    tanh or GELU. The scale of real-valued labels goes into the output layer.

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
            f"{source}: its head sees two spans of a row, which no class of transformers does"
        )
    if label_range is not None:
        least, scale = label_range.double()
        out, bias = out * scale, bias * scale + least
    pooled = f"{SENTENCE}pooler.weight" in weights
    identity = torch.eye(width, dtype=out.dtype, device=out.device)
    if pooled and activation != architecture.activation:
        raise MetaseqError(
            f"{source}: a {architecture.name} has no {activation} layer; train with "
            f"task.pooled=false or task.pooler_activation={architecture.activation} to export it"
        )
    if architecture.activation == "gelu" and not pooled:
        shift = _largest_states(weights).to(out) + _GELU_LINEAR
        weights |= {f"{SENTENCE}pooler.weight": identity, f"{SENTENCE}pooler.bias": shift}
        bias = bias - out @ shift
    elif not pooled:
        weights[f"{SENTENCE}pooler.weight"] = identity * LINEAR
        weights[f"{SENTENCE}pooler.bias"] = identity.new_zeros(width)
        out = out / LINEAR
    weights |= {f"{SENTENCE}out.weight": out, f"{SENTENCE}out.bias": bias}
    return {name: weight.float() for name, weight in weights.items()}


def _largest_states(weights: dict[str, Tensor]) -> Tensor:
    """Return a bound (D,) of the states of a post-LN encoder, from its last layer norm."""
    last = max(int(n.split(".")[3]) for n in weights if n.startswith("encoder.stack.layers."))
    scale, shift = (
        weights[f"encoder.stack.layers.{last}.ffn_norm.{kind}"] for kind in ("weight", "bias")
    )
    return scale.abs() * sqrt(len(scale)) + shift.abs()
