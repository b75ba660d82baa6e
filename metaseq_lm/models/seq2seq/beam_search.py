"""Beam search over a decoder that is stepped one token at a time.

Shapes: B rows, K hypotheses of a row, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# (last tokens (B, K), state) -> log-probabilities of what follows (B, K, V), state
Step = Callable[[Tensor, Any], tuple[Tensor, Any]]
# (state, hypotheses (B, K) to go on with) -> state
Reorder = Callable[[Any, Tensor], Any]


@dataclass(frozen=True)
class Beam:
    """The settings of beam search.

    A hypothesis of n tokens, its end included, scores its log-probability divided by
    ((5 + n) / 6) ** length_penalty (Wu et al. 2016, equation 14); 0 takes the log-probability.
    `banned` tokens are not generated.
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
    step: Step, reorder: Reorder, state: Any, limits: Tensor, beam: Beam
) -> tuple[Tensor, Tensor]:
    """Return the best hypothesis of each row, int64 (B, L) padded behind its end, and its score (B,).

    `limits` (B,) are the largest numbers of tokens of a row's hypotheses, with the end: at the limit
    only the end may follow. In each step the 2K best continuations of a row are looked at: those of the
    first K that end compete for the best, the K best that do not end go on. A row is done when nothing
    that goes on can become better; that depends on no other row. K = 1 without a length penalty is
    greedy search.
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
        log_probs = restricted(log_probs, limits == at + 1, beam)
        if alive is None:
            best_score = best_score.to(log_probs.dtype)
            alive = log_probs.new_full((rows, size), float("-inf"))
            alive[:, 0] = 0.0
        vocabulary = log_probs.shape[-1]
        every = (alive.unsqueeze(-1) + log_probs).flatten(1)  # (B, K V)
        scores, places = every.topk(min(2 * size, every.shape[1]), dim=1)
        origin, words = places // vocabulary, places % vocabulary
        ended = words == beam.end
        # Of those that end the best one is the best of all rows' hypotheses so far, or is not.
        length = torch.tensor(at + 1, device=device)
        worth = beam.worth(scores, length).masked_fill(~ended, float("-inf"))[:, :size]
        top, place = worth.max(1)
        better = top > best_score
        ending = tokens.gather(
            1, origin.gather(1, place[:, None])[..., None].expand(-1, 1, max_length)
        )
        ending = ending.squeeze(1).clone()
        ending[:, at] = beam.end
        best = torch.where(better[:, None], ending, best)
        best_score = torch.where(better, top, best_score)
        # topk orders by score, so a stable sort by "ends" keeps the best K of those that go on.
        order = ended.to(torch.int8).argsort(dim=1, stable=True)[:, :size]
        alive = scores.masked_fill(ended, float("-inf")).gather(1, order)
        origin, last = origin.gather(1, order), words.gather(1, order)
        tokens = tokens.gather(1, origin[..., None].expand(-1, -1, max_length))
        tokens[:, :, at] = last
        if done(alive, best_score, limits, beam):
            break
        state = reorder(state, origin)
    return best, best_score


def restricted(log_probs: Tensor, at_limit: Tensor, beam: Beam) -> Tensor:
    """Return log-probabilities (B, K, V) without banned tokens, and in rows at their limit only the end."""
    banned = torch.zeros(log_probs.shape[-1], dtype=torch.bool, device=log_probs.device)
    banned[list(beam.banned)] = True
    only = torch.ones_like(banned)
    only[beam.end] = False
    hidden = banned | (at_limit[:, None, None] & only)
    return log_probs.masked_fill(hidden, float("-inf"))


def done(alive: Tensor, best: Tensor, limits: Tensor, beam: Beam) -> bool:
    """Return whether no hypothesis (B, K) that goes on can become better than the best of its row.

    Log-probabilities only fall, and a penalty above 0 helps most at the row's limit (one below 0,
    not at all).
    """
    longest = limits if beam.length_penalty > 0 else torch.ones_like(limits)
    return bool((beam.worth(alive.max(1).values, longest) <= best).all())
