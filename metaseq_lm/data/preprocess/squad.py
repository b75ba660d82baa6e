"""SQuAD and MRQA: paragraphs and questions to token files, positions of tokens, gold spans."""

import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import nearest
from metaseq_lm.data.preprocess.pipeline import (
    TRAIN,
    Columns,
    Pipeline,
    Request,
    Split,
    end_to_end,
)
from metaseq_lm.data.preprocess.tokenizer import describe_tokenizer, save_tokenizer
from metaseq_lm.data.records.file_kinds import PLAIN, RECORDS, Kind
from metaseq_lm.data.squad.files import VERSIONS, Paragraph, Question, SquadReader
from metaseq_lm.data.squad.sets import PARTS, SQUAD
from metaseq_lm.data.storage.columns import ROWS
from metaseq_lm.data.tokenizers.base import Offsets, Tokenizer
from metaseq_lm.data.unknown_tokens import count_unknown

_COUNTS = ("paragraphs", "questions", "impossible", "unrecoverable", "bad_utf8")
_TOKENS = (PARTS[0], PARTS[3])  # the columns of tokens


class SquadPipeline(Pipeline[Paragraph, Columns]):
    """Official files to a SQuAD set; `version` is "v1.1", "v2.0" or "mrqa"."""

    kind, unit = SQUAD, "questions"
    reads_records = holds_out = True
    reads, expected = PLAIN | RECORDS | {Kind.SQUAD, Kind.JSON_COLUMNS}, "a file of SQuAD"

    def __init__(self, request: Request, version: str, tokenizer: Tokenizer) -> None:
        super().__init__(request.with_valid())
        if version not in VERSIONS:
            hint = nearest(version, list(VERSIONS))
            raise UsageError(f"SQuAD {version!r}: choose one of {', '.join(VERSIONS)}.{hint}")
        self.version = version
        self.tokenizer = tokenizer

    def prepare(self) -> dict[str, Any]:
        if self.request.hold_out is not None:
            files = map(self.request.text_file, self.request.splits[TRAIN])
            readers = chain.from_iterable(SquadReader(file, self.version) for file in files)
            # All questions on a context go to one side, or valid would be about texts of train.
            self.hold_out((hash(paragraph.context) for paragraph in readers), "contexts")
        return describe_tokenizer(self.tokenizer)

    def read(self, split: Split) -> Iterator[Paragraph]:
        """Yield the paragraphs; MetaseqError for a question id that occurs twice."""
        split.counts.update(dict.fromkeys(_COUNTS, 0))
        seen: set[str] = set()
        for path in split.sources:
            reader = SquadReader(self.request.text_file(path), self.version)
            for paragraph in reader:
                if self.is_elsewhere(split, hash(paragraph.context)):
                    continue
                for question in paragraph.questions:
                    if question.id in seen:
                        raise MetaseqError(
                            f"{path}: the question id {question.id!r} occurs twice in "
                            f"'{split.name}'; predictions could not be told apart"
                        )
                    seen.add(question.id)
                yield paragraph
            split.counts["bad_utf8"] += reader.bad_utf8

    def encode(self, split: Split, records: Iterator[Paragraph]) -> Iterator[Columns]:
        tokens, counts = self.tokenizer.dtype, split.counts
        unk = self.tokenizer.vocabulary.unk
        counts["unknown"] = 0
        for paragraph in records:
            context = self.tokenizer.encode_with_offsets(paragraph.context)
            ids = self.tokenizer.encode_batch([q.text for q in paragraph.questions])
            spans, texts = [], []
            for question in paragraph.questions:
                first, last = _gold_tokens(question, paragraph.context, context)
                spans.append([counts["paragraphs"], first, last, question.impossible])
                counts["questions"] += 1
                counts["impossible"] += question.impossible
                counts["unrecoverable"] += first < 0 and not question.impossible
                if first >= 0 and not paragraph.context.startswith(
                    question.answers[0], question.start
                ):
                    counts["displaced"] += 1
                texts.append(
                    {"id": question.id, "question": question.text, "answers": question.answers}
                )
            counts["paragraphs"] += 1
            # The characters of each token, because answers are cut out of the context.
            rows = (*([values] for values in context), ids, spans)
            int32 = np.dtype(np.int32)
            types = (tokens, int32, int32, tokens, int32)
            columns: dict[str, tuple[np.ndarray, np.ndarray]] = {}
            for part, values, dtype in zip(PARTS, rows, types):
                columns[part] = end_to_end(values, dtype)
            for part in _TOKENS:
                counts["unknown"] += count_unknown(columns[part][0], unk)
            row = {"context": paragraph.context, "questions": texts}
            yield {**columns, ROWS: json.dumps(row, ensure_ascii=False) + "\n"}

    def write(self, split: Split, encoded: Iterator[Columns]) -> None:
        tokens = self.write_columns(split, encoded)
        split.counts["tokens"] = [tokens[part] for part in _TOKENS]

    def nothing(self, split: Split) -> str:
        return f"{split}: no questions in {split.counts['paragraphs']} paragraphs"

    def finish(self, splits: list[Split]) -> dict[str, Any]:
        save_tokenizer(self.tokenizer, self.request.destdir.parent)
        return {"version": self.version}

    def summary(self, split: Split) -> str:
        counts = split.counts
        tokens = " + ".join(f"{number:,}" for number in counts["tokens"])
        text = (
            f"{split.name}: {counts['paragraphs']:,} paragraphs, {counts['questions']:,} "
            f"questions, {counts['impossible']:,} impossible, {tokens} tokens"
        )
        if lost := counts["unrecoverable"]:
            text += f"; {lost:,} answers not found in their context (not trained on)"
        if displaced := counts["displaced"]:
            text += f"; {displaced:,} answers found beside their answer_start"
        if counts["bad_utf8"]:
            text += f"; {counts['bad_utf8']:,} lines with invalid UTF-8 (replaced)"
        return text


def _gold_tokens(question: Question, context: str, offsets: Offsets) -> tuple[int, int]:
    """Return the first and the last token of the first gold answer, (-1, -1) if it has none."""
    if not question.answers:
        return -1, -1
    span = _find_answer(context, question.answers[0], question.start)
    if span is None:
        return -1, -1
    _, starts, ends = offsets
    # The tokens that the characters of the answer touch: the shortest span that holds it.
    first = int(np.searchsorted(ends, span[0], side="right"))
    last = int(np.searchsorted(starts, span[1], side="left")) - 1
    return (first, last) if first <= last else (-1, -1)


def _find_answer(context: str, answer: str, start: int) -> tuple[int, int] | None:
    """Return the characters of an answer said to begin at `start`, or None if they cannot be found.

    If the text is not there, it is searched for as in BERT's code, within the words that the place
    touches and with runs of white space equal: starts in the data sets may be off by a few.
    """
    end = start + len(answer)
    if not answer.strip() or start < 0 or end > len(context):
        return None
    if context[start:end] == answer:
        return start, end
    # A place between words belongs to the word before it.
    first = len(context[: start + 1].rstrip())
    if words_before := context[:first].split():
        first -= len(words_before[-1])
    after = re.compile(r"\S*").match(context, end - 1)
    assert after is not None
    words = r"\s+".join(map(re.escape, answer.split()))
    match = re.compile(words).search(context, first, after.end())
    return match.span() if match else None
