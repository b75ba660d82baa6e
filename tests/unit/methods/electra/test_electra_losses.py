"""Each criterion against its definition, written as loops over rows and positions."""

import math

import pytest
import torch
from electra_bench import (
    RATE,
    VOCABULARY,
    Seen,
    build,
    chosen_positions,
    criterion,
    make_batch,
    noise,
)
from electra_bench import length as length_of

from metaseq_lm.core.batch import TokenBatch
from metaseq_lm.methods.electra.data import ElectraBatch
from metaseq_lm.methods.electra.model import Electra

EXACT = {"rel": 1e-10}


def log_softmax(scores: torch.Tensor, symbol: int) -> float:
    """Return the log-probability of one symbol, without any library's softmax."""
    top = float(scores.max())
    total = sum(math.exp(float(s) - top) for s in scores)
    return float(scores[symbol]) - top - math.log(total)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def mean(items: list[float]) -> float:
    return sum(items) / len(items)


@torch.no_grad()
def generator_loss(model: Electra, batch: ElectraBatch) -> float:
    """The masked-LM loss of the small net at all chosen positions, a mean over tokens."""
    generator = model.generator
    table = generator.embeddings or model.encoder.embeddings
    stack = generator.stack or model.encoder.stack
    states = stack(table(batch.masked), batch.layout)
    losses = []
    for row in range(len(batch.tokens)):
        for place in chosen_positions(batch, row):
            scores = generator.head(states[row, place], table.tokens.weight)
            losses.append(-log_softmax(scores, int(batch.tokens[row, place])))
    return mean(losses)


@torch.no_grad()
def towers_log_q(model: Electra, batch: ElectraBatch, tokens: torch.Tensor) -> list[list[float]]:
    """log q of `tokens` by the towers that read the uncorrupted row."""
    scores = model.cloze_noise(batch)
    return [
        [log_softmax(scores[row, t], int(tokens[row, t])) for t in range(length_of(batch, row))]
        for row in range(len(tokens))
    ]


def binary(logit: float, fake: bool) -> float:
    return -math.log(sigmoid(logit)) if fake else -math.log(1 - sigmoid(logit))


@pytest.mark.parametrize("where", ["all", "masked", "random"])
@pytest.mark.parametrize("sharing", ["embeddings", "none", "all"])
def test_replaced_token_detection(where, sharing):
    """[CLS] and [SEP] count, padding does not; the weights are 1 and 50."""
    model = build(sharing=sharing, generator_size=1.0 if sharing == "all" else 0.5)
    batch = make_batch()
    seen = Seen(model, criterion("electra_rtd", disc_positions=where), batch)
    with torch.no_grad():
        logits = model.heads["rtd"](model.hidden(seen.tokens, batch))
    losses, right = [], []
    for row in range(3):
        for t in range(length_of(batch, row)):
            chosen = t in chosen_positions(batch, row)
            fake = chosen and bool(seen.tokens[row, t] != batch.tokens[row, t])
            judged = {"all": True, "masked": chosen, "random": bool(batch.subset[row, t])}
            if judged[where]:
                losses.append(binary(logits[row, t].item(), fake))
            right.append(float((logits[row, t].item() > 0) == fake))
    generator = generator_loss(model, batch)
    assert len(losses) == {"all": 21, "masked": 5}.get(where, batch.sizes["subset"])
    assert seen.logs["generator"].item() == pytest.approx(generator, **EXACT)
    assert seen.logs["discriminator"].item() == pytest.approx(mean(losses), **EXACT)
    assert seen.loss.item() == pytest.approx(generator + 50 * mean(losses), **EXACT)
    assert seen.logs["accuracy"].item() == pytest.approx(mean(right))


def test_weights_are_options():
    model, batch = build(), make_batch()
    how = criterion("electra_rtd", generator_weight=0.3, discriminator_weight=7.0)
    logs = (seen := Seen(model, how, batch)).logs
    wanted = 0.3 * logs["generator"] + 7 * logs["discriminator"]
    assert seen.loss.item() == pytest.approx(wanted.item(), **EXACT)


def test_the_rate_is_that_of_the_task():
    """Nobody has to write 15 % twice."""
    from metaseq_lm.core.loading import load_config

    names = ["task=electra", "criterion=electric_nce", "model=electra"]
    assert load_config(names).criterion.noise_rate == 0.15
    assert load_config([*names, "task.mask_prob=0.25"]).criterion.noise_rate == 0.25


def test_contrast():
    """Rows that are left alone have labels of 0 throughout and a label of 0 for the whole."""
    model, how = build(("rtd", "contrast")), criterion("electra_rtd", contrast=0.5)
    batch = make_batch((9, 7, 5, 8, 6, 7), [[1, 3], [5, 2], [3], [1, 2], [4, 2], [5, 1]])
    left_alone = set()
    for root in range(4):
        seen = Seen(model, how, batch, root)
        with torch.no_grad():
            hidden = model.hidden(seen.tokens, batch)
            logits = model.heads["rtd"](hidden)
            whole = model.heads["contrast"](hidden[:, 0])
        with noise(root, batch.rows):
            clean = how.corrupt(model, batch) and how.clean_rows(batch)
        left_alone |= set(clean.nonzero().flatten().tolist())
        tokens, rows = [], []
        for row in range(6):
            for t in range(length_of(batch, row)):
                fake = bool(seen.tokens[row, t] != batch.tokens[row, t])
                assert not (fake and clean[row])
                tokens.append(binary(logits[row, t].item(), fake))
            rows.append(binary(whole[row].item(), not clean[row]))
        assert seen.logs["discriminator"].item() == pytest.approx(mean(tokens), **EXACT)
        assert seen.logs["contrast"].item() == pytest.approx(mean(rows), **EXACT)
        total = generator_loss(model, batch) + 50 * mean(tokens) + mean(rows)
        assert seen.loss.item() == pytest.approx(total, **EXACT)
    assert left_alone == set(range(6))


def test_the_share_of_rows_left_alone():
    how, rows = criterion("electra_rtd", contrast=0.2), 20_000
    with noise(3, range(rows)):
        clean = how.clean_rows(TokenBatch(tokens=torch.zeros(rows, 4)))
    assert clean.double().mean().item() == pytest.approx(0.2, abs=4 * (0.16 / rows) ** 0.5)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kind", ["two_tower", "unigram", "uniform"])
def test_electric(kind, legacy, exact):
    """P(noise) = sigmoid(E + log q + log of the odds), every chosen token is noise."""
    model, batch = build(noise=kind), make_batch()
    how = criterion("electric_nce", exact_counts=exact, legacy_specials=legacy)
    seen = Seen(model, how, batch)
    with torch.no_grad():
        energy = model.heads["rtd"](model.hidden(seen.tokens, batch))
    if kind == "two_tower":
        log_q = towers_log_q(model, batch, seen.tokens)
    else:
        log_q = model.generator.log_probs[seen.tokens].tolist()
    losses, cloze = [], []
    for row in range(3):
        n = length_of(batch, row)
        k = len(chosen_positions(batch, row))
        taken = range(n) if legacy else range(1, n - 1)
        odds = math.log(k / (len(taken) - k)) if exact else math.log(RATE / (1 - RATE))
        for t in taken:
            logit = energy[row, t].item() + log_q[row][t] + odds
            fake = t in chosen_positions(batch, row)
            # In the form that survives a log q of -10,000.
            losses.append(max(logit, 0) - logit * fake + math.log1p(math.exp(-abs(logit))))
        if kind == "two_tower":
            original = towers_log_q(model, batch, batch.tokens)[row]
            cloze += [-q for q in original[1 : n - 1]]
    assert seen.logs["discriminator"].item() == pytest.approx(mean(losses), **EXACT)
    total = 50 * mean(losses)
    if kind == "two_tower":
        assert seen.logs["generator"].item() == pytest.approx(mean(cloze), **EXACT)
        total += mean(cloze)
    assert seen.loss.item() == pytest.approx(total, **EXACT)


def test_electric_scores_a_row_in_one_pass():
    model, batch = build(noise="two_tower"), make_batch()
    found = criterion("electric_nce").token_log_probs(model, batch)
    energy = model.heads["rtd"](model.hidden(batch.tokens, batch))
    assert torch.equal(found, -energy * batch.scored)


def test_two_towers_alone():
    model, batch = build((), noise="two_tower", generator_size=1.0), make_batch()
    assert model.encoder is None
    how = criterion("two_tower_cloze")
    with noise():
        terms = how(model, batch)
    log_q = towers_log_q(model, batch, batch.tokens)
    words = [log_q[row][t] for row in range(3) for t in range(1, length_of(batch, row) - 1)]
    found = terms["cloze"].sum.item() / batch.sizes[terms["cloze"].per]
    assert found == pytest.approx(-mean(words), **EXACT) and terms["cloze"].weight == 1
    scored = how.token_log_probs(model, batch)
    assert scored.sum().item() == pytest.approx(sum(words), **EXACT)


def test_replace_mlm():
    """Originals at all chosen positions, where the sample is the original too; weights 1 and 1."""
    model, batch = build(("lm",)), make_batch()
    seen = Seen(model, criterion("replace_mlm"), batch)
    with torch.no_grad():
        hidden = model.hidden(seen.tokens, batch)
        losses = []
        for row in range(3):
            for t in chosen_positions(batch, row):
                scores = model.heads["lm"](hidden[row, t], model.encoder.embeddings.tokens.weight)
                losses.append(-log_softmax(scores, int(batch.tokens[row, t])))
    assert len(losses) == 5
    assert seen.logs["mlm"].item() == pytest.approx(mean(losses), **EXACT)
    total = mean(losses) + generator_loss(model, batch)
    assert seen.loss.item() == pytest.approx(total, **EXACT)


@pytest.mark.parametrize("shift", [0.0, 30.0, -30.0])
def test_all_tokens_mlm(shift):
    """P(y) = D [y = input] + (1 - D) softmax(y), without logarithms; the copy gate may be shut."""
    model, batch = build(("lm", "copy"), large=0.3), make_batch()
    with torch.no_grad():
        model.heads["copy"].bias += shift
    seen = Seen(model, criterion("all_tokens_mlm"), batch)
    with torch.no_grad():
        hidden = model.hidden(seen.tokens, batch)
        gates = model.heads["copy"](hidden)
        losses = []
        for row in range(3):
            for t in range(1, length_of(batch, row) - 1):
                scores = model.heads["lm"](hidden[row, t], model.encoder.embeddings.tokens.weight)
                target, shown = int(batch.tokens[row, t]), int(seen.tokens[row, t])
                gate, inverse = sigmoid(gates[row, t].item()), sigmoid(-gates[row, t].item())
                p = inverse * math.exp(log_softmax(scores, target)) + gate * (target == shown)
                losses.append(-math.log(p))
    assert len(losses) == batch.sizes["candidates"] == 15
    assert seen.logs["mlm"].item() == pytest.approx(mean(losses), **EXACT)
    total = mean(losses) + generator_loss(model, batch)
    assert seen.loss.item() == pytest.approx(total, **EXACT)


def test_all_tokens_mlm_with_extreme_gates():
    """Where exp-space gives log 0, log-space is finite."""
    from metaseq_lm.methods.electra.criterion import _copied_log_probs

    logits = torch.zeros(1, 2, VOCABULARY, dtype=torch.double)
    gate = torch.tensor([[800.0, -800.0]], dtype=torch.double)
    for same in (True, False):
        wanted = {
            True: [0.0, -math.log(VOCABULARY)],
            False: [-800 - math.log(VOCABULARY), -math.log(VOCABULARY)],
        }
        found = _copied_log_probs(
            logits, gate, torch.full((1, 2), same), torch.zeros(1, 2, dtype=torch.long)
        )
        assert found[0].tolist() == pytest.approx(wanted[same])


@pytest.mark.parametrize(
    "name, kind, heads",
    [
        ("electra_rtd", "mlm", ("rtd",)),
        ("electra_rtd", "two_tower", ("rtd",)),
        ("electric_nce", "two_tower", ("rtd",)),
        ("all_tokens_mlm", "mlm", ("lm", "copy")),
        ("electra_adversarial", "mlm", ("rtd", "baseline")),
    ],
)
def test_more_padding_changes_no_loss(name, kind, heads):
    model = build(heads, noise=kind)
    losses = {Seen(model, criterion(name), make_batch(width=w)).loss.item() for w in (9, 10, 14)}
    assert max(losses) - min(losses) < 1e-10 * max(losses)


@pytest.mark.parametrize("p, q, biased, exact", [(0.3, 0.2, 0.444, 0.3), (0.9, 0.7, 10.1, 0.9)])
def test_probabilities_of_electra_with_two_towers(p, q, biased, exact):
    """From the best discriminator of labels by equality, at a noise rate of 15 %.

    The dissertation's formula gives the `biased` numbers, with odds of m / (1 - m); as it is
    printed, with k / n = m, it would give (1 - m) times those.
    """
    m = 0.15
    logit = math.log(m * q * (1 - p) / (p * (1 - m + m * q)))
    model, batch = build(noise="two_tower"), make_batch()
    model.heads["rtd"] = torch.nn.Identity()
    model.hidden = lambda tokens, b: torch.full(tokens.shape, logit).double()  # type: ignore[method-assign]
    scores = torch.full((*batch.tokens.shape, VOCABULARY), (1 - q) / (VOCABULARY - 1)).double()
    scores.scatter_(-1, batch.tokens.unsqueeze(-1), q)
    model.cloze_noise = lambda b: scores.log()  # type: ignore[method-assign]
    for formula, wanted in (("dissertation", biased), ("corrected", exact)):
        how = criterion("electra_rtd", pll_formula=formula, noise_rate=m)
        found = how.token_log_probs(model, batch)
        assert found[0, 2].exp().item() == pytest.approx(wanted, rel=5e-3)
        assert (found[~batch.scored] == 0).all()


def test_tokens_are_compared_by_the_log_odds_that_they_are_original():
    """Of a discriminator whose noise is a masked LM; with towers by log-probabilities."""
    batch, rtd = make_batch(), criterion("electra_rtd")
    model = build().eval()
    scores = rtd.comparison_scores(model, batch)
    fake = model.heads["rtd"](model.hidden(batch.tokens, batch)).sigmoid()  # P(replaced)
    wanted = ((1 - fake) / fake).log() * batch.scored
    assert torch.allclose(scores, wanted, atol=1e-6) and scores.any()
    towers = build(noise="two_tower").eval()
    expected = rtd.token_log_probs(towers, batch)
    assert torch.equal(rtd.comparison_scores(towers, batch), expected)
