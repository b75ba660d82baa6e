"""The runs of a table in one file, to keep and to share without their folders.

An archive is JSON lines. The first names the format, and the config keys with those values that all
runs share; every other line is a run: its name, the rest of its config, its results, its validation log.
`metaseq-lm report` reads it like a folder, beside folders too, so that seeds can be added later.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metaseq_lm.errors import MetaseqError, UsageError
from metaseq_lm.files import write_atomic
from metaseq_lm.reporting.runs import BEHIND, PATH_KEYS, Run, check_results

FORMAT = "metaseq-lm runs 1"
# What a report draws after training; the losses of training are many times as long.
KEPT_KINDS = ("valid",)


def write(path: Path, runs: Sequence[Run]) -> None:
    """Write the archive of `runs` in one piece."""
    values = [{k: v for k, v in run.values.items() if not is_place(k)} for run in runs]
    keys = list(dict.fromkeys(key for own in values for key in own))
    shared = {
        key: value
        for key, value in values[0].items()
        if all(key in other and same(other[key], value) for other in values)
    }
    lines: list[dict[str, Any]] = [{"format": FORMAT, "keys": keys, "values": shared}]
    for run, own in zip(runs, values):
        lines.append(
            {
                "name": name_of(run),
                "values": {key: value for key, value in own.items() if key not in shared},
                "results": run.results,
                "log": [line for line in run.log if line["kind"] in KEPT_KINDS],
                "notes": list(run.notes),
            }
        )
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def name_of(run: Run) -> str:
    """Return the name of a run below the archive: as it was before if it comes from one."""
    for above in run.path.parents:
        if above.is_file():
            return str(run.path.relative_to(above))
    return run.name.lstrip("/")


def is_place(key: str) -> bool:
    """Return whether a key says where something was on the machine that trained."""
    prefixes = [f"{prefix}." for prefix in BEHIND.values()]
    while any(key.startswith(prefix) for prefix in prefixes):
        key = key.partition(".")[2]
    return key in PATH_KEYS


def same(a: Any, b: Any) -> bool:
    """Return whether two values are written alike: 1 is not true."""
    return json.dumps(a) == json.dumps(b)


def read(path: Path) -> list[Run]:
    """Return the runs of an archive.

    Raises UsageError for a file of another kind, MetaseqError naming the line that is damaged.
    """
    lines = path.read_bytes().splitlines()
    try:
        head = json.loads(lines[0])
        if head["format"] != FORMAT:
            raise ValueError("another format")
        keys, shared = list(head["keys"]), dict(head["values"])
    except (LookupError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{path}: not an archive of runs. Give run folders, folders of runs, or a file that "
            "'metaseq-lm report RUNS --archive FILE' wrote."
        ) from error
    runs = []
    for number, row in enumerate(lines[1:], start=2):
        try:
            line = json.loads(row)
            known = {**shared, **line["values"]}
            values = {key: known[key] for key in keys if key in known}
            check_results(line["results"] or {})
            log = [entry for entry in line["log"] if entry["kind"] in KEPT_KINDS]
            place = path.resolve() / str(line["name"])
            runs.append(Run(place, values, log, line["results"], tuple(line["notes"])))
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise MetaseqError(
                f"{path}:{number}: not a run of an archive: {row[:60]!r}. Delete that line, or "
                "write the archive anew."
            ) from error
    return runs
