"""The provenance of runs: times, code, versions, machines, hashes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timezone

from metaseq_lm.core.output import count_text
from metaseq_lm.reporting.runs import Run

_TIME = "%Y-%m-%d %H:%M:%S UTC"


def times(runs: Iterable[Run], key: str) -> list[datetime]:
    """Return the times under a key in the runs' results.json."""
    known = []
    for run in runs:
        with suppress(ValueError, OverflowError):  # runs of earlier versions have no times
            text = str(run.recorded.get(key))
            known.append(datetime.fromisoformat(text).astimezone(timezone.utc))
    return known


def _counted(facts: Iterable[str]) -> str:
    """Return the values of a fact, with the number of runs of each if they differ."""
    counts = Counter(filter(None, facts))
    if len(counts) < 2:
        return "".join(counts)
    texts = [f"{value} ({count_text(n, 'run')})" for value, n in counts.most_common()]
    return " and ".join(texts)


def _made_with(runs: Sequence[Run]) -> str:
    """Return code, versions and machines that made runs, "" if none is recorded."""
    codes, versions, machines = [], [], []
    for run in runs:
        recorded = run.recorded
        code, machine = recorded.get("code"), recorded.get("architecture")
        codes.append(f"code {code}" if code else "")
        versions.append(", ".join(map(" ".join, (recorded.get("versions") or {}).items())))
        threads = recorded.get("threads")
        shown = f", {count_text(threads, 'thread')}" if threads else ""
        machines.append(f"{machine}{shown}" if machine else "")
    return "; ".join(filter(None, map(_counted, (codes, versions, machines))))


def describe_origin(runs: Sequence[Run]) -> list[str]:
    """Return sentences on code, versions, machines, data and plans of leagues, if recorded."""
    sentences = {
        "Made with ": _made_with(runs),
        "Data: ": _counted(str(run.recorded.get("data") or "") for run in runs),
        "Plan: ": _counted(run.plan for run in runs),
    }
    return [f"{start}{text}." for start, text in sentences.items() if text]


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
            parts.append(f"the first {name} started {min(starts):{_TIME}}")
    if ends := times(runs, "ended"):
        parts.append(f"the last run ended {max(ends):{_TIME}}")
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
