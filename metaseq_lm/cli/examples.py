"""Copy the examples, the plug-in of user_dir and the scripts out of the package.

examples:
  metaseq-lm examples                 names the examples
  metaseq-lm examples workbench       copies all, with the documentation, to workbench/examples, ...
  cd workbench && scripts/quickstart  compares four objectives in a small world
"""

import argparse
import re
import shutil
from pathlib import Path

from metaseq_lm.core.documents import show_result
from metaseq_lm.core.errors import UsageError

HELP = "copy examples, plug-in and scripts out of the package"
_FOLDERS = ("docs", "examples", "scripts", "user_dir")
_METHOD_PAGE = re.compile(r"metaseq_lm/methods/(\w+)/README\.md")
_PACKAGE = Path(__file__).parents[1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "folder", nargs="?", metavar="DIR", help="folder to copy to (default: only name them)"
    )


def run(args: argparse.Namespace) -> int:
    """Name the examples, or copy all folders."""
    root = _source_folder()
    if args.folder is None:
        titles = {}
        for folder in sorted((root / "examples").iterdir()):
            readme = folder / "README.md"
            first = readme.read_text(encoding="utf-8").split("\n")[0] if readme.is_file() else ""
            titles[folder.name] = first.lstrip("# ")
        lines = [f"{name:<20}{title}" for name, title in titles.items()]
        show_result("examples", {"examples": titles, "copied": []}, "\n".join(lines))
        return 0
    target = Path(args.folder)
    for name in _FOLDERS:
        if (target / name).exists():
            raise UsageError(f"{target / name} exists already; choose another folder")
    for name in _FOLDERS:
        hidden = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(root / name, target / name, ignore=hidden)
    _copy_method_pages(target)
    copied = [str(target / name) for name in _FOLDERS]
    text = "\n".join(f"copied {path}" for path in copied)
    show_result("examples", {"examples": {}, "copied": copied}, text)
    return 0


def _copy_method_pages(target: Path) -> None:
    """Copy the READMEs of the methods to docs/methods, and link the copied examples to them."""
    pages = target / "docs" / "methods"
    pages.mkdir()
    for readme in (_PACKAGE / "methods").glob("*/README.md"):
        shutil.copyfile(readme, pages / f"{readme.parent.name}.md")
    for file in (target / "examples").rglob("*.md"):
        text = file.read_text(encoding="utf-8")
        file.write_text(_METHOD_PAGE.sub(r"docs/methods/\1.md", text), encoding="utf-8")


def _source_folder() -> Path:
    """Return the parent of the folders: in an installed package, or the top of a checkout."""
    for root in (_PACKAGE / "shipped", _PACKAGE.parent):
        if all((root / name).is_dir() for name in _FOLDERS):
            return root
    raise UsageError(
        f"{_PACKAGE} has no examples beside it; install the package from its wheel, or use a "
        "checkout"
    )
