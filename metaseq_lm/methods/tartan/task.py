"""End-task-aware training of a text encoder on a labelled set, its texts and domain texts.

The criterion decides which tasks are trained: masked_lm trains only the auxiliary tasks (TAPT,
DAPT), tartan_mt and tartan_meta also train the end task.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn

from metaseq_lm.core.batch import ALL_VISIBLE, Batch
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.criterions.masked_lm import MaskedLM
from metaseq_lm.data.corpus.masking import Masking
from metaseq_lm.data.corpus.rows import Corpus
from metaseq_lm.data.labelled.sentence_rows import SentenceRows
from metaseq_lm.data.streams import Sequential, Shuffled, Stream
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.engine.engine import Engine
from metaseq_lm.methods.tartan.criterion import MultiTask, endtask_scored
from metaseq_lm.methods.tartan.data import TartanRows, masked_lines, masked_texts
from metaseq_lm.methods.tartan.model import META
from metaseq_lm.methods.tartan.options import TAPT, TartanConfig
from metaseq_lm.methods.tartan.update import AUXILIARY, DEV, ENDTASK, EndTaskAware
from metaseq_lm.models.transformer.encoder import SentenceHead, TransformerLM
from metaseq_lm.tasks import Passes, Scored, with_epochs
from metaseq_lm.tasks.finetuning import (
    encoder_sizes,
    encoder_weights,
    labelled_folder,
    labelled_scores,
    sentence_rows,
)
from metaseq_lm.tasks.masked_lm import masking_of, scored_rows, units_of

_FORMS = ("single", "pair")
LM = "lm"  # the first LM head


class TartanTask(EndTaskAware):
    """One encoder with an LM head per auxiliary task, a head for the end task and a meta head."""

    exported = (
        "it trains the heads of several objectives at once, and a class of transformers has one; "
        "start task sentence_prediction or masked_lm from it to export that"
    )
    criterions = (MultiTask, MaskedLM)
    endtask_head = "sentence"

    def __init__(self, config: TartanConfig, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        names = list(self.config.auxiliary)
        # Logs have loss_endtask and loss_dev next to the losses of the auxiliary tasks.
        if not names or len(set(names)) < len(names) or {ENDTASK, DEV} & set(names):
            raise UsageError(
                f"task.auxiliary is {names}; name one or more different tasks: {TAPT}, or splits "
                f"of the corpus in DATA (none may be called {ENDTASK} or {DEV})"
            )
        self.authors = self.config.fidelity == "authors"
        self.lm_heads = dict.fromkeys(names, LM)
        if not self.authors:
            self.lm_heads |= {name: f"{LM}{i}" for i, name in enumerate(names) if i}
        self.vocabulary = Vocabulary.load(self.data / "dict.txt")
        self.members = [AUXILIARY + name for name in names]
        if isinstance(self.criterion, MultiTask):
            self.members.append(ENDTASK)
            self.criterion.initial_logits(len(self.members))  # rejects wrong weights early
        self.labelled = lru_cache(maxsize=None)(self._labelled)

    @classmethod
    def prepare(cls, config: RunConfig) -> RunConfig:
        options = config.task
        if not options.epochs:
            return config
        task = cls(config.task, config)
        largest = max(len(rows.lengths) for rows in task.auxiliary_rows().values())
        return with_epochs(config, largest, options.batch_size, options.epochs)

    # ---------------------------------------------------------------- data

    def _labelled(self, split: str) -> SentenceRows:
        folder = labelled_folder(self.run_config)
        rows = sentence_rows(folder, split, self.vocabulary, self.config.tokens_per_sample)
        if rows.data.form not in _FORMS or rows.data.regression:
            form = "real values" if rows.data.regression else f"the form {rows.data.form}"
            raise UsageError(
                f"{folder}: task tartan needs classes of single texts or pairs; this set has {form}"
            )
        return rows

    def cut_rows(self, split: str) -> dict[str, np.ndarray]:
        """Return which rows of the end task's set are truncated."""
        return {"": self.labelled(split).is_cut}

    def labelled_rows(self, split: str) -> TartanRows:
        rows = self.labelled(split)
        if rows.data.labels is None:
            raise MetaseqError(f"{rows.data.folder}: '{split}' has no labels to train on")
        return TartanRows(rows.lengths, rows.batch)

    def masking(self) -> Masking:
        """Return how the tokens of texts are masked."""
        units = units_of(self.config, self.data)
        return masking_of(self.config, self.vocabulary, units=units)

    def auxiliary_rows(self) -> dict[str, TartanRows]:
        """Return the rows of each auxiliary task."""
        options, config = self.config, self.run_config
        masking = self.masking()
        seed = config.seed if options.lines_seed is None else options.lines_seed
        rows = {}
        for name in options.auxiliary:
            if name == TAPT:
                rows[name] = masked_texts(self.labelled("train"), masking)
                continue
            corpus = Corpus(self.data, name, self.vocabulary, options.tokens_per_sample, "eos")
            count = 0
            if options.lines_per_example:
                count = options.lines_per_example * len(self.labelled("train"))
            rows[name] = masked_lines(corpus, count, masking, seed, name)
        return rows

    def for_head(self, batch: Any, head: str) -> Batch:
        named = super().for_head(batch, head)
        return named.replace(layout=ALL_VISIBLE) if self.authors else named

    def build_streams(self, split: str) -> dict[str, Stream]:
        """Return the streams of all tasks, or one pass over a split of the end task.

        With criterion masked_lm, the texts of the pass are masked.
        """
        options = self.config
        if split != "train":
            labelled, head = self.labelled(split), self.endtask_head
            rows = TartanRows(labelled.lengths, labelled.batch)
            if not isinstance(self.criterion, MultiTask):
                rows, head = masked_texts(labelled, self.masking()), LM
            one_pass = Sequential(scored_rows(self, split, len(labelled)), options.batch_size)
            return {split: self.stream(split, one_pass, rows, head)}
        streams = {}
        for name, rows in self.auxiliary_rows().items():
            stream = AUXILIARY + name
            seed = self.run_config.seed
            order = Shuffled(len(rows.lengths), options.batch_size, seed, stream)
            streams[stream] = self.stream(stream, order, rows, self.lm_heads[name])
        return streams | self.drawn_streams()

    # ---------------------------------------------------------------- model

    def build_model(self) -> nn.Module:
        sizes, vocabulary = encoder_sizes(self.run_config), self.vocabulary
        lm_heads = tuple(dict.fromkeys(self.lm_heads.values()))
        model = TransformerLM(sizes, len(vocabulary), vocabulary.pad, lm_heads)
        logits = torch.zeros(len(self.members))
        if isinstance(self.criterion, MultiTask):
            classes = len(self.labelled("train").data.label_names)
            # The meta head comes last, so that it does not change the initial values of other
            # weights.
            heads = [self.endtask_head, *[META] * self.has_meta_head]
            for name in heads:
                model.heads[name] = SentenceHead(
                    sizes.width, classes, self.config.head_dropout, pooled=True, pooler_dropout=True
                )
            logits = self.criterion.initial_logits(len(self.members))
        model.register_buffer("task_logits", logits)
        return model

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Load the encoder and the LM heads; a missing LM head starts as the first one."""
        chosen = encoder_weights(weights, self.run_config)
        for head in set(self.lm_heads.values()):
            prefix = source = f"heads.{head}."
            if not any(name.startswith(prefix) for name in weights):
                source = f"heads.{LM}."
            for name, weight in weights.items():
                if name.startswith(source):
                    chosen[prefix + name.removeprefix(source)] = weight
        return chosen

    # ---------------------------------------------------------------- scores

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return the scores of the end task's head; with criterion masked_lm the masked-LM loss."""
        if not isinstance(self.criterion, MultiTask):
            return super().evaluate(engine, model, passes)
        ((split, batches),) = passes.items()
        data = self.labelled(split).data
        return labelled_scores(engine, data, batches, partial(endtask_scored, model))
