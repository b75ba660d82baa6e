"""The folder of a run: config, command, log, TensorBoard, checkpoints, results."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from metaseq_lm.errors import UsageError
from metaseq_lm.files import write_atomic

# What may change between the parts of one run: how it is computed, how long, how often it is looked
# at.
FREE = ("engine.", "trainer.", "save_dir", "user_dir", "label", "data")


class RunFolder:
    """Opens or continues a run folder; raises UsageError if it holds a different run."""

    def __init__(self, config: DictConfig) -> None:
        self.path = Path(config.save_dir)
        self.checkpoints = self.path / "checkpoints"
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / "config.yaml"
        if file.exists():
            check_same(OmegaConf.load(file), config, self.path)
        write_atomic(file, OmegaConf.to_yaml(config).encode())
        cut_torn_line(self.path / "log.jsonl")
        with open(self.path / "command.txt", "a", encoding="utf-8") as commands:
            commands.write(shlex.join(sys.argv) + "\n")

    def log(self, kind: str, update: int, seconds: float, values: dict[str, Any]) -> None:
        """Append one line to log.jsonl."""
        line = {"kind": kind, "update": update, "seconds": round(seconds, 3), **values}
        with open(self.path / "log.jsonl", "a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")

    def write_results(self, results: dict[str, Any]) -> None:
        """Write results.json in one piece."""
        write_atomic(self.path / "results.json", (json.dumps(results, indent=1) + "\n").encode())

    def forget_results(self) -> None:
        """Remove results.json: the run goes on, and what it says is no longer so."""
        (self.path / "results.json").unlink(missing_ok=True)


def read_results(path: Path) -> dict[str, Any] | None:
    """Return the results.json of a run folder, or None if there is none."""
    file = path / "results.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def cut_torn_line(file: Path) -> None:
    """Drop a last line without its end, which a killed process left; the next would be glued to it."""
    if file.is_file():
        data = file.read_bytes()
        if data and not data.endswith(b"\n"):
            write_atomic(file, data[: data.rfind(b"\n") + 1])


def check_same(old: Any, new: DictConfig, path: Path) -> None:
    """Raise UsageError naming the keys in which two configs ask for different results."""
    before, after = flatten(OmegaConf.to_container(old)), flatten(OmegaConf.to_container(new))
    differing = [
        f"{key} is {before.get(key)!r} there, {after.get(key)!r} here"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(FREE)
    ]
    if differing:
        raise UsageError(
            f"{path} holds another run ({'; '.join(differing[:5])}); "
            "choose another --save-dir, or the same options to resume it"
        )


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one with dotted keys."""
    if not isinstance(node, dict):
        return {prefix[:-1]: node}
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= flatten(value, f"{prefix}{key}.")
    return flat


def code_hash(user_dir: str | None) -> str:
    """Return a short hash of the source of this package and of the plug-in in use."""
    digest = hashlib.sha256()
    roots = [Path(__file__).parent] + ([Path(user_dir)] if user_dir else [])
    for root in roots:
        files = [root] if root.is_file() else sorted(root.rglob("*.py"))
        for file in files:
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def finite(values: dict[str, float]) -> bool:
    """Return whether all values are finite."""
    return all(math.isfinite(v) for v in values.values())
