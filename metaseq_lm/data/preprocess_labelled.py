"""Labelled TSV and JSONL files to a folder of token files, labels and a manifest."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.data.encode import encode_texts
from metaseq_lm.data.indexed import IndexedWriter
from metaseq_lm.data.labelled import input_name, label_name
from metaseq_lm.data.labelled_files import Columns, Row, RowReader
from metaseq_lm.data.manifest import LABELLED, Manifest
from metaseq_lm.data.preprocess import Job, describe
from metaseq_lm.data.staging import publish, staging
from metaseq_lm.data.tokenizer_base import Tokenizer
from metaseq_lm.errors import MetaseqError, UsageError
from metaseq_lm.registry import nearest

BATCH = 1024


@dataclass
class _Split:
    """What is known of a split once its texts are written."""

    labels: list[str | float] = field(default_factory=list)
    places: list[tuple[Path, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(
        default_factory=lambda: {"rows": 0, "blank": 0, "bad_utf8": 0, "skipped": 0, "no_tokens": 0}
    )


def preprocess_labelled(
    job: Job, columns: Columns, labels: list[str] | None, tokenizer: Tokenizer
) -> Manifest:
    """Write the labelled set of `job` into `job.destdir` and return its manifest.

    `labels` are the classes in order; None takes those of the train split, sorted. MetaseqError
    with file and line for a row that cannot be used; then nothing is written.
    """
    job.check()
    _check_labels(job, columns, labels)
    with staging(job.destdir, job.overwrite) as folder:
        splits = {}
        for split, paths in job.splits.items():
            splits[split] = _write_inputs(job, split, paths, columns, (tokenizer, folder))
        if not columns.regression and labels is None:
            labels = sorted_labels({str(label) for label in splits["train"].labels})
        names = []
        for split, content in splits.items():
            _write_labels(folder / label_name(split), content, labels)
            inputs = [input_name(split, i) for i in range(len(content.tokens))]
            names += [f"{n}.{e}" for n in (*inputs, label_name(split)) for e in ("bin", "idx")]
        manifest = Manifest(LABELLED, describe(tokenizer), {}, job.command)
        manifest.details = _details(job, columns, labels, splits)
        for split, content in splits.items():
            manifest.splits[split] = {
                **content.counts,
                "tokens": content.tokens,
                "sources": list(map(str, job.splits[split])),
            }
            print(_summary(split, content, labels), flush=True)
        manifest.add_files(folder, names)
        publish(folder, job.destdir, manifest)
    return manifest


def _check_labels(job: Job, columns: Columns, labels: list[str] | None) -> None:
    if columns.regression and labels is not None:
        raise UsageError("--regression and --labels exclude each other")
    if labels is not None and (len(set(labels)) != len(labels) or "" in labels):
        raise UsageError(f"--labels {','.join(labels)}: labels must be different and not empty")
    if labels is None and not columns.regression and "train" not in job.splits:
        raise UsageError("without --trainpref the classes must be given with --labels a,b,...")


def sorted_labels(labels: set[str]) -> list[str]:
    """Return labels in order: as numbers if all are whole numbers, else by code point."""
    if all(label.isascii() and label.removeprefix("-").isdigit() for label in labels):
        return sorted(labels, key=lambda label: (int(label), label))
    return sorted(labels)


def _details(
    job: Job, columns: Columns, labels: list[str] | None, splits: dict[str, _Split]
) -> dict[str, Any]:
    inputs = {split: len(content.tokens) for split, content in splits.items()}
    if len(set(inputs.values())) != 1:
        words = ", ".join(f"{split} has {count}" for split, count in inputs.items())
        raise MetaseqError(
            f"{job.destdir}: the splits differ in the number of text columns: {words}"
        )
    return {
        "labels": labels or [],
        "regression": columns.regression,
        "inputs": next(iter(inputs.values())),
        "text_columns": list(columns.texts or ()),
        "label_column": columns.label,
    }


def _usable_rows(job: Job, paths: list[Path], columns: Columns, content: _Split) -> Iterator[Row]:
    """Yield the rows to keep, noting counts, labels and places of each."""
    for path in paths:
        reader = RowReader(path, columns, job.on_bad_utf8)
        for row in reader:
            content.counts["bad_utf8"] += row.bad
            if row.bad and job.on_bad_utf8 == "skip":
                content.counts["skipped"] += 1
                continue
            content.labels.append(row.label)
            content.places.append((path, row.line))
            yield row
        content.counts["blank"] += reader.blank
    content.counts["rows"] = len(content.labels)


def _write_inputs(
    job: Job,
    split: str,
    paths: list[Path],
    columns: Columns,
    out: tuple[Tokenizer, Path],
) -> _Split:
    """Write the token files of a split into the folder of `out` with its tokenizer."""
    tokenizer, folder = out
    content = _Split()
    rows = _usable_rows(job, paths, columns, content)
    writers: list[IndexedWriter] = []
    with contextlib.ExitStack() as stack:
        while batch := list(islice(rows, BATCH)):
            for i in range(len(writers), len(batch[0].texts)):
                writer = IndexedWriter(folder / input_name(split, i), tokenizer.dtype)
                writers.append(stack.enter_context(writer))
            for i, writer in enumerate(writers):
                values, sizes = encode_texts(tokenizer, [row.texts[i] for row in batch])
                writer.extend(values, sizes)
                content.counts["no_tokens"] += int(np.count_nonzero(sizes == 0))
        if not content.labels:
            raise MetaseqError(
                f"{', '.join(map(str, paths))}: no rows ({content.counts['blank']} blank lines, "
                f"{content.counts['skipped']} rows skipped, apart from a header row)"
            )
        content.tokens = [writer.tokens for writer in writers]
    return content


def _write_labels(prefix: Path, content: _Split, labels: list[str] | None) -> None:
    if labels is None:
        values = np.array(content.labels, np.float64)
    else:
        number = {label: i for i, label in enumerate(labels)}
        for (path, line), label in zip(content.places, content.labels):
            if label not in number:
                raise MetaseqError(
                    f"{path}:{line}: label {label!r} is not one of {', '.join(labels)}."
                    f"{nearest(str(label), labels)} The classes are those of the train split "
                    "unless --labels gives them."
                )
        values = np.array([number[str(label)] for label in content.labels], np.int32)
    with IndexedWriter(prefix, values.dtype) as writer:
        writer.extend(values, np.ones(len(values), np.int64))


def _summary(split: str, content: _Split, labels: list[str] | None) -> str:
    counts = content.counts
    text = (
        f"{split}: {counts['rows']:,} rows, {' + '.join(f'{t:,}' for t in content.tokens)} tokens"
    )
    for name in ("blank", "bad_utf8", "skipped", "no_tokens"):
        if counts[name]:
            text += f", {counts[name]:,} {name}"
    if labels is None:
        values = np.array(content.labels, np.float64)
        return f"{text}; labels from {values.min():g} to {values.max():g}"
    shares = ", ".join(f"{label} {content.labels.count(label):,}" for label in labels)
    return f"{text}; {shares}"
