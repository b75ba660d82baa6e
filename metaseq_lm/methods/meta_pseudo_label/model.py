"""Student and teacher: encoders of equal size (paper section 3, appendix A).

The student has one head, tied to its embedding. The teacher has one encoder with two untied heads:
"x" for the input that it generates, "y" for the target. Virtual models and steps are functions of a
vector of weights.
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.func import functional_call

from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.models.layers import Embedding
from metaseq_lm.models.transformer.encoder import TransformerLM
from metaseq_lm.optim import Optimizer
from metaseq_lm.tasks.masked_lm import build_transformer


def build_pair(config: DictConfig, vocabulary: Vocabulary) -> nn.ModuleDict:
    """Return the nets "student" and "teacher"."""
    return nn.ModuleDict(
        {
            "student": build_transformer(config, vocabulary),
            "teacher": build_transformer(config, vocabulary, heads=("x", "y"), tied=False),
        }
    )


def student_of(model: nn.Module) -> TransformerLM:
    """Return the student of a pair."""
    return cast(TransformerLM, model.get_submodule("student"))


def teacher_of(model: nn.Module) -> TransformerLM:
    """Return the teacher of a pair."""
    return cast(TransformerLM, model.get_submodule("teacher"))


class VirtualModel:
    """Calls `module` with weights taken from a vector (..., P), or from vectors of several copies (C, P).

    The vector holds the parameters in the order of `module.named_parameters()`, a tied one once.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        named = dict(module.named_parameters())
        self.names = list(named)
        self.parameters = list(named.values())
        self.shapes = [p.shape for p in self.parameters]
        self.sizes = [p.numel() for p in self.parameters]
        # What the input side sees of the padding row does not follow a virtual step.
        self.constants = {
            f"{name}.padding_row": layer.weight[layer.padding_idx].detach().clone()
            for name, layer in module.named_modules()
            if isinstance(layer, Embedding) and layer.padding_idx is not None
        }

    def vector(self) -> Tensor:
        """Return a detached copy of the module's present parameters, (P,)."""
        return torch.cat([p.detach().reshape(-1) for p in self.parameters])

    def split(self, vector: Tensor) -> list[Tensor]:
        """Return the views of `vector` (..., P) that stand for the parameters."""
        lead = vector.shape[:-1]
        pieces = vector.split(self.sizes, dim=-1)
        return [piece.view(*lead, *shape) for piece, shape in zip(pieces, self.shapes)]

    def __call__(self, vector: Tensor, *args: object, **kwargs: object) -> Tensor:
        weights = dict(zip(self.names, self.split(vector))) | self.constants
        output: Tensor = functional_call(self.module, weights, args, kwargs)
        return output


# Optimizer steps as pure functions of vectors, for the virtual steps. All are elementwise and
# differentiable, so that the transpose of a step is one autograd call on vectors.

INSTEAD = "criterion.pretrain_step=sgd (soft labels), criterion.fidelity=authors (hard)"


@dataclass
class Moments:
    """Adam's running moments, and the settings of its next step."""

    first: Tensor
    second: Tensor
    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: Tensor | float


def moments_of(optimizer: Optimizer) -> Moments:
    """Return copies of an AdamW optimizer's moments as vectors (P,); errors as in `decoupled_decay`."""
    decays = decoupled_decay(optimizer)
    weight_decay: Tensor | float = decays[0]
    if len(set(decays)) > 1:
        sizes = [p.shape for p in optimizer.parameters]
        device, dtype = optimizer.local[0].device, optimizer.local[0].dtype
        pieces = zip(sizes, decays, strict=True)
        weight_decay = torch.cat(
            [torch.full((size.numel(),), d, device=device, dtype=dtype) for size, d in pieces]
        )

    def flat(name: str) -> Tensor:
        return torch.cat([moment.reshape(-1) for moment in optimizer.slots(name)])

    group = optimizer.inner.param_groups[0]
    return Moments(
        flat("exp_avg"),
        flat("exp_avg_sq"),
        optimizer.updates,
        optimizer.lr,
        tuple(group["betas"]),
        group["eps"],
        weight_decay,
    )


def decoupled_decay(optimizer: Optimizer) -> list[float]:
    """Return the weight decay of each parameter of an AdamW optimizer.

    Raises UsageError for another optimizer, and for one with several rates.
    """
    inner = optimizer.inner
    if not isinstance(inner, torch.optim.AdamW):
        raise UsageError(
            f"a virtual AdamW step, or the weight decay of a step, needs optimizer=adamw, this run has "
            f"{type(inner).__name__}; choose {INSTEAD}"
        )
    if len(set(optimizer.base)) > 1:
        raise UsageError(
            f"a virtual AdamW step has one rate; optimizer.layer_decay must be 1. Or choose {INSTEAD}"
        )
    decay = {id(p): g["weight_decay"] for g in inner.param_groups for p in g["params"]}
    return [decay[id(p)] for p in optimizer.local]


def adamw(theta: Tensor, grad: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
    """Return the parameters after one AdamW step (decoupled decay), and the moments after it.

    The derivative of the root at a second moment of 0 is taken as 0: there the gradient is 0 too
    and the parameter does not move.
    """
    beta1, beta2 = moments.betas
    step = moments.step + 1
    first = beta1 * moments.first + (1 - beta1) * grad
    second = beta2 * moments.second + (1 - beta2) * grad * grad
    positive = second > 0
    root = torch.where(positive, torch.where(positive, second, 1.0).sqrt(), 0.0)
    denominator = root / (1 - beta2**step) ** 0.5 + moments.eps
    size = moments.lr / (1 - beta1**step)
    theta = theta * (1 - moments.lr * moments.weight_decay) - size * first / denominator
    return theta, replace(moments, first=first, second=second, step=step)


def sgd(theta: Tensor, grad: Tensor, lr: float) -> Tensor:
    """Return the parameters after one plain gradient step."""
    return theta - lr * grad
