"""Lists and objects in the fields of a table, as JSON, Python or NumPy writes them."""

import ast
import contextlib
import json
import re
from typing import Any

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<type>,\s*dtype\s*=\s*(?:'[^']*'|"[^"]*"|[\w.]+))
    |(?P<value>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    |(?P<array>(?:array|(?:np|numpy)\.\w+)(?=\())
    |(?P<name>[A-Za-z_]\w*)
    |(?P<sign>[\[\](){},:])
    )""",
    re.DOTALL | re.VERBOSE,
)
_NAMES = {
    **dict.fromkeys(("None", "null", "nan"), "None"),
    **dict.fromkeys(("True", "true"), "True"),
    **dict.fromkeys(("False", "false"), "False"),
}


def read_literal(text: str) -> Any:
    """Parse a list, object, number or quoted text; return any other text unchanged.

    Blanks may separate the items of a list, as in NumPy's "['a' 'b']", and array(...) is a list.
    """
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    try:
        return _as_json(ast.literal_eval(_with_commas(text)))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def _with_commas(text: str) -> str:
    """Return a literal in Python's notation; ValueError for text that is not one."""
    parts: list[str] = []
    position, text, follows_value = 0, text.rstrip(), False
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"no literal at {position}")
        position, kind = match.end(), match.lastgroup
        if kind in ("type", "array"):
            continue
        token = match[kind or 0]
        if kind == "name" and token not in _NAMES:
            raise ValueError(f"no value: {token!r}")
        if follows_value and (kind != "sign" or token in "[({"):
            parts.append(",")
        parts.append(_NAMES.get(token, token))
        follows_value = kind != "sign" or token in "])}"
    return "".join(parts)


def _as_json(value: Any) -> Any:
    """Return a value with lists for tuples; ValueError for what JSON lacks."""
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _as_json(item) for name, item in value.items()}
    if isinstance(value, (dict, set, complex)):
        raise ValueError(f"no JSON: {value!r}")
    return value
