"""The data of a league: made once, and never confused with data of other options or files.

The corpus and the probes of a plan of a text are made from the user's files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import check_folder, is_altered, read_json, replacing
from metaseq_lm.core.output import show_progress
from metaseq_lm.core.registry import nearest
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.preprocess import pipeline
from metaseq_lm.data.preprocess.hold_out import HoldOut
from metaseq_lm.data.preprocess.world import WORLD_FILE
from metaseq_lm.data.records.file_kinds import Kind, recognise
from metaseq_lm.data.records.text_files import TextFile, check_text_file
from metaseq_lm.data.storage.manifest import MANIFEST_FILE
from metaseq_lm.data.words.columns import ConlluReader
from metaseq_lm.league.folder import data_folder
from metaseq_lm.league.plan import (
    BENCHMARKS,
    FILES,
    FOLDERS,
    PROBE,
    PROBE_TEST,
    TEXT,
    Plan,
    files_of,
)
from metaseq_lm.league.plan_files import LABELLED, RELATION, TAGS, UPOS, probe_sets
from metaseq_lm.runs.records import write_record

HELD_OUT = 50  # every 50th line of the text is held out
_SCORED = HoldOut(every=5, most=1000)  # of a labelled file, where no other file is scored
# Options of preprocess for the sets of a labelled file.
_OPTIONS = {
    UPOS: {"tag_column": "upos", "tag_scheme": "none"},
    RELATION: {"tag_column": "deprel", "tag_scheme": "none"},
    TAGS: {"tag_scheme": "none"},
}
_FEW_LABELS = 20  # a table of few rows may have as many
_EXPECTED = 10  # texts with a label that a part must be expected to have, if it may not lack it
# Options of preprocess that apply to a set of the probe, not to the text.
_OF_SET = {
    RELATION: ("relation_subtypes",),
    TAGS: ("tag_column",),
    LABELLED: ("columns", "text_columns", "label_column"),
}
_OF_PROBE = (PROBE, PROBE_TEST, *chain.from_iterable(_OF_SET.values()))  # keys for the probe


def _make_text(
    data: Mapping[str, Any], folder: Path, lines: int | None = None, keep_corpus: bool = True
) -> None:
    """Make the corpus of a text and the sets of its probe.

    Every 50th nonblank line of the text is in the valid split; the tokenizer learns from the
    others. A probe in CoNLL-U gives the sets `upos` and `relation`, one in CoNLL columns the set
    `tags`, a table of labelled texts the set `labels`. Without `probe_test` the part _SCORED of the
    probe is their valid split.

    Args:
        data: The files `text` (or several) and `probe`, perhaps `probe_test`, and options of
            preprocess by name, of which those in `_OF_PROBE` apply to the probe.
        folder: The data folder.
        lines: Number of lines of the text to read; None for all.
        keep_corpus: Whether to keep an existing corpus.

    Raises:
        UsageError: A file is missing, a probe is not CoNLL-U, the text is too short, or labelled
            texts are sorted by their labels.
        MetaseqError: A file is damaged or has another format.
    """
    _check_files(data)
    probe, sets = data[PROBE], probe_sets(data[PROBE])
    if not (keep_corpus and _has_set(folder)):
        texts = list(map(Path, files_of(data, TEXT)))
        if lines is not None:
            texts = [_first_lines(texts, folder.with_name(TEXT), lines)]
        others = (*FILES, *_OF_PROBE, FOLDERS, BENCHMARKS)
        options = {key: value for key, value in data.items() if key not in others}
        part = HoldOut(every=HELD_OUT)
        _make(options, pipeline.Request(folder, {"train": texts}, overwrite=True, hold_out=part))
    files, scored = {"train": [Path(probe)]}, None
    if PROBE_TEST in data:
        files["test"] = [Path(data[PROBE_TEST])]
    else:
        scored = _SCORED
        show_progress(
            f"{probe}: its valid split is scored, every {scored.every}th item (or fewer, so that "
            f"at most {scored.most:,} are scored, if there are more than "
            f"{scored.every * scored.most:,})"
        )
    for name in sets:
        options = {"labelled" if name == LABELLED else "tagged": name, **_OPTIONS.get(name, {})}
        options |= {key: data[key] for key in _OF_SET.get(name, ()) if key in data}
        _make(options, pipeline.Request(folder, files, overwrite=True, hold_out=scored))
    if LABELLED in sets:
        _check_labels(probe, folder / LABELLED)


def _check_files(data: Mapping[str, Any]) -> None:
    """Raise UsageError for files that are missing or of another kind than their names say."""
    for file in chain.from_iterable(files_of(data, key) for key in FILES):
        if not Path(file).is_file():
            kind = "is a folder; name its files" if Path(file).is_dir() else "no such file"
            raise UsageError(f"{file}: {kind}")
    probe, sets = data[PROBE], probe_sets(data[PROBE])
    if PROBE_TEST in data and probe_sets(data[PROBE_TEST]) != sets:
        raise UsageError(
            f"{probe} and {data[PROBE_TEST]}: their names end differently, so they are of two "
            "kinds; a probe learns from the one and is scored on the other"
        )
    for key in chain.from_iterable(names for name, names in _OF_SET.items() if name not in sets):
        if key in data:
            raise UsageError(f"data.{key}: does not apply to {probe}, which is {', '.join(sets)}")
    for file in (probe, *files_of(data, PROBE_TEST)) if RELATION in sets else ():
        try:
            count = sum(1 for _ in ConlluReader(TextFile(Path(file)), trees=False))
        except MetaseqError as error:
            raise UsageError(f"{error}. Correct the file, or name another one") from error
        if not count:
            raise UsageError(f"{file}: no sentences")
    if LABELLED in sets and recognise(TextFile(Path(probe))).kind in (Kind.COLUMNS, Kind.CONLLU):
        raise UsageError(
            f"{probe}: has words in columns, so its name should end in .conll or, for CoNLL-U, "
            ".conllu"
        )


def _check_labels(probe: str, folder: Path) -> None:
    """Raise UsageError for labelled texts from which no probe can learn."""
    # Probes learn from the first texts of train, and the last ones choose layers and epochs, so
    # texts must not be sorted by label.
    train = LabelledSet(folder, "train")
    if train.labels is None or train.labels.ndim > 1:
        return
    counts = np.bincount(train.labels)
    if len(counts) == 1:
        raise UsageError(f"{probe}: all rows have the label {train.label_names[0]!r}")
    if len(counts) > max(_FEW_LABELS, len(train.labels) / 2):
        raise UsageError(
            f"{probe}: {len(train.labels)} rows to learn from have {len(counts)} labels, so most "
            "have a single row at most; choose another column (label_column)"
        )
    last = np.bincount(train.labels[-len(train.labels) // 5 :], minlength=len(counts))
    for name, count, count_in_last in zip(train.label_names, counts, last):
        if count >= 5 * _EXPECTED and not count_in_last:
            raise UsageError(
                f"{probe}: its rows are sorted: {count} texts have the label {name!r}, but none "
                "in its last fifth, which chooses what is learnt from the others; shuffle the "
                "rows (below the header, with shuf)"
            )


def _has_sets(data: Mapping[str, Any], folder: Path) -> bool:
    """Return whether a folder has the corpus, the sets of a probe and those of benchmarks."""
    names = list(probe_sets(data[PROBE])) if TEXT in data else []
    for benchmark in data.get(BENCHMARKS, ()):
        names.append(benchmark.rpartition("/")[2].removesuffix(".yaml"))  # CoLA of glue/CoLA
    return all(map(_has_set, (folder, *(folder / name for name in names))))


def _has_set(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).exists()


def _make(arguments: Mapping[str, Any], request: pipeline.Request) -> None:
    """Make a dataset by options of preprocess; raises UsageError for an unknown option."""
    kinds = pipeline.all_kinds().values()
    known = {item.name for item in chain.from_iterable(map(fields, kinds))}
    for key in arguments:
        if key not in known:
            raise UsageError(
                f"data: preprocess has no option '{key}'.{nearest(key, sorted(known))} A league "
                "makes its data by options of preprocess, with _ in place of -"
            )
    kind, options = pipeline.choose_kind(arguments)
    pipeline.preprocess(kind.value(options, request))


def _first_lines(texts: Iterable[Path], folder: Path, most: int) -> Path:
    for text in texts:
        check_text_file(text)
    folder.mkdir(parents=True, exist_ok=True)
    head = folder / "head.txt"
    lines = chain.from_iterable(TextFile(text).lines() for text in texts)
    filled = (line for _, line, _ in lines if line.strip())
    with replacing(head) as file:
        file.writelines(line.encode() + b"\n" for line in islice(filled, most))
    return head


_RECORD = ".source.json"  # suffix of the record next to the data folder
# Options of preprocess that make a world small, for a look at its plan.
_SMALL = {"world_documents": 256, "world_held_out": 64, "world_labelled": 64, "world_pairs": 8}
_FEW_LINES = 5000  # of a text


def has_data(plan: Plan, folder: Path) -> bool:
    """Return whether the data of a plan exist, in `folder` or in the plan's own folder."""
    if "folder" in plan.data:
        return True
    return _has_sets(plan.data, folder) and _read_record(folder).get("complete", True)


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
    source, record = _source_of(plan.data), _read_record(folder)
    if "world" in plan.data and _has_set(folder) and not (folder / WORLD_FILE).exists():
        raise UsageError(
            f"{folder} holds other data than the world of the plan; choose another --out"
        )
    earlier = record.get("source", {})
    others = {key for key in {*source, *earlier} if source.get(key) != earlier.get(key)}
    if not has_data(plan, folder):
        # Other sets do not make the corpus another one, which may have taken hours.
        keep_corpus = bool(record) and others <= {*_OF_PROBE, BENCHMARKS}
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_record(_record_of(folder), {"source": source, "complete": False}, indent=1)
        _make_sets(plan.data, folder, small, keep_corpus)
        write_record(_record_of(folder), {"source": source, "complete": True}, indent=1)
    # Files that are no longer there may be the same.
    elif record and (others := others - {key for key in FILES if source.get(key, "") is None}):
        raise UsageError(
            f"{folder}: its data do not match what the plan says now (other "
            f"{', '.join(sorted(others))}); choose another --out, or delete this folder if nothing "
            "was trained on it"
        )
    # Links are made after the sets of the folder, so that nothing is ever written through a link.
    for path in map(Path, plan.data.get(FOLDERS, ())):
        link = folder / path.name
        if link.is_symlink():
            link.unlink()
        elif link.exists():
            raise UsageError(
                f"{link}: is there already, and the plan's data.{FOLDERS} name {path}; rename that"
            )
        link.symlink_to(path)
    return folder


def _make_sets(data: Mapping[str, Any], folder: Path, small: bool, keep_corpus: bool) -> None:
    if TEXT in data:
        _make_text(data, folder, _FEW_LINES if small else None, keep_corpus)
    else:
        arguments: dict[str, Any] = {}
        for key, value in {**data, **(_SMALL if small else {})}.items():
            if key not in (FOLDERS, BENCHMARKS):
                arguments[key] = tuple(value) if isinstance(value, list) else value
        _make(arguments, pipeline.Request(folder, {}, command="metaseq-lm league", overwrite=True))
    for benchmark, path in data.get(BENCHMARKS, {}).items():
        options = {"benchmark": benchmark, "source": Path(path)}
        _make(options, pipeline.Request(folder, {}, overwrite=True))


def _source_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sources of data: options of preprocess and hashes of files."""
    # Runs record with their scores what folders of suites held, so these do not count.
    source = {key: value for key, value in data.items() if key != FOLDERS}
    for key in FILES:
        if key in data:
            hashes = [_hash_of(file) for file in map(Path, files_of(data, key)) if file.is_file()]
            if len(hashes) < len(files_of(data, key)):
                source[key] = None
            else:
                source[key] = hashes[0] if isinstance(data[key], str) else hashes
    for benchmark, path in data.get(BENCHMARKS, {}).items():
        digest, folder = hashlib.blake2b(digest_size=16), Path(path)
        for file in sorted(filter(Path.is_file, folder.rglob("*"))):
            digest.update(f"{file.relative_to(folder)}\0{_hash_of(file)}\0".encode())
        source[BENCHMARKS] = {**source[BENCHMARKS], benchmark: digest.hexdigest()}
    return source


def _hash_of(file: Path) -> str:
    """Return a hash of the content of a file, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    with open(file, "rb") as content:
        while chunk := content.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _record_of(folder: Path) -> Path:
    """Return the file that records the sources of a data folder."""
    return folder.with_name(f"{folder.name}{_RECORD}")


def _read_record(folder: Path) -> dict[str, Any]:
    file = _record_of(folder)
    try:
        record = read_json(file)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise MetaseqError(f"{file}: damaged ({error}); delete it and {folder}") from error
    if is_altered(record) or not isinstance(record.get("source"), dict):
        raise MetaseqError(f"{file}: damaged (changed since); delete it and {folder}")
    return record
