"""An encoder with one head that scores whole rows, for fine-tuning.

Shapes: B samples, K classes or candidates, S length.
"""

import torch
from torch import Tensor, nn

from metaseq_lm.models.bilstm import BiLSTM, BiLSTMConfig
from metaseq_lm.models.transformer.encoder import Encoder, TransformerConfig, initialise


class SentencePredictor(nn.Module):
    """Scores of rows from the encoder's states; `head` maps states (..., S, D) to scores (..., K).

    The weights of the encoder have the names that pre-trained models give theirs. For real-valued
    labels `label_range` is (y_min, scale) of the training split: the head predicts (y - y_min) /
    scale; it is a buffer, so that it comes with the weights.
    """

    label_range: Tensor | None

    def __init__(
        self,
        config: TransformerConfig | BiLSTMConfig,
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
        self.heads = nn.ModuleDict({"sentence": head})
        self.register_buffer(
            "label_range", None if label_range is None else torch.tensor(label_range)
        )
        # A BiLSTM has initialised itself.
        if isinstance(config, BiLSTMConfig):
            initialise(self.heads, "truncated_normal")
        else:
            initialise(self, config.init)

    def forward(
        self,
        tokens: Tensor,
        padding: Tensor | None,
        segments: Tensor | None,
        spans: Tensor | None = None,
    ) -> Tensor:
        """Return scores (B, K) of rows (B, S), or of K candidates (B, K, S) by one linear unit."""
        states = self.encoder(tokens, padding, segments)
        head = self.heads["sentence"]
        scores: Tensor = head(states) if spans is None else head(states, spans)
        return scores.squeeze(-1) if tokens.dim() == 3 else scores

    def scaled(self, labels: Tensor) -> Tensor:
        """Return real-valued labels as the head predicts them."""
        assert self.label_range is not None
        return (labels - self.label_range[0]) / self.label_range[1]

    def unscaled(self, scores: Tensor) -> Tensor:
        """Return what the head predicts on the scale of the labels."""
        assert self.label_range is not None
        return scores * self.label_range[1] + self.label_range[0]
