"""Which loss reaches which weights, and every criterion's gradient against finite differences."""

import pytest
import torch
from electra_bench import PAD, Seen, build, criterion, make_batch
from torch import Tensor

from metaseq_lm.methods.electra.model import Electra

TABLES = "encoder.embeddings."


def reached(model: Electra, loss: Tensor) -> set[str]:
    """Return the names of the parameters with a gradient that is not zero."""
    names, leaves = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad))
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return {n for n, g in zip(names, grads) if g is not None and g.abs().max() > 0}


def split_of(model: Electra, **options: object) -> tuple[set[str], set[str]]:
    """Return what the generator's loss reaches, and what the discriminator's."""
    terms = Seen(model, criterion("electra_rtd", **options), make_batch()).terms
    return reached(model, terms["generator"].sum), reached(model, terms["discriminator"].sum)


@pytest.mark.parametrize("kind", ["mlm", "two_tower"])
@pytest.mark.parametrize("before", [True, False], ids=["pre", "post"])
def test_nothing_shared(kind: str, before: bool) -> None:
    model = build(noise=kind, sharing="none", encoder_normalize_before=before)
    generator, discriminator = split_of(model)
    every = {n for n, _ in model.named_parameters()}
    assert generator == {n for n in every if n.startswith("generator.")}
    assert discriminator == every - generator


@pytest.mark.parametrize("kind", ["mlm", "two_tower"])
@pytest.mark.parametrize("before", [True, False], ids=["pre", "post"])
def test_embeddings_shared(kind: str, before: bool) -> None:
    """Tables (token, position, segment) and their layer norm, and nothing else, get both."""
    model = build(noise=kind, encoder_normalize_before=before, segments=2)
    batch = make_batch()
    batch.segments = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens) // 5
    terms = Seen(model, criterion("electra_rtd"), batch).terms
    generator, discriminator = (
        reached(model, terms[n].sum) for n in ("generator", "discriminator")
    )
    tables = {n for n, _ in model.named_parameters() if n.startswith(TABLES)}
    kinds = {"tokens.weight", "positions.weight", "segments.weight"}
    kinds |= set() if before else {"norm.weight", "norm.bias"}
    assert {n.removeprefix(TABLES) for n in tables} == kinds
    own = {n for n, _ in model.named_parameters() if n.startswith("generator.")}
    assert generator == own | tables and discriminator & generator == tables
    assert discriminator | generator == {n for n, _ in model.named_parameters()}


def test_all_shared() -> None:
    """One encoder; each loss trains it and its own head."""
    model = build(sharing="all", generator_size=1.0)
    generator, discriminator = split_of(model)
    assert {n.split(".")[1] for n in generator if n.startswith("generator.")} == {"head"}
    encoder = {n for n, _ in model.named_parameters() if n.startswith("encoder.")}
    assert encoder <= generator and encoder <= discriminator
    assert not {n for n in generator if n.startswith("heads.")}
    assert not {n for n in discriminator if n.startswith("generator.")}


def test_all_shared_is_one_encoder_run_twice() -> None:
    """The generator's states are the main encoder's of the masked row."""
    model, batch = build(sharing="all", generator_size=1.0), make_batch()
    _, states = model.masked_noise(batch)
    whole = model.hidden(batch.masked, batch)
    for row in range(3):
        torch.testing.assert_close(states[row], whole[row, batch.positions[row]])


@pytest.mark.parametrize("kind", ["mlm", "two_tower"])
def test_a_frozen_generator(kind: str) -> None:
    """No gradient, and no dropout: its noise depends on the row only."""
    model = build(noise=kind, sharing="none", freeze_generator=True, dropout=0.5).train()
    seen = Seen(model, criterion("electra_rtd"), make_batch())
    assert {n.split(".")[0] for n in reached(model, seen.loss)} == {"encoder", "heads"}
    losses = {
        Seen(model, criterion("electra_rtd"), make_batch(), root).logs["generator"].item()
        for root in range(3)
    }
    assert len(losses) == 1
    assert not model.generator.training and model.encoder.training


def test_a_trained_generator_samples_with_dropout() -> None:
    """As the authors' code does: the samples come from the very pass that is trained."""
    model = build(dropout=0.5).train()
    losses = {
        Seen(model, criterion("electra_rtd"), make_batch(), root).logs["generator"].item()
        for root in range(3)
    }
    assert len(losses) == 3


CASES = [
    ("electra_rtd", "mlm", {}),
    ("electra_rtd", "mlm", {"disc_positions": "masked", "contrast": 0.5}),
    ("electra_rtd", "two_tower", {"disc_positions": "random"}),
    ("electric_nce", "two_tower", {}),
    ("electric_nce", "unigram", {"exact_counts": True, "legacy_specials": True}),
    ("two_tower_cloze", "two_tower", {}),
    ("replace_mlm", "mlm", {}),
    ("all_tokens_mlm", "mlm", {}),
]


@pytest.mark.parametrize("name, kind, options", CASES)
def test_gradients_are_those_of_finite_differences(name: str, kind: str, options: dict) -> None:
    """Along random directions, with the samples of one draw.

    log q is a constant of Electric's loss, so there the noise model stands still. A sampled [PAD]
    sends no gradient to its embedding (as torch's padding_idx has it), so that row does too.
    """
    how = criterion(name, **options)
    model = build(how.heads, noise=kind, large=0.3, sharing="none")
    batch = make_batch()
    held = Seen(model, how, batch).tokens
    constant = name == "electric_nce"
    names, leaves = zip(
        *(
            (n, p)
            for n, p in model.named_parameters()
            if not (constant and n.startswith("generator."))
        )
    )
    loss = Seen(model, how, batch).loss
    grads = torch.autograd.grad(loss, leaves)
    torch.manual_seed(0)
    for _ in range(3):
        direction = [torch.randn_like(p) for p in leaves]
        for n, d in zip(names, direction):
            if n.endswith("embeddings.tokens.weight"):
                d[PAD] = 0
        wanted = sum((g * d).sum() for g, d in zip(grads, direction)).item()
        sides = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                for p, d in zip(leaves, direction):
                    p.add_(d, alpha=step)
                seen = Seen(model, how, batch)
                for p, d in zip(leaves, direction):
                    p.sub_(d, alpha=step)
            assert torch.equal(seen.tokens, held)
            sides.append(seen.loss.item())
        assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_log_q_is_a_constant_of_electrics_loss() -> None:
    """The contrastive loss does not train the noise model, only the shared tables (through E)."""
    model = build(noise="two_tower")
    terms = Seen(model, criterion("electric_nce"), make_batch()).terms
    assert not {n for n in reached(model, terms["discriminator"].sum) if n.startswith("generator.")}
    alone = build(noise="two_tower", sharing="none")
    terms = Seen(alone, criterion("electric_nce"), make_batch()).terms
    assert {n.split(".")[0] for n in reached(alone, terms["generator"].sum)} == {"generator"}
