"""Data folders as version 0.2 wrote them before sets shared columns: a small set of each kind.

They are stored, because a test that writes them anew would not notice a change of the format.
"""

import shutil
from pathlib import Path

import pytest

from metaseq_lm.data.doctor.examine import examine
from metaseq_lm.data.images import load_images
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.parallel.sets import ParallelSet
from metaseq_lm.data.squad.sets import SquadSet
from metaseq_lm.data.words.sets import WordSet

STORED = Path(__file__).resolve().parents[2] / "support" / "data_folders.tar.xz"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    shutil.unpack_archive(STORED, folder, filter="data")
    return folder


@pytest.mark.parametrize("folder", ["data", "words", "images"])
def test_the_doctor_reads_every_byte(stored: Path, folder: str) -> None:
    levels = [finding.level for finding in examine(stored / folder, full=True)]
    assert "ok" in levels and "error" not in levels


def test_sets(stored: Path) -> None:
    pairs = LabelledSet(stored / "data" / "pairs", "train")
    assert pairs.label_names == ["no", "yes"] and pairs.labels is not None
    assert pairs.labels.tolist() == [1, 0] and pairs.inputs[0].sizes.tolist() == [2, 2]
    assert pairs.rows is None and pairs.benchmark is None
    rte = LabelledSet(stored / "data" / "RTE", "train")
    assert rte.benchmark is not None and rte.benchmark.name == "glue/RTE"
    assert rte.rows == [{"idx": 0}, {"idx": 1}]
    questions = SquadSet(stored / "data" / "SQuAD-2", "train")
    assert questions.impossible.tolist() == [False, True] and questions.text(0, 1, 1) == "cat"
    assert questions.golds() == {"q1": ["cat"], "q2": []}
    text = WordSet(stored / "words", "train")
    assert text.surface(text.lengths[:1] * 0) == [["the", "cat", "sat", "on", "the", "mat"]]
    tags = WordSet(stored / "words" / "tags", "train")
    assert tags.label_names == ["DT", "NN", "VB"] and tags.labels is not None
    assert tags.labels[1].tolist() == [0, 1, 2]
    trees = WordSet(stored / "words" / "trees", "train")
    assert trees.heads is not None and trees.heads[0].tolist() == [2, 0]
    translated = ParallelSet(stored / "words" / "pairs", "valid")
    assert translated.references == ["die Katze", "ein Hund"] and len(translated) == 2
    assert load_images(stored / "images", "train").labels.tolist() == [1, 0]
