"""Checkpoint manifests, and the checkpoints of a run folder; does not import torch."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from metaseq_lm.core.config import GROUPS, RunConfig, as_dict, check_names
from metaseq_lm.core.errors import MetaseqError, MissingError, UsageError
from metaseq_lm.core.files import COUNT, NUMBER, as_numbers, read_json, schema_error
from metaseq_lm.core.stored import from_stored, override_config
from metaseq_lm.runs.folder import check_hidden

WORDS = "words_"  # prefix of links to the checkpoints at numbers of words
FORMAT = 4
_OLD_FORMAT = 2  # with the moments in state.pt
OLD_FORMAT_IN_PARTS = 3  # its parts do not say where their rows begin
PREFIX = "update_"
BLOCK = 1 << 20  # bytes read at a time for a checksum
# Schema of a manifest, see `schema_error`. Imported models have no data fingerprint.
MANIFEST = {
    "format": int,
    "update": COUNT,
    "sha256": {"*": str},
    "state?": str,
    "weights?": str,
    "shards?": list,
    "valid?": {"*": NUMBER},
    "config?": {f"{part}?": dict for part in (*GROUPS, "engine", "trainer")},
    "data?": (str, dict),
    "tokenizer?": str,
    "code?": str,
    "torch?": str,
    "facts?": {"labels?": {"*": list}},
    "start?": {"weights?": str, "costs?": {"*": dict}},
}
PART = re.compile(r"part_[0-9]{5}\.safetensors")
_STATE = re.compile(r"state\.(pt|safetensors)")


class CheckpointError(MetaseqError):
    """A checkpoint cannot be used; the message says which and why."""


class _NoCheckpointError(CheckpointError, MissingError):
    """There is no checkpoint at the path that the user gave."""

    exit_code = MissingError.exit_code


def folder_of(folder: Path, update: int) -> Path:
    """Return the path of checkpoint `update`."""
    return folder / f"{PREFIX}{update:09d}"


def words_name(number: int) -> str:
    """Return the name of the checkpoint at a number of words: words_7M, words_20k, words_1500."""
    for size, unit in ((10**6, "M"), (10**3, "k")):
        if not number % size:
            return f"{WORDS}{number // size}{unit}"
    return f"{WORDS}{number}"


def word_links(folder: Path) -> dict[str, Path]:
    """Return the checkpoints at numbers of words by name, fewest words first."""
    links = {path.name: path.resolve() for path in folder.glob(f"{WORDS}*")}
    return dict(sorted(links.items(), key=lambda link: (link[1].name, len(link[0]), link[0])))


def hash_of_weights(manifest: Mapping[str, Any]) -> str:
    """Return a hash that identifies the weights of a checkpoint."""
    sums = {n: value for n, value in manifest["sha256"].items() if not _STATE.fullmatch(n)}
    if not any(map(PART.fullmatch, sums)):
        return str(sums.get("model.safetensors"))
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint; CheckpointError if it is missing or damaged."""
    file = path / "manifest.json"
    try:
        if not file.is_file():
            raise _NoCheckpointError(f"{path} is not a checkpoint: it has no manifest.json")
        manifest = read_json(file)
        if "splits" in manifest and "sha256" not in manifest:
            raise _NoCheckpointError(f"{path} is a data folder; name a run, or a checkpoint of one")
        version = manifest["format"]
        if "valid" in manifest:
            manifest["valid"] = as_numbers(manifest["valid"])
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r}") from error
    if version not in (_OLD_FORMAT, OLD_FORMAT_IN_PARTS, FORMAT):
        raise CheckpointError(
            f"{path} has format {str(version)[:20]}; this version reads formats {_OLD_FORMAT} to "
            f"{FORMAT}"
        )
    if problem := schema_error(manifest, MANIFEST):
        raise CheckpointError(f"{file} is damaged: {problem}")
    return manifest


def verify(path: Path, names: Iterable[str], manifest: Mapping[str, Any]) -> None:
    """Verify some files of a checkpoint; CheckpointError if one differs from the manifest."""
    for name in names:
        if not (path / name).is_file():  # reading a device or a pipe might never end
            raise CheckpointError(f"{path / name}: {os.strerror(errno.ENOENT)}")
        digest, buffer = hashlib.sha256(), bytearray(BLOCK)
        try:
            with open(path / name, "rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    digest.update(memoryview(buffer)[:count])
        except OSError as error:
            raise CheckpointError(f"{path / name}: {error.strerror}") from error
        if digest.hexdigest() != manifest["sha256"].get(name):
            raise CheckpointError(
                f"{path / name} is damaged: its checksum differs from the manifest's"
            )


def file_names(manifest: Mapping[str, Any]) -> list[str]:
    """Return the file names of a checkpoint; other names in a manifest could be unsafe paths."""
    names = {name for name in manifest["sha256"] if PART.fullmatch(name) or _STATE.fullmatch(name)}
    return sorted(names | {"model.safetensors", "state.pt"})


def all_updates(folder: Path) -> list[Path]:
    """Return all paths named like a checkpoint, oldest first, dangling links included."""
    return sorted(folder.glob(f"{PREFIX}*")) if folder.is_dir() else []


def newest_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of the newest checkpoint that has one; its files are not verified."""
    for path in reversed(all_updates(folder)):
        with contextlib.suppress(CheckpointError):
            return read_manifest(path)
    return None


def resolve(path: str, prefer: str = "last") -> Path:
    """Return a checkpoint folder: `path` itself, or the `prefer`red checkpoint of a run folder."""
    root = Path(path)
    if not root.exists():
        raise _NoCheckpointError(
            f"{path}: there is no such checkpoint or run folder (download a model of the "
            "Hugging Face Hub first, and convert it to a run with 'metaseq-lm import')"
        )
    if (root / "manifest.json").is_file():
        return root.resolve()
    for folder in (root / "checkpoints", root):
        for name in (prefer, "last"):
            if (folder / name / "manifest.json").is_file():
                return (folder / name).resolve()
    remedy = "; convert this transformers folder to a run with 'metaseq-lm import'"
    raise _NoCheckpointError(
        f"{path} holds no checkpoint (no manifest.json in it or its checkpoints/)"
        f"{remedy * ((root.parent if root.is_file() else root) / 'config.json').is_file()}"
    )


def config_of(manifest: Mapping[str, Any], path: Path) -> RunConfig:
    """Return the configuration of a checkpoint; CheckpointError if it is invalid."""
    try:
        return from_stored(manifest.get("config"))
    except ValueError as error:
        raise CheckpointError(f"{path}: its config cannot be used: {error}") from error


def _usable_config(path: Path, manifest: Mapping[str, Any], user_dir: str | None) -> RunConfig:
    """Return the configuration of a checkpoint; UsageError for a plug-in that is not named."""
    config = config_of(manifest, path)
    if config.user_dir and not user_dir:
        # Plug-in code runs only if the command line names it.
        raise UsageError(
            "this run used a plug-in; give --user-dir with its path from here, which was "
            f"{config.user_dir}"
        )
    try:
        check_names(config)
    except UsageError as error:
        if not config.user_dir:
            raise
        raise UsageError(f"{error} This run used the plug-in {config.user_dir}.") from error
    return config


def reopened_config(
    path: Path, manifest: Mapping[str, Any], user_dir: str | None, overrides: Sequence[str]
) -> RunConfig:
    """Return `_usable_config` with key=value overrides; UsageError for an invalid override."""
    config = _usable_config(path, manifest, user_dir)
    check_hidden(path, as_dict(config), overrides)
    return override_config(config, overrides)
