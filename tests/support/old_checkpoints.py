"""Checkpoints as earlier versions wrote them: formats 2 and 3, with the moments in state.pt or in
parts that do not say where their rows begin.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from metaseq_lm.runs import checkpoint, manifests
from metaseq_lm.runs.checkpoint import _structure_hash


def write(
    path: Path, weights: dict[str, Tensor], state: dict, about: dict[str, Any], parts: int
) -> None:
    """Write a checkpoint of format 2, or of format 3 with the rows of `parts` processes."""
    manifest = {**about, "format": 3 if parts else 2, "update": int(path.name[-9:])}
    trees = {"weights": dict(weights), "state": state}
    shards = take_matrices(trees, ()) if parts else {}
    manifest |= {"shards": [[keys, list(tensor.shape)] for keys, tensor in shards.items()]}
    files = {"model.safetensors": safetensors.torch.save(trees["weights"])}
    for number in range(parts):
        rows = {
            "/".join(map(str, keys)): rows_of(tensor, number, parts)
            for keys, tensor in shards.items()
        }
        files[f"part_{number:05d}.safetensors"] = safetensors.torch.save(rows)
    path.mkdir(parents=True, exist_ok=True)
    torch.save(state, path / "state.pt")
    for name, content in files.items():
        (path / name).write_bytes(content)
    manifest["state"] = _structure_hash(state)
    manifest["sha256"] = {
        name: hashlib.sha256((path / name).read_bytes()).hexdigest()
        for name in (*files, "state.pt")
    }
    (path / "manifest.json").write_text(json.dumps(manifest))


def take_matrices(tree: dict, path: tuple) -> dict[tuple, Tensor]:
    """Remove tensors with rows from nested dicts and return them by path."""
    shards: dict[tuple, Tensor] = {}
    for key, value in list(tree.items()):
        if isinstance(value, dict):
            shards |= take_matrices(value, (*path, key))
        elif isinstance(value, Tensor) and value.dim():
            shards[(*path, key)] = tree.pop(key)
    return shards


def rows_of(tensor: Tensor, number: int, parts: int) -> Tensor:
    """Return the rows held by process `number` of `parts`."""
    count = -(-tensor.shape[0] // parts)
    return tensor[number * count :][:count].contiguous()


def age(run: Path, parts: int) -> None:
    """Rewrite the checkpoints of a run folder in an old format."""
    for path in manifests.all_updates(run / "checkpoints"):
        stored = checkpoint.load(path)
        new = ("format", "update", "sha256", "state", "weights", "checksum")
        about = {key: value for key, value in stored.manifest.items() if key not in new}
        for file in path.iterdir():
            file.unlink()
        write(path, stored.weights, stored.state, about, parts)
