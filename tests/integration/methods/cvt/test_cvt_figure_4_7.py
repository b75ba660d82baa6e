"""examples/cvt/figure_4_7.py: what is measured at each place, of nets made by hand and of trained
runs.
"""

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import image_data
import numpy as np
import pytest
from battery import WORDS
from imported import imported
from torch import nn

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.images import Images
from metaseq_lm.training.run import TrainingRun

SCRIPT = Path(__file__).resolve().parents[4] / "examples" / "cvt" / "figure_4_7.py"
TINY = """
    task=cvt_vision task.labelled=60 task.valid_count=20 task.unlabelled_batch_size=8
    task.batch_size=8 model=conv_large model.width=0.06 model.norm=batch task.average_decay=0
    optimizer.lr=0.01 schedule=constant trainer.max_update=2 trainer.final_splits=[test]
    engine.device=cpu engine.threads=1 engine.tensorboard=false
""".split()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return imported(SCRIPT)


def train(data: Path, save: Path, criterion: str, *options: str) -> None:
    names = [f"data={data}", f"save_dir={save}", f"criterion={criterion}"]
    TrainingRun(load_config([*TINY, *names, *options])).train()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of supervised training, one of Cross-View Training."""
    folder = tmp_path_factory.mktemp("figure_4_7")
    data = image_data.write(folder / "data", size=32)
    for seed in (1, 2):
        out = folder / "runs" / f"supervised-{seed}"
        train(data, out, "image_classification", "label=supervised", f"seed={seed}")
    train(data, folder / "runs" / "cvt", "cvt_vision", "label=CVT", "seed=1")
    return folder / "runs"


def test_each_place_is_measured_by_itself(script):
    """The class is seen at one place; the others have chance, whatever their size."""
    rng = np.random.default_rng(1)

    def labelled(split: str) -> Images:
        classes = rng.integers(0, 2, 400)
        pixels = rng.choice([0, 255], (400, 2, 2, 1))
        pixels[:, 0, 1, 0] = 255 * classes
        return Images(pixels.astype(np.uint8), classes, ("a", "b"))

    splits = {split: labelled(split) for split in ("train", "test")}
    task = SimpleNamespace(
        config=SimpleNamespace(mean=[0.5], sd=[0.5]), labelled=lambda split: splits[split]
    )
    net = nn.Module()
    weights = np.array([[1.0, 2.0], [3.0, 4.0]])
    net.features = lambda x: x * x.new_tensor(weights)
    places = script.measure(net, task, "CVT", 1)
    assert places.activation == weights.tolist()
    accuracy = np.array(places.accuracy)
    assert accuracy[0, 1] == 1 and (abs(accuracy[weights != 2] - 0.5) < 0.1).all()


def test_zones_of_six_by_six_places(script):
    zones = script.zones(6)
    assert {name: int(mask.sum()) for name, mask in zones.items()} == {
        "corners": 4,
        "sides": 16,
        "inside": 16,
    }
    assert zones["corners"][0, 5] and zones["sides"][0, 4] and zones["inside"][1, 4]
    assert list(script.zones(2)) == ["corners"]


def test_runs_are_measured_beside_untrained_nets(script, runs, tmp_path, capsys):
    script.main([str(runs), "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    rows = json.loads((tmp_path / "figure_4_7.json").read_text())
    nets = [(row["label"], row["seed"]) for row in rows]
    assert sorted(nets) == [
        ("CVT", 1),
        ("supervised", 1),
        ("supervised", 2),
        ("untrained", 1),
        ("untrained", 2),
    ]
    assert all(np.shape(row[kind]) == (6, 6) for row in rows for kind in ("activation", "accuracy"))
    measured = {net: row["activation"] for net, row in zip(nets, rows)}
    assert len({str(values) for values in measured.values()}) == 5
    relative = np.array(measured["CVT", 1]) / np.array(measured["supervised", 1])
    zones = script.zones(6)
    cells = " | ".join(f"{relative[mask].mean():.2f}" for mask in zones.values())
    assert f"| activation, CVT | 1 | {cells} |" in printed
    assert "| activation, supervised | 2 | 1.00 ± 0.00 |" in printed
    assert (tmp_path / "figure_4_7.png").stat().st_size > 10_000

    script.main([str(tmp_path / "figure_4_7.json"), "--out", str(tmp_path / "again")])
    assert capsys.readouterr().out == printed
    again = tmp_path / "again" / "figure_4_7.json"
    assert again.read_text() == (tmp_path / "figure_4_7.json").read_text()
    alone = tmp_path / "alone.json"
    alone.write_text(json.dumps([row for row in rows if row["label"] != "CVT"]))
    script.main([str(alone), "--out", str(tmp_path / "alone")])
    assert "CVT" not in capsys.readouterr().out


def test_differences_stand_beside_what_would_be_seen(script):
    """Of three against three seeds of deviation 1, 2.5 is found with a probability of 0.8."""
    scores = np.array([4.0, 5.0, 6.0])
    assert script.difference(scores + 5, scores) == "+5.0 (2.5)"
    assert script.difference(scores[:2] + 5, scores) == "+4.5"


def test_what_cannot_be_compared_is_refused(script, runs, sentences, tmp_path):
    out = ["--out", str(tmp_path / "out")]
    with pytest.raises(MetaseqError, match="--baseline VAT: .*1, 2;.*CVT"):
        script.main([str(runs), *out, "--baseline", "VAT"])
    with pytest.raises(MetaseqError, match="seed 1;.*CVT"):
        script.main([str(runs / "cvt"), *out])
    twice = [script.Places(label, 1, [[1.0]], [[0.5]]) for label in ("supervised", "CVT", "CVT")]
    with pytest.raises(MetaseqError, match="CVT.*seed 1 twice"):
        script.by_label(twice, "supervised")
    damaged = tmp_path / "figure_4_7.json"
    for text in ("{", "[3]", '[{"label": "a"}]'):
        damaged.write_text(text)
        with pytest.raises(MetaseqError, match="figure_4_7.json.*figure_4_7.py"):
            script.main([str(damaged), *out])
    options = ["task=tagging", "task.labelled=chunk", "criterion=tagging", *WORDS, *TINY[-3:]]
    places = [f"data={sentences}", f"save_dir={tmp_path / 'tagger'}", "trainer.max_update=1"]
    TrainingRun(load_config([*options, *places])).train()
    with pytest.raises(MetaseqError, match="task tagging;.*cvt_vision"):
        script.main([str(tmp_path / "tagger"), *out])
    assert not (tmp_path / "out").exists()
