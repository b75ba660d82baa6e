"""Files made to do harm, each with checksums that agree, and what the commands say to them.

As a program: prepares every case below a folder, runs its commands in this process, and prints a
line of JSON per command: case, code, stderr, seconds, growth of the peak memory, size of the files.
"""

import contextlib
import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from battery import CASES as METHODS
from battery import TINY

from metaseq_lm.checkpoint import structure
from metaseq_lm.cli import main
from metaseq_lm.data.manifest import Manifest

MLM = [*METHODS["masked_lm"][0], *TINY]
MODULE = "from pathlib import Path\nPath({canary!r}).write_text('imported')\n"
CLASS = """
from pathlib import Path
class Evil:
    def __setstate__(self, state):
        Path({canary!r}).write_text('state')
"""


@dataclass
class Place:
    """What a case works on: copies of a run and of its data, and the file that must not appear."""

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
    """An object whose pickle calls a function when it is read."""

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
    made.something = 1  # without a state there is none to set
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
    """A tensor of one number seen ten billion times, converted: 80 GB."""
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
    """Replace state.pt by what `change` makes of its bytes."""

    def build(place: Place) -> None:
        file = place.newest / "state.pt"
        file.write_bytes(change(file.read_bytes(), place.canary))
        resign(place.newest)

    return build


def bomb(data: bytes, canary: Path) -> bytes:
    """A state that holds 400 MB of zeros in 400 KB."""
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
    """Name the first tensor once more, as whole numbers at the same place."""
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


def yaml_bomb(place: Place) -> str:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
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
    """An index that announces 2**60 documents."""
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
    """Make the manifest of a checkpoint agree with its files as well as an attacker could."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name in manifest["sha256"]:
        manifest["sha256"][name] = hashlib.sha256((path / name).read_bytes()).hexdigest()
    # What makes much memory when it is read must not do so here.
    content = (path / "state.pt").read_bytes()
    if b"bytearray" not in content and b"_rebuild_device" not in content:
        with contextlib.suppress(Exception):
            found = torch.load(path / "state.pt", weights_only=True)
            manifest["state"] = structure(found, most=1_000_000)
    (path / "manifest.json").write_text(json.dumps(manifest))


# ------------------------------------------------------------------------ the cases

CHECKPOINTS: dict[str, Build] = {
    "os.system as the state": state(lambda data, canary: saved(system(canary))),
    "os.system in the update": at("update", make=system),
    "eval in the optimizer": at("optimizers", "main", make=evaluated),
    "subprocess in the positions": at("positions", "train", make=process),
    "runpy in the window": at("window", "sums", make=module_run),
    "exec in the FLOPs": at("flops", make=executed),
    "import in the best": at("best", "value", make=module_import),
    "__setstate__ in the window": at("window", "counts", make=with_setstate),
    "numpy array of objects": at("best", make=object_array),
    "plain pickle": state(lambda data, canary: pickle.dumps(system(canary))),
    "old format of torch": state(old_format),
    "pickle as the weights": weights(lambda data, canary: saved(system(canary))),
    "bytearray of 2 GB": at("best", make=lambda canary: Call(bytearray, 1 << 31)),
    "tensor that unpacks": at("best", make=unpacked),
    "a million lists": at("best", make=laughs),
    "a list in itself": at("best", make=cycle),
    "lists 50,000 deep": state(deep),
    "zip bomb": state(bomb),
    "member twice": state(twice),
    "member twice in capitals": state(twice_in_capitals),
    "member /tmp/x": state(escaping("/tmp/metaseq_lm_evil")),
    "member ../../x": state(escaping("archive/../../evil")),
    "member a link": state(linked),
    "something before the archive": state(hidden_behind),
    "state.pt leads to /dev/zero": links_to("state.pt", "/dev/zero"),
    "weights lead to /dev/zero": links_to("model.safetensors", "/dev/zero"),
    "header of 2**60 bytes": weights(lambda data, canary: struct.pack("<Q", 1 << 60) + data[8:]),
    "offsets that overlap": weights(
        lambda data, canary: header(f'{{"a":{tensor(0, 8)},"b":{tensor(4, 12)}}}', bytes(12))
    ),
    "shape that overflows": weights(
        lambda data, canary: header(f'{{"a":{tensor(0, 0, f"[{2**62},{2**62}]")}}}')
    ),
    "tensor named twice": weights(twice_named),
    "manifest nested": text("run/checkpoints/last/manifest.json", NESTED),
    "manifest of 100 MB": edit(lambda content: content.update(note="x" * 100_000_000)),
    "manifest a list": edit(lambda content: [content]),
    "checksums a list": edit(lambda content: content.update(sha256=list(content["sha256"]))),
    "format a long text": edit(lambda content: content.update(format="x" * 1_000_000)),
}
CONFIGS: dict[str, Build] = {
    "config a text": edit(lambda content: content.update(config="evil")),
    "no config": edit(lambda content: content.pop("config") and None),
    "config with a list of tasks": config("task", ["evil"]),
    "config that names no task": config("task", {"_name": "../../evil"}),
    "config with wrong types": config("engine", {"device": {"a": 1}}),
    "config that asks for a secret": config("label", "${oc.env:METASEQ_LM_TEST_SECRET}"),
}
RUNS: dict[str, Build] = {
    "config.yaml with a tag": text("run/config.yaml", tagged),
    "config.yaml with aliases": text("run/config.yaml", yaml_bomb),
    "config.yaml nested": text("run/config.yaml", NESTED),
    "config.yaml a list": text("run/config.yaml", "- a\n- b\n"),
    "config.yaml not UTF-8": text("run/config.yaml", b"a: \xff\n"),
    "results.json a list": text("run/results.json", "[1]"),
    "results.json nested": text("run/results.json", NESTED),
}
LOGS: dict[str, Build] = {"log.jsonl nested": text("run/log.jsonl", log_line)}
RESULTS: dict[str, Build] = {
    "results.json empty": text("run/results.json", "{}"),
    "results.json with texts": text(
        "run/results.json", json.dumps(dict.fromkeys(("status", "seconds", "flops"), "x"))
    ),
}
DATA: dict[str, Build] = {
    "2**60 documents": text("data/train.idx", index),
    "row of 100 MB": text("data/dict.txt", long_row),
    "count of 5,000 digits": text("data/dict.txt", counts),
    "data manifest nested": text("data/manifest.json", NESTED),
    "data manifest of 100 MB": text("data/manifest.json", '{"a":"' + "x" * 100_000_000 + '"}'),
}
TOKENIZERS: dict[str, Build] = {
    "tokenizer nested": text("data/tokenizer.json", NESTED),
    "tokenizer a list": text("data/tokenizer.json", "[]"),
    "pre_tokenizer a list": tokenizer(lambda content: content.update(pre_tokenizer=["x"])),
    "prefix longer than the symbols": tokenizer(
        lambda content: content["model"].update(continuing_subword_prefix="x" * 1000)
    ),
    "symbol number 2**32": tokenizer(lambda content: content["model"]["vocab"].update(evil=2**32)),
    "options nested": text("data/tokenizer_options.json", NESTED),
    "pattern a number": text(
        "data/tokenizer_options.json", '{"tokenizer": "word", "version": 1, "pattern": 3}'
    ),
}
EVALUATE = "evaluate {run} --data {data} --split valid"
RESUME = "train {data} --save-dir {run} trainer.max_update=3"
START = "train {data} --save-dir {run}2 --init-from {run} trainer.max_update=1"
REPORT, DOCTOR, TRY = "report {run}", "doctor {data}", "train {data} --dry-run"
# Resuming and starting from a checkpoint read it by the same function; some cases see to that.
ALSO = {"os.system in the update", "zip bomb", "lists 50,000 deep", "manifest a list"}
CASES = [
    *((n, b, [EVALUATE, *([RESUME, START] if n in ALSO else [])]) for n, b in CHECKPOINTS.items()),
    *((name, build, [EVALUATE]) for name, build in CONFIGS.items()),
    *((name, build, [REPORT, RESUME]) for name, build in RUNS.items()),
    *((name, build, [REPORT]) for name, build in LOGS.items()),
    *((name, build, [START, RESUME]) for name, build in RESULTS.items()),
    *((name, build, [TRY, DOCTOR]) for name, build in DATA.items()),
    *((name, build, [DOCTOR]) for name, build in TOKENIZERS.items()),
]


# ------------------------------------------------------------------------ the program


def peak() -> int:
    """Return the peak memory of this process in bytes since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM")


def forget_peak() -> int:
    """Start the peak anew and return the present memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def prepare(work: Path, data: Path) -> None:
    """Train the run that the cases spoil, in a folder with modules that must not be imported."""
    canary = work / "canary"
    (work / "evil_module.py").write_text(MODULE.format(canary=str(canary)))
    (work / "evil_class.py").write_text(CLASS.format(canary=str(canary)))
    command = ["train", str(data), "--save-dir", str(work / "run"), *MLM, "trainer.max_update=2"]
    assert main(command) == 0
    (work / "run/results.json").unlink()  # there is something left to do


def perform(command: str, place: Place) -> dict[str, Any]:
    """Run one command in this process."""
    words = command.format(run=place.run, data=place.data).split()
    if words[0] == "train":
        words += [w for w in MLM if not any(o.split("=")[0] == w.split("=")[0] for o in words)]
    size = sum(p.stat().st_size for p in place.run.parent.rglob("*") if p.is_file())
    before, start = forget_peak(), time.monotonic()
    code: Any = None
    with contextlib.redirect_stderr(io.StringIO()) as err:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                code = main(words)
            except BaseException as error:  # anything that leaves a command is a fault of ours
                code = repr(error)[:300]
    return {
        "code": code,
        "stderr": err.getvalue()[:20_000],
        "stdout": out.getvalue()[:2_000],
        "seconds": time.monotonic() - start,
        "grown": peak() - before,
        "size": size,
        "canary": place.canary.exists(),
    }


def apart(work: Callable[[], None]) -> int:
    """Run `work` in a fork, so that what it leaves in memory counts for no other; return the status."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            sys.stdout.flush()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def program(work: Path, data: Path) -> None:
    """Run all cases and print their outcomes."""
    canary = work / "canary"
    # What is imported late is imported once, here.
    assert main(["train", str(data), *MLM, "--dry-run", "engine.keep_memory=false"]) == 0
    assert apart(lambda: prepare(work, data)) == 0
    sys.path.insert(0, str(work))
    for number, (name, build, commands) in enumerate(CASES):
        folder = work / f"case{number}"
        place = Place(folder / "run", folder / "data", canary)
        shutil.copytree(work / "run", place.run, symlinks=True)
        shutil.copytree(data, place.data)
        assert apart(lambda: build(place)) == 0, name
        canary.unlink(missing_ok=True)  # building some of them imports what they name
        for command in commands:
            told = {"case": name, "command": command.split()[0]}
            status = apart(lambda: print(json.dumps(told | perform(command, place))))
            if status:
                print(json.dumps(told | {"code": f"ended with {status}"}))
        shutil.rmtree(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    program(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
