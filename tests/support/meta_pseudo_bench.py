"""One task with nets and engine, assembled like in a run, and its batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metaseq_lm import plugins
from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Batch
from metaseq_lm.core.loading import Compositions, load_config
from metaseq_lm.data.streams import Shard
from metaseq_lm.engine.engine import Engine, Logs
from metaseq_lm.forward.passes import ForwardContext, ForwardPass, Noise, use_context
from metaseq_lm.tasks import Batches
from metaseq_lm.training.parts import build_model, build_task

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "meta_pseudo_label" / "config"
COMPOSED: Compositions = {}  # compositions of this process
Grads = Sequence[Tensor | None]


class Bench:
    """A working task.

    For the last update, `steps` holds (name, gradient) of every requested optimizer step, and
    `passes` holds (stream, draw) of every forward pass.
    """

    def __init__(self, data: Path, name: str, *overrides: str) -> None:
        torch.set_num_threads(1)
        plugins.load_all()
        given = [f"data={data}", "engine.precision=fp64", "engine.device=cpu", *overrides]
        self.config = load_config(given, str(CONFIGS), name, COMPOSED)
        # Any, because tests use attributes that only this task and these nets have.
        self.task: Any = build_task(self.config)
        self.model: Any = build_model(self.task, self.config, "cpu")
        self.engine = Engine(
            self.task.build_optimizers(self.model),
            self.config.seed,
            "cpu",
            self.config.engine.precision,
        )
        self.model.train()
        self.steps: list[tuple[str, Grads]] = []
        self.passes: list[tuple[str, Any]] = []
        self.record()

    def record(self) -> None:
        """Record each step of the engine before it is taken, and the draw of each pass."""
        step: Callable = self.engine.step
        start: Callable = self.engine.passes.start

        def noted(name: str, grads: Grads) -> bool:
            self.steps.append((name, [None if g is None else g.detach().clone() for g in grads]))
            return step(name, grads)

        @contextmanager
        def started(draw: Any, *rest: Any, **more: Any) -> Iterator[ForwardPass]:
            with start(draw, *rest, **more) as forward:
                over: Callable = forward.over

                def seen(batch: Batch) -> AbstractContextManager:
                    self.passes.append((batch.stream, draw))
                    return over(batch)

                forward.over = seen
                yield forward

        self.engine.step = noted  # type: ignore[method-assign]
        self.engine.passes.start = started  # type: ignore[method-assign]

    def batches(self, update: int, micro_batch_size: int = 0) -> Batches:
        """Return the batches of update `update`."""
        made: Batches = {}
        shard = Shard(0, 1, micro_batch_size)
        for name, stream in self.task.build_streams("train").items():
            count = self.task.needs(update).get(name, 0)
            if count:
                made[name] = [self.engine.to_device(stream.micro_batches(update, shard))]
        return made

    def update(self, update: int, micro_batch_size: int = 0) -> Logs:
        """Make one real update; `steps` then holds only the steps of this update."""
        self.steps.clear()
        self.passes.clear()
        self.engine.begin(update)
        batches = self.batches(update, micro_batch_size)
        return self.task.update(self.engine, self.model, batches)

    def gradient(self, name: str) -> Grads:
        """Return the only gradient for optimizer `name` in the last update."""
        (found,) = [grads for given, grads in self.steps if given == name]
        return found

    def replay(self, rows: Any, update: int, draw: Any) -> AbstractContextManager:
        """Enter a pass over `rows` with the random numbers of one of the engine's passes."""
        root = random_streams.key(self.config.seed, "noise", update, draw)
        noise = Noise(root, rows)
        return use_context(ForwardContext(noise, double_backward=True))

    @property
    def copies(self) -> int:
        return self.config.task.batches_per_update


def flat(parameters: Any) -> Tensor:
    """Return a detached copy of parameters or gradients in one vector."""
    return torch.cat([p.detach().reshape(-1).clone() for p in parameters])


def adam_state(bench: Bench, name: str) -> dict[str, Any]:
    """Return a copy of moments and counters of one optimizer."""
    return copy.deepcopy(bench.engine.optimizers[name].state_dict())


def parameters_by_name(net: nn.Module) -> dict[str, Tensor]:
    """Return a detached copy of each parameter."""
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def relative(found: Grads, wanted: Grads) -> float:
    """Return |found - wanted| / |wanted|; None must meet None or zeros."""
    difference, size = 0.0, 0.0
    for a, b in zip(found, wanted, strict=True):
        if a is None and b is None:
            continue
        x = torch.zeros_like(b) if a is None else a  # type: ignore[arg-type]
        y = torch.zeros_like(x) if b is None else b
        difference += (x - y).square().sum().item()
        size += y.square().sum().item()
    assert size > 0
    return (difference / size) ** 0.5
