"""A plug-in that gives tests time to interrupt a run: each update waits without using a core.

It does nothing in a process that runs tests.
"""

import sys
import time
from typing import Any

from metaseq_lm.training.trainer import Trainer

SECONDS = 0.04

if "conftest" not in sys.modules:
    update_at_once = Trainer._update

    def update(self: Trainer, *arguments: Any) -> None:
        """Wait, then make the update."""
        time.sleep(SECONDS)
        update_at_once(self, *arguments)

    Trainer._update = update  # type: ignore[method-assign]
