"""The data of the text arm: a corpus and its probes, made from the user's files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import replacing
from metaseq_lm.core.output import show_progress
from metaseq_lm.core.registry import nearest
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.preprocess import pipeline
from metaseq_lm.data.preprocess.hold_out import HoldOut
from metaseq_lm.data.records.file_kinds import Kind, recognise
from metaseq_lm.data.records.text_files import TextFile, check_text_file
from metaseq_lm.data.storage.manifest import MANIFEST_FILE
from metaseq_lm.data.words.columns import ConlluReader
from metaseq_lm.league.plan import BENCHMARKS, FILES, FOLDERS, PROBE, PROBE_TEST, TEXT, files_of
from metaseq_lm.league.plan_files import LABELLED, RELATION, TAGS, UPOS, probe_sets

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
OF_PROBE = (PROBE, PROBE_TEST, *chain.from_iterable(_OF_SET.values()))  # keys for the probe


def make_text(
    data: Mapping[str, Any], folder: Path, lines: int | None = None, keep_corpus: bool = True
) -> None:
    """Make the corpus of a text and the sets of its probe.

    Every 50th nonblank line of the text is in the valid split; the tokenizer learns from the
    others. A probe in CoNLL-U gives the sets `upos` and `relation`, one in CoNLL columns the set
    `tags`, a table of labelled texts the set `labels`. Without `probe_test` the part _SCORED of the
    probe is their valid split.

    Args:
        data: The files `text` (or several) and `probe`, perhaps `probe_test`, and options of
            preprocess by name, of which those in `OF_PROBE` apply to the probe.
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
    if not (keep_corpus and has_set(folder)):
        texts = list(map(Path, files_of(data, TEXT)))
        if lines is not None:
            texts = [_first_lines(texts, folder.with_name(TEXT), lines)]
        hold_out = HoldOut(every=HELD_OUT)
        others = (*FILES, *OF_PROBE, FOLDERS, BENCHMARKS)
        options = {key: value for key, value in data.items() if key not in others}
        request = pipeline.Request(folder, {"train": texts}, overwrite=True, hold_out=hold_out)
        make(options, request)
    files = {"train": [Path(probe)]}
    if PROBE_TEST in data:
        files["test"] = [Path(data[PROBE_TEST])]
    scored = None if PROBE_TEST in data else _SCORED
    if scored is not None:
        show_progress(
            f"{probe}: its valid split is scored, every {scored.every}th item (or fewer, so that "
            f"at most {scored.most:,} are scored, if there are more than "
            f"{scored.every * scored.most:,})"
        )
    for name in sets:
        options = {"labelled" if name == LABELLED else "tagged": name, **_OPTIONS.get(name, {})}
        options |= {key: data[key] for key in _OF_SET.get(name, ()) if key in data}
        make(options, pipeline.Request(folder, files, overwrite=True, hold_out=scored))
    if LABELLED in sets:
        _check_labels(probe, folder / LABELLED)


def _check_files(data: Mapping[str, Any]) -> None:
    """Raise UsageError for files that are missing or of another kind than their names say.

    The check runs before the corpus is made, which may take minutes.
    """
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
    if RELATION in sets:
        _check_conllu([probe, *files_of(data, PROBE_TEST)])
    if LABELLED in sets and recognise(TextFile(Path(probe))).kind in (Kind.COLUMNS, Kind.CONLLU):
        raise UsageError(
            f"{probe}: has words in columns, so its name should end in .conll or, for CoNLL-U, "
            ".conllu"
        )


def _check_labels(probe: str, folder: Path) -> None:
    """Raise UsageError for labelled texts from which no probe can learn.

    Probes learn from the first texts of train, and the last ones choose layers and epochs, so texts
    must not be sorted by label.
    """
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


def _check_conllu(files: Iterable[str]) -> None:
    """Raise UsageError, with file and line, for a file that is named CoNLL-U but is not."""
    for file in files:
        reader = ConlluReader(TextFile(Path(file)), trees=False)
        try:
            count = sum(1 for _ in reader)
        except MetaseqError as error:
            raise UsageError(f"{error}. Correct the file, or name another one") from error
        if not count:
            raise UsageError(f"{file}: no sentences")


def has_text(data: Mapping[str, Any], folder: Path) -> bool:
    """Return whether the corpus and all sets of its probe are in a data folder."""
    return all(map(has_set, (folder, *(folder / name for name in probe_sets(data[PROBE])))))


def has_set(folder: Path) -> bool:
    """Return whether a folder holds a data set."""
    return (folder / MANIFEST_FILE).exists()


def make(arguments: Mapping[str, Any], request: pipeline.Request) -> None:
    """Make a dataset by options of preprocess; raises UsageError for an unknown option."""
    known = {item.name for kind in pipeline.all_kinds().values() for item in fields(kind)}
    for key in arguments:
        if key not in known:
            raise UsageError(
                f"data: preprocess has no option '{key}'.{nearest(key, sorted(known))} A league "
                "makes its data by options of preprocess, with _ in place of -"
            )
    kind, options = pipeline.choose_kind(arguments)
    pipeline.preprocess(kind.value(options, request))


def _first_lines(texts: Iterable[Path], folder: Path, most: int) -> Path:
    """Write the first nonblank lines of texts into a folder and return the file."""
    for text in texts:
        check_text_file(text)
    folder.mkdir(parents=True, exist_ok=True)
    head = folder / "head.txt"
    lines = chain.from_iterable(TextFile(text).lines() for text in texts)
    filled = (line for _, line, _ in lines if line.strip())
    with replacing(head) as file:
        file.writelines(line.encode() + b"\n" for line in islice(filled, most))
    return head
