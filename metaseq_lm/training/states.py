"""Frozen states of the layers of a restored run's encoder, for probes.

Shapes: B rows, S positions, D width.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from metaseq_lm.core.batch import TokenBatch
from metaseq_lm.criterions.masked_lm import TOKENS_PER_PASS
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.distributed import process_group
from metaseq_lm.evaluation.suites import Rows
from metaseq_lm.tasks.protocols import encoder_of, layout_of_states, task_read_as
from metaseq_lm.training.parts import Parts
from metaseq_lm.training.scoring import batches_by_length, longest_row

# Which states of a batch are read: their values by layer, given all states (B, S, D), and the row
# of each.
Pooling = Callable[[TokenBatch, Sequence[Tensor]], tuple[list[Tensor], Tensor]]


class EncoderStates:
    """The states of each layer, in evaluation mode: see `evaluation.suites.HiddenStates`.

    Args:
        run: The restored run, whose criterion says what a token sees.
        batch_tokens: Largest number of tokens in a forward pass; does not change the states.

    Attributes:
        rows: How many rows were read.
        forward_tokens: How many tokens went through the encoder, with padding.

    Raises:
        UsageError: The run's model has no Transformer encoder.
    """

    def __init__(self, run: Parts, batch_tokens: int = TOKENS_PER_PASS) -> None:
        self.run, self.batch_tokens = run, batch_tokens
        self.task = task_read_as(run.task)
        self.encoder = encoder_of(self.task, run.model)
        self.longest = longest_row(run.config)
        self.vocabulary = load_tokenizer(run.config.data).vocabulary
        self.first = self.vocabulary.cls(self.task.text_token)
        self.rows = self.forward_tokens = 0

    def at_targets(self, rows: Rows, samples: np.ndarray) -> list[np.ndarray]:
        """Return for each layer the states at the positions with a target, float32 (words, D)."""

        def pool(batch: TokenBatch, states: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
            assert batch.targets is not None
            chosen = batch.targets >= 0
            return [x[chosen] for x in states], chosen.nonzero()[:, 0]

        return self._read(rows, samples, pool)

    def means(self, rows: Rows, samples: np.ndarray) -> list[np.ndarray]:
        """Return for each layer the mean of a row's states but those of special tokens, (B, D)."""
        vocabulary = self.vocabulary

        def pool(batch: TokenBatch, states: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
            tokens = batch.tokens
            chosen = (tokens != vocabulary.pad) & (tokens != vocabulary.sep)
            chosen[:, 0] = False
            weights = chosen / chosen.sum(1, keepdim=True).clamp(min=1)
            means = [torch.einsum("bs,bsd->bd", weights.to(x.dtype), x) for x in states]
            return means, torch.arange(len(tokens))

        return self._read(rows, samples, pool)

    def _read(self, rows: Rows, samples: np.ndarray, pool: Pooling) -> list[np.ndarray]:
        """Return the pooled states of each layer in the order of the samples."""
        run = self.run

        def states(batch: TokenBatch) -> tuple[list[Tensor], Tensor]:
            layout = layout_of_states(self.task, batch.tokens, batch.layout)
            return pool(batch, self.encoder.layer_states(batch.tokens, layout, batch.segments))

        parts, numbers = [], []
        run.model.eval()
        for indices in batches_by_length(rows.lengths[samples], self.batch_tokens):
            process_group.alive()
            process_group.stop_if_signalled("while reading hidden states")
            batch = rows.batch(samples[indices], np.zeros(len(indices), np.uint64))
            batch.tokens[:, 0] = self.first
            self.rows += len(indices)
            self.forward_tokens += batch.tokens.numel()
            [(layers, of_row)] = run.engine.map(
                states, run.engine.to_device([batch]), rng_key="states"
            )
            parts.append([layer.float().cpu().numpy() for layer in layers])
            numbers.append(indices[of_row.cpu().numpy()])
        order = np.argsort(np.concatenate(numbers), kind="stable")
        return [np.concatenate(of_layer)[order] for of_layer in zip(*parts)]
