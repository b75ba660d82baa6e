"""Rows in which some positions predict tokens: prefix LM, masked next token, masked diffusion.

States predict the token at their own position (masked LM, diffusion) or at the next one (causal and
prefix LM, masked next token). This module alone knows that shift: `next_targets` for targets of
rows, `source_of` for positions, `at_tokens` for values that go back to the tokens.

The lengths of prefixes and the times of diffusion are drawn for a global batch as a whole
(`draw_times`), so they depend on neither the number of processes nor the number of micro-batches.

Shapes: B rows, S length, N predictions of a batch.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from metaseq_lm.config.tasks import BELL, UNIFORM
from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Layout, SequenceBatch, as_tensor
from metaseq_lm.core.random_streams import subkeys, uniforms
from metaseq_lm.data.corpus.masking import Masking, candidates_of, mask_tokens, pick
from metaseq_lm.data.corpus.rows import Samples, row_layout

__all__ = ["PredictionBatch", "next_targets", "prediction_batch"]

_NONE = -1  # no target
# The number of predictions is a multiple of this, so that batches have few different shapes: the
# FLOPs of each shape are counted once.
MULTIPLE = 16
LEAST_TIME = 1e-3  # least diffusion time; at 0 nothing would be masked, with infinite weight


@dataclass(kw_only=True)
class PredictionBatch(SequenceBatch):
    """Rows in which any number of positions predict tokens.

    Attributes:
        sources: The position that predicts each target, as index into the B S positions (N,).
        targets: The tokens to predict (N,), -1 where there is none.
        weights: Weight of the loss of each target (N,); None for 1.
        mask_id: Id of [MASK].
    """

    sources: Tensor
    targets: Tensor
    weights: Tensor | None = None
    mask_id: int = _NONE


# ------------------------------------------------------------------------------- the shift


def next_targets(targets: Tensor, layout: Layout) -> Tensor:
    """Shift targets one position to the left, (B, S), with -1 at the end of a document.

    The first token of a row or document is therefore never a target.
    """
    shifted = targets[:, 1:]
    if layout.documents is not None:
        ends = layout.documents[:, 1:] != layout.documents[:, :-1]
        shifted = shifted.masked_fill(ends, _NONE)
    return F.pad(shifted, (0, 1), value=_NONE)


def source_of(positions: Tensor) -> Tensor:
    """Return the positions whose states predict the tokens at `positions`: the ones before them."""
    return positions - 1


def at_tokens(values: Tensor) -> Tensor:
    """Move values (B, S) from predicting positions to the tokens they predict; 0 at the first."""
    return F.pad(values[:, :-1], (1, 0))


# ------------------------------------------------------------------------------- times


def draw_times(key: int, rows: int) -> np.ndarray:
    """Return a time in (0, 1] for each row of a global batch, (rows,).

    The interval is cut into `rows` equal cells; each holds one time, in random order (Sahoo et al.
    2024, code, "antithetic sampling").

    Args:
        key: Key of the global batch.
        rows: Number of its rows.
    """
    generator = random_streams.generator(key, "times")
    cells = (np.arange(rows) + generator.random(rows)) / rows
    return np.asarray(1 - generator.permutation(cells))


def _diffusion_times(times: np.ndarray, distribution: str) -> np.ndarray:
    """Return the times of diffusion in (LEAST_TIME, 1], given uniform ones in (0, 1]."""
    if distribution == BELL:
        # The quantiles of Beta(2, 2), with density 6 t (1 - t). Bell-shaped densities are the idea
        # of Hong et al. 2026; this one is our choice.
        times = 0.5 - np.sin(np.arcsin(1 - 2 * times) / 3)
    return LEAST_TIME + (1 - LEAST_TIME) * times


@dataclass(frozen=True)
class MaskNoise:
    """How the rows of masked diffusion are masked (Sahoo et al. 2024, sections 3.1 and 3.3).

    At time t a token is masked with probability (1 - LEAST_TIME) t, and the losses of masked tokens
    have the weight 1 / t: their sum is then, in expectation over uniform times, a bound on the
    negative log-likelihood of the row.

    With `by_count`, for evaluation, the number k of masked tokens is uniform in 1 to n, these are
    drawn from the n, and the weight is n / k: the same bound in expectation, with less variance
    (Nie et al. 2025, code).

    Attributes:
        distribution: "uniform" or "bell", see `_diffusion_times`.
        is_flat: Whether all weights are 1.
        by_count: Whether a row's number determines k instead of t; distribution and is_flat are
            then ignored.
        is_shifted: Whether masked tokens are predicted at the position before.
    """

    distribution: str = UNIFORM
    is_flat: bool = False
    by_count: bool = False
    is_shifted: bool = False

    def choose(
        self, candidates: np.ndarray, times: np.ndarray, keys: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return which candidates are masked, boolean (B, S), and weights (B,).

        Args:
            candidates: Which tokens can be masked, boolean (B, S).
            times: A number in (0, 1] for each row (B,).
            keys: A key for each row (B,).
        """
        if self.by_count:
            return masked_by_count(candidates, times, keys)
        t = _diffusion_times(times, self.distribution)
        u = uniforms(subkeys(keys, "diffusion"), 0, candidates.shape[1])
        chosen = candidates & (u < (1 - LEAST_TIME) * t[:, None])
        if self.is_flat:
            return chosen, np.ones(len(t))
        return chosen, 1 / t


def masked_by_count(
    candidates: np.ndarray, times: np.ndarray, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return k of each row's n candidates (B, S), boolean, and weights n / k (B,).

    k is `times` (B,) times n, rounded up.
    """
    n = candidates.sum(1)
    k = np.ceil(times * n).astype(np.int64)
    positions, counted = pick(candidates, k, max(int(k.max(initial=0)), 1), keys)
    chosen = np.zeros(candidates.shape, bool)
    at_row, at = np.nonzero(counted)
    chosen[at_row, positions[at_row, at]] = True
    return chosen, n / np.maximum(k, 1)


# ------------------------------------------------------------------------------- batches


def prediction_batch(
    rows: np.ndarray,
    tokens: np.ndarray,
    layout: Layout,
    is_target: np.ndarray,
    is_shifted: bool,
    weights: np.ndarray | None = None,
) -> PredictionBatch:
    """Return the batch that predicts some tokens of rows; its sizes are "targets" and "rows".

    Args:
        rows: The original tokens (B, S).
        tokens: What the model reads (B, S).
        layout: Padding, documents and reach.
        is_target: Which tokens are predicted, boolean (B, S).
        is_shifted: Whether states predict next tokens.
        weights: Weight of the loss of each row's targets (B,); None for 1.
    """
    length = rows.shape[1]
    places = np.where(is_target, np.arange(rows.size).reshape(rows.shape), _NONE)
    if is_shifted:
        places = next_targets(torch.from_numpy(places), layout).numpy()
    places = places.reshape(-1)
    sources = np.flatnonzero(places != _NONE)
    count = len(sources)
    missing = -count % MULTIPLE or MULTIPLE * (not count)
    sources = np.append(sources, np.zeros(missing, np.int64))
    places = np.append(places[sources[:count]], np.zeros(missing, np.int64))
    targets = rows.reshape(-1)[places]
    targets[count:] = _NONE
    return PredictionBatch(
        tokens=as_tensor(tokens),
        layout=layout,
        sources=as_tensor(sources),
        targets=as_tensor(targets),
        weights=None if weights is None else as_tensor(weights[places // length]),
        sizes={"targets": count, "rows": len(rows)},
    )


def prefix_batch(
    corpus: Samples,
    samples: np.ndarray,
    keys: np.ndarray,
    width: int = 0,
    times: np.ndarray | None = None,
) -> PredictionBatch:
    """Return rows with bidirectional attention in a prefix, and the tokens after it as targets.

    The prefix of a row of n tokens includes [CLS] and has 1 to n - 1 tokens with equal probability,
    so at least one token is predicted (Raffel et al. 2020, code, `prefix_lm`). `times` (B,) in (0,
    1] give the share of the row that is predicted. In packed rows each document has its own prefix:
    see `_document_prefixes`.
    """
    assert times is not None
    rows, lengths = corpus.rows(samples, width=width)
    layout = row_layout(corpus, samples, lengths, rows.shape[1])
    at = np.arange(rows.shape[1])
    is_real = at < lengths[:, None]
    if layout.documents is None:
        prefix = 1 + ((1 - times) * (lengths - 1)).astype(np.int64)
        is_target = is_real & (at >= prefix[:, None])
    else:
        documents = layout.documents.numpy()
        prefix, position = _document_prefixes(documents, is_real, times, keys)
        is_target = is_real & (position >= prefix)
    layout = replace(layout, reach="prefix", prefix=as_tensor(prefix))
    return prediction_batch(rows, rows, layout, is_target, is_shifted=True)


def _document_prefixes(
    documents: np.ndarray, is_real: np.ndarray, times: np.ndarray, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the length of the prefix of each token's document, and its position, int64 (B, S).

    The first document of a row uses the row's time, as if it were alone. Each other document shifts
    the time by a uniform random number modulo 1, which keeps it uniform.

    Args:
        documents: The number of each token's document in its row, from 0 (B, S).
        is_real: Which positions hold a token, boolean (B, S).
        times: A number in (0, 1] for each row (B,).
        keys: A key for each row (B,).
    """
    count = int(documents.max(initial=0)) + 1
    row = np.broadcast_to(np.arange(len(documents))[:, None], documents.shape)
    sizes = np.zeros((len(documents), count), np.int64)
    np.add.at(sizes, (row, documents), is_real)
    moved = uniforms(subkeys(keys, "prefixes"), 0, count)
    moved[:, 0] = 0
    prefixes = 1 + (((1 - times)[:, None] + moved) % 1 * (sizes - 1)).astype(np.int64)
    begins = np.cumsum(sizes, 1) - sizes
    return prefixes[row, documents], np.arange(documents.shape[1]) - begins[row, documents]


def next_token_batch(
    corpus: Samples, masking: Masking, samples: np.ndarray, keys: np.ndarray, width: int = 0
) -> PredictionBatch:
    """Return rows `samples` (B,) that predict masked next tokens, masked by `keys` (B,)."""
    rows, lengths = corpus.rows(samples, width=width)
    masked, positions, originals = mask_tokens(rows, lengths, keys, masking)
    is_target = np.zeros(rows.shape, bool)
    at_row, at = np.nonzero(originals != _NONE)
    is_target[at_row, positions[at_row, at]] = True
    layout = row_layout(corpus, samples, lengths, rows.shape[1])
    return prediction_batch(rows, masked, layout, is_target, is_shifted=True)


def denoising_batch(
    corpus: Samples,
    masking: Masking,
    noise: MaskNoise,
    samples: np.ndarray,
    keys: np.ndarray,
    width: int = 0,
    times: np.ndarray | None = None,
) -> PredictionBatch:
    """Return rows that predict their masked tokens.

    The size "tokens" is the number of tokens that can be masked.

    Args:
        corpus: The rows.
        masking: The id of [MASK] and the tokens that are never masked.
        noise: How many tokens are masked, and the weights of their losses.
        samples: Numbers of the rows (B,).
        keys: A key for each row (B,).
        width: Width to pad to.
        times: Number of each row by `draw_times` (B,).
    """
    assert times is not None
    rows, lengths = corpus.rows(samples, width=width)
    candidates = candidates_of(rows, lengths, masking)
    chosen, weights = noise.choose(candidates, times, keys)
    tokens = np.where(chosen, masking.mask, rows)
    layout = row_layout(corpus, samples, lengths, rows.shape[1])
    batch = prediction_batch(rows, tokens, layout, chosen, noise.is_shifted, weights)
    batch.mask_id = masking.mask
    batch.sizes["tokens"] = int(candidates.sum())
    return batch
