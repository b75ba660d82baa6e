"""Official SuperGLUE files (JSON lines) to rows.

Texts of each task: BoolQ passage, question; CB, RTE, AX-g premise, hypothesis; AX-b sentence1,
sentence2; COPA premise with its question, and the two choices; MultiRC one row per answer:
paragraph, question with the answer; ReCoRD one row per entity: passage, query with the entity in
it; WiC two sentences with one span each; WSC a text with two spans.
"""

import re
from collections.abc import Iterator
from typing import Any

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.output import show
from metaseq_lm.data.benchmarks.examples import Example, Examples
from metaseq_lm.data.records.record import Record

_PLACEHOLDER = "@placeholder"
# The wording of COPA's own questions (Roemmele et al. 2011).
_COPA_QUESTIONS = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}


def _pair(first: str, second: str, has_pairs: bool = False) -> Examples:
    def examples(record: Record) -> Iterator[Example]:
        facts = {"idx": record.number("idx")}
        if "pair_id" in record.fields:
            facts["pair_id"] = record.number("pair_id")
        elif has_pairs:
            record.counts["no_pair_id"] += 1
        yield (record.text(first), record.text(second)), record.label(), (), facts

    return examples


def _boolq(record: Record) -> Iterator[Example]:
    passage = record.text("passage")
    # In BoolQ's own train file the title is a field of its own; SuperGLUE's passages begin with it.
    if "title" in record.fields and not passage.startswith(record.text("title")):
        passage = f"{record.text('title')} -- {passage}"
    texts = (passage, record.text("question"))
    yield texts, record.label(), (), {"idx": record.number("idx")}


def _copa(record: Record) -> Iterator[Example]:
    question = record.text("question")
    if question not in _COPA_QUESTIONS:
        raise MetaseqError(f"{record.where}: question {question!r} is not 'cause' or 'effect'")
    context = f"{record.text('premise')} {_COPA_QUESTIONS[question]}"
    texts = (context, record.text("choice1"), record.text("choice2"))
    yield texts, record.label(), (), {"idx": record.number("idx")}


def _multirc(record: Record) -> Iterator[Example]:
    for passage, question, answer, label, facts in multirc_answers(record):
        yield (passage, f"{question} {answer}"), label, (), facts


def multirc_answers(
    record: Record,
) -> Iterator[tuple[str, str, str, str | None, dict[str, Any]]]:
    """Yield passage, question, answer, label and facts of each answer of a passage of MultiRC."""
    passage = record.record("passage")
    text = passage.text("text")
    for question in passage.records("questions"):
        for answer in question.records("answers"):
            facts = {
                "passage": record.number("idx"),
                "question": question.number("idx"),
                "idx": answer.number("idx"),
            }
            yield text, question.text("question"), answer.text("text"), answer.label(), facts


def _record(record: Record) -> Iterator[Example]:
    passage = record.record("passage")
    text = passage.text("text")
    spans = [inclusive(entity, text) for entity in passage.records("entities")]
    # An entity that is named twice is one candidate.
    entities = dict.fromkeys(text[start:end] for start, end in spans)
    for _, query, facts in record_queries(record):
        answers = facts.get("answers")
        for entity_text in entities:
            label = None if answers is None else str(int(entity_text in answers))
            filled = query.replace(_PLACEHOLDER, entity_text)
            yield (text, filled), label, (), {**facts, "entity": entity_text}


def inclusive(span: Record, text: str) -> tuple[int, int]:
    """Return (first character, character after the last) of a span; ReCoRD names the last."""
    start, last = span.number("start"), span.number("end")
    if not 0 <= start <= last < len(text):
        raise MetaseqError(
            f"{span.where}: {span.name} from {start} to {last}, but the passage has "
            f"{len(text)} characters"
        )
    return start, last + 1


def record_queries(record: Record) -> Iterator[tuple[Record, str, dict[str, Any]]]:
    """Yield each query of a passage of ReCoRD, its text, and its facts with the answers it has."""
    for query in record.records("qas"):
        text = query.text("query")
        if _PLACEHOLDER not in text:
            raise MetaseqError(f"{record.where}: {query.name}.query has no {_PLACEHOLDER}")
        facts: dict[str, Any] = {"passage": record.number("idx"), "idx": query.number("idx")}
        if "answers" in query.fields:
            answers = [answer.text("text") for answer in query.records("answers")]
            facts["answers"] = list(dict.fromkeys(answers))
        yield query, text, facts


def _wic(record: Record) -> Iterator[Example]:
    texts, spans = [], []
    for i, number in enumerate("12"):
        text = record.text(f"sentence{number}")
        start, end = record.number(f"start{number}"), record.number(f"end{number}")
        if not 0 <= start < end <= len(text) or not text[start:end].strip():
            raise MetaseqError(
                f"{record.where}: no word from character {start} to {end} of sentence{number}, "
                f"which has {len(text)} characters"
            )
        texts.append(text)
        spans.append((i, start, end))
    yield tuple(texts), record.label(), tuple(spans), {"idx": record.number("idx")}


def _wsc(record: Record) -> Iterator[Example]:
    text, target = record.text("text"), record.record("target")
    spans = []
    for number in "12":
        words, index = target.text(f"span{number}_text"), target.number(f"span{number}_index")
        start, end, remark = _find_words(text, words, index)
        if start == end:
            raise MetaseqError(f"{record.where}: target.span{number}_index {index}: {remark}")
        if remark:
            record.counts["span_text_elsewhere"] += 1
            show(f"{record.where}: target.span{number}_index {index}: {remark}")
        spans.append((0, start, end))
    yield (text,), record.label(), tuple(spans), {"idx": record.number("idx")}


def _find_words(text: str, query: str, index: int) -> tuple[int, int, str]:
    """Return (first character, character after the last, remark) of the words `query` of WSC.

    They should begin with word `index` of `text`, counted between white space. Case, punctuation
    and a possessive 's do not matter. Otherwise the nearest match counts, or without one the words
    at `index`, and the remark says so. An index outside the text gives (0, 0).
    """
    words = [match.span() for match in re.finditer(r"\S+", text)]
    count = len(query.split())
    if not count or not 0 <= index < len(words):
        return 0, 0, f"the text has {len(words)} words, the span {count}"

    def span(position: int) -> tuple[int, int]:
        return words[position][0], words[min(position + count, len(words)) - 1][1]

    matches = [i for i in range(len(words)) if _letters(text[slice(*span(i))]) == _letters(query)]
    remark, position = "", index
    if index not in matches:
        position = min(matches, key=lambda i: (abs(i - index), i), default=index)
        choice = f"the nearest is word {position}" if matches else "these are taken"
        remark = f"the words there are {text[slice(*span(index))]!r}, not {query!r}; {choice}"
    start, end = span(position)
    if text[start : start + len(query)].lower() == query.lower():
        # Without the punctuation or 's that the last word has in the text.
        end = start + len(query)
    return start, end, remark


def _letters(words: str) -> str:
    return "".join(filter(str.isalnum, re.sub(r"['’]s\b", "", words.lower())))


EXAMPLES: dict[str, Examples] = {
    "BoolQ": _boolq,
    "CB": _pair("premise", "hypothesis"),
    "COPA": _copa,
    "MultiRC": _multirc,
    "ReCoRD": _record,
    "RTE": _pair("premise", "hypothesis"),
    "WiC": _wic,
    "WSC": _wsc,
    "AX-b": _pair("sentence1", "sentence2"),
    "AX-g": _pair("premise", "hypothesis", has_pairs=True),
}
