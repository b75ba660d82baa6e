"""Transformer encoder with LM heads, pre-LN (Xiong et al. 2020) or post-LN (Devlin et al. 2019).

`config/transformer.py` has the options of the classic and the modern encoder.

Shapes: B batch, S length, D width, E embedding width, V vocabulary, M selected positions; any
leading axes before S.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.config.transformer import (
    DEPTH_SCALED,
    TRUNCATED_NORMAL,
    XAVIER_ATTENTION,
    EncoderConfig,
    Scope,
)
from metaseq_lm.core.batch import ALL_VISIBLE, Layout
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import ATTENTIONS, FEED_FORWARDS, POSITIONS, NoOptions
from metaseq_lm.core.roles import Role
from metaseq_lm.forward.passes import apply_block
from metaseq_lm.models.layers import (
    Dropout,
    Embedding,
    Heads,
    Linear,
    gelu_linear,
    linear,
    select,
)
from metaseq_lm.models.transformer.attention import Rotation, Visibility
from metaseq_lm.models.transformer.parts import (
    ACTIVATIONS,
    FeedForward,
    Part,
    build_part,
    check_part_options,
    make_norm,
    scale_by_depth,
    truncated_normal,
)

__all__ = ["Encoder", "LMHead", "Stack", "TransformerLM"]


class GELUNetwork(FeedForward):
    """Two linear layers with a GELU between them, or with a gate.

    Gated, the first is twice as wide and its first half, through an activation, multiplies the
    second (Shazeer 2020).
    """

    outputs = ("fc2",)
    is_flat = True

    def __init__(self, options: NoOptions, sizes: EncoderConfig, number: int) -> None:
        super().__init__(options, sizes, number)
        width, inner, style = sizes.encoder_embed_dim, sizes.encoder_ffn_embed_dim, sizes.style
        self.gate = ACTIVATIONS[style.gate] if style.gate else None
        self.parameter_roles = {"fc1": Role.HIDDEN, "fc2": Role.HIDDEN}
        self.parameter_pieces = {"fc1": 2 if style.gate else 1}
        self.fc1 = Linear(width, 2 * inner if style.gate else inner, style.bias)
        self.fc2 = Linear(inner, width, style.bias)
        self.activation_dropout = Dropout(sizes.activation_dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if self.gate is not None:
            activated, other = x.chunk(2, -1)
            gated: Tensor = self.fc2(self.activation_dropout(self.gate(activated) * other))
            return gated
        if self.activation_dropout.training and self.activation_dropout.p:
            states: Tensor = self.fc2(self.activation_dropout(F.gelu(x)))
            return states
        return gelu_linear(x, self.fc2.weight, self.fc2.bias)


class Layer(nn.Module):
    """An encoder layer: attention and a feed-forward network, each with a residual connection.

    `number` counts the layers from 0: a pre-norm layer on top of normalised embeddings does not
    normalise them again.
    """

    is_gathered_alone = True  # of a sharded model

    def __init__(self, config: EncoderConfig, number: int = 0) -> None:
        super().__init__()
        width, style = config.encoder_embed_dim, config.style
        self.normalize_before = style.pre_norm
        self.attention = build_part(ATTENTIONS, config.attention, config, number)
        if style.qk_norm and not self.attention.has_qk_norm:
            raise UsageError(f"attention {config.attention} has no norms; leave model.qk_norm out")
        is_normal = style.pre_norm and style.embedding_norm and config.embed_dim == width
        skip = is_normal and number == 0
        self.attention_norm = nn.Identity() if skip else make_norm(width, config)
        network = build_part(FEED_FORWARDS, config.feed_forward, config, number)
        if network.is_flat:
            for name, child in network.named_children():
                self.add_module(name, child)
            self.parameter_roles = network.parameter_roles
            self.parameter_pieces = network.parameter_pieces
        else:
            self.feed_forward = network
        # In a list, so that it is not registered again.
        self._network = [network]
        self.ffn_norm = make_norm(width, config)
        self.dropout = Dropout(config.dropout)
        self.depth, self.width_ratio = style.depth, config.width_ratio

    def parts(self) -> list[Part]:
        """Return the parts with matrices, in the order in which their weights are drawn."""
        return [self.attention, *self._network]

    def initialise(self, init: str) -> None:
        """Draw the weights that differ from N(0, 0.02)."""
        for part in self.parts():
            part.initialise(init, self.depth)

    def ffn(self, x: Tensor) -> Tensor:
        states: Tensor = self._network[0](x)
        return states

    def forward(
        self, x: Tensor, visibility: Visibility, rotation: Rotation | None = None
    ) -> Tensor:
        x = self.add(x, self.attention_norm, lambda y: self.attention(y, visibility, rotation))
        return self.add(x, self.ffn_norm, self.ffn)

    def add(self, x: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the states x with the output of a sublayer added, normalised before or after."""
        if self.normalize_before:
            added: Tensor = self.dropout(sublayer(norm(x)), x)
            return added
        normal: Tensor = norm(self.dropout(sublayer(x), x))
        return normal


class Embeddings(nn.Module):
    """The sum of token, position and segment embeddings, normalised unless the encoder is pre-LN.

    Rotary positions have no embeddings: the Stack turns queries and keys.
    """

    def __init__(self, config: EncoderConfig, vocab_size: int, padding_idx: int = 0) -> None:
        super().__init__()
        width, style = config.embed_dim, config.style
        self.max_positions = config.max_positions
        self.tokens = Embedding(config.rows(vocab_size), width, padding_idx=padding_idx)
        self.positions = build_part(POSITIONS, style.positions, config).embedding()
        self.segments = Embedding(config.segments, width) if config.segments else None
        self.one_segment = config.segments == 1  # RoBERTa: every token has the same
        self.norm = make_norm(width, config) if style.embedding_norm else None
        self.dropout = Dropout(config.dropout)

    def forward(
        self, tokens: Tensor, layout: Layout = ALL_VISIBLE, segments: Tensor | None = None
    ) -> Tensor:
        """Return (..., S, E) of ids (..., S) or probabilities (..., S, V).

        Positions count in the row, or in each document of packed rows. `segments` (..., S) is 0
        throughout if not given, or if there is just one. Raises ValueError for S > max_positions.
        """
        x = self.tokens(tokens)
        length = x.shape[-2]
        if length > self.max_positions:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the model's {self.max_positions} "
                "positions; raise model.max_positions or cut the text with task.tokens_per_sample"
            )
        if self.positions is not None:
            x = self.positions(x, layout)
        if self.segments is not None:
            if segments is None or self.one_segment:
                segments = torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
            x = x + self.segments(segments)
        if self.norm is not None:
            x = self.norm(x)
        embeddings: Tensor = self.dropout(x)
        return embeddings


def _farthest(scope: Scope, length: int) -> int:
    """Return the largest distance between tokens of a row that see each other; 0 for any."""
    half = scope.window // 2
    return half if 0 < half < length else 0


class Stack(nn.Module):
    """A projection if the embeddings have another width, the layers, the final norm if pre-norm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width, layers = config.encoder_embed_dim, range(config.encoder_layers)
        other = config.embed_dim != width
        self.project = Linear(config.embed_dim, width, config.style.bias) if other else None
        self.parameter_roles = {"project": Role.EMBEDDING}
        self.glorot = [self.project] if self.project is not None else []
        self.layers = nn.ModuleList(Layer(config, number) for number in layers)
        self.norm = make_norm(width, config) if config.style.pre_norm else None
        self.scopes = [config.scope(number) for number in layers]
        self.positions = build_part(POSITIONS, config.style.positions, config)
        check_part_options(config)

    def forward(
        self, x: Tensor, layout: Layout = ALL_VISIBLE, outputs: list[Tensor] | None = None
    ) -> Tensor:
        """Return hidden states (..., S, D) of embeddings (..., S, E).

        The final states of each layer are appended to `outputs`; the last ones are as returned.
        """
        length = x.shape[-2]
        distances = [_farthest(scope, length) for scope in self.scopes]
        visibility = {
            d: Visibility.of(layout, length, x.device, d) for d in dict.fromkeys(distances)
        }
        rotation = {
            theta: self.positions.rotation(layout, x, theta)
            for theta in dict.fromkeys(scope.theta for scope in self.scopes)
        }
        if self.project is not None:
            x = self.project(x)
        for layer, distance, scope in zip(self.layers, distances, self.scopes):
            x = apply_block(layer, x, visibility[distance], rotation[scope.theta])
            if outputs is not None:
                outputs.append(x)
        if self.norm is not None:
            x = self.norm(x)
        if outputs is not None:
            outputs[-1] = x
        return x


class Encoder(nn.Module):
    """Embeddings and a stack of layers."""

    def __init__(self, config: EncoderConfig, vocab_size: int, padding_idx: int = 0) -> None:
        super().__init__()
        self.embeddings = Embeddings(config, vocab_size, padding_idx)
        self.stack = Stack(config)

    @property
    def parameter_levels(self) -> dict[str, int]:
        """Levels below the heads, as in ELECTRA's code; the last norm belongs to the top layer."""
        bottom = len(self.stack.layers) + 2
        layers = {f"stack.layers.{i}": bottom - 1 - i for i in range(bottom - 2)}
        return {"": bottom, "stack.norm": 2, **layers}

    def forward(
        self, tokens: Tensor, layout: Layout = ALL_VISIBLE, segments: Tensor | None = None
    ) -> Tensor:
        """Return hidden states (..., S, D) of ids (..., S) or probabilities (..., S, V).

        `segments` (..., S) numbers the segments.
        """
        states: Tensor = self.stack(self.embeddings(tokens, layout, segments), layout)
        return states

    def layer_states(
        self, tokens: Tensor, layout: Layout = ALL_VISIBLE, segments: Tensor | None = None
    ) -> list[Tensor]:
        """Return the embeddings (..., S, E), and the final states (..., S, D) of each layer.

        Arguments as for `forward`, which returns the last of these states.
        """
        states: list[Tensor] = [self.embeddings(tokens, layout, segments)]
        self.stack(states[0], layout, states)
        return states


def initialise(model: nn.Module, init: str) -> None:
    """Initialise all linear and embedding weights of `model` and zero the biases.

    "xavier_attention": N(0, 0.02), but Xavier uniform for the attention input projection, as in
    torch's attention. "truncated_normal": N(0, 0.02) cut at two standard deviations (Devlin et al.
    2019), but Glorot uniform for the layers that a module lists as `glorot`, as in ELECTRA's code.
    "depth_scaled", as for ModernBERT in the transformers library: also cut, which leaves a standard
    deviation of 0.0176; N(0, 0.02 / sqrt(2 depth)) for the `outputs` of parts, which are the
    layers that add to the residual stream, and for the first one of an LM head; N(0, D ** -0.5) for
    `glorot` layers with D inputs. With a `width_ratio` r, initial weights of layers and LM heads
    are divided by sqrt(r) (Yang et al. 2021, table 8).
    """
    draw = nn.init.normal_ if init == XAVIER_ATTENTION else truncated_normal
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            draw(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, LMHead) and module.weight is not None:
            draw(module.weight, std=0.02)
    # After the loop: modules() visits a layer before its projections.
    for module in model.modules():
        for layer in getattr(module, "glorot", []):
            if init == TRUNCATED_NORMAL:
                nn.init.xavier_uniform_(layer.weight)
            elif init == DEPTH_SCALED:
                truncated_normal(layer.weight, layer.in_features**-0.5)
        if isinstance(module, (Layer, LMHead)):
            module.initialise(init)
            if module.width_ratio != 1.0:
                _scale_linear(module, module.width_ratio**-0.5)


@torch.no_grad()
def _scale_linear(module: nn.Module, factor: float) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.mul_(factor)


class TransformerLM(nn.Module):
    """An encoder with one or more named language-model heads.

    `heads` names the heads; with `tied` they share the input embedding as output weights.
    """

    exported = True

    def __init__(
        self,
        config: EncoderConfig,
        vocab_size: int,
        padding_idx: int = 0,
        heads: tuple[str, ...] = ("lm",),
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.encoder = Encoder(config, vocab_size, padding_idx)
        self.heads = Heads({name: LMHead(config, vocab_size, tied) for name in heads})
        self.init = config.init
        initialise(self, self.init)
        if not tied:
            # A tied padding row is also an output weight, and keeps its random start.
            with torch.no_grad():
                self.encoder.embeddings.tokens.weight[padding_idx].zero_()

    def forward(
        self,
        tokens: Tensor,
        layout: Layout = ALL_VISIBLE,
        positions: Tensor | None = None,
        head: str | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """Return logits (..., S, V), or (..., M, V) of the selected `positions` (..., M) only.

        `head` may be left out when there is just one.
        """
        return self.predict(self.encoder(tokens, layout, segments), positions, head)

    def add_head(self, name: str, head: nn.Module) -> None:
        """Initialise a head like the rest of the model and add it to `heads`."""
        initialise(head, self.init)
        self.heads[name] = head

    def predict(
        self, x: Tensor, positions: Tensor | None = None, head: str | None = None
    ) -> Tensor:
        """Return the logits of one head for hidden states (..., S, D)."""
        if positions is not None:
            x = select(x, positions)
        name = head if head is not None else next(iter(self.heads))
        logits: Tensor = self.heads[name](x, self.encoder.embeddings.tokens.weight)
        return logits


class ModernLM(TransformerLM):
    """An encoder with the layers of ModernBERT (Warner et al. 2025) and language-model heads."""

    exported = True


class LMHead(nn.Module):
    """Linear (D to E), GELU, norm, then a projection to the vocabulary, tied or separate.

    Args:
        config: The encoder's configuration.
        vocab_size: Number of symbols; like the embedding, the head may have more rows.
        tied: Whether the input embedding is the projection.
        width: Width D of the states, if it is not the encoder's.
    """

    def __init__(
        self, config: EncoderConfig, vocab_size: int, tied: bool = True, width: int = 0
    ) -> None:
        super().__init__()
        rows, embed_dim = config.rows(vocab_size), config.embed_dim
        self.parameter_roles = {"dense": Role.HEAD_HIDDEN, "weight": Role.HEAD}
        self.dense = Linear(width or config.encoder_embed_dim, embed_dim, config.style.bias)
        self.norm = make_norm(embed_dim, config)
        self.bias = nn.Parameter(torch.zeros(rows))
        self.weight = None if tied else nn.Parameter(torch.empty(rows, embed_dim))
        self.depth, self.width_ratio = config.style.depth, config.width_ratio

    def initialise(self, init: str) -> None:
        """Draw the weights that differ from N(0, 0.02)."""
        if init == DEPTH_SCALED:
            scale_by_depth(self.dense, self.depth)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """Return logits (..., V); `embedding` (V, E) is the output weight of a tied head."""
        weight = embedding if self.weight is None else self.weight
        states = self.norm(F.gelu(self.dense(x)))
        if self.width_ratio != 1.0:
            states = states / self.width_ratio
        return linear(states, weight, self.bias)


class BinaryHead(nn.Module):
    """Linear (D to D), GELU, Linear to one logit: ELECTRA's discriminator head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.parameter_roles = {"dense": Role.HEAD_HIDDEN, "out": Role.HEAD}
        self.dense = Linear(width, width)
        self.out = Linear(width, 1)
        self.glorot = [self.out]

    def forward(self, x: Tensor) -> Tensor:
        """Return one logit per state, (...)."""
        logits: Tensor = self.out(F.gelu(self.dense(x))).squeeze(-1)
        return logits


class SentenceHead(nn.Module):
    """Dropout and a linear layer on the first state; with `pooled`, BERT's tanh layer before them.

    `pooler_dropout` also puts dropout before the tanh layer, as in RoBERTa's head; `activation`
    replaces tanh: "gelu" as in ELECTRA, "relu" as in DistilBERT.
    """

    def __init__(
        self,
        width: int,
        outputs: int,
        dropout: float,
        pooled: bool,
        pooler_dropout: bool = False,
        activation: str = "tanh",
    ) -> None:
        super().__init__()
        self.parameter_levels = {"pooler": 1}
        self.pooler = Linear(width, width) if pooled else None
        self.activation = ACTIVATIONS[activation]
        self.pooler_dropout = pooler_dropout
        self.out = Linear(width, outputs)
        self.dropout = Dropout(dropout)
        self.glorot = [self.out]

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (..., K) of rows (..., S, D)."""
        first = x[..., 0, :]
        if self.pooler is not None:
            if self.pooler_dropout:
                first = self.dropout(first)
            first = self.activation(self.pooler(first))
        logits: Tensor = self.out(self.dropout(first))
        return logits


class TokenHead(nn.Module):
    """Dropout and a linear layer on every state."""

    def __init__(self, width: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.out = Linear(width, outputs)
        self.dropout = Dropout(dropout)
        self.glorot = [self.out]

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (..., S, K) of rows (..., S, D)."""
        logits: Tensor = self.out(self.dropout(x))
        return logits


class SpanPairHead(nn.Module):
    """Dropout and a linear layer on the concatenated first state and mean states of two spans."""

    def __init__(self, width: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.out = Linear(3 * width, outputs)
        self.dropout = Dropout(dropout)
        self.glorot = [self.out]

    def forward(self, x: Tensor, spans: Tensor) -> Tensor:
        """Return scores (B, K) of rows (B, S, D); `spans` (B, 2, 2) are first and last + 1."""
        at = torch.arange(x.shape[1], device=x.device)
        inside = (at >= spans[..., :1]) & (at < spans[..., 1:])  # (B, 2, S)
        means = inside.to(x.dtype) @ x / inside.sum(-1, keepdim=True).to(x.dtype)
        logits: Tensor = self.out(self.dropout(torch.cat([x[:, 0], means.flatten(1)], -1)))
        return logits
