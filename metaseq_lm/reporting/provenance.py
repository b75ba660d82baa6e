"""The provenance of runs: times, code, versions, machines, hashes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timezone

from metaseq_lm.reporting.runs import Run


def times(runs: Iterable[Run], key: str) -> list[datetime]:
    """Return the times under a key in the runs' results.json."""
    known = []
    for run in runs:
        with suppress(ValueError, OverflowError):  # runs of earlier versions have no times
            text = str(run.recorded.get(key))
            known.append(datetime.fromisoformat(text).astimezone(timezone.utc))
    return known


def _time_text(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"


def _counted(runs: Iterable[Run], fact: Callable[[Run], str]) -> str:
    """Return the values of a fact, with the number of runs of each if they differ."""
    counts = Counter(value for run in runs if (value := fact(run)))
    if len(counts) < 2:
        return "".join(counts)
    texts = [f"{value} ({n} run{'s' * (n > 1)})" for value, n in counts.most_common()]
    return " and ".join(texts)


def _made_with(runs: Iterable[Run]) -> str:
    """Return code, versions and machines that made runs, "" if none is recorded."""
    runs = list(runs)
    facts = (_counted(runs, fact) for fact in (_code_of, _versions_of, _machine_of))
    return "; ".join(filter(None, facts))


def describe_software(runs: Iterable[Run]) -> list[str]:
    """Return a sentence on code, versions and machines; [] if nothing is recorded."""
    return [f"Made with {text}."] if (text := _made_with(runs)) else []


def hashes_of(runs: Iterable[Run]) -> list[str]:
    """Return sentences on the data and on the plans of leagues; [] if none is recorded."""
    runs = list(runs)
    data = _counted(runs, lambda run: str(run.recorded.get("data") or ""))
    plans = _counted(runs, lambda run: run.plan)
    sentences = {"Data": data, "Plan": plans}
    return [f"{name}: {text}." for name, text in sentences.items() if text]


def describe_provenance(trials: Sequence[Run], finals: Sequence[Run], runs: Sequence[Run]) -> str:
    """Return sentences on the time and code of the runs, and on whether they name the plan.

    Args:
        trials: The runs that tuned options.
        finals: The compared runs.
        runs: All runs, including controls.
    """
    parts = []
    for name, chosen in (("trial", trials), ("compared run", finals)):
        if starts := times(chosen, "started"):
            parts.append(f"the first {name} started {_time_text(min(starts))}")
    if ends := times(runs, "ended"):
        parts.append(f"the last run ended {_time_text(max(ends))}")
    text = ", ".join(parts) or "when the runs were made is not recorded"
    unknown = len(runs) - len(times(runs, "started"))
    if parts and unknown:
        text += f" ({unknown} of {len(runs)} runs do not say when)"
    if origin := _made_with(runs):
        text += f"; they were made with {origin}"
    marked = sum(bool(run.plan) for run in runs)
    extremes = {0: "No run records", len(runs): "Each run records"}
    count = extremes.get(marked, f"{marked} of {len(runs)} runs record")
    return f"{text[0].upper()}{text[1:]}. {count} the hash of this plan."


def _code_of(run: Run) -> str:
    code = run.recorded.get("code")
    return f"code {code}" if code else ""


def _versions_of(run: Run) -> str:
    versions = run.recorded.get("versions") or {}
    return ", ".join(map(" ".join, versions.items()))


def _machine_of(run: Run) -> str:
    architecture, threads = run.recorded.get("architecture"), run.recorded.get("threads")
    return f"{architecture}, {threads} thread{'s' * (threads != 1)}" if architecture else ""
