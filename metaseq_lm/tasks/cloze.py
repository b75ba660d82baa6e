"""Fine-tuning a masked language model on cloze tests, such as CLOTH: which candidate fills a blank.

The blank is [MASK], and the pre-trained head scores the candidates there. Shapes: B rows, K
candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor, nn

from metaseq_lm.config.tasks import ClozeConfig
from metaseq_lm.core.batch import Terms
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.criterions.labelled import Cloze, class_terms
from metaseq_lm.data.labelled.cloze_rows import ClozeBatch, ClozeRows
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.manifest import require_tokenizer
from metaseq_lm.data.streams import Shuffled, Stream, sorted_pass
from metaseq_lm.engine.engine import Engine
from metaseq_lm.tasks import Passes, Scored
from metaseq_lm.tasks.finetuning import (
    LabelledSetTask,
    encoder_weights,
    labelled_folder,
    labelled_scores,
)
from metaseq_lm.tasks.masked_lm import build_transformer, scored_rows

HEAD = "heads.lm."


class ClozeTask(LabelledSetTask):
    """A pre-trained masked language model on one set of form "cloze"."""

    exported = True
    criterion: Cloze
    criterions = (Cloze,)

    def __init__(self, config: ClozeConfig, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        self.labelled = lru_cache(maxsize=None)(self._labelled)

    def _labelled(self, split: str) -> ClozeRows:
        data = LabelledSet(labelled_folder(self.run_config), split)
        require_tokenizer(data.folder, data.tokenizer_hash)
        return ClozeRows(data, self.vocabulary, self.config.tokens_per_sample)

    def build_streams(self, split: str) -> dict[str, Stream]:
        rows, size, seed = self.labelled(split), self.config.batch_size, self.run_config.seed
        if split != "train":
            samples = np.arange(scored_rows(self, split, len(rows)))
            return {split: sorted_pass(split, samples, rows.lengths, rows.batch, size, seed)}
        if rows.data.labels is None:
            raise MetaseqError(f"{rows.data.folder}: '{split}' has no labels to train on")
        order = Shuffled(len(rows), size, seed, "train")
        return {split: Stream(split, order, rows.batch, seed, rows.lengths)}

    def build_model(self) -> nn.Module:
        return build_transformer(self.run_config, self.vocabulary)

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Load the encoder and the language-model head of any model that uses these names."""
        head = {name: weight for name, weight in weights.items() if name.startswith(HEAD)}
        return encoder_weights(weights, self.run_config) | head

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return the metrics, the main one first, the loss, and the rows of `labelled_split`."""
        ((split, batches),) = passes.items()

        def scored(batch: ClozeBatch) -> tuple[Tensor, Terms]:
            scores = self.criterion.scores(model, batch)
            terms: Terms = {} if batch.targets is None else class_terms(scores, batch.targets)
            return scores.double().softmax(-1), terms

        return labelled_scores(engine, self.labelled(split).data, batches, scored)

    def submissions(self, split: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Return no file: cloze tests have no leaderboard."""
        return {}
