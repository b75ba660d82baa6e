"""Helpers of BAM's tests: three small sets with easy rules, tiny models, whole runs."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import real_runs
import sentence_sets
import torch
from torch import Tensor

from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.loading import load_config
from metaseq_lm.distributed import process_group
from metaseq_lm.methods.bam import teachers
from metaseq_lm.training.parts import Parts, build_parts, prepare_config
from metaseq_lm.training.restore import initialise_from
from metaseq_lm.training.run import TrainingRun

SETS = {"words": ("single", 96), "few": ("pair", 24), "values": ("regression", 40)}
NAMES = tuple(SETS)
OPTIONS = [
    "task=bam",
    "criterion=bam_distill",
    "task.batch_size=16",
    "task.tokens_per_sample=24",
    "model.encoder_layers=1",
    "model.encoder_embed_dim=16",
    "model.encoder_ffn_embed_dim=32",
    "model.encoder_attention_heads=2",
    "model.max_positions=32",
    "model.segments=2",
    "optimizer.lr=0.01",
    "schedule=constant",
    "trainer.best_checkpoint_metric=score",
    "trainer.maximize_best_checkpoint_metric=true",
    "trainer.log_interval=1",
    "trainer.max_update=4",
    "engine.device=cpu",
    "engine.threads=1",
    "engine.tensorboard=false",
]
ALL = "task.labelled=[words,few,values]"
CALM = ["engine.precision=fp64", "optimizer.lr=0.002", "optimizer.eps=1e-4"]


def make_data(place: Path) -> Path:
    """Write a data folder with the sets."""
    sentence_sets.write_corpus(place)
    for number, (name, (form, rows)) in enumerate(SETS.items()):
        sentence_sets.learnable(place / name, form, rows, seed=number)
    return place


def configure(data: Path, save: Path, *more: str) -> RunConfig:
    """Return the configuration of a run on the three sets; `more` wins."""
    return load_config([*OPTIONS, ALL, f"data={data}", f"save_dir={save}", *more])


def train(data: Path, save: Path, *more: str) -> TrainingRun:
    """Train a run and return it."""
    run = TrainingRun(configure(data, save, *more))
    run.train()
    return run


def dry(data: Path, *more: str) -> Parts:
    """Return a run that writes nothing."""
    config = prepare_config(configure(data, Path("nowhere"), *more))
    parts = build_parts(config, dry_run=True)
    if config.init_from:
        initialise_from(parts, config.init_from)
    return parts


def weights(run: TrainingRun | Parts) -> dict[str, Tensor]:
    """Return a copy of a run's weights."""
    return {name: w.clone() for name, w in run.model.state_dict().items()}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest absolute difference between two sets of weights."""
    assert one.keys() == other.keys()
    return max((w - other[n]).abs().max().item() for n, w in one.items())


def logged(save: Path, kind: str = "train") -> list[dict]:
    """Return the lines of one kind in a run's log."""
    lines = [json.loads(line) for line in (save / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def teacher(place: Path, data: Path, *names: str, more: Sequence[str] = ()) -> Path:
    """Train a teacher of `names` for two updates, and return its run folder."""
    save = place / f"teacher_{'_'.join(names)}"
    labelled = f"task.labelled=[{','.join(names)}]"
    train(data, save, labelled, "trainer.max_update=2", "seed=5", *more)
    return save


def given(teacher_runs: list[Path]) -> str:
    """Return the option that names teachers."""
    return f"task.teachers=[{','.join(map(str, teacher_runs))}]"


def stored(teacher_runs: list[Path]) -> dict[str, Path]:
    """Return the files of outputs of teachers, by set."""
    files = [file for run in teacher_runs for file in run.glob("outputs/*/*")]
    return {file.name.partition(".")[0]: file for file in files}


def copied(teacher_runs: list[Path], place: Path) -> list[Path]:
    """Copy runs of teachers without outputs, which students of other tests may have stored."""
    without = shutil.ignore_patterns(teachers.FOLDER)
    return [
        Path(shutil.copytree(run, place / run.name, symlinks=True, ignore=without))
        for run in teacher_runs
    ]


def rng_batch(draw: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """Return random numbers in float64."""
    return torch.from_numpy(draw.normal(size=shape))


def on_two_processes(data: Path, out: Path, *more: str) -> list[dict[str, Tensor]]:
    """Train a student on two processes, and return the weights of each."""
    real_runs.on_replicas(2, train_replica, str(data), str(out), *more)
    return [torch.load(out / f"weights.{r}.pt", weights_only=True) for r in range(2)]


def train_replica(data: str, out: str, *more: str) -> None:
    """As one of several replicas, train a student; replica r saves OUT/weights.r.pt."""
    run = train(Path(data), Path(out) / "run", *more)
    torch.save(weights(run), Path(out) / f"weights.{process_group.rank()}.pt")
    process_group.finish()
