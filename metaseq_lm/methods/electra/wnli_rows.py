"""WNLI as rows for a discriminator: the sentence once with each candidate in place of the pronoun.

Shapes: N samples of the set, B of them in a batch, K candidates, R rows of a batch (all candidates
of its samples), S the longest row.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from metaseq_lm.core.batch import TokenBatch, as_tensor
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.random_streams import words
from metaseq_lm.data.benchmarks.wnli import overlap, phrase_key
from metaseq_lm.data.corpus.rows import padding_of
from metaseq_lm.data.labelled.sets import LabelledSet, rows_name
from metaseq_lm.data.tokenizers.base import Tokenizer, token_span

BENCHMARK = "glue/WNLI"
LABELS = ["0", "1"]  # 1 is entailment
REMEDY = f"make the set with 'metaseq-lm preprocess --benchmark {BENCHMARK}'"


@dataclass(kw_only=True)
class CandidateBatch(TokenBatch):
    """The rows (R, S) of all candidates of some samples, one after the other.

    Attributes:
        targets: 1 for entailment, else 0, (B,); None without labels.
        candidate: The tokens of the candidate in each row, boolean (R, S).
        slots: Place of each row in a table (B, K), counted row by row, (R,).
        present: Which places of the table are taken, boolean (B, K).
        positive: Which candidates may be right, boolean (B, K); None without labels.
    """

    candidate: Tensor
    slots: Tensor
    present: Tensor
    positive: Tensor | None = None


@dataclass(frozen=True)
class Choice:
    """One sample: `tokens` of each row without special ones, where the candidate stands in it.

    The query is the first. `positive` (K,) are the candidates that may be right, None without a
    label.
    """

    tokens: list[np.ndarray]
    spans: list[tuple[int, int]]
    positive: np.ndarray | None


class CandidateRows:
    """One split of WNLI, each sample the rows of its candidates.

    A sample is `usable` if its pronoun was found and there is a candidate beside the query. Which
    candidates are positive: of an entailment the query; otherwise the query of an entailment about
    the same pronoun, for WNLI asks about a pronoun more than once, or, where the split has none,
    all but the query. With `training` that query is made a candidate, and what overlaps it is none;
    else labels decide nothing but `positive`. Raises UsageError for another set, MetaseqError for
    a damaged one.
    """

    def __init__(
        self, data: LabelledSet, tokenizer: Tokenizer, tokens_per_sample: int, training: bool
    ) -> None:
        if data.benchmark != BENCHMARK or data.label_names != LABELS:
            raise UsageError(f"{data.folder} is not {BENCHMARK}; {REMEDY}")
        if data.tokenizer_hash != tokenizer.fingerprint:
            raise MetaseqError(
                f"{data.folder}: made with another tokenizer than that of {data.folder.parent}; "
                "preprocess again"
            )
        if tokens_per_sample < 5:
            raise UsageError(
                f"task.tokens_per_sample is {tokens_per_sample}, too short for the special tokens "
                "and some text"
            )
        self.data = data
        self.tokenizer = tokenizer
        self.room = tokens_per_sample - 2
        self.entailed = None if data.labels is None else data.labels == 1
        facts = self._checked()
        known = self._known_queries(facts)
        self.choices: dict[int, Choice] = {}
        for sample, row in enumerate(facts):
            choice = self._choice(sample, row, known, training)
            if choice is not None:
                self.choices[sample] = choice
        self.usable = np.array(list(self.choices), np.int64)
        self.unusable = np.setdiff1d(np.arange(len(data)), self.usable)

    def __len__(self) -> int:
        return len(self.usable)

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each usable sample's longest row with its special ones, int64 (N,)."""
        longest = [max(map(len, choice.tokens)) + 2 for choice in self.choices.values()]
        return np.array(longest, np.int64)

    def _checked(self) -> list[dict[str, Any]]:
        where = self.data.folder / rows_name(self.data.split)
        facts = self.data.rows
        if facts is None:
            raise MetaseqError(f"{where}: missing; {REMEDY}")
        for number, row in enumerate(facts, 1):
            if not _is_sound(row):
                raise MetaseqError(f"{where}:{number}: no sentence with a pronoun; {REMEDY}")
        return facts

    def _known_queries(self, facts: Sequence[dict[str, Any]]) -> dict[Any, list[str]]:
        """Return the right antecedents by sentence and pronoun, as far as labels say."""
        known: dict[Any, list[str]] = defaultdict(list)
        for sample, row in enumerate(facts):
            if row["pronoun"] and self.entailed is not None and self.entailed[sample]:
                known[(row["sentence"], *row["pronoun"])].append(row["query"])
        return known

    def _choice(
        self, sample: int, row: dict[str, Any], known: dict[Any, list[str]], training: bool
    ) -> Choice | None:
        if not row["pronoun"]:
            return None
        query, others = phrase_key(row["query"]), list(row["candidates"])
        entailed = self.entailed is not None and self.entailed[sample]
        found = known.get((row["sentence"], *row["pronoun"]), []) if not entailed else []
        right = {phrase_key(text): text for text in found if phrase_key(text) != query}
        if training and right:
            others = [t for t in others if not any(overlap(phrase_key(t), r) for r in right)]
            others += right.values()
        made = [self._row(row, text) for text in (row["query"], *others)]
        kept = [number for number, tokens in enumerate(made) if tokens is not None]
        if kept[:1] != [0] or len(kept) < 2:
            return None
        rows = [tokens for tokens in made if tokens is not None]
        positive = None
        if self.entailed is not None:
            texts = (row["query"], *others)
            positive = np.array([phrase_key(texts[number]) in right for number in kept])
            if entailed:
                positive[0] = True
            elif not positive.any():
                positive[1:] = True
        return Choice([tokens for tokens, _ in rows], [span for _, span in rows], positive)

    def _row(self, row: dict[str, Any], text: str) -> tuple[np.ndarray, tuple[int, int]] | None:
        """Return the tokens with `text` for the pronoun and where it stands; None if it has none.

        Of a long sentence the tokens around it are kept.
        """
        start, end = row["pronoun"]
        whole = row["sentence"][:start] + text + row["sentence"][end:]
        ids, starts, ends = self.tokenizer.encode_with_offsets(whole)
        first, last = token_span(np.array(starts), np.array(ends), start, start + len(text))
        if first == last:
            return None
        spare = max(len(ids) - self.room, 0)
        cut = min(max((first + last - self.room) // 2, 0), spare)
        tokens = np.array(ids[cut : cut + self.room], np.int64)
        return tokens, (max(first - cut, 0), min(last - cut, self.room))

    def batch(self, samples: np.ndarray, keys: np.ndarray, width: int = 0) -> CandidateBatch:
        """Return the candidates of the usable samples `samples` (B,); the size "rows" counts samples."""
        vocabulary, chosen = self.tokenizer.vocabulary, self.usable[samples]
        choices = [self.choices[sample] for sample in chosen.tolist()]
        counts = np.array([len(choice.tokens) for choice in choices])
        present = np.arange(counts.max()) < counts[:, None]
        rows = [tokens for choice in choices for tokens in choice.tokens]
        lengths = np.array([len(tokens) + 2 for tokens in rows])
        width = max(width, int(lengths.max()))
        tokens = np.full((len(rows), width), vocabulary.pad, np.int64)
        tokens[:, 0] = vocabulary.cls()
        tokens[np.arange(len(rows)), lengths - 1] = vocabulary.sep
        for row, values in enumerate(rows):
            tokens[row, 1 : len(values) + 1] = values
        spans = 1 + np.array([span for choice in choices for span in choice.spans])
        at = np.arange(width)
        positive = None
        if self.entailed is not None:
            positive = np.zeros_like(present)
            for sample, choice in enumerate(choices):
                assert choice.positive is not None
                positive[sample, : len(choice.positive)] = choice.positive
        return CandidateBatch(
            tokens=as_tensor(tokens),
            padding=as_tensor(padding_of(lengths, width)),
            segments=as_tensor(np.zeros_like(tokens)),
            candidate=as_tensor((at >= spans[:, :1]) & (at < spans[:, 1:])),
            slots=as_tensor(np.flatnonzero(present)),
            present=as_tensor(present),
            positive=as_tensor(positive),
            targets=None if self.entailed is None else self.entailed[chosen].astype(np.int64),
            # The model sees more rows than samples: each has random numbers of its own.
            rows=words(keys, 0, present.shape[1])[present],
            samples=chosen,
            sizes={"rows": len(samples)},
        )


def _is_sound(row: dict[str, Any]) -> bool:
    """Return whether a row has what `data.benchmarks.wnli.facts_of` gives."""
    sentence, pronoun = row.get("sentence"), row.get("pronoun", 0)
    if pronoun is None or not isinstance(sentence, str):
        return isinstance(sentence, str)
    texts = row.get("candidates")
    if not isinstance(texts, list) or not isinstance(pronoun, list):
        return False
    good = all(isinstance(text, str) and text for text in (row.get("query"), *texts))
    good = good and len(pronoun) == 2 and all(type(place) is int for place in pronoun)
    return good and 0 <= pronoun[0] < pronoun[1] <= len(sentence)
