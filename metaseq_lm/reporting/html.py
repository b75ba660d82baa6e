"""One self-contained html page of a whole report, and the page of samples."""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from metaseq_lm.core.output import clean, seconds_text
from metaseq_lm.reporting.formats import numeric_columns
from metaseq_lm.reporting.numbers import Metric, flops_text
from metaseq_lm.reporting.settings import Setting, show
from metaseq_lm.reporting.table import Cell, Table

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>$title</title>
<style>
:root { color-scheme: light dark; --line: #ccc; --dim: #666; --best: #e3f1e3; }
@media (prefers-color-scheme: dark) { :root { --line: #444; --dim: #999; --best: #243a24; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .7rem; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { border-bottom-width: 2px; }
.number { text-align: right; white-space: nowrap; }
.best { font-weight: bold; background: var(--best); }
.small { font-size: .85rem; } .small td:last-child { overflow-wrap: anywhere; }
li { margin: .2rem 0; }
figure { margin: 1.5rem 0; } figcaption { color: var(--dim); font-size: .85rem; }
img { max-width: 100%; background: white; } pre { white-space: pre-wrap; }
@page { size: A4 landscape; margin: 12mm; }
@media print {
  body { margin: 0; max-width: none; font-size: 9pt; } .wide { overflow: visible; }
  th, td { padding: .15rem .35rem; } .small { font-size: 7pt; }
  tr, figure { break-inside: avoid; } h2 { break-after: avoid; } img { max-height: 15cm; }
}
</style>
</head>
<body>
<h1>$title</h1>
$body
</body>
</html>
""")


def to_html(
    table: Table,
    settings: Sequence[Setting],
    metric: Metric,
    pictures: Sequence[Path] = (),
    notes: Sequence[str] = (),
    samples: Sequence[tuple[str, str]] = (),
) -> str:
    """Return the page: table, pictures (png files) with their notes, samples, settings and runs.

    Every text is escaped and every picture embedded.
    """
    parts = [html_table(table.head, table.rows, numeric_columns(table))]
    if any(cell.best for row in table.rows for cell in row):
        parts.append('<p class="small"><span class="best">Bold</span>: best.</p>')
    parts += [bullets(table.notes)]
    if pictures:
        parts += ["<h2>Pictures</h2>", *map(figure, pictures), bullets(notes)]
    if samples:
        parts.append("<h2>Samples</h2>")
    for name, content in samples:
        lines = "\n".join(map(text, content.splitlines()))
        parts.append(f"<h3>{text(name)}</h3>\n<pre>{lines}</pre>")
    if any(len(setting.values) > len(setting.shown) for setting in settings):
        parts += ["<h2>What else the settings differ in</h2>", differences(settings)]
    parts += ["<h2>Runs</h2>", run_table(settings, metric)]
    return PAGE.substitute(title=text(table.title), body="\n".join(part for part in parts if part))


def text(value: str) -> str:
    """Return a text escaped for HTML."""
    return escape(clean(value))


def html_table(
    head: Sequence[str], rows: Sequence[Sequence[Cell]], right: Sequence[bool], look: str = ""
) -> str:
    """Return a table that scrolls by itself where it is wider than the page."""

    def line(tag: str, cells: Iterable[tuple[str, bool]]) -> str:
        inner = []
        for (words, best), number in zip(cells, right):
            kinds = " ".join(["number"] * number + ["best"] * best)
            inner.append(f'<{tag} class="{kinds}">' if kinds else f"<{tag}>")
            inner.append(f"{text(words)}</{tag}>")
        return f"<tr>{''.join(inner)}</tr>"

    body = [line("td", ((cell.text, cell.best) for cell in row)) for row in rows]
    top = line("th", ((title, False) for title in head))
    return "\n".join(
        [
            '<div class="wide">',
            f'<table class="{look}">' if look else "<table>",
            f"<thead>{top}</thead>",
            *("<tbody>", *body, "</tbody>"),
            "</table></div>",
        ]
    )


def bullets(notes: Iterable[str]) -> str:
    """Return notes as a list, nothing where there are none."""
    items = "\n".join(f"<li>{text(note)}</li>" for note in notes)
    return f"<ul>\n{items}\n</ul>" if items else ""


def figure(path: Path) -> str:
    """Return a png file as an embedded picture with its name below."""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    name = text(path.stem.replace("_", " "))
    return (
        f'<figure><img alt="{name}" src="data:image/png;base64,{data}">'
        f"<figcaption>{name}</figcaption></figure>"
    )


def differences(settings: Sequence[Setting]) -> str:
    """Return a table of the config values of each setting that its name does not show."""
    rows = []
    for setting in settings:
        hidden = {
            k: v for k, v in setting.values.items() if k not in setting.shown and v is not None
        }
        words = ", ".join(f"{key}={show(value)}" for key, value in hidden.items())
        rows.append([Cell(setting.name), Cell(words)])
    return html_table(["setting", "config"], rows, [False, False], "small")


def run_table(settings: Sequence[Setting], metric: Metric) -> str:
    """Return every run with its seed, score, how it ended, cost, hashes and folder."""
    titles = ["setting", "seed", "status", metric.title, "updates", "FLOPs", "time"]
    right = [title in ("seed", metric.title, "updates", "FLOPs", "time") for title in titles]
    rows = []
    for setting, run in ((one, run) for one in settings for run in one.runs):
        results = run.results or {}
        score = run.metrics.get(metric.name)
        texts = [
            setting.name,
            show(run.seed),
            run.why_unscored(metric.name) or run.status,
            "-" if score is None else metric.text(score),
            str(results.get("updates", run.last_update)),
            flops_text(run.cost("flops", own_only=True)),
            seconds_text(run.cost("seconds", own_only=True)),
            str(results.get("data", "-")),
            str(results.get("code", "-")),
            run.name,
        ]
        rows.append([Cell(text) for text in texts])
    return html_table([*titles, "data", "code", "folder"], rows, [*right, *[False] * 3], "small")


# ---------------------------------------------------------------- samples


def samples_of(settings: Sequence[Setting]) -> list[tuple[str, str]]:
    """Return (heading, text) for each setting: the last samples of its first run with any."""
    pages = []
    for setting in settings:
        for run in setting.runs:
            lines = [line for line in run.log if line["kind"] == "samples"]
            lines = [line for line in lines if isinstance(line.get("texts"), list)]
            texts = [text for text in lines[-1]["texts"] if isinstance(text, str)] if lines else []
            if texts:
                update = lines[-1].get("update", 0)
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
