"""Loggers of a run, each offline against its own package; what happens without one,
or if it fails.
"""

import json
import shutil
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from outcomes import expect_error

from metaseq_lm.cli import main
from metaseq_lm.core.config import RunConfig, untyped_section
from metaseq_lm.training import loggers
from metaseq_lm.training.loggers import LoggedRun

MLM = ["--task=masked_lm", "--criterion=masked_lm", "engine.device=cpu", "engine.tensorboard=false"]
MLM += ["model.encoder_layers=1", "model.encoder_embed_dim=8", "model.encoder_ffn_embed_dim=8"]
MLM += ["model.encoder_attention_heads=2", "task.tokens_per_sample=8", "task.batch_size=2"]
MLM += ["trainer.log_interval=1", "trainer.save_interval_updates=2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("loggers")
    (place / "text").write_text("the cat sat on the mat\na dog ran to the cat\n" * 20)
    text = str(place / "text")
    words = ["--trainpref", text, "--validpref", text, "--tokenizer", "word"]
    assert main(["preprocess", *words, "--destdir", str(place / "data")]) == 0
    return place / "data"


def train(data: Path, run: Path, logger: str, updates: int) -> int:
    options = [*MLM, f"engine.loggers=[{logger}]", f"--max-update={updates}"]
    return main(["train", str(data), "--save-dir", str(run), *options])


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, where everything that a logger writes lies, with a key that
    none may keep.
    """
    for name, value in {
        "HOME": tmp_path,
        "TRACKIO_DIR": tmp_path / "trackio",
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": "5ec2e7" * 7,
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_TRACKING_TOKEN": "5ec2e7" * 7,
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trackio_runs(place: Path) -> list[list[int]]:
    with sqlite3.connect(place / "trackio" / "metaseq-lm.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    assert len({name for name, *_ in rows}) == 1
    return [sorted({step for _, step, metrics in rows if "train/loss" in str(metrics)})]


def wandb_runs(place: Path) -> list[list[int]]:
    """Return the steps of each offline part of the run; all have one id."""
    from wandb.proto.wandb_internal_pb2 import Record

    parts, ids = [], set()
    for file in sorted(place.rglob("run-*.wandb"), key=lambda file: file.stat().st_mtime_ns):
        records = [Record.FromString(content) for content in records_of(file.read_bytes())]
        ids |= {record.run.run_id for record in records if record.HasField("run")}
        history = [record.history for record in records if record.HasField("history")]
        items = [{i.key or i.nested_key[0]: i.value_json for i in h.item} for h in history]
        parts.append([int(item["_step"]) for item in items if "train/loss" in item])
    assert len(ids) == 1
    return parts


def records_of(content: bytes) -> Iterator[bytes]:
    """Return the records of a LevelDB log of at most one block, as wandb writes it when offline."""
    start = 7
    assert len(content) < 1 << 15
    while start < len(content):
        (length,) = struct.unpack_from("<H", content, start + 4)
        yield content[start + 7 : start + 7 + length]
        start += 7 + length


def mlflow_runs(place: Path) -> list[list[int]]:
    from mlflow import MlflowClient

    client = MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("metaseq-lm").experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"]
    assert runs[0].data.params["task.batch_size"] == "2"
    return [[m.step for m in client.get_metric_history(runs[0].info.run_id, "train/loss")]]


READERS = {
    "trackio": (trackio_runs, [[1, 2, 3, 4]]),
    "wandb": (wandb_runs, [[1, 2], [3, 4]]),
    "mlflow": (mlflow_runs, [[1, 2, 3, 4]]),
}


@pytest.mark.parametrize("logger", READERS)
def test_a_resumed_run_goes_on_in_the_same_logged_run(data, elsewhere, logger, capsys):
    pytest.importorskip(logger, reason=f"the extra {logger} is not installed")
    for updates in (2, 4):
        assert train(data, elsewhere / "run", logger, updates) == 0
    assert "warning" not in capsys.readouterr().err
    read, steps = READERS[logger]
    assert read(elsewhere) == steps
    files = [file.read_bytes() for file in elsewhere.rglob("*") if file.is_file()]
    assert not [content for content in files if b"5ec2e7" in content]


def test_a_missing_package_is_named(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    assert train(data, tmp_path / "run", "wandb", 2) == 2
    assert "pip install 'metaseq-lm[wandb]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_another_name_is_refused(data, tmp_path, capsys):
    expect_error(capsys, train(data, tmp_path / "run", "wanbd", 2), 2, "engine.loggers")


class Failing:
    """A logger that fails from its second point on, and at the end."""

    def __init__(self, run: LoggedRun) -> None:
        self.points = 0

    def log(self, update: int, values: dict[str, float]) -> None:
        self.points += 1
        if self.points > 1:
            raise ConnectionError("the network is down\nand more")

    def close(self, failed: bool) -> None:
        raise ConnectionError("still down")


def test_a_failing_logger_is_one_warning(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(loggers.LOGGERS, "trackio", Failing)
    monkeypatch.setattr(loggers, "find_spec", lambda name: name)
    assert train(data, tmp_path / "run", "trackio", 4) == 0
    shown = capsys.readouterr().err
    assert shown.count("trackio: the network") == 1
    assert "still down" not in shown and "Traceback" not in shown


def test_loggers_get_no_secrets(tmp_path):
    task = untyped_section({"hub_token": "abc", "task_token": 2})
    config = RunConfig(data="https://me:abc@host/x", task=task)
    options = LoggedRun(tmp_path, config).options
    assert "abc" not in str(options) and options["task.task_token"] == 2


def test_points_of_a_killed_process_are_not_repeated(data, tmp_path, monkeypatch):
    """In log.jsonl and in what TensorBoard reads; as after kill -9 between two checkpoints.

    Both starts fall into one second, by which the library names the files of events.
    """
    monkeypatch.setattr("tensorboardX.event_file_writer.time.time", lambda: 1.8e9)
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = tmp_path / "run"
    command = ["train", str(data), "--save-dir", str(run), *MLM, "engine.tensorboard=true"]
    assert main([*command, "--max-update=5"]) == 0
    for name in ("results.json", "checkpoints/last", "checkpoints/best"):
        (run / name).unlink()
    shutil.rmtree(run / "checkpoints" / "update_000000005")
    assert main([*command, "--max-update=6"]) == 0
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [r["update"] for r in rows if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    read = events.EventAccumulator(str(run / "tb"), purge_orphaned_data=True)
    read.Reload()
    assert [point.step for point in read.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
