"""WNLI for a discriminator: one row for each candidate, which replaces the pronoun.

Shapes: N samples of the set, B of them in a batch, K candidates, R rows of a batch (all candidates
of its samples), S the longest row.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor

from metaseq_lm.core.batch import TokenBatch, as_tensor
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.random_streams import words
from metaseq_lm.data.benchmarks.wnli import overlap, phrase_key
from metaseq_lm.data.corpus.rows import layout_of
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.columns import ROWS
from metaseq_lm.data.tokenizers.base import Tokenizer, token_span

_BENCHMARK = "glue/WNLI"
LABELS = ["0", "1"]  # 1 is entailment
_REMEDY = f"make the set with 'metaseq-lm preprocess --benchmark {_BENCHMARK}'"


@dataclass(kw_only=True)
class CandidateBatch(TokenBatch):
    """The rows (R, S) of all candidates of a batch of samples, sample by sample.

    Attributes:
        targets: 1 for entailment, else 0, (B,); None without labels.
        candidate: Which tokens of each row belong to the candidate, boolean (R, S).
        slots: Index (R,) of each row in a flattened table (B, K).
        present: Which entries of the table have a row, boolean (B, K).
        positive: Which candidates can be the antecedent, boolean (B, K); None without labels.
    """

    candidate: Tensor
    slots: Tensor
    present: Tensor
    positive: Tensor | None = None


@dataclass(frozen=True)
class _WnliChoice:
    """The candidates of one sample; the first is the query.

    Attributes:
        tokens: The tokens of each row, without special tokens.
        spans: Start and end of the candidate in the tokens of each row.
        positive: Which candidates can be the antecedent, boolean (K,); None without labels.
    """

    tokens: list[np.ndarray]
    spans: list[tuple[int, int]]
    positive: np.ndarray | None


class CandidateRows:
    """One split of WNLI; a sample is the rows of its candidates.

    A sample is `usable` if its pronoun was found and there is a candidate other than the query. For
    an entailment the query is positive. Otherwise the positive candidates are the queries of
    entailments about the same pronoun, since WNLI asks about a pronoun more than once; if the split
    has none, they are all candidates except the query. With `training`, such queries are added to
    the candidates, and candidates that overlap them are removed; otherwise the labels affect only
    `positive`.

    Raises:
        UsageError: The set is not WNLI, or tokens_per_sample is too small.
        MetaseqError: The set is damaged.
    """

    def __init__(
        self, data: LabelledSet, tokenizer: Tokenizer, tokens_per_sample: int, training: bool
    ) -> None:
        if not data.benchmark or data.benchmark.name != _BENCHMARK or data.label_names != LABELS:
            raise UsageError(f"{data.folder} is not {_BENCHMARK}; {_REMEDY}")
        if data.tokenizer_hash != tokenizer.fingerprint:
            raise MetaseqError(
                f"{data.folder}: was made with a different tokenizer from that of "
                f"{data.folder.parent}; preprocess it again"
            )
        if tokens_per_sample < 5:
            raise UsageError(
                f"task.tokens_per_sample is {tokens_per_sample}, too short for the special tokens "
                "and some text"
            )
        self.data = data
        self.tokenizer = tokenizer
        self.max_tokens = tokens_per_sample - 2
        self.entailed = None if data.labels is None else data.labels == 1
        facts = self._validated_rows()
        antecedents_by_pronoun = self._labelled_antecedents(facts)
        self.choices: dict[int, _WnliChoice] = {}
        for sample, row in enumerate(facts):
            choice = self._choice(sample, row, antecedents_by_pronoun, training)
            if choice is not None:
                self.choices[sample] = choice
        self.usable = np.array(list(self.choices), np.int64)
        self.unusable = np.setdiff1d(np.arange(len(data)), self.usable)

    def __len__(self) -> int:
        return len(self.usable)

    @property
    def lengths(self) -> np.ndarray:
        """Length of the longest row of each usable sample, special tokens included, int64 (N,)."""
        longest = [max(map(len, choice.tokens)) + 2 for choice in self.choices.values()]
        return np.array(longest, np.int64)

    def _validated_rows(self) -> list[dict[str, Any]]:
        where = self.data.folder / f"{self.data.split}.{ROWS}"
        facts = self.data.rows
        if facts is None:
            raise MetaseqError(f"{where}: missing; {_REMEDY}")
        for number, row in enumerate(facts, 1):
            if not _is_valid(row):
                raise MetaseqError(f"{where}:{number}: no sentence with a pronoun; {_REMEDY}")
        return facts

    def _labelled_antecedents(self, facts: Sequence[dict[str, Any]]) -> dict[Any, list[str]]:
        """Return the known antecedents, the queries of entailments, by sentence and pronoun."""
        antecedents_by_pronoun: dict[Any, list[str]] = defaultdict(list)
        for sample, row in enumerate(facts):
            if row["pronoun"] and self.entailed is not None and self.entailed[sample]:
                antecedents_by_pronoun[(row["sentence"], *row["pronoun"])].append(row["query"])
        return antecedents_by_pronoun

    def _choice(
        self,
        sample: int,
        row: dict[str, Any],
        antecedents_by_pronoun: dict[Any, list[str]],
        training: bool,
    ) -> _WnliChoice | None:
        if not row["pronoun"]:
            return None
        query, others = phrase_key(row["query"]), list(row["candidates"])
        entailed = self.entailed is not None and self.entailed[sample]
        antecedents: list[str] = []
        if not entailed:
            antecedents = antecedents_by_pronoun.get((row["sentence"], *row["pronoun"]), [])
        right = {phrase_key(text): text for text in antecedents if phrase_key(text) != query}
        if training and right:
            # A candidate that overlaps an antecedent is not wrong.
            wrong = []
            for text in others:
                key = phrase_key(text)
                if not any(overlap(key, antecedent) for antecedent in right):
                    wrong.append(text)
            others = [*wrong, *right.values()]
        encoded = {}
        for number, text in enumerate((row["query"], *others)):
            tokens = self._encode(row, text)
            if tokens is not None:
                encoded[number] = text, tokens
        if 0 not in encoded or len(encoded) < 2:
            return None
        positive = None
        if self.entailed is not None:
            positive = np.array([phrase_key(text) in right for text, _ in encoded.values()])
            if entailed:
                positive[0] = True
            elif not positive.any():
                positive[1:] = True
        rows, spans = zip(*(tokens for _, tokens in encoded.values()))
        return _WnliChoice(list(rows), list(spans), positive)

    def _encode(self, row: dict[str, Any], text: str) -> tuple[np.ndarray, tuple[int, int]] | None:
        """Return the tokens with `text` in place of the pronoun and its span, None if empty."""
        start, end = row["pronoun"]
        sentence = row["sentence"][:start] + text + row["sentence"][end:]
        ids, starts, ends = self.tokenizer.encode_with_offsets(sentence)
        first, last = token_span(np.array(starts), np.array(ends), start, start + len(text))
        if first == last:
            return None
        # A sentence that is too long is cut to a window around the span.
        excess = max(len(ids) - self.max_tokens, 0)
        cut = min(max((first + last - self.max_tokens) // 2, 0), excess)
        tokens = np.array(ids[cut : cut + self.max_tokens], np.int64)
        return tokens, (max(first - cut, 0), min(last - cut, self.max_tokens))

    def batch(self, samples: np.ndarray, keys: np.ndarray, width: int = 0) -> CandidateBatch:
        """Return the rows of the usable samples with indices `samples` (B,); sizes["rows"] is B."""
        vocabulary, numbers = self.tokenizer.vocabulary, self.usable[samples]
        choices = [self.choices[number] for number in numbers.tolist()]
        counts = np.array([len(choice.tokens) for choice in choices])
        present = np.arange(counts.max()) < counts[:, None]
        rows = list(chain.from_iterable(choice.tokens for choice in choices))
        lengths = np.array([len(tokens) + 2 for tokens in rows])
        width = max(width, int(lengths.max()))
        tokens = np.full((len(rows), width), vocabulary.pad, np.int64)
        tokens[:, 0] = vocabulary.cls()
        tokens[np.arange(len(rows)), lengths - 1] = vocabulary.sep
        for row, values in enumerate(rows):
            tokens[row, 1 : len(values) + 1] = values
        # [CLS] comes before the tokens.
        spans = 1 + np.concatenate([choice.spans for choice in choices])
        positions = np.arange(width)
        positive = targets = None
        if self.entailed is not None:
            targets = self.entailed[numbers].astype(np.int64)
            positive = np.zeros_like(present)
            for sample, choice in enumerate(choices):
                assert choice.positive is not None
                positive[sample, : len(choice.positive)] = choice.positive
        return CandidateBatch(
            tokens=as_tensor(tokens),
            layout=layout_of(lengths, width),
            segments=as_tensor(np.zeros_like(tokens)),
            candidate=as_tensor((positions >= spans[:, :1]) & (positions < spans[:, 1:])),
            slots=as_tensor(np.flatnonzero(present)),
            present=as_tensor(present),
            positive=as_tensor(positive),
            targets=as_tensor(targets),
            # There are more rows than samples: each row gets its own random keys.
            rows=words(keys, 0, present.shape[1])[present],
            samples=numbers,
            sizes={"rows": len(samples)},
        )


def _is_valid(row: dict[str, Any]) -> bool:
    """Return whether a row has the form of the results of `data.benchmarks.wnli.facts_of`."""
    sentence, pronoun = row.get("sentence"), row.get("pronoun", 0)
    if pronoun is None or not isinstance(sentence, str):
        return isinstance(sentence, str)
    texts = row.get("candidates")
    if not isinstance(texts, list) or not isinstance(pronoun, list):
        return False
    valid = all(isinstance(text, str) and text for text in (row.get("query"), *texts))
    valid = valid and len(pronoun) == 2 and all(type(position) is int for position in pronoun)
    return valid and 0 <= pronoun[0] < pronoun[1] <= len(sentence)
