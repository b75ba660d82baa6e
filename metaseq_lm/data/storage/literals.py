"""Lists and objects in the fields of a table, as JSON, Python or NumPy writes them."""

import ast
import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    |(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    |(?P<name>[A-Za-z_][\w.]*)
    |(?P<sign>[\[\](){},:=])
    )""",
    re.DOTALL | re.VERBOSE,
)
_NAMES = {"None": None, "True": True, "False": False, "null": None, "nan": None}
_NAMES |= {"true": True, "false": False}
_ARRAY = re.compile(r"array|(?:np|numpy)\.\w+")
_CLOSING = {"[": "]", "(": ")"}
Token = tuple[str, str]
END: Token = ("end", "")


def read_literal(text: str) -> Any:
    """Parse a list, object, number or quoted text; return any other text unchanged.

    Blanks may separate the items of a list, as in NumPy's "['a' 'b']", and array(...) is a list.
    """
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    try:
        tokens = _Tokens(text)
        value = tokens.value()
        tokens.expect(END)
    except (ValueError, SyntaxError, RecursionError):
        return text
    return value


class _Tokens:
    """The tokens of a text, read from left to right; ValueError for text that is not a literal."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._next = next(self._tokens)

    def _take(self) -> Token:
        token, self._next = self._next, next(self._tokens, END)
        return token

    def expect(self, token: Token) -> None:
        if self._take() != token:
            raise ValueError(f"no {token[1]!r}")

    def _skips(self, sign: str) -> bool:
        """Return whether the next token is `sign`, and skip it if so."""
        if self._next != ("sign", sign):
            return False
        self._take()
        return True

    def value(self) -> Any:
        """Return the next value."""
        kind, word = self._take()
        if kind == "text":
            return ast.literal_eval(word)
        if kind == "number":
            return int(word) if re.fullmatch(r"[+-]?\d+", word) else float(word)
        if kind == "name" and word in _NAMES:
            return _NAMES[word]
        if kind == "name" and _ARRAY.fullmatch(word):
            return self._array()
        if word == "{":
            return self._object()
        if word in _CLOSING and kind == "sign":
            return self._items(_CLOSING[word])
        raise ValueError(f"no value: {word!r}")

    def _items(self, closing: str) -> list[Any]:
        items: list[Any] = []
        while not self._skips(closing):
            items.append(self.value())
            self._skips(",")
        return items

    def _object(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        while not self._skips("}"):
            key = self.value()
            if not isinstance(key, str):
                raise ValueError(f"no name: {key!r}")
            self.expect(("sign", ":"))
            fields[key] = self.value()
            self._skips(",")
        return fields

    def _array(self) -> Any:
        """Return the first argument of NumPy's notation, such as array([1, 2], dtype=int32)."""
        self.expect(("sign", "("))
        value = self.value()
        while self._skips(","):
            self._take()  # dtype
            self.expect(("sign", "="))
            self._take()  # such as int32, or a text such as '<U3'
        self.expect(("sign", ")"))
        return value


def _tokens(text: str) -> Iterator[Token]:
    position = 0
    while position < len(text.rstrip()):
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            raise ValueError(f"no literal at {position}")
        yield match.lastgroup, match[match.lastgroup]
        position = match.end()
    yield END
