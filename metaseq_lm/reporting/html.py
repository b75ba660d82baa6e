"""The page of `metaseq-lm report`, and the page of samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from metaseq_lm.core.files import LARGEST_JSON, read_bounded
from metaseq_lm.core.output import clean, seconds_text
from metaseq_lm.reporting.drawing import Drawing
from metaseq_lm.reporting.numbers import Metric, flops_text, p_text, summarise
from metaseq_lm.reporting.page import HtmlTable, Section, html_table, text_table
from metaseq_lm.reporting.provenance import describe_software, hashes_of
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Setting, show
from metaseq_lm.reporting.significance import Significance
from metaseq_lm.reporting.table import Cell, Table

NAMES = 3  # names of folders in a title


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
        samples: Texts that runs logged, with headings.
        command: The command line of the report, without secrets.
    """

    table: Table
    settings: Sequence[Setting]
    metric: Metric
    spread: str = "sd"
    compared: Significance | None = None
    controls: Sequence[Setting] = ()
    samples: Sequence[tuple[str, str]] = ()
    command: str = ""

    @property
    def runs(self) -> list[Run]:
        """The runs of all settings."""
        runs = []
        for setting in self.settings:
            runs += setting.runs
        return runs

    def sections(self, drawings: Sequence[Drawing], notes: Sequence[str]) -> list[Section]:
        """Return the sections of the page; `notes` are about the figures."""
        differences = _difference_table(self.settings)
        details = [_run_table(self.settings, self.metric)]
        return [
            self.verdicts(),
            self.checks(),
            Section("Scores", tables=[html_table(self.table, self.table.title, [])]),
            Section("Figures", notes, drawings),
            Section("Samples", texts=self.samples),
            Section(
                "What else the settings differ in", tables=[differences] if differences else []
            ),
            Section("Runs", tables=details),
            self.repeat(),
        ]

    def verdicts(self) -> Section:
        """Return the result of the tests for each setting, or which setting is best."""
        if self.compared is None:
            note = "Nothing was tested: --baseline KEY=VALUE names a setting to compare with."
            return Section("Verdicts", [*self.best(), note])
        rows = []
        for item in self.compared.comparisons:
            if item.holm is None or item.baseline is None:  # a note explains it
                continue
            score = summarise(item.setting.scores(self.metric.name), self.spread)
            text = score.text(self.metric) if score else "-"
            name, verdict = item.setting.name, self.compared.verdict(item)
            rows.append([name, text, item.baseline.name, p_text(item.holm), verdict])
        head = ["setting", self.metric.title, "baseline", "p (Holm)", "verdict"]
        table = text_table(head, rows, right=(self.metric.title, "p (Holm)"))
        return Section("Verdicts", self.compared.notes(), tables=[table] if rows else [])

    def best(self) -> list[str]:
        """Return a sentence on the settings marked as best in the table; [] if none is."""
        if len(self.table.records) != len(self.settings):  # a table of one key against another
            return []
        names = []
        for setting, line in zip(self.settings, self.table.records):
            if line.get("is_best") and (score := summarise(setting.scores(self.metric.name))):
                names.append(f"{setting.name} ({self.metric.text(score.centre)})")
        return [f"Best by {self.metric.title}: {', '.join(names)}."] if names else []

    def checks(self) -> Section:
        """Return the scores of controls, and notes on missing, omitted or wrong results."""
        tested = set(self.compared.notes()) if self.compared else set()
        notes = [note for note in self.table.notes if note not in tested]
        rows = []
        for control in self.controls:
            score = summarise(control.scores(self.metric.name), self.spread)
            text = score.text(self.metric) if score else "-"
            rows.append([control.name, str(score.n if score else 0), text])
        head = ["control", "seeds", self.metric.title]
        tables = [text_table(head, rows, right=head[1:])] if rows else []
        if not notes:
            notes = ["All runs have a score, and none is marked as changed or incomplete."]
        return Section("Controls and checks", notes, tables=tables)

    def repeat(self) -> Section:
        """Return the commands, hashes and versions behind the numbers."""
        rows = []
        for setting in self.settings:
            if command := _command_of(setting.runs[0].path):
                rows.append([setting.name, command])
        closed = "The command of the first run of each setting"
        commands = text_table(["setting", "command"], rows, look="small", closed=closed)
        texts = [("This page", self.command)] if self.command else []
        notes = [*describe_software(self.runs), *hashes_of(self.runs)]
        return Section("To repeat it", notes, tables=[commands] if rows else [], texts=texts)


def _command_of(folder: Path) -> str:
    """Return the last command that started a run, "" if its folder is gone."""
    try:
        text = read_bounded(folder / "command.txt", LARGEST_JSON).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""
    return text.strip().rpartition("\n")[2]


def title_of(paths: Sequence[str | Path]) -> str:
    """Return the names of the folders (mostly sweeps) and archives of a report."""
    names = list(dict.fromkeys(Path(path).resolve().name for path in paths))
    rest = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return ", ".join(names[:NAMES]) + rest


def _difference_table(settings: Sequence[Setting]) -> HtmlTable | None:
    """Return the config values of settings that their names do not show; None without any.

    A value of None is left out.
    """
    if not any(len(setting.values) > len(setting.shown) for setting in settings):
        return None
    rows = []
    for setting in settings:
        words = []
        for key, value in setting.values.items():
            if key not in setting.shown and value is not None:
                words.append(f"{key}={show(value)}")
        rows.append([setting.name, ", ".join(words)])
    return text_table(["setting", "config"], rows, look="small")


def _run_table(settings: Sequence[Setting], metric: Metric) -> HtmlTable:
    """Return a table of all runs with seed, score, end, cost, hashes and folder."""
    rows = []
    for setting in settings:
        for run in setting.runs:
            results = run.results or {}
            score, seconds = run.metrics.get(metric.name), run.costs["own_seconds"]
            rows.append(
                [
                    Cell(setting.name, number=False),
                    Cell(show(run.seed)),
                    Cell(run.why_unscored(metric.name) or run.status, number=False),
                    Cell("-" if score is None else metric.text(score), value=score),
                    Cell(str(results.get("updates", run.last_update))),
                    Cell(flops_text(run.costs["own_flops"])),
                    Cell(seconds_text(seconds), value=seconds),
                    Cell(str(results.get("data", "-")), number=False),
                    Cell(str(results.get("code", "-")), number=False),
                    Cell(run.name, number=False),
                ]
            )
    head = ["setting", "seed", "status", metric.title, "updates", "FLOPs", "time"]
    head += ["data", "code", "folder"]
    return HtmlTable(head, rows, look="small")


# ---------------------------------------------------------------- samples


def samples_of(settings: Sequence[Setting]) -> list[tuple[str, str]]:
    """Return (heading, text) for each setting: the last samples of its first run with samples."""
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
    """Return a page of samples, indented so that they are not read as Markdown."""
    parts = ["# Samples that the runs logged"]
    for heading, text in samples:
        parts.append(f"## {clean(heading)}")
        # splitlines knows more line breaks than "\n"; each of them would end the block.
        parts.append("\n".join(f"    {clean(line)}".rstrip() for line in text.splitlines()))
    return "\n\n".join(parts) + "\n"
