"""The losses of the tasks, their weights, and the similarity of two gradients (paper section 3).

Shapes: B rows, K classes, T tasks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import Terms, TokenBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import option
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions import Criterion
from metaseq_lm.criterions.labelled import BatchSumConfig, SentencePrediction
from metaseq_lm.criterions.masked_lm import labelled_terms
from metaseq_lm.distributed import vectors
from metaseq_lm.distributed.vectors import Vector
from metaseq_lm.methods.tartan.data import TaskBatch
from metaseq_lm.methods.tartan.model import scores_of
from metaseq_lm.models.transformer.encoder import TransformerLM

CLASSES = SentencePrediction(BatchSumConfig(batch_sum=False))


@dataclass
class MultiTaskConfig:
    """MT-TARTAN: fixed task weights."""

    weights: list[float] | None = option(None, "task weights, the end task's last (null = equal)")
    algorithm_1: bool = option(
        False,
        "follow algorithm 1 of the paper where its text and the authors' code differ: weights "
        "change before the step, heads get unweighted gradients, the meta head "
        "is kept between updates",
    )


@dataclass
class MetaConfig(MultiTaskConfig):
    """META-TARTAN: learns the task weights, a softmax, from the end task's development loss."""

    weight_lr: float = option(1e-2, "rate of the weights' logits (0 = MT-TARTAN)", at_least=0)
    similarity: str = option(
        "cosine",
        "similarity of two gradients: cosine (algorithm 1) or dot product (equation 7)",
        choices=("cosine", "dot"),
    )
    similarity_over: str = option(
        "encoder",
        "parameters it compares: encoder, or body, which adds the LM heads (the authors' code)",
        choices=("encoder", "body"),
    )
    same_head: bool = option(False, "use the end task's head as the meta head (section 5.4)")
    meta_head_split: str = option(
        "train",
        "rows that the meta head is trained on: train (paper) or dev (the authors' code)",
        choices=("train", "dev"),
    )
    meta_head_steps: int = option(10, "maximum training steps of the meta head", at_least=0)
    meta_head_tolerance: float = option(0.0, "stop when its loss changes by less (authors: 1e-3)")
    meta_head_lr: float = option(1e-3, "learning rate of the meta head", at_least=0)
    meta_head_weight_decay: float = option(0.1, "weight decay of the meta head", at_least=0)


def task_terms(model: nn.Module, batch: TaskBatch) -> Terms:
    """Return loss and accuracy of a micro-batch of any task.

    Masked LM if the batch has positions; else classification, a mean over rows.
    """
    if not isinstance(batch, TokenBatch) or batch.positions is None:
        assert batch.targets is not None
        return CLASSES.terms(model, scores_of(model, batch), batch.targets)
    assert isinstance(model, TransformerLM)
    logits = model(batch.tokens, batch.layout, batch.positions, batch.head, segments=batch.segments)
    return labelled_terms(logits, batch)


def endtask_scored(model: nn.Module, batch: TaskBatch) -> tuple[Tensor, Terms]:
    """Return the end task's probabilities (B, K) in float64, and the terms of rows with labels."""
    scores = scores_of(model, batch)
    terms: Terms = {}
    if batch.targets is not None:
        terms = CLASSES.terms(model, scores, batch.targets)
    return scores.double().softmax(-1), terms


@register_criterion("tartan_mt", dataclass=MultiTaskConfig)
class MultiTask(Criterion):
    """Auxiliary tasks and the end task together with fixed weights (MT-TARTAN, section 3.1)."""

    tasks = ("tartan", "tartan_vision")
    config: MultiTaskConfig

    def __call__(self, model: nn.Module, batch: TaskBatch) -> Terms:
        return task_terms(model, batch)

    def initial_logits(self, n_tasks: int) -> Tensor:
        """Return the initial logits (T,) of the task weights; UsageError for wrong weights."""
        weights = self.config.weights
        if weights is None:
            return torch.zeros(n_tasks, dtype=torch.float64)
        if len(weights) != n_tasks or min(weights) <= 0:
            raise UsageError(
                f"criterion.weights is {list(weights)}; it needs {n_tasks} positive numbers, one "
                "for each of task.auxiliary and one for the end task"
            )
        return torch.tensor(list(weights), dtype=torch.float64).log()


@register_criterion("tartan_meta", dataclass=MetaConfig)
class Meta(MultiTask):
    """Weights learnt through a separate head (META-TARTAN, sections 3.2, 3.3, algorithm 1)."""

    config: MetaConfig

    def similarity(self, a: Vector, b: Vector) -> Tensor:
        """Return the similarity of two gradients, flattened; entries that are None count as 0.

        The cosine with a zero gradient is 0; with one that is not finite it is NaN.
        """
        product = vectors.dot(a, b)
        if self.config.similarity == "dot":
            return product
        norms = vectors.norm(a) * vectors.norm(b)
        return torch.where(norms == 0, torch.zeros_like(product), product / norms)
