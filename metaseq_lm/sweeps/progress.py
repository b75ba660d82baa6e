"""Progress of the runs that a sweep's command launched, and the time left."""

import time
from collections.abc import Mapping

from metaseq_lm.core.output import StatusLine, rate_text, seconds_text, show_progress
from metaseq_lm.sweeps.expansion import PlannedRun
from metaseq_lm.sweeps.folder import SweepFolder
from metaseq_lm.sweeps.states import ACTIVE, State, lines, read_states


class Progress:
    """Counts ended runs; the time left is estimated from these and from the done parts of others.

    Attributes:
        total: The number of runs.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.over: set[str] = set()
        self.begun: dict[str, State] = {}  # the active runs
        self.started = time.monotonic()
        self.status = StatusLine()

    def report(self, folder: SweepFolder, run: PlannedRun) -> None:
        """Show how many runs have ended; print a line for a run that did not finish."""
        (state,) = read_states(folder, [run])
        self.begun.pop(run.name, None)
        if state.state in ACTIVE:
            self.begun[run.name] = state
        else:
            self.over.add(run.name)
            if state.state != "finished":
                show_progress("\n".join(lines([state])))
        self.status.show(self.text(), len(self.over) / self.total)

    def text(self) -> str:
        """Return the numbers of ended and active runs, the time left if known, and what runs."""
        parts = (min(1.0, s.update / max(1, s.max_update)) for s in self.begun.values())
        done = len(self.over) + sum(parts)
        left = (time.monotonic() - self.started) * (self.total - done) / done if done else None
        text = f"{len(self.over)}/{self.total} runs over, {len(self.begun)} active"
        text += f", about {seconds_text(left)} left" * bool(left)
        return text + active_text(self.begun)


def active_text(active: Mapping[str, State]) -> str:
    """Return the names of active runs, and their updates a second; "" without any."""
    if not active:
        return ""
    rate = sum(state.update / state.seconds for state in active.values() if state.seconds)
    return f" ({', '.join([rate_text(rate, 'updates')] * bool(rate) + list(active))})"
