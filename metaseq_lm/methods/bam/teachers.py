"""Teachers: runs of this task; their outputs on the training rows are computed once and stored.

A file FOLDER/SET.train.safetensors holds the tensor "outputs", fp32 (rows of the set, K): logits
for classes, or one real value (K = 1) on the scale of the labels. Row i belongs to row i of the set
(the doubled rows of a benchmark have rows of their own). The header identifies the data, the
classes and the teacher's weights, and records the cost. For a teacher that is a run, FOLDER is
outputs/CHECKPOINT/ in its run folder.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from metaseq_lm.core.batch import TokenBatch
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import check_folder, write_atomic
from metaseq_lm.core.output import show_progress
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.manifest import MANIFEST_FILE, fingerprint
from metaseq_lm.distributed import process_group
from metaseq_lm.runs import lineage_cost, manifests
from metaseq_lm.runs.facts import check_classes, labels_of
from metaseq_lm.runs.flops import FlopMeter
from metaseq_lm.runs.folder import read_results
from metaseq_lm.runs.lineage_cost import Costs
from metaseq_lm.runs.safe_load import check_header
from metaseq_lm.tasks.finetuning import Outputs, split_outputs
from metaseq_lm.training.parts import Parts
from metaseq_lm.training.restore import open_run

FORMAT = 3
SUFFIX = ".train.safetensors"
FOLDER = "outputs"
# Engine options that a teacher takes from the student; they do not change results.
_ENGINE = ("device", "micro_batch_size", "threads", "timeout", "retain_heap")
_PROGRESS_SECONDS = 10.0  # seconds between lines of progress


@dataclass(frozen=True)
class Teacher:
    """A checkpoint of this task, or a folder of outputs.

    Attributes:
        name: The path that the user gave.
        outputs: Folder of its outputs, which may not exist yet.
        labels: The classes of each set that it teaches, empty for real values; None for a folder of
            outputs, since its files have them.
        checkpoint: The checkpoint; None for a folder of outputs.
        weights: Hash of its weights; None for a folder of outputs.
    """

    name: str
    outputs: Path
    labels: Mapping[str, list[str] | None]
    checkpoint: Path | None = None
    weights: str | None = None

    def file(self, name: str) -> Path:
        """Return the file with its outputs on the set `name`."""
        return self.outputs / f"{name}{SUFFIX}"


def resolve(name: str) -> Teacher:
    """Return the teacher at a path: a run (best checkpoint, else the last), or a folder of outputs.

    Raises:
        UsageError: The run has another task, or is not finished.
        CheckpointError: The path is neither a run nor a folder of outputs.
    """
    folder = Path(name)
    stored = sorted(folder.glob(f"*{SUFFIX}"))
    if stored:
        return Teacher(name, folder, dict.fromkeys(f.name.removesuffix(SUFFIX) for f in stored))
    source = manifests.resolve(name, prefer="best")
    is_run = (folder / "checkpoints").is_dir()
    if is_run and (read_results(folder) or {}).get("status") != "finished":
        raise UsageError(
            f"task.teachers: the run {folder} is not finished, its best checkpoint may change; let "
            "it come to its end, or name one of its checkpoints"
        )
    manifest = manifests.read_manifest(source)
    config = manifest.get("config")
    task = config.get("task") if isinstance(config, dict) else None
    kind = task.get("_name") if isinstance(task, dict) else None
    if kind != "bam":
        raise UsageError(
            f"{name} is a run of task {str(kind)[:40]}; a teacher is a run of task bam (on one set "
            "or several), or a folder of its outputs"
        )
    outputs = source.parent.parent / FOLDER / source.name
    if source.parent.name != "checkpoints":
        # A checkpoint outside a run folder has its outputs inside itself.
        outputs = source / FOLDER
    weights = manifests.hash_of_weights(manifest)
    labels = labels_of(manifest.get("facts"), source)
    return Teacher(name, outputs, labels, source, weights)


def assign(names: Sequence[str], labels: Mapping[str, list[str]]) -> dict[str, Teacher]:
    """Return the teacher of each of the student's sets; `labels` are their classes.

    Raises UsageError unless each set has exactly one teacher with the same classes in the same
    order.
    """
    by_set: dict[str, Teacher] = {}
    for teacher in map(resolve, names):
        for name in teacher.labels:
            if name in by_set and name in labels:
                raise UsageError(
                    f"task.teachers: both {by_set[name].name} and {teacher.name} teach {name}; a "
                    "set has one teacher"
                )
            by_set[name] = teacher
    lacking = [name for name in labels if name not in by_set]
    if lacking:
        raise UsageError(
            f"task.teachers: none of {', '.join(names)} teaches {', '.join(lacking)} (they teach "
            f"{', '.join(sorted(by_set)) or 'nothing'}); name a run trained "
            "on each of task.labelled"
        )
    for name, classes in labels.items():
        teacher_classes = by_set[name].labels[name]
        if teacher_classes is not None:
            check_classes(by_set[name].name, name, teacher_classes, classes)
    return {name: by_set[name] for name in labels}


# ---------------------------------------------------------------- computing


def load_outputs(
    config: RunConfig,
    sets: Mapping[str, LabelledSet],
    teachers: Mapping[str, Teacher],
    dry_run: bool = False,
) -> tuple[dict[str, np.ndarray], Costs]:
    """Return the outputs, float32 (rows, K), of the teacher of each set, and their cost.

    All replicas compute missing outputs, the first replica stores them, and all read them back, so
    that all replicas and resumed runs use the same numbers. A `dry_run` opens the teachers but has
    zeros for missing outputs. Call on all replicas.

    Raises:
        MetaseqError: A stored file belongs to other rows or weights.
        Interrupted: A signal asked one of the replicas to stop.
    """
    missing: dict[str, list[str]] = {}
    for name, teacher in teachers.items():
        if teacher.checkpoint and not teacher.file(name).is_file():
            missing.setdefault(teacher.name, []).append(name)
    # Replicas may not see the same files on a shared disk, so the first one decides.
    for names in process_group.from_first(missing).values():
        teacher = teachers[names[0]]
        run = _open_teacher(config, teacher)
        for name in names:
            if dry_run:
                break
            outputs, spent = _compute_outputs(run, teacher, name)
            if process_group.rank() == 0:
                file = teacher.file(name)
                own_cost = {str(file.resolve()): spent}
                costs = lineage_cost.merge_costs(
                    [lineage_cost.cost_of_ancestors(str(teacher.checkpoint)), own_cost]
                )
                header = describe(Path(config.data) / name, sets[name], teacher.weights)
                header |= {"checkpoint": str(teacher.checkpoint), "cost": costs}
                store(file, outputs, header)
            # A collective call, for all to wait until the file is written.
            process_group.from_first(None)
        # The next teacher needs the memory of this one.
        del run
        gc.collect()
    by_set, costs_by_set = {}, []
    for name, teacher in teachers.items():
        data, file = sets[name], teacher.file(name)
        if dry_run and not file.is_file():
            by_set[name] = np.zeros((len(data), max(len(data.label_names), 1)), np.float32)
            continue
        expected = describe(Path(config.data) / name, data, teacher.weights)
        by_set[name], costs = read(file, expected)
        costs_by_set.append(costs)
    return by_set, lineage_cost.merge_costs(costs_by_set)


def _open_teacher(config: RunConfig, teacher: Teacher) -> Parts:
    """Return a teacher's run on the student's data, in full precision.

    Raises UsageError if DATA lacks a set of the teacher, since the teacher's model has all its
    heads.
    """
    lacking = [n for n in teacher.labels if not (Path(config.data) / n / MANIFEST_FILE).is_file()]
    if lacking:
        raise UsageError(
            f"the teacher {teacher.name} has heads for {', '.join(lacking)}, too, which are not in "
            f"{config.data}; preprocess them there, or give a folder of its outputs instead"
        )
    overrides = [f"engine.{key}={getattr(config.engine, key)}" for key in _ENGINE]
    precision = "fp64" if config.engine.precision == "fp64" else "fp32"
    overrides.append(f"engine.precision={precision}")
    return open_run(str(teacher.checkpoint), config.data, config.user_dir, overrides)


def _compute_outputs(
    run: Parts, teacher: Teacher, name: str
) -> tuple[np.ndarray, dict[str, float]]:
    """Return a teacher's outputs (rows, K) on a set's training rows without dropout, and the cost.

    Call on all replicas, as each computes its share of every batch. Raises Interrupted.
    """
    task: Any = run.task  # a BamTask, which imports this module
    meter, engine, model = FlopMeter(), run.engine, run.model
    started, shown = time.monotonic(), -math.inf
    n_rows = len(task.labelled(name, "train"))

    def forward(batch: TokenBatch) -> Outputs:
        return split_outputs(batch.samples, task.criterion.teacher_outputs(model, batch, name))

    local: Outputs = []
    model.eval()
    with engine.outside_updates():
        for number, batch in enumerate(task.one_pass(name, "train").one_epoch(run.shard)):
            process_group.check_peers()
            process_group.stop_if_signalled(
                f"while the outputs of {teacher.name} were computed; those of whole sets are stored"
            )
            now = time.monotonic()
            if process_group.rank() == 0 and now - shown >= _PROGRESS_SECONDS:
                done = f"{number * task.config.batch_size:,} of {n_rows:,} rows"
                show_progress(f"{teacher.name}: its outputs on {name}: {done}")
                shown = now
            placed = engine.to_device(batch)
            with meter.count(placed):
                local.extend(chain.from_iterable(engine.map(forward, placed)))
    flops = sum(process_group.gather_objects(meter.total))
    rows = list(chain.from_iterable(process_group.gather_objects(local)))
    # NaN, so that `store` refuses a row that was not computed.
    outputs = np.full((n_rows, task.outputs[name]), np.nan, np.float32)
    outputs[[sample for sample, _ in rows]] = [values for _, values in rows]
    cost = {"seconds": time.monotonic() - started, "flops": flops, "updates": 0, "words": 0}
    return outputs, cost


# ---------------------------------------------------------------- storing


def describe(folder: Path, data: LabelledSet, weights: str | None) -> dict[str, Any]:
    """Return the header that identifies outputs: a set's data and rows, and a teacher's weights."""
    header = {
        "format": FORMAT,
        "set": folder.name,
        "data": fingerprint(folder, data.split),
        "rows": len(data),
        "labels": list(data.label_names),
    }
    return header if weights is None else header | {"weights": weights}


def store(path: Path, outputs: np.ndarray, header: dict[str, Any]) -> None:
    """Write outputs and their header atomically, unless another run has written them meanwhile."""
    outputs = np.ascontiguousarray(outputs, np.float32)
    if not np.isfinite(outputs).all():
        raise MetaseqError(
            f"the teacher {header.get('checkpoint')} has outputs on {header['set']} that are not "
            "finite; choose another teacher"
        )
    header = header | {"sha256": hashlib.sha256(outputs.tobytes()).hexdigest()}
    content = safetensors.numpy.save({"outputs": outputs}, {"about": json.dumps(header)})
    check_folder(path.parent, path.parents[2])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            if not path.is_file():
                write_atomic(path, content)
        finally:
            os.close(folder)
    except OSError as error:
        raise MetaseqError(
            f"{path}: {error.strerror}; the outputs of a teacher are stored in its run folder. "
            "Make it writable, or copy the run to where you can write"
        ) from error


def weights_hash(teacher: Teacher, name: str) -> str | None:
    """Return the hash of the weights behind a teacher's outputs on a set; None if unknown."""
    if teacher.weights is not None:
        return teacher.weights
    return _read_unchecked(teacher.file(name))[1].get("weights")


def _read_unchecked(path: Path) -> tuple[np.ndarray, dict[str, Any], Costs]:
    """Return stored outputs, their header and their cost; MetaseqError if the file is damaged."""
    try:
        content = path.read_bytes()
        check_header(content)
        outputs = safetensors.numpy.load(content)["outputs"]
        file_header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        header = json.loads(file_header["__metadata__"]["about"])
        if outputs.dtype != np.float32 or outputs.ndim != 2:
            raise ValueError(f"a table of {outputs.dtype} with {outputs.ndim} dimensions")
        if header["sha256"] != hashlib.sha256(outputs.tobytes()).hexdigest():
            raise ValueError("its checksum differs")
        costs = lineage_cost.check_costs(header.get("cost"))
    except OSError as error:
        raise MetaseqError(f"{path}: {error.strerror}") from error
    except Exception as error:  # the library raises many kinds of errors for a damaged file
        reason = str(error).split("\n")[0]
        raise MetaseqError(
            f"{path}: not readable as a teacher's outputs: {reason[:200]}; delete it, a run of its "
            "teacher's student makes it anew"
        ) from error
    return outputs, header, costs


def read(path: Path, expected: dict[str, Any]) -> tuple[np.ndarray, Costs]:
    """Return stored outputs, float32 (rows, K), and their cost.

    Raises MetaseqError if the file is damaged, or its header differs from `expected`.
    """
    outputs, header, costs = _read_unchecked(path)
    differing = [
        f"{key}: {str(header.get(key))[:60]} there, {str(value)[:60]} here"
        for key, value in expected.items()
        if header.get(key) != value
    ]
    shape = (expected["rows"], max(len(expected["labels"]), 1))
    if not differing and outputs.shape != shape:
        differing = [f"a table of {outputs.shape}, not of {shape}"]
    if differing:
        raise MetaseqError(
            f"{path}: these outputs are of other rows, classes or weights than are used now "
            f"({'; '.join(differing)}); delete the file to have it computed anew, or give the data "
            "and the teacher that it was made with"
        )
    return outputs, costs
