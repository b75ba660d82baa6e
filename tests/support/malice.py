"""Malicious files, and how to put them into a checkpoint, a run folder or a data folder."""

import contextlib
import hashlib
import io
import json
import os
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.runs.checkpoint import _structure_hash

MODULE = "from pathlib import Path\nPath({canary!r}).write_text('imported')\n"
CLASS = """
from pathlib import Path
class Evil:
    def __setstate__(self, state):
        Path({canary!r}).write_text('state')
"""


@dataclass
class Place:
    """The files of a case: copies of a run and its data, and the file that must not appear."""

    run: Path
    data: Path
    canary: Path

    @property
    def newest(self) -> Path:
        """The only checkpoint of the run."""
        (path,) = (self.run / "checkpoints").glob("update_*")
        return path


Build = Callable[[Place], None]


# ------------------------------------------------------------------------ pickles


class Call:
    """An object with a pickle that calls a function when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple:
        return self.call


def system(canary: Path) -> Call:
    return Call(os.system, f"touch {canary}")


def evaluated(canary: Path) -> Call:
    return Call(eval, f"open({str(canary)!r}, 'w')")


def executed(canary: Path) -> Call:
    return Call(exec, f"open({str(canary)!r}, 'w')")


def process(canary: Path) -> Call:
    import subprocess

    return Call(subprocess.check_call, ["touch", str(canary)])


def module_run(canary: Path) -> Call:
    import runpy

    return Call(runpy.run_module, "evil_module")


def module_import(canary: Path) -> Call:
    import importlib

    return Call(importlib.import_module, "evil_module")


def with_setstate(canary: Path) -> Any:
    import evil_class

    made = evil_class.Evil()
    made.something = 1  # without a state, there is nothing to set
    return made


def object_array(canary: Path) -> np.ndarray:
    return np.array([system(canary)], dtype=object)


def laughs(canary: Path) -> list:
    inner: list = [1]
    for _ in range(12):
        inner = [inner] * 12
    return inner


def cycle(canary: Path) -> list:
    inner: list = []
    inner.append(inner)
    return inner


def unpacked(canary: Path) -> Call:
    """Return a conversion of one number expanded ten billion times: 80 GB."""
    rebuild = torch._utils._rebuild_device_tensor_from_cpu_tensor
    return Call(rebuild, torch.zeros(1).expand(10**10), torch.float64, "cpu", False)


def at(*keys: str, make: Callable[[Path], Any]) -> Build:
    """Put an object into the state of a checkpoint."""

    def build(place: Place) -> None:
        file = place.newest / "state.pt"
        state = torch.load(file, weights_only=True)
        node = state
        for key in keys[:-1]:
            node = node[key]
        assert keys[-1] in node
        node[keys[-1]] = make(place.canary)
        torch.save(state, file)
        resign(place.newest)

    return build


# ------------------------------------------------------------------------ archives


def members(data: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(m.filename, archive.read(m)) for m in archive.infolist()]


def archive(entries: list[tuple[Any, bytes]], packed: bool = False) -> bytes:
    stream = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(stream, "w", method) as out:
        for name, content in entries:
            out.writestr(name, content)
    return stream.getvalue()


def saved(state: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def state(change: Callable[[bytes, Path], bytes]) -> Build:
    """Replace the bytes of state.pt by the result of `change`."""

    def build(place: Place) -> None:
        file = place.newest / "state.pt"
        file.write_bytes(change(file.read_bytes(), place.canary))
        resign(place.newest)

    return build


def bomb(data: bytes, canary: Path) -> bytes:
    """Return a state with 400 MB of zeros in 400 KB."""
    whole = torch.load(io.BytesIO(data), weights_only=True)
    return archive(members(saved(whole | {"zeros": torch.zeros(100_000_000)})), packed=True)


def deep(data: bytes, canary: Path) -> bytes:
    lists = b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."
    return archive([(n, lists if n.endswith("data.pkl") else d) for n, d in members(data)])


def twice(data: bytes, canary: Path) -> bytes:
    import warnings

    evil = dict(members(saved(system(canary))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return archive([*members(data), ("archive/data.pkl", evil["archive/data.pkl"])])


def twice_in_capitals(data: bytes, canary: Path) -> bytes:
    evil = dict(members(saved(system(canary))))
    return archive([("archive/DATA.PKL", evil["archive/data.pkl"]), *members(data)])


def escaping(name: str) -> Callable[[bytes, Path], bytes]:
    return lambda data, canary: archive([*members(data), (name, b"evil")])


def linked(data: bytes, canary: Path) -> bytes:
    link = zipfile.ZipInfo("archive/data/99")
    link.create_system, link.external_attr = 3, 0o120777 << 16
    return archive([*members(data), (link, str(canary).encode())])


def hidden_behind(data: bytes, canary: Path) -> bytes:
    return b"#!/bin/sh\ntouch canary\n" + data


def old_format(data: bytes, canary: Path) -> bytes:
    stream = io.BytesIO()
    torch.save({"update": system(canary)}, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


# ------------------------------------------------------------------------ safetensors, JSON, YAML


def weights(make: Callable[[bytes, Path], bytes]) -> Build:
    """Replace model.safetensors."""

    def build(place: Place) -> None:
        file = place.newest / "model.safetensors"
        file.write_bytes(make(file.read_bytes(), place.canary))
        resign(place.newest)

    return build


def header(text: str, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text.encode() + data


def tensor(first: int, last: int, shape: str = "[2]", kind: str = "F32") -> str:
    return f'{{"dtype":"{kind}","shape":{shape},"data_offsets":[{first},{last}]}}'


def twice_named(data: bytes, canary: Path) -> bytes:
    """Name the first tensor a second time, as whole numbers in the same place."""
    size = int.from_bytes(data[:8], "little")
    known = json.loads(data[8 : 8 + size])
    name = next(n for n, about in known.items() if about.get("dtype") == "F32")
    again = json.dumps({name: known[name] | {"dtype": "I32"}})[1:]
    return header(data[8 : 8 + size].decode().rstrip()[:-1] + "," + again, data[8 + size :])


NESTED = "[" * 200_000


def edit(change: Callable[[dict], Any]) -> Build:
    """Change the manifest of the checkpoint."""

    def build(place: Place) -> None:
        file = place.newest / "manifest.json"
        content = json.loads(file.read_text())
        changed = change(content)
        file.write_text(json.dumps(content if changed is None else changed))

    return build


def text(where: str, content: Any) -> Build:
    """Write a text file, given by a path from the case's folder."""

    def build(place: Place) -> None:
        made = content(place) if callable(content) else content
        file = place.run.parent / where
        file.write_bytes(made if isinstance(made, bytes) else made.encode())
        if where.startswith("data/") and file.name != "manifest.json":
            manifest = Manifest.load(place.data)
            manifest.add_files(place.data, [file.name])
            manifest.save(place.data)

    return build


def config(key: str, value: Any) -> Build:
    """Set a key of the config in the checkpoint's manifest."""
    return edit(lambda content: content["config"].update({key: value}))


def links_to(where: str, target: str) -> Build:
    def build(place: Place) -> None:
        (place.newest / where).unlink()
        (place.newest / where).symlink_to(target)

    return build


def place_in_run(name: str, make: Callable[[Path], Any]) -> Build:
    """Replace a file of the run."""

    def build(place: Place) -> None:
        (place.run / name).unlink(missing_ok=True)
        make(place.run / name)

    return build


def sparse(file: Path) -> None:
    """Make a sparse file of 100 GB that takes no disk space."""
    with open(file, "wb") as stream:
        stream.truncate(100 << 30)


def yaml_bomb(place: Place) -> str:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 6)]
    return (place.run / "config.yaml").read_text() + "\n".join(rows) + "\n"


def tagged(place: Place) -> str:
    evil = f"evil: !!python/object/apply:os.system ['touch {place.canary}']\n"
    return (place.run / "config.yaml").read_text() + evil


def tokenizer(change: Callable[[dict], Any]) -> Build:
    """Change tokenizer.json and the data folder's manifest with it."""

    def make(place: Place) -> str:
        content = json.loads((place.data / "tokenizer.json").read_text())
        changed = change(content)
        return json.dumps(content if changed is None else changed)

    return text("data/tokenizer.json", make)


def index(place: Place) -> bytes:
    """Return an index that announces 2**60 documents."""
    content = (place.data / "train.idx").read_bytes()
    return content[:18] + struct.pack("<QQ", 1 << 60, (1 << 60) + 1) + content[34:]


def counts(place: Place) -> bytes:
    return (place.data / "dict.txt").read_bytes() + b"x " + b"9" * 5000 + b"\n"


def long_row(place: Place) -> bytes:
    return (place.data / "dict.txt").read_bytes() + b"x" * 100_000_000 + b" 1\n"


def log_line(place: Place) -> bytes:
    lines = (place.run / "log.jsonl").read_bytes()
    return NESTED.encode() + b"\n" + lines


def resign(path: Path) -> None:
    """Make the manifest of a checkpoint agree with its files, as an attacker could."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name in manifest["sha256"]:
        manifest["sha256"][name] = hashlib.sha256((path / name).read_bytes()).hexdigest()
    # Objects that take much memory when loaded must not do so here.
    content = (path / "state.pt").read_bytes()
    if b"bytearray" not in content and b"_rebuild_device" not in content:
        with contextlib.suppress(Exception):
            found = torch.load(path / "state.pt", weights_only=True)
            manifest["state"] = _structure_hash(found, limit=1_000_000)
    (path / "manifest.json").write_text(json.dumps(manifest))
