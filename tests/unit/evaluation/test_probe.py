"""Linear probes: the regression in closed form, the choice of the layer, what is compared."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sentence_sets import sentences, write_corpus, write_set

from metaseq_lm.cli import main
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.labelled.baselines import class_of_word
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.words.subwords import TaggedRows
from metaseq_lm.evaluation.probe import RIDGES, _effective_rank, _inputs_of, _part_of, _Ridge
from metaseq_lm.evaluation.suites import (
    OVERALL,
    References,
    Results,
    SuiteRows,
    build_suite,
    share_known,
)

SIZES = "--world-documents 30 --world-held-out 30 --world-labelled 40 --world-pairs 5"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of a small draw of the world quad."""
    folder = tmp_path_factory.mktemp("probe") / "quad"
    assert main(["preprocess", "--world", "quad", *SIZES.split(), "--destdir", str(folder)]) == 0
    return folder


def test_the_ridge_is_that_with_the_fewest_errors_of_items_left_out():
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 3, 60)
    inputs = rng.normal(size=(60, 7)) + 0.7 * np.eye(3, 7)[labels]
    inputs[:, 5] *= 100  # standardised
    inputs[:, 6] = 2.5  # constant
    ridge = _Ridge.fit(inputs, labels, 3)
    x, y = inputs[:, :6], np.eye(3)[labels]
    x = (x - x.mean(0)) / x.std(0)
    errors = []
    for penalty in 60 * RIDGES:
        values = np.array([left_out(x, y, item, penalty) for item in range(60)])
        squared = ((y - values) ** 2).sum()
        errors.append((np.mean(values.argmax(1) != labels), squared))
    best = min(range(len(RIDGES)), key=errors.__getitem__)
    # Neither an end nor what the squared error would choose.
    assert 0 < best < len(RIDGES) - 1 and best != np.argmin([squared for _, squared in errors])
    fit = np.linalg.solve(x.T @ x + 60 * RIDGES[best] * np.eye(6), x.T @ y)
    assert ridge.ridge == RIDGES[best]
    assert ridge.weights[:6] == pytest.approx(fit, abs=1e-10)
    assert ridge.weights[6] == pytest.approx(0, abs=1e-12)
    assert ridge.intercept == pytest.approx(y.mean(0))
    assert ridge.values(inputs).argmax(1).tolist() == (x @ fit + y.mean(0)).argmax(1).tolist()


def left_out(x: np.ndarray, y: np.ndarray, item: int, penalty: float) -> np.ndarray:
    """Return the values of an item of the regression on the others, with a free intercept."""
    others = np.arange(len(x)) != item
    design = np.column_stack([x[others], np.ones(len(x) - 1)])
    size = np.diag([*[penalty] * x.shape[1], 0.0])
    fit = np.linalg.solve(design.T @ design + size, design.T @ y[others])
    return np.asarray(np.append(x[item], 1) @ fit)


def test_more_inputs_than_items():
    rng = np.random.default_rng(4)
    labels = np.arange(12) % 2
    inputs = rng.normal(size=(12, 40)).astype(np.float32)
    inputs[:, 0] += 10 * labels
    assert (_Ridge.fit(inputs, labels, 2).values(inputs).argmax(1) == labels).all()


def test_the_effective_rank_is_a_share_of_the_directions():
    axes = np.concatenate([np.eye(6), -np.eye(6)])
    assert _effective_rank(axes) == pytest.approx(1, abs=1e-12)
    assert _effective_rank(axes + 7) == pytest.approx(1, abs=1e-12)
    assert _effective_rank(axes[:, :3] @ np.ones((3, 6))) == pytest.approx(1 / 6, abs=1e-12)
    # Singular values in the proportion 3 to 1: exp(H) = 4 / 3^(3/4).
    assert _effective_rank(axes[:, :2] * [3, 1]) == pytest.approx(2 / 3**0.75, abs=1e-12)
    assert _effective_rank(np.eye(3, 50)) == pytest.approx(1, abs=1e-12)  # three points, a plane
    assert _effective_rank(np.full((9, 6), 0.1, np.float32)) == 0
    assert _effective_rank(np.ones((1, 6))) == 0


def test_the_class_of_a_word():
    words, labels = np.array([4, 4, 4, 7, 7, 2]), np.array([1, 1, 0, 0, 1, 1])
    # 7 has a tie and 9 does not occur: the majority.
    assert class_of_word(words, labels, np.array([4, 7, 9, 2, 1]), 3).tolist() == [1, 1, 1, 1, 1]
    assert class_of_word(words, labels[::-1].copy(), np.array([2, 9]), 3).tolist() == [1, 1]


class Labels:
    """Layers of states that are labels, of some splits shifted by one: wrong for a probe."""

    longest = 64

    def __init__(self, *shifted: tuple[str, ...]) -> None:
        self.shifted = shifted
        self.read: list[tuple[str, int]] = []

    def at_targets(self, rows: SuiteRows, samples: np.ndarray) -> list[np.ndarray]:
        assert isinstance(rows, TaggedRows)
        labels = rows.targets[rows.words(samples)]
        self.read.append((rows.data.split, len(samples)))
        return self.layers(labels[labels >= 0], rows.data.split, len(rows.classes))

    def means(self, rows: SuiteRows, samples: np.ndarray) -> list[np.ndarray]:
        data = rows.data  # type: ignore[attr-defined]
        return self.layers(data.labels[samples], data.split, len(data.label_names))

    def layers(self, labels: np.ndarray, split: str, count: int) -> list[np.ndarray]:
        return [np.eye(count)[(labels + (split in splits)) % count] for splits in self.shifted]


@pytest.mark.parametrize("name", ["state", "topic"])
def test_the_layer_is_chosen_on_the_valid_split(world, name):
    def score(*shifted: tuple[str, ...], options: tuple[str, ...] = ()) -> Results:
        suite = build_suite("probe", options)
        results: Results = suite.score(suite.read(world / name), Labels(*shifted))
        return results

    results = score(("valid",), ("test",), ())
    accuracies = {group: result.metrics["accuracy"] for group, result in results.items()}
    # Layers 1 and 2 are equal on valid: the first of them, whatever test says.
    assert results[OVERALL].metrics == {**results["layer_1"].metrics, "layer": 1}
    assert results[OVERALL].metrics["valid_accuracy"] == 1
    assert accuracies["layer_1"] < 0.5 and accuracies["layer_0"] == accuracies["layer_2"] == 1
    assert list(results) == [OVERALL, "layer_0", "layer_1", "layer_2", "last"]
    assert "share" not in results[OVERALL].metrics  # the world says not which side labels need
    assert accuracies["last"] == 1
    labels = Manifest.load(world).details["world"]["constants"]["labelled"][name]["labels"]
    assert {result.n for result in results.values()} == {labels}
    # Scored on valid, the last fifth of train chooses, and there all layers are right.
    assert score(("valid",), (), options=("split=valid",))[OVERALL].metrics["layer"] == 0


def test_the_first_items_can_be_read_alone(world):
    for options, sizes in (
        ([], {"train": 40, "valid": 40, "test": 40}),
        (["train=8", "test=5"], {"train": 8, "valid": 5, "test": 5}),
    ):
        suite, states = build_suite("probe", options), Labels(())
        suite.score(suite.read(world / "depth"), states)
        assert dict(states.read) == sizes
    # Without a valid split one in five of the items of train chooses the layer.
    suite, states = build_suite("probe", ["train=10", "split=valid"]), Labels(())
    suite.score(suite.read(world / "depth"), states)
    assert states.read == [("train", 8), ("train", 2), ("valid", 40)]


@pytest.mark.parametrize("name", ["topic", "state", "depth", "head_number"])
def test_references_are_those_of_the_world(world, name):
    constants = Manifest.load(world).details["world"]["constants"]["labelled"][name]
    suite = build_suite("probe")
    references = suite.references(suite.read(world / name), world / name)
    expected = {key: value for key, value in constants.items() if key != "labels"}
    assert references == {OVERALL: {"accuracy": pytest.approx(expected)}}
    part = build_suite("probe", ["test=5"])
    scores = part.references(part.read(world / name), world / name)[OVERALL]["accuracy"]
    assert "bayes" not in scores and "majority" in scores


def test_a_share_is_of_what_is_known_beyond_the_word(tmp_path):
    data = tmp_path / "mirrored"
    assert main(["preprocess", "--world", "mirrored", *SIZES.split(), "--destdir", str(data)]) == 0
    constants = Manifest.load(data).details["world"]["constants"]["labelled"]
    for name in ("pairs_behind", "state", "state_end"):
        exact, suite = constants[name], build_suite("probe")
        items, known = suite.read(data / name), exact["bayes"] - exact["word"]
        results = suite.score(items, Labels((), ("test",)))
        for metrics in (results["layer_0"].metrics, results["layer_1"].metrics):
            assert metrics["share"] == pytest.approx((metrics["accuracy"] - exact["word"]) / known)
            assert metrics["valid_share"] == pytest.approx((1 - exact["word"]) / known)
        for chosen in (suite, build_suite("probe", ["test=5"])):
            levels = chosen.references(chosen.read(data / name), data / name)[OVERALL]["share"]
            assert levels | {"bayes": 1.0, "word": 0.0} == levels
            for reference in ("bayes_left", "bayes_right", "chance", "majority"):
                expected = (exact[reference] - exact["word"]) / known
                assert levels[reference] == pytest.approx(expected)
        assert "bayes_right" in suite.references(items, data / name)[OVERALL]["accuracy"]
    assert share_known(0.7, {"bayes": 0.5, "word": 0.5}) == {}


def test_pairs_have_the_references_of_the_world(world):
    constants = Manifest.load(world).details["world"]["constants"]["pairs"]

    def all_references(*options: str) -> References:
        suite = build_suite("pairs", options)
        return suite.references(suite.read(world / "pairs"), world / "pairs")

    def references(*options: str) -> dict[str, dict[str, float]]:
        return {group: m["accuracy"] for group, m in all_references(*options).items()}

    for kind, expected in constants.items():
        del expected["pairs"]
        assert references()[kind] == expected
    ngram = np.mean([expected["ngram"] for expected in constants.values()])
    of_all = {"chance": 0.5, "ngram": pytest.approx(ngram), "bayes": 1.0}
    assert references()[OVERALL] == of_all
    assert all_references()[OVERALL]["accuracy_macro"] == of_all
    assert references("first=3")["copy"] == {"chance": 0.5}


MISTAKES: list[tuple[str, Callable[[Path], Path], str]] = [
    ("split=dev", lambda world: world / "depth", "no split 'dev', only"),
    ("split=train", lambda world: world / "depth", "is fitted to it"),
    ("train=8", lambda world: world, "tagged sets"),
    ("train=8", lambda world: world / "pairs", "tagged sets"),
    ("train=8", lambda world: world / "nowhere", "no such folder"),
]


@pytest.mark.parametrize("option, folder, reason", MISTAKES)
def test_other_data_are_refused(world, option, folder, reason):
    with pytest.raises(UsageError, match=reason):
        build_suite("probe", [option]).check(folder(world))


def test_the_hash_of_the_data_does_not_depend_on_their_place(world, tmp_path):
    """The manifest of a set has the command that made it, with the folder."""
    again = tmp_path / "again"
    assert main(["preprocess", "--world", "quad", *SIZES.split(), "--destdir", str(again)]) == 0
    suite = build_suite("probe")
    for name in ("topic", "state"):
        assert suite.data_hash(world / name) == suite.data_hash(again / name)
    assert suite.data_hash(world / "topic") != suite.data_hash(world / "state")


def test_words_without_a_label_are_left_out(world):
    rows = TaggedRows(world / "depth", "test", 64)
    part = _part_of(rows, 0, 3)
    assert part.samples.tolist() == [0, 1, 2]
    assert 0 < len(part.labels) < rows.lengths[:3].sum() and part.labels.max() < 4


def test_a_set_too_small_to_choose_a_layer_is_refused(world, tmp_path):
    """Without a valid split a part of train chooses, and one sentence has no part."""
    table = tmp_path / "one.tsv"
    table.write_text("text\tlabel\na\tgood\n")
    files = ["--trainpref", str(table), "--testpref", str(table)]
    assert main(["preprocess", "--labelled", "one", *files, "--destdir", str(world)]) == 0
    suite = build_suite("probe")
    items = suite.read(world / "one")
    with pytest.raises(UsageError, match="no labelled item"):
        suite.references(items, world / "one")
    with pytest.raises(UsageError, match="no labelled item"):
        suite.score(items, Labels())


def test_pairs_are_read_by_difference_and_product():
    """Whether two states are equal is no linear function of the two."""
    states = np.array([[[1.0, -2.0], [3.0, 0.5]]])
    assert _inputs_of(states).tolist() == [[1.0, -2.0, 3.0, 0.5, 2.0, 2.5, 3.0, -1.0]]
    assert _inputs_of(states[:, 0]).tolist() == [[1.0, -2.0]]
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 2, 400)
    first = rng.normal(size=(400, 3))
    pairs = np.stack([first, np.where(labels[:, None], first, -first)], 1)
    hits = [
        (_Ridge.fit(x[:200], labels[:200], 2).values(x[200:]).argmax(1) == labels[200:]).mean()
        for x in (_inputs_of(pairs), pairs.reshape(400, 6))
    ]
    assert hits[0] > 0.95 and hits[1] < 0.65


def test_real_values_are_fitted_with_the_least_squared_error():
    rng = np.random.default_rng(6)
    inputs = rng.normal(size=(50, 4))
    values = inputs @ np.array([1.0, 0.0, -2.0, 0.5]) + 3 + rng.normal(size=50)
    ridge = _Ridge.fit(inputs, values, 0)
    x = (inputs - inputs.mean(0)) / inputs.std(0)
    y = values[:, None]
    errors = []
    for penalty in 50 * RIDGES:
        predicted = np.array([left_out(x, y, item, penalty) for item in range(50)])
        errors.append(((predicted - y) ** 2).sum())
    assert ridge.ridge == RIDGES[np.argmin(errors)] and ridge.intercept == pytest.approx(y.mean(0))
    assert ridge.values(inputs).shape == (50, 1)


def test_sets_of_a_benchmark_have_its_metrics(tmp_path):
    """The main one, which comes first, chooses the layer; references have them, too."""
    rng = np.random.default_rng(7)
    write_corpus(tmp_path)
    gold = {"train": [0, 1, 1] * 8, "valid": [0, 1, 1, 0, 1], "test": [0, 1, 1, 1, 0, 1]}
    splits = {name: ([sentences(rng, len(y))], y) for name, y in gold.items()}
    write_set(tmp_path / "set", splits, ("0", "1"), benchmark="glue/CoLA")
    suite = build_suite("probe")
    items = suite.read(tmp_path / "set")
    results = suite.score(items, Labels(("valid", "test"), ("valid",), ()))
    metrics = results[OVERALL].metrics
    assert list(metrics) == [
        *("matthews", "accuracy", "valid_matthews", "valid_accuracy", "ridge", "layer")
    ]
    assert (metrics["matthews"], metrics["valid_matthews"], metrics["layer"]) == (1, 1, 2)
    assert results["layer_0"].metrics["matthews"] == -1
    references = suite.references(items, tmp_path / "set")[OVERALL]
    assert references["matthews"]["majority"] == 0
    assert references["accuracy"]["majority"] == pytest.approx(4 / 6)
    assert references["accuracy"]["chance"] == 0.5 and "chance" not in references["matthews"]
