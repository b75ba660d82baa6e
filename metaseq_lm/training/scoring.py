"""Pseudo-log-likelihoods of sentences: the sum over its tokens of log p(token | the others).

The sum is over the tokens without [CLS] and [SEP] (Salazar et al. 2020). A sentence is a row
`[CLSn] x [SEP]`. A masked LM needs one forward pass per token, Electric one per sentence.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor, nn
from tqdm import tqdm

from metaseq_lm.core.batch import ScoredBatch, as_tensor
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.output import is_quiet
from metaseq_lm.criterions.masked_lm import TOKENS_PER_PASS
from metaseq_lm.data.corpus.encode import encode_texts
from metaseq_lm.data.corpus.rows import layout_of
from metaseq_lm.data.labelled.files import Sentence
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.evaluation.suites import SentenceScore
from metaseq_lm.models.transformer.encoder import Stack
from metaseq_lm.tasks.protocols import token_scorer
from metaseq_lm.training.parts import Parts

TOO_LONG = ("fail", "skip", "cut")


@dataclass
class Cost:
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


class SentenceScorer:
    """Scores sentences with a restored run.

    Args:
        run: The run.
        batch_tokens: Largest number of tokens in a forward pass; does not change the scores.
        too_long: What to do with sentences longer than the run's rows: fail, skip, or cut.
    """

    def __init__(
        self, run: Parts, batch_tokens: int = TOKENS_PER_PASS, too_long: str = "fail"
    ) -> None:
        if batch_tokens < 1:
            raise UsageError(f"--batch-tokens {batch_tokens}: at least 1")
        if too_long not in TOO_LONG:
            raise UsageError(f"--too-long {too_long}: choose one of {', '.join(TOO_LONG)}")
        self.token_log_probs = token_scorer(run.task)
        self.run = run
        self.batch_tokens, self.too_long = batch_tokens, too_long
        self.tokenizer = load_tokenizer(run.config.data)
        self.vocabulary = self.tokenizer.vocabulary
        # Positions beyond the rows of the training were never trained.
        longest = getattr(run.config.task, "tokens_per_sample", 0)
        sizes = [longest, getattr(run.config.model, "max_positions", 0)]
        self.room = min((n for n in sizes if n), default=1 << 30) - 2
        self.cost = Cost()

    def score(self, sentences: Sequence[Sentence]) -> list[SentenceScore | None]:
        """Return the score of each sentence, None for one that is skipped.

        Raises MetaseqError that names the place of a sentence that is too long, and UsageError if
        the run's criterion gives no probabilities of tokens.
        """
        started = time.perf_counter()
        first = {sentence.text: sentence for sentence in reversed(sentences)}
        texts = list(dict.fromkeys(sentence.text for sentence in sentences))
        values, sizes = encode_texts(self.tokenizer, texts)
        ids = np.split(values.astype(np.int64), np.cumsum(sizes)[:-1]) if texts else []
        rows = [self._fit(tokens, first[text]) for tokens, text in zip(ids, texts)]
        # Equal rows are scored once, so that their scores cannot differ by a rounding error. A
        # sentence without tokens needs no pass.
        unique = {
            row.tobytes(): SentenceScore(row, np.zeros(len(row))) for row in rows if row is not None
        }
        nonempty = [score for score in unique.values() if len(score.tokens)]
        lengths = np.array([len(score.tokens) + 2 for score in nonempty], dtype=np.int64)
        self.cost.sentences += len(lengths)
        self.cost.row_tokens += int(lengths.sum())
        self.cost.tokens += int(lengths.sum()) - 2 * len(lengths)
        with tqdm(
            total=len(nonempty), unit="sent", desc="scoring", disable=is_quiet() or None
        ) as bar:
            for indices in batches_by_length(lengths, self.batch_tokens):
                log_probs = self._log_probs([nonempty[i].tokens for i in indices], lengths[indices])
                for i, row in zip(indices, log_probs):
                    nonempty[i].log_probs[:] = row[1 : lengths[i] - 1]
                bar.update(len(indices))
        self.cost.seconds += time.perf_counter() - started
        by_text = {t: None if r is None else unique[r.tobytes()] for t, r in zip(texts, rows)}
        return [by_text[sentence.text] for sentence in sentences]

    def _fit(self, tokens: np.ndarray, sentence: Sentence) -> np.ndarray | None:
        """Return the tokens that are scored, None for a sentence to skip."""
        if len(tokens) <= self.room:
            return tokens
        if self.too_long == "fail":
            raise MetaseqError(
                f"{sentence.location}: {len(tokens)} tokens, but a row of this run has room for "
                f"{self.room} beside [CLS] and [SEP]; --too-long cut scores its first ones"
            )
        return tokens[: self.room] if self.too_long == "cut" else None

    def _log_probs(self, sentences: list[np.ndarray], lengths: np.ndarray) -> np.ndarray:
        """Return the log-probabilities of rows, float64 (B, S), 0 outside the sentences."""
        engine, model = self.run.engine, self.run.model
        batch = self.batch(sentences, lengths)
        model.eval()
        hooks = [
            module.register_forward_hook(self._count_tokens)
            for module in model.modules()
            if isinstance(module, Stack)
        ]
        try:
            log_probs = engine.map(
                lambda batch: self.token_log_probs(model, batch),
                engine.to_device([batch]),
                rng_key="score",
            )[0]
        finally:
            for hook in hooks:
                hook.remove()
        return log_probs.double().cpu().numpy()

    def batch(self, sentences: list[np.ndarray], lengths: np.ndarray) -> ScoredBatch:
        """Return the micro-batch of rows `[CLSn] x [SEP]`, (B, S), for `token_log_probs`."""
        width = int(lengths.max())
        rows = np.full((len(sentences), width), self.vocabulary.pad, dtype=np.int64)
        rows[:, 0] = self.vocabulary.cls(self.run.task.text_token)
        for row, tokens in zip(rows, sentences):
            row[1 : len(tokens) + 2] = [*tokens, self.vocabulary.sep]
        at = np.arange(width)
        return ScoredBatch(
            tokens=as_tensor(rows),
            layout=layout_of(lengths, width),
            scored=as_tensor((at > 0) & (at < lengths[:, None] - 1)),
            mask_id=self.vocabulary.mask,
            batch_tokens=self.batch_tokens,
        )

    def _count_tokens(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.cost.forward_tokens += output.shape[:-1].numel()


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
