"""Paragraphs and questions of official SQuAD and MRQA files, each part checked, with its place."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.storage.text_files import TextFile, without_surrogates

VERSIONS = ("v1.1", "v2.0", "mrqa")
KINDS = {
    str: "a text",
    list: "a list",
    dict: "an object",
    int: "a whole number",
    bool: "true or false",
}


@dataclass(frozen=True)
class Question:
    """A question with its gold answers; the first answer begins at character `start`, -1 if none."""

    id: str
    text: str
    answers: tuple[str, ...]
    start: int
    impossible: bool = False


@dataclass(frozen=True)
class Paragraph:
    """A context and the questions on it."""

    context: str
    questions: tuple[Question, ...]


@dataclass
class SquadReader:
    """Iterates over the paragraphs of a file; `bad_utf8` counts the lines with invalid bytes so far.

    `version` is "v1.1" or "v2.0" (the official JSON) or "mrqa" (one JSON object per line, the first
    a header). MetaseqError names the file and the article, paragraph or question that is wrong.
    """

    file: TextFile
    version: str
    bad_utf8: int = 0

    def __iter__(self) -> Iterator[Paragraph]:
        return self._lines() if self.version == "mrqa" else self._articles()

    def _text(self) -> Iterator[tuple[int, str]]:
        for number, text, bad in self.file.lines():
            self.bad_utf8 += bad
            yield number, text

    def _articles(self) -> Iterator[Paragraph]:
        content = parsed("\n".join(text for _, text in self._text()), str(self.file), 1)
        for number, article in enumerate(part(content, "data", list, str(self.file)), 1):
            where = f"{self.file}: article {number}"
            title = article.get("title") if isinstance(article, dict) else None
            where += f" ({title[:40]!r})" if isinstance(title, str) else ""
            for at, paragraph in enumerate(part(article, "paragraphs", list, where), 1):
                yield self._paragraph(paragraph, f"{where}, paragraph {at}")

    def _lines(self) -> Iterator[Paragraph]:
        for number, text in self._text():
            if not text.strip():
                continue
            where = f"{self.file}:{number}"
            content = parsed(text, str(self.file), number)
            if number == 1 and isinstance(content, dict) and "header" in content:
                continue
            yield self._paragraph(content, where)

    def _paragraph(self, paragraph: Any, where: str) -> Paragraph:
        context = text_of(paragraph, "context", where)
        questions = []
        for number, node in enumerate(part(paragraph, "qas", list, where), 1):
            key = "qid" if self.version == "mrqa" else "id"
            name = text_of(node, key, f"{where}, question {number}")
            place = f"{where}, question {name!r}"
            read = self._mrqa_question if self.version == "mrqa" else self._question
            questions.append(read(node, name, context, place))
        return Paragraph(context, tuple(questions))

    def _question(self, node: Any, name: str, context: str, where: str) -> Question:
        question = text_of(node, "question", where)
        impossible = self.version == "v2.0" and "is_impossible" in node
        impossible = impossible and part(node, "is_impossible", bool, where)
        answers = part(node, "answers", list, where)
        texts = tuple(text_of(answer, "text", where) for answer in answers)
        starts = [part(answer, "answer_start", int, where) for answer in answers]
        if impossible and answers:
            raise MetaseqError(f"{where}: is marked as impossible, but has answers")
        if not impossible and not answers:
            remedy = "; is this a file of SQuAD 2.0?" if self.version == "v1.1" else ""
            raise MetaseqError(f"{where}: has no answer and is not marked as impossible{remedy}")
        return Question(name, question, texts, starts[0] if starts else -1, impossible)

    def _mrqa_question(self, node: Any, name: str, context: str, where: str) -> Question:
        detected = part(node, "detected_answers", list, where)
        spans = part(detected[0], "char_spans", list, where) if detected else []
        if not spans:
            raise MetaseqError(f"{where}: has no detected answer")
        first = spans[0]
        if not isinstance(first, list) or len(first) != 2 or any(type(n) is not int for n in first):
            raise MetaseqError(f"{where}: 'char_spans' holds {str(first)[:40]}, not [first, last]")
        start, last = first
        texts = part(node, "answers", list, where)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise MetaseqError(f"{where}: 'answers' is not a list of texts")
        gold = context[start : last + 1] if 0 <= start <= last else ""
        # The span comes first, because that is the answer to learn; scoring takes all of them.
        others = map(without_surrogates, texts)
        answers = tuple(dict.fromkeys(filter(None, (gold, *others))))
        return Question(name, text_of(node, "question", where), answers, start)


def parsed(text: str, path: str, line: int) -> Any:
    """Return parsed JSON; MetaseqError with file and line if it is none. `line` is that of its start."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = line + error.lineno - 1
        reason = f"{error.msg} (column {error.colno})"
        raise MetaseqError(f"{path}:{at}: not valid JSON: {reason}; copy the file again") from error
    except (ValueError, RecursionError) as error:
        raise MetaseqError(f"{path}: not usable JSON: {error}") from error


def part(node: Any, name: str, kind: type, where: str) -> Any:
    """Return `node[name]`, which must be of a kind of JSON value; MetaseqError otherwise."""
    if not isinstance(node, dict):
        raise MetaseqError(f"{where}: is {str(node)[:40]!r}, not an object with '{name}'")
    if name not in node:
        raise MetaseqError(
            f"{where}: '{name}' is missing; is this a file of this version of SQuAD?"
        )
    if type(node[name]) is not kind:
        raise MetaseqError(f"{where}: '{name}' is {str(node[name])[:40]!r}, not {KINDS[kind]}")
    return node[name]


def text_of(node: Any, name: str, where: str) -> str:
    """Return the text `node[name]`; MetaseqError if there is none."""
    return without_surrogates(part(node, name, str, where))
