"""Completion in a shell: what argcomplete prints for a line, and that names are those of the
registries.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from metaseq_lm.cli import COMMANDS
from metaseq_lm.cli.completion import _registered_names
from metaseq_lm.core.config import FOLDER
from metaseq_lm.core.registry import ALL


@pytest.mark.parametrize("kind", ALL)
def test_names_are_those_of_the_registry(kind: str) -> None:
    built_in = {n for n, e in ALL[kind].entries.items() if e.is_of_package}
    presets = {file.stem for file in (FOLDER / kind).glob("*.yaml")}
    assert built_in and set(_registered_names(kind)) >= built_in | presets


def completions(line: str, place: Path) -> set[str]:
    """Return what a shell would offer at the end of a line."""
    pytest.importorskip("argcomplete", reason="the extra completion is not installed")
    variables = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(place / "offered"),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    command = [sys.executable, "-m", "metaseq_lm"]
    subprocess.run(command, env={**os.environ, **variables}, cwd=place, check=True, timeout=60)
    return {word.strip() for word in (place / "offered").read_text().split("\n")}


@pytest.mark.parametrize(
    "line, offered",
    [
        ("metaseq-lm train --task mask",
         {"masked_diffusion", "masked_lm", "masked_next_token"}),
        ("metaseq-lm train data --criterion bam_", {"bam_distill"}),
        ("metaseq-lm train data model=bert_",
         {"model=bert_base", "model=bert_large", "model=bert_small"}),
        ("metaseq-lm train data engine.tensor", {"engine.tensorboard="}),
        ("metaseq-lm sweep --see", {"--seeds"}),
    ],
)  # fmt: skip
def test_a_line_is_completed(line: str, offered: set[str], tmp_path: Path) -> None:
    assert completions(line, tmp_path) == offered


def test_commands_and_names_of_a_plug_in(tmp_path: Path) -> None:
    assert completions("metaseq-lm ", tmp_path) >= set(COMMANDS)
    plug_in = tmp_path / "plug_in.py"
    plug_in.write_text(
        "from metaseq_lm.core.registry import register_criterion\n"
        "from metaseq_lm.criterions import Criterion\n"
        '@register_criterion("my_loss")\nclass MyLoss(Criterion):\n'
        "    def __call__(self, model, batch): ...\n"
    )
    line = f"metaseq-lm train --user-dir {plug_in} --criterion my"
    assert completions(line, tmp_path) == {"my_loss"}
