"""The examination of an objective before it gets a row: which tokens do its predictions see?

It runs in float64, with random weights, on rows of random tokens. Every token is changed in turn,
and the predictions of validation and the scores of sentences may change only as the criterion
declares (`reach`, `score_reach`, `normalised` of `Criterion`).
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from metaseq_lm.core.batch import ScoredBatch, as_tensor
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.metric_names import CAUSAL_NLL, CLOZE_NLL
from metaseq_lm.data.corpus.rows import layout_of
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.storage.word_starts import WordStartsWriter
from metaseq_lm.data.streams import Stream
from metaseq_lm.data.tokenizers.base import DICT_FILE
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.tasks import Passes, Task, with_updates
from metaseq_lm.tasks.protocols import (
    HasParts,
    ScoresTokens,
    score_reach_of,
    task_read_as,
    token_scorer,
)
from metaseq_lm.training.parts import Parts, build_parts, prepare_config

_VALID, _EOS, _NONE, _DOCUMENTS, _SEGMENTS = "valid", "eos", "none", "documents", "segments"
_LENGTH, _FURTHER = 8, 3  # tokens of a row, and more of a longer one
_MASKINGS = 4  # global batches, each with other masks
_MOST = 1024  # symbols to sum over; a sample of them in larger vocabularies
_TOLERANCE = 1e-7  # of log-probabilities in float64
_NOISE = 0.1  # standard deviation of the noise added to all weights
_Losses = list[tuple[int, float]]  # targets with their losses


def examine(config: RunConfig) -> None:
    """Raise UsageError if predictions depend on tokens that the criterion does not declare.

    The error names the criterion, the check and the tokens. Data other than token corpora, and
    scores of criterions without `token_log_probs`, are not examined.
    """
    config = prepare_config(config)
    if not config.trainer.max_update:
        config = with_updates(config, 1)
    longest = min(_LENGTH + _FURTHER, getattr(config.task, "tokens_per_sample", 0) - 2)
    files = [Path(config.data, name) for name in (DICT_FILE, f"{_VALID}.idx")]
    if longest < 4 or not all(file.exists() for file in files):
        return
    engine = replace(config.engine, precision="fp64", device="cpu", compile=False)
    with tempfile.TemporaryDirectory() as room:
        segments = getattr(config.task, "sample_break_mode", _EOS) == _SEGMENTS
        rows = _make_room(Path(config.data).resolve(), Path(room), longest, segments)
        vocabulary = Vocabulary.load(Path(room, DICT_FILE))
        parts = build_parts(replace(config, engine=engine, data=room), dry_run=True)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in parts.model.parameters():
                noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
                weight.add_(noise, alpha=_NOISE)
        whole = parts.task
        with parts.evaluation_mode():
            for task in whole.tasks.values() if isinstance(whole, HasParts) else [whole]:
                _Examination(parts, task, rows, vocabulary).check_losses()
            reading = task_read_as(whole)
            if isinstance(reading.criterion, ScoresTokens):
                _Examination(parts, reading, rows, vocabulary).check_scores()


def _make_room(data: Path, room: Path, longest: int, segments: bool) -> list[np.ndarray]:
    """Make a copy of a data folder with another valid split; return the rows of that split.

    The rows are a base row, copies of it with each token changed in turn, and a longer row of
    `longest` tokens. Each is a document, of two sequences if it is cut into `segments`.
    """
    for file in data.iterdir():
        if not file.name.startswith(f"{_VALID}."):
            (room / file.name).symlink_to(file)
    vocabulary = Vocabulary.load(data / DICT_FILE)
    draw = np.random.default_rng(1)
    symbols = np.setdiff1d(np.arange(len(vocabulary)), vocabulary.specials)
    length = min(_LENGTH, longest - 1)
    first: np.ndarray = draw.choice(symbols, length)
    rows = [first, *(first.copy() for _ in range(length))]
    for place in range(length):
        rows[place + 1][place] = draw.choice(symbols[symbols != first[place]])
    rows.append(draw.choice(symbols, longest))
    with (
        IndexedWriter(room / _VALID, np.int32, documents=True) as writer,
        WordStartsWriter(room / _VALID) as words,
    ):
        for row in rows:
            for part in np.array_split(row, 2 if segments else 1):
                writer.add(part.astype(np.int32))
            writer.end_documents([len(writer)])
            words.extend(np.ones(len(row), np.int32))
    return rows


class _CrossEntropies(TorchDispatchMode):
    """Keeps the log-probabilities (N, V) and targets (N,) of every cross-entropy of torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.predictions: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.nll_loss_forward.default and args[0].dim() == 2:
            self.predictions.append((args[0].clone(), args[1].clone()))
        return func(*args, **(kwargs or {}))


@dataclass
class _Examination:
    """Examines a task: its predictions may depend only on declared tokens, never on the target.

    Attributes:
        parts: Networks and engine.
        task: The task, or one of several on the same networks.
        rows: The rows of the valid split, see `_make_room`.
        vocabulary: The symbols.
        terms: The names of the metrics of the validations.
    """

    parts: Parts
    task: Task
    rows: list[np.ndarray]
    vocabulary: Vocabulary
    terms: set[str] = field(default_factory=set)

    def check_losses(self) -> None:
        task, alone = self.task, []
        if hasattr(task.config, "leave_unmasked_prob"):
            # The option declares that the model sees these targets.
            task.config = replace(task.config, leave_unmasked_prob=0.0)
        mode, pair = getattr(task.config, "sample_break_mode", _EOS), [0, len(self.rows) - 1]
        if mode in (_NONE, _DOCUMENTS):
            task.config = replace(task.config, sample_break_mode=_EOS)
        for name, stream in task.build_streams(_VALID).items():
            if len(stream.lengths) != len(self.rows):
                continue  # it reads something other than the rows
            self.check_terms(name, stream)
            for number in range(_MASKINGS):
                self.check_changes(name, stream, number)
                apart = self.losses(name, stream, number, pair, 0)
                apart += self.losses(name, stream, number, pair, 1)
                together = self.losses(name, stream, number, pair)
                self.compare(apart, together, "the rows and the padding beside it")
            for sample in range(len(self.rows)):
                alone += self.losses(name, stream, 0, [sample])
        if mode == _DOCUMENTS:
            task.config, packed = replace(task.config, sample_break_mode=mode), []
            for name, stream in task.build_streams(_VALID).items():
                for sample in range(len(stream.lengths)):
                    packed += self.losses(name, stream, 0, [sample])
            self.compare(alone, packed, "the documents packed with it")

    def check_terms(self, name: str, stream: Stream) -> None:
        # Terms which claim a bound have to be cross-entropies that can be examined.
        self.terms = set()
        has_targets = any(self.losses(name, stream, number, [0]) for number in range(_MASKINGS))
        kinds, bounds = self.parts.engine.record.loss_terms, (CAUSAL_NLL, CLOZE_NLL)
        terms = [term for term in sorted(self.terms) if kinds.get(term) in bounds]
        if terms and not has_targets:
            self.refuse(
                f"{', '.join(terms)} is not a cross-entropy of torch, so what it sees is not "
                "known; compute it by torch.nn.functional.cross_entropy, or give it another name"
            )

    def check_changes(self, name: str, stream: Stream, number: int) -> None:
        # What predictions depend on, in one global batch.
        base = self.predictions(name, stream, number, [0])
        changed = {}
        for place in range(len(self.rows[0])):
            observed = self.predictions(name, stream, number, [place + 1])
            if [x.shape for x, _ in observed] == [x.shape for x, _ in base]:
                changed[place] = observed
        for call, (log_probs, targets) in enumerate(base):
            sums = log_probs.logsumexp(-1)[targets >= 0]
            if len(sums) and float(sums.abs().max()) > _TOLERANCE:
                self.refuse("its losses do not come from probabilities that sum to one")
            for place, observed in changed.items():
                of_place = targets == int(self.rows[0][place])
                of_place &= observed[call][1] == int(self.rows[place + 1][place])
                reason = f"the prediction of token {place + 1} depends on "
                for other, then in changed.items():
                    differs = ((log_probs - then[call][0]).abs() > _TOLERANCE).any(-1)
                    if not (of_place & differs).any():
                        continue
                    if other == place and not self.task.criterion.sees_targets:
                        self.refuse(f"{reason}that token itself")
                    if other > place and score_reach_of(self.task) == "causal":
                        reason += f"token {other + 1}, which stands behind it, and it declares the "
                        self.refuse(f"{reason}reach causal")

    def compare(self, alone: _Losses, together: _Losses, company: str) -> None:
        # Other masks, with other targets, may give other losses.
        pairs = list(zip(sorted(alone), sorted(together)))
        is_same = len(alone) == len(together) and all(x[0] == y[0] for x, y in pairs)
        if is_same and any(abs(x[1] - y[1]) > _TOLERANCE for x, y in pairs):
            self.refuse(f"the losses of a row depend on {company}")

    def predictions(
        self, name: str, stream: Stream, number: int, samples: list[int], only: int | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the predictions of a micro-batch of samples, or of the one at index `only`."""
        chosen = np.array(samples)
        rows = np.arange(len(chosen)) if only is None else np.array([only])
        width = int(stream.lengths[chosen[rows]].max())
        batch = stream.micro_batch(number, chosen, rows, width, rows)
        passes: Passes = {name: [self.parts.engine.to_device([batch])]}
        mode = _CrossEntropies()
        with mode:
            scored = self.task.evaluate(self.parts.engine, self.parts.model, passes)
        self.terms |= set(scored.metrics)
        return mode.predictions

    def losses(
        self, name: str, stream: Stream, number: int, samples: list[int], only: int | None = None
    ) -> _Losses:
        losses: _Losses = []
        for log_probs, targets in self.predictions(name, stream, number, samples, only):
            known = targets[targets >= 0]
            chosen = log_probs[targets >= 0].gather(1, known.unsqueeze(1)).squeeze(1)
            losses += zip(known.tolist(), (-chosen).tolist())
        return losses

    def check_scores(self) -> None:
        try:
            (base,) = self.scores(self.rows[:1])
        except UsageError:  # a configuration without scores, such as ELECTRA with a masked LM
            return
        for place in range(1, len(base)) if score_reach_of(self.task) == "causal" else ():
            (changed,) = self.scores([self.rows[place + 1]])
            if np.abs(changed[:place] - base[:place]).max() > _TOLERANCE:
                reason = f"scores before token {place + 1} depend on it, and it declares the "
                self.refuse(f"{reason}reach causal")
        company = self.scores([self.rows[0], self.rows[-1]])[0]
        if np.abs(company - base).max() > _TOLERANCE:
            self.refuse("the scores of a row depend on the rows and the padding beside it")
        if self.task.criterion.normalised:
            for place in (0, len(base) // 2, len(base) - 1):
                self.check_sum(place)

    def check_sum(self, place: int) -> None:
        """Check that the probabilities of all symbols at a place sum to 1, or to less for a part.

        A token that is not predicted scores 0 for every symbol.
        """
        symbols = np.arange(len(self.vocabulary))
        # A model with more outputs than symbols gives the unused outputs a share.
        is_whole = getattr(self.parts.config.model, "vocab_multiple", 1) <= 1
        if len(symbols) > _MOST:
            symbols = np.random.default_rng(1).choice(symbols, _MOST, replace=False)
            is_whole = False
        rows = np.repeat(self.rows[0][None], len(symbols), axis=0)
        rows[:, place] = symbols
        scores = [score[place] for score in self.scores(list(rows), place)]
        total = float(np.exp(scores).sum())
        if any(scores) and (total > 1 + _TOLERANCE or (is_whole and total < 1 - _TOLERANCE)):
            which = "all" if is_whole else "some"
            reason = f"the probabilities of {which} symbols at token {place + 1} sum to {total:.6g}"
            self.refuse(f"{reason}; a criterion of other scores declares normalised = False")

    def scores(self, rows: list[np.ndarray], place: int | None = None) -> list[np.ndarray]:
        """Return the scores of the tokens of rows; if `place` is given, 0 everywhere else."""
        vocabulary = self.vocabulary
        lengths = np.array([len(row) + 2 for row in rows])
        tokens = np.full((len(rows), lengths.max()), vocabulary.pad, np.int64)
        scored = np.zeros(tokens.shape, bool)
        for i, row in enumerate(rows):
            ends = vocabulary.cls(self.task.text_token), vocabulary.sep
            tokens[i, : len(row) + 2] = [ends[0], *row, ends[1]]
            scored[i, 1 : len(row) + 1] = place is None or np.arange(len(row)) == place
        batch = ScoredBatch(
            tokens=as_tensor(tokens),
            layout=layout_of(lengths, int(lengths.max())),
            scored=as_tensor(scored),
            mask_id=vocabulary.mask,
            batch_tokens=1 << 12,
        )
        scorer, model, engine = token_scorer(self.task), self.parts.model, self.parts.engine
        (values,) = engine.map(
            lambda each: scorer(model, each), engine.to_device([batch]), rng_key="score"
        )
        return [value[1 : len(row) + 1] for value, row in zip(values.double().numpy(), rows)]

    def refuse(self, reason: str) -> None:
        name = self.task.run_config.criterion._name
        raise UsageError(f"criterion {name} is refused: {reason}")
