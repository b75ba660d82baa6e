"""A sweep goes on when data, configs or plug-in lie at another place, as long as they
say the same.
"""

import shutil
import sys
from pathlib import Path

import pytest
from outcomes import expect_facts
from sweeping import SHORT, states_of, submitted, sweep, train_in_process

CONFIG = "defaults: [base, _self_]\ntrainer: {max_update: 2}\n"
OPTIONS = [option for option in SHORT if not option.startswith("trainer.max_update")]


@pytest.fixture()
def checkout(moons: Path, tmp_path: Path) -> Path:
    """A folder with a sweep file, its configs, a plug-in and data."""
    place = tmp_path / "first"
    (place / "config").mkdir(parents=True)
    (place / "sweep.yaml").write_text("config_dir: config\nconfig_name: tiny\n")
    (place / "config/tiny.yaml").write_text(CONFIG)
    (place / "plug.py").write_text("PLUGIN = 1\n")
    shutil.copytree(moons, place / "data")
    return place


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training starts no process, but loads the plug-in as another one would."""
    train_in_process(monkeypatch, forget_plug_in)


def forget_plug_in() -> None:
    sys.modules.pop("plug", None)


def launch(place: Path, out: Path, *more: str) -> int:
    forget_plug_in()  # each command is a process of its own
    paths = [place / "sweep.yaml", place / "data", "--user-dir", place / "plug.py"]
    return sweep(*paths, "--out", out, *OPTIONS, *more)


def test_a_moved_checkout_goes_on(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    assert launch(checkout, out) == 0
    other = checkout.rename(tmp_path / "second")
    capsys.readouterr()
    assert launch(other, out) == 0
    assert "nothing to launch" in capsys.readouterr().out
    assert launch(other, out, "--seeds", "1,2") == 0
    assert submitted(out) == ["seed=1", "seed=2"]
    assert {state.state for state in states_of(out).values()} == {"finished"}


def test_other_content_at_another_place_is_another_sweep(
    checkout: Path, moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    assert launch(checkout, out) == 0
    before = (out / "sweep.json").read_bytes()

    def refused(place: Path, *words: str) -> None:
        capsys.readouterr()
        assert launch(place, out) == 2
        error = capsys.readouterr().err
        assert not [word for word in (*words, "the same") if word not in error], error
        assert (out / "sweep.json").read_bytes() == before

    copies = [Path(shutil.copytree(checkout, tmp_path / name)) for name in "abc"]
    (copies[0] / "config/tiny.yaml").write_text(CONFIG.replace("2", "3"))
    refused(copies[0], "another sweep", "config_dir is")
    (copies[1] / "plug.py").write_text("PLUGIN = 2\n")
    refused(copies[1], "another sweep", "user_dir is")
    data = copies[2] / "data"
    for path in data.glob("train.*"):
        path.write_bytes((data / path.name.replace("train", "valid")).read_bytes())
    (data / "manifest.json").unlink()
    refused(copies[2], "another sweep", "data is")
    # Where the old data are gone, the finished runs say which they were.
    shutil.rmtree(checkout)
    capsys.readouterr()
    assert launch(copies[2], out) == 1
    expect_facts(capsys.readouterr().err, "other data")
    assert (out / "sweep.json").read_bytes() == before
