"""Span corruption: loss, gradient and scores by hand, visibility, FLOPs by rule, refusals."""

from pathlib import Path
from typing import Any

import battery
import numpy as np
import pytest
import torch
from second_order import double_backward
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from metaseq_lm.core.batch import Layout, ScoredBatch
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.labelled.files import SourceSentence
from metaseq_lm.data.streams import Shard
from metaseq_lm.forward.passes import use_context
from metaseq_lm.training.parts import build_task, prepare_config
from metaseq_lm.training.restore import open_run
from metaseq_lm.training.run import TrainingRun
from metaseq_lm.training.scoring import SentenceScorer

CASES = [("span_corruption", number) for number in range(4)]
LONG = ["task.tokens_per_sample=500", "model.max_positions=600"]
of_each_model = pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[1]))


def configure(data: Path, save: Path, case: battery.Case, *more: str) -> RunConfig:
    return battery.configure(data, save, case, *battery.exact(*more))


def parts_of(batch: Any, row: int) -> tuple[Tensor, list[int]]:
    """Return the inputs of a row, `[CLSn] x [SEP]`, and its targets."""
    if batch.decoder_tokens is None:
        width, count = batch.tokens.shape[1], int(batch.layout.prefix[row])
        length = int((~batch.layout.padding_of(batch.tokens))[row].sum())
        targets = batch.tokens[row, count:length].tolist()
    else:
        width = batch.decoder_tokens.shape[1]
        count = int((~batch.layout.padding_of(batch.tokens))[row].sum())
        last = int((batch.decoder_tokens[row] == 2).nonzero()[-1])
        targets = batch.decoder_tokens[row, 1 : last + 1].tolist()
    is_target = (batch.targets >= 0) & (batch.positions // width == row)
    assert batch.targets[is_target].tolist() == targets and targets[-1] == 2
    return batch.tokens[row, :count], targets


def states_after(model: Any, inputs: Tensor, targets: list[int]) -> Tensor:
    """Return the state that predicts what follows some targets, without padding or other rows."""
    before = torch.tensor(targets, dtype=torch.long)
    if hasattr(model, "decoder"):
        return model.decode(inputs[None], Layout(), torch.cat([inputs[-1:], before])[None])[0, -1]
    layout = Layout(reach="prefix", prefix=torch.tensor([len(inputs)]))
    return model.encoder(torch.cat([inputs, before])[None], layout)[0, -1]


@of_each_model
def test_loss_and_gradient_are_those_of_a_loop(case, moons, tmp_path):
    """Row by row and token by token, with torch's cross-entropy."""
    run = TrainingRun(configure(moons, tmp_path, case))
    micro_batches = run.task.build_streams("train")["train"].micro_batches(3, Shard())
    (batch,) = run.engine.to_device(micro_batches)
    model, losses = run.model, []
    for row in range(len(batch.tokens)):
        inputs, targets = parts_of(batch, row)
        for at, target in enumerate(targets):
            state = states_after(model, inputs, targets[:at])
            logits = model.predict(state[None], head="lm")
            losses.append(F.cross_entropy(logits, torch.tensor([target])))
    term = run.task.criterion(model, batch)["target_token"]
    assert batch.sizes["targets"] == len(losses) and term.per == "targets"
    loss = torch.stack(losses).sum()
    torch.testing.assert_close(term.sum, loss, rtol=1e-12, atol=1e-10)
    parameters = [p for p in model.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(loss, parameters, allow_unused=True)
    gradients = torch.autograd.grad(term.sum, parameters, allow_unused=True)
    for gradient, expected in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES[:3:2], ids=["joint", "decoder"])
def test_a_target_sees_all_inputs_and_earlier_targets(case, moons, tmp_path):
    """By the gradient of its logits with respect to the embeddings; all layers are global."""
    run = TrainingRun(configure(moons, tmp_path, case, "task.batch_size=1"))
    (batch,) = run.engine.to_device(
        run.task.build_streams("train")["train"].micro_batches(0, Shard())
    )
    seen = []
    embeddings = run.model.encoder.embeddings
    embeddings.register_forward_hook(lambda module, inputs, output: seen.append(output))
    states = []
    norm = run.model.decoder.norm if hasattr(run.model, "decoder") else run.model.encoder.stack.norm
    norm.register_forward_hook(lambda module, inputs, output: states.append(output))
    run.task.criterion(run.model, batch)
    inputs, targets = parts_of(batch, 0)
    sources = (batch.positions - 1)[: len(targets)]
    for number, source in enumerate(sources[:4]):
        # Weighted: the sum of a normalised state is constant.
        value = states[-1][0, source] @ torch.arange(8.0, dtype=torch.float64) ** 2
        grads = torch.autograd.grad(value, seen, retain_graph=True)
        is_seen = torch.cat([(grad[0].abs().sum(-1) > 0) for grad in grads])
        count = len(inputs) + number + len(seen) - 1  # the decoder begins with [SEP]
        assert is_seen[:count].all() and not is_seen[count:].any()


@of_each_model
def test_scores_are_those_of_one_sentinel(case, moons, tmp_path):
    """log p(token | text with a sentinel in its place, the sentinel), token by token."""
    run = TrainingRun(configure(moons, tmp_path, case, "trainer.max_update=2"))
    run.train()
    parts = open_run(str(tmp_path))
    texts = ["0 1 1 0", "0 1 1 0 1 1 1", "1"]
    scores = SentenceScorer(parts).score([SourceSentence(text, text) for text in texts])
    vocabulary, model = parts.task.vocabulary, parts.model.eval()
    sentinel = vocabulary.cls(vocabulary.task_tokens - 1)
    start = vocabulary.cls(1 if parts.task.config.denoisers else 0)
    for score in scores:
        assert score is not None
        wanted = []
        for at, token in enumerate(score.tokens):
            text = torch.tensor([start, *score.tokens.tolist(), vocabulary.sep])
            text[1 + at] = sentinel
            logits = model.predict(states_after(model, text, [sentinel]), head="lm")
            wanted.append(logits.log_softmax(-1)[token].item())
        np.testing.assert_allclose(score.log_probs, wanted, atol=1e-11)


@of_each_model
def test_flops_by_rule(case, moons, tmp_path):
    """Of texts that are all of the longest kind; those of the paper's rules by their parts."""
    config = configure(moons, tmp_path, case, "task.batch_size=16")
    run = TrainingRun(config)
    task, model = run.task, run.model
    if config.model._name.startswith("modern"):
        texts = np.random.default_rng(1).integers(40, len(task.vocabulary), (16, 20))
        rows = task.rows(FullRows(texts))
        batch = rows.batch(np.arange(16), np.arange(16).astype(np.uint64) * 977, 20)
        (placed,) = run.engine.to_device([batch])
        with FlopCounterMode(display=False) as counter, use_context(double_backward()):
            task.criterion(model, placed)["target_token"].sum.backward()
        head = 6 * 8 * (8 + config.model.rows(len(task.vocabulary)))
        means = [d.row_lengths(np.array(18))[1] for d in task.denoisers]
        expected = task.flops_by_rule() + head * (len(batch.targets) - 16 * np.mean(means))
        assert counter.get_total_flops() == pytest.approx(expected, rel=1e-12)
    else:
        assert task.flops_by_rule() > 0
    longer = build_task(configure(moons, tmp_path, case, "task.tokens_per_sample=22"))
    assert longer.flops_by_rule() / longer.config.batch_size > task.flops_by_rule() / 16


class FullRows:
    """A corpus of rows of one length."""

    def __init__(self, rows: np.ndarray) -> None:
        self.all_rows = rows

    def rows(self, samples: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        return self.all_rows[samples], np.full(len(samples), width)


def test_inputs_length_sets_that_of_texts(moons, tmp_path):
    config = configure(moons, tmp_path, CASES[0], "task.inputs_length=19", "task.mean_span=3")
    assert prepare_config(config).task.tokens_per_sample == 22  # of 20 tokens: 3 noise, 1 span
    with pytest.raises(UsageError, match="at least 4"):
        prepare_config(configure(moons, tmp_path, CASES[0], "task.inputs_length=3"))


@pytest.mark.parametrize("task", ["span_corruption", "ul2"])
@pytest.mark.parametrize("model", ["transformer", "encoder_decoder"])
def test_the_defaults_fit_together(task, model, moons, tmp_path):
    names = [f"task={task}", "criterion=span_corruption", f"model={model}"]
    places = [f"data={moons}", f"save_dir={tmp_path}", "model.encoder_layers=1"]
    built = build_task(load_config([*names, *places]))
    built.build_model()
    assert max(built.widths) <= 128
    assert len(built.denoisers) == (7 if task == "ul2" else 1)


@pytest.mark.parametrize(
    "case, more, fact",
    [
        (0, ["task.tokens_per_sample=34"], "rows of up to 39, but model.max_positions is 34"),
        (0, [*LONG], "needs 38 sentinels.*--task-tokens 39"),
        (1, ["task.denoisers=[Q:1]"], "MODE:DENSITY:MEAN_SPAN"),
        (0, ["criterion=causal_lm"], "causal_lm is for task"),
        (0, ["task=masked_lm", "criterion=masked_lm", "model=encoder_decoder"], "cannot train"),
    ],
)
def test_what_does_not_fit_is_refused(case, more, fact, moons, tmp_path):
    with pytest.raises(UsageError, match=fact):
        TrainingRun(configure(moons, tmp_path, ("span_corruption", case), *more))


def test_padding_and_other_rows_change_no_score(moons, tmp_path):
    run = TrainingRun(configure(moons, tmp_path, CASES[2]))
    tokens = torch.tensor([[3, 40, 41, 2, 0, 0], [3, 40, 41, 42, 43, 2]])
    scored = torch.tensor([[False, True, True, False, False, False]] * 2)
    batch = ScoredBatch(
        tokens=tokens, layout=Layout(tokens == 0), scored=scored, mask_id=1, batch_tokens=64
    )
    both = run.task.token_log_probs(run.model.eval(), batch)
    alone = ScoredBatch(tokens=tokens[:1, :4], scored=scored[:1, :4], mask_id=1, batch_tokens=64)
    one = run.task.token_log_probs(run.model, alone)
    torch.testing.assert_close(both[:1, :4], one, rtol=1e-12, atol=1e-12)
