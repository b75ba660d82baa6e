"""What is drawn: its distribution, what it depends on, where it goes."""

import numpy as np
import pytest
import torch
from electra_bench import (
    FIRST,
    PAD,
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
from scipy.stats import chisquare
from torch import Tensor

from metaseq_lm.core.batch import Layout
from metaseq_lm.forward.passes import ForwardContext, Noise, use_context
from metaseq_lm.methods.electra.model import FixedNoise, replaced, sample

DRAWS = 100_000
LOGITS = torch.tensor([2.0, -1.0, 0.3, 0.0, 1.1, -3.0, 0.7])


def draw_many(logits: Tensor, counted: bool, **options: object) -> Tensor:
    """Draw DRAWS tokens from `logits` (V,): 1,000 rows of 100 positions."""
    torch.manual_seed(5)
    table = logits.expand(1000, DRAWS // 1000, -1)
    if not counted:
        return sample(table, **options).flatten()  # type: ignore[arg-type]
    with use_context(ForwardContext(Noise(11, np.arange(1000)))):
        return sample(table, **options).flatten()  # type: ignore[arg-type]


@pytest.mark.parametrize("counted", [True, False], ids=["counter", "torch"])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_samples_follow_the_softmax(counted: bool, temperature: float) -> None:
    drawn = draw_many(LOGITS, counted, temperature=temperature)
    seen = torch.bincount(drawn, minlength=len(LOGITS)).numpy()
    wanted = (LOGITS.double() / temperature).softmax(-1).numpy() * DRAWS
    assert chisquare(seen, wanted).pvalue > 1e-3


@pytest.mark.parametrize("counted", [True, False], ids=["counter", "torch"])
def test_the_original_is_never_drawn_if_disallowed(counted: bool) -> None:
    """Even if it has nearly all the mass; the others keep their proportions."""
    logits = LOGITS.clone()
    logits[4] = 12.0
    never = torch.full((1000, DRAWS // 1000), 4)
    drawn = draw_many(logits, counted, never=never)
    seen = torch.bincount(drawn, minlength=len(logits)).numpy()
    assert seen[4] == 0
    others = torch.arange(len(logits)) != 4
    wanted = logits[others].double().softmax(-1).numpy() * DRAWS
    assert chisquare(seen[others.numpy()], wanted).pvalue > 1e-3


def test_a_position_without_target_may_draw_anything() -> None:
    never = torch.full((1, 3), -1)
    assert sample(torch.zeros(1, 3, 5), never=never).shape == (1, 3)


def test_low_precision_is_drawn_in_fp32() -> None:
    """The same draws as from those numbers in fp32: bfloat16 would shift every share."""
    torch.manual_seed(0)
    low = (3 * torch.randn(100, 20, 50)).bfloat16()
    never = torch.randint(50, (100, 20))
    for options in ({}, {"temperature": 1.7}, {"never": never}):
        with noise(2, range(100)):
            found = sample(low, **options)
        with noise(2, range(100)):
            wanted = sample(low.float(), **options)
        assert torch.equal(found, wanted)


def test_samples_depend_on_root_and_row_only() -> None:
    """Root stands for seed and update. Rows may be cut and reordered; two roots or rows differ."""
    torch.manual_seed(1)
    logits = torch.randn(6, 5, 50)
    with noise(7, range(6)):
        whole = sample(logits)
    for rows in ([0, 1, 2], [5, 3], [4]):
        with noise(7, rows):
            assert torch.equal(sample(logits[rows]), whole[rows])
    with noise(8, range(6)):
        assert not torch.equal(sample(logits), whole)
    with noise(7, [3] * 6):
        alike = sample(logits[:1].expand(6, -1, -1))
    assert (alike == alike[0]).all()
    with noise(7, range(6)):
        assert not (sample(logits[:1].expand(6, -1, -1)) == alike[0]).all()


def test_a_wider_batch_draws_the_same() -> None:
    """More slots in the batch (another row has more) do not move the draws of a row's own."""
    torch.manual_seed(1)
    logits = torch.randn(2, 9, 50)
    with noise(7, [0, 1]):
        wide = sample(logits)
    with noise(7, [0, 1]):
        assert torch.equal(sample(logits[:, :4]), wide[:, :4])


@pytest.mark.parametrize("kind", ["mlm", "two_tower", "unigram", "uniform"])
def test_fakes_stand_at_all_chosen_positions_and_nowhere_else(kind: str) -> None:
    """Those that the generator saw unmasked are replaced too, from the original row."""
    model, how = build(noise=kind), criterion("electra_rtd", disallow_correct=True)
    batch = make_batch()
    seen = Seen(model, how, batch)
    changed = seen.tokens != batch.tokens
    for row in range(3):
        assert changed[row].nonzero().flatten().tolist() == sorted(chosen_positions(batch, row))
    assert not changed[:, 0].any() and not (changed & ~batch.candidates).any()


def test_a_slot_that_does_not_count_changes_nothing() -> None:
    """Uncounted slots point at position 0; there may even be a row without any chosen one."""
    batch = make_batch(chosen=[[1, 3, 4], [], [2]])
    tokens, chosen = replaced(batch, torch.full((3, 3), VOCABULARY - 1))
    assert chosen.nonzero().tolist() == [[0, 1], [0, 3], [0, 4], [2, 2]]
    assert torch.equal(tokens[~chosen], batch.tokens[~chosen])
    assert (tokens[chosen] == VOCABULARY - 1).all()


def test_uniform_noise_is_over_the_whole_vocabulary() -> None:
    noise_model = build(noise="uniform").generator
    assert isinstance(noise_model, FixedNoise)
    torch.testing.assert_close(
        noise_model.log_probs.exp(), torch.full((VOCABULARY,), 1 / VOCABULARY).double()
    )
    seen = Seen(build(noise="uniform"), criterion("electra_rtd"), make_batch())
    assert seen.logs["generator"].item() == pytest.approx(np.log(VOCABULARY))


def test_unigram_noise_has_the_frequencies_of_words_only() -> None:
    noise_model = build(noise="unigram").generator
    assert isinstance(noise_model, FixedNoise)
    found = noise_model.log_probs.exp()
    wanted = torch.arange(1.0, VOCABULARY - FIRST + 1).double()
    torch.testing.assert_close(found[FIRST:], wanted / wanted.sum(), rtol=1e-6, atol=0)
    assert (found[:FIRST] == 0).all() and torch.isfinite(noise_model.log_probs).all()


@pytest.mark.parametrize("kind", ["unigram", "uniform"])
def test_fixed_noise_is_not_trained(kind: str) -> None:
    seen = Seen(model := build(noise=kind), criterion("electra_rtd"), make_batch())
    only = 50 * seen.logs["discriminator"]
    assert seen.loss.item() == pytest.approx(only.item())
    assert not list(model.generator.parameters())


def test_temperature_leaves_the_generators_loss_alone() -> None:
    model, batch = build(), make_batch()
    cold, hot = (Seen(model, criterion("electra_rtd", temperature=t), batch) for t in (0.01, 100.0))
    assert cold.logs["generator"] == hot.logs["generator"]
    assert not torch.equal(cold.tokens, hot.tokens)
    with torch.no_grad():
        slots, _ = model.masked_noise(batch)
    for row in range(3):
        for slot, place in enumerate(chosen_positions(batch, row)):
            assert cold.tokens[row, place] == slots[row, slot].argmax()


def one_hot_on_the_original(kind: str) -> tuple[Seen, dict]:
    """Return a pass with noise that always draws the original token."""
    batch = make_batch()
    how = criterion("electric_nce" if kind == "two_tower" else "electra_rtd")
    model = build(noise=kind)
    if kind == "two_tower":
        wanted = torch.nn.functional.one_hot(batch.tokens, VOCABULARY) * 50.0
        model.cloze_noise = lambda batch: wanted.double()  # type: ignore[method-assign]
    else:
        right = batch.targets.clamp(min=0)
        wanted = torch.nn.functional.one_hot(right, VOCABULARY) * 50.0
        model.masked_noise = lambda b: (wanted.double(), None)  # type: ignore[method-assign]
    return Seen(model, how, batch), batch


def test_electra_calls_a_lucky_sample_real() -> None:
    """All labels are 0, however the positions were chosen."""
    seen, batch = one_hot_on_the_original("mlm")
    assert torch.equal(seen.tokens, batch.tokens)
    assert seen.logs["fakes"] == 0 and seen.logs["sample_accuracy"] == 1


def test_electric_calls_every_chosen_position_fake() -> None:
    """Even if the sample is the original: the labels are the chosen positions."""
    seen, batch = one_hot_on_the_original("two_tower")
    assert torch.equal(seen.tokens, batch.tokens)
    share = batch.sizes["targets"] / batch.sizes["tokens"]
    assert seen.logs["fakes"].item() == pytest.approx(share)
    # The logit of a token is E + log q + log(m / (1 - m)), and log q is 0 here.
    model = build(noise="two_tower")
    energy = model.heads["rtd"](model.hidden(batch.tokens, batch))
    total = 0.0
    for row in range(3):
        for place in range(1, length_of(batch, row) - 1):
            logit = energy[row, place].item() + np.log(RATE / (1 - RATE))
            fake = place in chosen_positions(batch, row)
            total += np.log1p(np.exp(-logit if fake else logit))
    found = seen.logs["discriminator"].item() * batch.sizes["candidates"]
    assert found == pytest.approx(total, rel=1e-9)


def test_a_sampled_special_token_hides_nothing() -> None:
    """A sampled [PAD] is a fake token like others, and no padding to the discriminator."""
    model, batch = build(noise="uniform"), make_batch()
    sampled = batch.tokens.clone()
    sampled[0, 3] = PAD
    shown = model.hidden(sampled, batch)
    hidden = model.hidden(sampled, batch.replace(layout=Layout(sampled == PAD)))
    assert not torch.allclose(shown[0, 1], hidden[0, 1])


def test_chosen_twice_gets_the_floor_of_the_mean() -> None:
    """The authors' code, for legacy_duplicates."""
    batch = make_batch(chosen=[[3, 3, 1], [2], [1]])
    tokens, chosen = replaced(batch, torch.tensor([[5, 8, 9], [6, 0, 0], [7, 0, 0]]))
    assert tokens[0, 3] == 6 and tokens[0, 1] == 9 and tokens[1, 2] == 6 and tokens[2, 1] == 7
    assert chosen.sum() == 4
