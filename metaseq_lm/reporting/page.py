"""Pages: sections of notes, tables, figures and texts in one file; the page of `metaseq-lm report`.

The style sheet and the script are the same on every page, and the page's Content-Security-Policy
allows only these two, by their hashes. So neither a label nor anything else in a run can add a
script, an image or a connection.
"""

import base64
import contextlib
import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from metaseq_lm.core.files import LARGEST_JSON, read_bounded
from metaseq_lm.core.output import clean, present_time, seconds_text
from metaseq_lm.reporting.canvas import ON_DARK, Drawing, swatch
from metaseq_lm.reporting.numbers import Metric, flops_text, p_text, summarise
from metaseq_lm.reporting.provenance import describe_origin
from metaseq_lm.reporting.settings import Row, runs_of, show
from metaseq_lm.reporting.significance import Significance
from metaseq_lm.reporting.table import Cell, Table

_MOST = 12  # rows of an open table that are shown at first
_LONG = 24  # characters of a text that may be broken into lines
# The number at the start of a cell: "<0.0001", "70.65 ± 2.30 a", "+1.91", "1,234".
_LEADING = re.compile(r"<?\s*([+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)", re.IGNORECASE)


@dataclass(frozen=True)
class Section:
    """A section: figures, tables, notes, then texts with their headings; an empty one is left out.

    A closed one shows only its title until it is opened.
    """

    title: str
    notes: Sequence[str] = ()
    drawings: Sequence[Drawing] = ()
    tables: Sequence[Table] = ()
    texts: Sequence[tuple[str, str]] = ()
    closed: bool = False


@dataclass(frozen=True)
class Page:
    """A page in the order of a reader: title, question, answer, sections.

    Attributes:
        title: The title.
        sections: The sections.
        reload: Seconds after which it reloads itself, since it follows runs; 0 for never.
        lead: The question and the answer; () for none.
        source: What the page is about in small print, such as the hash of a plan.
    """

    title: str
    sections: Sequence[Section]
    reload: int = 0
    lead: Sequence[str] = ()
    source: str = ""


def render(page: Page) -> str:
    """Return the page as HTML. The template escapes every text."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    def printed(value: Any) -> Any:  # markup of the template's macros keeps line ends
        return clean(value) if type(value) is str else value

    def hash_of(text: str) -> str:  # by which the Content-Security-Policy allows an inline text
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    environment = Environment(
        autoescape=True, finalize=printed, trim_blocks=True, undefined=StrictUndefined
    )
    template, style, script = (
        Path(__file__).with_name(f"page.{end}").read_text("utf-8") for end in ("html", "css", "js")
    )
    style = environment.from_string(style).render(colours=ON_DARK)
    shown = []
    for section in page.sections:
        has_rows = any(table.rows for table in section.tables)
        if section.notes or section.drawings or section.texts or has_rows:
            shown.append(section)
    return environment.from_string(template).render(
        page=replace(page, sections=shown),
        time=present_time(),
        style=Markup(style),
        script=Markup(script),
        style_hash=hash_of(style),
        script_hash=hash_of(script),
        most=_MOST,
        longest=_LONG,
        sort_value=_sort_value,
        swatch=swatch,
        value_table=_value_table,
    )


def _sort_value(cell: Cell) -> float | None:
    """Return the number to sort a cell by, None without a number."""
    value = cell.value
    if value is None and cell.number and (match := _LEADING.match(cell.text)):
        value = float(match[1].replace(",", ""))
    return value if value is not None and math.isfinite(value) else None


def _value_table(drawing: Drawing) -> Table:
    """Return the values of a figure as a table, for readers who cannot see it."""
    rows = []
    for mark in drawing.marks:
        # Sorted as along the axis, which has numbers or names.
        at = Cell(mark.at, number=False, value=mark.x if mark.at else None)
        names = [Cell(name, number=False) for name in (mark.panel, mark.series)]
        rows.append([*names, at, Cell(mark.value)])
    columns = {}
    for title, cells in zip(("panel", "series", "at", "value"), zip(*rows)):
        is_needed = title != "panel" or len(drawing.panels) > 1
        if is_needed and any(cell.text for cell in cells):
            columns[title] = cells
    return Table(drawing.name, list(columns), list(zip(*columns.values())))


@dataclass(frozen=True)
class Report:
    """The content of a report in the order of its page: decisions, their basis, the rest.

    Attributes:
        table: The table of scores.
        settings: The settings with their runs.
        metric: The compared metric.
        spread: The measure of spread, a key of SPREAD_TITLES.
        compared: The tests; None without tests.
        controls: The settings that are controls.
        command: The command line of the report, without secrets.
    """

    table: Table
    settings: Sequence[Row]
    metric: Metric
    spread: str = "sd"
    compared: Significance | None = None
    controls: Sequence[Row] = ()
    command: str = ""

    def page(self, title: str, drawings: Sequence[Drawing], notes: Sequence[str]) -> Page:
        """Return the page; `notes` are about the figures."""
        scores = [drawing for drawing in drawings if drawing.name.startswith("score")]
        first = (scores or [*drawings])[:1]
        others = [drawing for drawing in drawings if drawing not in first]
        texts = [("This page", self.command)] * bool(self.command)
        origin = describe_origin(runs_of(self.settings))
        sections = [
            Section("Scores", drawings=first, tables=[replace(self.table, title="", notes=[])]),
            self.checks(),
            self.verdicts(),
            Section("Further figures", notes, others, closed=True),
            Section("Samples", texts=self.samples, closed=True),
            Section("Configs", tables=[_difference_table(self.settings)], closed=True),
            Section("Runs", tables=[_run_table(self.settings, self.metric)], closed=True),
            Section("To repeat it", origin, (), [_command_table(self.settings)], texts, True),
        ]
        lead = f"Which setting is best by {self.metric.title}?", self.answer()
        return Page(title, sections, 0, lead)

    @cached_property
    def samples(self) -> list[tuple[str, str]]:
        """(heading, text) for each setting: the last samples of its first run with samples."""
        pages = []
        for setting in self.settings:
            run = next((run for run in setting.runs if run.samples[1]), None)
            if run:
                heading = f"{setting.name} (seed {run.seed}, update {run.samples[0]})"
                pages.append((heading, "\n\n".join(run.samples[1])))
        return pages

    def answer(self) -> str:
        """Return which settings are shown to be better than their baseline, or the best ones."""
        if self.compared is None:
            best = []
            # A table of one key against another has no line for each setting.
            has_lines = len(self.table.records) == len(self.settings)
            for setting, line in zip(self.settings, self.table.records):
                score = summarise(setting.run_scores(self.metric.name))
                if has_lines and line.get("is_best") and score:
                    best.append(f"{setting.name} ({self.metric.text(score.centre)})")
            untested = "Nothing was tested; --baseline KEY=VALUE names a setting to compare with."
            return f"Best by the mean: {', '.join(best)}. " * bool(best) + untested
        tested = [item for item in self.compared.comparisons if item.holm is not None]
        better = []
        for item in tested:
            if self.compared.verdict(item) == "better":
                better.append(f"{item.setting.name} (p {p_text(item.holm)})")
        if not better:
            return f"None of {len(tested)} settings is shown to be better than its baseline."
        return f"Better than the baseline, of {len(tested)} that were tested: {', '.join(better)}."

    def verdicts(self) -> Section:
        """Return the results of the tests; empty without tests."""
        if self.compared is None:
            return Section("How sure this is")
        rows = []
        for item in self.compared.comparisons:
            if item.holm is None or item.baseline is None:  # a note explains it
                continue
            score, verdict = self._score_text(item.setting), self.compared.verdict(item)
            rows.append([item.setting.name, score, item.baseline.name, p_text(item.holm), verdict])
        head = ["setting", self.metric.title, "baseline", "p (Holm)", "verdict"]
        table = Table.of_texts(head, rows, (self.metric.title, "p (Holm)"))
        return Section("How sure this is", self.compared.notes(), tables=[table])

    def checks(self) -> Section:
        """Return the scores of controls, and notes on missing, omitted or wrong results."""
        tested = set(self.compared.notes()) if self.compared else set()
        notes = [note for note in self.table.notes if note not in tested]
        rows = []
        for control in self.controls:
            count = len(control.run_scores(self.metric.name))
            rows.append([control.name, str(count), self._score_text(control)])
        if not notes:
            notes = ["All runs have a score, and none is marked as changed or incomplete."]
        head = ["control", "seeds", self.metric.title]
        return Section("Controls and checks", notes, tables=[Table.of_texts(head, rows, head[1:])])

    def _score_text(self, setting: Row) -> str:
        score = summarise(setting.run_scores(self.metric.name), self.spread)
        return score.text(self.metric) if score else "-"


def _command_table(settings: Sequence[Row]) -> Table:
    """Return the last command that started the first run of each setting, if it is still there."""
    rows = []
    for setting in settings:
        with contextlib.suppress(OSError, ValueError):
            text = read_bounded(setting.runs[0].path / "command.txt", LARGEST_JSON)
            if command := text.decode("utf-8", "replace").strip().rpartition("\n")[2]:
                rows.append([setting.name, command])
    return Table.of_texts(["setting", "command of its first run"], rows)


def title_of(paths: Sequence[str | Path]) -> str:
    """Return the names of the folders (mostly sweeps) and archives of a report."""
    names = list(dict.fromkeys(Path(path).resolve().name for path in paths))
    rest = f" and {len(names) - 3} more" * (len(names) > 3)
    return ", ".join(names[:3]) + rest


def _difference_table(settings: Sequence[Row]) -> Table:
    """Return the config values of settings that their names do not show, but None."""
    rows = []
    for setting in settings:
        hidden = {key: value for key, value in setting.values.items() if key not in setting.shown}
        words = [f"{key}={show(value)}" for key, value in hidden.items() if value is not None]
        if hidden:
            rows.append([setting.name, ", ".join(words)])
    return Table.of_texts(["setting", "config"], rows)


def _run_table(settings: Sequence[Row], metric: Metric) -> Table:
    rows = []
    for setting in settings:
        for run in setting.runs:
            score, seconds = run.metrics.get(metric.name), run.costs["own_seconds"]
            texts = [str(run.recorded.get(key, "-")) for key in ("data", "code")]
            row = [
                Cell(setting.name, number=False),
                Cell(show(run.seed)),
                Cell(run.why_unscored(metric.name) or run.status, number=False),
                Cell("-" if score is None else metric.text(score), value=score),
                Cell(str(run.recorded.get("updates", run.last_update))),
                Cell(flops_text(run.costs["own_flops"])),
                Cell(seconds_text(seconds), value=seconds),
                *(Cell(text, number=False) for text in (*texts, run.name)),
            ]
            rows.append(row)
    head = ["setting", "seed", "status", metric.title, "updates", "FLOPs", "time"]
    return Table("", [*head, "data", "code", "folder"], rows)


def samples_markdown(samples: Sequence[tuple[str, str]]) -> str:
    """Return a page of samples, indented so that they are not read as Markdown."""
    parts = ["# Samples that the runs logged"]
    for heading, text in samples:
        # splitlines knows more line breaks than "\n"; each of them would end the block.
        lines = [f"    {clean(line)}".rstrip() for line in text.splitlines()]
        parts += [f"## {clean(heading)}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"
