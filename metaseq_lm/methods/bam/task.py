"""Fine-tuning one encoder on several labelled sets at once, with or without teachers.

A list of one set is ordinary fine-tuning (the paper's "Single"). Shapes: N rows of a set, K classes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import nn

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Logs
from metaseq_lm.core.config import option, typed_options
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import register_task
from metaseq_lm.data.labelled.sentence_rows import SentenceRows
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.manifest import Manifest, require_tokenizer
from metaseq_lm.data.streams import Sequential, Stream
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.engine.engine import Engine
from metaseq_lm.methods.bam import sampling
from metaseq_lm.methods.bam import teachers as teaching
from metaseq_lm.methods.bam.criterion import LOSS, BamDistill
from metaseq_lm.methods.bam.data import MixedRows
from metaseq_lm.methods.bam.model import RANGES, MultiTaskModel
from metaseq_lm.methods.bam.teachers import Teacher
from metaseq_lm.models.transformer.labelled_sets import POOLER, SETS, SetHeads, set_of
from metaseq_lm.runs import checkpoint
from metaseq_lm.runs.folder import read_results
from metaseq_lm.runs.lineage_cost import Costs
from metaseq_lm.tasks import Batches, Passes, Scored, Task, with_epochs, with_updates
from metaseq_lm.tasks.finetuning import (
    different_sets,
    encoder_sizes,
    encoder_weights,
    ensemble_of,
    label_range,
    labelled_scores,
    leaderboard_files,
)
from metaseq_lm.tasks.masked_lm import scored_rows

FORMS = ("single", "pair")
# Of task.score=dev, the first of these that a set has: CoLA's, that of real values, all others'.
DEV = ("matthews", "spearman", "accuracy")
MEANS = ("score", "loss")  # over sets
# What a student draws its first heads by, and with its teachers' weights the order of its rows: with those of
# its teacher, whose seed it has in a sweep, it would be its twin.
TAUGHT = "taught"


@dataclass
class BamConfig:
    """Which labelled sets and teachers, how sets are mixed, and the heads (Clark et al. 2019)."""

    labelled: list[str] = option([], "labelled sets in DATA, each with a head")
    # Movable: which teachers they are is a fact of the checkpoints, wherever they lie.
    teachers: list[str] = option(
        [],
        "runs of this task, or folders of their outputs; each set needs one",
        source="teachers",
        movable=True,
    )
    batch_size: int = option(32, "rows of a batch, of all sets mixed", at_least=1)
    epochs: float = option(
        0.0, "sets trainer.max_update from the training sets (0 = it is given)", at_least=0
    )
    validate_epochs: float = option(
        0.0, "epochs between validations (0 = trainer.validate_interval_updates counts)", at_least=0
    )
    sampling: str = option(
        "sampler",
        "sampler: a fixed number of rows of each set in an epoch, its share; legacy_copies: copies "
        "and loss weights (the code)",
        choices=("sampler", "legacy_copies"),
    )
    exponent: float = option(
        0.75, "a set is seen in proportion to its size to this power", at_least=0, at_most=1
    )
    copies_over: list[str] = option(
        [], "other sets of DATA that count in legacy_copies' copies and weights"
    )
    tokens_per_sample: int = option(128, "longest row, with its special tokens; others are cut")
    group_by_length: bool = option(
        False,
        "training batches of rows of about the same length, which saves time on padding; sets of short "
        "rows and sets of long ones then hardly share a batch",
    )
    pooled: bool = option(True, "BERT's tanh layer on [CLS], shared by all heads")
    head_dropout: float = option(0.1, "dropout before the linear layers", at_least=0, below=1)
    keep_head: bool = option(False, "start from the heads of init_from too, not from fresh ones")
    score: str = option(
        "dev",
        "of each set in the average: dev (Matthews, Spearman, else accuracy) or official",
        choices=("dev", "official"),
    )
    valid_size: int = option(0, "rows of each validation split that are used (0 = all)", at_least=0)


@register_task("bam", dataclass=BamConfig)
class BamTask(Task):
    """An encoder with a head for each set of sentences or pairs, with classes or real values.

    The score of a validation is the mean of the sets' scores. Heads are called as their sets, and
    the pooler is taken from a model that has one: BERT's pre-training, or fine-tuning.
    """

    criterion: BamDistill
    criterions = (BamDistill,)

    def __init__(self, config: BamConfig, run_config: DictConfig) -> None:
        super().__init__(config, run_config)
        options = self.config
        self.names = different_sets(options.labelled)
        if options.copies_over and options.sampling != "legacy_copies":
            raise UsageError("task.copies_over counts with task.sampling=legacy_copies only")
        self.vocabulary = Vocabulary.load(self.data / "dict.txt")
        self.fresh = () if options.keep_head else ("heads.", RANGES)
        self._splits: dict[tuple[str, str], SentenceRows] = {}
        self._teachers_cost: Costs = None

    @classmethod
    def prepare(cls, config: DictConfig) -> DictConfig:
        config = config.copy()
        options = config.task
        # The run may go on from another folder.
        options.teachers = [os.path.abspath(path) if path else path for path in options.teachers]
        # How many updates trainer.max_flops pays for is not known yet.
        priced = config if config.trainer.max_update else with_updates(config, 1)
        task = cls(typed_options("task", config.task), priced)
        done = read_results(Path(config.save_dir)) if config.save_dir else None
        if done is None or done["status"] != "finished":
            _ = task.teachers  # so that what is wrong with them is said before anything is written
        if not (options.epochs or options.validate_epochs):
            return config
        rows = sum(task.mixing()[0])
        return with_epochs(
            config, rows, options.batch_size, options.epochs, options.validate_epochs
        )

    @cached_property
    def labels(self) -> dict[str, list[str]]:
        """The classes of each set in the order of the outputs of its head; none for real values."""
        manifests = {name: Manifest.load(self.data / name) for name in self.names}
        return {name: list(m.details.get("labels", ())) for name, m in manifests.items()}

    @cached_property
    def teachers(self) -> dict[str, Teacher]:
        """The teacher of each set, or nothing."""
        named = self.config.teachers
        return teaching.assigned(named, self.labels) if named else {}

    def facts(self) -> dict[str, Any]:
        """Return the classes of each set, and the weights of its teacher, by their hash."""
        weights = {name: teaching.weights_of(t, name) for name, t in self.teachers.items()}
        return {"labels": self.labels, "teachers": weights}

    def check_facts(self, facts: dict[str, Any], source: object) -> None:
        """Raise UsageError if kept heads are not there, or for other classes or another order."""
        if not self.config.keep_head:
            return
        labels = checkpoint.labels_of(facts, source)
        for name, own in self.labels.items():
            if name not in labels:
                raise UsageError(
                    f"task.keep_head: {source} has no head for {name}; it has heads for "
                    f"{', '.join(sorted(labels))}"
                )
            checkpoint.check_classes(source, name, labels[name], own)

    def further_costs(self) -> Costs:
        """Return what the teachers have cost, and computing their outputs."""
        return self._teachers_cost if self.config.teachers else {}

    # ---------------------------------------------------------------- data

    def labelled(self, name: str, split: str) -> SentenceRows:
        """Return the rows of a split of a set, read once."""
        if (name, split) not in self._splits:
            data = LabelledSet(self.data / name, split)
            require_tokenizer(data.folder, data.tokenizer_hash)
            if data.form not in FORMS:
                raise UsageError(
                    f"{data.folder}: task bam needs single texts or pairs; this set has the form "
                    f"{data.form}"
                )
            room = self.config.tokens_per_sample
            self._splits[name, split] = SentenceRows(data, self.vocabulary, room)
        return self._splits[name, split]

    def mixing(self) -> tuple[list[int], dict[str, float]]:
        """Return how many rows of each set an epoch has, and the weight of each set's losses.

        A set alone has its rows once and the weight 1, whatever the sampling.
        """
        options = self.config
        sizes = {name: len(self.labelled(name, "train")) for name in self.names}
        empty = [name for name, size in sizes.items() if not size]
        if empty:
            raise MetaseqError(f"{self.data / empty[0]}: 'train' has no rows")
        if len(sizes) == 1 or options.sampling == "sampler":
            counts = sampling.draws(list(sizes.values()), options.exponent)
            return counts, dict.fromkeys(sizes, 1.0)
        others = {n: len(LabelledSet(self.data / n, "train")) for n in options.copies_over}
        copies, weights = sampling.copies_and_weights(others | sizes, options.exponent)
        return [copies[name] * size for name, size in sizes.items()], weights

    def build_streams(self, split: str) -> dict[str, Stream]:
        """Return the mixed stream of "train", or a pass over each set that has the split.

        The split that is validated on all of them must have. With teachers that of "train" is a
        call of all replicas.
        """
        if split == "train":
            return {split: self._mixed()}
        names = self.names
        if split != self.run_config.trainer.valid_split:
            names = [n for n in names if split in Manifest.load(self.data / n).splits]
        if not names:
            raise MetaseqError(
                f"{self.data}: none of {', '.join(self.names)} has a split '{split}'"
            )
        return {f"{split}/{name}": self.once(name, split) for name in names}

    def _mixed(self) -> Stream:
        options, seed = self.config, self.run_config.seed
        rows = {name: self.labelled(name, "train") for name in self.names}
        for found in rows.values():
            if found.data.labels is None:
                raise MetaseqError(f"{found.data.folder}: 'train' has no labels to train on")
        outputs = self._outputs_of_teachers({n: found.data for n, found in rows.items()})
        counts, weights = self.mixing()
        sizes = [len(found) for found in rows.values()]
        name = f"{TAUGHT} by {self.facts()['teachers']}" if options.teachers else "train"
        mixed = MixedRows(rows, weights, outputs)
        lengths = mixed.lengths if options.group_by_length else None
        order = sampling.MixedEpochs(sizes, counts, options.batch_size, seed, name, lengths)
        return Stream("train", order, mixed.batch, seed, mixed.lengths)

    def _outputs_of_teachers(self, data: Mapping[str, LabelledSet]) -> dict[str, np.ndarray] | None:
        if not self.teachers:
            return None
        found, self._teachers_cost = teaching.outputs_of(
            self.run_config, data, self.teachers, self.dry_run
        )
        return found

    def once(self, name: str, split: str) -> Stream:
        """Return one pass over a split of a set."""
        rows, options = self.labelled(name, split), self.config
        order = Sequential(scored_rows(self, split, len(rows)), options.batch_size)
        return Stream(f"{split}/{name}", order, rows.batch, self.run_config.seed, rows.lengths)

    # ---------------------------------------------------------------- model

    @cached_property
    def outputs(self) -> dict[str, int]:
        """How many outputs the head of each set has: its classes, or 1 for real values."""
        counts = {}
        for name in self.names:
            split = sorted(Manifest.load(self.data / name).splits)[0]
            data = self.labelled(name, split).data
            if not data.regression and len(data.label_names) < 2:
                raise UsageError(f"{data.folder}: a set with classes needs at least two")
            counts[name] = 1 if data.regression else len(data.label_names)
        return counts

    def build_model(self) -> nn.Module:
        sizes, options, vocabulary = encoder_sizes(self.run_config), self.config, self.vocabulary
        if options.teachers:
            torch.manual_seed(random_streams.key(self.run_config.seed, TAUGHT))
        heads = SetHeads(sizes.width, self.outputs, options.head_dropout, options.pooled)
        real = [name for name, count in self.outputs.items() if count == 1]
        ranges = {name: label_range(self.data / name) for name in real}
        for name, (least, _) in ranges.items():
            if least < 0 and self.run_config.criterion.get("sigmoid"):
                raise UsageError(
                    f"criterion.sigmoid: {self.data / name} has labels from {least:g} on; divided by the "
                    "largest one they would span more than the 0 to 1 of a sigmoid, so leave it out"
                )
        return MultiTaskModel(sizes, len(vocabulary), vocabulary.pad, heads, ranges)

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Take the encoder, the pooler if there is one, and with task.keep_head the sets' heads.

        With a head comes the range of its labels, whatever that of DATA is.
        """
        chosen = encoder_weights(weights, self.run_config)
        for name, weight in weights.items():
            before, pooler, end = name.partition("pooler.")
            if self.config.pooled and pooler and before.startswith("heads."):
                chosen[POOLER + end] = weight
            own = set_of(name, SETS) or set_of(name, RANGES)
            if self.config.keep_head and own in self.names:
                chosen[name] = weight
        return chosen

    # ---------------------------------------------------------------- updates and scores

    def update(self, engine: Engine, model: nn.Module, batches: Batches) -> Logs:
        """Do the default update, with the share of the gold labels that is due.

        It follows the steps taken, which a checkpoint has: a resumed run goes on with it.
        """
        share = self.criterion.gold_share(engine.optimizers["main"].updates)
        shared = {
            name: [[micro.replace(gold_share=share) for micro in batch] for batch in stream]
            for name, stream in batches.items()
        }
        return super().update(engine, model, shared)

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return the mean score and loss of the sets, then each set's score, metrics and loss.

        No metrics of sets without labels; rows of all sets, with the set's name as "set".
        """
        every: dict[str, Logs] = {}
        makers: dict[str, Callable[[], Sequence[dict[str, Any]]]] = {}
        for key, batches in passes.items():
            split, _, name = key.partition("/")
            judge = partial(self.criterion.evaluated, model, name=name)
            data = self.labelled(name, split).data
            metrics, makers[name] = labelled_scores(engine, data, batches, judge)
            if metrics:
                every[name] = metrics | {"score": self._score(metrics)}
                del every[name][LOSS]

        def rows() -> list[dict[str, Any]]:
            return [{"set": name, **row} for name, made in makers.items() for row in made()]

        return Scored(summary(every), rows)

    def _score(self, metrics: Logs) -> float:
        """Return the score of a set; where there is none of DEV it is the official one (MultiRC)."""
        chosen = [metrics[name] for name in DEV if name in metrics]
        score: float = chosen[0] if chosen and self.config.score == "dev" else metrics["score"]
        return score

    def submissions(self, split: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Return the leaderboard file of each set that is of a benchmark, for a split to be sent in."""
        files: dict[str, str] = {}
        for name, own in by_set(rows).items():
            found = leaderboard_files(self.labelled(name, split).data, split, own)
            # Two sets made of one benchmark's files have files of the same name.
            files |= {f"{name}.{file}" if file in files else file: t for file, t in found.items()}
        return files

    def ensemble(
        self, split: str, members: Sequence[Sequence[dict[str, Any]]]
    ) -> tuple[Logs, Sequence[dict[str, Any]]]:
        """Return each set's metrics and predictions of the mean of the runs' probabilities (values)."""
        every: dict[str, Logs] = {}
        rows: list[dict[str, Any]] = []
        parts = [by_set(member) for member in members]
        for name in parts[0]:
            data = self.labelled(name, split).data
            metrics, found = ensemble_of(data, [part.get(name, []) for part in parts])
            rows += [{"set": name, **row} for row in found]
            if metrics:
                every[name] = metrics | {"score": self._score(metrics)}
        return summary(every), rows


def summary(every: Mapping[str, Logs]) -> Logs:
    """Return the means over the sets of what MEANS names, then what is known of each set."""
    kinds = [kind for kind in MEANS if all(kind in found for found in every.values())]
    means = {kind: float(np.mean([f[kind] for f in every.values()])) for kind in kinds if every}
    return means | {f"{name}_{k}": v for name, found in every.items() for k, v in found.items()}


def by_set(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return prediction rows by the labelled set that they are of."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["set"], []).append(row)
    return found
