"""The page of a report in a browser: what a reader does with it."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, Browser, browser
from synthetic import make_run

from metaseq_lm.cli import main
from metaseq_lm.league.entries import Standings, StandingsEntry
from metaseq_lm.league.page import write_page
from metaseq_lm.league.predictions import OPEN, Outcome, Prediction
from metaseq_lm.league.verdict import DecisionRule
from metaseq_lm.reporting.numbers import Metric

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
]
ATTACKS = ("<img src=x onerror=document.title='attacked'>", "</script><script>alert(1)</script>")
WIDE, NARROW = 1280, 390
TABLE = "#table-1-1"  # of scores
COSTS = "#figure-1-1"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of eight settings, two of whose labels try to bring a script."""
    folder = tmp_path_factory.mktemp("page")
    for i, label in enumerate([*ATTACKS, "masked", "causal", "hybrid", "soft", "hard", "electric"]):
        for seed in (1, 2):
            score = 0.5 + i / 20 + seed / 100
            curve = [(100, score - 0.2), (200, score)]
            costs = {"flops": 10.0 ** (11 + i % 3), "seconds": 10.0 * 7**i}
            make_run(
                folder / "runs" / f"{i}_{seed}", score, curve, None, costs, label=label, seed=seed
            )
    assert main(["report", str(folder / "runs"), "--out", str(folder), "--format", "html"]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory):
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def column(tab: Browser, title: str, table: str = TABLE) -> list[str]:
    """The cells of a column of a table that are shown, from the top."""
    return tab(
        f"(() => {{ const t = document.querySelector('{table}'), body = [...t.tBodies[0].rows];"
        f"const i = [...t.tHead.rows[0].cells].findIndex(c => c.textContent == '{title}');"
        "return body.filter(r => !r.hidden).map(r => r.cells[i].textContent); })()"
    )


def press_head(tab: Browser, title: str, table: str = TABLE) -> str:
    """Click on the head of a column; returns aria-sort."""
    find = f"[...document.querySelectorAll('{table} th')].find(c => c.textContent == '{title}')"
    tab(f"document.getElementById('head')?.removeAttribute('id'); {find}.id = 'head'")
    tab.click("#head button")
    return tab("document.getElementById('head').ariaSort")


def sorted_by(tab: Browser, title: str, table: str) -> list[str]:
    """The cells of a column after a click on its head: the same from below after a second one.

    What has no value stands last both times.
    """
    assert press_head(tab, title, table) == "ascending"
    up = column(tab, title, table)
    assert press_head(tab, title, table) == "descending"
    down = column(tab, title, table)
    assert press_head(tab, title, table) == "none"
    absent = [text for text in up if text in ("", "-", "none", "open")]
    present = up[: len(up) - len(absent)]
    assert up == present + absent and down == present[::-1] + absent
    return up


def table_of(tab: Browser, title: str) -> str:
    """The selector of the table with a title, or of the values of a figure; its part is opened."""
    return "#" + tab(
        f"(() => {{ const t = document.querySelector('table[data-name^={json.dumps(title)}]');"
        "for (const part of document.querySelectorAll('details')) part.open = part.contains(t);"
        "return t.id; })()"
    )


def test_no_script_of_a_label_runs_and_the_console_is_empty(page: Path, tab: Browser) -> None:
    tab.messages.clear()
    tab.open(page)
    assert tab("document.title").startswith("runs: ")
    assert tab("document.images.length") == 0 and tab("document.scripts.length") == 1
    assert {label for label in column(tab, "label") if "<" in label} == set(ATTACKS)
    assert tab.messages == []
    tab("document.body.append(Object.assign(document.createElement('script'), {text: 'x = 1'}))")
    assert tab("typeof x") == "undefined" and "Content Security Policy" in str(tab.messages)


def test_a_column_is_sorted_by_click_and_by_keyboard(page: Path, tab: Browser) -> None:
    tab.open(page)
    first = column(tab, "time")
    assert press_head(tab, "time") == "ascending"
    ordered = column(tab, "time")
    assert ordered[0] == "10.0 s" and ordered[-1].endswith("h") and "min" in ordered[3]
    tab.press("Enter")
    assert column(tab, "time") == ordered[::-1]
    assert tab("document.getElementById('head').ariaSort") == "descending"
    tab.press("Enter")
    assert (
        column(tab, "time") == first and tab("document.getElementById('head').ariaSort") == "none"
    )
    assert press_head(tab, "label") == "ascending"
    names = [label for label in column(tab, "label") if "<" not in label]
    assert names == ["causal", "electric", "hard", "hybrid", "masked", "soft"]


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of rates and one without, of negative scores and one that is missing."""
    folder = tmp_path_factory.mktemp("unequal")
    rows = [(1e-5, 2.5e11, -0.3), (0.02, 1e12, 0.05), (None, 2e10, -0.02), (0.001, 6e9, None)]
    for i, (rate, flops, score) in enumerate(rows):
        metrics = {"test": {} if score is None else {"mcc": score}}
        results = {"flops": flops, "metrics": metrics}
        for seed in (1, 2):
            make_run(
                folder / "runs" / f"{i}{seed}",
                results=results,
                optimizer={"lr": rate},
                seed=seed,
            )
    options = ["--metric", "test.mcc", "--out", str(folder), "--format", "html"]
    assert main(["report", str(folder / "runs"), *options]) == 0
    return folder / "report.html"


def test_numbers_of_a_report_are_sorted_by_size(unequal: Path, tab: Browser) -> None:
    tab.open(unequal)
    assert sorted_by(tab, "optimizer.lr", TABLE) == ["1e-05", "0.001", "0.02", "none"]
    assert sorted_by(tab, "best", TABLE) == ["-0.3000", "-0.02000", "0.05000", "-"]
    assert sorted_by(tab, "FLOPs", TABLE) == ["2.0e10", "2.5e11", "1.0e12", "-"]
    values = table_of(tab, "score by flops")
    assert sorted_by(tab, "at", values) == ["2.0e10 FLOPs", "2.5e11 FLOPs", "1.0e12 FLOPs"]
    scores = [text.partition(" ")[0] for text in sorted_by(tab, "value", values)]
    assert scores == ["-0.3000", "-0.02000", "0.05000"]


@pytest.fixture(scope="module")
def league(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a league of three objectives with untrained models and three predictions."""
    metric, noise = "probe.accuracy", 0.01 * np.array([-1.2, -0.7, -0.3, 0.0, 0.1, 0.4, 0.6, 1.1])
    budgets = (2e10, 6e10, 2.5e11, 1e12)
    rows = []
    for name, means in {
        "flat": (0.60, 0.62, 0.64, 0.66),
        "steep": (0.50, 0.60, 0.70, 0.78),
        "slow": (0.50, 0.55, 0.63, 0.70),
        "low": (0.40, 0.41, 0.42, 0.43),
    }.items():
        for budget, mean in zip(budgets, means):
            rows.append(
                StandingsEntry(
                    name, budget, {metric: list(mean + noise)}, {metric: list(0.45 + noise)}
                )
            )
    outcomes = []
    for value, budget in ((0.9, 1e12), (0.7, 2.5e11), (0.695, 2.5e11), (0.8, 4e12)):
        prediction = Prediction(
            time="2026-11-28T03:00:00+00:00",
            objective="steep",
            budget=budget,
            metric=metric,
            form="E",
            rungs=budgets[:2],
            value=value,
            interval=(value - 0.01, value + 0.01),
            naive={"last": 0.6, "line": 0.9},
        )
        outcomes.append(Outcome(prediction, OPEN if budget > 1e12 else ""))
    metrics = [Metric.of(metric, [0.5])]
    standings = Standings("Ladder", metrics, "flat", DecisionRule(0.02), rows, predictions=outcomes)
    folder = tmp_path_factory.mktemp("league")
    write_page(standings.decided(), folder)
    return folder / "standings.html"


def test_numbers_of_a_league_are_sorted_by_size(league: Path, tab: Browser) -> None:
    tab.open(league)
    table = table_of(tab, "FLOPs at equal score")
    budgets = sorted_by(tab, "FLOPs", table)
    assert list(dict.fromkeys(budgets)) == ["2.0e10", "6.0e10", "2.5e11", "1.0e12"]
    ratios = sorted_by(tab, "times fewer FLOPs", table)
    numbers = [float(text.removeprefix("at least ")) for text in ratios]
    assert numbers == sorted(numbers) and numbers[0] < 1 and numbers[-1] > 10
    assert any(text.startswith("at least") for text in ratios)
    crossings = sorted_by(tab, "crossover", table_of(tab, "Crossovers"))
    assert crossings[-1] == "none" and "e11" in crossings[-2] and "e10" in crossings[0]
    table = table_of(tab, "Predictions")
    assert sorted_by(tab, "mean", table)[2:] == ["78.00", "open"]
    assert sorted_by(tab, "error", table) == ["-0.50", "+0.00", "+12.00", ""]
    assert sorted_by(tab, "inside", table) == ["no", "yes", "yes", ""]
    values = table_of(tab, "ladder")
    places = list(dict.fromkeys(sorted_by(tab, "at", values)))
    assert [place.removesuffix(" FLOPs") for place in places] == [
        *("no training", "2.0e10", "6.0e10", "2.5e11", "1.0e12", "4.0e12")
    ]
    gains = [text for text in sorted_by(tab, "value", values) if text[0] in "+-"]
    assert gains[0].startswith("-5.00") and gains[-1].startswith("+33.00")


def test_arrow_keys_go_along_a_ladder(league: Path, tab: Browser) -> None:
    """From untrained models through the budgets, to what is predicted."""
    tab.open(league)
    ladder = "#figure-1-1"
    tab(f"document.querySelector('{ladder} .scroll').focus()")
    tip = f"document.querySelector('{ladder} .tip').textContent"
    texts = [tab(tip)]
    for _ in range(4):
        tab.press("ArrowRight")
        texts.append(tab(tip))
    assert [text.partition(" at ")[2] for text in texts] == [
        *("no training", "2.0e10 FLOPs", "6.0e10 FLOPs", "2.5e11 FLOPs", "1.0e12 FLOPs")
    ]


def test_rows_are_filtered_by_words(page: Path, tab: Browser) -> None:
    tab.open(page)
    assert len(column(tab, "label")) == 8
    tab.click(f"{TABLE}-filter")
    tab.call("Input.insertText", text="h -HY")
    assert "hard" in column(tab, "label") and "hybrid" not in column(tab, "label")
    tab.call("Input.insertText", text=" hard")
    assert column(tab, "label") == ["hard"]
    assert "1 of 8 rows" in tab(f"document.querySelector('{TABLE}-filter').parentNode.textContent")


def test_values_are_shown_by_pointer_and_keyboard(page: Path, tab: Browser) -> None:
    tab.open(page)
    tip = f"(t => t.hidden ? '' : t.textContent)(document.querySelector('{COSTS} .tip'))"
    assert tab(tip) == ""
    tab.hover(f"{COSTS} .mark:nth-of-type(6)")
    assert " seeds) at 1.0e1" in tab(tip) and "±" in tab(tip)
    tab(f"document.querySelector('{COSTS} .scroll').focus()")
    before = tab(tip)
    tab.press("ArrowDown")
    assert tab(tip) not in ("", before)
    tab.press("Escape")
    assert tab(tip) == ""


def test_the_legend_switches_series(page: Path, tab: Browser) -> None:
    tab.open(page)
    seen = f"[...document.querySelectorAll('{COSTS} .chart [data-series=\"3\"]')]"
    seen += ".filter(e => getComputedStyle(e).display != 'none').length"
    everything = tab(seen)
    button = f"{COSTS} .legend [data-series='3'] button"
    tab.click(button)
    assert everything > 3 and tab(seen) == 0
    assert tab(f'document.querySelector("{button}").ariaPressed') == "false"
    tab.press("Enter")
    assert tab(seen) == everything


@pytest.mark.parametrize("dark", [False, True])
def test_both_themes_have_contrast_in_figures_too(page: Path, tab: Browser, dark: bool) -> None:
    """Every line and text of a figure is at least twice as bright or dark as the page."""
    tab.open(page, dark=dark)
    colours = tab(
        "[getComputedStyle(document.body).backgroundColor,"
        f"...[...document.querySelectorAll('{COSTS} .chart text')]"
        ".map(e => getComputedStyle(e).fill),"
        f"...[...document.querySelectorAll('{COSTS} .chart [data-series] path[stroke]')]"
        ".map(e => getComputedStyle(e).stroke)]"
    )
    back, *others = map(luminance, colours)
    assert (back < 0.1) == dark and len(others) > 20
    for other in others:
        assert (max(back, other) + 0.05) / (min(back, other) + 0.05) > 2


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2) of a colour such as rgb(1, 2, 3)."""
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    red, green, blue = [p / 12.92 if p <= 0.04 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_a_narrow_page_does_not_scroll_sideways(page: Path, tab: Browser) -> None:
    tab.open(page, width=NARROW)
    assert tab("document.documentElement.scrollWidth") == NARROW
    box = f"document.querySelector('{TABLE}').closest('.wide')"
    assert tab(f"{box}.scrollWidth > {box}.clientWidth && {box}.tabIndex == 0")


def test_arrow_keys_scroll_to_the_mark_on_a_narrow_page(page: Path, tab: Browser) -> None:
    tab.open(page, width=NARROW)
    box = f"document.querySelector('{COSTS} .scroll')"
    tab(f"{box}.focus()")
    for far in ("0", f"{box}.scrollWidth") * 8:
        tab(f"{box}.scrollLeft = {far}")
        tab.press("ArrowDown")
        left, ring, right = tab(
            f"(() => {{ const b = {box}.getBoundingClientRect();"
            f"const r = document.querySelector('{COSTS} .ring').getBoundingClientRect();"
            "return [b.left, (r.left + r.right) / 2, b.right]; })()"
        )
        assert left <= ring <= right


def test_a_watched_page_reloads_with_sort_filter_and_switches(page: Path, tab: Browser) -> None:
    watched = page.with_name("watched.html")
    watched.write_text(page.read_text().replace('lang="en"', 'lang="en" data-watch="1"'))
    tab.open(watched)
    tab("window.first = true")
    press_head(tab, "time")
    tab.click(f"{COSTS} .legend [data-series='3'] button")
    tab.click(f"{TABLE}-filter")
    tab.call("Input.insertText", text="h")
    before = column(tab, "label")
    tab.wait_for_load()
    assert tab("window.first === undefined") and column(tab, "label") == before
    assert tab("document.activeElement.id") == f"{TABLE}-filter"[1:]
    assert (
        tab(f"document.querySelector('{COSTS} [data-series=\"3\"] button').ariaPressed") == "false"
    )
    tab.open(page)  # without a watch
    tab("window.first = true")
    time.sleep(1.5)
    assert tab("window.first")


def test_print_shows_the_tables_whole(page: Path, tab: Browser, tmp_path: Path) -> None:
    tab.open(page)
    tab.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").stat().st_size > 20_000
    tab.call("Emulation.setEmulatedMedia", media="print")
    box = f"document.querySelector('{TABLE}').closest('.wide')"
    assert tab(f"getComputedStyle({box}).overflow") == "visible"
    tools = f"document.querySelector('{TABLE}-filter').parentNode"
    assert tab(f"getComputedStyle({tools}).display") == "none"
    tab.call("Emulation.setEmulatedMedia", media="")
    tab.click(f"{TABLE}-filter")
    tab.call("Input.insertText", text="hard")
    tab.call("Emulation.setEmulatedMedia", media="print")
    assert column(tab, "label") == ["hard"]
    assert tab(f"getComputedStyle({tools}).display") != "none"
    assert "1 of 8 rows" in tab(f"{tools}.innerText")
