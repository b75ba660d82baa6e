"""Archives: the runs of a table in one file, without their folders.

An archive is JSON lines. The first holds the format, the number of runs (some archives lack it) and
the config keys with the value that most runs have. Every other line is a run: its name, the config
values that differ, its results, its validation log, and the results of suites if it has any. `metaseq-lm report` reads archives like
folders, and beside them, so that seeds can be added later.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import MetaseqError, UsageError, say
from metaseq_lm.core.files import (
    LARGEST_LOG,
    as_numbers,
    checksum,
    is_altered,
    read_bounded,
    to_json,
    with_checksum,
    write_atomic,
)
from metaseq_lm.reporting.runs import PATH_KEYS, Run, bare_key, check_results, is_log_line
from metaseq_lm.runs import suite_results

KIND = "metaseq-lm runs "
FORMAT = f"{KIND}1"
WHOLE_FILE = "Take the file from where it is whole, or delete it and write it anew."
# Kinds of log lines of which all are stored, and of which only the last one is.
ALL_LINES, LAST_LINES = ("valid",), ("train", "samples")


def write(path: Path, runs: Sequence[Run]) -> None:
    """Write the archive of `runs` atomically.

    Raises UsageError for a place that cannot be one, or an archive with runs that are not in `runs`.
    """
    if not path.name or (path.exists() and not path.is_file()):
        raise UsageError(f"--archive '{path}': name a file, such as runs.jsonl")
    if path.exists():
        check_complete(path, runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    configs = [portable(run) for run in runs]
    usual = {}
    for key in dict.fromkeys(key for config in configs for key in config):
        counts = Counter(json.dumps(config[key]) for config in configs if key in config)
        usual[key] = json.loads(counts.most_common(1)[0][0])
    lines: list[dict[str, Any]] = []
    for run, config in zip(runs, configs):
        values = {k: v for k, v in config.items() if json.dumps(v) != json.dumps(usual[k])}
        lines.append(
            {
                "name": name_of(run),
                "values": values,
                "absent": [key for key in usual if key not in config],
                "results": results_of(run),
                "log": stored_lines(run.log),
                "notes": list(run.notes),
                **({"state": run.state} if run.state else {}),
                **({"suites": [one.record() for one in run.suites]} if run.suites else {}),
            }
        )
    rows = "".join(to_json(line) + "\n" for line in lines).encode()
    first = {"format": FORMAT, "runs": len(runs), "values": usual, "rows": checksum(rows)}
    write_atomic(path, (to_json(with_checksum(first)) + "\n").encode() + rows)


def check_complete(path: Path, runs: Sequence[Run]) -> None:
    """Raise UsageError if an archive that is there has runs that would be lost."""
    names, contents = {name_of(run) for run in runs}, {identity(run) for run in runs}
    lost = [r for r in read(path) if name_of(r) not in names and identity(r) not in contents]
    if lost:
        raise UsageError(
            f"--archive {path}: has {len(lost)} run{'s' * (len(lost) > 1)} that this table lacks, such as "
            f"{name_of(lost[0])}. Give it among the runs, or write another file."
        )


def identity(run: Run) -> str:
    """Return a text that a run and its copies in archives have in common."""
    values = {key: value for key, value in portable(run).items() if bare_key(key) != "data"}
    outcome = results_of(run) or stored_lines(run.log)
    return json.dumps([values, outcome], sort_keys=True)


def name_of(run: Run) -> str:
    """Return the name of a run in an archive; one that comes from an archive keeps its name."""
    for above in run.path.parents:
        if above.is_file():
            return str(run.path.relative_to(above))
    return "/".join(Path(run.name).parts[-3:]) if Path(run.name).is_absolute() else run.name


def portable(run: Run) -> dict[str, Any]:
    """Return a run's config without paths of the machine that trained it."""
    config = {}
    for key, value in run.values.items():
        bare = bare_key(key)
        if key not in run.sources and bare not in PATH_KEYS:
            is_absolute = bare == "data" and value and Path(value).is_absolute()
            config[key] = Path(value).name if is_absolute else value
    return config


def results_of(run: Run) -> dict[str, Any] | None:
    """Return the results of a run; of its ancestors the total cost, not their paths."""
    if not run.results or not run.results.get("pretraining"):
        return run.results
    before = {k: v for k, v in run.results["pretraining"].items() if k not in ("run", "runs")}
    return {**run.results, "pretraining": before}


def stored_lines(log: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the validations of a log, the last line of training and the last samples."""
    last = {line["kind"]: line for line in log if line["kind"] in LAST_LINES}
    return [line for line in log if line["kind"] in ALL_LINES or line is last.get(line["kind"])]


def read(path: Path) -> list[Run]:
    """Return the runs of an archive, or of several one after another.

    Raises UsageError for a file of another kind, MetaseqError for one of another version, one that
    lacks runs, or one with a damaged line, which it names.
    """
    runs: list[Run] = []
    usual: dict[str, Any] = {}
    expected: int | None = 0  # number of runs before the next first line, or the end
    # The first line of each archive, by its number, and the rows behind it.
    archives: dict[int, tuple[dict[str, Any], list[bytes]]] = {}
    behind: list[bytes] = []
    try:
        rows = read_bounded(path, LARGEST_LOG).splitlines() or [b""]
    except ValueError as error:
        raise UsageError(f"{path}: not an archive of runs: {error}") from error
    for number, row in enumerate(rows, start=1):
        try:
            line = json.loads(row)
            if "format" in line:
                check_count(path, len(runs), expected)
                usual = usual_values(f"{path}:{number}", line)
                expected = len(runs) + line["runs"] if "runs" in line else None
                behind = []
                archives[number] = line, behind
            else:
                behind.append(row + b"\n")
                runs.append(parse_run(path.resolve(), line, usual))
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
            if not archives:
                raise UsageError(
                    f"{path}: not an archive of runs. Give run folders, folders of runs, or a file "
                    "that 'metaseq-lm report RUNS --archive FILE' wrote."
                ) from error
            raise MetaseqError(
                f"{path}:{number}: not a run of an archive: {row[:60]!r}. {WHOLE_FILE}"
            ) from error
    check_count(path, len(runs), expected)
    for number, (first, behind) in archives.items():
        digest = checksum(b"".join(behind)) if "rows" in first else None
        if is_altered(first) or first.get("rows") != digest:
            say(f"{path}:{number}: warning: the archive from here was changed after it was written")
    if not runs:
        raise MetaseqError(f"{path}: an archive that holds no runs. {WHOLE_FILE}")
    return runs


def check_count(path: Path, count: int, expected: int | None) -> None:
    """Raise MetaseqError unless the number of runs is the `expected` one, if that is known."""
    if expected is not None and count != expected:
        raise MetaseqError(
            f"{path}: damaged: its runs are {count}, and were {expected} when it was written. "
            f"{WHOLE_FILE}"
        )


def usual_values(place: str, line: dict[str, Any]) -> dict[str, Any]:
    """Return the config values that a first line holds; ValueError for another kind of file.

    Raises MetaseqError naming the `place` for another version.
    """
    if line["format"] != FORMAT and str(line["format"]).startswith(KIND):
        raise MetaseqError(
            f"{place}: an archive of another version: '{line['format']}', not '{FORMAT}'. Read it "
            "with the metaseq-lm that wrote it, or write it anew: metaseq-lm report RUNS --archive FILE"
        )
    if line["format"] != FORMAT:
        raise ValueError(f"format {line['format']}")
    return dict(line["values"])


def parse_run(path: Path, line: dict[str, Any], usual: dict[str, Any]) -> Run:
    """Return the run of a line; raises LookupError, TypeError or ValueError for another form."""
    absent = set(line["absent"])
    values = {key: v for key, v in {**usual, **line["values"]}.items() if key not in absent}
    if not isinstance(values.get("label"), str) or dict in map(type, values.values()):
        raise ValueError("values that no config has")
    results = line["results"] and {k: as_numbers(v) for k, v in line["results"].items()}
    check_results(results or {})
    log = list(line["log"])
    if not all(map(is_log_line, log)):
        raise ValueError("a line that no log has")
    log = [row if row["kind"] in LAST_LINES[1:] else as_numbers(row) for row in log]
    notes, state = tuple(line["notes"]), str(line.get("state", ""))
    suites = tuple(suite_results.parse(as_numbers(record)) for record in line.get("suites", ()))
    return Run(path / str(line["name"]), values, log, results, notes, state=state, suites=suites)
