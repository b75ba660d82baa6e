"""Fine-tuning the student on one labelled set in the common format: its LM head predicts label tokens.

Shapes: B batch, S length, V vocabulary, K classes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from metaseq_lm.config import option
from metaseq_lm.criterions import Batch, Criterion, Term, Terms
from metaseq_lm.criterions.masked_lm import cross_entropy
from metaseq_lm.data.streams import Order, Sequential, Shuffled, Stream
from metaseq_lm.data.token_labels import TokenLabels
from metaseq_lm.data.tokenizer import load_tokenizer
from metaseq_lm.data.vocabulary import Vocabulary
from metaseq_lm.engine import Engine
from metaseq_lm.registry import register_criterion, register_task
from metaseq_lm.tasks import Passes, Task
from metaseq_lm.tasks.masked_lm import build_transformer


def class_scores(logits: Tensor, batch: Batch) -> Tensor:
    """Return the mean raw logit of each class token over a row, padding counted as 0; (B, K)."""
    scores = logits[..., batch["class_tokens"]]
    if batch["padding"] is not None:
        scores = scores.masked_fill(batch["padding"].unsqueeze(-1), 0.0)
    return scores.mean(-2)


@register_criterion("token_labels")
class TokenLabelCriterion(Criterion):
    """Cross-entropy of the label token at every position, and the accuracy of the class it implies."""

    def __call__(self, model: nn.Module, batch: Batch) -> Terms:
        logits = model(batch["tokens"], batch["padding"])  # (B, S, V)
        with torch.no_grad():
            right = class_scores(logits, batch).argmax(-1) == batch["classes"]
        return {
            "labels": Term(cross_entropy(logits, batch["targets"]).sum(), "targets"),
            "accuracy": Term(right.sum().to(logits.dtype), "rows", weight=0.0),
        }


@dataclass
class TokenLabelsConfig:
    """Which labelled set, and how it is batched (paper table 6)."""

    labelled: str = option("", "labelled set in DATA")
    task_token: int = option(2, "n of the task token [CLSn]; as in pre-training")
    batch_size: int = option(4, "rows of a batch")
    tokens_per_sample: int = option(34, "longest row, with its special tokens")
    valid_size: int = option(128, "rows of the validation split that are used (0 = all)")
    shuffle: bool = option(True, "new order every epoch; the authors' code did not shuffle")


@register_task("token_labels", dataclass=TokenLabelsConfig)
class TokenLabelsTask(Task):
    """The student of a meta_pseudo_label run (or any model of its shape) on one labelled set."""

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.vocabulary = Vocabulary.load(self.data / "dict.txt")

    def labelled(self, split: str) -> TokenLabels:
        options = self.options
        return TokenLabels(
            self.data / options.labelled,
            split,
            self.vocabulary,
            options.task_token,
            options.tokens_per_sample,
        )

    def build_streams(self, split: str) -> dict[str, Stream]:
        options, seed = self.options, self.config.seed
        data = self.labelled(split)
        order: Order
        if split != "train":
            chosen = np.arange(len(data))
            if split == self.config.trainer.valid_split and len(data) > options.valid_size > 0:
                # The authors' draw of the small validation set: Python's generator, seed 42.
                shuffled = list(range(len(data)))
                random.Random(42).shuffle(shuffled)
                chosen = np.array(shuffled[: options.valid_size])
            order = Sequential(len(chosen), 256)
        else:
            chosen = np.arange(len(data))
            kind = Shuffled if options.shuffle else Cyclic
            order = kind(len(data), options.batch_size, seed, "train")

        def collate(samples: np.ndarray, keys: np.ndarray, width: int) -> Batch:
            return data.batch(chosen[samples], keys, width)

        return {split: Stream(split, order, collate, seed, data.lengths[chosen])}

    def build_model(self) -> nn.Module:
        return build_transformer(self.config, self.vocabulary)

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Take the student of a pair, or all weights if there is no pair."""
        student = {n[len("student.") :]: w for n, w in weights.items() if n.startswith("student.")}
        return student or weights

    def predict(
        self, engine: Engine, model: nn.Module, split: str, passes: Passes
    ) -> Sequence[dict[str, Any]]:
        """Return text, gold and predicted label and class scores of each row."""
        data, labels = self.labelled(split).data, self.labelled(split).labels
        tokenizer = load_tokenizer(self.data)
        rows = []
        for stream in passes.values():
            for batch in (micro for batches in stream for micro in batches):
                (scores,) = engine.map(
                    lambda b: class_scores(model(b["tokens"], b["padding"]), b), [batch]
                )
                for sample, row in zip(batch["samples"].tolist(), scores.tolist()):
                    text = [tokenizer.decode(column[sample].tolist()) for column in data.inputs]
                    rows.append(
                        {
                            "index": sample,
                            "text": text,
                            "gold": data.label_names[int(labels[sample])],
                            "predicted": data.label_names[int(np.argmax(row))],
                            "scores": row,
                        }
                    )
        return rows


class Cyclic:
    """The same order in every epoch."""

    def __init__(self, count: int, batch_size: int, seed: int, name: str) -> None:
        self.once = Sequential(count, batch_size)
        self.smallest = self.once.smallest

    def batch(self, number: int) -> np.ndarray:
        return self.once.batch(number % len(self.once))
