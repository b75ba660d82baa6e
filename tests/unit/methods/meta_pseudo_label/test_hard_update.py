"""Hard labels: rewards, the student's steps and the teacher's REINFORCE gradient, written out."""

import copy
from pathlib import Path

import pytest
import torch
from hard_reference import watch, written_out
from meta_pseudo_bench import Bench, flat, relative

from metaseq_lm.core.errors import UsageError
from metaseq_lm.distributed import vectors
from metaseq_lm.methods.meta_pseudo_label.criterion import reward_of

SMALL = """
    task.batch_size=3 task.batches_per_update=2 task.samples_per_task=2 schedule.warmup_updates=4
    task.labelled=[which_moon_10,pairs]
""".split()


def dropout(p: float) -> list[str]:
    return [f"model.{n}={p}" for n in ("dropout", "attention_dropout", "activation_dropout")]


def check(bench: Bench, update: int) -> None:
    """Make one update and compare all it did with the update written out."""
    state = copy.deepcopy((bench.model.state_dict(), bench.engine.optimizers["student"]))
    taken = watch(bench)
    bench.update(update)
    after, found = flat(bench.model["student"].parameters()), bench.gradient("teacher")
    draws = [draw for name, draw in bench.passes if draw != "teacher"]
    bench.model.load_state_dict(state[0])
    bench.engine.optimizers["student"].load_state_dict(state[1].state_dict())
    (pairs,) = taken.pairs
    wanted = written_out(bench, bench.batches(update), update, draws, pairs)
    assert taken.rewards == pytest.approx(wanted.rewards, rel=1e-7)
    assert taken.products == pytest.approx(wanted.products, rel=1e-7)
    assert (after - wanted.student).abs().max() < 1e-12
    own, total = wanted.reinforce, vectors.add(wanted.auxiliary, wanted.reinforce)
    small = (vectors.norm(total) / vectors.norm(own)).item()
    # Relative to the REINFORCE part, which is far smaller than the auxiliary one.
    assert relative(found, total) * small < 1e-7


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize("inner_steps", [0, 1])
@pytest.mark.parametrize("reward", ["cosine", "dot", "neg_loss"])
def test_update(ragged: Path, reward: str, inner_steps: int, trained: int, p: float) -> None:
    options = [f"criterion.reward={reward}", f"criterion.inner_steps={inner_steps}"]
    bench = Bench(ragged, "hard", *SMALL, *options, *dropout(p))
    for update in range(trained):
        bench.update(update)
    check(bench, trained)


@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize("reward", ["cosine", "dot"])
@pytest.mark.parametrize("decay", [0.01, 0.5])
def test_the_papers_update(ragged: Path, decay: float, reward: str, trained: int) -> None:
    options = ["criterion.fidelity=paper", f"optimizer.weight_decay={decay}"]
    bench = Bench(ragged, "hard", *SMALL, f"criterion.reward={reward}", *options, *dropout(0.1))
    for update in range(trained):
        bench.update(update)
    check(bench, trained)
    assert bench.engine.optimizers["student"].updates == trained


def test_update_as_configured(even: Path) -> None:
    bench = Bench(even, "hard")
    bench.update(0)
    check(bench, 1)


def test_clipped_inner_steps(ragged: Path) -> None:
    """Both inner gradients are longer than the norm they are clipped to."""
    weights = Bench(ragged, "hard", *SMALL, "criterion.reward=dot")
    with torch.no_grad():
        weights.model["student"].encoder.stack.norm.weight.mul_(200.0)
        weights.model["student"].heads["lm"].norm.weight.mul_(200.0)
    check(weights, 0)
    taken = watch(weights)
    weights.task.criterion.config.inner_clip_norm = 1e-3
    weights.update(0)
    assert max(map(abs, taken.products)) < 1e-3, "the query gradient is clipped"


def test_teacher_weight(even: Path) -> None:
    """`meta_weight` scales the REINFORCE loss beside the auxiliary losses."""
    found = {}
    for weight in (0.0, 1.0, 7.0):
        bench = Bench(even, "hard", *SMALL[:4], f"criterion.meta_weight={weight}")
        bench.update(0)
        found[weight] = bench.gradient("teacher")
    one = vectors.add(found[1.0], found[0.0], -1.0)
    seven = vectors.add(found[7.0], found[0.0], -1.0)
    assert relative(seven, vectors.scale(one, 7.0)) < 1e-9


def test_student_is_at_theta1_after_the_reward(even: Path) -> None:
    """Bitwise the student after its step, moments untouched by support and query."""
    with_reward, without = (Bench(even, "hard", *SMALL[:4], *dropout(0.0)) for _ in range(2))
    zero = torch.zeros(())
    nothing = {"reward": zero, "unscaled_reward": zero, "query": zero}
    without.task.reward = lambda *arguments: nothing
    for update in range(2):
        with_reward.update(update)
        # The teacher must sample the same pairs, so it is moved along.
        without.update(update)
        without.model["teacher"].load_state_dict(with_reward.model["teacher"].state_dict())
    one, other = (flat(b.model["student"].parameters()) for b in (with_reward, without))
    assert torch.equal(one, other)
    for moment in ("exp_avg", "exp_avg_sq", "step"):
        states = [
            [
                b.engine.optimizers["student"].inner.state[p][moment]
                for p in b.model["student"].parameters()
            ]
            for b in (with_reward, without)
        ]
        assert all(torch.equal(a, b) for a, b in zip(*states))


def test_a_reward_that_is_not_a_number_counts_nothing(even: Path) -> None:
    """A student that does not move has no cosine; the teacher learns from its own losses."""
    still = Bench(even, "hard", *SMALL[:4], "optimizer.lr=0")
    taken = watch(still)
    still.update(0)
    assert taken.rewards == [0.0, 0.0]
    other = Bench(even, "hard", *SMALL[:4], "criterion.meta_weight=0")
    other.update(0)
    assert relative(still.gradient("teacher"), other.gradient("teacher")) < 1e-12


@pytest.mark.parametrize("fidelity", ["authors", "paper"])
def test_a_refused_step_earns_nothing(even: Path, fidelity: str) -> None:
    """Weight decay that was not applied is no step either."""
    options = [f"criterion.fidelity={fidelity}", "optimizer.weight_decay=0.5"]
    bench = Bench(even, "hard", *SMALL[:4], *options)
    bench.update(0)
    taken, step = watch(bench), bench.engine.step
    bench.engine.step = lambda name, grads: name != "student" and step(name, grads)
    bench.update(1)
    assert taken.rewards == [0.0, 0.0]


def test_only_adamws_decay_can_be_left_out(even: Path) -> None:
    bench = Bench(even, "hard", *SMALL[:4], "criterion.fidelity=paper", "optimizer=sgd")
    with pytest.raises(
        UsageError, match=r"optimizer=adamw.* FusedSGD.* criterion.fidelity=authors"
    ):
        bench.update(0)


def test_reward_of() -> None:
    step, towards = torch.tensor([3.0, 4.0]), torch.tensor([0.6, -0.8])
    assert reward_of("cosine", step, towards, torch.tensor(2.0))[0] == pytest.approx(-1.4 / 5)
    assert reward_of("dot", step, towards, torch.tensor(2.0))[0] == pytest.approx(-1.4)
    assert reward_of("neg_loss", step, towards, torch.tensor(2.0))[0] == -2.0
    assert all(
        reward_of(k, step, towards, torch.tensor(2.0))[1] == pytest.approx(-1.4)
        for k in ("cosine", "dot", "neg_loss")
    )


@pytest.mark.parametrize("kind", ["cosine", "dot", "neg_loss"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_reward_of_what_is_not_finite(kind: str, bad: float) -> None:
    reward, _ = reward_of(kind, torch.tensor([bad, 1.0]), torch.ones(2), torch.tensor(bad))
    assert reward == 0


def test_a_cosine_beyond_one_is_skipped() -> None:
    """Rounding can do that; the authors' code skips such a sample."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(300):
        step = torch.randn(5, generator=generator)
        exact = torch.dot(step, step) / (step.norm() * step.norm())
        reward, _ = reward_of("cosine", step, step, torch.tensor(1.0))
        found.append((exact.item(), reward.item()))
    assert any(exact > 1 for exact, _ in found), "no case of rounding beyond 1"
    assert all(reward == (0.0 if exact > 1 else exact) for exact, reward in found)
