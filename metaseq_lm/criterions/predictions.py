"""Criterions for rows in which some positions predict tokens, see data/corpus/predictions.py.

Prefix LM, masked next token and masked diffusion. Only states that predict a token go through the
head.

Shapes: B rows, S length, N predictions, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor, nn

from metaseq_lm.config.criterions import CAUSAL, MaskedDiffusionConfig, PrefixLMConfig
from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Layout, ScoredBatch, Term, Terms, number_of
from metaseq_lm.core.metric_names import NLL
from metaseq_lm.criterions import Criterion, Exported
from metaseq_lm.criterions.language_modeling import CausalLM
from metaseq_lm.criterions.masked_lm import TargetRows, single_mask_log_probs, smoothing_of, z_terms
from metaseq_lm.data.corpus.predictions import PredictionBatch, masked_by_count, source_of
from metaseq_lm.models.layers import cross_entropy
from metaseq_lm.models.transformer.encoder import TransformerLM

__all__ = ["logits_at"]


def logits_at(model: nn.Module, tokens: Tensor, layout: Layout, sources: Tensor) -> Tensor:
    """Return the logits (N, V) of the states at `sources` (N,), which index the B S positions."""
    assert isinstance(model, TransformerLM)
    states = model.encoder(tokens, layout).flatten(0, 1)  # (B S, D)
    return model.predict(states.index_select(0, sources))


def _without_symbol(logits: Tensor, symbol: int) -> Tensor:
    """Return logits (N, V) with one symbol's at -inf, so that its probability is 0."""
    hidden = torch.arange(logits.shape[-1], device=logits.device) == symbol
    return logits.masked_fill(hidden, float("-inf"))


def _smoothed_without_symbol(
    logits: Tensor, targets: Tensor, symbol: int, label_smoothing: float
) -> Tensor:
    """Return the loss of each target (N,), smoothed over all symbols of logits (N, V) but one.

    `symbol` has probability 0 and is never a target.
    """
    others = torch.cat([logits[:, :symbol], logits[:, symbol + 1 :]], 1)
    # Later symbols have moved down by one.
    return cross_entropy(others, targets - (targets > symbol).to(targets), label_smoothing)


class PrefixLM(Criterion):
    """The mean loss of the tokens after a prefix that is seen from both sides (Raffel et al. 2020).

    The score of a sentence is its exact log-likelihood, with only [CLS] as the prefix.
    """

    exported = (
        "its rows are read from both sides in a prefix and causally after it, which no class of "
        "transformers does"
    )
    tasks = ("prefix_lm",)
    score_reach = CAUSAL
    config: PrefixLMConfig

    def __init__(self, config: PrefixLMConfig | None = None) -> None:
        super().__init__(config or PrefixLMConfig())
        self.reach = self.config.read

    def __call__(self, model: nn.Module, batch: PredictionBatch) -> Terms:
        logits = logits_at(model, batch.tokens, batch.layout, batch.sources)
        loss = cross_entropy(logits, batch.targets, smoothing_of(self.config, model)).sum()
        terms = {"next_token": Term(loss, "targets", kind=NLL)}
        return terms | z_terms(self.config, model, logits, batch)

    def token_log_probs(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """Return the log-probability of each token given [CLS] and earlier ones, in one pass."""
        return CausalLM().token_log_probs(model, batch)


class MaskedNextToken(Criterion):
    """Masked next-token prediction: a state predicts the next token if that is masked.

    The loss is the mean over these tokens (BehnamGhader et al. 2024; Charpentier and Samuel 2024).
    """

    exported = Exported(heads=("lm",), pipeline=False)  # outputs are for next tokens
    tasks = ("masked_next_token",)

    def __call__(self, model: nn.Module, batch: PredictionBatch) -> Terms:
        logits = logits_at(model, batch.tokens, batch.layout, batch.sources)
        loss = cross_entropy(logits, batch.targets, smoothing_of(self.config, model)).sum()
        with torch.no_grad():
            correct = number_of(logits.argmax(-1) == batch.targets)
        return {
            "masked_next_token": Term(loss, "targets", kind=NLL),
            "accuracy": Term(correct, "targets", weight=0.0),
            **z_terms(self.config, model, logits, batch),
        }

    def token_log_probs(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """Return the log-probability of each token if only it is masked, with one pass each.

        This is the sentence score of Salazar et al. 2020, section 2.
        """

        def predict(rows: TargetRows) -> Tensor:
            logits: Tensor = model(rows.tokens, rows.layout, source_of(rows.columns))
            return logits

        return single_mask_log_probs(batch, predict)


class MaskedDiffusion(Criterion):
    """Masked diffusion (Sahoo et al. 2024).

    The probability of [MASK] is 0, and tokens that are not masked have no loss. The loss is the sum
    of the weighted losses of masked tokens, divided by the number of tokens that could be masked.
    With weights 1 / t, and in evaluation, it bounds the negative log-likelihood per token.
    """

    exported = Exported(heads=("lm",), pipeline=False)  # a pipeline might choose [MASK]
    tasks = ("masked_diffusion",)
    normalised = False  # parts of a bound
    config: MaskedDiffusionConfig

    def __init__(self, config: MaskedDiffusionConfig | None = None) -> None:
        super().__init__(config or MaskedDiffusionConfig())

    def __call__(self, model: nn.Module, batch: PredictionBatch) -> Terms:
        logits = logits_at(model, batch.tokens, batch.layout, batch.sources)
        allowed = _without_symbol(logits, batch.mask_id)
        if smoothing := smoothing_of(self.config, model):
            losses = _smoothed_without_symbol(logits, batch.targets, batch.mask_id, smoothing)
        else:
            losses = cross_entropy(allowed, batch.targets)
        if batch.weights is not None:
            losses = losses * batch.weights.to(losses.dtype)
        terms = {"denoising": Term(losses.sum(), "tokens")}
        return terms | z_terms(self.config, model, allowed, batch)

    def token_log_probs(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """Return each token's part of a lower bound on the log-likelihood of the scored tokens.

        The bound is estimated from criterion.score_samples maskings of a sentence of n tokens. The
        numbers k of masked tokens are spread evenly over 1 to n; log-probabilities have weight
        n / k. Sentences of the same length get the same masks, which helps comparing pairs.
        """
        count = self.config.score_samples
        draw = np.arange(count)
        keys = random_streams.row_keys(random_streams.key(self.config.score_seed, "bound"), draw)
        times = 1 - (draw + random_streams.uniforms(keys, 0, 1)[:, 0]) / count
        scored = batch.scored.cpu().numpy()
        row = np.repeat(np.arange(len(scored)), count)
        chosen, weights = masked_by_count(
            scored[row], np.tile(times, len(scored)), np.tile(keys, len(scored))
        )
        device = batch.tokens.device
        total = torch.zeros(batch.tokens.shape, dtype=torch.float64, device=device)
        step = max(1, batch.batch_tokens // batch.tokens.shape[1])
        for first in range(0, len(row), step):
            part = slice(first, first + step)
            rows = torch.from_numpy(row[part]).to(device)
            log_probs = self.masked_log_probs(
                model, batch, rows, torch.from_numpy(chosen[part]).to(device)
            )
            scale = torch.from_numpy(weights[part] / count).to(device).unsqueeze(1)
            total.index_add_(0, rows, log_probs.double() * scale)
        return total

    def comparison_scores(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """Return the log-probability of each token if only it is masked, (B, S).

        Its sum over a sentence is no likelihood, and no bound on one.
        """

        def predict(rows: TargetRows) -> Tensor:
            logits = model(rows.tokens, rows.layout, self.sources(rows.columns))
            return _without_symbol(logits, batch.mask_id)

        return single_mask_log_probs(batch, predict)

    def sources(self, places: Tensor) -> Tensor:
        """Return the positions of the states that predict the tokens at `places`."""
        if self.config.shifted:
            return source_of(places)
        return places

    @torch.no_grad()
    def masked_log_probs(
        self, model: nn.Module, batch: ScoredBatch, rows: Tensor, chosen: Tensor
    ) -> Tensor:
        """Return the log-probabilities of masked tokens, (R, S), 0 elsewhere.

        Args:
            model: The model.
            batch: The rows to choose from.
            rows: Numbers of the chosen rows (R,).
            chosen: The tokens to mask together, boolean (R, S).
        """
        originals = batch.tokens[rows]
        tokens = originals.masked_fill(chosen, batch.mask_id)
        places = chosen.flatten().nonzero().squeeze(1)
        logits = logits_at(model, tokens, batch.layout.rows(rows), self.sources(places))
        losses = cross_entropy(_without_symbol(logits, batch.mask_id), originals.flatten()[places])
        return losses.new_zeros(chosen.shape).masked_scatter(chosen, -losses)
