"""The official files of a benchmark to a labelled set."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.benchmarks import (
    OPTIONAL_SPLITS,
    Benchmark,
    as_text,
    find_benchmark,
    superglue,
)
from metaseq_lm.data.benchmarks.wnli import CoreferenceRows
from metaseq_lm.data.corpus.preprocess import Job
from metaseq_lm.data.labelled.files import Columns, Row, RowReader, is_json, may_lack_labels
from metaseq_lm.data.labelled.preprocess import LabelledKind, Rows, preprocess_rows
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.storage.text_files import OPENERS
from metaseq_lm.data.tokenizers.base import Tokenizer


def official_files(name: str, source: Path) -> dict[str, list[Path]]:
    """Return the official files in a folder by split, packed ones (.xz, .gz, .bz2) included.

    A missing one is left out with a message; MetaseqError if all are.
    """
    if not source.is_dir():
        raise MetaseqError(f"{source}: no such folder; --source is the folder of {name}'s files")
    files = find_benchmark(name).files
    found: dict[str, list[Path]] = {}
    for split, file in files.items():
        there = [p for s in ("", *OPENERS) if (p := source / f"{file}{s}").is_file()]
        if there:
            found[split] = there[:1]
        elif split not in OPTIONAL_SPLITS:
            print(f"{source}: no {file}, so there will be no {split} split", flush=True)
    if not found:
        raise MetaseqError(
            f"{source}: holds none of the files of {name}: {', '.join(files.values())} (or packed, "
            f"with {', '.join(OPENERS)})"
        )
    return found


class Doubled:
    """The rows of a file, each followed by a copy with its two texts swapped."""

    def __init__(self, reader: Rows) -> None:
        self.reader = reader

    @property
    def counts(self) -> Counter[str]:
        """What the file's own reader counted."""
        return self.reader.counts

    def __iter__(self) -> Iterator[Row]:
        for row in self.reader:
            yield row
            facts = {**(row.facts or {}), "swapped": True}
            yield replace(row, texts=row.texts[::-1], facts=facts)


def preprocess_benchmark(
    job: Job, name: str, tokenizer: Tokenizer, double: bool = True, text: str | None = None
) -> Manifest:
    """Write the labelled set of a benchmark from the files of `job` and return its manifest.

    With `double`, tasks whose two texts are in no order get each train row a second time with the
    texts swapped, as in ELECTRA's fine-tuning. With `text`, "own" or "author", the set has the plain
    texts of `as_text`. MetaseqError with file and line for a row that cannot be used; then nothing is
    written.
    """
    benchmark = find_benchmark(name)
    form, labels = benchmark.form, list(benchmark.labels)
    if text:
        about = as_text.find_text_form(name)
        form, labels = about.form, list(about.labels)
    suite, _, task = name.partition("/")

    def read(split: str, path: Path) -> Rows:
        required = not may_lack_labels(split)
        if suite == "superglue":
            examples = as_text.FORMS[text][task] if text else superglue.EXAMPLES[task]
            return superglue.SuperglueReader(examples, path, job.on_bad_utf8, required)
        reader = RowReader(path, _columns(benchmark, split, path), job.on_bad_utf8, required)
        if name == "glue/WNLI":
            return CoreferenceRows(reader)
        return Doubled(reader) if benchmark.doubled and double and split == "train" else reader

    details = {"doubled": benchmark.doubled and double, "text_columns": list(benchmark.texts)}
    details |= {"as_text": bool(text)} | ({"spans": text} if text else {})
    kind = LabelledKind(labels or None, not labels, form, name, details)
    return preprocess_rows(job, kind, read, tokenizer)


def _columns(benchmark: Benchmark, split: str, path: Path) -> Columns:
    regression = not benchmark.labels
    if is_json(path):
        # A subset that somebody exported: text_a, text_b, label.
        return Columns(regression=regression, index=benchmark.index)
    return Columns(
        names=None if may_lack_labels(split) else benchmark.header,
        texts=benchmark.texts,
        label=benchmark.label,
        regression=regression,
        index=benchmark.index,
        skip_malformed=benchmark.skip_malformed,
    )
