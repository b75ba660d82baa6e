"""A plug-in that breaks a run on purpose and records the data and state of each replica.

It is loaded with --user-dir, patches the functions of the phases and reads the environment:
* METASEQ_LM_FAULTS: JSON list of {"what", "where", "rank", "update", "slot", "of", "stays",
  "once"}: "slot" is the micro-batch (null: all), "of" the end of a parameter's name, "stays" leaves
  a weight spoilt, "once" forgets the fault when its update is over;
* METASEQ_LM_RECORD: each replica appends to SAVE_DIR/record.RANK.jsonl, update by update, the
  sample numbers and hashes of weights and moments before and after;
* METASEQ_LM_SLOW_SAVE: seconds to wait before each step of a save;
* METASEQ_LM_SLOW_UPDATE: additional seconds of each update;
* METASEQ_LM_HOLD: the update that waits until the file METASEQ_LM_SENT says that a signal was sent,
  and for that signal to arrive, as on a busy machine a run may otherwise end before it;
* METASEQ_LM_FREE_BYTES: the free bytes that the disk reports.
Patches are permanent, so processes that run tests do not load it.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from metaseq_lm.core import files
from metaseq_lm.core.batch import Term
from metaseq_lm.data.streams import Shard, Stream
from metaseq_lm.distributed import process_group, signals
from metaseq_lm.distributed.reduction import Reduction
from metaseq_lm.distributed.vectors import local_part
from metaseq_lm.engine.engine import Engine
from metaseq_lm.forward import passes
from metaseq_lm.runs import checkpoint
from metaseq_lm.training.prefetch import sample_numbers
from metaseq_lm.training.trainer import Trainer

if "conftest" in sys.modules:
    raise RuntimeError("it patches the program for good: run the command in a process of its own")

FAULTS = json.loads(os.environ.get("METASEQ_LM_FAULTS", "[]"))
VALUES = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}


class Now:
    """The current update of this replica and the loss within it, both counted from 0."""

    update = -1
    slot = -1


def due(where: str, update: int, slot: int = 0, rank: int | None = None) -> list[dict]:
    """Return the faults due at this place and time."""
    rank = process_group.rank() if rank is None else rank
    here = {"where": where, "update": update, "rank": rank, "slot": slot}
    return [f for f in FAULTS if here.items() <= ({"rank": 0, "slot": 0} | f).items()]


def act(faults: list[dict]) -> None:
    """Die or hang as the first fault requires."""
    if not faults:
        return
    what = faults[0]["what"]
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "raise":
        raise ValueError("an injected fault")
    elif what == "exit":
        sys.exit(faults[0].get("code", 0))
    elif what == "loop":
        while True:
            pass
    elif what == "block":
        threading.Event().wait()
    else:
        raise AssertionError(f"no such fault: {what}")


def replaces(owner: Any, name: str) -> Callable:
    """Replace owner.name by the decorated function's result for it."""

    def put(make: Callable) -> Callable:
        setattr(owner, name, make(getattr(owner, name)))
        return make

    return put


def poisoned(tensor: Tensor, what: str) -> Tensor:
    """Return a copy with one nonfinite element."""
    copy = tensor.clone()
    copy.reshape(-1)[-1] = VALUES[what]
    return copy


# ---------------------------------------------------------------- phases


@replaces(Engine, "begin")
def begin(real: Callable) -> Callable:
    def wrapped(self: Engine, update: int, *others: Sequence[float]) -> None:
        Now.update, Now.slot = update, -1
        real(self, update, *others)

    return wrapped


@replaces(passes, "weighted_loss")
def weighted_loss(real: Callable) -> Callable:
    def wrapped(terms: dict[str, Term], totals: Any, logs: Any) -> Tensor:
        Now.slot += 1
        act(due("forward", Now.update, Now.slot))
        for fault in due("loss", Now.update, Now.slot):
            name, term = next(iter(terms.items()))
            terms = terms | {name: Term(term.sum + VALUES[fault["what"]], term.per, term.weight)}
        loss = real(terms, totals, logs)
        faults = due("backward", Now.update, Now.slot)
        if faults and loss.requires_grad:
            loss.register_hook(lambda gradient: act(faults))
        return loss

    return wrapped


@replaces(Reduction, "finish")
def finish(real: Callable) -> Callable:
    def wrapped(self: Reduction, *args: Any) -> Any:
        act(due("collective", Now.update))
        return real(self, *args)

    return wrapped


@replaces(Trainer, "_validate")
def validate(real: Callable) -> Callable:
    def wrapped(self: Trainer) -> Any:
        act(due("validate", self.update))
        return real(self)

    return wrapped


@replaces(Trainer, "state_dict")
def state_dict(real: Callable) -> Callable:
    def wrapped(self: Trainer) -> Any:
        act(due("save", self.update))
        return real(self)

    return wrapped


@replaces(Stream, "micro_batches")
def micro_batches(real: Callable) -> Callable:
    def wrapped(self: Stream, number: int, shard: Shard) -> Any:
        if self.name == "train":
            act(due("loader", number, rank=shard.rank))
        return real(self, number, shard)

    return wrapped


@replaces(Trainer, "_update")
def update_of(real: Callable) -> Callable:
    def wrapped(self: Trainer, update: int, batches: Any) -> None:
        time.sleep(float(os.environ.get("METASEQ_LM_SLOW_UPDATE", "0")))
        if update == int(os.environ.get("METASEQ_LM_HOLD", "-1")):
            wait_for_signal(Path(os.environ["METASEQ_LM_SENT"]))
        before = hashes(self)
        undo = spoil(self.model, update)
        real(self, update, batches)
        for step in undo:
            step()
        FAULTS[:] = [f for f in FAULTS if not (f.get("once") and f["update"] == update)]
        if os.environ.get("METASEQ_LM_RECORD"):
            record(self, update, batches, before)

    return wrapped


def wait_for_signal(sent: Path) -> None:
    """Wait until the test has sent its signal, and then for it; other replicas may have got it."""
    end = time.monotonic() + 60
    while not sent.exists() and time.monotonic() < end:
        time.sleep(0.01)
    end = time.monotonic() + 5
    while not signals.last_signal() and time.monotonic() < end:
        time.sleep(0.01)


def spoil(model: nn.Module, update: int) -> list[Callable]:
    """Make a weight, gradient or activation nonfinite; return functions that undo it."""
    norm = next(m for m in model.modules() if isinstance(m, nn.LayerNorm))
    undo: list[Callable] = []
    for fault in [f for f in FAULTS if f["update"] == update]:
        what, rank, slot = fault["what"], fault.get("rank", 0), fault.get("slot", 0)
        if rank != process_group.rank():
            continue
        of = fault.get("of", "layers.0.fc1.weight")
        weight = next(p for name, p in model.named_parameters() if name.endswith(of))
        if fault["where"] == "weight":
            kept = weight.data.clone()
            weight.data.copy_(poisoned(weight.data, what))
            undo += [] if fault.get("stays") else [lambda w=weight, k=kept: w.data.copy_(k)]
        elif fault["where"] == "gradient":
            hook: Any = weight.register_hook(
                lambda g, what=what, slot=slot: poisoned(g, what) if slot in (None, Now.slot) else g
            )
            undo.append(hook.remove)
        elif fault["where"] == "activation":
            hook = norm.register_forward_hook(
                # The loss of this pass is counted after the pass.
                lambda m, i, o, what=what, slot=slot: (
                    poisoned(o, what) if Now.slot + 1 == slot else o
                )
            )
            undo.append(hook.remove)
    return undo


# ---------------------------------------------------------------- records


def digest(value: Any) -> str:
    """Return a hash of all bits in nested containers of tensors."""
    total = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            total.update(value.detach().contiguous().view(-1).numpy().tobytes())
        elif isinstance(value, dict):
            for key, part in value.items():
                total.update(str(key).encode())
                add(part)
        else:
            total.update(repr(value).encode())

    add(value)
    return total.hexdigest()


def hashes(trainer: Trainer) -> list[str]:
    """Return the hashes of the weights and of each optimizer's state."""
    states = [o.local_state() for o in trainer.engine.optimizers.values()]
    weights = {name: local_part(w) for name, w in trainer.model.state_dict().items()}
    return [digest(weights), *map(digest, states)]


def record(trainer: Trainer, update: int, batches: Any, before: list[str]) -> None:
    """Append a record of this update."""
    moments = [
        value.numel()
        for o in trainer.engine.optimizers.values()
        for state in o.local_state()["state"].values()
        for value in state.values()
        if value.dim()
    ]
    line = {"update": update, "samples": sample_numbers(batches), "moments": sum(moments)}
    line |= {
        "before": before,
        "after": hashes(trainer),
        "refused": trainer.engine.finite_check.refused,
    }
    parameters = list(trainer.model.parameters())
    line |= {"parameters": sum(p.numel() for p in parameters)}
    line |= {"held": sum(local_part(p).numel() for p in parameters)}
    path = Path(trainer.config.save_dir) / f"record.{process_group.rank()}.jsonl"
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


# ---------------------------------------------------------------- the disk


class Slow:
    """A module with some slow functions."""

    def __init__(self, module: Any, names: set[str], seconds: float) -> None:
        self.module, self.names, self.seconds = module, names, seconds

    def __getattr__(self, name: str) -> Any:
        if name in self.names:
            time.sleep(self.seconds)
        return getattr(self.module, name)


def slow_save(seconds: float) -> None:
    """Wait before each step of a save, and in the middle of each file."""
    checkpoint.os = Slow(os, {"rename", "replace"}, seconds)
    checkpoint.shutil = Slow(shutil, {"rmtree"}, seconds)

    def write(path: Path, pieces: Iterable[Any]) -> str:
        data = b"".join(map(bytes, pieces))
        with open(path, "wb") as file:
            for part in (data[: len(data) // 2], data[len(data) // 2 :]):
                file.write(part)
                file.flush()
                time.sleep(seconds)
            os.fsync(file.fileno())
        return hashlib.sha256(data).hexdigest()

    def exchange(first: Path, second: Path) -> bool:
        time.sleep(seconds)
        return files.exchange_names(first, second)

    checkpoint._write = write
    checkpoint.exchange_names = exchange


if "METASEQ_LM_SLOW_SAVE" in os.environ:
    slow_save(float(os.environ["METASEQ_LM_SLOW_SAVE"]))
if "METASEQ_LM_FREE_BYTES" in os.environ:
    Usage = namedtuple("Usage", "total used free")
    shutil.disk_usage = lambda path: Usage(0, 0, int(os.environ["METASEQ_LM_FREE_BYTES"]))
# While a replica starts and has not joined the others.
act([f for f in FAULTS if f["where"] == "start" and str(f["rank"]) == os.environ.get("RANK")])
