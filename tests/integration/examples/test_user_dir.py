"""The example plug-in trains, and its spans are what it says."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from agreement import make_data, make_run, sentences
from battery import TINY
from outcomes import expect_error

from metaseq_lm import plugins
from metaseq_lm.cli import main
from metaseq_lm.core.random_streams import key, row_keys
from metaseq_lm.data.corpus.units import SpanLengths
from metaseq_lm.data.labelled.files import SourceSentence
from metaseq_lm.data.worlds.base import build_world
from metaseq_lm.evaluation.suites import SentenceScore, build_suite
from metaseq_lm.reporting.folders import read_run

ROOT = Path(__file__).resolve().parents[3]
CHOICE = ["--user-dir", str(ROOT / "user_dir"), "--task", "span_masking"]
ROWS = ["task.sample_break_mode=eos", "task.tokens_per_sample=34"]


def test_span_masking_learns(moons: Path, tmp_path: Path) -> None:
    options = ["--criterion", "span_boundary", "--save-dir", str(tmp_path), *TINY, *ROWS]
    steps = ["--max-update", "150", "--lr", "0.01", "--warmup-updates", "20"]
    assert main(["train", str(moons), *CHOICE, *options, *steps]) == 0
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    for name in ("mlm", "boundary"):
        losses = [line[name] for line in log if line["kind"] == "train"]
        assert losses[0] > 4 and np.mean(losses[-10:]) < 0.9 * losses[0]


def test_span_masking_starts_from_a_masked_lm(moons: Path, tmp_path: Path) -> None:
    first, short = tmp_path / "mlm", ["--max-update", "1", *TINY, *ROWS]
    assert main(["train", str(moons), "--save-dir", str(first), *short]) == 0
    second = tmp_path / "spans"
    more = ["--criterion", "span_boundary", "--init-from", str(first), "--save-dir", str(second)]
    assert main(["train", str(moons), *CHOICE, *more, *short]) == 0
    said = json.loads((second / "log.jsonl").read_text().splitlines()[0])["message"]
    assert said.startswith("starts from") and said.endswith("; fresh: heads.boundary")


def write_gaps(path: Path, count: int) -> None:
    """Write sentences of the toy language without their verb, which the right word agrees with."""
    rows = []
    for right, wrong in zip(sentences(count, 3), sentences(count, 3, grammatical=False)):
        verbs = {good: bad for good, bad in zip(right.split(), wrong.split()) if good != bad}
        ((good, bad),) = verbs.items()
        kind = "plural" if bad.endswith("s") else "singular"
        text = right.replace(f" {good} ", " ___ ")
        rows.append({"text": text, "words": [good, bad], "kind": kind})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_suite_scores_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(make_data(tmp_path), tmp_path / "run", 600)
    write_gaps(tmp_path / "gaps.jsonl", 100)
    command = ["score", str(run), "--suite", "gaps", "--data", str(tmp_path / "gaps.jsonl")]
    assert main([*command, *CHOICE[:2]]) == 0
    metrics = read_run(run).metrics
    assert metrics["gaps.accuracy"] > 0.8
    assert metrics["gaps.plural.n"] + metrics["gaps.singular.n"] == metrics["gaps.n"] == 100
    capsys.readouterr()
    assert main(["list", "suite", *CHOICE[:2]]) == 0
    assert "user_dir.gaps" in capsys.readouterr().out
    (tmp_path / "gaps.jsonl").write_text('{"text": "a ___ b"}\n')
    expect_error(capsys, main([*command, *CHOICE[:2]]), 2, "gaps.jsonl:1: no field")


def test_equal_words_share_and_long_sentences_are_left_out() -> None:
    plugins.load(str(ROOT / "user_dir"))
    suite = build_suite("gaps")
    gap_type = sys.modules["user_dir.gaps"].Gap
    table = {"a": 0.0, "b": -1.0, "c": 0.0}

    class Probabilities:
        def score(self, texts: list[SourceSentence]) -> list[SentenceScore | None]:
            values = [table.get(one.text) for one in texts]
            return [
                None if v is None else SentenceScore(np.zeros(1), np.array([v])) for v in values
            ]

    gaps = [
        gap_type("k", [SourceSentence(text, "here") for text in words])
        for words in ("abc", "ba", "ad")
    ]
    results = suite.score(gaps, Probabilities())
    assert results["overall"].n == 2 and results["k"].metrics["accuracy"] == 0.25


@pytest.mark.parametrize(
    "more, words",
    [
        ("task.mask_rounding=nearest", "mask_rounding=random"),
        ("task.mean_span=0.5", "task.mean_span must be at least 1"),
        ("criterion.boundary_weight=-1", "criterion.boundary_weight must be at least 0"),
    ],
)
def test_wrong_options(moons: Path, tmp_path: Path, more: str, words: str, capsys) -> None:
    options = ["--criterion", "span_boundary", "--save-dir", str(tmp_path), *TINY, *ROWS]
    expect_error(capsys, main(["train", str(moons), *CHOICE, *options, more]), 2, words)


def test_spans_have_their_number_and_length() -> None:
    from user_dir.spans import draw_spans

    candidates = np.ones((2000, 100), bool)
    candidates[:, [0, 60, 99]] = False
    counts = np.full(2000, 15)
    found = draw_spans(
        candidates, counts, SpanLengths(5.0, 10), row_keys(key("spans"), np.arange(2000))
    )
    assert found["counted"].all() and found["positions"].shape == (2000, 15)
    rows = np.arange(2000)[:, None]
    assert candidates[rows, found["positions"]].all()
    assert all(len(set(row)) == 15 for row in found["positions"].tolist())
    assert (found["positions"] == found["left"] + 1 + found["offset"]).all()
    assert (found["right"] > found["positions"]).all() and (found["right"] <= 99).all()
    sizes = (found["right"] - found["left"] - 1)[found["offset"] == 0]
    assert sizes.sum() == 2000 * 15 and sizes.max() <= 10
    # The paper's mean is 3.8; the end of the budget, other spans and ends of rows cut some.
    assert 2.9 < sizes.mean() < 3.7
    hidden = np.zeros((2000, 100), bool)
    hidden[rows, found["positions"]] = True
    assert not hidden[rows, found["left"]].any() and not hidden[rows, found["right"]].any()


def test_spans_do_not_depend_on_the_width() -> None:
    from user_dir.spans import draw_spans

    candidates = np.random.default_rng(1).random((50, 40)) < 0.9
    keys, counts = row_keys(key("spans"), np.arange(50)), np.full(50, 7)
    wide = np.pad(candidates, ((0, 0), (0, 30)))
    one, other = (draw_spans(c, counts, SpanLengths(3.0, 10), keys) for c in (candidates, wide))
    assert all((one[name] == other[name]).all() for name in one)


def test_the_boundary_head_does_not_see_the_span() -> None:
    """Its logits follow the states outside of the span and the offset, nothing else."""
    from metaseq_lm.config.transformer import TransformerConfig
    from user_dir.model import BoundaryHead
    from user_dir.spans import SpanBatch

    torch.manual_seed(1)
    config = TransformerConfig(encoder_embed_dim=6, encoder_ffn_embed_dim=8)
    head = BoundaryHead(config, 11, 4)
    x = torch.randn(1, 7, 6, requires_grad=True)
    left, right, offset = (torch.tensor([pair]) for pair in ([1, 1], [4, 4], [0, 1]))
    batch = SpanBatch(tokens=torch.zeros(1, 7), left=left, right=right, offset=offset)
    logits = head(x, batch, torch.randn(11, 6))
    assert logits.shape == (1, 2, 11) and not torch.equal(logits[0, 0], logits[0, 1])
    (grad,) = torch.autograd.grad(logits.square().sum(), x)
    assert grad.abs().sum(-1)[0].bool().tolist() == [False, True, False, False, True, False, False]


def test_the_world_is_exact(tmp_path: Path) -> None:
    plugins.load_all(str(ROOT / "user_dir"))
    sizes = ["nouns=2", "verbs=1", "phrases=1"]
    for ambiguous in ("true", "false"):
        world = build_world("hierarchy", 0, [*sizes, f"ambiguous={ambiguous}"])
        words = np.array(np.meshgrid(*[np.arange(-1, len(world.symbols))] * 5, indexing="ij"))
        sentences = words.reshape(5, -1).T
        padded = np.full((len(sentences), world.longest), -1)
        padded[:, :5] = sentences
        # All sentences without a reflexive, or without a phrase: 5 words at most with the end.
        shorter = np.exp(world.log_probs(padded)).sum()
        documents = world.sample(row_keys(key("world"), np.arange(4000)))
        assert np.isfinite(world.log_probs(documents.tokens)).all()
        share = (documents.lengths <= 5).mean()
        assert shorter == pytest.approx(3 / 4) and share == pytest.approx(3 / 4, abs=0.04)


def test_the_world_makes_data(tmp_path: Path) -> None:
    command = ["preprocess", *CHOICE[:2], "--world", "hierarchy", "--world-documents", "800"]
    command += ["--world-options", "nouns=6,verbs=4", "--destdir", str(tmp_path), "--quiet"]
    assert main(command) == 0
    pairs = json.loads((tmp_path / "world.json").read_text())["constants"]["pairs"]
    assert [pairs[f"agreement_{kind}"]["bayes"] for kind in ("same", "opposed")] == [1, 0.5]
    # n-grams take the nearest noun.
    assert pairs["agreement_same"]["ngram"] > 0.7 and pairs["agreement_opposed"]["ngram"] < 0.3
    suite = build_suite("pairs")
    assert len(suite.read(tmp_path / "pairs")) == 4 * 500
