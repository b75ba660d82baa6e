"""What this machine and installation have, and what each part gives: `doctor --environment`."""

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from metaseq_lm import __version__
from metaseq_lm.core.files import free_bytes, human_bytes
from metaseq_lm.distributed.launcher import usable_cores

# The distribution that an extra installs, and what it gives.
EXTRAS = {
    "transformers": ("transformers", "export and import --check, leagues from real encoders"),
    "arrow": ("pyarrow", "preprocess reads Parquet and Arrow files"),
    "zstd": ("zstandard", "preprocess reads .zst files"),
    "hub": ("huggingface_hub", "export --push"),
    "search": ("optuna", "sweep --search"),
    "completion": ("argcomplete", "completion in a shell"),
    "trackio": ("trackio", "engine.loggers=[trackio]"),
    "wandb": ("wandb", "engine.loggers=[wandb]"),
    "mlflow": ("mlflow-skinny", "engine.loggers=[mlflow]"),
}
_SLURM = {
    "sbatch": "sweep and league --executor slurm",
    "srun": "starts the processes of a job",
    "squeue": "sweep status",
    "sacct": "why jobs ended",
    "scancel": "sweep cancel",
}


@dataclass(frozen=True)
class Part:
    """A part of the machine or the installation.

    Attributes:
        name: Its name.
        value: What is there: a version, a path, a count or a size; None if there is none.
        unit: The unit of a number, "" for texts.
        gives: What it is needed for.
        remedy: How to get it if there is none.
    """

    name: str
    value: str | int | None
    unit: str
    gives: str
    remedy: str = ""

    def __str__(self) -> str:
        text = "-" if self.value is None else f"{self.value} {self.unit}".rstrip()
        if self.unit == "bytes" and isinstance(self.value, int):
            text = human_bytes(self.value)
        remedy = f"; {self.remedy}" if self.value is None and self.remedy else ""
        return f"{self.name:<24}{text:<28}{self.gives}{remedy}".rstrip()


def environment() -> Iterator[Part]:
    """Yield the parts: versions, processors, memory, GPUs, Slurm, disks, extras."""
    yield Part("metaseq-lm", __version__, "", "")
    yield Part("python", platform.python_version(), "", sys.executable)
    yield from _torch()
    yield Part("usable cores", usable_cores(), "cores", f"of {os.cpu_count()}; train --nproc")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Part("memory", memory, "bytes", "of the machine; jobs may have less")
    for command, gives in _SLURM.items():
        yield Part(command, shutil.which(command), "", gives, "a command of Slurm")
    for name, folder in (("current folder", Path.cwd()), ("TMPDIR", Path(tempfile.gettempdir()))):
        yield Part(f"free, {name}", free_bytes(folder), "bytes", str(folder))
    for extra, (distribution, gives) in EXTRAS.items():
        remedy = f"pip install 'metaseq-lm[{extra}]'"
        yield Part(distribution, _version_of(distribution), "", gives, remedy)


def _torch() -> Iterator[Part]:
    """Yield the version, build, threads and GPUs of torch."""
    try:
        import torch
    except ImportError as error:
        yield Part("torch", None, "", str(error), "pip install 'torch>=2.11'")
        return
    build = next((f"{n} {v}" for n in ("cuda", "hip") if (v := getattr(torch.version, n))), "cpu")
    yield Part("torch", torch.__version__, "", "train, evaluate, score, rerank, export, import")
    yield Part("torch build", build, "", "cpu: engine.device=cpu only")
    yield Part("torch threads", torch.get_num_threads(), "threads", "OMP_NUM_THREADS sets them")
    count = torch.cuda.device_count()
    yield Part("GPUs", count or None, "GPUs", "engine.device=cuda", "without, runs are on the CPU")
    for number in range(count):
        device = torch.cuda.get_device_properties(number)
        yield Part(f"GPU {number}", device.total_memory, "bytes", device.name)


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
