"""`manifest.json`: the content of a data folder, its command, and checksums of every block."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from metaseq_lm import __version__
from metaseq_lm.core.errors import MetaseqError, MissingError
from metaseq_lm.core.files import read_json, write_atomic

MANIFEST_FILE = "manifest.json"
WORDS = ".words"  # suffix of the files that store where words begin
_HERE = "."  # stands for the folder itself among the names of sets in a data folder
_FORMAT = 1
VALID_REMEDY = "preprocess with --validpref FILE, or with --hold-out 5% to take it out of train"
_BLOCK_BYTES = 64 << 20
ALWAYS_VERIFIED = 64 << 20  # most bytes of a data set whose checksums are read at each use
CORPUS, LABELLED = "corpus", "labelled"
_LABELLED_DETAILS = {
    "labels": list,
    "regression": bool,
    "inputs": int,
    "form": str,
    "benchmark": str,
}
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def _json(content: Any, indent: int | None = None) -> bytes:
    text = json.dumps(content, indent=indent, sort_keys=True, ensure_ascii=False)
    # The name of a file may not be UTF-8; in JSON its bytes are then written as \\udcXX.
    return text.encode("utf-8", "backslashreplace")


def _checksum(content: Any) -> str:
    return hashlib.blake2b(_json(content), digest_size=16).hexdigest()


def _block_checksums(path: Path, block_bytes: int = _BLOCK_BYTES) -> Iterator[str]:
    """Yield the blake2b-128 checksum (hex) of each block of a file, reading 1 MiB at a time."""
    with open(path, "rb") as file:
        while file.peek(1):
            digest, left = hashlib.blake2b(digest_size=16), block_bytes
            while left and (piece := file.read(min(left, 1 << 20))):
                digest.update(piece)
                left -= len(piece)
            yield digest.hexdigest()


@dataclass
class Manifest:
    """The content of a `manifest.json`."""

    kind: str  # such as "corpus" or "labelled"
    tokenizer: dict[str, Any]  # name, hash and vocabulary size of the tokenizer
    splits: dict[str, dict[str, Any]]  # the counts of each split
    command: str  # the command line that made the folder
    details: dict[str, Any] = field(default_factory=dict)  # fields of this kind alone
    # The size in bytes and the block checksums of each file.
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    block_bytes: int = _BLOCK_BYTES
    made_by: str = f"metaseq-lm {__version__}"
    version: int = _FORMAT

    def add_files(self, folder: Path, names: Iterable[str]) -> None:
        """Record size and checksums of the files `names` in `folder`."""
        for name in names:
            blocks = list(_block_checksums(folder / name, self.block_bytes))
            self.files[name] = {"bytes": (folder / name).stat().st_size, "blocks": blocks}

    def save(self, folder: Path) -> None:
        """Write `manifest.json` into `folder`, as a whole or not at all."""
        content = asdict(self)
        content["checksum"] = _checksum(content)
        write_atomic(folder / MANIFEST_FILE, _json(content, indent=1) + b"\n")

    @classmethod
    def load(cls, folder: str | Path) -> "Manifest":
        """Read and check the manifest of a folder; MetaseqError if missing, damaged or newer."""
        path = Path(folder) / MANIFEST_FILE
        if not path.is_file():
            raise MissingError(
                f"{path}: no such file; the folder is not a data set of 'metaseq-lm preprocess', "
                "or its preprocessing did not end"
            )
        try:
            content = read_json(path)
            checksum = content.pop("checksum")
            version = content.get("version")
            actual = _checksum(content)
        except (ValueError, KeyError, RecursionError) as error:
            raise MetaseqError(f"{path}: damaged: {error!r}; preprocess again") from error
        # Before the checksum, which another version may compute in another way.
        if version != _FORMAT:
            shown = repr(version)[:20]
            raise MetaseqError(f"{path}: format {shown}; this program reads format {_FORMAT}")
        if checksum != actual:
            raise MetaseqError(f"{path}: damaged or edited: its own checksum does not match")
        try:
            manifest = cls(**content)
            manifest.check()
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            reason = repr(error)[:200]
            raise MetaseqError(f"{path}: unknown content: {reason}; preprocess again") from error
        return manifest

    @property
    def data_parts(self) -> list[Any]:
        """The parts of the manifest about the data, without the place, the command or the version.

        Files of where words begin are left out, because earlier folders hold equal data without.
        """
        return [self.data_files, self.block_bytes, self.tokenizer, self.details]

    @property
    def data_files(self) -> dict[str, dict[str, Any]]:
        """The records of the files, except files of where words begin."""
        return {name: about for name, about in self.files.items() if not name.endswith(WORDS)}

    @property
    def data_hash(self) -> str:
        """The hash of `data_parts`, 32 hex digits."""
        return _checksum(self.data_parts)

    @property
    def has_valid(self) -> bool:
        """Whether training on the set can validate; also if there is nothing to train on."""
        splits = {name.partition("_")[0] for name in self.splits}
        return "train" not in splits or "valid" in splits

    def require_split(self, folder: str | Path, split: str) -> None:
        """Raise MetaseqError if the folder of this manifest has no such split."""
        if split not in self.splits:
            names = ", ".join(sorted(self.splits)) or "none"
            remedy = f"; {VALID_REMEDY}" if split == "valid" and not self.has_valid else ""
            raise MetaseqError(f"{folder}: no split '{split}'; there are {names}{remedy}")

    def check(self) -> None:
        """Raise TypeError, ValueError, KeyError or AttributeError for a part of a wrong form.

        Names of files and splits must not lead out of the folder.
        """
        typed: dict[str, tuple[Any, type]] = {
            "tokenizer hash": (self.tokenizer["hash"], str),
            "splits": (self.splits, dict),
            "details": (self.details, dict),
            "files": (self.files, dict),
            "block_bytes": (self.block_bytes, int),
        }
        for name, record in self.files.items():
            typed[f"size of {name}"] = (record["bytes"], int)
            typed[f"blocks of {name}"] = (record["blocks"], list)
        if self.kind == LABELLED:
            typed |= {name: (self.details[name], kind) for name, kind in _LABELLED_DETAILS.items()}
        wrong = [name for name, (value, expected) in typed.items() if type(value) is not expected]
        wrong += [repr(n) for n in (*self.files, *self.splits) if not FILE_NAME.fullmatch(n)]
        if wrong or self.block_bytes < 1:
            raise ValueError(", ".join(wrong) or "block_bytes")
        for name, record in self.files.items():
            if len(record["blocks"]) != -(-record["bytes"] // self.block_bytes):
                raise ValueError(f"{len(record['blocks'])} checksums for {name}")


def check_sizes(folder: str | Path) -> list[str]:
    """Return one complaint for each file of the manifest that is missing or has another size."""
    faults = []
    for name, record in Manifest.load(folder).files.items():
        path = Path(folder) / name
        if not path.is_file():
            faults.append(f"{path}: missing, but listed in {MANIFEST_FILE}")
        elif path.stat().st_size != record["bytes"]:
            faults.append(f"{path}: {path.stat().st_size} bytes instead of {record['bytes']}")
    return faults


def require_sizes(folder: str | Path) -> None:
    """Raise MetaseqError if a file of the manifest is missing or has another size."""
    _require_none(check_sizes(folder))


def _require_none(faults: list[str]) -> None:
    """Raise MetaseqError with the first of some complaints about a data folder."""
    if faults:
        others = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise MetaseqError(
            f"{'; '.join(faults[:3])}{others}; copy the folder again or preprocess again"
        )


def verify(folder: str | Path) -> list[str]:
    """Read every file of a data folder and return one complaint for each wrong file or block.

    An empty list means that every byte is as written. MetaseqError if the manifest itself is
    missing or damaged.
    """
    folder = Path(folder)
    manifest = Manifest.load(folder)
    faults = check_sizes(folder)
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != record["bytes"]:
            continue
        actual = _block_checksums(path, manifest.block_bytes)
        for number, (actual_sum, expected) in enumerate(zip(actual, record["blocks"])):
            if actual_sum != expected:
                first = number * manifest.block_bytes
                last = min(first + manifest.block_bytes, record["bytes"]) - 1
                faults.append(f"{path}: block {number} (bytes {first}-{last}) is damaged")
    return faults


def tokenizer_hash(folder: str | Path) -> str | None:
    """Return the hash of the tokenizer of a data folder; None if it is not known.

    A folder without a corpus, only with labelled sets, has no manifest but a tokenizer.
    """
    from metaseq_lm.data.tokenizers.base import OPTIONS_FILE
    from metaseq_lm.data.tokenizers.loading import load_tokenizer  # it imports this module's room

    if (Path(folder) / MANIFEST_FILE).is_file():
        return str(Manifest.load(folder).tokenizer["hash"])
    if not (Path(folder) / OPTIONS_FILE).is_file():
        return None
    return load_tokenizer(folder).fingerprint


def require_tokenizer(folder: Path, fingerprint: str) -> None:
    """Raise MetaseqError unless a set's tokenizer, `fingerprint`, is the data folder's."""
    corpus = tokenizer_hash(folder.parent)
    if corpus is not None and corpus != fingerprint:
        raise MetaseqError(
            f"{folder}: made with another tokenizer than {folder.parent}; preprocess it again"
        )


def fingerprint(folder: str | Path, split: str = "") -> str:
    """Return a short hash (16 hex digits) of the tokens and the tokenizer of a data folder.

    With a `split` of a labelled set, it covers the rows of the split and the classes. It depends
    only on the content, not on the place, the time or the command. It is computed from the
    checksums of the manifest, and raises MetaseqError unless the files are there in full; a folder
    without a manifest (made by another program) is read whole.
    """
    folder = Path(folder)
    if (folder / MANIFEST_FILE).is_file():
        manifest = Manifest.load(folder)
        # If the sizes differ, the checksums belong to other files.
        require_sizes(folder)
        if is_small(manifest):
            _require_none(verify(folder))
        parts: Any = manifest.data_parts
        if split:
            files = {n: a for n, a in manifest.data_files.items() if n.startswith(f"{split}.")}
            parts = [split, files, *parts[1:3], manifest.details.get("labels")]
    else:
        pairs = sorted(p for p in folder.glob("*") if p.suffix in (".bin", ".idx") and p.is_file())
        if not pairs:
            raise MissingError(f"{folder}: holds no .bin and .idx files")
        parts = {p.name: list(_block_checksums(p)) for p in pairs}
    return _checksum(parts)[:16]


def is_small(manifest: Manifest) -> bool:
    """Return whether the checksums of a data set are read at each use."""
    return bool(sum(about["bytes"] for about in manifest.files.values()) <= ALWAYS_VERIFIED)


def fingerprint_of_run(folder: str | Path, options: Any) -> str:
    """Return the fingerprint of a data folder and of its sets that `options` name.

    `options` are the options of the task; any text in them that is the name of a set counts.
    """
    folder = Path(folder)
    names = sets_named(folder, options)
    prints = [f"{name} {fingerprint(folder / name)}" for name in names]
    # A folder of labelled sets need not hold a corpus.
    if not names or holds_tokens(folder):
        prints.insert(0, fingerprint(folder))
    return _checksum(prints)[:16] if names else prints[0]


def corpus_fingerprint(folder: str | Path) -> str | None:
    """Return the fingerprint of a data folder without the sets in it; None if it holds no tokens.

    It is the same for all runs on a corpus, even if some of them also read labelled sets.
    """
    return fingerprint(folder) if holds_tokens(Path(folder)) else None


def train_words(folder: str | Path) -> int | None:
    """Return the number of words of the train split of a corpus, None if its manifest lacks it."""
    try:
        words = Manifest.load(folder).splits["train"].get("words")
    except (MetaseqError, KeyError):
        return None
    return None if words is None else int(words)


def holds_tokens(folder: Path) -> bool:
    """Return whether a data folder holds data itself, in addition to the sets in it."""
    return (folder / MANIFEST_FILE).is_file() or any(
        path.suffix in (".bin", ".idx") for path in folder.glob("*")
    )


def sets_named(folder: str | Path, options: Any) -> list[str]:
    """Return the sets inside a data folder that the `options` of a task name, sorted."""
    names = {text for text in _texts(options) if FILE_NAME.fullmatch(text)}
    return sorted(name for name in names if (Path(folder) / name / MANIFEST_FILE).is_file())


def labels_in(folder: str | Path, options: Any) -> dict[str, list[str]]:
    """Return the ordered classes of the sets, if they have any, that a task's `options` name.

    The name HERE is the data folder itself; real values have no classes, [].
    """
    unnamed = [_HERE] if (Path(folder) / MANIFEST_FILE).is_file() else []
    names = [*unnamed, *sets_named(folder, options)]
    labels = {name: Manifest.load(Path(folder) / name).details.get("labels") for name in names}
    return {name: classes for name, classes in labels.items() if isinstance(classes, list)}


def classes_of(folder: str | Path) -> list[str]:
    """Return the ordered classes of a labelled set; MetaseqError if it has none."""
    classes = labels_in(folder, {}).get(_HERE)
    if not classes:
        raise MetaseqError(f"{folder}: not a labelled set with classes, such as D/NAME")
    return classes


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in nested mappings and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts(list(value.values()))
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
