"""Shared code of fine-tuning tasks: loads a pre-trained encoder and scores labelled sets.

Shapes: N samples, K classes or candidates.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from metaseq_lm.config.models import BiLSTMConfig
from metaseq_lm.config.transformer import EncoderConfig, ModernConfig, TransformerConfig
from metaseq_lm.core.batch import Batch, Logs, Terms
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import MODELS
from metaseq_lm.data.images import Images
from metaseq_lm.data.labelled.sentence_rows import SentenceRows
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.manifest import Manifest, require_tokenizer
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.distributed import process_group
from metaseq_lm.engine.engine import Engine
from metaseq_lm.evaluation.benchmarks import (
    LabelledItems,
    format_submission,
    labelled_results,
)
from metaseq_lm.evaluation.official import THRESHOLD
from metaseq_lm.evaluation.predictions import mean_scores
from metaseq_lm.evaluation.suites import OVERALL
from metaseq_lm.tasks import Scored, TextTask, with_epochs
from metaseq_lm.tasks.masked_lm import check_rows

ENCODER = "encoder."
_POSITIONS = "encoder.embeddings.positions.weight"
# (sample number, outputs) of each sample.
Outputs = list[tuple[int, list[float]]]
Labels = LabelledSet | Images  # labelled sets that can be scored
T = TypeVar("T")


def encoder_sizes(config: RunConfig) -> EncoderConfig:
    """Return the sizes of the encoder of the configured model, which may have more options.

    Raises UsageError for a model without a Transformer encoder, and for rows that are too long.
    """
    check_rows(config)
    kind = ModernConfig if isinstance(config.model, ModernConfig) else TransformerConfig
    names = [field.name for field in fields(kind)]
    missing = [name for name in names if not hasattr(config.model, name)]
    if missing:
        raise UsageError(
            f"model '{config.model._name}' has no {missing[0]}; this task "
            "needs a Transformer encoder"
        )
    return kind(**{name: getattr(config.model, name) for name in names})


def row_encoder_sizes(config: RunConfig) -> EncoderConfig | BiLSTMConfig:
    """Return the sizes of the encoder as `encoder_sizes` does, or the sizes of model bilstm_lm."""
    if MODELS.entry(config.model._name).dataclass is BiLSTMConfig:
        sizes: EncoderConfig | BiLSTMConfig = config.model
        return sizes
    return encoder_sizes(config)


def encoder_weights(weights: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    """Return the weights of the encoder, which has the same name in every pre-training task.

    The position table (P, E) is cut, or filled up with zeros, to model.max_positions rows. Raises
    UsageError if it has fewer than task.tokens_per_sample.
    """
    encoder = {name: weight for name, weight in weights.items() if name.startswith(ENCODER)}
    if _POSITIONS in encoder:
        table, n_positions = encoder[_POSITIONS], config.model.max_positions
        if len(table) < config.task.tokens_per_sample:
            raise UsageError(
                f"init_from was trained with {len(table)} positions but task.tokens_per_sample is "
                f"{config.task.tokens_per_sample}; make it at most {len(table)} (longer contexts "
                "become windows)"
            )
        zeros = table.new_zeros(max(n_positions - len(table), 0), table.shape[1])
        encoder[_POSITIONS] = torch.cat([table[:n_positions], zeros])
    return encoder


# ------------------------------------------------------------------------ labelled sets


def labelled_folder(config: RunConfig) -> Path:
    """Return the folder of the labelled set; UsageError if none is named."""
    if not config.task.labelled:
        raise UsageError("give task.labelled=NAME, a labelled set in DATA")
    return Path(config.data, config.task.labelled)


def sentence_rows(
    folder: Path, split: str, vocabulary: Vocabulary, max_tokens: int
) -> SentenceRows:
    """Return the rows of a split of the set in `folder`, which must have the tokenizer of DATA."""
    data = LabelledSet(folder, split)
    require_tokenizer(data.folder, data.tokenizer_hash)
    return SentenceRows(data, vocabulary, max_tokens)


def different_sets(names: Sequence[str]) -> list[str]:
    """Return task.labelled as a list; UsageError unless it names different sets directly in DATA.

    A set's name also names its head, its stream and its files, so it has no dots and no slashes.
    """
    named = [name for name in names if name and not set("./\\") & set(name)]
    if not names or len(set(named)) < len(names):
        raise UsageError(
            "give task.labelled, one or more different labelled sets in DATA without dots and "
            f"slashes in their names; got {list(names)}"
        )
    return list(names)


def label_range(folder: Path) -> tuple[float, float]:
    """Return (least, scale) of the training labels; they are scaled to (y - least) / scale.

    The scale is the largest label, so that STS-B's 0 to 5 become 0 to 1 (Clark et al. 2020, code),
    or 1 if no label is positive. A set without a training split is only for evaluation, where the
    range comes with the weights.
    """
    labels = None
    if "train" in Manifest.load(folder).splits:
        labels = LabelledSet(folder, "train").labels
    if labels is None:
        return 0.0, 1.0
    return float(labels.min()), float(labels.max()) if labels.max() > 0 else 1.0


def evaluate_predictions(
    engine: Engine, batches: Iterable[list[Batch]], judge: Callable[[Any], tuple[Terms, list[T]]]
) -> tuple[Logs, list[T]]:
    """Return the mean loss over all `batches` of a split, and the results of all replicas.

    `judge` returns the terms and the list of results of a micro-batch.
    """
    results: list[T] = []

    def loss(batch: Batch) -> Terms:
        terms, batch_results = judge(batch)
        results.extend(batch_results)
        return terms

    logs = engine.evaluate(loss, batches, rng_key="validate")
    return logs, list(chain.from_iterable(process_group.gather_objects(results)))


def chosen_rows(data: Labels, samples: Sequence[int]) -> list[dict[str, Any]] | None:
    """Return the rows of a benchmark's file for `samples`; None if the set has no such rows."""
    if data.rows is None:
        return None
    return [data.rows[sample] for sample in samples]


def split_outputs(samples: Any, outputs: Tensor) -> Outputs:
    """Return (sample, outputs) of each sample of a batch, given `samples` (B,), outputs (B, K)."""
    return list(zip(samples.tolist(), outputs.tolist()))


def labelled_split(data: Labels, outputs: Outputs, logs: Logs) -> Scored:
    """Return a split's metrics from the outputs of all samples and the other `logs`, and its rows.

    Without labels there are only the `_prediction_rows`.
    """
    metrics: Logs = {}
    if data.labels is not None:
        samples, scores = zip(*sorted(outputs))
        metrics = labelled_metrics(data, np.array(samples), np.array(scores))
        metrics |= {name: value for name, value in logs.items() if name not in metrics}
    return Scored(metrics, lambda: _prediction_rows(data, outputs))


def labelled_metrics(data: Labels, samples: np.ndarray, scores: np.ndarray) -> Logs:
    """Return the metrics of samples (N,) with scores (N, K): "score", which is the main one, first.

    The set's benchmark has a suite, which defines the metrics. "score" lets one report hold sets
    with different main metrics.
    """
    assert data.labels is not None
    rows = chosen_rows(data, samples.tolist()) if data.benchmark else None
    items = LabelledItems(data.benchmark, data.labels[samples], rows, data.label_names)
    values = labelled_results(items, scores)[OVERALL].metrics
    return {"score": next(iter(values.values())), **values}


def labelled_scores(
    engine: Engine,
    data: Labels,
    batches: Iterable[list[Batch]],
    scored: Callable[[Any], tuple[Tensor, Terms]],
) -> Scored:
    """Return the `labelled_split` of a whole split. A collective call.

    `scored` returns the outputs (B, K) and terms of a micro-batch; no terms without targets.
    """

    def judge(batch: Batch) -> tuple[Terms, Outputs]:
        outputs, terms = scored(batch)
        return terms, split_outputs(batch.samples, outputs)

    logs, results = evaluate_predictions(engine, batches, judge)
    return labelled_split(data, results, logs)


def _prediction_rows(data: Labels, outputs: Outputs) -> list[dict[str, Any]]:
    """Return "index", "gold", "predicted" and "scores" of samples with their outputs.

    Labels are names; "gold" is None if the split has none. Scores are the probabilities of the
    classes or candidates, or the one real value. If rows have several labels, gold and predicted
    are lists.
    """

    def named(label: Any) -> Any:
        if data.multi_label:
            return [data.label_names[number] for number in np.flatnonzero(label)]
        return label.item() if data.regression else data.label_names[label]

    rows = []
    for sample, row in outputs:
        gold = None if data.labels is None else named(data.labels[sample])
        predicted: Any = row[0]
        if data.multi_label:
            predicted = named(np.array(row) > THRESHOLD)
        elif not data.regression:
            predicted = named(np.argmax(row))
        rows.append({"index": sample, "gold": gold, "predicted": predicted, "scores": row})
    return rows


def leaderboard_files(data: Labels, split: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the benchmark's leaderboard file for a test or diagnostic split.

    `rows` come from `_prediction_rows`. Other sets and splits have no file.
    """
    if not data.benchmark or split.partition("_")[0] in ("train", "valid"):
        return {}
    ordered = sorted(rows, key=lambda row: row["index"])
    scores = np.array([row["scores"] for row in ordered])
    if data.regression:
        scores = scores[:, 0]
    set_rows = chosen_rows(data, [row["index"] for row in ordered])
    name, text = format_submission(data.benchmark, split, scores, set_rows, data.label_names)
    return {name: text}


def ensemble_of(
    data: Labels, members: Sequence[Sequence[dict[str, Any]]]
) -> tuple[Logs, Sequence[dict[str, Any]]]:
    """Return metrics and predictions of the mean of the runs' probabilities (or real values)."""
    samples, scores = mean_scores(members)
    metrics = {} if data.labels is None else labelled_metrics(data, samples, scores)
    return metrics, _prediction_rows(data, list(zip(samples.tolist(), scores.tolist())))


class OneSetTask(TextTask):
    """A task on one set in DATA; `labelled` returns the rows of a split with their `data`."""

    labelled: Callable[[str], Any]

    @classmethod
    def n_examples(cls, config: RunConfig) -> int:
        """Return the number of training samples in an epoch."""
        return len(LabelledSet(labelled_folder(config), "train"))

    @classmethod
    def prepare(cls, config: RunConfig) -> RunConfig:
        options = config.task
        between = getattr(options, "validate_epochs", 0.0)
        if not (options.epochs or between):
            return config
        examples = cls.n_examples(config)
        return with_epochs(config, examples, options.batch_size, options.epochs, between)

    def cut_rows(self, split: str) -> dict[str, np.ndarray]:
        """Return which rows of a split are cut, if any can be."""
        is_cut = getattr(self.labelled(split), "is_cut", None)
        return {} if is_cut is None else {"": is_cut}

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Load the encoder of any model that calls it `encoder`."""
        return encoder_weights(weights, self.run_config)


class LabelledSetTask(OneSetTask):
    """A task on one labelled set; its rows have scores of classes, candidates or real values."""

    def submissions(self, split: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Return the benchmark's leaderboard file for a test or diagnostic split."""
        return leaderboard_files(self.labelled(split).data, split, rows)

    def ensemble(
        self, split: str, members: Sequence[Sequence[dict[str, Any]]]
    ) -> tuple[Logs, Sequence[dict[str, Any]]]:
        """Return metrics and predictions of the runs' mean probabilities (or real values)."""
        return ensemble_of(self.labelled(split).data, members)
