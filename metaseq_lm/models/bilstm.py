"""Language model of a forward and a backward stack of LSTMs (ELMo, Peters et al. 2018, 3.1).

Shapes: B rows, S length, D width of the embeddings and of the states of one direction, V
vocabulary.
"""

import contextlib
import warnings

import torch
from torch import Tensor, nn

from metaseq_lm.config.models import BiLSTMConfig
from metaseq_lm.core.batch import ALL_VISIBLE, Layout
from metaseq_lm.core.errors import UsageError
from metaseq_lm.forward.passes import current_context
from metaseq_lm.models.layers import Dropout, Embedding, Heads, Linear, reverse, select

# Use torch's kernel: oneDNN's has neither projections nor a count of its FLOPs.
warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN")


class BiLSTM(nn.Module):
    """Token embeddings and a stack of projected LSTMs for each direction, with separate weights.

    From the second layer on, the input of a layer is added to its output. Unlike ELMo's program, it
    has no character input, does not clip cells, and keeps no states between batches. `ids` (tokens
    of the data,) map each token of the data to one of the `vocab_size` tokens of the model; without
    them they are the same. Raises UsageError unless there are more cells than the width that they
    are projected to.
    """

    ids: Tensor | None

    def __init__(
        self,
        config: BiLSTMConfig,
        vocab_size: int,
        padding_idx: int = 0,
        ids: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("ids", ids)
        width, cells = config.encoder_embed_dim, config.encoder_hidden_dim
        if width >= cells:
            raise UsageError(
                "model.encoder_hidden_dim must be more than model.encoder_embed_dim, to which it "
                f"is projected; got {cells} and {width}"
            )
        self.tokens = Embedding(vocab_size, width, padding_idx=padding_idx)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        layers = range(config.encoder_layers)
        self.ahead = nn.ModuleList(projected_lstm(width, cells) for _ in layers)
        self.back = nn.ModuleList(projected_lstm(width, cells) for _ in layers)
        self.dropout = Dropout(config.dropout)

    def known(self, tokens: Tensor) -> Tensor:
        """Map token ids of the data to token ids of the model."""
        return tokens if self.ids is None else self.ids[tokens]

    def states(
        self, tokens: Tensor, layout: Layout = ALL_VISIBLE
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the states (B, S, D) of the forward and of the backward direction, layer by layer.

        At position t, forward states depend on the tokens up to t, backward states on the tokens
        from t on. Each list starts with the embeddings. States at padding are arbitrary.
        """
        lengths = layout.lengths(tokens)
        x = self.tokens(self.known(tokens))
        ahead = self._stack(self.ahead, x)
        # Reversed within the lengths: padding comes last in both directions, and has no effect.
        back = self._stack(self.back, reverse(x, lengths))
        return ahead, [reverse(states, lengths) for states in back]

    def _stack(self, layers: nn.ModuleList, x: Tensor) -> list[Tensor]:
        states = [x]
        for number, layer in enumerate(layers):
            x = self.dropout(x)
            with _differentiable():
                out, _ = layer(x)
            x = out + x if number else out
            states.append(x)
        return states

    def forward(
        self, tokens: Tensor, layout: Layout = ALL_VISIBLE, segments: Tensor | None = None
    ) -> Tensor:
        """Return the concatenated top states of both directions, (..., S, 2D), of rows (..., S).

        For heads that read the first position, the forward direction has the state of the row's
        last token there, because it has seen only [CLS] at the first. Segments are not used.
        """
        rows = tokens.reshape(-1, tokens.shape[-1])
        ahead, back = (states[-1] for states in self.states(rows, layout))
        last = (layout.lengths(rows) - 1).clamp(min=0).unsqueeze(1)
        ahead = torch.cat([select(ahead, last), ahead[:, 1:]], dim=1)
        return torch.cat([ahead, back], dim=-1).view(*tokens.shape, -1)


class LSTM(nn.LSTM):
    """An LSTM layer that sharded models gather when it is called."""

    is_gathered_alone = True


def projected_lstm(width: int, cells: int, inputs: int = 0) -> LSTM:
    """Return an LSTM layer whose forget gate has an initial bias of 1.

    Its `cells` are projected to `width` unless they are equal; its input width is `inputs`, or
    `width` for 0.
    """
    projection = 0 if cells == width else width
    lstm = LSTM(inputs or width, cells, batch_first=True, proj_size=projection)
    with torch.no_grad():
        for name in ("bias_ih_l0", "bias_hh_l0"):
            bias = getattr(lstm, name)
            bias.zero_()
            # The two biases are added.
            bias[cells : 2 * cells] = 0.5
    return lstm


def _differentiable() -> contextlib.AbstractContextManager[None]:
    """Return a context that turns off cuDNN if second derivatives, which it lacks, are needed."""
    if current_context().double_backward:
        return torch.backends.cudnn.flags(enabled=False)
    return contextlib.nullcontext()


class BiLSTMLM(nn.Module):
    """A BiLSTM and a softmax that both directions share; `ids` as in BiLSTM."""

    def __init__(
        self,
        config: BiLSTMConfig,
        vocab_size: int,
        padding_idx: int = 0,
        ids: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.encoder = BiLSTM(config, vocab_size, padding_idx, ids)
        width = config.encoder_embed_dim
        head = Linear(width, vocab_size)
        nn.init.normal_(head.weight, std=width**-0.5)
        nn.init.zeros_(head.bias)
        self.heads = Heads({"lm": head})

    def directions(self, tokens: Tensor, layout: Layout = ALL_VISIBLE) -> tuple[Tensor, Tensor]:
        """Return the logits (B, S - 1, V) of the next and of the previous token.

        Entry t of the first predicts token t + 1 from tokens up to t; entry t of the second
        predicts token t from tokens from t + 1 on.
        """
        ahead, back = (states[-1] for states in self.encoder.states(tokens, layout))
        head, dropout = self.heads["lm"], self.encoder.dropout
        return head(dropout(ahead[:, :-1])), head(dropout(back[:, 1:]))
