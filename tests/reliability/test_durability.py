"""A power cut at any moment: the old content or the new one is whole, and what was saved is there.

The real code runs while every change of a name and every fsync is recorded. The model of a disk
then loses power after each of them: a file has the content that was fsynced last, and of the
changes in a folder since its last fsync any may be lost, each by itself.
"""

import os
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from metaseq_lm.core.files import write_atomic
from metaseq_lm.data.preprocess.pipeline import _publish, staging
from metaseq_lm.data.storage import manifest
from metaseq_lm.runs import checkpoint, manifests


class Disk:
    """What `action` does in a folder: events (inode, changed names) and (inode,
    content at fsync).
    """

    def __init__(self, root: Path, action: Callable[[], object]) -> None:
        self.root = root
        self.events: list[tuple[int, Any]] = []
        self.names: dict[int, dict[str, int]] = {}  # of every folder, as it is now
        self.links: dict[int, str] = {}
        self.pins: dict[int, int] = {}
        self.look()  # what is there before is safe
        for path in (root, *root.rglob("*")):
            if not path.is_symlink():
                self.synced(self.pins[path.stat().st_ino])
        self.start = len(self.events)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("fsync", "mkdir", "rename", "replace", "rmdir", "symlink", "unlink"):
                patch.setattr(os, name, self.watched(getattr(os, name)))
            action()
        for pin in self.pins.values():
            os.close(pin)

    def watched(self, real: Callable) -> Callable:
        def call(*args: Any, **more: Any) -> None:
            self.look()
            real(*args, **more)
            if real.__name__ == "fsync":
                self.synced(*args)
            self.look()

        return call

    def look(self) -> None:
        """Write down the names that changed since the last look; 0 stands for a name
        that is gone.
        """
        for folder, folders, files in os.walk(self.root):
            now = {name: self.inode(Path(folder, name)) for name in (*folders, *files)}
            before = self.names.get(self.inode(Path(folder)), {})
            changed = dict(now.items() - before.items())
            changed |= dict.fromkeys(before.keys() - now.keys(), 0)
            if changed:
                self.events.append((self.inode(Path(folder)), changed))
            self.names[self.inode(Path(folder))] = now

    def inode(self, path: Path) -> int:
        number = path.lstat().st_ino
        if number not in self.pins:  # no other file gets the number of an open one
            self.pins[number] = os.open(path, os.O_PATH | os.O_NOFOLLOW)
            if path.is_symlink():
                self.links[number] = os.readlink(path)
        return number

    def synced(self, descriptor: int) -> None:
        file = Path(f"/proc/self/fd/{descriptor}")
        self.events.append((file.stat().st_ino, b"" if file.is_dir() else file.read_bytes()))

    def cuts(self, place: Path) -> Iterator[tuple[Path, bool]]:
        """Put what may be there after each cut under `place`; True where `action` had returned."""
        for count in range(self.start, len(self.events) + 1):
            events = list(enumerate(self.events[:count]))
            synced = {inode: at for at, (inode, what) in events if isinstance(what, bytes)}
            loose = [at for at, (inode, _) in events if at > synced.get(inode, -1)]
            for many in range(len(loose) + 1):
                for lost in combinations(loose, many):
                    content: dict[int, bytes] = {}
                    names: dict[int, dict[str, int]] = {}
                    for at, (inode, what) in events:
                        if isinstance(what, bytes):
                            content[inode] = what
                        elif at not in lost:
                            names.setdefault(inode, {}).update(what)
                    state = place / f"{count} without {' '.join(map(str, lost))}"
                    self.write(state, self.root.stat().st_ino, names, content)
                    yield state, count == len(self.events)

    def write(self, path: Path, inode: int, names: dict, content: dict) -> None:
        if inode in self.links:
            path.symlink_to(self.links[inode])
        elif inode not in self.names:
            path.write_bytes(content.get(inode, b""))
        else:
            path.mkdir(parents=True)
            for name, own in names.get(inode, {}).items():
                if own:
                    self.write(path / name, own, names, content)


def save(folder: Path, update: int, value: int) -> None:
    checkpoint.save(folder, update, {"w": torch.tensor(float(value))}, {"value": value}, {})


def test_the_first_checkpoint_is_there_with_its_folder(tmp_path):
    (tmp_path / "run").mkdir()
    disk = Disk(tmp_path / "run", lambda: save(tmp_path / "run" / "checkpoints", 1, 1))
    for place, saved in disk.cuts(tmp_path / "cuts"):
        assert not saved or checkpoint.find_newest(place / "checkpoints")[0] is not None


@pytest.mark.parametrize("exchanges", [True, False], ids=["at once", "in two steps"])
@pytest.mark.parametrize("update", [2, 1], ids=["new", "again"])
def test_a_save_leaves_the_old_checkpoint_or_the_new(update, exchanges, tmp_path, monkeypatch):
    if not exchanges:
        monkeypatch.setattr(checkpoint, "exchange_names", lambda first, second: False)
    save(tmp_path / "run", 1, 1)
    disk = Disk(tmp_path / "run", lambda: save(tmp_path / "run", update, 2))
    for place, saved in disk.cuts(tmp_path / "cuts"):
        found, skipped = checkpoint.find_newest(place)
        assert found is not None and not skipped
        assert found.state["value"] == found.weights["w"] in ((2,) if saved else (1, 2))


def test_the_last_checkpoint_is_there_while_it_is_written_again(tmp_path):
    """As after its validation: at no moment it is missing under its name and its link."""
    save(tmp_path / "run", 1, 1)
    disk = Disk(tmp_path / "run", lambda: save(tmp_path / "run", 1, 2))
    for place, saved in disk.cuts(tmp_path / "cuts"):
        for path in (place / "last", manifests.folder_of(place, 1)):
            assert checkpoint.load(path).state["value"] in ((2,) if saved else (1, 2))


def test_a_file_has_the_old_content_or_the_new(tmp_path):
    (tmp_path / "run").mkdir()
    write_atomic(tmp_path / "run" / "file", b"old")
    disk = Disk(tmp_path / "run", lambda: write_atomic(tmp_path / "run" / "file", b"new"))
    for place, written in disk.cuts(tmp_path / "cuts"):
        assert (place / "file").read_bytes() in ((b"new",) if written else (b"old", b"new"))


def preprocess(dest: Path, content: str) -> None:
    """Publish files as others write them, without an fsync."""
    about = manifest.Manifest("corpus", {"hash": content}, {}, "")
    with staging(dest, overwrite=True) as folder:
        for name in ("train.bin", "train.idx", "vocabulary.txt"):
            (folder / name).write_text(content + name)
        about.add_files(folder, ["train.bin", "train.idx", "vocabulary.txt"])
        _publish(folder, dest, about)


@pytest.mark.parametrize("old", [False, True], ids=["new", "replacing"])
def test_data_with_a_manifest_are_whole(old, tmp_path):
    (tmp_path / "data").mkdir()
    if old:
        preprocess(tmp_path / "data", "old")
    disk = Disk(tmp_path / "data", lambda: preprocess(tmp_path / "data", "new"))
    for place, published in disk.cuts(tmp_path / "cuts"):
        if published or (place / "manifest.json").exists():
            assert not manifest.verify(place)
            found = manifest.Manifest.load(place).tokenizer["hash"]
            assert found in (["new"] if published else ["new", "old"])
