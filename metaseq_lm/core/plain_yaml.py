"""YAML that holds nothing but numbers, texts, lists and mappings, such as the config of a run."""

import re
from collections import Counter
from typing import Any, ClassVar

import yaml

DEEPEST = 50  # lists and mappings in each other


class PlainReader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads numbers as OmegaConf does, 1e-3 among them, by libyaml where PyYAML has it.

    A report opens hundreds of configs, and OmegaConf takes over ten times as long for each.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the mapping of a node; ValueError for a key that stands in it twice."""
        keys = Counter((k.tag, k.value) for k, _ in node.value if isinstance(k, yaml.ScalarNode))
        for (_, key), count in keys.most_common(1):
            if count > 1:
                raise ValueError(f"it has the key {key} twice")
        return super().construct_mapping(node, deep=deep)


PlainReader.add_implicit_resolver(
    "tag:yaml.org,2002:float",  # in YAML 1.1 a text, without a point and a sign
    re.compile(r"[-+]?[0-9]+(_[0-9]+)*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def parse_yaml(text: str) -> Any:
    """Return the content of a document; ValueError or yaml.YAMLError for what is not plain.

    Aliases are refused: a few of them, nested, make a large config of a small text.
    """
    if "*" in text:
        events = yaml.parse(text, PlainReader)
        if any(isinstance(event, yaml.AliasEvent) for event in events):
            raise ValueError("it has aliases (*name)")
    content = PlainReader(text).get_single_data()
    _check_plain(content)
    return content


def _check_plain(content: object, depth: int = 0) -> None:
    """Raise ValueError for a date, a set, or lists nested too deep."""
    if depth > DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} deep")
    if isinstance(content, dict):
        content = [*content, *content.values()]
    if isinstance(content, list):
        for value in content:
            _check_plain(value, depth + 1)
    elif not isinstance(content, str | int | float | None):
        raise ValueError(f"it has a {type(content).__name__}")


def yaml_problem(error: Exception) -> str:
    """Return the YAML reader's error message and its position as one line."""
    if isinstance(error, RecursionError):
        return "nested too deeply, or an alias (*name) refers to a node that contains it"
    mark, key = getattr(error, "problem_mark", None), getattr(error, "full_key", None)
    position = (
        f"line {mark.line + 1}, column {mark.column + 1}: " if mark else f"{key}: " * bool(key)
    )
    return position + (getattr(error, "problem", None) or str(error).splitlines()[0])
