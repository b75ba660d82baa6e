"""Options that contradict each other end in one message with a remedy."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from electra_bench import Seen, build, criterion, make_batch, noise

from metaseq_lm.core.config import section
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.training.run import TrainingRun

TINY = """
    task=electra task.tokens_per_sample=16 task.batch_size=4 model=electra model.encoder_layers=1
    model.encoder_embed_dim=8 model.encoder_ffn_embed_dim=32 model.encoder_attention_heads=1
    model.max_positions=16 engine.threads=1
""".split()
UNFIT: list[tuple[Callable[[], object], str]] = [
    (lambda: section("model", _name="electra", noise="bert"), "'bert'.*two_tower, unigram"),
    (lambda: section("model", _name="electra", sharing="some"), "'some'.*none, all"),
    (lambda: build(sharing="all"), "needs model.noise=mlm, model.generator_size=1"),
    (lambda: build(sharing="all", generator_size=1.0, generator_layers=0.5), "generator_layers=1"),
    (lambda: build(sharing="all", noise="two_tower", generator_size=1.0), "model.noise=mlm"),
    (lambda: build(freeze_generator=True), "needs model.sharing=none"),
    (lambda: criterion("electra_rtd", temperature=0.0), "temperature .*above 0"),
    (lambda: criterion("electra_rtd", temperature=-1.0), "temperature .*above 0"),
    (lambda: criterion("electra_rtd", disc_positions="15%"), "all, masked, random"),
    (lambda: criterion("electra_rtd", pll_formula="d"), "corrected, dissertation"),
    (lambda: criterion("electric_nce", temperature=2.0), "criterion.temperature=1"),
    (lambda: criterion("electric_nce", disallow_correct=True), "disallow_correct=false"),
    (lambda: Seen(build(), criterion("electric_nce"), make_batch()), "model.noise=two_tower"),
    (
        lambda: Seen(
            build(("rtd", "baseline"), noise="two_tower"),
            criterion("electra_adversarial"),
            make_batch(),
        ),
        "model.noise=mlm",
    ),
    (
        lambda: criterion("electra_rtd").token_log_probs(build(), make_batch()),
        "model.noise=two_tower.*electric_nce",
    ),
]


@pytest.mark.parametrize("number", range(len(UNFIT)), ids=lambda n: UNFIT[n][1][:24])
def test_contradictions(number: int) -> None:
    act, remedy = UNFIT[number]
    with pytest.raises(UsageError, match=remedy):
        act()


@pytest.mark.parametrize("kind", ["mlm", "unigram", "uniform"])
def test_the_cloze_criterion_needs_two_towers(kind: str) -> None:
    with pytest.raises(UsageError, match="model.noise=two_tower"):
        model = build((), noise=kind)
        with noise():
            criterion("two_tower_cloze")(model, make_batch())


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 1.5])
def test_a_rate_without_noise_or_without_data(rate: float) -> None:
    """log(m / (1 - m)) is no number there."""
    with pytest.raises(UsageError, match="mask_prob|noise_rate"):
        how = criterion("electric_nce", noise_rate=rate)
        Seen(build(noise="two_tower"), how, make_batch())


RUNS = [
    (["criterion=masked_lm"], "electra_rtd or electric_nce"),
    (["criterion=electra_rtd", "model=transformer"], "model=electra"),
    (["criterion=electra_rtd", "task.tokens_per_sample=17"], "max_positions"),
    (["criterion=electra_rtd", "model.generator_size=0.01"], "generator_size"),
    (["criterion=electra_rtd", "model.generator_size=-1"], "generator_size"),
    (["criterion=electra_rtd", "model.generator_layers=-1"], "generator_layers"),
    (["criterion=two_tower_cloze"], "model.noise=two_tower"),
    (["criterion=electric_nce"], "model.noise=two_tower"),
    (["criterion=electra_rtd", "criterion.contrast=1.5"], "contrast"),
    (["criterion=electra_rtd", "criterion.contrast=-0.5"], "contrast"),
]


@pytest.mark.parametrize("number", range(len(RUNS)), ids=lambda n: " ".join(RUNS[n][0])[:60])
def test_runs_that_cannot_be(number: int, moons: Path, tmp_path: Path) -> None:
    """Refused before the first update, with the option's name; nothing is written."""
    options, remedy = RUNS[number]
    tiny = [o for o in TINY if o.partition("=")[0] not in {p.partition("=")[0] for p in options}]
    tiny = [o for o in tiny if not ("model=transformer" in options and "generator" in o)]
    with pytest.raises(UsageError, match=remedy):
        TrainingRun(load_config([*tiny, *options, f"data={moons}", f"save_dir={tmp_path}/run"]))
    assert not (tmp_path / "run").exists()


def test_a_row_without_candidates_is_harmless() -> None:
    """[CLS] [SEP] alone, and a row of which nothing was chosen, with either count of the odds."""
    batch = make_batch((9, 2, 7), [[1, 3], [], []])
    for kind, name, options in (
        ("mlm", "electra_rtd", {}),
        ("mlm", "electra_rtd", {"disc_positions": "masked"}),
        ("two_tower", "electric_nce", {}),
        ("two_tower", "electric_nce", {"exact_counts": True}),
        ("two_tower", "electric_nce", {"exact_counts": True, "legacy_specials": True}),
    ):
        model = build(noise=kind)
        seen = Seen(model, criterion(name, **options), batch)
        grads = torch.autograd.grad(seen.loss, list(model.parameters()), allow_unused=True)
        finite = [g is None or bool(torch.isfinite(g).all()) for g in grads]
        assert torch.isfinite(seen.loss) and all(finite), (name, options)


def test_every_option_has_a_line_of_help() -> None:
    from metaseq_lm.core.loading import describe

    for name in ("electra_rtd", "electric_nce", "electra_adversarial", "all_tokens_mlm"):
        lines = describe(load_config(["task=electra", "model=electra", f"criterion={name}"]))
        for line in lines.splitlines():
            if re.match(r"  (task|criterion)\.", line):
                assert len(line.split(None, 1)) == 2, line
