"""scripts/benchmark runs and prints what it promises."""

import importlib
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from imported import imported

from metaseq_lm.reporting.folders import find_runs

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "scripts" / "benchmarks"
VOCABULARY = 200
TINY = """
    model.encoder_layers=1 model.encoder_embed_dim=16 model.encoder_ffn_embed_dim=32
    model.encoder_attention_heads=1
""".split()
TINY_TAGGER = """
    model.word_embed_dim=6 model.char_embed_dim=3 model.char_filters=2 model.encoder_hidden_dim=6
    model.second_hidden_dim=4 model.projection_dim=4
""".split()


@pytest.mark.slow
def test_prints_json_lines_and_a_table(tmp_path):
    """Of the family whose processes have the least to do."""
    out = tmp_path / "figures.jsonl"
    command = [sys.executable, PROGRAM, "--only", "windows", "--quick"]
    done = subprocess.run(
        [*command, "--out", out], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    assert [json.loads(line) for line in out.read_text().splitlines()] == figures
    assert [figure["name"] for figure in figures] == ["windows", "windows_bare"]
    for figure in figures:
        assert figure["spread"][0] <= figure["ratio"] <= figure["spread"][1]
        assert figure["ours"] > 0 and figure["reference"] > 0
        assert {"unit", "rounds", "target", "threads", "versions"} <= set(figure)
    assert figures[0]["unit"] in done.stderr


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[None]:
    """The modules of scripts/benchmarks can be imported."""
    sys.path.insert(0, str(PROGRAM))
    yield
    sys.path.remove(str(PROGRAM))


@pytest.fixture
def program(benchmarks: None) -> ModuleType:
    """What scripts/benchmark starts."""
    return imported(PROGRAM / "__main__.py", "benchmark_program")


def in_turn(variants: dict[str, Any], rounds: int, warm_up: int = 1) -> dict[str, Any]:
    """Step the variants in this process, those of the peers tiny too."""
    timing = importlib.import_module("timing")
    small = {"bert_step": {"vocab": VOCABULARY, "layers": 1}, "matmul": {"size": 32}}
    small["pair_step"] = small["bert_step"]
    found = {}
    for name, variant in pickle.loads(pickle.dumps(variants)).items():  # as to their processes
        step = variant.make(**(variant.options | small.get(variant.make.__name__, {})))
        done = []
        for _ in range(rounds):
            cpu, wall = time.process_time(), time.perf_counter()
            result = step()
            seconds = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
            done.append(result | seconds)
        found[name] = timing.Measured(done, 1_000_000)
    return found


@pytest.mark.parametrize(
    "name, options, wanted",
    [
        ("mlm", ("OVERRIDES", TINY), ["mlm_step", "mlm_memory", "mlm_flop_rate"]),
        ("electra", ("OVERRIDES", TINY), ["electra_step", "electra_memory"]),
        ("bam", ("BAM", TINY), ["bam_step"]),
        (
            "cvt",
            ("OPTIONS", TINY_TAGGER),
            [
                "cvt_labelled",
                "cvt_unlabelled",
                "cvt_unlabelled_labelled",
                "cvt_multitask",
                "cvt_multitask_dearest",
                "cvt_multitask_cheapest",
            ],
        ),
    ],
    ids=["mlm", "electra", "bam", "cvt"],
)
def test_families_of_tiny_models(name, options, wanted, program, tmp_path, monkeypatch, capsys):
    """Everything but the processes of their own."""
    pytest.importorskip("transformers")
    family = importlib.import_module(f"{name}_speed")
    monkeypatch.setattr(family, "paired", in_turn)
    for size, value in {"VOCAB": VOCABULARY, "WORDS": VOCABULARY, "BATCH_SIZE": 16}.items():
        monkeypatch.setattr(family, size, value, raising=False)
    constant, smaller = options
    monkeypatch.setattr(family, constant, [*getattr(family, constant), *smaller])
    if name == "bam":
        monkeypatch.setattr(family, "PLAIN", [*family.PLAIN, *smaller])
    out = tmp_path / "figures.jsonl"
    command = ["benchmark", "--quick", "--only", name, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    program.main()
    figures = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [figure["name"] for figure in figures] == wanted
    assert [json.loads(line) for line in out.read_text().splitlines()] == figures
    for figure in figures:
        assert figure["spread"][0] <= figure["ratio"] <= figure["spread"][1]
        assert figure["ours"] > 0 and figure["reference"] > 0


def test_reports_are_measured_in_processes_of_their_own(benchmarks, tmp_path, monkeypatch):
    """Of folders that have what their archive has."""
    report = importlib.import_module("report_speed")
    archive = ROOT / "examples" / "cvt" / "measured" / "elmo.jsonl"
    metric = "test.f1"
    monkeypatch.setattr(report, "METRIC", metric)
    folders = tmp_path / "runs"
    count = report.write_folders(archive, folders)
    written = [run.metrics[metric] for run in find_runs([folders])]
    archived = [run.metrics[metric] for run in find_runs([archive])]
    assert len(written) == count and sorted(written) == sorted(archived)
    out = tmp_path / "out"
    ours = report.measure(["report", str(folders), "--metric", metric, "--out", str(out)], 1)
    assert (out / "report.html").exists()
    (measured,) = ours.rounds
    assert measured["cpu"] > 0.5 and ours.peak > 50_000_000
    with pytest.raises(RuntimeError, match="exit code 2"):
        report.measure(["report", str(tmp_path / "none")], 1)


@pytest.mark.parametrize(
    "seconds, peak, reached",
    [(9.9, 299e6, [True, True]), (10.1, 299e6, [False, True]), (9.9, 301e6, [True, False])],
)
def test_reports_have_limits(seconds, peak, reached, benchmarks):
    report, timing = (importlib.import_module(name) for name in ("report_speed", "timing"))
    ours = timing.Measured([{"amount": 1, "cpu": seconds, "wall": 30.0}], int(peak))
    time_taken, memory = report.against_limits("x", ours, "500 runs")
    assert [time_taken.reached, memory.reached] == reached
    assert (time_taken.ours, time_taken.reference) == (pytest.approx(seconds), 10)
    assert (memory.ours, memory.reference, memory.unit) == (peak / 1e6, 300, "MB")


def test_costs_of_meta_learning(benchmarks, tmp_path):
    """Each kind of update is made, tiny; k + 1 batches take k + 1 times the FLOPs of one."""
    meta = importlib.import_module("meta_speed")
    flops = {}
    for kind, place in meta.made_up_data(tmp_path / "data", vocab=60).items():
        options = [*meta.options_of(kind, 2), *TINY]
        flops[kind] = meta.updates(place, options, 2)()["flops"]
    assert flops.keys() == meta.KINDS.keys()
    assert flops["meta_pretrain_5"] / flops["meta_pretrain_1"] == pytest.approx(3, rel=0.1)
    assert flops["meta_pretrain_1"] / flops["mlm"] == pytest.approx(2, rel=0.2)
    assert flops["mlm"] < flops["tartan_mt"] < flops["tartan_meta"]
    assert flops["meta_pretrain_1"] < flops["meta_pretrain_1_exact"]
    assert flops["tartan_mt"] < flops["tartan_meta_same_head"] < flops["tartan_meta"]
    assert 4 * flops["mlm"] < flops["hard"] < flops["soft"] < flops["soft_difference"]


def test_figures_of_meta_learning(benchmarks, tmp_path, monkeypatch):
    """Each kind of update is a figure against plain masked LM of the same run."""
    meta = importlib.import_module("meta_speed")
    monkeypatch.setattr(meta, "paired", in_turn)
    monkeypatch.setattr(meta, "SIZES", [*meta.SIZES, *TINY])
    monkeypatch.setattr(meta.made_up_data, "__defaults__", (VOCABULARY,))
    found = {figure.name: figure for figure in meta.figures(tmp_path, None, True)}
    assert list(found) == [f"{kind}_update" for kind in meta.KINDS if kind != meta.PLAIN]
    times = {name: float(f.note.partition(" times;")[0].split()[-1]) for name, f in found.items()}
    assert times["meta_pretrain_5_update"] > 2 * times["meta_pretrain_1_update"]
    assert all("1 MB against" in figure.note for figure in found.values())


def test_figures_of_soft_labels(benchmarks, tmp_path, monkeypatch):
    """Exact and by differences, against a step of transformers' BERT."""
    pytest.importorskip("transformers")
    soft = importlib.import_module("soft_speed")
    monkeypatch.setattr(soft, "paired", in_turn)
    monkeypatch.setattr(soft, "VOCAB", VOCABULARY)
    monkeypatch.setattr(soft, "LAYERS", 1)
    found = {figure.name: figure for figure in soft.figures(tmp_path, None, True)}
    assert list(found) == ["soft_exact", "soft_finite_difference"]
    assert {name: figure.target for name, figure in found.items()} == {
        "soft_exact": 3.5,
        "soft_finite_difference": 2.3,
    }
    assert all("FLOPs; peak 1" in figure.note for figure in found.values())


# ---------------------------------------------------------------- on a GPU


@pytest.mark.parametrize("name", ["BERT", "ELECTRA"])
def test_tokens_and_flops_of_updates(name, benchmarks, tmp_path):
    """Of a tiny model on the CPU: rows of 16 tokens, each update as dear as the first one."""
    gpu, training, check = map(importlib.import_module, ("gpu_speed", "training", "gpu_check"))
    data = training.made_up_corpus(tmp_path / "data", VOCABULARY, 14 * 40)
    sizes = ["task.batch_size=4", "task.tokens_per_sample=16", "model.token_embed_dim=0"]
    overrides = [*getattr(check, name), *TINY, *sizes]
    found = gpu.measured(data, overrides, rounds=2, updates=3)
    assert [done.tokens for done in found] == [4 * 16 * 3] * 2
    run = training.build(data, overrides)
    training.train(run, *next(training.fetched(run)))
    assert [done.flops for done in found] == [3 * run.flops.total] * 2
    assert all(done.seconds > 0 for done in found)


def test_share_of_a_matrix_product(benchmarks, monkeypatch):
    """2e9 FLOPs for 1,000 tokens in 4, 5 and 8 seconds, of a peak of 1e9 FLOPs per second."""
    gpu = importlib.import_module("gpu_speed")
    rounds = [gpu.Round(1000, 2e9, seconds) for seconds in (4.0, 8.0, 5.0)]
    figure = gpu.share_of("x", rounds, 1e9, "a GPU")
    assert (figure.ours, figure.reference, figure.unit) == (200, 500, "tokens/s")
    assert figure.ratio == pytest.approx(0.4) and figure.spread == pytest.approx((0.25, 0.5))
    assert figure.note.startswith("a GPU; 0.0004")
    # A clock that goes on by a second each time it is read.
    ticks = iter(range(100))
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: float(next(ticks)))
    assert gpu.matmul_rate("cpu", 32, rounds=2, products=3) == 3 * 2 * 32**3
    assert gpu.copy_rate("cpu", 1000, rounds=2) == 2000
    assert gpu.launch_seconds("cpu", 4) == 0.25


def test_the_mean_of_steps_is_that_of_what_a_unit_costs(benchmarks):
    """0.1 s a word and 0.2 s: 0.15, whatever the batches hold."""
    family, timing = (importlib.import_module(name) for name in ("cvt_speed", "timing"))
    parts = [
        timing.Measured([{"amount": 10, "cpu": 1.0, "wall": 2.0, "flops_per_word": 100}], 5),
        timing.Measured([{"amount": 30, "cpu": 6.0, "wall": 3.0, "flops_per_word": 300}], 7),
    ]
    mean = family.mean_of(parts)
    assert mean.rates() == pytest.approx([1 / 0.15])
    assert mean.rates("wall") == pytest.approx([1 / 0.15])
    assert mean.peak == 7
    other = timing.Measured(parts[0].rounds, 5)
    figure = family.compared("x", mean, other, None, "both")
    assert figure.ratio == pytest.approx(1.5) and figure.note.endswith("; 2 times its FLOPs")
