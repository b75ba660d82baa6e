"""Parts of a Transformer that are chosen by name: initial weights, FLOPs, shapes, refusals."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metaseq_lm.cli import main
from metaseq_lm.config.transformer import EncoderConfig, ModernConfig, TransformerConfig
from metaseq_lm.core.batch import Layout
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import (
    ATTENTIONS,
    FEED_FORWARDS,
    NORMS,
    POSITIONS,
    Entry,
    NoOptions,
    Registry,
)
from metaseq_lm.models.layers import Linear
from metaseq_lm.models.transformer.attention import Positions, Visibility
from metaseq_lm.models.transformer.encoder import Layer, TransformerLM
from metaseq_lm.models.transformer.flops_rules import Sizes, has_ruled_parts
from metaseq_lm.models.transformer.parts import FeedForward
from metaseq_lm.runs.flops import Counter

ATTENTION_NAMES = ["softmax", "grouped_query", "differential"]
SIZES: dict[str, Any] = {
    "encoder_layers": 4,
    "encoder_embed_dim": 64,
    "encoder_ffn_embed_dim": 96,
    "encoder_attention_heads": 4,
    "global_every": 1,
}


def modern(**options: Any) -> ModernConfig:
    return ModernConfig(**(SIZES | options))


@pytest.mark.parametrize("name", ATTENTION_NAMES)
def test_an_attention_has_the_scale_of_its_depth_and_declares_its_flops(name: str) -> None:
    config = modern(attention=name)
    layers = TransformerLM(config, 50).encoder.stack.layers
    for part in layers[1].parts():
        for module_name, layer in part.named_modules():
            if isinstance(layer, nn.Linear):
                depth = 2 * config.encoder_layers if module_name in part.outputs else 1
                assert layer.weight.std().item() == pytest.approx(0.0176 / depth**0.5, rel=0.05)
    x = torch.randn(2, 12, 64)
    with Counter() as counter:
        layers[1](x, Visibility())
    blocks = Sizes.of(config, 50, 12).blocks()
    assert counter.total == 2 * blocks // config.encoder_layers


@pytest.mark.parametrize("name", ATTENTION_NAMES)
def test_an_attention_sees_what_it_may(name: str) -> None:
    """Also with the form of the kernel that second derivatives and dropout take."""
    torch.manual_seed(1)
    layer = Layer(modern(attention=name), 1).double()
    x, layout = torch.randn(2, 9, 64, dtype=torch.float64), Layout(reach="causal")
    seen = Visibility.of(layout, 9, x.device)
    changed = x.clone()
    changed[:, 5:] += 1.0
    before = layer(x, seen)
    assert torch.equal(before[:, :5], layer(changed, seen)[:, :5])
    assert not torch.allclose(before[:, 5:], layer(changed, seen)[:, 5:])
    layer.attention.dropout.p = 1e-12
    torch.testing.assert_close(layer(x, seen), before, rtol=1e-10, atol=1e-10)


def test_one_group_for_each_head_is_softmax_attention() -> None:
    layers = [
        Layer(modern(attention=name, part_options=options), 1).double()
        for name, options in (("softmax", {}), ("grouped_query", {"kv_heads": 4}))
    ]
    weights = layers[0].state_dict()
    joint = weights.pop("attention.in_proj.weight")
    weights |= {"attention.q_proj.weight": joint[:64], "attention.kv_proj.weight": joint[64:]}
    layers[1].load_state_dict(weights)
    x = torch.randn(2, 5, 64, dtype=torch.float64)
    torch.testing.assert_close(*(layer(x, Visibility()) for layer in layers))


def test_differential_attention_is_the_difference_of_two_maps() -> None:
    attention = Layer(modern(attention="differential"), 1).double().attention
    for vector in (attention.q1, attention.k1, attention.q2, attention.k2):
        nn.init.normal_(vector)
    x = torch.randn(2, 5, 64, dtype=torch.float64)
    q, k, v = attention.in_proj(x).chunk(3, -1)
    heads = []
    factor = (attention.q1 @ attention.k1).exp() - (attention.q2 @ attention.k2).exp()
    factor = factor + attention.start
    for head in range(2):
        maps = []
        for number in (head, 2 + head):
            at = slice(16 * number, 16 * number + 16)
            maps.append((q[..., at] @ k[..., at].mT / 4).softmax(-1))
        values = v[..., 32 * head : 32 * head + 32]
        heads.append(attention.norm((maps[0] - factor * maps[1]) @ values) * (1 - attention.start))
    expected = attention.out_proj(torch.cat(heads, -1))
    torch.testing.assert_close(attention(x, Visibility()), expected)


class Squared(FeedForward):
    """Squared ReLU (So et al. 2021)."""

    outputs = ("down",)

    def __init__(self, options: NoOptions, sizes: EncoderConfig, number: int) -> None:
        super().__init__(options, sizes, number)
        self.up = Linear(sizes.encoder_embed_dim, sizes.encoder_ffn_embed_dim, False)
        self.down = Linear(sizes.encoder_ffn_embed_dim, sizes.encoder_embed_dim, False)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.down(self.up(x).relu().square())
        return states


class NoPositions(Positions):
    """No positions."""


def unit_norm(options: NoOptions, sizes: EncoderConfig, width: int) -> nn.Module:
    return nn.LayerNorm(width, elementwise_affine=False)


def test_other_parts_take_the_place_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[tuple[Registry[Any], Any]] = [
        *((FEED_FORWARDS, Squared), (NORMS, unit_norm), (POSITIONS, NoPositions))
    ]
    for registry, value in kinds:
        entry = Entry("mine", NoOptions, "mine.mine", value)
        monkeypatch.setitem(registry.entries, "mine", entry)
    config = modern(feed_forward="mine", norm="mine", positions="mine")
    model = TransformerLM(config, 50)
    names = {name for name in model.state_dict() if ".layers.1." in name}
    stem = "encoder.stack.layers.1"
    parts = ("attention.in_proj", "attention.out_proj", "feed_forward.up", "feed_forward.down")
    assert names == {f"{stem}.{part}.weight" for part in parts}
    down = model.encoder.stack.layers[1].feed_forward.down
    assert down.weight.std().item() == pytest.approx(0.0176 / 8**0.5, rel=0.05)
    tokens = torch.tensor([[5, 6, 7]])
    states = model.encoder(tokens), model.encoder(tokens.flip(-1)).flip(-2)
    torch.testing.assert_close(*states)  # nothing tells positions apart


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"part_options": {"kv_heads": 2}}, ["kv_heads", "none"]),
        ({"attention": "grouped_query", "part_options": {"kv_head": 2}}, ["kv_head ", "kv_heads"]),
        (
            {"attention": "grouped_query", "part_options": {"kv_heads": 3}},
            ["kv_heads=3", "4 heads"],
        ),
        ({"attention": "grouped_query", "part_options": {"kv_heads": "x"}}, ["kv_heads"]),
        ({"attention": "grouped_query", "qk_norm": True}, ["grouped_query", "qk_norm"]),
        ({"attention": "differential", "encoder_attention_heads": 1}, ["1 heads"]),
    ],
)
def test_parts_that_do_not_fit_are_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        TransformerLM(modern(**options), 50)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("outputs", [(), ("down", "sideways"), ("activation",)])
def test_a_part_names_its_outputs(
    outputs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Entry("mine", NoOptions, "mine.mine", type("Own", (Squared,), {"outputs": outputs}))
    monkeypatch.setitem(FEED_FORWARDS.entries, "mine", entry)
    with pytest.raises(UsageError, match="outputs.*down, up"):
        Layer(modern(feed_forward="mine"))


def test_other_attentions_of_a_classic_encoder() -> None:
    config = TransformerConfig(attention="differential", encoder_layers=1)
    assert not has_ruled_parts(config) and has_ruled_parts(TransformerConfig())
    layer = TransformerLM(config, 50).encoder.stack.layers[0]
    limit = (6 / (layer.attention.in_proj.weight.shape[0] + 256)) ** 0.5
    assert layer.attention.in_proj.weight.abs().max().item() == pytest.approx(limit, rel=0.01)


def test_the_command_line_takes_parts_and_export_refuses_them(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--model", "modern_nano", "task.sample_break_mode=eos", "task.tokens_per_sample=34"]
    run = ["train", str(moons), *sizes, "--max-update", "1", "--save-dir", str(tmp_path / "run")]
    plug_in = ["--user-dir", str(Path(sys.modules["user_dir"].__file__ or "").parent)]
    parts = ["model.attention=grouped_query", "model.part_options={kv_heads: 1}"]
    assert main([*run, *plug_in, "model.attention=grouped_querry"]) == 2
    assert "grouped_query" in (said := capsys.readouterr().err) and said.count("\n") == 1
    assert main([*run, *plug_in, *parts]) == 0
    capsys.readouterr()
    target = ["--out", str(tmp_path / "out")]
    assert main(["export", str(tmp_path / "run"), *target, *plug_in]) == 1
    assert "model.attention=grouped_query" in (said := capsys.readouterr().err)
    assert said.count("\n") == 1 and not (tmp_path / "out").exists()
    assert set(ATTENTION_NAMES) <= set(ATTENTIONS.names())
