"""SQuAD on disk: tokens of contexts and questions, positions of tokens, gold spans.

`NAME/SPLIT.context.{bin,idx}` has one sequence per paragraph, `.context_start` and `.context_end`
the characters at which its tokens start and end, `.question` one sequence per question, `.spans`
four numbers per question (see SquadSet), `SPLIT.rows.jsonl` one line per paragraph: its context and
the id, text and answers of its questions.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.records.json_files import json_object
from metaseq_lm.data.records.record import Record
from metaseq_lm.data.squad.files import VERSIONS
from metaseq_lm.data.storage.columns import ROWS, ColumnSet
from metaseq_lm.data.storage.indexed import IndexedDataset, number_outside
from metaseq_lm.data.storage.manifest import Manifest, require_sizes

SQUAD = "squad"
PARTS = ("context", "context_start", "context_end", "question", "spans")
_SPAN_COLUMNS = 4
_REFUSAL = "not a SQuAD set; make one with 'preprocess --benchmark squad/v1.1' or v2.0"


def squad_manifest(folder: Path) -> Manifest:
    """Return the manifest of a SQuAD set; MetaseqError if the folder holds none."""
    manifest = Manifest.load(folder)
    if manifest.kind != SQUAD or manifest.details.get("version") not in VERSIONS:
        raise MetaseqError(f"{folder}: {_REFUSAL}")
    return manifest


class SquadSet(ColumnSet):
    """One split of a SQuAD set.

    Attributes:
        contexts: The tokens of each paragraph.
        questions: The tokens of each question.
        starts: The first character of each context token.
        ends: The character after the last of each context token.
        paragraph: The paragraph of each question, int64 (questions,).
        first: The first gold token in the context, -1 for none, int64 (questions,).
        last: The last gold token in the context, -1 for none, int64 (questions,).
        impossible: Whether the question has no answer, boolean (questions,).
    """

    kinds = (SQUAD,)
    refusal = _REFUSAL

    def __init__(self, folder: str | Path, split: str) -> None:
        super().__init__(folder, split)
        self.version: str = squad_manifest(self.folder).details["version"]
        self.tokenizer_hash: str = self.manifest.tokenizer["hash"]
        self.contexts, self.starts, self.ends, self.questions, spans = map(self.column, PARTS)
        for data in (self.starts, self.ends):
            self.check_rows(data, self.contexts, same_sizes=True)
        if len(spans) != len(self.questions) or (spans.sizes != _SPAN_COLUMNS).any():
            self.refuse(spans, f"does not have {_SPAN_COLUMNS} numbers for each question")
        table = np.array(spans.tokens, np.int64).reshape(-1, _SPAN_COLUMNS)
        self.paragraph, self.first, self.last = table[:, 0], table[:, 1], table[:, 2]
        self.impossible = table[:, 3] != 0
        self._check_table(spans)
        # Each of two swapped files is sound by itself.
        require_sizes(self.folder)

    def _check_table(self, spans: IndexedDataset) -> None:
        if number_outside(self.paragraph, len(self.contexts)) is not None:
            self.refuse(spans, "names a paragraph that is not there")
        none = (self.first == -1) & (self.last == -1)
        inside = (0 <= self.first) & (self.first <= self.last)
        inside &= self.last < self.contexts.sizes[self.paragraph]
        if not (none | inside & ~self.impossible).all():
            self.refuse(spans, "has a span outside its context")

    def __len__(self) -> int:
        return len(self.paragraph)

    @property
    def answerable_only(self) -> bool:
        """Whether the official scores of this version lack impossible questions."""
        return self.version != "v2.0"

    @functools.cached_property
    def texts(self) -> tuple[list[str], list[dict[str, Any]]]:
        """Contexts (paragraphs,) and the id, question and answers of each question (questions,).

        Read at first use; MetaseqError with file and line if the file is damaged.
        """
        contexts, questions = [], []
        for row in self.lines(ROWS, len(self.contexts), _paragraph):
            contexts.append(row.text("context"))
            for question in row.records("questions"):
                questions.append({k: question.get(k) for k in ("id", "question", "answers")})
        if len(questions) != len(self):
            raise MetaseqError(
                f"{self.folder / self.split}.{ROWS}: {len(questions)} questions, expected "
                f"{len(self)}; preprocess again"
            )
        return contexts, questions

    def golds(self) -> dict[str, list[str]]:
        """Return the gold answers of each question by its id."""
        return {row["id"]: list(row["answers"]) for row in self.texts[1]}

    def text(self, question: int, first: int, last: int) -> str:
        """Return the text of tokens `first` to `last` of the context of a question."""
        at = int(self.paragraph[question])
        start, end = int(self.starts[at][first]), int(self.ends[at][last])
        return self.texts[0][at][start:end].strip()


def _paragraph(text: str, place: str) -> Record:
    where = f"{place}: damaged, preprocess again"
    return Record(json_object(text, where), where)
