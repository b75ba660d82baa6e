"""A joint-embedding term in addition to masked LM (Boukhari 2026, arXiv 2606.05173).

A moving average of the encoder reads the unmasked row. From the states of a context, which is a
part of the row, a predictor guesses the average's states of hidden blocks. The loss is
    share * mean over hidden tokens of (1 - cos(predicted, target)) + (1 - share) * masked LM
with share = sigmoid(w) and w learnt from 0: it rises while the cosine term is the smaller one,
unless `criterion.share` fixes it. The masked LM has a separate pass over whole rows. Sizes of
blocks, the LayerNorm without weights on targets and the rising decay follow the paper's code
(commit bc6dc05). Unlike there, blocks are drawn by row and apart from the context, [CLS] is
context, blocks are predicted at once, and targets have no dropout. Shapes: B rows, S length, D
width of the states.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.config.criterions import ZLossConfig
from metaseq_lm.config.tasks import MaskedLMConfig
from metaseq_lm.core.batch import Logs, Term, Terms, TokenBatch
from metaseq_lm.core.options import option
from metaseq_lm.core.random_streams import subkeys, uniforms
from metaseq_lm.core.registry import register_criterion, register_task
from metaseq_lm.criterions import Exported
from metaseq_lm.criterions.masked_lm import MaskedLM
from metaseq_lm.data.corpus.rows import Samples, masked_batch
from metaseq_lm.forward.passes import full_precision
from metaseq_lm.models.layers import AveragedWeights, Embedding, Linear, dropout_at
from metaseq_lm.models.transformer.encoder import Stack
from metaseq_lm.tasks.masked_lm import MaskedCollate, MaskedLMTask, build_lm

CONTEXT, HIDDEN = (0.65, 0.85), (0.10, 0.25)  # least and largest share of a row
DECAY, LAYERS = 0.996, 2  # decay of the average in the first update; layers of the predictor


@dataclass(kw_only=True)
class JointBatch(TokenBatch):
    """Masked rows, the unmasked rows, and which tokens are context or hidden, (B, S)."""

    originals: Tensor
    context: Tensor
    hidden: Tensor


def blocks(lengths: np.ndarray, width: int, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which tokens of each row are context, and which are hidden, boolean (B, S)."""
    u, inside = uniforms(subkeys(keys, "blocks"), 0, 6).reshape(-1, 2, 3), lengths[:, None] - 2
    least, most = np.transpose([CONTEXT, HIDDEN, HIDDEN])
    sizes = ((least + (most - least) * u[:, 0]) * inside).astype(np.int64).clip(1)  # (B, 3)
    starts = 1 + (u[:, 1] * (inside - sizes + 1)).astype(np.int64)[..., None]
    at = np.arange(width)
    visible, first, second = np.moveaxis((at >= starts) & (at < starts + sizes[..., None]), 1, 0)
    hidden = first | second
    return (visible & ~hidden) | (at == 0), hidden


def joint_batch(
    corpus: Samples, masking: Any, samples: np.ndarray, keys: np.ndarray, width: int = 0
) -> JointBatch:
    """Return masked rows with their context and hidden blocks; "hidden" is the number of tokens."""
    batch = masked_batch(corpus, masking, samples, keys, width)
    rows, lengths = corpus.rows(samples, width=width)
    context, hidden = blocks(lengths, rows.shape[1], keys)
    batch.sizes["hidden"] = int(hidden.sum())
    return JointBatch(**vars(batch), originals=rows, context=context, hidden=hidden)


class Predictor(nn.Module):
    """Predicts states of hidden tokens from the context, half as wide as the encoder; holds w."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.encoder_embed_dim
        is_learned = config.style.positions == "learned"
        self.positions = Embedding(config.max_positions, width) if is_learned else None
        self.mask = nn.Parameter(nn.init.trunc_normal_(torch.empty(width), std=0.02))
        self.stack = Stack(config.resized(width // 2, LAYERS, width))
        self.out = Linear(width // 2, width)
        self.balance = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, batch: JointBatch) -> Tensor:
        """Return states (B, S, D), predicted where `batch.hidden`, given the context's states x."""
        x = torch.where(batch.hidden.unsqueeze(-1), self.mask, x)
        if self.positions is not None:
            x = x + self.positions.weight[: x.shape[1]]
        layout = replace(batch.layout, padding=~(batch.context | batch.hidden))
        return self.out(self.stack(x, layout))


@dataclass
class JointEmbeddingConfig(ZLossConfig):
    """The weights of the terms, and the average."""

    share: float = option(0.0, "share of the added term (0 = learnt)", at_least=0, below=1)
    decay_updates: int = option(0, "updates until the decay is 1", follows="trainer.max_update")


@register_criterion("joint_embedding", dataclass=JointEmbeddingConfig)
class JointEmbedding(MaskedLM):
    """Masked LM and predicted states of hidden blocks; an evaluation is that of masked LM."""

    exported = Exported(heads=("lm",))
    tasks = ("joint_embedding",)

    def __call__(self, model: Any, batch: JointBatch) -> Terms:
        terms, predictor = super().__call__(model, batch), model.heads["predictor"]
        if not model.training:
            return terms
        alone = replace(batch.layout, padding=~batch.context)
        predicted = predictor(model.encoder(batch.tokens, alone, batch.segments), batch)
        with torch.no_grad(), dropout_at(average := model.heads["average"].net, 0.0):
            target = average(batch.originals, batch.layout, batch.segments)
        target = F.layer_norm(full_precision(target), target.shape[-1:])
        cosine = F.cosine_similarity(full_precision(predicted), target, dim=-1)  # (B, S)
        share = self.config.share or predictor.balance.sigmoid()
        terms["mlm"].weight = 1 - share
        terms["joint_embedding"] = Term(((1 - cosine) * batch.hidden).sum(), "hidden", share)
        return terms


@register_task("joint_embedding", dataclass=MaskedLMConfig)
class JointEmbeddingTask(MaskedLMTask):
    """Masked rows with hidden blocks; a model with a predictor and an averaged encoder."""

    exported = True
    criterions = (JointEmbedding,)

    def collate(self, corpus: Samples) -> MaskedCollate:
        return partial(joint_batch, corpus)

    def build_model(self) -> nn.Module:
        model = build_lm(self.run_config, self.vocabulary)
        model.add_head("predictor", Predictor(self.run_config.model))
        model.heads["average"] = AveragedWeights(model.encoder, DECAY)  # exports omit heads
        return model

    def update(self, engine: Any, model: Any, batches: Any) -> Logs:
        done, updates = engine.optimizers["main"].updates, self.criterion.config.decay_updates
        logs = super().update(engine, model, batches)
        rising = DECAY + (1 - DECAY) * min(done / max(updates, 1), 1.0)
        model.heads["average"].update_parameters(model.encoder, rising if done else 0.0)
        return logs

    def flops_by_rule(self) -> None:
        """Return None, because the rules count neither predictor nor targets."""
