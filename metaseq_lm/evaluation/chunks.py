"""F1 of spans (chunks, entities) in tagged sentences, counted as by Clark et al. 2018 (code).

A span counts as found if start, end and type are those of a gold span of the same sentence; counts
are summed over all sentences. What spans a sequence of tags spells is another matter where it is not
well formed: `chunk_spans` follows the code of Clark et al., `conlleval.conlleval_spans` the official
script of CoNLL-2000. Both read the gold tags too.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from metaseq_lm.data.words.tags import OUTSIDE, Span, split_tag

SpanReader = Callable[[Sequence[str]], set[Span]]


def chunk_spans(tags: Sequence[str]) -> set[Span]:
    """Return the spans (first word, word after the last, type) of tags of BIO or BIOES.

    Only O, B- and S- end a span, so a change of type inside one does not; the type is that of the last
    tag. I- and E- after O open a span. A tag that is none of spans counts as O.
    """
    spans: set[Span] = set()
    start, last = -1, ""
    for word, tag in enumerate([*tags, OUTSIDE]):
        prefix, kind = split_tag(tag)
        outside = prefix in ("", OUTSIDE)
        if start >= 0 and (outside or prefix in "BS"):
            spans.add((start, word, last))
            start = -1
        if start < 0 and not outside:
            start = word
        last = kind
    return spans


@dataclass(frozen=True)
class SpanScores:
    """Numbers of spans in gold, predicted, and correct, and what follows from them."""

    gold: int = 0
    predicted: int = 0
    correct: int = 0

    @property
    def precision(self) -> float:
        """Correct spans per predicted one; 0 if nothing is predicted."""
        return self.correct / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Correct spans per gold one; 0 if there is none."""
        return self.correct / self.gold if self.gold else 0.0

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall, from 0 to 1; 0 if nothing is correct."""
        return 2 * self.correct / (self.gold + self.predicted) if self.correct else 0.0

    def __add__(self, other: "SpanScores") -> "SpanScores":
        return SpanScores(
            self.gold + other.gold, self.predicted + other.predicted, self.correct + other.correct
        )


@dataclass
class SpanCounts:
    """Counts spans sentence by sentence; `reader` says what spans tags spell."""

    reader: SpanReader = chunk_spans
    gold: Counter[str] = field(default_factory=Counter)
    predicted: Counter[str] = field(default_factory=Counter)
    correct: Counter[str] = field(default_factory=Counter)

    def add(self, gold: Sequence[str], predicted: Sequence[str]) -> None:
        """Count a sentence; ValueError if it has not as many predicted tags as gold ones."""
        if len(gold) != len(predicted):
            raise ValueError(f"{len(gold)} gold tags but {len(predicted)} predicted ones")
        true, found = self.reader(gold), self.reader(predicted)
        for counts, spans in (
            (self.gold, true),
            (self.predicted, found),
            (self.correct, true & found),
        ):
            counts.update(kind for _, _, kind in spans)

    @property
    def scores(self) -> SpanScores:
        """The scores over all types."""
        return SpanScores(self.gold.total(), self.predicted.total(), self.correct.total())

    @property
    def by_type(self) -> dict[str, SpanScores]:
        """The scores of each type that occurs, sorted by name."""
        kinds = sorted(set(self.gold) | set(self.predicted))
        return {k: SpanScores(self.gold[k], self.predicted[k], self.correct[k]) for k in kinds}


def span_counts(
    gold: Iterable[Sequence[str]],
    predicted: Iterable[Sequence[str]],
    reader: SpanReader = chunk_spans,
) -> SpanCounts:
    """Count the spans of sentences of tags; ValueError if the two differ in number or length."""
    counts = SpanCounts(reader)
    for true, found in zip(gold, predicted, strict=True):
        counts.add(true, found)
    return counts
