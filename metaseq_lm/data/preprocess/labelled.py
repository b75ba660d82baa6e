"""Labelled sets: rows of TSV or JSONL files to token files, labels, spans and facts."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from metaseq_lm.core.config import option
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import nearest
from metaseq_lm.data.corpus.encode import encode_texts
from metaseq_lm.data.labelled.files import Columns, Row, RowReader, Rows, is_json, may_lack_labels
from metaseq_lm.data.labelled.sets import WITH_PLACES, rows_name
from metaseq_lm.data.preprocess.pipeline import (
    TRAIN,
    Pipeline,
    Request,
    Split,
    batches,
    register_dataset_kind,
)
from metaseq_lm.data.preprocess.tokenizer import (
    describe_tokenizer,
    save_tokenizer,
    tokenizer_for_set,
)
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.storage.manifest import LABELLED, classes_of
from metaseq_lm.data.tokenizers.base import Tokenizer, token_span

BATCH = 1024
COUNTS = ("rows", "blank", "bad_utf8", "skipped", "no_tokens")


@dataclass(frozen=True)
class LabelledOptions:
    """Options of labelled sets."""

    NOUN: ClassVar[str] = "labelled sets"
    UNUSED_WITH: ClassVar[dict[str, str]] = {"labels_from": "labels regression"}

    labelled: str = option("", "the files are a labelled set, written to D/NAME", metavar="NAME")
    columns: tuple[str, ...] | None = option(
        None, "column names of TSV files that have no header row", metavar="A,B,..."
    )
    text_columns: tuple[str, ...] | None = option(
        None, "default: text, or text_a,text_b", metavar="A[,B]"
    )
    label_column: str = option("label", "the column of the labels", metavar="A")
    labels: tuple[str, ...] | None = option(
        None, "the classes in order (default: of train, sorted)", metavar="A,B,..."
    )
    labels_from: Path | None = option(
        None,
        "the classes of this set, a folder D/NAME, in its order; for --tagged, --treebank too",
        metavar="SET",
    )
    regression: bool = option(False, "labels are numbers, not classes")
    tokenizer_from: Path | None = option(None, "")


@dataclass(frozen=True)
class LabelledForm:
    """What a labelled set is, apart from its rows.

    `labels` are the classes in order, None for those of the train split, sorted. `form` is one of
    labelled.sets.FORMS, "" for "single" or "pair" by the number of texts. `details` go into the manifest.
    """

    labels: list[str] | None = None
    regression: bool = False
    form: str = ""
    benchmark: str = ""
    details: dict[str, Any] = field(default_factory=dict)


OpenRows = Callable[[str, Path], Rows]  # of a split and a file


@register_dataset_kind("labelled", LabelledOptions)
def labelled_set(options: LabelledOptions, request: Request) -> "LabelledPipeline":
    """Return what makes a labelled set of TSV or JSONL files."""
    columns = Columns(
        names=options.columns,
        texts=options.text_columns,
        label=options.label_column,
        regression=options.regression,
    )
    files = [path for paths in request.splits.values() for path in paths]
    if columns.names is not None and all(map(is_json, files)):
        raise UsageError("--columns names those of TSV files; fields of JSON files have names")
    labels = list(options.labels) if options.labels is not None else None
    if options.labels_from is not None:
        labels = classes_of(options.labels_from)
    details = {"text_columns": list(columns.texts or ()), "label_column": columns.label}

    def open_rows(split: str, path: Path) -> Rows:
        return RowReader(request.text_file(path), columns, not may_lack_labels(split))

    return LabelledPipeline(
        request.inside(options.labelled),
        LabelledForm(labels, columns.regression, details=details),
        open_rows,
        tokenizer_for_set(request.destdir, options.tokenizer_from),
    )


Label = tuple[Path, int, str | float | None]  # the file and line of a row, and its label
# A batch of rows, ids end to end and sizes of each text column, and the spans of each row.
EncodedTexts = tuple[np.ndarray, np.ndarray]
EncodedRows = tuple[list[Row], list[EncodedTexts], list[list[int]]]


class LabelledPipeline(Pipeline[tuple[Path, Row], EncodedRows]):
    """Rows of any source to a labelled set; `open_rows` returns the rows of a file of a split."""

    kind, unit = LABELLED, "rows"

    def __init__(
        self, request: Request, form: LabelledForm, open_rows: OpenRows, tokenizer: Tokenizer
    ) -> None:
        super().__init__(request)
        self.form = form
        self.open_rows = open_rows
        self.tokenizer = tokenizer
        self._labels: dict[str, list[Label]] = {}
        self._classes = form.labels

    def prepare(self) -> dict[str, Any]:
        labels, regression = self.form.labels, self.form.regression
        if regression and labels is not None:
            raise UsageError("--regression and --labels exclude each other")
        if labels is not None and (len(set(labels)) != len(labels) or "" in labels):
            raise UsageError(f"--labels {','.join(labels)}: labels must be different and not empty")
        if labels is None and not regression and TRAIN not in self.request.splits:
            raise UsageError("without --trainpref the classes must be given with --labels a,b,...")
        return describe_tokenizer(self.tokenizer)

    def read(self, split: Split) -> Iterator[tuple[Path, Row]]:
        """Yield the rows to keep with their file, counting the others and noting labels."""
        counts = split.counts
        counts.update(dict.fromkeys(COUNTS, 0))
        labels = self._labels[split.name] = []
        columns = 0
        for path in split.sources:
            reader = self.open_rows(split.name, path)
            for row in reader:
                if self.skips(split, row.bad):
                    continue
                columns = columns or len(row.texts)
                if len(row.texts) != columns:
                    raise MetaseqError(
                        f"{path}:{row.line}: {len(row.texts)} text column(s), but earlier rows of the "
                        f"split have {columns}; say which with --text-columns"
                    )
                counts["rows"] += 1
                labels.append((path, row.line, row.label))
                yield path, row
            counts.update(reader.counts)

    def encode(self, split: Split, records: Iterator[tuple[Path, Row]]) -> Iterator[EncodedRows]:
        for batch in batches(records, BATCH):
            rows = [row for _, row in batch]
            if self.form.form in WITH_PLACES:
                yield rows, *self._encode_with_spans(batch)
                continue
            texts = zip(*(row.texts for row in rows))
            columns = [encode_texts(self.tokenizer, column) for column in texts]
            for _, sizes in columns:
                split.counts["no_tokens"] += int(np.count_nonzero(sizes == 0))
            yield rows, columns, []

    def _encode_with_spans(
        self, batch: list[tuple[Path, Row]]
    ) -> tuple[list[EncodedTexts], list[list[int]]]:
        ids: list[list[np.ndarray]] = [[] for _ in batch[0][1].texts]
        spans = []
        for path, row in batch:
            offsets = [self.tokenizer.encode_with_offsets(text) for text in row.texts]
            for column, (values, _, _) in zip(ids, offsets):
                column.append(np.asarray(values, np.int64))
            places: list[int] = []
            for column_number, start, end in row.spans:
                _, starts, ends = offsets[column_number]
                first, last = token_span(np.asarray(starts), np.asarray(ends), start, end)
                if first == last:
                    raise MetaseqError(
                        f"{path}:{row.line}: no token holds {row.texts[column_number][start:end]!r} "
                        f"(characters {start} to {end} of text {column_number + 1})"
                    )
                places += [column_number, first, last]
            spans.append(places)
        sizes = [np.array(list(map(len, column)), np.int64) for column in ids]
        columns = [(np.concatenate(column), size) for column, size in zip(ids, sizes)]
        return columns, spans

    def write(self, split: Split, encoded: Iterator[EncodedRows]) -> None:
        with contextlib.ExitStack() as stack:
            writers: list[IndexedWriter] = []
            span_writer = append_facts = None
            for rows, columns, spans in encoded:
                if not writers:
                    for i in range(len(columns)):
                        name, dtype = f"{split.name}.input{i}", self.tokenizer.dtype
                        writers.append(self.open_writer(stack, split, name, dtype))
                    if self.form.form in WITH_PLACES:
                        name = f"{split.name}.spans"
                        span_writer = self.open_writer(stack, split, name, np.int32)
                    if rows[0].facts is not None:
                        append_facts = self.open_text(stack, split, rows_name(split.name))
                for writer, (values, sizes) in zip(writers, columns):
                    writer.extend(values, sizes)
                if span_writer is not None:
                    for places in spans:
                        span_writer.add(np.array(places, np.int32))
                if append_facts is not None:
                    facts = (
                        json.dumps(row.facts, ensure_ascii=False, sort_keys=True) for row in rows
                    )
                    append_facts("".join(f"{line}\n" for line in facts))
            split.counts["tokens"] = [writer.tokens for writer in writers]

    def nothing(self, split: Split) -> str:
        counts = split.counts
        return (
            f"{split}: no rows ({counts['blank']} blank lines, "
            f"{counts['skipped'] + counts['malformed']} rows skipped, apart from a header row)"
        )

    def finish(self, splits: list[Split]) -> dict[str, Any]:
        n_columns = {split.name: len(split.counts["tokens"]) for split in splits}
        if not self.form.regression and self._classes is None:
            self._classes = sorted_labels({str(label) for _, _, label in self._labels[TRAIN]})
        if len(set(n_columns.values())) != 1:
            listed = ", ".join(f"{split} has {count}" for split, count in n_columns.items())
            raise MetaseqError(
                f"{self.request.destdir}: the splits differ in the number of text columns: {listed}"
            )
        count = n_columns[splits[0].name]
        for split in splits:
            self._write_labels(split)
        save_tokenizer(self.tokenizer, self.request.destdir.parent)
        return {
            "labels": self._classes or [],
            "regression": self.form.regression,
            "inputs": count,
            "form": self.form.form or ("single" if count == 1 else "pair"),
            "benchmark": self.form.benchmark,
            **self.form.details,
        }

    def _complete_labels(self, split: Split) -> list[Label]:
        """Return the labels of a split, or none; MetaseqError with the place if only some rows have one."""
        labels = self._labels[split.name]
        missing = [(path, line) for path, line, label in labels if label is None]
        if missing and len(missing) < len(labels):
            path, line = missing[0]
            raise MetaseqError(f"{path}:{line}: no label, but other rows of the split have one")
        return [] if missing else labels

    def _write_labels(self, split: Split) -> None:
        labels, classes = self._complete_labels(split), self._classes
        if not labels:
            return
        if classes is None:
            values = np.array([label for _, _, label in labels], np.float64)
        else:
            numbers = {label: i for i, label in enumerate(classes)}
            for path, line, label in labels:
                if label not in numbers:
                    raise MetaseqError(
                        f"{path}:{line}: label {label!r} is not one of {', '.join(classes)}."
                        f"{nearest(str(label), classes)} The classes are those of the train split "
                        "unless --labels or --benchmark gives them."
                    )
            values = np.array([numbers[str(label)] for _, _, label in labels], np.int32)
        with contextlib.ExitStack() as stack:
            writer = self.open_writer(stack, split, f"{split.name}.label", values.dtype)
            writer.extend(values, np.ones(len(values), np.int64))

    def summary(self, split: Split) -> str:
        counts = split.counts
        labels = [label for _, _, label in self._complete_labels(split)]
        tokens = " + ".join(f"{number:,}" for number in counts["tokens"])
        parts = [f"{counts['rows']:,} rows", f"{tokens} tokens"]
        text = f"{split.name}: {', '.join(parts + split.other_counts('rows', 'tokens'))}"
        if not labels:
            return f"{text}; no labels"
        if self._classes is None:
            values = np.array(labels, np.float64)
            return f"{text}; labels from {values.min():g} to {values.max():g}"
        shares = [f"{label} {labels.count(label):,}" for label in self._classes]
        return f"{text}; {', '.join(shares)}"


def sorted_labels(labels: set[str]) -> list[str]:
    """Return labels in order: as numbers if all are whole numbers, else by code point."""
    if all(label.isascii() and label.removeprefix("-").isdigit() for label in labels):
        return sorted(labels, key=lambda label: (int(label), label))
    return sorted(labels)
