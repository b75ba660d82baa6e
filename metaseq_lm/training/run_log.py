"""Where a training run reports: the screen, log.jsonl and TensorBoard."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from metaseq_lm.core.errors import printable, say
from metaseq_lm.distributed import process_group
from metaseq_lm.engine.engine import Engine
from metaseq_lm.runs.folder import RunFolder


class RunLog:
    """Writes events and values to the screen, log.jsonl and TensorBoard.

    Only the first replica prints: a progress bar on a terminal, else lines. No files are written if
    `folder` is None.
    """

    def __init__(self, name: str, folder: RunFolder | None, tensorboard: bool = True) -> None:
        self.name, self.folder = name, folder
        self.tensorboard = tensorboard and folder is not None
        self.board = TensorBoard(None)
        self.visible = False
        self.bar: tqdm[Any] | None = None
        self.total = 0
        self.last_validation = 0.0  # when the screen last showed one

    def start(self, total: int, update: int) -> None:
        """Show progress from `update` on, of `total`, and open the event file."""
        self.total = total
        self.visible = process_group.rank() == 0
        if self.visible and sys.stderr.isatty():
            self.bar = tqdm(
                total=total,
                initial=update,
                desc=printable(self.name),
                unit="upd",
                dynamic_ncols=True,
            )
        if self.tensorboard and self.folder is not None:
            self.board = TensorBoard(self.folder.path / "tb")

    def step(self) -> None:
        """Count one update."""
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.update(1)

    def message(self, text: str) -> None:
        """Show a line on the screen only."""
        line = printable(f"{self.name}: {text}")
        if self.bar is not None:
            # The terminal may be closed: log.jsonl has every line.
            with contextlib.suppress(OSError):
                self.bar.write(line, file=sys.stderr)
        elif self.visible:
            say(line)

    def event(self, update: int, seconds: float, message: str, **details: Any) -> None:
        """Show a line, and log it with `details`."""
        self.message(message)
        self.record("event", update, seconds, {"message": message, **details})

    def values(self, kind: str, update: int, seconds: float, values: dict[str, float]) -> None:
        """Show, plot and log the values of a `kind` of line, such as "train" or "valid"."""
        self._show(kind, update, values)
        self.board.values(kind, update, values)
        self.record(kind, update, seconds, values)

    def _show(self, kind: str, update: int, values: dict[str, float]) -> None:
        text = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        if self.bar is not None and kind == "train":
            self.bar.set_postfix_str(text)
            return
        # A run may validate many times a second; the log has every line, the screen one a second.
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

    def close(self) -> None:
        """Finish the progress bar and the event file."""
        if self.bar is not None:
            self.bar.close()
        self.board.close()


class TensorBoard:
    """An event file under `folder`, or nothing with None.

    Not by the library's SummaryWriter: that writes in a thread, and when the thread dies of a full disk
    the next point waits for ever. Here the first error ends the file, with a message.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.writer = folder, None
        if folder is not None:
            from tensorboardX.event_file_writer import EventsWriter  # takes most of a second

            folder.mkdir(parents=True, exist_ok=True)
            with self._end_on_error():
                self.writer = EventsWriter(str(folder / "events"))

    def values(self, kind: str, update: int, values: dict[str, float]) -> None:
        """Write one point per metric."""
        if self.writer is None:
            return
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        event = Event(step=update, wall_time=time.time())
        for name, value in values.items():
            event.summary.MergeFrom(scalar(f"{kind}/{name}", value))
        with self._end_on_error():
            self.writer.write_event(event)
            self.writer.flush()

    def close(self) -> None:
        """Flush and close."""
        if self.writer is not None:
            with self._end_on_error():
                self.writer.close()

    @contextlib.contextmanager
    def _end_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.writer = None
            say(f"{self.folder}: {error.strerror}; no more events for TensorBoard")


class Window:
    """Means of the logs since the last line; the values stay on their device until they are read."""

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
        """Return sums and counts: a resumed run continues the line of the log that it was at."""
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
    return rates | {f"gnorm_{name}": value for name, value in engine.norms.items()}
