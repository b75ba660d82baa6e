"""The teacher's gradient with soft labels against one autograd graph, differences, brute force."""

import copy
from pathlib import Path

import pytest
import torch
from meta_pseudo_bench import Bench, flat, relative
from soft_reference import Wanted, unrolled

from metaseq_lm.distributed import vectors

SMALL = [
    "task.batch_size=3",
    "task.batches_per_update=2",
    "task.samples_per_task=2",
    "schedule.warmup_updates=4",
    # More positions than any text has: their gradients and moments stay 0 (the NaN trap).
    "model.max_positions=37",
]
STEPS = {
    "adamw, sgd": [],
    "adamw, adamw": ["criterion.finetune_step=adamw"],
    "sgd, sgd": ["criterion.pretrain_step=sgd"],
    "adamw": ["criterion.inner_steps=0"],
    "sgd": ["criterion.pretrain_step=sgd", "criterion.inner_steps=0"],
    "undivided adamw, sgd": ["criterion.fidelity=paper"],
    "undivided sgd": ["criterion.pretrain_step=sgd", "criterion.fidelity=paper"],
}


# With dropout there is more to get wrong: without it the default steps are enough.
NOISY = [(steps, 0.1) for steps in STEPS] + [
    pytest.param(steps, 0.0, marks=[pytest.mark.exhaustive] * (number > 0))
    for number, steps in enumerate(STEPS)
]


def dropout(p: float) -> list[str]:
    return [f"model.{n}={p}" for n in ("dropout", "attention_dropout", "activation_dropout")]


def wanted_and_found(bench: Bench, update: int) -> tuple[Wanted, list, list]:
    """Make one update; return the reference, the teacher's and the student's gradient."""
    before = copy.deepcopy((bench.model.state_dict(), bench.engine.optimizers["student"]))
    passes = 3 if bench.config.criterion.inner_steps == 0 else 4
    found = bench.update(update)
    teacher, student = bench.gradient("teacher"), bench.gradient("student")
    draws = [draw for _, draw in bench.passes[:passes]]
    bench.model.load_state_dict(before[0])
    bench.engine.optimizers["student"].load_state_dict(before[1].state_dict())
    wanted = unrolled(bench, bench.batches(update), update, draws)
    assert found["pseudo"].item() == pytest.approx(wanted.pseudo, rel=1e-12)
    assert found["query"].item() == pytest.approx(wanted.query, rel=1e-12)
    return wanted, teacher, student


def error_beside_meta(found: list, wanted: Wanted) -> float:
    """Return |found - wanted| / |the meta part of wanted|, so that a wrong small part shows."""
    total = vectors.add(wanted.auxiliary, wanted.meta)
    return relative(found, total) * (vectors.norm(total) / vectors.norm(wanted.meta)).item()


@pytest.mark.parametrize("fixed_y", [False, True])
@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize("steps, p", NOISY)
def test_exact(ragged: Path, steps: str, trained: int, fixed_y: bool, p: float) -> None:
    bench = Bench(
        ragged,
        "soft",
        f"criterion.fixed_y={fixed_y}",
        "task.labelled=[which_moon_10,pairs]",
        *(SMALL + STEPS[steps] + dropout(p)),
    )
    for update in range(trained):
        bench.update(update)
    wanted, teacher, student = wanted_and_found(bench, trained)
    assert torch.isfinite(vectors.flat(teacher)).all()
    assert error_beside_meta(teacher, wanted) < 1e-10
    assert relative(student, wanted.student) < 1e-12


@pytest.mark.parametrize("targets", ["flat", "shifted", "unigram", "uniform"])
def test_controls_are_exact(ragged: Path, targets: str) -> None:
    """What the student is taught in place of the teacher's probabilities, gradients included."""
    bench = Bench(ragged, "soft", f"criterion.targets={targets}", "criterion.support=0.6", *SMALL)
    bench.update(0)
    wanted, teacher, student = wanted_and_found(bench, 1)
    assert error_beside_meta(teacher, wanted) < 1e-10
    assert relative(student, wanted.student) < 1e-12


@pytest.mark.parametrize("mask", ["x", "y"])
@pytest.mark.parametrize("name", ["soft", "soft_fixed_y"])
def test_exact_on_rows_of_equal_length(even: Path, name: str, mask: str) -> None:
    """The rows of the paper's table 10, with a loss at every position of masked text (x) or not."""
    bench = Bench(even, name, f"task.mlm_label_mask={mask}", *SMALL)
    bench.update(0)
    wanted, teacher, _ = wanted_and_found(bench, 1)
    assert error_beside_meta(teacher, wanted) < 1e-10


def test_the_micro_steps_have_virtual_students_of_their_own(ragged: Path) -> None:
    bench = Bench(ragged, "soft", *SMALL)
    bench.update(0)
    wanted, _, _ = wanted_and_found(bench, 1)
    first, second = (flat(weights.values()) for weights in wanted.after_pseudo)
    assert (first - second).norm() > 1e-6


def snapshot(bench: Bench) -> tuple:
    """Return all that an update changes."""
    optimizers = {n: copy.deepcopy(o.state_dict()) for n, o in bench.engine.optimizers.items()}
    return copy.deepcopy(bench.model.state_dict()), optimizers


def put_back(bench: Bench, kept: tuple) -> None:
    bench.model.load_state_dict(kept[0])
    for name, state in kept[1].items():
        bench.engine.optimizers[name].load_state_dict(copy.deepcopy(state))


@pytest.mark.parametrize("steps", ["adamw, sgd", "adamw, adamw", "sgd"])
def test_brute_force(ragged: Path, steps: str) -> None:
    bench = Bench(ragged, "soft", *(SMALL + STEPS[steps] + dropout(0.1)))
    for update in range(3):
        bench.update(update)
    kept = snapshot(bench)

    def objective() -> float:
        logs = bench.update(3)
        put_back(bench, kept)
        half = 2 * logs["teacher_x"] + logs["teacher_copy"] + logs["teacher_mlm"]
        return (bench.config.criterion.meta_weight * logs["query"] + 0.5 * half).item()

    objective()
    exact = dict(zip(dict(bench.model["teacher"].named_parameters()), bench.gradient("teacher")))
    for name in (
        "encoder.embeddings.tokens.weight",
        "encoder.stack.layers.0.attention.in_proj.weight",
        "heads.x.bias",
        "heads.y.weight",
    ):
        gradient = exact[name]
        at = int(gradient.abs().argmax())
        sides = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter = bench.model["teacher"].get_parameter(name)
                parameter.view(-1)[at] += sign * 1e-4
            sides.append(objective())
        slope = (sides[0] - sides[1]) / 2e-4
        assert slope == pytest.approx(gradient.view(-1)[at].item(), rel=1e-4)


def gradients_at(bench: Bench, step: float) -> list:
    """Return the teacher's gradient at the present state, exact for step 0, else by differences."""
    bench.task.criterion.difference_step = step
    kept = snapshot(bench)
    bench.update(9)
    put_back(bench, kept)
    return bench.gradient("teacher")


@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize("steps, p", NOISY)
def test_finite_differences_agree(ragged: Path, steps: str, trained: int, p: float) -> None:
    bench = Bench(ragged, "soft", *(SMALL + STEPS[steps] + dropout(p)))
    for update in range(trained):
        bench.update(update)
    exact = gradients_at(bench, 0.0)
    near, nearer = (relative(gradients_at(bench, step), exact) for step in (1e-5, 1e-6))
    assert near < 1e-2, "the default displacement"
    assert 0 < nearer < 1e-5
    # Central differences are of second order: a tenth of the step, a hundredth of the error.
    assert nearer < near / 20 or near < 1e-7


def test_finite_difference_option(ragged: Path) -> None:
    option = "criterion.hypergradient=finite_difference"
    bench = Bench(ragged, "soft", *SMALL, option, "criterion.difference_step=3e-6")
    assert bench.task.criterion.difference_step == 3e-6
    assert Bench(ragged, "soft", *SMALL).task.criterion.difference_step == 0
