"""Names say what they stand for: none that only their author understands (CONTRIBUTING.md)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import metaseq_lm

PACKAGE = Path(metaseq_lm.__file__).parent
VAGUE = set(
    "asked came data2 foo found given gone heard here how kept made meant more own plain put said "
    "spelled stuff taken thing things tmp there those towards wanted what".split()
)


def defined_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that a module defines, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def vague_names(source: str) -> list[tuple[str, int]]:
    """Return the vague names that a source defines, with their lines."""
    return [(n, line) for n, line in defined_names(ast.parse(source)) if n.strip("_") in VAGUE]


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_names_of_the_package_are_not_vague(path: Path) -> None:
    names = [f"{path}:{line}: '{name}'" for name, line in vague_names(path.read_text("utf-8"))]
    assert not names, "choose the field's noun or verb instead of\n" + "\n".join(names)


@pytest.mark.parametrize(
    "source",
    ["found = 1", "def f(how): ...", "self.own = 1", "for kept in x: ...", "def given(): ..."],
)
def test_vague_names_are_seen_wherever_they_are_defined(source: str) -> None:
    assert len(vague_names(source)) == 1
