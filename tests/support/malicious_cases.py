"""The malicious files by name, and the commands' messages on each; checksums match the files.

As a program it prepares every case in a folder, runs its commands in separate processes, and prints
a line of JSON per command: case, code, stderr, CPU seconds, growth of the peak memory, size.
"""

import contextlib
import gc
import io
import json
import os
import pickle
import shutil
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from battery import CASES as METHODS
from battery import TINY
from malice import (
    CLASS,
    MODULE,
    NESTED,
    Build,
    Call,
    Place,
    at,
    bomb,
    config,
    counts,
    cycle,
    deep,
    edit,
    escaping,
    evaluated,
    executed,
    header,
    hidden_behind,
    index,
    laughs,
    linked,
    links_to,
    log_line,
    long_row,
    module_import,
    module_run,
    object_array,
    old_format,
    place_in_run,
    process,
    saved,
    sparse,
    state,
    system,
    tagged,
    tensor,
    text,
    tokenizer,
    twice,
    twice_in_capitals,
    twice_named,
    unpacked,
    weights,
    with_setstate,
    yaml_bomb,
)

from metaseq_lm.cli import main

MLM = [*METHODS["masked_lm"][0], *TINY]

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
LOGS: dict[str, Build] = {
    "log.jsonl nested": text("run/log.jsonl", log_line),
    "log.jsonl of 100 GB of nothing": place_in_run("log.jsonl", sparse),
}
UNREADABLE: dict[str, Build] = {
    f"{file} {name}": place_in_run(file, make)
    for file in ("log.jsonl", "config.yaml", "results.json")
    for name, make in (
        ("a pipe", os.mkfifo),
        ("leads to /dev/zero", lambda file: file.symlink_to("/dev/zero")),
    )
}
PIPES: dict[str, Build] = {
    "command.txt a pipe": place_in_run("command.txt", os.mkfifo),
    "command.txt leads out": place_in_run(
        "command.txt", lambda f: f.symlink_to(f.parents[1] / "x")
    ),
}
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
# Resuming and starting from a checkpoint use the same reader; some cases check that.
ALSO = {"os.system in the update", "zip bomb", "lists 50,000 deep", "manifest a list"}
CASES = [
    *((n, b, [EVALUATE, *([RESUME, START] if n in ALSO else [])]) for n, b in CHECKPOINTS.items()),
    *((name, build, [EVALUATE]) for name, build in CONFIGS.items()),
    *((name, build, [REPORT, RESUME]) for name, build in RUNS.items()),
    *((name, build, [REPORT]) for name, build in LOGS.items()),
    *((n, b, [REPORT, RESUME][: 1 + (n[0] != "r")]) for n, b in UNREADABLE.items()),
    *((name, build, [RESUME]) for name, build in PIPES.items()),
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
    """Reset the peak and return the current memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def prepare(work: Path, data: Path) -> None:
    """Train the run that the cases damage, in a folder with modules that must not be imported."""
    canary = work / "canary"
    (work / "evil_module.py").write_text(MODULE.format(canary=str(canary)))
    (work / "evil_class.py").write_text(CLASS.format(canary=str(canary)))
    command = ["train", str(data), "--save-dir", str(work / "run"), *MLM, "trainer.max_update=2"]
    assert main(command) == 0
    (work / "run/results.json").unlink()  # leaves something to do


def perform(command: str, place: Place) -> dict[str, Any]:
    """Run one command in this process."""
    words = command.format(run=place.run, data=place.data).split()
    if words[0] == "train":
        words += [w for w in MLM if not any(o.split("=")[0] == w.split("=")[0] for o in words)]
    size = sum(p.stat().st_size for p in place.run.parent.rglob("*") if p.is_file())
    before, start = forget_peak(), time.process_time()
    code: Any = None
    with contextlib.redirect_stderr(io.StringIO()) as err:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                code = main(words)
            except BaseException as error:  # any exception that leaves a command is our fault
                code = repr(error)[:300]
    return {
        "code": code,
        "stderr": err.getvalue()[:20_000],
        "stdout": out.getvalue()[:2_000],
        "seconds": time.process_time() - start,
        "grown": peak() - before,
        "size": size,
        "canary": place.canary.exists(),
    }


def apart(work: Callable[[], None]) -> int:
    """Run `work` in a fork and return the status, so that its memory does not count for others."""
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
    # Import late modules here, once.
    assert main(["train", str(data), *MLM, "--dry-run", "engine.retain_heap=false"]) == 0
    gc.freeze()  # a collection would write into pages that the forks share
    assert apart(lambda: prepare(work, data)) == 0
    sys.path.insert(0, str(work))
    for number, (name, build, commands) in enumerate(CASES):
        folder = work / f"case{number}"
        place = Place(folder / "run", folder / "data", canary)
        shutil.copytree(work / "run", place.run, symlinks=True)
        shutil.copytree(data, place.data)
        assert apart(lambda: build(place)) == 0, name
        canary.unlink(missing_ok=True)  # building some cases imports the modules that they name
        for command in commands:
            told = {"case": name, "command": command.split()[0]}
            status = apart(lambda: print(json.dumps(told | perform(command, place))))
            if status:
                print(json.dumps(told | {"code": f"ended with {status}"}))
        shutil.rmtree(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    program(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
