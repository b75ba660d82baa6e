"""`score --suite finetune`: the training runs, what is printed and kept, how it goes on."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from agreement import make_data, make_run, write_labelled_pairs
from outcomes import expect_facts

from metaseq_lm.cli import main
from metaseq_lm.distributed import signals
from metaseq_lm.runs import manifests, suite_results
from metaseq_lm.training.run import TrainingRun

OPTIONS = ["epochs=2", "batch_size=8", "lr=3e-3", "tokens=16"]
# What the suite asks for, as options of train.
TRAIN = [
    *("--task", "sentence_prediction", "--criterion", "sentence_prediction", "--model", "inherit"),
    *("--optimizer", "adamw", "--schedule", "cosine", "seed=42", "task.epochs=2"),
    *("task.batch_size=8", "task.validate_epochs=1", "task.tokens_per_sample=12"),
    *("task.pooled=true", "task.pooler_activation=gelu", "task.head_dropout=0.1"),
    *("optimizer.lr=3e-3", "optimizer.betas=[0.9,0.999]", "optimizer.eps=1e-8"),
    *("optimizer.weight_decay=0.01", "optimizer.clip_norm=0", "schedule.warmup_ratio=0.06"),
    *("schedule.end=0.1", "engine.tensorboard=false", "engine.threads=1"),
    "trainer.maximize_best_checkpoint_metric=true",
]
HELD_OUT = ["task.held_out=0.1", "trainer.valid_split=held_out", "trainer.final_splits=[valid]"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, and two sets in its data folder."""
    folder = tmp_path_factory.mktemp("finetune")
    data = make_data(folder)
    make_run(data, folder / "run", 60)
    source = folder / "challenge"
    source.mkdir()
    for task, labels in (("mrpc", (1, 0)), ("rte", (0, 1))):
        write_labelled_pairs(source / f"{task}.train.jsonl", 80, 5, labels)
        write_labelled_pairs(source / f"{task}.valid.jsonl", 30, 6, labels)
        command = ["preprocess", "--benchmark", f"babylm/{task.upper()}", "--source", str(source)]
        assert main([*command, "--destdir", str(data)]) == 0
    return folder


@pytest.fixture
def place(trained: Path, tmp_path: Path) -> Path:
    """A copy of the folder that a test may change."""
    return shutil.copytree(trained, tmp_path / "copy", symlinks=True)


def score(place: Path, *words: str, data: str = "data") -> int:
    command = ["score", str(place / "run"), "--suite", "finetune", "--data", str(place / data)]
    return main([*command, *OPTIONS, *words])


def results_of(place: Path, name: str = "finetune") -> dict[str, Any]:
    (file,) = (place / "run" / "suites" / name).glob("*.json")
    record: dict[str, Any] = json.loads(file.read_text())
    return record


def trained_alone(place: Path, task: str, *words: str) -> dict[str, Any]:
    """Return the results of the run that `train` makes of the same options."""
    save = place / f"alone-{len(list(place.glob('alone*')))}"
    source = ["--init-from", str(place / "run" / "checkpoints" / "best")]
    if not Path(source[1]).exists():
        source[1] = str(place / "run" / "checkpoints" / "last")
    command = ["train", str(place / "data"), f"task.labelled={task}", "--save-dir", str(save)]
    assert main([*command, *TRAIN, *source, *words]) == 0
    record: dict[str, Any] = json.loads((save / "results.json").read_text())
    best = manifests.read_manifest(manifests.resolve(str(save), prefer="best"))
    return record | {"best": best["update"]}


def test_results_are_those_of_train(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score(place) == 0
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines() if line]
    head = shown.splitlines()[2]
    assert "accuracy_macro (%)" in head and "majority" in head and "majority f1" in head
    assert [row[:2] for row in lines[3:]] == [["overall", "60"], ["MRPC", "30"], ["RTE", "30"]]
    record = results_of(place)
    groups = record["groups"]
    flops = 0
    for task, metric in (("MRPC", "f1"), ("RTE", "score")):
        alone = trained_alone(place, task, *HELD_OUT, f"trainer.best_checkpoint_metric={metric}")
        expected, metrics = alone["metrics"]["valid"], groups[task]["metrics"]
        assert metrics["accuracy"] == expected["accuracy"]
        assert metrics["epoch"] == alone["best"] / 9  # 72 rows in batches of 8
        assert (metrics["rows_trained"], metrics["rows_choosing"]) == (72, 8)
        flops += alone["flops"]
    assert record["facts"]["flops"] == flops and record["facts"]["updates"] == 36
    parts = [groups[task]["metrics"]["accuracy"] for task in ("MRPC", "RTE")]
    assert groups["overall"]["metrics"]["accuracy_macro"] == pytest.approx(sum(parts) / 2)
    majority = record["references"]["RTE.accuracy"]["majority"]
    assert majority == pytest.approx(20 / 30)
    # The column of frozen states is that of the suite probe.
    probe = ["--suite", "probe", "--data", str(place / "data" / "RTE"), "split=valid"]
    assert main(["score", str(place / "run"), *probe]) == 0
    frozen = results_of(place, "probe")
    assert (
        groups["RTE"]["metrics"]["frozen_accuracy"]
        == (frozen["groups"]["overall"]["metrics"]["accuracy"])
    )
    # Neither the training runs nor their checkpoints stay.
    assert [path.name for path in (place / "run/suites/finetune").iterdir()] == [
        "update_000000060.json"
    ]


def test_in_the_way_of_the_challenge_the_scored_rows_choose(place: Path) -> None:
    assert score(place, "sets=[RTE]", "choose=scored", "epochs=3") == 0
    metrics = results_of(place)["groups"]["RTE"]["metrics"]
    way = ["trainer.best_checkpoint_metric=score", "trainer.valid_split=valid", "task.epochs=3"]
    alone = trained_alone(place, "RTE", *way)
    log = (place / "alone-0" / "log.jsonl").read_text().splitlines()
    scores = [line["score"] for line in map(json.loads, log) if line["kind"] == "valid"]
    assert len(scores) == 3
    assert metrics["accuracy"] == max(scores) == alone["metrics"]["valid"]["accuracy"]
    assert (metrics["rows_trained"], metrics["rows_choosing"]) == (80, 30)


def test_what_has_ended_is_not_trained_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    train = TrainingRun.train

    def interrupted(run: TrainingRun) -> None:
        begun.append(run.config.task.labelled)
        if len(begun) == 2:
            raise signals.make_interruption(signal.SIGTERM, "while training")
        train(run)

    monkeypatch.setattr(TrainingRun, "train", interrupted)
    assert score(place) == 75 and begun == ["MRPC", "RTE"]
    assert not list((place / "run/suites").rglob("update_*.json"))
    assert score(place) == 0 and begun == ["MRPC", "RTE", "RTE"]
    first = results_of(place)
    shutil.rmtree(place / "run/suites")
    assert score(place) == 0
    for record in (first, again := results_of(place)):
        del record["facts"]["seconds"], record["checksum"]
    assert first == again


def test_the_rate_that_the_held_out_rows_prefer(place: Path) -> None:
    """The score is that of the better of two runs of train, the cost that of both."""
    words = ["lr_choices=1e-6,3e-2", "frozen=false"]
    assert score(place, "--name", "rates", *words, data="data/MRPC") == 0
    record = results_of(place, "rates")
    metric = "trainer.best_checkpoint_metric=f1"
    runs = {}
    for rate in (1e-6, 3e-2):
        run = trained_alone(place, "MRPC", *HELD_OUT, metric, f"optimizer.lr={rate}")
        folder = manifests.resolve(str(place / f"alone-{len(runs)}"), prefer="best")
        runs[rate] = (manifests.read_manifest(folder)["valid"]["f1"], run)
    best = max(runs, key=lambda rate: runs[rate][0])
    assert len({choice for choice, _ in runs.values()}) == 2  # else the first one is taken
    metrics = record["groups"]["overall"]["metrics"]
    assert metrics["lr"] == best
    assert metrics["accuracy"] == runs[best][1]["metrics"]["valid"]["accuracy"]
    assert record["facts"]["flops"] == sum(run["flops"] for _, run in runs.values())


def test_a_rate_that_diverges_is_left_out_but_counts(place: Path) -> None:
    words = ["lr_choices=1e30,3e-2", "frozen=false"]
    assert score(place, "--name", "rates", *words, data="data/MRPC") == 0
    assert score(place, "--name", "rate", "lr=3e-2", "frozen=false", data="data/MRPC") == 0
    both, one = results_of(place, "rates"), results_of(place, "rate")
    metrics = both["groups"]["overall"]["metrics"]
    assert metrics.pop("lr") == 3e-2 and metrics == one["groups"]["overall"]["metrics"]
    assert one["facts"]["updates"] < both["facts"]["updates"] < 2 * one["facts"]["updates"]


def test_at_the_end_of_a_run(place: Path) -> None:
    entry = f"finetune RTE name=rte_tuned {' '.join(OPTIONS)}"
    make_run(place / "data", place / "other", 60, f'trainer.final_suites=["{entry}"]')
    (results,) = suite_results.read_all(place / "other")[0]
    assert results.metrics["rte_tuned.n"] == 30
    assert score(place, "--name", "rte_tuned", data="data/RTE") == 0
    record = results_of(place, "rte_tuned")
    assert record["groups"] == dict(results.groups)  # the runs are the same


def test_an_encoder_that_was_trained_causally_stays_so(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(place / "run")
    causal = ["task=causal_lm", "task.mask_prob=null"]
    sizes = [f"model.{name}" for name in ("encoder_layers=1", "encoder_embed_dim=32")]
    sizes += ["model.encoder_ffn_embed_dim=64", "model.encoder_attention_heads=2"]
    command = ["train", str(place / "data"), "--save-dir", str(place / "run"), causal[0]]
    command += ["criterion=causal_lm", *sizes, "model.max_positions=12", "trainer.max_update=2"]
    command += ["task.tokens_per_sample=12", "task.sample_break_mode=eos", "engine.threads=1"]
    assert main([*command, "trainer.valid_split=''", "engine.tensorboard=false"]) == 0
    reaches = []
    train = TrainingRun.train

    def noted(run: TrainingRun) -> None:
        reaches.append((run.config.task.reach, run.model.is_causal))
        train(run)

    monkeypatch.setattr(TrainingRun, "train", noted)
    assert score(place, "sets=[RTE]", "epochs=1") == 0
    assert reaches == [("causal", True)]


def test_a_set_of_another_tokenizer(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "text.txt").write_text("other words\n")
    other = ["--trainpref", f"{place}/text.txt", "--destdir", f"{place}/other"]
    assert main(["preprocess", *other, "--tokenizer", "word"]) == 0
    command = ["preprocess", "--benchmark", "babylm/RTE", "--source", str(place / "challenge")]
    assert main([*command, "--destdir", str(place / "other")]) == 0
    assert score(place, data="other") == 2
    expect_facts(capsys.readouterr().err, "RTE: ", "another tokenizer")
    assert not (place / "run" / "suites").exists()
