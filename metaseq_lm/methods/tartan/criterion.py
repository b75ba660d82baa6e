"""The losses of the tasks, their weights, and how alike two gradients are (paper section 3).

Shapes: B rows, K classes, T tasks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import Terms, TokenBatch
from metaseq_lm.core.config import option
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions import Criterion
from metaseq_lm.criterions.masked_lm import labelled_terms
from metaseq_lm.criterions.sentence_prediction import SentencePrediction, SentencePredictionConfig
from metaseq_lm.engine import vectors
from metaseq_lm.engine.vectors import Vector
from metaseq_lm.methods.tartan.data import TaskBatch
from metaseq_lm.methods.tartan.model import probabilities, scores_of
from metaseq_lm.models.transformer.encoder import TransformerLM

CLASSES = SentencePrediction(SentencePredictionConfig(batch_sum=False))


@dataclass
class MultiTaskConfig:
    """MT-TARTAN: the weights of the tasks stay as they are."""

    weights: list[float] | None = option(
        None,
        "weights of the auxiliaries and, last, of the end task, scaled to sum 1 (null = equal)",
    )
    scale_heads: bool = option(
        True, "heads get the gradient of the weighted loss; false: unweighted (algorithm 1)"
    )


@dataclass
class MetaConfig(MultiTaskConfig):
    """META-TARTAN: the weights, softmax of logits, follow the end task's development loss."""

    weight_lr: float = option(1e-2, "rate of the logits of the weights (0 = MT-TARTAN)", at_least=0)
    similarity: str = option(
        "cosine",
        "of gradients: cosine (algorithm 1) or dot (equation 7)",
        choices=("cosine", "dot"),
    )
    similarity_over: str = option(
        "encoder",
        "parameters it is taken over: encoder, or body, with the LM heads (the code)",
        choices=("encoder", "body"),
    )
    weight_update: str = option(
        "after",
        "weights move after the step (section 3.2, the code) or before it (algorithm 1)",
        choices=("after", "before"),
    )
    same_head: bool = option(False, "no meta head: the end task's own instead (section 5.4)")
    meta_head_split: str = option(
        "train", "rows it is fitted to: train (paper) or dev (the code)", choices=("train", "dev")
    )
    meta_head_reset: bool = option(True, "drawn afresh in every update; false: carried over")
    meta_head_steps: int = option(10, "steps it is fitted for at most", at_least=0)
    meta_head_tolerance: float = option(
        0.0, "fitting ends when the loss changes by less (0 = never; the code: 1e-3)"
    )
    meta_head_lr: float = option(1e-3, "rate of the fitting", at_least=0)
    meta_head_weight_decay: float = option(0.1, "weight decay of the fitting", at_least=0)


def task_terms(model: nn.Module, batch: TaskBatch) -> Terms:
    """Return the terms of a micro-batch: masked LM if it has positions, else classes.

    Classes: mean cross-entropy over rows and accuracy.
    """
    if not isinstance(batch, TokenBatch) or batch.positions is None:
        assert batch.targets is not None
        return CLASSES.terms(model, scores_of(model, batch), batch.targets)
    assert isinstance(model, TransformerLM)
    logits = model(
        batch.tokens, batch.padding, batch.positions, batch.head, segments=batch.segments
    )
    return labelled_terms(logits, batch)


def endtask_scored(model: nn.Module, batch: TaskBatch) -> tuple[Tensor, Terms]:
    """Return the probabilities (B, K) of the end task's classes, and the terms of rows with labels."""
    scores = scores_of(model, batch)
    terms: Terms = {}
    if batch.targets is not None:
        terms = CLASSES.terms(model, scores, batch.targets)
    return probabilities(scores), terms


@register_criterion("tartan_mt", dataclass=MultiTaskConfig)
class MultiTask(Criterion):
    """Auxiliary tasks and the end task together with fixed weights (MT-TARTAN, section 3.1)."""

    tasks = ("tartan", "tartan_vision")
    config: MultiTaskConfig

    def __call__(self, model: nn.Module, batch: TaskBatch) -> Terms:
        return task_terms(model, batch)

    def start(self, tasks: int) -> Tensor:
        """Return the logits (T,) that the weights start from: those of the options, or zeros."""
        weights = self.config.weights
        if weights is None:
            return torch.zeros(tasks, dtype=torch.float64)
        if len(weights) != tasks or min(weights) <= 0:
            raise UsageError(
                f"criterion.weights is {list(weights)}; it needs {tasks} positive numbers, one for each "
                "of task.auxiliary and one for the end task"
            )
        return torch.tensor(list(weights), dtype=torch.float64).log()


@register_criterion("tartan_meta", dataclass=MetaConfig)
class Meta(MultiTask):
    """Weights learnt through a separate head (META-TARTAN, sections 3.2, 3.3, algorithm 1)."""

    config: MetaConfig

    def similarity(self, a: Vector, b: Vector) -> Tensor:
        """Return how alike two gradients are, flattened together; entries that are None count as 0.

        The cosine with a gradient that vanishes is 0; with one that is not finite it is NaN.
        """
        product = vectors.dot(a, b)
        if self.config.similarity == "dot":
            return product
        length = vectors.norm(a) * vectors.norm(b)
        return torch.where(length == 0, torch.zeros_like(product), product / length)
