"""The report on a data folder: the check of its kind, then those of the sets inside it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.doctor import sets, words
from metaseq_lm.data.doctor.findings import (
    CHECKS,
    ERROR,
    STANDS_ALONE,
    WARNING,
    Finding,
    Subject,
    files,
    token_files,
)
from metaseq_lm.data.storage.manifest import CORPUS, MANIFEST_FILE, Manifest, check_sizes

BUILT_IN = (sets, words)  # importing them registers their checks


def examine(folder: Path, full: bool) -> Iterator[Finding]:
    """Yield the findings on a data folder and the sets in it; `full` reads every checksum."""
    if not folder.is_dir():
        yield Finding(ERROR, f"{folder}: no such folder")
        return
    subject = Subject(folder, None, full)
    inside = sorted(path.parent for path in folder.glob(f"*/{MANIFEST_FILE}"))
    if (folder / MANIFEST_FILE).is_file():
        try:
            subject.manifest = Manifest.load(folder)
        except MetaseqError as error:
            yield Finding(ERROR, str(error))
    elif not inside or token_files(folder) or not all(map(stands_alone, inside)):
        yield Finding(WARNING, f"{folder}: no {MANIFEST_FILE} to compare the files with")
    else:
        # A folder that only holds sets, which need nothing of it.
        for one in inside:
            yield from examine_set(subject, one)
        return
    if subject.manifest is None:
        yield from sets.corpus(subject)
    else:
        yield from examine_contents(subject)
    for one in inside:
        yield from examine_set(subject, one)


def stands_alone(folder: Path) -> bool:
    """Return whether a set needs neither tokenizer nor vocabulary of the folder that it lies in."""
    try:
        return Manifest.load(folder).kind in STANDS_ALONE
    except MetaseqError:
        return False


def examine_set(around: Subject, folder: Path) -> Iterator[Finding]:
    """Yield the findings on a set inside the data folder `around`."""
    try:
        manifest = Manifest.load(folder)
    except MetaseqError as error:
        yield Finding(ERROR, str(error))
    else:
        yield from examine_contents(replace(around, folder=folder, manifest=manifest))


def examine_contents(subject: Subject) -> Iterator[Finding]:
    """Yield the comparison of the files with the manifest, then the findings of the kind's check."""
    manifest = subject.manifest
    assert manifest is not None
    yield from files(subject.folder, subject.full)
    # Without its files, every reader of a set would say so again.
    if manifest.kind in CHECKS and (manifest.kind == CORPUS or not check_sizes(subject.folder)):
        yield from CHECKS[manifest.kind](subject)
