"""The data of the text arm: a corpus and its probes, made of files of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.preprocess import pipeline
from metaseq_lm.data.storage.manifest import MANIFEST_FILE
from metaseq_lm.data.storage.text_files import TextFile
from metaseq_lm.league.plan import CONLLU, FILES, LABELLED, TEXT

HELD_OUT = 50  # every 50th line of the text is held out
# The probes of a file of dependencies: name, column, scheme of the tags.
TAGGED = (("upos", "upos", "none"), ("relation", "deprel", "none"))


def make_text(data: Mapping[str, Any], folder: Path, lines: int | None = None) -> None:
    """Make what a data folder lacks of the corpus of a text and the sets of its probe.

    Every 50th line of the text is the valid split; the tokenizer learns from the others. A probe in
    CoNLL-U gives the sets `upos` and `relation`, a table of labelled texts the set `labels`.

    Args:
        data: The files `text`, `probe` and `probe_test`, and options of preprocess by name.
        folder: The data folder.
        lines: How many lines of the text are read; None for all.
    """
    if not has_set(folder):
        splits = split_lines(Path(data[TEXT]), folder.with_name(TEXT), lines)
        options = {key: value for key, value in data.items() if key not in FILES}
        make(options, pipeline.Request(folder, splits))
    probes = {"train": [Path(data["probe"])], "test": [Path(data["probe_test"])]}
    for name, options in probe_sets(data).items():
        if not has_set(folder / name):
            make(options, pipeline.Request(folder, probes))


def probe_sets(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options of preprocess that make each set of a probe, by its name."""
    if not data["probe"].endswith(CONLLU):
        return {LABELLED: {"labelled": LABELLED}}
    sets = {}
    for name, column, scheme in TAGGED:
        sets[name] = {"tagged": name, "tag_column": column, "tag_scheme": scheme}
    return sets


def has_text(data: Mapping[str, Any], folder: Path) -> bool:
    """Return whether the corpus and all sets of its probe are in a data folder."""
    return all(map(has_set, (folder, *(folder / name for name in probe_sets(data)))))


def has_set(folder: Path) -> bool:
    """Return whether a folder holds a data set."""
    return (folder / MANIFEST_FILE).exists()


def make(arguments: Mapping[str, Any], request: pipeline.Request) -> None:
    """Make a dataset by options of preprocess."""
    kind, options = pipeline.choose_kind(arguments)
    pipeline.preprocess(kind.value(options, request))


def split_lines(text: Path, folder: Path, most: int | None) -> dict[str, list[Path]]:
    """Write the lines of a text into train.txt and valid.txt and return their paths by split."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {split: folder / f"{split}.txt" for split in ("train", "valid")}
    count = 0
    with open(paths["train"], "wb") as train, open(paths["valid"], "wb") as valid:
        for _, line, _ in TextFile(text).lines():
            if not line.strip():
                continue
            count += 1
            (train if count % HELD_OUT else valid).write(line.encode() + b"\n")
            if count == most:
                break
    if count < 2 * HELD_OUT:
        raise UsageError(
            f"--{TEXT} {text}: {count} lines; a document is a line, and {2 * HELD_OUT} are needed"
        )
    return {split: [path] for split, path in paths.items()}
