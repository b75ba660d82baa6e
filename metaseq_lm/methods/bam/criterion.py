"""The loss of several labelled sets with mixed targets: gold labels and what teachers say of the rows.

Shapes: B rows, K_k outputs of set k, K the most outputs of a set.
"""

from dataclasses import dataclass

from omegaconf import II
from torch import Tensor, nn

from metaseq_lm.config import option
from metaseq_lm.criterions import Batch, Criterion, Term, Terms
from metaseq_lm.errors import UsageError
from metaseq_lm.methods.bam.data import size_of
from metaseq_lm.models.layers import full_precision
from metaseq_lm.registry import register_criterion

LOSS = "cross_entropy_or_squared_error"  # of one set, in evaluation, where it is all of the loss


@dataclass
class BamDistillConfig:
    """How targets are mixed, and how the losses of a batch are put together."""

    annealing: bool = option(
        True, "teacher annealing: the gold label's share of the target grows from 0 to 1"
    )
    total_updates: int = option(II("trainer.max_update"), "updates over which it grows")
    distill_weight: float = option(0.5, "without annealing: the teacher's share of the target")
    temperature: float = option(1.0, "what the teacher's logits are divided by")
    sigmoid: bool = option(
        False, "real values through a sigmoid, as the dissertation says (its code has none)"
    )
    batch_sum: bool = option(
        True, "sum of the batch's losses, which clipping sees; false takes their mean"
    )


@register_criterion("bam_distill", dataclass=BamDistillConfig)
class BamDistill(Criterion):
    """Cross-entropy, or squared error, against gold * share + teacher * (1 - share).

    Of classes the teacher's part is its softmax; of real values its prediction, on the scale of the
    head. batch["gold_share"] is the share, 1 where it or batch["teacher"] is missing, as in an
    evaluation. Every row counts for its own set only. An evaluation has no batch: there losses are
    means over rows, and weights do not count.
    """

    tasks = ("bam",)

    def __init__(
        self,
        annealing: bool = True,
        total_updates: int = 1000,
        distill_weight: float = 0.5,
        temperature: float = 1.0,
        sigmoid: bool = False,
        batch_sum: bool = True,
    ) -> None:
        if not 0 <= distill_weight <= 1:
            raise UsageError(
                f"criterion.distill_weight is a share from 0 to 1, got {distill_weight}"
            )
        if temperature <= 0:
            raise UsageError(f"criterion.temperature must be above 0, got {temperature}")
        self.annealing, self.total_updates = annealing, total_updates
        self.distill_weight, self.temperature = distill_weight, temperature
        self.sigmoid, self.batch_sum = sigmoid, batch_sum

    def gold_share(self, updates: int) -> float:
        """Return the gold label's share of the target after `updates` updates."""
        if not self.annealing:
            return 1.0 - self.distill_weight
        return min(1.0, updates / max(self.total_updates, 1))

    def __call__(self, model: nn.Module, batch: Batch) -> Terms:
        per = None if self.batch_sum and model.training else "rows"
        terms: Terms = {}
        rows = len(batch["set"])
        for number, (name, scores) in enumerate(self.scores(model, batch).items()):
            mine = batch["set"] == number
            losses = self.losses(model, number, scores, batch)
            if model.training:
                losses = losses * batch["weights"]
            terms[f"{name}_loss"] = Term(losses.where(mine, 0.0).sum(), per)
            if scores.shape[-1] > 1:
                right = (scores.argmax(-1) == batch["targets"]) & mine
                terms[f"{name}_accuracy"] = Term(right.sum().to(scores.dtype), size_of(name), 0.0)
        if "teacher" in batch:
            share = scores.new_full((), batch["gold_share"] * rows)
            terms["gold_share"] = Term(share, "rows", 0.0)
        return terms

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return every head's logits (B, K_k), or predictions (B, 1) of its real values, by set.

        They are in full precision. Of a set of real values they are on the scale of the head.
        """
        found = model(batch["tokens"], batch["padding"], batch["segments"])
        found = {name: full_precision(scores) for name, scores in found.items()}
        if self.sigmoid:
            return {n: s.sigmoid() if s.shape[-1] == 1 else s for n, s in found.items()}
        return found

    def losses(self, model: nn.Module, number: int, scores: Tensor, batch: Batch) -> Tensor:
        """Return the loss (B,) of each row as a row of the set at place `number`, given its `scores`.

        Rows of other sets have one, too, that means nothing.
        """
        targets, teacher = batch["targets"], batch.get("teacher")
        share = 1.0 if teacher is None else batch["gold_share"]
        classes = scores.shape[-1]
        if classes == 1:
            wanted = model.scaled(number, targets)  # type: ignore[operator]
            if teacher is not None:
                wanted = share * wanted + (1 - share) * teacher[:, 0]
            return (scores.squeeze(-1) - wanted) ** 2
        logs = scores.log_softmax(-1)
        gold = targets.long().clamp(0, classes - 1)
        losses = -logs.gather(-1, gold[:, None]).squeeze(-1)
        if teacher is not None:
            soft = (teacher[:, :classes] / self.temperature).softmax(-1)
            losses = share * losses - (1 - share) * (soft * logs).sum(-1)
        return losses

    def final(self, model: nn.Module, number: int, scores: Tensor) -> Tensor:
        """Return probabilities (B, K_k), or values (B, 1) on the scale of the labels, as float64."""
        if scores.shape[-1] == 1:
            return model.unscaled(number, scores.double())  # type: ignore[operator]
        return scores.double().softmax(-1)

    def evaluated(
        self, model: nn.Module, batch: Batch, number: int, name: str
    ) -> tuple[Tensor, Terms]:
        """Return `final` outputs and the terms of a batch of rows of one set.

        A split without labels has no terms.
        """
        scores = self.scores(model, batch)[name]
        terms: Terms = {}
        if "targets" in batch:
            losses = self.losses(model, number, scores, batch)
            terms[LOSS] = Term(losses.sum(), "rows")
        return self.final(model, number, scores), terms
