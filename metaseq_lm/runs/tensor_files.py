"""Tensors in safetensors files; a process writes and reads only its own rows.

The header of a file of rows says where in the tensors they begin, in the layout of
torch.distributed.checkpoint's HuggingFaceStorageWriter, so that HuggingFaceStorageReader and
`dcp.load` read it. This module moves bytes between file and tensor itself: that writer needs
collective calls and a copy of the file in memory, safetensors reports a full disk only as text, and
memory mapped by both counts twice at the peak.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import _TYPES
from torch import Tensor

from metaseq_lm.distributed import vectors
from metaseq_lm.runs.manifests import CheckpointError
from metaseq_lm.runs.safe_load import check_header

_DTYPES: dict[str, torch.dtype] = {code: d for code, d in _TYPES.items() if d is not None}
CODES = {dtype: code for code, dtype in _DTYPES.items()}
_OFFSETS = "DCP_SHARDING_INFO"  # key of torch.distributed.checkpoint in the metadata of a header


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in files, or some of its rows; slicing returns another StoredTensor.

    Attributes:
        ranges: File, position and length in bytes of the rows, in order.
    """

    shape: torch.Size
    dtype: torch.dtype
    ranges: tuple[tuple[Path, int, int], ...]

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def __getitem__(self, rows: slice) -> StoredTensor:
        start, stop, _ = rows.indices(self.shape[0])
        shape = torch.Size([max(stop - start, 0), *self.shape[1:]])
        size = self.shape[1:].numel() * self.dtype.itemsize
        skipped, left, ranges = start * size, shape[0] * size, []
        for file, position, length in self.ranges:
            ahead = min(skipped, length)
            used = min(length - ahead, left)
            ranges.append((file, position + ahead, used))
            skipped, left = skipped - ahead, left - used
        return StoredTensor(shape, self.dtype, tuple(r for r in ranges if r[2]))

    def read(self) -> Tensor:
        """Read the tensor; CheckpointError if a file has become too short."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        target = memoryview(_as_bytes(tensor))
        for file, position, length in self.ranges:
            with open(file, "rb") as stream:
                stream.seek(position)
                if stream.readinto(target[:length]) != length:
                    raise CheckpointError(f"{file} was changed while it was read")
            target = target[length:]
        return tensor


def rows_like(tensor: Tensor | StoredTensor, like: Tensor) -> Tensor:
    """Return the rows of a whole tensor that this process holds of `like`; read no others."""
    rows = vectors.rows_of(tensor, like)  # type: ignore[arg-type]  # it takes slices only
    return rows.read() if isinstance(rows, StoredTensor) else rows


def map_tensors(function: Callable[[str, Any], Any], value: Any, name: str = "") -> Any:
    """Copy nested containers, replacing each tensor by `function` of its path and value."""
    if isinstance(value, (Tensor, StoredTensor)):
        return function(name, value)
    prefix = name and f"{name}/"
    if isinstance(value, dict):
        return {key: map_tensors(function, v, f"{prefix}{key}") for key, v in value.items()}
    if type(value) in (list, tuple):
        items = (map_tensors(function, v, f"{prefix}{i}") for i, v in enumerate(value))
        return type(value)(items)
    return copy.deepcopy(value)


def _as_bytes(tensor: Tensor) -> Any:
    """Return the memory of a contiguous tensor as a numpy array of bytes."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def encode(
    tensors: Mapping[str, Tensor], first_rows: Mapping[str, int] | None = None
) -> Iterator[Any]:
    """Yield the pieces of a safetensors file; memory that tensors share is written twice.

    Args:
        tensors: Contiguous tensors on the CPU, by name.
        first_rows: Index of each tensor's first row in the whole tensor; None for whole tensors.
    """
    header: dict[str, Any] = {}
    if first_rows is not None:
        offsets = {
            name: {"saved_offsets": [first_rows[name], *[0] * (tensor.dim() - 1)]}
            for name, tensor in tensors.items()
        }
        metadata = {_OFFSETS: json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
        header["__metadata__"] = metadata
    # Larger dtypes first, as the library sorts them, so that all are aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        about = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = about | {"data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield _as_bytes(tensor)


def stored_tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return the tensors in some safetensors files by name, joined from their rows.

    The rows of files that do not say where they begin follow one another. Raises an error of any
    kind for a damaged file, ValueError for rows that are missing or occur twice.
    """
    pieces: dict[str, list[tuple[int | None, StoredTensor]]] = {}
    for file in files:
        with safe_open(file, "pt"):  # checks the header, except for names that occur twice
            pass
        with open(file, "rb") as stream:
            length = stream.read(8)
            start = 8 + int.from_bytes(length, "little")
            header = check_header(length + stream.read(start - 8))
        offsets = json.loads(header.pop("__metadata__", {}).get(_OFFSETS, "{}"))
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            shape, ranges = torch.Size(entry["shape"]), ((file, start + begin, end - begin),)
            first, *others = offsets[name]["saved_offsets"] if name in offsets else [None]
            if any(others):
                raise ValueError(f"{name} is divided otherwise than by rows")
            piece = StoredTensor(shape, _DTYPES[entry["dtype"]], ranges)
            pieces.setdefault(name, []).append((first, piece))
    return {name: _joined(name, rows) for name, rows in pieces.items()}


def _joined(name: str, pieces: list[tuple[int | None, StoredTensor]]) -> StoredTensor:
    if len(pieces) == 1 and pieces[0][0] is None:
        return pieces[0][1]
    pieces.sort(key=lambda piece: piece[0] or 0)
    count, shape, dtype = 0, pieces[0][1].shape[1:], pieces[0][1].dtype
    for first, piece in pieces:
        if first not in (None, count) or (piece.shape[1:], piece.dtype) != (shape, dtype):
            raise ValueError(f"rows of {name} are missing, there twice or of another shape")
        count += piece.shape[0]
    ranges = tuple(chain.from_iterable(piece.ranges for _, piece in pieces))
    return StoredTensor(torch.Size([count, *shape]), dtype, ranges)
