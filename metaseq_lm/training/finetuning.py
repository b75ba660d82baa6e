"""Fine-tuning of a checkpoint on labelled sets, each in a training run of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import DivergedError, MetaseqError
from metaseq_lm.core.files import to_json
from metaseq_lm.core.loading import load_config
from metaseq_lm.core.overrides import quote_path
from metaseq_lm.data.labelled.sentence_rows import SentenceRows
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.tokenizers.base import DICT_FILE
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.distributed import process_group
from metaseq_lm.evaluation.finetune import FineTuned
from metaseq_lm.runs import manifests
from metaseq_lm.runs.folder import read_results
from metaseq_lm.tasks.sentence_prediction import HELD_OUT, parts_of_train
from metaseq_lm.training.parts import Parts
from metaseq_lm.training.scoring import longest_row
from metaseq_lm.training.states import EncoderStates

CHOICES = (
    "task=sentence_prediction",
    "criterion=sentence_prediction",
    "model=inherit",
    "optimizer=adamw",
    "schedule=cosine",
)
LENGTH = "task.tokens_per_sample"
Train = Callable[[RunConfig], None]  # makes the training run of a configuration


class FineTuner:
    """Fine-tunes the encoder of a checkpoint: see `evaluation.finetune.FineTuning`.

    A call that was interrupted goes on where it stopped, and one that has ended is not repeated, as
    long as the folder is there.

    Args:
        run: The restored run of the checkpoint, whose engine's options are used.
        checkpoint: The folder of the checkpoint.
        folder: The folder for the training runs.
        train: Makes a training run.
        batch_tokens: Largest number of tokens in a forward pass that reads states.

    Attributes:
        states: The states of the encoder without fine-tuning.
        flops: The FLOPs of the calls so far.
        updates: The updates of the calls so far.
    """

    def __init__(
        self, run: Parts, checkpoint: Path, folder: Path, train: Train, batch_tokens: int
    ) -> None:
        self.config, self.checkpoint, self.folder = run.config, checkpoint, folder
        self.train = train
        self.states = EncoderStates(run, batch_tokens)
        self.flops = self.updates = 0

    def fine_tune(
        self, folder: Path, split: str, seed: int, options: Mapping[str, Any]
    ) -> FineTuned:
        """Return how a model that was trained on the set in a folder does on a split."""
        config = self._configured(folder.resolve(), split, seed, options)
        run = Path(config.save_dir)
        results = process_group.from_first(read_results(run))
        if results is None or results["status"] != "finished":
            try:
                self.train(config)
            except DivergedError:
                self._count(process_group.from_first(read_results(run)))
                raise
            results = process_group.from_first(read_results(run))
        if results is None:
            raise MetaseqError(f"{run}: the fine-tuning wrote no results")
        self._count(results)
        best = manifests.read_manifest(manifests.resolve(config.save_dir, prefer="best"))
        train, scored = LabelledSet(folder, "train"), LabelledSet(folder, split)
        first, stop = parts_of_train(train, config.task)
        left_out = {"score", "loss", *results["losses"]}  # the main metric has its own name, too
        return FineTuned(
            metrics={n: v for n, v in results["metrics"][split].items() if n not in left_out},
            choice=best["valid"][config.trainer.best_checkpoint_metric],
            epoch=best["update"] * config.task.epochs / results["updates"],
            trained=first,
            choosing=stop - first if config.trainer.valid_split == HELD_OUT else len(scored),
            cut=share_of_cut_rows(scored, config.task.tokens_per_sample),
        )

    def _count(self, results: Mapping[str, Any] | None) -> None:
        """Add the cost of a training run, or of what it came to."""
        if results is not None:
            self.flops += int(results["flops"])
            self.updates += results["updates"]

    def _configured(
        self, folder: Path, split: str, seed: int, options: Mapping[str, Any]
    ) -> RunConfig:
        """Return the configuration of the training run on a set."""
        options = {**options, LENGTH: min(options[LENGTH], longest_row(self.config))}
        digest = hashlib.blake2b(to_json([str(folder), seed, options]).encode(), digest_size=6)
        paths = {
            "data": folder.parent,
            "init_from": self.checkpoint,
            "save_dir": self.folder / f"{folder.name}-{digest.hexdigest()}",
        }
        keys = [f"{key}={quote_path(str(path))}" for key, path in paths.items()]
        if self.config.user_dir:
            keys.append(f"user_dir={quote_path(self.config.user_dir)}")
        values = {
            "label": folder.name,
            "seed": seed,
            "task.labelled": folder.name,
            "trainer.final_splits": [split],
            "trainer.save_interval_updates": 0,
            "trainer.keep_last": 0,
            **options,
        }
        keys += [f"{key}={to_json(value)}" for key, value in values.items()]
        config = load_config([*CHOICES, *keys])
        engine = replace(self.config.engine, tensorboard=False, loggers=[], compile=False)
        return replace(config, engine=engine)


def share_of_cut_rows(data: LabelledSet, tokens: int) -> float:
    """Return the share of the rows of a split that do not fit into rows of some tokens."""
    rows = SentenceRows(data, Vocabulary.load(data.folder.parent / DICT_FILE), tokens)
    return float(rows.is_cut.mean())
