"""Loggers of a run besides log.jsonl: TensorBoard, trackio, Weights & Biases, MLflow."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from metaseq_lm.core.config import RunConfig, as_dict, flatten
from metaseq_lm.core.errors import UsageError, say
from metaseq_lm.core.files import write_atomic
from metaseq_lm.core.secrets import mask_options

PROJECT = "metaseq-lm"
_ID_FILE = "run_id.txt"


@dataclass(frozen=True)
class LoggedRun:
    """The facts on a run that loggers need.

    Attributes:
        folder: The run folder.
        config: The run's configuration.
        update: The update from which it continues.
    """

    folder: Path
    config: RunConfig
    update: int = 0

    @property
    def name(self) -> str:
        """The name of the run folder."""
        return self.folder.resolve().name

    @property
    def id(self) -> str:
        """The logger's identifier of the run, stored in the run folder to resume it."""
        file, stored = self.folder / _ID_FILE, ""
        if file.is_file():
            stored = file.read_text(errors="replace").strip()
        if not re.fullmatch("[0-9a-f]{32}", stored):
            stored = uuid.uuid4().hex
            write_atomic(file, f"{stored}\n".encode())
        return stored

    @property
    def options(self) -> dict[str, Any]:
        """The configuration with dotted keys, without secrets."""
        return flatten(mask_options(as_dict(self.config)))


class _Logger(Protocol):
    """A service that is open for a run; its methods may raise any exception."""

    def log(self, update: int, values: dict[str, float]) -> None:
        """Add one point per value; a resumed run may repeat an update with equal values."""

    def close(self, failed: bool) -> None:
        """Flush, and mark the run as finished or failed."""


class _TensorBoard:
    """An event file in the run folder."""

    def __init__(self, run: LoggedRun) -> None:
        from tensorboardX.event_file_writer import EventsWriter  # takes most of a second
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder = run.folder / "tb"
        folder.mkdir(parents=True, exist_ok=True)
        # The number sorts files of the same second. The rest is random, so nobody can plant a link.
        number = sum(1 for _ in folder.iterdir())
        # The library's SummaryWriter writes in a thread: when that dies because the disk is full,
        # the next point blocks.
        self.writer = EventsWriter(str(folder / "events"), f".{number:04d}.{secrets.token_hex(8)}")
        # TensorBoard then drops later points, which a killed process logged, and shows new ones.
        start = SessionLog(status=SessionLog.START)
        self.writer.write_event(
            Event(step=run.update + 1, wall_time=time.time(), session_log=start)
        )

    def log(self, update: int, values: dict[str, float]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        event = Event(step=update, wall_time=time.time())
        for name, value in values.items():
            event.summary.MergeFrom(scalar(name, value))
        self.writer.write_event(event)
        self.writer.flush()

    def close(self, failed: bool) -> None:
        self.writer.close()


class _Trackio:
    """A run of trackio, in TRACKIO_DIR or in the space that its environment variables name."""

    def __init__(self, run: LoggedRun) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        # trackio finds runs by their names.
        name = f"{run.name}-{run.id[:8]}"
        self.run = trackio.init(project, name=name, config=run.options, resume="allow", embed=False)

    def log(self, update: int, values: dict[str, float]) -> None:
        self.run.log(values, step=update)

    def close(self, failed: bool) -> None:
        self.run.finish()


class _WandB:
    """A run of Weights & Biases; WANDB_MODE, WANDB_PROJECT etc. choose where it goes."""

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.id,
            name=run.name,
            dir=run.folder,
            config=run.options,
            resume="allow",
            # Command line, output and code may hold secrets.
            settings=wandb.Settings(
                console="off", disable_git=True, save_code=False, x_disable_meta=True
            ),
        )

    def log(self, update: int, values: dict[str, float]) -> None:
        """Log a step; the service drops steps before its last one."""
        self.run.log(values, step=update)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class _MLflow:
    """A run of MLflow at MLFLOW_TRACKING_URI, in MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, run: LoggedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        if experiment := self.client.get_experiment_by_name(name):
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self.client.create_experiment(name)
        earlier = self.client.search_runs([experiment_id], f"tags.metaseq_lm_id = '{run.id}'")
        if earlier:
            self.run_id = earlier[0].info.run_id
            self.client.update_run(self.run_id, status="RUNNING")
            return
        tags = {"metaseq_lm_id": run.id}
        self.run_id = self.client.create_run(
            experiment_id, run_name=run.name, tags=tags
        ).info.run_id
        options = [Param(key, str(value)[:500]) for key, value in run.options.items()]
        # MLflow takes no more at once.
        for first in range(0, len(options), 100):
            self.client.log_batch(self.run_id, params=options[first : first + 100])

    def log(self, update: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        points = [Metric(name, value, now, update) for name, value in values.items()]
        self.client.log_batch(self.run_id, metrics=points)

    def close(self, failed: bool) -> None:
        self.client.set_terminated(self.run_id, status="FAILED" if failed else "FINISHED")


# Keys are the names in engine.loggers, which are also the names of the packages and extras.
LOGGERS: dict[str, Callable[[LoggedRun], _Logger]] = {
    "tensorboard": _TensorBoard,
    "trackio": _Trackio,
    "wandb": _WandB,
    "mlflow": _MLflow,
}


def check_installed(names: Sequence[str]) -> None:
    """Raise UsageError if the package of a logger is missing."""
    for name in names:
        if find_spec(name) is None:
            raise UsageError(
                f"engine.loggers names {name}, which is not installed; pip install "
                f"'metaseq-lm[{name}]'"
            )


class LoggerGroup:
    """The open loggers of a run; one that raises an exception is left out, with one warning."""

    def __init__(self, names: Sequence[str], run: LoggedRun) -> None:
        self.loggers: dict[str, _Logger] = {}
        for name in dict.fromkeys(names):
            with self._without_errors(name):
                self.loggers[name] = LOGGERS[name](run)

    def log(self, kind: str, update: int, values: dict[str, float]) -> None:
        """Log the values of a `kind` of line, such as "train" or "valid"."""
        named = {f"{kind}/{name}": value for name, value in values.items()}
        for name, logger in list(self.loggers.items()):
            with self._without_errors(name):
                logger.log(update, named)

    def close(self, failed: bool) -> None:
        """Close all."""
        for name, logger in list(self.loggers.items()):
            with self._without_errors(name):
                logger.close(failed)
        self.loggers.clear()

    @contextlib.contextmanager
    def _without_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # from the network, the disk or the logger's package
            self.loggers.pop(name, None)
            reason = (str(error).strip() or repr(error)).splitlines()[0].rstrip(".")
            say(f"warning: {name}: {reason}; it gets no more values (log.jsonl has them all)")
