"""The `rerank` command."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agreement import make_data, make_run, sentences
from outcomes import expect_facts

from metaseq_lm.cli import main
from metaseq_lm.cli.rerank import parse_grid
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.output import escape_formula
from metaseq_lm.data.labelled.files import SourceSentence
from metaseq_lm.evaluation.nbest import _edit_distances, read_nbest, read_plls
from metaseq_lm.training.restore import open_run
from metaseq_lm.training.scoring import SentenceScorer


def utterance(reference: str, *hypotheses: tuple[float, str]) -> dict[str, Any]:
    found = {f"hyp_{n}": {"score": s, "text": t} for n, (s, t) in enumerate(hypotheses, 1)}
    return {"ref": reference, **found}


def write(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def made_up(folder: Path, lowest: float, highest: float) -> list[str]:
    """Write lists and PLLs for which a lambda is right strictly between the two bounds.

    Below them the first utterance goes wrong, above them the second.
    """
    lists = {
        "a": utterance("one two", (0.0, "one too"), (-10 * lowest, " one two ")),
        "b": utterance("three four five", (0.0, "three four five"), (-10 * highest, "three")),
    }
    plls = {"one too": -10.0, "one two": 0.0, "three four five": -10.0, "three": 0.0}
    lines = [f"{pll}\t2\t{text}\n" for text, pll in plls.items()]
    (folder / "plls.tsv").write_text("".join(lines))
    place = write(folder / "lists.json", lists)
    return ["--dev", place, "--test", place, "--scores", str(folder / "plls.tsv")]


def shown(capsys: pytest.CaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def rate(references: list[str], hypotheses: list[str]) -> float:
    """The word error rate of one hypothesis for each reference."""
    edits = sum(_edit_distances(r, [h])[0] for r, h in zip(references, hypotheses, strict=True))
    return edits / sum(len(r.split()) for r in references)


def test_the_best_lambda_is_found_and_is_the_smallest(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    options = made_up(tmp_path, 0.32, 0.48)
    capsys.readouterr()
    assert main(["rerank", *options, "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    [found] = map(json.loads, out.splitlines())
    assert found["lambda"] == 0.35
    assert found["dev"] == found["test"]
    test = found["test"]
    assert (test["utterances"], test["hypotheses"], test["words"]) == (2, 4, 5)
    assert (test["one_best_wer"], test["oracle_wer"], test["wer"]) == (1 / 5, 0, 0)
    # Of the 4 equally likely draws one has the second utterance only, one the first one only.
    assert test["interval"] == [-0.5, 0] and test["difference"] == -1 / 5
    for words in (["no re-ranking", "20.00"], ["plls.tsv", "0.35", "0.00", "[-50.00, +0.00]"]):
        assert any(all(word in line for word in words) for line in err.splitlines()), err
    again = json.loads((tmp_path / "out" / "1" / "test.json").read_text())
    assert again["a"] == utterance("one two", (-3.2, "one two"), (-3.5, "one too"))
    assert main(["rerank", *options, "--lambdas", "0.1,0.5"]) == 0
    [found] = shown(capsys)
    # Both lambdas are wrong: by one word of the first, or two of the second utterance.
    assert found["lambda"] == 0.1 and found["test"]["wer"] == 1 / 5


def test_lambda_is_chosen_on_dev_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "other").mkdir()
    dev = made_up(tmp_path, 0.32, 0.48)
    test = made_up(tmp_path / "other", 0.07, 0.3)
    capsys.readouterr()
    assert main(["rerank", *dev[:2], *test[2:]]) == 0
    [found] = shown(capsys)
    assert found["lambda"] == 0.35
    assert (found["dev"]["wer"], found["test"]["wer"]) == (0, 2 / 5)


@pytest.mark.parametrize(
    "text, grid",
    [
        ("0.05:1.0:0.05", [n / 20 for n in range(1, 21)]),
        ("0:0.3:0.1", [0, 0.1, 0.2, 0.3]),
        ("0:1:0.4", [0, 0.4, 0.8]),
        ("2,-1,2", [-1, 2]),
        ("3:3:1", [3]),
    ],
)
def test_grids(text: str, grid: list[float]) -> None:
    assert parse_grid(text) == grid


@pytest.mark.parametrize(
    "text", ["", "a", "1:2", "1:0:0.1", "0:1:0", "0:1:-1", "0:inf:1", "nan", "0:1e9:1", "0:1:1:1"]
)
def test_wrong_grids(text: str) -> None:
    with pytest.raises(UsageError, match="--lambdas"):
        parse_grid(text)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rerank")
    return make_run(make_data(folder), folder / "run", 30)


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Noisy lists: each sentence with three others, the scores drawn at random."""
    folder = tmp_path_factory.mktemp("lists")
    rng = np.random.default_rng(4)
    places = []
    for seed, name in enumerate(("dev", "test")):
        right, wrong = sentences(30, seed), sentences(30, seed, grammatical=False)
        content = {}
        for n, reference in enumerate(right):
            texts = [wrong[n], reference, right[n - 1], f"  {wrong[n]} "]
            content[f"u{n}"] = utterance(reference, *zip(rng.normal(size=4).tolist(), texts))
        places.append(write(folder / f"{name}.json", content))
    return places[0], places[1]


def test_a_run_scores_and_its_scores_serve_again(
    run: Path, lists: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    command = ["rerank", "--dev", lists[0], "--test", lists[1]]
    capsys.readouterr()
    more = ["--append-period", "--out", str(tmp_path), "engine.precision=fp64"]
    assert main([*command, str(run), str(run), *more]) == 0
    out, err = capsys.readouterr()
    first, second = map(json.loads, out.splitlines())
    assert first == second and "sentences/s" in err
    plls = read_plls(tmp_path / "1" / "plls.tsv")
    both = [nbest for place in lists for nbest in read_nbest(Path(place))]
    texts = {text + "." for nbest in both for text in nbest.texts}
    assert set(plls) == texts  # each different text once
    scorer = SentenceScorer(open_run(str(run), overrides=["engine.precision=fp64"]))
    for text in sorted(texts)[:5]:
        [score] = scorer.score([SourceSentence(text, "")])
        assert score is not None and plls[text] == pytest.approx(score.pll, abs=1e-12)
    # The rates are those of the lists that were written.
    for name in ("dev", "test"):
        written = read_nbest(tmp_path / "2" / f"{name}.json")
        best = [nbest.texts[0] for nbest in written]
        assert first[name]["wer"] == rate([n.reference for n in written], best)
        assert all((np.diff(nbest.scores) <= 0).all() for nbest in written)
    saved = ["--scores", str(tmp_path / "1" / "plls.tsv")]
    assert main([*command, *saved, "--append-period"]) == 0
    assert shown(capsys) == [{**first, "source": saved[1]}]
    assert main([*command, *saved]) == 1
    expect_facts(capsys.readouterr().err, "no score")


@pytest.mark.parametrize("written", [str, escape_formula])
def test_scores_of_texts_that_look_like_formulas(
    tmp_path: Path, capsys: pytest.CaptureFixture, written: Callable[[str], str]
) -> None:
    """Saved as they are, by earlier versions, or inert."""
    texts = {"- one two": 0.0, "=one \x1btoo": -10.0}
    lists = {"a": utterance("- one two", *((0.0, text) for text in reversed(texts)))}
    (tmp_path / "plls.tsv").write_bytes(
        b"".join(f"{pll}\t3\t{written(text)}\n".encode() for text, pll in texts.items())
    )
    place = write(tmp_path / "lists.json", lists)
    words = ["rerank", "--dev", place, "--test", place, "--scores", str(tmp_path / "plls.tsv")]
    assert main(words) == 0
    assert shown(capsys)[0]["test"]["wer"] == 0


def test_hypotheses_longer_than_the_rows(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    place = write(tmp_path / "long.json", {"u7": utterance("cats", (0.0, "cats " * 11))})
    command = ["rerank", "--dev", place, "--test", place, str(run)]
    assert main(command) == 1
    err = capsys.readouterr().err
    expect_facts(err, "long.json: ", "'u7'", "11 tokens")
    assert "--too-long skip" not in err
    assert main([*command, "--too-long", "cut"]) == 0


GOOD = utterance("cats", (0.0, "cats"))
MISTAKES: dict[str, tuple[Any, str]] = {
    "not JSON": (b"{", "bad.json: not valid JSON"),
    "not UTF-8": (b'{"u\xff": 1}', "bad.json: not valid UTF-8"),
    "empty": (b"", "bad.json: is empty"),
    "a list": ([GOOD], "bad.json: not a JSON object"),
    "nothing": ({}, "holds no utterance"),
    "deep": (b"[" * 100_000, "not valid JSON"),
    "no lists": ({"u1": 5}, "utterance 'u1': not a JSON object"),
    "no reference": (
        {"u1": GOOD, "u2": {"hyp_1": GOOD["hyp_1"]}},
        "utterance 'u2': no field 'ref'",
    ),
    "number as reference": ({"u1": GOOD | {"ref": 1}}, "'u1': field 'ref' is not a text"),
    "no hypothesis": ({"u1": {"ref": "cats"}}, "utterance 'u1': has no hypothesis"),
    "text as hypothesis": ({"u1": GOOD | {"hyp_2": "cats"}}, "utterance 'u1': hyp_2: expected"),
    "no text": ({"u1": GOOD | {"hyp_2": {"score": 1}}}, "'u1': hyp_2: no field 'text'"),
    "no score": ({"u1": GOOD | {"hyp_2": {"text": "a"}}}, "'u1': hyp_2: its score is null"),
    "text as score": (
        {"u1": GOOD | {"hyp_2": {"text": "a", "score": "1"}}},
        "'u1': hyp_2: its score is \"1\"",
    ),
    "truth as score": ({"u1": GOOD | {"hyp_2": {"text": "a", "score": True}}}, "its score is true"),
    "nan": ({"u1": utterance("a", (float("nan"), "a"))}, "'u1': hyp_1: its score is nan"),
    "huge": (
        b'{"u1": {"ref": "a", "hyp_1": {"text": "a", "score": 1' + b"0" * 400 + b"}}}",
        "'u1': hyp_1: its score is",
    ),
    "other key": ({"u1": GOOD | {"hpy_2": GOOD["hyp_1"]}}, "utterance 'u1': 'hpy_2' is neither"),
    "no word": ({"u1": utterance("", (0.0, ""))}, "hold no word"),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_wrong_lists(tmp_path: Path, capsys: pytest.CaptureFixture, name: str) -> None:
    content, words = MISTAKES[name]
    bad = tmp_path / "bad.json"
    bad.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    good = write(tmp_path / "good.json", {"u1": GOOD})
    (tmp_path / "plls.tsv").write_text("0.0\t1\tcats\n0.0\t0\t\n0\t0\ta\n")
    capsys.readouterr()
    saved = ["--scores", str(tmp_path / "plls.tsv"), "--out", str(tmp_path / "out")]
    assert main(["rerank", "--dev", good, "--test", str(bad), *saved]) == 1
    out, err = capsys.readouterr()
    assert words in err and "Traceback" not in err and err.count("metaseq-lm:") == 1, err
    assert not out and not list(tmp_path.glob("out/*/*"))


@pytest.mark.parametrize(
    "line", ["cats", "x\t1\tcats", "nan\t1\tcats", "0.0 1 cats", "0.0\tcats", "", "\xff"]
)
def test_wrong_scores(tmp_path: Path, capsys: pytest.CaptureFixture, line: str) -> None:
    place = write(tmp_path / "lists.json", {"u1": GOOD})
    (tmp_path / "plls.tsv").write_bytes(b"0.0\t1\tcats\n" + line.encode("latin-1") + b"\n")
    command = ["rerank", "--dev", place, "--test", place]
    assert main([*command, "--scores", str(tmp_path / "plls.tsv")]) == 1
    assert "plls.tsv:2: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        ([], 2, "give a RUN"),
        (["nowhere"], 2, "nowhere"),
        (["--scores", "none.tsv"], 2, "none.tsv: no such file"),
        (["--lambdas", "x", "nowhere"], 2, "--lambdas"),
        (["--too-long", "skip", "nowhere"], 2, "skip"),
        (["--append-perod", "nowhere"], 2, "--append-period"),
        (["{run}", "engine.devcie=cpu"], 2, "devcie"),
    ],
)
def test_mistakes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture, arguments: list, code: int, words: str
) -> None:
    place = write(tmp_path / "lists.json", {"u1": GOOD})
    given = [argument.format(run=run) for argument in arguments]
    assert main(["rerank", "--dev", place, "--test", place, *given]) == code
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err


def test_hypotheses_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """As text "hyp_10" comes before "hyp_2"; of equal scores the lower number is the better one."""
    place = tmp_path / "lists.json"
    content = {"ref": "a"} | {f"hyp_{n}": {"score": 0, "text": f"a {n}"} for n in (10, 2, 1)}
    [nbest] = read_nbest(Path(write(place, {"u": content})))
    assert nbest.texts == ["a 1", "a 2", "a 10"]


def test_librispeech_lists(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = os.environ.get("METASEQ_LM_DATA")
    files = sorted((Path(folder or ".") / "librispeech-nbest-sample").glob("*.json"))
    if not folder or not files:
        pytest.skip("METASEQ_LM_DATA names no folder with librispeech-nbest-sample")
    for file in files:
        lists = read_nbest(file)
        assert [len(nbest.texts) for nbest in lists] == [100] * 3
        rows = [f"-1.0\t1\t{text}\n" for nbest in lists for text in nbest.texts]
        (tmp_path / "plls.tsv").write_text("".join(rows))
        capsys.readouterr()
        command = ["rerank", "--dev", str(file), "--test", str(file)]
        assert main([*command, "--scores", str(tmp_path / "plls.tsv")]) == 0
        [found] = shown(capsys)
        raw = json.loads(file.read_text())
        best = [
            max((h for k, h in u.items() if k != "ref"), key=lambda h: h["score"])["text"]
            for u in raw.values()
        ]
        wanted = rate([u["ref"] for u in raw.values()], best)
        # Equal PLLs change no order.
        assert found["test"]["one_best_wer"] == found["test"]["wer"] == wanted
        assert found["test"]["oracle_wer"] <= wanted
