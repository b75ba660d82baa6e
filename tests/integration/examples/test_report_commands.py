"""Every `report` command that the documentation names has options that go together.

Those of scripts are in test_example_scripts.py.
"""

import re
import subprocess
from pathlib import Path

import pytest

from metaseq_lm.cli import main

ROOT = Path(__file__).resolve().parents[3]
COMMAND = re.compile(r"^\s*metaseq-lm (report .*)$", re.MULTILINE)


def documented() -> list[tuple[str, str]]:
    """Return file and text of each command, without comment, pipe and redirection."""
    found = []
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*"), *ROOT.glob("examples/**/*")]
    for path in sorted(pages):
        if path.suffix not in (".md", ".yaml"):
            continue
        text = re.sub(r"\\\n\s*(#\s*)?", " ", path.read_text())
        text = re.sub(r"^# +", "", text, flags=re.MULTILINE)
        for command in COMMAND.findall(text):
            found.append((str(path.relative_to(ROOT)), re.split(r"\s+(?:#|\||>)\s*", command)[0]))
    return found


COMMANDS = documented()


def test_documentation_has_report_commands() -> None:
    """The pattern finds them in READMEs and sweeps."""
    assert len(COMMANDS) >= 15
    assert {Path(name).suffix for name, _ in COMMANDS} == {".md", ".yaml"}


@pytest.mark.parametrize(
    "name, command", COMMANDS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(COMMANDS)]
)
def test_options_go_together(
    name: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """In an empty folder nothing is wrong with a command but that its runs are not there."""
    shell = ["bash", "-c", f"printf '%s\\n' {command}"]
    words = subprocess.run(shell, capture_output=True, text=True, check=True).stdout.splitlines()
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert "no such folder. Give run folders" in capsys.readouterr().err, command
