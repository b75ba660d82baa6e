"""ELECTRA, its variants, and Electric (Clark 2021, sections 5.1, 5.3, 5.4 and 5.5).

The sigmoid of a discriminator's logit is P(fake). A token is fake if it was chosen and the sample
differs from the original; a sample equal to the original counts as real.

Shapes: B batch, S length, M chosen positions, V vocabulary, D hidden width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.core.batch import ScoredBatch, Term, Terms, TokenBatch, number_of
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.metric_names import CLOZE_NLL, DETECTION, NLL
from metaseq_lm.criterions import Criterion, Exported
from metaseq_lm.forward.passes import full_precision, uniform
from metaseq_lm.methods.electra.data import ElectraBatch
from metaseq_lm.methods.electra.model import (
    Electra,
    FixedNoise,
    MaskedGenerator,
    TwoTowers,
    check_noise,
    replaced,
    sample,
)
from metaseq_lm.methods.electra.options import (
    NOISES,
    AdversarialConfig,
    ElectricConfig,
    NoiseConfig,
    RTDConfig,
)
from metaseq_lm.models.layers import cross_entropy, select


@dataclass
class _Noised:
    """Corrupted rows.

    Attributes:
        tokens: The rows with sampled tokens, (B, S).
        chosen: Which positions are chosen, boolean (B, S).
        terms: The noise model's own loss and metrics.
        log_q: Log-probability under the noise of each of `tokens` given the others, (B, S); None
            for a masked LM, which does not provide it.
    """

    tokens: Tensor
    chosen: Tensor
    terms: Terms
    log_q: Tensor | None = None

    def fake(self, batch: ElectraBatch) -> Tensor:
        """Return which tokens are fake, (B, S): chosen and different from the original."""
        return self.chosen & (self.tokens != batch.tokens)


class Corrupting(Criterion):
    """The base of criterions on rows with sampled tokens; `heads` are heads of the main encoder."""

    config: NoiseConfig
    tasks = ("electra",)
    heads: tuple[str, ...] = ("rtd",)
    noises: tuple[str, ...] = NOISES

    def check_sampling(self, criterion: str) -> None:
        """Raise UsageError if samples do not follow the noise model's distribution."""
        if self.config.temperature != 1 or self.config.disallow_correct:
            raise UsageError(
                f"{criterion} needs samples of the noise model's own distribution: "
                "criterion.temperature=1, criterion.disallow_correct=false"
            )

    def corrupt(self, model: Electra, batch: ElectraBatch) -> _Noised:
        """Replace the tokens at the chosen positions by samples of the noise model."""
        generator, weight, log_probs = model.generator, self.config.generator_weight, None
        if isinstance(generator, FixedNoise):
            slots, weight, log_probs = generator(batch.positions), 0.0, generator.log_probs
        elif isinstance(generator, TwoTowers):
            log_probs = noise_log_probs(model, batch)
            slots = select(log_probs, batch.positions)
        else:
            slots, _ = model.masked_noise(batch)
        never = batch.targets if self.config.disallow_correct else None
        # The noise model learns from its own loss only, never through its samples.
        samples = sample(slots.detach(), self.config.temperature, never)
        tokens, chosen = replaced(batch, samples)
        terms = _generator_terms(slots, samples, batch, weight)
        if log_probs is None:
            return _Noised(tokens, chosen, terms)
        if isinstance(generator, TwoTowers):
            terms["generator"] = cloze_term(log_probs, batch, weight)
        return _Noised(tokens, chosen, terms, _log_prob_of(log_probs, tokens).detach())


def noise_log_probs(model: Electra, batch: TokenBatch) -> Tensor:
    """Return the noise's log-probabilities: (B, S, V) for two towers, or (V,) for fixed noise."""
    if isinstance(model.generator, FixedNoise):
        return model.generator.log_probs
    logits = model.cloze_noise(batch)
    return full_precision(logits).log_softmax(-1)


def _log_prob_of(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Return the entries of `log_probs` (B, S, V) or (V,) at `tokens` (B, S)."""
    table = log_probs.expand(*tokens.shape, -1)
    return table.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def cloze_term(log_probs: Tensor, batch: ElectraBatch, weight: float) -> Term:
    """Return the loss of the towers at all candidates, chosen or not."""
    log_p = _log_prob_of(log_probs, batch.tokens)
    return Term(-(log_p * batch.candidates).sum(), "candidates", weight)


def _generator_terms(logits: Tensor, samples: Tensor, batch: ElectraBatch, weight: float) -> Terms:
    targets = batch.targets
    with torch.no_grad():
        best_correct = number_of(logits.argmax(-1) == targets)
        sample_correct = number_of(samples == targets)
    return {
        "generator": Term(cross_entropy(logits, targets).sum(), "targets", weight),
        "generator_accuracy": Term(best_correct, "targets", 0.0),
        "sample_accuracy": Term(sample_correct, "targets", 0.0),
    }


def _real_tokens(batch: ElectraBatch) -> Tensor:
    """Return a mask (B, S), false at padding."""
    return ~batch.layout.padding_of(batch.tokens)


def binary_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the binary cross-entropy of each logit, in at least fp32."""
    logits = full_precision(logits)
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")


def _detection_terms(logits: Tensor, fake: Tensor, batch: ElectraBatch) -> Terms:
    """Return shares of all tokens: correctly classified, fake, classified as fake, and both."""
    with torch.no_grad():
        real = _real_tokens(batch)
        flagged = (logits > 0) & real
        # About 94 % of the tokens are real, so accuracy says little. Recall of the fakes is caught
        # / fakes, precision caught / flagged.
        counts = {
            "accuracy": (flagged == fake) & real,
            "fakes": fake & real,
            "flagged": flagged,
            "caught": flagged & fake,
            "candidates": batch.candidates,
        }
        return {name: Term(number_of(count), "tokens", 0.0) for name, count in counts.items()}


class ReplacedTokenDetection(Corrupting):
    """ELECTRA: is each token the original one? (Clark et al. 2020, section 2).

    With model.noise=two_tower this is ELECTRA-TT, whose discriminator gives token probabilities.
    """

    exported = Exported(heads=("rtd",))
    normalised = False
    config: RTDConfig

    def __init__(self, config: RTDConfig) -> None:
        super().__init__(config)
        self.heads = ("rtd", "contrast") if config.contrast else ("rtd",)
        self.exported = Exported(self.heads, generator=config.generator_weight > 0)

    def __call__(self, model: nn.Module, batch: ElectraBatch) -> Terms:
        assert isinstance(model, Electra)
        noised = self.corrupt(model, batch)
        clean = self.clean_rows(batch)
        if clean is not None:
            noised.tokens = torch.where(clean[:, None], batch.tokens, noised.tokens)
        hidden = model.hidden(noised.tokens, batch)
        logits = model.heads["rtd"](hidden)  # (B, S)
        fake = noised.fake(batch)
        included, size = self.included(batch, noised.chosen)
        losses = binary_losses(logits, fake) * included
        weight = self.config.discriminator_weight
        detection = Term(losses.sum(), size, weight, kind=DETECTION)
        terms = noised.terms | {"discriminator": detection}
        if clean is not None:
            row_logits = model.heads["contrast"](hidden[:, 0]).squeeze(-1)
            loss = binary_losses(row_logits, ~clean).sum()
            terms["contrast"] = Term(loss, "rows", self.config.contrast_weight)
        return terms | _detection_terms(logits, fake, batch)

    def included(self, batch: ElectraBatch, chosen: Tensor) -> tuple[Tensor, str]:
        """Return the positions of the detection loss, (B, S), and the name of their count."""
        if self.config.disc_positions == "masked":
            return chosen, "targets"
        if self.config.disc_positions == "random":
            assert batch.subset is not None
            return batch.subset, "subset"
        return _real_tokens(batch), "tokens"

    def clean_rows(self, batch: ElectraBatch) -> Tensor | None:
        """Return which rows remain uncorrupted, (B,); None without criterion.contrast."""
        if not self.config.contrast:
            return None
        return uniform((len(batch.tokens),), batch.tokens.device) < self.config.contrast

    @torch.no_grad()
    def token_log_probs(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """Return log p of each token given the others, (B, S), from P(fake) and the towers' log q.

        With labels by equality the optimal discriminator has odds real : fake = p (1 - m + m q) : m
        q (1 - p) at noise rate m, which `corrected` solves for p. `dissertation` is log q + log(m /
        (1 - m)) - logit (Clark 2021, section 5.4.5, with Electric's constant), which holds if all
        chosen tokens count as fake.
        """
        assert isinstance(model, Electra)
        if isinstance(model.generator, MaskedGenerator):
            raise UsageError(
                "an ELECTRA whose noise is a masked LM gives no token probabilities in one pass; "
                "train it with model.noise=two_tower (ELECTRA-TT), or use electric_nce"
            )
        self.check_sampling("token probabilities of electra_rtd")
        log_q = _log_prob_of(noise_log_probs(model, batch), batch.tokens)
        logits = model.heads["rtd"](model.hidden(batch.tokens, batch)).to(log_q.dtype)
        m = self.config.noise_rate
        if self.config.pll_formula == "dissertation":
            log_probs: Tensor = log_q + math.log(m / (1 - m)) - logits
        else:
            log_odds = log_q + math.log(m) - logits - torch.log(1 - m + m * log_q.exp())
            log_probs = F.logsigmoid(log_odds)
        return log_probs * batch.scored

    @torch.no_grad()
    def comparison_scores(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """Return scores (B, S) for comparing tokens at the same position.

        If the noise is a masked LM, which gives no log q in one pass, they are the discriminator's
        log-odds that a token is the original; otherwise they are log-probabilities.
        """
        assert isinstance(model, Electra)
        if not isinstance(model.generator, MaskedGenerator):
            return self.token_log_probs(model, batch)
        logits = model.heads["rtd"](model.hidden(batch.tokens, batch))
        scores: Tensor = -logits * batch.scored
        return scores


class ReplaceMLM(Corrupting):
    """A masked LM with samples instead of [MASK] at the chosen positions (Clark 2021, 5.4.3)."""

    # The pipeline fills [MASK], which this model never sees.
    exported = Exported(heads=("lm",), pipeline=False)
    heads = ("lm",)

    def __call__(self, model: nn.Module, batch: ElectraBatch) -> Terms:
        assert isinstance(model, Electra)
        noised = self.corrupt(model, batch)
        states = select(model.hidden(noised.tokens, batch), batch.positions)
        logits = model.heads["lm"](states, model.token_table())  # (B, M, V)
        losses = cross_entropy(logits, batch.targets)
        with torch.no_grad():
            correct = number_of(logits.argmax(-1) == batch.targets)
        return noised.terms | {
            "mlm": Term(losses.sum(), "targets", kind=CLOZE_NLL),
            "accuracy": Term(correct, "targets", 0.0),
        }


class AllTokensMLM(Corrupting):
    """Replace MLM that predicts every token, with a gate that copies the input (Clark 2021, 5.4.3).

    P(y) = D [y = input] + (1 - D) softmax(y), D = sigmoid(gate). Special tokens are not targets.
    """

    exported = Exported(heads=("lm", "copy"))
    heads = ("lm", "copy")
    sees_targets = True

    def __call__(self, model: nn.Module, batch: ElectraBatch) -> Terms:
        assert isinstance(model, Electra)
        noised = self.corrupt(model, batch)
        hidden = model.hidden(noised.tokens, batch)
        logits = model.heads["lm"](hidden, model.token_table())  # (B, S, V)
        gate = model.heads["copy"](hidden).squeeze(-1)
        logits, gate = full_precision(logits), full_precision(gate)
        log_p = _copied_log_probs(logits, gate, noised.tokens == batch.tokens, batch.tokens)
        with torch.no_grad():
            copied = number_of((gate > 0) & batch.candidates)
        return noised.terms | {
            "mlm": Term(-(log_p * batch.candidates).sum(), "candidates", kind=NLL),
            "copied": Term(copied, "candidates", 0.0),
        }


def _copied_log_probs(logits: Tensor, gate: Tensor, same: Tensor, targets: Tensor) -> Tensor:
    """Return log P(target) (B, S) of softmax `logits` (B, S, V) mixed with a copy of the input.

    `same` (B, S) marks positions where the input already is the target.
    """
    log_softmax = -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    predicted = F.logsigmoid(-gate) + log_softmax.view(targets.shape)
    return torch.where(same, torch.logaddexp(F.logsigmoid(gate), predicted), predicted)


class AdversarialElectra(Corrupting):
    """The generator is rewarded for fooling the discriminator (Clark 2021, section 5.3.4).

    It is trained by REINFORCE. The reward at a chosen position is the discriminator's loss there,
    which is assumed not to depend on other samples, minus a learnt baseline b = -log sigmoid(w h)
    of the detached state h. The baseline is trained by cross-entropy with target exp(-reward).
    There is no masked-LM loss.
    """

    exported = Exported(heads=("rtd", "baseline"), generator=False)
    heads = ("rtd", "baseline")
    noises = ("mlm",)

    config: AdversarialConfig

    def __init__(self, config: AdversarialConfig) -> None:
        super().__init__(config)
        self.check_sampling("electra_adversarial")

    def __call__(self, model: nn.Module, batch: ElectraBatch) -> Terms:
        assert isinstance(model, Electra)
        check_noise("electra_adversarial", self.noises, model.noise)
        targets = batch.targets
        slots, states = model.masked_noise(batch)
        samples = sample(slots.detach())
        noised = _Noised(*replaced(batch, samples), _generator_terms(slots, samples, batch, 0.0))
        logits = model.heads["rtd"](model.hidden(noised.tokens, batch))
        fake, real = noised.fake(batch), _real_tokens(batch)
        losses = binary_losses(logits, fake)
        weight = self.config.discriminator_weight
        detection = Term((losses * real).sum(), "tokens", weight, kind=DETECTION)
        terms = noised.terms | {"discriminator": detection}
        rewards = losses.detach().gather(1, batch.positions)  # (B, M)
        terms |= self.policy_terms(model, slots, states, samples, (rewards, targets >= 0))
        return terms | _detection_terms(logits, fake, batch)

    def policy_terms(
        self,
        model: Electra,
        slots: Tensor,
        states: Tensor,
        samples: Tensor,
        rewards: tuple[Tensor, Tensor],
    ) -> Terms:
        """Return the losses of policy and baseline from `rewards` (B, M) at the used positions."""
        reward, counted = rewards
        log_probs = full_precision(slots).log_softmax(-1)
        chosen = log_probs.gather(-1, samples.unsqueeze(-1)).squeeze(-1)
        score = model.heads["baseline"](states.detach()).squeeze(-1).to(log_probs.dtype)
        advantage = (reward - F.softplus(-score)).detach()
        baseline = binary_losses(score, torch.exp(-reward))
        with torch.no_grad():
            entropy = -(log_probs.exp() * log_probs).sum(-1)
        policy = -(chosen * advantage * counted).sum()
        return {
            "policy": Term(policy, "targets", self.config.generator_weight),
            "baseline": Term((baseline * counted).sum(), "targets"),
            "reward": Term((reward * counted).sum(), "targets", 0.0),
            "entropy": Term((entropy * counted).sum(), "targets", 0.0),
        }


class Electric(Corrupting):
    """Electric (Clark 2021, section 5.1.5): token energies E by noise-contrastive estimation.

    P(noise) = sigmoid(E + log q + log(k / (n - k))), where every chosen token counts as noise, even
    if the sample is the original. At the optimum exp(-E) is therefore the data's normalised
    probability of the token given the others (Clark 2021, section 5.1.3). The noise model must see
    all tokens except the one it predicts.
    """

    exported = (
        "its head gives energies of tokens, and a class of transformers with this head gives "
        "logits of replaced tokens"
    )
    noises = ("two_tower", "unigram", "uniform")

    # Energies do not sum to 1.
    normalised = False
    config: ElectricConfig

    def __init__(self, config: ElectricConfig) -> None:
        super().__init__(config)
        self.check_sampling("electric_nce")

    def __call__(self, model: nn.Module, batch: ElectraBatch) -> Terms:
        assert isinstance(model, Electra)
        check_noise("electric_nce", self.noises, model.noise)
        noised = self.corrupt(model, batch)
        assert noised.log_q is not None
        included, size = batch.candidates, "candidates"
        if self.config.legacy_specials:
            included, size = _real_tokens(batch), "tokens"
        energy = model.heads["rtd"](model.hidden(noised.tokens, batch))  # (B, S)
        logits = energy + noised.log_q + self.log_odds(included, noised)
        losses = binary_losses(logits, noised.chosen) * included
        weight = self.config.discriminator_weight
        detection = Term(losses.sum(), size, weight, kind=DETECTION)
        terms = noised.terms | {"discriminator": detection}
        return terms | _detection_terms(logits, noised.chosen, batch)

    def log_odds(self, included: Tensor, noised: _Noised) -> float | Tensor:
        """Return log(k / (n - k)), a number, or (B, 1) with exact_counts.

        `included` (B, S) marks the n tokens of the loss, of which k are noise.
        """
        if not self.config.exact_counts:
            return math.log(self.config.noise_rate / (1 - self.config.noise_rate))
        k = noised.chosen.sum(-1, keepdim=True)
        n = included.sum(-1, keepdim=True)
        # A row without noise or without data is ignored, because log 0 would give NaN.
        odds = torch.log(k.clamp(min=1).double() / (n - k).clamp(min=1))
        assert noised.log_q is not None
        return odds.to(noised.log_q)

    @torch.no_grad()
    def token_log_probs(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """Return -E of each token of the uncorrupted rows, (B, S), in one pass."""
        assert isinstance(model, Electra)
        energy = model.heads["rtd"](model.hidden(batch.tokens, batch))
        log_probs: Tensor = -energy * batch.scored
        return log_probs


class TwoTowerCloze(Criterion):
    """The two towers alone, trained on every token given all others (Clark 2021, section 5.4.5)."""

    tasks = ("electra",)
    heads: tuple[str, ...] = ()
    noises = ("two_tower",)

    def __call__(self, model: nn.Module, batch: ElectraBatch) -> Terms:
        assert isinstance(model, Electra)
        check_noise("two_tower_cloze", self.noises, model.noise)
        log_probs = noise_log_probs(model, batch)
        with torch.no_grad():
            correct = (log_probs.argmax(-1) == batch.tokens) & batch.candidates
        return {
            "cloze": cloze_term(log_probs, batch, 1.0),
            "accuracy": Term(number_of(correct), "candidates", 0.0),
        }

    @torch.no_grad()
    def token_log_probs(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """Return log q of each token given the others, (B, S), in one pass."""
        assert isinstance(model, Electra)
        return _log_prob_of(noise_log_probs(model, batch), batch.tokens) * batch.scored
