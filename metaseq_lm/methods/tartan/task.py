"""End-task-aware training of a text encoder: a labelled set, its own texts, lines of its domain.

The criterion says which tasks are trained: masked_lm the auxiliaries only (TAPT, DAPT), tartan_mt and
tartan_meta the end task with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from metaseq_lm.core.batch import Logs
from metaseq_lm.core.config import option, typed_options
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import register_task
from metaseq_lm.criterions.masked_lm import MaskedLM
from metaseq_lm.data.corpus.rows import Corpus
from metaseq_lm.data.labelled.sentence_rows import SentenceRows
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.manifest import require_tokenizer
from metaseq_lm.data.streams import Order, Sequential, Shuffled, Stream
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.engine.engine import Engine
from metaseq_lm.methods.tartan import data, update
from metaseq_lm.methods.tartan.criterion import Meta, MultiTask, endtask_scored, task_terms
from metaseq_lm.methods.tartan.model import LM, META, SENTENCE, build_text_model, sentence_head
from metaseq_lm.methods.tartan.update import AUXILIARY, BODY, DEV, ENDTASK, FIT, HEAD
from metaseq_lm.optim import Optimizer, build_optimizer
from metaseq_lm.tasks import Batches, Passes, Scored, Task, with_epochs
from metaseq_lm.tasks.finetuning import encoder_weights, labelled_folder, labelled_scores
from metaseq_lm.tasks.masked_lm import masking_of, scored_rows

TAPT = "tapt"
FORMS = ("single", "pair")


@dataclass
class TartanConfig:
    """Tasks and batches; the defaults are the authors' (batches of 2 x 64 accumulated)."""

    labelled: str = option("", "labelled set in DATA, the end task")
    auxiliary: list[str] = option(
        [TAPT], "masked-LM tasks: tapt, the labelled set's own texts, or splits of DATA"
    )
    lines_per_example: int = option(
        0,
        "draw so many lines of each such split for each row of the labelled set (0 = all)",
        at_least=0,
    )
    lines_seed: int | None = option(None, "seed of that draw (null = the run's)")
    own_lm_heads: bool = option(True, "an LM head for each auxiliary; false: one (the code)")
    batch_size: int = option(128, "rows of a batch of the end task", at_least=1)
    auxiliary_batch_size: int = option(
        0, "rows of a batch of each auxiliary (0 = batch_size)", at_least=0
    )
    dev_batch_size: int = option(
        0, "rows of a batch of the meta-objective (0 = batch_size)", at_least=0
    )
    meta_head_batch_size: int = option(32, "rows the meta head is fitted to", at_least=1)
    dev_split: str = option("valid", "split of the labelled set that is the meta-objective's")
    epochs: float = option(
        0.0, "sets trainer.max_update from the largest auxiliary (0 = it is given)", at_least=0
    )
    tokens_per_sample: int = option(128, "longest row, with its special tokens; others are cut")
    mask_prob: float = option(0.15, "share of the tokens that are targets", at_least=0, at_most=1)
    mask_rounding: str = option(
        "random",
        "their number, random: right on average; nearest",
        choices=("random", "nearest"),
    )
    legacy_duplicates: bool = option(False, "draw targets with replacement (ELECTRA's code)")
    random_token_prob: float = option(
        0.1, "share of the targets that become a random token", at_least=0, at_most=1
    )
    leave_unmasked_prob: float = option(
        0.1, "share of the targets that stay", at_least=0, at_most=1
    )
    attend_to_padding: bool = option(False, "no mask for padding (the authors' code)")
    head_dropout: float = option(0.1, "dropout in the classification heads", at_least=0, below=1)
    head_lr: float = option(1e-3, "rate of the end task's head", at_least=0)
    head_weight_decay: float = option(0.1, "weight decay of the end task's head", at_least=0)
    valid_size: int = option(0, "rows of the validation split that are used (0 = all)", at_least=0)


@register_task("tartan", dataclass=TartanConfig)
class TartanTask(Task):
    """One body, an LM head for the auxiliaries, a head for the end task, and the meta head.

    Optimizers: "body" of encoder and LM heads, "head" of the end task's head.
    """

    fresh = ("heads.", "task_logits")
    criterions = (MultiTask, MaskedLM)

    def __init__(self, config: TartanConfig, run_config: DictConfig) -> None:
        super().__init__(config, run_config)
        check_names(self.config.auxiliary)
        self.vocabulary = Vocabulary.load(self.data / "dict.txt")
        self.members = [AUXILIARY + name for name in self.config.auxiliary]
        if isinstance(self.criterion, MultiTask):
            self.members.append(ENDTASK)
            self.criterion.start(len(self.members))  # complains now about wrong weights
        self._rows: dict[str, SentenceRows] = {}

    @classmethod
    def prepare(cls, config: DictConfig) -> DictConfig:
        options = config.task
        if not options.epochs:
            return config
        # Built for its sizes only, which the model's have no part in.
        sizes = [
            len(rows.lengths)
            for rows in cls(typed_options("task", config.task), config).auxiliary_rows().values()
        ]
        return with_epochs(config, max(sizes), batch_size_of(options, "auxiliary"), options.epochs)

    # ---------------------------------------------------------------- data

    def labelled(self, split: str) -> SentenceRows:
        """Return the rows of a split of the end task, read once."""
        if split not in self._rows:
            found = LabelledSet(labelled_folder(self.run_config), split)
            require_tokenizer(found.folder, found.tokenizer_hash)
            if found.form not in FORMS or found.regression:
                raise UsageError(
                    f"{found.folder}: task tartan needs classes of single texts or pairs; this set "
                    f"has {'real values' if found.regression else f'the form {found.form}'}"
                )
            room = self.config.tokens_per_sample
            self._rows[split] = SentenceRows(found, self.vocabulary, room)
        return self._rows[split]

    def auxiliary_rows(self) -> dict[str, data.Rows]:
        """Return the rows of each auxiliary task by its name."""
        options, config = self.config, self.run_config
        masking = masking_of(options, self.vocabulary)
        found = {}
        for name in options.auxiliary:
            if name == TAPT:
                found[name] = data.masked_texts(self.labelled("train"), masking)
                continue
            corpus = Corpus(self.data, name, self.vocabulary, options.tokens_per_sample, "eos")
            count = 0
            if options.lines_per_example:
                count = options.lines_per_example * len(self.labelled("train"))
            seed = config.seed if options.lines_seed is None else options.lines_seed
            found[name] = data.masked_lines(corpus, count, masking, seed, name)
        return found

    def stream(self, name: str, order: Order, rows: data.Rows, head: str) -> Stream:
        """Return a stream whose batches name their head."""
        collate = data.with_head(rows.collate, head, self.config.attend_to_padding)
        return Stream(name, order, collate, self.run_config.seed, rows.lengths)

    def build_streams(self, split: str) -> dict[str, Stream]:
        options, seed = self.config, self.run_config.seed
        if split != "train":
            return {split: self.once(split)}
        streams = {}
        size = batch_size_of(options, "auxiliary")
        for (name, rows), head in zip(self.auxiliary_rows().items(), self.lm_heads_by_task()):
            full = AUXILIARY + name
            order = Shuffled(len(rows.lengths), size, seed, full)
            streams[full] = self.stream(full, order, rows, head)
        if isinstance(self.criterion, MultiTask):
            streams[ENDTASK] = self.drawn(ENDTASK, "train", options.batch_size, SENTENCE)
        if isinstance(self.criterion, Meta):
            config = self.criterion.config
            head = SENTENCE if config.same_head else META
            dev = options.dev_split
            streams[DEV] = self.drawn(DEV, dev, batch_size_of(options, "dev"), head)
            if not config.same_head:
                fit = "train" if config.meta_head_split == "train" else dev
                streams[FIT] = self.drawn(FIT, fit, options.meta_head_batch_size, META)
        return streams

    def once(self, split: str) -> Stream:
        """Return one pass over a split of the end task; with masked_lm its texts are masked."""
        rows, options = self.labelled(split), self.config
        order = Sequential(scored_rows(self, split, len(rows)), options.batch_size)
        if isinstance(self.criterion, MultiTask):
            return self.stream(split, order, whole(rows), SENTENCE)
        masked = data.masked_texts(rows, masking_of(options, self.vocabulary))
        return self.stream(split, order, masked, self.lm_heads()[0])

    def drawn(self, name: str, split: str, batch_size: int, head: str) -> Stream:
        """Return an endless stream of labelled batches, each drawn anew."""
        rows = self.labelled(split)
        if rows.data.labels is None:
            raise MetaseqError(f"{rows.data.folder}: '{split}' has no labels to train on")
        order = data.Drawn(len(rows), batch_size, self.run_config.seed, name)
        return self.stream(name, order, whole(rows), head)

    # ---------------------------------------------------------------- model

    def lm_heads(self) -> tuple[str, ...]:
        """Return the names of the LM heads."""
        count = len(self.config.auxiliary) if self.config.own_lm_heads else 1
        return (LM, *(f"{LM}{i}" for i in range(1, count)))

    def lm_heads_by_task(self) -> list[str]:
        """Return the name of each auxiliary's LM head."""
        heads = self.lm_heads()
        return [heads[i if len(heads) > 1 else 0] for i in range(len(self.config.auxiliary))]

    def build_model(self) -> nn.Module:
        model = build_text_model(self.run_config, self.vocabulary, self.lm_heads())
        start = torch.zeros(len(self.members))
        if isinstance(self.criterion, MultiTask):
            classes = len(self.labelled("train").data.label_names)
            width, dropout = self.run_config.model.encoder_embed_dim, self.config.head_dropout
            model.heads[SENTENCE] = sentence_head(width, classes, dropout)
            # Last, so that everything else starts as it does without it.
            if isinstance(self.criterion, Meta) and not self.criterion.config.same_head:
                model.heads[META] = sentence_head(width, classes, dropout)
            start = self.criterion.start(len(self.members))
        model.register_buffer("task_logits", start)
        return model

    def build_optimizers(self, model: nn.Module) -> dict[str, Optimizer]:
        options, config = self.config, self.run_config
        heads = tuple(f"heads.{name}." for name in (SENTENCE, META))
        body = [(n, p) for n, p in model.named_parameters() if not n.startswith(heads)]
        found = {BODY: build_optimizer(body, config.optimizer, config.schedule)}
        if ENDTASK in self.members:
            found[HEAD] = update.build_own_optimizer(
                model.get_submodule(f"heads.{SENTENCE}"),
                config.optimizer,
                config.schedule,
                options.head_lr,
                options.head_weight_decay,
            )
        return found

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Take the encoder and the LM heads of whatever was pre-trained.

        An LM head that it does not have starts as its first one.
        """
        chosen = encoder_weights(weights, self.run_config)
        for head in self.lm_heads():
            own = f"heads.{head}."
            source = own if any(name.startswith(own) for name in weights) else f"heads.{LM}."
            for name, weight in weights.items():
                if name.startswith(source):
                    chosen[own + name.removeprefix(source)] = weight
        return chosen

    # ---------------------------------------------------------------- updates and scores

    def needs(self, number: int) -> dict[str, int]:
        wanted = dict.fromkeys(self.members, 1)
        if isinstance(self.criterion, Meta):
            wanted[DEV] = 1
            if not self.criterion.config.same_head:
                wanted[FIT] = 1
        return wanted

    def update(self, engine: Engine, model: nn.Module, batches: Batches) -> Logs:
        optimizer = self.run_config.optimizer
        return update.update(engine, model, batches, self.members, self.criterion, optimizer)

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return the `labelled_split` of the end task's head; with masked_lm the loss on its texts."""
        ((split, batches),) = passes.items()
        if not isinstance(self.criterion, MultiTask):
            everything = (micro for batch in batches for micro in batch)
            return Scored(
                engine.evaluate(partial(task_terms, model), everything, rng_key="validate")
            )
        data = self.labelled(split).data
        return labelled_scores(engine, data, batches, partial(endtask_scored, model))


def check_names(auxiliary: Sequence[str]) -> None:
    """Raise UsageError unless there are auxiliaries, all different, none with a task's own name."""
    taken = {ENDTASK, DEV} & set(auxiliary)  # the logs of their losses
    if not auxiliary or len(set(auxiliary)) < len(auxiliary) or taken:
        raise UsageError(
            f"task.auxiliary is {list(auxiliary)}; name one or more different tasks: {TAPT}, or splits "
            f"of the corpus in DATA (none may be called {ENDTASK} or {DEV})"
        )


def batch_size_of(options: DictConfig, name: str) -> int:
    """Return the batch size of a kind of rows, that of the end task where it is 0."""
    size: int = getattr(options, f"{name}_batch_size") or options.batch_size
    return size


def whole(rows: SentenceRows) -> data.Rows:
    """Return the rows of a labelled set as they are."""
    return data.Rows(rows.lengths, rows.batch)
