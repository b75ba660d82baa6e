"""The calendar of a run: fetch, update, log, validate, save, stop."""

from __future__ import annotations

import math
import signal
import time
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from metaseq_lm.core.errors import DivergedError, Interrupted, UsageError
from metaseq_lm.core.logging import Progress, TensorBoard, Window
from metaseq_lm.data.storage.manifest import fingerprint_of_run, tokenizer_hash
from metaseq_lm.data.streams import Shard
from metaseq_lm.distributed import process_group, signals
from metaseq_lm.engine.engine import Engine, copied
from metaseq_lm.runs import checkpoint
from metaseq_lm.runs.checkpoint import Checkpoint, CheckpointError
from metaseq_lm.runs.flops import FlopMeter
from metaseq_lm.runs.folder import RunFolder, finite
from metaseq_lm.tasks import Batches, Passes, Scored, Task
from metaseq_lm.training.best_checkpoint import Best
from metaseq_lm.training.prefetch import Fetcher, sample_numbers


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
            process_group.rank(), process_group.world_size(), config.engine.micro_batch_size
        )
        self.flops = FlopMeter()
        self.update, self.seconds = 0, 0.0
        self.positions: dict[str, int] = {}
        self.best = Best(self.options)
        self.last_valid: dict[str, float] = {}
        self.window = Window()
        self.stopped_by = ""  # the limit that ended the run
        self._refused = 0  # updates in a row, or rollbacks to one checkpoint
        self._validated_at = self._saved_at = -1

    @cached_property
    def data(self) -> str:
        """The fingerprint of the data that are used; MetaseqError if files are not those they were."""
        return fingerprint_of_run(self.config.data, OmegaConf.to_container(self.config.task))

    @cached_property
    def about(self) -> dict[str, Any]:
        """What every checkpoint says of its run and its data: as they were at the start."""
        config, tokenizer = OmegaConf.to_container(self.config), tokenizer_hash(self.config.data)
        facts = self.task.facts()
        return {"config": config, "data": self.data, "tokenizer": tokenizer, "facts": facts}

    def check_data(self) -> None:
        """Raise MetaseqError now, not at the first save, if the data folder is damaged."""
        _ = self.data

    # ---------------------------------------------------------------- the loop

    def train(self, progress: Progress, board: TensorBoard) -> None:
        """Make the updates that are left; raises DivergedError or Interrupted."""
        self.progress, self.board = progress, board
        _ = self.about  # now, not at the first save
        streams = self.task.build_streams("train")
        self._started = time.monotonic() - self.seconds
        for name, stream in streams.items():
            self.shard.check(name, stream.smallest_batch)
        if self.options.on_nonfinite == "rollback" and not self.update:
            self.save(False)
        self.model.train()
        with signals.listening():
            # A signal may have come before, or the last process left without a validation for one.
            self._boundary(self.agree())
            while not self.stopped_by:
                engine = self.config.engine
                fetcher = Fetcher(
                    self.task, streams, self.positions, self.shard, engine.workers, engine.timeout
                )
                self._make_updates(fetcher)

    def _make_updates(self, fetcher: Fetcher) -> None:
        """Make updates until the run ends or is rolled back."""
        for update, batches in fetcher.updates(self.update, self.options.max_update):
            process_group.alive()
            placed = {
                name: [self.engine.to_device(batch) for batch in stream]
                for name, stream in batches.items()
            }
            self._update(update, placed)
            self.positions = dict(fetcher.positions)
            if self.engine.nonfinite and self._refuse(placed):
                return
            self.update = update + 1
            self.seconds = time.monotonic() - self._started
            self.progress.step()
            asked = self.agree()
            if self.stopped_by or self._due(self.options.log_interval):
                self._log("train", self.window.means() | self._rates())
            self._boundary(asked)
            if self.stopped_by:
                return

    def _update(self, update: int, batches: Batches) -> None:
        """Make one update; of one that is not finite nothing stays."""
        skip = self.options.on_nonfinite == "skip"
        before = copied(self._changeable()) if skip else None
        self.engine.begin(update)
        with self.flops.count(batches):
            logs = self.task.update(self.engine, self.model, batches)
        if not self.engine.nonfinite:
            self._refused *= self.options.on_nonfinite == "rollback"  # there only a save counts
            self.window.add(logs)
        elif before is not None:
            self.model.load_state_dict(before["weights"], strict=False)
            for name, state in before["optimizers"].items():
                self.engine.optimizers[name].load_state_dict(state)

    def _changeable(self) -> dict[str, Any]:
        """Return what an update may have changed before a step of it was refused.

        With several optimizers an earlier one may have stepped; with one its step is refused or
        done, and what no optimizer moves is left: running statistics, averages, frozen nets.
        """
        weights, optimizers = self.model.state_dict(keep_vars=True), self.engine.optimizers
        if len(optimizers) > 1:
            states = {name: o.local_state() for name, o in optimizers.items()}
            return {"weights": self.model.state_dict(), "optimizers": states}
        moved = {id(p) for o in optimizers.values() for p in o.parameters}
        return {
            "weights": {n: w.detach() for n, w in weights.items() if id(w) not in moved},
            "optimizers": {},
        }

    def _due(self, interval: int) -> bool:
        return bool(interval and self.update) and not self.update % interval

    def agree(self) -> int:
        """Decide with all replicas whether a limit is reached; returns a signal that came, or 0."""
        first, own = process_group.rank() == 0, signals.received()
        numbers = [self.flops.total, self.seconds * first]
        numbers += [float(own == number) for number in signals.SIGNALS]
        if process_group.world_size() > 1:
            total = torch.tensor(numbers, dtype=torch.float64, device=self.engine.device)
            process_group.sum_([total])
            numbers = total.tolist()
        spent = {"max_flops": numbers[0], "max_seconds": numbers[1]}
        reached = [name for name in spent if 0 < self.options[name] <= spent[name]]
        if self.update >= self.options.max_update:
            reached.append("max_update")
        self.stopped_by = reached[0] if reached else ""
        return max((s for s, asked in zip(signals.SIGNALS, numbers[2:]) if asked), default=0)

    def _boundary(self, asked: int) -> None:
        """Between two updates: stop, validate and save where it is due."""
        options = self.options
        if asked:
            if self.update:
                self.save(False, last=True)
            self.raise_interrupted(asked)
        improved = False
        wanted = self.stopped_by or self._due(options.validate_interval_updates)
        wanted = wanted or (options.validate_first and not self.update)
        if options.valid_split and wanted and self._validated_at != self.update:
            if self._due(options.save_interval_updates):
                self.save(False)  # a job may have less time left than a validation takes
            improved = self._validate()
        waited = self.best.waited if options.valid_split else 0
        if 0 < options.patience <= waited and not self.stopped_by:
            self.stopped_by = "patience"
            self._event(
                f"no better {options.best_checkpoint_metric} in {options.patience} validations"
            )
        if improved or self.stopped_by or self._due(options.save_interval_updates):
            self.save(improved, last=bool(self.stopped_by))

    def raise_interrupted(self, asked: int) -> None:
        """Raise Interrupted for a signal."""
        done = f"after update {self.update}; a checkpoint is saved"
        error = Interrupted(
            f"stopped by {signal.Signals(asked).name} {done if self.update else 'before the first update'}"
            ", start the same command again to go on"
        )
        error.signal = asked
        raise error

    # ---------------------------------------------------------------- validation

    def _validate(self) -> bool:
        """Validate and log; return whether this is the best so far."""
        self.last_valid = self.evaluate(self.options.valid_split).metrics
        self._validated_at = self.update
        self._saved_at = -1  # a checkpoint that is there already lacks this validation
        self._log("valid", self.last_valid)
        self._log_samples()
        self.seconds = time.monotonic() - self._started
        try:
            return self.best.takes(self.last_valid, self.update)
        except UsageError:
            self._validated_at = -1
            self.save(False, last=True)  # a wrong name must not cost the updates
            raise

    def evaluate(self, split: str) -> Scored:
        """Return what the task makes of a split, in evaluation mode."""
        self.model.eval()
        with self.engine.outside_updates():
            logs, rows = self.task.evaluate(self.engine, self.model, self.passes(split))
        self.model.train()
        return Scored({name: float(value) for name, value in logs.items()}, rows)

    def _log_samples(self) -> None:
        self.model.eval()
        with self.engine.outside_updates():
            texts = self.task.samples(self.engine, self.model)
        self.model.train()
        if texts and self.run is not None:
            self.run.log("samples", self.update, self.seconds, {"texts": texts})

    def passes(self, split: str) -> Passes:
        """Return this replica's batches of a split, read as they are asked for."""

        def read(stream: Any) -> Any:
            for batch in stream.once(self.shard):
                process_group.alive()
                yield self.engine.to_device(batch)

        return {name: read(stream) for name, stream in self.task.build_streams(split).items()}

    # ---------------------------------------------------------------- what is not finite

    def _refuse(self, batches: Batches) -> bool:
        """Deal with an update that is not finite; returns whether the run was rolled back."""
        names = ", ".join(dict.fromkeys(self.engine.nonfinite))
        what = f"update {self.update + 1}: the loss or the gradient of {names} is not finite"
        self._event(what, samples=process_group.gather_objects(sample_numbers(batches)))
        self._refused += 1
        policy, most = self.options.on_nonfinite, self.options.max_nonfinite
        if policy == "stop" or self._refused > most:
            times = f" ({self._refused} times in a row)" if self._refused > 1 else ""
            raise DivergedError(
                f"{what}{times}; nothing was changed by it. Lower optimizer.lr or optimizer.clip_norm and "
                "start anew, or resume with trainer.on_nonfinite=skip or rollback"
            )
        if policy == "skip":
            return False
        # The data that led here is left behind, and what was spent on it stays spent.
        spent, positions, refused = self.flops.state_dict(), self.positions, self._refused
        for message in self.resume(Path(self.config.save_dir) / "checkpoints"):
            self._event(message)
        self.flops.load_state_dict(spent)
        self.positions, self._refused = positions, refused
        return True

    # ---------------------------------------------------------------- logs

    def _rates(self) -> dict[str, float]:
        rates = {f"lr_{name}": o.last_lr for name, o in self.engine.optimizers.items()}
        return rates | {f"gnorm_{name}": value for name, value in self.engine.norms.items()}

    def _event(self, message: str, **more: Any) -> None:
        self.progress.message(message)
        if self.run is not None:
            self.run.log("event", self.update, self.seconds, {"message": message, **more})

    def _log(self, kind: str, values: dict[str, float]) -> None:
        self.progress.values(kind, self.update, values)
        self.board.values(kind, self.update, values)
        if self.run is not None:
            self.run.log(kind, self.update, self.seconds, values)
        if kind == "train" and not finite(values):
            bad = [name for name, value in values.items() if not math.isfinite(value)]
            raise DivergedError(
                f"update {self.update}: {', '.join(bad)} is not finite. Lower optimizer.lr, or resume from "
                "the last checkpoint with another setting"
            )

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return all that a checkpoint needs besides the weights; a call of all replicas."""
        return {
            "update": self.update,
            "positions": dict(self.positions),
            "best": self.best.state_dict(),
            "seconds": self.seconds,
            "validated_at": self._validated_at,
            "window": self.window.state_dict(),
            "flops": self.flops.of_all(),
            "optimizers": {name: o.state_dict() for name, o in self.engine.optimizers.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a saved state; raises KeyError if a part is missing, ValueError if one does not fit."""
        for name, optimizer in self.engine.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        # Of all replicas, which may have been more or fewer: the first one takes it.
        self.flops.load_state_dict(state["flops"], share=process_group.rank() == 0)
        self.window.load_state_dict(state["window"], self.engine.device)
        self.update, self.seconds = state["update"], state["seconds"]
        self._validated_at = state["validated_at"]
        self.positions = dict(state["positions"])
        if not self.best.load_state_dict(state["best"]):
            self._validated_at = -1  # not by this metric

    def save(self, is_best: bool, last: bool = False) -> None:
        """Write a checkpoint from the first replica, link it as best if it is, drop old ones.

        Raises DivergedError if a weight is not finite, CheckpointError if it cannot be written and
        trainer.on_save_error is stop or this is the `last` one, MetaseqError if the replicas disagree.
        """
        process_group.alive()
        weights = self.model.state_dict()
        # Spoilt on one replica only, it must stop them all.
        bad = [
            n for own in process_group.gather_objects(checkpoint.nonfinite(weights)) for n in own
        ]
        if bad:
            raise DivergedError(
                f"after update {self.update} {', '.join([*dict.fromkeys(bad)][:4])} is not finite, so "
                "nothing is saved. Resume from the last checkpoint with a lower optimizer.lr"
            )
        process_group.check_equal(weights, self.update)
        state = self.state_dict()
        trouble = ""
        if self.run is not None:
            try:
                self._write(weights, state, is_best)
            except CheckpointError as error:
                trouble = str(error)
        trouble = process_group.from_first(trouble)
        if trouble and (last or self.options.on_save_error == "stop"):
            raise CheckpointError(trouble)
        if trouble:
            self._event(trouble)
        else:
            self._saved_at = self.update
            self._refused *= bool(self.engine.nonfinite)

    def _write(self, weights: dict[str, Any], state: dict[str, Any], is_best: bool) -> None:
        assert self.run is not None
        folder = self.run.checkpoints
        path = checkpoint.folder_of(folder, self.update)
        if self._saved_at != self.update:
            about = {**self.about, "valid": self.last_valid}
            checkpoint.save(folder, self.update, weights, state, about)
        if is_best:
            checkpoint.link(folder, "best", path)
        checkpoint.prune(folder, self.options.keep_last, self.update)

    def resume(self, folder: Path) -> list[str]:
        """Load the newest checkpoint under `folder` that verifies and fits; returns what was done.

        The first replica chooses for all. Raises CheckpointError if there are some and none fits.
        """
        found: Optional[Checkpoint] = None
        skipped: list[str] = []
        if process_group.rank() == 0:
            found, skipped = checkpoint.newest(folder, self._check_fit)
        path, skipped = process_group.from_first((found.path if found else None, skipped))
        messages = [f"skipped a checkpoint that cannot be used: {reason}" for reason in skipped]
        if path is None:
            return messages
        found = found or checkpoint.load(path)
        self.model.load_state_dict(found.weights)
        try:
            self.load_state_dict(found.state)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{found.path}: its state is not of this run: {error}") from error
        self._saved_at = self.update
        self.last_valid = found.manifest["valid"]
        if self.run is not None:
            best = None if self.best.value is None else self.best.update
            checkpoint.relink(folder, found.path, best)
        return [*messages, f"resumed from {found.path} at update {self.update}"]

    def _check_fit(self, found: Checkpoint) -> None:
        data = found.manifest.get("data")
        if data != self.data:
            raise CheckpointError(
                f"{found.path} was trained on other data than {self.config.data} holds now "
                f"({data} then, {self.data} now); choose another --save-dir"
            )
        checkpoint.check_facts(found.manifest.get("facts"), self.about["facts"], found.path)
        checkpoint.check_fit(self.model, found.weights, found.path)
        lacking = self.engine.optimizers.keys() ^ found.state.get("optimizers", {}).keys()
        if lacking:
            raise CheckpointError(f"{found.path}: the optimizers {sorted(lacking)} do not match")
