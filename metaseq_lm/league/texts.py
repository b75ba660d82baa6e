"""The data of the text arm: a corpus and its probes, made from the user's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import replacing
from metaseq_lm.core.registry import nearest
from metaseq_lm.data.preprocess import pipeline
from metaseq_lm.data.preprocess.hold_out import HoldOut
from metaseq_lm.data.records.text_files import TextFile, check_text_file
from metaseq_lm.data.storage.manifest import MANIFEST_FILE
from metaseq_lm.data.words.columns import ConlluReader
from metaseq_lm.league.plan import BENCHMARKS, FILES, FOLDERS, TEXT
from metaseq_lm.league.plan_files import CONLLU, LABELLED

HELD_OUT = 50  # every 50th line of the text is held out
# The probes of a file of dependencies: name, column, scheme of the tags.
RELATION = "relation"
_TAGGED = (("upos", "upos", "none"), (RELATION, "deprel", "none"))
_SUBTYPES = "relation_subtypes"  # option of preprocess for the relations of a probe
OF_PROBE = ("probe", "probe_test", _SUBTYPES)  # keys for the probe of a text


def make_text(
    data: Mapping[str, Any], folder: Path, lines: int | None = None, keep_corpus: bool = True
) -> None:
    """Make the corpus of a text and the sets of its probe.

    Every 50th nonblank line of the text is in the valid split; the tokenizer learns from the
    others. A probe in CoNLL-U gives the sets `upos` and `relation`, a table of labelled texts gives
    the set `labels`.

    Args:
        data: The files `text`, `probe` and `probe_test`, and options of preprocess by name, of
            which `relation_subtypes` applies to the probe.
        folder: The data folder.
        lines: Number of lines of the text to read; None for all.
        keep_corpus: Whether to keep an existing corpus.

    Raises:
        UsageError: A file is missing, a probe is not CoNLL-U, or the text is too short.
        MetaseqError: A file is damaged or has another format.
    """
    for key in FILES:
        if not Path(data[key]).is_file():
            raise UsageError(f"{data[key]}: no such file; the data need {', '.join(FILES)}")
    if data["probe"].endswith(CONLLU) != data["probe_test"].endswith(CONLLU):
        raise UsageError(
            f"{data['probe']} and {data['probe_test']}: one is CoNLL-U by its name, the other is "
            "not; a probe learns from the one and is scored on the other"
        )
    if _SUBTYPES in data and not data["probe"].endswith(CONLLU):
        raise UsageError(f"data.{_SUBTYPES}: {data['probe']} is no CoNLL-U, so it has no relations")
    _check_probe(data)
    if not (keep_corpus and has_set(folder)):
        text = Path(data[TEXT])
        if lines is not None:
            text = _first_lines(text, folder.with_name(TEXT), lines)
        hold_out = HoldOut(every=HELD_OUT)
        others = (*FILES, *OF_PROBE, FOLDERS, BENCHMARKS)
        options = {key: value for key, value in data.items() if key not in others}
        request = pipeline.Request(folder, {"train": [text]}, overwrite=True, hold_out=hold_out)
        make(options, request)
    probes = {"train": [Path(data["probe"])], "test": [Path(data["probe_test"])]}
    for options in _probe_sets(data).values():
        make(options, pipeline.Request(folder, probes, overwrite=True))


def _probe_sets(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options of preprocess for each set of a probe, by set."""
    if not data["probe"].endswith(CONLLU):
        return {LABELLED: {"labelled": LABELLED}}
    sets = {}
    for name, column, scheme in _TAGGED:
        sets[name] = {"tagged": name, "tag_column": column, "tag_scheme": scheme}
    if _SUBTYPES in data:
        sets[RELATION][_SUBTYPES] = data[_SUBTYPES]
    return sets


def _check_probe(data: Mapping[str, Any]) -> None:
    """Raise UsageError, with file and line, for a probe that is named CoNLL-U but is not.

    The check runs before the corpus is made, which may take minutes.
    """
    for key in ("probe", "probe_test") if data["probe"].endswith(CONLLU) else ():
        reader = ConlluReader(TextFile(Path(data[key])), trees=False)
        try:
            count = sum(1 for _ in reader)
        except MetaseqError as error:
            raise UsageError(f"{error}. Correct the file, or name another one") from error
        if not count:
            raise UsageError(f"{data[key]}: no sentences")


def has_text(data: Mapping[str, Any], folder: Path) -> bool:
    """Return whether the corpus and all sets of its probe are in a data folder."""
    return all(map(has_set, (folder, *(folder / name for name in _probe_sets(data)))))


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


def _first_lines(text: Path, folder: Path, most: int) -> Path:
    """Write the first nonblank lines of a text into a folder and return the file."""
    check_text_file(text)
    folder.mkdir(parents=True, exist_ok=True)
    head = folder / "head.txt"
    filled = (line for _, line, _ in TextFile(text).lines() if line.strip())
    with replacing(head) as file:
        file.writelines(line.encode() + b"\n" for line in islice(filled, most))
    return head
