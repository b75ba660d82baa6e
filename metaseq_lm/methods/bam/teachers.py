"""Teachers: runs of this task, and their outputs on the training rows, computed once and stored.

A file FOLDER/SET.train.safetensors holds the tensor "outputs", fp32 (rows of the set, K): the logits of
its classes, or its real value (K = 1) on the scale of the labels; row i is that of row i of the set (a
benchmark's doubled rows have numbers of their own). Its header says of which data, classes and weights
it is, and what all that it took has cost. The folder of a teacher's run has them in
outputs/CHECKPOINT/.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from omegaconf import DictConfig

from metaseq_lm.core.batch import TokenBatch
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import write_atomic
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.manifest import MANIFEST_FILE, fingerprint
from metaseq_lm.distributed import process_group
from metaseq_lm.runs import checkpoint, lineage_cost
from metaseq_lm.runs.flops import FlopMeter
from metaseq_lm.runs.folder import read_results
from metaseq_lm.runs.lineage_cost import Costs
from metaseq_lm.runs.safe_load import check_header
from metaseq_lm.tasks.finetuning import Outputs, listed
from metaseq_lm.training.parts import Parts
from metaseq_lm.training.restore import open_run

FORMAT = 3
SUFFIX = ".train.safetensors"
FOLDER = "outputs"
# What the student's engine decides for its teachers too; it changes no result.
ENGINE = ("device", "micro_batch_size", "threads", "timeout", "retain_heap")
QUIET = 10.0  # seconds between two lines of progress


@dataclass(frozen=True)
class Teacher:
    """A run of this task, or a folder of outputs, resolved.

    `labels` has the classes of each set that it teaches (none for real values); of a folder of
    outputs they are None, the files know them. `outputs` is where its outputs are, or will be;
    `checkpoint` is None for a folder of outputs.
    """

    name: str
    outputs: Path
    labels: Mapping[str, list[str] | None]
    checkpoint: Path | None = None
    weights: str | None = None  # a hash

    def file(self, name: str) -> Path:
        """Return the file with its outputs on the set `name`."""
        return self.outputs / f"{name}{SUFFIX}"


def resolve(name: str) -> Teacher:
    """Return the teacher that a path means: a run (its best checkpoint, else its last), or outputs.

    Raises UsageError for a run of another task or an unfinished one, CheckpointError for what is neither.
    """
    stored = sorted(Path(name).glob(f"*{SUFFIX}"))
    if stored:
        sets = [path.name.removesuffix(SUFFIX) for path in stored]
        return Teacher(name, Path(name), dict.fromkeys(sets))
    place = checkpoint.resolve(name, prefer="best")
    require_finished(Path(name))
    manifest = checkpoint.read_manifest(place)
    config = manifest.get("config")
    task = config.get("task") if isinstance(config, dict) else None
    kind = task.get("_name") if isinstance(task, dict) else None
    if kind != "bam":
        raise UsageError(
            f"{name} is a run of task {str(kind)[:40]}; a teacher is a run of task bam (on one set or "
            "several), or a folder of its outputs"
        )
    # Outside a run folder they are in the checkpoint itself.
    inside = place.parent.name == "checkpoints"
    outputs = place.parent.parent / FOLDER / place.name if inside else place / FOLDER
    weights = str(manifest["sha256"].get("model.safetensors"))
    labels = checkpoint.labels_of(manifest.get("facts"), place)
    return Teacher(name, outputs, labels, place, weights)


def require_finished(folder: Path) -> None:
    """Raise UsageError for the folder of a run that is not finished: its best checkpoint may change."""
    results = read_results(folder) if (folder / "checkpoints").is_dir() else {"status": "finished"}
    if (results or {}).get("status") != "finished":
        raise UsageError(
            f"task.teachers: the run {folder} is not finished, its best checkpoint may change; let it come "
            "to its end, or name one of its checkpoints"
        )


def assigned(names: Sequence[str], labels: Mapping[str, list[str]]) -> dict[str, Teacher]:
    """Return the teacher of each of the student's sets, given their classes.

    Raises UsageError unless each set has exactly one, with the same classes in the same order.
    """
    found: dict[str, Teacher] = {}
    for teacher in map(resolve, names):
        for name in teacher.labels:
            if name in found and name in labels:
                raise UsageError(
                    f"task.teachers: both {found[name].name} and {teacher.name} teach {name}; a set has "
                    "one teacher"
                )
            found[name] = teacher
    lacking = [name for name in labels if name not in found]
    if lacking:
        raise UsageError(
            f"task.teachers: none of {', '.join(names)} teaches {', '.join(lacking)} (they teach "
            f"{', '.join(sorted(found)) or 'nothing'}); name a run trained on each of task.labelled"
        )
    for name, own in labels.items():
        then = found[name].labels[name]
        if then is not None:
            checkpoint.check_classes(found[name].name, name, then, own)
    return {name: found[name] for name in labels}


# ---------------------------------------------------------------- computing


def outputs_of(
    config: DictConfig,
    sets: Mapping[str, LabelledSet],
    teachers: Mapping[str, Teacher],
    dry_run: bool = False,
) -> tuple[dict[str, np.ndarray], Costs]:
    """Return the outputs, float32 (rows, K), of the teacher of each set, and what they have cost.

    What is not stored yet is computed, by all replicas, and stored; what comes back is what is
    stored, so that it is the same for all replicas and for a run that is resumed. In a `dry_run`
    zeros stand in for it, after a look whether the teacher can be asked. A call of all replicas.
    Raises MetaseqError if something is stored that is not of these rows, Interrupted for a signal.
    """
    for teacher, names in missing(teachers):
        run = opened(config, teacher)
        for name in () if dry_run else names:
            outputs, spent = computed(run, teacher, name)
            if process_group.rank() == 0:
                file = teacher.file(name)
                own = {str(file.resolve()): spent}
                costs = lineage_cost.union([lineage_cost.ancestors(str(teacher.checkpoint)), own])
                about = describe(Path(config.data) / name, sets[name], teacher.weights)
                store(file, outputs, about | {"checkpoint": str(teacher.checkpoint), "cost": costs})
            process_group.from_first(None)  # nobody reads before it is written
        del run
        gc.collect()
    found, every = {}, []
    for name, teacher in teachers.items():
        data, file = sets[name], teacher.file(name)
        if dry_run and not file.is_file():
            found[name] = np.zeros((len(data), max(len(data.label_names), 1)), np.float32)
            continue
        found[name], costs = read(file, describe(Path(config.data) / name, data, teacher.weights))
        every.append(costs)
    return found, lineage_cost.union(every)


def missing(teachers: Mapping[str, Teacher]) -> list[tuple[Teacher, list[str]]]:
    """Return each teacher with the sets of which its outputs are not stored, by the first replica."""
    by_name = {teacher.name: teacher for teacher in teachers.values() if teacher.checkpoint}
    found = []
    for own in by_name.values():
        names = [n for n, t in teachers.items() if t is own and not own.file(n).is_file()]
        if names := process_group.from_first(names):
            found.append((own, names))
    return found


def opened(config: DictConfig, teacher: Teacher) -> Parts:
    """Return the run of a teacher on the student's data, to be asked in full precision.

    Raises MetaseqError if it cannot be: a model has all its heads, so DATA must have all its sets.
    """
    lacking = [n for n in teacher.labels if not (Path(config.data) / n / MANIFEST_FILE).is_file()]
    if lacking:
        raise UsageError(
            f"the teacher {teacher.name} has heads for {', '.join(lacking)}, too, which are not in "
            f"{config.data}; preprocess them there, or give a folder of its outputs instead"
        )
    overrides = [f"engine.{key}={config.engine[key]}" for key in ENGINE]
    precision = "fp64" if config.engine.precision == "fp64" else "fp32"
    overrides.append(f"engine.precision={precision}")
    return open_run(str(teacher.checkpoint), config.data, config.user_dir, overrides)


def computed(run: Parts, teacher: Teacher, name: str) -> tuple[np.ndarray, dict[str, float]]:
    """Return a teacher's outputs (rows, K) on a set's training rows, without dropout, and their cost.

    A call of all replicas, each of which takes its share of each batch. Raises Interrupted.
    """
    task: Any = run.task  # a BamTask, which imports this module
    meter, engine, model = FlopMeter(), run.engine, run.model
    started = time.monotonic()
    rows = len(task.labelled(name, "train"))
    show = Rows(f"{teacher.name}: its outputs on {name}", rows)

    def find(batch: TokenBatch) -> Outputs:
        return listed(batch.samples, task.criterion.answers(model, batch, name))

    mine: Outputs = []
    model.eval()
    with engine.outside_updates():
        for number, batch in enumerate(task.once(name, "train").one_epoch(run.shard)):
            process_group.alive()
            stop_if_asked(teacher)
            show(number * task.config.batch_size)
            placed = engine.to_device(batch)
            with meter.count(placed):
                parts = engine.map(find, placed)
            mine += [row for part in parts for row in part]
    flops = sum(process_group.gather_objects(meter.total))
    every = [row for part in process_group.gather_objects(mine) for row in part]
    # What nobody has computed must not pass for an output.
    outputs = np.full((rows, task.outputs[name]), np.nan, np.float32)
    outputs[[sample for sample, _ in every]] = [values for _, values in every]
    return outputs, {"seconds": time.monotonic() - started, "flops": flops, "updates": 0}


class Rows:
    """Prints how many of `total` rows are done: at once, then a line every QUIET seconds."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.shown = what, total, -math.inf

    def __call__(self, done: int) -> None:
        """Print the line, if it is time and this is the first replica."""
        if process_group.rank() == 0 and time.monotonic() - self.shown >= QUIET:
            print(f"{self.what}: {done:,} of {self.total:,} rows", flush=True)
            self.shown = time.monotonic()


def stop_if_asked(teacher: Teacher) -> None:
    """Raise Interrupted on all replicas if a signal asked one of them to stop."""
    process_group.stop_if_signalled(
        f"while the outputs of {teacher.name} were computed; those of whole sets are stored"
    )


# ---------------------------------------------------------------- storing


def describe(folder: Path, data: LabelledSet, weights: str | None) -> dict[str, Any]:
    """Return what outputs must be of: the data and rows of a set, and a teacher's weights (or any)."""
    about = {
        "format": FORMAT,
        "set": folder.name,
        "data": fingerprint(folder, data.split),
        "rows": len(data),
        "labels": list(data.label_names),
    }
    return about if weights is None else about | {"weights": weights}


def store(path: Path, outputs: np.ndarray, about: dict[str, Any]) -> None:
    """Write outputs and what they are of, in one piece, unless another run has done so meanwhile."""
    outputs = np.ascontiguousarray(outputs, np.float32)
    if not np.isfinite(outputs).all():
        raise MetaseqError(
            f"the teacher {about.get('checkpoint')} has outputs on {about['set']} that are not finite; "
            "choose another teacher"
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


def weights_of(teacher: Teacher, name: str) -> str | None:
    """Return the hash of the weights whose outputs on a set a teacher has, None if it is not said."""
    if teacher.weights is not None:
        return teacher.weights
    return opened_file(teacher.file(name))[1].get("weights")


def opened_file(path: Path) -> tuple[np.ndarray, dict[str, Any], Costs]:
    """Return stored outputs, what they are of, and their cost; MetaseqError if they are damaged."""
    try:
        content = path.read_bytes()
        check_header(content)
        outputs = safetensors.numpy.load(content)["outputs"]
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        about = json.loads(header["__metadata__"]["about"])
        if outputs.dtype != np.float32 or outputs.ndim != 2:
            raise ValueError(f"a table of {outputs.dtype} with {outputs.ndim} dimensions")
        if about["sha256"] != hashlib.sha256(outputs.tobytes()).hexdigest():
            raise ValueError("its checksum differs")
        costs = lineage_cost.checked(about.get("cost"))
    except OSError as error:
        raise MetaseqError(f"{path}: {error.strerror}") from error
    except Exception as error:  # whatever the library raises for a file that is not its own
        reason = str(error).split("\n")[0]
        raise MetaseqError(
            f"{path}: not readable as a teacher's outputs: {reason[:200]}; delete it, a run of its "
            "teacher's student makes it anew"
        ) from error
    return outputs, about, costs


def read(path: Path, wanted: dict[str, Any]) -> tuple[np.ndarray, Costs]:
    """Return stored outputs, float32 (rows, K), and what they have cost.

    Raises MetaseqError if they are damaged or not of `wanted`.
    """
    outputs, about, costs = opened_file(path)
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
            f"{path}: these outputs are of other rows, classes or weights than are used now "
            f"({'; '.join(differing)}); delete the file to have it computed anew, or give the data and the "
            "teacher that it was made with"
        )
    return outputs, costs
