"""The span-boundary head (Joshi et al. 2020, section 3.2).

Shapes: B rows, S length, M targets, D width of the encoder, E of the embeddings, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.config.transformer import EncoderConfig
from metaseq_lm.core.roles import Role
from metaseq_lm.models.layers import Embedding, LayerNorm, Linear, select
from metaseq_lm.models.transformer.encoder import LMHead

from .spans import SpanBatch

BOUNDARY = "boundary"
OFFSET_DIM = 200  # as in the paper


class BoundaryHead(nn.Module):
    """Predicts a token of a span from the states on both sides of the span and its place in it."""

    def __init__(self, config: EncoderConfig, vocab_size: int, longest: int) -> None:
        super().__init__()
        width = config.encoder_embed_dim
        self.offsets = Embedding(longest, OFFSET_DIM)
        self.parameter_roles = {"dense": Role.HEAD_HIDDEN}
        self.dense = Linear(2 * width + OFFSET_DIM, width)
        self.norm = LayerNorm(width, config.norm_eps)
        self.words = LMHead(config, vocab_size)

    def forward(self, x: Tensor, batch: SpanBatch, embedding: Tensor) -> Tensor:
        """Return logits (B, M, V) for states x (B, S, D).

        `embedding` (V, E) is the input embedding and also the output weight.
        """
        left, right = select(x, batch.left), select(x, batch.right)
        pair = torch.cat([left, right, self.offsets(batch.offset)], -1)
        return self.words(self.norm(F.gelu(self.dense(pair))), embedding)
