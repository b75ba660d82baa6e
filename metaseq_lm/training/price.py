"""The FLOPs of an update, measured by a dry run, and the number of updates for a budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from metaseq_lm.config.tasks import WarmupConfig
from metaseq_lm.core.config import RunConfig, TrainerConfig, flatten
from metaseq_lm.core.errors import DivergedError, UsageError
from metaseq_lm.core.files import human_bytes
from metaseq_lm.data.streams import Stream, mean_over_first
from metaseq_lm.distributed import process_group
from metaseq_lm.engine.engine import Engine
from metaseq_lm.runs.conditions import REMEDY, describe_conditions
from metaseq_lm.runs.flops import Counter
from metaseq_lm.runs.folder import has_started, read_config
from metaseq_lm.tasks import Batches, with_updates
from metaseq_lm.tasks.masked_lm import length_phases
from metaseq_lm.tasks.protocols import kind_streams_of, kinds_of
from metaseq_lm.training.conditions import check_best_metric, conditions_of
from metaseq_lm.training.loggers import check_installed
from metaseq_lm.training.nonfinite import check_finite, check_learns, describe_refusal
from metaseq_lm.training.parts import (
    Parts,
    build_parts,
    build_task,
    check_splits,
    choose_device,
    count_parameters,
    evaluate_split,
    peak_memory,
    prepare_config,
)
from metaseq_lm.training.prefetch import Prefetcher
from metaseq_lm.training.restore import initialise_from
from metaseq_lm.training.run_log import RunLog, Window, engine_values
from metaseq_lm.training.suites import check_final_suites
from metaseq_lm.training.words import updates_for

# A dry run on a CPU computes a part of a batch with at least this many rows: a whole update of a
# model of 10 M parameters would take most of its time. On a GPU it tests whether a batch fits.
_DRY_ROWS = 8
_RAMP_POINTS = 10_000  # assumed updates for the mean over warm-ups if the run's number is unknown
PRICED_SEED = 1  # seed of the batches that measure how many updates a budget pays for


@dataclass(frozen=True)
class PriceEstimate:
    """The cost of an update, from a dry run of one update of each kind.

    Attributes:
        flops: Mean FLOPs of an update of all replicas, over its kinds and their batches.
        first_updates: FLOPs of the measured update of each kind, in the task's order.
        scales: Weight of each measured update in the mean: relative size times share of updates.
        logs: Means of the logs of these updates.
        divisor: By how much the batches were divided; the first part of each was computed.
        parts: Task, networks and engine of the dry run.
    """

    flops: float
    first_updates: list[float]
    scales: list[float]
    logs: dict[str, float]
    divisor: int
    parts: Parts


def estimate_price(config: RunConfig, divisor: int = 1) -> PriceEstimate:
    """Make one update of each kind of the task and return its cost; write nothing.

    A collective call. The cost of each kind is scaled to the mean size of its batches. The mean
    includes the batches of a warm-up, but batches of full size are measured. With a `divisor` only
    that fraction of each batch is computed and its cost multiplied; raises UsageError for a batch
    of fewer rows. 0 takes the divisor of a dry run.

    Each phase of row lengths is measured. The estimate describes the last one, except that `flops`
    is the mean over all, and `scales` assume that seconds are proportional to FLOPs.
    """
    flops = 0.0
    for share, size, phase in _phases_of(config):
        estimate = _measure(phase, divisor, size)
        flops += share * estimate.flops
    ratio = flops / estimate.flops if share < 1.0 else 1.0
    return replace(estimate, flops=flops, scales=[ratio * scale for scale in estimate.scales])


def _phases_of(config: RunConfig) -> Iterator[tuple[float, float, RunConfig]]:
    """Yield for each phase of row lengths its share of the updates, the mean size of its batches
    relative to the full size, and the configuration of a run with only this phase.
    """
    if not isinstance(config.task, WarmupConfig):
        yield 1.0, 1.0, config
        return
    updates = config.trainer.max_update or max(_RAMP_POINTS, config.task.length_updates)
    sizes = config.task.sizes(updates)
    begins = length_phases(with_updates(config, updates)).begins
    for phase, begin, end in zip(config.task.in_phases(), begins, [*begins[1:], updates]):
        of_phase = sizes[begin:end]
        if len(of_phase):
            task = phase.without_warmup()
            yield len(of_phase) / updates, float(of_phase.mean()), replace(config, task=task)


def _measure(config: RunConfig, divisor: int, size: float) -> PriceEstimate:
    """Return the estimate of a run from updates of full size; `size` is the relative mean size."""
    if not config.trainer.max_update:
        config = with_updates(config, 1)
    parts = build_parts(config, dry_run=True)
    task, model, engine = parts.task, parts.model, parts.engine
    if config.init_from:
        initialise_from(parts, config.init_from)
    # Damaged data would end the run as well.
    _ = parts.data_fingerprint
    check_splits(parts)
    check_final_suites(config, task, model)
    streams = kind_streams_of(task)
    divisor = divisor or divisor_of_dry_run(parts, streams)
    window, costs, steps = Window(), [], []
    of_steps = _count_steps(engine)
    for number, placed in enumerate(updates_of_kinds(parts, streams, divisor)):
        of_steps.clear()
        with Counter() as counter:
            logs = task.update(engine, model, placed)
        window.add(logs)
        if refused := engine.finite_check.refused:
            raise DivergedError(describe_refusal(number + 1, engine, refused, logs))
        # What optimizers compute does not depend on the batch.
        steps.append(sum(process_group.gather_objects(sum(of_steps))))
        on_batches = sum(process_group.gather_objects(counter.total)) - steps[-1]
        costs.append(float(divisor * on_batches))
    kinds = kinds_of(task)
    scales = [size * part * mean_over_first(streams, needs) for part, needs in kinds]
    price = sum(scale * cost for scale, cost in zip(scales, costs, strict=True))
    price += sum(share * step for (share, _), step in zip(kinds, steps, strict=True))
    costs = [cost + step for cost, step in zip(costs, steps, strict=True)]
    return PriceEstimate(price, costs, scales, window.means(), divisor, parts)


def _count_steps(engine: Engine) -> list[int]:
    """Return a list to which each optimizer step appends its FLOPs from now on."""
    spent: list[int] = []

    def counted(step: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            if not Counter.active:
                return step()
            before = Counter.active[-1].total
            result = step()
            spent.append(Counter.active[-1].total - before)
            return result

        return run

    for optimizer in engine.optimizers.values():
        optimizer.inner.step = counted(optimizer.inner.step)  # type: ignore[assignment]
    return spent


def divisor_of_dry_run(parts: Parts, streams: Mapping[str, Any]) -> int:
    """Return the divisor of a dry run's batches; on a CPU parts have _DRY_ROWS or all rows."""
    if parts.engine.device.type != "cpu":
        return 1
    needed = [streams[name] for _, needs in kinds_of(parts.task) for name in needs]
    smallest: int = min(stream.smallest_batch for stream in needed)
    # The smallest batch is often the last one of an epoch.
    first = min(len(s.order.batch(0)) if isinstance(s, Stream) else smallest for s in needed)
    rows = first // parts.shard.world
    return max(min(rows // _DRY_ROWS, smallest // parts.shard.world), 1)


def updates_of_kinds(parts: Parts, streams: dict[str, Any], divisor: int) -> Iterator[Batches]:
    """Start an update of each kind of the task and yield its batches on the engine's device.

    A replica takes the share of a batch that it would have among `divisor` times as many replicas.
    """
    kinds = kinds_of(parts.task)
    shard = replace(parts.shard, world=divisor * parts.shard.world)
    timeout = parts.config.engine.timeout
    prefetcher = Prefetcher(lambda update: kinds[update][1], streams, {}, shard, timeout=timeout)
    parts.model.train()
    for number, batches in prefetcher.updates(0, len(kinds)):
        process_group.stop_if_signalled("before the first update")
        parts.engine.begin(number)
        empty = [name for name, stream in batches.items() if not all(stream)]
        if empty and divisor > 1:
            raise UsageError(f"batches of stream '{empty[0]}' cannot be divided by {divisor}")
        yield parts.to_device(batches)


def price_of_run(
    config: RunConfig, divisor: int, rate: float
) -> tuple[float, float, dict[str, Any]]:
    """Return FLOPs and seconds of all updates of a run, without validations, and its conditions.

    An init_from that does not exist yet, such as an earlier stage of a sweep, is left out.

    Args:
        config: Configuration of the run.
        divisor: By how much batches are divided, see `estimate_price`.
        rate: FLOPs a second; 0 measures the seconds.
    """
    if config.init_from and not Path(config.init_from).exists():
        config = replace(config, init_from=None)
    config = prepare_config(config)
    if not config.trainer.max_update:
        config = resolve_budget(config)
    estimate = estimate_price(config, divisor)
    updates = config.trainer.max_update
    seconds = estimate.flops / rate if rate else seconds_of_update(estimate)
    conditions = conditions_before(config, estimate)
    return updates * estimate.flops, updates * seconds, conditions


def conditions_before(config: RunConfig, estimate: PriceEstimate) -> dict[str, Any]:
    """Return the conditions of a run of known price; {} if the number of updates is unknown."""
    limit, task = _updates_of_budget(config, estimate.flops), estimate.parts.task
    if not config.trainer.max_update and limit:
        config = with_updates(config, limit)
    most = config.trainer.max_update
    if not most:
        return {}
    return conditions_of(config, task, task.build_streams("train"), min(limit or most, most))


def seconds_of_update(estimate: PriceEstimate) -> float:
    """Repeat one update of each kind; return the mean time over the kinds and their batches.

    A collective call. The updates of the estimate itself would take longer: they are the first
    ones, and their FLOPs are counted.
    """
    parts, seconds = estimate.parts, []
    streams = kind_streams_of(parts.task)
    for batches in updates_of_kinds(parts, streams, estimate.divisor):
        began = time.perf_counter()
        parts.task.update(parts.engine, parts.model, batches)
        if parts.engine.device.type == "cuda":
            torch.cuda.synchronize(parts.engine.device)
        seconds.append(estimate.divisor * (time.perf_counter() - began))
    return float(sum(scale * took for scale, took in zip(estimate.scales, seconds, strict=True)))


def dry_run(config: RunConfig) -> tuple[Parts, dict[str, Any]]:
    """Make one update of each kind, validate a batch, print results and cost; write nothing.

    On a CPU the updates take a part of a batch, see `_DRY_ROWS`. Returns the parts of the run, and
    what was printed.
    """
    check_installed(config.engine.loggers)
    config = prepare_config(config)
    estimate = estimate_price(config, divisor=0)
    parts, updates = estimate.parts, len(estimate.first_updates)
    log = RunLog(config, None)
    log.start(updates, updates, parts.engine.device)
    values = estimate.logs | engine_values(parts.engine)
    log.values("train", updates, 0.0, values)
    check_finite(updates, values)
    check_learns(updates, parts.task, parts.engine, estimate.logs)
    valid: dict[str, float] = {}
    if config.trainer.valid_split:
        valid = evaluate_split(parts, config.trainer.valid_split, most=1).metrics
        log.values("first batch of valid", updates, 0.0, valid)
        check_best_metric(parts, valid)
    trained = count_parameters(parts.model)["trained"]
    part, larger = "", ""
    if estimate.divisor > 1:
        part = f" (measured on 1/{estimate.divisor} of a batch)"
        larger = " with such a part, more with a whole batch"
    seconds = seconds_of_update(estimate)
    peak = max(process_group.gather_objects(peak_memory(parts.engine.device)))
    log.message(
        f"an update costs {estimate.flops:.3g} FLOPs and {seconds:.3g} s{part}; {trained:,} "
        "parameters are trained",
        is_result=True,
    )
    rules = {name: item.describe_rules() for name, item in parts.engine.optimizers.items()}
    for name in filter(rules.get, rules):
        log.message(f"optimizer {name} steps {rules[name]}", is_result=True)
    options = config.trainer
    total = options.max_update or _updates_of_budget(config, estimate.flops)
    log.message(
        f"{total:,} updates take {total * seconds / 3600:.2g} hours on this machine as it is now, "
        f"without validations and saves; memory: {human_bytes(peak)} of a process at most{larger}",
        is_result=True,
    )
    conditions = describe_conditions(conditions_before(config, estimate), REMEDY)
    for sentence in conditions:
        log.message(sentence, is_result=True)
    log.close()
    costs = {"updates": total, "flops_per_update": estimate.flops, "seconds_per_update": seconds}
    costs |= {"divisor": estimate.divisor, "peak_memory_bytes": peak, "parameters": trained}
    logs = {"optimizer_rules": rules, "train": values, "valid": valid}
    return parts, {**costs, **logs, "conditions": conditions}


def resolve_budget(config: RunConfig) -> RunConfig:
    """Return a configuration with trainer.max_update 0 with the number of updates of its budget.

    These are the updates that max_flops pays for, or that see max_words; the smaller number if both
    are given. A dry run measures the cost of an update with the batches of PRICED_SEED, so that all
    seeds of a setting make the same number of updates; words are exact, so their number depends on
    the seed. A resumed run reads the number from its folder, because the cost depends a little on
    engine.*, which may change. A collective call.
    """
    options = config.trainer
    if not options.max_flops and not options.max_words:
        raise UsageError(
            "trainer.max_update is 0, which means as many updates as trainer.max_flops pays for or "
            "as see trainer.max_words; give --max-flops or --max-words, or a number of updates"
        )
    device = choose_device(config.engine.device)
    process_group.initialise(device, config.engine.timeout, config.save_dir)
    cached = process_group.from_first(_read_cached_budget(Path(config.save_dir), options))
    if cached:
        return with_updates(config, cached)
    price = 0.0
    if options.max_flops:
        price = estimate_price(replace(config, seed=PRICED_SEED)).flops
    if price > options.max_flops:
        raise UsageError(
            f"one update costs {price:.3g} FLOPs, more than "
            f"trainer.max_flops={options.max_flops:.3g}"
        )
    return with_updates(config, _updates_of_budget(config, price))


def _updates_of_budget(config: RunConfig, price: float) -> int:
    """Return the updates that max_flops pays for, or that see max_words, whichever are fewer.

    `price` is the FLOPs of an update. 0 without a budget.
    """
    options, counts = config.trainer, []
    if options.max_flops:
        counts.append(int(options.max_flops // price))
    if options.max_words:
        counts.append(_updates_for_words(config))
    return min(counts, default=0)


def _updates_for_words(config: RunConfig) -> int:
    """Return the number of updates that see trainer.max_words words of the corpus, or more."""
    updates, needed = 0, 1
    # If warm-ups depend on the number, it is the smallest one that is consistent with itself.
    while needed > updates:
        updates = needed
        task = build_task(with_updates(config, updates))
        needed = updates_for(task, task.build_streams("train"), config.trainer.max_words)
    return updates


def _read_cached_budget(folder: Path, options: TrainerConfig) -> int:
    """Return the number of updates of the run in a folder if it has the same limits, else 0."""
    file = folder / "config.yaml"
    values = flatten(read_config(file)) if has_started(folder) and file.is_file() else {}
    limits = {"trainer.max_flops": options.max_flops, "trainer.max_words": options.max_words}
    if any(values.get(key, 0) != limit for key, limit in limits.items()):
        return 0
    updates = values.get("trainer.max_update")
    return updates if isinstance(updates, int) else 0
