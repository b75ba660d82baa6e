"""The loss of several labelled sets with mixed targets: gold labels and the outputs of teachers.

Shapes: B rows, K_k outputs of set k, K the most outputs of a set.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import II
from torch import Tensor, nn

from metaseq_lm.core.batch import Term, Terms, TokenBatch
from metaseq_lm.core.config import option
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions import Criterion
from metaseq_lm.methods.bam.data import WITH_CLASSES, MixedBatch
from metaseq_lm.models.layers import full_precision

LOSS = "cross_entropy_or_squared_error"  # of one set, in evaluation, where it is all of the loss


@dataclass
class BamDistillConfig:
    """How targets are mixed, and how the losses of a batch are put together."""

    annealing: bool = option(
        True, "teacher annealing: the gold label's share of the target grows from 0 to 1"
    )
    # 0 until it is known how many updates trainer.max_flops pays for.
    total_updates: int = option(II("trainer.max_update"), "updates over which it grows", at_least=0)
    distill_weight: float = option(
        0.5, "without annealing: the teacher's share of the target", at_least=0, at_most=1
    )
    temperature: float = option(1.0, "what the teacher's logits are divided by", above=0)
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
    labels. The share is that of the batch; without a teacher it is 1. Every row counts for its own
    set only. The term of a set is its part of the batch's loss, not its mean. An
    evaluation (`evaluated`) has means over the rows of a set, and no weights.
    """

    tasks = ("bam",)

    config: BamDistillConfig

    def __init__(self, config: BamDistillConfig) -> None:
        super().__init__(config)
        if not config.total_updates:
            raise UsageError("criterion.total_updates must be at least 1, got 0")

    def gold_share(self, updates: int) -> float:
        """Return the gold label's share of the target after `updates` updates."""
        if not self.config.annealing:
            return 1.0 - self.config.distill_weight
        return min(1.0, updates / self.config.total_updates)

    def __call__(self, model: nn.Module, batch: MixedBatch) -> Terms:
        per = None if self.config.batch_sum else "rows"
        terms: Terms = {}
        right = []
        for number, (name, scores) in enumerate(self.scores(model, batch).items()):
            in_set = batch.sets == number
            losses = self.losses(
                model, name, scores, batch.targets, batch.teacher, batch.gold_share
            )
            losses = (losses * batch.weights).where(in_set, 0.0)
            terms[f"{name}_part_of_loss"] = Term(losses.sum(), per)
            if scores.shape[-1] > 1:
                right.append(((scores.argmax(-1) == batch.targets) & in_set).sum())
        if right:
            terms["accuracy"] = Term(sum(right[1:], right[0]).to(losses.dtype), WITH_CLASSES, 0.0)
        if batch.teacher is not None:
            share = losses.new_full((), batch.gold_share * len(batch.sets))
            terms["gold_share"] = Term(share, "rows", 0.0)
        return terms

    def scores(
        self, model: nn.Module, batch: TokenBatch, names: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Return the heads' logits (B, K_k), or predictions (B, 1) of real values, by set.

        They are in full precision. Of a set of real values they are on the scale of the head.
        Without `names` all heads.
        """
        by_set = model(batch.tokens, batch.padding, batch.segments, names)
        by_set = {name: full_precision(scores) for name, scores in by_set.items()}
        if self.config.sigmoid:
            return {n: s.sigmoid() if s.shape[-1] == 1 else s for n, s in by_set.items()}
        return by_set

    def losses(
        self,
        model: nn.Module,
        name: str,
        scores: Tensor,
        targets: Tensor,
        teacher: Tensor | None = None,
        share: float = 1.0,
    ) -> Tensor:
        """Return the loss (B,) of each row as a row of the set `name`, given its `scores`.

        Rows of other sets have one, too, that means nothing.

        Args:
            model: The model, which knows the range of real values.
            name: The set.
            scores: Outputs of its head (B, K_k).
            targets: Classes or real values (B,).
            teacher: Outputs of the rows' teachers (B, K), with at least K_k columns.
            share: The gold label's share of the target, used with a teacher.
        """
        classes = scores.shape[-1]
        if classes == 1:
            if teacher is not None:
                targets = share * targets + (1 - share) * teacher[:, 0]
            wanted = model.scaled(name, targets)  # type: ignore[operator]
            squares: Tensor = (scores.squeeze(-1) - wanted) ** 2
            return squares
        logs = scores.log_softmax(-1)
        gold = targets.long().clamp(0, classes - 1)
        losses = -logs.gather(-1, gold[:, None]).squeeze(-1)
        if teacher is not None:
            soft = (teacher[:, :classes] / self.config.temperature).softmax(-1)
            losses = share * losses - (1 - share) * (soft * logs).sum(-1)
        return losses

    def answers(self, model: nn.Module, batch: TokenBatch, name: str) -> Tensor:
        """Return what a teacher is asked for: logits (B, K_k), or values (B, 1) on the labels' scale."""
        scores = self.scores(model, batch, [name])[name]
        return scores if scores.shape[-1] > 1 else self.final(model, name, scores)

    def final(self, model: nn.Module, name: str, scores: Tensor) -> Tensor:
        """Return probabilities (B, K_k), or values (B, 1) on the scale of the labels, as float64."""
        if scores.shape[-1] == 1:
            values: Tensor = model.unscaled(name, scores.double())  # type: ignore[operator]
            return values
        return scores.double().softmax(-1)

    def evaluated(self, model: nn.Module, batch: TokenBatch, name: str) -> tuple[Tensor, Terms]:
        """Return `final` outputs and the terms of a batch of rows of one set.

        A split without labels has no terms.
        """
        scores = self.scores(model, batch, [name])[name]
        terms: Terms = {}
        if batch.targets is not None:
            losses = self.losses(model, name, scores, batch.targets)
            terms[LOSS] = Term(losses.sum(), "rows")
        return self.final(model, name, scores), terms
