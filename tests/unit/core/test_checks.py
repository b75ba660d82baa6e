"""What checks of options let through, and what they say else."""

from dataclasses import dataclass, fields

import pytest

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import check_options, option, with_default


@dataclass
class Ranges:
    """Options with ranges."""

    least: float = option(1.0, "at least 1", at_least=1)
    share: float = option(0.5, "a share", at_least=0, at_most=1)
    dropout: float = option(0.5, "a share that is not the whole", at_least=0, below=1)
    seed: int = option(1, "a whole number")
    weights: list[float] = option([1.0], "numbers")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"least": 0}, "task.least .*at least 1, got 0"),
        ({"least": -3.5}, "task.least .*at least 1, got -3.5"),
        ({"least": float("nan")}, "task.least is nan; give finite numbers"),
        ({"share": -0.1}, "task.share .*at least 0, got -0.1"),
        ({"share": 1.1}, "task.share .*at most 1, got 1.1"),
        ({"share": float("nan")}, "task.share is nan"),
        ({"dropout": 1}, "task.dropout .*below 1, got 1"),
        ({"dropout": float("inf")}, "task.dropout is inf"),
        ({"weights": [1, float("nan")]}, "task.weights is .*nan"),
        ({"seed": 1 << 63}, "task.seed is 9223372036854775808; whole numbers have 64 bits"),
    ],
)
def test_a_value_outside_its_range_is_refused(changes: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_options(Ranges, Ranges(**changes), "task.")


@pytest.mark.parametrize(
    "changes", [{}, {"least": 7.5}, {"share": 0}, {"share": 1}, {"dropout": 0}, {"dropout": 0.999}]
)
def test_a_value_in_its_range_is_taken(changes: dict) -> None:
    check_options(Ranges, Ranges(**changes), "task.")


def test_an_option_declared_again_keeps_what_is_not_said_anew() -> None:
    @dataclass
    class Again(Ranges):
        share: float = with_default(Ranges, "share", 0.25)
        dropout: float = with_default(Ranges, "dropout", 0.0, "none by default", below=0.5)
        weights: list[float] = with_default(Ranges, "weights", [1.0])

    first, items = Again(), {item.name: item for item in fields(Again)}
    assert (first.share, first.dropout, first.weights) == (0.25, 0.0, [1.0])
    assert first.weights is not Again().weights
    assert items["share"].metadata["help"] == "a share"
    assert items["dropout"].metadata["help"] == "none by default"
    for wrong, words in (({"share": 2.0}, "at most 1"), ({"dropout": 0.5}, "below 0.5")):
        with pytest.raises(UsageError, match=words):
            check_options(Again, Again(**wrong))
