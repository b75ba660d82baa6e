"""One run, put together from its configuration: process group, task, model, engine, trainer, folder."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from pathlib import Path
from typing import Any, Optional

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from metaseq_lm.core.errors import Interrupted, MetaseqError, UsageError
from metaseq_lm.core.files import free_bytes, human_bytes
from metaseq_lm.core.logging import Progress, TensorBoard
from metaseq_lm.core.registry import TASKS
from metaseq_lm.data.storage.manifest import tokenizer_hash
from metaseq_lm.data.streams import mean_over_first
from metaseq_lm.distributed import process_group
from metaseq_lm.engine.engine import PRECISIONS, Engine
from metaseq_lm.evaluation.predictions import write_predictions
from metaseq_lm.models.inherit import inherited
from metaseq_lm.runs import checkpoint, lineage_cost
from metaseq_lm.runs.folder import RunFolder, begun, code_hash, read_config, read_results
from metaseq_lm.tasks import Task, with_updates
from metaseq_lm.training.trainer import Trainer


def choose_device(wanted: str) -> str:
    """Return cpu or cuda; raises UsageError for a device that is not there."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("engine.device is cuda but torch finds no GPU; use engine.device=cpu")
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


def keep_memory() -> None:
    """Tell glibc to keep freed memory: faulting it in again costs a CPU step up to a quarter."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def check_data(config: DictConfig) -> None:
    """Raise UsageError if the data folder is not there."""
    if not Path(config.data).is_dir():
        raise UsageError(f"{config.data}: there is no such data folder; make it with 'preprocess'")


def build_task(config: DictConfig) -> Task:
    """Build the configured task; the data folder must be there."""
    check_data(config)
    return TASKS.build(config.task._name, config)


def prepared(config: DictConfig) -> DictConfig:
    """Return the config as init_from and the task complete it; the data must be there."""
    check_data(config)
    config = inherited(config)
    return TASKS.entry(config.task._name).value.prepare(config)


def paid_for(config: DictConfig) -> DictConfig:
    """Return the config with as many updates as trainer.max_flops pays for, if trainer.max_update is 0.

    To know the price of one, an update of each kind is made, unless the folder of the run has the
    number: the price depends a little on engine.*, which may change. A call of all replicas.
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
    known = process_group.from_first(paid_before(Path(config.save_dir), options.max_flops))
    if known:
        return with_updates(config, known)
    probe = with_updates(config, 1)
    probe.trainer.valid_split = ""
    run = Run(probe, dry_run=True)
    run.plan_kinds()
    run.trainer.train(Progress(1, 0, "", False), TensorBoard(None))
    price = run.price()
    if price > options.max_flops:
        raise UsageError(
            f"one update costs {price:.3g} FLOPs, more than trainer.max_flops={options.max_flops:.3g}"
        )
    return with_updates(config, int(options.max_flops // price))


def paid_before(folder: Path, max_flops: float) -> int:
    """Return how many updates the run in a folder makes under such a limit, 0 if it does not say."""
    file = folder / "config.yaml"
    config = read_config(file) if begun(folder) and file.is_file() else OmegaConf.create()
    same = OmegaConf.select(config, "trainer.max_flops") == max_flops
    updates = OmegaConf.select(config, "trainer.max_update") if same else 0
    return updates if isinstance(updates, int) else 0


def build_model(task: Task, config: DictConfig, device: str) -> nn.Module:
    """Build the task's nets from the seed and place them."""
    torch.manual_seed(config.seed)
    model = task.build_model()
    return model.to(device=device, dtype=PRECISIONS[config.engine.precision])


class Run:
    """Builds everything that a run needs.

    With `dry_run` nothing is written, and one update of each kind of the task is made, whatever the
    limits are.
    """

    def __init__(self, config: DictConfig, dry_run: bool = False) -> None:
        if dry_run:
            config = config.copy() if config.trainer.max_update else with_updates(config, 1)
            config.trainer.max_update = 1
            config.trainer.max_flops = config.trainer.max_seconds = 0.0
            config.trainer.patience = 0
            config.trainer.final_splits = []
        else:
            config = paid_for(prepared(config))
        if config.engine.threads:
            torch.set_num_threads(config.engine.threads)
        if config.engine.keep_memory:
            keep_memory()
        self.config = config
        self.dry_run = dry_run
        self.device = choose_device(config.engine.device)
        process_group.initialise(self.device, config.engine.timeout)
        self.first = process_group.rank() == 0
        self.task = build_task(config)
        self.task.dry_run = dry_run
        self.model = build_model(self.task, config, self.device)
        self.before: lineage_cost.Costs = {}
        self.started = ""  # from what, for the log
        if not dry_run:
            self.task.start(self.model)
        if config.init_from:
            self._initialise(config.init_from)
        optimizers = self.task.build_optimizers(self.model)
        engine = Engine(
            optimizers,
            config.seed,
            self.device,
            config.engine.precision,
            config.engine.shard_optimizer,
        )
        self.folder = RunFolder(config) if self.first and not dry_run else None
        self.trainer = Trainer(config, self.task, self.model, engine, self.folder)
        self.name = config.label or f"{config.task._name}/{config.criterion._name}"

    def _initialise(self, source: str) -> None:
        found = checkpoint.load(checkpoint.resolve(source))
        check_source(found, self.config)
        self.task.check_facts(found.manifest.get("facts") or {}, found.path)
        chosen = self.task.pretrained(found.weights)
        if not chosen:
            raise checkpoint.CheckpointError(
                f"{found.path} has no weights that task '{self.config.task._name}' starts from; "
                f"it has {', '.join(sorted(found.weights)[:3])}, ..."
            )
        own = self.model.state_dict()
        fresh = {n: w for n, w in own.items() if n not in chosen and n.startswith(self.task.fresh)}
        self.started = f"starts from {found.path}: {len(chosen)} weights of it"
        if fresh:
            self.started += f"; fresh: {', '.join([*fresh][:4])}{', ...' * (len(fresh) > 4)}"
        checkpoint.load_into(self.model, {**fresh, **chosen}, found.path)
        self.before = lineage_cost.behind(source)

    def train(self) -> None:
        """Train what is left of the run, score the final splits, write the results."""
        trainer = self.trainer
        trainer.check_data()
        self._check_splits()
        if self.dry_run:
            self.plan_kinds()
        folder = Path(self.config.save_dir)
        done = None if self.dry_run else read_results(folder)
        complete = done is not None and is_complete(done, self.config.trainer)
        if process_group.from_first(complete):
            if done is not None and self.first:
                print(f"{folder} is finished already ({done['updates']} updates)", flush=True)
            return
        messages = [] if self.dry_run else trainer.resume(folder / "checkpoints")
        if self.started and not trainer.update:
            messages.insert(0, self.started)
        progress = Progress(self.config.trainer.max_update, trainer.update, self.name, self.first)
        board = TensorBoard(
            self.folder.path / "tb" if self.folder and self.config.engine.tensorboard else None
        )
        if self.folder is not None:
            check_room(folder, self.model)
            self.folder.forget_results()
        for message in messages:
            progress.message(message)
            if self.folder is not None:
                self.folder.log("event", trainer.update, trainer.seconds, {"message": message})
        try:
            trainer.train(progress, board)
            if self.dry_run:
                trained = count_parameters(self.model)["trained"]
                progress.message(
                    f"an update costs {self.price():.3g} FLOPs; {trained:,} parameters are trained"
                )
            self._finish(progress)
        finally:
            progress.close()
            board.close()

    def plan_kinds(self) -> None:
        """Let this dry run make one update of each kind of its task."""
        self.config.trainer.max_update = len(self.task.kinds())

    def price(self) -> float:
        """Return the FLOPs of an update of all replicas, the mean over its kinds, after a dry run.

        What the first batch of a kind cost is scaled by how large its batches are on average.
        """
        # Kinds differ in their streams, so each has an entry of its own, in their order.
        spent = process_group.gather_objects(list(self.trainer.flops.known.values()))
        costs = map(sum, zip(*spent, strict=True))
        streams = self.task.build_streams("train")
        scales = [share * mean_over_first(streams, needs) for share, needs in self.task.kinds()]
        return float(sum(s * cost for s, cost in zip(scales, costs, strict=True)))

    def _check_splits(self) -> None:
        """Open every split that will be scored, so that a missing one costs no training."""
        options = self.config.trainer
        for split in sorted({options.valid_split, *options.final_splits} - {""}):
            check_scored(split)
            self.task.build_streams(split)

    def _finish(self, progress: Progress) -> None:
        metrics: dict[str, Any] = {}
        if self.config.trainer.valid_split and self.trainer.last_valid:
            metrics[self.config.trainer.valid_split] = self.trainer.last_valid
        self._take_best(metrics)
        for split in self.config.trainer.final_splits:
            asked = self.trainer.agree()
            if asked:
                self.trainer.raise_interrupted(asked)
            metrics[split], rows = self.score(split)
            if self.folder is not None and rows:
                files = self.task.submissions(split, rows)
                write_predictions(self.folder.path, split, rows, files)
            text = "  ".join(f"{k} {v:.4g}" for k, v in metrics[split].items())
            progress.message(f"{split}  {text}")
        self.record("finished", metrics=metrics)

    def _take_best(self, metrics: dict[str, Any]) -> None:
        """Let the best checkpoint's validation count, if one is kept; further splits want its weights."""
        best = Path(self.config.save_dir) / "checkpoints" / "best"
        if not best.exists():
            return
        if valid := checkpoint.read_manifest(best.resolve())["valid"]:
            metrics[self.config.trainer.valid_split] = valid
        if self.config.trainer.final_splits:
            checkpoint.load_into(self.model, checkpoint.load(best.resolve()).weights, best)

    def score(self, split: str) -> tuple[dict[str, float], list[dict]]:
        """Return metrics of the present weights on a split and, on the first replica, predictions.

        Raises UsageError for "train".
        """
        check_scored(split)
        self.trainer.check_data()
        metrics, rows = self.trainer.evaluate(split)
        return metrics, [] if process_group.rank() else list(rows())

    def record(
        self, status: str, error: Optional[MetaseqError] = None, metrics: Any = None
    ) -> None:
        """Write results.json, from the first replica; unless the run "failed", a call of all of them."""
        trainer, config = self.trainer, self.config
        own = (trainer.flops.total, peak_memory(self.device))
        every = process_group.gather_objects(own) if status != "failed" else [own]
        by_rule = self.task.flops_by_rule()
        before = lineage_cost.union([self.before, self.task.further_costs()])
        if self.folder is None:
            return
        if status == "failed" and self.folder.is_finished():
            return  # before it went on: what it has reached stays on record
        self.folder.write_results(
            {
                "status": status,
                "message": str(error or ""),
                "exit_code": error.exit_code if error else 0,
                "signal": error.signal if isinstance(error, Interrupted) else 0,
                "stopped_by": trainer.stopped_by,
                "seed": config.seed,
                "updates": trainer.update,
                "max_update": config.trainer.max_update,
                "patience": config.trainer.patience,
                "seconds": trainer.seconds,
                "flops": sum(flops for flops, _ in every),
                "flops_by_rule": None if by_rule is None else by_rule * trainer.update,
                "peak_memory": max(memory for _, memory in every),
                "parameters": count_parameters(self.model),
                "metrics": metrics or {},
                "losses": sorted(trainer.engine.loss_terms),
                "data": trainer.data,
                "code": code_hash(config.user_dir),
                "replicas": process_group.world_size(),
                "pretraining": lineage_cost.summed(before, config.init_from),
            }
        )


# What makes other hidden states of the same weights, and leaves no trace in their shapes.
UNSEEN = ("encoder_attention_heads", "encoder_normalize_before", "norm_eps")


def check_source(found: checkpoint.Checkpoint, config: DictConfig) -> None:
    """Raise UsageError if a run cannot start from a checkpoint: another tokenizer or other layers."""
    check_tokenizer(found, config.data)
    model = (found.manifest.get("config") or {}).get("model") or {}
    for key in UNSEEN:
        if key in model and key in config.model and model[key] != config.model[key]:
            raise UsageError(
                f"{found.path} was trained with model.{key}={model[key]}, this run has "
                f"{config.model[key]}; its weights would compute something else"
            )


def check_tokenizer(found: checkpoint.Checkpoint, data: str) -> None:
    """Raise UsageError if a checkpoint was trained on the tokens of another tokenizer than `data`'s."""
    then, now = found.manifest.get("tokenizer"), tokenizer_hash(data)
    if then and now and then != now:
        raise UsageError(
            f"{found.path} was trained with another tokenizer than {data} has ({then} and {now}); "
            "binarise the data with its tokenizer: preprocess --tokenizer-from FOLDER"
        )


def check_scored(split: str) -> None:
    """Raise UsageError for the split of training, which no task can score."""
    if split == "train":
        raise UsageError(
            "the stream of 'train' is endless and cannot be scored; binarise its text as a further split "
            "(preprocess --split NAME=FILE) and name that"
        )


def is_complete(done: dict[str, Any], options: DictConfig) -> bool:
    """Return whether results.json says that nothing is left to do under the limits of `options`."""
    if done["status"] != "finished":
        return False
    if set(options.final_splits) - set(done.get("metrics") or {}):
        return False  # trained, perhaps, but not scored on all that is asked for now
    spent = [(done["flops"], options.max_flops), (done["seconds"], options.max_seconds)]
    reached = any(0 < limit <= amount for amount, limit in spent)
    patience = done.get("patience", options.patience)
    given_up = done["stopped_by"] == "patience" and 0 < options.patience <= patience
    return reached or given_up or done["updates"] >= options.max_update


def check_room(folder: Path, model: nn.Module) -> None:
    """Raise MetaseqError if the disk has no room for two checkpoints, before any work is done.

    A checkpoint is taken as the weights and two moments of each.
    """
    size = 3 * sum(w.numel() * w.element_size() for w in model.state_dict().values())
    needed, free = int(2.2 * size), free_bytes(folder)
    if free < needed:
        raise MetaseqError(
            f"{folder}: there is no room for checkpoints: about {needed:,} bytes are needed and {free:,} "
            f"are free ({human_bytes(free)}). Make room, or choose another --save-dir"
        )


def peak_memory(device: str) -> int:
    """Return the peak memory of this process in bytes: GPU memory on a GPU, resident size on CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Return the number of trained and of all parameters, a shared one counted once."""
    every = list(model.parameters())
    return {
        "trained": sum(p.numel() for p in every if p.requires_grad),
        "all": sum(p.numel() for p in every),
    }
