"""A few kills of kill_and_resume.py, which by hand makes hundreds; and where they hit hardest."""

import os

import pytest
from battery import configure, train
from kill_and_resume import torture
from real_runs import MLM, REPEATS

from metaseq_lm.runs import checkpoint, manifests


@pytest.mark.slow
@pytest.mark.parametrize("nproc, kills", [(1, 6), (2, 2)])
def test_no_kill_loses_or_changes_anything(nproc, kills, moons, tmp_path):
    counts = torture(moons, tmp_path, kills * REPEATS, nproc, seed=REPEATS)
    assert not counts.troubles
    assert counts.kills >= kills * REPEATS and counts.copies <= 1


def test_a_kill_between_a_checkpoint_and_its_links(moons, tmp_path):
    """The links point at older checkpoints, or are half made: the next start puts them right."""
    more = [f"trainer.{n}_interval_updates=1" for n in ("save", "validate")]
    config = configure(moons, tmp_path, MLM, *more, "trainer.keep_last=9", "trainer.max_update=4")
    train(config)
    folder = tmp_path / "checkpoints"
    before = {name: os.readlink(folder / name) for name in ("best", "last")}
    first = manifests.folder_of(folder, 1)
    assert first.name not in before.values()
    for name in before:
        checkpoint.link(folder, name, first)
    (folder / ".tmp-last").symlink_to(first.name)
    (folder / ".tmp-update_000000005").mkdir()
    (tmp_path / "results.json").unlink()
    train(config)
    assert {name: os.readlink(folder / name) for name in before} == before
    assert not list(folder.glob(".tmp-*")) and len(manifests.all_updates(folder)) == 4
