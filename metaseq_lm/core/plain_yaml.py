"""Reads YAML that has only numbers, texts, lists and mappings: run configs, plans, sweep files."""

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import yaml

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.files import read_bounded

_DEEPEST = 50  # nested lists and mappings
_LARGEST_YAML = 1 << 20
# Values that aliases may add: nested aliases can expand a small text to a large file.
_LARGEST_GROWTH = 5000


_OLD_NUMBER = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-9_.]+)+)")  # 010 is 8, 1:30 is 90


class _PlainReader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads numbers as OmegaConf does, such as 1e-3, with libyaml if PyYAML has it.

    A report opens hundreds of configs, and OmegaConf would take over ten times as long for each.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_PlainReader.add_implicit_resolver(
    "tag:yaml.org,2002:float",  # YAML 1.1 reads it as a text without a point and a sign
    re.compile(r"[-+]?[0-9]+(_[0-9]+)*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(path: Path, limit: int = _LARGEST_YAML) -> Any:
    """Return the content of a file with one document.

    Raises ValueError, with line and column, if it is not plain, is nested deeper than `_DEEPEST`,
    or its aliases (*name) add more than `_LARGEST_GROWTH` values; OSError without a file.
    """
    try:
        reader = _PlainReader(read_bounded(path, limit).decode("utf-8"))
        root = reader.get_single_node()
        if root is None:
            return None
        _extent(root, {}, ())
        content = reader.construct_document(root)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(_problem(error)) from error
    _check_plain(content)
    return content


@contextmanager
def naming_place(path: Path | None, always: bool = False) -> Iterator[None]:
    """Add FILE:LINE to a UsageError in the block if its message begins with a key of a file.

    Args:
        path: The file; None to add nothing.
        always: Whether to also add the file to errors that name none of its keys.
    """
    try:
        yield
    except UsageError as error:
        if path is None:
            raise
        line = _line_of(path, str(error))
        if not (line or always):
            raise
        place = f"{path}:{line}" if line else path
        raise UsageError(f"{place}: {error}") from error


def _line_of(path: Path, message: str) -> int:
    """Return the line of the key, such as tuning.seeds, that a message begins with; 0 if none."""
    named = re.match(r"(?:[\w.@/-]|:(?=\w)|\[\d+\])+", message)
    if named is None or not path.is_file():
        return 0
    node = _PlainReader(read_bounded(path, _LARGEST_YAML).decode("utf-8")).get_single_node()
    # List items are written with their index, as in stages[0].name.
    line, rest = 0, re.sub(r"\[(\d+)\]", r".\1", named[0]).rstrip(".")
    while rest and isinstance(node, yaml.CollectionNode):
        below = {str(i): (item, item) for i, item in enumerate(node.value)}
        if isinstance(node, yaml.MappingNode):
            below = {key.value: (key, value) for key, value in node.value}
        name = max((key for key in below if f"{rest}.".startswith(f"{key}.")), key=len, default="")
        if not name:
            break
        key, node = below[name]
        line, rest = key.start_mark.line + 1, rest[len(name) + 1 :]
    return line


def _extent(
    node: yaml.Node, known: dict[int, tuple[int, int]], above: tuple[yaml.Node, ...]
) -> tuple[int, int]:
    """Return the number of nodes that a node expands to, and its depth; visits each node once.

    Args:
        node: The node.
        known: Results for nodes so far, by `id`.
        above: The nodes that contain it.

    Raises:
        ValueError: It is nested too deep, too large, contains itself, has a key twice, or is a
            number that YAML reads differently than it looks.
    """
    place = _place(node.start_mark)
    if any(node is other for other in above):
        raise ValueError(f"{place}: an alias (*name) refers to a node that contains it")
    if node.tag.endswith((":int", ":float")) and _OLD_NUMBER.fullmatch(node.value):
        raise ValueError(
            f"{place}: {node.value} is octal or to the base 60; write 10 for ten, "
            "minutes as one number, or a text in quotes"
        )
    if id(node) not in known:
        children = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
            children = itertools.chain.from_iterable(node.value)
        size, depth = 1, 0
        if len(above) <= _DEEPEST:
            for child in children:
                child_size, child_depth = _extent(child, known, (*above, node))
                size, depth = size + child_size, max(depth, child_depth + 1)
        # Each node counts once in `known`, and as often as it is named in the size.
        if size - len(known) > _LARGEST_GROWTH:
            raise ValueError(f"{place}: its aliases (*name) make it {size:,} values large")
        known[id(node)] = size, depth
    if len(above) + known[id(node)][1] > _DEEPEST:
        raise ValueError(f"{place}: it is nested more than {_DEEPEST} deep")
    return known[id(node)]


def _check_keys(node: yaml.MappingNode) -> None:
    """Raise ValueError for a key that is null, or occurs twice in a mapping."""
    keys = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.tag.endswith(":null"):
                raise ValueError(f"{_place(key.start_mark)}: a key is null")
            if (key.tag, key.value) in keys:
                raise ValueError(f"{_place(key.start_mark)}: it has the key {key.value} twice")
            keys.add((key.tag, key.value))


def _check_plain(content: object) -> None:
    """Raise ValueError for a date, or a set."""
    if isinstance(content, dict):
        content = [*content, *content.values()]
    if isinstance(content, list):
        for value in content:
            _check_plain(value)
    elif not isinstance(content, str | int | float | None):
        raise ValueError(f"it has a {type(content).__name__}")


def _place(mark: yaml.Mark) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


def _problem(error: Exception) -> str:
    """Return PyYAML's message and its position on one line."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    mark = getattr(error, "problem_mark", None)
    text = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{_place(mark)}: {text}" if mark else text
