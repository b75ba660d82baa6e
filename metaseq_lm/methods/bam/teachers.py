"""What teachers say of the training rows: computed once, without dropout, and stored.

A file FOLDER/SET.train.safetensors holds the tensor "outputs", fp32 (rows of the set, K): the logits of
its classes, or the prediction of its real value (K = 1) on the scale of the head; row i is that of
row i of the set (a benchmark's doubled rows have numbers of their own). Its header says of which data
and of which weights. The folder of a teacher's run has them in outputs/CHECKPOINT/.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy
from omegaconf import DictConfig

from metaseq_lm import checkpoint, distributed
from metaseq_lm.criterions import Batch
from metaseq_lm.data.labelled import LabelledSet
from metaseq_lm.data.manifest import fingerprint
from metaseq_lm.errors import MetaseqError, UsageError
from metaseq_lm.files import write_atomic
from metaseq_lm.opened import open_run
from metaseq_lm.tasks.finetuning import Outputs, listed, mapped

if TYPE_CHECKING:
    from metaseq_lm.methods.bam.task import BamTask
    from metaseq_lm.run import Run

FORMAT = 1
SUFFIX = ".train.safetensors"
FOLDER = "outputs"
# What the student's engine decides for its teachers too; it changes no result.
ENGINE = ("device", "micro_batch_size", "threads", "timeout", "keep_memory")


def assigned(teachers: Sequence[str], sets: Sequence[str]) -> dict[str, str]:
    """Return the teacher (run, checkpoint or folder of stored outputs) of each of the student's sets.

    Raises UsageError unless each set has exactly one.
    """
    found: dict[str, str] = {}
    for teacher in teachers:
        for name in taught(teacher):
            if name in found and name in sets:
                raise UsageError(
                    f"task.teachers: both {found[name]} and {teacher} teach {name}; a set has one teacher"
                )
            found[name] = teacher
    lacking = [name for name in sets if name not in found]
    if lacking:
        raise UsageError(
            f"task.teachers: none of {', '.join(teachers)} teaches {', '.join(lacking)} (they teach "
            f"{', '.join(sorted(found)) or 'nothing'}); name a run trained on each of task.labelled"
        )
    return {name: found[name] for name in sets}


def taught(teacher: str) -> list[str]:
    """Return the sets that a teacher was trained on, or that a folder has outputs of.

    Raises UsageError for a run of another task, CheckpointError for what is neither.
    """
    stored = sorted(Path(teacher).glob(f"*{SUFFIX}"))
    if stored:
        return [path.name.removesuffix(SUFFIX) for path in stored]
    place = checkpoint.resolve(teacher, prefer="best")
    task = (checkpoint.read_manifest(place).get("config") or {}).get("task") or {}
    if task.get("_name") != "bam":
        raise UsageError(
            f"{teacher} is a run of task {task.get('_name')}; a teacher is a run of task bam (on one set "
            "or several), or a folder of its outputs"
        )
    return list(task["labelled"])


def outputs_of(
    config: DictConfig, sets: dict[str, LabelledSet], teachers: dict[str, str]
) -> dict[str, np.ndarray]:
    """Return what the teacher of each set says of its training rows, float32 (rows, K).

    What is not stored yet is computed, by all replicas, and stored; what comes back is what is
    stored, so that it is the same for all replicas and for a run that is resumed. A call of all
    replicas. Raises MetaseqError if something is stored that is not of these rows.
    """
    for teacher in dict.fromkeys(teachers.values()):
        names = [name for name, own in teachers.items() if own == teacher]
        if any(Path(teacher).glob(f"*{SUFFIX}")):
            continue
        place = checkpoint.resolve(teacher, prefer="best")
        missing = [name for name in names if not stored_at(teacher, name).is_file()]
        missing = distributed.from_first(missing)
        if missing:
            compute(config, str(place), stored_folder(place), missing)
    found = {}
    for name, teacher in teachers.items():
        weights = None
        if not any(Path(teacher).glob(f"*{SUFFIX}")):
            weights = weights_hash(checkpoint.resolve(teacher, prefer="best"))
        about = describe(Path(config.data) / name, sets[name], weights)
        found[name] = read(stored_at(teacher, name), about)
    return found


def stored_at(teacher: str, name: str) -> Path:
    """Return the file with a teacher's outputs on the set `name`."""
    folder = Path(teacher)
    if not any(folder.glob(f"*{SUFFIX}")):
        folder = stored_folder(checkpoint.resolve(teacher, prefer="best"))
    return folder / f"{name}{SUFFIX}"


def stored_folder(place: Path) -> Path:
    """Return where the outputs of a checkpoint are: in its run folder, or in itself if it has none."""
    if place.parent.name == "checkpoints":
        return place.parent.parent / FOLDER / place.name
    return place / FOLDER


def weights_hash(place: Path) -> str:
    """Return the hash of a checkpoint's weights, from its manifest."""
    return str(checkpoint.read_manifest(place)["sha256"].get("model.safetensors"))


# ---------------------------------------------------------------- computing


def compute(config: DictConfig, place: str, folder: Path, names: Sequence[str]) -> None:
    """Compute the outputs of a checkpoint on training rows of the student's data, and store them.

    A call of all replicas, each of which computes its share; the first one writes.
    """
    if distributed.rank() == 0:
        print(f"{place} is asked what it says of the rows of {', '.join(names)}", flush=True)
    overrides = [f"engine.{key}={config.engine[key]}" for key in ENGINE]
    if config.engine.precision == "fp64":
        overrides.append("engine.precision=fp64")
    teacher = open_run(place, config.data, config.user_dir, overrides)
    weights = weights_hash(Path(place))
    for name in names:
        data, outputs = forward(teacher, name)
        if distributed.rank() == 0:
            about = describe(Path(config.data) / name, data, weights)
            store(folder / f"{name}{SUFFIX}", outputs, about | {"checkpoint": place})
        distributed.from_first(None)  # nobody reads before it is written
    del teacher
    gc.collect()


def forward(teacher: Run, name: str) -> tuple[LabelledSet, np.ndarray]:
    """Return a set's training rows, and the outputs (rows, K) of a pass over them without dropout."""
    task: BamTask = teacher.task  # type: ignore[assignment]
    number, engine, model = task.names.index(name), teacher.trainer.engine, teacher.model

    def placed() -> Iterator[list[Batch]]:
        for batch in task.once(name, "train").once(teacher.trainer.shard):
            distributed.alive()
            yield engine.to_device(batch)

    def find(batch: Batch) -> Outputs:
        return listed(batch["samples"], task.criterion.scores(model, batch)[name])

    data = task.labelled(name, "train").data
    model.eval()
    with engine.outside_updates():
        mine = mapped(engine, placed(), find)
    every = [row for part in distributed.gather_objects(mine) for row in part]
    outputs = np.empty((len(data), task.outputs[number]), np.float32)
    outputs[[sample for sample, _ in every]] = [values for _, values in every]
    return data, outputs


# ---------------------------------------------------------------- storing


def describe(folder: Path, data: LabelledSet, weights: str | None) -> dict[str, Any]:
    """Return what outputs must be of: the data and rows of a set, and a teacher's weights (or any)."""
    about = {
        "format": FORMAT,
        "set": folder.name,
        "data": fingerprint(folder),
        "rows": len(data),
        "labels": list(data.label_names),
    }
    return about if weights is None else about | {"weights": weights}


def store(path: Path, outputs: np.ndarray, about: dict[str, Any]) -> None:
    """Write outputs and what they are of, in one piece, unless another run has done so meanwhile."""
    outputs = np.ascontiguousarray(outputs, np.float32)
    if not np.isfinite(outputs).all():
        raise MetaseqError(
            f"the teacher {about.get('checkpoint')} says something that is not finite of "
            f"{about['set']}; choose another teacher"
        )
    about = about | {"sha256": hashlib.sha256(outputs.tobytes()).hexdigest()}
    content = safetensors.numpy.save({"outputs": outputs}, {"about": json.dumps(about)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent):
            if not path.is_file():
                write_atomic(path, content)
    except OSError as error:
        raise MetaseqError(
            f"{path}: {error.strerror}; the outputs of a teacher are stored in its run folder. Make it "
            "writable, or copy the run to where you can write"
        ) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes that ask for the same out of the block."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read(path: Path, wanted: dict[str, Any]) -> np.ndarray:
    """Return stored outputs, float32 (rows, K); MetaseqError if they are damaged or not of `wanted`."""
    try:
        content = path.read_bytes()
        checkpoint.check_header(content)
        outputs = safetensors.numpy.load(content)["outputs"]
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        about = json.loads(header["__metadata__"]["about"])
        if outputs.dtype != np.float32 or outputs.ndim != 2:
            raise ValueError(f"a table of {outputs.dtype} with {outputs.ndim} dimensions")
        if about["sha256"] != hashlib.sha256(outputs.tobytes()).hexdigest():
            raise ValueError("its checksum differs")
    except OSError as error:
        raise MetaseqError(f"{path}: {error.strerror}") from error
    except Exception as error:  # whatever the library raises for a file that is not its own
        reason = str(error).split("\n")[0]
        raise MetaseqError(
            f"{path}: not readable as a teacher's outputs: {reason[:200]}; delete it, a run of its "
            "teacher's student makes it anew"
        ) from error
    differing = [
        f"{key}: {str(about.get(key))[:60]} there, {str(value)[:60]} here"
        for key, value in wanted.items()
        if about.get(key) != value
    ]
    columns = max(len(wanted["labels"]), 1)
    if not differing and outputs.shape != (wanted["rows"], columns):
        differing = [f"a table of {outputs.shape}, not of {(wanted['rows'], columns)}"]
    if differing:
        raise MetaseqError(
            f"{path}: what this teacher says is of other rows or weights than are used now "
            f"({'; '.join(differing)}); delete the file to have it computed anew, or give the data and the "
            "teacher that it was made with"
        )
    return outputs
