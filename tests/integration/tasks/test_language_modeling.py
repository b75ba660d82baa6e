"""Language modelling in both directions, and fine-tuning what it gives."""

import math
from pathlib import Path

import battery
import numpy as np
import pytest
import sentence_sets
import torch
from torch.nn import functional as F

from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.streams import Shard
from metaseq_lm.training.run import TrainingRun

TINY = [s for s in battery.TINY if not s.startswith("model.")]
NAMES = ["task=language_modeling", "criterion=language_modeling", "task.batch_size=16"]


def configure(data: Path, save: Path, *more: str) -> RunConfig:
    places = [f"data={data}", f"save_dir={save}", "task.tokens_per_sample=34"]
    return load_config([*battery.LSTM, *NAMES, *TINY, *places, *more])


@pytest.mark.parametrize("mode", ["eos", "none"])
def test_the_loss_is_the_mean_of_both_directions(mode: str, moons: Path, tmp_path: Path) -> None:
    """With torch's own cross-entropy, row by row: x and [SEP] forwards, x and [CLS] backwards."""
    more = [f"task.sample_break_mode={mode}", "task.tokens_per_sample=20"]
    run = TrainingRun(configure(moons, tmp_path, *more, "engine.precision=fp64"))
    stream = run.task.build_streams("valid")["valid"]
    last = list(stream.one_epoch(Shard()))[-1]  # the only one with padding in mode "none"
    (batch,) = run.engine.to_device(last)
    tokens, padding = batch.tokens, batch.padding
    assert padding is not None and padding.any()
    terms = run.task.criterion(run.model.eval(), batch)
    total = {"forward": 0.0, "backward": 0.0}
    count = 0
    vocabulary = run.task.vocabulary
    for row, pads in zip(tokens, padding):
        text = row[~pads]
        assert text[0] == vocabulary.cls() and text[-1] == vocabulary.sep
        ahead, back = run.model.directions(text.unsqueeze(0))
        total["forward"] += F.cross_entropy(ahead[0], text[1:], reduction="sum").item()
        total["backward"] += F.cross_entropy(back[0], text[:-1], reduction="sum").item()
        count += len(text) - 1
    assert batch.sizes == {"targets": count, "rows": len(tokens)}
    for name, term in terms.items():
        assert (term.per, term.weight) == ("targets", 0.5)
        assert term.sum.item() == pytest.approx(total[name], abs=1e-9)


def test_perplexity_and_learning(moons: Path, tmp_path: Path) -> None:
    """From the vocabulary's size, a uniform guess, to less than half; exp of the mean loss."""
    run = TrainingRun(configure(moons, tmp_path, "trainer.max_update=60", "optimizer.lr=0.02"))
    start = run.parts.score("valid")[0]
    assert start["perplexity"] == pytest.approx(len(run.task.vocabulary), rel=0.25)
    run.train()
    found = run.trainer.last_valid
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["loss"] == pytest.approx((found["forward"] + found["backward"]) / 2)
    assert found["perplexity"] < start["perplexity"] / 2


@pytest.mark.parametrize(
    "more, words",
    [
        (["model=transformer"], "task language_modeling needs --model bilstm_lm, got transformer"),
        (["task.sample_break_mode=segments"], "'segments'.*Choices: eos, none"),
        (["criterion=masked_lm"], "needs criterion=language_modeling"),
        (["task=masked_lm", "criterion=masked_lm"], "model bilstm_lm"),
        (["task=masked_lm"], "bilstm_lm"),
        (["task=sentence_pairs", "criterion=bert_pretraining"], "bilstm_lm"),
    ],
)
def test_mistakes(more: list[str], words: str, moons: Path, tmp_path: Path) -> None:
    places = [f"data={moons}", f"save_dir={tmp_path}"]
    start = battery.LSTM if "model=transformer" not in more else []
    with pytest.raises(UsageError, match=words):
        TrainingRun(load_config([*start, *NAMES, *TINY, *places, *more])).train()


# ---------------------------------------------------------------- fine-tuning


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, and a set of sentences and one of pairs that can be learnt."""
    place = tmp_path_factory.mktemp("sentences")
    sentence_sets.write_corpus(place)
    for form in ("single", "pair", "choices", "spans", "regression"):
        sentence_sets.learnable(place / form, form)
    return place


SMALL = ["model=bilstm_lm", "model.encoder_embed_dim=16", "model.encoder_hidden_dim=24"]
TUNING = ["task=sentence_prediction", "criterion=sentence_prediction", "task.tokens_per_sample=32"]
CALM = ["schedule=constant", "engine.threads=1", "engine.tensorboard=false"]


def tuning(data: Path, save: Path, *more: str) -> RunConfig:
    return load_config([*TUNING, *SMALL, *CALM, f"data={data}", f"save_dir={save}", *more])


@pytest.mark.parametrize("form", ["single", "pair"])
def test_sentences_and_pairs_are_learnt(form: str, sets: Path, tmp_path: Path) -> None:
    """The same head as a Transformer's, on the ends of both directions."""
    more = [f"task.labelled={form}", "optimizer.lr=0.01", "task.epochs=6", "task.batch_size=16"]
    run = TrainingRun(tuning(sets, tmp_path, *more))
    run.train()
    assert run.trainer.last_valid["accuracy"] > 0.9


@pytest.mark.parametrize("form", ["choices", "spans", "regression"])
def test_language_model_of_other_forms_runs(form: str, sets: Path, tmp_path: Path) -> None:
    run = TrainingRun(tuning(sets, tmp_path, f"task.labelled={form}", "trainer.max_update=2"))
    run.train()
    assert np.isfinite(run.trainer.last_valid["loss"])


def test_the_encoder_is_taken_over(moons: Path, tmp_path: Path) -> None:
    before = TrainingRun(configure(moons, tmp_path / "lm", "trainer.max_update=2", *SMALL))
    before.train()
    trained = before.model.state_dict()
    start = [f"init_from={tmp_path / 'lm'}", "task.labelled=which_moon_20"]
    run = TrainingRun(tuning(moons, tmp_path / "tuned", *start))
    own = run.model.state_dict()
    names = {n for n in own if n.startswith("encoder.")}
    assert len(names) == 1 + 2 * 2 * 5
    assert all(torch.equal(own[n], trained[n]) for n in names)
    costs = run.initialisation.costs.values()
    assert costs and sum(cost["flops"] for cost in costs) > 0
