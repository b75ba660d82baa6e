"""A suite that fine-tunes on labels of words: what an encoder learns from few labelled sentences.

The encoder of a checkpoint and a new linear layer on the state of a word's first token are trained
on the first sentences of a tagged set. All tokens see each other, as when users adapt a causal
model to an end task that needs both sides. The number of updates and the rates to try are the same
for every run: AdamW with the defaults of task token_classification, a tenth of warm-up, then a
linear decay. The valid split, or sentences held out from train, chooses the rate.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from metaseq_lm.config.suites import AdaptConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.words.subwords import TaggedRows
from metaseq_lm.evaluation.finetune import at_best_rate, check_rates
from metaseq_lm.evaluation.probe import ACCURACY, VALID, Probe, ProbedSet, ProbePart
from metaseq_lm.evaluation.suites import (
    OVERALL,
    WORD_TUNING,
    GroupMetrics,
    References,
    Results,
    Suite,
    exact_labels,
    share_known,
)


class WordTuning(Protocol):
    """Fine-tunes the encoder of a run on labels of words, without changing the run.

    Attributes:
        longest: Largest number of tokens in a row, with special ones.
    """

    longest: int

    def tune(
        self, folder: Path, scored: Sequence[ProbePart], options: Mapping[str, Any]
    ) -> list[np.ndarray]:
        """Return the logits of the labelled words after fine-tuning, (words, K) for each part.

        Args:
            folder: The folder of the tagged set.
            scored: The parts to score.
            options: Options of the training by their keys.

        Raises:
            DivergedError: The training diverged.
        """


class Adapt(Suite[ProbedSet, WordTuning]):
    """The encoder fine-tuned, with attention to both sides, for labels of words."""

    patterns = Probe.patterns
    takes = WORD_TUNING

    def __init__(self, config: AdaptConfig) -> None:
        super().__init__(config)
        self._probe = Probe(config)  # reads the same items and has the same references

    def check(self, folder: Path) -> None:
        self.read(folder)

    def read(self, folder: Path) -> ProbedSet:
        self.files(folder)
        if Manifest.load(folder).kind != "tags":
            raise UsageError(
                f"{folder}: no tagged set (preprocess --tagged NAME --tokenizer-from DATA), whose "
                "words have labels; suite finetune takes labelled texts"
            )
        check_rates("lr", self.config.lr)
        if not self.config.lr:
            raise UsageError("lr=[]: give one rate or more")
        return self._probe.read(folder)

    def score(self, items: ProbedSet, probabilities: WordTuning) -> Results:
        train, chooser, test = self._probe.parts(items, probabilities.longest)
        options = self.options_for(train)
        hits: dict[float, tuple[int, ...]] = {}

        def metrics_at(rate: float) -> dict[str, float]:
            at_rate = options | {"optimizer.lr": rate}
            of_chooser, of_test = probabilities.tune(items.folder, (chooser, test), at_rate)
            hits[rate] = test.hits(of_test)
            valid = chooser.metrics(of_chooser)[ACCURACY]
            return {**test.metrics(of_test), f"{VALID}_{ACCURACY}": valid}

        rate, metrics = at_best_rate(
            self.config.lr, metrics_at, lambda metrics: metrics[f"{VALID}_{ACCURACY}"]
        )
        metrics |= share_known(metrics[ACCURACY], exact_labels(items.folder))
        metrics |= {"lr": rate, "rows_trained": len(train.samples)}
        return {OVERALL: GroupMetrics(len(test.labels), metrics, hits[rate])}

    def options_for(self, train: ProbePart) -> dict[str, Any]:
        """Return the training options for a part of train that begins with its first row."""
        config = self.config
        assert isinstance(train.rows, TaggedRows)
        options = {
            "task.train_size": int(train.rows.sentence[train.samples[-1]]) + 1,
            "task.batch_size": config.batch_size,
            "schedule.warmup_ratio": 0.1,
            "trainer.max_update": config.updates,
        }
        if config.seed:
            options["seed"] = config.seed
        return options

    def references(self, items: ProbedSet, folder: Path) -> References:
        return self._probe.references(items, folder)
