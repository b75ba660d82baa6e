"""Rows for the ELECTRA family: the original, the masked one, and which tokens are chosen.

Shapes: B rows, S length, M chosen positions.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from metaseq_lm.core.batch import TokenBatch, as_tensor
from metaseq_lm.core.random_streams import mix, uniforms
from metaseq_lm.data.corpus.masking import Masking, candidates_of, mask_tokens
from metaseq_lm.data.corpus.rows import Samples, row_layout

_SUBSET = 0xE1EC  # number of this draw among the draws of a row; masking.py counts from 1


@dataclass(kw_only=True)
class ElectraBatch(TokenBatch):
    """Rows with the original tokens in `tokens`.

    Attributes:
        masked: The rows that a masked generator reads (B, S).
        positions: The chosen positions (B, M).
        targets: The tokens there (B, M), -1 if a row has fewer than M.
        candidates: Which tokens can be chosen, boolean (B, S).
        subset: A random subset of all tokens, boolean (B, S); None unless the loss is on one.
    """

    masked: Tensor
    positions: Tensor
    targets: Tensor
    candidates: Tensor
    subset: Tensor | None = None


@dataclass(frozen=True)
class ElectraRows:
    """The batches of a corpus.

    With `has_subset` they have a `subset` with the same share of tokens as is masked.
    """

    corpus: Samples
    has_subset: bool = False

    def batch(
        self, masking: Masking, samples: np.ndarray, keys: np.ndarray, width: int = 0
    ) -> ElectraBatch:
        """Return the rows `samples` (B,), masked by random `keys` (B,), padded to at least `width`.

        The sizes are "targets", "tokens", "candidates", "rows", and with a subset "subset".
        """
        rows, lengths = self.corpus.rows(samples, width=width)
        masked, positions, targets = mask_tokens(rows, lengths, keys, masking)
        candidates = candidates_of(rows, lengths, masking)
        sizes = {
            "targets": int((targets >= 0).sum()),
            "tokens": int(lengths.sum()),
            "candidates": int(candidates.sum()),
            "rows": len(rows),
        }
        subset = None
        if self.has_subset:
            # A sub-key of each row's key, so that the draw depends on nothing else.
            u = uniforms(mix(keys ^ np.uint64(_SUBSET)), 0, rows.shape[1])
            real = np.arange(rows.shape[1]) < lengths[:, None]
            subset = real & (u < masking.rate)
            sizes["subset"] = int(subset.sum())
        return ElectraBatch(
            tokens=as_tensor(rows),
            masked=as_tensor(masked),
            layout=row_layout(self.corpus, samples, lengths, rows.shape[1]),
            segments=as_tensor(self.corpus.segments(samples, rows.shape[1])),
            positions=as_tensor(positions),
            targets=as_tensor(targets),
            candidates=as_tensor(candidates),
            subset=as_tensor(subset),
            sizes=sizes,
        )
