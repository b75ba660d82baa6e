"""LSTM encoder-decoder with bilinear attention (Luong et al. 2015; Clark 2021, section 4.2.4).

The encoder is a stack of bidirectional LSTMs; each layer reads both directions of the layer below.
A layer of the decoder starts from the last states of both directions of the encoder's layer.
Attention is not fed back into the decoder, so that several heads can share its states. Beam search
steps the decoder one token at a time. Shapes: B rows, S source and T target positions, D width of
the states, V target vocabulary, K hypotheses of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from metaseq_lm.config.models import EncoderDecoderConfig
from metaseq_lm.core.batch import Layout
from metaseq_lm.forward.passes import full_precision
from metaseq_lm.models.bilstm import projected_lstm
from metaseq_lm.models.layers import Dropout, Embedding, Heads, Linear, reverse

# (last tokens (B, K), state) -> log-probabilities of the next token (B, K, V), state
Step = Callable[[Tensor, Any], tuple[Tensor, Any]]
# (state, hypotheses (B, K) to continue) -> state
_Reorder = Callable[[Any, Tensor], Any]


@dataclass(frozen=True)
class Beam:
    """The settings of beam search.

    The score of a hypothesis of n tokens, including the end, is its log-probability divided by
    ((5 + n) / 6) ** length_penalty (Wu et al. 2016, equation 14). `banned` tokens are not
    generated.
    """

    size: int
    start: int
    end: int
    pad: int
    length_penalty: float = 0.0
    banned: tuple[int, ...] = ()

    def worth(self, log_probs: Tensor, lengths: Tensor) -> Tensor:
        """Return the scores of hypotheses with these log-probabilities and lengths."""
        return log_probs / ((5.0 + lengths.to(log_probs)) / 6.0) ** self.length_penalty


@torch.no_grad()
def beam_search(
    step: Step, reorder: _Reorder, state: Any, limits: Tensor, beam: Beam
) -> tuple[Tensor, Tensor]:
    """Return the best hypothesis of each row, int64 (B, L) padded at the end, and its score (B,).

    `limits` (B,) are the largest numbers of tokens of a row's hypotheses, with the end: at the
    limit only the end may follow. Each step considers the 2K best continuations of a row. Finished
    ones among the first K compete for the best hypothesis; the K best unfinished ones continue. A
    row is done when no unfinished hypothesis can become better, independently of other rows. K = 1
    without a length penalty is greedy search.
    """
    rows, size, device = len(limits), beam.size, limits.device
    max_length = int(limits.max())
    tokens = torch.full((rows, size, max_length), beam.pad, dtype=torch.long, device=device)
    last = torch.full((rows, size), beam.start, dtype=torch.long, device=device)
    alive: Tensor | None = None  # log-probabilities (B, K); at first there is one hypothesis
    best = torch.full((rows, max_length), beam.pad, dtype=torch.long, device=device)
    best_score = torch.full((rows,), float("-inf"), device=device)
    for at in range(max_length):
        log_probs, state = step(last, state)
        log_probs = _restricted(log_probs, limits == at + 1, beam)
        if alive is None:
            best_score = best_score.to(log_probs.dtype)
            alive = log_probs.new_full((rows, size), float("-inf"))
            alive[:, 0] = 0.0
        vocabulary = log_probs.shape[-1]
        every = (alive.unsqueeze(-1) + log_probs).flatten(1)  # (B, K V)
        scores, indices = every.topk(min(2 * size, every.shape[1]), dim=1)
        origin, words = indices // vocabulary, indices % vocabulary
        ended = words == beam.end
        # The best finished hypothesis replaces the row's best so far if its score is higher.
        length = torch.tensor(at + 1, device=device)
        worth = beam.worth(scores, length).masked_fill(~ended, float("-inf"))[:, :size]
        top, index = worth.max(1)
        better = top > best_score
        ending = tokens.gather(
            1, origin.gather(1, index[:, None])[..., None].expand(-1, 1, max_length)
        )
        ending = ending.squeeze(1).clone()
        ending[:, at] = beam.end
        best = torch.where(better[:, None], ending, best)
        best_score = torch.where(better, top, best_score)
        # topk orders by score, so a stable sort by "ends" keeps the best K unfinished ones.
        order = ended.to(torch.int8).argsort(dim=1, stable=True)[:, :size]
        alive = scores.masked_fill(ended, float("-inf")).gather(1, order)
        origin, last = origin.gather(1, order), words.gather(1, order)
        tokens = tokens.gather(1, origin[..., None].expand(-1, -1, max_length))
        tokens[:, :, at] = last
        if done(alive, best_score, limits, beam):
            break
        state = reorder(state, origin)
    return best, best_score


def _restricted(log_probs: Tensor, at_limit: Tensor, beam: Beam) -> Tensor:
    """Mask log-probs (B, K, V) of banned tokens, and of all but the end in rows at their limit."""
    banned = torch.zeros(log_probs.shape[-1], dtype=torch.bool, device=log_probs.device)
    banned[list(beam.banned)] = True
    only = torch.ones_like(banned)
    only[beam.end] = False
    hidden = banned | (at_limit[:, None, None] & only)
    return log_probs.masked_fill(hidden, float("-inf"))


def done(alive: Tensor, best: Tensor, limits: Tensor, beam: Beam) -> bool:
    """Return whether no unfinished hypothesis (B, K) can still exceed the best of its row."""
    # Log-probabilities only fall. A penalty above 0 helps most at the row's limit, one below 0 not
    # at all.
    longest = limits if beam.length_penalty > 0 else torch.ones_like(limits)
    return bool((beam.worth(alive.max(1).values, longest) <= best).all())


PRIMARY = "primary"
# State (1, B, width) and cells (1, B, cells) of one layer.
_LSTMState = tuple[Tensor, Tensor]


@dataclass
class Memory:
    """Decoder input: source states (B, S, D), padding (B, S), and initial decoder states."""

    states: Tensor
    padding: Tensor
    first: list[_LSTMState]


class _AttentionHead(nn.Module):
    """Bilinear attention, a = tanh(W_a [c; h]), and a softmax layer, V logits.

    Dropout on the attention weights hides a part of the source; with rate 0 it does nothing.
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
        # Every row has a position that is no padding, so softmax is never over nothing.
        scores = scores.masked_fill(memory.padding.unsqueeze(1), float("-inf"))
        context = self.attention_dropout(scores.softmax(-1)) @ memory.states
        return torch.tanh(self.combine(torch.cat([context, states], dim=-1)))

    def forward(self, states: Tensor, memory: Memory) -> Tensor:
        """Return logits (B, T, V) of decoder states (B, T, D)."""
        logits: Tensor = self.out(self.attend(states, memory))
        return logits


class LSTMEncoderDecoder(nn.Module):
    """The encoder, the decoder's LSTMs and the head "primary"; other heads may be added.

    `vocab_sizes` are the vocabulary sizes of source and target. Parameters start uniform in +-0.1
    (from memory of the program that the paper's is built on), except the forget gates' bias of 1.
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
        decoder = [projected_lstm(config.output_dim, config.hidden_dim, n) for n in inputs]
        for layer in decoder:
            # The number of its calls for a translation depends on a replica's sentences.
            layer.is_gathered_alone = False
        self.decoder = nn.ModuleList(decoder)
        self.dropout = Dropout(config.dropout)
        self.heads = Heads()
        _draw_uniform(self)
        self.add_head(PRIMARY)

    def add_head(self, name: str, attention_dropout: float = 0.0) -> None:
        """Add a head with separate attention and softmax on the decoder's states."""
        self.heads[name] = _AttentionHead(self.width, len(self.target.weight), attention_dropout)
        _draw_uniform(self.heads[name])

    def encode(self, tokens: Tensor, layout: Layout) -> Memory:
        """Encode source rows (B, S) for the decoder; states at padding are arbitrary."""
        lengths = layout.lengths(tokens)
        # torch needs them there; copied once for all layers.
        counts = lengths.cpu()
        x, first = self.dropout(self.source(tokens)), []
        for ahead, back in zip(self.ahead, self.back, strict=True):
            one, (h, c) = _run_rows(ahead, x, counts)
            other, (g, d) = _run_rows(back, reverse(x, lengths), counts)
            first.append((torch.cat([h, g], dim=-1), torch.cat([c, d], dim=-1)))
            x = self.dropout(torch.cat([one, reverse(other, lengths)], dim=-1))
        return Memory(x, layout.padding_of(tokens), first)

    def decode(self, inputs: Tensor, before: list[_LSTMState]) -> tuple[Tensor, list[_LSTMState]]:
        """Return the top states (B, T, D) after each input (B, T), and the states of all layers."""
        x, after = self.dropout(self.target(inputs)), []
        for layer, state in zip(self.decoder, before, strict=True):
            x, state = layer(x, (state[0].contiguous(), state[1].contiguous()))
            x = self.dropout(x)
            after.append(state)
        return x, after

    def forward(self, tokens: Tensor, layout: Layout, inputs: Tensor) -> Tensor:
        """Return the primary head's logits (B, T, V) after each of the `inputs` (B, T)."""
        memory = self.encode(tokens, layout)
        logits: Tensor = self.heads[PRIMARY](self.decode(inputs, memory.first)[0], memory)
        return logits

    @torch.no_grad()
    def translate(
        self, tokens: Tensor, layout: Layout, limits: Tensor, beam: Beam
    ) -> tuple[Tensor, Tensor]:
        """Return the best target row of each source row (B, S), and its score, by beam search.

        It uses the primary head; dropout follows the model's mode. See `beam_search`.
        """
        memory, size = self.encode(tokens, layout), beam.size
        head = self.heads[PRIMARY]

        def step(last: Tensor, state: list[_LSTMState]) -> tuple[Tensor, list[_LSTMState]]:
            states, state = self.decode(last.reshape(-1, 1), state)
            # The hypotheses of a row attend to one memory like steps of one target.
            logits = head(states.view(*last.shape, -1), memory)
            return full_precision(logits).log_softmax(-1), state

        def reorder(state: list[_LSTMState], origin: Tensor) -> list[_LSTMState]:
            starts = torch.arange(len(origin), device=origin.device) * size
            flat = (origin + starts[:, None]).flatten()
            return [(h[:, flat], c[:, flat]) for h, c in state]

        first = [
            (h.repeat_interleave(size, dim=1), c.repeat_interleave(size, dim=1))
            for h, c in memory.first
        ]
        return beam_search(step, reorder, first, limits, beam)


def _draw_uniform(net: nn.Module) -> None:
    for name, parameter in net.named_parameters():
        if "bias" not in name:
            nn.init.uniform_(parameter, -0.1, 0.1)


def _run_rows(layer: nn.Module, x: Tensor, counts: Tensor) -> tuple[Tensor, _LSTMState]:
    """Return the outputs (B, S, width) of a layer on rows of `counts` (B,) steps, 0 after them.

    Also returns state and cells after each row's last step. `counts` must be on the CPU.
    """
    packed = pack_padded_sequence(x, counts, batch_first=True, enforce_sorted=False)
    out, state = layer(packed)
    return pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0], state
