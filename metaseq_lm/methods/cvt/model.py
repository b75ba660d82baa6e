"""Code shared by the methods on words, translation and images.

It has the views of the auxiliary modules on words (Clark et al. 2018, code; the modules are in
metaseq_lm/models/words/word_model.py), averaged weights, and perturbations of the student's input
(Miyato et al. 2017).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.words.sets import TREES
from metaseq_lm.forward.passes import current_context
from metaseq_lm.models.layers import RAW_PREFIX, AveragedWeights
from metaseq_lm.models.words.word_model import AHEAD, BACK, FULL
from metaseq_lm.tasks import Passes, Scored

# Options of each TaggingModule: its view; at t it predicts the class of t + shift. "future" and
# "past" do not see the word that they classify; "full" sees the same as the primary module, but
# with dropout.
TAGGING: dict[str, dict[str, Any]] = {
    "full": {"view": FULL, "linear": True},
    "forwards": {"view": AHEAD},
    "backwards": {"view": BACK},
    "future": {"view": AHEAD, "shift": 1},
    "past": {"view": BACK, "shift": -1},
}
# Options of each ParsingModule: the views of the candidate head and of the dependent.
PARSING: dict[str, dict[str, Any]] = {
    "full": {"views": (FULL, FULL)},
    "fw_fw": {"views": (AHEAD, AHEAD)},
    "fw_bw": {"views": (AHEAD, BACK)},
    "bw_fw": {"views": (BACK, AHEAD)},
    "bw_bw": {"views": (BACK, BACK)},
}


def auxiliary_options(form: str) -> dict[str, dict[str, Any]]:
    """Return the options of all auxiliary modules for sets of a form, tags or trees."""
    return PARSING if form == TREES else TAGGING


def check_teacher(mean_teacher: bool, decay: float) -> None:
    """Raise UsageError if the averaged weights should teach but do not exist."""
    if mean_teacher and not decay:
        raise UsageError("criterion.mean_teacher needs averaged weights; task.average_decay is 0")


class AveragedNet(nn.Module):
    """A trained `net` and, if `decay` is above 0, the moving average of its weights."""

    def __init__(self, net: nn.Module, decay: float) -> None:
        super().__init__()
        self.net = net
        self.average = AveragedWeights(net, decay) if decay else None

    @property
    def averaged(self) -> nn.Module:
        """The net with averaged weights, or the trained net without an average."""
        return self.net if self.average is None else self.average.net

    def forward(self, *inputs: Any) -> Any:
        return self.net(*inputs)

    def move_average(self) -> None:
        """Update the average with the current weights, if there is one."""
        if self.average is not None:
            self.average.update_parameters(self.net)

    def scored(
        self, evaluate: Callable[[nn.Module, Passes], Scored], passes: Passes, score_raw: bool
    ) -> Scored:
        """Return the result of `evaluate` with the averaged weights.

        With `score_raw` it also has the metrics of the trained weights, as "raw_*"; the batches are
        then held in memory.
        """
        if not score_raw or self.average is None:
            return evaluate(self.averaged, passes)
        batches: Passes = {name: list(stream) for name, stream in passes.items()}
        metrics, rows = evaluate(self.averaged, batches)
        raw = evaluate(self.net, batches).metrics
        return Scored(metrics | {RAW_PREFIX + name: value for name, value in raw.items()}, rows)


def normalise_rows(x: Tensor) -> Tensor:
    """Return x (B, ...) with rows scaled to norm 1; a row of zeros stays."""
    # In fp32 the squares of tiny entries would be 0.
    norms = x.flatten(1).double().norm(dim=1)
    norms = torch.where(norms > 0, norms, 1.0)
    return (x.double() / norms.view(-1, *[1] * (x.dim() - 1))).to(x.dtype)


def draw_gaussian(like: Tensor) -> Tensor:
    """Return normal numbers shaped as `like` (B, ...), drawn by row (see forward.passes.Noise)."""
    noise = current_context().noise
    if noise is None:
        return torch.randn_like(like)
    # Box and Muller 1958; 1 - u is never 0.
    radius, angle = (noise.uniform(like.shape, like.dtype) for _ in range(2))
    return (-2 * torch.log1p(-radius)).sqrt() * torch.cos(2 * math.pi * angle)


def adversarial_direction(start: Tensor, xi: float, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient (B, ...) of a loss, summed over rows, after a step `xi` along `start`.

    For a random `start` this is one step of power iteration towards the direction that raises the
    loss most. Parameters get no gradient.
    """
    step = (xi * normalise_rows(start)).requires_grad_(True)
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(loss(step), step)
    return gradient
