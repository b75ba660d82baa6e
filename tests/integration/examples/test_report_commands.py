"""Every `report` command that the documentation names has options that go together.

Those of scripts are in test_example_scripts.py.
"""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from outcomes import expect_error

from metaseq_lm.cli import main
from metaseq_lm.sweeps.definition import normalise, read_file
from metaseq_lm.sweeps.expansion import expand

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


def test_documentation_has_report_commands():
    """The pattern finds them in READMEs and sweeps."""
    assert len(COMMANDS) >= 15
    assert {Path(name).suffix for name, _ in COMMANDS} == {".md", ".yaml"}


@pytest.mark.parametrize(
    "name, command", COMMANDS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(COMMANDS)]
)
def test_options_go_together(name, command, tmp_path, monkeypatch, capsys):
    """In an empty folder nothing is wrong with a command but that its runs are not there."""
    shell = ["bash", "-c", f"printf '%s\\n' {command}"]
    words = subprocess.run(shell, capture_output=True, text=True, check=True).stdout.splitlines()
    monkeypatch.chdir(tmp_path)
    expect_error(capsys, main(words), 2, "no such folder.")


def labels_of(sweep: Path, data: Path, last: bool) -> set[str]:
    """Return the labels that the runs of a sweep have, or those of its last stage."""
    content = read_file(sweep) | {"data": str(data), "seeds": [1]}
    labels = set()
    for run in expand(normalise(content), data / "out"):
        for stage in run.stages[-1:] if last else run.stages:
            config = stage.arguments[stage.arguments.index("--config-name") + 1]
            file = Path(content["config_dir"], f"{config}.yaml").read_text("utf-8")
            options = [a.partition("=") for a in stage.arguments if a.startswith("label=")]
            stated = options[-1][2].strip("'") if options else yaml.safe_load(file).get("label")
            labels.add(str(stated))
    return labels


LABELLED = [
    (name, command, word.removeprefix("label=").strip("'"))
    for name, command in COMMANDS
    for word in shlex.split(command)
    if word.startswith("label=") and name.endswith(".yaml")
]


@pytest.mark.parametrize("name, command, label", LABELLED)
def test_the_header_of_a_sweep_names_its_labels(name, command, label, tmp_path):
    """A report of the folder of a sweep is one of its last stage."""
    is_whole = re.fullmatch(r"runs/\w+", command.split()[1]) is not None
    assert label in labels_of(ROOT / name, tmp_path, is_whole)
