"""Scores of sentences under models whose conditionals are known, computed by hand.

The texts of three letters are "aab" (1/2), "abb" (1/4) and "bab" (1/4); a model that knows them
answers every question about masked letters exactly. So the log-likelihood of "aab" is ln 1/2, and
its pseudo-log-likelihood ln 2/3 + ln 2/3 + ln 1.
"""

from dataclasses import replace
from math import exp, log

import pytest
import torch
from electra_bench import VOCABULARY, build, make_batch
from electra_bench import criterion as electra_criterion
from torch import Tensor, nn

from metaseq_lm.config.criterions import MaskedDiffusionConfig
from metaseq_lm.core.batch import Layout, ScoredBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.criterions.language_modeling import CausalLM
from metaseq_lm.criterions.masked_lm import MaskedLM
from metaseq_lm.criterions.predictions import MaskedDiffusion, MaskedNextToken, PrefixLM
from metaseq_lm.methods.span_corruption.criterion import SpanCorruption
from metaseq_lm.models.transformer.encoder import TransformerLM

PAD, MASK, SEP, CLS, A, B = range(6)
SYMBOLS = 6
TEXTS = {(A, A, B): 1 / 2, (A, B, B): 1 / 4, (B, A, B): 1 / 4}
AAB = [CLS, A, A, B, SEP]


def letter_log_probs(row: list[int], at: int) -> Tensor:
    """Return the log-probabilities of the letter `at` a position, given those not masked, (V,)."""
    probs = torch.zeros(SYMBOLS, dtype=torch.float64)
    for text, probability in TEXTS.items():
        seen = [(i, symbol) for i, symbol in enumerate(row[1:4]) if symbol != MASK and i != at - 1]
        if all(text[i] == symbol for i, symbol in seen):
            probs[text[at - 1]] += probability
    return (probs / probs.sum()).log()


class Knowing(TransformerLM):
    """Gives the exact log-probabilities as logits.

    Args:
        shifted: Whether a state predicts the next position, else its own.
        causal: Whether it sees only what is before the predicted one.
    """

    def __init__(self, shifted: bool = False, causal: bool = False) -> None:
        nn.Module.__init__(self)
        self.shifted, self.causal = shifted, causal

    @property
    def encoder(self):  # type: ignore[no-untyped-def]
        return self.states

    def states(self, tokens: Tensor, layout: Layout) -> Tensor:
        """Return the logits of each position as its state, (B, S, V)."""
        states = torch.zeros(*tokens.shape, SYMBOLS, dtype=torch.float64)
        for r, row in enumerate(tokens.tolist()):
            for at in range(1, 4):
                seen = [s if i < at else MASK for i, s in enumerate(row)] if self.causal else row
                states[r, at - self.shifted] = letter_log_probs(seen, at)
        return states

    def predict(self, x: Tensor, positions: Tensor | None = None, head: str = "lm") -> Tensor:
        if positions is None:
            return x
        return x.gather(1, positions.unsqueeze(-1).expand(-1, -1, SYMBOLS))

    def forward(self, tokens, layout, positions=None, segments=None):  # type: ignore[no-untyped-def]
        return self.predict(self.states(tokens, layout), positions)


def batch_of(words: list[int] | None = None) -> ScoredBatch:
    tokens = torch.tensor([AAB])
    return ScoredBatch(
        tokens=tokens,
        scored=(tokens == A) | (tokens == B),
        mask_id=MASK,
        batch_tokens=64,
        words=None if words is None else torch.tensor([words]),
    )


ALONE = [2 / 3, 2 / 3, 1.0]  # of a letter, given both others
IN_ORDER = [3 / 4, 2 / 3, 1.0]  # given those before it
ONE_WORD, FIRST_TWO, THREE_WORDS = [-1, 0, 0, 0, -1], [-1, 0, 0, 1, -1], [-1, 0, 1, 2, -1]


@pytest.mark.parametrize(
    "criterion, model",
    [(MaskedLM(), Knowing()), (MaskedNextToken(), Knowing(shifted=True))],
    ids=["masked", "masked next token"],
)
@pytest.mark.parametrize(
    "words, wanted",
    [
        (None, ALONE),
        (THREE_WORDS, ALONE),  # the rules are the same for words of one token
        (ONE_WORD, IN_ORDER),  # a word of its tokens in order: the chain rule
        # The first given "b" at the end, which is in all texts.
        (FIRST_TWO, [3 / 4, 2 / 3, 1.0]),
    ],
)
def test_masked_letters(criterion, model, words, wanted):
    scores = criterion.token_log_probs(model, batch_of(words))[0, 1:4]
    assert scores.exp().tolist() == pytest.approx(wanted, abs=1e-12)


def test_two_pieces_of_a_word_by_two_rules():
    """Of "ab" and "ba", with 1/2 each, a piece gives the other away."""

    class Pieces(Knowing):
        def states(self, tokens: Tensor, layout: Layout) -> Tensor:
            states = torch.full((*tokens.shape, SYMBOLS), -torch.inf, dtype=torch.float64)
            for r, row in enumerate(tokens.tolist()):
                for at in (1, 2):
                    other = row[3 - at]
                    for symbol in (A, B):
                        half = 0.5 if other == MASK else float(symbol != other)
                        states[r, at, symbol] = log(half) if half else -torch.inf
            states[:, [0, 3]] = 0
            return states

    tokens = torch.tensor([[CLS, A, B, SEP]])
    batch = replace(batch_of(), tokens=tokens, scored=tokens >= A)
    original = MaskedLM().token_log_probs(Pieces(), batch).sum()
    words = torch.tensor([[-1, 0, 0, -1]])
    within = MaskedLM().token_log_probs(Pieces(), replace(batch, words=words)).sum()
    assert original.item() == 0
    assert within.item() == pytest.approx(-0.6931, abs=1e-4)


@pytest.mark.parametrize("criterion", [CausalLM(), PrefixLM()], ids=["causal", "prefix"])
def test_letters_in_order(criterion):
    model = Knowing(shifted=True, causal=True)
    scores = criterion.token_log_probs(model, batch_of())[0, 1:4]
    assert scores.exp().tolist() == pytest.approx(IN_ORDER, abs=1e-12)
    assert exp(scores.sum()) == pytest.approx(1 / 2)


def test_the_bound_of_diffusion_is_exact_where_letters_do_not_depend_on_each_other():
    class Independent(Knowing):
        """A letter is "a" with 3/4, wherever it stands."""

        def states(self, tokens: Tensor, layout: Layout) -> Tensor:
            probs = torch.tensor([0, 0.5, 0, 0, 0.375, 0.125], dtype=torch.float64)
            return probs.log().expand(*tokens.shape, SYMBOLS)  # [MASK] does not count

    # One letter is always masked alone.
    alone = replace(batch_of(), scored=torch.tensor([[False, False, False, True, False]]))
    score = MaskedDiffusion().token_log_probs(Independent(), alone).sum()
    assert score.item() == pytest.approx(log(1 / 4))
    # Letters with the same probability weigh n / k times k of them, whichever are masked.
    tokens = torch.tensor([[CLS, A, A, A, SEP]])
    for seed in range(3):
        criterion = MaskedDiffusion(MaskedDiffusionConfig(score_samples=2, score_seed=seed))
        score = criterion.token_log_probs(Independent(), replace(batch_of(), tokens=tokens)).sum()
        assert score.item() == pytest.approx(3 * log(3 / 4))


def test_a_sentinel_stands_for_one_letter_alone():
    class Spans(Knowing):
        """Reads [CLS] x [SEP] <sentinel>, where the last state predicts the masked letter."""

        def states(self, tokens: Tensor, layout: Layout) -> Tensor:
            states = torch.zeros(*tokens.shape, SYMBOLS, dtype=torch.float64)
            for r, row in enumerate(tokens.tolist()):
                states[r, 5] = letter_log_probs(row, row.index(MASK))
            return states

    scores = SpanCorruption().token_log_probs(Spans(), batch_of())[0, 1:4]
    assert scores.exp().tolist() == pytest.approx(ALONE, abs=1e-12)
    with pytest.raises(UsageError, match="--pll original"):
        SpanCorruption().token_log_probs(Spans(), batch_of(ONE_WORD))


@pytest.mark.parametrize(
    "name, options, of_a_token",
    [
        ("electric_nce", {}, 2.66839),  # minus the energy
        ("two_tower_cloze", {}, log(0.1)),
        ("electra_rtd", {}, log(0.2)),
        ("electra_rtd", {"pll_formula": "dissertation"}, -1.36880),
    ],
)
def test_discriminators_energies_and_towers(name, options, of_a_token):
    """Where the noise is the right token with 1/10 and the discriminator's logit is -2.66839.

    That is the best one's for a token with 1/5 at a noise rate of 15 %.
    """
    model, batch = build(noise="two_tower"), make_batch()
    model.heads["rtd"] = nn.Identity()
    model.hidden = lambda tokens, batch: torch.full(tokens.shape, -2.66839).double()  # type: ignore[method-assign]
    noise = torch.full((*batch.tokens.shape, VOCABULARY), 0.9 / (VOCABULARY - 1)).double()
    noise.scatter_(-1, batch.tokens.unsqueeze(-1), 0.1)
    model.cloze_noise = lambda batch: noise.log()  # type: ignore[method-assign]
    criterion = electra_criterion(name, noise_rate=0.15, **options)
    scores = criterion.token_log_probs(model, batch)
    counts = batch.scored.sum(1)
    assert scores.sum(1).tolist() == pytest.approx((counts * of_a_token).tolist(), rel=1e-4)
