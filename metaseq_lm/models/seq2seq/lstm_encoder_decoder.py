"""LSTM encoder-decoder with bilinear attention (Luong et al. 2015; Clark 2021, section 4.2.4).

The encoder is a stack of LSTMs in both directions, each layer reading both directions of the one
below. A layer of the decoder starts from the last states of both directions of the encoder's layer.
Attention is not fed back into the decoder, so that several heads can share its states.
Shapes: B rows, S source and T target positions, D width of the states, V target vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from metaseq_lm.core.config import option
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import register_model
from metaseq_lm.models.bilstm import lengths_of, projected_lstm, reverse
from metaseq_lm.models.layers import Dropout, Embedding, Linear, full_precision
from metaseq_lm.models.seq2seq.beam_search import Beam, beam_search

PRIMARY = "primary"
# The state (1, B, width) and the cells (1, B, cells) of one layer.
LSTMState = tuple[Tensor, Tensor]


@dataclass
class EncoderDecoderConfig:
    """Sizes and dropout; the paper's decoder is not described, these follow its other LSTMs."""

    layers: int = option(2, "LSTM layers of the encoder and of the decoder", at_least=1)
    embed_dim: int = option(300, "width of the embeddings of both sides", at_least=1)
    hidden_dim: int = option(
        1024, "cells of a decoder layer; each encoder direction has half", at_least=2
    )
    output_dim: int = option(
        512, "width of the projected states; each encoder direction has half", at_least=2
    )
    dropout: float = option(
        0.5, "dropout of embeddings and of the output of every LSTM", at_least=0, below=1
    )

    def check(self) -> None:
        """Raise UsageError for sizes that do not fit together."""
        cells, width = self.hidden_dim, self.output_dim
        if cells % 2 or width % 2 or width > cells:
            raise UsageError(
                "model.hidden_dim and model.output_dim must be even numbers and the second not "
                f"larger; got {cells} and {width}"
            )


@dataclass
class Memory:
    """What the decoder knows of the source: states (B, S, D), padding (B, S), its own first states."""

    states: Tensor
    padding: Tensor
    first: list[LSTMState]


class AttentionHead(nn.Module):
    """Bilinear attention, a = tanh(W_a [c; h]), and a softmax layer, V logits.

    The weights of attention go through dropout, which hides a part of the source; with a rate of 0
    it does nothing.
    """

    def __init__(self, width: int, vocab_size: int, attention_dropout: float = 0.0) -> None:
        super().__init__()
        self.query = Linear(width, width, bias=False)
        self.combine = Linear(2 * width, width, bias=False)
        self.out = Linear(width, vocab_size)
        self.attention_dropout = Dropout(attention_dropout)

    def attend(self, states: Tensor, memory: Memory) -> Tensor:
        """Return the attention vectors (B, T, D) of decoder states (B, T, D)."""
        scores = self.query(states) @ memory.states.mT
        # Every row has a real position, so no row of weights is empty.
        scores = scores.masked_fill(memory.padding.unsqueeze(1), float("-inf"))
        context = self.attention_dropout(scores.softmax(-1)) @ memory.states
        return torch.tanh(self.combine(torch.cat([context, states], dim=-1)))

    def forward(self, states: Tensor, memory: Memory) -> Tensor:
        """Return logits (B, T, V) of decoder states (B, T, D)."""
        logits: Tensor = self.out(self.attend(states, memory))
        return logits


@register_model("lstm_encoder_decoder", dataclass=EncoderDecoderConfig)
class LSTMEncoderDecoder(nn.Module):
    """The encoder, the decoder's LSTMs and the head "primary"; other heads may be added.

    `vocab_sizes` are those of source and target. Parameters start uniform in +-0.1 (from memory of
    the program that the paper's is built on), but for the forget gates' bias, which is 1.
    """

    def __init__(
        self, config: EncoderDecoderConfig, vocab_sizes: tuple[int, int], padding_idx: int = 0
    ) -> None:
        super().__init__()
        config.check()
        self.width = config.output_dim
        half, cells = config.output_dim // 2, config.hidden_dim // 2
        inputs = [config.embed_dim] + [config.output_dim] * (config.layers - 1)
        self.source = Embedding(vocab_sizes[0], config.embed_dim, padding_idx)
        self.target = Embedding(vocab_sizes[1], config.embed_dim, padding_idx)
        self.ahead = nn.ModuleList(projected_lstm(half, cells, n) for n in inputs)
        self.back = nn.ModuleList(projected_lstm(half, cells, n) for n in inputs)
        self.decoder = nn.ModuleList(
            projected_lstm(config.output_dim, config.hidden_dim, n) for n in inputs
        )
        self.dropout = Dropout(config.dropout)
        self.heads = nn.ModuleDict()
        draw_uniform(self)
        self.add_head(PRIMARY)

    def add_head(self, name: str, attention_dropout: float = 0.0) -> None:
        """Add a head with attention and softmax of its own on the decoder's states."""
        self.heads[name] = AttentionHead(self.width, len(self.target.weight), attention_dropout)
        draw_uniform(self.heads[name])

    def encode(self, tokens: Tensor, padding: Tensor) -> Memory:
        """Return what the decoder needs of source rows (B, S); what stands at padding means nothing."""
        lengths = lengths_of(tokens, padding)
        counts = lengths.cpu()  # where torch wants them; once for all layers
        x, first = self.dropout(self.source(tokens)), []
        for ahead, back in zip(self.ahead, self.back, strict=True):
            one, (h, c) = run_rows(ahead, x, counts)
            other, (g, d) = run_rows(back, reverse(x, lengths), counts)
            first.append((torch.cat([h, g], dim=-1), torch.cat([c, d], dim=-1)))
            x = self.dropout(torch.cat([one, reverse(other, lengths)], dim=-1))
        return Memory(x, padding, first)

    def decode(self, inputs: Tensor, before: list[LSTMState]) -> tuple[Tensor, list[LSTMState]]:
        """Return the top states (B, T, D) after each input (B, T), and the states of all layers."""
        x, after = self.dropout(self.target(inputs)), []
        for layer, state in zip(self.decoder, before, strict=True):
            x, state = layer(x, (state[0].contiguous(), state[1].contiguous()))
            x = self.dropout(x)
            after.append(state)
        return x, after

    def forward(self, tokens: Tensor, padding: Tensor, inputs: Tensor) -> Tensor:
        """Return the primary head's logits (B, T, V) after each of the `inputs` (B, T)."""
        memory = self.encode(tokens, padding)
        logits: Tensor = self.heads[PRIMARY](self.decode(inputs, memory.first)[0], memory)
        return logits

    @torch.no_grad()
    def translate(
        self, tokens: Tensor, padding: Tensor, limits: Tensor, beam: Beam
    ) -> tuple[Tensor, Tensor]:
        """Return the best target row of each source row (B, S), and its score, by beam search.

        By the primary head, with dropout as the mode of the model has it. See `beam_search`.
        """
        memory, size = self.encode(tokens, padding), beam.size
        head = self.heads[PRIMARY]

        def step(last: Tensor, state: list[LSTMState]) -> tuple[Tensor, list[LSTMState]]:
            states, state = self.decode(last.reshape(-1, 1), state)
            # The hypotheses of a row look at one memory as if they were steps of one target.
            logits = head(states.view(*last.shape, -1), memory)
            return full_precision(logits).log_softmax(-1), state

        def reorder(state: list[LSTMState], origin: Tensor) -> list[LSTMState]:
            starts = torch.arange(len(origin), device=origin.device) * size
            flat = (origin + starts[:, None]).flatten()
            return [(h[:, flat], c[:, flat]) for h, c in state]

        first = [
            (h.repeat_interleave(size, dim=1), c.repeat_interleave(size, dim=1))
            for h, c in memory.first
        ]
        return beam_search(step, reorder, first, limits, beam)


def draw_uniform(net: nn.Module) -> None:
    """Draw all weights but biases afresh, uniform in +-0.1."""
    for name, parameter in net.named_parameters():
        if "bias" not in name:
            nn.init.uniform_(parameter, -0.1, 0.1)


def run_rows(layer: nn.Module, x: Tensor, counts: Tensor) -> tuple[Tensor, LSTMState]:
    """Return the outputs (B, S, width) of a layer on rows of `counts` (B,) steps, 0 behind them.

    And state and cells after each row's last step. `counts` is on the CPU.
    """
    packed = pack_padded_sequence(x, counts, batch_first=True, enforce_sorted=False)
    out, state = layer(packed)
    return pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0], state
