"""Cross-View Training on tagged sets and treebanks: labelled and unlabelled updates take turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
from omegaconf import DictConfig
from torch import nn

from metaseq_lm import randomness
from metaseq_lm.config import option
from metaseq_lm.data.streams import Stream
from metaseq_lm.data.words.buckets import CHUNK, LONGEST, Bucketed
from metaseq_lm.data.words.sets import WordSet
from metaseq_lm.engine import Engine, Logs
from metaseq_lm.errors import UsageError
from metaseq_lm.methods.cvt.criterion import Unlabelled, drawn_set, needs_normalised
from metaseq_lm.methods.cvt.model import auxiliaries
from metaseq_lm.models.views import ViewsEncoder
from metaseq_lm.registry import register_task
from metaseq_lm.tasks import Batches
from metaseq_lm.tasks.words import ParserConfig, WordTask, WordTaskConfig, word_batch

UNLABELLED = "unlabelled"


@dataclass
class CVTConfig(ParserConfig, WordTaskConfig):
    """Which labelled sets, the unlabelled text, batches, heads and averaged weights."""

    labelled: list[str] = field(
        default_factory=list,
        metadata={"help": "tagged sets and treebanks in DATA; several are multi-task training"},
    )
    unlabelled: str = option("train", "split of the text in DATA that is the unlabelled one")
    unlabelled_chunk: int = option(
        CHUNK, "sentences of it that are sorted by length together (0 = all of them)"
    )
    unlabelled_longest: int = option(
        LONGEST, "sentences of it with so many words or more are left out (0 = none)"
    )


@register_task("cvt", dataclass=CVTConfig)
class CVTTask(WordTask):
    """Even updates, from 0, take a batch of a labelled set, odd ones a batch of unlabelled text.

    A labelled set is drawn with a probability like the square root of the number of its training
    sentences. With criterion tagging or parsing, or criterion.use_unlabelled=false, every update is a
    labelled one. A language model beside the encoder (task.elmo) goes with those two criterions only.
    """

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        if UNLABELLED in self.names:
            raise UsageError(f"a set called '{UNLABELLED}' cannot be one of task.labelled")
        if needs_normalised(self.criterion) and not config.model.get("normalize_words"):
            raise UsageError(
                "criterion vat needs normalised word embeddings; give model.normalize_words=true"
            )

        if self.options.get("elmo") and isinstance(self.criterion, Unlabelled):
            raise UsageError(
                "task.elmo is for supervised training, --criterion tagging or parsing: the states of the "
                "language model know the whole sentence, and so would every auxiliary module"
            )

    @property
    def names(self) -> list[str]:
        return list(self.options.labelled)

    @property
    def alternating(self) -> bool:
        """Whether every other update is an unlabelled one."""
        return isinstance(self.criterion, Unlabelled) and self.criterion.unlabelled

    def build_heads(self, name: str, encoder: ViewsEncoder) -> nn.ModuleDict:
        heads = super().build_heads(name, encoder)
        if isinstance(self.criterion, Unlabelled):
            data = self.some_split(name)
            for module in self.criterion.modules(data.form):
                heads[module] = self.build_module(data, encoder, **auxiliaries(data.form)[module])
        return heads

    def build_streams(self, split: str) -> dict[str, Stream]:
        streams = super().build_streams(split)
        if split == "train" and self.alternating:
            streams[UNLABELLED] = self._unlabelled_stream()
        return streams

    def _unlabelled_stream(self) -> Stream:
        options, seed = self.options, self.config.seed
        data = WordSet(self.data, options.unlabelled, self.vocabulary)
        order = Bucketed(
            data.lengths,
            options.batch_size,
            seed,
            UNLABELLED,
            chunk=options.unlabelled_chunk,
            longest=options.unlabelled_longest,
        )
        collate = partial(word_batch, data, UNLABELLED)
        return Stream(UNLABELLED, order, collate, seed, data.lengths)

    @cached_property
    def _shares(self) -> np.ndarray:
        """Where each labelled set's part of [0, 1) ends."""
        sizes = np.sqrt([float(len(self.chosen(name))) for name in self.names])
        return np.cumsum(sizes / sizes.sum())

    def drawn(self, what: str, update: int) -> float:
        """Return a number in [0, 1) that follows from the seed and the number of the update."""
        return randomness.generator(self.config.seed, "cvt", what, update).random()

    def needs(self, update: int) -> dict[str, int]:
        if self.alternating and update % 2:
            return {UNLABELLED: 1}
        number = int(np.searchsorted(self._shares, self.drawn("set", update), side="right"))
        return {self.names[min(number, len(self.names) - 1)]: 1}

    def update(self, engine: Engine, model: nn.Module, batches: Batches) -> Logs:
        """Do one step; "loss" is logged under the name of its kind too, whose means can be compared."""
        if UNLABELLED not in batches:
            logs = super().update(engine, model, batches)
            return logs | {"loss_labelled": logs["loss"]}
        assert isinstance(self.criterion, Unlabelled)
        draw = self.drawn("learner", engine.optimizers["main"].updates)
        sets = drawn_set(self.names, self.criterion.how.all_sets, draw)
        marked = [[micro | {"sets": sets} for micro in batch] for batch in batches[UNLABELLED]]
        logs = super().update(engine, model, {UNLABELLED: marked})
        return logs | {"loss_unlabelled": logs["loss"]}
