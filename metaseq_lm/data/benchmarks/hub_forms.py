"""GLUE and SuperGLUE as the `datasets` library exports them: JSON, tables, Parquet.

In exports a label is a number (-1 for none) or its name, and nested parts of SuperGLUE's files are
flat: one row per answer of MultiRC and per query of ReCoRD, whose spans end after their last
character. In tables, lists and objects are texts as Python writes them, or have a column for each
field.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from metaseq_lm.data.benchmarks import Benchmark
from metaseq_lm.data.benchmarks.examples import Example, Examples
from metaseq_lm.data.labelled.classes import NO_LABEL, spelling_key
from metaseq_lm.data.labelled.files import LabelledRow
from metaseq_lm.data.records.record import Record, structured

_VALID = ("validation", "valid", "val", "dev")
SPLITS = {
    "train": ("train", "training"),
    "valid": (*_VALID, *(f"{name}_matched" for name in _VALID)),
    "valid_mismatched": tuple(f"{name}_mismatched" for name in _VALID),
    "test": ("test", "test_matched"),
}
_NO_NUMBER = "-1.0"  # the key of the label of a row that has none
# Columns that hold no text: numbers, lists, objects.
_VALUES = (
    *("idx", "pair_id", "start1", "end1", "start2", "end2", "span1_index", "span2_index"),
    *("target", "entities", "entity_spans", "answers"),
)


def label_words(benchmark: Benchmark) -> dict[str, str]:
    """Return a map from the numbers and names of labels in exports to a benchmark's labels."""
    labels = benchmark.labels
    words = {spelling_key(label): label for label in labels}
    for number, word in enumerate(benchmark.exported_labels):
        label = word if word in labels else labels[number]
        words |= {spelling_key(str(number)): label, spelling_key(word): label}
    return words


def _official_label(label: str, words: dict[str, str]) -> str:
    key = spelling_key(label)
    if key == _NO_NUMBER:
        return "-1"
    return words.get(key, label)


def with_official_label(row: LabelledRow, words: dict[str, str]) -> LabelledRow:
    """Return a row of GLUE with the label of the official file; -1.0 of STS-B means none."""
    if isinstance(row.label, str):
        return replace(row, label=_official_label(row.label, words))
    return replace(row, label=NO_LABEL) if row.label == -1.0 else row


def accepts_both(benchmark: Benchmark, task: str, examples: Examples) -> Examples:
    """Return the reader of a task of SuperGLUE for objects of official files and of exports."""
    words, nest = label_words(benchmark), _NESTED.get(task)

    def read(record: Record) -> Iterator[Example]:
        fields = structured(record.fields, _VALUES)
        if isinstance(label := fields.get("label"), (int, float, str)):
            fields["label"] = _official_label(str(label), words) or None
        record = replace(record, fields=fields)
        if nest is not None:
            record = replace(record, fields=fields | nest(record))
        return examples(record)

    return read


def _wsc(record: Record) -> dict[str, Any]:
    names = [name for name in record.fields if name.startswith(("span1_", "span2_"))]
    return {"target": {name: record.fields[name] for name in names}} if names else {}


def _multirc(record: Record) -> dict[str, Any]:
    if "paragraph" not in record.fields or "idx" not in record.fields:
        return {}
    places = record.record("idx")
    answer = {"text": record.text("answer"), "idx": places.number("answer")}
    if "label" in record.fields:
        answer["label"] = record.fields["label"]
    question = {"question": record.text("question"), "idx": places.number("question")}
    questions = [{**question, "answers": [answer]}]
    passage = {"text": record.text("paragraph"), "questions": questions}
    return {"idx": places.number("paragraph"), "passage": passage}


def _record(record: Record) -> dict[str, Any]:
    if "entity_spans" not in record.fields:
        return {}
    places = record.record("idx")
    entities = [
        {"text": span.text("text"), "start": span.number("start"), "end": span.number("end") - 1}
        for span in record.records("entity_spans")
    ]
    query = {"query": record.text("query"), "idx": places.number("query")}
    if answers := record.fields.get("answers"):
        query["answers"] = [entity for entity in entities if entity["text"] in answers]
    passage = {"text": record.text("passage"), "entities": entities}
    return {"idx": places.number("passage"), "passage": passage, "qas": [query]}


_NESTED = {"WSC": _wsc, "MultiRC": _multirc, "ReCoRD": _record}
