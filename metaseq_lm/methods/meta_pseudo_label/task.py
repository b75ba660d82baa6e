"""The updates, with one method for each kind of label.

An update is C = batches_per_update micro-steps of B = batch_size samples each.
* masked_lm: one student step on the mean of the C micro-steps' losses.
* hard: the student takes C real steps, one per micro-step (or one on their mean), the teacher one.
* soft: C virtual students, side by side as one model with an axis of copies (they all start from
  the same weights); student and teacher take one real step each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import Layout, Logs, ScoredBatch, Terms, as_tensor
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.criterions import Criterion
from metaseq_lm.criterions.masked_lm import MaskedLM
from metaseq_lm.data.corpus.masking import Masking
from metaseq_lm.data.corpus.packing import open_corpus
from metaseq_lm.data.corpus.rows import Corpus
from metaseq_lm.data.streams import Sequential, Stream
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.distributed import vectors
from metaseq_lm.distributed.vectors import Vector, local_part
from metaseq_lm.engine.engine import Engine
from metaseq_lm.methods.meta_pseudo_label import criterion as losses
from metaseq_lm.methods.meta_pseudo_label.criterion import HardLabels, SoftLabels, teacher_logits
from metaseq_lm.methods.meta_pseudo_label.episodes import (
    MLM,
    UNLABELLED,
    Labelled,
    UnlabelledBatch,
    UnlabelledRows,
    labelled_sets,
    masked_rows,
    micro_step_of,
    pseudo_batch,
    streams,
)
from metaseq_lm.methods.meta_pseudo_label.model import (
    Moments,
    VirtualModel,
    adamw_step,
    build_pair,
    moments_of,
    sgd_step,
    student_of,
    teacher_of,
)
from metaseq_lm.methods.meta_pseudo_label.options import HardConfig, MetaPseudoLabelConfig
from metaseq_lm.models.transformer.encoder import TransformerLM
from metaseq_lm.optim import Optimizer, build_optimizer
from metaseq_lm.tasks import Batches, Passes, Scored, TextTask
from metaseq_lm.tasks.finetuning import different_sets
from metaseq_lm.tasks.masked_lm import limited_count, units_of
from metaseq_lm.tasks.protocols import Kinds, ScoresTokens


class MetaPseudoLabelTask(TextTask):
    """Student and teacher on unlabelled text and labelled sets."""

    text_token = MLM
    criterions = (HardLabels, SoftLabels, MaskedLM)

    def __init__(self, config: MetaPseudoLabelConfig, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        self.mlm_token = self.vocabulary.cls(MLM)
        different_sets(self.config.labelled)
        self.takes_second_derivatives = isinstance(self.criterion, SoftLabels)
        updates = {
            HardLabels: self.update_hard,
            SoftLabels: self.update_soft,
            MaskedLM: self.update_mlm,
        }
        self._update = next(u for kind, u in updates.items() if isinstance(self.criterion, kind))

    # ---------------------------------------------------------------- data and nets

    def corpus(self, split: str) -> Corpus:
        corpus = open_corpus(self.data, split, self.vocabulary, self.config, self.run_config.seed)
        assert isinstance(corpus, Corpus)  # the only data set without segments
        return corpus

    def masking(self) -> Masking:
        """Return the paper's masking: CLS and SEP can be targets; a random token may be SEP."""
        vocabulary = self.vocabulary
        never = np.setdiff1d(np.asarray(vocabulary.specials), [vocabulary.sep])
        return Masking(
            mask=vocabulary.mask,
            rate=self.config.mask_prob,
            random=self.config.random_token_prob,
            keep=self.config.leave_unmasked_prob,
            replacements=np.setdiff1d(np.arange(len(vocabulary)), never),
            units=units_of(self.config, self.data),
        )

    def build_streams(self, split: str) -> dict[str, Any]:
        options, seed = self.config, self.run_config.seed
        unlabelled = UnlabelledRows(self.corpus(split), self.masking(), seed)
        if split != "train":
            count = limited_count(len(unlabelled.corpus), options.valid_size)
            order = Sequential(count, options.batch_size * options.batches_per_update)
            rows, lengths = partial(masked_rows, unlabelled), unlabelled.corpus.row_lengths
            return {split: Stream(split, order, rows, seed, lengths)}
        include_mlm = options.include_mlm_task
        if include_mlm is None:
            include_mlm = isinstance(self.criterion, SoftLabels)
        mlm = unlabelled if include_mlm else None
        sets = labelled_sets(self.data, split, self.vocabulary, options)
        labelled = Labelled(sets, mlm, options.samples_per_task, seed, options.mlm_label_mask)
        return streams(unlabelled, labelled, options.batches_per_update, options.batch_size)

    def build_model(self) -> nn.Module:
        pair = build_pair(self.run_config, self.vocabulary)
        if isinstance(self.criterion, SoftLabels) and self.criterion.config.targets == "unigram":
            self.criterion.frequencies = self.frequencies()
        if isinstance(self.criterion, MaskedLM):
            del pair["teacher"]
        return pair

    def frequencies(self) -> Tensor:
        """Return the share of each symbol in the text of the corpus, float64 (V,)."""
        counts = torch.from_numpy(self.vocabulary.text_counts)
        if not counts.sum() > 0:
            raise UsageError(
                "criterion.targets=unigram needs the counts of dict.txt; binarise the corpus with "
                "'metaseq-lm preprocess --trainpref', which counts them"
            )
        return counts / counts.sum()

    def build_optimizers(self, model: nn.Module) -> dict[str, Optimizer]:
        """Return one optimizer per net, with the same settings (table 5)."""
        config = self.run_config
        return {
            name: build_optimizer(net.named_parameters(), config.optimizer, config.schedule)
            for name, net in model.named_children()
        }

    def token_log_probs(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        assert isinstance(self.criterion, ScoresTokens)
        return self.criterion.token_log_probs(student_of(model), batch)

    def encoder_of(self, model: nn.Module) -> nn.Module:
        """Return the encoder of the student."""
        return student_of(model).encoder

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return masked-LM loss and accuracy of the student."""
        return super().evaluate(engine, student_of(model), passes)

    def samples(self, engine: Engine, model: nn.Module) -> list[str]:
        """Return some validation texts with the pair that the teacher makes of each."""
        if isinstance(self.criterion, MaskedLM) or not self.config.pairs:
            return []
        texts = _texts_of(self.corpus(self.run_config.trainer.valid_split), self.config.pairs)
        (batch,) = engine.to_device([texts])
        make = partial(_pair_of, self.criterion, teacher_of(model))
        (pair,) = engine.map(make, [batch], rng_key="pairs")
        return _format_pairs(batch, pair, load_tokenizer(self.data))

    # ---------------------------------------------------------------- updates

    def needs(self, update: int) -> dict[str, int]:
        return self.kinds()[-1 if self.reward_due(update) else 0][1]

    def kinds(self) -> Kinds:
        batches = {"unlabelled": 1, "support": 1, "query": 1}
        if not isinstance(self.criterion, MaskedLM):
            return [(1.0, batches)]
        samples = self.config.batch_size * self.config.batches_per_update
        share = min(1.0, samples / (self.config.reward_interval or math.inf))
        without_reward = (1 - share, batches | {"support": 0, "query": 0})
        return [kind for kind in (without_reward, (share, batches)) if kind[0]]

    def reward_due(self, update: int) -> bool:
        """Return whether masked_lm logs its reward at this update."""
        interval = self.config.reward_interval
        samples = self.config.batch_size * self.config.batches_per_update
        return bool(interval) and (update + 1) * samples // interval > update * samples // interval

    def update(self, engine: Engine, model: nn.Module, batches: Batches) -> Logs:
        return self._update(engine, model, batches)

    def update_mlm(self, engine: Engine, model: nn.Module, batches: Batches) -> Logs:
        """Make a masked-LM step of the student; at intervals, log the reward of such a step."""
        student = student_of(model)
        (unlabelled,) = batches["unlabelled"]
        parameters = engine.parameters("student")
        before = vectors.flat(parameters).detach() if "support" in batches else None
        grads, logs = engine.gradients(partial(losses.student_mlm, student), unlabelled, parameters)
        engine.step("student", grads)
        if before is not None:
            micro_step = self.config.batches_per_update - 1
            with engine.restoring("student"):
                logs |= self.reward(
                    engine, student, HardLabels(HardConfig()), before, batches, micro_step
                )
        return logs

    def update_hard(self, engine: Engine, model: nn.Module, batches: Batches) -> Logs:
        """Sample pairs; the student learns each for a reward, and REINFORCE trains the teacher."""
        criterion, (student, teacher) = self.criterion, (student_of(model), teacher_of(model))
        assert isinstance(criterion, HardLabels)
        parameters, optimizer = engine.parameters("student"), engine.optimizers["student"]
        (unlabelled,) = batches["unlabelled"]
        pairs = engine.map(partial(criterion.sample, teacher), unlabelled, rng_key="teacher")
        logs: Logs = {}
        rewards, micro_steps = [], self.config.batches_per_update
        one_step = criterion.config.fidelity == "paper"
        total: Vector = [None] * len(parameters)
        for micro_step in range(micro_steps):
            pseudo = [
                pseudo_batch(batch, x[micro_step], y[micro_step], micro_step, self.vocabulary.pad)
                for batch, (x, y) in zip(unlabelled, pairs)
            ]
            before = vectors.flat(parameters).detach()
            origin = criterion.origin(optimizer, before)
            grads, pseudo_logs = engine.gradients(
                partial(losses.labelled_loss, student), pseudo, parameters
            )
            with ExitStack() as virtual:
                if one_step:  # a micro-step's step is only tried
                    total = vectors.add(total, grads, 1 / micro_steps)
                    virtual.enter_context(engine.restoring("student"))
                if not engine.step("student", grads):
                    origin = before
                if not one_step:
                    virtual.enter_context(engine.restoring("student"))
                reward_logs = self.reward(engine, student, criterion, origin, batches, micro_step)
            rewards.append(reward_logs["reward"])
            logs = _add_logs(logs, {"pseudo": pseudo_logs["query"]} | reward_logs, 1 / micro_steps)
        if one_step:
            engine.step("student", total)
        sampled = [
            batch.replace(sampled_x=x, sampled_y=y) for batch, (x, y) in zip(unlabelled, pairs)
        ]
        weights = torch.stack(rewards)

        def teacher_loss(batch: UnlabelledBatch) -> Terms:
            # The draw and the first forward equal the sampling pass, so the dropout masks are the
            # same.
            terms = criterion.reinforce(teacher, batch, weights)
            return terms | losses.auxiliary_losses(teacher, batch, self.mlm_token)

        grads, teacher_logs = engine.gradients(
            teacher_loss, sampled, engine.parameters("teacher"), rng_key="teacher"
        )
        engine.step("teacher", grads)
        return logs | teacher_logs

    def reward(
        self,
        engine: Engine,
        student: nn.Module,
        criterion: HardLabels,
        origin: Tensor,
        batches: Batches,
        micro_step: int,
    ) -> Logs:
        """Return the reward of a virtual support step from `origin` (P,), by the query gradient.

        The student is left moved; the caller restores it.
        """
        loss, config = partial(losses.labelled_loss, student), criterion.config
        parameters = engine.parameters("student")
        step = origin - vectors.flat(parameters).detach()
        support = [micro_step_of(batch, micro_step) for batch in batches["support"][0]]
        query = [micro_step_of(batch, micro_step) for batch in batches["query"][0]]
        for _ in range(config.inner_steps):
            grads, _ = engine.gradients(loss, support, parameters)
            engine.move("student", vectors.clip(grads, config.inner_clip_norm), -config.inner_lr)
        grads, logs = engine.gradients(loss, query, parameters)
        grads = vectors.clip(grads, config.inner_clip_norm)
        reward, product = losses.reward_of(config.reward, step, vectors.flat(grads), logs["query"])
        return {"reward": reward, "unscaled_reward": product, "query": logs["query"]}

    def update_soft(self, engine: Engine, model: nn.Module, batches: Batches) -> Logs:
        """Unroll every micro-step, some side by side; make one real step of teacher and student."""
        parameters, copies = engine.parameters("teacher"), self.config.batches_per_update
        at_once = self.config.copies_at_once or copies
        meta: Vector = [None] * len(parameters)
        total: Any = 0.0
        logs: Logs = {}
        student = VirtualModel(student_of(model), engine.placement)
        for low in range(0, copies, at_once):
            chosen = slice(low, min(low + at_once, copies))
            part = {}
            for name, stream in batches.items():
                part[name] = [[batch.some_copies(chosen) for batch in stream[0]]]
            count = chosen.stop - chosen.start
            part_meta, grad0, part_logs = self.unroll(engine, model, student, part, count)
            meta, total = vectors.add(meta, part_meta), total + grad0.sum(0)
            logs = _add_logs(logs, part_logs, count / copies)
        auxiliary, auxiliary_logs = engine.gradients(
            lambda batch: losses.auxiliary_losses(teacher_of(model), batch, self.mlm_token),
            batches["unlabelled"][0],
            parameters,
            rng_key=4,
        )
        engine.step("teacher", vectors.add(auxiliary, meta))
        engine.step("student", student.tensors(total))
        return logs | auxiliary_logs

    def unroll(
        self, engine: Engine, model: nn.Module, student: VirtualModel, batches: Batches, copies: int
    ) -> tuple[Vector, Tensor, Logs]:
        """Differentiate the query loss through two virtual student steps of each of C micro-steps.

        Returns the meta gradient of the teacher, the pseudo gradients (C, P) of the student, and
        the logs. Passes have numbered random streams, so that the noise of a micro-step does not
        depend on micro-steps computed in parallel.
        """
        criterion, teacher = self.criterion, teacher_of(model)
        assert isinstance(criterion, SoftLabels)
        (unlabelled,), (support,), (query,) = map(
            batches.__getitem__, ("unlabelled", "support", "query")
        )
        start = student.vector()  # (P,)
        theta0 = student.leaf(start.expand(copies, -1).clone())  # (C, P)
        replay = bool(criterion.difference_step)

        # Forward: theta0 --teacher's pairs--> theta1 --support--> theta2 --query--> loss.
        pseudo = engine.inner(
            lambda batch: criterion.distil(partial(student, theta0), teacher, batch),
            unlabelled,
            [theta0],
            rng_key=1,
            replay=replay,
        )
        grad0 = _leaf(pseudo.value[0])
        theta1, moments = self.pretrain_step(engine, start, grad0)
        at1 = student.leaf(theta1)
        if criterion.config.inner_steps:
            tuned = engine.inner(
                lambda batch: losses.labelled_loss(partial(student, at1), batch),
                support,
                [at1],
                rng_key=2,
                replay=replay,
            )
            grad1 = _leaf(tuned.value[0])
            theta2 = self.finetune_step(theta1, grad1, moments)
        else:
            tuned, grad1, theta2 = None, None, theta1
        at2 = student.leaf(theta2)
        weight = criterion.config.meta_weight / self.config.batches_per_update
        (grad_at2,), logs = engine.gradients(
            lambda batch: losses.labelled_loss(partial(student, at2), batch, weight),
            query,
            [at2],
            rng_key=3,
            full_precision=True,
        )

        # Backward: to grad0 past the support step (its Hessian included), then into the teacher.
        grad_theta2 = None if grad_at2 is None else local_part(grad_at2)
        if grad_theta2 is None:
            grad_grad0 = torch.zeros_like(grad0)  # meta weight 0: only auxiliary losses
        elif tuned is None or grad1 is None:
            (grad_grad0,) = torch.autograd.grad(theta1, grad0, grad_theta2)
        else:
            (grad_grad1,) = torch.autograd.grad(theta2, grad1, grad_theta2, retain_graph=True)
            (hvp,) = engine.hypergradients(
                tuned, [student.place(grad_grad1)], [at1], criterion.difference_step
            )
            assert hvp is not None
            (grad_grad0,) = torch.autograd.grad(
                [theta2, theta1], grad0, [grad_theta2, local_part(hvp)]
            )
        meta = engine.hypergradients(
            pseudo,
            [student.place(grad_grad0)],
            engine.parameters("teacher"),
            criterion.difference_step,
        )
        return meta, grad0.detach(), {"pseudo": pseudo.logs["pseudo"], "query": logs["query"]}

    def pretrain_step(
        self, engine: Engine, theta: Tensor, grad: Tensor
    ) -> tuple[Tensor, Moments | None]:
        """Return the virtual student after a step on the pairs, differentiable in `grad` (C, P)."""
        assert isinstance(self.criterion, SoftLabels)
        if self.criterion.config.fidelity == "paper":
            grad = grad * self.config.batches_per_update
        if self.criterion.config.pretrain_step == "sgd":
            return sgd_step(theta, grad, self.criterion.config.inner_lr), None
        return adamw_step(theta, grad, moments_of(engine.optimizers["student"]))

    def finetune_step(self, theta: Tensor, grad: Tensor, moments: Moments | None) -> Tensor:
        """Return the virtual student after its step on the support batch."""
        assert isinstance(self.criterion, SoftLabels)
        if self.criterion.config.finetune_step == "sgd":
            return sgd_step(theta, grad, self.criterion.config.inner_lr)
        assert moments is not None
        return adamw_step(theta, grad, moments)[0]


def _leaf(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return local_part(tensor.detach()).requires_grad_()


def _add_logs(total: Logs, part: Logs, weight: float) -> Logs:
    return {name: total.get(name, 0.0) + weight * value for name, value in part.items()}


# ------------------------------------------------------------------------ pairs as text
# Tables 1 and 3 of the paper.


def _texts_of(corpus: Corpus, count: int) -> UnlabelledBatch:
    """Return `count` texts spread evenly over a corpus as a micro-step (1, N, S)."""
    chosen = np.unique(np.linspace(0, len(corpus) - 1, count).round().astype(np.int64))
    original, lengths = corpus.rows(chosen, cls=UNLABELLED)
    padding = np.arange(original.shape[1]) >= lengths[:, None]
    return UnlabelledBatch(
        tokens=as_tensor(original[None]),
        layout=Layout(as_tensor(padding[None])),
        original=as_tensor(original[None]),
        rows=np.arange(len(chosen), dtype=np.uint64),
    )


@torch.no_grad()
def _pair_of(
    criterion: Criterion, teacher: TransformerLM, batch: UnlabelledBatch
) -> tuple[Tensor, Tensor]:
    """Return the teacher's pair, (1, N, S) each: a sample (hard) or the likeliest tokens (soft)."""
    if isinstance(criterion, HardLabels):
        return criterion.sample(teacher, batch)
    x, y = (scores.argmax(-1) for scores in teacher_logits(teacher, batch))
    if isinstance(criterion, SoftLabels) and criterion.config.fixed_y:
        return x, batch.original
    return x, y


def _format_pairs(
    batch: UnlabelledBatch, pair: tuple[Tensor, Tensor], tokenizer: Tokenizer
) -> list[str]:
    """Return three lines for each text: x, the teacher's input x̂ and its target ŷ."""
    assert batch.padding is not None
    named = zip(("x", "x\u0302", "y\u0302"), (batch.original, *pair))
    texts = [(name, tokens[0]) for name, tokens in named]
    samples = []
    for row, padding in enumerate(batch.padding[0]):
        lines = [
            f"{name}  {_readable(tokens[row, ~padding].tolist(), tokenizer)}"
            for name, tokens in texts
        ]
        samples.append("\n".join(lines))
    return samples


def _readable(tokens: Iterable[int], tokenizer: Tokenizer) -> str:
    """Return tokens as text on one line, special symbols by name."""
    vocabulary = tokenizer.vocabulary
    parts = []
    for special, run in groupby(tokens, key=lambda token: token in vocabulary.unwritten):
        if special:
            parts += [vocabulary.symbols[token] for token in run]
        else:
            parts += tokenizer.decode(run).split()
    return " ".join(parts)
