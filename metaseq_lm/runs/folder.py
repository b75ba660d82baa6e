"""The folder of a run: config, command, log, TensorBoard, checkpoints, results."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf

from metaseq_lm.config.entries import as_text
from metaseq_lm.core.config import (
    GROUPS,
    RunConfig,
    as_dict,
    declaration,
    flatten,
    options_with,
)
from metaseq_lm.core.errors import MetaseqError, UsageError, say
from metaseq_lm.core.files import (
    COST,
    COUNT,
    FULL_DISK,
    LARGEST_LOG,
    TIME,
    as_numbers,
    check_folder,
    check_regular,
    checksum,
    is_altered,
    read_bounded,
    read_json,
    remove_leftovers,
    require_folder,
    schema_error,
    without_link,
    write_atomic,
)
from metaseq_lm.core.journal import Journal
from metaseq_lm.core.loading import format_value, quote_path
from metaseq_lm.core.plain_yaml import read_yaml
from metaseq_lm.core.registry import ALL
from metaseq_lm.core.secrets import MASK, hidden_options, mask_options, mask_text, masked
from metaseq_lm.core.stored import with_current_names
from metaseq_lm.runs.records import write_record

# Keys that may change when a run is resumed, besides options that are `movable`.
_FREE = ("engine.", "trainer.")
# Parts of a run that `train --reset` names. Options of schedule and optimizer may change with the
# part of that name, others with the part that they declare (`reset`).
RESETS = ("schedule", "optimizer", "data")
_SOURCES_FILE = "sources.json"
NAME = re.compile(r"[A-Za-z_][\w.]*")
# Values of results.json, see `schema_error`; files of earlier versions lack some.
RESULTS = {
    "status?": str,
    "message?": str,
    "stopped_by?": str,
    **{f"{key}?": COUNT for key in ("updates", "max_update", "patience", "replicas", "threads")},
    **{f"{key}?": COST for key in ("seconds", "flops", "flops_by_rule", "peak_memory")},
    "words_seen?": COST,
    **{f"{key}?": int for key in ("seed", "exit_code", "signal")},
    **{f"{key}?": str for key in ("data", "corpus", "code", "architecture")},
    **{f"{key}?": TIME for key in ("started", "ended")},
    "metrics?": dict,
    "losses?": [str, ...],
    **{f"{key}?": {"*": str} for key in ("bounds", "terms", "effects")},
    "evaluates_as?": str,
    "versions?": {"*": str},
    "parameters?": {"*": COUNT},
    "pretraining?": {
        **{f"{key}?": COST for key in ("seconds", "flops", "words")},
        "updates?": COUNT,
        "runs?": (dict, list),
    },
}
# Keys of results.json that are needed to resume a run and to start from it.
_NEEDED = ("status", "updates", "max_update", "seconds", "flops", "stopped_by", "pretraining")


class RunFolder:
    """Opens or continues a run folder; raises UsageError if it holds a different run.

    The options of the parts in `reset` may differ. A resumed run calls `write_config` after loading
    its checkpoint, so that a mistake leaves the folder unchanged.
    """

    def __init__(self, config: RunConfig, reset: Collection[str] = ()) -> None:
        if not config.save_dir.isprintable():
            raise UsageError(f"--save-dir {config.save_dir!r}: a character of it cannot be printed")
        self.path = Path(config.save_dir)
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"--save-dir {self.path} is a file; name a folder")
        self.path.mkdir(parents=True, exist_ok=True)
        for name in ("command.txt", "log.jsonl"):
            check_regular(self.path / name)
        for name in ("checkpoints", "tb", "wandb"):
            check_folder(self.path / name)
        self._log = Journal(self.path / "log.jsonl", sync=False)
        self._waiting: list[dict[str, Any]] = []
        self._written: dict[str, Any] = {}  # content of config.yaml
        commands = self._held = _open_locked(self.path / "command.txt")
        for name in ("config.yaml", _SOURCES_FILE, "log.jsonl", "results.json"):
            remove_leftovers(self.path / name)
        file = self.path / "config.yaml"
        if file.exists():
            try:
                check_same(read_config(file), config, self.path, reset)
            except UsageError:
                if has_started(self.path):
                    raise
                # Nothing was trained: another config may take the folder.
                (self.path / "log.jsonl").unlink(missing_ok=True)
        if not file.exists() or not has_started(self.path):
            self.write_config(config)
        sources = options_with("source", config)
        if sources.keys() - _common_sources().keys():
            write_atomic(self.path / _SOURCES_FILE, (json.dumps(sources) + "\n").encode())
        commands.write(masked(sys.argv) + "\n")
        commands.flush()

    def write_config(self, config: RunConfig) -> None:
        """Write config.yaml in one piece, without secrets."""
        values = mask_options(as_dict(config))
        if values == self._written:
            return
        options = OmegaConf.create(values)
        write_atomic(self.path / "config.yaml", OmegaConf.to_yaml(options).encode())
        self._written = values

    def log(self, kind: str, update: int, seconds: float, values: dict[str, Any]) -> None:
        """Append one line to log.jsonl; if the disk is full, lines wait until there is room."""
        texts = {key: mask_text(value) for key, value in values.items() if isinstance(value, str)}
        line = {"kind": kind, "update": update, "seconds": round(seconds, 3), **values, **texts}
        self._waiting.append(line)
        require_folder(self.path)
        try:
            self._log.write(self._waiting)
            self._waiting.clear()
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            if len(self._waiting) == 1:
                say(f"{self._log.path}: {error.strerror}; lines wait until there is room")

    def cut_log(self, update: int) -> None:
        """Drop values after an update, which a killed process logged: they will be logged again."""
        path = self.path / "log.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        remaining = [line for line in lines if not _is_later(line, update)]
        if len(remaining) < len(lines):
            write_atomic(path, b"".join(remaining))

    def write_results(self, results: dict[str, Any]) -> None:
        """Write results.json in one piece, with the checksums for `altered_files`."""
        files = {}
        for name in ("config.yaml", "log.jsonl"):
            if (file := self.path / name).is_file() and (content := file.read_bytes()):
                files[name] = [len(content), checksum(content)]
        results = {**results, "message": mask_text(results.get("message") or ""), "files": files}
        write_record(self.path / "results.json", results, indent=1)

    def is_finished(self) -> bool:
        """Return whether results.json says that the run is finished."""
        try:
            return (read_results(self.path) or {}).get("status") == "finished"
        except MetaseqError:  # damaged
            return False


def _is_later(line: bytes, update: int) -> bool:
    try:
        row = json.loads(line)
        return row["kind"] in ("train", "valid") and row["update"] > update
    except (ValueError, LookupError, TypeError, RecursionError):  # damaged; reports say so
        return False


def has_started(folder: Path) -> bool:
    """Return whether a run folder has a checkpoint or logged values."""
    if any((folder / "checkpoints").glob("update_*")):
        return True
    log = folder / "log.jsonl"
    if not log.is_file():
        return False
    with open(log, errors="replace") as lines:
        return any(line.startswith(('{"kind": "train"', '{"kind": "valid"')) for line in lines)


def _open_locked(path: Path) -> IO[str]:
    """Open a file of a run folder for appending, locked until this process ends.

    Raises MetaseqError if another process, which trains the run, holds the lock.
    """
    # The file stays open, and so locked.
    file = open(path, "a", encoding="utf-8", opener=without_link)  # noqa: SIM115
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise MetaseqError(
            f"{path.parent}: another process trains this run; wait for it, or choose another "
            "--save-dir"
        ) from None
    except OSError:  # a file system without locks
        pass
    return file


def read_config(file: Path) -> dict[str, Any]:
    """Return the plain, unresolved values of a config.yaml; MetaseqError if no run wrote it."""
    try:
        config = read_yaml(file)
        if not isinstance(config, dict):
            raise ValueError("not a mapping of keys to values")
    except (ValueError, OSError) as error:
        raise MetaseqError(f"{file}: not a readable config: {error}") from error
    current: dict[str, Any] = with_current_names(config)
    return current


def _common_sources() -> dict[str, str]:
    """Return the options of every run that name another run; see `read_sources`."""
    return {
        item.name: item.metadata["source"]
        for item in fields(RunConfig)
        if "source" in item.metadata
    }


def read_sources(folder: Path) -> dict[str, str]:
    """Return the options of a run that name other runs, with the names of these runs in reports.

    Such an option is declared by `option(..., source="pretraining")`. The run folder lists such
    options of tasks and models, so that a reader does not need their code. Raises MetaseqError if
    that list is damaged.
    """
    file = folder / _SOURCES_FILE
    if not file.is_file():
        return _common_sources()
    try:
        sources = read_json(file)
        texts = [*sources.keys(), *sources.values()]
        if not all(isinstance(text, str) and NAME.fullmatch(text) for text in texts):
            raise ValueError("not a table of names")
    except ValueError as error:
        raise MetaseqError(
            f"{file} is damaged ({error}); start the run again, it writes it anew"
        ) from error
    return _common_sources() | sources


def read_results(path: Path) -> dict[str, Any] | None:
    """Return the results.json of a run folder, or None; MetaseqError if it is damaged."""
    file = path / "results.json"
    if not file.is_file():
        return None
    try:
        results = parse_results(file)
        missing = [key for key in _NEEDED if key not in results]
        if missing:
            raise ValueError(f"it has no {missing[0]}")
        if "runs" not in (results["pretraining"] or {"runs": {}}):
            raise ValueError("its pretraining has no runs")
    except ValueError as error:
        raise MetaseqError(
            f"{file} is damaged ({error}); delete it, the run then writes it anew"
        ) from error
    return results


def parse_results(file: Path) -> dict[str, Any]:
    """Return a results.json without its checksums; ValueError if it deviates from RESULTS."""
    content = read_json(file)
    texts = {"message": content["message"]} if "message" in content else {}
    results: dict[str, Any] = as_numbers(content, 21) | texts
    for key in ("files", "checksum"):
        results.pop(key, None)
    if problem := schema_error(results, RESULTS):
        raise ValueError(problem)
    return results


def altered_files(folder: Path) -> list[str]:
    """Return the files of a run that changed after its results were written; a log may have grown.

    Results without a checksum count as changed, although the first version wrote none.
    """
    try:
        results = read_json(folder / "results.json")
    except (OSError, ValueError):
        return []
    altered = ["results.json"] if is_altered(results) else []
    recorded = results.get("files")
    recorded = recorded if isinstance(recorded, dict) else {}
    for name in ("config.yaml", "log.jsonl"):
        if name in recorded:
            try:
                content = read_bounded(folder / name, LARGEST_LOG)
                size, expected = recorded[name]
                same = checksum(content[:size] if name == "log.jsonl" else content) == expected
            except (OSError, ValueError, TypeError):
                same = False
            altered += [name] * (not same)
    return altered


def stored_overrides(folder: Path) -> list[str]:
    """Return the configuration of the run in a folder as key=value; [] if there is none.

    Options that follow trainer.max_update are left out, so that they follow a new number, and so
    are masked values, see `check_hidden`.
    """
    file = folder / "config.yaml"
    if not file.is_file():
        return []
    stored = read_config(file)
    values = flatten(stored)
    names = {group: values.get(f"{group}._name") for group in GROUPS}
    if missing := [group for group, name in names.items() if name is None]:
        raise MetaseqError(f"{file}: not a readable config: it has no {missing[0]}")
    following = _following_options(names, "trainer.max_update")
    follows = {key for key in following if values.get(key) == values.get("trainer.max_update")}
    skipped = {"save_dir", "user_dir", *follows, *(f"{group}._name" for group in GROUPS)}
    return [f"{group}={name}" for group, name in names.items()] + [
        f"{key}={quote_path(value) if isinstance(value, str) else format_value(value)}"
        for key, value in values.items()
        if key not in skipped and (key == "label" or MASK not in str(value))
    ]


def check_hidden(file: Path, config: Any, overrides: Collection[str] = ()) -> None:
    """Raise UsageError for an option stored without its value unless an override gives it."""
    keys = {override.partition("=")[0] for override in overrides}
    # A label only names the run in reports, and is not needed.
    if missing := [key for key in hidden_options(config) if key not in {*keys, "label"}]:
        raise UsageError(
            f"{file}: the value of {missing[0]}, which is a secret or holds one, was not stored; "
            f"give it: {missing[0]}=..."
        )


def changed_options(old: Any, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the options in which the configs of two runs differ, with both values.

    An option that did not exist when the old config was written counts as its default. `movable`
    options, and options of the engine, are not compared.
    """
    before, after = (flatten(mask_options(values)) for values in (old, as_dict(new)))
    names = {group: getattr(new, group)._name for group in GROUPS}
    before |= {key: _default_of(names, key) for key in after.keys() - before.keys()}
    before, after = map(with_text_entries, (before, after))
    movable = options_with("movable", new)
    return {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
        and key not in movable
        and not key.startswith("engine.")
    }


def with_text_entries(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat configuration with entries as texts, however they were written."""
    texts = dict(values)
    for key in ("task.objectives", "trainer.final_suites"):
        if values.get(key):
            texts[key] = list(map(as_text, values[key]))
    return texts


def check_same(old: Any, new: RunConfig, path: Path, reset: Collection[str]) -> None:
    """Raise UsageError naming options in which two runs differ, except for parts in `reset`."""
    names = {f"{group}._name": getattr(new, group)._name for group in GROUPS}
    changes = {
        key: values
        for key, values in changed_options(old, new).items()
        if not key.startswith(_FREE) and _reset_parts(key, names).isdisjoint(reset)
    }
    if not changes:
        return
    differences = [f"{k} is {a!r} there, {b!r} here" for k, (a, b) in [*changes.items()][:5]]
    parts = [_reset_parts(key, names).intersection(RESETS) for key in changes]
    remedy = "choose another --save-dir, or the same options to resume it"
    if all(parts):
        added = {*reset, *(min(fitting, key=RESETS.index) for fitting in parts)}
        ordered = ",".join(part for part in RESETS if part in added)
        remedy = f"to go on with these options add --reset {ordered}, else {remedy}"
    raise UsageError(
        f"{path} holds another run ({'; '.join(differences)}); {remedy}. A new run that starts "
        f"from its weights is init_from={path}"
    )


def _reset_parts(key: str, names: Mapping[str, Any]) -> set[str]:
    """Return the parts of RESETS with which an option of the classes in `names` may change."""
    item = declaration(key, names)
    declared = {item.metadata["reset"]} if item and "reset" in item.metadata else set()
    return declared | ({key.partition(".")[0]} & {"schedule", "optimizer"})


def _default_of(names: Mapping[str, Any], key: str) -> Any:
    """Return a key's default from the class that `names` gives its group; None for other keys."""
    group, _, name = key.partition(".")
    if group not in names or names[group] not in ALL[group].entries:
        return None
    return getattr(ALL[group].entry(names[group]).dataclass(), name, None)


def _following_options(names: Mapping[str, Any], key: str) -> list[str]:
    """Return the options of the classes in `names`, by group, that follow the option `key`."""
    following = []
    for group, name in names.items():
        known = fields(ALL[group].entry(name).dataclass) if name in ALL[group].entries else ()
        for item in known:
            if item.metadata.get("follows") == key:
                following.append(f"{group}.{item.name}")
    return following


def code_hash(user_dir: str | None) -> str:
    """Return a short hash of the source of this package and of the plug-in in use.

    Presets and defaults in YAML count as source.
    """
    digest = package_digest().copy()
    if user_dir:
        add_source(digest, Path(user_dir))
    return digest.hexdigest()[:16]


@cache
def package_digest() -> hashlib._Hash:
    """Return a digest of this package's source at the first call.

    Later edits do not count, because a running process does not run them.
    """
    digest = hashlib.sha256()
    add_source(digest, Path(__file__).parents[1])
    return digest


def add_source(digest: hashlib._Hash, root: Path) -> None:
    """Add names and contents of Python files and configs of a folder, or one file, to a digest."""
    files = [root] if root.is_file() else sorted(root.rglob("*.py"))
    for file in [*files, *sorted(root.glob("config/**/*.yaml"))]:
        digest.update(file.name.encode() + file.read_bytes())
