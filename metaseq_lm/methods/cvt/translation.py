"""Cross-view training of translation (Clark 2021, sections 4.2.4 and 4.3.1).

Labelled and unlabelled batches take turns; each is a step of its own. Shapes: B rows, T target positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from metaseq_lm.core.batch import Logs
from metaseq_lm.core.config import option
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import register_task
from metaseq_lm.data.parallel.rows import IGNORE, TranslationBatch, TranslationRows, shorter
from metaseq_lm.data.parallel.sets import UNLABELLED, ParallelSet
from metaseq_lm.data.streams import Stream
from metaseq_lm.data.words.buckets import Bucketed
from metaseq_lm.distributed import process_group
from metaseq_lm.engine.engine import Engine
from metaseq_lm.methods.cvt.averaging import AveragedNet, scores
from metaseq_lm.methods.cvt.translation_losses import SemiSupervisedTranslation
from metaseq_lm.models.words.word_model import dropout_at
from metaseq_lm.tasks import Batches, Passes, Scored
from metaseq_lm.tasks.protocols import Kinds
from metaseq_lm.tasks.translation import TranslationConfig, TranslationTask

REST = "rest"


@dataclass
class CVTTranslationConfig(TranslationConfig):
    """Where unlabelled source text comes from, and the average of the weights."""

    unlabelled: str = option(
        UNLABELLED,
        "split with the unlabelled source text; rest: the training pairs that labelled_share leaves",
    )
    unlabelled_batch_size: int = option(
        0, "sentences of an unlabelled batch (0 = batch_size)", at_least=0
    )
    labelled_first: int = option(
        0,
        "updates before the first unlabelled batch; a teacher that knows nothing teaches nothing",
        at_least=0,
    )
    average_decay: float = option(
        0.998,
        "of the moving average of the weights that is scored (0 = the weights themselves)",
        at_least=0,
        below=1,
    )
    score_raw: bool = option(False, "score the weights themselves too, as raw_*")


@register_task("cvt_translation", dataclass=CVTTranslationConfig)
class CVTTranslationTask(TranslationTask):
    """Even updates (from 0) learn from pairs, odd ones from source text that is translated first.

    With criterion `translation` there are labelled batches only.
    """

    def __init__(self, config: CVTTranslationConfig, run_config: DictConfig) -> None:
        super().__init__(config, run_config)
        self.semi_supervised = isinstance(self.criterion, SemiSupervisedTranslation)

    # ---------------------------------------------------------------- data and model

    def unlabelled_rows(self) -> TranslationRows:
        """Return the source text without translations."""
        options = self.config
        if options.unlabelled == REST:
            data, chosen = ParallelSet(self.data, "train"), self.labelled_pairs()[1]
            if not len(chosen):
                raise UsageError(
                    f"task.unlabelled=rest: task.labelled_share={options.labelled_share} leaves no pair; "
                    "lower it, or name a split of source text"
                )
        else:
            data = ParallelSet(self.data, options.unlabelled)
            chosen = shorter(data, options.max_length, with_target=False)
        return TranslationRows(data, self.tokenizers, chosen, with_target=False)

    def build_streams(self, split: str) -> dict[str, Stream]:
        streams = super().build_streams(split)
        if split == "train" and self.semi_supervised:
            rows, seed = self.unlabelled_rows(), self.run_config.seed
            size = self.config.unlabelled_batch_size or self.config.batch_size
            buckets = self.config.buckets
            order = Bucketed(rows.lengths, size, seed, UNLABELLED, buckets=buckets)
            streams[UNLABELLED] = Stream(UNLABELLED, order, rows.batch, seed, rows.lengths)
        return streams

    def build_model(self) -> nn.Module:
        net = super().build_model()
        if isinstance(self.criterion, SemiSupervisedTranslation):
            for name in self.criterion.auxiliary:
                hidden = self.criterion.attention_dropout if name == "attention" else 0.0
                net.add_head(name, hidden)  # type: ignore[operator]
        return AveragedNet(net, self.config.average_decay)

    # ---------------------------------------------------------------- updates

    def needs(self, update: int) -> dict[str, int]:
        turn = update % 2 and update >= self.config.labelled_first
        return {UNLABELLED: 1} if self.semi_supervised and turn else {"train": 1}

    def kinds(self) -> Kinds:
        """Return the two kinds that take turns after task.labelled_first."""
        kinds: Kinds = [(0.5, {"train": 1}), (0.5, {UNLABELLED: 1})]
        return kinds if self.semi_supervised else [(1.0, self.needs(0))]

    def update(self, engine: Engine, model: nn.Module, batches: Batches) -> Logs:
        """Do one step; "loss" is logged under the name of its kind too, whose means can be compared."""
        kind = "labelled"
        if UNLABELLED in batches:
            kind, (parts,) = UNLABELLED, batches[UNLABELLED]
            batches = {UNLABELLED: [self.with_translations(engine, model, parts)]}
        assert isinstance(model, AveragedNet)
        if model.average is not None:
            model.average.move(model.net)
        logs = super().update(engine, model, batches)
        return logs | {f"loss_{kind}": logs["loss"]}

    def with_translations(
        self, engine: Engine, model: nn.Module, parts: Sequence[Any]
    ) -> list[TranslationBatch]:
        """Return unlabelled micro-batches with the translations that the primary head finds now.

        Without dropout, by beam search. Their lengths are sizes, so they must be known before the
        first micro-batch learns; all parts get one width, because random numbers follow from it.
        A call of all replicas.
        """

        def search(batch: TranslationBatch) -> Tensor:
            with dropout_at(model, 0.0):
                return self.search(model.net, batch)  # type: ignore[arg-type]

        pad = self.tokenizers[1].vocabulary.pad
        translations = engine.map(search, parts, rng_key="teacher")
        counts = [(ids != pad).sum(-1) for ids in translations]
        longest_here = max((int(count.max()) for count in counts), default=0)
        width = max(process_group.gather_objects(longest_here))
        return [self._translated(*each, width) for each in zip(parts, translations, counts)]

    def _translated(
        self, batch: TranslationBatch, ids: Tensor, counts: Tensor, width: int
    ) -> TranslationBatch:
        source, target = (tokenizer.vocabulary for tokenizer in self.tokenizers)
        rows = ids.new_full((len(ids), width), target.pad)
        rows[:, : min(width, ids.shape[1])] = ids[:, :width]
        inputs = rows.roll(1, dims=1)
        inputs[:, 0] = target.cls()
        said = torch.arange(width, device=ids.device) < counts[:, None]
        total = int(counts.sum())
        sizes = {"targets": total, "later_targets": total - len(ids)}
        return batch.replace(
            inputs=inputs,
            targets=rows.masked_fill(~said, IGNORE),
            words=~batch.padding & (batch.tokens != source.sep),
            mask_id=source.mask,
            sizes={**batch.sizes, **sizes},
        )

    # ---------------------------------------------------------------- scores

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return what the averaged weights give, and with task.score_raw the scores of the others too."""
        assert isinstance(model, AveragedNet)
        return scores(super().evaluate, engine, model, passes, self.config.score_raw)
