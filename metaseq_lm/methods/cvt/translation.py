"""Cross-view training of translation (Clark 2021, sections 4.2.4 and 4.3.1): criterions and task.

Labelled batches train the primary head. On unlabelled source text its beam-search translations are
hard targets. Shapes: B rows, S source and T target positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from metaseq_lm.config.tasks import UNLABELLED
from metaseq_lm.core.batch import Logs, Term, Terms
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.criterions.translation import Translation
from metaseq_lm.data.parallel.rows import (
    IGNORE,
    TranslationBatch,
    TranslationRows,
    drop_long_sentences,
)
from metaseq_lm.data.parallel.sets import ParallelSet
from metaseq_lm.data.streams import Stream
from metaseq_lm.data.words.buckets import Bucketed
from metaseq_lm.distributed import process_group
from metaseq_lm.engine.engine import Engine
from metaseq_lm.forward.passes import uniform
from metaseq_lm.methods.cvt.criterion import weight_after
from metaseq_lm.methods.cvt.model import AveragedNet
from metaseq_lm.methods.cvt.options import (
    FUTURE,
    CVTTranslationConfig,
    SemiSupervisedConfig,
    TranslationCrossViewConfig,
    TranslationWordDropoutConfig,
)
from metaseq_lm.models.layers import cross_entropy, dropout_at
from metaseq_lm.models.seq2seq import PRIMARY, LSTMEncoderDecoder
from metaseq_lm.tasks import Batches, Passes, Scored
from metaseq_lm.tasks.protocols import Kinds
from metaseq_lm.tasks.translation import TranslationTask

_REST = "rest"


class _SemiSupervisedTranslation(Translation):
    """The primary head's loss on labelled batches, `student_terms` on unlabelled ones."""

    tasks = ("cvt_translation",)
    auxiliary: tuple[str, ...] = ()
    attention_dropout = 0.0

    config: SemiSupervisedConfig

    @property
    def gold_smoothing(self) -> float:
        return 0.0

    def __call__(self, model: nn.Module, batch: TranslationBatch) -> Terms:
        if batch.stream != UNLABELLED:
            return super().__call__(model, batch)
        net: Any = model.net
        # `dropout` applies to encoder and decoder; the heads have their own.
        with dropout_at(net.dropout, self.config.unlabelled_dropout):
            return self.student_terms(net, batch)

    def student_terms(self, net: LSTMEncoderDecoder, batch: TranslationBatch) -> Terms:
        """Return the terms of an unlabelled batch with the teacher's translations."""
        raise NotImplementedError(f"{type(self).__name__} must define student_terms")


class CVTTranslation(_SemiSupervisedTranslation):
    """The sum of the auxiliary heads' losses, each per target token (Clark 2021, section 4.2.4).

    The primary head gets no gradient from unlabelled batches, because it takes no part in them.
    """

    def __init__(self, config: TranslationCrossViewConfig) -> None:
        super().__init__(config)
        if not config.auxiliary or len(set(config.auxiliary)) < len(config.auxiliary):
            raise UsageError(
                f"criterion.auxiliary is {list(config.auxiliary)}; name one or more different heads"
            )
        self.auxiliary = tuple(config.auxiliary)
        self.attention_dropout = config.attention_dropout

    def student_terms(self, net: LSTMEncoderDecoder, batch: TranslationBatch) -> Terms:
        assert batch.inputs is not None and batch.targets is not None
        memory = net.encode(batch.tokens, batch.layout)
        states, _ = net.decode(batch.inputs, memory.first)
        terms = {}
        for name in self.auxiliary:
            inputs, targets, per = states, batch.targets, "targets"
            if name == FUTURE:
                # Predicts the word at t from the attention vector at t - 1, which is independent of
                # word t - 1.
                inputs, targets, per = states[:, :-1], targets[:, 1:], "later_targets"
            logits = net.heads[name](inputs, memory)
            losses = cross_entropy(logits, targets, self.config.label_smoothing)
            terms[f"cvt_{name}"] = Term(losses.sum(), per, batch.weight)
        return terms


class WordDropoutTranslation(_SemiSupervisedTranslation):
    """The baseline: the primary head is the student and reads [MASK] in place of some words."""

    config: TranslationWordDropoutConfig

    def student_terms(self, net: LSTMEncoderDecoder, batch: TranslationBatch) -> Terms:
        assert batch.inputs is not None and batch.targets is not None and batch.words is not None
        u = uniform(batch.tokens.shape, batch.tokens.device)
        tokens = batch.tokens.masked_fill(batch.words & (u < self.config.rate), batch.mask_id)
        memory = net.encode(tokens, batch.layout)
        logits = net.heads[PRIMARY](net.decode(batch.inputs, memory.first)[0], memory)
        losses = cross_entropy(logits, batch.targets, self.config.label_smoothing)
        return {"word_dropout": Term(losses.sum(), "targets", batch.weight)}


# ------------------------------------------------------------------------ task


class CVTTranslationTask(TranslationTask):
    """Even updates (from 0) learn from pairs, odd ones from source text that is translated first.

    With criterion `translation` there are labelled batches only.
    """

    def __init__(self, config: CVTTranslationConfig, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        self.semi_supervised = isinstance(self.criterion, _SemiSupervisedTranslation)

    # ---------------------------------------------------------------- data and model

    def unlabelled_rows(self) -> TranslationRows:
        """Return the source text without translations."""
        options = self.config
        if options.unlabelled == _REST:
            data, chosen = ParallelSet(self.data, "train"), self.labelled_pairs()[1]
            if not len(chosen):
                raise UsageError(
                    f"task.unlabelled=rest: task.labelled_share={options.labelled_share} leaves no "
                    "pair; lower it, or name a split of source text"
                )
        else:
            data = ParallelSet(self.data, options.unlabelled)
            chosen = drop_long_sentences(data, options.max_length, with_target=False)
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
        if isinstance(self.criterion, _SemiSupervisedTranslation):
            for name in self.criterion.auxiliary:
                dropout = self.criterion.attention_dropout if name == "attention" else 0.0
                net.add_head(name, dropout)  # type: ignore[operator]
        return AveragedNet(net, self.config.average_decay)

    # ---------------------------------------------------------------- updates

    def needs(self, update: int) -> dict[str, int]:
        if self.semi_supervised and update % 2 and update >= self.config.labelled_first:
            return {UNLABELLED: 1}
        return {"train": 1}

    def kinds(self) -> Kinds:
        """Return the two kinds that take turns after task.labelled_first."""
        if not self.semi_supervised:
            return [(1.0, {"train": 1})]
        return [(0.5, {"train": 1}), (0.5, {UNLABELLED: 1})]

    def update(self, engine: Engine, model: nn.Module, batches: Batches) -> Logs:
        """Make one step; the loss is also logged as "loss_labelled" or "loss_unlabelled"."""
        kind = "labelled"
        if UNLABELLED in batches:
            kind, (parts,) = UNLABELLED, batches[UNLABELLED]
            assert isinstance(self.criterion, _SemiSupervisedTranslation)
            updates = engine.optimizers["main"].updates - self.config.labelled_first
            weight = weight_after(self.criterion.config, updates)
            translated = self.with_translations(engine, model, parts)
            batches = {UNLABELLED: [[part.replace(weight=weight) for part in translated]]}
        assert isinstance(model, AveragedNet)
        model.move_average()
        logs = super().update(engine, model, batches)
        return logs | {f"loss_{kind}": logs["loss"]}

    def with_translations(
        self, engine: Engine, model: nn.Module, parts: Sequence[Any]
    ) -> list[TranslationBatch]:
        """Return unlabelled micro-batches with the primary head's translations, by beam search.

        Dropout is off. The lengths of translations are sizes, so all parts are translated before
        the first one is learnt from. All parts get one width, because random numbers depend on it.
        Call on all replicas.
        """

        def search(batch: TranslationBatch) -> Tensor:
            with dropout_at(model, 0.0):
                return self.search(model.net, batch)  # type: ignore[arg-type]

        pad = self.tokenizers[1].vocabulary.pad
        translations = engine.map(search, parts, rng_key="teacher")
        counts = [(ids != pad).sum(-1) for ids in translations]
        longest = max((int(count.max()) for count in counts), default=0)
        width = max(process_group.gather_objects(longest))
        return [self._translated(*part, width) for part in zip(parts, translations, counts)]

    def _translated(
        self, batch: TranslationBatch, ids: Tensor, counts: Tensor, width: int
    ) -> TranslationBatch:
        source, target = (tokenizer.vocabulary for tokenizer in self.tokenizers)
        rows = ids.new_full((len(ids), width), target.pad)
        rows[:, : min(width, ids.shape[1])] = ids[:, :width]
        inputs = rows.roll(1, dims=1)
        inputs[:, 0] = target.cls()
        is_token = torch.arange(width, device=ids.device) < counts[:, None]
        total = int(counts.sum())
        sizes = {"targets": total, "later_targets": total - len(ids)}
        return batch.replace(
            inputs=inputs,
            targets=rows.masked_fill(~is_token, IGNORE),
            words=~batch.layout.padding_of(batch.tokens) & (batch.tokens != source.sep),
            mask_id=source.mask,
            sizes={**batch.sizes, **sizes},
        )

    # ---------------------------------------------------------------- scores

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Score the averaged weights and, with task.score_raw, also the trained ones."""
        assert isinstance(model, AveragedNet)
        return model.scored(partial(super().evaluate, engine), passes, self.config.score_raw)
