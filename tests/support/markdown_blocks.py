"""Fenced blocks of Markdown pages, and the commands in them."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"(?:<!-- test: (?P<test>(?:(?!-->).)*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
# Bash calls these instead of the programs; each call records its words, each ending in NUL.
STUBS = """
PATH=/nonexistent METASEQ_LM_DATA=FOLDER
record() { printf '%s\\0' "$@" $'\\n' >> "$CALLS"; }
metaseq-lm() { record metaseq-lm "$@"; }
python() { record python "$@"; }
bash() { record bash "$@"; }
pip() { :; }
cd() { :; }
"""


@dataclass(frozen=True)
class Block:
    """A fenced block: its first line, language, text, and the requests of its comment."""

    place: str
    language: str
    text: str
    test: str

    @property
    def replaced(self) -> str:
        """The text with the replacements of the comment, each of which must match."""
        text = self.text
        for change in self.test.split(";")[1:]:
            if " -> " not in change:
                continue
            old, new = (part.strip() for part in change.split(" -> "))
            assert old in text, f"{self.place}: nothing to replace: {old}"
            text = text.replace(old, new)
        return text

    @property
    def extra(self) -> str:
        """The extra of the package that the block needs, "" without one."""
        needs = [part.split() for part in self.test.split(";") if part.split()[:1] == ["needs"]]
        return needs[0][1] if needs else ""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT) if page.is_relative_to(ROOT) else page)


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    source = page.read_text(encoding="utf-8")
    defaults = {"python": "run", "bash": "compose"}
    return [
        Block(
            f"{name(page)}:{source[: match.start('language')].count(chr(10)) + 1}",
            match["language"],
            match["text"],
            match["test"] or defaults.get(match["language"], ""),
        )
        for match in BLOCK.finditer(source)
    ]


def calls(block: Block, folder: Path) -> list[list[str]]:
    """Return the commands that bash would run for a block, in an empty folder."""
    record = folder / "calls"
    record.write_bytes(b"")
    script = STUBS + block.text
    environment = {"CALLS": str(record), "PWD": str(folder)}
    subprocess.run(["/bin/bash", "-c", script], cwd=folder, env=environment, capture_output=True)
    lines = record.read_bytes().decode().split("\n\0")
    return [line.split("\0")[:-1] for line in lines if line]


def share(folder: Path, root: Path = ROOT) -> None:
    """Put the folders of the repository, or of a copy, that commands name into a folder."""
    for shared in ("examples", "user_dir", "scripts"):
        (folder / shared).symlink_to(root / shared)
