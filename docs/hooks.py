"""Hooks of mkdocs: add the pages that docs/generate.py makes of the package, and put its tables in.

A page that loads something from elsewhere is refused.

The package is imported in a process of its own, by the `python` on PATH, so that mkdocs may be
installed elsewhere.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
REMOTE = re.compile(r'<(?:script|link|img|source|iframe)\b[^>]*\b(?:src|href)="https?://[^"]*"')
TABLES: dict[str, str] = {}  # by the comment that a page has in place of each


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the generated pages."""
    python = shutil.which("python") or sys.executable
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    command = [python, str(ROOT / "docs" / "generate.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise PluginError(f"{' '.join(command)} failed:\n{result.stderr}")
    for path, content in json.loads(result.stdout).items():
        if path.startswith("<!--"):
            TABLES[path] = content
        else:
            files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put the generated tables in place of their comments."""
    for comment, table in TABLES.items():
        markdown = markdown.replace(comment, table)
    return markdown


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Refuse a page that a browser cannot show without a network."""
    if loaded := REMOTE.search(output):
        raise PluginError(f"{page.file.src_uri} loads from elsewhere: {loaded[0]}")
    return output
