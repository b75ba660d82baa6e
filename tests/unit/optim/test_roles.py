"""Roles of parameters: what modules declare, what torch's modules are, and who keeps them."""

from typing import Any, ClassVar

import pytest
import torch
from optimizers import make_optimizer
from torch import nn

from metaseq_lm.config.groups import Rule
from metaseq_lm.config.optimizers import OptimizerConfig
from metaseq_lm.core.config import section
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import OPTIMIZERS, Entry
from metaseq_lm.core.roles import ParameterRole, Role, role_of
from metaseq_lm.distributed import shards
from metaseq_lm.methods.electra.model import Electra
from metaseq_lm.methods.span_corruption.model import EncoderDecoder
from metaseq_lm.models.bilstm import BiLSTMLM
from metaseq_lm.models.layers import Heads
from metaseq_lm.models.transformer.encoder import Stack, TransformerLM
from metaseq_lm.optim.roles import assign_roles, roles_of

SIZES = {
    "encoder_layers": 2,
    "encoder_embed_dim": 8,
    "encoder_ffn_embed_dim": 12,
    "encoder_attention_heads": 2,
    "token_embed_dim": 4,
}


def names_by_role(model: nn.Module) -> dict[Role | None, set[str]]:
    names: dict[Role | None, set[str]] = {}
    for name, role in roles_of(model).items():
        names.setdefault(role.role, set()).add(name)
    return names


def options_of(model: str, **more: Any) -> Any:
    return section("model", _name=model, **(SIZES | more))


@pytest.mark.parametrize("tied", [True, False])
def test_roles_of_a_language_model(tied: bool) -> None:
    model = TransformerLM(options_of("transformer", segments=2), 20, tied=tied)
    names = names_by_role(model)
    embeddings = {f"encoder.embeddings.{n}.weight" for n in ("tokens", "positions", "segments")}
    assert names[Role.EMBEDDING] == {*embeddings, "encoder.stack.project.weight"}
    parts = ("attention.in_proj", "attention.out_proj", "fc1", "fc2")
    hidden = {f"encoder.stack.layers.{i}.{part}.weight" for i in range(2) for part in parts}
    assert names[Role.HIDDEN] == hidden
    assert names[Role.HEAD_HIDDEN] == {"heads.lm.dense.weight"}
    assert names.get(Role.HEAD, set()) == (set() if tied else {"heads.lm.weight"})
    assert all(name.endswith("norm.weight") for name in names[Role.GAIN])
    assert all(name.endswith("bias") for name in names[Role.BIAS])
    assert None not in names and Role.KERNEL not in names
    assert sum(map(len, names.values())) == len(list(model.parameters()))


def test_pieces_and_levels() -> None:
    """Queries, keys and values are three matrices, a gate has two; layers know their height."""
    roles = roles_of(TransformerLM(options_of("modern"), 20))
    layer = "encoder.stack.layers.{}.{}.weight"
    assert [roles[layer.format(i, "attention.in_proj")] for i in range(2)] == [
        ParameterRole(Role.HIDDEN, 3, 3),
        ParameterRole(Role.HIDDEN, 3, 2),
    ]
    assert roles[layer.format(0, "fc1")].pieces == 2
    assert roles[layer.format(0, "fc2")].pieces == 1
    assert roles["encoder.stack.norm.weight"] == ParameterRole(Role.GAIN, 1, 2)
    assert roles["encoder.embeddings.tokens.weight"].level == 4
    assert roles["heads.lm.dense.weight"].level == 0
    without_gate = roles_of(TransformerLM(options_of("modern", gate="none"), 20))
    assert without_gate[layer.format(0, "fc1")].pieces == 1


def test_roles_of_decoders_and_towers() -> None:
    """All stacks have hidden matrices; only an encoder below heads has levels."""
    decoder = roles_of(EncoderDecoder(options_of("encoder_decoder"), 20, 0, ("lm",)))
    cross = "decoder.layers.0.cross_attention"
    assert decoder[f"{cross}.kv_proj.weight"] == ParameterRole(Role.HIDDEN, 2, 0)
    assert decoder[f"{cross}.q_proj.weight"] == ParameterRole(Role.HIDDEN, 1, 0)
    assert decoder["decoder.project.weight"].role is Role.EMBEDDING
    assert decoder["encoder.stack.layers.1.fc1.weight"] == ParameterRole(Role.HIDDEN, 1, 2)
    towers = Electra(options_of("electra", noise="two_tower"), 20)
    names = names_by_role(towers)
    for side in ("left", "right"):
        assert f"generator.{side}.layers.1.fc2.weight" in names[Role.HIDDEN]
        assert f"generator.{side}.project.weight" in names[Role.EMBEDDING]
    assert {"generator.head.dense.weight", "heads.rtd.dense.weight"} == names[Role.HEAD_HIDDEN]
    assert names[Role.HEAD] == {"heads.rtd.out.weight"}


def test_torchs_modules_have_roles() -> None:
    torchs = {
        "linear": nn.Linear(4, 4),
        "table": nn.Embedding(5, 4),
        "recurrent": nn.GRU(4, 4),
        "cell": nn.LSTMCell(4, 4),
        "filters": nn.Conv2d(4, 4, 3),
        "statistics": nn.BatchNorm2d(4),
        "norm": nn.LayerNorm(4),
        "attention": nn.MultiheadAttention(4, 2),
        "free": nn.ParameterList([torch.ones(2, 2), torch.ones(2)]),
    }
    roles = roles_of(nn.ModuleDict(torchs))
    kernels = ("recurrent.weight_ih_l0", "recurrent.weight_hh_l0", "cell.weight_hh")
    assert {roles[name].role for name in (*kernels, "filters.weight")} == {Role.KERNEL}
    assert roles["linear.weight"] == roles["attention.out_proj.weight"]
    assert roles["linear.weight"] == ParameterRole(Role.HIDDEN)
    assert roles["attention.in_proj_weight"] == ParameterRole(Role.HIDDEN, 3)
    assert roles["table.weight"].role is Role.EMBEDDING
    biases = ("linear.bias", "recurrent.bias_ih_l0", "filters.bias", "norm.bias")
    assert {roles[name].role for name in biases} == {Role.BIAS}
    assert roles["norm.weight"].role is roles["statistics.weight"].role is Role.GAIN
    assert roles["free.0"].role is None and roles["free.1"].role is Role.GAIN


def test_the_innermost_table_counts_and_in_it_the_longest_name() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    outer = nn.ModuleDict(
        {"a": inner, "b": nn.Linear(2, 2), "heads": Heads({"c": nn.Linear(2, 2)})}
    )
    outer.parameter_roles = {"": Role.KERNEL, "a.1": Role.HEAD, "a": Role.EMBEDDING}
    outer.parameter_levels = {"a": 3}
    inner.parameter_roles = {"0.weight": Role.HIDDEN}
    roles = roles_of(outer)
    assert roles["a.0.weight"] == ParameterRole(Role.HIDDEN, 1, 3)
    assert roles["a.1.weight"] == ParameterRole(Role.HEAD, 1, 3)
    assert roles["a.1.bias"] == ParameterRole(Role.BIAS, 1, 3)
    assert roles["b.weight"] == ParameterRole(Role.KERNEL)
    assert roles["heads.c.weight"].role is Role.HEAD


def test_layers_inside_heads_are_hidden() -> None:
    """As those of a predictor of joint embeddings."""
    heads = Heads({"predictor": Stack(options_of("modern"))})
    assert names_by_role(heads).keys() == {Role.HIDDEN, Role.EMBEDDING, Role.GAIN}


@pytest.mark.parametrize("order", [("table", "out"), ("out", "table")])
def test_a_tied_matrix_is_an_embedding(order: tuple[str, str]) -> None:
    modules: dict[str, Any] = {"table": nn.Embedding(3, 2), "out": nn.Linear(2, 3, bias=False)}
    modules["out"].weight = modules["table"].weight
    roles = roles_of(nn.ModuleDict({name: modules[name] for name in order}))
    assert roles == {f"{order[0]}.weight": ParameterRole(Role.EMBEDDING)}


def test_lstms_are_no_matrices_for_muon() -> None:
    config = section("model", _name="bilstm_lm", encoder_embed_dim=4, encoder_hidden_dim=6)
    names = names_by_role(BiLSTMLM(config, 20))
    assert names.keys() == {Role.KERNEL, Role.EMBEDDING, Role.HEAD, Role.BIAS}
    assert names[Role.HEAD] == {"heads.lm.weight"}


def test_a_part_of_a_shard_has_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    assign_roles(model)
    monkeypatch.setattr(shards, "is_dtensor", lambda _: True)
    monkeypatch.setattr(shards, "local_part", lambda tensor: tensor[:1])
    part = shards.local_parameter(model.weight)
    assert part.shape == (1, 2) and role_of("weight", part) == ParameterRole(Role.HIDDEN)


def test_plug_ins_go_by_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the trial of stand-ins before the first update."""
    seen = []

    def build(config: OptimizerConfig, parameters: Any) -> torch.optim.Optimizer:
        groups = config.groups(parameters, Rule(".*", {"lr": 0.5}, roles=(Role.HEAD,)))
        seen.append([len(group["params"]) for group in groups if group["lr"] == 0.5])
        return torch.optim.SGD(groups)

    monkeypatch.setitem(OPTIMIZERS.entries, "mine", Entry("mine", OptimizerConfig, "mine.b", build))
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "heads": Heads({"out": nn.Linear(2, 2)})})
    make_optimizer(model, {"_name": "mine"}, {"_name": "constant"})
    assert seen == [[1], [1]]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_rates_by_width_need_roles(optimizer: str) -> None:
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "free": nn.ParameterList([torch.ones(2, 2)])})
    options = {"_name": optimizer, "width_ratio": 2.0}
    with pytest.raises(UsageError, match=r"free\.0 \(2, 2\)"):
        make_optimizer(model, options, {"_name": "constant"})
    make_optimizer(model, {"_name": "adamw"}, {"_name": "constant"})


def test_a_table_with_a_wrong_key_is_refused() -> None:
    class Mistyped(nn.Module):
        parameter_roles: ClassVar = {"outputs": Role.HEAD}

        def __init__(self) -> None:
            super().__init__()
            self.output = nn.Linear(2, 3)

    with pytest.raises(UsageError, match="parameter_roles has 'outputs'.*'output'"):
        roles_of(Mistyped())
