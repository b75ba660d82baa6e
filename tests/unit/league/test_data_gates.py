"""Gates on the data: another domain, documents in both splits, epochs; and the refusal to start."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from league_rows import SYMBOLS, UNIGRAM, change, make_context, make_row

from metaseq_lm.cli import main
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.doctor.likeness import Likeness
from metaseq_lm.league.corpus import Corpus, check_domain, from_about, read_corpus
from metaseq_lm.league.data_gates import domain, epochs, leak

ALIKE = Likeness(0.02, 0.019, 0.004)


def corpus(**changes: object) -> Corpus:
    return replace(Corpus(SYMBOLS, UNIGRAM, words=1000, valid=ALIKE), **changes)


@pytest.mark.parametrize(
    "gate, changes, action",
    [
        (domain, {}, None),
        (domain, {"valid": None}, None),
        (domain, {"valid": replace(ALIKE, divergence=0.2)}, "flag"),
        (domain, {"valid": replace(ALIKE, divergence=0.2, usual=0.15)}, None),
        (domain, {"valid": replace(ALIKE, divergence=0.9), "shifted": True}, "note"),
        (leak, {}, None),
        (leak, {"valid": replace(ALIKE, shared=0.03)}, "note"),
        (leak, {"valid": replace(ALIKE, shared=0.6)}, "flag"),
        (epochs, {"words": 10**9}, None),
        (epochs, {"words": None}, None),
    ],
)
def test_gates_of_the_data(gate, changes, action) -> None:
    row = make_row("causal", 0.8)
    actions = [finding.action for finding in gate(row, make_context(row, corpus=corpus(**changes)))]
    assert actions == ([action] if action else [])


def test_epochs_are_counted_in_words() -> None:
    row = change(
        make_row("causal", 0.8),
        lambda run: replace(run, results={**run.results, "words_seen": 2500}),
    )
    (finding,) = epochs(row, make_context(row, corpus=corpus()))
    assert finding.action == "note" and "2.5 times" in finding.reason
    assert not list(epochs(row, make_context(row, corpus=None)))


def test_an_archive_keeps_what_is_known() -> None:
    assert from_about({"corpus": corpus().as_text()}) == corpus()
    assert from_about({"vocabulary": "7", "unigram": "1.5"}) == Corpus(7, 1.5)
    assert from_about({}) is None


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of two sources one after the other, of which the last one is held out."""
    folder = tmp_path_factory.mktemp("shifted")
    draw = np.random.default_rng(0)
    for split, first, lines in (("train", 0, 400), ("valid", 15, 120)):
        words = [[f"w{first + i}" for i in draw.integers(0, 20, 12)] for _ in range(lines)]
        (folder / f"{split}.txt").write_text("".join(" ".join(line) + "\n" for line in words))
    texts = [f"--{split}pref={folder / split}.txt" for split in ("train", "valid")]
    command = ["preprocess", *texts, "--tokenizer", "word", "--destdir", str(folder / "data")]
    assert main(command) == 0
    return folder / "data"


def test_a_league_on_another_domain_does_not_start(shifted: Path) -> None:
    known = read_corpus(shifted)
    assert known.valid and known.valid.shift > 0.5 and known.words == 4800
    with pytest.raises(UsageError, match="another domain"):
        check_domain(known, shifted)
    check_domain(read_corpus(shifted, shifted=True), shifted)


def test_doctor_tells_another_domain(shifted: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor", str(shifted)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("error") and "another domain" in line for line in lines)
    assert main(["doctor", "--shifted-valid", str(shifted)]) == 0
