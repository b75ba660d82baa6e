"""The tasks of SuperGLUE as one or two plain texts per row, for a model that has only an LM head.

The forms are those of Shen 2021 (section 4.1, the author's code): BoolQ question, passage; CB and
RTE hypothesis, premise; COPA premise with its question word, both choices in one text; MultiRC one
row per answer: question with the answer, passage; ReCoRD query, passage; WiC two sentences; WSC
both spans, text. Spans stand between asterisks; which they are differs from the author's code where
the files are wrong (WSC) or name one twice (ReCoRD): FORMS has both ways. ReCoRD has one row per
query, and its places are those of the answers in the passage.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import nearest
from metaseq_lm.data.benchmarks import BENCHMARKS, BINARY, THREE_WAY, TRUTH, superglue
from metaseq_lm.data.benchmarks.superglue import Example, Examples, Record

MARK = "*"


@dataclass(frozen=True)
class TextForm:
    """A task as text: its classes, the one that [SEP] stands for first, and its labelled.FORMS."""

    labels: tuple[str, ...]
    form: str = "pair"


# In the order of the author's task tokens [CLS2] to [CLS9].
AS_TEXT = {
    "superglue/BoolQ": TextForm(TRUTH),
    "superglue/CB": TextForm(THREE_WAY),
    "superglue/COPA": TextForm(BINARY),
    "superglue/MultiRC": TextForm(BINARY),
    "superglue/ReCoRD": TextForm(BINARY, "tokens"),
    "superglue/RTE": TextForm(("not_entailment", "entailment")),
    "superglue/WiC": TextForm(TRUTH),
    "superglue/WSC": TextForm(TRUTH),
}


def find_text_form(name: str) -> TextForm:
    """Return the text form of a benchmark such as "superglue/WiC"; UsageError if it has none."""
    if name not in AS_TEXT:
        hint = nearest(name, list(AS_TEXT)) if name not in BENCHMARKS else ""
        raise UsageError(
            f"--as-text: {name} has no such form.{hint} These have: {', '.join(AS_TEXT)}"
        )
    return AS_TEXT[name]


def marked(
    text: str, spans: Sequence[tuple[int, int]], every: bool = False
) -> tuple[str, Callable[[int], int]]:
    """Put an asterisk before and after each span (first character, character after the last).

    Returns the new text and the function that maps a character's old place to its new one. Equal
    spans are marked once, with `every` as often as they are given.
    """
    borders = sorted(border for span in (spans if every else set(spans)) for border in span)
    pieces = [text[i:j] for i, j in zip([0, *borders], [*borders, len(text)])]

    def moved(place: int) -> int:
        return place + sum(border <= place for border in borders)

    return MARK.join(pieces), moved


def _turned(task: str) -> Examples:
    def examples(record: Record, counts: Counter[str]) -> Iterator[Example]:
        for texts, label, spans, facts in superglue.EXAMPLES[task](record, counts):
            yield texts[::-1], label, spans, facts

    return examples


def _copa(record: Record, counts: Counter[str]) -> Iterator[Example]:
    for (_, first, second), label, spans, facts in superglue.EXAMPLES["COPA"](record, counts):
        asked = f"{record.text('premise')} {record.text('question')}"
        yield (asked, f"0: {first} 1: {second}"), label, spans, facts


def _multirc(record: Record, counts: Counter[str]) -> Iterator[Example]:
    for passage, question, answer, label, facts in superglue.multirc_answers(record):
        yield (f"Question: {question} Answer: {answer}", passage), label, (), facts


def _record(record: Record, counts: Counter[str], every: bool = False) -> Iterator[Example]:
    passage = record.record("passage")
    text = passage.text("text")
    entities = [superglue.inclusive(entity, text) for entity in passage.records("entities")]
    shown, moved = marked(text, entities, every)
    for query, asked, facts in superglue.record_queries(record):
        label, spans = None, []
        if "answers" in query.fields:
            places = {superglue.inclusive(answer, text) for answer in query.records("answers")}
            spans = [(1, moved(start), moved(end - 1) + 1) for start, end in sorted(places)]
            label = str(int(bool(spans)))
        yield (asked, shown), label, tuple(spans), facts


def _wic(record: Record, counts: Counter[str]) -> Iterator[Example]:
    for texts, label, spans, facts in superglue.EXAMPLES["WiC"](record, counts):
        both = (marked(text, [(s, e)])[0] for text, (_, s, e) in zip(texts, spans))
        yield tuple(both), label, (), facts


def _wsc(record: Record, counts: Counter[str]) -> Iterator[Example]:
    for (text,), label, spans, facts in superglue.EXAMPLES["WSC"](record, counts):
        shown, _ = marked(text, [(start, end) for _, start, end in spans])
        yield (_asked(record), shown), label, (), facts


def _asked(record: Record) -> str:
    target = record.record("target")
    return f"{target.text('span1_text')} = {target.text('span2_text')}"


def _wsc_of_author(record: Record, counts: Counter[str]) -> Iterator[Example]:
    text, target = record.text("text"), record.record("target")
    wanted = [(target.text(f"span{n}_text"), target.number(f"span{n}_index")) for n in "12"]
    spans = [searched_span(text, words, index) for words, index in wanted]
    shown, _ = marked(text, spans, every=True)
    yield (_asked(record), shown), record.label(), (), {"idx": record.number("idx")}


def searched_span(text: str, wanted: str, index: int) -> tuple[int, int]:
    """Return (first character, character after the last) of WSC's `wanted` words by the author's rule.

    They begin with the word `index` of `text`, in any case; else the span goes from the first to the
    last word from there on that is one of them, each taken once; else it is (0, 0).
    """
    words = [match.span() for match in re.finditer(r"\S+", text)]
    first = words[index][0] if 0 <= index < len(words) else len(text)
    if wanted and text[first:].lower().startswith(wanted.lower()):
        return first, first + len(wanted)
    left = {_letters(word) for word in wanted.split()}
    borders: list[int] = []
    for start, end in words[max(index, 0) :]:
        word = _letters(text[start:end])
        if word in left:
            left.remove(word)
            borders += [start, end]
    return (borders[0], borders[-1]) if borders else (0, 0)


def _letters(word: str) -> str:
    return re.sub(r"\W+", "", word).lower()


EXAMPLES: dict[str, Examples] = {
    "BoolQ": _turned("BoolQ"),
    "CB": _turned("CB"),
    "COPA": _copa,
    "MultiRC": _multirc,
    "ReCoRD": _record,
    "RTE": _turned("RTE"),
    "WiC": _wic,
    "WSC": _wsc,
}
FORMS: dict[str, dict[str, Examples]] = {
    "own": EXAMPLES,
    "author": EXAMPLES | {"ReCoRD": partial(_record, every=True), "WSC": _wsc_of_author},
}
