"""The loss of several labelled sets, with gold labels mixed with the outputs of teachers.

Shapes: B rows, K_k outputs of set k, K the largest K_k.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import Term, Terms, TokenBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.criterions import Criterion, Exported
from metaseq_lm.forward.passes import full_precision
from metaseq_lm.methods.bam.data import WITH_CLASSES, MixedBatch
from metaseq_lm.methods.bam.options import BamDistillConfig

LOSS = "cross_entropy_or_squared_error"  # the loss of one set, in evaluation


class BamDistill(Criterion):
    """Cross-entropy, or squared error, against gold * share + teacher * (1 - share).

    The teacher contributes its softmax for classes, and its prediction on the scale of the labels
    for real values. Without a teacher the share is 1. Each row has a loss only for its own set, and
    the gradient is taken of the sum of a batch's weighted losses, as in the authors' code, so
    clipping sees the sum. Logs show the mean over the batch. Evaluation (`evaluated`) uses
    unweighted means over the rows of a set.
    """

    tasks = ("bam",)

    exported = Exported(heads=("sentence",))  # the head of the chosen set
    config: BamDistillConfig

    def __init__(self, config: BamDistillConfig) -> None:
        super().__init__(config)
        self.exported = replace(self.exported, real_values=not config.sigmoid)
        if not config.total_updates:
            raise UsageError("criterion.total_updates must be at least 1, got 0")

    def gold_share(self, updates: int) -> float:
        """Return the weight of the gold label in the target after `updates` updates."""
        if not self.config.annealing:
            return 1.0 - self.config.distill_weight
        return min(1.0, updates / self.config.total_updates)

    def __call__(self, model: nn.Module, batch: MixedBatch) -> Terms:
        terms: Terms = {}
        correct = []
        for number, (name, scores) in enumerate(self.scores(model, batch).items()):
            in_set = batch.sets == number
            losses = self.losses(
                model, name, scores, batch.targets, batch.teacher, batch.gold_share
            )
            losses = (losses * batch.weights).where(in_set, 0.0)
            terms[f"{name}_part_of_loss"] = Term(losses.sum(), "rows", is_summed=True)
            if scores.shape[-1] > 1:
                correct.append(((scores.argmax(-1) == batch.targets) & in_set).sum())
        if correct:
            total = sum(correct[1:], correct[0]).to(losses.dtype)
            terms["accuracy"] = Term(total, WITH_CLASSES, 0.0)
        if batch.teacher is not None:
            shares = torch.as_tensor(batch.gold_share * len(batch.sets), dtype=torch.float64)
            terms["gold_share"] = Term(shares.to(losses), "rows", 0.0)
        return terms

    def scores(
        self, model: nn.Module, batch: TokenBatch, names: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Return by set, in full precision, the outputs of the heads `names` (default: all heads).

        Logits (B, K_k) for classes, predictions (B, 1) on the scale of the head for real values.
        """
        by_set = model(batch.tokens, batch.layout, batch.segments, names)
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
        share: float | Tensor = 1.0,
    ) -> Tensor:
        """Return the loss (B,) of each row under the head of the set `name`.

        Losses of rows of other sets are meaningless; the caller masks them.

        Args:
            model: The model, which knows the range of real values.
            name: The set.
            scores: Outputs of its head (B, K_k).
            targets: Classes or real values (B,).
            teacher: Outputs of the rows' teachers (B, K).
            share: Weight of the gold label, used with a teacher.
        """
        classes = scores.shape[-1]
        if classes == 1:
            if teacher is not None:
                targets = share * targets + (1 - share) * teacher[:, 0]
            scaled = model.scaled(name, targets)  # type: ignore[operator]
            squares: Tensor = (scores.squeeze(-1) - scaled) ** 2
            return squares
        log_probs = scores.log_softmax(-1)
        gold = targets.long().clamp(0, classes - 1)
        losses = -log_probs.gather(-1, gold[:, None]).squeeze(-1)
        if teacher is not None:
            soft = (teacher[:, :classes] / self.config.temperature).softmax(-1)
            losses = share * losses - (1 - share) * (soft * log_probs).sum(-1)
        return losses

    def teacher_outputs(self, model: nn.Module, batch: TokenBatch, name: str) -> Tensor:
        """Return a teacher's logits (B, K_k), or real values (B, 1) on the scale of the labels."""
        scores = self.scores(model, batch, [name])[name]
        return scores if scores.shape[-1] > 1 else self.final(model, name, scores)

    def final(self, model: nn.Module, name: str, scores: Tensor) -> Tensor:
        """Return probabilities (B, K_k), or values (B, 1) on the labels' scale, in float64."""
        if scores.shape[-1] == 1:
            values: Tensor = model.unscaled(name, scores.double())  # type: ignore[operator]
            return values
        return scores.double().softmax(-1)

    def evaluated(self, model: nn.Module, batch: TokenBatch, name: str) -> tuple[Tensor, Terms]:
        """Return `final` outputs for rows of one set, and the terms, if the rows have labels."""
        scores = self.scores(model, batch, [name])[name]
        terms: Terms = {}
        if batch.targets is not None:
            losses = self.losses(model, name, scores, batch.targets)
            terms[LOSS] = Term(losses.sum(), "rows")
        return self.final(model, name, scores), terms
