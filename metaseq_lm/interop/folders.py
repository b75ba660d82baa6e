"""Reads and writes the files of a folder of the transformers library."""

import io
import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from metaseq_lm.core.errors import MetaseqError, MissingError, UsageError
from metaseq_lm.core.files import read_json, temporary_name, write_atomic
from metaseq_lm.data.records.text_files import check_text_file
from metaseq_lm.data.tokenizers.base import DICT_FILE, OPTIONS_FILE
from metaseq_lm.runs.checkpoint import nonfinite_names
from metaseq_lm.runs.safe_load import check_archive, check_header

_LARGEST_POINTER = 1 << 10  # bytes; Git LFS has such files in place of large ones
CONFIG_FILE = "config.json"
_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_TORCH_FILE = "pytorch_model.bin"
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "spm.model", OPTIONS_FILE, DICT_FILE),
)


def read_folder_config(folder: Path) -> dict[str, Any]:
    """Return the content of `config.json`; MetaseqError if it is missing or cannot be read."""
    path = folder / CONFIG_FILE
    if folder.is_file():
        raise MissingError(f"{folder}: is a file; give its folder, which save_pretrained wrote")
    if not path.is_file():
        raise MissingError(f"{path}: no such file; give a folder that save_pretrained wrote")
    try:
        return read_json(path)
    except ValueError as error:
        raise MetaseqError(f"{path}: damaged ({error})") from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder; MetaseqError names the file that is missing or damaged."""
    index, torch_file = folder / _INDEX_FILE, folder / _TORCH_FILE
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        if path.is_file() and path.stat().st_size < _LARGEST_POINTER:
            check_text_file(path)
    if (folder / _WEIGHTS_FILE).is_file():
        tensors = _read_safetensors(folder / _WEIGHTS_FILE)
    elif index.is_file():
        tensors = {}
        for name in _shards(index):
            tensors |= _read_safetensors(folder / name)
    elif torch_file.is_file():
        tensors = _read_torch(torch_file)
    else:
        raise MetaseqError(f"{folder}: neither {_WEIGHTS_FILE} nor {_TORCH_FILE} is there")
    if nonfinite_names(tensors):
        raise MetaseqError(f"{folder}: {', '.join(nonfinite_names(tensors)[:4])} is not finite")
    return tensors


def _shards(index: Path) -> list[str]:
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        # Only files in this folder: an index must not lead anywhere else.
        if not all(isinstance(n, str) and n == Path(n).name for n in names):
            raise ValueError("it names files that are not beside it")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise MetaseqError(f"{index}: damaged ({error})") from error
    return names


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        data = path.read_bytes()
        tensors: dict[str, Tensor] = safetensors.torch.load(data)
        check_header(data)
    except OSError as error:
        raise MetaseqError(f"{path}: {error.strerror}") from error
    except Exception as error:  # the library may raise anything for a foreign file
        raise MetaseqError(f"{path}: damaged ({str(error).splitlines()[0][:200]})") from error
    return tensors


def _read_torch(path: Path) -> dict[str, Tensor]:
    data = path.read_bytes()
    try:
        # Before 2020 torch did not write zip files; only weights_only protects reading such a file.
        if zipfile.is_zipfile(io.BytesIO(data)):
            check_archive(data)
        content = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # torch may raise anything for a foreign file
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:200]
        raise MetaseqError(f"{path}: cannot be read ({reason})") from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    ):
        raise MetaseqError(f"{path}: does not hold named tensors")
    return dict(content)


def write_model(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write `config.json` and `model.safetensors`."""
    data = safetensors.torch.save(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt"}
    )
    write_atomic(folder / _WEIGHTS_FILE, data)
    write_json(folder / CONFIG_FILE, config)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object as the transformers library formats it."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_atomic(path, text.encode("utf-8"))


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer files of a folder unchanged; return their names."""
    names = [name for name in _TOKENIZER_FILES if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `path` at the end, or vanishes if the block fails.

    UsageError if `path` exists already.
    """
    path = path.absolute()
    if path == Path.cwd():
        raise UsageError("--out: give the name of a new folder, not the present one")
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise UsageError(f"--out {path}: is there already; give the name of a new folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    temporary.mkdir()
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
