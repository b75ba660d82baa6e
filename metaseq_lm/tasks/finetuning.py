"""What fine-tuning tasks share: the encoder of whatever was pre-trained; scores of labelled sets.

Shapes: N samples, K classes or candidates.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from metaseq_lm.core.batch import Batch, Logs, Terms
from metaseq_lm.core.config import typed_options
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import MODELS
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.distributed import process_group
from metaseq_lm.engine.engine import Engine
from metaseq_lm.evaluation import classification
from metaseq_lm.evaluation.predictions import mean_scores
from metaseq_lm.models.bilstm import BiLSTMConfig
from metaseq_lm.models.transformer.encoder import TransformerConfig
from metaseq_lm.tasks import Scored
from metaseq_lm.tasks.masked_lm import check_rows

ENCODER = "encoder."
POSITIONS = "encoder.embeddings.positions.weight"
# What is known of some samples: (sample, its outputs).
Outputs = list[tuple[int, list[float]]]
T = TypeVar("T")


def encoder_sizes(config: DictConfig) -> TransformerConfig:
    """Return the sizes of the encoder of the configured model, which may have more options.

    Raises UsageError for a model without a Transformer encoder, and for rows longer than it.
    """
    check_rows(config)
    names = [field.name for field in fields(TransformerConfig)]
    lacking = [name for name in names if name not in config.model]
    if lacking:
        raise UsageError(
            f"model '{config.model._name}' has no {lacking[0]}; this task needs a Transformer encoder"
        )
    return TransformerConfig(**{name: config.model[name] for name in names})


def row_encoder_sizes(config: DictConfig) -> TransformerConfig | BiLSTMConfig:
    """Return the sizes of the encoder for a task that needs states of rows only.

    That is a Transformer's, as `encoder_sizes` has it, or those of model bilstm_lm.
    """
    if MODELS.entry(config.model._name).dataclass is BiLSTMConfig:
        sizes: TransformerConfig | BiLSTMConfig = typed_options("model", config.model)
        return sizes
    return encoder_sizes(config)


def encoder_weights(weights: dict[str, Any], config: DictConfig) -> dict[str, Any]:
    """Choose the weights of the main encoder, as every pre-training task calls it.

    The table of positions is made as long as the model's: what no row reaches may differ. Raises
    UsageError if it has fewer positions than the task's rows need.
    """
    chosen = {name: weight for name, weight in weights.items() if name.startswith(ENCODER)}
    if POSITIONS in chosen:
        needed, room = config.task.tokens_per_sample, config.model.max_positions
        chosen[POSITIONS] = with_positions(chosen[POSITIONS], needed, room)
    return chosen


def with_positions(table: Tensor, needed: int, room: int) -> Tensor:
    """Return a position table (P, E) cut, or filled up with zeros, to `room` rows.

    Raises UsageError if it has fewer than the `needed` rows that are used.
    """
    if len(table) < needed:
        raise UsageError(
            f"init_from was trained with {len(table)} positions but task.tokens_per_sample is "
            f"{needed}; make it at most {len(table)} (longer contexts become windows)"
        )
    missing = table.new_zeros(max(room - len(table), 0), table.shape[1])
    return torch.cat([table[:room], missing])


# ------------------------------------------------------------------------ labelled sets


class Labels(Protocol):
    """What scores need of a labelled set: LabelledSet, or another with the same facts."""

    @property
    def regression(self) -> bool:
        """Whether labels are real values."""

    @property
    def benchmark(self) -> str:
        """The name of the benchmark, or empty."""

    @property
    def label_names(self) -> list[str]:
        """The classes."""

    @property
    def labels(self) -> np.ndarray | None:
        """The labels (rows,), None for a split without."""

    @property
    def rows(self) -> list[dict[str, Any]] | None:
        """What scorers need of each row, or None."""


def labelled_folder(config: DictConfig) -> Path:
    """Return the folder of the labelled set; UsageError if none is named."""
    if not config.task.labelled:
        raise UsageError("give task.labelled=NAME, a labelled set in DATA")
    return Path(config.data, config.task.labelled)


def different_sets(names: Sequence[str]) -> list[str]:
    """Return task.labelled as a list; UsageError unless it names different sets directly in DATA.

    A set's name is the name of its head, its stream and its files, too: no dots, no slashes.
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
    or 1 where no label is positive. A set without a training split is only good for evaluation,
    where the weights bring the range along.
    """
    labels = None
    if "train" in Manifest.load(folder).splits:
        labels = LabelledSet(folder, "train").labels
    if labels is None:
        return 0.0, 1.0
    return float(labels.min()), float(labels.max()) if labels.max() > 0 else 1.0


def judged(
    engine: Engine, batches: Iterable[list[Batch]], judge: Callable[[Any], tuple[Terms, list[T]]]
) -> tuple[Logs, list[T]]:
    """Return the mean loss over all `batches` of a split, and what `judge` finds, of all replicas.

    `judge` returns the terms of a micro-batch and a list, which goes into the whole one.
    """
    found: list[T] = []

    def loss(batch: Batch) -> Terms:
        terms, more = judge(batch)
        found.extend(more)
        return terms

    everything = (micro for batch in batches for micro in batch)
    logs = engine.evaluate(loss, everything, rng_key="validate")
    return logs, [item for part in process_group.gather_objects(found) for item in part]


def chosen_rows(data: Labels, samples: Sequence[int]) -> list[dict[str, Any]] | None:
    """Return what scorers need of some rows, None if the set has nothing of the kind."""
    return None if data.rows is None else [data.rows[sample] for sample in samples]


def listed(samples: Any, outputs: Tensor) -> Outputs:
    """Return (sample, its outputs) of a batch, given its `samples` (B,) and outputs (B, K)."""
    return list(zip(samples.tolist(), outputs.tolist()))


def labelled_split(data: Labels, found: Outputs, logs: Logs) -> Scored:
    """Return the metrics of a split of which all outputs are known, then the rest of `logs`, and its rows.

    Without labels there are only the `prediction_rows`.
    """
    metrics: Logs = {}
    if data.labels is not None:
        samples = np.array([sample for sample, _ in sorted(found)])
        metrics = labelled_metrics(data, samples, np.array([scores for _, scores in sorted(found)]))
        metrics |= {name: value for name, value in logs.items() if name not in metrics}
    return Scored(metrics, lambda: prediction_rows(data, found))


def labelled_metrics(data: Labels, samples: np.ndarray, scores: np.ndarray) -> Logs:
    """Return the metrics of samples (N,) with scores (N, K), the main one first and as "score".

    So that one report can hold sets whose main metrics differ.
    """
    assert data.labels is not None
    gold = data.labels[samples]
    scores = scores[:, 0] if data.regression else scores
    if data.benchmark:
        from metaseq_lm.evaluation.benchmarks import metrics

        about = chosen_rows(data, samples.tolist())
        found = metrics(data.benchmark, gold, scores, about, data.label_names)
    else:
        found = plain_metrics(gold, scores, 0 if data.regression else scores.shape[1])
    return {"score": next(iter(found.values())), **found}


def plain_metrics(gold: np.ndarray, scores: np.ndarray, classes: int) -> Logs:
    """Return accuracy and macro F1 of scores (N, K), or CORRELATIONS of values (N,) for 0 `classes`.

    Every class counts in the macro-averaged F1, one that is neither gold nor predicted as 0. The
    micro-averaged F1 of single labels is the accuracy.
    """
    if not classes:
        return {n: metric(gold, scores) for n, metric in classification.CORRELATIONS.items()}
    predicted = scores.argmax(1)
    return {
        "accuracy": classification.accuracy(gold, predicted),
        "f1_macro": classification.f1_macro(gold, predicted, range(classes)),
    }


def labelled_scores(
    engine: Engine,
    data: Labels,
    batches: Iterable[list[Batch]],
    scored: Callable[[Any], tuple[Tensor, Terms]],
) -> Scored:
    """Return the `labelled_split` of what `scored` finds: the main metric first, then the terms.

    `scored` returns the outputs (B, K) of a micro-batch and its terms, none if it has no targets. A
    call of all replicas.
    """

    def judge(batch: Batch) -> tuple[Terms, Outputs]:
        outputs, terms = scored(batch)
        return terms, listed(batch.samples, outputs)

    logs, found = judged(engine, batches, judge)
    return labelled_split(data, found, logs)


def prediction_rows(data: Labels, found: Outputs) -> list[dict[str, Any]]:
    """Return "index", "gold", "predicted" and "scores" of samples with their outputs.

    Labels are names, "gold" None where the split has none; scores are the probabilities of the
    classes or candidates, or the one real value.
    """
    rows = []
    for sample, row in found:
        gold: Any = None if data.labels is None else data.labels[sample].item()
        predicted: Any = row[0] if data.regression else int(np.argmax(row))
        if not data.regression:
            gold = None if gold is None else data.label_names[gold]
            predicted = data.label_names[predicted]
        rows.append({"index": sample, "gold": gold, "predicted": predicted, "scores": row})
    return rows


def leaderboard_files(data: Labels, split: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the file that the benchmark's leaderboard wants for a test or diagnostic split.

    `rows` are those of `prediction_rows`; there is no file for other sets and splits.
    """
    if not data.benchmark or split.partition("_")[0] in ("train", "valid"):
        return {}
    from metaseq_lm.evaluation.benchmarks import submission

    ordered = sorted(rows, key=lambda row: row["index"])
    scores = np.array([row["scores"] for row in ordered])
    if data.regression:
        scores = scores[:, 0]
    about = chosen_rows(data, [row["index"] for row in ordered])
    name, text = submission(data.benchmark, split, scores, about, data.label_names)
    return {name: text}


def ensemble_of(
    data: Labels, members: Sequence[Sequence[dict[str, Any]]]
) -> tuple[Logs, Sequence[dict[str, Any]]]:
    """Return metrics and predictions of the mean of the runs' probabilities (or real values)."""
    samples, scores = mean_scores(members)
    metrics = {} if data.labels is None else labelled_metrics(data, samples, scores)
    return metrics, prediction_rows(data, list(zip(samples.tolist(), scores.tolist())))
