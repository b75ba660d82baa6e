"""Where a training run reports: the screen, log.jsonl and TensorBoard."""

from __future__ import annotations

from typing import Any

from metaseq_lm.core.logging import Progress, TensorBoard
from metaseq_lm.distributed import process_group
from metaseq_lm.engine.engine import Engine
from metaseq_lm.runs.folder import RunFolder


class RunLog:
    """Writes events and values to all places. Without a folder (other replicas) it is silent."""

    def __init__(self, name: str, folder: RunFolder | None, tensorboard: bool = True) -> None:
        self.name, self.folder = name, folder
        self.tensorboard = tensorboard and folder is not None
        self.progress = Progress(0, 0, name, show=False)
        self.board = TensorBoard(None)

    def start(self, total: int, update: int) -> None:
        """Show progress from `update` on, of `total`, and open the event file."""
        self.progress = Progress(total, update, self.name, process_group.rank() == 0)
        if self.tensorboard and self.folder is not None:
            self.board = TensorBoard(self.folder.path / "tb")

    def step(self) -> None:
        """Count one update."""
        self.progress.step()

    def message(self, text: str) -> None:
        """Show a line on the screen only."""
        self.progress.message(text)

    def event(self, update: int, seconds: float, message: str, **details: Any) -> None:
        """Show a line, and log it with `details`."""
        self.progress.message(message)
        self.record("event", update, seconds, {"message": message, **details})

    def values(self, kind: str, update: int, seconds: float, values: dict[str, float]) -> None:
        """Show, plot and log the values of a `kind` of line, such as "train" or "valid"."""
        self.progress.values(kind, update, values)
        self.board.values(kind, update, values)
        self.record(kind, update, seconds, values)

    def record(self, kind: str, update: int, seconds: float, content: dict[str, Any]) -> None:
        """Write a line of log.jsonl only."""
        if self.folder is not None:
            self.folder.log(kind, update, seconds, content)

    def close(self) -> None:
        """Finish the progress bar and the event file."""
        self.progress.close()
        self.board.close()


def engine_values(engine: Engine) -> dict[str, float]:
    """Return rate and gradient norm of each optimizer's last step."""
    rates = {f"lr_{name}": o.last_lr for name, o in engine.optimizers.items()}
    return rates | {f"gnorm_{name}": value for name, value in engine.norms.items()}
