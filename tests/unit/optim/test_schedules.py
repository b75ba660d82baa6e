"""Schedules at their corners and by their formulas."""

import math

import pytest

from metaseq_lm.core.config import build, section
from metaseq_lm.core.errors import UsageError
from metaseq_lm.optim import Schedule


def constant(warmup_updates: int) -> Schedule:
    return build("schedule", section("schedule", _name="constant", warmup_updates=warmup_updates))


def inverse_sqrt(warmup_updates: int, lr_is_peak: bool = False) -> Schedule:
    options = {"warmup_updates": warmup_updates, "lr_is_peak": lr_is_peak}
    return build("schedule", section("schedule", **{"_name": "inverse_sqrt", **options}))


def damped_inverse_sqrt(warmup_updates: int, damping: float) -> Schedule:
    options = {"warmup_updates": warmup_updates, "damping": damping}
    return build("schedule", section("schedule", **{"_name": "damped_inverse_sqrt", **options}))


def linear(warmup_updates: int, total_updates: int, **more: float) -> Schedule:
    options = {"warmup_updates": warmup_updates, "total_updates": total_updates, **more}
    return build("schedule", section("schedule", **{"_name": "linear", **options}))


def polynomial(
    warmup_updates: int,
    total_updates: int,
    power: float,
    end: float,
    warmup_ratio: float = 0.0,
    **more: float,
) -> Schedule:
    options = {"warmup_updates": warmup_updates, "total_updates": total_updates, "power": power}
    options |= {"end": end, "warmup_ratio": warmup_ratio, **more}
    return build("schedule", section("schedule", **{"_name": "polynomial", **options}))


def wsd(total_updates: int, **more: float) -> Schedule:
    return build("schedule", section("schedule", _name="wsd", total_updates=total_updates, **more))


def test_wsd_rises_stays_and_falls_to_its_end_at_the_last_update() -> None:
    factor = wsd(20, warmup_ratio=0.2, decay_ratio=0.25, end=0.1)
    assert [factor(step) for step in (1, 2, 3, 4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert {factor(step) for step in range(4, 16)} == {1.0}
    falling = [0.82, 0.64, 0.46, 0.28, 0.1]
    assert [factor(step) for step in range(16, 21)] == pytest.approx(falling)
    assert factor(21) == factor(1000) == pytest.approx(0.1)
    assert [wsd(1)(1), wsd(4, decay_ratio=0.0)(4), wsd(4, decay_ratio=1.0)(1)] == [0.0, 1.0, 0.75]
    with pytest.raises(UsageError, match="at least 1"):
        wsd(0)


def test_wsd_by_hand() -> None:
    """Ten updates, two of warm-up, four of decay: linear, and 1 - sqrt(x) with x the share over."""
    options = {"warmup_updates": 2, "decay_ratio": 0.4}
    factor = wsd(10, **options)
    rates = [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
    assert [factor(step) for step in range(1, 11)] == pytest.approx(rates)
    factor = wsd(10, decay="sqrt", **options)
    last = [1 - 0.25**0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0]
    assert [factor(step) for step in range(1, 11)] == pytest.approx([*rates[:6], *last])
    assert wsd(10, decay="sqrt", end=0.1, **options)(8) == pytest.approx(0.1 + 0.9 * last[1])


@pytest.mark.parametrize("end", [0.0, 0.1, 0.3, 0.7])
def test_a_plateau_has_the_rates_of_every_length(end: float) -> None:
    """Exactly: a run that decays from a plateau is the one that was trained through."""
    plateau = wsd(50, warmup_updates=7, decay_ratio=0.0, end=end)
    for total in (60, 100, 1000):
        longer = wsd(total, warmup_updates=7, decay_ratio=10 / total, end=end)
        assert [plateau(step) for step in range(1, 51)] == [longer(step) for step in range(1, 51)]


def test_cosine_rises_and_falls_to_its_floor() -> None:
    def factor(step: int, **options: float) -> float:
        values = {"_name": "cosine", "total_updates": 12, "warmup_updates": 4, **options}
        return build("schedule", section("schedule", **values))(step)

    assert [factor(step) for step in (1, 2, 4)] == pytest.approx([0.25, 0.5, 1.0])
    assert factor(8) == pytest.approx(0.1 + 0.9 / 2)
    assert factor(6) == pytest.approx(0.1 + 0.9 * (1 + 0.5**0.5) / 2)
    assert factor(8, warmup_updates=5) == pytest.approx(
        0.1 + 0.45 * (1 + math.cos(math.pi * 3 / 7))
    )
    assert factor(12) == factor(13) == factor(1000) == pytest.approx(0.1)
    assert factor(12, end=0.0) == pytest.approx(0.0, abs=1e-15)
    with pytest.raises(UsageError, match="total_updates"):
        factor(1, total_updates=0)


def test_cosine_with_a_cooldown_is_that_of_gpt_bert() -> None:
    """Its rule, whose steps begin at 0: 250 of warm-up and 250 of cooldown in 15,625."""
    total, rising, cooling, floor = 15_625, 250, 250, 0.1
    options = {"warmup_updates": rising, "cooldown_ratio": 0.016, "end": floor}
    values = {"_name": "cosine", "total_updates": total, **options}
    factor = build("schedule", section("schedule", **values))

    def published(step: int) -> float:
        if step < rising:
            return step / rising
        if step >= total - cooling:
            return floor * (total - step) / cooling
        done = (step - rising) / (total - rising)
        return max(floor, floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))

    steps = [1, 100, 249, 250, 251, 8000, 15_374, 15_375, 15_376, 15_500, 15_624, 15_625]
    assert [factor(step) for step in steps] == pytest.approx([published(step) for step in steps])
    assert factor(20_000) == 0


@pytest.mark.parametrize("name", ["cosine", "linear", "polynomial", "wsd"])
@pytest.mark.parametrize("warmup", [12, 50])
def test_a_warmup_as_long_as_the_run_only_rises(name: str, warmup: int) -> None:
    values = {"total_updates": 12, "warmup_updates": warmup}
    values |= {"power": 0.0} if name == "polynomial" else {}
    values |= {"decay_ratio": 0.0} if name == "wsd" else {}
    factor = build("schedule", section("schedule", _name=name, **values))
    assert [factor(n) for n in range(1, 12)] == [n / warmup for n in range(1, 12)]


@pytest.mark.parametrize("warmup", [1, 4, 1000])
def test_inverse_sqrt(warmup: int) -> None:
    factor = inverse_sqrt(warmup)
    for step in (1, 2, 3, 4, 5, 999, 1000, 1001, 123_456):
        wanted = step**-0.5 if step >= warmup else warmup**-0.5 * step / warmup
        assert factor(step) == pytest.approx(wanted, rel=1e-12)
    peak = factor(warmup)
    assert peak == pytest.approx(warmup**-0.5)
    assert factor(4 * warmup) == pytest.approx(peak / 2)
    assert all(factor(step) <= peak for step in range(1, 3 * warmup))
    at_one = inverse_sqrt(warmup, lr_is_peak=True)
    assert at_one(warmup) == pytest.approx(1.0)
    assert all(at_one(n) * peak == pytest.approx(factor(n)) for n in (1, 3, 1000, 4 * warmup))


def test_constant() -> None:
    assert [constant(0)(step) for step in (1, 2, 10**9)] == [1, 1, 1]
    assert [constant(4)(step) for step in (1, 2, 3, 4, 5)] == [0.25, 0.5, 0.75, 1, 1]


def test_linear() -> None:
    factor = linear(10, 110)
    assert [factor(s) for s in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])
    assert [factor(s) for s in (11, 60, 109)] == pytest.approx([0.99, 0.5, 0.01])
    assert factor(110) == 0 and factor(111) == 0 and factor(10_000) == 0
    assert linear(0, 4)(1) == 0.75


@pytest.mark.parametrize(("power", "end"), [(1.0, 0.0), (1.0, 0.2), (2.0, 0.1)])
def test_polynomial(power: float, end: float) -> None:
    factor = polynomial(10, 100, power, end)
    for step in (1, 5, 10, 11, 50, 99, 100):
        wanted = min(1, step / 10) * (end + (1 - end) * (1 - step / 100) ** power)
        assert factor(step) == pytest.approx(wanted, abs=1e-12)
    assert factor(100) == pytest.approx(end) and factor(1_000_000) == pytest.approx(end)
    assert polynomial(0, 100, power, end)(1) > factor(1)


def test_product_form_of_electra() -> None:
    """lr (1 - t / T) min(1, t / W) with t from 0 and W = T / 10: the peak is 1 - W / T, not 1."""
    factor = polynomial(0, 200, 1.0, 0.0, warmup_ratio=0.1, zero_based=True)
    for t in range(200):
        assert factor(t + 1) == pytest.approx((1 - t / 200) * min(1, t / 20), abs=1e-15)
    assert factor(1) == 0 and factor(21) == max(map(factor, range(1, 201))) == 0.9
    assert factor(200) == pytest.approx(1 / 200) and factor(201) == factor(1000) == 0


def test_form_of_bert() -> None:
    """lr t / W while t < W, then lr (1 - t / T), t from 0: a drop after the warm-up."""
    factor = polynomial(0, 200, 1.0, 0.0, 0.1, zero_based=True, decay_in_warmup=False)
    for t in range(200):
        assert factor(t + 1) == pytest.approx(t / 20 if t < 20 else 1 - t / 200, abs=1e-15)
    assert factor(20) == 0.95 and factor(21) == 0.9
    # W is a whole number: 10 % of 233 are 23, so that number 23 decays already.
    factor = polynomial(0, 233, 1.0, 0.0, 0.1, zero_based=True, decay_in_warmup=False)
    assert factor(23) == pytest.approx(22 / 23) and factor(24) == pytest.approx(1 - 23 / 233)


def test_share_of_warmup() -> None:
    """The longer of both counts, and a share need not be whole: 10 % of 25 is 2.5 updates."""
    assert polynomial(0, 25, 1.0, 1.0, warmup_ratio=0.1)(1) == pytest.approx(1 / 2.5)
    assert polynomial(5, 25, 1.0, 1.0, warmup_ratio=0.1)(1) == pytest.approx(1 / 5)
    factor = linear(0, 40, warmup_ratio=0.25)
    assert [factor(s) for s in (1, 10, 25, 40)] == pytest.approx([0.1, 1.0, 0.5, 0.0])
    for wrong in (-0.1, 1.1):
        with pytest.raises(UsageError, match="warmup_ratio"):
            polynomial(0, 10, 1.0, 0.0, warmup_ratio=wrong)


@pytest.mark.parametrize(
    "build", [lambda: inverse_sqrt(0), lambda: linear(0, 0), lambda: polynomial(0, 0, 1.0, 0.0)]
)
def test_impossible_settings(build: object) -> None:
    with pytest.raises(UsageError, match="must"):
        build()  # type: ignore[operator]


def test_damped_inverse_sqrt() -> None:
    """Clark et al. 2018: 0.5 min(1, t / 5000) / (1 + 0.005 sqrt(t))."""
    factor = damped_inverse_sqrt(5000, 0.005)
    rates = {1: 9.9502e-5, 2500: 0.2, 5000: 0.369398, 10_000: 1 / 3, 40_000: 0.25, 10**6: 1 / 12}
    assert {step: 0.5 * factor(step) for step in rates} == pytest.approx(rates, rel=1e-5)
    assert [damped_inverse_sqrt(0, 0.0)(step) for step in (1, 100)] == [1, 1]
    with pytest.raises(UsageError, match="damping"):
        damped_inverse_sqrt(1, -1.0)
