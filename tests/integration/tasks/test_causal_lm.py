"""The causal language model: its loss and scores by hand, FLOPs by rule, what it refuses."""

import json
import re
from pathlib import Path

import battery
import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from torch.nn import functional as F

from metaseq_lm.core.batch import Layout, ScoredBatch, TokenBatch
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.criterions.language_modeling import next_tokens
from metaseq_lm.data.labelled.files import SourceSentence
from metaseq_lm.data.streams import Shard
from metaseq_lm.interop.claims import claimed_export
from metaseq_lm.models.transformer.flops_rules import Sizes
from metaseq_lm.training.restore import open_run
from metaseq_lm.training.run import TrainingRun
from metaseq_lm.training.scoring import SentenceScorer

NAMES = ["task=causal_lm", "criterion=causal_lm", "task.batch_size=16", "engine.precision=fp64"]


def configure(data: Path, save: Path, *more: str) -> DictConfig:
    places = [f"data={data}", f"save_dir={save}", "task.tokens_per_sample=34"]
    return load_config([*NAMES, *battery.TINY, *places, *more])


@pytest.mark.parametrize("mode", ["eos", "none"])
def test_the_loss_is_that_of_the_next_token(mode, moons, tmp_path):
    """With torch's own cross-entropy, prefix by prefix; dropout is off."""
    more = [f"task.sample_break_mode={mode}", "task.tokens_per_sample=12", "task.batch_size=3"]
    run = TrainingRun(configure(moons, tmp_path, *more))
    stream = run.task.build_streams("valid")["valid"]
    last = list(stream.one_epoch(Shard()))[-1]  # the only one with padding in mode "none"
    (batch,) = run.engine.to_device(last)
    model = run.model.eval()
    terms = run.task.criterion(model, batch)
    total, count = 0.0, 0
    for row, padding in zip(batch.tokens, batch.layout.padding_of(batch.tokens)):
        text = row[~padding]
        for length in range(1, len(text)):
            logits = model(text[None, :length])[0, -1]  # both sides of a prefix are its past
            alone = model(text[None, :length], Layout(reach="causal"))[0, -1]
            total += F.cross_entropy(alone, text[length]).item()
            assert length == 1 or not torch.allclose(alone, logits)
            count += 1
    assert batch.sizes["targets"] == count
    assert terms["next_token"].per == "targets"
    assert terms["next_token"].sum.item() == pytest.approx(total, abs=1e-9)


def test_scores_are_sums_over_prefixes(moons, tmp_path):
    """Of a trained and restored run: [SEP] is not scored, and later words change nothing."""
    run = TrainingRun(configure(moons, tmp_path, "trainer.max_update=3"))
    run.train()
    parts = open_run(str(tmp_path), overrides=["engine.precision=fp64"])
    texts = ["0 1 1 0", "0 1 1 0 1 1 1", "1"]
    scores = SentenceScorer(parts).score([SourceSentence(text, text) for text in texts])
    vocabulary, model = parts.task.vocabulary, parts.model.eval()
    for score in scores:
        assert score is not None
        row = torch.tensor([[vocabulary.cls(), *score.tokens.tolist()]])
        wanted = []
        for length in range(1, row.shape[1]):
            logits = model(row[:, :length], Layout(reach="causal"))[0, -1]
            wanted.append(logits.log_softmax(-1)[row[0, length]].item())
        np.testing.assert_allclose(score.log_probs, wanted, atol=1e-12)
    first, longer = scores[0], scores[1]
    assert first is not None and longer is not None
    shared = len(first.tokens)
    np.testing.assert_allclose(longer.log_probs[:shared], first.log_probs, atol=1e-12)


def test_no_target_lies_in_another_document():
    tokens = torch.tensor([[3, 7, 2, 3, 8, 9, 2, 0]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    layout = Layout(tokens == 0, documents)
    targets = next_tokens(TokenBatch(tokens=tokens, layout=layout))
    assert targets.tolist() == [[7, 2, -1, 8, 9, 2, -1, -1]]


def test_packed_rows_have_the_losses_of_their_documents(moons, tmp_path):
    run = TrainingRun(configure(moons, tmp_path))
    criterion, model = run.task.criterion, run.model.eval()
    parts = [torch.tensor([[3, 10, 11, 2]]), torch.tensor([[3, 12, 2]])]
    documents = torch.tensor([[0] * 4 + [1] * 3])
    packed = TokenBatch(tokens=torch.cat(parts, 1), layout=Layout(documents=documents))
    alone = sum(criterion(model, TokenBatch(tokens=part))["next_token"].sum for part in parts)
    together = criterion(model, packed)["next_token"].sum
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


def test_only_scored_positions_have_a_probability(moons, tmp_path):
    run = TrainingRun(configure(moons, tmp_path))
    tokens = torch.tensor([[3, 10, 11, 2]])
    scored = torch.tensor([[False, False, True, False]])
    batch = ScoredBatch(tokens=tokens, scored=scored, mask_id=1, batch_tokens=8)
    log_probs = run.task.criterion.token_log_probs(run.model.eval(), batch)
    assert (log_probs != 0).tolist() == scored.tolist()


def test_flops_by_rule(moons, tmp_path):
    """Twice the forward pass, with a softmax at every position."""
    run = TrainingRun(configure(moons, tmp_path))
    row = Sizes.of(run.config.model, len(run.task.vocabulary), 34)
    wanted = 16 * 2 * (row.blocks() + row.inputs() + row.softmax_head(1.0))
    assert run.task.flops_by_rule() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    "more, fact",
    [
        (["task=masked_lm"], "causal_lm is for task causal_lm"),
        (["criterion=masked_lm"], "needs criterion=causal_lm"),
        (["model=bilstm_lm"], "task causal_lm cannot train model bilstm_lm"),
    ],
)
def test_what_does_not_belong_together_is_refused(more, fact, moons, tmp_path):
    tiny = [o for o in battery.TINY if not (o.startswith("model.") and "bilstm" in more[0])]
    names = [o for o in NAMES if o.partition("=")[0] != more[0].partition("=")[0]]
    places = [f"data={moons}", f"save_dir={tmp_path}", "task.tokens_per_sample=34"]
    with pytest.raises(UsageError, match=fact):
        TrainingRun(load_config([*names, *tiny, *more, *places])).train()


def fine_tuning(data: Path, save: Path, *more: str) -> TrainingRun:
    """Return a run on the parity of Two Moons' labels."""
    names = ["task=sentence_prediction", "criterion=sentence_prediction", "task.epochs=0"]
    places = [f"data={data}", f"save_dir={save}", "task.labelled=which_moon_20"]
    sizes = ["task.tokens_per_sample=34", "trainer.max_update=2"]
    return TrainingRun(load_config([*names, *battery.TINY, *places, *sizes, *more]))


def test_fine_tuning_a_causal_model_reads_the_last_token(moons, tmp_path):
    """As its objective had it, also when the run goes on without its source, or is reopened."""
    source = tmp_path / "causal"
    TrainingRun(configure(moons, source, "trainer.max_update=2")).train()
    run = fine_tuning(moons, tmp_path / "run", f"init_from={source}")
    assert run.config.task.reach == "causal" and run.model.is_causal
    run.train()
    (tmp_path / "causal").rename(tmp_path / "moved")
    again = fine_tuning(moons, tmp_path / "run", f"init_from={source}", "trainer.max_update=3")
    assert again.config.task.reach == "causal"
    assert open_run(str(tmp_path / "run")).model.is_causal
    next_one = fine_tuning(moons, tmp_path / "next", f"init_from={tmp_path / 'run'}")
    assert next_one.model.is_causal
    two_sided = ["task.reach=both", f"init_from={tmp_path / 'moved'}"]
    assert not fine_tuning(moons, tmp_path / "both", *two_sided).model.is_causal
    new = fine_tuning(moons, tmp_path / "new")
    assert new.config.task.reach == "auto" and not new.model.is_causal
    with pytest.raises(MetaseqError, match=r"reads \[SEP\]"):
        claimed_export(run.config, "run")


def test_a_run_from_before_the_option_sees_both_sides(moons, tmp_path):
    """Though it started from a causal model."""
    source = tmp_path / "causal"
    TrainingRun(configure(moons, source, "trainer.max_update=2")).train()
    save, start = tmp_path / "run", f"init_from={source}"
    fine_tuning(moons, save, start, "task.reach=both").train()
    for manifest in (save / "checkpoints").glob("update_*/manifest.json"):
        stored = json.loads(manifest.read_text())
        del stored["config"]["task"]["reach"], stored["checksum"]
        manifest.write_text(json.dumps(stored))
    file = save / "config.yaml"
    file.write_text(re.sub(r"  reach: \w+\n", "", file.read_text()))
    again = fine_tuning(moons, save, start, "trainer.max_update=3")
    again.train()
    assert not again.model.is_causal and again.trainer.update == 3
