"""Spans and report of conlleval, the official script of CoNLL-2000 (Tjong Kim Sang and Buchholz 2000).

It differs from `chunks.chunk_spans` in tags that are not well formed: a change of type inside a span
begins a new one, and E- and S-, as its later versions have them, end one.
"""

from collections.abc import Sequence

from metaseq_lm.data.words.tags import OUTSIDE, Span, split_tag
from metaseq_lm.evaluation.chunks import SpanCounts


def conlleval_spans(tags: Sequence[str]) -> set[Span]:
    """Return the spans (first word, word after the last, type) that conlleval sees in tags.

    A span goes on only with I- or E- of its type, after B- or I-. A tag that is none of spans is O.
    """
    spans: set[Span] = set()
    start = -1
    before = OUTSIDE, ""
    for word, tag in enumerate([*tags, OUTSIDE]):
        prefix, kind = split_tag(tag)
        goes_on = prefix in ("I", "E") and before[0] in ("B", "I") and kind == before[1]
        if start >= 0 and not goes_on:
            spans.add((start, word, before[1]))
            start = -1
        if start < 0 and prefix not in ("", OUTSIDE):
            start = word
        before = prefix, kind
    return spans


def conlleval_report(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> str:
    """Return the lines that conlleval prints: counts, accuracy of tags, scores of all and each type.

    ValueError if the two differ in the number or length of sentences.
    """
    counts = SpanCounts(conlleval_spans)
    words = right = 0
    for true, found in zip(gold, predicted, strict=True):
        counts.add(true, found)
        words += len(true)
        right += sum(a == b for a, b in zip(true, found))
    total = counts.scores
    lines = [
        f"processed {words} tokens with {total.gold} phrases; found: {total.predicted} phrases; "
        f"correct: {total.correct}.",
        f"accuracy: {100 * right / max(words, 1):6.2f}%; {_rates(total)}",
    ]
    for kind, scores in counts.by_type.items():
        lines.append(f"{kind:>17}: {_rates(scores)}  {scores.predicted}")
    return "\n".join(lines) + "\n"


def _rates(scores: object) -> str:
    values = [100 * getattr(scores, name) for name in ("precision", "recall", "f1")]
    return "precision: {:6.2f}%; recall: {:6.2f}%; FB1: {:6.2f}".format(*values)
