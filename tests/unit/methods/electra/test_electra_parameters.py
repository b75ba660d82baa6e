"""Parameter counts of the published sizes, part by part, and FLOPs by the paper's rules."""

import pytest
import torch
from torch import nn

from metaseq_lm.core.loading import load_config
from metaseq_lm.methods.electra.model import Electra
from metaseq_lm.methods.electra.options import ElectraConfig
from metaseq_lm.models.transformer import flops_rules
from metaseq_lm.models.transformer.encoder import TransformerLM
from metaseq_lm.models.transformer.flops_rules import Sizes
from metaseq_lm.training.parts import build_parts

SYMBOLS = 30522
# Computed from the shapes of the authors' code.
PARTS = {
    "embeddings": (3_972_864, 23_837_184, 31_782_912),
    "projection": (33_024, 0, 0),
    "layers": (9_477_120, 85_054_464, 302_309_376),
    "encoder": (13_483_008, 108_891_648, 334_092_288),
    "head": (66_049, 591_361, 1_050_625),
    "generator_width": (64, 256, 256),
    "generator_heads": (1, 4, 4),
    "generator_layers": (12, 12, 24),
    "generator_projection": (8_256, 196_864, 262_400),
    "generator_stack": (599_808, 9_477_120, 18_954_240),
    "generator_head": (39_098, 229_434, 295_738),
    "electra": (14_196_219, 119_386_427, 354_655_291),
    "bert": (13_546_682, 109_514_298, 335_174_458),
    "two_towers": (1_263_418, 19_774_010, 38_991_162),
}
NAMES = ("small", "base", "large")


def options(size: str, *more: str) -> ElectraConfig:
    config = load_config([f"model=electra_{size}", "task=electra", "criterion=electra_rtd", *more])
    return config.model


def build(size: str, *more: str) -> Electra:
    with torch.device("meta"):
        return Electra(options(size, *more), SYMBOLS)


def count(*modules: nn.Module | None) -> int:
    return sum(p.numel() for m in modules if m is not None for p in m.parameters())


@pytest.mark.parametrize("size", NAMES)
def test_parts(size):
    model, number = build(size), NAMES.index(size)
    encoder, generator = model.encoder, model.generator
    first = generator.stack.layers[0].attention
    found = {
        "embeddings": count(encoder.embeddings),
        "projection": count(encoder.stack.project),
        "layers": count(encoder.stack.layers),
        "encoder": count(encoder),
        "head": count(model.heads["rtd"]),
        "generator_width": first.out_proj.in_features,
        "generator_heads": first.heads,
        "generator_layers": len(generator.stack.layers),
        "generator_projection": count(generator.stack.project),
        "generator_stack": count(generator.stack.layers),
        "generator_head": count(generator.head),
        "electra": count(model),
    }
    assert found == {name: PARTS[name][number] for name in found}


@pytest.mark.parametrize("size", NAMES)
def test_two_towers(size):
    model = build(size, "model.noise=two_tower")
    assert count(model.generator) == PARTS["two_towers"][NAMES.index(size)]


@pytest.mark.parametrize("size", NAMES)
def test_masked_lm_of_the_same_size(size):
    config = load_config([f"model=bert_{size}"])
    with torch.device("meta"):
        model = TransformerLM(config.model, SYMBOLS)
    assert count(model) == PARTS["bert"][NAMES.index(size)]


@pytest.mark.parametrize("size", NAMES)
def test_other_ways_of_sharing(size):
    """Without sharing the generator's own embeddings have its width, and there is no projection."""
    number = NAMES.index(size)
    width = PARTS["generator_width"][number]
    own = build(size, "model.sharing=none")
    assert own.generator.stack.project is None
    assert count(own.generator.embeddings) == (SYMBOLS + 512 + 2 + 2) * width
    whole = build(size, "model.sharing=all", "model.generator_size=1")
    wanted = PARTS["electra"][number] - sum(
        PARTS[f"generator_{part}"][number] for part in ("projection", "stack", "head")
    )
    assert count(whole.generator) == count(whole.generator.head)
    assert count(whole) == wanted + count(whole.generator.head)
    bert = PARTS["bert"][number] - PARTS["encoder"][number]
    assert count(whole.generator.head) == bert


@pytest.mark.parametrize("noise", ["mlm", "two_tower", "difficulty"])
def test_initial_weights(noise):
    """As the authors' code draws them: N(0, 0.02) cut at 0.04, but Glorot where it says nothing.

    That is the projections of the embeddings and the heads of one linear layer; biases are 0.
    """
    torch.manual_seed(0)
    heads = ("rtd", "lm", "copy", "contrast", "baseline")
    config = options("small", "model.encoder_layers=2", f"model.noise={noise}")
    model = Electra(config, 2000, heads=heads)
    glorot = ["encoder.stack.project", "heads.rtd.out", *(f"heads.{name}" for name in heads[2:])]
    stacks = ("left", "right") if noise == "two_tower" else ("stack",)
    glorot += [f"generator.{name}.project" for name in stacks]
    glorot += ["generator.head.out"] if noise == "difficulty" else []
    norms = {n for n, m in model.named_modules() if isinstance(m, nn.LayerNorm)}
    seen = set()
    for name, weight in model.named_parameters():
        place, _, kind = name.rpartition(".")
        if kind == "bias" or place in norms:
            assert (weight == (kind == "weight")).all(), name
        elif place in glorot:
            bound = (6 / sum(weight.shape)) ** 0.5
            assert 0.9 * bound < weight.abs().max() <= bound, name
            assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.15), name
            seen.add(place)
        else:
            assert weight.abs().max() <= 0.04, name
            # Of a normal distribution that is cut at two standard deviations.
            sure = max(0.03, 4 / (2 * weight.numel()) ** 0.5)
            assert weight.std().item() == pytest.approx(0.8796 * 0.02, rel=sure), name
    assert seen == set(glorot)


def flops(size: str, length: int, *more: str) -> tuple[Sizes, Sizes]:
    config = options(size, *more)
    return Sizes.of(config, SYMBOLS, length), Sizes.of(config.generator(), SYMBOLS, length)


ELECTRA = [
    (("small", 128), 128, 1_000_000, 1.294e18),
    (("small", 128, "model.generator_size=0.5"), 128, 1_000_000, 1.424e18),
    (("base", 512), 256, 766_000, 6.425e19),
    (("large", 512), 2048, 400_000, 7.118e20),
    (("large", 512), 2048, 1_750_000, 3.114e21),
]
BERT = [
    (("small", 128), 128, 1_450_000, 1.419e18),
    (("base", 512), 256, 1_000_000, 6.43e19),
    (("large", 512), 256, 1_000_000, 1.917e20),
]
INFERENCE = [("small", 3.68e9), ("base", 2.86e10), ("large", 8.75e10)]


@pytest.mark.parametrize("sizes, rows, updates, wanted", ELECTRA)
def test_pretraining_flops(sizes, rows, updates, wanted):
    found = flops_rules._electra_flops(*flops(*sizes)) * rows * updates
    assert found == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("sizes, rows, updates, wanted", BERT)
def test_masked_lm_flops(sizes, rows, updates, wanted):
    found = flops_rules.masked_lm(flops(*sizes)[0]) * rows * updates
    assert found == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("size, wanted", INFERENCE)
def test_inference_flops(size, wanted):
    assert flops_rules.classifier_flops(flops(size, 128)[0]) == pytest.approx(wanted, rel=2e-3)


TOYS = [((4, 128, 64, 64, 64), 0.5, 3.7e10), ((4, 256, 128, 128, 128), 0.25, 4.0e11)]


@pytest.mark.parametrize("toy, share, wanted", TOYS)
def test_flops_of_a_step_of_a_toy(toy, share, wanted):
    layers, width, embed, longest, rows = toy
    config = ElectraConfig(
        encoder_layers=layers,
        encoder_embed_dim=width,
        encoder_ffn_embed_dim=4 * width,
        encoder_attention_heads=max(1, width // 64),
        token_embed_dim=embed,
        generator_size=share,
    )
    sizes = (Sizes.of(config, 8000, longest), Sizes.of(config.generator(), 8000, longest))
    assert flops_rules._electra_flops(*sizes) * rows == pytest.approx(wanted, rel=0.02)


def test_two_tower_flops():
    """Two stacks with a projection each, and a softmax at every position."""
    tower = flops("small", 128)[1]
    h, e, s = tower.width, tower.embed, tower.length
    head = s * (2 * e * SYMBOLS + 2 * (2 * h) * e + e + 13 * e + 7 * SYMBOLS)
    wanted = 2 * (2 * tower.blocks() + tower.inputs() + s * (2 * h * e + h) + head)
    assert flops_rules.two_towers(tower) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    ("criterion", "more", "wanted"),
    [
        ("electra_rtd", [], lambda m, g: flops_rules._electra_flops(m, g)),
        ("electra_rtd", ["model.noise=uniform"], lambda m, g: 2 * flops_rules.classifier_flops(m)),
        ("replace_mlm", [], lambda m, g: flops_rules.masked_lm(m) + flops_rules.masked_lm(g)),
        (
            "strategic_mlm",
            ["model.noise=difficulty"],
            lambda m, g: flops_rules.masked_lm(m) + 2 * flops_rules.classifier_flops(g),
        ),
    ],
    ids=["electra", "uniform", "replace_mlm", "strategic_mlm"],
)
def test_flops_by_rule_of_a_run(criterion, more, wanted, moons, tmp_path):
    """What results.json has beside the measured FLOPs."""
    options = ["task=electra", "model=electra_small", "model.encoder_layers=1", "task.batch_size=3"]
    options += [f"criterion={criterion}", *more, f"data={moons}", f"save_dir={tmp_path}"]
    run = build_parts(load_config(options))
    vocab = len(run.task.vocabulary)
    main = flops_rules.Sizes(1, 256, 1024, 4, 128, vocab, 128)
    generator = flops_rules.Sizes(1, 64, 256, 1, 128, vocab, 128)
    assert run.task.flops_by_rule() == pytest.approx(3 * wanted(main, generator), rel=1e-12)
