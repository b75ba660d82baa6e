"""Checkpoints: folders that are complete, verified, or not there at all.

A checkpoint is written under a temporary name, every file and the folder are fsynced, then it is
renamed. It holds model.safetensors, state.pt (plain data, loaded with weights_only) and
manifest.json with their checksums. If parameters are sharded, each process writes its rows of them
and of their moments as a part; whoever loads the checkpoint has whole tensors again. "best" and
"last" beside the checkpoints are links to them, and so are "words_7M" and the like.
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
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from metaseq_lm.core.errors import UsageError, say
from metaseq_lm.core.files import (
    exchange,
    is_altered,
    sync_folder,
    to_json,
    with_checksum,
)
from metaseq_lm.distributed import placement, vectors
from metaseq_lm.runs.manifests import (
    FORMAT,
    FORMAT_IN_PARTS,
    CheckpointError,
    all_updates,
    file_names,
    folder_of,
    read_file,
    read_manifest,
    word_links,
)
from metaseq_lm.runs.safe_load import check_archive, check_header

TEMPORARY = ".tmp-"
REPLACED = ".old-"  # of a checkpoint that is written again where names cannot be exchanged
TreePath = tuple[Any, ...]  # keys of nested dicts


@dataclass
class Checkpoint:
    """The content of a verified checkpoint."""

    path: Path
    weights: dict[str, Tensor]
    state: dict[str, Any]
    manifest: dict[str, Any]


def save(
    folder: Path,
    update: int,
    weights: dict[str, Tensor],
    state: dict[str, Any],
    description: dict[str, Any],
) -> Path:
    """Write checkpoint `update` under `folder` and return its path.

    `state` is all that resuming needs besides the weights, as plain data and tensors; `description`
    holds entries for the manifest. If the checkpoint cannot be written, CheckpointError tells the
    bytes needed and free, and earlier checkpoints are untouched.
    """
    files = serialise(weights, state)
    needed = sum(map(len, files.values()))
    prepare(folder, update, needed)
    sums = Writing(folder, update, files, needed).finish()
    return commit(folder, update, build_manifest(update, state, description), sums)


def serialise(weights: dict[str, Tensor], state: dict[str, Any]) -> dict[str, bytes]:
    """Return the files of whole weights and state; CheckpointError for a bad state."""
    stream = io.BytesIO()
    torch.save(state, stream)
    try:
        check_archive(stream.getvalue())
    except ValueError as error:  # better now than when it is loaded
        raise CheckpointError(f"the state of the run cannot be saved: {error}") from error
    weights = {name: tensor.detach().cpu() for name, tensor in weights.items()}
    content = safetensors.torch.save(without_shared_memory(weights))
    return {"model.safetensors": content, "state.pt": stream.getvalue()}


def serialise_rows(shards: Mapping[TreePath, Tensor]) -> dict[str, bytes]:
    """Return the file of this process's rows of shards; none if another replica has it."""
    number = placement.part_number(next(iter(shards.values()))) if shards else None
    if number is None:
        return {}
    rows = {joined(path): vectors.local(t).detach().cpu() for path, t in shards.items()}
    content = safetensors.torch.save(without_shared_memory(rows))
    return {f"part_{number:05d}.safetensors": content}


def build_manifest(
    update: int,
    state: dict[str, Any],
    description: dict[str, Any],
    shards: Mapping[TreePath, Tensor] | None = None,
) -> dict[str, Any]:
    """Return a manifest without the checksums of the files."""
    manifest = {"format": FORMAT, "update": update, "sha256": {}}
    manifest |= {"state": structure(state), **description}
    if shards:
        shapes = [[path, list(shard.shape)] for path, shard in shards.items()]
        manifest |= {"format": FORMAT_IN_PARTS, "shards": shapes}
    return manifest


class Writing:
    """Files of a checkpoint on their way into its temporary folder, in a thread.

    The files are complete already: what they were made of may change.
    """

    def __init__(self, folder: Path, update: int, files: dict[str, bytes], needed: int) -> None:
        self.sums: dict[str, str] = {}
        self.error: BaseException | None = None
        arguments = (folder, update, files, needed)
        self.thread = threading.Thread(target=self._write, args=arguments, name="checkpoint")
        self.thread.start()

    def _write(self, folder: Path, update: int, files: dict[str, bytes], needed: int) -> None:
        try:
            with _writing(folder, update, needed) as temporary:
                for name, data in files.items():
                    _write(temporary / name, data)
                    self.sums[name] = hashlib.sha256(data).hexdigest()
        except BaseException as error:
            self.error = error  # for the thread that waits

    def is_done(self) -> bool:
        """Return whether all files are written, or one could not be."""
        return not self.thread.is_alive()

    def finish(self) -> dict[str, str]:
        """Wait for the files, return their checksums; CheckpointError if one cannot be written."""
        self.thread.join()
        if self.error is not None:
            raise self.error
        return self.sums


def commit(folder: Path, update: int, manifest: dict[str, Any], sums: dict[str, str]) -> Path:
    """Turn the temporary folder, which has all files, into checkpoint `update`; return its path."""
    manifest = manifest | {"sha256": sums}
    final = folder_of(folder, update)
    content = to_json(with_checksum(manifest), 1).encode()
    with _writing(folder, update, len(content)) as temporary:
        _write(temporary / "manifest.json", content)
        sync_folder(temporary)
        _publish(temporary, final)
        link(folder, "last", final)
    return final


def _publish(temporary: Path, final: Path) -> None:
    """Give a complete checkpoint its name; one that has it, unvalidated or damaged, is removed.

    A kill at any moment leaves the old one or the new one under that name, to which links may lead.
    Only where names cannot be exchanged there is a moment with neither, after which `newest` puts
    the old one back.
    """
    old = temporary
    if not os.path.lexists(final):
        os.rename(temporary, final)
    elif not exchange(temporary, final):
        old = final.with_name(f"{REPLACED}{final.name}")
        os.rename(final, old)
        os.rename(temporary, final)
    sync_folder(final.parent)
    if os.path.lexists(old):
        _remove(old)


def take_shards(tree: dict[Any, Any], path: TreePath = ()) -> dict[TreePath, Tensor]:
    """Remove the sharded tensors from nested dicts; return them by their paths."""
    shards: dict[TreePath, Tensor] = {}
    for key, value in list(tree.items()):
        if isinstance(value, dict):
            shards |= take_shards(value, (*path, key))
        elif isinstance(value, Tensor) and vectors.is_sharded(value):
            shards[(*path, key)] = tree.pop(key)
        elif isinstance(value, Tensor):
            tree[key] = vectors.local(value)
    return shards


def joined(path: Sequence[Any]) -> str:
    """Return the name in a part of the tensor at a path."""
    return "/".join(map(str, path))


def prepare(folder: Path, update: int, needed: int) -> None:
    """Make the temporary folder of a checkpoint of `needed` bytes; CheckpointError without room."""
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
    """Yield the temporary folder of a checkpoint; it is removed if it cannot be written."""
    final = folder_of(folder, update)
    temporary = folder / f"{TEMPORARY}{final.name}"
    try:
        yield temporary
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        raise CheckpointError(
            f"cannot write checkpoint {final}: {error.strerror} ({needed:,} bytes needed, {free:,} "
            "free). Earlier checkpoints are intact; make room and start the run again to resume"
        ) from error


def without_shared_memory(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors that share no memory, which safetensors requires.

    A model that shares a tensor under two names loads it from either.
    """
    seen: set[int] = set()
    for name, tensor in weights.items():
        copy = tensor.contiguous()
        address = copy.untyped_storage().data_ptr()
        weights[name] = copy.clone() if address in seen else copy
        seen.add(address)
    return weights


def structure(state: Any, limit: float = math.inf) -> str:
    """Return a hash of the keys and shapes in nested containers, to detect a missing part.

    Raises ValueError for more than `limit` values, as in containers that contain each other.
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
        return list(value.shape) if isinstance(value, Tensor) else type(value).__name__

    return hashlib.sha256(json.dumps(outline(state)).encode()).hexdigest()[:16]


def nonfinite(weights: dict[str, Tensor]) -> list[str]:
    """Return the names of the weights that contain NaN or infinity."""
    return [n for n, w in weights.items() if w.is_floating_point() and not w.isfinite().all()]


def link(folder: Path, name: str, target: Path) -> None:
    """Point the link `name` at a checkpoint, atomically."""
    temporary = folder / f"{TEMPORARY}{name}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    unlink(folder / name, only_folder=True)
    os.replace(temporary, folder / name)


def unlink(path: Path, only_folder: bool = False) -> None:
    """Remove a link, or the folder in its place where a run was copied without links (scp -r)."""
    if path.is_dir() and not path.is_symlink():
        obsolete = path.with_name(f"{TEMPORARY}{path.name}-copy")  # not torn by a kill
        os.rename(path, obsolete)
        _remove(obsolete)
    elif not only_folder:
        path.unlink(missing_ok=True)


def relink(folder: Path, newest: Path, best: int | None, words: Mapping[str, int]) -> None:
    """Point all links at the right checkpoints, after a kill between a save and its links.

    `best` is the update of the best checkpoint, None if there is none; `words` are the updates of
    those at numbers of words.
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
    manifest = read_manifest(path)
    names = file_names(manifest)
    contents = {name: read_file(path, name, manifest) for name in names}
    try:
        weights, *pieces = [_tensors(contents[n]) for n in names if n != "state.pt"]
        check_archive(contents["state.pt"])
        state = torch.load(io.BytesIO(contents["state.pt"]), weights_only=True, map_location="cpu")
        outline = structure(state, limit=len(contents["state.pt"]))
    except Exception as error:  # the two libraries may raise anything for a damaged file
        reason = str(error).split("\n")[0]
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {reason}") from error
    if not isinstance(state, dict) or outline != manifest.get("state"):
        raise CheckpointError(
            f"{path / 'state.pt'} lacks a part that was saved, or has one more than was saved"
        )
    try:
        _put_together(pieces, manifest.get("shards", []), {"weights": weights, "state": state})
    except Exception as error:  # the manifest may say anything
        raise CheckpointError(f"{path}: its parts do not fit together: {error}") from error
    if nonfinite(weights):
        raise CheckpointError(f"{path}: {', '.join(nonfinite(weights)[:4])} is not finite")
    if is_altered(manifest):
        say(f"{path}: warning: manifest.json was changed after it was written")
    return Checkpoint(path, weights, state, manifest)


def _tensors(content: bytes) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file."""
    tensors: dict[str, Tensor] = safetensors.torch.load(content)
    check_header(content)
    return tensors


def _put_together(
    parts: Sequence[dict[str, Tensor]], shards: Sequence[Any], tree: dict[str, Any]
) -> None:
    """Put the rows of all parts together and into nested dicts, the reverse of `take_shards`.

    Raises an error if something is missing, or if there is more than there should be.
    """
    for path, shape in shards:
        name = joined(path)
        tensor = torch.cat([part.pop(name) for part in parts])
        if list(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)} instead of {shape}")
        *parents, last = path
        node = tree
        for key in parents:
            node = node[key]
        node[last] = tensor
    if any(parts):
        raise ValueError("they hold more tensors than the manifest names")


def labels_of(facts: dict[str, Any] | None, source: object) -> dict[str, list[str]]:
    """Return the classes of each set from a checkpoint's facts; CheckpointError without any."""
    labels = (facts or {}).get("labels")
    if labels is None or not all(isinstance(x, str) for names in labels.values() for x in names):
        raise CheckpointError(
            f"{source} does not say which classes its heads are for; train it anew with this "
            "version"
        )
    return dict(labels)


def check_classes(source: object, name: str, then: Sequence[str], now: Sequence[str]) -> None:
    """Raise UsageError if `source` was trained on other classes of a set, or in another order."""
    if list(then) != list(now):
        trained, current = (", ".join(labels) or "real values" for labels in (then, now))
        raise UsageError(
            f"{source} was trained on {name} with the classes {trained}, but DATA has {current}; "
            "their order is that of the outputs. Preprocess the set again with --labels-from the "
            "set of then, or with --labels in its order"
        )


def check_heads(
    source: object, then: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]]
) -> None:
    """Raise UsageError if the classes of a set of `now` are not those that its head was trained on.

    `then` are the classes of the sets that `source` was trained on. If that is a single set, its
    head is compared with every set of `now`.
    """
    for name, labels in now.items():
        only = next(iter(then.values())) if len(then) == 1 else labels
        check_classes(source, name, then.get(name, only), labels)


def check_facts(stored: Any, current: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError if a checkpoint's facts differ from those of the run to resume.

    Facts that the checkpoint lacks are not compared.
    """
    stored = stored if isinstance(stored, dict) else {}
    differing = [key for key in current if key in stored and stored[key] != current[key]]
    if differing:
        key = differing[0]
        raise CheckpointError(
            f"{path} was trained with other {key} than there are now ({str(stored[key])[:200]} "
            f"then, {str(current[key])[:200]} now); choose another --save-dir"
        )


def newest(
    folder: Path, check: Callable[[Checkpoint], None] = lambda stored: None
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that verifies and passes `check`, and why others were not.

    Removes what an interrupted save left. Raises CheckpointError if there are checkpoints but none
    can be used: starting again would lose the run silently.
    """
    skipped: list[str] = []
    for old in folder.glob(f"{REPLACED}*") if folder.is_dir() else ():
        final = folder / old.name.removeprefix(REPLACED)
        if not os.path.lexists(final):
            os.rename(old, final)
        else:
            _remove(old)
    for leftover in folder.glob(f"{TEMPORARY}*") if folder.is_dir() else ():
        _remove(leftover)
    for path in reversed(all_updates(folder)):
        try:
            stored = load(path)
            check(stored)
            return stored, skipped
        except CheckpointError as error:
            skipped.append(str(error))
    if skipped:
        raise CheckpointError(
            f"no checkpoint in {folder} can be used: {'; '.join(skipped)}. Move the folder away to "
            "start the run anew"
        )
    return None, skipped


def prune(folder: Path, keep_last: int, update: int) -> None:
    """Remove checkpoints up to `update` except the `keep_last` newest (at least one), the best and
    those at numbers of words.

    Later ones stay: the run resumed before them because they are damaged, and will write them
    again.
    """
    latest = folder_of(folder, update).name
    known = [path for path in all_updates(folder) if path.name <= latest]
    retained = {path.name for path in known[-max(keep_last, 1) :]}
    links = [folder / "best", *(folder / name for name in word_links(folder))]
    retained |= {os.readlink(path) for path in links if path.is_symlink()}
    for path in known:
        if path.name not in retained:
            # Renamed first: a kill meanwhile must not leave a folder that looks like a checkpoint.
            obsolete = path.with_name(f"{TEMPORARY}{path.name}")
            os.rename(path, obsolete)
            _remove(obsolete)


def load_into(module: torch.nn.Module, weights: dict[str, Tensor], source: object) -> None:
    """Copy `weights` into `module`; raises CheckpointError if they do not fit."""
    check_fit(module, weights, source)
    module.load_state_dict(weights)


def check_fit(module: torch.nn.Module, weights: dict[str, Tensor], source: object) -> None:
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


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
