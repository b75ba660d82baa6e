"""The `evaluate` command."""

import json
import shutil
from pathlib import Path

import pytest
from battery import CASES, TINY
from outcomes import expect_facts

from metaseq_lm.cli import main
from metaseq_lm.core.registry import CRITERIONS


@pytest.fixture(scope="module")
def run(moons: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short fine-tuning run, scored on the test split at its end."""
    place = tmp_path_factory.mktemp("runs") / "tuned"
    options = ["--criterion", "token_labels", *CASES["token_labels"][0], *TINY]
    more = [
        "--max-update",
        "6",
        "trainer.validate_interval_updates=2",
        "trainer.final_splits=[test]",
    ]
    assert main(["train", str(moons), "--save-dir", str(place), *options, *more]) == 0
    return place


def test_scores_and_predictions_are_those_of_training(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    capsys.readouterr()
    assert main(["evaluate", str(run), "--split", "test", "valid", "--out", str(tmp_path)]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    metrics = json.loads((run / "results.json").read_text())["metrics"]
    for line in shown:
        assert {k: line[k] for k in metrics["test"]} == metrics[line["split"]]
    file = "predictions.test.jsonl"
    assert (tmp_path / file).read_text() == (run / file).read_text()
    rows = [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
    right = sum(row["gold"] == row["predicted"] for row in rows) / len(rows)
    assert right == pytest.approx(metrics["test"]["accuracy"], abs=1e-12)
    assert len(rows) == 1000 and rows[3]["index"] == 3


def test_overrides_may_stand_anywhere(run: Path, capsys: pytest.CaptureFixture) -> None:
    shown = []
    for words in (["task.valid_size=4", str(run)], [str(run), "task.valid_size=4"]):
        for more in (["--split", "valid"], ["--split", "valid", "engine.precision=fp64"]):
            capsys.readouterr()
            assert main(["evaluate", *words, *more]) == 0
            shown.append(json.loads(capsys.readouterr().out))
    assert shown[0] == shown[2] != shown[1] == shown[3]
    assert shown[0]["accuracy"] in (0, 0.25, 0.5, 0.75, 1)


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (["nowhere"], 2, ("nowhere", "no such checkpoint")),
        (["{run}", "--split", "tset"], 1, ("tset", "test")),
        (["{run}", "--split", "train"], 2, ("'train' is endless", "preprocess --split")),
        (["{run}", "--data", "none"], 2, ("none", "no such data folder")),
        (["{run}", "engine.devcie=cpu"], 2, ("engine.devcie", "'engine.device'")),
        (["{run}", "engine.precision=fp16"], 2, ("engine.precision", "fp64")),
        (["{run}", "--split", "valid", "engine.device=gpu"], 2, ("engine.device", "cpu, cuda")),
        (["{run}", "task.batch_size=abc"], 2, ("task.batch_size", "abc")),
        (["{run}", "task.stride=8", "--split", "task.valid_size=4"], 2, ("--split", "no split")),
    ],
)
def test_mistakes(
    run: Path, capsys: pytest.CaptureFixture, arguments: list, code: int, words: tuple
) -> None:
    assert main(["evaluate", *(a.format(run=run) for a in arguments)]) == code
    text = capsys.readouterr().err
    assert "Traceback" not in text and not [w for w in words if w not in text], text


def test_another_plugin_than_that_of_the_run_is_told_apart(
    moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(CRITERIONS, "entries", dict(CRITERIONS.entries))
    right, wrong = (tmp_path / f"plugin_{name}.py" for name in ("right", "wrong"))
    right.write_text(
        "from metaseq_lm.core.registry import register_criterion\n"
        "from metaseq_lm.config.criterions import ZLossConfig\n"
        "from metaseq_lm.criterions.masked_lm import MaskedLM\n"
        "register_criterion('of_a_plugin', dataclass=ZLossConfig)(type('Mine', (MaskedLM,), {}))\n"
    )
    wrong.write_text("")
    options = [*CASES["masked_lm"][0], *TINY, "--max-update", "1", "--criterion", "of_a_plugin"]
    run = ["--save-dir", str(tmp_path / "run"), "--user-dir", str(right)]
    assert main(["train", str(moons), *run, *options]) == 0
    del CRITERIONS.entries["of_a_plugin"]
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--user-dir", str(wrong)]) == 2
    text = capsys.readouterr().err
    assert "unknown criterion 'of_a_plugin'" in text
    assert text.endswith(f" plug-in {right}.\n")


def test_a_plugin_is_not_loaded_because_a_file_names_it(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    plugin = tmp_path / "quiet_plugin.py"
    plugin.write_text("from pathlib import Path\n(Path(__file__).parent / 'ran').write_text('x')\n")
    options = ["--criterion", "masked_lm", *CASES["masked_lm"][0], *TINY, "--max-update", "1"]
    place = str(tmp_path / "run")
    command = ["train", str(moons), "--save-dir", place, "--user-dir", str(plugin), *options]
    assert main(command) == 0
    (tmp_path / "ran").unlink()
    import sys

    del sys.modules["quiet_plugin"]
    assert main(["evaluate", place, "--split", "valid"]) == 2
    expect_facts(capsys.readouterr().err, "quiet_plugin", "--user-dir")
    assert not (tmp_path / "ran").exists()
    shutil.rmtree(place)
