"""Task, networks and engine of a run, built from its configuration, and their evaluation."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from metaseq_lm.core import interfaces
from metaseq_lm.core.config import (
    RunConfig,
    as_dict,
    build,
    flatten,
    options_with,
    require_data_folder,
)
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.metric_names import lower_is_better
from metaseq_lm.core.registry import TASKS
from metaseq_lm.data.storage.manifest import fingerprint_of_run
from metaseq_lm.data.streams import Shard
from metaseq_lm.distributed import process_group
from metaseq_lm.distributed.placement import build_mesh, build_placement
from metaseq_lm.engine.engine import PRECISIONS, Engine
from metaseq_lm.forward.compilation import compile_blocks
from metaseq_lm.models.inherit import INHERIT, inherit_model
from metaseq_lm.models.transformer.encoder import Layer, Stack
from metaseq_lm.optim.optimizers import with_half_life, with_width
from metaseq_lm.optim.roles import assign_roles
from metaseq_lm.tasks import Batches, Passes, Scored, Task, check_pair
from metaseq_lm.tasks.protocols import HasSamples, NeedsEager, Prepares, ScoresTraining, passes_of
from metaseq_lm.training.words import numbers_of_words

__all__ = ["Parts"]


@dataclass
class Parts:
    """The task, the networks and the engine of a run, on the configured device."""

    config: RunConfig
    task: Task
    model: nn.Module
    engine: Engine

    @property
    def shard(self) -> Shard:
        """This replica's share of each batch."""
        rows = self.config.engine.micro_batch_size
        return Shard(process_group.rank(), process_group.world_size(), rows)

    @cached_property
    def data_fingerprint(self) -> str:
        """The fingerprint of the data in use; MetaseqError if a file differs from the manifest."""
        return fingerprint_of_run(self.config.data, vars(self.config.task))

    def to_device(self, batches: Batches) -> Batches:
        """Return the batches of an update on the engine's device, in its precision."""
        to_device = self.engine.to_device
        return {name: [*map(to_device, stream)] for name, stream in batches.items()}

    @contextlib.contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Switch dropout off; random numbers inside do not depend on the update."""
        self.model.eval()
        with self.engine.outside_updates():
            yield
        self.model.train()

    def score(self, split: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return metrics on a split and, on the first replica, predictions.

        A collective call. Raises UsageError for "train" if the task cannot score it.
        """
        _check_scored(self.task, split)
        # MetaseqError if a file is damaged.
        _ = self.data_fingerprint
        metrics, rows = evaluate_split(self, split)
        if process_group.rank():
            return metrics, []
        return metrics, list(rows())


def prepare_config(config: RunConfig) -> RunConfig:
    """Return the configuration with the options that other runs, the task and the data decide.

    The data folder must exist. Raises UsageError for trainer.save_words that are no numbers, and
    for a task and a criterion that do not fit each other.
    """
    require_data_folder(config.data)
    if config.trainer.save_words:
        numbers_of_words(config.trainer.save_words)
    check_pair(config)
    if config.model._name == INHERIT:
        config = inherit_model(config)
    task_class = TASKS.entry(config.task._name).value
    if issubclass(task_class, Prepares):
        config = task_class.prepare(config)
    if getattr(config.optimizer, "beta2_half_life", 0.0):
        config = with_half_life(config)
    if getattr(config.model, "base_width", 0):
        config = with_width(config)
    return _with_direction(config)


def _with_direction(config: RunConfig) -> RunConfig:
    """Return `config` with the direction of its best checkpoint's metric, if the name tells it."""
    trainer = config.trainer
    lower = lower_is_better(trainer.best_checkpoint_metric)
    if trainer.maximize_best_checkpoint_metric is not None or lower is None:
        return config
    return replace(config, trainer=replace(trainer, maximize_best_checkpoint_metric=not lower))


def build_parts(config: RunConfig, dry_run: bool = False, empty: bool = False) -> Parts:
    """Join the process group and build task, networks, optimizers and engine.

    In a `dry_run` the task must not write any file. If parameters may be `empty`, a checkpoint must
    provide all of them.
    """
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    if config.engine.parallel != "replicate":
        # Gathering and releasing parameters in turn would fragment the heap.
        set_heap(1 << 20)
    elif config.engine.retain_heap:
        # On a CPU this can save a quarter of the time of an update.
        set_heap(1 << 30, retain=True)
    device = choose_device(config.engine.device)
    process_group.initialise(device, config.engine.timeout, config.save_dir)
    task = build_task(config)
    task.dry_run = dry_run
    model = build_model(task, config, device, empty)
    check_model(config, task, model)
    recompute = config.engine.recompute == "block"
    if recompute and not any(isinstance(module, Stack) for module in model.modules()):
        raise UsageError(
            "engine.recompute=block computes the activations of Transformer layers again, and "
            f"model {config.model._name} has none; leave engine.recompute out"
        )
    if config.engine.precision == "fp64" and config.engine.reduce_precision == "bf16":
        raise UsageError(
            "engine.reduce_precision=bf16 would round the gradients of engine.precision=fp64; "
            "leave it out, or use engine.precision=fp32"
        )
    mesh = build_mesh(config.engine.parallel, device)
    in_turn = config.engine.gather == "layer" and not task.criterion.differentiates
    low = config.engine.reduce_precision == "bf16"
    placement = build_placement(model, mesh, in_turn, task.takes_second_derivatives, low)
    if empty:
        _allocate(model, device)
    placement.prepare()
    by_block = recompute or placement.gathers
    if config.engine.compile:
        _check_compilable(config, task, model, device)
        _set_up_compiler()
        if by_block:
            compile_blocks([m for m in model.modules() if isinstance(m, Layer)])
    assign_roles(model)
    optimizers = task.build_optimizers(model)
    engine = Engine(
        optimizers,
        config.seed,
        device,
        config.engine.precision,
        placement,
        recompute,
        config.engine.compile and not by_block,
        config.engine.reduce_precision,
    )
    return Parts(config, task, model, engine)


def check_model(config: RunConfig, task: Task, model: nn.Module) -> None:
    """Raise UsageError if built-in criterions cannot call a plug-in's model."""
    criterion = type(task.criterion)
    named = next(c for c in criterion.__mro__ if {"calls", "__call__"} & vars(c).keys())
    # Several networks in a ModuleDict are called one by one.
    is_of_plug_in = not type(model).__module__.startswith("metaseq_lm.")
    is_network = is_of_plug_in and type(model).forward is not nn.Module.forward
    # A criterion that defines `__call__` may call the model differently.
    if criterion.calls and "calls" in vars(named) and is_network:
        by_position, _, by_name = " ".join(criterion.calls).partition("*")
        title = f"model '{config.model._name}' of criterion '{config.criterion._name}'"
        interfaces.check_call(title, model.forward, by_position.split(), by_name, type(model))


def _check_compilable(config: RunConfig, task: Task, model: nn.Module, device: str) -> None:
    """Raise UsageError that names what engine.compile=true cannot compile or does not find."""
    reasons = [
        part.eager_reason() for part in (task, task.criterion) if isinstance(part, NeedsEager)
    ]
    if task.criterion.differentiates:
        reasons.append("the loss contains a gradient")
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        reasons.append(f"torch.compile does not trace the LSTMs of model {config.model._name}")
    for reason in filter(None, reasons):
        raise UsageError(
            f"engine.compile=true cannot compile task {config.task._name} with criterion "
            f"{config.criterion._name} and these options, because {reason}; use "
            "engine.compile=false"
        )
    compiler = os.environ.get("CXX", "g++")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if device == "cpu" and not (shutil.which(compiler) and headers.exists()):
        raise UsageError(
            f"engine.compile=true needs a C++ compiler ({compiler}) and Python's headers "
            f"({headers}): install g++ and python3-dev or their like, name the compiler in CXX, or "
            "use engine.compile=false"
        )


def _set_up_compiler() -> None:
    """Make torch.compile treat Python numbers, such as dropout rates, as constants."""
    import torch._dynamo  # takes 2 s

    # By default it traces them as symbols, fails, and then traces and compiles everything again.
    # Values that change between updates are tensors.
    torch._dynamo.config.specialize_float = True


def check_parts(config: RunConfig) -> Task | None:
    """Return the configured task; UsageError if it or its networks cannot be built.

    The networks are built without memory; one that computes with its first weights cannot be, and
    passes unchecked. Returns None, without a check, if the data folder is still empty or a run to
    start from does not exist yet.
    """
    check_pair(config)
    require_data_folder(config.data)
    if not any(Path(config.data).iterdir()):
        return None
    values = flatten(as_dict(config))
    for key in options_with("source", config):
        source = values.get(key) or []
        paths = [source] if isinstance(source, str) else source
        if not all(Path(path).exists() for path in paths):
            return None
    task = build_task(prepare_config(config))
    with torch.device("meta"), contextlib.suppress(RuntimeError):
        task.build_model()
    return task


def build_task(config: RunConfig) -> Task:
    """Build the configured task; the data folder must exist."""
    require_data_folder(config.data)
    task: Task = build("task", config.task, config)
    return task


def build_model(task: Task, config: RunConfig, device: str, empty: bool = False) -> nn.Module:
    """Build the task's networks, initialised by the seed, and move them to `device`.

    If they may be `empty`, parameters stay on the meta device, unless other values depend on their
    initial ones.
    """
    model = _build_on_meta(task) if empty else None
    if model is None:
        torch.manual_seed(config.seed)
        model = task.build_model()
        return model.to(device=device, dtype=PRECISIONS[config.engine.precision])
    model.to(dtype=PRECISIONS[config.engine.precision])
    # Buffers have values already.
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    return model


def _build_on_meta(task: Task) -> nn.Module | None:
    """Build the task's networks with parameters on the meta device, and buffers with their values.

    Returns None if a network computes with the values of parameters, or keeps results of them in
    tensors that no checkpoint stores.
    """

    def without_memory(
        module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> nn.Parameter | None:
        # A tied parameter must stay the same object.
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        model = task.build_model()
    except RuntimeError:  # an operation needs values
        return None
    finally:
        hook.remove()
    stored = model.state_dict().keys()
    others: list[Any] = [buffer for name, buffer in model.named_buffers() if name not in stored]
    for module in model.modules():
        others += vars(module).values()
    if any(isinstance(value, Tensor) and value.is_meta for value in others):
        return None
    return model


def _allocate(model: nn.Module, device: str) -> None:
    """Allocate all meta tensors of a model on `device`; tied parameters stay tied."""
    allocated: dict[int, Tensor] = {}
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or not tensor.is_meta:
                continue
            if id(tensor) not in allocated:
                empty = torch.empty_like(tensor, device=device)
                if isinstance(tensor, nn.Parameter):
                    empty = nn.Parameter(empty, tensor.requires_grad)
                allocated[id(tensor)] = empty
            # Not into module._parameters: an LSTM keeps a second list of its weights.
            setattr(module, name, allocated[id(tensor)])


def choose_device(name: str) -> str:
    """Return "cpu" or "cuda" for engine.device; UsageError if there is no such device."""
    if name != "cpu" and torch.cuda.is_available():
        return "cuda"
    if name == "cuda":
        raise UsageError("engine.device is cuda but torch finds no GPU; use engine.device=cpu")
    return "cpu"


def set_heap(largest: int, retain: bool = False) -> None:
    """Make glibc map blocks above `largest` bytes and `retain` freed memory below that size."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, largest)  # M_MMAP_THRESHOLD
        if retain:
            mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def check_splits(parts: Parts) -> None:
    """Open every split that will be scored, so that a missing one is noticed before training."""
    options = parts.config.trainer
    if options.valid_split == "train":
        raise UsageError(
            "trainer.valid_split=train would choose the best checkpoint by the examples it was "
            "trained on; name another split, and score 'train' with trainer.final_splits=[train]"
        )
    for split in sorted({options.valid_split, *options.final_splits} - {""}):
        _check_scored(parts.task, split)
        parts.task.build_streams(split)


def _check_scored(task: Task, split: str) -> None:
    """Raise UsageError for the training split if the task cannot score it."""
    if split == "train" and not isinstance(task, ScoresTraining):
        raise UsageError(
            "the stream of 'train' is endless and cannot be scored; binarise its text as a further "
            "split (preprocess --split NAME=FILE) and name that"
        )


def evaluate_split(parts: Parts, split: str, most: int | None = None) -> Scored:
    """Return the task's metrics and predictions on a split, in evaluation mode.

    A collective call. With `most`, only the first batches of each stream are used.
    """
    with parts.evaluation_mode():
        logs, rows = parts.task.evaluate(parts.engine, parts.model, _batches_of(parts, split, most))
    return Scored({name: float(value) for name, value in logs.items()}, rows)


def sample_texts(parts: Parts) -> list[str]:
    """Return the task's examples of the model's output; for most tasks an empty list."""
    if not isinstance(parts.task, HasSamples):
        return []
    with parts.evaluation_mode():
        return parts.task.samples(parts.engine, parts.model)


def _batches_of(parts: Parts, split: str, most: int | None = None) -> Passes:
    """Return iterators by stream over this replica's batches of a split, or over the first `most`.

    They raise Interrupted after a stop signal, on all replicas at the same batch.
    """
    shard = parts.shard

    def read(stream: Any) -> Any:
        for batch in islice(stream.one_epoch(shard), most):
            process_group.check_peers()
            process_group.stop_if_signalled("during an evaluation")
            yield parts.engine.to_device(batch)

    return {name: read(stream) for name, stream in passes_of(parts.task, split).items()}


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: of the GPU, or resident size on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Return the number of trained and of all parameters; a shared one counts once."""
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return {"trained": trained, "all": sum(p.numel() for p in parameters)}
