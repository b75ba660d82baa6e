"""Metrics of labelled sets that are of no benchmark."""

import numpy as np
import pytest

from metaseq_lm.evaluation.benchmarks import general_metrics


def test_every_class_counts_in_the_macro_f1() -> None:
    """Class 2 of 3 neither occurs nor is predicted; its F1 is 0."""
    gold, scores = np.array([0, 0, 1, 1]), np.eye(3)[[0, 1, 1, 1]]
    found = general_metrics(gold, scores)
    assert list(found) == ["accuracy", "f1_macro"] and found["accuracy"] == 0.75
    assert found["f1_macro"] == pytest.approx((2 / 3 + 4 / 5 + 0) / 3)
