"""Strategic masking: which tokens are drawn, what becomes of them, and who learns
from which loss.
"""

import math

import numpy as np
import pytest
import torch
from electra_bench import FIRST, MASK, Rows, Seen, build, criterion, make_batch, noise
from scipy import stats
from torch import Tensor

from metaseq_lm.core.errors import UsageError
from metaseq_lm.methods.electra.model import Electra, check_noise
from metaseq_lm.methods.electra.strategic import redrawn

ROWS = 20_000
WEIGHTS = torch.tensor([1.0, 2.0, 5.0, 0.5], dtype=torch.double)


def strategic(**options: object) -> Electra:
    return build(("lm",), noise="difficulty", **options)


def drawn(chosen: list[int]) -> tuple[Rows, Tensor, Tensor, Tensor]:
    """Draw from ROWS rows [CLS] 4 words [SEP] padding, whose words have WEIGHTS; padding weighs
    most.
    """
    batch = make_batch((6,) * ROWS, [chosen] * ROWS, width=8)
    log_weights = torch.full((ROWS, 8), 3.0, dtype=torch.double)
    log_weights[:, 1:5] = WEIGHTS.log()
    with noise(rows=np.arange(ROWS)):
        return (batch, *redrawn(batch, log_weights))


def test_one_token_is_drawn_in_proportion_to_its_weight() -> None:
    _, _, positions, targets = drawn([3])
    assert (targets >= 0).all()
    counts = np.bincount(positions[:, 0].numpy() - 1, minlength=4)
    assert stats.chisquare(counts, (WEIGHTS / WEIGHTS.sum() * ROWS).numpy()).pvalue > 1e-3


def test_pairs_are_successive_draws_by_weight() -> None:
    """P({i, j}) = w_i w_j / W (1 / (W - w_i) + 1 / (W - w_j))."""
    _, _, positions, _ = drawn([1, 3])
    i, j = np.triu_indices(4, 1)
    total, (a, b) = WEIGHTS.sum().item(), (WEIGHTS[i].numpy(), WEIGHTS[j].numpy())
    expected = a * b / total * (1 / (total - a) + 1 / (total - b))
    assert abs(expected.sum() - 1) < 1e-12
    pairs = positions.sort(1).values.numpy() - 1
    counts = np.zeros((4, 4))
    np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
    assert counts[i, j].sum() == ROWS
    assert stats.chisquare(counts[i, j], expected * ROWS).pvalue > 1e-3


def test_what_becomes_of_a_token_moves_with_the_draw() -> None:
    """Of two chosen tokens one stays visible, one is [MASK]; nothing else changes."""
    batch, masked, positions, targets = drawn([1, 3])
    assert (batch.tokens.gather(1, positions) == targets).all()
    assert (masked.gather(1, positions[:, :1]) == targets[:, :1]).all()
    assert (masked.gather(1, positions[:, 1:]) == MASK).all()
    assert ((masked != batch.tokens).sum(1) == 1).all()


def test_rows_keep_their_number_of_tokens_and_a_draw_belongs_to_a_row() -> None:
    lengths, chosen = (9, 7, 5, 3), [[1, 3, 4], [5, 2], [3], []]
    batch = make_batch(lengths, chosen)
    log_weights = torch.randn(batch.tokens.shape, dtype=torch.double)
    with noise(rows=np.arange(4)):
        masked, positions, targets = redrawn(batch, log_weights)
    assert (targets >= 0).sum(1).tolist() == [3, 2, 1, 0]
    assert (targets[targets >= 0] >= FIRST).all()
    assert (masked[3] == batch.tokens[3]).all()
    # The rest of the batch is not there: the width alone is that of the whole.
    alone = make_batch((7,), [[5, 2]], width=9)
    for name in ("tokens", "masked", "candidates"):
        setattr(alone, name, getattr(batch, name)[1:2])
    alone.positions, alone.targets = batch.positions[1:2], batch.targets[1:2]
    with noise(rows=[1]):
        parts = redrawn(alone, log_weights[1:2])
    for part, whole in zip(parts, (masked, positions, targets)):
        assert (part == whole[1:2]).all()


@pytest.mark.parametrize("training", [True, False])
def test_losses(training: bool) -> None:
    """Both losses written out at the chosen positions; in evaluation they are the batch's."""
    model, batch = strategic().train(training), make_batch()
    seen = Seen(model, criterion("strategic_mlm", difficulty_weight=0.3), batch)
    with torch.no_grad():
        guesses = model.difficulty(batch)
        with noise(rows=batch.rows):
            weights = torch.nn.functional.logsigmoid(guesses)
            again = redrawn(batch, weights)
        masked, positions, targets = (
            again if training else (batch.masked, batch.positions, batch.targets)
        )
        hidden = model.hidden(masked, batch)
        log_p = model.heads["lm"](hidden, model.token_table()).log_softmax(-1)
    assert (seen.tokens == masked).all()
    assert not training or not torch.equal(positions, batch.positions)
    mlm, difficulty, missed = [], [], []
    for row, slot in (targets >= 0).nonzero().tolist():
        t = int(positions[row, slot])
        p = math.exp(log_p[row, t, targets[row, slot]].item())
        s = 1 / (1 + math.exp(-guesses[row, t].item()))
        mlm.append(-math.log(p))
        missed.append(1 - p)
        difficulty.append(-(1 - p) * math.log(s) - p * math.log(1 - s))
    logs = {name: value.item() for name, value in seen.logs.items()}
    for name, parts in (("mlm", mlm), ("difficulty", difficulty), ("missed", missed)):
        assert logs[name] == pytest.approx(sum(parts) / 5, rel=1e-9), name
    assert logs["loss"] == pytest.approx(logs["mlm"] + 0.3 * logs["difficulty"], rel=1e-10)


def test_sharpness_zero_ignores_the_guesses() -> None:
    model, batch = strategic(), make_batch()
    shown = []
    for shift in (0.0, 3.0):
        with torch.no_grad():
            model.generator.head.dense.weight.add_(shift * torch.randn(4, 4, dtype=torch.double))
        shown.append(
            [
                Seen(model, criterion("strategic_mlm", sharpness=s), batch).tokens
                for s in (0.0, 50.0)
            ]
        )
    (even, sharp), (even_again, sharp_again) = shown
    assert torch.equal(even, even_again) and not torch.equal(sharp, sharp_again)


@pytest.mark.parametrize("sharing", ["embeddings", "none"])
def test_the_masked_lm_does_not_train_the_guesses_nor_the_other_way_round(sharing: str) -> None:
    model = strategic(sharing=sharing)
    terms = Seen(model, criterion("strategic_mlm"), make_batch()).terms
    names, leaves = zip(*model.named_parameters())
    reached = {}
    for term in ("mlm", "difficulty"):
        grads = torch.autograd.grad(terms[term].sum, leaves, allow_unused=True, retain_graph=True)
        reached[term] = {n for n, g in zip(names, grads) if g is not None and g.abs().max() > 0}
    small = {n for n in names if n.startswith("generator.")}
    tables = {n for n in names if n.startswith("encoder.embeddings.")}
    assert reached["mlm"] == set(names) - small
    assert reached["difficulty"] == small | (tables if sharing == "embeddings" else set())


@pytest.mark.parametrize(
    ("name", "kind"), [("electra_rtd", "difficulty"), ("strategic_mlm", "mlm")]
)
def test_a_net_of_the_other_kind_is_refused(name: str, kind: str) -> None:
    with pytest.raises(UsageError, match=f"{name} cannot.*model.noise={kind};"):
        check_noise(name, criterion(name).noises, kind)
