"""Reading and checking the paragraphs and questions of SQuAD and MRQA files."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.records.reading import records
from metaseq_lm.data.records.record import Record, structured
from metaseq_lm.data.records.text_files import TextFile, without_surrogates

VERSIONS = ("v1.1", "v2.0", "mrqa")
_VALUES = ("answers", "detected_answers", "is_impossible")  # columns that hold no text


@dataclass(frozen=True)
class Question:
    """A question and its gold answers.

    `start` is the character of the context at which the first answer begins, -1 without answers.
    """

    id: str
    text: str
    answers: tuple[str, ...]
    start: int
    impossible: bool = False


@dataclass(frozen=True)
class Paragraph:
    """A context and the questions about it."""

    context: str
    questions: tuple[Question, ...]


# Rows with one question, as `datasets` exports SQuAD, have a context of their own.
def _context_of_row(record: Record) -> str | None:
    if "context" in record.fields and "qas" not in record.fields:
        return record.text("context")
    return None


@dataclass
class SquadReader:
    """Iterates over the paragraphs of a file; `bad_utf8` counts records with invalid bytes so far.

    `version` is "v1.1" or "v2.0" (official JSON) or "mrqa" (one JSON object per line, the first a
    header). Exports of the library `datasets` are read too: articles, paragraphs or single
    questions in JSON, tables, Parquet and Arrow; consecutive rows with the same context form one
    paragraph. Raises MetaseqError naming the file and the invalid question or field.
    """

    file: TextFile
    version: str
    bad_utf8: int = 0

    def __iter__(self) -> Iterator[Paragraph]:
        for context, group in groupby(self._records(), _context_of_row):
            if context is not None:
                questions = []
                for record in group:
                    if self.version != "mrqa":
                        record.fields.setdefault("is_impossible", not record.records("answers"))
                    questions.append(self._question(record, context))
                yield Paragraph(context, tuple(questions))
                continue
            for record in group:
                yield from self._paragraphs(record)

    def _records(self) -> Iterator[Record]:
        for record in records(self.file):
            self.bad_utf8 += record.is_bad
            if "header" not in record.fields:
                remedy = "Is this a file of this version of SQuAD?"
                yield replace(record, fields=structured(record.fields, _VALUES), remedy=remedy)

    def _paragraphs(self, record: Record) -> Iterator[Paragraph]:
        """Yield the paragraphs of an object: a paragraph, an article, or a whole file."""
        for outer in ("data", "paragraphs"):
            if outer in record.fields:
                for inner in record.records(outer):
                    yield from self._paragraphs(inner)
                return
        context = record.text("context")
        questions = (self._question(question, context) for question in record.records("qas"))
        yield Paragraph(context, tuple(questions))

    def _question(self, record: Record, context: str) -> Question:
        key = "qid" if self.version == "mrqa" else "id"
        # Some exports have integer ids.
        is_number = type(record.fields.get(key)) is int
        name = str(record.number(key)) if is_number else record.text(key)
        record = replace(record, where=f"{record.where}, question {name!r}")
        if self.version == "mrqa":
            return self._mrqa_question(record, name, context)
        impossible = False
        if self.version == "v2.0" and "is_impossible" in record.fields:
            impossible = record.get("is_impossible", bool)
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
        return Question(name, record.text("question"), texts, next(iter(starts), -1), impossible)

    def _mrqa_question(self, record: Record, name: str, context: str) -> Question:
        detected = record.records("detected_answers")
        spans = detected[0].get("char_spans") if detected else []
        if type(spans) is dict:  # as `datasets` exports it
            spans = [list(span) for span in zip(spans.get("start", ()), spans.get("end", ()))]
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
            raise MetaseqError(f"{record.where}: 'answers' is not a list of strings")
        gold = context[start : last + 1] if 0 <= start <= last else ""
        # The detected span comes first: it is the training target; all answers count in scoring.
        others = map(without_surrogates, texts)
        answers = tuple(dict.fromkeys(filter(None, (gold, *others))))
        return Question(name, record.text("question"), answers, start)
