"""A plug-in that gives tests time to interrupt a run: each update waits without using a core.

An update waits for the signal while the file METASEQ_LM_HELD exists (the fixture `held`). The
plug-in does nothing in a process that runs tests.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from metaseq_lm.distributed import signals
from metaseq_lm.training.trainer import Trainer

SECONDS = 0.04
HELD = 60

if "conftest" not in sys.modules:
    update_at_once = Trainer._update

    def update(self: Trainer, number: int, *arguments: Any) -> None:
        """Wait, then make the update."""
        time.sleep(SECONDS)
        end, held = time.monotonic() + 60, Path(os.environ.get("METASEQ_LM_HELD", "nowhere"))
        while number == HELD and held.is_file() and not signals.last_signal():
            if time.monotonic() > end:
                break
            time.sleep(0.01)
        update_at_once(self, number, *arguments)

    Trainer._update = update  # type: ignore[method-assign]
