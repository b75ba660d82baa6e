"""A folder that is filled out of sight and then appears file by file, its manifest last."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import sync_file, sync_folder
from metaseq_lm.data.storage.manifest import MANIFEST_FILE, Manifest

STAGING = ".preprocess"


@contextmanager
def staging(dest: Path, overwrite: bool) -> Iterator[Path]:
    """Yield an empty folder inside `dest`, on the same file system; it is removed at the end.

    UsageError if `dest` holds a data set and `overwrite` is false; MetaseqError if another
    process is filling it. What a killed process left is removed.
    """
    existed = dest.is_dir()
    if dest.exists() and not existed:
        raise UsageError(f"{dest}: is a file; --destdir must be a folder")
    data_files = [path for path in dest.glob("*") if path.suffix in (".bin", ".idx")]
    if not overwrite and (data_files or (dest / MANIFEST_FILE).exists()):
        raise UsageError(
            f"{dest}: already holds a data set; give another --destdir, or --overwrite to replace"
        )
    folder = dest / STAGING
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            existed = True
            raise MetaseqError(
                f"{dest}: another preprocess is writing here; wait for it"
            ) from error
        try:
            for left in folder.iterdir():
                left.unlink()
            yield folder
        finally:
            shutil.rmtree(folder)
    finally:
        os.close(lock)
        if not existed and not any(dest.iterdir()):
            dest.rmdir()


def publish(folder: Path, dest: Path, manifest: Manifest) -> None:
    """Move the files of `manifest` from the staging `folder` to `dest`, replacing what is there.

    Indices go after their tokens and the manifest goes last; an old index is removed before new
    tokens come, so that a kill in between never leaves a pair of old and new.
    """
    names = sorted(manifest.files, key=lambda name: (name.endswith(".idx"), name))
    for name in names:
        sync_file(folder / name)
    manifest.save(folder)
    try:
        old = [*Manifest.load(dest).files, *names]
    except MetaseqError:  # there is none, or a damaged one; files of the same names go all the same
        old = names
    (dest / MANIFEST_FILE).unlink(missing_ok=True)
    sync_folder(dest)  # after a power cut, too, it does not stand beside new files
    for name in sorted(old, key=lambda name: not name.endswith(".idx")):
        if name.endswith(".idx") or name not in manifest.files:
            (dest / name).unlink(missing_ok=True)
    for name in names:
        os.replace(folder / name, dest / name)
    sync_folder(dest)
    os.replace(folder / MANIFEST_FILE, dest / MANIFEST_FILE)
    sync_folder(dest)
