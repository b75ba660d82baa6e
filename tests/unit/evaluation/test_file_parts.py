"""Parts of files: `first` and `skip` of every suite of sentences that has them."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from metaseq_lm.config.suites import _FilePart
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.evaluation.file_parts import is_apart
from metaseq_lm.evaluation.suites import build_suite


def write_pairs(folder: Path, name: str, count: int) -> None:
    rows = [{"sentence_good": f"{name} {n}", "sentence_bad": f"no {n}"} for n in range(count)]
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def write_choices(folder: Path, name: str, count: int) -> None:
    rows = [
        {"input_prefix": f"{name} {n}", "options": [" a.", " b."], "numops": 0}
        for n in range(count)
    ]
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def write_suite(folder: Path, name: str, count: int) -> None:
    def condition(key: str, number: int) -> dict[str, object]:
        region = {"region_number": 1, "content": f"{name} {key} {number}"}
        return {"condition_name": key, "regions": [region]}

    items = [
        {"item_number": n + 1, "conditions": [condition("a", n), condition("b", n)]}
        for n in range(count)
    ]
    content = {
        "meta": {"metric": "sum"},
        "predictions": [{"type": "formula", "formula": "(1;%a%) < (1;%b%)"}],
        "items": items,
    }
    (folder / f"{name}.json").write_text(json.dumps(content))


SUITES = {"pairs": write_pairs, "entity_tracking": write_choices, "syntaxgym": write_suite}


@pytest.mark.parametrize("name", SUITES)
def test_what_is_skipped_is_what_comes_first(name: str, tmp_path: Path) -> None:
    write: Callable[[Path, str, int], None] = SUITES[name]
    write(tmp_path, "one", 5)
    write(tmp_path, "two", 3)

    def read(*options: str) -> list[str]:
        # As texts: a formula is another object each time it is read.
        items = build_suite(name, options).read(tmp_path)
        return [re.sub(r"<[^>]* at 0x\w+>", "", repr(item)) for item in items]

    whole = read()
    assert len(whole) == 8
    one, two = whole[:5], whole[5:]
    assert read("first=2") == one[:2] + two[:2]
    assert read("skip=2") == one[2:] + two[2:]
    assert read("skip=1", "first=2") == one[1:3] + two[1:]
    assert len(read("skip=1", "first=3")) == 5
    with pytest.raises(MetaseqError, match="two.*: skip=3"):
        read("skip=3")


def test_parts_share_no_item_where_one_begins_at_the_end_of_the_other() -> None:
    assert is_apart(_FilePart(first=200), _FilePart(skip=200))
    assert is_apart(_FilePart(first=200), _FilePart(skip=300, first=10))
    for one, other in (
        (_FilePart(first=200), _FilePart(skip=199)),
        (_FilePart(first=200), _FilePart()),
        (_FilePart(), _FilePart()),
        (_FilePart(), _FilePart(skip=200)),
        (object(), object()),
    ):
        assert not is_apart(one, other)
