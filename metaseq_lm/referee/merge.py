"""Leagues of one plan that ran apart, as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from metaseq_lm.core.errors import UsageError
from metaseq_lm.league.assembly import LeagueRuns
from metaseq_lm.league.folder import Added
from metaseq_lm.reporting.runs import Run


def merge(leagues: Sequence[LeagueRuns], names: Sequence[str]) -> LeagueRuns:
    """Return the runs, added objectives and predictions of leagues of one plan as one league.

    Objectives that were added without any run stay: they are attempts, and Holm's correction counts
    them.

    Args:
        leagues: The leagues.
        names: What messages call them.

    Raises:
        UsageError: They are of several plans or of several data, or two have the same run or
            objective and differ in it.
    """
    first = leagues[0]
    added: dict[str, tuple[Added, str]] = {}
    runs: dict[str, tuple[Run, str]] = {}
    prices: dict[str, float] = {}
    for league, name in zip(leagues, names):
        if league.contents.plan.hash != first.contents.plan.hash:
            raise UsageError(
                f"{name}: of another plan ({league.contents.plan.hash}) than {names[0]} "
                f"({first.contents.plan.hash}); only leagues of one plan can be merged"
            )
        ours, theirs = league.corpus, first.corpus
        if ours and theirs and ours.rounded != theirs.rounded:
            raise UsageError(f"{name}: trained on other data than {names[0]}")
        for item in league.contents.additions:
            other, source = added.setdefault(item.key, (item.portable, name))
            if other.record != item.portable.record:
                raise UsageError(
                    f"{name} and {source} define the objective {item.name} differently; one of "
                    "them needs another name"
                )
        for run in league.runs:
            run_name = name_in_league(run)
            known, source = runs.setdefault(run_name, (run, name))
            if known.course != run.course:
                raise UsageError(
                    f"{name} and {source} have different runs {run_name}; at most one of them is "
                    "what the plan says: verify them"
                )
        prices = {**league.contents.prices, **prices}
    predictions = chain.from_iterable(league.predictions for league in leagues)
    latest_first = sorted(predictions, key=lambda x: x.time, reverse=True)
    earliest = {(x.objective, x.budget): x for x in latest_first}
    additions = tuple(item for item, _ in added.values())
    contents = replace(first.contents, added=(), archived=additions, prices=prices, archive=None)
    _ = contents.extended  # UsageError for too many attempts
    return LeagueRuns(
        contents,
        tuple(run for run, _ in runs.values()),
        next((league.corpus for league in leagues if league.corpus), None),
        predictions=tuple(sorted(earliest.values(), key=lambda x: x.time)),
    )


def name_in_league(run: Run) -> str:
    """Return the name of a run in a league: PHASE/OBJECTIVE/NAME."""
    return "/".join(run.path.parts[-3:])
