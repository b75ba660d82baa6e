import math
from functools import partial

import numpy as np
import pytest
from outcomes import expect_facts
from PIL import Image
from synthetic import make_run

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.reporting.canvas import canvas, control_style, swatch
from metaseq_lm.reporting.folders import find_runs
from metaseq_lm.reporting.plots import (
    Pictures,
    _draw_costs,
    _draw_curves,
    _draw_scores,
    _drawn_costs,
    _separate_overlapping,
)
from metaseq_lm.reporting.settings import group, require_logged
from metaseq_lm.reporting.table import choose_metric

KEY = "task.labelled"


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB"), dtype=float)


def has_colour(image, colour):
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return (np.abs(image - wanted).max(axis=2) < 3).sum() > 50


@pytest.fixture
def settings(tmp_path):
    for i, label in enumerate(("$hard$", "_soft")):
        for n in (5, 100):
            for seed in (1, 2):
                score = 0.6 + 0.1 * i + n / 1000 + seed / 100
                make_run(
                    tmp_path / "runs" / f"{label}_{n}_{seed}",
                    score,
                    [(100, 0.4), (200, score)],
                    {KEY: f"which_moon_{n}"},
                    {"flops": 10.0 ** (12 + i)},
                    label=label,
                    seed=seed,
                )
    return group(find_runs([tmp_path / "runs"]), [KEY])


def test_pictures_are_written_with_both_colours_and_are_not_blank(settings, tmp_path):
    metric = choose_metric([run for s in settings for run in s.runs], None)
    along = Pictures(settings, along=KEY)
    assert list(along.styles()) == ["$hard$", "_soft"]
    assert _draw_curves(along, "valid.accuracy", tmp_path / "curves.png") == []
    assert _draw_scores(along, metric, tmp_path / "scores.png") == []
    assert _draw_costs(along, metric, tmp_path / "flops.png", "flops") == []
    _draw_curves(Pictures(settings, "range"), "train.loss", tmp_path / "range.png")
    for name in ("curves", "scores", "flops", "range"):
        image = pixels(tmp_path / f"{name}.png")
        assert image.shape[0] > 400 and image.shape[1] > 600 and image.var() > 100
        assert has_colour(image, "#0072B2") and has_colour(image, "#D55E00"), name
    with Image.open(tmp_path / "curves.png") as picture:
        assert round(picture.info["dpi"][0]) == 150


def test_costs_that_are_drawn(tmp_path):
    """Words if they differ between settings, and only those settings that have them."""
    for name, words in (("a", 1000), ("b", 1000)):
        make_run(tmp_path / name, label=name, results={"words_seen": words})
    metric = choose_metric([], None)
    settings = group(find_runs([tmp_path]))
    assert _drawn_costs(settings, metric) == ["flops"]
    make_run(tmp_path / "c", label="c", results={"words_seen": 3000})
    make_run(tmp_path / "d", label="d")
    settings = group(find_runs([tmp_path]))
    assert _drawn_costs(settings, metric) == ["flops", "words"]
    (note,) = _draw_costs(Pictures(settings), metric, tmp_path / "words.png", "words")
    expect_facts(note, "d: not in", "over words")
    assert pixels(tmp_path / "words.png").var() > 100


@pytest.mark.parametrize("draw", [_draw_scores, partial(_draw_costs, cost="flops")])
def test_controls_are_grey_lines_across_and_no_points(draw, settings, tmp_path):
    """The control has neither a place on the axis nor one of the colours."""
    metric = choose_metric([run for s in settings for run in s.runs], None)
    controls = [s for s in settings if s.values["label"] == "$hard$"]
    with_points = Pictures(settings, along=KEY)
    pictures = Pictures(settings, along=KEY, controls=controls)
    styles = pictures.styles()
    assert list(styles) == ["_soft", "$hard$"] and styles["$hard$"].marker == ""
    assert styles["_soft"] == with_points.styles()["$hard$"], (
        "colours are those of what is compared"
    )
    image = {}
    for name, which in (("lines", pictures), ("points", with_points)):
        assert draw(which, metric, tmp_path / f"{name}.png") == []
        image[name] = pixels(tmp_path / f"{name}.png")
    grey, second = "#888888", with_points.styles()["_soft"].colour
    assert has_colour(image["lines"], grey) and not has_colour(image["lines"], second)
    assert has_colour(image["points"], second)
    # Each of the two lines is as long as its panel; half of it are the gaps between dashes.
    rows = (np.abs(image["lines"] - 0x88).max(axis=2) < 3).sum(axis=1)
    assert (rows > 0.15 * image["lines"].shape[1]).sum() >= 2


def test_panels_of_other_data_have_scales_of_their_own(settings, tmp_path):
    """Of sizes of one set (which_moon_5, which_moon_100) they are shared; so are those of other
    keys.
    """
    assert Pictures(settings, panels=KEY).shares_scale(KEY)
    for name, score in (("chunk", 0.9), ("ner", 0.6)):
        make_run(tmp_path / "others" / name, score, [(100, score)], {KEY: [name]}, label=name)
    others = group(find_runs([tmp_path / "others"]), [KEY])
    pictures = Pictures(others, panels=KEY)
    assert not pictures.shares_scale(KEY)
    assert pictures.shares_scale("label") and pictures.shares_scale(None)


@pytest.mark.parametrize("panels, rows, columns", [(1, 1, 1), (3, 1, 3), (4, 2, 2), (5, 2, 3)])
def test_panels_stand_in_rows_that_are_as_full_as_can_be(panels, rows, columns, tmp_path):
    with canvas(panels, tmp_path / "panels.png", shared=False) as (figure, grid):
        assert len(grid) == panels
        places = grid[0].get_subplotspec().get_gridspec()
        assert (places.nrows, places.ncols) == (rows, columns)
        grid[-1].set_ylim(0, 5)
        assert panels == 1 or grid[0].get_ylim() == (0, 1)


def test_metrics_of_a_pattern_share_one_picture(settings, tmp_path):
    """A panel for each setting, a line for each metric: train.loss and train.lr_main."""
    pictures = Pictures(settings)
    assert require_logged([r for s in settings for r in s.runs], "train.l*") == [
        "train.loss",
        "train.lr_main",
    ]
    assert _draw_curves(pictures, "train.l*", tmp_path / "together.png") == []
    image = pixels(tmp_path / "together.png")
    assert has_colour(image, "#0072B2") and has_colour(image, "#D55E00")
    assert image.shape[1] > pixels_of_one_panel(pictures, tmp_path)
    with pytest.raises(UsageError, match="metric 'train.x_\\*'"):
        _draw_curves(pictures, "train.x_*", tmp_path / "none.png")


def pixels_of_one_panel(pictures, tmp_path):
    _draw_curves(pictures, "train.loss", tmp_path / "one.png")
    return pixels(tmp_path / "one.png").shape[1]


def test_without_a_common_key_each_setting_is_a_series(settings):
    assert len(Pictures(settings).styles()) == 4
    assert len(Pictures(settings, panels=KEY).styles()) == 2
    assert len({tuple(vars(s).values()) for s in Pictures(settings).styles().values()}) == 4


def test_an_unlogged_metric_names_the_logged(settings, tmp_path):
    with pytest.raises(UsageError, match="mean 'valid.accuracy'.*train.lr_main"):
        _draw_curves(Pictures(settings), "valid.acuracy", tmp_path / "x.png")


def test_values_that_cannot_be_drawn_are_said(tmp_path):
    make_run(tmp_path / "r" / "a", 0.5, [(1, 0.5), (2, math.nan), (3, 0.7)])
    make_run(tmp_path / "r" / "b", None, [(1, 0.5), (2, math.inf)], seed=2)
    settings = group(find_runs([tmp_path / "r"]))
    notes = _draw_curves(Pictures(settings), "valid.accuracy", tmp_path / "x.png")
    assert len(notes) == 2
    expect_facts(notes[0], "1 values", "valid.accuracy", "not finite")
    assert pixels(tmp_path / "x.png").var() > 100


def test_runs_without_the_key_are_said(tmp_path):
    make_run(tmp_path / "r" / "a", 0.5, label="a", extra={"k": 10})
    make_run(tmp_path / "r" / "b", 0.6, label="b")
    runs = find_runs([tmp_path / "r"])
    settings = group(runs, ["extra.k"])
    pictures = Pictures(settings, along="extra.k")
    notes = _draw_scores(pictures, choose_metric(runs, None), tmp_path / "x.png")
    assert len(notes) == 1 and notes[0].startswith("b:")
    with pytest.raises(MetaseqError, match="sets init_from"):
        _draw_scores(
            Pictures(group(runs, ["init_from"]), along="init_from"),
            choose_metric(runs, None),
            tmp_path / "y.png",
        )


def test_a_key_with_names_and_missing_flops(tmp_path):
    for i in range(3):
        flops = {"flops": None} if i == 0 else {}
        make_run(tmp_path / "r" / f"{i}", 0.5, config={KEY: "set" + "abc"[i]}, results=flops)
    runs = find_runs([tmp_path / "r"])
    pictures, metric = Pictures(group(runs, [KEY]), along=KEY), choose_metric(runs, None)
    assert _draw_scores(pictures, metric, tmp_path / "x.png") == []
    (note,) = _draw_costs(pictures, metric, tmp_path / "y.png", "flops")
    assert "seta" in note and "FLOPs" in note


def test_points_that_would_hide_each_other_stand_side_by_side():
    ends = (1e10, 1e12)
    apart = [(1e11, [0.5, 0.6]), (1e11, [0.8, 0.9]), (3e11, [0.5])]
    assert _separate_overlapping(apart, ends) == pytest.approx([1e11, 1e11, 3e11])
    left, right = _separate_overlapping([(1e11, [0.5, 0.6]), (1.01e11, [0.55])], ends)
    assert 0.9e11 < left < 0.98e11 < 1.02e11 < right < 1.12e11
    assert math.sqrt(left * right) == pytest.approx(math.sqrt(1.01) * 1e11)
    assert _separate_overlapping([], ends) == []


def test_five_controls_are_told_apart_by_their_dashes_also_in_a_legend():
    styles = [control_style(i) for i in range(5)]
    assert len({style.dash for style in styles}) == len({swatch(style) for style in styles}) == 5
    assert control_style(5) == styles[0]
