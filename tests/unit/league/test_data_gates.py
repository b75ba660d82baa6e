"""Gates on the data: another domain, documents in both splits, epochs; and the refusal to start."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from league_rows import ALIKE, SYMBOLS, UNIGRAM, change, make_context, make_row, with_results
from outcomes import expect_facts

from metaseq_lm.cli import main
from metaseq_lm.core.errors import UsageError
from metaseq_lm.league.corpus import CorpusFacts, check_domain, from_about, read_corpus
from metaseq_lm.league.data_gates import conditions, domain, epochs, leak, not_judged

FILE = Path("runs.jsonl")


def corpus(**changes: object) -> CorpusFacts:
    return replace(CorpusFacts(SYMBOLS, UNIGRAM, words=1000, valid=ALIKE), **changes)


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
        (leak, {"valid": replace(ALIKE, passages=0.01)}, None),
        (leak, {"valid": replace(ALIKE, passages=0.03)}, "note"),
        (leak, {"valid": replace(ALIKE, passages=0.1)}, "flag"),
        (epochs, {"words": 10**9}, None),
        (epochs, {"words": None}, None),
    ],
)
def test_gates_of_the_data(gate, changes, action) -> None:
    row = make_row("causal", 0.8)
    actions = [finding.action for finding in gate(row, make_context(row, corpus=corpus(**changes)))]
    assert actions == ([action] if action else [])


def test_a_leak_says_what_stands_in_train() -> None:
    row = make_row("causal", 0.8)
    for valid, reason in (
        (replace(ALIKE, shared=0.12), "12.0 % in documents"),
        (replace(ALIKE, shared=0.0, passages=0.25), "25.0 % in passages of 50 tokens"),
        (
            replace(ALIKE, shared=0.2, passages=0.3),
            "20.0 % in documents and 30.0 % in passages of 50 tokens",
        ),
    ):
        (finding,) = leak(row, make_context(row, corpus=corpus(valid=valid)))
        assert finding.reason.endswith(f"train: {reason}")


def test_runs_that_did_otherwise_than_asked_are_counted() -> None:
    cut = {"cut": {"valid": 0.25}}
    row = change(make_row("causal", 0.8), with_results(conditions=cut), [0, 1, 2])
    (finding,) = conditions(row, make_context(row))
    assert finding.action == "note" and finding.reason.startswith("3 of 8 runs:")


def test_epochs_are_counted_in_words() -> None:
    row = change(make_row("causal", 0.8), with_results(words_seen=2500))
    (finding,) = epochs(row, make_context(row, corpus=corpus()))
    assert finding.action == "note" and "2.5 times" in finding.reason
    assert not list(epochs(row, make_context(row, corpus=None)))


@pytest.mark.parametrize(
    "known, reason",
    [
        (corpus(), ""),
        (corpus(valid=None), "domain and leak, as it is not known how valid compares with train"),
        (corpus(words=None), "epochs, as it is not known how many words train has"),
        (
            None,
            "domain and leak, as it is not known how valid compares with train; "
            "epochs, as it is not known how many words train has",
        ),
    ],
)
def test_what_is_not_known_of_the_data_is_said_once(known: CorpusFacts | None, reason: str) -> None:
    rows = [make_row(name, 0.8) for name in ("causal", "masked", "rtd")]
    context = make_context(*rows, corpus=known)
    findings = [finding for row in rows for finding in not_judged(row, context)]
    assert [(f.action, f.reason) for f in findings] == (
        [("note", f"not judged: {reason}")] if reason else []
    )


def test_runs_without_a_count_of_words_are_not_judged() -> None:
    rows = [make_row("causal", 0.8), make_row("masked", 0.8)]
    rows[1] = change(rows[1], with_results(words_seen=None), [0, 1, 2])
    context = make_context(*rows, corpus=corpus())
    (finding,) = not_judged(rows[0], context)
    expect_facts(finding.reason, "not judged: ", "epochs of 3", "16 runs")
    assert not list(epochs(rows[1], context))


def test_an_archive_keeps_what_is_known() -> None:
    known = corpus(valid=replace(ALIKE, passages=0.02))
    assert from_about(FILE, {"corpus": known.as_text()}) == known
    earlier = corpus().as_text().replace(', "passages": null', "")
    assert "passages" not in earlier and from_about(FILE, {"corpus": earlier}) == corpus()
    assert from_about(FILE, {"vocabulary": "7", "unigram": "1.5"}) == CorpusFacts(7, 1.5)
    assert from_about(FILE, {}) is None


def preprocessed(folder: Path, train: list[str], valid: list[str]) -> Path:
    """Return a data folder of lines of words."""
    for split, lines in (("train", train), ("valid", valid)):
        (folder / f"{split}.txt").write_text("".join(line + "\n" for line in lines))
    texts = [f"--{split}pref={folder / split}.txt" for split in ("train", "valid")]
    command = ["preprocess", *texts, "--tokenizer", "word", "--destdir", str(folder / "data")]
    assert main(command) == 0
    return folder / "data"


@pytest.fixture(scope="module")
def sources() -> list[str]:
    """The lines of one text of six sources one after the other, which share a vocabulary.

    Each has frequencies of its own, as adult and child-directed speech.
    """
    draw = np.random.default_rng(0)
    shares = 1 / np.arange(1, 121) ** 1.5
    lines = []
    for _ in range(6):
        words = draw.permutation([f"w{i}" for i in range(120)])
        drawn = draw.choice(words, (300, 12), p=shares / shares.sum())
        lines += [" ".join(line) for line in drawn]
    return lines


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory, sources: list[str]) -> Path:
    """A corpus whose valid split is the end of the text: it is of the last source alone."""
    return preprocessed(tmp_path_factory.mktemp("shifted"), sources[:-200], sources[-200:])


def test_lines_from_everywhere_in_the_text_are_of_its_domain(
    tmp_path: Path, sources: list[str]
) -> None:
    data = preprocessed(tmp_path, [x for i, x in enumerate(sources) if i % 9], sources[::9])
    known = read_corpus(data)
    assert known.valid and known.valid.shift < 0.02
    assert main(["doctor", str(data)]) == 0


def test_a_league_on_another_domain_does_not_start(shifted: Path) -> None:
    known = read_corpus(shifted)
    assert known.valid and known.valid.shift > 0.5 and known.words == 19200
    with pytest.raises(UsageError, match="another domain"):
        check_domain(known, shifted)
    check_domain(read_corpus(shifted, shifted=True), shifted)


def test_doctor_tells_another_domain(shifted: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor", str(shifted)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("error") and "another domain" in line for line in lines)
    assert main(["doctor", "--shifted-valid", str(shifted)]) == 0
