"""The page of a report in a browser: what a reader does with it."""

import time
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, browser
from synthetic import make_run

from metaseq_lm.cli import main

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
]
ATTACKS = ("<img src=x onerror=document.title='attacked'>", "</script><script>alert(1)</script>")
WIDE, NARROW = 1280, 390
TABLE = "#table-3-1"  # of scores
COSTS = "#figure-4-2"


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


def column(tab: Browser, title: str) -> list[str]:
    """The cells of a column of the table of scores that are shown, from the top."""
    return tab(
        f"(() => {{ const t = document.querySelector('{TABLE}'), body = [...t.tBodies[0].rows];"
        f"const i = [...t.tHead.rows[0].cells].findIndex(c => c.textContent == '{title}');"
        "return body.filter(r => !r.hidden).map(r => r.cells[i].textContent); })()"
    )


def press_head(tab: Browser, title: str) -> str:
    """Click on the head of a column; returns aria-sort."""
    find = f"[...document.querySelectorAll('{TABLE} th')].find(c => c.textContent == '{title}')"
    tab(f"{find}.id = 'head'")
    tab.click("#head button")
    return tab("document.getElementById('head').ariaSort")


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
    assert tab("getComputedStyle(document.querySelector('.tools')).display") == "none"
