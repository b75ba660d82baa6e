"""Parameter groups by rules over names, and optimizers that need whole matrices."""

import pytest
import torch
from torch import nn

from metaseq_lm.config.groups import Rule, parameter_groups
from metaseq_lm.config.optimizers import OptimizerConfig
from metaseq_lm.optim import _why_whole
from metaseq_lm.optim.optimizers import Adafactor, FusedAdamW


def net() -> nn.ModuleDict:
    """An embedding, two layers of a matrix and a norm, a head."""
    layers = [
        nn.ModuleDict({"map": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}),
        nn.ModuleDict({"map": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}),
    ]
    parts = {"embed": nn.Embedding(7, 4), "layers": nn.ModuleList(layers), "head": nn.Linear(4, 2)}
    return nn.ModuleDict(parts)


def names_by_group(model: nn.Module, groups: list[dict]) -> list[list[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in groups]


def test_later_rules_replace_options_of_earlier_ones() -> None:
    model = net()
    rules = [
        Rule(".*", {"lr": 0.1, "weight_decay": 0.5}),
        Rule(r"head\..*", {"lr": 0.3}),
        Rule(r".*\.bias", {"weight_decay": 0.0}),
    ]
    groups = parameter_groups(list(model.named_parameters()), rules)
    options = [(group["lr"], group["weight_decay"]) for group in groups]
    assert options == [(0.3, 0.5), (0.3, 0.0), (0.1, 0.5), (0.1, 0.0)]
    assert names_by_group(model, groups)[:2] == [["head.weight"], ["head.bias"]]


def test_a_pattern_must_match_the_whole_name() -> None:
    model = net()
    rules = [Rule(".*", {"lr": 0.1}), Rule("head", {"lr": 0.3})]
    assert len(parameter_groups(list(model.named_parameters()), rules)) == 1


def test_rules_choose_by_the_number_of_dimensions() -> None:
    """The split of Muon: matrices of hidden layers, not embeddings, heads, norms or biases."""
    model = net()
    config = OptimizerConfig(lr=0.1, weight_decay=0.2, decay_norms_and_biases=False)
    hidden = Rule(r"layers\.\d+\..*", {"lr": 0.02, "is_orthogonal": True}, dims=(2,))
    groups = config.groups(list(model.named_parameters()), hidden)
    split = [group for group in groups if group.get("is_orthogonal")]
    assert names_by_group(model, split) == [["layers.0.map.weight", "layers.1.map.weight"]]
    assert split[0]["weight_decay"] == 0.2 and split[0]["lr"] == 0.02


def test_groups_of_the_common_options() -> None:
    """Vectors and numbers are spared, and are a group of their own even without weight decay."""
    model = net()
    parameters = list(model.named_parameters())
    assert len(OptimizerConfig().groups(parameters)) == 1
    for decay in (0.1, 0.0):
        config = OptimizerConfig(weight_decay=decay, decay_norms_and_biases=False)
        matrices, vectors = config.groups(parameters)
        assert {p.dim() for p in matrices["params"]} == {2}
        assert {p.dim() for p in vectors["params"]} == {1}
        assert (matrices["weight_decay"], vectors["weight_decay"]) == (decay, 0.0)


class Orthogonal(FusedAdamW):
    """An optimizer that declares its need."""

    needs_whole_matrices = True


@pytest.mark.parametrize(
    ("kind", "needs"),
    [
        (torch.optim.AdamW, False),
        (FusedAdamW, False),
        (torch.optim.Muon, True),
        (Adafactor, True),
        (Orthogonal, True),
    ],
)
def test_who_needs_whole_matrices(kind: type[torch.optim.Optimizer], needs: bool) -> None:
    assert bool(_why_whole(kind([torch.nn.Parameter(torch.zeros(2, 2))], lr=0.1))) == needs
