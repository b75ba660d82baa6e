"""The training loop: fetch, update, log, validate, save, stop."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from metaseq_lm.core.batch import Logs
from metaseq_lm.core.errors import DivergedError, Interrupted, MetaseqError, UsageError
from metaseq_lm.distributed import process_group, signals
from metaseq_lm.runs.conditions import REMEDY, describe_conditions
from metaseq_lm.runs.flops import FlopMeter
from metaseq_lm.runs.manifests import CheckpointError
from metaseq_lm.tasks import Batches
from metaseq_lm.tasks.protocols import flops_by_rule
from metaseq_lm.training.averaging import MovingAverage
from metaseq_lm.training.checkpointing import BestCheckpoint, Checkpointer
from metaseq_lm.training.conditions import conditions_of
from metaseq_lm.training.nonfinite import (
    NonfinitePolicy,
    check_finite,
    check_learns,
    describe_refusal,
)
from metaseq_lm.training.parts import Parts, evaluate_split, sample_texts
from metaseq_lm.training.prefetch import Prefetcher, sample_numbers
from metaseq_lm.training.run_log import RunLog, Window, engine_values
from metaseq_lm.training.words import WordCounter

_MOST_UNCHECKED = 1000  # updates, each with its logs on the device
_MOST_WITHOUT_TARGETS = 100  # updates; a line of one token may by chance get a target only later


@dataclass
class _Unchecked:
    """An update of which the host does not know yet whether the device has refused it.

    Attributes:
        samples: Its sample numbers, by stream.
        logs: Its logs.
        positions: The positions in the data after it.
        words: The state of the word counter after it.
    """

    samples: dict[str, list[Any]]
    logs: Logs
    positions: dict[str, int] = field(default_factory=dict)
    words: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """Runs a task's updates from the last checkpoint on. All methods are collective calls."""

    def __init__(self, parts: Parts, checkpointer: Checkpointer, log: RunLog) -> None:
        self.parts, self.checkpointer, self.log = parts, checkpointer, log
        self.config, self.options = parts.config, parts.config.trainer
        self.task, self.model, self.engine = parts.task, parts.model, parts.engine
        self.nonfinite = NonfinitePolicy(self.options, self.model, self.engine)
        self.average = MovingAverage(self.model, self.options.average_decay)
        self.flops = FlopMeter()
        self.words = WordCounter(self.options)
        self.update, self.seconds = 0, 0.0
        self.positions: dict[str, int] = {}
        self.best = BestCheckpoint(self.options)
        self.last_valid: dict[str, float] = {}
        self.window = Window()
        # The updates that the device may have refused.
        self._unchecked: dict[int, _Unchecked] = {}
        self.stopped_by = ""  # the limit that ended the run
        self.conditions: dict[str, Any] = {}  # see runs.conditions; on the first replica
        self._validated_at = -1

    # ---------------------------------------------------------------- the loop

    def train(self) -> None:
        """Make the remaining updates; raises DivergedError or Interrupted."""
        # Damaged data show now, not at the first save.
        _ = self.checkpointer.description
        streams = self.task.build_streams("train")
        # A plug-in may return anything.
        if not isinstance(streams, dict):
            raise UsageError(
                f"build_streams of task '{self.config.task._name}' returns a "
                f"{type(streams).__name__}; it must return a dict of streams by name, such as "
                '{"train": stream}'
            )
        self.words.start(streams, self.positions)
        if process_group.rank() == 0:
            self.conditions = conditions_of(self.config, self.task, streams, self._expected())
            for sentence in describe_conditions(self.conditions, REMEDY):
                self.log.message(sentence)
        self._started = time.monotonic() - self.seconds
        shard, engine = self.parts.shard, self.config.engine
        if self.options.on_nonfinite == "rollback" and not self.update:
            self.save(False)
        self.model.train()
        with signals.listen():
            # A signal may have come already, or stopped an earlier process before a validation.
            self._between_updates(self.poll_limits())
            while not self.stopped_by:
                prefetcher = Prefetcher(
                    self.task.needs,
                    streams,
                    self.positions,
                    shard,
                    engine.workers,
                    engine.timeout,
                    self.parts.to_device,
                )
                try:
                    self._make_updates(prefetcher)
                except DivergedError:
                    self.checkpointer.finish()
                    raise

    def _expected(self) -> int:
        """Return the updates that the run will make, estimated from a rule for its FLOPs."""
        price = flops_by_rule(self.task, self.engine)
        most, flops = self.options.max_update, self.options.max_flops
        if not price or not flops:
            return most
        return min(most, math.ceil(flops / price))

    def _make_updates(self, prefetcher: Prefetcher) -> None:
        for update, batches in prefetcher.updates(self.update, self.options.max_update):
            process_group.check_peers()
            before, self.positions = self.positions, dict(prefetcher.positions)
            self.words.advance(update + 1, before, self.positions)
            self._update(update, batches)
            if update in self._unchecked:
                self._unchecked[update].positions = dict(self.positions)
                self._unchecked[update].words = self.words.state_dict()
            refused = self.engine.finite_check.refused
            if refused and self._decide({update: refused}):
                return
            self.update = update + 1
            self.seconds = time.monotonic() - self._started
            self.log.step(batches)
            signal = self.poll_limits()
            options = self.options
            intervals = (options.validate_interval_updates, options.save_interval_updates)
            looks = self._is_due(options.log_interval, *intervals)
            looks = looks or bool(self.words.names_at(self.update))
            looks = looks or len(self._unchecked) >= _MOST_UNCHECKED
            if (looks or signal or self.stopped_by) and self._check_skipped():
                return
            if self.stopped_by or self._is_due(options.log_interval):
                self._log_window()
            self._between_updates(signal)
            if self.stopped_by:
                return

    def _log_window(self) -> None:
        """Log the updates since the last line.

        Raises DivergedError if a value is not finite, MetaseqError if no update has had a target.
        """
        means = self.window.means()
        values = means | engine_values(self.engine) | self.words.values
        if self.engine.record.has_items is not False:
            check_learns(self.update, self.task, self.engine, means)
            self.log.values("train", self.update, self.seconds, values)
            check_finite(self.update, values)
            return
        self._event("no targets so far")
        if self.stopped_by or self.update >= _MOST_WITHOUT_TARGETS:
            raise MetaseqError(
                f"no targets in {self.update} updates, so nothing was learnt: the text has no "
                "tokens to predict; look at it with 'metaseq-lm doctor', and at "
                "options such as task.mask_prob"
            )

    def _update(self, update: int, batches: Batches) -> None:
        snapshot = self.nonfinite.snapshot()
        finite_check = self.engine.finite_check
        # Replicas sum these numbers with the sizes of the update, which saves a message.
        spent: list[float] = []
        if process_group.world_size() > 1:
            spent = self._spent(self.flops.total_with(batches))
        self.engine.begin(update, spent)
        with self.flops.count(batches):
            logs = self.task.update(self.engine, self.model, batches)
        if finite_check.defers or finite_check.refused:
            self._unchecked[update] = _Unchecked(sample_numbers(batches), logs)
        if finite_check.defers:
            self.nonfinite.undo_skipped(snapshot)
            self.average.move(finite_check.skips())
        elif finite_check.refused:
            self.nonfinite.undo(snapshot)
        else:
            self.nonfinite.accept()
            self.window.add(logs)
            self.average.move()

    def _check_skipped(self) -> bool:
        """Ask the device which updates it refused; return whether the run was rolled back."""
        skipped = self.engine.finite_check.skipped()
        if self.nonfinite.policy == "skip":
            # A skipped step does not advance the schedule, as if the host had refused it.
            for name in itertools.chain.from_iterable(skipped.values()):
                self.engine.optimizers[name].updates -= 1
            for name in skipped.get(self.update - 1, []):
                self.engine.norms.pop(name, None)
        return self._decide(skipped)

    def _decide(self, refused: dict[int, list[str]]) -> bool:
        """Apply trainer.on_nonfinite to the unchecked updates.

        Returns whether the run was rolled back. `refused` has the names of the optimizers that
        skipped a step, by update.
        """
        unchecked, self._unchecked = self._unchecked, {}
        for number, update in unchecked.items():
            if number not in refused:
                self.nonfinite.accept()
                self.window.add(update.logs)
                continue
            self._report_refusal(number, refused[number], update)
            if self.nonfinite.policy == "rollback":
                self._roll_back(update)
                return True
        return False

    def _roll_back(self, refused: _Unchecked) -> None:
        """Return to the last checkpoint, but continue in the data after the refused update."""
        # What was spent stays counted, like the words.
        spent = self.flops.total
        for message in self.resume():
            self._event(message)
        self.flops.total, self.stopped_by = spent, ""
        self.positions = refused.positions
        self.words.load_state_dict(refused.words)

    def _report_refusal(self, number: int, optimizers: list[str], update: _Unchecked) -> None:
        message = describe_refusal(number + 1, self.engine, optimizers, update.logs)
        self._event(message, samples=process_group.gather_objects(update.samples))
        self.nonfinite.refuse(message)

    def _spent(self, flops: float) -> list[float]:
        """Return the numbers that limits and signals depend on, to be summed over the replicas."""
        first = process_group.rank() == 0
        seconds, words = self.seconds * first, (self.words.seen or 0) * first
        return [flops, seconds, words, self.checkpointer.is_written(), *signals.pending_signals()]

    def poll_limits(self) -> int:
        """Decide with all replicas whether a limit is reached; return a received signal, or 0."""
        options = self.options
        # Replicas send these numbers with the sizes of an update, so they notice a signal, or the
        # end of the time, up to one update later than a single process.
        sums = self.engine.take_sums()
        counts_flops = options.max_flops > 0 or options.pause_flops > 0
        if sums is None or (counts_flops and math.isnan(sums[0])):
            sums = process_group.sum_of_hosts(self._spent(self.flops.total))
        flops, seconds, words, written, *votes = sums
        spent = {"max_flops": flops, "pause_flops": flops, "max_seconds": seconds}
        spent |= {"max_words": words}
        reached = [n for n, number in spent.items() if 0 < getattr(options, n) <= number]
        if self.update >= options.max_update:
            reached.append("max_update")
        self.stopped_by = reached[0] if reached else ""
        if written == process_group.world_size() and (trouble := self.checkpointer.finish()):
            self._event(trouble)
        return signals.agree_on_signal(votes)

    def _is_due(self, *intervals: int) -> bool:
        return self.update > 0 and any(n and not self.update % n for n in intervals)

    def _between_updates(self, signal: int) -> None:
        """Stop for a signal; validate and save when due."""
        options = self.options
        if signal:
            if self.update:
                self.save(False, required=True)
            raise signals.make_interruption(signal, self.progress_text())
        due = self.stopped_by or self._is_due(options.validate_interval_updates)
        due = due or (options.validate_first and not self.update)
        improved = False
        save_due = self._is_due(options.save_interval_updates)
        save_due = save_due or bool(self.words.names_at(self.update))
        if options.valid_split and due and self._validated_at != self.update:
            # A job may have too little time left for the validation.
            if save_due:
                self.save(False)
            improved = self._validate()
        waited = self.best.waited if options.valid_split else 0
        if 0 < options.patience <= waited and not self.stopped_by:
            self.stopped_by = "patience"
            metric = options.best_checkpoint_metric
            self._event(f"no better {metric} in {options.patience} validations")
        if improved or self.stopped_by or save_due:
            self.save(improved, required=bool(self.stopped_by))

    def progress_text(self) -> str:
        """Return the progress of the run, for the message of an interruption."""
        if not self.update:
            return "before the first update"
        return f"after update {self.update}; a checkpoint is saved"

    # ---------------------------------------------------------------- validation

    def _validate(self) -> bool:
        """Validate and log; return whether the result is the best so far."""
        try:
            with self.average.shown():
                valid = evaluate_split(self.parts, self.options.valid_split)
            self.last_valid = valid.metrics
        except Interrupted as error:
            if self.update:
                self.save(False, required=True)
            raise signals.make_interruption(error.signal, self.progress_text()) from None
        self._validated_at = self.update
        # A checkpoint already saved at this update lacks the validation.
        if trouble := self.checkpointer.outdate():
            self._event(trouble)
        if self.last_valid:
            self.log.values("valid", self.update, self.seconds, self.last_valid)
        with self.average.shown():
            texts = sample_texts(self.parts)
        if texts:
            self.log.record("samples", self.update, self.seconds, {"texts": texts})
        self.seconds = time.monotonic() - self._started
        if not self.last_valid:
            self._event(f"{self.options.valid_split} has no targets, so no score")
            return False
        try:
            return self.best.improves(self.last_valid, self.update)
        except UsageError:
            # A wrong name of the metric must not lose the updates.
            self._validated_at = -1
            self.save(False, required=True)
            raise

    def _event(self, message: str, **details: Any) -> None:
        self.log.event(self.update, self.seconds, message, **details)

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint holds besides the averaged weights.

        A collective call; moments of sharded parameters are shards.
        """
        return {
            "update": self.update,
            "positions": dict(self.positions),
            "best": self.best.state_dict(),
            "seconds": self.seconds,
            "validated_at": self._validated_at,
            "window": self.window.state_dict(),
            "flops": self.flops.state_dict(),
            "words": self.words.state_dict(),
            "optimizers": {name: o.state_dict() for name, o in self.engine.optimizers.items()},
            **self.average.hidden_weights(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state; raises KeyError for a missing part, ValueError for other shapes."""
        for name, optimizer in self.engine.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.average.load(state)
        self.flops.load_state_dict(state["flops"])
        # Runs of earlier versions lack it; their words are counted again.
        if "words" in state:
            self.words.load_state_dict(state["words"])
        self.window.load_state_dict(state["window"], self.engine.device)
        self.update, self.seconds = state["update"], state["seconds"]
        self._validated_at = state["validated_at"]
        self.positions = dict(state["positions"])
        # The last validation may have been for another metric.
        if not self.best.load_state_dict(state["best"]):
            self._validated_at = -1

    def save(self, is_best: bool, required: bool = False) -> None:
        """Save a checkpoint, linked as the best if it is, and by the numbers of words it reaches.

        Raises DivergedError if a weight is not finite, MetaseqError if the replicas disagree,
        CheckpointError if it cannot be written and trainer.on_save_error is stop or it is
        `required`.
        """
        self.checkpointer.check_weights(self.update)
        names = [*["best"] * is_best, *self.words.names_at(self.update)]
        with self.average.shown():
            state, valid = self.state_dict(), self.last_valid
            trouble = self.checkpointer.save(self.update, state, valid, names, required)
        if trouble:
            self._event(trouble)
        else:
            self.nonfinite.saved()

    def resume(self, reset: Collection[str] = ()) -> list[str]:
        """Load the newest checkpoint that verifies and fits, if there are any; return messages.

        The parts of the run in `reset` restart, and the checkpoint is written again. A run without
        checkpoints continues from branch_from's. Raises CheckpointError if there are checkpoints
        and none fits.
        """
        self.checkpointer.finish()
        stored, messages = self.checkpointer.newest(reset)
        is_branch = stored is None and bool(self.config.branch_from)
        if is_branch:
            reset = ["schedule"]
            stored = self.checkpointer.origin(reset)
        if stored is None:
            return messages
        try:
            self.load_state_dict(self._without(reset, stored.state))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{stored.path}: its state is not of this run: {error}"
            ) from error
        self.last_valid = stored.manifest.get("valid") or {}
        if is_branch or stored.manifest.get("data") != self.parts.data_fingerprint:
            # Its scores are not comparable, or belong to another run's checkpoints.
            self.best, self.last_valid, self._validated_at = BestCheckpoint(self.options), {}, -1
        if not is_branch:
            best = None if self.best.value is None else self.best.update
            self.checkpointer.resumed(stored, self.update, best, self.words.named)
        if reset:
            self.checkpointer.outdate()
            self.save(False, required=True)
        return messages + self.checkpointer.describe_resume(stored, reset)

    def _without(self, reset: Collection[str], state: dict[str, Any]) -> dict[str, Any]:
        """Return a saved state without moments or positions in the data, if they are reset."""
        state = dict(state)
        if "data" in reset:
            state["positions"] = {}
        if "optimizer" in reset:
            counts = {name: saved["updates"] for name, saved in state["optimizers"].items()}
            state["optimizers"] = {
                name: {"updates": counts.get(name, state["update"]), "state": {}}
                for name in self.engine.optimizers
            }
        return state
