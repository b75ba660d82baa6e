"""The account of a search with objectives that cost nothing: FLOPs, rungs, repetition, deaths."""

import math
from pathlib import Path

import pytest

pytest.importorskip("optuna")

from search_studies import RULES, RUN, A, loss, run_all, studies_in

from metaseq_lm.sweeps.studies import Setting, Studies
from metaseq_lm.sweeps.trials import DIVERGED, FAILED


@pytest.mark.parametrize("sampler", ["qmc", "tpe", "random"])
def test_a_search_spends_its_budget_and_is_repeatable(tmp_path: Path, sampler: str) -> None:
    first, second = (studies_in(tmp_path / name, sampler=sampler) for name in "xy")
    for studies in (first, second):
        run_all(studies)
    trials = first.trials("a")
    assert trials == second.trials("a")
    assert RULES["flops"] - 25 < first.trials("a").flops <= RULES["flops"]
    assert {trial.state for trial in trials} <= {"finished", "pruned", "unpaid"}
    best = first.trials("a").best()
    assert best and best.score == min(t.score for t in trials if t.state == "finished")
    assert all(1e-5 <= trial.values["optimizer.lr"] <= 1e-1 for trial in trials)
    assert {trial.values["task.batch_size"] for trial in trials} == {8, 16}
    assert len({tuple(trial.values.values()) for trial in trials}) == len(trials)


def test_a_killed_search_goes_on_with_the_same_values(tmp_path: Path) -> None:
    whole, parts = studies_in(tmp_path / "whole"), studies_in(tmp_path / "parts")
    run_all(whole)
    run_all(parts, most=3)
    run_all(studies_in(tmp_path / "parts"))
    assert parts.trials("a") == whole.trials("a")


def test_every_setting_has_the_same_budget(tmp_path: Path) -> None:
    """The smaller loss of one does not stop the trials of another."""
    b = Setting("b", {"criterion": "b"}, RUN)
    studies = studies_in(tmp_path, A, b)
    run_all(studies, lambda trial: loss(trial) + 100 * (trial.setting == "b"))
    a_states, b_states = ([t.state for t in studies.trials(name)] for name in "ab")
    assert a_states == b_states and "finished" in a_states
    assert studies.trials("a").flops == studies.trials("b").flops


def test_trials_stop_at_rungs_unless_the_better_half(tmp_path: Path) -> None:
    """With a factor of 2 the first trial at a rung goes on, the second only if as good."""
    studies = studies_in(tmp_path)
    scores = iter([3, 3, 3, 4, 2, 2, 1])
    run_all(studies, lambda trial: next(scores), most=3)
    assert [(t.state, t.flops) for t in studies.trials("a")] == [
        ("finished", 100),
        ("pruned", 25),
        ("finished", 100),
    ]
    assert studies.trials("a").best().number == 2


def test_without_pruning_all_trials_run_to_their_end(tmp_path: Path) -> None:
    studies = studies_in(tmp_path, prune="none")
    run_all(studies)
    assert [(t.state, t.flops) for t in studies.trials("a")] == [("finished", 100)] * 6


def test_what_is_not_paid_for_is_not_begun(tmp_path: Path) -> None:
    """Running trials have reserved what they may spend, also for workers beside them."""
    studies = studies_in(tmp_path, flops=120.0)
    first = studies.begin("search-1")
    others = [Studies(tmp_path, studies.search).begin(f"search-{n}") for n in (2, 3, 4, 5)]
    assert [trial is not None for trial in others] == [True, True, True, False]
    assert len({str(trial.values) for trial in [first, *others[:3]]}) == 4
    stopped = studies.report(first, 1.0, 25.0)
    assert stopped.state == "unpaid" and studies.trials("a").best() is None


def test_what_an_update_spent_beyond_a_rung_is_not_paid_twice(tmp_path: Path) -> None:
    studies = studies_in(tmp_path, flops=RUN)
    trial = studies.begin("search-1")
    for flops in (40.0, 60.0, 100.0):
        assert trial.state == "running"
        trial = studies.report(trial, 1.0, flops)
    assert trial.state == "finished" and studies.trials("a").flops == RUN
    assert studies.begin("search-1") is None


def test_a_dead_trial_is_failed_and_charged_and_a_saved_one_goes_on(tmp_path: Path) -> None:
    studies = studies_in(tmp_path)
    dead, saved = studies.begin("search-1"), studies.begin("search-2")
    studies.interrupt(saved)
    (running,) = studies.running()
    assert running.worker == "search-1"
    studies.end(running, FAILED, 20.0, "its process died")
    assert studies.trials("a").flops == 20
    assert studies.begin("search-3").number == saved.number
    assert studies.begin("search-3").number == 2
    assert [t.state for t in studies.trials("a")] == ["failed", "running", "running"]
    assert dead.number == 0


def test_a_search_that_only_fails_ends(tmp_path: Path) -> None:
    studies = studies_in(tmp_path)
    for _ in range(3):
        assert not studies.failures("a")
        studies.end(studies.begin("search-1"), FAILED, 0.0, "out of memory")
    assert len(studies.failures("a")) == 3 and studies.begin("search-1") is None
    studies.create([A])  # the command that is given again
    assert studies.begin("search-1") is not None


def test_a_diverged_trial_is_never_chosen(tmp_path: Path) -> None:
    studies = studies_in(tmp_path, prune="none", sampler="tpe")
    run_all(studies, lambda trial: math.nan if trial.values["optimizer.lr"] > 1e-3 else loss(trial))
    states = {t.state for t in studies.trials("a")}
    assert states == {"finished", DIVERGED}
    assert studies.trials("a").best().values["optimizer.lr"] <= 1e-3
    assert studies.trials("a").flops == 600


def test_more_flops_go_on(tmp_path: Path) -> None:
    run_all(studies_in(tmp_path))
    studies = studies_in(tmp_path, flops=900.0)
    assert studies.is_open(A)
    run_all(studies)
    assert 875 < studies.trials("a").flops <= 900
