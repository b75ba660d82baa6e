"""The data of a league: made once, and never confused with data of other options or files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import (
    check_folder,
    is_altered,
    read_json,
    to_json,
    with_checksum,
    write_atomic,
)
from metaseq_lm.data.preprocess import pipeline
from metaseq_lm.data.preprocess.world import WORLD_FILE
from metaseq_lm.league.folder import data_folder
from metaseq_lm.league.plan import BENCHMARKS, FILES, FOLDERS, TEXT, Plan
from metaseq_lm.league.texts import OF_PROBE, has_set, has_text, make, make_text

_RECORD = ".source.json"  # suffix of the record next to the data folder
# Options of preprocess that make a world small, for a look at its plan.
_SMALL = {"world_documents": 256, "world_held_out": 64, "world_labelled": 64, "world_pairs": 8}
_FEW_LINES = 5000  # of a text
CHUNK = 1 << 20  # bytes


def has_data(plan: Plan, folder: Path) -> bool:
    """Return whether the data of a plan exist, in `folder` or in the plan's own folder."""
    if "folder" in plan.data:
        return True
    is_there = has_text(plan.data, folder) if TEXT in plan.data else has_set(folder)
    sets = [folder / _set_name(benchmark) for benchmark in plan.data.get(BENCHMARKS, ())]
    return is_there and all(map(has_set, sets)) and _read_record(folder).get("complete", True)


def make_data(plan: Plan, folder: Path, small: bool = False) -> Path:
    """Return the data folder of a plan, made in `folder` unless it is there.

    A record next to it names its sources and whether it is complete; data of a stopped command are
    made again. Folders of suites are links in it, which are made anew each time.

    Raises:
        UsageError: An option, a file or a folder cannot be used, or the data have other sources.
    """
    if "folder" in plan.data:
        return data_folder(plan, folder)
    check_folder(folder)
    for path in (*plan.data.get(FOLDERS, ()), *plan.data.get(BENCHMARKS, {}).values()):
        if not Path(path).is_dir():
            raise UsageError(f"{path}: no such folder; the plan's data name it: put it there")
    source, record = source_of(plan.data), _read_record(folder)
    if "world" in plan.data and has_set(folder) and not (folder / WORLD_FILE).exists():
        raise UsageError(
            f"{folder} holds other data than the world of the plan; choose another --out"
        )
    if has_data(plan, folder):
        _check_source(source, record.get("source", source), folder)
        _link_folders(plan, folder)
        return folder
    if not _is_same_corpus(source, record.get("source", {})):
        record = {}
    is_begun = bool(record)
    _write_record(folder, {"source": source, "complete": False})
    if TEXT in plan.data:
        make_text(plan.data, folder, _FEW_LINES if small else None, keep_corpus=is_begun)
    else:
        arguments: dict[str, Any] = {}
        for key, value in {**plan.data, **(_SMALL if small else {})}.items():
            if key not in (FOLDERS, BENCHMARKS):
                arguments[key] = tuple(value) if isinstance(value, list) else value
        make(arguments, pipeline.Request(folder, {}, command="metaseq-lm league", overwrite=True))
    for benchmark, path in plan.data.get(BENCHMARKS, {}).items():
        options = {"benchmark": benchmark, "source": Path(path)}
        make(options, pipeline.Request(folder, {}, overwrite=True))
    _write_record(folder, {"source": source, "complete": True})
    _link_folders(plan, folder)
    return folder


def _set_name(benchmark: str) -> str:
    """Return the name of the labelled set of a benchmark, such as CoLA of glue/CoLA."""
    return benchmark.rpartition("/")[2].removesuffix(".yaml")


def _link_folders(plan: Plan, folder: Path) -> None:
    """Link the plan's folders of suites into a data folder, under their names.

    This happens after its sets are made, so that nothing is ever written through a link. Raises
    UsageError if something else has the name.
    """
    for path in map(Path, plan.data.get(FOLDERS, ())):
        link = folder / path.name
        if link.is_symlink():
            link.unlink()
        elif link.exists():
            raise UsageError(
                f"{link}: is there already, and the plan's data.{FOLDERS} name {path}; rename that"
            )
        link.symlink_to(path)


def source_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sources of data: options of preprocess and hashes of files.

    A missing file has no hash. Folders of suites are not included, since runs record with their
    scores what they were scored with.
    """
    source = {key: value for key, value in data.items() if key != FOLDERS}
    if BENCHMARKS in data:
        sources = data[BENCHMARKS].items()
        source[BENCHMARKS] = {name: _hash_of_folder(Path(path)) for name, path in sources}
    for key in FILES:
        if key in data:
            source[key] = _hashes_of(data[key])
    return source


def _hashes_of(files: str | Sequence[str]) -> Any:
    """Return the hash of a file, or those of several; None if one is missing."""
    if isinstance(files, str):
        return _hash_of(Path(files)) if Path(files).is_file() else None
    hashes = list(map(_hashes_of, files))
    return None if None in hashes else hashes


def _hash_of(file: Path) -> str:
    """Return a hash of the content of a file, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    with open(file, "rb") as content:
        while chunk := content.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _hash_of_folder(folder: Path) -> str:
    """Return a hash of the names and the content of the files in a folder, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(folder)}\0{_hash_of(file)}\0".encode())
    return digest.hexdigest()


def _is_same_corpus(source: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two sources differ at most in the sources of probes."""
    of_sets = {*OF_PROBE, BENCHMARKS}
    return all(source.get(key) == other.get(key) for key in {*source, *other} - of_sets)


def _check_source(source: Mapping[str, Any], made_of: Mapping[str, Any], folder: Path) -> None:
    """Raise UsageError if data were made from other sources; missing files do not count."""
    differing = [
        key
        for key in sorted({*source, *made_of})
        if source.get(key) != made_of.get(key)
        and not (key in FILES and key in source and source[key] is None)
    ]
    if differing:
        raise UsageError(
            f"{folder}: its data do not match what the plan says now (other "
            f"{', '.join(differing)}); choose another --out, or delete this folder if nothing "
            "was trained on it"
        )


def record_of(folder: Path) -> Path:
    """Return the file that records the sources of a data folder."""
    return folder.with_name(f"{folder.name}{_RECORD}")


def _read_record(folder: Path) -> dict[str, Any]:
    """Return the recorded sources of a data folder, {} without a record."""
    file = record_of(folder)
    try:
        record = read_json(file)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise MetaseqError(f"{file}: damaged ({error}); delete it and {folder}") from error
    if is_altered(record) or not isinstance(record.get("source"), dict):
        raise MetaseqError(f"{file}: damaged (changed since); delete it and {folder}")
    return record


def _write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the record of a data folder's sources."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(record_of(folder), (to_json(with_checksum(dict(record)), 1) + "\n").encode())
