"""Base class of criterions: from one batch to named sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from metaseq_lm.core.batch import Terms

__all__ = ["Criterion", "Exported"]


@dataclass(frozen=True)
class Exported:
    """The computation of a transformers class that replaces a criterion's model.

    It gives the states of `Encoder.forward` and the plain outputs of its heads.

    Attributes:
        heads: Names of the heads that the class evaluates; others are left out.
        pipeline: Whether the class's pipeline performs the trained task.
        generator: Whether the noise model, if there is one, is a masked language model.
        real_values: Whether the head predicts real values directly, up to a scale.
        reach: What a token sees, "both" sides or "causal" (see core.batch.Layout).
    """

    heads: tuple[str, ...]
    pipeline: bool = True
    generator: bool = True
    real_values: bool = True
    reach: str = "both"


class Criterion:
    """Compute the terms of a loss from a model and one batch; it keeps no state between calls.

    A criterion that gives probabilities of tokens has `token_log_probs`, see
    tasks.protocols.ScoresTokens.

    Args:
        config: An instance of the dataclass that it is registered with.

    Attributes:
        tasks: Names of the tasks that can use it; empty for no restriction by name.
        general: Whether any task can use it; otherwise only a task that names its class, or a base
            class of it, in `Task.criterions`.
        exported: What `metaseq-lm export` may write, or why it may not. Only the body of the
            registered class counts: a subclass may compute something else, and must repeat it.
        differentiates: Whether the loss itself contains gradients, such as an adversarial
            direction: torch.compile cannot compile it, and sharded parameters are not gathered
            block by block.
        reach: What a token sees when frozen states are read, "both" sides or "causal"; None for the
            reach of `exported`, or both.
        score_reach: What the score of a token depends on, in the same words; None for the reach of
            states.
        normalised: Whether the probabilities of `token_log_probs` at a position, all else being the
            same, sum to one over the vocabulary; false for energies, bounds and estimates.
        sees_targets: Whether the model sees the tokens that it predicts, as one that copies does.
        calls: Arguments that `__call__` gives a model, by position and, after a "*", by name, if a
            plug-in's model can replace the package's; () if unknown.
        evaluates_as: The criterion with the same evaluation losses, so that reports compare them.
            Only the body of the registered class counts, as for `exported`.
    """

    tasks: tuple[str, ...] = ()
    general: bool = True
    exported: Exported | str | None = None
    differentiates: bool = False
    reach: str | None = None
    score_reach: str | None = None
    normalised: bool = True
    sees_targets: bool = False
    calls: tuple[str, ...] = ()
    evaluates_as: str = ""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def __call__(self, model: nn.Module, batch: Any) -> Terms:
        """Return the terms of one micro-batch by name."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(model, batch)")
