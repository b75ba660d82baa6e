"""`manifest.json`: what stands in a data folder, how it was made, and checksums of every block."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from metaseq_lm import __version__
from metaseq_lm.errors import MetaseqError
from metaseq_lm.files import write_atomic

MANIFEST_FILE = "manifest.json"
FORMAT = 1
BLOCK_BYTES = 64 << 20
CORPUS, LABELLED = "corpus", "labelled"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, ensure_ascii=False).encode("utf-8")


def block_checksums(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[str]:
    """Yield the blake2b-128 checksum (hex) of each block of a file, reading 1 MiB at a time."""
    with open(path, "rb") as file:
        while True:
            digest, left = hashlib.blake2b(digest_size=16), block_bytes
            while left and (piece := file.read(min(left, 1 << 20))):
                digest.update(piece)
                left -= len(piece)
            if left == block_bytes:
                return
            yield digest.hexdigest()
            if left:
                return


@dataclass
class Manifest:
    """The content of a `manifest.json`.

    `kind` is "corpus" or "labelled"; `tokenizer` has name, hash, vocabulary size; `splits` holds
    the counts of each split; `details` what only this kind has; `files` the size in bytes and
    block checksums of each file.
    """

    kind: str
    tokenizer: dict[str, Any]
    splits: dict[str, dict[str, Any]]
    command: str
    details: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    block_bytes: int = BLOCK_BYTES
    made_by: str = f"metaseq-lm {__version__}"
    version: int = FORMAT

    def add_files(self, folder: Path, names: Iterable[str]) -> None:
        """Record size and checksums of the files `names` in `folder`."""
        for name in names:
            blocks = list(block_checksums(folder / name, self.block_bytes))
            self.files[name] = {"bytes": (folder / name).stat().st_size, "blocks": blocks}

    def save(self, folder: Path) -> None:
        """Write `manifest.json` into `folder`, as a whole or not at all."""
        content = asdict(self)
        content["checksum"] = _digest(_canonical(content))
        text = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        write_atomic(folder / MANIFEST_FILE, text.encode("utf-8"))

    @classmethod
    def load(cls, folder: str | Path) -> "Manifest":
        """Read and check the manifest of a folder; MetaseqError if missing, damaged or newer."""
        path = Path(folder) / MANIFEST_FILE
        if not path.is_file():
            raise MetaseqError(
                f"{path}: no such file; the folder is not a data set of 'metaseq-lm preprocess', "
                "or its preprocessing did not end"
            )
        try:
            content = json.loads(path.read_bytes())
            checksum = content.pop("checksum")
            version = content.get("version")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise MetaseqError(f"{path}: damaged: {error!r}; preprocess again") from error
        if version != FORMAT:
            raise MetaseqError(f"{path}: format {version!r}; this program reads format {FORMAT}")
        if checksum != _digest(_canonical(content)):
            raise MetaseqError(f"{path}: damaged or edited: its own checksum does not match")
        try:
            return cls(**content)
        except TypeError as error:
            raise MetaseqError(f"{path}: unknown content: {error}; preprocess again") from error


def check_sizes(folder: str | Path) -> list[str]:
    """Return one complaint for each file of the manifest that is missing or has another size."""
    folder = Path(folder)
    faults = []
    for name, record in Manifest.load(folder).files.items():
        path = folder / name
        if not path.is_file():
            faults.append(f"{path}: missing, but listed in {MANIFEST_FILE}")
        elif path.stat().st_size != record["bytes"]:
            faults.append(f"{path}: {path.stat().st_size} bytes instead of {record['bytes']}")
    return faults


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
        actual = block_checksums(path, manifest.block_bytes)
        for number, (found, expected) in enumerate(zip(actual, record["blocks"])):
            if found != expected:
                first = number * manifest.block_bytes
                last = min(first + manifest.block_bytes, record["bytes"]) - 1
                faults.append(f"{path}: block {number} (bytes {first}-{last}) is damaged")
    return faults


def fingerprint(folder: str | Path) -> str:
    """Return a short hash (16 hex digits) of the tokens and the tokenizer of a data folder.

    It depends on the content only: not on the place, the time or the command. It comes from the
    checksums of the manifest; a folder without one (made by another program) is read whole.
    """
    folder = Path(folder)
    if (folder / MANIFEST_FILE).is_file():
        manifest = Manifest.load(folder)
        parts: Any = [manifest.files, manifest.block_bytes, manifest.tokenizer, manifest.details]
    else:
        pairs = sorted(p for p in folder.glob("*") if p.suffix in (".bin", ".idx") and p.is_file())
        if not pairs:
            raise MetaseqError(f"{folder}: holds no .bin and .idx files")
        parts = {p.name: list(block_checksums(p)) for p in pairs}
    return _digest(_canonical(parts))[:16]
