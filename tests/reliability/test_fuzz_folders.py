"""No damage of a run, a sweep, an archive or a data folder changes what a command
says in silence.
"""

from pathlib import Path

import fuzz_folders
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, pytest.param(60, marks=pytest.mark.exhaustive)])
def test_damage_is_refused_or_said(tmp_path: Path, count: int) -> None:
    """`python tests/support/fuzz_folders.py --count 500` tries more."""
    counts = fuzz_folders.fuzz(tmp_path / "fuzz", count, seed=1)
    assert counts.mutations == count
    assert not counts.troubles, "\n".join(counts.troubles)


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_odd_values_with_sound_checksums_end_in_a_message(tmp_path: Path, count: int) -> None:
    counts = fuzz_folders.fuzz(tmp_path / "fuzz", count, seed=1, values=True)
    assert counts.mutations == count
    assert not counts.troubles, "\n".join(counts.troubles)
