"""What every registered criterion must satisfy, whatever it computes."""

import contextlib
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import battery
import pytest
import real_runs
import torch

from metaseq_lm.core.config import RunConfig, section
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import CRITERIONS
from metaseq_lm.distributed import process_group
from metaseq_lm.models.transformer.encoder import Layer
from metaseq_lm.optim.roles import assign_roles
from metaseq_lm.runs.folder import read_results
from metaseq_lm.tasks.protocols import ScoresTraining
from metaseq_lm.training.effects import check_effects
from metaseq_lm.training.parts import Parts, build_task, prepare_config
from metaseq_lm.training.restore import open_run

cases = pytest.mark.parametrize("case", battery.ALL, ids=lambda c: f"{c[0]}-{c[1]}")
# Further cases keep their state in the same places; their replicas have micro-batches, too.
first = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.exhaustive] * (case not in battery.FIRST))
        for case in battery.ALL
    ],
    ids=lambda c: f"{c[0]}-{c[1]}",
)


def test_every_registered_criterion_has_a_case():
    assert sorted(battery.CASES) == CRITERIONS.names()


@first
def test_micro_batches_change_nothing(case, moons, whole, tmp_path):
    """Micro-batches (of one row of each micro-step, or four rows) equal the whole batch.

    With dropout on: masks belong to rows, not to calls.
    """
    rows = 1 if battery.has_few_rows(case) else 4
    more = battery.dropped(f"engine.micro_batch_size={rows}", *battery.few_rows(case))
    config = battery.configure(moons, tmp_path, case, *more)
    assert battery.difference(whole(case), battery.train_uncounted(config)) <= 1e-11


@pytest.mark.parametrize("case", battery.FIRST, ids=lambda c: c[0])
def test_options_affect_what_they_say(case, moons, tmp_path):
    """As `train --dry-run` tries it of a plug-in's options; all options could be tried."""
    assert not check_effects(battery.configure(moons, tmp_path, case), of_package=True)


@pytest.mark.parametrize("case", battery.TASKS, ids=lambda c: c[0])
def test_a_task_takes_or_refuses_each_criterion(case, moons, tmp_path):
    taken, config = set(), battery.configure(moons, tmp_path, case)
    for criterion in CRITERIONS.names():
        with contextlib.suppress(UsageError):
            options = section("criterion", _name=criterion)
            changed = replace(config, criterion=options) if criterion != case[0] else config
            build_task(prepare_config(changed))
            taken.add(criterion)
    assert case[0] in taken and len(taken) < len(CRITERIONS.names())


@cases
def test_muon_steps_all_matrices_of_layers_or_is_refused(case, moons, tmp_path):
    config = prepare_config(battery.configure(moons, tmp_path, case, "optimizer=muon"))
    task = build_task(config)
    model = task.build_model()
    assign_roles(model)
    try:
        optimizers = task.build_optimizers(model).values()
    except UsageError:
        assert config.model._name not in ("modern", "encoder_decoder", "electra")
        return
    groups = [group for o in optimizers for group in o.inner.param_groups]
    stepped = {id(p) for group in groups if "momentum" in group for p in group["params"]}
    trained = {id(p) for group in groups for p in group["params"]}
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    matrices = {id(p) for layer in layers for p in layer.parameters() if p.dim() == 2}
    assert stepped == matrices & trained and stepped


def test_an_update_of_a_gated_decoder_with_muon(moons, tmp_path):
    more = ["optimizer=muon", "trainer.max_update=1"]
    battery.train(battery.configure(moons, tmp_path, ("span_corruption", 3), *more))


@pytest.mark.parametrize("case", battery.TASKS, ids=lambda c: c[0])
def test_a_run_is_opened_again_and_scored(case, moons, tmp_path, monkeypatch):
    more = ["trainer.max_update=2", "trainer.save_interval_updates=0"]
    config = battery.configure(moons, tmp_path, case, *more)
    battery.train(config)
    again = open_run(str(tmp_path), user_dir=battery.plug_in_of(case))
    split = config.trainer.valid_split or "valid"
    metrics, rows = again.score(split)
    assert all(isinstance(row, dict) for row in rows)
    monkeypatch.setattr(Parts, "shard", again.shard)  # all the rows, of which it tells none
    monkeypatch.setattr(process_group, "rank", lambda: 1)
    assert not again.score(split)[1]
    monkeypatch.undo()
    before = (read_results(tmp_path) or {})["metrics"].get(split) or metrics
    assert metrics and {n: metrics[n] for n in before} == pytest.approx(before, nan_ok=True)
    if isinstance(again.task, ScoresTraining):
        assert again.score("train")[0].keys() == metrics.keys()
    else:
        with pytest.raises(UsageError, match="'train' is endless"):
            again.score("train")


@cases
def test_the_update_moves_the_weights(case, whole):
    """A battery of runs that do nothing would pass everything else."""
    assert battery.difference(whole(case), whole(case, "before")) > 1e-3


# An epoch of token_labels has 5 updates: these are within and at the end of one.
CUTS = (1, 5, 8)
# Of further cases of a criterion, whose tasks and criterions keep the same state.
FEWER_CUTS = (2, 5)


@first
def test_resume_is_bitwise(case, moons, tmp_path):
    """Stopping after any of these updates and starting again equals going on, to the last bit.

    Every other start prepares its batches with two threads ahead of time, which changes nothing.
    """
    stop_and_go_on(case, moons, tmp_path)


def test_resume_in_bf16_is_bitwise(moons, tmp_path):
    """What autocast rounds, it rounds again from the weights that were saved in full."""
    case = ("masked_lm", 0)
    low = stop_and_go_on(case, moons, tmp_path / "bf16", "engine.precision=bf16")
    full = battery.train(battery.configure(moons, tmp_path, case, "trainer.max_update=9"))
    assert all(w.dtype != torch.bfloat16 for w in low.values()) and battery.difference(low, full)


def stop_and_go_on(
    case: battery.Case, data: Path, place: Path, *options: str
) -> dict[str, torch.Tensor]:
    """Assert that nine updates with stops are those without, and return their weights."""

    def config(name: str, last: int, *threads: str) -> RunConfig:
        calendar = ["trainer.save_interval_updates=0", "trainer.validate_interval_updates=4"]
        more = [*calendar, *battery.few_rows(case), *options, *threads]
        return battery.configure(data, place / name, case, f"trainer.max_update={last}", *more)

    straight = battery.train_uncounted(config("straight", 9))
    cuts = CUTS if case in battery.FIRST else FEWER_CUTS
    for start, cut in enumerate((*cuts, 9)):
        resumed = battery.train(config("cut", cut, f"engine.workers={2 * (start % 2)}"))
    assert battery.difference(straight, resumed) == 0
    logs = [(place / name / "log.jsonl").read_text() for name in ("straight", "cut")]
    assert losses(logs[0]) == losses(logs[1])
    return straight


def losses(log: str) -> list[tuple]:
    """Return (update, loss) of each training line; JSON keeps every bit of a float."""
    import json

    lines = [json.loads(line) for line in log.splitlines()]
    return [(line["update"], line["loss"]) for line in lines if line["kind"] == "train"]


def test_kill_and_resume_is_bitwise(moons, tmp_path):
    """kill -9 of the real program in the middle, then the same command again."""
    case = ("meta_pseudo_label_soft", 0)
    steps = ["trainer.max_update=8", "trainer.save_interval_updates=2"]
    killed, straight = (
        real_runs.command(moons, tmp_path / name, *steps, case=case)
        for name in ("killed", "straight")
    )
    run = real_runs.Started(killed, tmp_path / "err", {"METASEQ_LM_SLOW_UPDATE": "0.1"})
    last = tmp_path / "killed" / "checkpoints" / "last"
    real_runs.until(last.exists, real_runs.LONG, "a checkpoint")
    run.kill_all()
    assert run.code == -signal.SIGKILL
    for command in (killed, straight):
        run = real_runs.Started(command, tmp_path / "err")
        assert run.wait() == 0, run.text()
    final = "checkpoints/update_000000008/model.safetensors"
    assert (tmp_path / "killed" / final).read_bytes() == (
        tmp_path / "straight" / final
    ).read_bytes()


def test_signal_saves_and_asks_to_be_started_again(moons, tmp_path):
    """Of the program as a user starts it; the other signals are those of test_preemption.py."""
    command = [sys.executable, "-m", "metaseq_lm", "train", str(moons), "--save-dir", str(tmp_path)]
    options = ["--criterion", "masked_lm", *battery.CASES["masked_lm"][0], *battery.TINY]
    run = subprocess.Popen(
        [*command, *options, "trainer.max_update=1000000"], stderr=subprocess.PIPE, text=True
    )
    log = tmp_path / "log.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 75, errors
    assert "same command again" in errors and "Traceback" not in errors
    assert (tmp_path / "checkpoints" / "last" / "manifest.json").exists()
