"""Parts of a Transformer's layers that are chosen by name, and what each declares of itself.

`model.attention`, `model.feed_forward`, `model.norm` and `model.positions` name registered classes
or functions; their own options stand in `model.part_options`. attention.py has the attentions and
positions of the package.
"""

from collections.abc import Callable
from dataclasses import fields
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.config.transformer import DEPTH_SCALED, XAVIER_ATTENTION, EncoderConfig
from metaseq_lm.core import interfaces
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import (
    ATTENTIONS,
    FEED_FORWARDS,
    NORMS,
    POSITIONS,
    NoOptions,
    Registry,
    nearest,
)
from metaseq_lm.core.structured import read_structured
from metaseq_lm.models.layers import LayerNorm, RMSNorm

__all__ = ["FeedForward"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "relu": torch.relu,
    "silu": F.silu,
}


def build_part(registry: Registry[Any], name: str, sizes: EncoderConfig, *arguments: int) -> Any:
    """Return a registered part of an encoder, called with its options, `sizes` and `arguments`."""
    entry = registry.entry(name)
    names = {item.name for item in fields(entry.dataclass)}
    values = {key: value for key, value in sizes.part_options.items() if key in names}
    options: Any = read_structured(entry.dataclass, values, "model.part_options")
    part = entry.value(options, sizes, *arguments)
    if isinstance(part, Part):
        _check_tables(part, f"{registry.kind} '{name}'")
    return part


def _check_tables(part: "Part", title: str) -> None:
    """Raise UsageError unless a part names the layers whose initial weights differ."""
    linear = {name for name, module in part.named_modules() if isinstance(module, nn.Linear)}
    wrong = sorted({*part.inputs, *part.outputs} - linear)
    if wrong or (not part.outputs and type(part).initialise is Part.initialise):
        raise UsageError(
            f"{interfaces.place_of(type(part))}: {title}: `outputs` has to name the linear layers "
            f"that add to the residual stream, and `inputs` those to queries, keys and values, "
            f"among {', '.join(sorted(linear)) or 'none'}; it names {', '.join(wrong) or 'none'}"
        )


def check_part_options(sizes: EncoderConfig) -> None:
    """Raise UsageError for an option of no part of an encoder."""
    names = {
        ATTENTIONS: sizes.attention,
        FEED_FORWARDS: sizes.feed_forward,
        NORMS: sizes.style.norm,
        POSITIONS: sizes.style.positions,
    }
    classes = [registry.entry(name).dataclass for registry, name in names.items()]
    known = [item.name for item in chain.from_iterable(map(fields, classes))]
    for key in sizes.part_options:
        if key not in known:
            raise UsageError(
                f"model.part_options.{key} is an option of no part of this model."
                f"{nearest(key, known)} Options: {', '.join(known) or 'none'}"
            )


def truncated_normal(weight: Tensor, std: float) -> None:
    """Fill `weight` from N(0, std) cut at two standard deviations."""
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def scale_by_depth(layer: nn.Linear, depth: int) -> None:
    """Draw the weights of a layer that adds to the residual stream of `depth` layers."""
    truncated_normal(layer.weight, 0.02 / (2 * depth) ** 0.5)


class Part(nn.Module):
    """A part of a layer with matrices.

    Like all modules, a part may declare roles and pieces of its matrices (see core.roles), and that
    it `is_gathered_alone` on shards.

    Attributes:
        inputs: Names of its linear layers that project to queries, keys and values.
        outputs: Names of its linear layers that add to the residual stream.
    """

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __init__(self, options: Any, sizes: EncoderConfig, number: int) -> None:
        super().__init__()

    def initialise(self, init: str, depth: int) -> None:
        """Draw the weights that differ from other layers' N(0, 0.02), see `encoder.initialise`."""
        if init == XAVIER_ATTENTION:
            for name in self.inputs:
                nn.init.xavier_uniform_(getattr(self, name).weight)
        elif init == DEPTH_SCALED:
            for name in self.outputs:
                scale_by_depth(getattr(self, name), depth)

    def flops(self, length: int) -> int:
        """Return the forward FLOPs of its matrix products on one row of `length` tokens."""
        return 2 * length * sum(p.numel() for p in self.parameters() if p.dim() == 2)


class FeedForward(Part):
    """A network between the states of each token; the layer adds the residual connection.

    Attributes:
        is_flat: Whether its layers have their names in the Transformer's layer, without a prefix.
    """

    is_flat = False

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., S, D) for states (..., S, D)."""
        raise NotImplementedError


def layer_norm(options: NoOptions, sizes: EncoderConfig, width: int) -> LayerNorm:
    """LayerNorm, with a bias if linear layers have one."""
    return LayerNorm(width, sizes.norm_eps, bias=sizes.style.bias)


def rms_norm(options: NoOptions, sizes: EncoderConfig, width: int) -> RMSNorm:
    """RMSNorm."""
    return RMSNorm(width, sizes.norm_eps)


def make_norm(width: int, sizes: EncoderConfig) -> nn.Module:
    """Return a norm of the configured kind."""
    norm: nn.Module = build_part(NORMS, sizes.style.norm, sizes, width)
    return norm
