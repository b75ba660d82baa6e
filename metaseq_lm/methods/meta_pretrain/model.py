"""An encoder with one linear head for each labelled set (Lv et al. 2020, supervised pre-training)."""

from collections.abc import Mapping

from torch import Tensor, nn

from metaseq_lm.models.heads import SentenceHead
from metaseq_lm.models.transformer import Encoder, TransformerConfig, initialise


def head_name(name: str) -> str:
    """Return the name of the head of a set: one that no attribute of a ModuleDict has."""
    return f"set_{name}"


class LabelledSetsModel(nn.Module):
    """Scores of rows of one of several sets from the state of [CLS]; `classes` counts each set's.

    The weights of the encoder have the names that pre-trained models give theirs.
    """

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        padding_idx: int,
        classes: Mapping[str, int],
    ) -> None:
        super().__init__()
        self.encoder = Encoder(config, vocab_size, padding_idx)
        self.heads = nn.ModuleDict(
            {
                head_name(name): SentenceHead(
                    config.encoder_embed_dim, count, config.dropout, pooled=False
                )
                for name, count in classes.items()
            }
        )
        initialise(self, config.init)

    def forward(
        self, tokens: Tensor, padding: Tensor | None, segments: Tensor | None, name: str
    ) -> Tensor:
        """Return the scores (B, K) of rows (B, S) of the set `name`."""
        return self.heads[head_name(name)](self.encoder(tokens, padding, segments))
