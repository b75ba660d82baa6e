"""What this machine and installation have, and what each part gives: `doctor --environment`."""

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from metaseq_lm import __version__
from metaseq_lm.core.files import free_bytes, human_bytes
from metaseq_lm.distributed.launcher import usable_cores

# The distribution that each extra installs, and what it gives.
EXTRAS = {
    "transformers": ("transformers", "export --check, import --check"),
    "arrow": ("pyarrow", "Parquet and Arrow files in preprocess"),
    "zstd": ("zstandard", ".zst files in preprocess"),
    "hub": ("huggingface_hub", "export --push"),
    "search": ("optuna", "sweep --search"),
    "completion": ("argcomplete", "completion in a shell"),
    **{name: (name, f"engine.loggers=[{name}]") for name in ("trackio", "wandb")},
    "mlflow": ("mlflow-skinny", "engine.loggers=[mlflow]"),
}


class _EnvironmentPart(NamedTuple):
    """A version, path or number (sizes in bytes), None if missing; its use, how to install it."""

    name: str
    value: str | int | None
    use: str
    install: str = ""

    def __str__(self) -> str:
        value = "-" if self.value is None else str(self.value)
        if isinstance(self.value, int) and self.value > 1 << 20:
            value = human_bytes(self.value)
        install = f": {self.install}" if self.value is None and self.install else ""
        return f"{self.name:<22}{value:<28}{self.use}{install}"


def environment() -> Iterator[_EnvironmentPart]:
    """Yield the parts: versions, processors, memory, GPUs, Slurm, disks, extras."""
    yield _EnvironmentPart("metaseq-lm", __version__, "this package")
    yield _EnvironmentPart("python", platform.python_version(), sys.executable)
    yield from _torch()
    yield _EnvironmentPart("cores", usable_cores(), f"usable, of {os.cpu_count()}; train --nproc")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield _EnvironmentPart("memory", memory, "of the machine; a job may have less")
    for command in ("sbatch", "srun", "squeue", "sacct", "scancel"):
        yield _EnvironmentPart(
            command, shutil.which(command), "Slurm: sweep and league --executor slurm"
        )
    for name, folder in (("current folder", Path.cwd()), ("TMPDIR", Path(tempfile.gettempdir()))):
        yield _EnvironmentPart(f"free, {name}", free_bytes(folder), str(folder))
    for extra, (distribution, use) in EXTRAS.items():
        install = f"pip install 'metaseq-lm[{extra}]'"
        try:
            yield _EnvironmentPart(distribution, metadata.version(distribution), use, install)
        except metadata.PackageNotFoundError:
            yield _EnvironmentPart(distribution, None, use, install)


def _torch() -> Iterator[_EnvironmentPart]:
    try:
        import torch
    except ImportError as error:
        yield _EnvironmentPart("torch", None, str(error), "pip install 'torch>=2.11'")
        return
    build = next((f"{n} {v}" for n in ("cuda", "hip") if (v := getattr(torch.version, n))), "cpu")
    yield _EnvironmentPart(
        "torch", torch.__version__, "train, evaluate, score, rerank, export, import"
    )
    yield _EnvironmentPart("torch build", build, "a build for CPUs uses no GPU")
    yield _EnvironmentPart(
        "threads", torch.get_num_threads(), "of torch in a process; OMP_NUM_THREADS"
    )
    devices = range(torch.cuda.device_count())
    yield _EnvironmentPart("GPUs", len(devices) or None, "engine.device=cuda")
    for device in map(torch.cuda.get_device_properties, devices):
        yield _EnvironmentPart("memory of a GPU", device.total_memory, device.name)
