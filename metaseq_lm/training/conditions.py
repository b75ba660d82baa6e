"""The conditions of a run, computed before its first update from its configuration and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.core.config import RunConfig, build, options_of
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.metric_names import lower_is_better
from metaseq_lm.data.storage.manifest import holds_tokens, sets_named
from metaseq_lm.data.streams import Growing, PhasedOrder, Stream
from metaseq_lm.data.unknown_tokens import unknown_shares
from metaseq_lm.tasks import Task
from metaseq_lm.tasks.protocols import CutsRows, kinds_of
from metaseq_lm.training.checkpointing import check_produced
from metaseq_lm.training.parts import Parts, evaluate_split

_GRID = 2000  # updates of a long run at which its schedule is evaluated, by each of three grids
_USUAL_METRIC = "loss"  # nearly every validation has it, so no pass at the start checks for it
_LIMITS = ("max_query_length", "tokens_per_sample")  # options of tasks that cut rows


def conditions_of(
    config: RunConfig, task: Task, streams: Mapping[str, Any], updates: int = 0
) -> dict[str, Any]:
    """Return the conditions of a run (see runs.conditions) for results.json.

    `streams` are the training streams; `updates` is how many the run will make (max_update if 0).
    """
    updates = updates or config.trainer.max_update
    conditions: dict[str, Any] = {
        "unknown": _unknown(config, task, streams),
        "batches": _batches(task, streams, updates),
        "rates": _rates(config, updates) if updates else {},
    }
    if cut := _cut(config, task):
        option = next(name for name in _LIMITS if hasattr(config.task, name))
        cut_by = f"task.{option}={getattr(config.task, option)}"
        conditions |= {"cut": cut, "cut_by": cut_by}
    trainer = config.trainer
    metric, maximize = trainer.best_checkpoint_metric, trainer.maximize_best_checkpoint_metric
    if trainer.valid_split and maximize is not None and maximize == lower_is_better(metric):
        conditions["best"] = {"metric": metric, "has": "highest" if maximize else "lowest"}
    return conditions


def _splits(config: RunConfig) -> list[str]:
    options = config.trainer
    return list(
        dict.fromkeys(["train", *filter(None, [options.valid_split]), *options.final_splits])
    )


def _unknown(config: RunConfig, task: Task, streams: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the share of [UNK] in the splits of the sets and the corpus of a run."""
    names = sets_named(task.data, options_of(task.config))
    folders = {f"{name}/": task.data / name for name in names}
    reads_corpus = any(getattr(stream, "words", None) is not None for stream in streams.values())
    if holds_tokens(task.data) and (reads_corpus or not names):
        folders[""] = task.data
    splits, unknown = _splits(config), {}
    for name, folder in folders.items():
        for split, share in unknown_shares(Path(folder)).items():
            if split in splits:
                unknown[f"{name}{split}"] = share
    return unknown


def _cut(config: RunConfig, task: Task) -> dict[str, float]:
    """Return the share of rows that lose tokens, by split; splits without rows are left out."""
    if not isinstance(task, CutsRows):
        return {}
    shares = {}
    for split in _splits(config):
        for name, is_cut in task.cut_rows(split).items():
            if len(is_cut):
                shares[f"{name}/{split}" if name else split] = float(is_cut.mean())
    return shares


def _batches(task: Task, streams: Mapping[str, Any], updates: int) -> dict[str, Any]:
    """Return by stream the configured and actual rows of a batch and the epochs, where known."""
    batches = {}
    for name, stream in streams.items():
        order = getattr(stream, "order", None)
        size = getattr(order, "batch_size", getattr(task.config, "batch_size", 0))
        count, per_epoch = getattr(order, "count", 0), getattr(order, "per_epoch", 0)
        if not (isinstance(stream, Stream) and count and per_epoch):
            continue
        needed = updates * sum(part * needs.get(name, 0) for part, needs in kinds_of(task))
        epochs = needed / per_epoch
        if isinstance(order, Growing | PhasedOrder):
            epochs = order.epochs(round(needed))
        batches[name] = {"asked": size, "rows": min(size, count), "epochs": epochs}
    return batches


def _rates(config: RunConfig, updates: int) -> dict[str, float]:
    """Return the highest and last learning rate of a run, and from where on its rate is constant.

    Also "length", if the schedule is longer than the run.
    """
    schedule, base = build("schedule", config.schedule), config.optimizer.lr
    ways = [
        np.arange(1, min(updates, _GRID) + 1),
        np.geomspace(1, updates, _GRID),
        np.linspace(1, updates, _GRID),
    ]
    numbers = np.unique(np.concatenate(ways).astype(np.int64)).tolist()
    factors = [float(schedule(number)) for number in numbers]
    highest, last = max(factors), factors[-1]
    rates = {
        "asked": base,
        "highest": base * highest,
        "at": numbers[factors.index(highest)],
        "last": base * last,
        "updates": updates,
    }
    same = next(i for i in range(len(factors)) if set(factors[i:]) == {last})
    if 0 < same < len(factors) - 1 and last < highest:
        low, high = numbers[same - 1], numbers[same]
        while high - low > 1:
            middle = (low + high) // 2
            if schedule(middle) == last:
                high = middle
            else:
                low = middle
        rates["same_from"] = high
    for item in fields(config.schedule):
        length = getattr(config.schedule, item.name)
        if item.metadata.get("follows") == "trainer.max_update" and length > updates:
            rates["length"] = length
    return rates


# ------------------------------------------------------------------------ the best checkpoint


def check_best_metric(parts: Parts, known: Mapping[str, float]) -> None:
    """Raise UsageError if validation does not give the best checkpoint's metric, or no direction.

    A collective call. It validates the first batch, and if that lacks the metric, the whole split.
    `known` are metrics of an earlier validation.
    """
    options = parts.config.trainer
    metric = options.best_checkpoint_metric
    if not (metric and options.valid_split):
        return
    metrics = dict(known)
    for most in (1, None):
        if metric not in metrics and metric != _USUAL_METRIC:
            metrics = evaluate_split(parts, options.valid_split, most).metrics
    check_produced(metric, metrics)
    if options.maximize_best_checkpoint_metric is None:
        raise UsageError(
            f"the name of trainer.best_checkpoint_metric={metric} does not say whether a larger "
            "value is better; give trainer.maximize_best_checkpoint_metric=true or false"
        )
