"""Labelled sets of every form from token ids, with an easy rule; no text and no tokenizer."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.storage.manifest import LABELLED, Manifest
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary

Columns = list[list[list[int]]]  # column, row, token


def write_corpus(data: Path, words: int = 20) -> Vocabulary:
    """Write the vocabulary and manifest of a data folder at `data`, without any text."""
    vocabulary = Vocabulary(
        ["[PAD]", "[MASK]", "[SEP]", "[CLS0]", *(f"w{i}" for i in range(words))]
    )
    data.mkdir(parents=True, exist_ok=True)
    vocabulary.save(data / "dict.txt")
    manifest = Manifest("corpus", {"name": "word", "hash": "0", "size": len(vocabulary)}, {}, "")
    manifest.add_files(data, ["dict.txt"])
    manifest.save(data)
    return vocabulary


def write_set(
    folder: Path,
    splits: dict[str, tuple[Columns, Sequence[float | list[int]] | None]],
    labels: Sequence[str] = (),
    spans: dict[str, list[list[tuple[int, int, int]]]] | None = None,
    **details: object,
) -> None:
    """Write a labelled set of given tokens; `labels` are the classes, empty for real values."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = Manifest(LABELLED, {"name": "word", "hash": "0", "size": 24}, {}, "")
    count = 0
    for split, (columns, gold) in splits.items():
        count = len(columns)
        arrays = {f"{split}.input{i}": (c, np.uint16) for i, c in enumerate(columns)}
        if gold is not None:
            kind = np.int32 if labels else np.float64
            arrays[f"{split}.label"] = ([y if isinstance(y, list) else [y] for y in gold], kind)
        if spans is not None:
            flat = [[number for span in row for number in span] for row in spans[split]]
            arrays[f"{split}.spans"] = (flat, np.int32)
        for name, (rows, dtype) in arrays.items():
            with IndexedWriter(folder / name, np.dtype(dtype)) as writer:
                for row in rows:
                    writer.add(np.array(row, dtype))
            manifest.add_files(folder, [f"{name}.bin", f"{name}.idx"])
        manifest.splits[split] = {"rows": len(columns[0])}
    about = {"labels": list(labels), "regression": not labels, "inputs": count, "benchmark": ""}
    about["form"] = "single" if count == 1 else "pair"
    manifest.details = json.loads(json.dumps(about | details))
    manifest.save(folder)


def sentences(rng: np.random.Generator, rows: int, longest: int = 8) -> list[list[int]]:
    """Return rows of ordinary words, ids 8 to 23."""
    return [rng.integers(8, 24, rng.integers(3, longest + 1)).tolist() for _ in range(rows)]


def put(rng: np.random.Generator, rows: list[list[int]], words: Sequence[int]) -> list[int]:
    """Replace one random word of each row by words[row]; return its position."""
    places = [int(rng.integers(len(row))) for row in rows]
    for row, place, word in zip(rows, places, words):
        row[place] = int(word)
    return places


def learnable(folder: Path, form: str, rows: int = 256, seed: int = 0) -> None:
    """Write a set of `form` with labels that follow from which of the words 4 and 5 occurs.

    single: in the sentence; pair: in the second one; choices: word 4 in the right candidate; spans:
    at the first span, the other word at the second; regression: 4.0 minus the word times ten.
    """
    rng = np.random.default_rng(seed)
    splits, spans = {}, {}
    for split in ("train", "valid", "test"):
        gold = rng.integers(0, 2, rows)
        count = {"single": 1, "pair": 2, "choices": 3, "spans": 1, "regression": 1}[form]
        columns = [sentences(rng, rows) for _ in range(count)]
        if form == "choices":
            put(rng, columns[1], 4 + gold)
            put(rng, columns[2], 5 - gold)
        elif form == "spans":
            for row in columns[0]:
                row += rng.integers(8, 24, 2).tolist()
            at = [rng.permutation(len(row))[:2].tolist() for row in columns[0]]
            for row, (a, b), y in zip(columns[0], at, gold):
                row[a], row[b] = 4 + int(y), 5 - int(y)
            spans[split] = [[(0, a, a + 1), (0, b, b + 1)] for a, b in at]
        else:
            put(rng, columns[-1], 4 + gold)
        real = (4.0 - 10 * gold).tolist()
        splits[split] = (columns, real if form == "regression" else gold.tolist())
    if form == "regression":
        write_set(folder, splits, form="single")
    else:
        names = ("0", "1") if form == "choices" else ("no", "yes")
        write_set(folder, splits, names, spans or None, form=form)
