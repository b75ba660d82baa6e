from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from outcomes import expect_facts
from scipy import stats
from synthetic import make_run

from metaseq_lm.cli import main
from metaseq_lm.core.errors import UsageError
from metaseq_lm.reporting.folders import find_runs
from metaseq_lm.reporting.settings import group
from metaseq_lm.reporting.stats import Test as SeedTest
from metaseq_lm.reporting.stats import holm
from metaseq_lm.reporting.table import choose_metric, pair_table

KEY = "task.labelled"
CENTRES = {"a": 0.5, "b": 0.55, "c": 0.8}


def make_all(folder: Path, seeds: int = 5) -> dict[tuple[str, str], list[float]]:
    rng, scores = np.random.default_rng(5), {}
    for label, name in product(CENTRES, ("x", "y")):
        scores[label, name] = [CENTRES[label] + 0.02 * rng.normal() for _ in range(seeds)]
        for seed, score in enumerate(scores[label, name]):
            run = folder / label / name / f"seed={seed}"
            make_run(run, score, label=label, seed=seed, config={KEY: name})
    return scores


@pytest.mark.parametrize("lower", [False, True])
def test_pairs_have_the_two_sided_p_of_scipy(lower: bool, tmp_path: Path) -> None:
    scores = make_all(tmp_path)
    runs = find_runs([tmp_path])
    metric = choose_metric(runs, "test.accuracy", "lower" if lower else "higher")
    table = pair_table(group(runs), metric, "label", SeedTest("t"))
    expected = {}
    for name, (one, other) in product("xy", combinations(CENTRES, 2)):
        sides = scores[one, name], scores[other, name]
        p = float(stats.ttest_ind(*sides).pvalue)
        difference = abs(float(np.mean(sides[0]) - np.mean(sides[1])))
        is_first = (np.mean(sides[0]) < np.mean(sides[1])) == lower
        order = (one, other) if is_first else (other, one)
        expected[tuple(f"{label}, labelled={name}" for label in order)] = (difference, p)
    lines = {(line["setting"], line["ahead_of"]): line for line in table.records}
    assert lines.keys() == expected.keys()
    for key, (difference, p) in expected.items():
        assert lines[key]["difference"] == pytest.approx(difference, abs=1e-12)
        assert lines[key]["p"] == pytest.approx(p, rel=1e-9)
    assert [line["p_holm"] for line in table.records] == holm([line["p"] for line in table.records])
    assert [line["p"] for line in table.records] == sorted(line["p"] for line in table.records)


def test_a_permutation_of_five_seeds_has_twice_the_exact_p(tmp_path: Path) -> None:
    make_all(tmp_path)
    runs = find_runs([tmp_path])
    metric = choose_metric(runs, "test.accuracy")
    table = pair_table(group(runs), metric, "label", SeedTest("permutation"))
    apart = [line for line in table.records if line["setting"].startswith("c")]
    assert [line["p"] for line in apart] == pytest.approx([2 / 252] * 4)


def test_nothing_to_compare(tmp_path: Path) -> None:
    make_all(tmp_path, seeds=2)
    runs = find_runs([tmp_path])
    with pytest.raises(UsageError, match="'label' alone .* 3 "):
        pair_table(group(runs), choose_metric(runs, "test.accuracy"), "label", SeedTest("t"))


def test_report_prints_and_writes_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_all(tmp_path / "runs")
    argv = ["report", str(tmp_path / "runs"), "--metric", "test.accuracy", "--pairs"]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    expect_facts(said, "c, labelled=x", "the 6 pairs")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"pairs.{ending}" for ending in ("txt", "md", "csv", "tex")
    }
    assert main([*argv, KEY, "--where", "label=a"]) == 0
    expect_facts(capsys.readouterr().out, "the 1 pairs")
    assert main([*argv, "--baseline", "label=a"]) == 2
    assert "--pairs: leave --baseline" in capsys.readouterr().err
    assert main([*argv, "--sides", "1"]) == 2
    assert "--sides" in capsys.readouterr().err
    assert main([*argv, "optimizer.nothing"]) == 2
    assert "optimizer.nothing" in capsys.readouterr().err
