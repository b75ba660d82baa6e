"""Modules on views: tagging and parsing scores by loops, classes of trees, averages,
dropout rates.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from metaseq_lm.models.layers import AveragedWeights, Dropout, dropout_at
from metaseq_lm.models.words.word_model import (
    IMPOSSIBLE,
    PRIMARY,
    ParsingModule,
    TaggingModule,
    Views,
    ViewsEncoder,
    WordModel,
    classes_of,
    heads_of,
    shift_positions,
)

ROWS, LENGTH, RELATIONS, HIDDEN, UNITS = 2, 5, 3, 6, 4


class Encoder(ViewsEncoder):
    """Only widths: views are made by hand."""

    width, full_width = 3, 4


def made(seed: int = 1) -> tuple[Views, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    widths = (3, 3, 4)
    views = Views(*(torch.randn(ROWS, LENGTH, w, generator=draw).double() for w in widths))
    scored = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    scored[0, 1:4] = scored[1, 1:3] = True
    return views, scored


@pytest.mark.parametrize("linear", [False, True])
def test_a_tagging_module_adds_two_maps(linear: bool) -> None:
    module = TaggingModule(Encoder(), 5, HIDDEN, linear=linear).double()
    views, scored = made()
    one, two = module.hidden.maps
    assert (one.in_features, two.in_features) == (6, 4)
    hidden = one(torch.cat([views.ahead, views.back], -1)) + two(views.merged)
    hidden = hidden if linear else hidden.clamp(min=0)
    wanted = hidden @ module.out.weight.T + module.out.bias
    assert (module(views, scored) - wanted).abs().max() < 1e-14
    assert (hidden < 0).any() == linear


@pytest.mark.parametrize("root", ["linear", "vector"])
def test_parsing_scores_by_a_loop(root: str) -> None:
    """One number for each dependent, candidate and relation, -100 where it cannot be."""
    torch.manual_seed(2)
    options = (RELATIONS, Dropout(0.0), HIDDEN, UNITS, root, ("back", "ahead"))
    module = ParsingModule(Encoder(), *options).double()
    assert module.scale.item() == pytest.approx(UNITS**0.25)
    with torch.no_grad():
        module.scale.fill_(1.7)
    views, scored = made()
    scores = module(views, scored)
    assert scores.shape == (ROWS, LENGTH, (1 + LENGTH) * RELATIONS)
    candidates = module.candidate.maps[0](views.back).relu()
    dependents = module.unit(module.dependent.maps[0](views.ahead).relu()) / 1.7
    for row in range(ROWS):
        for word in range(LENGTH):
            unit = dependents[row, word]
            for head in range(-1, LENGTH):
                for relation in range(RELATIONS):
                    weight = (module.by_relation[:, relation] + module.shared) / 1.7
                    if head >= 0:
                        wanted = candidates[row, head] @ weight @ unit
                        allowed = bool(scored[row, head])
                    elif root == "vector":
                        wanted, allowed = module.root @ weight @ unit, relation == 0
                    else:
                        wanted, allowed = module.root_scores(unit)[relation], relation == 0
                    number = (1 + head) * RELATIONS + relation
                    wanted = wanted + (0.0 if allowed else IMPOSSIBLE)
                    assert abs(scores[row, word, number] - wanted) < 1e-12


@given(st.integers(1, 6), st.integers(0, 9), st.integers(0, 5))
def test_classes_of_trees_go_there_and_back(relations: int, head: int, relation: int) -> None:
    relation = min(relation, relations - 1)
    classes = classes_of(torch.tensor([head]), torch.tensor([relation]), relations)
    # Position 0 is that of <start>, which is nobody's head: its classes stay unused.
    assert classes.item() == (relation if head == 0 else (1 + head) * relations + relation)
    assert [t.item() for t in heads_of(classes, relations)] == [head, relation]


def test_next_to() -> None:
    x = torch.tensor([[1, 2, 3]])
    assert shift_positions(x, 1).tolist() == [[2, 3, 0]] and shift_positions(x, -1).tolist() == [
        [0, 1, 2]
    ]


def test_averages_are_the_closed_form() -> None:
    """After n moves: d^n w_0 + (1 - d) sum d^(n-1-i) w_i, and the start does not weigh less."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()
    average, decay = AveragedWeights(net, 0.9), 0.9
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    taken = []
    for _ in range(7):
        taken.append({name: p.detach().clone() for name, p in net.named_parameters()})
        average.update_parameters(net)
        with torch.no_grad():
            for p in net.parameters():
                p.add_(torch.randn_like(p))
    for name, found in average.net.named_parameters():
        wanted = decay**7 * start[name]
        wanted = wanted + 0.1 * sum(decay ** (6 - i) * w[name] for i, w in enumerate(taken))
        assert (found - wanted).abs().max() < 1e-14
        assert not found.requires_grad


def test_a_decay_of_its_own_moves_an_average() -> None:
    net = nn.Linear(1, 1, bias=False)
    average = AveragedWeights(net, 0.9)
    with torch.no_grad():
        before = net.weight.item()
        net.weight.add_(1.0)
    average.update_parameters(net, decay=1.0)
    assert average.net.weight.item() == before
    average.update_parameters(net, decay=0.25)
    assert average.net.weight.item() == pytest.approx(before + 0.75)


def test_the_average_is_a_part_of_the_model() -> None:
    encoder = Encoder()
    encoder.weight = nn.Parameter(torch.tensor(1.0))
    heads = {"a": nn.ModuleDict({PRIMARY: TaggingModule(encoder, 2, 2)})}
    model = WordModel(encoder, heads, 0.5)
    assert "average.net.encoder.weight" in model.state_dict()
    assert WordModel(encoder, heads).averaged.encoder is encoder


def test_dropout_at_sets_every_rate_and_puts_it_back() -> None:
    net = nn.Sequential(Dropout(0.5), nn.Sequential(Dropout(0.1)))
    x = torch.ones(1000)
    with dropout_at(net, 0.0):
        assert torch.equal(net(x), x)
    with dropout_at(net, 0.2):
        assert (net[0](x) == 0).float().mean() == pytest.approx(0.2, abs=0.06)
    with pytest.raises(KeyError), dropout_at(net, 0.3):
        raise KeyError
    with dropout_at(net, None):
        assert [net[0].p, net[1][0].p] == [0.5, 0.1]
