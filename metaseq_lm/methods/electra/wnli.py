"""WNLI as coreference: the candidate that looks least replaced in the pronoun's position.

In Clark 2021, section 5.2.4, rules extract the candidates, and the discriminator with its
pre-trained head learns that the tokens of the right candidate are real and all others fake. The
source gives neither score nor loss. Here a candidate's score is the mean over its tokens of minus
the logit of P(fake), and the loss is cross-entropy over candidates.

Shapes: B samples, K candidates (the query first), R rows of the model, S length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from metaseq_lm.config.criterions import BatchSumConfig
from metaseq_lm.config.transformer import EncoderConfig
from metaseq_lm.core.batch import Layout, Term, Terms
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.criterions import Criterion
from metaseq_lm.criterions.labelled import is_batch_sum
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.manifest import Manifest, require_tokenizer
from metaseq_lm.data.streams import Order, Sequential, Shuffled, Stream
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.engine.engine import Engine
from metaseq_lm.forward.passes import full_precision
from metaseq_lm.methods.electra.options import WnliTaskConfig
from metaseq_lm.methods.electra.wnli_rows import CandidateBatch, CandidateRows
from metaseq_lm.models.layers import Heads
from metaseq_lm.models.transformer.encoder import BinaryHead, Encoder, initialise
from metaseq_lm.tasks import Passes, Scored
from metaseq_lm.tasks.finetuning import (
    LabelledSetTask,
    Outputs,
    encoder_sizes,
    encoder_weights,
    evaluate_predictions,
    labelled_folder,
    labelled_split,
    split_outputs,
)

HEAD = "heads.rtd."


class _Discriminator(nn.Module):
    """ELECTRA's encoder and detection head, with the weight names of pre-training.

    `prior` (2,) has the shares of the labels in the training set, which are the prediction for
    samples without candidates; it is a buffer, so it is saved with the weights.
    """

    prior: Tensor

    def __init__(
        self, config: EncoderConfig, vocab_size: int, padding_idx: int, prior: Sequence[float]
    ) -> None:
        super().__init__()
        self.encoder = Encoder(config, vocab_size, padding_idx)
        self.heads = Heads({"rtd": BinaryHead(config.encoder_embed_dim)})
        self.register_buffer("prior", torch.tensor(prior))
        initialise(self, config.init)

    def forward(self, tokens: Tensor, layout: Layout, segments: Tensor | None) -> Tensor:
        """Return the logit of P(fake) of each token, (R, S)."""
        logits: Tensor = self.heads["rtd"](self.encoder(tokens, layout, segments))
        return logits


# ------------------------------------------------------------------------ criterion


class Wnli(Criterion):
    """Minus the log-probability of the positive candidates (see CandidateRows)."""

    exported = (
        "it compares candidates by the mean logit of a detector, which no class of "
        "transformers does"
    )
    tasks = ("wnli",)

    config: BatchSumConfig

    def __call__(self, model: nn.Module, batch: CandidateBatch) -> Terms:
        return self.terms(model, self.scores(model, batch), batch)

    def scores(self, model: nn.Module, batch: CandidateBatch) -> Tensor:
        """Return the scores (B, K) of the candidates in full precision, -inf at padding."""
        logits = full_precision(model(batch.tokens, batch.layout, batch.segments))
        inside = batch.candidate.to(logits.dtype)
        means = -(logits * inside).sum(-1) / inside.sum(-1)
        table = torch.full_like(batch.present, -torch.inf, dtype=means.dtype)
        return table.flatten().index_put((batch.slots,), means).view_as(table)

    def terms(self, model: nn.Module, scores: Tensor, batch: CandidateBatch) -> Terms:
        """Return the terms of scores (B, K)."""
        is_summed = is_batch_sum(self.config, model)
        assert batch.positive is not None and batch.targets is not None
        positive = scores.masked_fill(~batch.positive, -torch.inf)
        losses = scores.logsumexp(-1) - positive.logsumexp(-1)
        with torch.no_grad():
            hits = ((_query_margin(scores) > 0) == batch.targets.bool()).sum()
        return {
            "cross_entropy": Term(losses.sum(), "rows", is_summed=is_summed),
            "accuracy": Term(hits.to(scores.dtype), "rows", weight=0.0),
        }


def _query_margin(scores: Tensor) -> Tensor:
    """Return the query's score minus the best other score, (B,), of scores (B, K)."""
    return scores[:, 0] - scores[:, 1:].amax(-1)


def _label_probabilities(scores: Tensor) -> Tensor:
    """Return probabilities of "0" and "1" (entailment), (B, 2) in float64, of scores (B, K)."""
    # Entailment is the likelier label exactly if the query scores best.
    entailed = _query_margin(scores.double()).sigmoid()
    return torch.stack([1 - entailed, entailed], -1)


# ------------------------------------------------------------------------ task


class WnliTask(LabelledSetTask):
    """A pre-trained discriminator on WNLI; samples without candidates get the majority label."""

    exported = True
    criterion: Wnli
    fresh = ("heads.", "prior")

    def __init__(self, config: WnliTaskConfig, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        self.labelled = lru_cache(maxsize=None)(partial(_candidate_rows, run_config))

    @classmethod
    def n_examples(cls, config: RunConfig) -> int:
        return len(_candidate_rows(config, "train"))

    # ---------------------------------------------------------------- data and model

    def build_streams(self, split: str) -> dict[str, Stream]:
        rows, size, seed = self.labelled(split), self.config.batch_size, self.run_config.seed
        order: Order = Sequential(len(rows), size)
        if split == "train":
            if rows.data.labels is None or not len(rows):
                raise MetaseqError(
                    f"{rows.data.folder}: '{split}' has no labelled rows with a pronoun to train on"
                )
            order = Shuffled(len(rows), size, seed, "train")
        return {split: Stream(split, order, rows.batch, seed, rows.lengths)}

    def build_model(self) -> nn.Module:
        sizes, vocabulary = encoder_sizes(self.run_config), load_tokenizer(self.data).vocabulary
        folder = labelled_folder(self.run_config)
        # A folder without a training split is for evaluation, where the prior is in the weights.
        prior, labels = [0.5, 0.5], None
        if "train" in Manifest.load(folder).splits:
            labels = LabelledSet(folder, "train").labels
        if labels is not None:
            prior = (np.bincount(labels, minlength=2) / len(labels)).tolist()
        return _Discriminator(sizes, len(vocabulary), vocabulary.pad, prior)

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Load the encoder and the detection head of an ELECTRA run, or of a run of this task."""
        head = {name: weight for name, weight in weights.items() if name.startswith(HEAD)}
        return encoder_weights(weights, self.run_config) | head

    # ---------------------------------------------------------------- scores

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return accuracy over all samples, and the loss over samples with candidates."""
        ((split, batches),) = passes.items()
        data = self.labelled(split).data

        def judge(batch: CandidateBatch) -> tuple[Terms, Outputs]:
            scores = self.criterion.scores(model, batch)
            outputs = split_outputs(batch.samples, _label_probabilities(scores))
            if data.labels is None:
                return {}, outputs
            return self.criterion.terms(model, scores, batch), outputs

        logs, outputs = evaluate_predictions(engine, batches, judge)
        # The prior predicts samples that are in no batch.
        assert isinstance(model.prior, Tensor)
        prior = model.prior.tolist()
        outputs += [(sample, prior) for sample in self.labelled(split).unusable.tolist()]
        return labelled_split(data, outputs, logs)


def _candidate_rows(config: RunConfig, split: str) -> CandidateRows:
    data = LabelledSet(labelled_folder(config), split)
    require_tokenizer(data.folder, data.tokenizer_hash)
    tokenizer = load_tokenizer(config.data)
    return CandidateRows(data, tokenizer, config.task.tokens_per_sample, split == "train")
