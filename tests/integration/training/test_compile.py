"""engine.compile=true: no graph break, the same losses, few graphs; what cannot be compiled is
refused.
"""

import functools
import json
from pathlib import Path

import battery
import numpy as np
import pytest
import small_data
import torch
import torch._dynamo
from real_runs import on_replicas
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.distributed import process_group
from metaseq_lm.forward.passes import Noise, TracedNoise
from metaseq_lm.training.run import TrainingRun

LSTMS = "torch.compile does not trace the LSTMs of model"
GRADIENT = "the loss contains a gradient"
# Why the first case of a criterion cannot be compiled; all others must be, without a graph break.
REFUSED = {
    "meta_pseudo_label_soft": "gradients are differentiated again",
    "cvt_vision": GRADIENT,
    "vat_vision": GRADIENT,
    "vat": GRADIENT,
    **dict.fromkeys("language_modeling translation cvt_translation".split(), LSTMS),
    **dict.fromkeys("word_dropout_translation tagging parsing cvt_aux".split(), LSTMS),
    "word_dropout": LSTMS,
}
COMPILED = [case for case in battery.FIRST if case[0] not in REFUSED]
# Of these the derivatives are traced too, which takes five times as long.
DERIVATIVES_TRACED = [("masked_lm", 0), ("electra_rtd", 0), ("tartan_mt", 0)]
# Further tasks and models of these criterions: first-order MAML, TARTAN, images, other noise.
FURTHER = [
    *(("masked_lm", i) for i in (1, 3, 4)),
    ("bert_pretraining", 1),
    ("tartan_mt", 3),
    ("tartan_meta", 5),
    ("electra_rtd", 1),
    ("electric_nce", 1),
]
# Of words, with attention instead of LSTMs. The weight of unlabelled sentences rises.
VIEWS = """
    task=cvt task.labelled=[chunk] task.hidden_dim=6 task.batch_size=8 model=transformer_views
    model.word_embed_dim=6 model.char_embed_dim=3 model.char_filters=2 model.directed_layers=1
    model.encoder_layers=1
""".split()
# Run always. The others are like them: one encoder, and a loss of a few lines.
ALWAYS = [
    *DERIVATIVES_TRACED,
    ("meta_pseudo_label_hard", 0),
    ("electric_nce", 0),
    ("tartan_meta", 5),
]
# The masks of dropout are half of what is traced: of those that run always this one has them.
WITH_DROPOUT = ("masked_lm", 0)
WITHOUT_DROPOUT = ["model.dropout=0", "model.attention_dropout=0", "criterion.unlabelled_dropout=0"]
WARMUP = "criterion.unlabelled_warmup=9"


@pytest.fixture
def fresh() -> None:
    """Nothing is compiled, or counted, yet."""
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()


@pytest.mark.slow
def test_compiled_losses_are_those_of_eager(moons, tmp_path, fresh):
    """20 updates of inductor's code, with dropout, in micro-batches of 6, 6 and 4 rows.

    In fp32 fused operations round differently: losses agree to 1e-5 of their size.
    """
    losses = []
    for compiled in ("false", "true"):
        more = ["trainer.max_update=20", "engine.micro_batch_size=6", "model.encoder_layers=1"]
        more += [f"engine.compile={compiled}", "trainer.valid_split=''"]
        save = tmp_path / compiled
        battery.train_uncounted(battery.configure(moons, save, ("masked_lm", 0), *more))
        lines = [json.loads(line) for line in (save / "log.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if line["kind"] == "train"])
    eager, inductor = losses
    assert len(eager) == 20 and inductor == pytest.approx(eager, rel=1e-5)
    assert not counters["graph_break"]
    assert 1 <= counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[pytest.mark.exhaustive] * (c not in ALWAYS))
        for c in [*COMPILED, *FURTHER]
    ],
    ids=lambda c: f"{c[0]}-{c[1]}",
)
def test_no_graph_break(case, moons, tmp_path, fresh, monkeypatch):
    """Traced, without code for the processor: the weights agree to 1e-12.

    Of one layer: a second one is traced like the first, in as much time again.
    """
    backend = "aot_eager" if case in DERIVATIVES_TRACED else "eager"
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    weights = []
    options = battery.dropped if case == WITH_DROPOUT or case not in ALWAYS else battery.exact
    steps = ["trainer.max_update=5", "trainer.valid_split=''", "model.encoder_layers=1"]
    for compiled in ("false", "true"):
        more = options(*steps, f"engine.compile={compiled}")
        config = battery.configure(moons, tmp_path / compiled, case, *more)
        weights.append(battery.train_uncounted(config))
    assert battery.difference(*weights) <= 1e-12
    assert not counters["graph_break"]
    assert not any(metrics.restart_reasons for metrics in get_compilation_metrics())
    assert 1 <= counters["stats"]["unique_graphs"] <= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, more",
    [
        pytest.param("tagging", [], marks=pytest.mark.exhaustive),
        pytest.param(
            "parsing", ["task.labelled=[dep]", "task.parser_dim=4"], marks=pytest.mark.exhaustive
        ),
        ("cvt_aux", [WARMUP, *WITHOUT_DROPOUT]),
        pytest.param("word_dropout", [WARMUP], marks=pytest.mark.exhaustive),
    ],
)
def test_no_graph_break_in_attention_views(name, more, moons, tmp_path, fresh, monkeypatch):
    """Two graphs, of labelled and of unlabelled sentences, in however many updates."""
    backend = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", backend)
    data = small_data.ensure(moons, "words")
    options = [*battery.TINY, f"data={data}", f"criterion={name}", *VIEWS]
    options += battery.dropped("trainer.valid_split=''", *more)
    weights = []
    for compiled in ("false", "true"):
        places = [f"save_dir={tmp_path / compiled}", f"engine.compile={compiled}"]
        weights.append(battery.train_uncounted(load_config([*options, *places])))
    assert battery.difference(*weights) <= 1e-12
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == (1 if name in ("tagging", "parsing") else 2)


def train_by_block(
    folder: str, data: str, parallel: str, recompute: str, case: battery.Case
) -> None:
    """As one of several replicas, compare compiled blocks with eager ones."""
    process_group.initialise("cpu", 200)
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    weights = []
    for compiled in ("false", "true"):
        more = ["trainer.max_update=4", "trainer.valid_split=''", f"engine.compile={compiled}"]
        more += [f"engine.parallel={parallel}", f"engine.recompute={recompute}"]
        more += ["engine.micro_batch_size=3"]
        config = battery.configure(
            Path(data), Path(folder, compiled), case, *battery.dropped(*more)
        )
        weights.append(battery.train_uncounted(config))
    assert battery.difference(*weights) <= 1e-12
    assert not counters["graph_break"]
    assert 1 <= counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize(
    "processes, parallel, recompute, case",
    [
        pytest.param(1, "replicate", "block", ("masked_lm", 0), marks=pytest.mark.exhaustive),
        (2, "shard", "none", ("masked_lm", 0)),
        pytest.param(2, "shard", "block", ("causal_lm", 0), marks=pytest.mark.exhaustive),
    ],
)
def test_blocks_are_compiled_beside_shards_and_recomputation(
    processes, parallel, recompute, case, moons, tmp_path
):
    """Two layers share their code, whatever their place in the stream of random numbers."""
    arguments = (str(tmp_path), str(moons), parallel, recompute, case)
    on_replicas(processes, train_by_block, *arguments, seconds=300)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_refused(name, moons, tmp_path):
    config = battery.configure(moons, tmp_path, (name, 0), "engine.compile=true")
    with pytest.raises(UsageError, match=rf"criterion {name} .*because {REFUSED[name]}"):
        TrainingRun(config)


@pytest.mark.parametrize(
    "case, override, message", [(("bert_pretraining", 2), "seed=1", r"task\.second_order=exact")]
)
def test_options_that_cannot_be_compiled(case, override, message, moons, tmp_path):
    config = battery.configure(moons, tmp_path, case, "engine.compile=true", override)
    with pytest.raises(UsageError, match=message):
        TrainingRun(config)


def test_a_missing_compiler_is_named(moons, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = battery.configure(moons, tmp_path, ("masked_lm", 0), "engine.compile=true")
    with pytest.raises(UsageError, match=r"C\+\+ compiler.*no-such-compiler.*install"):
        TrainingRun(config)


def test_traced_noise_is_the_same_noise():
    """Masks of sizes that 4 does not divide, and numbers, one after the other."""
    noise = Noise(7, np.arange(3))
    traced = TracedNoise(noise.traced_keys())
    for shape, p in (((3, 5), 0.1), ((3, 2, 9), 0.5), ((3, 4), 0.1)):
        mask = noise.keep(shape, p, torch.float32, ahead=64)
        assert torch.equal(mask, traced.keep(shape, p, torch.float32))
        assert torch.equal(noise.uniform(shape), traced.uniform(shape))
    assert noise.position == traced.position
