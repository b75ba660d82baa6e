"""Findings on the machine, which need no data."""

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from metaseq_lm.core.files import free_bytes, human_bytes
from metaseq_lm.data.doctor.findings import ERROR, OK, WARNING, Finding

LITTLE_SPACE = 2 << 30


def machine(folder: Path) -> Iterator[Finding]:
    """Yield what is to be said of Python, torch, processors and disk."""
    version = platform.python_version()
    tested = (3, 10) <= sys.version_info[:2] <= (3, 13)
    yield Finding(OK if tested else WARNING, f"Python {version}{'' if tested else ', not tested'}")
    try:
        import torch
    except ImportError as error:
        yield Finding(ERROR, f"torch cannot be imported: {error}; pip install 'torch>=2.11'")
    else:
        cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Finding(
            OK,
            f"torch {torch.__version__}, {torch.get_num_threads()} threads on {os.cpu_count()} "
            f"processors, {', '.join(cards) or 'no CUDA device'}",
        )
    free = free_bytes(folder)
    level = OK if free >= LITTLE_SPACE else WARNING
    yield Finding(level, f"{human_bytes(free)} free on the disk of {folder}")
