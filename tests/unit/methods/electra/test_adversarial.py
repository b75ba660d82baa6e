"""The rewarded generator: loss, policy gradient, baseline."""

import math

import pytest
import torch
from electra_bench import FIRST, VOCABULARY, Seen, build, chosen_positions, criterion, make_batch
from electra_bench import length as length_of
from torch import Tensor
from torch.nn import functional as F

from metaseq_lm.methods.electra.model import Electra, replaced

HEADS = ("rtd", "baseline")


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("sharing", ["embeddings", "none"])
def test_losses(sharing: str) -> None:
    """Reward, baseline and policy at each chosen position, written out."""
    model, batch = build(HEADS, sharing=sharing), make_batch()
    seen = Seen(model, criterion("electra_adversarial"), batch)
    with torch.no_grad():
        logits = model.heads["rtd"](model.hidden(seen.tokens, batch))
        slots, states = model.masked_noise(batch)
        log_q = slots.log_softmax(-1)
        scores = model.heads["baseline"](states).squeeze(-1)
    discriminator, policy, baseline, rewards = [], [], [], []
    for row in range(3):
        for t in range(length_of(batch, row)):
            fake = bool(seen.tokens[row, t] != batch.tokens[row, t])
            p_fake = sigmoid(logits[row, t].item())
            discriminator.append(-math.log(p_fake if fake else 1 - p_fake))
        for slot, t in enumerate(chosen_positions(batch, row)):
            drawn = int(seen.tokens[row, t])
            p_fake = sigmoid(logits[row, t].item())
            right = 1 - p_fake if drawn == batch.tokens[row, t] else p_fake
            reward = -math.log(right)
            s = sigmoid(scores[row, slot].item())
            b = -math.log(s)
            policy.append(-log_q[row, slot, drawn].item() * (reward - b))
            target = math.exp(-reward)
            baseline.append(-target * math.log(s) - (1 - target) * math.log(1 - s))
            rewards.append(reward)
    logs = {n: v.item() for n, v in seen.logs.items()}
    for name, parts in (
        ("discriminator", discriminator),
        ("policy", policy),
        ("baseline", baseline),
        ("reward", rewards),
    ):
        assert logs[name] == pytest.approx(sum(parts) / len(parts), rel=1e-9), name
    total = 50 * logs["discriminator"] + logs["policy"] + logs["baseline"]
    assert logs["loss"] == pytest.approx(total, rel=1e-10)


def gradient(model: Electra, loss: Tensor, prefix: str) -> dict[str, Tensor]:
    names, leaves = zip(*((n, p) for n, p in model.named_parameters() if n.startswith(prefix)))
    return dict(zip(names, torch.autograd.grad(loss, leaves, allow_unused=True)))


def test_adversarial_generator_has_no_masked_lm_loss() -> None:
    """The generator's weights get the policy gradient only, the baseline's get only their own."""
    model, batch = build(HEADS, sharing="none"), make_batch()
    terms = Seen(model, criterion("electra_adversarial"), batch).terms
    assert terms["generator"].weight == 0
    for name, prefixes in (
        ("discriminator", {"encoder", "heads.rtd"}),
        ("policy", {"generator"}),
        ("baseline", {"heads.baseline"}),
    ):
        found = gradient(model, terms[name].sum, "")
        reached = {n for n, g in found.items() if g is not None and g.abs().max() > 0}
        assert {
            p
            for p in ("encoder", "generator", "heads.rtd", "heads.baseline")
            if any(n.startswith(p) for n in reached)
        } == prefixes, name


def test_policy_gradient_is_that_of_the_expected_reward() -> None:
    """Over all samples of one chosen position, weighted by their probabilities, exactly.

    The generator climbs the reward: the gradient of the loss is minus that of E[R], and any
    baseline that does not see the sample drops out.
    """
    model, how = build(HEADS, sharing="none"), criterion("electra_adversarial")
    batch = make_batch((5,), [[2]])
    slots, states = model.masked_noise(batch)
    q = slots[0, 0].softmax(-1)
    mean: dict[str, Tensor] = {}
    expected = torch.zeros((), dtype=torch.double)
    for symbol in range(VOCABULARY):
        samples = torch.tensor([[symbol]])
        tokens, _ = replaced(batch, samples)
        with torch.no_grad():
            logit = model.heads["rtd"](model.hidden(tokens, batch))[0, 2]
        fake = tokens[0, 2] != batch.tokens[0, 2]
        reward = F.softplus(-logit if fake else logit)
        expected = expected + q[symbol] * reward
        given = (reward.view(1, 1), torch.ones(1, 1, dtype=torch.bool))
        slots, states = model.masked_noise(batch)
        terms = how.policy_terms(model, slots, states, samples, given)
        one = gradient(model, terms["policy"].sum, "generator.")
        for name, grad in one.items():
            mean[name] = mean.get(name, 0.0) + q[symbol].detach() * grad
    for name, grad in gradient(model, expected, "generator.").items():
        torch.testing.assert_close(mean[name], -grad, rtol=1e-9, atol=1e-12)
    assert max(g.abs().max().item() for g in mean.values()) > 1e-3


def test_the_baseline_learns_the_reward() -> None:
    """The minimum of its loss, for one state and two rewards, is b = -log(mean of exp(-R))."""
    model, batch = build(HEADS), make_batch((5, 5), [[2], [2]])
    states = torch.randn(1, 1, 4, dtype=torch.double).expand(2, 1, -1)
    slots = torch.zeros(2, 1, VOCABULARY, dtype=torch.double, requires_grad=True)
    reward = torch.tensor([[0.3], [2.0]], dtype=torch.double)
    counted = torch.ones(2, 1, dtype=torch.bool)
    optimizer = torch.optim.LBFGS(model.heads["baseline"].parameters(), max_iter=100)
    how, samples = criterion("electra_adversarial"), torch.full((2, 1), FIRST)

    def loss() -> Tensor:
        optimizer.zero_grad()
        terms = how.policy_terms(model, slots, states, samples, (reward, counted))
        terms["baseline"].sum.backward()
        return terms["baseline"].sum

    optimizer.step(loss)
    best = -F.logsigmoid(model.heads["baseline"](states[0, 0])).item()
    assert best == pytest.approx(-math.log(torch.exp(-reward).mean().item()), abs=1e-5)
    assert batch.sizes["rows"] == 2
