"""SQuAD on disk: tokens of contexts and questions, where each token stands in its context, gold spans.

`NAME/SPLIT.context.{bin,idx}` has one sequence per paragraph, `.context_start` and `.context_end`
the characters at which its tokens start and end, `.question` one sequence per question, `.spans`
four numbers per question (see SquadSet), `SPLIT.rows.jsonl` one line per paragraph: its context and
the id, text and answers of its questions.
"""

import contextlib
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import full_disk_message
from metaseq_lm.core.registry import nearest
from metaseq_lm.data.corpus.preprocess import Job, describe
from metaseq_lm.data.labelled.sets import rows_name
from metaseq_lm.data.squad.files import VERSIONS, Paragraph, Question, SquadReader
from metaseq_lm.data.storage.indexed import IndexedDataset, IndexedWriter, prefix_path
from metaseq_lm.data.storage.manifest import Manifest, require_sizes
from metaseq_lm.data.storage.staging import publish, staging
from metaseq_lm.data.storage.text_files import numbered_lines
from metaseq_lm.data.tokenizers.base import Offsets, Tokenizer
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary

SQUAD = "squad"
PARTS = ("context", "context_start", "context_end", "question", "spans")
SPAN_COLUMNS = 4
Counts = dict[str, Any]


# ---------------------------------------------------------------- preprocessing


def preprocess_squad(job: Job, version: str, tokenizer: Tokenizer) -> Manifest:
    """Write the SQuAD or MRQA files of `job` into `job.destdir` and return the manifest.

    `version` is "v1.1", "v2.0" or "mrqa". MetaseqError with file and place for what is wrong in a
    file; then nothing is written.
    """
    if version not in VERSIONS:
        known = ", ".join(VERSIONS)
        raise UsageError(
            f"SQuAD {version!r}: choose one of {known}.{nearest(version, list(VERSIONS))}"
        )
    job.check()
    with staging(job.destdir, job.overwrite) as folder:
        manifest = Manifest(SQUAD, describe(tokenizer), {}, job.command)
        manifest.details = {"version": version}
        names = []
        for split, paths in job.splits.items():
            counts = _write_split(job, split, version, (tokenizer, folder))
            manifest.splits[split] = {**counts, "sources": list(map(str, paths))}
            names += [f"{split}.{part}.{end}" for part in PARTS for end in ("bin", "idx")]
            names.append(rows_name(split))
            print(_summary(split, counts), flush=True)
        manifest.add_files(folder, names)
        publish(folder, job.destdir, manifest)
    return manifest


def _write_split(job: Job, split: str, version: str, out: tuple[Tokenizer, Path]) -> Counts:
    """Write the files of a split into the folder of `out` with its tokenizer; return its counts."""
    tokenizer, folder = out
    numbers = ("paragraphs", "questions", "impossible", "unrecoverable", "bad_utf8")
    counts: Counts = dict.fromkeys(numbers, 0)
    tokens, int32 = tokenizer.dtype, np.dtype(np.int32)
    rows_path = folder / rows_name(split)
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedWriter(folder / f"{split}.{part}", stored))
            for part, stored in zip(PARTS, (tokens, int32, int32, tokens, int32))
        ]
        stack.enter_context(full_disk_message(rows_path, lambda: rows_path.stat().st_size))
        rows = stack.enter_context(open(rows_path, "w", encoding="utf-8"))
        for paragraph in _paragraphs(job, split, version, counts):
            _write_paragraph(paragraph, tokenizer, (writers, rows), counts)
        if not counts["questions"]:
            files = ", ".join(map(str, job.splits[split]))
            raise MetaseqError(f"{files}: no questions in {counts['paragraphs']} paragraphs")
        counts["tokens"] = [writers[0].tokens, writers[3].tokens]
    return counts


def _paragraphs(job: Job, split: str, version: str, counts: Counts) -> Iterator[Paragraph]:
    seen: set[str] = set()
    for path in job.splits[split]:
        reader = SquadReader(path, version, job.on_bad_utf8)
        for paragraph in reader:
            for question in paragraph.questions:
                if question.id in seen:
                    raise MetaseqError(
                        f"{path}: the question id {question.id!r} occurs twice in '{split}'; "
                        "predictions could not be told apart"
                    )
                seen.add(question.id)
            yield paragraph
        counts["bad_utf8"] += reader.bad_utf8


def _write_paragraph(
    paragraph: Paragraph,
    tokenizer: Tokenizer,
    out: tuple[list[IndexedWriter], IO[str]],
    counts: Counts,
) -> None:
    (contexts, starts, ends, questions, spans), rows = out
    offsets = tokenizer.encode_with_offsets(paragraph.context)
    for writer, values in zip((contexts, starts, ends), offsets):
        writer.add(values)
    for ids in tokenizer.encode_batch([question.text for question in paragraph.questions]):
        questions.add(ids)
    texts = []
    for question in paragraph.questions:
        first, last = gold_tokens(question, paragraph.context, offsets)
        spans.add([counts["paragraphs"], first, last, question.impossible])
        counts["questions"] += 1
        counts["impossible"] += question.impossible
        counts["unrecoverable"] += first < 0 and not question.impossible
        about = {"id": question.id, "question": question.text, "answers": question.answers}
        texts.append(about)
    counts["paragraphs"] += 1
    row = {"context": paragraph.context, "questions": texts}
    rows.write(json.dumps(row, ensure_ascii=False) + "\n")


def gold_tokens(question: Question, context: str, offsets: Offsets) -> tuple[int, int]:
    """Return the first and the last token of the first gold answer, (-1, -1) if it has none.

    These are the tokens that the characters of the answer touch, the shortest span that holds them.
    """
    place = answer_place(context, question.answers[0], question.start) if question.answers else None
    if place is None:
        return -1, -1
    _, starts, ends = offsets
    first = int(np.searchsorted(ends, place[0], side="right"))
    last = int(np.searchsorted(starts, place[1], side="left")) - 1
    return (first, last) if first <= last else (-1, -1)


def answer_place(context: str, answer: str, start: int) -> tuple[int, int] | None:
    """Return the characters of an answer said to begin at `start`, or None if they cannot be found.

    If the text is not there, it is looked for within the words that the place touches (as BERT's
    code does it, white space runs being equal): starts in the data sets may be off by a few.
    """
    end = start + len(answer)
    if not answer.strip() or start < 0 or end > len(context):
        return None
    if context[start:end] == answer:
        return start, end
    # A place between words belongs to the word before it.
    first = len(context[: start + 1].rstrip())
    first -= len(context[:first].split()[-1]) if context[:first].split() else 0
    after = re.compile(r"\S*").match(context, end - 1)
    assert after is not None
    words = r"\s+".join(map(re.escape, answer.split()))
    found = re.compile(words).search(context, first, after.end())
    return found.span() if found else None


def _summary(split: str, counts: Counts) -> str:
    text = (
        f"{split}: {counts['paragraphs']:,} paragraphs, {counts['questions']:,} questions, "
        f"{counts['impossible']:,} impossible, {' + '.join(f'{t:,}' for t in counts['tokens'])} tokens"
    )
    if counts["unrecoverable"]:
        text += f"; {counts['unrecoverable']:,} answers not found in their context (not trained on)"
    if counts["bad_utf8"]:
        text += f"; {counts['bad_utf8']:,} lines with invalid UTF-8 (replaced)"
    return text


# ---------------------------------------------------------------- reading


def squad_manifest(folder: Path) -> Manifest:
    """Return the manifest of a SQuAD set; MetaseqError if the folder holds none."""
    manifest = Manifest.load(folder)
    if manifest.kind != SQUAD or manifest.details.get("version") not in VERSIONS:
        raise MetaseqError(
            f"{folder}: not a SQuAD set; make one with 'preprocess --benchmark squad/v1.1' or v2.0"
        )
    return manifest


class SquadSet:
    """One split of a SQuAD set, memory-mapped.

    `contexts` and `questions` are IndexedDatasets of tokens, `starts` and `ends` of the characters
    of each context token; `paragraph`, `first`, `last` (gold tokens in the context, -1 for none)
    and `impossible` are arrays (questions,). MetaseqError if files are missing, damaged or do not
    belong together.
    """

    def __init__(self, folder: str | Path, split: str) -> None:
        self.folder, self.split = Path(folder), split
        manifest = squad_manifest(self.folder)
        if split not in manifest.splits:
            raise MetaseqError(
                f"{self.folder}: no split '{split}'; there are {', '.join(sorted(manifest.splits))}"
            )
        self.version: str = manifest.details["version"]
        self.tokenizer_hash: str = manifest.tokenizer["hash"]
        parts = [IndexedDataset(self.folder / f"{split}.{part}") for part in PARTS]
        self.contexts, self.starts, self.ends, self.questions, spans = parts
        for data in (self.starts, self.ends):
            if not np.array_equal(data.sizes, self.contexts.sizes):
                self._refuse(data, "has other sizes than the contexts")
        for data in parts:
            if data.dtype.kind not in "iu":
                self._refuse(data, f"holds {data.dtype}")
        if len(spans) != len(self.questions) or (spans.sizes != SPAN_COLUMNS).any():
            self._refuse(spans, f"does not have {SPAN_COLUMNS} numbers for each question")
        table = np.array(spans.tokens, np.int64).reshape(-1, SPAN_COLUMNS)
        self.paragraph, self.first, self.last = table[:, 0], table[:, 1], table[:, 2]
        self.impossible = table[:, 3] != 0
        self._check_table(spans)
        # Of two files that were swapped each is sound.
        require_sizes(self.folder)

    def _refuse(self, data: IndexedDataset, what: str) -> None:
        path = prefix_path(data.prefix, ".bin")
        raise MetaseqError(f"{path}: {what}; the files do not belong together, preprocess again")

    def _check_table(self, spans: IndexedDataset) -> None:
        if len(self.paragraph) and not 0 <= self.paragraph.min() <= self.paragraph.max() < len(
            self.contexts
        ):
            self._refuse(spans, "names a paragraph that is not there")
        none = (self.first == -1) & (self.last == -1)
        inside = (0 <= self.first) & (self.first <= self.last)
        inside &= self.last < self.contexts.sizes[self.paragraph]
        if not (none | inside & ~self.impossible).all():
            self._refuse(spans, "has a span outside its context")

    def __len__(self) -> int:
        return len(self.paragraph)

    @property
    def answerable_only(self) -> bool:
        """Whether the official scores of this version know no impossible questions."""
        return self.version != "v2.0"

    def check_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Raise MetaseqError if the set holds an id that the vocabulary lacks."""
        for data in (self.contexts, self.questions):
            least, most = int(data.tokens.min(initial=0)), int(data.tokens.max(initial=0))
            if least < 0 or most >= len(vocabulary):
                raise MetaseqError(
                    f"{data.prefix}.bin holds token id {min(least, 0) or most} but dict.txt has only "
                    f"{len(vocabulary)} symbols; preprocess again with this tokenizer"
                )

    @functools.cached_property
    def texts(self) -> tuple[list[str], list[dict[str, Any]]]:
        """The contexts (paragraphs,) and the id, question and answers of each question (questions,).

        Read when first asked for; MetaseqError with file and line if the file is damaged.
        """
        path = self.folder / rows_name(self.split)
        contexts, questions = [], []
        for number, text, _ in numbered_lines(path, "fail"):
            try:
                row = json.loads(text)
                contexts.append(str(row["context"]))
                questions += [
                    {k: q[k] for k in ("id", "question", "answers")} for q in row["questions"]
                ]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise MetaseqError(f"{path}:{number}: damaged; preprocess again") from error
        if len(contexts) != len(self.contexts) or len(questions) != len(self):
            raise MetaseqError(
                f"{path}: {len(contexts)} paragraphs and {len(questions)} questions, expected "
                f"{len(self.contexts)} and {len(self)}; preprocess again"
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
