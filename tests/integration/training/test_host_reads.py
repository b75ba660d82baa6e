"""On a GPU the host gives orders and does not wait: what an update reads, and steps refused by the
device.
"""

import json
from pathlib import Path

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

PACKED = "models/seq2seq.py:run_rows"  # torch wants the lengths of packed rows on the host
SEARCH = {"models/seq2seq.py:beam_search", "models/seq2seq.py:done"}
TRANSLATED = {f"methods/cvt/translation.py:{name}" for name in ("_translated", "<genexpr>")}
# Where an update of these does wait, because it decides by what it reads.
WAITS = {
    "tartan_meta": {"methods/tartan/update.py:fit_meta_head"},
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


@pytest.mark.parametrize("case", battery.FIRST, ids=lambda case: case[0])
def test_update_reads_no_value(
    case: battery.Case, moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_step_refused_by_the_device_changes_nothing(kind: dict) -> None:
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
        assert engine.finite_check.skipped() == ((2, ["main"]) if defers else None)
        assert engine.finite_check.skipped() is None
        ends.append(state(model, engine))
    for looked, deferred in zip(*ends, strict=True):
        assert torch.equal(looked, deferred)


def test_later_steps_of_a_refused_update_are_refused_too() -> None:
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
    assert engine.finite_check.skipped() == (7, ["main"])


def test_run_stops_where_the_host_looks(
    moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Update 3 is not finite, the log is due at 5: the run ends there, names 3, and saves nothing
    of it.
    """
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
    with pytest.raises(DivergedError, match=r"update 3: .*main is not finite"):
        run.train()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    event = next(line for line in lines if "is not finite" in line.get("message", ""))
    assert len(event["samples"][0]["train"][0]) == 16
    assert saved == [2]  # the host looked again before the save at 4
