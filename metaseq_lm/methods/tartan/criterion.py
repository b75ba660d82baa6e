"""The losses of the tasks, their weights, and the similarity of two gradients (paper section 3).

Shapes: B rows, K classes, T tasks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from metaseq_lm.config.criterions import BatchSumConfig
from metaseq_lm.core.batch import Terms, TokenBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.criterions import Criterion
from metaseq_lm.criterions.labelled import SentencePrediction
from metaseq_lm.criterions.masked_lm import labelled_terms
from metaseq_lm.distributed import vectors
from metaseq_lm.distributed.vectors import Vector
from metaseq_lm.methods.tartan.data import TaskBatch
from metaseq_lm.methods.tartan.model import scores_of
from metaseq_lm.methods.tartan.options import MetaConfig, MultiTaskConfig
from metaseq_lm.models.transformer.encoder import TransformerLM

_CLASSES = SentencePrediction(BatchSumConfig(batch_sum=False))


def task_terms(model: nn.Module, batch: TaskBatch) -> Terms:
    """Return loss and accuracy of a micro-batch of any task.

    The loss is masked LM if the batch has positions, else classification as a mean over rows.
    """
    if not isinstance(batch, TokenBatch) or batch.positions is None:
        assert batch.targets is not None
        return _CLASSES.terms(model, scores_of(model, batch), batch.targets)
    assert isinstance(model, TransformerLM)
    logits = model(batch.tokens, batch.layout, batch.positions, batch.head, segments=batch.segments)
    return labelled_terms(logits, batch)


def endtask_scored(model: nn.Module, batch: TaskBatch) -> tuple[Tensor, Terms]:
    """Return the end task's probabilities (B, K) in float64, and the terms of rows with labels."""
    scores = scores_of(model, batch)
    terms: Terms = {}
    if batch.targets is not None:
        terms = _CLASSES.terms(model, scores, batch.targets)
    return scores.double().softmax(-1), terms


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


class Meta(MultiTask):
    """Weights learnt through a separate head (META-TARTAN, sections 3.2, 3.3, algorithm 1)."""

    config: MetaConfig

    def similarity(self, a: Vector, b: Vector) -> Tensor:
        """Return the similarity of two gradients, flattened; entries that are None count as 0.

        The cosine with a zero gradient is 0; with a gradient that is not finite it is NaN.
        """
        product = vectors.dot(a, b)
        if self.config.similarity == "dot":
            return product
        norms = vectors.norm(a) * vectors.norm(b)
        return torch.where(norms == 0, torch.zeros_like(product), product / norms)
