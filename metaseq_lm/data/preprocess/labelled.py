"""Labelled sets: rows of CSV, TSV, JSONL, Parquet or Arrow to tokens, labels, spans, facts."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.options import option
from metaseq_lm.core.registry import abbreviated, nearest
from metaseq_lm.data.corpus.encode import encode_texts
from metaseq_lm.data.labelled.classes import (
    NO_GOLD,
    NO_LABEL,
    gold_classes,
    label_warnings,
    number_of,
    spelling_key,
    whole_number,
)
from metaseq_lm.data.labelled.files import (
    Label,
    LabelledRow,
    RowReader,
    TableColumns,
    may_lack_labels,
)
from metaseq_lm.data.labelled.sets import MULTI_LABEL, WITH_PLACES
from metaseq_lm.data.preprocess.options import ClassOptions, TableOptions, TokenizerFromOptions
from metaseq_lm.data.preprocess.pipeline import (
    TRAIN,
    VALID,
    Columns,
    Pipeline,
    Request,
    Split,
    batches,
    end_to_end,
    register_dataset_kind,
)
from metaseq_lm.data.preprocess.tokenizer import (
    describe_tokenizer,
    save_tokenizer,
    tokenizer_for_set,
)
from metaseq_lm.data.records.file_kinds import JSON, PLAIN, RECORDS, Kind, check_kind
from metaseq_lm.data.records.reading import reader_name
from metaseq_lm.data.records.record import TABLE, Reading
from metaseq_lm.data.storage.columns import ROWS
from metaseq_lm.data.storage.manifest import LABELLED, Manifest, classes_of
from metaseq_lm.data.tokenizers.base import Tokenizer, token_span
from metaseq_lm.data.unknown_tokens import count_unknown

_BATCH = 1024
_SPANS = "spans"  # the column with three numbers for each span of a row
_COUNTS = ("rows", "blank", "bad_utf8", "skipped", "no_tokens", "unknown")


@dataclass(frozen=True)
class _LabelledOptions(TableOptions, ClassOptions, TokenizerFromOptions):
    NOUN: ClassVar[str] = "labelled sets"
    UNUSED_WITH: ClassVar[dict[str, str]] = {
        **dict.fromkeys(
            ("train_labels", "valid_labels", "test_labels"),
            "columns text_columns text_column text_separator label_column label_columns quoting",
        ),
        "labels_from": "labels first_label regression",
        "label_separator": "regression",
        "label_columns": "label_column label_separator labels first_label regression",
        "text_column": "text_columns",
    }

    labelled: str = option("", "the files are a labelled set, written to D/NAME", metavar="NAME")
    text_column: tuple[str, ...] | None = option(
        None, "the same as --text-columns", metavar="A[,B]"
    )
    text_separator: str | None = option(
        None,
        "join the text columns to one text with S between them, such as title and body",
        metavar="S",
    )
    label_column: str = option("label", "the column of the labels", metavar="A")
    label_columns: tuple[str, ...] | None = option(
        None, "a row has any number of labels, each with a column of 0 and 1", metavar="A,B,..."
    )
    labels: tuple[str, ...] | None = option(
        None,
        "the classes in order (default: of train, sorted); names for labels that are the numbers "
        "0, 1, ... or 1, 2, ...",
        metavar="A,B,...",
    )
    first_label: int | None = option(
        None,
        "the number that the first of --labels names (default: 0 or 1, if the labels of all splits "
        "leave no doubt)",
        metavar="N",
        at_least=-1,
    )
    train_labels: tuple[Path, ...] = option(
        (), "files with a label a line, of the texts a line in --trainpref", metavar="F"
    )
    valid_labels: tuple[Path, ...] = option((), "the same for --validpref", metavar="F")
    test_labels: tuple[Path, ...] = option((), "the same for --testpref", metavar="F")
    label_separator: str = option(
        "", "a row has any number of labels, with this text between them", metavar="S"
    )
    regression: bool = option(False, "labels are numbers, not classes")


@dataclass(frozen=True)
class LabelledForm:
    """The form of a labelled set, independent of its rows.

    `labels` are the classes in order, None for the sorted classes of the train split. `form` is one
    of labelled.sets.FORMS, "" for "single" or "pair" by the number of texts. `details` go into the
    manifest. If `are_names`, the classes are the names of labels that are numbers, and the number
    `first` stands for the first one; None lets the labels of all splits decide.
    """

    labels: list[str] | None = None
    regression: bool = False
    form: str = ""
    benchmark: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    are_names: bool = False
    first: int | None = None


def _names_in(label: Label) -> tuple[str, ...]:
    return label if isinstance(label, tuple) else (str(label),)


def _count_labels(labels: Iterable[Label]) -> Counter[str]:
    return Counter(chain.from_iterable(map(_names_in, labels)))


def _with_names(row: LabelledRow, names: Mapping[str, str]) -> LabelledRow:
    def name(label: str) -> str:
        return names.get(whole_number(label), label)

    if isinstance(row.label, tuple):
        return replace(row, label=tuple(map(name, row.label)))
    if isinstance(row.label, str):
        return replace(row, label=name(row.label))
    return row


# Takes a split, a file, and what gets the remarks on it.
_OpenRows = Callable[[str, Path, Reading], Iterable[LabelledRow]]


@register_dataset_kind("labelled", _LabelledOptions)
def _labelled_set(options: _LabelledOptions, request: Request) -> "LabelledPipeline":
    """Return what makes a labelled set of CSV, TSV, JSONL, Parquet or Arrow files."""
    columns = TableColumns(
        names=options.columns,
        texts=options.text_columns or options.text_column,
        label=options.label_column,
        regression=options.regression,
        text_separator=options.text_separator,
        quoting=options.quoting,
        separator=options.label_separator,
        indicators=options.label_columns or (),
    )
    request = request.expanded()
    files = list(chain.from_iterable(request.splits.values()))
    if columns.names is not None and all(
        reader_name(request.text_file(path)) != TABLE for path in files
    ):
        raise UsageError(
            "--columns names those of CSV and TSV files; fields of JSON files have names"
        )
    label_files = _label_files(options, request)

    def open_rows(split: str, path: Path, reading: Reading) -> RowReader:
        file, labels = request.text_file(path), label_files.get(path)
        label_file = None if labels is None else request.text_file(labels)
        return RowReader(file, columns, not may_lack_labels(split), label_file, reading)

    return LabelledPipeline(
        request.inside(options.labelled),
        _form_of(options, columns),
        open_rows,
        tokenizer_for_set(request.destdir, options.tokenizer_from),
        label_files,
    )


def _form_of(options: _LabelledOptions, columns: TableColumns) -> LabelledForm:
    labels, form = options.labels, ""
    if options.label_columns is not None:
        labels, form = options.label_columns, MULTI_LABEL
    if options.labels_from is not None:
        labels = tuple(classes_of(options.labels_from))
        if Manifest.load(options.labels_from).details.get("form") == MULTI_LABEL:
            form = MULTI_LABEL
    details: dict[str, Any] = {"text_columns": list(columns.texts or ())}
    if columns.text_separator is not None:
        details["text_separator"] = columns.text_separator
    if columns.indicators:
        details["label_columns"] = list(columns.indicators)
    else:
        details["label_column"] = columns.label
    are_names = options.labels is not None and all(
        number_of(label) is None for label in options.labels
    )
    if options.first_label is not None and not are_names:
        raise UsageError("--first-label needs --labels A,B,... that are no numbers")

    return LabelledForm(
        None if labels is None else list(labels),
        columns.regression,
        form,
        details=details,
        are_names=are_names,
        first=options.first_label,
    )


def _label_files(options: _LabelledOptions, request: Request) -> dict[Path, Path]:
    files: dict[Path, Path] = {}
    for split in (TRAIN, VALID, "test"):
        paths = getattr(options, f"{split}_labels")
        texts = request.splits.get(split, [])
        if paths and len(paths) != len(texts):
            raise UsageError(
                f"--{split}-labels names {len(paths)} files, --{split}pref {len(texts)}; each file "
                "of texts has one of labels"
            )
        files |= zip(texts, paths)
    return files


class LabelledPipeline(Pipeline[tuple[Path, LabelledRow], Columns]):
    """Turns rows of any source into a labelled set; `open_rows` opens a file of a split."""

    kind, unit = LABELLED, "rows"
    reads_records = holds_out = True
    reads, expected = RECORDS | PLAIN, "a table or records with labels"

    def __init__(
        self,
        request: Request,
        form: LabelledForm,
        open_rows: _OpenRows,
        tokenizer: Tokenizer,
        label_files: Mapping[Path, Path] | None = None,
    ) -> None:
        super().__init__(request.with_valid())
        self._label_files = label_files or {}
        self.form = form
        self.open_rows = open_rows
        self.tokenizer = tokenizer
        # The file and line of each row, and its label.
        self._labels: dict[str, list[tuple[Path, int, Label]]] = {}
        self._multi_label = form.form == MULTI_LABEL
        self._classes = form.labels
        self._spellings: dict[str, str] = {}
        self._warnings: list[str] = []
        if form.benchmark:  # official files have forms of their own
            self.reads = frozenset(Kind) - {Kind.SQUAD, Kind.HTML, Kind.XML}
            self.expected = f"a file of {form.benchmark}"

    def input_files(self) -> Iterable[Path]:
        return [*super().input_files(), *self._label_files.values()]

    def check_file(self, path: Path) -> None:
        super().check_file(path)
        if path in (*self._label_files, *self._label_files.values()):
            allowed = frozenset(Kind) - JSON
            check_kind(self.request.text_file(path), allowed, "texts or labels, one a line")

    def is_read_first(self, path: Path) -> bool:
        takes_labels = self.form.labels is None and not self.form.regression
        return takes_labels and path in self.request.splits.get(TRAIN, [])

    def prepare(self) -> dict[str, Any]:
        labels, regression = self.form.labels, self.form.regression
        if regression and labels is not None:
            raise UsageError("--regression and --labels exclude each other")
        if labels is not None and (len(set(labels)) != len(labels) or "" in labels):
            raise UsageError(f"--labels {','.join(labels)}: labels must be different and not empty")
        if labels is None and not regression and TRAIN not in self.request.splits:
            raise UsageError("without --trainpref the classes must be given with --labels a,b,...")
        if labels is None and not regression:
            self._classes = gold_classes(_count_labels(self._labels_of(TRAIN)))
        # "1" and "1.0" are one class: one split may hold the numbers in a column of floats.
        self._spellings = {whole_number(name): name for name in self._classes or []}
        if self.form.are_names:
            self._spellings |= self._names_of_numbers(self._classes or [])
        if self.request.hold_out is not None:
            # A record may be several rows, which stay together.
            no_gold, rows = self._no_gold(), self._rows_to_keep(TRAIN)
            labelled = ((path, row.line) for path, row in rows if row.label not in no_gold)
            self.hold_out(labelled, "rows")
        return describe_tokenizer(self.tokenizer)

    def _names_of_numbers(self, names: Sequence[str]) -> dict[str, str]:
        """Return the name of each label that is a number; UsageError if it could have two.

        Ignores splits without labels, or with 0 in place of every label.
        """
        seen: set[int] = set()
        for split in self.request.splits:
            words = set(map(whole_number, _count_labels(self._labels_of(split))))
            numbers = {int(word) for word in words if word.isdecimal() or word == "-1"}
            if not (may_lack_labels(split) and numbers <= {-1, 0}):
                seen |= numbers
        first = self.form.first
        if first is None:
            last, counted = len(names), sorted(seen - {-1})
            # Labels up to the number of names, without 0, count from 1.
            first = int(last in seen and 0 not in seen)
            # Numbers that fit either way of counting leave a doubt, which a wrong guess would hide.
            other = int(bool(counted) and 0 < counted[0] <= counted[-1] < last)
            if seen == {-1, 1} and last == 2:
                raise UsageError(
                    "--labels has 2 names, and the labels are -1 and 1, which do not count; give "
                    "--labels=-1,1"
                )
            if -1 in seen and counted and counted[-1] == last - 2:
                other = -1  # as in "negative, neutral, positive"; otherwise -1 means no label
            if other:
                number = counted[0]
                raise UsageError(
                    f"--labels has {last} names, and the labels are numbers from {min(seen)} to "
                    f"{counted[-1]}: {number} is {names[number]!r} if they count from 0, or "
                    f"{names[number - other]!r} if they count from {other}; say --first-label 0 or "
                    f"{other}"
                )
        return {str(number): name for number, name in enumerate(names, first)}

    def _rows_to_keep(self, split: str) -> Iterator[tuple[Path, LabelledRow]]:
        """Yield the rows of a split before it is read, to decide on its classes."""
        for path in self.request.splits[split]:
            for row in self.open_rows(split, path, Reading()):
                if not (row.bad and self.request.on_bad_utf8 == "skip"):
                    yield path, _with_names(row, self._spellings)

    def _labels_of(self, split: str) -> Iterator[Label]:
        return (row.label for _, row in self._rows_to_keep(split))

    def _no_gold(self) -> set[Label]:
        no_gold: set[Label] = {NO_LABEL, *NO_GOLD, f"{NO_GOLD[-1]}.0"}
        return no_gold.difference(self._classes or [])

    def _is_unlabelled(self, split: str) -> bool:
        """Return whether a split that may lack labels has one that means none in each row."""
        if not may_lack_labels(split):
            return False
        labels, no_gold = self._labels_of(split), self._no_gold() | {()}
        if self.form.are_names and "0" not in self._spellings:
            no_gold.add("0")
        first = next(labels, None)
        return first in no_gold and all(label in no_gold for label in labels)

    def read(self, split: Split) -> Iterator[tuple[Path, LabelledRow]]:
        """Yield the rows to keep with their file, counting the others and noting labels."""
        counts = split.counts
        counts.update(dict.fromkeys(_COUNTS, 0))
        labels = self._labels[split.name] = []
        classes = {*(self._classes or ())}
        columns, no_gold, unlabelled = 0, self._no_gold(), self._is_unlabelled(split.name)
        for path in split.sources:
            reading = Reading()
            for row in self.open_rows(split.name, path, reading):
                if self.is_elsewhere(split, (path, row.line)) or self.skips(split, row.bad):
                    continue
                if row.label not in classes:
                    row = _with_names(row, self._spellings)
                if unlabelled:
                    row = replace(row, label=None)
                elif row.label in no_gold:
                    counts["no_gold_label"] += 1
                    if counts["no_gold_label"] == 1:
                        label = f"label {row.label!r}" if row.label else "the empty label"
                        can_be_class = row.label and self.form.labels is None
                        remedy = " (--labels can make it a class)" if can_be_class else ""
                        self._warnings.append(
                            f"{path}:{row.line}: {label} means that the row has no gold label; it "
                            f"and others like it are left out{remedy}"
                        )
                    continue
                self._check_number(path, row)
                columns = columns or len(row.texts)
                if len(row.texts) != columns:
                    raise MetaseqError(
                        f"{path}:{row.line}: {len(row.texts)} text column(s), but earlier rows of "
                        f"the split have {columns}; say which with --text-columns"
                    )
                counts["rows"] += 1
                labels.append((path, row.line, row.label))
                yield path, row
            if self.request.hold_out is None or split.name != VALID:  # reported for train
                counts.update(reading.counts)
                self._warnings += [f"{path}: {remark}" for remark in reading.remarks]

    def _check_number(self, path: Path, row: LabelledRow) -> None:
        if row.label is None:
            return
        label: Any = row.label
        if isinstance(label, tuple):
            label = list(label)
            if not any(self._labels.values()):  # the first row decides
                self._multi_label = True
        if isinstance(label, list) != self._multi_label:
            expected = "a list of labels" if self._multi_label else "one label"
            raise MetaseqError(
                f"{path}:{row.line}: label {label!r} where {expected} should stand, as in the rows "
                "before; write all labels as lists, or give --label-separator"
            )

    def encode(
        self, split: Split, records: Iterator[tuple[Path, LabelledRow]]
    ) -> Iterator[Columns]:
        unk = self.tokenizer.vocabulary.unk
        for batch in batches(records, _BATCH):
            if self.form.form in WITH_PLACES:
                columns = self._encode_with_spans(batch)
            else:
                columns = {}
                for i, texts in enumerate(zip(*(row.texts for _, row in batch))):
                    columns[f"input{i}"] = _, sizes = encode_texts(self.tokenizer, texts)
                    split.counts["no_tokens"] += int(np.count_nonzero(sizes == 0))
            for name, (values, _) in columns.items():
                split.counts["unknown"] += name != _SPANS and count_unknown(values, unk)
            stored: Columns = {**columns}
            if batch[0][1].facts is not None:
                lines = []
                for _, row in batch:
                    lines.append(json.dumps(row.facts, ensure_ascii=False, sort_keys=True))
                stored[ROWS] = "\n".join([*lines, ""])
            yield stored

    def _encode_with_spans(
        self, batch: list[tuple[Path, LabelledRow]]
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        texts: dict[str, list[list[int]]] = {f"input{i}": [] for i in range(len(batch[0][1].texts))}
        spans = []
        encode = lru_cache(maxsize=16)(self.tokenizer.encode_with_offsets)  # rows share passages
        for path, row in batch:
            offsets = [encode(text) for text in row.texts]
            for column, (values, _, _) in zip(texts.values(), offsets):
                column.append(values)
            places: list[int] = []
            for column_number, start, end in row.spans:
                _, starts, ends = offsets[column_number]
                first, last = token_span(np.asarray(starts), np.asarray(ends), start, end)
                if first == last:
                    raise MetaseqError(
                        f"{path}:{row.line}: no token holds "
                        f"{row.texts[column_number][start:end]!r} (characters {start} to {end} of "
                        f"text {column_number + 1})"
                    )
                places += [column_number, first, last]
            spans.append(places)
        dtype = self.tokenizer.dtype
        columns = {name: end_to_end(column, dtype) for name, column in texts.items()}
        return columns | {_SPANS: end_to_end(spans, np.int32)}

    def write(self, split: Split, encoded: Iterator[Columns]) -> None:
        tokens = self.write_columns(split, encoded)
        split.counts["tokens"] = [n for name, n in tokens.items() if name != _SPANS]

    def nothing(self, split: Split) -> str:
        counts = split.counts
        return (
            f"{split}: no rows ({counts['blank']} blank lines, {counts['no_gold_label']} rows "
            f"without label, {counts['no_text']} without text, "
            f"{counts['skipped'] + counts['malformed']} rows skipped, apart from a header row)"
        )

    def finish(self, splits: list[Split]) -> dict[str, Any]:
        n_columns = {split.name: len(split.counts["tokens"]) for split in splits}
        if len(set(n_columns.values())) != 1:
            listed = ", ".join(f"{split} has {count}" for split, count in n_columns.items())
            raise MetaseqError(
                f"{self.request.destdir}: the splits differ in the number of text columns: {listed}"
            )
        if self._multi_label and not self._classes:
            raise MetaseqError(f"{self.request.destdir}: no row of the train split has a label")
        count = n_columns[splits[0].name]
        form = self.form.form or ("single" if count == 1 else "pair")
        if self._multi_label:
            form = MULTI_LABEL
        # Only after all rows is it known whether each row of a split has a label.
        for split in splits:
            self._write_labels(split)
        save_tokenizer(self.tokenizer, self.request.destdir.parent)
        return {
            "labels": self._classes or [],
            "regression": self.form.regression,
            "inputs": count,
            "form": form,
            "benchmark": self.form.benchmark,
            **self.form.details,
        }

    def _complete_labels(self, split: Split) -> list[tuple[Path, int, Label]]:
        """Return the labels of a split, or none; MetaseqError if only some rows have one."""
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
            sizes = np.ones(len(values), np.int64)
        else:
            numbers = {label: i for i, label in enumerate(classes)}
            flat, counts = [], []
            for path, line, label in labels:
                names = _names_in(label)
                for name in names:
                    if name not in numbers:
                        same = {spelling_key(known): known for known in reversed(classes)}
                        alike = same.get(spelling_key(name))
                        hint = nearest(name, classes) if alike is None else f" Is it {alike!r}?"
                        raise MetaseqError(
                            f"{path}:{line}: label {name[:60]!r} is not one of "
                            f"{abbreviated(classes)}.{hint} The classes are those of the train "
                            "split unless --labels or --benchmark gives them."
                        )
                    flat.append(numbers[name])
                counts.append(len(names))
            values, sizes = np.array(flat, np.int32), np.array(counts, np.int64)
        self.write_columns(split, [{"label": (values, sizes)}])

    def summary(self, split: Split) -> str:
        counts = split.counts
        labels = [label for _, _, label in self._complete_labels(split)]
        tokens = " + ".join(f"{number:,}" for number in counts["tokens"])
        parts = [f"{counts['rows']:,} rows", f"{tokens} tokens"]
        text = f"{split.name}: {', '.join(parts + split.other_counts('rows', 'tokens', 'unknown'))}"
        if not labels:
            return f"{text}; no labels"
        if self._classes is None:
            values = np.array(labels, np.float64)
            return f"{text}; labels from {values.min():g} to {values.max():g}"
        counts_of = _count_labels(labels)
        shares = [f"{label} {counts_of[label]:,}" for label in self._classes]
        if self._multi_label:
            text += f"; several labels a row, {labels.count(()):,} rows without any"
        return f"{text}; {abbreviated(shares, most=20)}"

    def report(self) -> str:
        train = _count_labels(label for _, _, label in self._labels.get(TRAIN, []))
        faults = [] if self.form.regression else list(label_warnings(train))
        unseen = [repr(name) for name in self._classes or () if train and not train[name]]
        if unseen:
            faults.append(f"{abbreviated(unseen)}: no row of train has it, so no model learns it")
        return "\n".join(f"warning: {text}" for text in (*self._warnings, *faults))
