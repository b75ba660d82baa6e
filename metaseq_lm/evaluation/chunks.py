"""F1 of spans (chunks, entities) in tagged sentences.

A predicted span is correct if a gold span of the same sentence has the same start, end and type;
counts are summed over all sentences. Two readers differ in badly formed tags, and also read the
gold tags: `_chunk_spans` follows the code of Clark et al. 2018, `conlleval_spans` the official
script of CoNLL-2000 (Tjong Kim Sang and Buchholz 2000).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from metaseq_lm.data.words.tags import OUTSIDE, Span, split_tag

_SpanReader = Callable[[Sequence[str]], set[Span]]


def _chunk_spans(tags: Sequence[str]) -> set[Span]:
    """Return the spans (first word, word after the last, type) of BIO or BIOES tags.

    Only O, B- and S- end a span, so a change of type inside one does not; the type is that of the
    last tag. I- and E- after O open a span. A tag without a known prefix counts as O.
    """
    spans: set[Span] = set()
    start, last_kind = -1, ""
    for word, tag in enumerate([*tags, OUTSIDE]):
        prefix, kind = split_tag(tag)
        outside = prefix in ("", OUTSIDE)
        if start >= 0 and (outside or prefix in "BS"):
            spans.add((start, word, last_kind))
            start = -1
        if start < 0 and not outside:
            start = word
        last_kind = kind
    return spans


def conlleval_spans(tags: Sequence[str]) -> set[Span]:
    """Return the spans (first word, word after the last, type) as conlleval reads them.

    A span continues only with I- or E- of its type, after B- or I-: unlike in `_chunk_spans`, a
    change of type begins a new span, and E- and S- end one. A tag without a known prefix counts as
    O.
    """
    spans: set[Span] = set()
    start = -1
    previous = OUTSIDE, ""
    for word, tag in enumerate([*tags, OUTSIDE]):
        prefix, kind = split_tag(tag)
        continues = prefix in ("I", "E") and previous[0] in ("B", "I") and kind == previous[1]
        if start >= 0 and not continues:
            spans.add((start, word, previous[1]))
            start = -1
        if start < 0 and prefix not in ("", OUTSIDE):
            start = word
        previous = prefix, kind
    return spans


@dataclass(frozen=True)
class _SpanScores:
    """Numbers of gold, predicted and correct spans, and their precision, recall and F1 (0 to 1)."""

    gold: int = 0
    predicted: int = 0
    correct: int = 0

    @property
    def precision(self) -> float:
        """Correct spans per predicted span; 0 if nothing is predicted."""
        return self.correct / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Correct spans per gold span; 0 if there is none."""
        return self.correct / self.gold if self.gold else 0.0

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall; 0 if nothing is correct."""
        return 2 * self.correct / (self.gold + self.predicted) if self.correct else 0.0


@dataclass
class _SpanCounts:
    """Numbers of spans of each type: gold, predicted and correct."""

    gold: Counter[str] = field(default_factory=Counter)
    predicted: Counter[str] = field(default_factory=Counter)
    correct: Counter[str] = field(default_factory=Counter)

    @property
    def scores(self) -> _SpanScores:
        """The scores over all types."""
        return _SpanScores(self.gold.total(), self.predicted.total(), self.correct.total())

    @property
    def by_type(self) -> dict[str, _SpanScores]:
        """The scores of each type that occurs, sorted by name."""
        kinds = sorted(set(self.gold) | set(self.predicted))
        return {k: _SpanScores(self.gold[k], self.predicted[k], self.correct[k]) for k in kinds}


def span_counts(
    gold: Iterable[Sequence[str]],
    predicted: Iterable[Sequence[str]],
    reader: _SpanReader = _chunk_spans,
) -> _SpanCounts:
    """Count the spans of tagged sentences; ValueError if the two differ in number or length."""
    counts = _SpanCounts()
    for gold_tags, predicted_tags in zip(gold, predicted, strict=True):
        if len(gold_tags) != len(predicted_tags):
            raise ValueError(f"{len(gold_tags)} gold tags but {len(predicted_tags)} predicted ones")
        gold_spans, predicted_spans = reader(gold_tags), reader(predicted_tags)
        counts.gold.update(kind for _, _, kind in gold_spans)
        counts.predicted.update(kind for _, _, kind in predicted_spans)
        counts.correct.update(kind for _, _, kind in gold_spans & predicted_spans)
    return counts


def conlleval_report(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> str:
    """Return the lines that conlleval prints: counts, accuracy, scores overall and by type.

    ValueError if the two differ in the number or length of sentences.
    """
    counts = span_counts(gold, predicted, conlleval_spans)
    n_words = sum(map(len, gold))
    pairs = zip(chain.from_iterable(gold), chain.from_iterable(predicted))
    n_right = sum(a == b for a, b in pairs)
    total = counts.scores
    lines = [
        f"processed {n_words} tokens with {total.gold} phrases; found: {total.predicted} phrases; "
        f"correct: {total.correct}.",
        f"accuracy: {100 * n_right / max(n_words, 1):6.2f}%; {_rates(total)}",
    ]
    for kind, scores in counts.by_type.items():
        lines.append(f"{kind:>17}: {_rates(scores)}  {scores.predicted}")
    return "\n".join(lines) + "\n"


def _rates(scores: _SpanScores) -> str:
    values = [100 * value for value in (scores.precision, scores.recall, scores.f1)]
    return "precision: {:6.2f}%; recall: {:6.2f}%; FB1: {:6.2f}".format(*values)
