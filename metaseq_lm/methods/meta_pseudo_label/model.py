"""Student and teacher: encoders of equal size (paper section 3, appendix A).

The student has one head, tied to its embedding. The teacher has one encoder with two untied heads:
"x" for the generated input, "y" for the target. Virtual models and steps are functions of a vector
of weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.distributed import vectors
from metaseq_lm.distributed.placement.protocol import Placement
from metaseq_lm.distributed.vectors import local_part
from metaseq_lm.models.layers import Embedding
from metaseq_lm.models.transformer.encoder import TransformerLM
from metaseq_lm.optim import Optimizer
from metaseq_lm.optim.muon import Muon
from metaseq_lm.optim.optimizers import UncorrectedAdam
from metaseq_lm.tasks.masked_lm import build_transformer


def build_pair(config: RunConfig, vocabulary: Vocabulary) -> nn.ModuleDict:
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


def _bound(module: nn.Module) -> Callable[..., Any]:
    """Return what `Placement.bind` does where every process has all parameters."""
    names = [name for name, _ in module.named_parameters()]
    # The search for ties takes a twentieth of the update of a small model.
    is_tied = len(list(module.named_parameters(remove_duplicate=False))) > len(names)

    def call(values: Sequence[Tensor], constants: dict[str, Tensor], *inputs: Any) -> Any:
        weights = dict(zip(names, values)) | constants
        return functional_call(module, weights, *inputs, tie_weights=is_tied)

    return call


class VirtualModel:
    """Calls `module` with weights from a vector (..., P), or from one vector per copy (C, P).

    The vector holds the parameters in the order of `module.named_parameters()`, tied ones once. For
    shards, P counts the entries that this process holds.

    Args:
        module: The model.
        placement: The placement of its parameters; by default every process has all.
    """

    def __init__(self, module: nn.Module, placement: Placement | None = None) -> None:
        self.call = placement.bind(module) if placement and placement.gathers else _bound(module)
        self.parameters = list(module.parameters())
        self.shapes = [vectors.part(p).shape for p in self.parameters]
        self.sizes = [shape.numel() for shape in self.shapes]
        # On the input side, the padding row does not follow a virtual step.
        self.constants = {
            f"{name}.padding_row": vectors.gather_row(layer.weight, layer.padding_idx)
            for name, layer in module.named_modules()
            if isinstance(layer, Embedding) and layer.padding_idx is not None
        }

    def vector(self) -> Tensor:
        """Return a detached copy of the module's present parameters, (P,)."""
        return local_part(vectors.flat([p.detach() for p in self.parameters]))

    def leaf(self, vector: Tensor) -> Tensor:
        """Return a graph leaf with the values of vectors (..., P), placed by `place`."""
        leaf = self.place(vector.detach())
        local_part(leaf).requires_grad_()
        return leaf

    def place(self, vector: Tensor) -> Tensor:
        """Return vectors (..., P) in the parameters' placement, for the engine."""
        return vectors.place_flat(vector, self.parameters)

    def tensors(self, vector: Tensor) -> list[Tensor]:
        """Return a vector (P,) as tensors with the placement of the parameters."""
        return vectors.unflatten(vector, self.parameters)

    def split(self, vector: Tensor) -> list[Tensor]:
        """Return views of `vector` (..., P), one for each parameter."""
        lead = vector.shape[:-1]
        pieces = vector.split(self.sizes, dim=-1)
        return [piece.view(*lead, *shape) for piece, shape in zip(pieces, self.shapes)]

    def __call__(self, vector: Tensor, *args: object, **kwargs: object) -> Tensor:
        output: Tensor = self.call(self.split(local_part(vector)), self.constants, args, kwargs)
        return output


# Optimizer steps as pure functions of vectors, for the virtual steps. All are elementwise and
# differentiable, so that the transpose of a step is one autograd call on vectors.

_INSTEAD = "criterion.pretrain_step=sgd (soft labels), criterion.fidelity=authors (hard)"


@dataclass
class Moments:
    """Adam's running moments, the number of its last step, and the settings of its next step."""

    first: Tensor
    second: Tensor
    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: Tensor | float

    @property
    def remaining(self) -> Tensor | float:
        """The factor by which weight decay multiplies a parameter."""
        return 1 - self.lr * self.weight_decay

    @property
    def corrections(self) -> tuple[float, float]:
        """lr / (1 - b1^step) and the root of 1 - b2^step."""
        beta1, beta2 = self.betas
        return self.lr / (1 - beta1**self.step), (1 - beta2**self.step) ** 0.5


def moments_of(optimizer: Optimizer) -> Moments:
    """Return an AdamW optimizer's moments, copied as vectors (P,); for shards, the local ones.

    Raises the errors of `decoupled_decay`.
    """
    decays = decoupled_decay(optimizer)
    weight_decay: Tensor | float = decays[0]
    if len(set(decays)) > 1:
        pieces = zip(optimizer.parameters, decays, strict=True)
        weight_decay = local_part(vectors.flat([torch.full_like(p.detach(), d) for p, d in pieces]))

    def flat(name: str) -> Tensor:
        return local_part(vectors.flat(optimizer.placed_slots(name)))

    group = optimizer.inner.param_groups[0]
    uncorrected = isinstance(optimizer.inner, UncorrectedAdam)
    return Moments(
        flat("exp_avg"),
        flat("exp_avg_sq"),
        int(UncorrectedAdam.LATE) if uncorrected else optimizer.updates,
        optimizer.lr,
        tuple(group["betas"]),
        group["eps"],
        weight_decay,
    )


def decoupled_decay(optimizer: Optimizer) -> list[float]:
    """Return the weight decay of each parameter of an AdamW optimizer.

    Raises UsageError for another optimizer, or for several rates.
    """
    inner = optimizer.inner
    if not isinstance(inner, torch.optim.AdamW) or isinstance(inner, Muon):
        raise UsageError(
            "a virtual AdamW step, or the weight decay of a step, needs optimizer=adamw, this run "
            f"has {type(inner).__name__}; choose {_INSTEAD}"
        )
    if len(set(optimizer.base)) > 1:
        raise UsageError(
            "a virtual AdamW step has one rate; optimizer.layer_decay must be "
            f"1. Or choose {_INSTEAD}"
        )
    decay = {id(p): g["weight_decay"] for g in inner.param_groups for p in g["params"]}
    return [decay[id(p)] for p in optimizer.local]


def adamw_step(theta: Tensor, grad: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
    """Return the parameters after one AdamW step (decoupled decay), and the moments after it."""
    settings = replace(moments, step=moments.step + 1)
    after: tuple[Tensor, Tensor, Tensor] = _AdamWStep.apply(  # type: ignore[no-untyped-call]
        theta, grad, moments.first, moments.second, settings
    )
    return after[0], replace(settings, first=after[1], second=after[2])


class _AdamWStep(torch.autograd.Function):
    """Map theta, g, m and v to theta', m' and v', with a closed-form, differentiable derivative.

    m' = b1 m + (1 - b1) g,  v' = b2 v + (1 - b2) g^2,  theta' = (1 - lr decay) theta - size m' / d
    with d = sqrt(v') / root + eps; `Moments.corrections` are size and root. Autograd through these
    formulas would store all intermediate results.
    """

    @staticmethod
    def forward(
        ctx: Any, theta: Tensor, grad: Tensor, first: Tensor, second: Tensor, settings: Moments
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.settings, ctx.shapes = settings, (theta.shape, first.shape)
        (beta1, beta2), (size, correction) = settings.betas, settings.corrections
        first = (grad * (1 - beta1)).add_(beta1 * first)
        second = (grad * (1 - beta2)).mul_(grad).add_(beta2 * second)
        denominator = second.sqrt().div_(correction).add_(settings.eps)
        moved = (first * size).div_(denominator)
        ctx.save_for_backward(grad, first, second)
        return theta * settings.remaining - moved, first, second

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        by_theta, by_first, by_second = grads
        grad, first, second = ctx.saved_tensors
        settings, (theta_shape, moments_shape) = ctx.settings, ctx.shapes
        (beta1, beta2), (size, correction) = settings.betas, settings.corrections
        # The root has no derivative at 0, but there the gradient is 0 and nothing moves: take 0.
        positive = second > 0
        root = torch.where(positive, second, 1.0).sqrt_()
        denominator = torch.where(positive, root, 0.0).div_(correction).add_(settings.eps)
        by_moved = (by_theta / denominator).mul_(-size)
        by_root = (by_moved * first).div_(denominator).div_(-correction)
        by_first = by_first + by_moved
        by_second = by_second + torch.where(positive, by_root.div_(root).mul_(0.5), 0.0)
        needed = ctx.needs_input_grad
        return (
            (by_theta * settings.remaining).sum_to_size(theta_shape) if needed[0] else None,
            (grad * by_second).mul_(2 * (1 - beta2)).add_(by_first, alpha=1 - beta1),
            (beta1 * by_first).sum_to_size(moments_shape) if needed[2] else None,
            (beta2 * by_second).sum_to_size(moments_shape) if needed[3] else None,
            None,
        )


def sgd_step(theta: Tensor, grad: Tensor, lr: float) -> Tensor:
    """Return the parameters after one plain gradient step."""
    return theta - lr * grad
