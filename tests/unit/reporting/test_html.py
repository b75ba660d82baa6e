import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from outcomes import expect_facts
from synthetic import make_run

from metaseq_lm.reporting import page
from metaseq_lm.reporting.canvas import COLOURS, CONTROL, ON_DARK, collect, thinned
from metaseq_lm.reporting.folders import find_runs
from metaseq_lm.reporting.page import Report, Section, _sort_value, _value_table, render, title_of
from metaseq_lm.reporting.plots import Pictures, _draw_costs, _draw_curves
from metaseq_lm.reporting.settings import group
from metaseq_lm.reporting.significance import compare
from metaseq_lm.reporting.table import Cell, Table, choose_metric, setting_table

VOID = {"meta", "br"}
EVIL = "<script>alert(1)</script>"


class Page(HTMLParser):
    """The page as a browser reads it: tags that all close, attributes, the cells of its tables."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.tables = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


def render_report(runs, metric=None, baseline=(), drawings=(), notes=(), **options):
    settings, metric = group(runs), choose_metric(runs, metric)
    compared = compare(settings, metric, baseline) if baseline else None
    table = setting_table(settings, metric, significance=compared)
    report = Report(table, settings, metric, compared=compared, **options)
    return render(report.page("runs: a title", drawings, notes))


def page_of(tmp_path, **options):
    return render_report(find_runs([tmp_path / "runs"]), **options)


def drawings_of(tmp_path):
    """The figures of all runs below a folder."""
    runs = find_runs([tmp_path / "runs"])
    pictures = Pictures(group(runs))
    with collect() as drawings:
        _draw_curves(pictures, "valid.accuracy", tmp_path / "curves.png")
        _draw_costs(pictures, choose_metric(runs, None), tmp_path / "score_by_flops.png", "flops")
    return drawings


def headings(text):
    return re.findall(r"<h2[^>]*>([^<]*)</h2>", text)


def test_table_settings_and_runs_are_on_the_page(tmp_path):
    optimizer = {"lr": 0.5, "clip": 2}
    make_run(tmp_path / "runs" / "a", 0.5, label="soft", seed=7, optimizer=optimizer)
    failed = {"status": "failed", "message": "no memory\nmore", "exit_code": 1, "updates": 9}
    make_run(tmp_path / "runs" / "b", 0.6, label="hard", seed=8, results=failed)
    table, differences, runs = Page(page_of(tmp_path)).tables
    assert table[1][:3] == ["hard", "0/1", "-"] and table[2][2] == "50.00"
    assert differences[1:] == [
        ["hard", "optimizer.lr=0.001"],
        ["soft", "optimizer.lr=0.5, optimizer.clip=2"],
    ]
    soft = dict(zip(runs[0], runs[2]))
    assert soft["setting"] == "soft" and soft["seed"] == "7" and soft["status"] == "finished"
    assert soft["updates"] == "400" and soft["FLOPs"] == "1.0e12" and soft["time"] == "1 min"
    assert soft["data"] == "d1" and soft["code"] == "c1" and soft["folder"].endswith("runs/a")
    expect_facts(runs[1][2], "failed", "9 updates", "(exit code 1): no memory")


def test_the_answer_comes_first_and_what_repeats_it_last(tmp_path):
    for label, centre in (("hard", 0.5), ("soft", 0.8), ("low", 0.49)):
        for seed in range(1, 6):
            make_run(
                tmp_path / "runs" / f"{label}{seed}", centre + seed / 100, label=label, seed=seed
            )
    (tmp_path / "runs" / "soft1" / "command.txt").write_text("metaseq-lm train soft\n")
    text = page_of(tmp_path, baseline=["label=hard"], command="metaseq-lm report runs")
    head = text[text.index("<h1>") : text.index("<main>")]
    assert re.search(r'class="lead">[^<]*soft \(p ', head) and "low" not in head
    *first, last = headings(text)
    assert first[:3] == ["Scores", "Controls and checks", "How sure this is"]
    assert last == "To repeat it"
    verdicts = {row[0]: row[-1] for row in Page(text).tables[1][1:]}
    assert verdicts == {"soft": "better", "low": "no difference shown"}
    end = text[text.rindex(last) :]
    assert "metaseq-lm report runs" in end and "metaseq-lm train soft" in end


def test_a_report_without_a_baseline_says_that_nothing_was_tested(tmp_path):
    for label, score in (("hard", 0.5), ("soft", 0.8)):
        make_run(tmp_path / "runs" / label, score, label=label)
    controls = [s for s in group(find_runs([tmp_path / "runs"])) if s.values["label"] == "hard"]
    text = page_of(tmp_path, controls=controls)
    assert "Nothing was tested" in text and "soft (80.00)" in text
    assert Page(text).tables[1][1] == ["hard", "1", "50.00"]


def test_every_value_is_escaped(tmp_path):
    bad = {"status": EVIL, "message": EVIL, "data": EVIL, "code": EVIL, "architecture": EVIL}
    make_run(tmp_path / "runs" / "a<b>&", 0.5, label=EVIL, results=bad, clip=EVIL)
    make_run(tmp_path / "runs" / "c", 0.5, label=f'"{EVIL}', clip="'\x1b[2J")
    text = page_of(tmp_path, notes=[EVIL], command=EVIL, drawings=drawings_of(tmp_path))
    page = Page(text)
    assert page.tags.count("script") == 1 and "<b>&" not in text and "\x1b" not in text
    assert text.count("alert(1)") > 10 and EVIL not in text
    scores = next(table for table in page.tables if table[0][0] == "label")
    assert scores[1][0] == f'"{EVIL}' and scores[2][0] == EVIL


def test_only_the_style_and_the_script_of_the_page_are_allowed(tmp_path):
    """The hashes of the policy are those of what stands in the page, and nothing is linked."""
    make_run(tmp_path / "runs" / "a")
    text = page_of(tmp_path, drawings=drawings_of(tmp_path), notes=["a note"])
    page = Page(text)
    policy = next(value for name, value in page.attributes if "default-src" in (value or ""))
    for name in ("style", "script"):
        (content,) = re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert {"link", "iframe", "object", "img"}.isdisjoint(page.tags)
    assert not {"style", "onclick", "onload"} & {name for name, _ in page.attributes}
    links = {value for name, value in page.attributes if name in ("src", "href")}
    assert all(link.startswith("#") for link in links) and "<li>a note</li>" in text
    assert not re.search(r"https?:|url\((?!#)|@import", text)


def test_figures_have_their_values_as_titles_table_and_alternative_text(tmp_path):
    for label, score in (("hard", 0.5), ("soft", 0.8)):
        for seed in (1, 2):
            name = f"{label}{seed}"
            make_run(tmp_path / "runs" / name, score + seed / 50, label=label, seed=seed)
    curves, costs = drawings_of(tmp_path)
    text = page_of(tmp_path, drawings=[curves, costs])
    page = Page(text)
    assert page.tags.count("circle") == 2 * 3 + 2
    by_flops = next(t for t in page.tables if t[0] == ["series", "at", "value"] and len(t) == 3)
    assert by_flops[2] == ["soft", "1.0e12 FLOPs", "83.00 ± 1.41 (2 seeds)"]
    alternative, _ = [v for n, v in page.attributes if n == "aria-label" and "in the table" in v]
    assert "soft: 83.00 ± 1.41 (2 seeds) at 1.0e12 FLOPs" in alternative
    keys = {costs.keys["hard"], costs.keys["soft"]}
    for key in keys:
        assert costs.svg.count(f'data-series="{key}"') > 3


def test_every_colour_of_a_figure_has_one_for_the_dark_theme(tmp_path):
    for label in "abcdefghi":  # more than there are colours
        for seed, status in ((1, "finished"), (2, "finished"), (3, "diverged")):
            score = ord(label) / 300
            results = {"status": status}
            name = f"{label}{seed}"
            make_run(tmp_path / "runs" / name, score, label=label, seed=seed, results=results)
    svg = "".join(drawing.svg for drawing in drawings_of(tmp_path))
    colours = set(re.findall(r'(?:fill|stroke)="(#[0-9a-f]+)"', svg))
    assert len(colours) > 8 and colours <= ON_DARK.keys()
    assert set(COLOURS) | {CONTROL} <= {colour.upper() for colour in ON_DARK} | set(ON_DARK)


def test_figures_are_drawn_for_a_page_only_where_one_collects_them(tmp_path):
    make_run(tmp_path / "runs" / "a")
    curves, costs = drawings_of(tmp_path)
    assert (curves.name, costs.name) == ("curves", "score by flops")
    ids = re.findall(r' id="([^"]+)"', curves.svg), re.findall(r' id="([^"]+)"', costs.svg)
    assert ids[0] and set(ids[0]).isdisjoint(ids[1])
    settings = group(find_runs([tmp_path / "runs"]))
    _draw_curves(Pictures(settings), "valid.accuracy", tmp_path / "other.png")
    with collect() as drawings:
        assert drawings == []


@pytest.mark.parametrize("count", [0, 1, 60, 61, 1000])
def test_curves_have_few_marks_with_the_last_point(count):
    chosen = thinned(count)
    assert len(chosen) <= 60 and (not count or chosen[-1] == count - 1)
    assert count > 60 or len(chosen) == count


@pytest.mark.parametrize(
    "text, value, number",
    [
        ("70.65 ± 2.30 a", None, 70.65),
        ("<0.0001", None, 0.0001),
        ("1,234", None, 1234.0),
        ("-8.13", None, -8.13),
        ("2.5e11", None, 2.5e11),
        ("1 min", 60.0, 60.0),
        ("void", None, None),
        ("-", float("nan"), None),
    ],
)
def test_what_a_cell_is_sorted_by(text, value, number):
    assert _sort_value(Cell(text, value=value)) == number


def test_rows_of_a_long_table_are_folded():
    cells = [[Cell(f"<{i}>")] for i in range(14)]
    long, short = Table("t & u", ["a"], cells), Table("", ["a"], cells[:12])
    text = render(page.Page("", [Section("", tables=[long])]))
    assert text.count('class="more"') == 2 and "&lt;13&gt;" in text and "t &amp; u" in text
    assert 'class="more"' not in render(page.Page("", [Section("", tables=[short])]))
    assert Page(text).tables[0][14] == ["<13>"]


def test_a_text_has_no_number_to_be_sorted_by():
    assert _sort_value(Cell("10 points", number=False)) is None
    assert _sort_value(Cell("ten points", number=False, value=10.0)) == 10.0


def test_an_absent_value_leaves_a_column_of_numbers(tmp_path):
    """A key that one of the runs does not set, and a score that one does not have."""
    for i, (rate, score) in enumerate([(1e-5, 0.5), (0.02, None), (None, 0.7)]):
        metrics = {"test": {} if score is None else {"accuracy": score}}
        make_run(tmp_path / str(i), optimizer={"lr": rate}, results={"metrics": metrics})
    settings = group(find_runs([tmp_path]))
    table = setting_table(settings, choose_metric(find_runs([tmp_path]), None))
    numbers = [title for title, right in zip(table.head, table.right) if right]
    assert numbers == [title for title in table.head if title != "label"]
    cells = {row[1].text: row[1] for row in table.rows}
    assert cells["1e-05"].value == 1e-5 and cells["none"].is_absent


def test_values_of_a_figure_are_sorted_along_its_axis(tmp_path):
    for i, flops in enumerate((2e10, 2.5e11, 1e12)):
        label = "abc"[i]
        make_run(tmp_path / "runs" / label, 0.5 + i / 10, label=label, results={"flops": flops})
    _, costs = drawings_of(tmp_path)
    table = _value_table(costs)
    cells = {title: [row[i] for row in table.rows] for i, title in enumerate(table.head)}
    assert [_sort_value(cell) for cell in cells["at"]] == pytest.approx([2e10, 2.5e11, 1e12])
    assert [_sort_value(cell) for cell in cells["value"]] == [50.0, 60.0, 70.0]
    assert table.right == [False, False, True]


def test_the_title_names_the_sweeps(tmp_path):
    paths = [tmp_path / name for name in "abcde"]
    assert title_of([paths[0], str(paths[0])]) == "a"
    assert title_of(paths) == "a, b, c and 2 more"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_or_cost_that_is_not_finite(tmp_path, value):
    metrics = {"test": {"loss": value}}
    make_run(tmp_path / "runs" / "a", results={"metrics": metrics, "flops": value})
    make_run(tmp_path / "runs" / "b", results={"metrics": {"test": {"loss": 2.0}}}, seed=2)
    page = Page(page_of(tmp_path, metric="test.loss"))
    head, bad, good = page.tables[-1]
    about = dict(zip(head, bad))
    assert about["status"] == f"test.loss is {value}" and about["test.loss"] == str(value)
    assert about["FLOPs"] == "-" and dict(zip(head, good))["test.loss"] == "2.000"


@pytest.mark.parametrize("label", ["", "$title", "a\nb"])
def test_odd_names_are_no_template(tmp_path, label):
    make_run(tmp_path / "runs" / "a", label=label)
    assert Page(page_of(tmp_path)).tables[0][1][0] in (
        label.replace("\n", " "),
        "label_tokens/cross_entropy",
    )
