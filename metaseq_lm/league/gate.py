"""The registry of gates: checks that void, refuse, flag or note a row of a league.

A gate is a function of a row and a context that yields findings (docs/reference/gates.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import Registry
from metaseq_lm.league.standings import Context, GateFinding
from metaseq_lm.reporting.settings import Row

__all__ = [
    "BOUNDS",
    "CONTROLS",
    "DATA",
    "GAIN",
    "LEARNING",
    "LOSSES",
    "READINGS",
    "RUNS",
    "SCORES",
    "STATES",
    "gate",
]

Gate = Callable[[Row, Context], Iterator[GateFinding]]
# The stages of gates, in the order in which their findings are printed.
STAGES = RUNS, DATA, BOUNDS, LOSSES, STATES, SCORES, CONTROLS, READINGS = (
    *("runs", "data", "bounds", "losses", "states", "scores", "controls", "readings"),
)

# What a flagged row lacks. A row without a gain (or with a part below chance) can still be worse
# than the baseline, but neither better nor equivalent. A row that has not learnt is left out of
# curves.
GAIN, LEARNING = "gain", "learning"

GATES: Registry[Gate] = Registry("gate")
_stages: dict[str, int] = {}
# Meaning of a finding and what its row lacks, by the name of the finding.
_findings: dict[str, tuple[str, str]] = {
    "baseline": ("the baseline has no number to compare it with", "")
}


def gate(
    stage: str, says: Mapping[str, str] | None = None, lacks: str = ""
) -> Callable[[Gate], Gate]:
    """Register a gate under the name of its function, with blanks in place of underscores.

    Args:
        stage: The stage that it judges, one of STAGES.
        says: Meaning of its findings by name, for a screen; reasons have the numbers. Findings that
            are notes need no entry.
        lacks: GAIN or LEARNING if these findings say that the row lacks it, else "".

    Raises:
        UsageError: The stage does not exist, or the name is taken.
    """
    if stage not in STAGES:
        raise UsageError(f"gate: stage {stage!r} is none of {', '.join(STAGES)}")

    def register(judge: Gate) -> Gate:
        name = judge.__name__.replace("_", " ")
        GATES.register(name)(judge)
        _stages[name] = STAGES.index(stage)
        _findings.update({finding: (text, lacks) for finding, text in (says or {}).items()})
        return judge

    return register


def registered_gates() -> list[Gate]:
    """Return all gates ordered by stage, and within a stage by registration."""
    return [GATES.entries[name].value for name in sorted(GATES.entries, key=_stages.__getitem__)]


def said_of(finding: str) -> str:
    """Return the meaning of a finding, given its name."""
    return _findings.get(finding, ("see the reasons", ""))[0]


def lacked_by(finding: str) -> str:
    """Return what a row with a finding of this name lacks: GAIN, LEARNING or ""."""
    return _findings.get(finding, ("", ""))[1]
