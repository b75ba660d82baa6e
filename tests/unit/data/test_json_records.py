"""Objects of JSON in every form in which programs write them, and literals in the
cells of tables.
"""

import json

import pytest

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.records.literals import read_literal
from metaseq_lm.data.records.reading import records
from metaseq_lm.data.records.text_files import TextFile

ROWS = [{"text": "a", "n": [1, {"b": 2}]}, {"text": "[b}", "n": None}]


def read(tmp_path, content):
    path = tmp_path / "rows.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [(record.line, record.fields, record.is_bad) for record in records(TextFile(path))]


@pytest.mark.parametrize(
    ("content", "numbers"),
    [
        ("\n".join(map(json.dumps, ROWS)) + "\n\n", (1, 2)),
        (json.dumps(ROWS), (1, 2)),
        (json.dumps(ROWS, indent=1) + "\n", (1, 2)),
        ("[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]", (1, 2)),
        ("\n".join(json.dumps(row, indent=1) for row in ROWS), (1, 10)),
        (json.dumps({"version": "2", "data": ROWS, "rest": {}}), (1, 2)),
        (json.dumps({"schema": [1], "data": ROWS}, indent=2), (1, 2)),
        ("\ufeff" + json.dumps(ROWS), (1, 2)),
    ],
)
def test_forms(tmp_path, content, numbers):
    assert read(tmp_path, content) == [(n, row, False) for n, row in zip(numbers, ROWS)]


def test_objects_longer_than_what_is_read_at_once(tmp_path):
    rows = [{"text": "x" * size, "n": list(range(size // 9))} for size in (10, 90_000, 20, 200_000)]
    for indent in (None, 1):
        assert [row for _, row, _ in read(tmp_path, json.dumps(rows, indent=indent))] == rows


def test_invalid_bytes_are_those_of_one_object(tmp_path):
    bad = [bad for _, _, bad in read(tmp_path, b'[{"a": "x"}, {"a": "\xff"}, {"a": "y"}]')]
    assert bad == [False, True, False]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"a": 1}', ":1: not valid JSON: the file ends"),
        ('[{"a": 1}\n {"b": 2}]', ":2: not valid JSON: no ',' before"),
        ('[{"a": 1},\n{"b": }]', ":2: not valid JSON: Expecting value"),
        ('[{"a": 1}] x', ":1: not valid JSON: text behind"),
        ('[{"a": 1}, 2]', ":2: not a JSON object but '2'"),
        ('["a", "b"]\n["c", "d"]', ":1: no objects but values"),
        ('[{"a": 1, "a": 2}]', ":1: not valid JSON: the key 'a'"),
        ('{\n"a": 1,\n"a": 2}', ":3: not valid JSON: the key 'a'"),
        ('{"a": {"b": 1, "b": 2}}\n', ":1: not valid JSON: the key 'b'"),
        ("[" * 100_000, ":1: not valid JSON"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, content, message):
    with pytest.raises(MetaseqError) as raised:
        read(tmp_path, content)
    assert f"rows.json{message}" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("['a' 'b']", ["a", "b"]),
        ("[\"it's\" 'b']", ["it's", "b"]),
        ("['a', None, True, -1.5]", ["a", None, True, -1.5]),
        ("[ 0 10 25]", [0, 10, 25]),
        (
            "{'a': array(['x', 'y'], dtype=object), 'b': array([], dtype='<U1')}",
            {"a": ["x", "y"], "b": []},
        ),
        ("[np.str_('x'), np.int64(3)]", ["x", 3]),
        ('{"a": [1, null]}', {"a": [1, None]}),
        ("[a, b]", "[a, b]"),
        ("[1 2 ... 9]", "[1 2 ... 9]"),
        ("['a'", "['a'"),
        ("__import__('os')", "__import__('os')"),
        ("{'a': f(1)}", "{'a': f(1)}"),
        ("[" * 99_999, "[" * 99_999),
    ],
)
def test_literals(text, value):
    assert read_literal(text) == value
