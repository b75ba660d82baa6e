"""When and with which code a league's runs were made, to compare with the age of its plan."""

from __future__ import annotations

from collections.abc import Sequence

from metaseq_lm.reporting.provenance import made_with, time_text, times
from metaseq_lm.reporting.runs import Run


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
            parts.append(f"the first {name} started {time_text(min(starts))}")
    if ends := times(runs, "ended"):
        parts.append(f"the last run ended {time_text(max(ends))}")
    text = ", ".join(parts) or "when the runs were made is not recorded"
    unknown = len(runs) - len(times(runs, "started"))
    if parts and unknown:
        text += f" ({unknown} of {len(runs)} runs do not say when)"
    origin = made_with(runs)
    marked = sum(bool(run.plan) for run in runs)
    count = {0: "No run records", len(runs): "Each run records"}.get(
        marked, f"{marked} of {len(runs)} runs record"
    )
    if origin:
        text += f"; they were made with {origin}"
    return f"{text[0].upper()}{text[1:]}. {count} the hash of this plan."
