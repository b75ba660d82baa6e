"""What an update changes, how often each net steps, and that cutting a batch changes nothing."""

import math

import pytest
import torch
from meta_pseudo_bench import Bench, adam_state, flat, parameters_by_name, relative

from metaseq_lm.distributed import vectors

SMALL = ["task.batch_size=4", "task.batches_per_update=3", "schedule.warmup_updates=4"]
NO_DROPOUT = ["model.dropout=0", "model.attention_dropout=0"]


def rates(bench: Bench, count: int) -> list[float]:
    """Return the first rates of base .08 with a warm-up of 4 steps, written out."""
    return [0.08 * n**-0.5 if n >= 4 else 0.08 / 2 * n / 4 for n in range(1, count + 1)]


@pytest.mark.parametrize(
    ("name", "student", "teacher"), [("mlm", 1, None), ("soft", 1, 1), ("hard", 3, 1)]
)
def test_steps_and_schedules(even, name, student, teacher):
    bench = Bench(even, name, *SMALL)
    for update in range(5):
        bench.update(update)
        wanted = ["student"] * student + ["teacher"] * (teacher or 0)
        assert sorted(n for n, _ in bench.steps) == wanted
    made = {n: o.updates for n, o in bench.engine.optimizers.items()}
    assert made == {"student": 5 * student} | ({"teacher": 5} if teacher else {})
    for net, optimizer in bench.engine.optimizers.items():
        used = optimizer.inner.param_groups[0]["lr"]
        assert used == pytest.approx(rates(bench, made[net])[-1], rel=1e-12)
        adam_steps = {int(s["step"]) for s in adam_state(bench, net)["state"].values()}
        assert adam_steps == {made[net]}


@pytest.mark.parametrize("name", ["soft", "hard"])
def test_student_is_moved_by_its_own_step_only(even, name):
    """Weights and moments are bitwise those of AdamW on the gradients it was given."""
    bench = Bench(even, name, *SMALL)
    student = bench.model["student"]
    copied = [p.detach().clone().requires_grad_() for p in student.parameters()]
    adamw = torch.optim.AdamW(
        copied, lr=0.0, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, fused=True
    )
    number = 0
    for update in range(3):
        bench.update(update)
        for grads in [g for n, g in bench.steps if n == "student"]:
            clipped = vectors.clip(grads, 5.0)
            adamw.param_groups[0]["lr"] = 0.08 * (
                bench.engine.optimizers["student"].schedule(number + 1)
            )
            number += 1
            for p, g in zip(copied, clipped):
                p.grad = g
            adamw.step()
    assert torch.equal(flat(student.parameters()), flat(copied))
    state = bench.engine.optimizers["student"].inner.state
    for p, q in zip(student.parameters(), copied):
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[p][moment], adamw.state[q][moment])


def test_teacher_gradient_reaches_no_student_parameter(even):
    """The real student learns from its pseudo loss alone: lambda does not matter."""
    students = []
    for weight in (100.0, 1.0):
        bench = Bench(even, "soft", *SMALL, f"criterion.meta_weight={weight}")
        bench.update(0)
        students.append((bench.gradient("student"), bench.gradient("teacher")))
    assert all(torch.equal(a, b) for a, b in zip(students[0][0], students[1][0]))
    assert relative(students[0][1], students[1][1]) > 1e-3


def test_weights_of_the_meta_loss(even):
    """The teacher's gradient is linear in lambda: g(100) - g(1) is 99 times g(2) - g(1)."""
    found = {}
    for weight in (1.0, 2.0, 100.0):
        bench = Bench(even, "soft", *SMALL, f"criterion.meta_weight={weight}")
        bench.update(0)
        found[weight] = bench.gradient("teacher")
    one = vectors.add(found[2.0], found[1.0], -1.0)
    many = vectors.add(found[100.0], found[1.0], -1.0)
    assert relative(many, vectors.scale(one, 99.0)) < 1e-8


@pytest.mark.parametrize("how", ["exact", "finite_difference"])
def test_meta_weight_zero_leaves_the_auxiliary_losses(even, how):
    """The control experiment: a teacher trained by its own losses only."""
    bench = Bench(even, "soft", *SMALL, "criterion.meta_weight=0", f"criterion.hypergradient={how}")
    bench.update(0)
    assert all(g is None or torch.isfinite(g).all() for g in bench.gradient("teacher"))


@pytest.mark.parametrize("name", ["soft", "hard"])
def test_clip_of_real_steps(even, name):
    """Meta and auxiliary gradients are clipped to 5 together, whatever their weights."""
    bench = Bench(even, name, *SMALL, "criterion.meta_weight=1e7", "optimizer.eps=1e3")
    bench.update(0)
    moment = bench.engine.optimizers["teacher"].inner.state
    first = [moment[p]["exp_avg"] for p in bench.model["teacher"].parameters()]
    assert vectors.norm(bench.gradient("teacher")) > 50
    assert vectors.norm(first).item() == pytest.approx(0.1 * 5.0, rel=1e-5)


def compare_steps(one: Bench, other: Bench) -> None:
    """Expect the same optimizer steps with the same gradients, up to the order of summation."""
    assert [name for name, _ in one.steps] == [name for name, _ in other.steps]
    for number, ((_, wanted), (_, found)) in enumerate(zip(one.steps, other.steps)):
        assert relative(found, wanted) < 1e-9, f"step {number}"


@pytest.mark.parametrize("name", ["mlm", "soft", "soft_fixed_y", "hard"])
@pytest.mark.parametrize("micro", [1, 3])
def test_micro_batches_change_nothing(even, name, micro):
    whole, cut = (Bench(even, name, *SMALL, "task.reward_interval=16") for _ in range(2))
    for update in range(3):
        one, other = whole.update(update), cut.update(update, micro)
        assert one.keys() == other.keys()
        for key in one:
            assert one[key].item() == pytest.approx(other[key].item(), rel=1e-9), key
        compare_steps(whole, cut)
    a, b = flat(whole.model.parameters()), flat(cut.model.parameters())
    assert (a - b).abs().max() < 1e-9


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", ["mlm", "soft", "hard"])
def test_micro_batches_change_nothing_where_rows_differ_in_length(ragged, name, dropout):
    options = ["task.samples_per_task=2", "task.labelled=[which_moon_10,pairs]"]
    options += [f"model.dropout={dropout}", f"model.attention_dropout={dropout}"]
    whole, cut = (Bench(ragged, name, *SMALL, *options) for _ in range(2))
    whole.update(0)
    cut.update(0, 1)
    compare_steps(whole, cut)


@pytest.mark.parametrize("name", ["mlm", "soft", "hard"])
def test_same_seed_same_run_and_other_seed_other_run(even, name):
    def weights(seed: int) -> torch.Tensor:
        bench = Bench(even, name, *SMALL, f"seed={seed}")
        for update in range(2):
            bench.update(update)
        return flat(bench.model.parameters())

    first = weights(3)
    assert torch.equal(first, weights(3))
    assert not torch.equal(first, weights(4))


@pytest.mark.parametrize("name", ["mlm", "soft", "hard"])
def test_initial_losses_are_near_log_vocabulary(even, name):
    logs = Bench(even, name).update(0)
    wanted = {"mlm": ["mlm"], "soft": ["pseudo"], "hard": ["pseudo", "reinforce"]}[name]
    wanted += [] if name == "mlm" else ["teacher_x", "teacher_copy", "teacher_mlm"]
    for key in wanted:
        assert logs[key].item() == pytest.approx(math.log(407), abs=0.05), key


def test_masked_lm_student_gradient(even):
    """The mean over micro-steps of the mean CE of masked tokens."""
    bench = Bench(even, "mlm", *SMALL, *NO_DROPOUT, "task.reward_interval=0")
    student = bench.model["student"]
    start = parameters_by_name(student)
    bench.update(0)
    found = bench.gradient("student")
    student.load_state_dict(start)
    (batch,) = bench.batches(0)["unlabelled"][0]
    total = torch.zeros(())
    for c in range(3):
        logits = student(batch.tokens[c])
        at, targets = batch.positions[c], batch.targets[c]
        rows, columns = torch.nonzero(targets >= 0, as_tuple=True)
        chosen = logits[rows, at[rows, columns]].log_softmax(-1)
        total = total - chosen[torch.arange(len(rows)), targets[rows, columns]].mean() / 3
    assert relative(found, list(torch.autograd.grad(total, list(student.parameters())))) < 1e-12


@pytest.mark.parametrize("more", [[], ["criterion.inner_steps=0"]])
@pytest.mark.parametrize("at_once", [1, 3])
def test_copies_at_once_change_nothing(ragged, at_once, more):
    """Side by side or in turn, with dropout on: the same gradients and logs."""
    found = []
    for option in (0, at_once):
        bench = Bench(ragged, "soft", "model.dropout=0.1", f"task.copies_at_once={option}", *more)
        logs = bench.update(3)
        found.append((flat(bench.gradient("teacher")), flat(bench.gradient("student")), logs))
    for one, other in zip(found[0][:2], found[1][:2]):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    for name, value in found[0][2].items():
        assert float(found[1][2][name]) == pytest.approx(float(value), rel=1e-9), name
