"""The losses of student and teacher (paper section 3; further details from the authors' code).

Each loss is a mean over the tokens of a micro-step. Terms are sums (C,), one per micro-step, with
the weight 1/C, so that the loss of an update is the mean over its micro-steps.

Shapes: C micro-steps, B batch, S length, M targets, V vocabulary, P student parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import CopiesBatch, Term, Terms, TokenBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.criterions import Criterion
from metaseq_lm.criterions.masked_lm import labelled_terms
from metaseq_lm.distributed import vectors
from metaseq_lm.forward.passes import copy_sums, draw_index, full_precision
from metaseq_lm.methods.meta_pseudo_label.episodes import UnlabelledBatch
from metaseq_lm.methods.meta_pseudo_label.model import decoupled_decay
from metaseq_lm.methods.meta_pseudo_label.options import HardConfig, SoftConfig
from metaseq_lm.models.layers import blocks, cross_entropy, is_large, log_sums, softmax_hvp
from metaseq_lm.models.transformer.encoder import TransformerLM
from metaseq_lm.optim import Optimizer


def student_mlm(student: nn.Module, batch: CopiesBatch) -> Terms:
    """Return the masked-LM terms of the student on an update's masked rows (C, B, S)."""
    logits = student(batch.tokens, batch.layout, batch.positions)
    terms = labelled_terms(logits, batch)
    # An update takes the mean over its micro-steps.
    return {n: replace(t, weight=t.weight / batch.copy_count) for n, t in terms.items()}


def labelled_loss(student: Callable[..., Tensor], batch: TokenBatch, weight: float = 1.0) -> Terms:
    """Return CE(y, S(x)) of support or query rows (equations 2 and 3)."""
    assert batch.targets is not None
    logits = student(batch.tokens, batch.layout, batch.positions)
    loss = copy_sums(cross_entropy(logits, batch.targets), batch)
    return {"query": Term(loss, "targets", weight)}


def teacher_logits(teacher: TransformerLM, batch: UnlabelledBatch) -> tuple[Tensor, Tensor]:
    """Return the teacher's two logits (C, B, S, V) for the unlabelled rows."""
    hidden = teacher.encoder(batch.original, batch.layout)
    return teacher.predict(hidden, head="x"), teacher.predict(hidden, head="y")


def auxiliary_losses(teacher: TransformerLM, batch: UnlabelledBatch, task_token: int) -> Terms:
    """Return the teacher's masked-LM losses (section 3.4), two pairs of half cross-entropies.

    From x with the MLM task token, the teacher should produce (x masked, x); from x masked, (x
    masked, y).
    """
    assert batch.targets is not None
    original = batch.original.clone()
    original[..., 0] = task_token
    masked, padding = batch.tokens, batch.layout.padding_of(batch.tokens)
    inputs = torch.stack([original, masked], dim=-2)  # (C, B, 2, S)
    hidden = teacher.encoder(inputs, batch.layout.repeated(2))
    x_targets = masked.masked_fill(padding, -1)
    of_original, of_masked = hidden.unbind(-3)
    x_logits = teacher.predict(hidden, head="x")
    x = cross_entropy(x_logits, torch.stack([x_targets, x_targets], dim=-2))
    y_logits = teacher.predict(of_original, head="y")
    y_copy = cross_entropy(y_logits, original.masked_fill(padding, -1))
    y_masked = cross_entropy(teacher.predict(of_masked, batch.positions, "y"), batch.targets)
    half = 0.5 / batch.copy_count
    return {
        # There are two rows per text: logs have the mean of both pairs, the loss has their sum.
        "teacher_x": Term(copy_sums(x, batch) / 2, "tokens", 2 * half),
        "teacher_copy": Term(copy_sums(y_copy, batch), "tokens", half),
        "teacher_mlm": Term(copy_sums(y_masked, batch), "targets", half),
    }


class _PairCriterion(Criterion):
    """Base class for soft and hard labels: validation scores the student as a masked LM."""

    def __call__(self, model: nn.Module, batch: TokenBatch) -> Terms:
        return labelled_terms(model(batch.tokens, batch.layout, batch.positions), batch)


class HardLabels(_PairCriterion):
    """Sampled pairs and the REINFORCE loss (equations 4 to 8)."""

    config: HardConfig

    def sample(self, teacher: TransformerLM, batch: UnlabelledBatch) -> tuple[Tensor, Tensor]:
        """Draw a pair, (C, B, S) each, with every position from its softmax; padding is copied."""
        padding, original = batch.layout.padding_of(batch.tokens), batch.original
        x, y = (draw(logits) for logits in teacher_logits(teacher, batch))
        return torch.where(padding, original, x), torch.where(padding, original, y)

    def reinforce(self, teacher: TransformerLM, batch: UnlabelledBatch, rewards: Tensor) -> Terms:
        """Return reward * CE of the sampled pair under the teacher (equation 6); rewards (C,)."""
        assert batch.sampled_x is not None and batch.sampled_y is not None
        padding = batch.layout.padding_of(batch.tokens)
        logits_x, logits_y = teacher_logits(teacher, batch)
        loss_x = cross_entropy(logits_x, batch.sampled_x.masked_fill(padding, -1))
        loss_y = cross_entropy(logits_y, batch.sampled_y.masked_fill(padding, -1))
        total = copy_sums(0.5 * (loss_x + loss_y), batch)
        weight = self.config.meta_weight * rewards / batch.copy_count
        return {"reinforce": Term(total, "tokens", weight)}

    def origin(self, optimizer: Optimizer, weights: Tensor) -> Tensor:
        """Return the parameters (P,) that the student's next step starts from, given its `weights`.

        These are the weights themselves or, as in the paper, the weights after weight decay alone.
        """
        if self.config.fidelity == "authors":
            return weights
        decays = decoupled_decay(optimizer)
        if len(set(decays)) == 1:
            return weights * (1 - optimizer.lr * decays[0])
        each = [torch.full_like(p, d) for p, d in zip(optimizer.parameters, decays, strict=True)]
        return weights * (1 - optimizer.lr * vectors.flat(each))


def draw(logits: Tensor) -> Tensor:
    """Sample a token per position from softmax(logits)."""
    return draw_index(logits.double().softmax(-1).cumsum(-1))


class SoftLabels(_PairCriterion):
    """Probabilities as pairs (section 3.3)."""

    def __init__(self, config: SoftConfig) -> None:
        super().__init__(config)
        if config.finetune_step == "adamw" and config.pretrain_step == "sgd":
            raise UsageError(
                "criterion.finetune_step=adamw needs pretrain_step=adamw, whose moments it uses"
            )
        if config.fixed_y and config.targets != "learned":
            raise UsageError(
                f"criterion.targets={config.targets}: with criterion.fixed_y the text is the target"
            )
        self.frequencies: Tensor | None = None  # (V,), shares in the corpus, for unigram targets
        exact = config.hypergradient == "exact"
        self.difference_step = 0.0 if exact else config.difference_step

    def eager_reason(self) -> str:
        """Return why torch.compile cannot run the updates."""
        return "gradients are differentiated again"

    def distil(
        self, student: Callable[..., Tensor], teacher: TransformerLM, batch: UnlabelledBatch
    ) -> Terms:
        """Return the student's cross-entropy with the teacher's target on the teacher's input.

        Padding follows the unlabelled rows; the input may put mass on any token.
        """
        scores_x, scores_y = teacher_logits(teacher, batch)
        predicted = student(scores_x.softmax(-1), batch.layout)  # (C, B, S, V)
        padding = batch.layout.padding_of(batch.tokens)
        if self.config.fixed_y:
            losses = cross_entropy(predicted, batch.original.masked_fill(padding, -1))
        else:
            taught = self.taught(scores_y.softmax(-1), padding)
            losses = _soft_cross_entropy(predicted, taught).masked_fill(padding, 0.0)
        return {"pseudo": Term(copy_sums(losses, batch), "tokens", 1.0 / batch.copy_count)}

    def taught(self, probabilities: Tensor, padding: Tensor) -> Tensor:
        """Return the student's targets in place of the teacher's probabilities (C, B, S, V)."""
        kind = self.config.targets
        if kind == "flat":
            return _flat_support(probabilities.detach(), self.config.support)
        if kind == "shifted":
            # Detached: the meta loss would teach the teacher's head of targets to predict half a
            # row ahead, which undoes the shift.
            return _shift_targets(probabilities.detach(), padding)
        if kind == "unigram":
            assert self.frequencies is not None
            return self.frequencies.to(probabilities).expand_as(probabilities)
        if kind == "uniform":
            return torch.full_like(probabilities, 1.0 / probabilities.shape[-1])
        return probabilities


def _flat_support(probabilities: Tensor, share: float) -> Tensor:
    """Return equal probabilities for the likeliest tokens that together hold `share` (..., V)."""
    ordered, tokens = probabilities.sort(-1, descending=True)
    support = (ordered.cumsum(-1) - ordered < share).to(probabilities)
    return torch.zeros_like(support).scatter(-1, tokens, support / support.sum(-1, keepdim=True))


def _shift_targets(probabilities: Tensor, padding: Tensor) -> Tensor:
    """Return the probabilities (..., S, V) shifted by half a row, around the end of its text.

    Padding (..., S) follows the text. Rows are independent, and nothing is drawn.
    """
    length = (~padding).sum(-1, keepdim=True)
    places = torch.arange(padding.shape[-1], device=padding.device).expand(padding.shape)
    source = torch.where(padding, places, (places + length // 2) % length.clamp(min=1))
    return probabilities.gather(-2, source.unsqueeze(-1).expand(probabilities.shape))


def reward_of(
    kind: str, step: Tensor, query_gradient: Tensor, query_loss: Tensor
) -> tuple[Tensor, Tensor]:
    """Return reward and dot product for a step theta0 - theta1 and the query gradient (eq. 8).

    A reward that is not finite, or a cosine outside [-1, 1], counts as 0: that sample is skipped.
    """
    product = vectors.dot([step], [query_gradient])
    if kind == "neg_loss":
        reward = -query_loss
    elif kind == "dot":
        reward = product
    else:
        reward = vectors.cosine([step], [query_gradient])
        reward = torch.where(reward.abs() <= 1, reward, torch.zeros_like(reward))
    return torch.where(reward.isfinite(), reward, torch.zeros_like(reward)), product


# The soft cross-entropy also has explicit derivatives for large logits, see criterions.masked_lm.


def _soft_cross_entropy(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Return the cross-entropy at each position with `probabilities` (..., V), which sum to 1."""
    if not is_large(logits):
        return -(probabilities * logits.log_softmax(-1)).sum(-1)
    flat = full_precision(logits.flatten(0, -2)), probabilities.flatten(0, -2)
    losses: Tensor = _SoftLoss.apply(*flat)  # type: ignore[no-untyped-call]
    return losses.view(logits.shape[:-1])


class _SoftLoss(torch.autograd.Function):
    """log sum exp - <probabilities, logits>, (N,): the cross-entropy, as probabilities sum to 1."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probabilities: Tensor) -> Tensor:
        log_sum = log_sums(logits)
        ctx.save_for_backward(logits, probabilities, log_sum)
        products = [(probabilities[at] * logits[at]).sum(-1) for at in blocks(logits)]
        return log_sum.squeeze(1) - torch.cat(products)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        logits, probabilities, log_sum = ctx.saved_tensors
        scale = grads[0].unsqueeze(1)
        by_logits = _SoftGradient.apply(logits, probabilities, log_sum, scale)  # type: ignore[no-untyped-call]
        # The derivative by the probabilities equals the cross-entropy's up to a constant in each
        # row, to which a softmax is invariant.
        return by_logits, -scale * logits if ctx.needs_input_grad[1] else None


class _SoftGradient(torch.autograd.Function):
    """scale * (softmax - probabilities), (N, V)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, probabilities: Tensor, log_sum: Tensor, scale: Tensor
    ) -> Tensor:
        ctx.save_for_backward(logits, probabilities, log_sum, scale)
        out = torch.empty_like(logits)
        for at in blocks(logits):
            part = torch.sub(logits[at], log_sum[at], out=out[at]).exp_()
            part.sub_(probabilities[at]).mul_(scale[at])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, Tensor | None]:
        logits, probabilities, log_sum, scale = ctx.saved_tensors
        hvp = softmax_hvp(logits, log_sum, scale, grads[0])
        by_target = -scale * grads[0] if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[3]:
            return hvp, by_target, None, None
        ones = torch.ones_like(scale)
        unscaled = _SoftGradient.apply(logits, probabilities, log_sum, ones)  # type: ignore[no-untyped-call]
        return hvp, by_target, None, (unscaled * grads[0]).sum(-1, keepdim=True)
