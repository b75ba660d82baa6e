"""Pseudo-log-likelihoods of sentences: the sum over its tokens of log p(token | the others).

The sum is over the tokens without [CLS] and [SEP] (Salazar et al. 2020). A sentence is a row
`[CLSn] x [SEP]`. A masked LM needs one forward pass per token, Electric one per sentence. The later
tokens of the same word can also be hidden (Kauf and Ivanova 2023).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from metaseq_lm.core.batch import ScoredBatch, as_tensor
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.output import Meter, hide_status
from metaseq_lm.criterions.masked_lm import TOKENS_PER_PASS
from metaseq_lm.data.corpus.encode import encode_texts
from metaseq_lm.data.corpus.rows import layout_of
from metaseq_lm.data.labelled.files import SourceSentence
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.distributed import process_group
from metaseq_lm.evaluation.suites import SentenceScore
from metaseq_lm.models.transformer.encoder import Stack
from metaseq_lm.tasks.protocols import (
    TokenScorer,
    comparison_scorer,
    score_reach_of,
    task_read_as,
    token_scorer,
)
from metaseq_lm.training.parts import Parts

TOO_LONG = ("fail", "skip", "cut")
ORIGINAL, _WITHIN_WORD = PLL_RULES = ("original", "within_word_l2r")


@dataclass
class _Cost:
    """The cost of scoring: seconds, distinct sentences, tokens, tokens through the encoder."""

    seconds: float = 0.0
    sentences: int = 0
    tokens: int = 0
    row_tokens: int = field(default=0, repr=False)  # with [CLS] and [SEP]
    forward_tokens: int = 0  # with padding, in all passes

    def __str__(self) -> str:
        seconds = max(self.seconds, 1e-9)
        passes = self.forward_tokens / max(self.row_tokens, 1)
        return (
            f"{self.sentences:,} different sentences of {self.tokens:,} tokens in {seconds:.2f} s: "
            f"{self.sentences / seconds:,.1f} sentences/s; {self.forward_tokens:,} tokens went "
            f"through the encoder, {passes:.2f} times each with padding"
        )


class _ScoredRow(NamedTuple):
    """The token ids of a row without special ones (n,), and the number of each token's word (n,).

    The words are None if the scores do not depend on them.
    """

    ids: np.ndarray
    words: np.ndarray | None = None

    def slice(self, first: int, end: int) -> "_ScoredRow":
        """Return the tokens from `first` on and before `end`."""
        words = None if self.words is None else self.words[first:end]
        return _ScoredRow(self.ids[first:end], words)

    @property
    def key(self) -> tuple[bytes, bytes]:
        return self.ids.tobytes(), b"" if self.words is None else self.words.tobytes()


class SentenceScorer:
    """Scores sentences with a restored run.

    Args:
        run: The run.
        batch_tokens: Largest number of tokens in a forward pass; does not change the scores.
        too_long: What to do with sentences longer than the run's rows: fail, skip, or cut.
        pll: Which tokens a masked LM hides to predict one: "original", only that one (Salazar et
            al. 2020), or "within_word_l2r", also the later tokens of its word (Kauf and Ivanova
            2023). Other objectives ignore it.

    Attributes:
        reach: Which tokens the score of a token depends on: "both" sides, or "causal", the ones
            before it.
    """

    def __init__(
        self,
        run: Parts,
        batch_tokens: int = TOKENS_PER_PASS,
        too_long: str = "fail",
        pll: str = ORIGINAL,
    ) -> None:
        if batch_tokens < 1:
            raise UsageError(f"--batch-tokens {batch_tokens}: at least 1")
        for name, value, known in (("too-long", too_long, TOO_LONG), ("pll", pll, PLL_RULES)):
            if value not in known:
                raise UsageError(f"--{name} {value}: choose one of {', '.join(known)}")
        self.task = task_read_as(run.task)
        comparison_scorer(self.task)  # UsageError for a criterion without one, before data are read
        self.reach = score_reach_of(self.task)
        self.run = run
        self.batch_tokens, self.too_long, self.pll = batch_tokens, too_long, pll
        self.tokenizer = load_tokenizer(run.config.data)
        self.vocabulary = self.tokenizer.vocabulary
        self.room = longest_row(run.config) - 2
        self.cost = _Cost()

    def score(self, sentences: Sequence[SourceSentence]) -> list[SentenceScore | None]:
        """Return the score of each sentence, None for one that is skipped.

        Raises MetaseqError, with the location, for a sentence that is too long, and UsageError if
        the run's criterion gives no probabilities of tokens.
        """
        rows = list(map(self._fit, self._rows(sentences), sentences))
        scored = [None if row is None else np.ones(len(row.ids), dtype=bool) for row in rows]
        return self._scores(rows, scored, token_scorer(self.task))

    def score_changed(
        self, pairs: Sequence[tuple[SourceSentence, SourceSentence]]
    ) -> list[tuple[SentenceScore, SentenceScore] | None]:
        """Return the scores of the tokens in which the sentences of each pair differ.

        A masked LM makes one pass for each of these tokens, other models one for each sentence.
        None for a pair with a skipped sentence.

        Raises:
            MetaseqError: A sentence is too long, or a pair has different numbers of tokens.
            UsageError: The run's criterion gives no scores by which tokens can be compared.
        """
        sentences = list(chain.from_iterable(pairs))
        rows = list(map(self._fit, self._rows(sentences), sentences))
        scored: list[np.ndarray | None] = []
        for (good, _), first, second in zip(pairs, rows[::2], rows[1::2]):
            differs = None
            if first is not None and second is not None:
                if len(first.ids) != len(second.ids):
                    raise MetaseqError(
                        f"{good.location}: the sentences have {len(first.ids)} and "
                        f"{len(second.ids)} tokens, so that no token stands for another; leave out "
                        "compare=changed"
                    )
                differs = first.ids != second.ids
            scored += [differs, differs]
        scores = self._scores(rows, scored, comparison_scorer(self.task))
        return [
            None if good is None or bad is None else (good, bad)
            for good, bad in zip(scores[::2], scores[1::2])
        ]

    def score_parts(
        self, sentences: Sequence[SourceSentence], parts: Sequence[Sequence[tuple[int, int]]]
    ) -> list[np.ndarray | None]:
        """Return the summed log-probability of each part of each sentence, float64 (parts,).

        A token belongs to the part in which it begins. If sentences that are too long are cut, they
        lose their first tokens here.

        Args:
            sentences: The sentences.
            parts: The (first character, character after the last) of each sentence's parts, which
                do not overlap.

        Returns:
            The log-probabilities; None for a skipped sentence, or one with a part that is cut.

        Raises:
            MetaseqError: A sentence is too long.
            UsageError: The run's criterion gives no probabilities of tokens.
        """
        starts = {
            text: np.array(self.tokenizer.encode_with_offsets(text)[1], np.int64)
            for text in dict.fromkeys(sentence.text for sentence in sentences)
        }
        rows: list[_ScoredRow | None] = []
        part_of: list[np.ndarray] = []
        for row, sentence, spans in zip(self._rows(sentences), sentences, parts):
            number = np.full(len(row.ids), -1)
            for i, (first, end) in enumerate(spans):
                at = starts[sentence.text]
                number[(at >= first) & (at < end)] = i
            dropped = max(0, len(row.ids) - self.room)
            fitting = self._fit(row, sentence, from_end=True)
            rows.append(None if (number[:dropped] >= 0).any() else fitting)
            part_of.append(number[dropped:])
        scored = [None if row is None else number >= 0 for row, number in zip(rows, part_of)]
        scores = self._scores(rows, scored, token_scorer(self.task))
        sums: list[np.ndarray | None] = [None] * len(scores)
        for i, (score, number, spans) in enumerate(zip(scores, part_of, parts)):
            if score is not None:
                sums[i] = np.bincount(number[number >= 0], score.log_probs, minlength=len(spans))
        return sums

    def _rows(self, sentences: Sequence[SourceSentence]) -> list[_ScoredRow]:
        texts = list(dict.fromkeys(sentence.text for sentence in sentences))
        values, sizes = encode_texts(self.tokenizer, texts)
        ids = np.split(values.astype(np.int64), np.cumsum(sizes)[:-1]) if texts else []
        rows = map(_ScoredRow, ids)
        if self.pll == _WITHIN_WORD:
            rows = map(_ScoredRow, ids, self.tokenizer.word_numbers(texts))
        row_of = dict(zip(texts, rows))
        return [row_of[sentence.text] for sentence in sentences]

    def _seen(self, row: _ScoredRow, choice: np.ndarray) -> tuple[_ScoredRow, np.ndarray]:
        """Return a row and its scored tokens, without tokens that no score depends on."""
        if self.reach != "causal":
            return row, choice
        # No score depends on the tokens after the last scored one.
        last = int(choice.nonzero()[0][-1]) + 1 if choice.any() else 0
        return row.slice(0, last), choice[:last]

    def _scores(
        self,
        rows: Sequence[_ScoredRow | None],
        scored: Sequence[np.ndarray | None],
        scorer: TokenScorer,
    ) -> list[SentenceScore | None]:
        """Return the scores of the `scored` tokens of each row; None if one of the two is None."""
        started = time.perf_counter()
        # Equal rows are scored once, so that their scores cannot differ by a rounding error. A row
        # without scored tokens needs no pass.
        unique: dict[tuple[bytes, ...], tuple[_ScoredRow, np.ndarray]] = {}
        keys = []
        for row, choice in zip(rows, scored):
            key = None
            if row is not None and choice is not None:
                row, choice = self._seen(row, choice)
                key = (*row.key, choice.tobytes())
                unique.setdefault(key, (row, choice))
            keys.append(key)
        scores = {
            key: SentenceScore(row.ids[choice], np.zeros(choice.sum()))
            for key, (row, choice) in unique.items()
        }
        nonempty = [key for key, score in scores.items() if len(score.tokens)]
        lengths = np.array([len(unique[key][0].ids) + 2 for key in nonempty], dtype=np.int64)
        self.cost.sentences += len(lengths)
        self.cost.row_tokens += int(lengths.sum())
        self.cost.tokens += int(lengths.sum()) - 2 * len(lengths)
        meter = Meter("scoring", "sentences", len(nonempty))
        for indices in batches_by_length(lengths, self.batch_tokens):
            process_group.check_peers()
            process_group.stop_if_signalled("while scoring")
            batch = self.batch([unique[nonempty[i]] for i in indices], lengths[indices])
            values = self._token_scores(scorer, batch)
            for i, row, chosen in zip(indices, values, batch.scored.numpy()):
                scores[nonempty[i]].log_probs[:] = row[chosen]
            meter.advance(len(indices))
        hide_status()
        self.cost.seconds += time.perf_counter() - started
        return [None if key is None else scores[key] for key in keys]

    def _fit(
        self, row: _ScoredRow, sentence: SourceSentence, from_end: bool = False
    ) -> _ScoredRow | None:
        """Return the tokens that fit into a row, None for a sentence to skip.

        A cut sentence keeps its first tokens, or with `from_end` its last ones.
        """
        count = len(row.ids)
        if count <= self.room:
            return row
        if self.too_long == "fail":
            cut = "cut leaves out its first tokens" if from_end else "cut scores its first tokens"
            raise MetaseqError(
                f"{sentence.location}: {count} tokens, but a row of this run has room for "
                f"{self.room} beside [CLS] and [SEP]; --too-long {cut}, or train with "
                "longer rows (task.tokens_per_sample)"
            )
        if self.too_long == "skip":
            return None
        first = count - self.room if from_end else 0
        return row.slice(first, first + self.room)

    def _token_scores(self, scorer: TokenScorer, batch: ScoredBatch) -> np.ndarray:
        """Return the scores of the tokens of a micro-batch, float64 (B, S), 0 elsewhere."""
        engine, model = self.run.engine, self.run.model
        model.eval()
        hooks = [
            module.register_forward_hook(self._count_tokens)
            for module in model.modules()
            if isinstance(module, Stack)
        ]
        try:
            scores = engine.map(
                lambda batch: scorer(model, batch), engine.to_device([batch]), rng_key="score"
            )[0]
        finally:
            for hook in hooks:
                hook.remove()
        return scores.double().cpu().numpy()

    def batch(
        self, sentences: Sequence[tuple[_ScoredRow, np.ndarray]], lengths: np.ndarray
    ) -> ScoredBatch:
        """Return the micro-batch of rows `[CLSn] x [SEP]`, (B, S).

        Args:
            sentences: The tokens of each sentence, and which of them are scored, (n,) each.
            lengths: The lengths of the rows.
        """
        width = int(lengths.max())
        rows = np.full((len(sentences), width), self.vocabulary.pad, dtype=np.int64)
        rows[:, 0] = self.vocabulary.cls(self.task.text_token)
        scored = np.zeros(rows.shape, dtype=bool)
        words = np.full(rows.shape, -1, dtype=np.int64)  # special tokens belong to no word
        for i, (row, choice) in enumerate(sentences):
            end = len(row.ids) + 1
            rows[i, 1 : end + 1] = [*row.ids, self.vocabulary.sep]
            scored[i, 1:end] = choice
            if row.words is not None:
                words[i, 1:end] = row.words
        return ScoredBatch(
            tokens=as_tensor(rows),
            layout=layout_of(lengths, width),
            scored=as_tensor(scored),
            mask_id=self.vocabulary.mask,
            batch_tokens=self.batch_tokens,
            words=as_tensor(words) if self.pll == _WITHIN_WORD else None,
        )

    def _count_tokens(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.cost.forward_tokens += output.shape[:-1].numel()


def longest_row(config: RunConfig) -> int:
    """Return the most tokens in a row, with special ones; later positions were never trained."""
    tokens = getattr(config.task, "tokens_per_sample", 0)
    positions = getattr(config.model, "max_positions", 0)
    return min(filter(None, (tokens, positions)), default=1 << 30)


def batches_by_length(lengths: np.ndarray, batch_tokens: int) -> Iterator[np.ndarray]:
    """Yield the row numbers of each batch, rows of similar length together.

    The longest rows come first, so that a run out of memory fails at once. A batch has at most
    `batch_tokens` tokens with padding, but at least one row.
    """
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        count = max(1, batch_tokens // int(lengths[order[start]]))
        yield order[start : start + count]
        start += count
