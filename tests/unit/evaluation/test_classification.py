import math

import pytest

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.evaluation.classification import (
    CORRELATIONS,
    _pearson_spearman,
    accuracy,
    f1_binary,
    f1_macro,
    matthews,
    pearson,
    spearman,
)

# Label 1: 2 true positives, 1 false positive, 1 false negative; label 0: 1, 1, 1.
GOLD = [1, 1, 1, 0, 0]
PREDICTED = [1, 1, 0, 0, 1]


def test_accuracy():
    assert accuracy(GOLD, PREDICTED) == 3 / 5
    assert accuracy(["a", "b"], ["a", "c"]) == 0.5


def test_f1_by_hand():
    assert math.isclose(f1_binary(GOLD, PREDICTED), 2 / 3)
    assert math.isclose(f1_binary(GOLD, PREDICTED, positive=0), 1 / 2)
    assert math.isclose(f1_macro(GOLD, PREDICTED), (2 / 3 + 1 / 2) / 2)


def test_an_absent_or_unpredicted_label_counts_zero():
    assert math.isclose(f1_macro(GOLD, PREDICTED, [0, 1, 2]), (2 / 3 + 1 / 2) / 3)
    assert math.isclose(f1_macro([0, 0, 1], [0, 0, 0], [0, 1]), 0.8 / 2)
    assert f1_binary([0, 0], [0, 0]) == 0.0


def test_a_prediction_outside_the_labels_is_wrong():
    assert math.isclose(f1_macro(["y", "n"], ["y", "?"], ["y", "n"]), 0.5)


def test_matthews_by_hand():
    # (2*1 - 1*1) / sqrt(3 * 3 * 2 * 2)
    assert math.isclose(matthews(GOLD, PREDICTED), 1 / 6)
    assert matthews([0, 1], [1, 1]) == 0.0
    assert math.isclose(matthews([0, 1], [1, 0]), -1.0)


def test_correlations_by_hand():
    gold, predicted = [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 8.0]
    # Deviations (-1.5, -.5, .5, 1.5) and (-2.5, -1.5, -.5, 4.5).
    by_hand = (3.75 + 0.75 - 0.25 + 6.75) / math.sqrt(5 * 29)
    assert math.isclose(pearson(gold, predicted), by_hand)
    assert math.isclose(spearman(gold, predicted), 1.0)
    assert math.isclose(_pearson_spearman(gold, predicted), (by_hand + 1) / 2)


@pytest.mark.parametrize(
    "metric", [accuracy, f1_macro, f1_binary, matthews, *CORRELATIONS.values()]
)
def test_every_metric_returns_a_plain_float_and_refuses_unpaired_items(metric):
    assert type(metric(GOLD, PREDICTED)) is float
    for gold, predicted in (([1, 2], [1]), ([], []), ([[1]], [[1]])):
        with pytest.raises(MetaseqError, match="not pair up"):
            metric(gold, predicted)


@pytest.mark.filterwarnings("ignore:An input array is constant")
def test_constant_scores_have_no_correlation():
    assert math.isnan(pearson([1, 2, 3], [5, 5, 5]))
    with pytest.raises(MetaseqError, match="two items"):
        spearman([1], [1])
