"""Labelled sets in the common format: tokens x and label tokens y of equal length.

A row is `[CLSn] A [SEP]` or `[CLSn] A [SEP] B [SEP]`, with n the number of the task; its label is
an ordinary token repeated at every position of the row: class 0 is [SEP], class 1 [CLSn], class 2
[MASK]. In sets of form "tokens" y is instead the token itself where it belongs to the answer, and
[SEP] elsewhere (Shen 2021, section 4.1 and code).

A row that is too long is cut into several windows, see `_cut_windows`.

Shapes: N samples, W windows, B rows, S the longest row of the batch, K classes.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from metaseq_lm.config.tasks import STRIDE
from metaseq_lm.core.batch import TokenBatch, as_tensor
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.random_streams import uniforms
from metaseq_lm.data.corpus.rows import cut_pair, layout_of, text_rows
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.indexed import concatenate_ranges
from metaseq_lm.data.storage.manifest import require_tokenizer
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary


@dataclass(kw_only=True)
class TokenLabelBatch(TokenBatch):
    """Windows of rows; `targets` (B, S) are the label tokens, -1 at padding."""

    classes: Tensor  # class of each row (B,), 0 in a split without labels
    class_tokens: Tensor  # the label token of each class (K,)
    token_level: bool  # whether the answer is tokens of the text, not a class
    # Length of the longest window of the same sample (B,), which class scores are divided by.
    longest: Tensor
    windows: Tensor  # number of each window (B,)


class TokenLabels:
    """One split of a labelled set in the common format; `number` is the task's n in [CLSn].

    Windows have their `sample` (W,), `lengths` (W,) with the special tokens and, for each text,
    `starts` and `n_tokens` (W, texts), all int64. The windows of sample i are
    `first[i]` to `first[i + 1] - 1`, the longest of them has `longest[i]` tokens.
    Raises UsageError for more classes than there are label tokens, for a set of another form, and
    for rows without room for text.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        vocabulary: Vocabulary,
        number: int,
        tokens_per_sample: int,
        stride: int = STRIDE,
    ) -> None:
        self.data = LabelledSet(folder, split)
        require_tokenizer(folder, self.data.tokenizer_hash)
        self.vocabulary = vocabulary
        self.number = number
        self.class_tokens = np.array([vocabulary.sep, vocabulary.cls(number), vocabulary.mask])
        data = self.data
        if data.regression or not 1 <= len(data.label_names) <= len(self.class_tokens):
            raise UsageError(
                f"{data.folder} has {len(data.label_names) or 'real-valued'} labels; label tokens "
                "exist for 1 to 3 classes"
            )
        if data.form not in ("single", "pair", "tokens"):
            raise UsageError(
                f"{data.folder}: a set of form {data.form}; rows of one or two plain texts are "
                "needed, which 'metaseq-lm preprocess --benchmark NAME --as-text' makes of "
                "SuperGLUE"
            )
        self.token_level = data.form == "tokens"  # the answer is tokens of the text, not a class
        # The label tokens of further classes must not count as predictions.
        self.class_tokens = self.class_tokens[: len(self.data.label_names)]
        self.labels = self.data.labels
        sizes = np.stack([column.sizes for column in self.data.inputs], 1)
        room = tokens_per_sample - 1 - sizes.shape[1]
        if room < sizes.shape[1] or stride < 0:
            raise UsageError(
                f"task.tokens_per_sample is {tokens_per_sample} and task.stride {stride}: rows "
                "need room for their special tokens and some text, and the stride is at least 0"
            )
        self.sample, self.starts, self.n_tokens = _cut_windows(sizes, room, stride)
        self.lengths = self.n_tokens.sum(1) + 1 + self.n_tokens.shape[1]
        self.first = np.searchsorted(self.sample, np.arange(len(self.data) + 1))
        self.longest = self.lengths[:0]
        if len(self.data):
            self.longest = np.maximum.reduceat(self.lengths, self.first[:-1])

    def __len__(self) -> int:
        return len(self.data)

    def random_windows(self, samples: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return one window of each of `samples` (B,), uniform, by the uint64 `keys` (B,)."""
        counts = self.first[samples + 1] - self.first[samples]
        rank = (uniforms(keys, 0, 1)[:, 0] * counts).astype(np.int64)
        return np.asarray(self.first[samples] + rank)

    def windows_of(self, samples: np.ndarray) -> np.ndarray:
        """Return all windows of `samples` (B,), in their order."""
        return concatenate_ranges(
            self.first[samples], self.first[samples + 1] - self.first[samples]
        )

    def rows(
        self, windows: np.ndarray, width: int = 0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rows (B, S) padded to at least `width`, their lengths (B,), targets (B, S).

        Targets are -1 at padding, and everywhere in a split without labels.
        """
        texts = []
        for text, data in enumerate(self.data.inputs):
            starts = data.starts[self.sample[windows]] + self.starts[windows, text]
            texts.append((data, starts, self.n_tokens[windows, text]))
        tokens, lengths = text_rows(self.vocabulary, self.number, texts, width)
        return tokens, lengths, self._targets(windows, tokens, lengths)

    def _targets(self, windows: np.ndarray, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        inside = np.arange(tokens.shape[1]) < lengths[:, None]
        if self.labels is None:
            return np.full(tokens.shape, -1)
        if not self.token_level:
            label = self.class_tokens[self.labels[self.sample[windows]]]
            return np.where(inside, label[:, None], -1)
        answer = self._is_answer(windows, tokens.shape)
        return np.where(inside, np.where(answer, tokens, self.vocabulary.sep), -1)

    def _is_answer(self, windows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return which tokens of the rows belong to an answer, boolean (B, S)."""
        answers = np.zeros(shape, bool)
        assert self.data.places is not None
        owner, column, first, end = self.data.places.T
        low = np.searchsorted(owner, self.sample[windows])
        counts = np.searchsorted(owner, self.sample[windows], side="right") - low
        span_index, at = concatenate_ranges(low, counts), np.repeat(np.arange(len(windows)), counts)
        text, window = column[span_index], windows[at]
        start, n_tokens = self.starts[window, text], self.n_tokens[window, text]
        # Where the text begins in the row: after [CLSn], and for B after A and its [SEP].
        before = np.where(text > 0, self.n_tokens[window, 0] + 2, 1)
        left = np.clip(first[span_index] - start, 0, n_tokens)
        right = np.clip(end[span_index] - start, 0, n_tokens)
        answers.reshape(-1)[concatenate_ranges(at * shape[1] + before + left, right - left)] = True
        return answers

    def batch(self, windows: np.ndarray, keys: np.ndarray, width: int = 0) -> TokenLabelBatch:
        """Return windows, padded to at least `width`; sizes "targets" and "rows".

        `samples` of the batch are the samples that the windows belong to. `keys` are not used.
        """
        tokens, lengths, targets = self.rows(windows, width)
        samples = self.sample[windows]
        labels = np.zeros(len(self), np.int64) if self.labels is None else self.labels
        return TokenLabelBatch(
            tokens=as_tensor(tokens),
            layout=layout_of(lengths, tokens.shape[1]),
            targets=as_tensor(targets),
            classes=labels[samples],
            class_tokens=as_tensor(self.class_tokens),
            token_level=self.token_level,
            longest=self.longest[samples],
            samples=samples,
            windows=as_tensor(windows),
            sizes={"targets": int((targets >= 0).sum()), "rows": len(windows)},
        )


def _tokens_per_window(sizes: np.ndarray, room: int) -> np.ndarray:
    """Return how many tokens of each text of rows (N, texts) a window has, at most `room` in all.

    This is the closed form of "longest_first" of the tokenizers library: the longer text is cut,
    and if both are too long, each gets half of the room and the longer one (the second of equals)
    an odd token.

        >>> _tokens_per_window(np.array([[9, 2], [9, 8], [1, 2]]), room=7)
        array([[5, 2],
               [4, 3],
               [1, 2]])
    """
    if sizes.shape[1] == 1:
        return np.asarray(np.minimum(sizes, room))
    longer, shorter = cut_pair(sizes.max(1), sizes.min(1), room)
    first_longer = sizes[:, 0] > sizes[:, 1]
    counts = np.where(first_longer, longer, shorter), np.where(first_longer, shorter, longer)
    return np.stack(counts, 1)


def _cut_windows(
    sizes: np.ndarray, room: int, stride: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut the texts of rows (N, texts) into windows of at most `room` tokens together.

    Returns the row (W,), the first token (W, texts) and the number of tokens (W, texts) of each
    window. A text with m tokens per window (see `_tokens_per_window`) is cut into windows of m
    tokens that share `stride` tokens with the previous one; the last one is shorter. With two
    texts, every window of A is combined with every window of B. The tokenizers library does the
    same, except that here a window begins at least m / 4 tokens after the previous one: the library
    raises an error if m <= stride, and makes hundreds of windows if m is hardly more.

    A text of 9 tokens in windows of 4 that share 1, and one of 3 tokens:

        >>> row, starts, counts = _cut_windows(np.array([[9], [3]]), room=4, stride=1)
        >>> row, starts[:, 0], counts[:, 0]
        (array([0, 0, 0, 1]), array([0, 3, 6, 0]), array([4, 4, 3, 3]))
    """
    n_tokens = _tokens_per_window(sizes, room)
    step = np.maximum(n_tokens - stride, np.maximum(-(-n_tokens // 4), 1))
    counts = 1 + -(-np.maximum(sizes - n_tokens, 0) // step)
    total = counts.prod(1)
    row = np.repeat(np.arange(len(sizes)), total)
    rank = concatenate_ranges(np.zeros_like(total), total)
    numbers = [rank]  # index of the window within each text
    if sizes.shape[1] > 1:
        numbers = [rank // counts[row, 1], rank % counts[row, 1]]
    starts = np.stack(numbers, 1) * step[row]
    return row, starts, np.minimum(n_tokens[row], sizes[row] - starts)
