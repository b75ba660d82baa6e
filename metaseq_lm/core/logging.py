"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere, TensorBoard."""

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

from metaseq_lm.core.errors import say


def number(value: float) -> str:
    """Return a number in at most four significant digits."""
    return f"{value:.4g}"


class Progress:
    """Shows updates and metrics on stderr; silent with `show` false (other replicas)."""

    def __init__(self, total: int, start: int, name: str, show: bool = True) -> None:
        self.total = total
        self.name = name
        self.show = show
        self.shown = 0.0  # when the last line of a validation was
        interactive = show and sys.stderr.isatty()
        self.bar = (
            tqdm(total=total, initial=start, desc=name, unit="upd", dynamic_ncols=True)
            if interactive
            else None
        )

    def step(self) -> None:
        """Count one update."""
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.update(1)

    def values(self, kind: str, update: int, values: dict[str, float]) -> None:
        """Show the metrics of an update."""
        text = "  ".join(f"{k} {number(v)}" for k, v in values.items())
        if self.bar is not None and kind == "train":
            self.bar.set_postfix_str(text)
            return
        now = time.monotonic()
        # A run may validate many times a second; the log has every line, the screen one a second.
        if kind != "train":
            if update != self.total and now - self.shown < 1.0:
                return
            self.shown = now
        self.message(f"{kind} {update}/{self.total}  {text}")

    def message(self, text: str) -> None:
        """Show one line."""
        if not self.show:
            return
        line = f"{self.name}: {text}"
        # The terminal or pipe may be closed, the disk of a file full: log.jsonl has all of it.
        if self.bar is None:
            say(line)
            return
        with contextlib.suppress(OSError):
            self.bar.write(line, file=sys.stderr)

    def close(self) -> None:
        """Finish the bar."""
        if self.bar is not None:
            self.bar.close()


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
            with self._told():
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
        with self._told():
            self.writer.write_event(event)
            self.writer.flush()

    def close(self) -> None:
        """Flush and close."""
        if self.writer is not None:
            with self._told():
                self.writer.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.writer = None
            say(f"{self.folder}: {error.strerror}; no more events for TensorBoard")


class Window:
    """Means of the logs since the last line; the values stay on their device until asked for."""

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {}
        self.counts: dict[str, int] = {}

    def add(self, logs: Mapping[str, Any]) -> None:
        """Add the logs of one update; an update may lack some names."""
        for name, value in logs.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        """Return the mean of each name over the updates that had it, and start anew."""
        means = {name: float(total) / self.counts[name] for name, total in self.sums.items()}
        self.sums, self.counts = {}, {}
        return means

    def state_dict(self) -> dict[str, Any]:
        """Return sums and counts, so that a line that spans a resumption is the same line."""
        return {"sums": dict(self.sums), "counts": dict(self.counts)}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Take saved sums and counts."""
        self.counts = dict(state["counts"])
        self.sums = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in state["sums"].items()
        }
