"""What fine-tuning tasks share: the encoder of whatever model was pre-trained."""

from dataclasses import fields
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from metaseq_lm.errors import UsageError
from metaseq_lm.models.transformer import TransformerConfig
from metaseq_lm.tasks.masked_lm import check_rows

ENCODER = "encoder."
POSITIONS = "encoder.embeddings.positions.weight"


def encoder_sizes(config: DictConfig) -> TransformerConfig:
    """Return the sizes of the encoder of the configured model, which may have more options.

    Raises UsageError for a model without a Transformer encoder, and for rows longer than it.
    """
    check_rows(config)
    names = [field.name for field in fields(TransformerConfig)]
    lacking = [name for name in names if name not in config.model]
    if lacking:
        raise UsageError(
            f"model '{config.model._name}' has no {lacking[0]}; this task needs a Transformer encoder"
        )
    return TransformerConfig(**{name: config.model[name] for name in names})


def encoder_weights(weights: dict[str, Any], config: DictConfig) -> dict[str, Any]:
    """Choose the weights of the main encoder, as every pre-training task calls it.

    The table of positions is made as long as the model's: what no row reaches may differ. Raises
    UsageError if it has fewer positions than the task's rows need.
    """
    chosen = {name: weight for name, weight in weights.items() if name.startswith(ENCODER)}
    if POSITIONS in chosen:
        needed, room = config.task.tokens_per_sample, config.model.max_positions
        chosen[POSITIONS] = with_positions(chosen[POSITIONS], needed, room)
    return chosen


def with_positions(table: Tensor, needed: int, room: int) -> Tensor:
    """Return a position table (P, E) cut, or filled up with zeros, to `room` rows.

    Raises UsageError if it has fewer than the `needed` rows that are used.
    """
    if len(table) < needed:
        raise UsageError(
            f"init_from was trained with {len(table)} positions but task.tokens_per_sample is "
            f"{needed}; make it at most {len(table)} (longer contexts become windows)"
        )
    missing = table.new_zeros(max(room - len(table), 0), table.shape[1])
    return torch.cat([table[:room], missing])
