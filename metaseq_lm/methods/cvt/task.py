"""Cross-View Training on tagged sets and treebanks, alternating labelled and unlabelled updates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np
import torch
from torch import nn

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Batch, Logs, WordBatch
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.streams import Order, Stream
from metaseq_lm.data.words.buckets import CHUNK, Bucketed
from metaseq_lm.data.words.sets import SentenceWords, WordSet
from metaseq_lm.engine.engine import PRECISIONS, Engine
from metaseq_lm.methods.cvt.criterion import Unlabelled, VirtualAdversarial, weight_after
from metaseq_lm.methods.cvt.model import auxiliary_options, check_teacher
from metaseq_lm.methods.cvt.options import CVTConfig
from metaseq_lm.models.words.word_model import ViewsEncoder
from metaseq_lm.tasks import Batches
from metaseq_lm.tasks.protocols import Kinds
from metaseq_lm.tasks.words import AT, WordTask, word_batch

_UNLABELLED = "unlabelled"


class CVTTask(WordTask):
    """Even updates, from 0, take a batch of a labelled set, odd ones a batch of unlabelled text.

    The first task.labelled_first updates are all labelled.
    A labelled set is drawn with a probability proportional to the square root of its number of
    training sentences. With criterion tagging or parsing, or criterion.use_unlabelled=false, all
    updates are labelled. With criterion.all_sets=false each set has its own unlabelled batches, and
    all sets together go through the text once. task.elmo needs criterion tagging or parsing.
    """

    def __init__(self, config: CVTConfig, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        options = self.config
        if _UNLABELLED in self.names:
            raise UsageError(f"a set called '{_UNLABELLED}' cannot be one of task.labelled")
        normalised = getattr(run_config.model, "normalize_words", False)
        if isinstance(self.criterion, VirtualAdversarial) and not normalised:
            raise UsageError(
                "criterion vat needs normalised word embeddings; give model.normalize_words=true"
            )
        if isinstance(self.criterion, Unlabelled):
            check_teacher(self.criterion.config.mean_teacher, options.average_decay)
        if options.elmo and isinstance(self.criterion, Unlabelled):
            raise UsageError(
                "task.elmo is for supervised training, --criterion tagging or parsing: the "
                "language model knows the whole sentence, so every auxiliary module would know it"
            )

    @property
    def names(self) -> list[str]:
        return list(self.config.labelled)

    @property
    def alternating(self) -> bool:
        """Whether every other update is unlabelled."""
        return isinstance(self.criterion, Unlabelled) and self.criterion.unlabelled

    def build_heads(self, name: str, encoder: ViewsEncoder) -> nn.ModuleDict:
        heads = super().build_heads(name, encoder)
        if isinstance(self.criterion, Unlabelled):
            data = self.some_split(name)
            for module in self.criterion.modules(data.form):
                heads[module] = self.build_module(
                    data, encoder, **auxiliary_options(data.form)[module]
                )
        return heads

    def build_streams(self, split: str) -> dict[str, Stream]:
        streams = super().build_streams(split)
        if split == "train" and self.alternating:
            streams |= self._unlabelled_streams()
        return streams

    @cached_property
    def learners(self) -> dict[str, list[str]]:
        """The sets that learn from the batches of each unlabelled stream."""
        assert isinstance(self.criterion, Unlabelled)
        if self.criterion.config.all_sets:
            return {_UNLABELLED: self.names}
        return {f"{_UNLABELLED}{AT}{name}": [name] for name in self.names}

    def _unlabelled_streams(self) -> dict[str, Stream]:
        options, seed = self.config, self.run_config.seed
        data = WordSet(self.data, options.unlabelled, self.vocabulary)
        order = Bucketed(
            data.lengths,
            options.batch_size,
            seed,
            _UNLABELLED,
            chunk=CHUNK,
            longest=options.unlabelled_longest,
            buckets=options.buckets,
        )
        streams = {}
        for number, (name, sets) in enumerate(self.learners.items()):
            every_other = _EveryOther(order, number, len(self.learners))
            collate = partial(_unlabelled_batch, data, sets)
            words = SentenceWords(data.lengths)
            streams[name] = Stream(name, every_other, collate, seed, data.lengths, words=words)
        return streams

    @cached_property
    def _shares(self) -> np.ndarray:
        """The upper bound of each labelled set's interval of [0, 1)."""
        sizes = np.sqrt([float(len(self.chosen(name))) for name in self.names])
        return np.cumsum(sizes / sizes.sum())

    def uniform(self, purpose: str, update: int) -> float:
        """Return a random number in [0, 1) that depends only on the seed and the update."""
        return random_streams.generator(self.run_config.seed, "cvt", purpose, update).random()

    def needs(self, update: int) -> dict[str, int]:
        if self.alternating and update % 2 and update >= self.config.labelled_first:
            streams = list(self.learners)
            return {streams[int(self.uniform("learner", update) * len(streams))]: 1}
        number = int(np.searchsorted(self._shares, self.uniform("set", update), side="right"))
        return {self.names[min(number, len(self.names) - 1)]: 1}

    def kinds(self) -> Kinds:
        shares = np.diff(self._shares, prepend=0.0).tolist()
        labelled: Kinds = [(share, {name: 1}) for share, name in zip(shares, self.names)]
        if not self.alternating:
            return labelled
        unlabelled = [(0.5 / len(self.learners), {name: 1}) for name in self.learners]
        return [(0.5 * share, needs) for share, needs in labelled] + unlabelled

    def update(self, engine: Engine, model: nn.Module, batches: Batches) -> Logs:
        """Make one step; the loss is also logged as "loss_labelled" or "loss_unlabelled"."""
        kind = "labelled" if set(batches) <= set(self.names) else _UNLABELLED
        if kind == _UNLABELLED:
            batches = self.weighed(engine, engine.optimizers["main"].updates, batches)
        logs = super().update(engine, model, batches)
        return logs | {f"loss_{kind}": logs["loss"]}

    def weighed(self, engine: Engine, updates: int, batches: Batches) -> Batches:
        """Return unlabelled batches weighted for a number of updates."""
        assert isinstance(self.criterion, Unlabelled)
        number = weight_after(self.criterion.config, updates - self.config.labelled_first)
        # A tensor, because torch.compile would recompile for each number.
        dtype = PRECISIONS[engine.precision]
        weight = torch.full((), number, dtype=dtype, device=engine.device)

        def weighted(batch: Sequence[Batch]) -> list[Batch]:
            return [part.replace(weight=weight) for part in batch]

        return {name: [*map(weighted, stream)] for name, stream in batches.items()}


class _EveryOther:
    """The batches `number`, `number` + `count`, `number` + 2 `count`, ... of an order."""

    def __init__(self, order: Order, number: int, count: int) -> None:
        self.order, self.number, self.count = order, number, count
        self.smallest = order.smallest

    def batch(self, number: int) -> np.ndarray:
        """Return the sample numbers of global batch `number`, int64 (rows,)."""
        return self.order.batch(number * self.count + self.number)


def _unlabelled_batch(
    data: WordSet, sets: Sequence[str], samples: np.ndarray, keys: np.ndarray, width: int = 0
) -> WordBatch:
    return word_batch(data, _UNLABELLED, samples, keys, width).replace(learners=tuple(sets))
