"""The FLOPs of an update, measured by a dry run, and the number of updates for a budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from metaseq_lm.core.errors import DivergedError, UsageError
from metaseq_lm.data.streams import mean_over_first
from metaseq_lm.distributed import process_group
from metaseq_lm.runs.flops import FlopMeter
from metaseq_lm.runs.folder import begun, read_config
from metaseq_lm.tasks import with_updates
from metaseq_lm.tasks.protocols import kinds_of
from metaseq_lm.training.nonfinite import check_finite, describe_refusal
from metaseq_lm.training.parts import (
    Parts,
    build_parts,
    check_splits,
    choose_device,
    count_parameters,
    evaluate_split,
    prepare_config,
)
from metaseq_lm.training.prefetch import Prefetcher
from metaseq_lm.training.restore import initialise_from
from metaseq_lm.training.run_log import RunLog, Window, engine_values


@dataclass(frozen=True)
class PriceEstimate:
    """The cost of an update, from a dry run of one update of each kind.

    Attributes:
        flops: FLOPs of an update of all replicas, the mean over its kinds and their batches.
        first_updates: FLOPs of the measured update of each kind, in the task's order.
        logs: means of the logs of these updates.
        parts: task, networks and engine of the dry run.
    """

    flops: float
    first_updates: list[float]
    logs: dict[str, float]
    parts: Parts


def estimate_price(config: DictConfig) -> PriceEstimate:
    """Make one update of each kind of the task and return its cost; write nothing.

    A call of all replicas. The cost of each kind is scaled to the mean size of its batches.
    """
    config = config.copy() if config.trainer.max_update else with_updates(config, 1)
    parts = build_parts(config, dry_run=True)
    task, model, engine = parts.task, parts.model, parts.engine
    if config.init_from:
        initialise_from(parts, config.init_from)
    _ = parts.data_fingerprint  # damaged data would end the run as well
    check_splits(parts)
    streams = task.build_streams("train")
    for name, stream in streams.items():
        parts.shard.check(name, stream.smallest_batch)
    kinds = kinds_of(task)
    batches_of_kinds = Prefetcher(
        lambda update: kinds[update][1], streams, {}, parts.shard, timeout=config.engine.timeout
    )
    meter, window, costs = FlopMeter(), Window(), []
    model.train()
    for number, batches in batches_of_kinds.updates(0, len(kinds)):
        process_group.stop_if_signalled("before the first update")
        placed = parts.place(batches)
        engine.begin(number)
        before = meter.total
        with meter.count(placed):
            window.add(task.update(engine, model, placed))
        if engine.nonfinite:
            raise DivergedError(describe_refusal(number + 1, engine.nonfinite))
        costs.append(sum(process_group.gather_objects(meter.total - before)))
    scales = [share * mean_over_first(streams, needs) for share, needs in kinds]
    price = float(sum(scale * cost for scale, cost in zip(scales, costs, strict=True)))
    return PriceEstimate(price, costs, window.means(), parts)


def dry_run(config: DictConfig) -> Parts:
    """Make one update of each kind and a validation, print results and cost; write nothing."""
    config = prepare_config(config)
    estimate = estimate_price(config)
    parts, updates = estimate.parts, len(estimate.first_updates)
    log = RunLog(config.label or f"{config.task._name}/{config.criterion._name}", None)
    log.start(updates, updates)
    values = estimate.logs | engine_values(parts.engine)
    log.values("train", updates, 0.0, values)
    check_finite(updates, values)
    if config.trainer.valid_split:
        valid = evaluate_split(parts, config.trainer.valid_split).metrics
        log.values("valid", updates, 0.0, valid)
    trained = count_parameters(parts.model)["trained"]
    log.message(f"an update costs {estimate.flops:.3g} FLOPs; {trained:,} parameters are trained")
    log.close()
    return parts


def resolve_flops_budget(config: DictConfig) -> DictConfig:
    """Return the configuration, with trainer.max_update=0 replaced by the updates for max_flops.

    A dry run measures the cost of an update. A resumed run reads the number of updates from its
    folder, because the cost depends a little on engine.*, which may change. A call of all replicas.
    """
    options = config.trainer
    if options.max_update:
        return config
    if not options.max_flops:
        raise UsageError(
            "trainer.max_update is 0, which means as many updates as trainer.max_flops pays for; "
            "give --max-flops, or a number of updates"
        )
    process_group.initialise(choose_device(config.engine.device), config.engine.timeout)
    cached = process_group.from_first(read_cached_budget(Path(config.save_dir), options.max_flops))
    if cached:
        return with_updates(config, cached)
    price = estimate_price(config).flops
    if price > options.max_flops:
        raise UsageError(
            f"one update costs {price:.3g} FLOPs, more than trainer.max_flops={options.max_flops:.3g}"
        )
    return with_updates(config, int(options.max_flops // price))


def read_cached_budget(folder: Path, max_flops: float) -> int:
    """Return the number of updates of the run in a folder if it has the same limit, else 0."""
    file = folder / "config.yaml"
    config = read_config(file) if begun(folder) and file.is_file() else OmegaConf.create()
    if OmegaConf.select(config, "trainer.max_flops") != max_flops:
        return 0
    updates = OmegaConf.select(config, "trainer.max_update")
    return updates if isinstance(updates, int) else 0
