"""Fine-tuning one encoder on several labelled sets at once, with or without teachers.

A list of one set is ordinary fine-tuning (the paper's "Single"). Shapes: N rows of a set, K
classes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Batch, Logs
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.labelled.sentence_rows import SentenceRows
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.streams import Sequential, Stream
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.engine.engine import Engine
from metaseq_lm.methods.bam import teachers
from metaseq_lm.methods.bam.criterion import LOSS, BamDistill
from metaseq_lm.methods.bam.data import MixedEpochs, MixedRows, copies_and_weights, rows_per_epoch
from metaseq_lm.methods.bam.model import MultiTaskModel
from metaseq_lm.methods.bam.options import BamConfig
from metaseq_lm.methods.bam.teachers import Teacher
from metaseq_lm.models.transformer.classifiers import POOLER, RANGES, SETS, SetHeads, set_of
from metaseq_lm.runs.facts import check_classes, labels_of
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
    sentence_rows,
)
from metaseq_lm.tasks.masked_lm import scored_rows

_FORMS = ("single", "pair")
# The paper's score of a set is the first of these that it has: for CoLA, for real values, for all
# others.
_PAPER_METRICS = ("matthews", "spearman", "accuracy")
# Added to the random streams of a student's new heads and row order. Without it a student would
# start exactly like a teacher of the same seed.
_STUDENT = "taught"


class BamTask(Task):
    """An encoder with a head for each set of sentences or pairs, with classes or real values.

    The score of a validation is the mean of the sets' scores. The pooler comes from init_from if
    that has one (BERT's pre-training, or fine-tuning).
    """

    exported = True
    criterion: BamDistill
    criterions = (BamDistill,)

    def __init__(self, config: BamConfig, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        options = self.config
        self.names = different_sets(options.labelled)
        if options.copies_over and options.sampling != "legacy_copies":
            raise UsageError("task.copies_over works with task.sampling=legacy_copies only")
        self.vocabulary = Vocabulary.load(self.data / "dict.txt")
        self.fresh = () if options.keep_head else ("heads.", RANGES)
        self._splits: dict[tuple[str, str], SentenceRows] = {}
        self._teachers_cost: Costs = None

    @classmethod
    def prepare(cls, config: RunConfig) -> RunConfig:
        # The run may be resumed from another working folder.
        paths = [os.path.abspath(path) if path else path for path in config.task.teachers]
        options = replace(config.task, teachers=paths)
        config = replace(config, task=options)
        # With trainer.max_flops the number of updates is not known yet; any number will do here.
        countable = config if config.trainer.max_update else with_updates(config, 1)
        task = cls(options, countable)
        results = read_results(Path(config.save_dir)) if config.save_dir else None
        if results is None or results["status"] != "finished":
            # Wrong teachers are rejected before anything is written.
            _ = task.teachers
        if not (options.epochs or options.validate_epochs):
            return config
        rows = sum(task.mixing()[0])
        return with_epochs(
            config, rows, options.batch_size, options.epochs, options.validate_epochs
        )

    @cached_property
    def labels(self) -> dict[str, list[str]]:
        """The classes of each set, in the order of its head's outputs; empty for real values."""
        manifests = {name: Manifest.load(self.data / name) for name in self.names}
        return {name: list(m.details.get("labels", ())) for name, m in manifests.items()}

    @cached_property
    def teachers(self) -> dict[str, Teacher]:
        """The teacher of each set; empty without teachers."""
        names = self.config.teachers
        return teachers.assign(names, self.labels) if names else {}

    def facts(self) -> dict[str, Any]:
        """Return the classes of each set, and the hash of the weights of its teacher."""
        hashes = {name: teachers.weights_hash(t, name) for name, t in self.teachers.items()}
        return {"labels": self.labels, "teachers": hashes}

    def check_facts(self, facts: dict[str, Any], source: object) -> None:
        """Raise UsageError unless init_from has the heads to keep, with the same class order."""
        if not self.config.keep_head:
            return
        labels = labels_of(facts, source)
        for name, classes in self.labels.items():
            if name not in labels:
                raise UsageError(
                    f"task.keep_head: {source} has no head for {name}; it has heads for "
                    f"{', '.join(sorted(labels))}"
                )
            check_classes(source, name, labels[name], classes)

    def further_costs(self) -> Costs:
        """Return the cost of the teachers and of computing their outputs."""
        return self._teachers_cost if self.config.teachers else {}

    # ---------------------------------------------------------------- data

    def labelled(self, name: str, split: str) -> SentenceRows:
        """Return the rows of a split of a set, from a cache."""
        if (name, split) not in self._splits:
            folder, max_tokens = self.data / name, self.config.tokens_per_sample
            rows = sentence_rows(folder, split, self.vocabulary, max_tokens)
            if rows.data.form not in _FORMS:
                raise UsageError(
                    f"{folder}: task bam needs single texts or pairs; this set has the form "
                    f"{rows.data.form}"
                )
            self._splits[name, split] = rows
        return self._splits[name, split]

    def mixing(self) -> tuple[list[int], dict[str, float]]:
        """Return the number of rows of each set in an epoch, and the weight of its losses.

        A single set has each row once and the weight 1, whatever the sampling.
        """
        options = self.config
        sizes = {name: len(self.labelled(name, "train")) for name in self.names}
        empty = [name for name, size in sizes.items() if not size]
        if empty:
            raise MetaseqError(f"{self.data / empty[0]}: 'train' has no rows")
        if len(sizes) == 1 or options.sampling == "sampler":
            counts = rows_per_epoch(list(sizes.values()), options.exponent)
            return counts, dict.fromkeys(sizes, 1.0)
        others = {n: len(LabelledSet(self.data / n, "train")) for n in options.copies_over}
        copies, weights = copies_and_weights(others | sizes, options.exponent)
        return [copies[name] * size for name, size in sizes.items()], weights

    def build_streams(self, split: str) -> dict[str, Stream]:
        """Return the mixed stream of "train", or one pass over each set that has the split.

        For the split used in validation every set must have it. With teachers, "train" must be
        called on all replicas.
        """
        if split == "train":
            return {split: self._train_stream()}
        names = self.names
        if split != self.run_config.trainer.valid_split:
            names = [n for n in names if split in Manifest.load(self.data / n).splits]
        if not names:
            raise MetaseqError(
                f"{self.data}: none of {', '.join(self.names)} has a split '{split}'"
            )
        return {f"{split}/{name}": self.one_pass(name, split) for name in names}

    def _train_stream(self) -> Stream:
        options, seed = self.config, self.run_config.seed
        rows = {name: self.labelled(name, "train") for name in self.names}
        sets = {name: part.data for name, part in rows.items()}
        for data in sets.values():
            if data.labels is None:
                raise MetaseqError(f"{data.folder}: 'train' has no labels to train on")
        outputs, stream_key = None, "train"
        if self.teachers:
            outputs, self._teachers_cost = teachers.load_outputs(
                self.run_config, sets, self.teachers, self.dry_run
            )
            stream_key = f"{_STUDENT} by {self.facts()['teachers']}"
        counts, weights = self.mixing()
        mixed = MixedRows(rows, weights, outputs)
        lengths = mixed.lengths if options.group_by_length else None
        sizes = [len(part) for part in rows.values()]
        order = MixedEpochs(sizes, counts, options.batch_size, seed, stream_key, lengths)
        return Stream("train", order, mixed.batch, seed, mixed.lengths)

    def cut_rows(self, split: str) -> dict[str, np.ndarray]:
        """Return which rows of each set are truncated."""
        names = [name for name in self.names if split in Manifest.load(self.data / name).splits]
        return {name: self.labelled(name, split).is_cut for name in names}

    def one_pass(self, name: str, split: str) -> Stream:
        """Return one pass over a split of a set."""
        rows, options = self.labelled(name, split), self.config
        order = Sequential(scored_rows(self, split, len(rows)), options.batch_size)
        return Stream(f"{split}/{name}", order, rows.batch, self.run_config.seed, rows.lengths)

    # ---------------------------------------------------------------- model

    @cached_property
    def outputs(self) -> dict[str, int]:
        """The number of outputs of each set's head: its classes, or 1 for real values."""
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
            torch.manual_seed(random_streams.key(self.run_config.seed, _STUDENT))
        heads = SetHeads(sizes.width, self.outputs, options.head_dropout, options.pooled)
        ranges = {n: label_range(self.data / n) for n, k in self.outputs.items() if k == 1}
        for name, (minimum, _) in ranges.items():
            if minimum < 0 and getattr(self.run_config.criterion, "sigmoid", False):
                raise UsageError(
                    f"criterion.sigmoid: {self.data / name} has labels from {minimum:g} on; "
                    "divided by the largest one they would span more than the 0 to 1 "
                    "of a sigmoid, so leave it out"
                )
        return MultiTaskModel(sizes, len(vocabulary), vocabulary.pad, heads, ranges)

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Load the encoder, the pooler if there is one, and with task.keep_head the sets' heads.

        A kept head keeps the range of labels that it was trained on.
        """
        chosen = encoder_weights(weights, self.run_config)
        for name, weight in weights.items():
            prefix, pooler, suffix = name.partition("pooler.")
            if self.config.pooled and pooler and prefix.startswith("heads."):
                chosen[POOLER + suffix] = weight
            labelled_set = set_of(name, SETS) or set_of(name, RANGES)
            if self.config.keep_head and labelled_set in self.names:
                chosen[name] = weight
        return chosen

    # ---------------------------------------------------------------- updates and scores

    def update(self, engine: Engine, model: nn.Module, batches: Batches) -> Logs:
        """Make the default update with the current weight of the gold labels."""
        # A tensor, because torch.compile would recompile for each number.
        # The weight follows the optimizer's count of steps, so a resumed run continues it.
        number = self.criterion.gold_share(engine.optimizers["main"].updates)
        share = torch.full((), number, dtype=torch.float64, device=engine.device)

        def with_share(batch: Sequence[Batch]) -> list[Batch]:
            return [micro.replace(gold_share=share) for micro in batch]

        annealed = {name: [*map(with_share, stream)] for name, stream in batches.items()}
        return super().update(engine, model, annealed)

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return the mean score and loss of the sets, then each set's score, metrics and loss.

        Sets without labels have no metrics. Each row has the name of its set as "set".
        """
        metrics_by_set: dict[str, Logs] = {}
        rows_by_set: dict[str, Callable[[], Sequence[dict[str, Any]]]] = {}
        for key, batches in passes.items():
            split, _, name = key.partition("/")
            score = partial(self.criterion.evaluated, model, name=name)
            data = self.labelled(name, split).data
            metrics, rows_by_set[name] = labelled_scores(engine, data, batches, score)
            if metrics:
                # It equals "loss".
                del metrics[LOSS]
                metrics_by_set[name] = _with_score(metrics)

        def rows() -> list[dict[str, Any]]:
            named: list[dict[str, Any]] = []
            for name, make in rows_by_set.items():
                named += [{"set": name, **row} for row in make()]
            return named

        return Scored(_summary(metrics_by_set), rows)

    def submissions(self, split: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Return the leaderboard file of each set that belongs to a benchmark."""
        files: dict[str, str] = {}
        for name, set_rows in _by_set(rows).items():
            new = leaderboard_files(self.labelled(name, split).data, split, set_rows)
            for file, text in new.items():
                # Two sets made from one benchmark have files of the same name.
                files[f"{name}.{file}" if file in files else file] = text
        return files

    def ensemble(
        self, split: str, members: Sequence[Sequence[dict[str, Any]]]
    ) -> tuple[Logs, Sequence[dict[str, Any]]]:
        """Return metrics and predictions, by set, of the runs' mean probabilities or values."""
        metrics_by_set: dict[str, Logs] = {}
        rows: list[dict[str, Any]] = []
        members_by_set = [_by_set(member) for member in members]
        for name in members_by_set[0]:
            data = self.labelled(name, split).data
            metrics, set_rows = ensemble_of(data, [m.get(name, []) for m in members_by_set])
            rows += [{"set": name, **row} for row in set_rows]
            if metrics:
                metrics_by_set[name] = _with_score(metrics)
        return _summary(metrics_by_set), rows


def _with_score(metrics: Logs) -> Logs:
    """Return the metrics of a set with the paper's as "score", or else the official score."""
    paper = [metrics[name] for name in _PAPER_METRICS if name in metrics]
    return metrics | {"score": paper[0]} if paper else metrics


def _summary(metrics_by_set: Mapping[str, Logs]) -> Logs:
    """Return the mean "score" and "loss" of the sets if all have them, then each set's metrics."""
    result: dict[str, Any] = {}
    for kind in ("score", "loss"):
        values = [metrics[kind] for metrics in metrics_by_set.values() if kind in metrics]
        if values and len(values) == len(metrics_by_set):
            result[kind] = float(np.mean(values))
    for name, metrics in metrics_by_set.items():
        result |= {f"{name}_{key}": value for key, value in metrics.items()}
    return result


def _by_set(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["set"], []).append(row)
    return groups
