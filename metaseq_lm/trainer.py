"""The calendar of a run: fetch, update, log, validate, save, stop."""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, Optional

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from metaseq_lm import checkpoint, distributed
from metaseq_lm.data.manifest import fingerprint
from metaseq_lm.data.streams import Shard, Stream
from metaseq_lm.engine import Engine, Logs
from metaseq_lm.errors import DivergedError, Interrupted, UsageError
from metaseq_lm.flops import FlopMeter
from metaseq_lm.logging import Progress, TensorBoard
from metaseq_lm.run_folder import RunFolder, finite
from metaseq_lm.tasks import Batches, Passes, Task

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Fetcher:
    """Gives the batches of update after update, prepared ahead by threads if `workers` > 0.

    `positions` says how many global batches each stream has given; it is all there is to save.
    """

    def __init__(
        self,
        task: Task,
        streams: dict[str, Stream],
        positions: dict[str, int],
        shard: Shard,
        workers: int,
    ) -> None:
        self.task = task
        self.streams = streams
        self.positions = {name: positions.get(name, 0) for name in streams}
        self.shard = shard
        self.pool = ThreadPoolExecutor(workers) if workers else None
        self.ahead = 2 * workers

    def _plan(self, update: int, positions: dict[str, int]) -> list[tuple[str, int]]:
        plan = []
        for name, count in self.task.needs(update).items():
            plan += [(name, positions[name] + i) for i in range(count)]
            positions[name] += count
        return plan

    def _make(self, plan: list[tuple[str, int]]) -> Batches:
        batches: Batches = {}
        for name, number in plan:
            made = self.streams[name].micro_batches(number, self.shard)
            batches.setdefault(name, []).append(made)
        return batches

    def updates(self, start: int, stop: int) -> Iterator[tuple[int, Batches]]:
        """Yield (update, batches); `positions` counts what has been yielded."""
        if self.pool is None:
            for update in range(start, stop):
                yield update, self._make(self._plan(update, self.positions))
            return
        planned = dict(self.positions)
        queue: deque[tuple[int, Future[Batches]]] = deque()
        following = start
        try:
            while queue or following < stop:
                while following < stop and len(queue) <= self.ahead:
                    plan = self._plan(following, planned)
                    queue.append((following, self.pool.submit(self._make, plan)))
                    following += 1
                update, made = queue.popleft()
                batches = made.result()
                self._plan(update, self.positions)
                yield update, batches
        finally:
            self.pool.shutdown(cancel_futures=True)


class Trainer:
    """Runs a task's updates from where the run folder left off."""

    def __init__(
        self,
        config: DictConfig,
        task: Task,
        model: nn.Module,
        engine: Engine,
        run: Optional[RunFolder],
    ) -> None:
        self.config = config
        self.options = config.trainer
        self.task, self.model, self.engine, self.run = task, model, engine, run
        self.shard = Shard(
            distributed.rank(), distributed.world_size(), config.engine.micro_batch_size
        )
        self.data = fingerprint(Path(config.data))
        self.flops = FlopMeter()
        self.update = 0
        self.positions: dict[str, int] = {}
        self.best: dict[str, Any] = {"value": None, "update": 0, "waited": 0}
        self.seconds = 0.0
        self.last_valid: dict[str, float] = {}
        self._stop_signal: Optional[int] = None
        self._saved_at = -1

    # ---------------------------------------------------------------- the loop

    def train(self, progress: Progress, board: TensorBoard) -> None:
        """Make the updates that are left; raises DivergedError or Interrupted."""
        options = self.options
        streams = self.task.build_streams("train")
        fetcher = Fetcher(
            self.task, streams, self.positions, self.shard, self.config.engine.workers
        )
        started = time.monotonic() - self.seconds
        window = Window()
        self.model.train()
        with _handlers(self._on_signal):
            for update, batches in fetcher.updates(self.update, options.max_update):
                placed = {
                    name: [self.engine.to_device(batch) for batch in stream]
                    for name, stream in batches.items()
                }
                self.engine.begin(update)
                with self.flops.count(placed):
                    logs = self.task.update(self.engine, self.model, placed)
                self.update, self.positions = update + 1, fetcher.positions
                self.seconds = time.monotonic() - started
                window.add(logs)
                self._check_finite()
                progress.step()
                if self._due(options.log_interval):
                    self._log("train", window.means() | self._rates(), progress, board)
                stop = self._validate_and_save(progress, board)
                if stop:
                    break
                self.seconds = time.monotonic() - started

    def _due(self, interval: int) -> bool:
        return self.update == self.options.max_update or bool(
            interval and not self.update % interval
        )

    def _validate_and_save(self, progress: Progress, board: TensorBoard) -> bool:
        """Do what is due after an update; return whether to stop early."""
        options = self.options
        enough = False
        improved = False
        if options.valid_split and self._due(options.validate_interval_updates):
            values = self.validate(options.valid_split)
            self._log("valid", values, progress, board)
            self.last_valid = values
            improved = self._better(values)
            enough = bool(options.patience) and self.best["waited"] >= options.patience
        interrupted = self._interrupted()
        if improved or enough or interrupted or self._due(options.save_interval_updates):
            self.save(improved)
        if interrupted:
            raise Interrupted(
                f"stopped by signal {interrupted} after update {self.update}; a checkpoint is saved, "
                "start the same command again to go on"
            )
        if enough:
            progress.message(
                f"no better {options.best_checkpoint_metric} in {options.patience} validations"
            )
        return enough

    def validate(self, split: str) -> dict[str, float]:
        """Return the task's metrics on a split, in evaluation mode."""
        self.model.eval()
        logs = self.task.validate(self.engine, self.model, self.passes(split))
        self.model.train()
        return {name: float(value) for name, value in logs.items()}

    def passes(self, split: str) -> Passes:
        """Return this replica's batches of a split, read as they are asked for."""
        return {
            name: (self.engine.to_device(batch) for batch in stream.once(self.shard))
            for name, stream in self.task.build_streams(split).items()
        }

    def _better(self, values: dict[str, float]) -> bool:
        """Return whether this validation is the best so far, and remember it."""
        metric = self.options.best_checkpoint_metric
        if metric not in values:
            raise UsageError(
                f"trainer.best_checkpoint_metric is '{metric}' but validation gives "
                f"{', '.join(sorted(values))}"
            )
        sign = 1 if self.options.maximize_best_checkpoint_metric else -1
        value = values[metric]
        before = self.best["value"]
        if math.isfinite(value) and (before is None or sign * value > sign * before):
            self.best = {"value": value, "update": self.update, "waited": 0}
            return True
        self.best["waited"] += 1
        return False

    def _check_finite(self) -> None:
        if self.engine.nonfinite:
            raise DivergedError(
                f"update {self.update}: the gradient of {', '.join(self.engine.nonfinite)} is not finite; "
                "nothing was changed by it. Lower optimizer.lr or optimizer.clip_norm, or resume from the "
                "last checkpoint with another setting"
            )

    def _rates(self) -> dict[str, float]:
        rates = {f"lr_{name}": o.lr for name, o in self.engine.optimizers.items()}
        return rates | {f"gnorm_{name}": value for name, value in self.engine.norms.items()}

    def _log(
        self, kind: str, values: dict[str, float], progress: Progress, board: TensorBoard
    ) -> None:
        progress.values(kind, self.update, values)
        board.values(kind, self.update, values)
        if self.run is not None:
            self.run.log(kind, self.update, self.seconds, values)
        if kind == "train" and not finite(values):
            bad = [name for name, value in values.items() if not math.isfinite(value)]
            raise DivergedError(
                f"update {self.update}: {', '.join(bad)} is not finite. Lower optimizer.lr, or resume from "
                "the last checkpoint with another setting"
            )

    # ---------------------------------------------------------------- signals

    def _on_signal(self, number: int, frame: Optional[FrameType]) -> None:
        self._stop_signal = number

    def _interrupted(self) -> int:
        """Return the signal that asked any replica to stop, or 0; all replicas agree."""
        mine = self._stop_signal or 0
        if distributed.world_size() == 1:
            return mine
        flag = torch.tensor([mine], dtype=torch.float64, device=self.engine.device)
        distributed.sum_([flag])
        return int(flag.item())

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return all that a checkpoint needs besides the weights."""
        return {
            "update": self.update,
            "positions": dict(self.positions),
            "best": dict(self.best),
            "seconds": self.seconds,
            "flops": self.flops.state_dict(),
            "optimizers": {name: o.state_dict() for name, o in self.engine.optimizers.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a saved state; raises KeyError if a part is missing."""
        for name, optimizer in self.engine.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.flops.load_state_dict(state["flops"])
        self.update, self.seconds = state["update"], state["seconds"]
        self.positions, self.best = dict(state["positions"]), dict(state["best"])

    def save(self, is_best: bool) -> None:
        """Write a checkpoint from the first replica, link it as best if it is, drop old ones."""
        if self.run is not None and self._saved_at != self.update:
            folder = self.run.checkpoints
            about = {
                "config": OmegaConf.to_container(self.config),
                "valid": self.last_valid,
                "data": self.data,
            }
            path = checkpoint.save(
                folder, self.update, self.model.state_dict(), self.state_dict(), about
            )
            if is_best:
                checkpoint.link(folder, "best", path)
            checkpoint.prune(folder, self.options.keep_last)
        self._saved_at = self.update
        distributed.barrier()

    def resume(self, folder: Path) -> list[str]:
        """Load the newest verified checkpoint under `folder`; returns messages of what was done."""
        found, skipped = checkpoint.newest(folder)
        messages = [f"skipped a damaged checkpoint: {reason}" for reason in skipped]
        if found is not None:
            if found.manifest["data"] != self.data:
                raise UsageError(
                    f"{found.path} was trained on other data than {self.config.data} holds now "
                    f"({found.manifest['data']} then, {self.data} now); choose another --save-dir"
                )
            checkpoint.load_into(self.model, found.weights, found.path)
            try:
                self.load_state_dict(found.state)
            except (KeyError, ValueError) as error:
                raise checkpoint.CheckpointError(
                    f"{found.path / 'state.pt'} lacks or misfits {error}; it was written by another version"
                ) from error
            self._saved_at = self.update
            self.last_valid = found.manifest["valid"]
            messages.append(f"resumed from {found.path} at update {self.update}")
        return messages


class Window:
    """Means of the logs since the last line; the values stay on their device until asked for."""

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {}
        self.counts: dict[str, int] = {}

    def add(self, logs: Logs) -> None:
        """Add the logs of one update; an update may lack some names."""
        for name, value in logs.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        """Return the mean of each name over the updates that had it, and start anew."""
        means = {name: float(total) / self.counts[name] for name, total in self.sums.items()}
        self.sums, self.counts = {}, {}
        return means


class _handlers:
    """Calls `handler` for the stop signals inside the with block (main thread only)."""

    def __init__(self, handler: Any) -> None:
        self.handler = handler
        self.before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in SIGNALS:
            self.before[number] = signal.signal(number, self.handler)

    def __exit__(self, *exc: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
