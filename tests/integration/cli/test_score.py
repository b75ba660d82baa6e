"""The `score` command."""

import io
import json
import os
from pathlib import Path

import pytest
import torch
from agreement import make_data, make_pairs, make_run, sentences
from outcomes import expect_facts

from metaseq_lm.cli import main
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.models.transformer.encoder import TransformerLM
from metaseq_lm.training.restore import open_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked LM that has learned that verbs agree with their subjects."""
    folder = tmp_path_factory.mktemp("score")
    return make_run(make_data(folder), folder / "run", 600)


def rows(text: str) -> list[list[str]]:
    return [line.split("\t") for line in text.splitlines()]


def test_grammatical_sentences_are_told_from_wrong_ones(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    one, two = make_pairs(tmp_path / "one.jsonl", 200, 7), make_pairs(tmp_path / "two.jsonl", 50, 8)
    with open(two, "a") as file:
        file.write('\n{"sentence_good": "the cat runs", "sentence_bad": "the cat runs"}\n')
    capsys.readouterr()
    assert main(["score", str(run), "--input", str(one), str(two), "--pairs"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["overall"]["pairs"] == 251 and found["overall"]["accuracy"] > 0.9
    assert found["files"][str(one)]["ties"] == 0 and found["files"][str(one)]["pairs"] == 200
    # A tie counts 1/2.
    assert found["files"][str(two)]["ties"] == 1
    assert 0.9 < found["files"][str(two)]["accuracy"] <= 50.5 / 51
    assert found["files"][str(two)]["accuracy"] * 51 % 1 == pytest.approx(0.5)
    expect_facts(err, "sentences/s", "the encoder")
    good, bad = sentences(200, 7), sentences(200, 7, grammatical=False)
    for name, lines in (("good", good), ("bad", bad)):
        (tmp_path / name).write_text("\n".join(lines))
        assert main(["score", str(run), "--input", str(tmp_path / name)]) == 0
    plls = [float(row[0]) for row in rows(capsys.readouterr().out)]
    right = sum(a > b for a, b in zip(plls[:200], plls[200:]))
    assert right / 200 == found["files"][str(one)]["accuracy"]


def test_a_line_for_each_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = b"\xef\xbb\xbfthe cat runs\r\n\nthe\tdogs\nthe cat runs"
    (tmp_path / "in.txt").write_bytes(text)
    out = tmp_path / "new" / "out.tsv"
    command = ["score", str(run), "engine.precision=fp64"]
    assert main([*command, "--input", str(tmp_path / "in.txt"), "--out", str(out)]) == 0
    assert capsys.readouterr().out == ""
    found = rows(out.read_text())
    assert [row[1:] for row in found] == [
        ["3", "the cat runs"],
        ["0", ""],
        ["2", "the dogs"],
        ["3", "the cat runs"],
    ]
    assert found[0][0] == found[3][0] and found[1][0] == "0.0"
    # Standard input and an override behind --input give the same.
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert main(["score", str(run), "--input", "-", "engine.precision=fp64"]) == 0
    assert capsys.readouterr().out == out.read_text()
    more = ["--input", str(tmp_path / "in.txt"), "--tokens", "--batch-tokens", "1"]
    assert main([*command, *more]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["tokens"] for line in lines[:2]] == [["the", "cat", "runs"], []]
    for line, row in zip(lines, found):
        assert line["pll"] == pytest.approx(float(row[0]), abs=1e-12)
        assert sum(line["log_probs"]) == pytest.approx(line["pll"], abs=1e-12)
        assert line["text"].split() == row[2].split()
    assert lines[2]["text"] == "the\tdogs"


def test_no_spreadsheet_takes_a_sentence_for_a_formula(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Nor a terminal for a command; numbers stay numbers, and JSON has the text as it is."""
    lines = ["=HYPERLINK(0)", "cats\t@SUM(1)", "- no", "\x1b[31mred", "-5", "cats - dogs", " +1"]
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n")
    capsys.readouterr()
    assert main(["score", str(run), "--input", str(tmp_path / "in.txt")]) == 0
    shown = rows(capsys.readouterr().out)
    expected = ["'=HYPERLINK(0)", "cats @SUM(1)", "'- no", " [31mred", "-5", "cats - dogs", "' +1"]
    assert [row[2:] for row in shown] == [[text] for text in expected]
    assert all(float(row[0]) < 0 for row in shown)
    assert main(["score", str(run), "--input", str(tmp_path / "in.txt"), "--tokens"]) == 0
    assert [json.loads(r)["text"] for r in capsys.readouterr().out.splitlines()] == lines


@pytest.mark.parametrize(
    "policy, kept", [("replace", ["cats", "b\ufffdd", "dogs"]), ("skip", ["cats", "dogs"])]
)
def test_invalid_utf8(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture, policy: str, kept: list[str]
) -> None:
    (tmp_path / "in.txt").write_bytes(b"cats\nb\xffd\ndogs\n")
    capsys.readouterr()
    command = ["score", str(run), "--input", str(tmp_path / "in.txt"), "--on-bad-utf8", policy]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert [row[2] for row in rows(out)] == kept
    assert ("UTF-8: 1" in err) == (policy == "skip")


def test_a_pair_is_skipped_as_a_whole(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    long = {"sentence_good": "the cat runs", "sentence_bad": "cats " * 11}
    pairs = make_pairs(tmp_path / "pairs.jsonl", 3, 2)
    pairs.write_text(pairs.read_text() + json.dumps(long) + "\n")
    command = ["score", str(run), "--pairs", "--input", str(pairs)]
    assert main([*command, "--too-long", "skip"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["overall"]["pairs"] == 3 and "too long: 1" in err
    assert main([*command, "--too-long", "cut"]) == 0
    assert json.loads(capsys.readouterr().out)["overall"]["pairs"] == 4
    assert main(command) == 1
    assert f"{pairs}:4: 11 tokens" in capsys.readouterr().err


MISTAKES = {
    "no file": (["{run}", "--input", "{d}/none.txt"], 2, ["none.txt: no such file"]),
    "empty": (["{run}", "--input", "{d}/empty.txt"], 1, ["empty.txt: is empty"]),
    "bad bytes": (
        ["{run}", "--input", "{d}/bytes.txt", "--on-bad-utf8", "fail"],
        1,
        ["bytes.txt:2", "0xff"],
    ),
    "not JSON": (["{run}", "--pairs", "--input", "{d}/text.txt"], 1, ["text.txt:1", "JSON"]),
    "no field": (
        ["{run}", "--pairs", "--input", "{d}/good.jsonl"],
        1,
        ["good.jsonl:2", "sentence_bad"],
    ),
    "no text": (["{run}", "--pairs", "--input", "{d}/number.jsonl"], 1, ["number.jsonl:1"]),
    "no pair": (["{run}", "--pairs", "--input", "{d}/blank.txt"], 1, ["blank.txt: holds no pair"]),
    "no run": (["{d}/nowhere", "--input", "{d}/text.txt"], 2, ["nowhere", "no such checkpoint"]),
    "no data": (["{run}", "--input", "{d}/text.txt", "--data", "none"], 2, ["none"]),
    "override": (["{run}", "--input", "{d}/text.txt", "engine.devcie=cpu"], 2, ["devcie"]),
    "tokens of pairs": (
        ["{run}", "--input", "{d}/text.txt", "--pairs", "--tokens"],
        2,
        ["--tokens"],
    ),
    "twice": (["{run}", "--input", "{d}/text.txt", "{d}/text.txt"], 2, ["twice"]),
    "batch": (["{run}", "--input", "{d}/text.txt", "--batch-tokens", "0"], 2, ["--batch-tokens"]),
    "folder": (["{run}", "--input", "{d}/text.txt", "--out", "{d}"], 2, ["--out"]),
    "option": (["{run}", "--input", "{d}/text.txt", "--token"], 2, ["--tokens"]),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture, name: str) -> None:
    good = {"sentence_good": "cats", "sentence_bad": "dogs"}
    files = {
        "empty.txt": b"",
        "blank.txt": b"\n\n",
        "bytes.txt": b"cats\nb\xffd\n",
        "text.txt": b"cats\n",
        "good.jsonl": json.dumps(good).encode() + b'\n{"sentence_good": "cats"}\n',
        "number.jsonl": json.dumps(good | {"sentence_bad": 3}).encode(),
    }
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    arguments, code, words = MISTAKES[name]
    given = [argument.format(run=run, d=tmp_path) for argument in arguments]
    if "--out" not in given:
        given += ["--out", str(tmp_path / "out.tsv")]
    capsys.readouterr()
    assert main(["score", *given]) == code
    out, err = capsys.readouterr()
    assert not [word for word in words if word not in err], err
    assert err.count("metaseq-lm:") == 1 and "Traceback" not in err and not out
    assert {path.name for path in tmp_path.iterdir()} == set(files)


def test_empty_standard_input(
    run: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert main(["score", str(run), "--input", "-"]) == 1
    assert "standard input: " in capsys.readouterr().err


def test_next_sentence_prediction_changes_no_score(
    documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A run of bert_pretraining gives each hidden token the log-probability of its head "lm"."""
    from battery import CASES, TINY

    place = tmp_path / "bert"
    options = [*CASES["bert_pretraining"][0], *TINY, "trainer.max_update=2"]
    command = ["train", str(documents), "--save-dir", str(place)]
    assert main([*command, "--criterion", "bert_pretraining", *options]) == 0
    (tmp_path / "in.txt").write_text("a b c\nd\n")
    capsys.readouterr()
    precise = ["engine.precision=fp64", "--tokens"]
    assert main(["score", str(place), "--input", str(tmp_path / "in.txt"), *precise]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    opened = open_run(str(place), overrides=["engine.precision=fp64"])
    for line in found:
        assert_plls(opened.model.eval(), opened.task.vocabulary, line)


@torch.no_grad()
def assert_plls(model: TransformerLM, vocabulary: Vocabulary, line: dict) -> None:
    """Check the scores of a sentence by hiding one token after another."""
    row = [vocabulary.cls(), *(vocabulary.index(t) for t in line["tokens"]), vocabulary.sep]
    for place, found in enumerate(line["log_probs"], 1):
        hidden = torch.tensor([row])
        hidden[0, place] = vocabulary.mask
        log_probs = model(hidden, head="lm")[0, place].log_softmax(-1)
        assert found == pytest.approx(log_probs[row[place]].item(), rel=1e-9)


def test_a_criterion_without_probabilities(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from battery import CASES, TINY

    options = [*CASES["token_labels"][0], *TINY, "trainer.max_update=1", "trainer.valid_split=''"]
    place = str(tmp_path / "run")
    command = ["train", str(moons), "--save-dir", place, "--criterion", "token_labels", *options]
    assert main(command) == 0
    (tmp_path / "in.txt").write_text("some text\n")
    capsys.readouterr()
    assert main(["score", place, "--input", str(tmp_path / "in.txt")]) == 2
    err = capsys.readouterr().err
    expect_facts(err, "token_labels", "no probabilities", "masked_lm")
    pairs = make_pairs(tmp_path / "pairs.jsonl", 3, 2)
    assert main(["score", place, "--suite", "pairs", "--data", str(pairs)]) == 2
    err = capsys.readouterr().err
    expect_facts(err, "token_labels", "no probabilities", "masked_lm")
    assert not (tmp_path / "run" / "suites").exists()


def test_the_output_is_utf8_wherever_it_goes(
    run: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture
) -> None:
    (tmp_path / "in.txt").write_text("ein schöner Satz\n", encoding="utf-8")
    assert main(["score", str(run), "--input", str(tmp_path / "in.txt")]) == 0
    assert capfdbinary.readouterr().out.endswith("\t3\tein schöner Satz\n".encode())


def test_blimp_is_scored(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = os.environ.get("METASEQ_LM_DATA")
    file = Path(folder or ".") / "blimp" / "intransitive.jsonl"
    if not folder or not file.is_file():
        pytest.skip("METASEQ_LM_DATA names no folder with blimp")
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(file.read_text().splitlines()[:20]) + "\n")
    capsys.readouterr()
    assert main(["score", str(run), "--input", str(few), "--pairs", "--too-long", "cut"]) == 0
    assert json.loads(capsys.readouterr().out)["overall"]["pairs"] == 20
