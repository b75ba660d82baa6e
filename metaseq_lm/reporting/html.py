"""One self-contained html page of a whole report, and the page of samples."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from metaseq_lm.core.output import clean, seconds_text
from metaseq_lm.reporting.formats import numeric_columns
from metaseq_lm.reporting.numbers import Metric, flops_text
from metaseq_lm.reporting.settings import Setting, show
from metaseq_lm.reporting.table import Cell, Table

TEMPLATE = Path(__file__).with_name("report.html")
# Columns of the table of runs, and which of them are aligned right.
RUN_COLUMNS = {
    "setting": False,
    "seed": True,
    "status": False,
    "score": True,
    "updates": True,
    "FLOPs": True,
    "time": True,
    "data": False,
    "code": False,
    "folder": False,
}


class HtmlTable(NamedTuple):
    """A table of the page; `right` says which columns are aligned right."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    right: Sequence[bool]


def to_html(
    table: Table,
    settings: Sequence[Setting],
    metric: Metric,
    pictures: Sequence[Path] = (),
    notes: Sequence[str] = (),
    samples: Sequence[tuple[str, str]] = (),
) -> str:
    """Return the page: table, pictures (png files) with their notes, samples, settings and runs."""
    has_hidden = any(len(setting.values) > len(setting.shown) for setting in settings)
    details = {"What else the settings differ in": difference_table(settings)} if has_hidden else {}
    details["Runs"] = run_table(settings, metric)
    return render_page(table, pictures, notes, samples=samples, details=details)


def render_page(
    table: Table,
    pictures: Sequence[Path] = (),
    notes: Sequence[str] = (),
    *,
    samples: Sequence[tuple[str, str]] = (),
    tables: Sequence[Table] = (),
    details: Mapping[str, HtmlTable] | None = None,
) -> str:
    """Return a page: table, more `tables`, pictures with their notes, samples, small tables.

    `details` are the small tables by their headings. The template escapes every text. Pictures are
    embedded.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True,
        finalize=without_control_characters,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=table.title,
        tables=[
            (part, HtmlTable(part.head, part.rows, numeric_columns(part)), has_best(part))
            for part in (table, *tables)
        ],
        pictures=[(path.stem.replace("_", " "), encoded(path)) for path in pictures],
        picture_notes=notes,
        samples=[(name, content.splitlines()) for name, content in samples],
        details=details or {},
    )


def has_best(table: Table) -> bool:
    """Return whether any cell of a table is marked as the best."""
    return any(cell.best for row in table.rows for cell in row)


def without_control_characters(value: Any) -> Any:
    """Return what the template prints; markup of its macros keeps its line ends."""
    return clean(value) if type(value) is str else value


def encoded(picture: Path) -> str:
    """Return the content of a file in base64."""
    return base64.b64encode(picture.read_bytes()).decode("ascii")


def difference_table(settings: Sequence[Setting]) -> HtmlTable:
    """Return a table of the config values of each setting that its name does not show."""
    rows = []
    for setting in settings:
        words = []
        for key, value in setting.values.items():
            if key not in setting.shown and value is not None:
                words.append(f"{key}={show(value)}")
        rows.append([Cell(setting.name), Cell(", ".join(words))])
    return HtmlTable(["setting", "config"], rows, [False, False])


def run_table(settings: Sequence[Setting], metric: Metric) -> HtmlTable:
    """Return every run with its seed, score, how it ended, cost, hashes and folder."""
    rows = []
    for setting in settings:
        for run in setting.runs:
            results = run.results or {}
            score = run.metrics.get(metric.name)
            texts = [
                setting.name,
                show(run.seed),
                run.why_unscored(metric.name) or run.status,
                "-" if score is None else metric.text(score),
                str(results.get("updates", run.last_update)),
                flops_text(run.costs["own_flops"]),
                seconds_text(run.costs["own_seconds"]),
                str(results.get("data", "-")),
                str(results.get("code", "-")),
                run.name,
            ]
            rows.append([Cell(text) for text in texts])
    head = [metric.title if title == "score" else title for title in RUN_COLUMNS]
    return HtmlTable(head, rows, list(RUN_COLUMNS.values()))


# ---------------------------------------------------------------- samples


def samples_of(settings: Sequence[Setting]) -> list[tuple[str, str]]:
    """Return (heading, text) for each setting: the last samples of its first run with any."""
    pages = []
    for setting in settings:
        for run in setting.runs:
            update, texts = run.samples
            if texts:
                heading = f"{setting.name} (seed {run.seed}, update {update})"
                pages.append((heading, "\n\n".join(texts)))
                break
    return pages


def samples_markdown(samples: Sequence[tuple[str, str]]) -> str:
    """Return a page of samples, indented so that nothing in them is taken for Markdown."""
    parts = ["# Samples that the runs logged"]
    for heading, text in samples:
        parts.append(f"## {clean(heading)}")
        # splitlines knows more line breaks than "\n", and each would end the block.
        parts.append("\n".join(f"    {clean(line)}".rstrip() for line in text.splitlines()))
    return "\n\n".join(parts) + "\n"
