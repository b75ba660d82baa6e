"""Fixtures that tests of several folders share: one thread, the registered methods, small data."""

import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import bam_bench
import battery
import pytest
import sharing
import small_data
import tartan_bench
import torch
import warm_server
import word_data
from bare import Bare, bare_place
from hypothesis import settings
from meta_pseudo_data import make_even, make_ragged
from registrations import forgotten
from small_data import make_moons
from superglue_data import make_superglue

from metaseq_lm import plugins
from metaseq_lm.training.run import TrainingRun

ROOT = Path(__file__).resolve().parents[1]
# A busy machine is no failure: no test has a time limit of its own.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


# Files that take longest, so that none of them runs alone in the end.
LONG = [
    "test_battery",
    "test_battery_replicas",
    "test_launch",
    "test_kill_and_resume",
    "test_sharded_checkpoints",
    "test_compile",
    "test_documentation",
    "test_resume_matrix",
    "test_malicious_files",
    "test_sweep_stages",
    "test_soft_gradient",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first; the others stay in their order."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models are fastest on one thread, and tests must not fight for cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def unsynced() -> Iterator[None]:
    """No file of a test has to outlive a power cut; test_durability.py has a disk of its own."""

    def fsync(descriptor: int) -> None:
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    """Every built-in name is registered, and the example plug-in with them."""
    plugins.load_all(str(ROOT / "user_dir"))


@pytest.fixture(scope="session", autouse=True)
def warm() -> None:
    """Sweeps in this process have a server that has imported torch already."""
    warm_server.replace("forkserver")


@pytest.fixture(scope="module", autouse=True)
def unregistered(registered: None) -> Iterator[None]:
    """What the tests of a file register is gone after them."""
    with forgotten():
        yield


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    """An installation of the wheel without extras."""
    installed = Bare(bare_place(tmp_path_factory))
    yield installed
    installed.close()


@pytest.fixture(scope="session")
def moons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A binarised Two Moons folder with the labelled set which_moon_20.

    `battery.configure` makes what else a case needs; `small_data.ensure` does on request.
    """
    made = sharing.once(tmp_path_factory, "moons", lambda place: make_moons(place / "moons"))
    place = tmp_path_factory.mktemp("data")
    shutil.copytree(made, place, dirs_exist_ok=True)
    return place / "moons"


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that holds an update of runs with `slow_updates` until a signal comes."""
    file = tmp_path / "held"
    file.touch()
    monkeypatch.setenv("METASEQ_LM_HELD", str(file))
    return file


@pytest.fixture(scope="session")
def pairs(moons: Path) -> Path:
    """Two Moons with the labelled sets "pairs" and "scores"."""
    for name in ("pairs", "scores"):
        small_data.ensure(moons, name)
    return moons


@pytest.fixture(scope="session")
def documents(moons: Path) -> Path:
    """A corpus of documents, beside Two Moons."""
    return small_data.ensure(moons, "documents")


@pytest.fixture(scope="session")
def whole(moons: Path, tmp_path_factory: pytest.TempPathFactory) -> battery.Whole:
    """The weights of a case after the updates of `battery.dropped` on whole batches, or before."""

    @functools.cache
    def weights(case: battery.Case, when: str = "after") -> dict[str, torch.Tensor]:
        def train(place: Path) -> None:
            more = battery.dropped("trainer.valid_split=''")  # the others validate
            run = TrainingRun(battery.configure(moons, place / "run", case, *more))
            torch.save(battery.weights_of(run), place / "before.pt")
            with battery.uncounted():
                run.train()
            torch.save(battery.weights_of(run), place / "after.pt")

        folder = sharing.once(tmp_path_factory, f"whole/{case[0]}-{case[1]}", train)
        return torch.load(folder / f"{when}.pt", weights_only=True)

    return weights


@pytest.fixture(scope="session")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder of words: text, the tagged sets "chunk" and "pos", the treebank "dep"."""
    folder = tmp_path_factory.mktemp("sentences")
    word_data.binarise(folder, folder / "data")
    return folder / "data"


@pytest.fixture(scope="session")
def bam_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with three small labelled sets."""
    return bam_bench.make_data(tmp_path_factory.mktemp("bam") / "data")


@pytest.fixture(scope="session")
def teacher_runs(bam_sets: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The run folders of a teacher of two sets and of one of the third."""
    place = tmp_path_factory.mktemp("teachers")
    return [
        bam_bench.teacher(place, bam_sets, "words", "values"),
        bam_bench.teacher(place, bam_sets, "few"),
    ]


@pytest.fixture(scope="session")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data like Two Moons: every line has 34 tokens."""
    return make_even(tmp_path_factory.mktemp("even"))


@pytest.fixture(scope="session")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data with lines of 6 to 34 tokens, so that batches are padded."""
    return make_ragged(tmp_path_factory.mktemp("ragged"))


@pytest.fixture(scope="session")
def superglue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of sentences, and MultiRC, ReCoRD and CB as text."""
    return make_superglue(tmp_path_factory.mktemp("superglue"))


@pytest.fixture(scope="session")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a labelled set "topic" and the splits "train" and "long" of its domain."""
    return tartan_bench.make_data(tmp_path_factory.mktemp("topics"))
