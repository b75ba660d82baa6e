"""Metrics of GLUE and SuperGLUE against scikit-learn, scipy and naive definitions."""

import math
import re
import string
import warnings

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from benchmark_files import BENCHMARKS
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.registry import SUITES
from metaseq_lm.evaluation.benchmarks import LabelledItems, labelled_results
from metaseq_lm.evaluation.squad import _normalize_answer, exact_match, token_f1

# Few values, so that ties, constant columns and one-sided predictions are common.
score = st.sampled_from([-1.0, 0.0, 0.5, 2.0])
TWO = ["0", "1"]


@st.composite
def cases(draw, classes, least=1):
    """Gold classes (rows,) and scores (rows, classes)."""
    rows = draw(st.integers(least, 12))
    gold = draw(arrays(np.int64, rows, elements=st.integers(0, classes - 1)))
    return gold, draw(arrays(np.float64, (rows, classes), elements=score))


def metrics(name, gold, scores, rows, labels):
    items = LabelledItems(BENCHMARKS[name], np.asarray(gold), rows, list(labels))
    return labelled_results(items, scores)["overall"].metrics


def decided(scores):
    """The first of the greatest scores, row by row."""
    return [max(range(len(row)), key=lambda k: (row[k], -k)) for row in scores.tolist()]


def f1_by_hand(gold, predicted, positive):
    pairs = list(zip(gold, predicted))
    hit = sum(g == p == positive for g, p in pairs)
    given = sum(p == positive for _, p in pairs)
    wanted = sum(g == positive for g, _ in pairs)
    return 2 * hit / (given + wanted) if hit else 0.0


ACCURACY = [name for name, task in BENCHMARKS.items() if task.metric == "accuracy"]


@pytest.mark.parametrize("name", ACCURACY)
@given(st.data())
def test_accuracy(name, data):
    labels = list(BENCHMARKS[name].labels)
    gold, scores = data.draw(cases(len(labels)))
    found = metrics(name, gold, scores, None, labels)
    assert list(found) == ["accuracy"]
    assert found["accuracy"] == pytest.approx(
        sum(g == p for g, p in zip(gold, decided(scores))) / len(gold)
    )


@pytest.mark.parametrize("name", ["glue/CoLA", "glue/AX", "superglue/AX-b"])
@given(st.data())
def test_matthews(name, data):
    labels = list(BENCHMARKS[name].labels)
    gold, scores = data.draw(cases(len(labels)))
    found = metrics(name, gold, scores, None, labels)
    predicted = decided(scores)
    # Gorodkin's definition by covariances of one-hot rows, 0 if a side is constant.
    x, y = np.eye(len(labels))[gold], np.eye(len(labels))[predicted]
    x, y = x - x.mean(0), y - y.mean(0)
    norm = math.sqrt((x * x).sum() * (y * y).sum())
    by_hand = (x * y).sum() / norm if norm > 1e-12 else 0.0
    assert list(found) == ["matthews"]
    assert found["matthews"] == pytest.approx(by_hand, abs=1e-9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        independent = sklearn.metrics.matthews_corrcoef(gold, predicted)
    assert found["matthews"] == pytest.approx(independent, abs=1e-9)


@pytest.mark.parametrize("name", ["glue/MRPC", "glue/QQP"])
@pytest.mark.parametrize("labels", [["0", "1"], ["1", "0"]])
@given(cases(2))
def test_binary_f1_and_accuracy(name, labels, case):
    """The positive class is "1", wherever it stands."""
    gold, scores = case
    found = metrics(name, gold, scores, None, labels)
    predicted, positive = decided(scores), labels.index("1")
    f1 = f1_by_hand(gold.tolist(), predicted, positive)
    right = sklearn.metrics.accuracy_score(gold, predicted)
    assert list(found) == ["mean", "f1", "accuracy"]
    assert found == pytest.approx({"mean": (f1 + right) / 2, "f1": f1, "accuracy": right})


@given(cases(3))
def test_macro_f1_of_cb_counts_all_three_classes(case):
    gold, scores = case
    labels = list(BENCHMARKS["superglue/CB"].labels)
    found = metrics("superglue/CB", gold, scores, None, labels)
    predicted = decided(scores)
    f1 = sum(f1_by_hand(gold.tolist(), predicted, k) for k in range(3)) / 3
    right = sklearn.metrics.accuracy_score(gold, predicted)
    assert found == pytest.approx({"mean": (f1 + right) / 2, "f1": f1, "accuracy": right})


number = st.floats(-10, 10, width=16)


@given(st.data())
def test_correlations(data):
    rows = data.draw(st.integers(2, 12))
    gold = data.draw(arrays(np.float64, rows, elements=number))
    scores = data.draw(arrays(np.float64, rows, elements=st.one_of(number, score)))
    found = metrics("glue/STS-B", gold, scores, None, [])
    assert list(found) == ["mean", "pearson", "spearman"]
    if (gold == gold[0]).all() or (scores == scores[0]).all():
        assert all(math.isnan(value) for value in found.values())
        return
    assume(gold.std() > 1e-3 and scores.std() > 1e-3)
    ranks = scipy.stats.rankdata(gold), scipy.stats.rankdata(scores)  # ties share a rank
    expected = {"pearson": np.corrcoef(gold, scores)[0, 1], "spearman": np.corrcoef(*ranks)[0, 1]}
    expected["mean"] = (expected["pearson"] + expected["spearman"]) / 2
    assert found == pytest.approx(expected, abs=1e-6)
    assert metrics("glue/STS-B", gold, scores[:, None], None, []) == found


@given(st.data())
def test_multirc(data):
    gold, scores = data.draw(cases(2))
    ids = st.integers(0, 2)
    rows = [
        {"passage": data.draw(ids), "question": data.draw(ids), "idx": i} for i in range(len(gold))
    ]
    found = metrics("superglue/MultiRC", gold, scores, rows, TWO)
    predicted = decided(scores)
    questions = {(row["passage"], row["question"]) for row in rows}
    whole = 0
    for question in questions:
        mine = [i for i, row in enumerate(rows) if (row["passage"], row["question"]) == question]
        whole += all(gold[i] == predicted[i] for i in mine)
    expected = {"f1a": f1_by_hand(gold.tolist(), predicted, 1), "em": whole / len(questions)}
    expected["mean"] = sum(expected.values()) / 2
    assert next(iter(found)) == "mean" and found == pytest.approx(expected)


def official_normalize(text):
    """SQuAD's order of steps, spelt out."""
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


words = st.lists(
    st.sampled_from(["the", "Ann", "ann's", "U.S.", "a", "b-c", "--", "An"]), max_size=4
)


@given(words.map(" ".join), words.map(" ".join))
def test_answers(gold, predicted):
    assert _normalize_answer(gold) == official_normalize(gold)
    ours, theirs = official_normalize(predicted).split(), official_normalize(gold).split()
    assert exact_match(gold, predicted) == (ours == theirs)
    left, shared = list(theirs), 0
    for word in ours:
        if word in left:
            left.remove(word)
            shared += 1
    if shared:
        precision, recall = shared / len(ours), shared / len(theirs)
        assert token_f1(gold, predicted) == pytest.approx(2 / (1 / precision + 1 / recall))
    else:
        assert token_f1(gold, predicted) == 0.0


@given(st.data())
def test_record(data):
    entity = words.map(" ".join)
    queries = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=10))
    answers = {q: data.draw(st.lists(entity, max_size=2)) for q in set(queries)}
    rows = [{"idx": q, "entity": data.draw(entity), "answers": answers[q]} for q in queries]
    scores = data.draw(arrays(np.float64, (len(rows), 2), elements=score))
    found = metrics("superglue/ReCoRD", np.zeros(len(rows)), scores, rows, TWO)
    f1s, ems = [], []
    for query in set(queries):
        mine = [i for i, q in enumerate(queries) if q == query]
        chosen = rows[max(mine, key=lambda i: (scores[i, 1] - scores[i, 0], -i))]["entity"]
        f1s.append(max([token_f1(a, chosen) for a in answers[query]], default=0))
        ems.append(max([exact_match(a, chosen) for a in answers[query]], default=0))
    expected = {"f1": np.mean(f1s), "em": np.mean(ems)}
    assert found == pytest.approx(expected | {"mean": (expected["f1"] + expected["em"]) / 2})
    # Only the order within a query matters, not the scale: probabilities do as well as logits.
    liking = (scores[:, 1] - scores[:, 0]).tolist()
    if len(set(liking)) == len(liking):  # rounding may part equal ones
        odds = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        again = metrics("superglue/ReCoRD", np.zeros(len(rows)), odds, rows, TWO)
        assert again == pytest.approx(found)


@given(cases(2, least=2))
def test_gender_parity(case):
    gold, scores = case
    rows = [{"idx": i, "pair_id": i // 2} for i in range(len(gold))]
    labels = list(BENCHMARKS["superglue/AX-g"].labels)
    found = metrics("superglue/AX-g", gold, scores, rows, labels)
    predicted = decided(scores)
    pairs = [predicted[i : i + 2] for i in range(0, len(predicted), 2)]
    assert found["gender_parity"] == pytest.approx(np.mean([len(set(p)) == 1 for p in pairs]))
    assert list(found) == ["accuracy", "gender_parity"]
    without = metrics(
        "superglue/AX-g", gold, scores, [{"idx": i} for i in range(len(gold))], labels
    )
    assert without["accuracy"] == found["accuracy"] and np.isnan(without["gender_parity"])


# The names of the results of each metric, the main one first.
RESULTS = {
    "accuracy": ["accuracy"],
    "matthews": ["matthews"],
    "f1_accuracy": ["mean", "f1", "accuracy"],
    "accuracy_f1": ["accuracy", "f1"],
    "macro_f1_accuracy": ["mean", "f1", "accuracy"],
    "correlations": ["mean", "pearson", "spearman"],
    "multirc": ["mean", "f1a", "em"],
    "record": ["mean", "f1", "em"],
    "gender_parity": ["accuracy", "gender_parity"],
    "accuracy_by_level": ["accuracy", "accuracy_middle", "accuracy_high"],
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_official_metrics(name):
    assert name in SUITES.names()
    task = BENCHMARKS[name]
    count = max(len(task.labels), 1)
    fact = {
        "idx": 0,
        "passage": 0,
        "question": 0,
        "entity": "a",
        "answers": ["a"],
        "pair_id": 0,
        "level": "middle",
    }
    rows = [{**fact, "idx": i} for i in range(4)]
    gold = [0.0, 1.0, 1.0, 0.0]
    rng = np.random.default_rng(0)
    scores = rng.random((4, count))
    found = metrics(name, gold, scores, rows, task.labels)
    assert list(found) == RESULTS[task.metric]
    assert all(type(value) is float for value in found.values())
    scores[2, 0] = math.nan
    lost = metrics(name, gold, scores, rows, task.labels)
    assert list(lost) == RESULTS[task.metric] and all(map(math.isnan, lost.values()))


@pytest.mark.parametrize(
    "name, gold, scores, rows, labels, message",
    [
        ("glue/RTE", [0, 1], [[0, 1]], None, TWO, "2 gold labels and 1 scores do not"),
        ("glue/RTE", [0], [[0, 1, 2]], None, TWO, r"shape \(1, 3\), expected \(rows, 2\)"),
        ("glue/RTE", [0], [1], None, TWO, r"shape \(1,\), expected \(rows, 2\)"),
        ("glue/STS-B", [0], [[0, 1]], None, [], r"shape \(1, 2\), expected \(rows,\)"),
        ("glue/STS-B", [0.0], [1.0], None, [], "at least two items"),
        ("glue/RTE", [], np.zeros((0, 2)), None, TWO, "do not pair up"),
        ("glue/MRPC", [0], [[0, 1]], None, ["no", "yes"], "no label '1' among no, yes"),
        ("superglue/MultiRC", [0], [[0, 1]], None, TWO, "0 rows.* 1 scores"),
        ("superglue/MultiRC", [0], [[0, 1]], [{"passage": 1}], TWO, "row 1 has no 'question'"),
        ("superglue/ReCoRD", [], np.zeros((0, 2)), [], TWO, "no rows"),
    ],
)
def test_parts_that_do_not_belong_together(name, gold, scores, rows, labels, message):
    with pytest.raises(MetaseqError, match=message):
        metrics(name, gold, scores, rows, labels)


def test_cloth_is_grouped_by_the_level_of_the_school():
    rows = [{"level": level} for level in ("middle", "high", "high", "middle", "high")]
    gold, scores = np.array([0, 1, 2, 3, 0]), np.eye(4)[[0, 1, 1, 0, 0]]
    items = LabelledItems(BENCHMARKS["cloth/CLOTH"], gold, rows, ["A", "B", "C", "D"])
    results = labelled_results(items, scores)
    found = {name: (group.n, group.metrics["accuracy"]) for name, group in results.items()}
    assert found == {"overall": (5, 3 / 5), "high": (3, 2 / 3), "middle": (2, 1 / 2)}
    assert results["overall"].metrics["accuracy_high"] == 2 / 3
