"""The teacher's auxiliary losses and the shapes of the two nets."""

from pathlib import Path

import pytest
import torch
from meta_pseudo_bench import Bench, relative
from torch import Tensor
from torch.nn import functional as F

from metaseq_lm.core.batch import Layout
from metaseq_lm.methods.meta_pseudo_label import criterion as losses

OPTIONS = ["task.batches_per_update=3", "task.batch_size=2"]
QUIET = ["model.dropout=0", "model.attention_dropout=0"]


def written_out(bench: Bench, batch: dict) -> Tensor:
    """Return both pairs' losses: one forward pass of 2B rows per micro-step."""
    teacher, total = bench.model["teacher"], torch.zeros(())
    cls1 = bench.task.vocabulary.symbols.index("[CLS1]")
    for c in range(3):
        x_u, x_m = batch.original[c].clone(), batch.tokens[c]
        x_u[:, 0] = cls1
        pads = x_u == 0
        y_m = torch.zeros_like(x_m)
        for row in range(2):
            for at, target in zip(batch.positions[c, row], batch.targets[c, row]):
                if target >= 0:
                    y_m[row, at] = target
        hidden = teacher.encoder(torch.cat([x_u, x_m]), Layout(torch.cat([pads, pads])))
        x, y = (teacher.predict(hidden, head=name) for name in ("x", "y"))
        inside, chosen = ~pads, y_m != 0
        total = total + 0.5 * F.cross_entropy(x[:2][inside], x_m[inside])
        total = total + 0.5 * F.cross_entropy(y[:2][inside], x_u[inside])
        total = total + 0.5 * F.cross_entropy(x[2:][inside], x_m[inside])
        total = total + 0.5 * F.cross_entropy(y[2:][chosen], y_m[chosen])
    return total / 3


@pytest.mark.parametrize("data", ["even", "ragged"])
def test_auxiliary_losses(data: str, request: pytest.FixtureRequest) -> None:
    bench = Bench(request.getfixturevalue(data), "soft", *OPTIONS, *QUIET)
    teacher = bench.model["teacher"]
    with torch.no_grad():
        for head in teacher.heads.values():
            head.weight.mul_(30)
    (batch,) = bench.batches(0)["unlabelled"][0]
    cls1 = bench.task.vocabulary.symbols.index("[CLS1]")
    parameters = list(teacher.parameters())
    grads, logs = bench.engine.gradients(
        lambda b: losses.auxiliary_losses(teacher, b, cls1), [batch], parameters
    )
    wanted = written_out(bench, batch)
    assert logs["loss"].item() == pytest.approx(wanted.item(), rel=1e-12)
    assert relative(grads, list(torch.autograd.grad(wanted, parameters))) < 1e-11


def test_unlabelled_text_is_not_overwritten(even: Path) -> None:
    """The task token of the auxiliary losses goes into a copy: x still starts with [CLS0]."""
    bench = Bench(even, "soft", *OPTIONS)
    (batch,) = bench.batches(0)["unlabelled"][0]
    before = batch.original.clone()
    losses.auxiliary_losses(bench.model["teacher"], batch, 4)
    assert torch.equal(batch.original, before)
    assert (before[..., 0] == 3).all()


def test_each_head_learns_from_both_rows(even: Path) -> None:
    """Removing one of the two rows changes the gradient of both heads."""
    bench = Bench(even, "soft", *OPTIONS, *QUIET)
    teacher = bench.model["teacher"]
    (batch,) = bench.batches(0)["unlabelled"][0]

    def slopes(name: str, hide: str) -> Tensor:
        terms = losses.auxiliary_losses(teacher, batch, 4)
        total = sum((t.sum * 1.0).sum() for n, t in terms.items() if n != hide)
        assert isinstance(total, Tensor)
        return torch.autograd.grad(total, teacher.heads[name].weight)[0]

    for hide in ("teacher_copy", "teacher_mlm"):
        assert not torch.equal(slopes("y", ""), slopes("y", hide))
        assert torch.allclose(slopes("x", ""), slopes("x", hide))
    x = losses.auxiliary_losses(teacher, batch, 4)["teacher_x"].sum
    with torch.no_grad():
        batch.tokens[..., 1:] = 2
    assert not torch.allclose(losses.auxiliary_losses(teacher, batch, 4)["teacher_x"].sum, x)


def test_the_nets(even: Path) -> None:
    """One encoder each; the student's output is tied, the teacher has two heads of its own."""
    bench = Bench(even, "soft")
    student, teacher = bench.model["student"], bench.model["teacher"]
    assert list(student.heads) == ["lm"] and list(teacher.heads) == ["x", "y"]
    assert student.heads["lm"].weight is None
    tables = [
        teacher.encoder.embeddings.tokens.weight,
        *(teacher.heads[n].weight for n in ("x", "y")),
    ]
    assert len({t.data_ptr() for t in tables}) == 3
    assert sum(p.numel() for p in student.parameters()) == 5_783
    assert sum(p.numel() for p in teacher.parameters()) == 12_790
    assert {"student", "teacher"} == set(bench.engine.optimizers)
    assert list(Bench(even, "mlm").model) == ["student"]


def test_padding_rows(even: Path) -> None:
    """The student's starts random and learns through the tied output; the teacher's stays zero."""
    bench = Bench(even, "soft", *OPTIONS)
    student, teacher = bench.model["student"], bench.model["teacher"]
    assert 0.01 < student.encoder.embeddings.tokens.weight[0].norm() < 0.2
    assert (teacher.encoder.embeddings.tokens.weight[0] == 0).all()
    for update in range(2):
        bench.update(update)
    names = [n for n, _ in student.named_parameters()]
    grad = bench.gradient("student")[names.index("encoder.embeddings.tokens.weight")]
    assert grad is not None and grad[0].norm() > 0
    assert (teacher.encoder.embeddings.tokens.weight[0] == 0).all()


def test_soft_input_meets_no_padding_row(even: Path) -> None:
    """Probabilities that fall on [PAD] give the student's PAD row no gradient."""
    bench = Bench(even, "soft", *OPTIONS, *QUIET)
    student = bench.model["student"]
    (batch,) = bench.batches(0)["unlabelled"][0]
    weight = student.encoder.embeddings.tokens.weight
    soft = F.one_hot(torch.zeros_like(batch.original), 407).double()
    embedded = student.encoder.embeddings.tokens(0.7 * soft + 0.3 * soft.roll(9, -1))
    (grad,) = torch.autograd.grad(embedded.square().sum(), weight)
    assert grad[0].norm() < 1e-12 * grad[9].norm()
