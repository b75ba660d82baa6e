import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from synthetic import make_run

from metaseq_lm.reporting.folders import find_runs
from metaseq_lm.reporting.html import to_html
from metaseq_lm.reporting.settings import group
from metaseq_lm.reporting.table import choose_metric, setting_table

VOID = {"meta", "img"}
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


def page_of(tmp_path, pictures=(), notes=()):
    runs = find_runs([tmp_path / "runs"])
    settings, metric = group(runs), choose_metric(runs, None)
    return to_html(setting_table(settings, metric), settings, metric, pictures, notes)


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
    assert runs[1][2] == "failed after 9 updates (exit code 1): no memory"


def test_every_value_is_escaped(tmp_path):
    bad = {"status": EVIL, "message": EVIL, "data": EVIL, "code": EVIL, "updates": EVIL}
    make_run(tmp_path / "runs" / "a<b>&", 0.5, label=EVIL, results=bad, clip=EVIL)
    make_run(tmp_path / "runs" / "c", 0.5, label=f'"{EVIL}', clip="'\x1b[2J")
    text = page_of(tmp_path, notes=[EVIL])
    page = Page(text)
    assert "script" not in page.tags and "<b>" not in text and "\x1b" not in text
    assert page.tables[0][1][0] == f'"{EVIL}' and page.tables[0][2][0] == EVIL


def test_pictures_are_embedded_and_nothing_is_linked(tmp_path):
    make_run(tmp_path / "runs" / "a")
    pixels = np.random.default_rng(0).integers(0, 255, (4, 5, 3), dtype=np.uint8)
    path = tmp_path / "score_by_x<.png"
    Image.fromarray(pixels).save(path)
    text = page_of(tmp_path, [path], ["a note"])
    page = Page(text)
    (source,) = [value for name, value in page.attributes if name == "src"]
    kind, data = source.split(",")
    assert kind == "data:image/png;base64"
    assert (np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) == pixels).all()
    assert {"script", "link", "a", "iframe", "object"}.isdisjoint(page.tags)
    assert not re.search(r"https?:|url\(|@import|href", text) and "<li>a note</li>" in text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_or_cost_that_is_not_finite(tmp_path, value):
    metrics = {"test": {"loss": value}}
    make_run(tmp_path / "runs" / "a", results={"metrics": metrics, "flops": value})
    make_run(tmp_path / "runs" / "b", results={"metrics": {"test": {"loss": 2.0}}}, seed=2)
    runs = find_runs([tmp_path / "runs"])
    settings, metric = group(runs), choose_metric(runs, "test.loss")
    page = Page(to_html(setting_table(settings, metric), settings, metric))
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
