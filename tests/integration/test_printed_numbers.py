"""Every number of the results was printed by the command beside it (docs/promises.md).

How a page says what is printed by what: tests/support/printed_numbers.py.
"""

import functools
import hashlib
import re
import shlex
from pathlib import Path

import pytest
import sharing
from markdown_blocks import ROOT, name, share
from printed_numbers import Page, describe, run

from metaseq_lm.reporting import archive

PAGES = [
    *sorted((ROOT / "docs" / "results").glob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
]

READ = functools.lru_cache(maxsize=2)(archive.read)  # many commands of a page read the same file


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_numbers_are_printed(page, tmp_path, tmp_path_factory, monkeypatch):
    def run_once(words: list[str]) -> str:
        """Run a command once in a session: other pages quote it."""
        key = hashlib.sha256(shlex.join(words).encode()).hexdigest()[:16]
        folder = sharing.once(
            tmp_path_factory, f"printed-{key}", lambda made: write(made / "printed.txt", run(words))
        )
        return (folder / "printed.txt").read_text(encoding="utf-8")

    share(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(archive, "read", lambda path: list(READ(path)))
    problems = Page(page, tmp_path, run_once).problems()
    assert not problems, "\n" + describe(problems)


def write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


PRINTED = """
label  score
mlm    77.68 ± 3.53  p 0.014  +21.07
soft   0.6947 ± 0.0801  [1.5, 2.5]  1,234
"""
COMMAND = "```bash\nmetaseq-lm report examples/electra/measured.jsonl\n```\n\n"
TABLE = "| | score | paper |\n|---|---|---|\n"


@pytest.mark.parametrize(
    "text, missing",
    [
        (COMMAND + TABLE + "| mlm 9 | 77.7 ± 3.5 (.014) | 61.4 |", []),
        (COMMAND + TABLE + "| mlm | 77.68 ± 8.01 | |", ["77.68 ± 8.01"]),
        (
            COMMAND + TABLE + "| mlm | **77.69** ± 3.53, 21.07, -21.07 | |",
            ["77.69 ± 3.53", "-21.07"],
        ),
        (COMMAND + TABLE + "| soft | 69.5 ± 8.0, 1,234, 4 | |", ["4"]),
        (TABLE + "| mlm | 77.68 | |\n\n" + COMMAND, ["77.68"]),
        (COMMAND + "## Other\n\n" + TABLE + "| mlm | 77.68 | |", ["77.68"]),
        (
            COMMAND + "21 points, 14 points, 3 seeds; section 3.4, 0.03 (paper: 75.1), `0.2`",
            ["14", "0.03"],
        ),
        (
            COMMAND
            + "## Other\n\n<!-- numbers: of this page -->\n"
            + TABLE
            + "| mlm | 77.68, 7.7 | |",
            ["7.7"],
        ),
        (COMMAND + "## Other\n\nOf the page: 21.1, 69 %, 68 %.", ["68"]),
        (COMMAND + "```text\nlabel  score\nmlm    77.68\n```", ["mlm    77.68"]),
        ("<!-- numbers: of the paper -->\n21.5\n\n22.5", ["22.5"]),
        (
            "## One\n\n<!-- numbers: settings -->\n\n21.5\n\n1.5 ± 0.5\n\n## Other\n\n22.5",
            ["1.5 ±", "22.5"],
        ),
        ("<!-- numbers: not archived -->\n21.5, which is not archived", []),
        ("<!-- numbers: not archived -->\n21.5", ["not archived, which the page does not say"]),
        ("<!-- numbers: of the linked pages -->\nOf [this](results/a.md) 21.07, 3.54", ["3.54"]),
    ],
)
def test_numbers_that_are_not_printed_are_seen(text, missing, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{text}\n")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.md").write_text(f"# A\n\n{COMMAND}")
    problems = Page(page, tmp_path, lambda words: PRINTED).problems()
    assert [re.sub(r"^'|'$| is no.*", "", problem.text) for problem in problems] == missing


def test_a_file_of_printed_numbers_names_its_command(tmp_path):
    page = tmp_path / "page.md"
    comment = "<!-- test: printed in examples/electra/measured.jsonl -->\n"
    page.write_text(comment + COMMAND)
    with pytest.raises(AssertionError, match="name the command"):
        Page(page, tmp_path, run)
