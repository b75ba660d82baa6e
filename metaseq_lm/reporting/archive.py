"""Archives: the runs of a table in one file, readable without the run folders.

An archive is JSON lines. The first line holds the format, the number of runs (some archives lack
it), the most frequent value of each config key, and the metrics that are means of others. Every
other line is a run: its name, the config values (and means) that differ, its results, its
validation log, the results of suites, and, if any, the plan of its league and the record of its
tuning. An archive is compressed if its name ends in .gz.
`metaseq-lm report` reads archives and run folders alike, so that seeds can be added later.
"""

import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import MetaseqError, UsageError, say
from metaseq_lm.core.files import (
    COUNT,
    FOLDER,
    LARGEST_LOG,
    as_numbers,
    checksum,
    is_altered,
    read_bounded,
    schema_error,
    to_json,
    with_checksum,
    write_atomic,
)
from metaseq_lm.core.output import count_text
from metaseq_lm.reporting.runs import MEANS, Run, check_values, log_problem, with_numbers
from metaseq_lm.runs import suite_results
from metaseq_lm.runs.folder import RESULTS
from metaseq_lm.runs.records import HASH, TRIAL_FORM, TUNING_FORM

KIND = "metaseq-lm runs "
_PACKED = ".gz"
FORMAT = f"{KIND}1"
_HEADER = {"runs?": COUNT, "values": dict, "means?": MEANS, "about?": {"*": str}}
_ROW = {
    "name": FOLDER,
    "values": dict,
    "absent": [str, ...],
    "results": (dict, type(None)),
    "log": list,
    "notes": [str, ...],
    "state?": str,
    "plan?": HASH,
    "means?": MEANS,
    "suites?": list,
    "tuning?": TUNING_FORM,
    "trial?": TRIAL_FORM,
}
_RESTORE_HINT = "Restore the file from an intact copy, or delete it and write it again."


def write(path: Path, runs: Sequence[Run], about: Mapping[str, str] | None = None) -> None:
    """Write the archive of `runs` atomically, with facts `about` them.

    Raises UsageError if `path` is not a file, or if it is an archive with runs that are not in
    `runs` and would be lost.
    """
    if not path.name or (path.exists() and not path.is_file()):
        raise UsageError(f"--archive '{path}': name a file, such as runs.jsonl")
    if path.exists():
        names, fingerprints = set(map(_name_of, runs)), {run.fingerprint for run in runs}
        others = [_name_of(run) for run in read(path) if run.fingerprint not in fingerprints]
        if missing := [name for name in others if name not in names]:
            raise UsageError(
                f"--archive {path}: has {count_text(len(missing), 'run')} that this "
                f"table lacks, such as {missing[0]}. Include that archive in RUNS, or write to "
                "another file."
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    common = _common_values([run.portable_values for run in runs])
    means = _common_values([{"means": dict(run.means)} for run in runs]).get("means") or {}
    lines = [to_json(_archived_line(run, common, means)) + "\n" for run in runs]
    rows = "".join(lines).encode()
    first = {"format": FORMAT, "runs": len(runs), "values": common, "rows": checksum(rows)}
    first |= {key: dict(x) for key, x in (("means", means), ("about", about)) if x}
    content = (to_json(with_checksum(first)) + "\n").encode() + rows
    if path.suffix == _PACKED:
        # Without a time in it, the same runs make the same bytes.
        content = gzip.compress(content, mtime=0)
    write_atomic(path, content)


def _common_values(configs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    counts: dict[str, Counter[str]] = {}
    for config in configs:
        for key, value in config.items():
            counts.setdefault(key, Counter())[json.dumps(value)] += 1
    return {key: json.loads(count.most_common(1)[0][0]) for key, count in counts.items()}


def _archived_line(run: Run, common: dict[str, Any], means: dict[str, Any]) -> dict[str, Any]:
    """Return the archive line of a run; values of `common` and equal `means` are left out."""
    config = run.portable_values
    line = {
        "name": _name_of(run),
        "values": {k: x for k, x in config.items() if json.dumps(x) != json.dumps(common[k])},
        "absent": [key for key in common if key not in config],
        "results": run.portable_results,
        "log": run.portable_log,
        "notes": list(run.notes),
    }
    line |= {key: value for key in ("state", "plan") if (value := getattr(run, key))}
    if run.means != means:
        line["means"] = dict(run.means)
    line |= {key: dict(value) for key in ("tuning", "trial") if (value := getattr(run, key))}
    if run.suites:
        line["suites"] = [results.record() for results in run.suites]
    return line


def _name_of(run: Run) -> str:
    """Return the name of a run in an archive; a run read from an archive keeps its name."""
    for parent in run.path.parents:
        if parent.is_file():
            return str(run.path.relative_to(parent))
    name = Path(run.name)
    return "/".join(name.parts[-3:]) if name.is_absolute() else run.name


def read(path: Path, report: Callable[[str], None] = say) -> list[Run]:
    """Return the runs of an archive, or of several concatenated ones; none if it says so.

    `report` is called with a sentence for each archive that was changed after it was written.

    Raises UsageError if the file is not an archive, and MetaseqError if it is of another version,
    incomplete, or has a damaged line.
    """
    runs: list[Run] = []
    # The number of the line of each header, the header, and the rows after it.
    archives: list[tuple[int, dict[str, Any], list[bytes]]] = []
    place = path.resolve()
    try:
        rows = _read_content(path).splitlines() or [b""]
    except ValueError as error:
        raise UsageError(f"{path}: not an archive of runs: {error}") from error
    for number, row in enumerate(rows, start=1):
        try:
            line = json.loads(row)
            if "format" in line:
                archives.append((number, _checked_header(f"{path}:{number}", line), []))
            else:
                _, header, following = archives[-1]
                following.append(row + b"\n")
                runs.append(_parse_run(place, line, header))
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
            if not archives:
                raise UsageError(
                    f"{path}: not an archive of runs. Give run folders, folders of runs, or a file "
                    "that 'metaseq-lm report RUNS --archive FILE' wrote."
                ) from error
            raise MetaseqError(
                f"{path}:{number}: not a run of an archive ({error}): {row[:60]!r}. {_RESTORE_HINT}"
            ) from error
    for number, header, following in archives:
        if header.get("runs") not in (None, len(following)):
            raise MetaseqError(
                f"{path}: damaged: its runs are {len(following)}, and were {header['runs']} when "
                f"it was written. {_RESTORE_HINT}"
            )
        if is_altered(header) or header.get("rows") != checksum(b"".join(following)):
            lacking = {"checksum", "rows"} - header.keys()
            report(
                f"{path}:{number}: warning: the archive that starts here was changed after it was "
                f"written{', or lacks its checksums from the start' * bool(lacking)}"
            )
    if not runs and any(header.get("runs") != 0 for _, header, _ in archives):
        raise MetaseqError(f"{path}: the archive has no runs. {_RESTORE_HINT}")
    return runs


def read_about(path: Path) -> dict[str, str]:
    """Return the facts about the runs of an archive, taken from the first header.

    Raises UsageError if the file is not an archive.
    """
    try:
        first = json.loads(_read_content(path).partition(b"\n")[0])
        if problem := schema_error(first, _HEADER):
            raise ValueError(problem)
        return dict(first.get("about") or {})
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not an archive of runs: {error}") from error


def read_fact(path: Path, about: Mapping[str, str], key: str, form: Any, default: str) -> Any:
    """Return a fact of an archive at `path` that is stored as JSON; MetaseqError if it is damaged.

    `default` is the JSON for an archive that lacks the fact; `form` is a form of `schema_error`.
    """
    try:
        value = json.loads(about.get(key, default))
        problem = schema_error(value, form, key)
    except (ValueError, RecursionError) as error:
        problem = f"{key} is not readable as JSON: {error}"
    if problem:
        raise MetaseqError(f"{path}: damaged ({problem}). {_RESTORE_HINT}")
    return value


def _read_content(path: Path) -> bytes:
    """Return the lines of an archive, unpacked; ValueError if they are too large or damaged."""
    content = read_bounded(path, LARGEST_LOG)
    if path.suffix != _PACKED:
        return content
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            content = file.read(LARGEST_LOG + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(str(error)) from error
    if len(content) > LARGEST_LOG:
        raise ValueError(f"more than {LARGEST_LOG:,} bytes when unpacked")
    return content


def _checked_header(position: str, line: dict[str, Any]) -> dict[str, Any]:
    """Return the header `line` at `position`; ValueError or, for another version, MetaseqError."""
    if line["format"] != FORMAT:
        if not str(line["format"]).startswith(KIND):
            raise ValueError(f"format {line['format']}")
        raise MetaseqError(
            f"{position}: an archive of another version: '{line['format']}', not '{FORMAT}'. Read "
            "it with the metaseq-lm that wrote it, or write it anew: "
            "metaseq-lm report RUNS --archive FILE"
        )
    if problem := schema_error(line, _HEADER):
        raise MetaseqError(f"{position}: damaged ({problem}). {_RESTORE_HINT}")
    return line


def _parse_run(path: Path, line: dict[str, Any], header: dict[str, Any]) -> Run:
    if problem := schema_error(line, _ROW):
        raise ValueError(problem)
    values = {**header["values"], **line["values"]}
    for key in line["absent"]:
        values.pop(key, None)
    if not isinstance(values.get("label"), str) or dict in map(type, values.values()):
        raise ValueError("invalid config values")
    check_values(values)
    results = line["results"] and {k: as_numbers(v) for k, v in line["results"].items()}
    if problem := schema_error(results or {}, RESULTS):
        raise ValueError(problem)
    if any(map(log_problem, line["log"])):
        raise ValueError("invalid log line")
    suites = (suite_results.parse(as_numbers(record)) for record in line.get("suites") or ())
    means = header.get("means") if line.get("means") is None else line["means"]
    return Run(
        path / line["name"],
        values,
        with_numbers(line["log"]),
        results,
        tuple(line["notes"]),
        state=line.get("state") or "",
        suites=tuple(suites),
        means=means or {},
        plan=line.get("plan") or "",
        tuning=dict(line.get("tuning") or {}),
        trial=dict(line.get("trial") or {}),
    )
