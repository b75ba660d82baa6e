"""WNLI as coreference: which candidate, put in place of the pronoun, looks least like a fake.

Clark 2021, section 5.2.4: the candidates are extracted by rules and the discriminator is trained so
that the tokens of the right one look real, those of the others fake. Its head is the pre-trained
one. Aggregation and loss are not given; here the score of a candidate is the mean of minus the
logit of P(fake) over its tokens, and the loss is cross-entropy over candidates.

Shapes: B samples, K candidates (the query first), R rows of the model, S length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from metaseq_lm.core.batch import Logs, Term, Terms
from metaseq_lm.core.config import option
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import register_criterion, register_task
from metaseq_lm.criterions import Criterion
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.manifest import Manifest, require_tokenizer
from metaseq_lm.data.streams import Order, Sequential, Shuffled, Stream
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.engine.engine import Engine
from metaseq_lm.methods.electra.wnli_rows import CandidateBatch, CandidateRows
from metaseq_lm.models.transformer.encoder import BinaryHead, Encoder, TransformerConfig, initialise
from metaseq_lm.tasks import Passes, Scored, Task, with_epochs
from metaseq_lm.tasks.finetuning import (
    Outputs,
    encoder_sizes,
    encoder_weights,
    ensemble_of,
    judged,
    labelled_folder,
    labelled_split,
    leaderboard_files,
    listed,
)

HEAD = "heads.rtd."


class Discriminator(nn.Module):
    """ELECTRA's encoder and detection head, under the names that pre-training gives their weights.

    `prior` (2,) are the shares of the labels in the training set, for rows without a choice; it is
    a buffer, so that it comes with the weights.
    """

    prior: Tensor

    def __init__(
        self, config: TransformerConfig, vocab_size: int, padding_idx: int, prior: Sequence[float]
    ) -> None:
        super().__init__()
        self.encoder = Encoder(config, vocab_size, padding_idx)
        self.heads = nn.ModuleDict({"rtd": BinaryHead(config.encoder_embed_dim)})
        self.register_buffer("prior", torch.tensor(prior))
        initialise(self, config.init)

    def forward(self, tokens: Tensor, padding: Tensor | None, segments: Tensor | None) -> Tensor:
        """Return the logit of P(fake) of each token, (R, S)."""
        logits: Tensor = self.heads["rtd"](self.encoder(tokens, padding, segments))
        return logits


# ------------------------------------------------------------------------ criterion


@dataclass
class WnliConfig:
    """How the losses of a batch are put together."""

    batch_sum: bool = option(
        True, "sum of the batch's losses, which clipping sees; false takes their mean"
    )


@register_criterion("wnli", dataclass=WnliConfig)
class Wnli(Criterion):
    """Minus the log-probability that one of the positive candidates is chosen.

    For an entailment that is the query; otherwise the antecedent that another row of the same
    sentence tells, or, where none does, any but the query: minus log (1 - p(query)).
    """

    tasks = ("wnli",)

    config: WnliConfig

    def __call__(self, model: nn.Module, batch: CandidateBatch) -> Terms:
        return self.terms(model, self.scores(model, batch), batch)

    def scores(self, model: nn.Module, batch: CandidateBatch) -> Tensor:
        """Return the scores (B, K) of the candidates in full precision; -inf for what is not there."""
        logits = model(batch.tokens, batch.padding, batch.segments)
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        inside = batch.candidate.to(logits.dtype)
        means = -(logits * inside).sum(-1) / inside.sum(-1)
        table = torch.full_like(batch.present, -torch.inf, dtype=means.dtype)
        return table.flatten().index_put((batch.slots,), means).view_as(table)

    def terms(self, model: nn.Module, scores: Tensor, batch: CandidateBatch) -> Terms:
        """Return the terms of scores (B, K)."""
        per = None if self.config.batch_sum and model.training else "rows"
        assert batch.positive is not None and batch.targets is not None
        right = scores.masked_fill(~batch.positive, -torch.inf)
        losses = scores.logsumexp(-1) - right.logsumexp(-1)
        with torch.no_grad():
            hits = ((query_margin(scores) > 0) == batch.targets.bool()).sum()
        return {
            "cross_entropy": Term(losses.sum(), per),
            "accuracy": Term(hits.to(scores.dtype), "rows", weight=0.0),
        }


def query_margin(scores: Tensor) -> Tensor:
    """Return by how much the query's score exceeds the best other, (B,), of scores (B, K)."""
    return scores[:, 0] - scores[:, 1:].amax(-1)


def label_probabilities(scores: Tensor) -> Tensor:
    """Return probabilities of "0" and "1" (entailment), (B, 2), of scores (B, K), as float64.

    Those of the query against the best other candidate alone, so that entailment is the likelier
    label exactly if the query scores best.
    """
    entailed = query_margin(scores.double()).sigmoid()
    return torch.stack([1 - entailed, entailed], -1)


# ------------------------------------------------------------------------ task


@dataclass
class WnliTaskConfig:
    """Which labelled set, and how it is batched (defaults: Clark et al. 2020)."""

    labelled: str = option("", "set in DATA, made by preprocess --benchmark glue/WNLI")
    batch_size: int = option(32, "samples of a batch, each of about ten rows", at_least=1)
    epochs: float = option(
        0.0, "sets trainer.max_update from the training set (0 = it is given)", at_least=0
    )
    tokens_per_sample: int = option(128, "longest row, with its special tokens; others are cut")


@register_task("wnli", dataclass=WnliTaskConfig)
class WnliTask(Task):
    """A pre-trained discriminator on WNLI; what it cannot choose for gets the commoner label."""

    criterion: Wnli
    fresh = ("prior",)

    def __init__(self, config: WnliTaskConfig, run_config: DictConfig) -> None:
        super().__init__(config, run_config)
        self._splits: dict[str, CandidateRows] = {}

    @classmethod
    def prepare(cls, config: DictConfig) -> DictConfig:
        options = config.task
        if not options.epochs:
            return config
        examples = len(candidate_rows(config, "train"))
        return with_epochs(config, examples, options.batch_size, options.epochs)

    def rows(self, split: str) -> CandidateRows:
        """Return the rows of a split, read once."""
        if split not in self._splits:
            self._splits[split] = candidate_rows(self.run_config, split)
        return self._splits[split]

    # ---------------------------------------------------------------- data and model

    def build_streams(self, split: str) -> dict[str, Stream]:
        rows, size, seed = self.rows(split), self.config.batch_size, self.run_config.seed
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
        # A folder without a training split is only good for evaluation, where the weights bring
        # the prior along.
        labels = None
        if "train" in Manifest.load(folder).splits:
            labels = LabelledSet(folder, "train").labels
        prior = [0.5, 0.5]
        if labels is not None:
            prior = (np.bincount(labels, minlength=2) / len(labels)).tolist()
        return Discriminator(sizes, len(vocabulary), vocabulary.pad, prior)

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Take the encoder and the detection head of an ELECTRA run, or of a run of this task."""
        head = {name: weight for name, weight in weights.items() if name.startswith(HEAD)}
        if not head:
            raise UsageError(
                "init_from has no detection head (heads.rtd), which task wnli starts from; give a run "
                "of task=electra criterion=electra_rtd"
            )
        return encoder_weights(weights, self.run_config) | head

    # ---------------------------------------------------------------- scores

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return accuracy over all rows, then the loss of those with a choice: see `labelled_split`."""
        ((split, batches),) = passes.items()
        data = self.rows(split).data

        def judge(batch: CandidateBatch) -> tuple[Terms, Outputs]:
            scores = self.criterion.scores(model, batch)
            outputs = listed(batch.samples, label_probabilities(scores))
            terms = {} if data.labels is None else self.criterion.terms(model, scores, batch)
            return terms, outputs

        logs, outputs = judged(engine, batches, judge)
        return labelled_split(data, outputs + self._without_choice(split, model), logs)

    def _without_choice(self, split: str, model: nn.Module) -> Outputs:
        """Return the rows that no batch holds, with the prior."""
        assert isinstance(model.prior, Tensor)
        prior = model.prior.tolist()
        return [(sample, prior) for sample in self.rows(split).unusable.tolist()]

    def submissions(self, split: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Return WNLI.tsv as GLUE's leaderboard wants it, for a test split."""
        return leaderboard_files(self.rows(split).data, split, rows)

    def ensemble(
        self, split: str, members: Sequence[Sequence[dict[str, Any]]]
    ) -> tuple[Logs, Sequence[dict[str, Any]]]:
        """Return metrics and predictions of the mean of the runs' probabilities."""
        return ensemble_of(self.rows(split).data, members)


def candidate_rows(config: DictConfig, split: str) -> CandidateRows:
    """Return the rows of a split of the configured set."""
    data = LabelledSet(labelled_folder(config), split)
    require_tokenizer(data.folder, data.tokenizer_hash)
    tokenizer = load_tokenizer(config.data)
    return CandidateRows(data, tokenizer, config.task.tokens_per_sample, split == "train")
