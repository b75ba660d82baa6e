"""What each position of the two causal towers may see."""

import pytest
import torch
from electra_bench import CLS, FIRST, PAD, SEP, VOCABULARY, build, make_batch
from torch import Tensor

from metaseq_lm.core.batch import Layout, TokenBatch
from metaseq_lm.methods.electra.model import TwoTowers


@pytest.fixture(params=[(False, "embeddings"), (True, "embeddings"), (True, "none")], ids=str)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    before, sharing = request.param
    return build(noise="two_tower", encoder_normalize_before=before, sharing=sharing, segments=2)


@torch.no_grad()
def logits(model: torch.nn.Module, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
    return model.cloze_noise(TokenBatch(tokens=tokens, layout=Layout(padding)))


def test_a_token_moves_all_logits_but_its_own(model: torch.nn.Module) -> None:
    """Its neighbours' above all; the first and the last position are no exception."""
    tokens = make_batch((9,), [[1]]).tokens
    whole = logits(model, tokens)
    for place in range(9):
        other = tokens.clone()
        other[0, place] = FIRST + (tokens[0, place] + 1) % (VOCABULARY - FIRST)
        moved = (logits(model, other) - whole).abs().amax(-1)[0]
        assert moved[place] == 0, place
        assert (moved[torch.arange(9) != place] > 1e-8).all(), place


def test_no_gradient_from_the_own_token(model: torch.nn.Module) -> None:
    """The same by derivatives with respect to the embedded input."""
    tower = model.generator
    assert isinstance(tower, TwoTowers)
    tokens = make_batch((7,), [[1]]).tokens
    table = tower.embeddings or model.encoder.embeddings
    inputs: list[Tensor] = []

    def keep(module: torch.nn.Module, given: tuple, out: Tensor) -> Tensor:
        inputs.append(out.detach().requires_grad_())
        return inputs[-1]

    handle = table.register_forward_hook(keep)
    out = model.cloze_noise(TokenBatch(tokens=tokens))
    handle.remove()
    for place in range(7):
        (grad,) = torch.autograd.grad(out[0, place].square().sum(), inputs[0], retain_graph=True)
        reached = grad[0].abs().sum(-1) > 0
        assert reached.tolist() == [other != place for other in range(7)]


@pytest.mark.parametrize("extra", [1, 4])
def test_padding_changes_no_candidate(model: torch.nn.Module, extra: int) -> None:
    batch = make_batch((9, 6), [[1], [2]], width=9 + extra)
    alone = [logits(model, batch.tokens[i : i + 1, :n]) for i, n in ((0, 9), (1, 6))]
    found = logits(model, batch.tokens, batch.padding)
    for row, n in ((0, 9), (1, 6)):
        torch.testing.assert_close(found[row, : n - 1], alone[row][0, : n - 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("extra", [1, 4])
def test_padding_changes_nothing_at_the_end(model: torch.nn.Module, extra: int) -> None:
    """[SEP] is the last token of a row whether or not padding follows."""
    batch = make_batch((9, 6), [[1], [2]], width=9 + extra)
    alone = [logits(model, batch.tokens[i : i + 1, :n]) for i, n in ((0, 9), (1, 6))]
    found = logits(model, batch.tokens, batch.padding)
    for row, n in ((0, 9), (1, 6)):
        torch.testing.assert_close(found[row, n - 1], alone[row][0, n - 1], rtol=0, atol=1e-12)


def test_two_towers_ignore_tokens_in_padding(model: torch.nn.Module) -> None:
    batch = make_batch((9, 6), [[1], [2]])
    tokens, padding = batch.tokens, batch.padding
    other = torch.where(padding, FIRST + 2, tokens)
    found, wanted = logits(model, other, padding), logits(model, tokens, padding)
    torch.testing.assert_close(found[~padding], wanted[~padding], rtol=0, atol=1e-12)


def test_a_row_that_is_one_token_is_finite(model: torch.nn.Module) -> None:
    tokens = torch.tensor([[CLS, SEP, PAD, PAD], [CLS, 5, 6, SEP]])
    assert torch.isfinite(logits(model, tokens, tokens == PAD)).all()


def test_the_row_is_read_unmasked(model: torch.nn.Module) -> None:
    """What the masking did to the row is nothing to the towers."""
    batch = make_batch()
    with torch.no_grad():
        wanted = model.cloze_noise(batch)
        masked = model.cloze_noise(batch.replace(masked=torch.full_like(batch.masked, 1)))
    assert torch.equal(wanted, masked)


def test_the_two_towers_have_weights_of_their_own() -> None:
    model = build(noise="two_tower")
    left, right = dict(model.generator.left.named_parameters()), model.generator.right
    assert left.keys() == dict(right.named_parameters()).keys()
    assert not {id(p) for p in left.values()} & {id(p) for p in right.parameters()}
    # Each has a projection of its own from the shared embeddings.
    assert model.generator.embeddings is None
    assert model.generator.left.project is not None and right.project is not None
