"""Frozen states of the layers of a restored run's encoder, for probes.

Shapes: B rows, P parts of a row, S positions, D width.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from metaseq_lm.core.batch import TokenBatch
from metaseq_lm.criterions.masked_lm import TOKENS_PER_PASS
from metaseq_lm.data.tokenizers.base import DICT_FILE
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.distributed import process_group
from metaseq_lm.engine.engine import Engine
from metaseq_lm.evaluation.suites import SuiteRows
from metaseq_lm.tasks.protocols import (
    HasLayout,
    encoder_of,
    layout_of_states,
    reach_of,
    task_read_as,
)
from metaseq_lm.training.parts import Parts
from metaseq_lm.training.scoring import batches_by_length, longest_row

# Given a batch and its states (B, S, D) by layer, returns the pooled states by layer, and the row
# of each.
_Pooling = Callable[[TokenBatch, Sequence[Tensor]], tuple[list[Tensor], Tensor]]


class EncoderStates:
    """The states of each layer, in evaluation mode: see `evaluation.suites.HiddenStates`.

    Args:
        run: The restored run; its criterion says what a token sees.
        batch_tokens: Largest number of tokens in a forward pass; does not change the states.

    Attributes:
        reach: What a token sees: "both" sides, also if the criterion has a layout, or "causal".
        rows: Number of rows read.
        forward_tokens: Number of tokens that went through the encoder, with padding.

    Raises:
        UsageError: The run's model has no Transformer encoder.
    """

    def __init__(self, run: Parts, batch_tokens: int = TOKENS_PER_PASS) -> None:
        self.run, self.batch_tokens = run, batch_tokens
        self.task = task_read_as(run.task)
        has_layout = isinstance(self.task.criterion, HasLayout)
        self.reach = "both" if has_layout else reach_of(self.task)
        self.encoder = encoder_of(self.task, run.model)
        self.longest = longest_row(run.config)
        self.vocabulary = Vocabulary.load(Path(run.config.data, DICT_FILE))
        self.first = self.vocabulary.cls(self.task.text_token)
        self.rows = self.forward_tokens = 0

    def at_targets(self, rows: SuiteRows, samples: np.ndarray) -> list[np.ndarray]:
        """Return each layer's states at the positions with a target, float32 (words, D)."""

        def pool(batch: TokenBatch, states: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
            assert batch.targets is not None
            chosen = batch.targets >= 0
            return [x[chosen] for x in states], chosen.nonzero()[:, 0]

        return self._read(rows, samples, pool)

    def means(self, rows: SuiteRows, samples: np.ndarray) -> list[np.ndarray]:
        """Return each layer's mean over a row's states without special tokens, (B, D)."""

        def pool(batch: TokenBatch, states: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
            return _means_where(self._is_text(batch).unsqueeze(1), states)

        return [x[:, 0] for x in self._read(rows, samples, pool)]

    def means_of_parts(self, rows: SuiteRows, samples: np.ndarray) -> list[np.ndarray]:
        """Return each layer's means over both texts of a row's pair, or its spans, (B, 2, D).

        Special tokens do not count.
        """

        def pool(batch: TokenBatch, states: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
            spans = getattr(batch, "spans", None)
            if spans is None:
                assert batch.segments is not None
                inside = batch.segments.unsqueeze(1) == torch.arange(2).view(1, 2, 1).to(
                    batch.segments
                )
            else:
                at = torch.arange(batch.tokens.shape[1]).to(spans)
                inside = (at >= spans[..., :1]) & (at < spans[..., 1:])
            return _means_where(inside & self._is_text(batch).unsqueeze(1), states)

        return self._read(rows, samples, pool)

    def _is_text(self, batch: TokenBatch) -> Tensor:
        """Return which tokens are not special ones, boolean (B, S)."""
        tokens, vocabulary = batch.tokens, self.vocabulary
        is_text = (tokens != vocabulary.pad) & (tokens != vocabulary.sep)
        is_text[:, 0] = False
        return is_text

    def _read(self, rows: SuiteRows, samples: np.ndarray, pool: _Pooling) -> list[np.ndarray]:
        """Return the pooled states of each layer in the order of the samples."""

        def states(batch: TokenBatch) -> tuple[list[Tensor], Tensor]:
            batch.tokens[:, 0] = self.first
            self.rows += len(batch.tokens)
            self.forward_tokens += batch.tokens.numel()
            layout = layout_of_states(self.task, batch.tokens, batch.layout)
            return pool(batch, self.encoder.layer_states(batch.tokens, layout, batch.segments))

        self.run.model.eval()
        return read_rows(self.run.engine, rows, samples, self.batch_tokens, states)


def read_rows(
    engine: Engine,
    rows: SuiteRows,
    samples: np.ndarray,
    batch_tokens: int,
    function: Callable[[TokenBatch], tuple[list[Tensor], Tensor]],
) -> list[np.ndarray]:
    """Return the outputs of a function on rows, in the order of the samples.

    Args:
        engine: The engine of a model in evaluation mode.
        rows: The rows.
        samples: The numbers of the rows to read, (B,).
        batch_tokens: Largest number of tokens in a forward pass.
        function: Returns lists of values (N, ...) of a batch, and the row of each, (N,).
    """
    parts, numbers = [], []
    for indices in batches_by_length(rows.lengths[samples], batch_tokens):
        process_group.check_peers()
        process_group.stop_if_signalled("while reading hidden states")
        batch = rows.batch(samples[indices], np.zeros(len(indices), np.uint64))
        [(values, of_row)] = engine.map(function, engine.to_device([batch]), rng_key="states")
        parts.append([value.float().cpu().numpy() for value in values])
        numbers.append(indices[of_row.cpu().numpy()])
    order = np.argsort(np.concatenate(numbers), kind="stable")
    return [np.concatenate(of_values)[order] for of_values in zip(*parts)]


def _means_where(chosen: Tensor, states: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return each layer's means of the chosen states, (B, P, D), and the rows' numbers, (B,)."""
    # The mean of no state is 0.
    weights = chosen / chosen.sum(-1, keepdim=True).clamp(min=1)
    means = [torch.einsum("bps,bsd->bpd", weights.to(x.dtype), x) for x in states]
    return means, torch.arange(len(chosen))
