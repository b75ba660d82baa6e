"""Rows of Arrow record batches as objects of JSON.

Text may be marked as binary by programs without a type for text. Numbers of classes become the
names that the library datasets stored for them; NaN becomes null. A value of a type that JSON
lacks, such as a timestamp, a map or an image, becomes an object that names the type, see
`unreadable_type`.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.registry import abbreviated
from metaseq_lm.data.storage.tables import repeated
from metaseq_lm.data.storage.text_files import SURROGATES

_TYPE = "type of Arrow"
# The features that the library datasets records for columns that are not media.
_PLAIN_FEATURES = (None, "Value", "ClassLabel", "Sequence", "List", "LargeList", "Translation")
_Convert = Callable[[Any], Any]


def unreadable_type(value: Any) -> str:
    """Return the type of a value that JSON cannot hold; "" for any other value."""
    return str(value[_TYPE]) if isinstance(value, dict) and value.keys() == {_TYPE} else ""


class BinaryColumn:
    """Decodes the values of a binary column, unless most of the first ones are not text."""

    def __init__(self, type_name: str, decode: _Convert) -> None:
        self.type_name, self.decode = type_name, decode
        self.is_text: bool | None = None
        self._values = self._invalid = 0

    def __call__(self, data: bytes) -> Any:
        if self.is_text is None:
            self._values += 1
            self._invalid += b"\0" in data or SURROGATES.search(self.decode(data)) is not None
        return {_TYPE: self.type_name} if self.is_text is False else self.decode(data)

    def decide(self) -> None:
        """Decide whether the column is text, if it has had values."""
        if self.is_text is None and self._values:
            self.is_text = 2 * self._invalid <= self._values


class RowConverter:
    """Converts record batches of one schema.

    Bytes that are not UTF-8 are decoded from `encoding`; those that cannot be decoded stay in the
    text as surrogates. MetaseqError, which begins with `where`, for a column name that occurs
    twice.
    """

    def __init__(self, schema: Any, where: str, encoding: str = "utf-8") -> None:
        names = schema.names
        if doubled := repeated(names):
            raise MetaseqError(f"{where}: a column name occurs twice: {abbreviated(doubled)}")
        self._encoding = encoding
        self._binary_columns: list[BinaryColumn] = []
        features = _features(schema)
        self._types = {field.name: _as_binary(field.type) for field in schema}
        self._converts = {
            field.name: self._convert(field.type, features.get(field.name)) for field in schema
        }

    def rows(self, batch: Any) -> Iterator[dict[str, Any]]:
        """Yield the rows of a record batch."""
        columns = {
            name: _values(column, self._types[name])
            for name, column in zip(batch.schema.names, batch.columns)
        }
        if any(column.is_text is None for column in self._binary_columns):
            for name, values in columns.items():
                for value in values:
                    self._converts[name](value)
            for binary in self._binary_columns:
                binary.decide()
        for row in zip(*columns.values()):
            yield {
                name: convert(value) for (name, convert), value in zip(self._converts.items(), row)
            }

    def _convert(self, kind: Any, feature: Any) -> _Convert:
        """Return the function that converts values of a type, given the feature of `datasets`."""
        import pyarrow

        types = pyarrow.types
        if isinstance(feature, list) and feature:  # a list, in older versions
            feature = feature[0]
        feature = feature if isinstance(feature, dict) else {}
        inside = feature.get("feature", feature)
        if types.is_dictionary(kind):
            return self._convert(kind.value_type, feature)
        media = feature.get("_type")
        if types.is_struct(kind) and isinstance(media, str) and media not in _PLAIN_FEATURES:
            return _unless_null(lambda value: {_TYPE: media})
        if types.is_struct(kind):
            inside = inside if isinstance(inside, dict) else {}
            converts = {f.name: self._convert(f.type, inside.get(f.name)) for f in kind}
            return _unless_null(
                lambda row: {name: converts[name](value) for name, value in row.items()}
            )
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            convert = self._convert(kind.value_type, inside)
            return _unless_null(lambda values: list(map(convert, values)))
        if _is_text(kind):
            return _unless_null(self._decode)
        if _is_binary(kind):
            column = BinaryColumn(str(kind), self._decode)
            self._binary_columns.append(column)
            return _unless_null(column)
        if types.is_decimal(kind):
            return _unless_null(_number)
        if types.is_floating(kind):
            return lambda value: None if value is None or math.isnan(value) else float(value)
        if types.is_integer(kind):
            names = feature.get("names")
            return _class_name(names) if isinstance(names, list) else _unchanged
        if types.is_boolean(kind) or types.is_null(kind):
            return _unchanged
        return _unless_null(lambda value: {_TYPE: str(kind)})

    def _decode(self, data: bytes | str) -> str:
        if isinstance(data, str):
            return data
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            if self._encoding == "utf-8":
                return data.decode("utf-8", "surrogateescape")
            return data.decode(self._encoding, "replace")


def _unchanged(value: Any) -> Any:
    return value


def _unless_null(convert: _Convert) -> _Convert:
    return lambda value: None if value is None else convert(value)


def _class_name(names: list[Any]) -> _Convert:
    numbered = dict(enumerate(names))
    return lambda value: numbered.get(value, value)


def _number(value: Decimal) -> int | float:
    return int(value) if value == value.to_integral_value() else float(value)


def _is_text(kind: Any) -> bool:
    import pyarrow

    types = pyarrow.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or "string_view" in str(kind))


def _is_binary(kind: Any) -> bool:
    import pyarrow

    types = pyarrow.types
    is_variable = types.is_binary(kind) or types.is_large_binary(kind)
    return bool(is_variable or types.is_fixed_size_binary(kind) or "binary_view" in str(kind))


def _as_binary(kind: Any) -> Any:
    """Return a type with binary values for texts, which may hold invalid UTF-8."""
    import pyarrow

    types = pyarrow.types
    if types.is_dictionary(kind):
        return _as_binary(kind.value_type)
    if _is_text(kind):
        return pyarrow.large_binary()
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_as_binary(field.type)) for field in kind])
    if types.is_fixed_size_list(kind):
        return pyarrow.list_(_as_binary(kind.value_type), kind.list_size)
    if types.is_list(kind):
        return pyarrow.list_(_as_binary(kind.value_type))
    if types.is_large_list(kind):
        return pyarrow.large_list(_as_binary(kind.value_type))
    return kind


def _values(column: Any, kind: Any) -> list[Any]:
    import pyarrow

    # If this version of pyarrow cannot convert nested types, invalid UTF-8 is an error.
    with contextlib.suppress(pyarrow.ArrowNotImplementedError, pyarrow.ArrowInvalid):
        column = column if column.type == kind else column.cast(kind)
    return list(column.to_pylist())


def _features(schema: Any) -> Mapping[str, Any]:
    """Return the features of columns that the library datasets recorded, if it wrote the file."""
    try:
        note = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = note["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}
