"""The distributions of a search: their texts, their ends, and what is refused."""

import pytest

from metaseq_lm.core.errors import UsageError
from metaseq_lm.sweeps.search import Choice, Range, Search, _parse_distribution, parse_axis


@pytest.mark.parametrize(
    "text, expected",
    [
        ("optimizer.lr=log 2e-4..8e-3", Range(2e-4, 8e-3, log=True)),
        ("task.mask_prob=0.15..0.5", Range(0.15, 0.5)),
        ("task.mask_prob=.1 .. 1", Range(0.1, 1.0)),
        ("model.encoder_layers=1..4", Range(1, 4)),
        ("task.batch_size=8,16", Choice((8, 16))),
        ("model.act=gelu,relu", Choice(("gelu", "relu"))),
    ],
)
def test_command_line_and_file_say_the_same(text: str, expected: Range | Choice) -> None:
    key, distribution = parse_axis(text)
    assert distribution == expected
    assert _parse_distribution(distribution.as_json(), key) == expected
    if isinstance(expected, Range):
        assert distribution.is_whole == isinstance(expected.low, int)


@pytest.mark.parametrize(
    "text, problem",
    [
        ("optimizer.lr=1e-2..1e-3", "is empty"),
        ("optimizer.lr=1..1", "is empty"),
        ("optimizer.lr=log 0..1", "no logarithm"),
        ("optimizer.lr=log -1..1", "no logarithm"),
        ("optimizer.lr=low..high", "neither a range"),
        ("optimizer.lr=0..1e999", "finite"),
        ("optimizer.lr=0.1", "two or more"),
        ("optimizer.lr=0.1,0.1", "two or more"),
        ("optimizer.lr", "KEY=LOW..HIGH"),
    ],
)
def test_what_is_no_distribution_is_refused(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_axis(text)


@pytest.mark.parametrize(
    "value, end", [(1e-4, "lower"), (1.1e-4, "lower"), (2e-4, ""), (9e-3, "upper"), (5e-3, "")]
)
def test_the_edge_is_measured_on_the_scale_that_is_uniform(value: float, end: str) -> None:
    assert Range(1e-4, 1e-2, log=True).edge_of(value) == end
    assert Range(1, 4).edge_of(4) == "upper" and Range(1, 4).edge_of(2) == ""
    # Of a list of numbers, in any order, the ends; other choices have none.
    rates = Choice((1e-3, 1e-4, 3e-4))
    assert [rates.edge_of(x) for x in (1e-4, 3e-4, 1e-3)] == ["lower", "", "upper"]
    assert rates.edge_of(None) == ""
    for values in (("a", "b"), (1e-4, "inherit"), (False, True)):
        assert [Choice(values).edge_of(x) for x in values] == ["", ""]


@pytest.mark.parametrize(
    "values, best, value",
    [
        ((1.0, 2.0, 4.0), 4.0, 8.0),
        ((1.0, 2.0, 4.0), 1.0, 0.5),
        ((1.0, 2.0, 4.0), 2.0, None),
        ((1e-3, 1.5e-3), 1.5e-3, 2.25e-3),
        ((2, 4, 8), 8, 16),
        ((2, 3), 2, 1),
        ((1, 2), 1, None),  # 0.5 rounds to 0
        ((0.0, 1.0), 0.0, None),
        ((0.0, 1.0), 1.0, None),
        ((-1.0, 1.0), 1.0, None),
        ((3.0,), 3.0, None),
    ],
)
def test_the_step_beyond_an_end_is_the_ratio_of_the_last_two(
    values: tuple[float, ...], best: float, value: float | None
) -> None:
    assert Choice(values).beyond(best) == (None if value is None else pytest.approx(value))


SPACE = {"space": {"optimizer.lr": "log 1e-4..1e-2"}, "flops": 4.0}


@pytest.mark.parametrize(
    "rules, problem",
    [
        ({**SPACE, "flops": 0}, "^search.flops "),
        ({**SPACE, "space": {"optimizer.lr": 3}}, "^search.space.optimizer.lr: '3'"),
        ({**SPACE, "space": ["optimizer.lr"]}, "^search.space: "),
        ({**SPACE, "seed": -1}, "^search.seed: "),
        ({"space": SPACE["space"]}, "--search-flops"),
        ({**SPACE, "first_rung": 0.1}, "first_rung"),
        ({**SPACE, "sampler": "cmaes"}, "sampler"),
        ({**SPACE, "trials": 4}, "^search.trials: "),
        ({**SPACE, "flops": "many"}, "^search.flops: .*number"),
    ],
)
def test_rules_that_cannot_be_are_refused(rules: dict, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        Search.from_json(rules)


@pytest.mark.parametrize(
    "space, problem",
    [
        ({}, "no key is searched"),
        ({"seed": "1..4"}, "seed"),
        ({"trainer.max_flops": "1e9..2e9"}, "budget of every trial"),
        ({"criterion": ["a", "b"]}, "in grid or list"),
    ],
)
def test_keys_that_cannot_be_searched_are_refused(space: dict, problem: str) -> None:
    search = Search.from_json({**SPACE, "space": space})
    with pytest.raises(UsageError, match=problem):
        search.check({"criterion"}, [1])


def test_final_seeds_are_fresh() -> None:
    search = Search.from_json(SPACE)
    search.check(set(), [1, 2])
    with pytest.raises(UsageError, match="101"):
        search.check(set(), [1, 101])


def test_a_metric_has_a_direction() -> None:
    with pytest.raises(UsageError, match="--search-better"):
        Search.from_json({**SPACE, "metric": "blimp.macro"}).check_direction()
    search = Search.from_json({**SPACE, "metric": "blimp.macro", "better": "higher"})
    search.check_direction()
    assert not search.lower_is_better
    assert Search.from_json(SPACE).lower_is_better


def test_rungs_begin_at_a_quarter() -> None:
    assert Search.from_json(SPACE).rungs == (0.25, 0.5, 1.0)
    assert Search.from_json({**SPACE, "first_rung": 0.6}).rungs == (0.6, 1.0)
    assert Search.from_json({**SPACE, "prune": "none"}).rungs == (1.0,)
