"""Checkpoints: folders that are complete, verified, or not there at all.

A checkpoint is written under a temporary name, every file and the folder are fsynced, then it is
renamed. It holds model.safetensors, state.safetensors with the moments of optimizers, state.pt
(plain data, loaded with weights_only) and manifest.json with their checksums. If parameters are
sharded, each process writes its rows of parameters and moments as a part. "best", "last" and names
such as "words_7M" in the same folder are links to checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metaseq_lm.core.errors import say
from metaseq_lm.core.files import exchange_names, is_altered, sync_folder, to_json, with_checksum
from metaseq_lm.distributed import process_group, shards, vectors
from metaseq_lm.runs.manifests import (
    FORMAT,
    OLD_FORMAT_IN_PARTS,
    PART,
    CheckpointError,
    all_updates,
    file_names,
    folder_of,
    read_manifest,
    verify,
    word_links,
)
from metaseq_lm.runs.safe_load import check_archive
from metaseq_lm.runs.tensor_files import (
    StoredTensor,
    encode,
    map_tensors,
    rows_like,
    stored_tensors,
)

_TEMPORARY = ".tmp-"
_REPLACED = ".old-"  # prefix of a checkpoint being replaced where names cannot be exchanged


@dataclass
class Checkpoint:
    """The content of a verified checkpoint.

    Attributes:
        weights: Tensors by name; StoredTensors if opened by `open_lazily`.
        state: Everything else that resuming needs, with tensors of the same kind.
    """

    path: Path
    weights: dict[str, Any]
    state: dict[str, Any]
    manifest: dict[str, Any]


@dataclass
class _CheckpointContents:
    """One process's files of a checkpoint, which training does not change meanwhile.

    Attributes:
        files: Functions that return the pieces of the files.
        size: Approximate number of bytes.
        structures: Entries for the manifest that show whether a part is missing.
    """

    files: dict[str, Callable[[], Iterable[Any]]]
    size: int
    structures: dict[str, str]

    def manifest(self, update: int, description: dict[str, Any]) -> dict[str, Any]:
        """Return a manifest without the checksums of the files."""
        return {**description, "format": FORMAT, "update": update, "sha256": {}, **self.structures}


def save(
    folder: Path,
    update: int,
    weights: dict[str, Tensor],
    state: dict[str, Any],
    description: dict[str, Any],
) -> Path:
    """Write checkpoint `update` under `folder` and return its path.

    `state` is everything that resuming needs besides the weights, as plain data and tensors;
    `description` has entries for the manifest. If the checkpoint cannot be written, CheckpointError
    names the bytes needed and free, and earlier checkpoints are untouched.
    """
    contents = stage(weights, state, is_first=True)
    prepare(folder, update, contents.size)
    manifest = contents.manifest(update, description)
    return commit(folder, update, manifest, write(folder, update, contents))


def stage(
    weights: Mapping[str, Tensor], state: dict[str, Any], is_first: bool, copy: bool = False
) -> _CheckpointContents:
    """Return this process's files of weights and state; of shards it writes its own rows.

    The process that `is_first` also writes everything that is whole. With `copy`, training may go
    on while the files are written; otherwise tensors on the CPU are not copied.
    """
    tensors = dict(weights)

    def take_out(name: str, tensor: Tensor) -> Tensor:
        if name in tensors:
            raise CheckpointError(f"the state of the run cannot be saved: two values are {name}")
        tensors[name] = tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    def file_of(name: str, tensor: Tensor) -> str | None:
        """Return the file to which this process writes a tensor or its rows."""
        if not vectors.is_sharded(tensor):
            kind = "model" if name in weights else "state"
            return f"{kind}.safetensors" if is_first else None
        number = shards.part_number(tensor)
        # Processes without rows of a tensor would all claim the same first row.
        is_part = number is not None and (vectors.local_part(tensor).shape[0] or number == 0)
        return f"part_{number:05d}.safetensors" if is_part else None

    outline = map_tensors(take_out, state)
    files: dict[str, Callable[[], Iterable[Any]]] = {}
    tables: dict[str, dict[str, Tensor]] = {}
    if is_first:
        files["state.pt"] = partial(_archive, outline)
        tables["model.safetensors"] = {}  # also for a run with all weights in parts
    for name, tensor in tensors.items():
        if file := file_of(name, tensor):
            tables.setdefault(file, {})[name] = vectors.local_part(tensor)
    first_rows = {n: shards.first_row(t) for n, t in tensors.items() if vectors.is_sharded(t)}
    for file, table in tables.items():
        rows = first_rows if PART.fullmatch(file) else None
        files[file] = partial(encode, _on_host(table, copy), rows)
    # With the entries of headers and state.pt for each tensor.
    size = 0
    for table in tables.values():
        size += sum(tensor.nbytes + 2 * len(name) + 200 for name, tensor in table.items())
    structures = {"state": _structure_hash(outline), "weights": _structure_hash(dict(weights))}
    return _CheckpointContents(files, size, structures)


def _on_host(tensors: Mapping[str, Tensor], copy: bool) -> dict[str, Tensor]:
    """Return contiguous tensors on the CPU, from a GPU in pinned memory; copies if `copy`."""
    result = {}
    for name, tensor in tensors.items():
        result[name] = tensor.detach().contiguous()
        if copy or tensor.is_cuda:
            target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            result[name] = target.copy_(result[name], non_blocking=True)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return result


def _archive(outline: dict[str, Any]) -> list[bytes]:
    """Return the file content of a state without tensors; CheckpointError if `load` refuses it."""
    stream = io.BytesIO()
    torch.save(outline, stream)
    try:
        check_archive(stream.getvalue())
    except ValueError as error:
        raise CheckpointError(f"the state of the run cannot be saved: {error}") from error
    return [stream.getvalue()]


def write(folder: Path, update: int, contents: _CheckpointContents) -> dict[str, str]:
    """Write this process's files into the temporary folder; return their checksums.

    Raises CheckpointError if one cannot be written.
    """
    with _writing(folder, update, contents.size) as temporary:
        return {name: _write(temporary / name, file()) for name, file in contents.files.items()}


def commit(folder: Path, update: int, manifest: dict[str, Any], sums: dict[str, str]) -> Path:
    """Turn the complete temporary folder into checkpoint `update`; return its path."""
    manifest = manifest | {"sha256": sums}
    final = folder_of(folder, update)
    content = to_json(with_checksum(manifest), 1).encode()
    with _writing(folder, update, len(content)) as temporary:
        _write(temporary / "manifest.json", [content])
        sync_folder(temporary)
        _publish(temporary, final)
        link(folder, "last", final)
    return final


def _publish(temporary: Path, final: Path) -> None:
    """Give a complete checkpoint its name; an unvalidated or damaged one is removed."""
    # A kill at any moment leaves the old or the new one under that name, to which links may point.
    # If names cannot be exchanged, there is a moment with neither, after which `newest` restores
    # the old one.
    old = temporary
    if not os.path.lexists(final):
        os.rename(temporary, final)
    elif not exchange_names(temporary, final):
        old = final.with_name(f"{_REPLACED}{final.name}")
        os.rename(final, old)
        os.rename(temporary, final)
    sync_folder(final.parent)
    if os.path.lexists(old):
        _remove(old)


def prepare(folder: Path, update: int, needed: int) -> None:
    """Make the temporary folder of a checkpoint; CheckpointError without `needed` free bytes."""
    with _writing(folder, update, needed) as temporary:
        if not folder.is_dir():
            folder.mkdir(parents=True)
            sync_folder(folder.parent)
        shutil.rmtree(temporary, ignore_errors=True)
        if shutil.disk_usage(folder).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        temporary.mkdir()


@contextlib.contextmanager
def _writing(folder: Path, update: int, needed: int) -> Iterator[Path]:
    """Yield the temporary folder of a checkpoint; remove it if the block cannot write it."""
    final = folder_of(folder, update)
    temporary = folder / f"{_TEMPORARY}{final.name}"
    try:
        yield temporary
    except (OSError, CheckpointError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, CheckpointError):
            raise
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        raise CheckpointError(
            f"cannot write checkpoint {final}: {error.strerror} ({needed:,} bytes needed, {free:,} "
            "free). Earlier checkpoints are intact; make room and start the run again to resume"
        ) from error


def _structure_hash(state: Any, limit: float = math.inf) -> str:
    """Return a hash of the keys and shapes in nested containers, to detect a missing part.

    Raises ValueError for more than `limit` values, such as in containers that contain each other.
    """
    count = 0

    def outline(value: Any) -> Any:
        nonlocal count
        count += 1
        if count > limit:
            raise ValueError(f"more than {limit:,} values")
        if isinstance(value, dict):
            return sorted((str(k), outline(v)) for k, v in value.items())
        if isinstance(value, (list, tuple)):
            return [outline(v) for v in value]
        is_tensor = isinstance(value, (Tensor, StoredTensor))
        return list(value.shape) if is_tensor else type(value).__name__

    return hashlib.sha256(json.dumps(outline(state)).encode()).hexdigest()[:16]


def nonfinite_names(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the weights that contain NaN or infinity."""
    return [n for n, w in weights.items() if w.is_floating_point() and not w.isfinite().all()]


def _check_finite(weights: Mapping[str, Tensor], path: Path) -> None:
    if bad := nonfinite_names(weights):
        raise CheckpointError(f"{path}: {', '.join(bad[:4])} is not finite")


def link(folder: Path, name: str, target: Path) -> None:
    """Point the link `name` at a checkpoint, atomically."""
    temporary = folder / f"{_TEMPORARY}{name}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    unlink(folder / name, only_folder=True)
    os.replace(temporary, folder / name)


def unlink(path: Path, only_folder: bool = False) -> None:
    """Remove a link, or the folder in its place if a run was copied without links (scp -r)."""
    if path.is_dir() and not path.is_symlink():
        obsolete = path.with_name(f"{_TEMPORARY}{path.name}-copy")  # no part stays after a kill
        os.rename(path, obsolete)
        _remove(obsolete)
    elif not only_folder:
        path.unlink(missing_ok=True)


def relink(folder: Path, newest: Path, best: int | None, words: Mapping[str, int]) -> None:
    """Point all links at the right checkpoints, after a kill between a save and its links.

    `best` is the update of the best checkpoint, None if there is none; `words` are the updates of
    checkpoints at numbers of words.
    """
    link(folder, "last", newest)
    updates = dict(words) if best is None else {**words, "best": best}
    for name in {"best", *word_links(folder)} - updates.keys():
        unlink(folder / name)
    for name, update in updates.items():
        if folder_of(folder, update).is_dir():
            link(folder, name, folder_of(folder, update))


def load(path: Path) -> Checkpoint:
    """Read and verify a checkpoint folder; CheckpointError names the file and the fault."""
    verify(path, file_names(manifest := read_manifest(path)), manifest)
    stored = _open(path)
    for tree in (stored.weights, stored.state):
        tree.update(map_tensors(lambda _, t: t.read() if isinstance(t, StoredTensor) else t, tree))
    _check_finite(stored.weights, path)
    return stored


def open_lazily(path: Path) -> Checkpoint:
    """Return a checkpoint with StoredTensors; a collective call, which shares the verification.

    Errors as in `load`, on all replicas.
    """
    with agree_on_error():
        names = file_names(manifest := read_manifest(path))
        share = {"state.pt", *names[process_group.rank() :: process_group.world_size()]}
        verify(path, sorted(share), manifest)
    with agree_on_error():
        return _open(path)


def read_weights(module: torch.nn.Module, stored: Checkpoint) -> None:
    """Read the weights of a checkpoint into `module`; for shards, this process's rows.

    A collective call. Raises CheckpointError on all replicas if they do not fit or are not finite.
    """
    with agree_on_error():
        load_into(module, stored.weights, stored.path)
        _check_finite(
            {n: vectors.local_part(w) for n, w in module.state_dict().items()}, stored.path
        )


@contextlib.contextmanager
def agree_on_error() -> Iterator[None]:
    """Raise a CheckpointError of any replica on all replicas."""
    error_here: CheckpointError | None = None
    try:
        yield
    except CheckpointError as error:
        error_here = error
    troubles = process_group.gather_objects("" if error_here is None else str(error_here))
    if trouble := next(filter(None, troubles), ""):
        raise error_here or CheckpointError(trouble)


def _open(path: Path) -> Checkpoint:
    """Read a checkpoint from verified files; CheckpointError if they do not fit together."""
    manifest = read_manifest(path)
    content = (path / "state.pt").read_bytes()
    try:
        check_archive(content)
        state = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        outline = _structure_hash(state, limit=len(content))
        tensors = stored_tensors([path / n for n in file_names(manifest) if n != "state.pt"])
    except Exception as error:  # the two libraries may raise anything for a damaged file
        reason = str(error).split("\n")[0]
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {reason}") from error
    if not isinstance(state, dict) or outline != manifest.get("state"):
        raise CheckpointError(
            f"{path / 'state.pt'} lacks a part that was saved, or has one more than was saved"
        )
    try:
        if manifest["format"] == OLD_FORMAT_IN_PARTS:
            _insert(manifest.get("shards", []), tensors, {"weights": tensors, "state": state})
        state = map_tensors(partial(_find, tensors), state)
        if manifest["format"] == FORMAT and _structure_hash(tensors) != manifest.get("weights"):
            raise ValueError("a part that was saved is missing, or there is one more")
    except Exception as error:  # the manifest may contain anything
        raise CheckpointError(f"{path}: its parts do not fit together: {error}") from error
    if is_altered(manifest):
        say(f"{path}: warning: manifest.json was changed after it was written")
    return Checkpoint(path, tensors, state, manifest)


def _find(tensors: dict[str, StoredTensor], name: str, value: Any) -> Any:
    """Return a tensor of the state; if state.pt has only its place, take it out of `tensors`."""
    if isinstance(value, StoredTensor) or not value.is_meta:
        return value
    stored = tensors.pop(name, None)
    if stored is None or (stored.shape, stored.dtype) != (value.shape, value.dtype):
        raise ValueError(f"{name} is missing, or not {value.dtype} of shape {list(value.shape)}")
    return stored if stored.dim() else stored.read()


def _insert(shards: Sequence[Any], tensors: dict[str, StoredTensor], tree: dict[str, Any]) -> None:
    """Move the tensors of an old format, named by their paths, to these paths in nested dicts."""
    for path, shape in shards:
        tensor = tensors.pop("/".join(map(str, path)))
        if list(tensor.shape) != shape:
            raise ValueError(f"{path} has shape {list(tensor.shape)} instead of {shape}")
        *parents, last = path
        node = tree
        for key in parents:
            node = node[key]
        node[last] = tensor
    if any(name.startswith(("weights/", "state/")) for name in tensors):
        raise ValueError("they hold more tensors than the manifest names")


def find_newest(
    folder: Path, read: Callable[[Path], Checkpoint] = load
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest readable checkpoint, and why others were skipped; a collective call.

    Removes the rest of an interrupted save. Raises CheckpointError if there are checkpoints but
    none can be used: starting again would lose the run silently.
    """
    skipped: list[str] = []
    paths = _recovered(folder) if process_group.rank() == 0 else []
    for name in process_group.from_first([path.name for path in paths]):
        try:
            return read(folder / name), skipped
        except CheckpointError as error:
            skipped.append(str(error))
    if skipped:
        raise CheckpointError(
            f"no checkpoint in {folder} can be used: {'; '.join(skipped)}. Move the folder away to "
            "start the run anew"
        )
    return None, skipped


def _recovered(folder: Path) -> list[Path]:
    """Clean up after an interrupted save; return the checkpoints of a folder, newest first."""
    if not folder.is_dir():
        return []
    for old in folder.glob(f"{_REPLACED}*"):
        final = folder / old.name.removeprefix(_REPLACED)
        if not os.path.lexists(final):
            os.rename(old, final)
        else:
            _remove(old)
    for leftover in folder.glob(f"{_TEMPORARY}*"):
        _remove(leftover)
    return all_updates(folder)[::-1]


def prune(folder: Path, keep_last: int, update: int) -> None:
    """Remove old checkpoints up to `update`.

    The `keep_last` newest (at least one) stay, and so do the best one and those at numbers of
    words. Later ones also stay: they are damaged, so the run resumed before them, and will write
    them again.
    """
    latest = folder_of(folder, update).name
    known = [path for path in all_updates(folder) if path.name <= latest]
    retained = {path.name for path in known[-max(keep_last, 1) :]}
    links = [folder / "best", *(folder / name for name in word_links(folder))]
    retained |= {os.readlink(path) for path in links if path.is_symlink()}
    for path in known:
        if path.name not in retained:
            # Rename first: a kill meanwhile must not leave a folder that looks like a checkpoint.
            obsolete = path.with_name(f"{_TEMPORARY}{path.name}")
            os.rename(path, obsolete)
            _remove(obsolete)


def load_into(
    module: torch.nn.Module, weights: Mapping[str, Tensor | StoredTensor], source: object
) -> None:
    """Copy `weights` into `module`; for shards, this process's rows.

    Raises CheckpointError if they do not fit.
    """
    check_fit(module, weights, source)
    with torch.no_grad():
        for name, target in module.state_dict().items():
            vectors.local_part(target).copy_(rows_like(weights[name], target))


def check_fit(
    module: torch.nn.Module, weights: Mapping[str, Tensor | StoredTensor], source: object
) -> None:
    """Raise CheckpointError naming weights that are missing, unexpected or of another shape."""
    expected = module.state_dict()
    missing = sorted(expected.keys() - weights.keys())
    extra = sorted(weights.keys() - expected.keys())
    wrong = [
        f"{n}: {tuple(weights[n].shape)} there, {tuple(expected[n].shape)} in the model"
        for n in sorted(expected.keys() & weights.keys())
        if expected[n].shape != weights[n].shape
    ]
    if missing or extra or wrong:
        parts = [("missing", missing), ("unexpected", extra), ("of another shape", wrong)]
        text = "; ".join(f"{kind}: {', '.join(names[:4])}" for kind, names in parts if names)
        raise CheckpointError(
            f"{source} does not fit the model ({text}); use the same model and vocabulary"
        )


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link, but not the target of a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _write(path: Path, pieces: Iterable[Any]) -> str:
    """Write the pieces of a file; return their SHA-256 checksum."""
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
