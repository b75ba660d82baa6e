"""Entries of task.objectives and trainer.final_suites: mappings, and texts of earlier versions."""

from typing import Any

import pytest

from metaseq_lm.config.entries import (
    ObjectiveEntry,
    SuiteEntry,
    _as_mapping,
    as_text,
    objective_entries,
    read_entry,
)
from metaseq_lm.core.errors import UsageError

MASKED = {"task": "masked_lm", "weight": [0, 1], "task.mask_prob": 0.4, "name": "m"}
PROBE = {"suite": "probe", "folder": "a b", "lr": [1e-3, 3e-3], "optional": True, "note": "it's"}


@pytest.mark.parametrize("entry, schema", [(MASKED, ObjectiveEntry), (PROBE, SuiteEntry)])
def test_text_and_mapping_say_the_same(entry: dict[str, Any], schema: type) -> None:
    text = as_text(entry)
    assert _as_mapping(text, schema) == entry and as_text(text) == text
    assert read_entry(text, schema) == read_entry(entry, schema)


def test_an_entry_has_types_and_defaults() -> None:
    entry = read_entry("masked_lm weight=2 task.mask_prob=0.4", ObjectiveEntry)
    assert entry == ObjectiveEntry("masked_lm", weight=[2.0], options={"task.mask_prob": 0.4})
    suite = read_entry({"suite": "blimp", "folder": "x", "first": 5}, SuiteEntry)
    assert (suite.optional, suite.name, suite.options) == (False, "", {"first": 5})
    entries = objective_entries({"task.objectives": ["causal_lm", MASKED]})
    assert [*entries] == ["causal_lm", "m"] and entries["m"].weight == [0.0, 1.0]


@pytest.mark.parametrize(
    "entry, schema, message",
    [
        ({"weight": 1}, ObjectiveEntry, "^task: .*TASK"),
        ({"task": "x", "weight": "much"}, ObjectiveEntry, "^weight: .*much"),
        ({"task": "x", "weight": [-1]}, ObjectiveEntry, "^weight .* 0"),
        ({"task": "x", "weight": []}, ObjectiveEntry, "^weight: "),
        ("masked_lm mask_prob", ObjectiveEntry, "'mask_prob' is no part of an entry"),
        ("blimp 'x", SuiteEntry, "No closing quotation"),
        ("blimp", SuiteEntry, "write {suite: SUITE"),
        ({"suite": "a", "folder": "b", "optional": "perhaps"}, SuiteEntry, "^optional: .*perhaps"),
    ],
)
def test_what_is_wrong_is_named(entry: Any, schema: type, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_entry(entry, schema)
