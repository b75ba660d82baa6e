"""Pre-training as meta-learning in whole runs: streams, equality with plain training, mistakes."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import battery
import pytest
import small_data
import torch
from torch.nn import functional as F

from metaseq_lm.core.batch import Batch
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.streams import Shard
from metaseq_lm.engine.engine import Engine, Logs
from metaseq_lm.tasks import Batches, Task
from metaseq_lm.training.run import TrainingRun

TEXT = ["task=meta_pretrain", "criterion=bert_pretraining", *battery.PACKED]
PAIRS = [*battery.LABELLED_SETS, "criterion=meta_pretrain_pairs", "task.batch_size=8"]
LSTM = ["task=meta_pretrain_lstm", "criterion=language_modeling", *battery.TEXT, *battery.LSTM]
ELSEWHERE = [s for s in battery.TINY if not s.startswith("model.")]
DROPOUT = ["model.dropout=0.2", "trainer.max_update=5", "optimizer.clip_norm=0.5"]


def configure(moons: Path, save: Path, *more: str) -> RunConfig:
    data = moons
    if {"task=meta_pretrain", "task=sentence_pairs"} & set(more):
        data = small_data.ensure(moons, "documents")
    elif any(option.startswith("task.labelled=") for option in more):
        for name in ("pairs", "scores"):
            small_data.ensure(moons, name)
    sizes = ELSEWHERE if battery.LSTM[0] in more else battery.TINY
    return load_config([*sizes, f"data={data}", f"save_dir={save}", *more])


def trained(config: RunConfig) -> TrainingRun:
    run = TrainingRun(config)
    run.train()
    return run


def same(one: TrainingRun, other: TrainingRun) -> bool:
    """Return whether weights, moments and schedule of two runs are equal bit for bit."""
    states = [run.engine.optimizers["main"].local_state() for run in (one, other)]
    weights = [run.model.state_dict() for run in (one, other)]
    numbers = [[w for s in state["state"].values() for w in s.values()] for state in states]
    return (
        states[0]["updates"] == states[1]["updates"]
        and all(torch.equal(w, weights[1][n]) for n, w in weights[0].items())
        and all(torch.equal(a, b) for a, b in zip(*numbers, strict=True))
    )


PLAIN = {
    "text": (TEXT, ["task=sentence_pairs", "criterion=bert_pretraining", *battery.PACKED]),
    "lstm": (LSTM, ["task=language_modeling", *LSTM[1:]]),
}


def test_flops_by_rule_count_every_gradient(moons, tmp_path):
    tasks = {
        k: TrainingRun(configure(moons, tmp_path / str(k), *TEXT, f"task.inner_steps={k}")).task
        for k in (0, 3)
    }
    plain = TrainingRun(
        configure(moons, tmp_path / "plain", *PLAIN["text"][1])
    ).task.flops_by_rule()
    assert plain and tasks[0].flops_by_rule() == plain
    assert tasks[3].flops_by_rule() == 4 * plain


@pytest.mark.parametrize("kind", sorted(PLAIN))
def test_no_inner_steps_equal_the_plain_task(kind, moons, tmp_path):
    """Weights, moments and schedule bit for bit, with dropout, clipping and a schedule."""
    meta, plain = PLAIN[kind]
    one = trained(configure(moons, tmp_path / "a", *meta, *DROPOUT, "task.inner_steps=0"))
    other = trained(configure(moons, tmp_path / "b", *plain, *DROPOUT))
    more = trained(configure(moons, tmp_path / "c", *meta, *DROPOUT))
    assert same(one, other) and not same(more, other)


def last_only(self: Task, engine: Engine, model: torch.nn.Module, batches: Batches) -> Logs:
    """An ordinary update on the test batches."""
    return Task.update(self, engine, model, {n: b[-1:] for n, b in batches.items()})


@pytest.mark.parametrize("setting", [TEXT, PAIRS, LSTM], ids=["text", "pairs", "lstm"])
@pytest.mark.parametrize("order", ["none", "exact"])
def test_inner_rate_zero_equals_training_on_the_test_batches(
    setting, order, moons, tmp_path, monkeypatch
):
    steps = ["task.inner_steps=2", "task.inner_optim=sgd", "task.inner_lr=0"]
    steps += [f"task.second_order={order}", *DROPOUT]
    one = trained(configure(moons, tmp_path / "a", *setting, *steps))
    task = type(one.task)
    monkeypatch.setattr(task, "update", last_only)
    other = trained(configure(moons, tmp_path / "b", *setting, *steps))
    assert same(one, other)


def everything(run: TrainingRun) -> list[torch.Tensor]:
    """Return copies of all weights, moments and counters of a run."""
    own = run.engine.optimizers["main"].local_state()
    moments = [w for state in own["state"].values() for w in state.values()]
    counter = torch.tensor(own["updates"])
    return [w.detach().clone() for w in (*run.model.state_dict().values(), *moments, counter)]


@pytest.mark.parametrize("setting", [TEXT, PAIRS], ids=["text", "pairs"])
def test_moments_never_leak(setting, moons, tmp_path):
    """Inner steps of the fused Adam change weights and moments, and leave them to the last bit."""
    run = TrainingRun(configure(moons, tmp_path, *setting, *DROPOUT, "task.inner_steps=2"))
    engine, seen = run.engine, []
    assert engine.optimizers["main"].inner.defaults["fused"]
    restoring = engine.restoring

    @contextlib.contextmanager
    def watched(name: str) -> Iterator[None]:
        states = [everything(run)]
        with restoring(name):
            yield
            states.append(everything(run))
        seen.append([*states, everything(run)])

    engine.restoring = watched  # type: ignore[method-assign]
    run.train()
    assert len(seen) == 5
    for before, within, after in seen[1:]:  # the first has no moments yet
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        same_within = [torch.equal(a, b) for a, b in zip(before, within, strict=True)]
        assert same_within[-1] and sum(same_within) < len(same_within) / 4


@pytest.mark.parametrize("k", [0, 1, 3])
def test_an_update_takes_k_plus_one_batches_of_each_stream(k, moons, tmp_path):
    """In the order of the stream: inner ones first, then the test batch; all losses are logged."""
    seen: list[list[tuple[str, list[int]]]] = []
    run = TrainingRun(
        configure(moons, tmp_path, *PAIRS, f"task.inner_steps={k}", "trainer.max_update=3")
    )
    criterion = run.task.criterion

    def watched(model: torch.nn.Module, batch: Batch) -> object:
        if model.training:
            seen.append((batch.head, batch.samples.tolist()))  # type: ignore[arg-type]
        return criterion(model, batch)

    run.task.criterion = watched  # type: ignore[assignment]
    assert run.task.needs(7) == {"pairs": k + 1, "which_moon_20": k + 1}
    run.train()
    streams = run.task.build_streams("train")
    expected = [
        (name, streams[name].micro_batches(number, Shard())[0].samples.tolist())
        for number in range(3 * (k + 1))
        for name in ("pairs", "which_moon_20")
    ]
    assert seen == expected
    lines = [json.loads(row) for row in (tmp_path / "log.jsonl").read_text().splitlines()]
    names = [name for name in lines[0] if name.startswith("inner_loss_")]
    assert names == [f"inner_loss_{j}" for j in range(k)]


def test_the_loss_of_labelled_sets_is_the_sum_of_their_means(moons, tmp_path):
    """With torch's own cross-entropy on each set's head, also over several micro-batches."""
    more = ["model.dropout=0", "model.attention_dropout=0", "trainer.max_update=1"]
    more.append("engine.micro_batch_size=3")
    run = TrainingRun(configure(moons, tmp_path, *PAIRS, *more, "task.inner_steps=0"))
    wanted = 0.0
    for name, stream in run.task.build_streams("train").items():
        (batch,) = stream.micro_batches(0, Shard())
        assert len(batch.tokens) == 4 and batch.sizes == {name: 4}
        states = run.model.encoder(batch.tokens, batch.layout, batch.segments)
        scores = run.model.heads.sets[f"set_{name}"](states[:, 0])
        wanted += F.cross_entropy(scores, batch.targets).item()
    run.train()
    line = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert line["loss"] == pytest.approx(wanted, rel=1e-6)
    assert line["loss_pairs"] + line["loss_which_moon_20"] == pytest.approx(line["loss"])
    metrics = run.parts.score("valid")[0]
    assert metrics["loss_pairs"] + metrics["loss_which_moon_20"] == pytest.approx(metrics["loss"])
    assert 0 <= metrics["accuracy_pairs"] <= 1


@pytest.mark.parametrize("steps", [[], ["task.inner_optim=sgd", "task.inner_lr=0.05"]])
def test_labelled_sets_are_learnt(steps, moons, tmp_path):
    """Inner steps and all: the meta-learned weights fit the sets better than the first ones."""
    more = ["model.dropout=0", "optimizer.lr=0.01", "schedule=constant", "trainer.max_update=60"]
    run = TrainingRun(configure(moons, tmp_path, *PAIRS, *more, *steps))
    run.train()
    lines = [json.loads(row) for row in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[58]["loss"] < 0.7 * lines[0]["loss"]


def test_a_run_starts_from_plain_pretraining(moons, tmp_path):
    """From masked_lm or sentence_pairs on text; labelled sets take the encoder and fresh heads."""
    plain = ["task=masked_lm", "criterion=masked_lm", *battery.PACKED]
    data = f"data={small_data.ensure(moons, 'documents')}"
    before = TrainingRun(load_config([*battery.TINY, *plain, data, f"save_dir={tmp_path / 'lm'}"]))
    before.config.trainer.max_update = 2
    before.train()
    known = before.model.state_dict()
    run = TrainingRun(configure(moons, tmp_path / "meta", *TEXT, f"init_from={tmp_path / 'lm'}"))
    own = run.model.state_dict()
    assert all(torch.equal(own[n], w) for n, w in known.items())
    assert {n for n in own if n not in known} == {
        f"heads.next_sentence.{part}.{kind}"
        for part in ("pooler", "out")
        for kind in ("weight", "bias")
    }


def test_the_encoder_of_labelled_sets_is_taken_over(moons, tmp_path):
    config = configure(moons, tmp_path / "sets", *PAIRS, "trainer.max_update=2")
    known = trained(config).model.state_dict()
    tuning = [*battery.SENTENCES, "criterion=sentence_prediction", "task.labelled=pairs"]
    start = [*tuning, "model.segments=2", f"init_from={tmp_path / 'sets'}"]
    own = TrainingRun(configure(moons, tmp_path / "tuned", *start)).model.state_dict()
    assert all(torch.equal(w, known[n]) for n, w in own.items() if n.startswith("encoder."))
    other = TrainingRun(
        configure(moons, tmp_path / "more", *PAIRS, f"init_from={tmp_path / 'sets'}")
    )
    mine = other.model.state_dict()
    assert all(
        torch.equal(w, known[n]) == n.startswith("encoder.") or "bias" in n for n, w in mine.items()
    )


@pytest.mark.parametrize(
    "more, words",
    [
        ([*TEXT, "task.inner_steps=-1"], "inner_steps .*at least 0"),
        ([*TEXT, "task.inner_optim=sgd", "task.inner_lr=-1"], "inner_lr .*at least 0"),
        ([*TEXT, "task.inner_optim=sgd"], "inner_lr is the rate of"),
        ([*TEXT, "task.second_order=exact"], "second_order=exact needs"),
        ([*TEXT, "task.sample_break_mode=eos"], "sample_break_mode is 'eos'. Choices: segments"),
        ([*TEXT, "criterion=meta_pretrain_pairs"], "is for task meta_pretrain_pairs"),
        ([*PAIRS, "criterion=masked_lm"], "criterion=meta_pretrain_pairs"),
        ([*PAIRS, "task.labelled=[]"], "different labelled sets"),
        ([*PAIRS, "task.labelled=[pairs,pairs]"], "different labelled sets"),
        ([*PAIRS, "task.labelled=[pairs,a.b]"], "without dots"),
        ([*PAIRS, "task.batch_size=7"], "a multiple of 2"),
        ([*PAIRS, "task.labelled=[pairs,scores]"], "holds real values"),
        ([*PAIRS, "task.labelled=[pairs,nothing]"], "nothing"),
        ([*LSTM, "model=transformer"], "needs --model bilstm_lm"),
    ],
)
def test_mistakes(more, words, moons, tmp_path):
    more = [s for s in more if "hidden_dim" not in s] if "model=transformer" in more else more
    with pytest.raises(MetaseqError, match=words):
        TrainingRun(configure(moons, tmp_path, *more)).train()
