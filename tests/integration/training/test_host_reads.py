"""On a GPU the host gives orders and does not wait: what an update reads, and steps refused by the
device.
"""

import json
from typing import Any

import battery
import pytest
import torch
from host_reads import HostReads
from optimizers import make_optimizer
from torch import Tensor, nn

from metaseq_lm.core.errors import DivergedError
from metaseq_lm.engine.engine import Engine
from metaseq_lm.training.run import TrainingRun
from metaseq_lm.training.trainer import Trainer

PACKED = "models/seq2seq.py:_run_rows"  # torch wants the lengths of packed rows on the host
SEARCH = {"models/seq2seq.py:beam_search", "models/seq2seq.py:done"}
TRANSLATED = {f"methods/cvt/translation.py:{name}" for name in ("_translated", "<genexpr>")}
# Where an update of these does wait, because it decides by what it reads.
WAITS = {
    "translation": {PACKED},
    "cvt_translation": {PACKED, *SEARCH, *TRANSLATED},
    "word_dropout_translation": {PACKED, *SEARCH, *TRANSLATED},
    "meta_pseudo_label_hard": {"distributed/vectors.py:clip"},  # on a CPU only
}
ADAM = {"lr": 0.03, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.1}
KINDS = [
    {"_name": "adamw", **ADAM},
    {"_name": "adam_uncorrected", **ADAM},
    {"_name": "sgd", "lr": 0.03, "momentum": 0.9},
]


UPDATES = [pytest.param(case, "stop", id=case[0]) for case in battery.FIRST]
UPDATES += [
    pytest.param(case, policy, id=f"{case[0]}-{policy}")
    for case in (("masked_lm", 0), ("tartan_meta", 0))
    for policy in ("skip", "rollback")
    if (case[0], policy) != ("tartan_meta", "skip")  # of two optimizers: the host looks
]


@pytest.mark.parametrize("case, policy", UPDATES)
def test_update_reads_no_value(case, policy, moons, tmp_path, monkeypatch):
    """The second update of every criterion, with dropout."""
    reads = HostReads()
    update = Trainer._update

    def watched(trainer: Trainer, number: int, batches: dict) -> None:
        trainer.engine.finite_check.defers = True
        if not number:
            update(trainer, number, batches)
            return
        with reads:
            update(trainer, number, batches)

    monkeypatch.setattr(Trainer, "_update", watched)
    more = battery.dropped("trainer.max_update=2", "trainer.valid_split=''")
    more.append(f"trainer.on_nonfinite={policy}")
    battery.train_uncounted(battery.configure(moons, tmp_path, case, *more))
    assert set(reads.by_function) == WAITS.get(case[0], set())


def deferring(kind: dict, defers: bool) -> tuple[nn.Linear, Engine]:
    """Return a small model and its engine."""
    torch.manual_seed(3)
    model = nn.Linear(5, 3)
    optimizer = {"clip_norm": 0.1, "weight_decay": 0.0, **kind}
    engine = Engine(
        {"main": make_optimizer(model.named_parameters(), optimizer, {"_name": "constant"})}
    )
    engine.finite_check.defers = defers
    return model, engine


def gradient(model: nn.Module, number: int) -> list[Tensor | None]:
    """Return the gradient of an update of a model of one layer; the norm is clipped
    in every other.
    """
    torch.manual_seed(number)
    return [torch.randn(p.shape) * 10.0 ** -(2 * (number % 2)) for p in model.parameters()]


def state(model: nn.Module, engine: Engine) -> list[Tensor]:
    """Return copies of weights and moments."""
    moments = engine.optimizers["main"].inner.state.values()
    values = [*model.state_dict().values(), *(t for each in moments for t in each.values())]
    return [value.clone() for value in values]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["_name"])
def test_step_refused_by_the_device_changes_nothing(kind):
    """Its neighbours are bitwise those of steps that the host looks at."""
    ends = []
    for defers in (False, True):
        model, engine = deferring(kind, defers)
        for number in range(6):
            engine.begin(number)
            grads = gradient(model, number)
            if number in (2, 4):
                grads[0][1, 2] = float("inf") if number == 2 else float("nan")  # type: ignore[index]
            before = state(model, engine)
            assert engine.step("main", grads) is (defers or number not in (2, 4))
            if number in (2, 4):
                for old, new in zip(before, state(model, engine), strict=True):
                    assert torch.equal(old, new)
        assert engine.finite_check.skipped() == ({2: ["main"], 4: ["main"]} if defers else {})
        assert engine.finite_check.skipped() == {}
        ends.append(state(model, engine))
    for looked, deferred in zip(*ends, strict=True):
        assert torch.equal(looked, deferred)


def test_later_steps_of_a_refused_update_are_refused_too():
    """As a method that looks would not take them; the next update is one of its own."""
    model, engine = deferring(KINDS[0], True)
    engine.begin(7)
    engine.finite_check.require(torch.tensor([1.0, float("nan")]))
    for _ in range(2):
        before = state(model, engine)
        engine.step("main", gradient(model, 1))
        assert all(torch.equal(a, b) for a, b in zip(before, state(model, engine)))
    engine.begin(8)
    engine.step("main", gradient(model, 1))
    assert not torch.equal(before[0], model.weight)
    assert engine.finite_check.skipped() == {7: ["main", "main"]}


def test_run_stops_where_the_host_looks(moons, tmp_path, monkeypatch):
    """Update 3 is not finite, the log is due at 5: the run ends, names 3, saves nothing."""
    more = ["trainer.max_update=10", "trainer.log_interval=5", "trainer.save_interval_updates=2"]
    run = TrainingRun(battery.configure(moons, tmp_path, ("masked_lm", 0), *more))
    step, saved = run.engine.step, []
    run.engine.finite_check.defers = True

    def spoilt(name: str, grads: list[Tensor]) -> bool:
        if run.engine.passes.update == 2:
            grads[0].fill_(float("nan"))
        return step(name, grads)

    monkeypatch.setattr(run.engine, "step", spoilt)
    monkeypatch.setattr(run.trainer, "save", lambda *a, **k: saved.append(run.trainer.update))
    with pytest.raises(DivergedError, match="update 3: .*main"):
        run.train()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    event = next(line for line in lines if "is not finite" in line.get("message", ""))
    assert len(event["samples"][0]["train"][0]) == 16
    assert saved == [2]  # the host looked again before the save at 4


POLICIES = [
    ("skip", {2, 3}, ["schedule=constant", "schedule.warmup_updates=0"]),
    ("skip", {9}, ["schedule=constant", "schedule.warmup_updates=0"]),
    ("rollback", {4}, []),
    ("rollback", {9}, []),
]


@pytest.mark.parametrize("policy, spoilt, more", POLICIES)
def test_policies_where_the_host_looks_later(policy, spoilt, more, moons, tmp_path, monkeypatch):
    """The weights, a tensor outside the optimizer, the log and the events of a host that looks."""
    ends = []
    for defers in (False, True):
        options = [f"trainer.on_nonfinite={policy}", "trainer.max_update=10", *more]
        options += ["trainer.log_interval=5", "trainer.save_interval_updates=3"]
        save = tmp_path / str(defers)
        run = TrainingRun(battery.configure(moons, save, ("masked_lm", 0), *options))
        run.model.register_buffer("steps", torch.zeros(()))
        engine, faults = run.engine, set(spoilt)
        engine.finite_check.defers = defers

        def spoiling(name: str, grads: list[Tensor], step: Any = engine.step) -> bool:
            run.model.steps.add_(1)
            if engine.passes.update in faults:
                faults.remove(engine.passes.update)
                grads[0].fill_(float("nan"))
            return step(name, grads)

        monkeypatch.setattr(engine, "step", spoiling)
        run.train()
        assert not faults and run.trainer.update == 10
        assert run.model.steps == (10 - len(spoilt) if policy == "skip" else 10)
        lines = [json.loads(line) for line in (save / "log.jsonl").read_text().splitlines()]
        refusals = [line for line in lines if "is not finite" in line.get("message", "")]
        ends.append(
            {
                "weights": battery.weights_of(run),
                "updates": engine.optimizers["main"].updates,
                "positions": run.trainer.positions,
                "logs": [line["loss"] for line in lines if line["kind"] == "train"],
                # A host that looks also names the first gradient that is not finite.
                "refusals": [
                    (line["message"].partition(": no term")[0], line["samples"])
                    for line in refusals
                ],
            }
        )
    weights = [end.pop("weights") for end in ends]
    assert all(torch.equal(one, weights[1][name]) for name, one in weights[0].items())
    assert ends[0] == ends[1]


def test_too_many_skipped_updates_in_a_row(moons, tmp_path, monkeypatch):
    more = ["trainer.on_nonfinite=skip", "trainer.max_nonfinite=2", "trainer.log_interval=5"]
    run = TrainingRun(battery.configure(moons, tmp_path, ("masked_lm", 0), *more))
    run.engine.finite_check.defers = True
    step = run.engine.step

    def spoilt(name: str, grads: list[Tensor]) -> bool:
        if run.engine.passes.update in (0, 2, 3, 4):
            grads[0].fill_(float("nan"))
        return step(name, grads)

    monkeypatch.setattr(run.engine, "step", spoilt)
    with pytest.raises(DivergedError, match=r"update 5: .*\b3 times"):
        run.train()
