"""The programs of processes that a sweep starts from its snapshot of the code."""

import gc
import sys
from pathlib import Path

from submitit.core.submission import process_job

from metaseq_lm import plugins
from metaseq_lm.cli import program
from metaseq_lm.core.errors import MetaseqError, say
from metaseq_lm.core.files import read_json
from metaseq_lm.core.registry import ALL
from metaseq_lm.sweeps.job import JobRunner
from metaseq_lm.sweeps.server import fork_jobs


def serve(lock: str) -> None:
    """Fork the runs of local sweeps."""
    _import_all()
    JobRunner.program = staticmethod(program)
    JobRunner.import_all = staticmethod(lambda: None)
    fork_jobs(lock)


def process(folder: str) -> None:
    """Run a job that submitit has stored in a folder."""
    JobRunner.program = staticmethod(program)
    JobRunner.import_all = staticmethod(_import_all)
    process_job(folder)


def repeat(file: str) -> None:
    """Train runs of a league again, as a request in a file says; see `referee.repetition`."""
    from metaseq_lm.referee.repetition import train_again

    request = read_json(Path(file))
    try:
        plugins.load_all(request["user_dir"])
        train_again(request, Path(file).parent)
    except MetaseqError as error:
        say(f"metaseq-lm: {error}")
        sys.exit(error.exit_code)


def _import_all() -> None:
    import torch._dynamo  # noqa: F401 - or the first optimizer of each run imports it

    import metaseq_lm.cli.train
    import metaseq_lm.interop.exporting
    import metaseq_lm.training.run  # noqa: F401

    plugins.load_all()
    for registry in ALL.values():
        for entry in registry.entries.values():
            _ = entry.value  # the access imports it
    gc.collect()
    gc.freeze()  # garbage collection in the forked processes would copy every page
