"""Entries of lists of options: the objectives of a mixture, and the suites at the end of a run.

    task.objectives=[{task: causal_lm, weight: [1, 0]},
                     {task: masked_lm, weight: [0, 1], mask_prob: 0.4}]
    trainer.final_suites=[{suite: blimp, folder: blimp, first: 100}]

An entry is a mapping with the keys of its dataclass; all other keys are options of the task and
criterion or of the suite. Earlier versions wrote an entry as text, "masked_lm weight=[0,1]
task.mask_prob=0.4", which `_as_mapping` converts.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import format_value, is_valid, override_value
from metaseq_lm.core.options import option
from metaseq_lm.core.structured import read_structured

E = TypeVar("E", "ObjectiveEntry", "SuiteEntry")


@dataclass
class ObjectiveEntry:
    """An objective of task.objectives.

    Attributes:
        task: A task, or a preset of one.
        criterion: Its criterion; "" for the one with the task's name.
        name: Its name, also the prefix of its losses; "" for the task's name.
        weight: Its weight, or one for each phase.
        options: Options of the task and the criterion, by their names or as task.NAME.
    """

    task: str
    criterion: str = ""
    name: str = ""
    weight: list[float] = option([1.0], "weight in each phase", at_least=0)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.weight:
            raise UsageError("weight: give a number, or one for each phase as [1, 0]")


@dataclass
class SuiteEntry:
    """A suite of trainer.final_suites.

    Attributes:
        suite: The registered name.
        folder: The folder of its data, in the data folder or absolute.
        name: Name of the results in reports; "" for the name of the suite.
        too_long: What to do with sentences that are longer than the run's rows; "" for the default.
        pll: Which tokens of a token's word a masked LM does not see; "" for the default.
        optional: Whether to skip the suite for a run that does not give what it takes.
        options: Options of the suite.
    """

    suite: str
    folder: str
    name: str = ""
    too_long: str = ""
    pll: str = ""
    optional: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def _as_mapping(entry: str | Mapping[str, Any], schema: type[E]) -> dict[str, Any]:
    """Return an entry as a mapping, also if it is written as text; UsageError if it is wrong."""
    if not isinstance(entry, str):
        return dict(entry)
    positional = [key for key in entry_keys(schema) if key in ("task", "suite", "folder")]
    try:
        words = shlex.split(entry)
    except ValueError as error:
        raise UsageError(f"{error}; write {usage(schema)}") from error
    if len(words) < len(positional):
        raise UsageError(f"write {usage(schema)}")
    pairs = [word.partition("=") for word in words[len(positional) :]]
    for key, equals, _ in pairs:
        if not equals:
            raise UsageError(f"'{key}' is no part of an entry; write {usage(schema)}")
    return {
        **dict(zip(positional, words)),
        **{key: _value(value) for key, _, value in pairs},
    }


def as_text(entry: str | Mapping[str, Any]) -> str:
    """Return an entry as one line of text, in the form of earlier versions."""
    if isinstance(entry, str):
        return entry
    positional = ("task", "suite", "folder")
    words = [str(entry[key]) for key in positional if key in entry]
    words += [f"{k}={plain_text(v)}" for k, v in entry.items() if k not in positional]
    return " ".join(shlex.quote(word) if set(word) & set(" \t'\"\\") else word for word in words)


def read_entry(entry: str | Mapping[str, Any], schema: type[E]) -> E:
    """Return an entry with checked types; UsageError names the key that is wrong."""
    mapping = _as_mapping(entry, schema)
    known = entry_keys(schema)
    values = {key: value for key, value in mapping.items() if key in known}
    if "weight" in values and not isinstance(values["weight"], list):
        values["weight"] = [values["weight"]]
    options = {key: value for key, value in mapping.items() if key not in known}
    try:
        return read_structured(schema, values, options=options)
    except UsageError as error:
        raise UsageError(f"{error}; write {usage(schema)}") from error


def usage(schema: type[ObjectiveEntry] | type[SuiteEntry]) -> str:
    """Return the syntax of an entry, for messages."""
    if schema is ObjectiveEntry:
        return (
            "{task: TASK, criterion: CRITERION, name: NAME, weight: W or [W, ...], OPTION: VALUE}"
        )
    return (
        "{suite: SUITE, folder: FOLDER, name: NAME, too_long: fail, skip or cut, pll: original or "
        "within_word_l2r, optional: true, OPTION: VALUE}"
    )


def objective_entries(values: Mapping[str, Any]) -> dict[str, ObjectiveEntry]:
    """Return the entries of task.objectives in a flat configuration, by name."""
    entries = [read_entry(item, ObjectiveEntry) for item in values.get("task.objectives") or []]
    return {entry.name or entry.task: entry for entry in entries}


def entry_keys(schema: type) -> list[str]:
    """Return the keys of an entry that are not options."""
    return [item.name for item in fields(schema) if item.name != "options"]


def _value(text: str) -> Any:
    """Return the value of a text in Hydra's grammar; the text itself if it is not in it."""
    if is_valid(f"x={text}"):
        return override_value(f"x={text}")
    return text


def plain_text(value: Any) -> str:
    """Return the value of an option of an entry as text."""
    if isinstance(value, str):
        return value
    return format_value(value)
