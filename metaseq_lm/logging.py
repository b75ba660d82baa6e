"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere, TensorBoard."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm


def number(value: float) -> str:
    """Return a number in at most four significant digits."""
    return f"{value:.4g}"


class Progress:
    """Shows updates and metrics on stderr; silent with `show` false (other replicas)."""

    def __init__(self, total: int, start: int, name: str, show: bool = True) -> None:
        self.total = total
        self.name = name
        self.show = show
        self.shown = 0.0
        interactive = show and sys.stderr.isatty()
        self.bar = (
            tqdm(total=total, initial=start, desc=name, unit="upd", dynamic_ncols=True)
            if interactive
            else None
        )

    def step(self) -> None:
        """Count one update."""
        if self.bar is not None:
            self.bar.update(1)

    def values(self, kind: str, update: int, values: dict[str, float]) -> None:
        """Show the metrics of an update."""
        text = "  ".join(f"{k} {number(v)}" for k, v in values.items())
        if self.bar is not None and kind == "train":
            self.bar.set_postfix_str(text)
            return
        now = time.monotonic()
        # A run may validate many times a second; the log has every line, the screen one a second.
        if kind == "train" or update == self.total or now - self.shown >= 1.0:
            self.message(f"{kind} {update}/{self.total}  {text}")
            self.shown = now

    def message(self, text: str) -> None:
        """Show one line."""
        if not self.show:
            return
        if self.bar is not None:
            self.bar.write(f"{self.name}: {text}", file=sys.stderr)
        else:
            print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Finish the bar."""
        if self.bar is not None:
            self.bar.close()


class TensorBoard:
    """Event files under `folder`, or nothing with None."""

    def __init__(self, folder: Path | None) -> None:
        self.writer: Any = None
        if folder is not None:
            from tensorboardX import SummaryWriter  # takes most of a second to import

            self.writer = SummaryWriter(str(folder))

    def values(self, kind: str, update: int, values: dict[str, float]) -> None:
        """Write one point per metric."""
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(f"{kind}/{name}", value, update)

    def close(self) -> None:
        """Flush and close."""
        if self.writer is not None:
            self.writer.close()
