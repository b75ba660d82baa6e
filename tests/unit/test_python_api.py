"""The names that plug-ins may use: those in `__all__`, which stay as they are."""

import ast
import re
from pathlib import Path

import generate
import pytest
import python_api
from markdown_blocks import ROOT, blocks

MODULES = generate.api_modules()
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*/*.md"), *ROOT.glob("user_dir/*.md")]
SOURCES = {str(f.relative_to(ROOT)): f.read_text("utf-8") for f in ROOT.glob("user_dir/*.py")}
for page in PAGES:
    SOURCES |= {block.place: block.text for block in blocks(page) if block.language == "python"}


def uses(source):
    """Yield what a source takes from the package: imports, and attributes that begin with _."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("metaseq_lm"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("metaseq_lm"))
        elif isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            yield from {ast.unparse(node)} - {f"self.{node.attr}"}


@pytest.mark.parametrize("place", SOURCES)
def test_plug_ins_use_nothing_else(place):
    """Neither those of the repository nor the code of its pages."""
    for use in uses(SOURCES[place]):
        module, _, name = use.rpartition(".")
        assert name in MODULES.get(module, ()), use


def test_names_and_signatures_are_as_recorded():
    """A change that a plug-in can notice changes a line."""
    recorded = Path(__file__).with_name("python_api.txt").read_text("utf-8")
    assert list(python_api.lines()) == recorded.splitlines()


def test_the_page_has_each_name_once_and_says_what_it_is():
    """Also names that a statement assigns or another module defines."""
    for module, names in MODULES.items():
        rows = list(generate.api_rows(module, names))
        listed = re.findall(r"`(\w+)`", " ".join(cell for cell, _, _ in rows))
        assert sorted(listed) == sorted(names), module
        assert all(what for _, _, what in rows), module
