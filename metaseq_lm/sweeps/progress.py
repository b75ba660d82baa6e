"""Progress of the runs that a sweep's command launched, and the time left."""

import time

from metaseq_lm.core.output import StatusLine, seconds_text, show_progress
from metaseq_lm.sweeps.expansion import Run
from metaseq_lm.sweeps.folder import SweepFolder
from metaseq_lm.sweeps.states import ACTIVE, lines, states


class Progress:
    """Counts ended runs; the time left is estimated from these and from the done parts of others.

    Attributes:
        total: The number of runs.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.over: set[str] = set()
        self.begun: dict[str, float] = {}  # the done part of each active run
        self.started = time.monotonic()
        self.status = StatusLine()

    def report(self, folder: SweepFolder, run: Run) -> None:
        """Show how many runs have ended; print a line for a run that did not finish."""
        (state,) = states(folder, [run])
        self.begun.pop(run.name, None)
        if state.state in ACTIVE:
            self.begun[run.name] = min(1.0, state.update / max(1, state.max_update))
        else:
            self.over.add(run.name)
            if state.state != "finished":
                show_progress("\n".join(lines([state])))
        self.status.show(self.text(), len(self.over) / self.total)

    def text(self) -> str:
        """Return the numbers of ended and active runs, and the time left if known."""
        done = len(self.over) + sum(self.begun.values())
        left = (time.monotonic() - self.started) * (self.total - done) / done if done else None
        text = f"{len(self.over)}/{self.total} runs over, {len(self.begun)} active"
        return f"{text}, about {seconds_text(left)} left" if left else text
