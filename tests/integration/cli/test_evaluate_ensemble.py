"""`evaluate RUN1 RUN2 ... --ensemble`: the runs' own predictions, averaged and scored."""

import json
from pathlib import Path

import numpy as np
import pytest
import small_data
from battery import CASES, TINY
from outcomes import expect_facts

from metaseq_lm.cli import main
from metaseq_lm.evaluation.squad import _squad_v2
from metaseq_lm.training.parts import Parts

SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def runs(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Three runs on pairs and two on real values, each with its own seed."""
    place = tmp_path_factory.mktemp("runs")
    found: dict[str, list[str]] = {"pairs": [], "scores": []}
    for name, number in (("pairs", 1), ("scores", 3)):
        options = [*CASES["sentence_prediction"][number], *TINY, "--max-update", "4"]
        for seed in SEEDS[: 3 if name == "pairs" else 2]:
            found[name].append(str(place / f"{name}={seed}"))
            save = ["--save-dir", found[name][-1], "--criterion", "sentence_prediction"]
            assert main(["train", str(pairs), *save, *options, f"seed={seed}"]) == 0
    return found


def evaluated(place: Path, names: list[str], *more: str) -> tuple[dict, list[dict]]:
    assert main(["evaluate", *names, "--split", "valid", "--out", str(place), *more]) == 0
    rows = (place / "predictions.valid.jsonl").read_text().splitlines()
    return json.loads((place / "metrics.valid.json").read_text()), [json.loads(r) for r in rows]


@pytest.mark.parametrize("name", ["pairs", "scores"])
def test_the_mean_of_what_the_runs_say(
    name: str, runs: dict[str, list[str]], tmp_path: Path
) -> None:
    alone = [evaluated(tmp_path / str(i), [run])[1] for i, run in enumerate(runs[name])]
    # The overrides may stand between the runs' names and the options.
    metrics, rows = evaluated(tmp_path / "all", [*runs[name], "engine.device=cpu"], "--ensemble")
    scores = np.mean([[row["scores"] for row in member] for member in alone], 0)
    np.testing.assert_allclose([row["scores"] for row in rows], scores, rtol=1e-12)
    assert [row["gold"] for row in rows] == [row["gold"] for row in alone[0]]
    assert len(rows) == 20
    if name == "scores":
        assert list(metrics) == ["score", "pearson_spearman", "pearson", "spearman"]
        return
    labels = [["less", "more"][i] for i in scores.argmax(1)]
    assert [row["predicted"] for row in rows] == labels
    assert metrics["accuracy"] == np.mean([row["gold"] == row["predicted"] for row in rows])


def test_an_ensemble_of_one_is_the_run(runs: dict[str, list[str]], tmp_path: Path) -> None:
    metrics, rows = evaluated(tmp_path / "one", runs["pairs"][:1])
    together, same = evaluated(tmp_path / "ensemble", runs["pairs"][:1], "--ensemble")
    assert same == rows and together == {name: metrics[name] for name in together}


@pytest.mark.parametrize("metric, sign", [("cross_entropy", -1), ("loss", -1), ("accuracy", 1)])
def test_the_best_runs_are_taken(
    metric: str, sign: int, runs: dict[str, list[str]], capsys: pytest.CaptureFixture
) -> None:
    """Those with the best value of the validation metric in their results."""
    results = [json.loads((Path(r) / "results.json").read_text()) for r in runs["pairs"]]
    values = [sign * r["metrics"]["valid"][metric] for r in results]
    wanted = sorted(sorted(range(3), key=lambda i: (-values[i], i))[:2])
    capsys.readouterr()
    how = ["--ensemble", "--best", "2"] + (["--metric", metric] if metric != "accuracy" else [])
    assert main(["evaluate", *runs["pairs"], "--split", "valid", *how]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])["checkpoints"]
    assert [Path(path).parent.parent.name for path in shown] == [
        Path(runs["pairs"][i]).name for i in wanted
    ]


@pytest.mark.parametrize(
    "names, more, code, words",
    [
        (("pairs", "pairs"), [], 2, "--ensemble to score them together"),
        (("pairs",), ["--best", "1"], 2, "give --ensemble too"),
        (("pairs", "pairs"), ["--ensemble", "--best", "3"], 2, "there are 2 runs"),
        (("pairs", "pairs"), ["--ensemble", "--best", "1", "--metric", "f2"], 2, "metric 'f2'"),
        (("pairs", "scores"), ["--ensemble"], 2, "on sentence_prediction scores"),
        ((), ["a=b"], 2, "no checkpoint"),
    ],
)
def test_mistakes(
    names: tuple[str, ...],
    more: list[str],
    code: int,
    words: str,
    runs: dict[str, list[str]],
    capsys: pytest.CaptureFixture,
) -> None:
    given = [runs[name][i] for i, name in enumerate(names)]
    assert main(["evaluate", *given, *more, "--split", "valid"]) == code
    text = capsys.readouterr().err
    assert "Traceback" not in text and words in text, text


@pytest.mark.parametrize("number", [0, 1])
def test_answers_to_questions(moons: Path, tmp_path: Path, number: int) -> None:
    """Of the runs' own n-best lists and odds, with the official scores; both kinds of heads."""
    small_data.ensure(moons, "squad")
    names = [str(tmp_path / str(seed)) for seed in SEEDS[:2]]
    options = [*CASES["squad"][number], *TINY, "--criterion", "squad", "--max-update", "3"]
    for seed, name in zip(SEEDS, names):
        assert main(["train", str(moons), "--save-dir", name, *options, f"seed={seed}"]) == 0
    alone = [evaluated(tmp_path / f"alone{name[-1]}", [name]) for name in names]
    metrics, rows = evaluated(tmp_path / "one", names, "--ensemble", "--best", "1")
    assert rows in (alone[0][1], alone[1][1])
    first = alone[rows == alone[1][1]][0]
    assert metrics == {name: first[name] for name in metrics} and "best_f1" in metrics
    metrics, rows = evaluated(tmp_path / "all", names, "--ensemble")
    assert len(rows) == len(alone[0][1]) == 6
    said, odds = {}, {}
    for row, *members in zip(rows, *(found for _, found in alone)):
        shares: dict[str, float] = {}
        for member in members:
            assert member["id"] == row["id"]
            for answer in member["nbest"]:
                old = shares.get(answer["text"], 0.0)
                shares[answer["text"]] = old + answer["probability"] / 2
        assert row["nbest"][0]["probability"] == pytest.approx(max(shares.values()))
        said[row["id"]] = text = row["nbest"][0]["text"]
        assert shares[text] == pytest.approx(max(shares.values()))
        none = np.mean([1 / (1 + np.exp(-member["null_odds"])) for member in members])
        odds[row["id"]] = row["null_odds"]
        assert row["null_odds"] == pytest.approx(np.log(none / (1 - none)))
        assert row["predicted"] == ("" if row["null_odds"] > -2.75 else text)
    golds = {row["id"]: row["gold"] for row in rows}
    wanted = _squad_v2(golds, said, odds, -2.75)
    assert metrics["score"] == metrics["f1"] == pytest.approx(wanted["f1"] / 100)
    assert metrics["best_exact_thresh"] == wanted["best_exact_thresh"]
    assert metrics.keys() == {"score", *wanted}
    files = ("predictions", "null_odds", "nbest")
    kept = [json.loads((tmp_path / "all" / f"{name}.valid.json").read_text()) for name in files]
    assert kept[0] == {row["id"]: row["predicted"] for row in rows} and kept[1] == odds


def test_tasks_without_a_way_to_do_it(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal comes before anything is scored."""
    options = ["--criterion", "masked_lm", *CASES["masked_lm"][0], *TINY, "--max-update", "1"]
    assert main(["train", str(moons), "--save-dir", str(tmp_path), *options]) == 0
    monkeypatch.setattr(Parts, "score", lambda *given: pytest.fail("scored for nothing"))
    assert main(["evaluate", str(tmp_path), "--split", "valid", "--ensemble"]) == 2
    expect_facts(capsys.readouterr().err, "'masked_lm'", "predictions")
