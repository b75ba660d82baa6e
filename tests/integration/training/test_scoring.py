"""Pseudo-log-likelihoods: their definition, and what they must not depend on."""

import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from agreement import make_data, make_run, sentences
from battery import CASES, TINY, configure
from hypothesis import given
from hypothesis import strategies as st

from metaseq_lm.cli import main
from metaseq_lm.core.batch import Layout, ScoredBatch
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.criterions.masked_lm import MaskedLM
from metaseq_lm.data.labelled.files import SourceSentence
from metaseq_lm.evaluation.minimal_pairs import read_pairs
from metaseq_lm.evaluation.suites import SentenceScore
from metaseq_lm.methods.meta_pseudo_label.criterion import HardLabels
from metaseq_lm.methods.meta_pseudo_label.options import HardConfig
from metaseq_lm.tasks.protocols import token_scorer
from metaseq_lm.training.restore import open_run
from metaseq_lm.training.run import TrainingRun
from metaseq_lm.training.scoring import SentenceScorer, batches_by_length

TEXTS = [*sentences(12, 5), "cats", "the the the the the the the the", "an unknown dog runs"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three updates, with dropout, so that weights are neither trained nor symmetric."""
    folder = tmp_path_factory.mktemp("scoring")
    return make_run(make_data(folder), folder / "run", 3, "model.dropout=0.1")


@pytest.fixture(scope="module")
def opened(place: Path) -> TrainingRun:
    """The run in float64."""
    return open_run(str(place), overrides=["engine.precision=fp64"])


def scored(run: TrainingRun, texts: list[str], *args: object) -> list[SentenceScore]:
    """Return the scores of texts of which none is skipped."""
    given = [SourceSentence(text, f"here:{n}") for n, text in enumerate(texts, 1)]
    scores = SentenceScorer(run, *args).score(given)  # type: ignore[arg-type]
    return [score for score in scores if score is not None]


def by_hand(run: TrainingRun, text: str) -> list[float]:
    """Hide one token after the other in a row of its own, and look its log-probability up."""
    symbols = {s: n for n, s in enumerate(SentenceScorer(run).vocabulary.symbols)}
    ids = [symbols["[CLS0]"], *(symbols.get(w, symbols["[UNK]"]) for w in text.split())]
    found = []
    run.model.eval()
    for at in range(1, len(ids)):
        row = torch.tensor([[*ids, symbols["[SEP]"]]])
        row[0, at] = symbols["[MASK]"]
        with torch.no_grad():
            found.append(run.model(row)[0, at].log_softmax(-1)[ids[at]].item())
    return found


def test_a_score_is_the_sum_over_hidden_tokens(opened):
    opened.model.train()  # the scorer must switch dropout off itself
    for text, score in zip(TEXTS, scored(opened, TEXTS), strict=True):
        wanted = by_hand(opened, text)
        assert score.log_probs == pytest.approx(wanted, abs=1e-12)
        assert score.pll == pytest.approx(sum(wanted), abs=1e-12)
        assert len(score.tokens) == len(text.split())


@pytest.mark.parametrize("batch_tokens", [1, 9, 40, 100, 100_000])
def test_scores_do_not_depend_on_the_batch(place, opened, batch_tokens):
    alone = [scored(opened, [text])[0].pll for text in TEXTS]
    assert [s.pll for s in scored(opened, TEXTS, batch_tokens)] == pytest.approx(alone, abs=1e-12)
    back = [s.pll for s in scored(opened, TEXTS[::-1], batch_tokens)]
    assert back[::-1] == pytest.approx(alone, abs=1e-12)
    single = open_run(str(place))
    assert [s.pll for s in scored(single, TEXTS, batch_tokens)] == pytest.approx(alone, rel=1e-5)


def test_low_precision_is_near(place, opened):
    low = scored(open_run(str(place), overrides=["engine.precision=bf16"]), TEXTS)
    exact = [score.pll for score in scored(opened, TEXTS)]
    assert [score.pll for score in low] == pytest.approx(exact, rel=0.02)
    assert [score.pll for score in low] != pytest.approx(exact, rel=1e-9)


def test_segments_go_along_with_their_rows():
    """A model is asked with the segments and padding of the row that a hidden token stands in."""
    seen = []

    def model(tokens, layout, positions, segments):  # type: ignore[no-untyped-def]
        seen.append((tokens, layout.padding, positions, segments))
        return torch.zeros(len(tokens), 1, 50)

    tokens = torch.tensor([[3, 10, 11, 2], [3, 12, 2, 0]])
    padding, segments = tokens == 0, torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])
    scored = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0]]).bool()
    rows = {"tokens": tokens, "layout": Layout(padding), "segments": segments}
    batch = ScoredBatch(**rows, scored=scored, mask_id=1, batch_tokens=8)
    found = MaskedLM().token_log_probs(model, batch)
    assert torch.allclose(found, scored * -torch.tensor(50.0).log())
    assert [len(call[0]) for call in seen] == [2, 1]  # 8 tokens are two rows of 4
    hidden, padded, positions, segmented = (torch.cat(parts) for parts in zip(*seen))
    assert hidden.tolist() == [[3, 1, 11, 2], [3, 10, 1, 2], [3, 1, 2, 0]]
    assert positions.tolist() == [[1], [2], [1]]
    assert torch.equal(padded, padding[[0, 0, 1]]) and torch.equal(segmented, segments[[0, 0, 1]])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 100))
def test_every_row_is_in_one_batch(lengths, batch_tokens):
    sizes = np.array(lengths)
    batches = list(batches_by_length(sizes, batch_tokens))
    assert sorted(np.concatenate(batches)) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * sizes[batch].max() <= batch_tokens
    assert all(sizes[a].min() >= sizes[b].max() for a, b in itertools.pairwise(batches))


def test_equal_rows_and_empty_ones_cost_nothing(opened):
    scorer = SentenceScorer(opened)
    texts = ["the zebra sleeps", "", "the yak sleeps", "cats"]  # two unknown words are one token
    scores = scorer.score([SourceSentence(text, "x") for text in texts])
    assert [score and len(score.tokens) for score in scores] == [3, 0, 3, 1]
    assert scores[0] is scores[2] and scores[1] is not None and scores[1].pll == 0
    # Of n tokens n rows of n + 2; the shorter row is padded to the longer, of 5.
    assert (scorer.cost.sentences, scorer.cost.tokens) == (2, 4)
    assert scorer.cost.forward_tokens == 3 * 5 + 1 * 5
    assert scorer.score([]) == []


PAIRS = [
    ("the old cats sleep", "the old cats sleeps"),
    ("cats run", "cats runs"),
    ("the dog runs", "the cats run"),
    ("cats run", "cats run"),
]


def test_only_changed_tokens_are_scored(opened):
    pairs = [
        (SourceSentence(good, f"good:{n}"), SourceSentence(bad, "bad"))
        for n, (good, bad) in enumerate(PAIRS)
    ]
    scorer = SentenceScorer(opened)
    for pair, scores in zip(pairs, scorer.score_changed(pairs), strict=True):
        whole = scored(opened, [sentence.text for sentence in pair])
        differs = whole[0].tokens != whole[1].tokens
        assert scores is not None
        for score, full in zip(scores, whole):
            assert score.tokens.tolist() == full.tokens[differs].tolist()
            assert score.log_probs == pytest.approx(full.log_probs[differs], abs=1e-12)
    # One row, of 6 tokens with padding, for each of the first two pairs, and four for the third,
    # whose sentences differ beside the masked token.
    assert scorer.cost.forward_tokens == (1 + 1 + 4) * 6
    with pytest.raises(MetaseqError, match="good:0.* 2 and 1.*compare=changed"):
        scorer.score_changed(
            [(SourceSentence("cats run", "good:0"), SourceSentence("cats", "bad"))]
        )
    long = SourceSentence(" ".join(["cats"] * 11), "long")
    skipping = SentenceScorer(opened, too_long="skip")
    assert skipping.score_changed([(long, long), pairs[1]])[0] is None


def test_parts_of_sentences(opened):
    """Their scores are the sums over their tokens, and only these are scored."""
    text, other = "the old cats sleep here", "cats run"
    sentences = [SourceSentence(text, "x"), SourceSentence(other, "y"), SourceSentence(text, "z")]
    parts = [[(4, 8), (13, len(text))], [(0, 4), (4, 4)], [(0, 0)]]
    scorer = SentenceScorer(opened)
    sums = scorer.score_parts(sentences, parts)
    first, second = (score.log_probs for score in scored(opened, [text, other]))
    assert sums[0] == pytest.approx([first[1], first[3:].sum()], abs=1e-12)
    assert sums[1] == pytest.approx([second[0], 0], abs=1e-12)
    assert sums[2] == pytest.approx([0])
    assert scorer.cost.forward_tokens == (3 + 1) * 7  # passes of rows of 7 with padding
    long = "the " * 9 + "old cats"
    ends = [[(36, 44)], [(0, 44)]]
    cut = SentenceScorer(opened, too_long="cut").score_parts([SourceSentence(long, "x")] * 2, ends)
    last = scored(opened, ["the " * 8 + "old cats"])[0].log_probs[-2:]
    assert cut[0] == pytest.approx([last.sum()], abs=1e-12) and cut[1] is None
    with pytest.raises(MetaseqError, match=r"long:1.*\b10\b.*its first"):
        scorer.score_parts([SourceSentence(long, "long:1")], [[(36, 44)]])


def test_sentences_longer_than_the_rows(opened):
    long, short = " ".join(["cats"] * 11), "cats run"
    with pytest.raises(MetaseqError, match=r"here:2: 11 tokens.*\b10\b.*tokens_per_sample"):
        scored(opened, [short, long])
    left = scored(opened, [short, long], 100, "skip")
    assert [len(score.tokens) for score in left] == [2]
    cut = scored(opened, [short, long], 100, "cut")[1]
    assert cut.pll == scored(opened, [" ".join(["cats"] * 10)])[0].pll


def test_rows_end_where_the_training_rows_did(place):
    run = open_run(str(place), overrides=["task.tokens_per_sample=6"])
    with pytest.raises(MetaseqError, match="room for 4"):
        scored(run, ["the old cats sleep here"])


def test_token_scorer_refuses_criterions_without_probabilities(opened):
    task = SimpleNamespace(
        criterion=HardLabels(HardConfig()),
        run_config=load_config(["criterion=meta_pseudo_label_hard"]),
    )
    with pytest.raises(UsageError, match="meta_pseudo_label_hard.*: .*masked_lm"):
        token_scorer(task)
    assert token_scorer(opened.task)


def test_sentence_scorer_refuses_wrong_arguments(opened):
    for wrong in ((0,), (9, "never")):
        with pytest.raises(UsageError):
            scored(opened, ["cats"], *wrong)


def test_the_student_of_a_pair_reads_text_behind_its_own_token(moons, tmp_path):
    save = tmp_path / "run"
    options = [*CASES["masked_lm"][1], *TINY, "trainer.max_update=1", "trainer.valid_split=''"]
    command = ["train", str(moons), "--save-dir", str(save), "--criterion", "masked_lm"]
    assert main([*command, *options]) == 0
    run = open_run(str(save), overrides=["engine.precision=fp64"])
    scorer = SentenceScorer(run)
    [score] = scored(run, ["some text"])
    row = [scorer.vocabulary.cls(1), *score.tokens, scorer.vocabulary.sep]
    hidden = torch.tensor([row] * len(score.tokens))
    at = torch.arange(len(score.tokens))
    hidden[at, at + 1] = scorer.vocabulary.mask
    with torch.no_grad():
        logits = run.model["student"](hidden)[at, at + 1].log_softmax(-1)
    assert score.log_probs == pytest.approx(logits[at, score.tokens].numpy(), abs=1e-12)


def test_blimp_is_read():
    folder = os.environ.get("METASEQ_LM_DATA")
    if not folder or not (Path(folder) / "blimp").is_dir():
        pytest.skip("METASEQ_LM_DATA names no folder with blimp")
    files = sorted((Path(folder) / "blimp").glob("*.jsonl"))
    counts = [len(read_pairs(str(file))[0]) for file in files]
    assert counts == [1000] * 34


def test_a_run_on_words_says_that_it_cannot_score(moons, tmp_path):
    """Its data have no tokenizer of texts; that is not the reason."""
    config = configure(moons, tmp_path, ("tagging", 0), "trainer.max_update=1")
    with pytest.raises(UsageError, match="criterion tagging"):
        SentenceScorer(TrainingRun(config))
