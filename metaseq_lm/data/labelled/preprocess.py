"""Rows of labelled files to a folder of token files, labels, spans, facts and a manifest."""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import full_disk_message
from metaseq_lm.core.registry import nearest
from metaseq_lm.data.corpus.encode import encode_texts
from metaseq_lm.data.corpus.preprocess import Job, describe
from metaseq_lm.data.labelled.files import Columns, Row, RowReader, may_lack_labels
from metaseq_lm.data.labelled.sets import (
    WITH_PLACES,
    input_name,
    label_name,
    plain_form,
    rows_name,
    spans_name,
)
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.storage.manifest import LABELLED, Manifest
from metaseq_lm.data.storage.staging import publish, staging
from metaseq_lm.data.tokenizers.base import Tokenizer

BATCH = 1024


class Rows(Protocol):
    """Iterates over the rows of a file."""

    @property
    def counts(self) -> Counter[str]:
        """The lines it passed over, by reason."""

    def __iter__(self) -> Iterator[Row]: ...


@dataclass(frozen=True)
class LabelledKind:
    """What a labelled set is, apart from its rows.

    `labels` are the classes in order, None those of the train split, sorted; `form` is one of
    labelled.FORMS, "" for the plain one of the number of texts; `details` go into the manifest.
    """

    labels: list[str] | None = None
    regression: bool = False
    form: str = ""
    benchmark: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def check(self, splits: dict[str, list[Path]]) -> None:
        """Raise UsageError if the labels cannot be used with these splits."""
        labels = self.labels
        if self.regression and labels is not None:
            raise UsageError("--regression and --labels exclude each other")
        if labels is not None and (len(set(labels)) != len(labels) or "" in labels):
            raise UsageError(f"--labels {','.join(labels)}: labels must be different and not empty")
        if labels is None and not self.regression and "train" not in splits:
            raise UsageError("without --trainpref the classes must be given with --labels a,b,...")


@dataclass
class _Split:
    """What is known of a split once its texts are written."""

    labels: list[str | float | None] = field(default_factory=list)
    places: list[tuple[Path, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    facts: bool = False
    counts: Counter[str] = field(
        default_factory=lambda: Counter(rows=0, blank=0, bad_utf8=0, skipped=0, no_tokens=0)
    )

    @property
    def labelled(self) -> bool:
        """Whether the rows have labels; MetaseqError with the place if only some have."""
        missing = [i for i, label in enumerate(self.labels) if label is None]
        if missing and len(missing) < len(self.labels):
            path, line = self.places[missing[0]]
            raise MetaseqError(f"{path}:{line}: no label, but other rows of the split have one")
        return not missing


def preprocess_labelled(
    job: Job, columns: Columns, labels: list[str] | None, tokenizer: Tokenizer
) -> Manifest:
    """Write the labelled set of the TSV or JSONL files of `job` and return its manifest.

    `labels` are the classes in order; None takes those of the train split, sorted. MetaseqError
    with file and line for a row that cannot be used; then nothing is written.
    """
    details = {"text_columns": list(columns.texts or ()), "label_column": columns.label}
    kind = LabelledKind(labels, columns.regression, details=details)

    def read(split: str, path: Path) -> RowReader:
        return RowReader(path, columns, job.on_bad_utf8, not may_lack_labels(split))

    return preprocess_rows(job, kind, read, tokenizer)


def preprocess_rows(
    job: Job, kind: LabelledKind, read: Callable[[str, Path], Rows], tokenizer: Tokenizer
) -> Manifest:
    """Write a labelled set into `job.destdir` and return its manifest.

    `read` returns the rows of a file of a split. MetaseqError with file and line for a row that
    cannot be used; then nothing is written.
    """
    job.check()
    kind.check(job.splits)
    labels = kind.labels
    with staging(job.destdir, job.overwrite) as folder:
        splits = {}
        for split, paths in job.splits.items():
            content = splits[split] = _Split()
            rows = _usable_rows(job, paths, [read(split, path) for path in paths], content)
            _write_inputs(folder, split, rows, content, tokenizer, kind.form in WITH_PLACES)
            if not content.labels:
                counts = content.counts
                raise MetaseqError(
                    f"{', '.join(map(str, paths))}: no rows ({counts['blank']} blank lines, "
                    f"{counts['skipped'] + counts['malformed']} rows skipped, apart from a header "
                    "row)"
                )
        if not kind.regression and labels is None:
            labels = sorted_labels({str(label) for label in splits["train"].labels})
        manifest = Manifest(LABELLED, describe(tokenizer), {}, job.command)
        manifest.details = _details(job, kind, labels, splits)
        names = []
        for split, content in splits.items():
            names += _write_labels(folder, split, content, labels)
            names += _files(split, content, manifest.details["form"])
            manifest.splits[split] = {
                **content.counts,
                "tokens": content.tokens,
                "sources": list(map(str, job.splits[split])),
            }
            print(_summary(split, content, labels), flush=True)
        manifest.add_files(folder, names)
        publish(folder, job.destdir, manifest)
    return manifest


def sorted_labels(labels: set[str]) -> list[str]:
    """Return labels in order: as numbers if all are whole numbers, else by code point."""
    if all(label.isascii() and label.removeprefix("-").isdigit() for label in labels):
        return sorted(labels, key=lambda label: (int(label), label))
    return sorted(labels)


def _details(
    job: Job, kind: LabelledKind, labels: list[str] | None, splits: dict[str, _Split]
) -> dict[str, Any]:
    inputs = {split: len(content.tokens) for split, content in splits.items()}
    if len(set(inputs.values())) != 1:
        words = ", ".join(f"{split} has {count}" for split, count in inputs.items())
        raise MetaseqError(
            f"{job.destdir}: the splits differ in the number of text columns: {words}"
        )
    count = next(iter(inputs.values()))
    return {
        "labels": labels or [],
        "regression": kind.regression,
        "inputs": count,
        "form": kind.form or plain_form(count),
        "benchmark": kind.benchmark,
        **kind.details,
    }


def _files(split: str, content: _Split, form: str) -> list[str]:
    """Return the names of the files of a split, its labels apart."""
    pairs = [input_name(split, i) for i in range(len(content.tokens))]
    pairs += [spans_name(split)] if form in WITH_PLACES else []
    names = [f"{name}.{suffix}" for name in pairs for suffix in ("bin", "idx")]
    return [*names, rows_name(split)] if content.facts else names


def _usable_rows(
    job: Job, paths: list[Path], readers: list[Rows], content: _Split
) -> Iterator[Row]:
    """Yield the rows to keep, noting counts, labels and places of each."""
    columns = 0
    for path, reader in zip(paths, readers):
        for row in reader:
            content.counts["bad_utf8"] += row.bad
            if row.bad and job.on_bad_utf8 == "skip":
                content.counts["skipped"] += 1
                continue
            columns = columns or len(row.texts)
            if len(row.texts) != columns:
                raise MetaseqError(
                    f"{path}:{row.line}: {len(row.texts)} text column(s), but earlier rows of the split "
                    f"have {columns}; say which with --text-columns"
                )
            content.labels.append(row.label)
            content.places.append((path, row.line))
            yield row
        content.counts.update(reader.counts)
    content.counts["rows"] = len(content.labels)


def _write_inputs(
    folder: Path,
    split: str,
    rows: Iterator[Row],
    content: _Split,
    tokenizer: Tokenizer,
    spans: bool,
) -> None:
    """Write the token files, spans and facts of a split into `folder`."""
    writers: list[IndexedWriter] = []
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        if spans:
            places = enter(IndexedWriter(folder / spans_name(split), np.int32))
        while batch := list(islice(rows, BATCH)):
            if not writers:
                prefixes = [folder / input_name(split, i) for i in range(len(batch[0].texts))]
                writers = [enter(IndexedWriter(p, tokenizer.dtype)) for p in prefixes]
                content.facts = batch[0].facts is not None
                if content.facts:
                    facts = enter(open(folder / rows_name(split), "wb"))
            first = len(content.places) - len(batch)
            if spans:
                for row, (path, line) in zip(batch, content.places[first:]):
                    places.add(_write_with_spans(row, f"{path}:{line}", tokenizer, writers))
            else:
                for i, writer in enumerate(writers):
                    values, sizes = encode_texts(tokenizer, [row.texts[i] for row in batch])
                    writer.extend(values, sizes)
                    content.counts["no_tokens"] += int(np.count_nonzero(sizes == 0))
            if content.facts:
                _write_facts(facts, folder / rows_name(split), batch)
        content.tokens = [writer.tokens for writer in writers]


def _write_facts(file: IO[bytes], path: Path, batch: list[Row]) -> None:
    lines = (json.dumps(row.facts, ensure_ascii=False, sort_keys=True) + "\n" for row in batch)
    data = "".join(lines).encode("utf-8")
    with full_disk_message(path, lambda: len(data)):
        file.write(data)
        file.flush()


def _write_with_spans(
    row: Row, where: str, tokenizer: Tokenizer, writers: list[IndexedWriter]
) -> np.ndarray:
    """Write the texts of a row and return the token spans of its character spans, int32 (6,)."""
    encoded = [tokenizer.encode_with_offsets(text) for text in row.texts]
    for writer, (ids, _, _) in zip(writers, encoded):
        writer.add(np.asarray(ids, np.int64))
    found = []
    for column, start, end in row.spans:
        _, starts, ends = encoded[column]
        first, last = token_span(np.asarray(starts), np.asarray(ends), start, end)
        if first == last:
            raise MetaseqError(
                f"{where}: no token holds {row.texts[column][start:end]!r} (characters {start} to "
                f"{end} of text {column + 1})"
            )
        found += [column, first, last]
    return np.array(found, np.int32)


def token_span(starts: np.ndarray, ends: np.ndarray, first: int, end: int) -> tuple[int, int]:
    """Return (first token, token after the last) that share a character with [first, end).

    `starts` and `ends` (tokens,) are where the tokens stand; (0, 0) if there is none.
    """
    inside = np.flatnonzero((starts < end) & (ends > first) & (starts < ends))
    return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)


def _write_labels(folder: Path, split: str, content: _Split, labels: list[str] | None) -> list[str]:
    """Write the labels, if the split has any, and return the names of the files."""
    if not content.labelled:
        return []
    if labels is None:
        values = np.array(content.labels, np.float64)
    else:
        number = {label: i for i, label in enumerate(labels)}
        for (path, line), label in zip(content.places, content.labels):
            if label not in number:
                raise MetaseqError(
                    f"{path}:{line}: label {label!r} is not one of {', '.join(labels)}."
                    f"{nearest(str(label), labels)} The classes are those of the train split "
                    "unless --labels or --benchmark gives them."
                )
        values = np.array([number[str(label)] for label in content.labels], np.int32)
    with IndexedWriter(folder / label_name(split), values.dtype) as writer:
        writer.extend(values, np.ones(len(values), np.int64))
    return [f"{label_name(split)}.{suffix}" for suffix in ("bin", "idx")]


def _summary(split: str, content: _Split, labels: list[str] | None) -> str:
    counts = content.counts
    text = (
        f"{split}: {counts['rows']:,} rows, {' + '.join(f'{t:,}' for t in content.tokens)} tokens"
    )
    for name, count in counts.items():
        if count and name != "rows":
            text += f", {count:,} {name}"
    if not content.labelled:
        return f"{text}; no labels"
    if labels is None:
        values = np.array(content.labels, np.float64)
        return f"{text}; labels from {values.min():g} to {values.max():g}"
    shares = ", ".join(f"{label} {content.labels.count(label):,}" for label in labels)
    return f"{text}; {shares}"
