"""Outputs of a training run: the screen, log.jsonl and loggers such as TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from metaseq_lm.core.batch import SequenceBatch
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import say
from metaseq_lm.core.files import human_bytes
from metaseq_lm.core.output import Meter, hide_status, is_quiet, printable, rate_text
from metaseq_lm.distributed import process_group
from metaseq_lm.engine.engine import Engine
from metaseq_lm.runs.folder import RunFolder
from metaseq_lm.tasks import Batches
from metaseq_lm.training.loggers import LoggedRun, LoggerGroup
from metaseq_lm.training.parts import peak_memory


class RunLog:
    """Writes events and values to the screen, log.jsonl and loggers.

    Only the first replica prints: a line that is rewritten on a terminal, else lines. No files are
    written if `folder` is None.
    """

    def __init__(self, config: RunConfig, folder: RunFolder | None) -> None:
        self.config, self.folder = config, folder
        self.name = config.label or f"{config.task._name}/{config.criterion._name}"
        self.loggers: LoggerGroup | None = None
        self.visible = False
        self.total = 0
        self.last_validation = 0.0  # when the screen last showed one

    def start(self, total: int, update: int, device: torch.device) -> None:
        """Show progress from `update` on, of `total`, of a run on a device."""
        self.total, self.device = total, device
        self.visible = process_group.rank() == 0
        self.meter = Meter(self.name, "updates", total, update)
        self._since = _Since()

    def open_loggers(self, update: int) -> None:
        """Open TensorBoard's event file and the loggers of engine.loggers at an update of a run."""
        options = self.config.engine
        names = ["tensorboard"] * options.tensorboard + list(options.loggers)
        if self.folder is not None and names:
            self.loggers = LoggerGroup(names, LoggedRun(self.folder.path, self.config, update))

    def step(self, batches: Batches) -> None:
        """Count one update of these batches."""
        if self.visible:
            self._since.add(batches)
            self.meter.advance()

    def message(self, text: str, is_result: bool = False) -> None:
        """Show a line on the screen only; with --quiet, if it is a result."""
        if self.visible and (is_result or not is_quiet()):
            say(printable(f"{self.name}: {text}"))

    def event(self, update: int, seconds: float, message: str, **details: Any) -> None:
        """Show a line, and log it with `details`."""
        self.message(message)
        self.record("event", update, seconds, {"message": message, **details})

    def values(self, kind: str, update: int, seconds: float, values: dict[str, float]) -> None:
        """Show, plot and log the values of a `kind` of line, such as "train" or "valid"."""
        self._show(kind, update, values)
        if self.loggers is not None:
            self.loggers.log(kind, update, values)
        self.record(kind, update, seconds, values)

    def _show(self, kind: str, update: int, values: dict[str, float]) -> None:
        text = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        if kind == "train" and self.visible:
            speed = self._since.text(self.meter.is_visible)
            speed += f"  memory {human_bytes(peak_memory(self.device))}"
            self._since = _Since()
            # The values come last, because a narrow terminal cuts them off.
            if self.meter.is_visible:
                self.meter.note = f"{speed.strip()}  {text}"
                return
            text += speed
        # A run may validate many times a second: the log gets every line, the screen one a second.
        if kind != "train":
            now = time.monotonic()
            if update != self.total and now - self.last_validation < 1.0:
                return
            self.last_validation = now
        self.message(f"{kind} {update}/{self.total}  {text}")

    def record(self, kind: str, update: int, seconds: float, content: dict[str, Any]) -> None:
        """Write a line of log.jsonl only."""
        if self.folder is not None:
            self.folder.log(kind, update, seconds, content)

    def close(self, failed: bool = False) -> None:
        """Finish the status line and the loggers."""
        hide_status()
        if self.loggers is not None:
            self.loggers.close(failed)


class _Since:
    """Updates and tokens of this replica since the last line of training on the screen."""

    def __init__(self) -> None:
        self.began, self.updates, self.tokens = time.monotonic(), 0, 0

    def add(self, batches: Batches) -> None:
        """Count an update; tokens with padding, of batches that have some."""
        self.updates += 1
        for batch in chain.from_iterable(chain.from_iterable(batches.values())):
            if isinstance(batch, SequenceBatch):
                self.tokens += batch.tokens.numel()

    def text(self, without_updates: bool = False) -> str:
        """Return updates, and tokens of all replicas, a second."""
        seconds = time.monotonic() - self.began
        counts = {"tokens": self.tokens * process_group.world_size()}
        if not without_updates:
            counts = {"updates": self.updates, **counts}
        rates = [rate_text(n / seconds, unit) for unit, n in counts.items() if n and seconds]
        return "".join(f"  {rate}" for rate in rates)


class Window:
    """Means of the logs since the last line; values stay on their device until they are read."""

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {}
        self.counts: dict[str, int] = {}

    def add(self, logs: Mapping[str, Any]) -> None:
        """Add the logs of one update; an update may lack some names."""
        for name, value in logs.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        """Return the mean of each name over the updates that had it, and reset."""
        means = {name: float(total) / self.counts[name] for name, total in self.sums.items()}
        self.sums, self.counts = {}, {}
        return means

    def state_dict(self) -> dict[str, Any]:
        """Return sums and counts: a resumed run continues its current line of the log."""
        return {"sums": dict(self.sums), "counts": dict(self.counts)}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Load saved sums and counts."""
        self.counts = dict(state["counts"])
        self.sums = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in state["sums"].items()
        }


def engine_values(engine: Engine) -> dict[str, float]:
    """Return learning rate and gradient norm of each optimizer's last step."""
    rates = {f"lr_{name}": o.last_lr for name, o in engine.optimizers.items()}
    return rates | {f"gnorm_{name}": float(norm) for name, norm in engine.norms.items()}
