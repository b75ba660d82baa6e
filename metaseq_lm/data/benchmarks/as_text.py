"""The tasks of SuperGLUE as one or two plain texts per row, for a model that has only an LM head.

The forms are from Shen 2021 (section 4.1, the author's code): BoolQ question, passage; CB and
RTE hypothesis, premise; COPA premise with its question word, both choices in one text; MultiRC one
row per answer: question with the answer, passage; ReCoRD query, passage; WiC two sentences; WSC
both spans, text. Asterisks mark spans; the choice of spans differs from the author's code where the
files are wrong (WSC) or name one twice (ReCoRD): FORMS has both ways. ReCoRD has one row per query,
and its places are the places of the answers in the passage.

BABYLM has the texts of the BabyLM challenge (evaluation pipeline of 2025, finetune/dataset.py) for
official files and for files of the challenge, whose rows are flat and may lack an index.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.benchmarks import Benchmark, find_benchmark, superglue
from metaseq_lm.data.benchmarks.examples import Example, Examples
from metaseq_lm.data.records.record import Record

_MARK = "*"


def marked(
    text: str, spans: Sequence[tuple[int, int]], every: bool = False
) -> tuple[str, Callable[[int], int]]:
    """Put an asterisk before and after each span (first character, character after the last).

    Returns the new text and the function that maps a character's old place to its new one. Equal
    spans are marked once, with `every` as often as they are given.
    """
    if not every:
        spans = list(set(spans))
    borders = sorted(chain.from_iterable(spans))
    pieces = [text[i:j] for i, j in zip([0, *borders], [*borders, len(text)])]

    def moved(position: int) -> int:
        return position + sum(border <= position for border in borders)

    return _MARK.join(pieces), moved


def _swapped(task: str) -> Examples:
    def examples(record: Record) -> Iterator[Example]:
        for texts, label, spans, facts in superglue.EXAMPLES[task](record):
            yield texts[::-1], label, spans, facts

    return examples


def _copa(record: Record) -> Iterator[Example]:
    for (_, first, second), label, spans, facts in superglue.EXAMPLES["COPA"](record):
        question = f"{record.text('premise')} {record.text('question')}"
        yield (question, f"0: {first} 1: {second}"), label, spans, facts


def _multirc(record: Record) -> Iterator[Example]:
    for passage, question, answer, label, facts in superglue.multirc_answers(record):
        yield (f"Question: {question} Answer: {answer}", passage), label, (), facts


def _record(record: Record, every: bool = False) -> Iterator[Example]:
    passage = record.record("passage")
    text = passage.text("text")
    entities = [superglue.inclusive(entity, text) for entity in passage.records("entities")]
    marked_text, moved = marked(text, entities, every)
    for query, question, facts in superglue.record_queries(record):
        label, spans = None, []
        if "answers" in query.fields:
            places = {superglue.inclusive(answer, text) for answer in query.records("answers")}
            spans = [(1, moved(start), moved(end - 1) + 1) for start, end in sorted(places)]
            label = str(int(bool(spans)))
        yield (question, marked_text), label, tuple(spans), facts


def _wic(record: Record) -> Iterator[Example]:
    for texts, label, spans, facts in superglue.EXAMPLES["WiC"](record):
        marked_texts = (marked(text, [(s, e)])[0] for text, (_, s, e) in zip(texts, spans))
        yield tuple(marked_texts), label, (), facts


def _wsc(record: Record) -> Iterator[Example]:
    for (text,), label, spans, facts in superglue.EXAMPLES["WSC"](record):
        marked_text, _ = marked(text, [(start, end) for _, start, end in spans])
        yield (_spans_text(record), marked_text), label, (), facts


def _spans_text(record: Record) -> str:
    target = record.record("target")
    return f"{target.text('span1_text')} = {target.text('span2_text')}"


def _wsc_of_author(record: Record) -> Iterator[Example]:
    text, target = record.text("text"), record.record("target")
    queries = [(target.text(f"span{n}_text"), target.number(f"span{n}_index")) for n in "12"]
    spans = [_searched_span(text, words, index) for words, index in queries]
    marked_text, _ = marked(text, spans, every=True)
    yield (_spans_text(record), marked_text), record.label(), (), {"idx": record.number("idx")}


def _searched_span(text: str, query: str, index: int) -> tuple[int, int]:
    """Return (first character, character after the last) of WSC's words by the author's rule.

    The span is `query` if it begins at word `index` of `text`, ignoring case; else it goes from the
    first to the last word from there on that is one of its words, each taken once; else it is
    (0, 0).
    """
    words = [match.span() for match in re.finditer(r"\S+", text)]
    first = words[index][0] if 0 <= index < len(words) else len(text)
    if query and text[first:].lower().startswith(query.lower()):
        return first, first + len(query)
    left = {_letters(word) for word in query.split()}
    borders: list[int] = []
    for start, end in words[max(index, 0) :]:
        word = _letters(text[start:end])
        if word in left:
            left.remove(word)
            borders += [start, end]
    return (borders[0], borders[-1]) if borders else (0, 0)


def _letters(word: str) -> str:
    return re.sub(r"\W+", "", word).lower()


def _index(record: Record) -> dict[str, Any]:
    return {"idx": record.number("idx")} if "idx" in record.fields else {}


def _boolq_of_babylm(record: Record) -> Iterator[Example]:
    yield (record.text("question"), record.text("passage")), record.label(), (), _index(record)


def _multirc_of_babylm(record: Record) -> Iterator[Example]:
    if "passage" in record.fields:
        yield from _multirc(record)
        return
    question = f"Question: {record.text('question')} Answer: {record.text('answer')}"
    yield (question, record.text("paragraph")), record.label(), (), {}


def _wsc_of_babylm(record: Record) -> Iterator[Example]:
    target = record.record("target")
    pronoun, noun = target.text("span2_text"), target.text("span1_text")
    question = f'Does "{pronoun}" refer to "{noun}" in this passage?'
    yield (question, record.text("text")), record.label(), (), _index(record)


_EXAMPLES: dict[str, Examples] = {
    "BoolQ": _swapped("BoolQ"),
    "CB": _swapped("CB"),
    "COPA": _copa,
    "MultiRC": _multirc,
    "ReCoRD": _record,
    "RTE": _swapped("RTE"),
    "WiC": _wic,
    "WSC": _wsc,
}
FORMS: dict[str, dict[str, Examples]] = {
    "own": _EXAMPLES,
    "author": _EXAMPLES | {"ReCoRD": partial(_record, every=True), "WSC": _wsc_of_author},
}
BABYLM: dict[str, Examples] = {
    "BoolQ": _boolq_of_babylm,
    "MultiRC": _multirc_of_babylm,
    "WSC": _wsc_of_babylm,
}
AS_TEXT = tuple(f"superglue/{task}" for task in _EXAMPLES)
# [SEP] is the label token of class 0.
_CHANGED: dict[str, dict[str, Any]] = {
    "superglue/ReCoRD": {"form": "tokens"},
    "superglue/RTE": {"labels": ("not_entailment", "entailment")},
}


def find_text_form(name: str) -> Benchmark:
    """Return the text form of a benchmark such as "superglue/WiC"; UsageError if it has none."""
    benchmark = find_benchmark(name)
    if name not in AS_TEXT:
        raise UsageError(f"--as-text: {name} has no such form. These have: {', '.join(AS_TEXT)}")
    return replace(benchmark, **{"form": "pair", **_CHANGED.get(name, {})})
