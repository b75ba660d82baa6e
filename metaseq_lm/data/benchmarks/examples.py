"""Rows of files of objects: a function of each task turns an object into its examples."""

from collections.abc import Callable, Iterator
from typing import Any

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.registry import abbreviated
from metaseq_lm.data.labelled.files import LabelledRow
from metaseq_lm.data.records.reading import records
from metaseq_lm.data.records.record import Reading, Record
from metaseq_lm.data.records.text_files import TextFile

Span = tuple[int, int, int]  # text, first character, character after the last
# Texts, label (None if there is no field), spans, facts.
Example = tuple[tuple[str, ...], str | None, tuple[Span, ...], dict[str, Any]]
Examples = Callable[[Record], Iterator[Example]]


def example_rows(
    examples: Examples, file: TextFile, required: bool, remedy: str, reading: Reading
) -> Iterator[LabelledRow]:
    """Yield the rows that `examples` makes of the objects of a file, `required` to have labels.

    `remedy` ends the message on a missing field.
    """
    seen = set()
    for record in records(file, reading):
        record.remedy = remedy
        for texts, label, spans, facts in examples(record):
            if label is None and required:
                raise MetaseqError(
                    f"{record.where}: no field 'label'; there are "
                    f"{abbreviated(record.fields)}. {remedy}"
                )
            # The leaderboard identifies an example by these numbers.
            names = [n for n in ("passage", "question", "idx", "entity") if n in facts]
            key = tuple(facts[name] for name in names)
            if key and key in seen:
                shown = ", ".join(f"{name} {facts[name]}" for name in names)
                raise MetaseqError(f"{record.where}: {shown} occurs twice")
            seen.add(key)
            yield LabelledRow(record.line, texts, label, record.is_bad, spans, facts)
