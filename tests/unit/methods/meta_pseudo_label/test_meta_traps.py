"""Details of the authors' code that are easily lost."""

import copy
from typing import Any

import pytest
import torch
from meta_pseudo_bench import Bench, flat, relative
from test_soft_gradient import SMALL, dropout, error_beside_meta, wanted_and_found
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.core.batch import Layout
from metaseq_lm.core.errors import UsageError
from metaseq_lm.methods.meta_pseudo_label import criterion as losses
from metaseq_lm.methods.meta_pseudo_label.model import VirtualModel, adamw_step, moments_of


@pytest.mark.parametrize("steps", ["sgd", "adamw"])
def test_virtual_steps_are_not_clipped(ragged, steps):
    """Soft labels clip real steps only; here every gradient is far longer than 5."""
    bench = Bench(ragged, "soft", *SMALL, *dropout(0.0), f"criterion.pretrain_step={steps}")
    student = bench.model["student"]
    with torch.no_grad():
        student.heads["lm"].norm.weight.mul_(500.0)
        student.heads["lm"].bias.normal_(generator=torch.Generator().manual_seed(1)).mul_(9.0)
    wanted, teacher, found = wanted_and_found(bench, 0)
    assert flat(wanted.student).norm() > 10
    assert error_beside_meta(teacher, wanted) < 1e-8
    assert relative(found, wanted.student) < 1e-10


@pytest.mark.parametrize(("name", "passes"), [("mlm", 4), ("soft", 4), ("hard", 14)])
def test_every_pass_draws_its_own_dropout(even, name, passes):
    """Only the teacher's sampling pass and its loss share their masks."""
    bench = Bench(even, name, "task.reward_interval=16")
    bench.update(0)
    draws = [draw for _, draw in bench.passes]
    if name == "mlm":
        assert len(draws) == 3 == len(set(draws))
        return
    assert len(draws) == passes
    assert len(set(draws)) == passes - (name == "hard")


def test_passes_with_other_draws_see_other_masks(even):
    """Two updates, two draws, two rows: all four masks differ; the same three numbers: the same."""
    bench = Bench(even, "soft")
    rows = bench.batches(0)["unlabelled"][0][0].rows
    layer = bench.model["student"].encoder.embeddings.dropout

    def mask(update: int, draw: Any, c: int) -> Tensor:
        with bench.replay(rows[c], update, draw):
            return layer(torch.ones(4, 34, 8))

    masks = [mask(0, 1, 0), mask(1, 1, 0), mask(0, 2, 0), mask(0, 1, 1), mask(0, "teacher", 0)]
    for number, one in enumerate(masks):
        for other in masks[:number]:
            agree = ((one == 0) == (other == 0)).double().mean()
            assert 0.7 < agree < 0.9, "independent masks agree with .9^2 + .1^2"
    assert torch.equal(mask(0, 1, 0), masks[0])


@pytest.mark.parametrize("how", ["exact", "finite_difference"])
@pytest.mark.parametrize("micro", [0, 2])
def test_the_unroll_is_in_full_precision(even, micro, how, monkeypatch):
    """With bf16 autocast the meta part stays in float32, however the batch is cut."""
    seen: dict[str, set[bool]] = {}

    def watched(name: str, function: Any) -> Any:
        def called(*arguments: Any, **more: Any) -> Any:
            seen.setdefault(name, set()).add(torch.is_autocast_enabled("cpu"))
            return function(*arguments, **more)

        return called

    bench = Bench(even, "soft", "engine.precision=bf16", f"criterion.hypergradient={how}")
    monkeypatch.setattr(losses, "labelled_loss", watched("labelled_loss", losses.labelled_loss))
    bench.task.criterion.distil = watched("distil", bench.task.criterion.distil)
    bench.update(0, micro)
    assert seen["distil"] == {False}, "the pseudo pass"
    assert seen["labelled_loss"] == {False}, "the support and the query pass"


class Certain(nn.Module):
    """A teacher that is certain: its softmax is exactly one-hot."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self.logits = {"x": 1e4 * F.one_hot(x, 407).double(), "y": 1e4 * F.one_hot(y, 407).double()}
        self.unused = nn.Parameter(torch.zeros(1))

    def encoder(self, tokens: Tensor, layout: Layout) -> Tensor:
        return tokens

    def predict(self, hidden: Tensor, head: str) -> Tensor:
        return self.logits[head] + self.unused


@pytest.mark.parametrize("trained", [0, 2])
def test_a_certain_teacher_gives_a_plain_adamw_step(even, trained):
    """One-hot pairs and one micro-step: the virtual step is torch's AdamW step on the hard CE."""
    options = ["task.batches_per_update=1", "schedule.warmup_updates=4", *dropout(0.0)]
    bench = Bench(even, "soft", *options)
    for update in range(trained):
        bench.update(update)
    (batch,) = bench.batches(trained)["unlabelled"][0]
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(407, batch.original.shape, generator=generator) for _ in range(2))
    student = VirtualModel(bench.model["student"])
    theta = student.vector().unsqueeze(0).requires_grad_()
    pseudo = bench.engine.inner(
        lambda b: bench.task.criterion.distil(
            lambda *a: student(theta, *a),
            Certain(x, y),
            b,  # type: ignore[arg-type]
        ),
        [batch],
        [theta],
    )
    virtual, _ = adamw_step(
        student.vector(), pseudo.value[0], moments_of(bench.engine.optimizers["student"])
    )
    real = copy.deepcopy(bench.model["student"])
    optimizer = torch.optim.AdamW(real.parameters(), betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01)
    inner = bench.engine.optimizers["student"].inner.state_dict()["state"]
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict(copy.deepcopy({"state": inner, "param_groups": groups}))
    optimizer.param_groups[0]["lr"] = 0.08 / 2 * (trained + 1) / 4
    F.cross_entropy(real(x[0]).flatten(0, 1), y[0].flatten()).backward()
    optimizer.step()
    assert (virtual[0] - flat(real.parameters())).abs().max() < 1e-12
    assert (virtual[0] - student.vector()).abs().max() > 1e-3


def test_fixed_y_trains_the_input_head_only(even):
    """The meta loss reaches head y through soft targets, and not where the text is the target."""
    found: dict[tuple[str, float], dict[str, Any]] = {}
    for name in ("soft", "soft_fixed_y"):
        for weight in (1.0, 2.0):
            option = f"criterion.meta_weight={weight}"
            bench = Bench(even, name, "task.batches_per_update=1", option)
            bench.update(0)
            names = [n for n, _ in bench.model["teacher"].named_parameters()]
            found[name, weight] = dict(zip(names, bench.gradient("teacher")))

    def reached(name: str, parameter: str) -> bool:
        return not torch.equal(found[name, 1.0][parameter], found[name, 2.0][parameter])

    assert reached("soft", "heads.x.weight") and reached("soft", "heads.y.weight")
    assert reached("soft_fixed_y", "heads.x.weight")
    assert not reached("soft_fixed_y", "heads.y.weight")


def test_targets_of_two_kinds_are_refused(even):
    with pytest.raises(UsageError, match="is the target"):
        Bench(even, "soft_fixed_y", "criterion.targets=flat")


def test_a_tied_weight_counts_once(even):
    student = VirtualModel(Bench(even, "hard").model["student"])
    assert student.vector().numel() == 5_783 and len(student.parameters) == len(
        set(student.parameters)
    )
