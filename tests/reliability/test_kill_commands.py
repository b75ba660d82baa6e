"""A few kills of kill_commands.py, which by hand makes sixty."""

from pathlib import Path

import pytest
from kill_commands import torture
from real_runs import REPEATS

SLOW = [pytest.param(name, 1, marks=pytest.mark.exhaustive) for name in ("league", "search")]


@pytest.mark.slow
@pytest.mark.parametrize("name, kills", [("world", 2), ("watch", 1), ("suites", 1), *SLOW])
def test_a_killed_command_runs_again_to_the_same_end(name: str, kills: int, tmp_path: Path) -> None:
    if name == "search":
        pytest.importorskip("optuna")
    assert not torture(name, tmp_path, kills * REPEATS, seed=REPEATS)
