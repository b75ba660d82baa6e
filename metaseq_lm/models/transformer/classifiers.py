"""An encoder with one head on whole rows, or with a head for each of several labelled sets.

Shapes: B samples, S length, D width, K classes or candidates, K_k outputs of set k: its classes, or
1 for real values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from metaseq_lm.config.models import BiLSTMConfig
from metaseq_lm.config.transformer import EncoderConfig
from metaseq_lm.core.batch import Layout
from metaseq_lm.core.roles import Role
from metaseq_lm.models.bilstm import BiLSTM
from metaseq_lm.models.layers import Dropout, Heads, Linear, select
from metaseq_lm.models.transformer.encoder import Encoder, TokenHead, initialise


class SentencePredictor(nn.Module):
    """Scores of rows from the encoder's states; `head` maps states (..., S, D) to scores (..., K).

    The weights of the encoder have the same names as in pre-trained models. For real-valued labels
    `label_range` is (y_min, scale) of the training split: the head predicts (y - y_min) / scale. It
    is a buffer, so that it comes with the weights.

    If `is_causal`, tokens see only earlier ones, and the head gets the state of the last token,
    which has seen the whole row, in place of the first.
    """

    label_range: Tensor | None
    is_causal = False

    def __init__(
        self,
        config: EncoderConfig | BiLSTMConfig,
        vocab_size: int,
        padding_idx: int,
        head: nn.Module,
        label_range: tuple[float, float] | None = None,
    ) -> None:
        super().__init__()
        self.encoder: nn.Module
        if isinstance(config, BiLSTMConfig):
            self.encoder = BiLSTM(config, vocab_size, padding_idx)
        else:
            self.encoder = Encoder(config, vocab_size, padding_idx)
        self.heads = Heads({"sentence": head})
        self.register_buffer(
            "label_range", None if label_range is None else torch.tensor(label_range)
        )
        # A BiLSTM initialises itself.
        if isinstance(config, BiLSTMConfig):
            initialise(self.heads, "truncated_normal")
        else:
            initialise(self, config.init)

    def forward(
        self,
        tokens: Tensor,
        layout: Layout,
        segments: Tensor | None,
        spans: Tensor | None = None,
    ) -> Tensor:
        """Return scores (B, K) of rows (B, S), or of K candidates (B, K, S), by one linear unit."""
        if self.is_causal:
            layout = replace(layout, reach="causal")
        states = self.encoder(tokens, layout, segments)
        if self.is_causal:
            last = select(states, layout.last(tokens).unsqueeze(-1))  # (..., 1, D)
            states = last if spans is None else torch.cat([last, states[..., 1:, :]], -2)
        head = self.heads["sentence"]
        scores: Tensor = head(states) if spans is None else head(states, spans)
        return scores.squeeze(-1) if tokens.dim() == 3 else scores

    def scaled(self, labels: Tensor) -> Tensor:
        """Return real-valued labels on the scale of the head's predictions."""
        assert self.label_range is not None
        return (labels - self.label_range[0]) / self.label_range[1]

    def unscaled(self, scores: Tensor) -> Tensor:
        """Return the predictions of the head on the scale of the labels."""
        assert self.label_range is not None
        return scores * self.label_range[1] + self.label_range[0]


class TokenClassifier(nn.Module):
    """An encoder and a linear layer on the state of every token."""

    def __init__(
        self, config: EncoderConfig, vocab_size: int, padding_idx: int, head: TokenHead
    ) -> None:
        super().__init__()
        self.encoder = Encoder(config, vocab_size, padding_idx)
        self.heads = Heads({"token": head})
        initialise(self, config.init)

    def forward(self, tokens: Tensor, layout: Layout, segments: Tensor | None) -> Tensor:
        """Return scores (B, S, K) of rows (B, S)."""
        scores: Tensor = self.heads["token"](self.encoder(tokens, layout, segments))
        return scores


POOLER = "heads.pooler."
SETS = "heads.sets."
RANGES = "ranges."  # folder of the ranges of real-valued labels, in models with such sets


def module_name(name: str) -> str:
    """Return the module name of a set, because no module can have a child "values" or "type"."""
    return f"set_{name}"


def set_of(weight: str, folder: str) -> str:
    """Return the set with the module below `folder` that has this weight, "" for none.

    The inverse of `module_name`; names of sets have no dots.
    """
    if not weight.startswith(folder):
        return ""
    return weight.removeprefix(folder + module_name("")).partition(".")[0]


class SetHeads(nn.Module):
    """Dropout and a linear layer per set on the first state, after a tanh layer if `pooled`."""

    def __init__(
        self, width: int, outputs: Mapping[str, int], dropout: float, pooled: bool
    ) -> None:
        super().__init__()
        self.parameter_roles, self.parameter_levels = {"": Role.HEAD}, {"pooler": 1}
        self.names = list(outputs)
        self.pooler = Linear(width, width) if pooled else None
        self.dropout = Dropout(dropout)
        self.sets = nn.ModuleDict(
            {module_name(name): Linear(width, count) for name, count in outputs.items()}
        )
        self.glorot = list(self.sets.values())

    def forward(self, x: Tensor, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return the outputs (B, K_k) of the heads `names`, or of all, for states (B, S, D)."""
        first = x[:, 0]
        if self.pooler is not None:
            first = torch.tanh(self.pooler(first))
        first = self.dropout(first)
        chosen = self.names if names is None else names
        return {name: self.sets[module_name(name)](first) for name in chosen}


class LabelledSetsModel(nn.Module):
    """An encoder and its `heads`; a pass computes some or all of them.

    If rows of several sets are mixed, it computes all of them, and the criterion chooses: selecting
    rows would wait for their counts on a GPU. The encoder's weights have the same names as in
    pre-trained models.
    """

    def __init__(
        self, config: EncoderConfig, vocab_size: int, padding_idx: int, heads: SetHeads
    ) -> None:
        super().__init__()
        self.encoder = Encoder(config, vocab_size, padding_idx)
        self.heads = heads
        initialise(self, config.init)

    def forward(
        self,
        tokens: Tensor,
        layout: Layout,
        segments: Tensor | None,
        names: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        """Return the outputs (B, K_k) of the heads `names`, or of all, for rows (B, S)."""
        scores: dict[str, Tensor] = self.heads(self.encoder(tokens, layout, segments), names)
        return scores
