"""Gates on losses: their levels, and what is no fault."""

from collections.abc import Callable
from dataclasses import replace

import league_rows as make
import numpy as np
import pytest
from league_standings import said

from metaseq_lm.league.loss_gates import (
    _base_rate,
    _best_detection,
    diverged,
    still_falling,
    trigrams,
    undetected,
)
from metaseq_lm.reporting.settings import Row


@pytest.mark.parametrize("term", ["next_token", "causal_lm.next_token", "mlm", "backward"])
@pytest.mark.parametrize("loss", [2.59, 2.61])
def test_what_sees_only_the_tokens_before_is_compared_with_trigrams(
    term: str, loss: float, row: Row
) -> None:
    edit = make.with_values(task__objectives=["causal_lm", "masked_lm"])
    row = make.change(make.change(row, edit), make.with_logged(**{term: loss}))
    findings = list(trigrams(row, make.make_context(row)))
    assert len(findings) == (term.endswith("next_token") and loss > make.TRIGRAM)


FULL, MASKED = 0.75 * np.log(4 / 3) + 0.25 * np.log(4), np.log(2)


@pytest.mark.parametrize(
    "losses",
    [
        [4.2, 2.5, 2.4, 2.42, 2.41, 2.6, 2.62],  # an eighth of the gain
        [4.2, 4.1, 4.15, 4.05, 4.1, 4.2],  # all of the gain, within the steps
    ],
)
def test_noise_at_the_end_is_no_divergence(row: Row, losses: list[float]) -> None:
    row = make.change(row, make.with_losses(lambda _: losses))
    assert not list(diverged(row, make.make_context(row)))


def test_weights_of_the_best_validation_do_not_diverge(row: Row) -> None:
    row = make.change(row, make.with_losses(lambda _: [4.2, 2.5, 2.4, 2.42, 2.41, 2.43, 3.9]))
    assert list(diverged(row, make.make_context(row)))
    row = make.change(row, make.with_values(trainer__best_checkpoint_metric="loss"))
    assert not list(diverged(row, make.make_context(row)))


def falling(first: list[float], last: list[float], schedule: dict[str, object]) -> Callable:
    """Return an edit: losses that fall until the rate decays, and after that, by a schedule."""
    values = make.with_values(**{f"schedule__{key}": value for key, value in schedule.items()})
    losses = make.with_losses(lambda s: [x + s / 1e3 for x in [*first, *last]])
    return lambda run: values(losses(run))


FALLS, FLAT = [4.0, 3.5, 3.0, 2.5, 2.0], [2.0] * 5  # validations at updates 40, 80, ..., 200
WSD = {"_name": "wsd", "total_updates": 280, "decay_ratio": 0.25, "end": 0.0}


@pytest.mark.parametrize(
    ("first", "last", "schedule", "said"),
    [
        (FLAT, [1.5, 1.0], {}, "the last quarter of the updates"),
        (FLAT, [1.5, 1.0], {"_name": "constant"}, "the last quarter of the updates"),
        (FLAT, [1.5, 1.0], {**WSD, "end": 1.0}, "the last quarter of the updates"),
        (FLAT, [1.5, 1.0], {**WSD, "decay_ratio": 0.0}, "the last quarter of the updates"),
        (FLAT, [1.5, 1.0], WSD, ""),
        (FALLS, [1.5, 1.0], WSD, "the last quarter of the updates before the rate decays"),
        # Three validations before the decay.
        (FALLS, [1.5, 1.0], {**WSD, "decay_ratio": 0.5}, ""),
        (FALLS, [1.5, 1.0], {"_name": "linear", "total_updates": 280}, ""),
        (FALLS, [1.5, 1.0], {"_name": "polynomial", "total_updates": 280, "end": 0.0}, ""),
    ],
)
def test_a_loss_that_falls_while_the_rate_decays_is_no_limit_of_the_budget(
    row: Row, first: list[float], last: list[float], schedule: dict[str, object], said: str
) -> None:
    row = make.change(row, falling(first, last, schedule))
    reasons = [finding.reason for finding in still_falling(row, make.make_context(row))]
    assert len(reasons) == bool(said)
    if reasons:
        assert reasons[0].endswith(said)


@pytest.mark.parametrize(("away", "is_told"), [(0.08, True), (0.1, False)])
def test_a_fall_counts_from_two_standard_deviations_on(
    row: Row, away: float, is_told: bool
) -> None:
    """0.2 ± 1.07 `away`."""
    row = make.change(
        row, make.with_losses(lambda s: [*FLAT, 2.0, 1.8 + (away if s % 2 else -away)])
    )
    assert bool(list(still_falling(row, make.make_context(row)))) == is_told


@pytest.mark.parametrize(
    ("criterion", "level"),
    [
        # 20 of 100 tokens are fake, 80 may be; the others are known and cost nothing.
        ({"criterion.disc_positions": "all"}, 0.8 * FULL),
        ({"criterion.disc_positions": "masked"}, MASKED),
        ({"criterion.legacy_specials": False}, FULL),
        ({"criterion.legacy_specials": True}, 0.8 * FULL),
    ],
)
def test_the_level_of_a_discriminator_is_the_entropy_of_the_share_of_fakes(
    row: Row, criterion: dict[str, object], level: float
) -> None:
    logged = {"fakes": 0.2, "candidates": 0.8, "sample_accuracy": 0.5}
    run = replace(row.runs[0], values={**row.runs[0].values, **criterion})
    assert _base_rate(run, {"kind": "valid", **logged}) == pytest.approx(level)
    assert _base_rate(run, {"kind": "valid"}) == 0
    for loss, count in ((0.979 * level, 0), (0.981 * level, 8)):
        rows = [replace(r, values={**r.values, **criterion}) for r in row.runs]
        edit = make.with_logged(discriminator=loss, **logged)
        findings = list(
            undetected(replace(row, runs=tuple(map(edit, rows))), make.make_context(row))
        )
        assert len(findings) == bool(count)


def test_a_discriminator_is_judged_where_it_is_the_best(row: Row) -> None:
    """A generator that gets better makes the task harder, and fakes rarer."""
    run = row.runs[0]
    for line, loss, share in zip(run.log, [0.6, 0.3, 0.35], [0.2, 0.2, 0.1]):
        line |= {"discriminator": loss, "fakes": share}
    term, loss, level = _best_detection(run)
    assert (term, loss) == ("discriminator", 0.3) and level == pytest.approx(
        0.8 * np.log(1 / 0.8) + 0.2 * np.log(5)
    )


@pytest.mark.parametrize(
    "entry", ["masked_lm weight=[0,0]", "masked_lm task.leave_unmasked_prob=0.2 weight=[0,1]"]
)
def test_objectives_that_are_only_validated_have_no_ceiling(
    entry: str, baseline: Row, row: Row
) -> None:
    row = make.change(row, make.with_logged(**{"masked_lm.mlm": 5.0}))
    row = make.change(row, make.with_values(task__objectives=["causal_lm", entry]))
    assert ("ceiling" in said(baseline, row)) == ("[0,1]" in entry)


def test_data_that_are_not_known_have_no_ceiling(baseline: Row, row: Row) -> None:
    row = make.change(row, make.with_losses(lambda s: make.losses(s, 4.8, 5.1)))
    assert not said(baseline, row, corpus=None).keys() & {"ceiling", "plateau"}
