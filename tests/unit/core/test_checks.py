"""What checks of options let through, and what they say else."""

import pytest

from metaseq_lm.core.checks import check_least, check_numbers, check_share
from metaseq_lm.core.errors import UsageError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task.epochs": float("inf")}, "task.epochs is inf"),
        ({"criterion.weights": [1, float("nan")]}, "criterion.weights is .*nan"),
        ({"seed": 1 << 63}, "seed is 9223372036854775808"),
    ],
)
def test_numbers(options: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_numbers({"seed": 1, "task.epochs": 2.5, "label": "nan", **options})


def test_least() -> None:
    check_least({"a": 1, "b": 7.5}, 1)
    for value in (0, -3.5, float("nan")):
        with pytest.raises(UsageError, match=f"task.b must be at least 1, got {value}"):
            check_least({"task.a": 1, "task.b": value}, 1)


@pytest.mark.parametrize(
    ("value", "whole", "good"),
    [
        *((0, True, True), (1, True, True), (1, False, False), (0.999, False, True)),
        *((-0.1, True, False), (1.1, True, False), (float("nan"), True, False)),
    ],
)
def test_share(value: float, whole: bool, good: bool) -> None:
    if good:
        check_share("task.x", value, whole)
        return
    with pytest.raises(UsageError, match=f"task.x must be from 0 to .*1, got {value}"):
        check_share("task.x", value, whole)
