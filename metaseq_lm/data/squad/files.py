"""Paragraphs and questions of official SQuAD and MRQA files, each part checked, with its place."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.labelled.records import Record
from metaseq_lm.data.storage.json_records import json_object
from metaseq_lm.data.storage.text_files import TextFile, without_surrogates

VERSIONS = ("v1.1", "v2.0", "mrqa")


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


def _is_row(line: str) -> bool:
    """Return whether a line is one question with its context, as `datasets` exports SQuAD."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and "context" in fields and "data" not in fields


@dataclass
class SquadReader:
    """Iterates over the paragraphs of a file; `bad_utf8` counts the lines with invalid bytes so far.

    `version` is "v1.1" or "v2.0" (the official JSON, or lines of the `datasets` library) or "mrqa"
    (one JSON object per line, the first a header). MetaseqError names the file and the question or field that is wrong.
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

    def _record(self, text: str, where: str) -> Record:
        remedy = "; is this a file of this version of SQuAD?"
        return Record(json_object(text, where), where, remedy=remedy)

    def _articles(self) -> Iterator[Paragraph]:
        lines = self._text()
        number, first = next(lines, (1, ""))
        if _is_row(first):
            yield from self._rows(chain([(number, first)], lines))
            return
        content = "\n".join([first, *(text for _, text in lines)])
        for article in self._record(content, str(self.file)).records("data"):
            yield from map(self._paragraph, article.records("paragraphs"))

    def _rows(self, lines: Iterable[tuple[int, str]]) -> Iterator[Paragraph]:
        """Yield a paragraph for each run of rows with the same context; one without answers is impossible."""
        records = (self._record(text, f"{self.file}:{n}") for n, text in lines if text.strip())
        for context, group in groupby(records, lambda record: record.text("context")):
            questions = []
            for record in group:
                record.fields.setdefault("is_impossible", not record.records("answers"))
                questions.append(self._question(record, record.text("id"), context))
            yield Paragraph(context, tuple(questions))

    def _lines(self) -> Iterator[Paragraph]:
        for number, text in self._text():
            if text.strip():
                record = self._record(text, f"{self.file}:{number}")
                if number > 1 or "header" not in record.fields:
                    yield self._paragraph(record)

    def _paragraph(self, paragraph: Record) -> Paragraph:
        context = paragraph.text("context")
        questions = []
        for record in paragraph.records("qas"):
            name = record.text("qid" if self.version == "mrqa" else "id")
            record.where += f", question {name!r}"
            read = self._mrqa_question if self.version == "mrqa" else self._question
            questions.append(read(record, name, context))
        return Paragraph(context, tuple(questions))

    def _question(self, record: Record, name: str, context: str) -> Question:
        impossible = self.version == "v2.0" and "is_impossible" in record.fields
        impossible = impossible and record.get("is_impossible", bool)
        answers = record.records("answers")
        texts = tuple(answer.text("text") for answer in answers)
        starts = [answer.number("answer_start") for answer in answers]
        if impossible and answers:
            raise MetaseqError(f"{record.where}: is marked as impossible, but has answers")
        if not impossible and not answers:
            remedy = "; is this a file of SQuAD 2.0?" if self.version == "v1.1" else ""
            raise MetaseqError(
                f"{record.where}: has no answer and is not marked as impossible{remedy}"
            )
        start = starts[0] if starts else -1
        return Question(name, record.text("question"), texts, start, impossible)

    def _mrqa_question(self, record: Record, name: str, context: str) -> Question:
        detected = record.records("detected_answers")
        spans = detected[0].get("char_spans", list) if detected else []
        if not spans:
            raise MetaseqError(f"{record.where}: has no detected answer")
        first = spans[0]
        if not isinstance(first, list) or len(first) != 2 or any(type(n) is not int for n in first):
            raise MetaseqError(
                f"{record.where}: 'char_spans' holds {str(first)[:40]}, not [first, last]"
            )
        start, last = first
        texts = record.get("answers", list)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise MetaseqError(f"{record.where}: 'answers' is not a list of texts")
        gold = context[start : last + 1] if 0 <= start <= last else ""
        # The span comes first, because that is the answer to learn; scoring takes all of them.
        others = map(without_surrogates, texts)
        answers = tuple(dict.fromkeys(filter(None, (gold, *others))))
        return Question(name, record.text("question"), answers, start)
