"""SQuAD as rows `[CLS0] question [SEP] window of the context [SEP]`, as BERT and ELECTRA cut them.

Shapes: B rows, S the longest row of the batch, W windows.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from metaseq_lm.core.batch import TokenBatch, as_tensor
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.corpus.rows import check_ids, layout_of, segments_of, text_rows
from metaseq_lm.data.squad.sets import SquadSet
from metaseq_lm.data.storage.indexed import concatenate_ranges
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary

_SPECIALS = 3  # of a row: one [CLSn], two [SEP]


@dataclass(kw_only=True)
class AnswerBatch(TokenBatch):
    """Windows; `segments` is 1 at the context and the last [SEP]."""

    answer_mask: Tensor  # where an answer may be: there and at [CLS0], boolean (B, S)
    starts: Tensor  # position of the first token of the gold answer (B,), 0 where there is none
    ends: Tensor  # position of its last token (B,)
    impossible: Tensor  # 1 for a question without an answer, else 0, (B,)


class SquadWindows:
    """The windows of one split, and batches of them.

    Rows have at most `tokens_per_sample` tokens, questions at most `max_query_length`. A window
    starts `stride` tokens after the one before it, or where that one ends.

    `question`, `start` (first context token), `length` (context tokens), `targets` (positions of
    the gold answer in the row, (W, 2), 0 and 0 if the window does not hold it) and `lengths` (of
    the rows) are arrays (W,). A context without tokens has one empty window. For `training`
    answerable questions whose answer was not found in the context are left out (`skipped` counts
    them); windows of a long context that lack the answer stay, with [CLS0] as target but labelled
    answerable, as in ELECTRA's code. Raises MetaseqError if no window is left.
    """

    def __init__(
        self,
        data: SquadSet,
        vocabulary: Vocabulary,
        training: bool,
        tokens_per_sample: int,
        max_query_length: int,
        stride: int,
    ) -> None:
        for tokens in (data.contexts, data.questions):
            check_ids(tokens, vocabulary, first=None)
        self.data, self.vocabulary = data, vocabulary
        self.query = np.minimum(data.questions.sizes, max_query_length)
        query = int(self.query.max(initial=0))
        if tokens_per_sample <= query + _SPECIALS:
            raise UsageError(
                f"task.tokens_per_sample is {tokens_per_sample} and task.max_query_length "
                f"{max_query_length}: a row needs room for a question (of {query} tokens), "
                f"{_SPECIALS} special tokens and some of the context"
            )
        usable = (data.first >= 0) | data.impossible | (not training)
        self.skipped = int((~usable).sum())
        chosen = np.flatnonzero(usable)
        sizes = data.contexts.sizes[data.paragraph[chosen]]
        room = tokens_per_sample - _SPECIALS - self.query[chosen]
        strides = np.minimum(stride, room)
        counts = 1 + -(-np.maximum(sizes - room, 0) // strides)
        at = np.repeat(np.arange(len(chosen)), counts)
        number = concatenate_ranges(np.zeros_like(counts), counts)
        self.question = chosen[at]
        self.start = number * strides[at]
        self.length = np.minimum(room[at], sizes[at] - self.start)
        first, last = data.first[self.question], data.last[self.question]
        inside = (first >= self.start) & (last < self.start + self.length)
        shift = self.query[self.question] + 2 - self.start
        places = np.stack([first + shift, last + shift], axis=1)
        self.targets = np.where(inside[:, None], places, 0)
        if not len(self):
            raise MetaseqError(
                f"{data.folder}: '{data.split}' has no window to train on or to score "
                f"({self.skipped} questions skipped because their answer was not found)"
            )

    def __len__(self) -> int:
        return len(self.question)

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each row, special ones included, int64 (W,)."""
        return np.asarray(self.query[self.question] + self.length + _SPECIALS)

    def context_at(self, windows: np.ndarray) -> np.ndarray:
        """Return the position in its row of the first context token of each window, int64."""
        return np.asarray(self.query[self.question[windows]] + 2)

    def max_context(self, window: int) -> np.ndarray:
        """Return which tokens have more context in this window than in any other, bool (length,).

        A token in several windows of a question counts in only one: the first in which the smaller
        of its distances to the two ends, plus a hundredth of the length, is largest (BERT).
        """
        question = self.question[window]
        low, high = np.searchsorted(self.question, [question, question + 1])
        starts, lengths = self.start[low:high, None], self.length[low:high, None]
        token = self.start[window] + np.arange(self.length[window])
        left, right = token - starts, starts + lengths - 1 - token
        score = np.minimum(left, right) + 0.01 * lengths
        score[(left < 0) | (right < 0)] = -np.inf
        return np.asarray(score.argmax(0) == window - low)

    def batch(
        self, samples: np.ndarray, keys: np.ndarray | None = None, width: int = 0
    ) -> AnswerBatch:
        """Return the windows `samples`, padded to at least `width`; size "rows".

        `keys` are not used.
        """
        data, questions = self.data, self.question[samples]
        query = self.query[questions]
        starts = data.contexts.starts[data.paragraph[questions]] + self.start[samples]
        texts = [
            (data.questions, data.questions.starts[questions], query),
            (data.contexts, starts, self.length[samples]),
        ]
        tokens, lengths = text_rows(self.vocabulary, 0, texts, width)
        segments = segments_of(query, lengths, tokens.shape[1])
        return AnswerBatch(
            tokens=as_tensor(tokens),
            layout=layout_of(lengths, tokens.shape[1]),
            segments=as_tensor(segments),
            answer_mask=(segments == 1) | (np.arange(tokens.shape[1]) == 0),
            starts=self.targets[samples, 0],
            ends=self.targets[samples, 1],
            impossible=data.impossible[questions].astype(np.float64),
            samples=samples,
            sizes={"rows": len(samples)},
        )
