"""Fine-tuning of a checkpoint: on texts in separate training runs, on words in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from metaseq_lm.core.batch import TokenBatch
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import DivergedError, MetaseqError
from metaseq_lm.core.files import to_json
from metaseq_lm.core.loading import load_config, quote_path
from metaseq_lm.criterions.labelled import TokenClassification
from metaseq_lm.data.labelled.sentence_rows import SentenceRows
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.tokenizers.base import DICT_FILE
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.distributed import process_group, shards
from metaseq_lm.evaluation.finetune import FineTuned
from metaseq_lm.evaluation.probe import ProbePart
from metaseq_lm.runs import checkpoint as checkpoints
from metaseq_lm.runs import manifests
from metaseq_lm.runs.flops import FlopMeter
from metaseq_lm.runs.folder import read_results
from metaseq_lm.tasks.finetuning import ENCODER
from metaseq_lm.tasks.protocols import encoder_of, task_read_as
from metaseq_lm.tasks.sentence_prediction import HELD_OUT, parts_of_train
from metaseq_lm.training.nonfinite import describe_refusal
from metaseq_lm.training.parts import Parts, build_parts, prepare_config
from metaseq_lm.training.scoring import longest_row
from metaseq_lm.training.states import EncoderStates, read_rows

_OF_TEXTS = ("task=sentence_prediction", "criterion=sentence_prediction", "schedule=cosine")
_OF_WORDS = ("task=token_classification", "criterion=token_classification", "schedule=linear")
LENGTH = "task.tokens_per_sample"
Train = Callable[[RunConfig], None]  # makes the training run of a configuration


class FineTuner:
    """Fine-tunes the encoder of a checkpoint: see `evaluation.finetune.FineTuning`.

    As long as the folder exists, an interrupted call continues where it stopped, and a finished one
    is not repeated.

    Args:
        run: The restored run of the checkpoint, which provides the engine's options.
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
        """Train on the set in a folder and return the results on a split."""
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
        choosing = stop - first if config.trainer.valid_split == HELD_OUT else len(scored)
        # "score" repeats the main metric.
        left_out = {"score", "loss", *results["losses"]}
        return FineTuned(
            metrics={n: v for n, v in results["metrics"][split].items() if n not in left_out},
            choice=best["valid"][config.trainer.best_checkpoint_metric],
            epoch=best["update"] * config.task.epochs / results["updates"],
            trained=first,
            choosing=choosing,
            cut=_share_of_cut_rows(scored, config.task.tokens_per_sample),
        )

    def _count(self, results: Mapping[str, Any] | None) -> None:
        """Add the cost of a training run, also of one that ended early."""
        if results is not None:
            self.flops += int(results["flops"])
            self.updates += results["updates"]

    def _configured(
        self, folder: Path, split: str, seed: int, options: Mapping[str, Any]
    ) -> RunConfig:
        options = {**options, LENGTH: min(options[LENGTH], longest_row(self.config))}
        digest = hashlib.blake2b(to_json([str(folder), seed, options]).encode(), digest_size=6)
        values = {
            "label": folder.name,
            "seed": seed,
            "trainer.final_splits": [split],
            "trainer.save_interval_updates": 0,
            "trainer.keep_last": 0,
            **options,
        }
        save_dir = self.folder / f"{folder.name}-{digest.hexdigest()}"
        return _tuning_config(self.config, _OF_TEXTS, self.checkpoint, folder, save_dir, values)


class WordTuner:
    """Fine-tunes an encoder for labels of words: see `evaluation.adapt.WordTuning`.

    A call makes the updates of a `train` run with task token_classification, without its folder,
    log and checkpoints, which would take longer than the updates of a small model.

    Args:
        run: The restored run of the checkpoint, which provides the engine's options.
        checkpoint: The folder of the checkpoint.
        batch_tokens: Largest number of tokens in a forward pass that scores words.

    Attributes:
        longest: Largest number of tokens in a row, with special ones.
        updates: The updates of the calls so far.

    Raises:
        UsageError: The run's model has no Transformer encoder.
    """

    def __init__(self, run: Parts, checkpoint: Path, batch_tokens: int) -> None:
        self.config, self.checkpoint, self.batch_tokens = run.config, checkpoint, batch_tokens
        self.encoder = encoder_of(task_read_as(run.task), run.model)
        self.longest = longest_row(run.config)
        self.updates = 0
        self._meter = FlopMeter()

    @property
    def flops(self) -> int:
        """The FLOPs of the calls so far."""
        return int(self._meter.total)

    def tune(
        self, folder: Path, scored: Sequence[ProbePart], options: Mapping[str, Any]
    ) -> list[np.ndarray]:
        """Return the logits of words, after fine-tuning on the set in a folder."""
        values = {"seed": self.config.seed, LENGTH: self.longest, **options}
        source = (self.config, _OF_WORDS, self.checkpoint, folder.resolve())
        parts = build_parts(
            prepare_config(_tuning_config(*source, Path(self.config.save_dir), values)),
            dry_run=True,
        )
        self._start(parts)
        self._train(parts)
        with parts.evaluation_mode():
            return [self._logits(parts, part) for part in scored]

    def _start(self, parts: Parts) -> None:
        """Load the weights of the encoder; the head keeps its own."""
        names, weights = zip(*self.encoder.state_dict().items())
        whole = dict(zip((ENCODER + name for name in names), shards.gather_whole(list(weights))))
        loaded = parts.model.state_dict() | parts.task.pretrained(whole)
        checkpoints.load_into(parts.model, loaded, self.checkpoint)

    def _train(self, parts: Parts) -> None:
        """Make the updates; raises DivergedError, or Interrupted after a stop signal."""
        [(name, stream)] = parts.task.build_streams("train").items()
        engine = parts.engine
        parts.model.train()
        for update in range(parts.config.trainer.max_update):
            process_group.check_peers()
            process_group.stop_if_signalled("while fine-tuning for labels of words")
            batches = {name: [engine.to_device(stream.micro_batches(update, parts.shard))]}
            engine.begin(update)
            # The shapes include the head's.
            with self._meter.count((parts.config.task.labelled, batches)):
                logs = parts.task.update(engine, parts.model, batches)
            self.updates += 1
            if refused := engine.finite_check.refused:
                message = describe_refusal(update + 1, engine, refused, logs)
                raise DivergedError(f"{message}; give smaller rates: lr=RATE,...")

    def _logits(self, parts: Parts, part: ProbePart) -> np.ndarray:
        """Return the logits of the labelled words of a part, float32 (words, K)."""

        criterion = parts.task.criterion
        assert isinstance(criterion, TokenClassification)

        def logits(batch: TokenBatch) -> tuple[list[Tensor], Tensor]:
            assert batch.targets is not None
            chosen = batch.targets >= 0
            scores = criterion.scores(parts.model, batch)
            return [scores[chosen]], chosen.nonzero()[:, 0]

        (values,) = read_rows(parts.engine, part.rows, part.samples, self.batch_tokens, logits)
        return values


def _tuning_config(
    source: RunConfig,
    choices: Sequence[str],
    checkpoint: Path,
    folder: Path,
    save_dir: Path,
    values: Mapping[str, Any],
) -> RunConfig:
    """Return the configuration of a fine-tuning on the set in a folder.

    Args:
        source: The checkpoint's configuration, which provides the engine's options and the plug-in.
        choices: Task, criterion and schedule.
        checkpoint: The folder of the checkpoint.
        folder: The folder of the set, an absolute path.
        save_dir: The folder of the run.
        values: Further options by their keys.
    """
    paths = {"data": folder.parent, "init_from": checkpoint, "save_dir": save_dir}
    keys = [f"{key}={quote_path(str(path))}" for key, path in paths.items()]
    if source.user_dir:
        keys.append(f"user_dir={quote_path(source.user_dir)}")
    values = {"task.labelled": folder.name, **values}
    keys += [f"{key}={to_json(value)}" for key, value in values.items()]
    config = load_config([*choices, "model=inherit", "optimizer=adamw", *keys])
    engine = replace(source.engine, tensorboard=False, loggers=[], compile=False)
    return replace(config, engine=engine)


def _share_of_cut_rows(data: LabelledSet, tokens: int) -> float:
    """Return the share of a split's rows that do not fit into rows of `tokens` tokens."""
    rows = SentenceRows(data, Vocabulary.load(data.folder.parent / DICT_FILE), tokens)
    return float(rows.is_cut.mean())
