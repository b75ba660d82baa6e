"""The language model of words: which words it knows, its loss row by row, learning, mistakes."""

from pathlib import Path

import battery
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.streams import Shard
from metaseq_lm.data.words.vocabulary import (
    END,
    SPECIAL_CHARACTERS,
    SPECIAL_WORDS,
    START,
    UNKNOWN,
    WordVocabulary,
)
from metaseq_lm.tasks.language_modeling import _model_ids
from metaseq_lm.training.parts import build_parts
from metaseq_lm.training.run import TrainingRun

NAMES = [*battery.WORD_LM, "criterion=language_modeling"]
TINY = [s for s in battery.TINY if not s.startswith("model.")]


def configure(data: Path, save: Path, *more: str) -> RunConfig:
    return load_config([*NAMES, *TINY, f"data={data}", f"save_dir={save}", *more])


def test_frequent_words_are_known_and_others_are_unknown() -> None:
    words = [*SPECIAL_WORDS, "a", "b", "c", "d", "e"]
    counts = [0] * 5 + [3, 7, 1, 3, 0]
    vocabulary = WordVocabulary(words, SPECIAL_CHARACTERS, counts)
    special = [0, 1, 2, 3, 4]
    assert _model_ids(vocabulary, 1).tolist() == [*special, 6, 5, 8, 7, 1]
    assert _model_ids(vocabulary, 2).tolist() == [*special, 6, 5, 1, 7, 1]
    assert _model_ids(vocabulary, 2, size=2).tolist() == [*special, 6, 5, 1, 1, 1]
    with pytest.raises(MetaseqError, match="word of.*data"):
        _model_ids(vocabulary, 8)


def test_the_loss_is_the_mean_of_both_directions(sentences: Path, tmp_path: Path) -> None:
    """With torch's own cross-entropy, row by row, rare words being <unk> for both sides."""
    more = ["task.vocab_size=9", "engine.precision=fp64", "task.valid_size=11"]
    run = build_parts(configure(sentences, tmp_path, *more))
    model, vocabulary = run.model.eval(), run.task.words
    assert model.heads["lm"].weight.shape[0] == 5 + 9
    unknown = model.encoder.ids == UNKNOWN
    assert unknown.sum() == len(vocabulary) - 5 - 9 + 1
    stream = run.task.build_streams("valid")["valid"]
    assert sum(len(b.samples) for (b,) in stream.one_epoch(Shard())) == 11
    (batch,) = run.engine.to_device(stream.micro_batches(0, Shard()))
    total = {"forward": 0.0, "backward": 0.0}
    count = 0
    plain = dict(model.encoder.named_buffers())["ids"]
    for row, pads in zip(batch.tokens, batch.padding):
        text = row[~pads]
        assert text[0] == START and text[-1] == END
        ids = plain[text]
        ahead, back = model.directions(text.unsqueeze(0))
        total["forward"] += F.cross_entropy(ahead[0], ids[1:], reduction="sum").item()
        total["backward"] += F.cross_entropy(back[0], ids[:-1], reduction="sum").item()
        count += len(text) - 1
    assert batch.sizes["targets"] == count
    for name, term in run.task.criterion(model, batch).items():
        assert (term.per, term.weight) == ("targets", 0.5)
        assert term.sum.item() == pytest.approx(total[name], abs=1e-9)


def test_unknown_words_are_one_word(sentences: Path, tmp_path: Path) -> None:
    run = build_parts(configure(sentences, tmp_path, "task.vocab_size=9"))
    first, second = (run.model.encoder.ids == 1).nonzero().flatten()[1:3]
    rows = torch.tensor([[2, 7, first, 6, 3], [2, 7, second, 6, 3]])
    for states in run.model.eval().encoder.states(rows):
        assert all(torch.equal(layer[0], layer[1]) for layer in states)


def test_word_language_model_learns(sentences: Path, tmp_path: Path) -> None:
    """From the perplexity of a uniform guess to less than half of it."""
    run = TrainingRun(configure(sentences, tmp_path, "trainer.max_update=40", "optimizer.lr=0.05"))
    start = run.parts.score("valid")[0]["perplexity"]
    assert start == pytest.approx(run.model.heads["lm"].weight.shape[0], rel=0.25)
    run.train()
    assert run.trainer.last_valid["perplexity"] < start / 2


def test_batches_hold_the_text_without_long_sentences(sentences: Path, tmp_path: Path) -> None:
    run = build_parts(configure(sentences, tmp_path, "task.longest=12"))
    stream = run.task.build_streams("train")["train"]
    seen = np.concatenate([stream.order.batch(i) for i in range(stream.order.per_epoch)])
    assert sorted(seen) == np.flatnonzero(stream.lengths < 12).tolist()
    assert 0 < len(seen) < len(stream.lengths)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["task.min_frequency=0"], "min_frequency .*at least 1"),
        (["task.min_frequency=100000"], "lower it"),
        (["task.valid_size=-3"], "task.valid_size .*at least 0"),
        (["task.longest=-1"], "task.longest .*at least 0"),
        (["criterion=masked_lm"], "needs criterion=language_modeling"),
    ],
)
def test_mistakes(more: list[str], words: str, sentences: Path, tmp_path: Path) -> None:
    with pytest.raises(MetaseqError, match=words):
        TrainingRun(configure(sentences, tmp_path, *more)).train()


def test_word_language_model_refuses_data_without_words(tmp_path: Path) -> None:
    with pytest.raises(MetaseqError, match="metaseq-lm preprocess --words"):
        TrainingRun(configure(tmp_path, tmp_path / "run"))
