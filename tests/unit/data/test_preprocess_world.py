"""`preprocess --world`: an ordinary data folder, its sets and pairs, and mistakes of users."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from outcomes import expect_error

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.preprocess.world import _round_floats, load_world
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.storage.manifest import Manifest, verify
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.data.words.sets import WordSet
from metaseq_lm.data.words.tags import UNLABELLED
from metaseq_lm.evaluation.minimal_pairs import read_pairs

SMALL = ["--world-documents", "60", "--world-held-out", "20"]
SMALL += ["--world-labelled", "12", "--world-pairs", "9"]
QUAD = ["preprocess", "--world", "quad", "--world-seed", "11"]
SETS = ("topic", "state", "depth", "head_number")


def make(folder: Path, *more: str) -> Path:
    """Make a small data folder of the world."""
    assert main([*QUAD, *SMALL, *more, "--destdir", str(folder), "--quiet"]) == 0
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small data folder of the world."""
    return make(tmp_path_factory.mktemp("world") / "quad")


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each file but the manifests, which have the command."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_same_seed_same_bytes(data, tmp_path):
    again, other = make(tmp_path / "again"), make(tmp_path / "other", "--world-seed", "12")
    assert contents(again) == contents(data)
    assert contents(other).keys() == contents(data).keys()
    assert contents(other)["train.bin"] != contents(data)["train.bin"]
    more = make(tmp_path / "more", "--world-documents", "80")
    assert contents(more)["train.bin"].startswith(contents(data)["train.bin"])
    assert contents(more)["valid.bin"] == contents(data)["valid.bin"]


@pytest.mark.parametrize("killed", ["before the pairs", "in a set", "in the corpus"])
def test_a_killed_command_makes_the_rest(killed, data, tmp_path):
    again = make(tmp_path / "again")
    if killed == "before the pairs":
        shutil.rmtree(again / "pairs")
    else:
        place = again / "depth" if killed == "in a set" else again
        (place / ".preprocess").mkdir()
        (place / "manifest.json").rename(place / ".preprocess/manifest.json")
        next(place.glob("valid*.idx")).unlink()
    assert contents(make(again)) == contents(data) and verify(again) == []
    shutil.rmtree(again / "pairs")
    assert main([*QUAD, *SMALL, "--workers", "1", "--destdir", str(again), "--quiet"]) == 2


def test_the_corpus_is_of_the_world(data):
    manifest, tokenizer = Manifest.load(data), load_tokenizer(data)
    assert verify(data) == [] and manifest.kind == "corpus"
    assert {name: split["documents"] for name, split in manifest.splits.items()} == {
        "train": 60,
        "valid": 20,
        "test": 20,
    }
    # Five special symbols: [PAD] [MASK] [SEP] [CLS0] [UNK].
    assert len(tokenizer.vocabulary) == 5 + 99
    world = load_world(data)
    texts = [tokenizer.decode(row) for row in IndexedDataset(data / "train")]
    assert texts[0].count(".") == 4 and "[UNK]" not in " ".join(texts)
    assert np.isfinite(world.log_probs(world.encode(texts))).all()
    about = json.loads((data / "world.json").read_text())
    assert (about["name"], about["seed"]) == ("quad", 11)
    assert about["parameters"] == _round_floats(world.parameters())
    assert about["parameters"]["nouns"] == pytest.approx(np.array(world.parameters()["nouns"]))
    constants = manifest.details["world"]["constants"]
    assert constants == about["constants"]
    assert 50 < constants["losses"]["document"]["mean"] < 62
    assert constants["pairs"]["copy"] | {"ngram": 0} == {
        "pairs": 9,
        "bayes": 1.0,
        "ngram": 0,
        "chance": 0.5,
    }


def test_the_last_digit_does_not_change_the_data():
    """Processors differ in it, and with it would the hash of the data."""
    content = {"a": [1 / 3, (2.0, 7)], "b": {"c": "text", "d": 12_345_678_901, "e": 1e-9 / 3}}
    other = {"a": [1 / 3 + 1e-16, [2.0, 7]], "b": content["b"] | {"e": 1e-9 / 3 + 1e-25}}
    assert content["a"] != other["a"]
    assert _round_floats(content) == _round_floats(other)
    assert _round_floats(content)["b"]["d"] == 12_345_678_901
    assert _round_floats(content)["a"][0] == pytest.approx(1 / 3, rel=1e-7)


def test_labelled_sets_have_the_labels_of_the_world(data):
    world = load_world(data)
    topics = LabelledSet(data / "topic", "test")
    tokenizer = load_tokenizer(data)
    tokens = world.encode([tokenizer.decode(row) for row in topics.inputs[0]])
    right = world.posterior("topic", tokens).argmax(axis=1) == topics.labels
    assert len(topics) == 12 and topics.label_names == list(world.label_sets["topic"])
    scores = Manifest.load(data).details["world"]["constants"]["labelled"]["topic"]
    assert right.mean() == pytest.approx(scores["bayes"])
    for name in SETS[1:]:
        words = WordSet(data / name, "test")
        assert words.label_names == [*world.label_sets[name], UNLABELLED]
        for row in range(len(words)):
            text = words.surface(np.array([row]))[0]
            labels = np.asarray(words.labels[row])
            posterior = world.posterior(name, world.encode([" ".join(text)]))[0, : len(labels)]
            labelled = labels != len(world.label_sets[name])
            assert labelled.any() and not np.isnan(posterior[labelled]).any()
            if name != "state":
                assert (posterior[labelled].argmax(axis=1) == labels[labelled]).all()


def test_what_labels_need_is_printed_where_a_world_knows_it(tmp_path, capsys):
    printed = {}
    for world in ("quad", "mirrored"):
        folder = tmp_path / world
        assert main(["preprocess", "--world", world, *SMALL, "--destdir", str(folder)]) == 0
        printed[world] = capsys.readouterr()
    assert "needs" not in "".join(printed["quad"])
    exact = json.loads((folder / "world.json").read_text())["constants"]["labelled"]
    lines = map(str.split, "".join(printed["mirrored"]).splitlines())
    rows = {words[0]: words[1:] for words in lines if words and words[0] in ("set", *exact)}
    assert rows.pop("set") == ["needs", "word", "left", "right", "both"]
    assert rows.keys() == {name for name in exact if not name.startswith("topic")}
    for name, (need, *values) in rows.items():
        scores = [exact[name][key] for key in ("word", "bayes_left", "bayes_right", "bayes")]
        assert values == [f"{score:.3f}" for score in scores]
        assert need == ("later" if name.endswith("_end") else exact[name]["needs"] or "-")


def test_pairs_are_those_that_the_suite_reads(data):
    world = load_world(data)
    for kind in world.pair_kinds:
        pairs, _ = read_pairs(str(data / "pairs" / f"{kind}.jsonl"))
        assert len(pairs) == 9 and {pair.groups for pair in pairs} == {(kind,)}
        good = world.encode([pair.good.text for pair in pairs])
        bad = world.encode([pair.bad.text for pair in pairs])
        assert np.isfinite(world.log_probs(good)).all() and (good != bad).sum() == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world", "qaud"], "unknown world 'qaud'. Did you mean 'quad'?"),
        ([*QUAD[1:], "--world-documents", "0"], "--world-documents must be at least 1, got 0"),
        ([*QUAD[1:], "--world-seed", "-1"], "--world-seed must be at least 0"),
        ([*QUAD[1:], "--world-documents", "many"], "--world-documents"),
        ([*QUAD[1:], "--world-options", "topcs=3"], "Did you mean 'topics'?"),
        ([*QUAD[1:], "--world-options", "topics"], "topics: world quad"),
        ([*QUAD[1:], "--world-options", "topics=x"], "topics=x"),
        ([*QUAD[1:], "--trainpref", "text.txt"], "leave out --trainpref"),
        ([*QUAD[1:], "--documents", "10"], "--documents"),
        (["--world-documents", "10"], "give --world NAME as well"),
    ],
)
def test_mistakes_are_refused(tmp_path, capsys, options, message):
    assert main(["preprocess", "--destdir", str(tmp_path / "new"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_folder_with_data_is_not_replaced(data, tmp_path, capsys):
    expect_error(capsys, main([*QUAD, *SMALL, "--destdir", str(data)]), 2, f"{data}: already holds")
    folder = make(tmp_path / "own")
    for path in [*folder.glob("*.bin"), *folder.glob("*.idx"), folder / "manifest.json"]:
        path.unlink()
    expect_error(capsys, main([*QUAD, *SMALL, "--destdir", str(folder)]), 2, "topic: already holds")
    assert not (folder / "train.bin").exists()
    make(folder, "--overwrite")
    assert contents(folder) == contents(data)


def test_a_world_that_makes_no_pairs_is_an_error(tmp_path, capsys):
    command = [*QUAD, *SMALL, "--world-options", "names=1", "--destdir", str(tmp_path / "new")]
    expect_error(capsys, main(command), 1, "pairs copy")


def test_other_folders_are_of_no_world(tmp_path):
    (tmp_path / "text.txt").write_text("a b c\n")
    command = ["preprocess", "--trainpref", str(tmp_path / "text.txt"), "--tokenizer", "word"]
    assert main([*command, "--destdir", str(tmp_path / "data")]) == 0
    with pytest.raises(MetaseqError, match="of a world"):
        load_world(tmp_path / "data")
