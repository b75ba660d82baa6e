"""The loss in closed form: mixed targets, annealing's ends, ablations, weights, rates by layer."""

from pathlib import Path
from typing import Any

import bam_bench
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from metaseq_lm.config.groups import options_of, rates_by_level
from metaseq_lm.core.config import build, section
from metaseq_lm.core.errors import UsageError
from metaseq_lm.methods.bam.criterion import BamDistill
from metaseq_lm.methods.bam.data import WITH_CLASSES, MixedBatch
from metaseq_lm.methods.bam.options import BamDistillConfig

LEAST, SCALE = -6.0, 4.0  # of the real values of set c


class Known(torch.nn.Module):
    """Gives the scores it was told, as a model of three sets: 2 and 3 classes, real values."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        draw = np.random.default_rng(0)
        self.found = {n: bam_bench.rng_batch(draw, (rows, k)) for n, k in zip("abc", (2, 3, 1))}

    def forward(self, *_: Any) -> dict[str, Tensor]:
        return self.found

    def scaled(self, name: str, labels: Tensor) -> Tensor:
        assert name == "c"
        return (labels - LEAST) / SCALE


def batch_of(share: float | None) -> MixedBatch:
    """Return a batch of seven rows of the three sets; without a share, one without teachers."""
    draw = np.random.default_rng(1)
    batch = MixedBatch(
        tokens=torch.zeros(7, 0),
        sets=torch.tensor([0, 1, 2, 1, 2, 0, 1]),
        targets=torch.tensor([1, 2, 3.5, 0, -6, 0, 1]).double(),
        weights=torch.tensor([0.5, 2, 3, 2, 3, 0.5, 2]).double(),
    )
    if share is None:
        return batch
    return batch.replace(teacher=bam_bench.rng_batch(draw, (7, 3)), gold_share=share)


def by_hand(model: Known, batch: MixedBatch, share: float, temperature: float = 1.0) -> dict:
    """Return the summed weighted loss of each set, row by row, from the definition."""
    sums = dict.fromkeys("abc", 0.0)
    for row in range(7):
        number = int(batch.sets[row])
        name, gold = "abc"[number], batch.targets[row]
        scores, teacher = model.found[name][row], batch.teacher
        if name == "c":
            # Both on the scale of the labels; the mixture is brought to that of the head.
            wanted = gold if teacher is None else share * gold + (1 - share) * teacher[row, 0]
            loss = (scores[0] - (wanted - LEAST) / SCALE) ** 2
        else:
            target = share * F.one_hot(gold.long(), len(scores)).double()
            if teacher is not None:
                soft = F.softmax(teacher[row, : len(scores)] / temperature, -1)
                target = target + (1 - share) * soft
            loss = F.cross_entropy(scores[None], target[None])
        sums[name] += float(batch.weights[row] * loss)
    return sums


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0, None])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_targets_are_mixed_as_defined(share: float | None, temperature: float) -> None:
    model, batch = Known(7), batch_of(share)
    terms = BamDistill(BamDistillConfig(total_updates=10, temperature=temperature))(model, batch)
    wanted = by_hand(model, batch, 1.0 if share is None else share, temperature)
    for name, value in wanted.items():
        term = terms[f"{name}_part_of_loss"]
        assert float(term.sum) == pytest.approx(value, rel=1e-12)
        assert term.per == "rows" and term.is_summed
    assert ("gold_share" in terms) == (share is not None)
    # One accuracy, over the rows of all sets with classes.
    names = ["abc"[number] for number in batch.sets]
    right = sum(
        int(model.found[n][row].argmax()) == int(batch.targets[row])
        for row, n in enumerate(names)
        if n != "c"
    )
    assert float(terms["accuracy"].sum) == right and terms["accuracy"].per == WITH_CLASSES
    assert terms["accuracy"].weight == 0 and not [n for n in terms if n.endswith("_accuracy")]


def test_annealing_goes_from_teacher_to_gold() -> None:
    """Other gold labels change nothing at first, another teacher little at last."""
    criterion, model = BamDistill(BamDistillConfig(total_updates=1000)), Known(7)

    def loss(updates: int, change: str = "") -> float:
        batch = batch_of(criterion.gold_share(updates))
        if change:
            value = getattr(batch, change)
            batch = batch.replace(
                **{change: value.roll(1, 0) if change == "teacher" else 0 * value}
            )
        return sum(float(t.sum) for n, t in criterion(model, batch).items() if "_loss" in n)

    assert loss(0, "targets") == loss(0) and abs(loss(0, "teacher") - loss(0)) > 0.1
    assert abs(loss(999, "targets") - loss(999)) > 0.1
    assert 0 < abs(loss(999, "teacher") - loss(999)) < 0.05
    shares = [criterion.gold_share(u) for u in (0, 250, 500, 999, 1000, 2000)]
    assert shares == [0, 0.25, 0.5, 0.999, 1, 1]


@pytest.mark.parametrize("weight, share", [(1.0, 0.0), (0.5, 0.5), (0.0, 1.0)])
def test_ablations_are_fixed_weights_of_the_teacher(weight: float, share: float) -> None:
    """The paper's lambda of 0 and 0.5 are the code's distill_weight of 1 and 0.5, always."""
    criterion = BamDistill(
        BamDistillConfig(annealing=False, distill_weight=weight, total_updates=10)
    )
    assert {criterion.gold_share(updates) for updates in (0, 5, 10)} == {share}


def test_the_sigmoid_of_the_text_is_of_real_values_only() -> None:
    model = Known(7)
    plain, squashed = (
        BamDistill(BamDistillConfig(total_updates=10)),
        BamDistill(BamDistillConfig(total_updates=10, sigmoid=True)),
    )
    one, other = plain.scores(model, batch_of(None)), squashed.scores(model, batch_of(None))
    assert torch.equal(other["c"], one["c"].sigmoid()) and torch.equal(other["a"], one["a"])


@pytest.mark.parametrize(
    "options, words",
    [
        ({"distill_weight": 1.1}, "distill_weight .*at most 1"),
        ({"temperature": 0}, "above"),
        ({"total_updates": 0}, "at least 1"),
    ],
)
def test_impossible_options(options: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build("criterion", section("criterion", **{"_name": "bam_distill", **options}))


# ---------------------------------------------------------------- with a model


def test_losses_of_a_model_are_those_of_its_rows_alone(bam_sets: Path) -> None:
    """A mixed batch equals each row alone through its head, evaluation `final`."""
    run = bam_bench.dry(bam_sets, "engine.precision=fp64")
    run.model.eval()
    rows = run.task.build_streams("train")["train"].micro_batches(0, run.shard)
    (batch,) = run.engine.to_device(rows)
    terms = run.task.criterion(run.model, batch)
    assert batch.sizes == {"rows": 16, WITH_CLASSES: int((batch.sets < 2).sum())}
    wanted = dict.fromkeys(("words", "few", "values"), 0.0)
    first = np.cumsum([0, *(len(run.task.labelled(name, "train")) for name in wanted)])
    for sample in batch.samples.tolist():
        number = int(np.searchsorted(first, sample, side="right")) - 1
        name = list(wanted)[number]
        alone = run.task.labelled(name, "train").batch(np.array([sample - first[number]]), None)
        tokens, segments = alone.tokens, alone.segments
        scores = run.model(tokens, alone.layout, segments)[name]
        target = alone.targets
        if name == "values":
            loss = ((scores[:, 0] - (target - -6) / 4) ** 2).sum()
        else:
            loss = F.cross_entropy(scores, target)
        wanted[name] += loss.item()
    for name, value in wanted.items():
        assert value > 0 and terms[f"{name}_part_of_loss"].sum.item() == pytest.approx(
            value, rel=1e-9
        )


def test_rates_by_layer(bam_sets: Path) -> None:
    """Heads 1, the shared pooler alpha, layer i alpha^(L + 1 - i), embeddings alpha^(L + 2)."""
    run = bam_bench.dry(bam_sets, "model.encoder_layers=3", "optimizer.layer_decay=0.9")
    names = [name for name, _ in run.model.named_parameters()]
    rules = rates_by_level(list(run.model.named_parameters()), 1.0, 0.9)
    multipliers = {
        name: options_of(name, p, rules)["lr"] for name, p in run.model.named_parameters()
    }
    assert {multipliers[n] for n in names if n.startswith("heads.sets.")} == {1.0}
    assert {multipliers[n] for n in names if n.startswith("heads.pooler.")} == {0.9}
    for layer in range(3):
        (rate,) = {multipliers[n] for n in names if f"layers.{layer}." in n}
        assert rate == pytest.approx(0.9 ** (3 + 1 - layer))
    assert multipliers["encoder.embeddings.tokens.weight"] == pytest.approx(0.9 ** (3 + 2))
    groups = run.engine.optimizers["main"].inner.param_groups
    assert {round(g["lr"] / 0.01, 6) for g in groups} == {round(0.9**k, 6) for k in range(6)}
