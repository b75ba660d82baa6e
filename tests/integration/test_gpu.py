"""On a CUDA device: the same training as on the CPU, bf16 near fp32, and no wait for the device."""

from dataclasses import replace

import battery
import numpy as np
import pytest
import torch

from metaseq_lm.core.errors import DivergedError
from metaseq_lm.data.corpus.rows import layout_of
from metaseq_lm.forward.passes import ForwardContext, Noise, use_context
from metaseq_lm.models.layers import Dropout
from metaseq_lm.models.transformer.attention import Visibility, mix_values
from metaseq_lm.training.parts import build_parts, evaluate_split
from metaseq_lm.training.run import TrainingRun
from metaseq_lm.training.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CASES = [
    ("masked_lm", 0),
    ("bert_pretraining", 0),
    ("electra_rtd", 0),
    ("electra_rtd", 1),
    ("electric_nce", 0),
    ("electra_adversarial", 0),
    # The modern backbone: packed documents, from both sides and with prefixes, SwiGLU, a
    # discriminator, a decoder.
    ("masked_lm", 5),
    ("causal_lm", 2),
    ("prefix_lm", 1),
    ("electra_rtd", 5),
    ("span_corruption", 3),
]
IDS = [f"{name}-{number}" for name, number in CASES]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_same_weights_as_on_the_cpu(case, moons, tmp_path):
    """Ten updates in float64 with dropout: draws come from counters, not devices."""
    more = battery.exact("model.dropout=0.1", "model.attention_dropout=0.1")
    found = []
    for device in ("cpu", "cuda"):
        place = tmp_path / device
        config = battery.configure(moons, place, case, *more, f"engine.device={device}")
        found.append({name: weight.cpu() for name, weight in battery.train(config).items()})
    assert battery.difference(*found) < 1e-8


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_bf16_is_near_fp32(case, moons, tmp_path):
    """Losses of validation before any training, where nothing has grown apart yet."""
    found = []
    for precision in ("fp32", "bf16"):
        more = ["engine.device=cuda", f"engine.precision={precision}"]
        run = build_parts(battery.configure(moons, tmp_path / precision, case, *more))
        found.append(evaluate_split(run, "valid").metrics)
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=0.02)


WATCHED = [
    *((case, "stop") for case in CASES),
    *((case, "stop") for case in (("sentence_prediction", 0), ("tartan_mt", 0))),
    *((("masked_lm", 0), policy) for policy in ("skip", "rollback")),
    *((("tartan_meta", 0), policy) for policy in ("stop", "rollback")),
]


@pytest.mark.parametrize("case, policy", WATCHED, ids=str)
def test_updates_do_not_wait_for_the_device(case, policy, moons, tmp_path, monkeypatch):
    """From the third update on, batches included; torch raises where the host would wait."""
    update = Trainer._update

    def watched(trainer: Trainer, number: int, batches: dict) -> None:
        assert trainer.engine.finite_check.defers
        torch.cuda.set_sync_debug_mode("error" if number >= 2 else "default")
        update(trainer, number, batches)

    monkeypatch.setattr(Trainer, "_update", watched)
    more = [
        "model.dropout=0.1",
        "trainer.max_update=5",
        "trainer.log_interval=0",
        "engine.workers=1",
        f"trainer.on_nonfinite={policy}",
    ]
    run = TrainingRun(battery.configure(moons, tmp_path, case, *more, "engine.device=cuda"))
    monkeypatch.setattr(
        run.trainer, "_check_skipped", lambda: torch.cuda.set_sync_debug_mode("default")
    )
    try:
        run.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.trainer.update == 5


def test_a_device_refuses_an_update(moons, tmp_path, monkeypatch):
    more = ["engine.device=cuda", "trainer.log_interval=5", "trainer.max_update=10"]
    run = TrainingRun(battery.configure(moons, tmp_path, CASES[0], *more))
    step = run.engine.step

    def spoilt(name: str, grads: list[torch.Tensor]) -> bool:
        if run.engine.passes.update == 2:
            grads[0].fill_(float("nan"))
        return step(name, grads)

    monkeypatch.setattr(run.engine, "step", spoilt)
    with pytest.raises(DivergedError, match="update 3: "):
        run.train()
    assert all(w.isfinite().all() for w in run.model.state_dict().values())


@pytest.mark.parametrize("numbers", [1, 7, 1030, 100_000])
def test_kernels_draw_the_numbers_of_the_cpu(numbers):
    """Two tensors of each kind, one after the other, with gradients; the kernels are Triton's."""
    rows = np.arange(5)
    here, there = Noise(3, rows), Noise(3, rows, "cuda")
    assert there.kernels is not None
    layer = Dropout(0.1)
    for _ in range(2):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            results = []
            for noise in (here, there):
                x = torch.linspace(-1, 1, 5 * numbers).view(5, -1).to(noise.device, dtype)
                x.requires_grad_()
                for residual in (None, x.detach().float()):
                    with use_context(ForwardContext(noise)):
                        dropped = layer(x, residual)
                    (gradient,) = torch.autograd.grad((dropped * x.detach()).sum(), x)
                    results.append([dropped.cpu(), gradient.cpu()])
            for one, other in zip([*results[0], *results[1]], [*results[2], *results[3]]):
                assert torch.equal(one, other)
        wanted = here.uniform((5, numbers), torch.float64)
        assert torch.equal(wanted, there.uniform((5, numbers), torch.float64).cpu())


@pytest.mark.parametrize("distance", [0, 3])
@pytest.mark.parametrize("reach", ["both", "causal"])
@pytest.mark.parametrize("packed", [False, True])
def test_sequences_are_attended_to_as_masks_say(packed, reach, distance):
    """Flash attention over padded and packed rows in bf16, near masks in fp32."""
    torch.manual_seed(1)
    lengths, length = np.array([64, 17, 40]), 64
    layout = replace(layout_of(lengths, length), reach=reach)
    if packed:
        documents = torch.arange(length).expand(3, length) // 16
        layout = replace(layout, documents=documents, sequences=15)
    layout = layout.map(lambda tensor: tensor.cuda())
    visibility = Visibility.of(layout, length, torch.device("cuda"), distance)
    assert visibility.sequences is not None
    inputs = [torch.randn(3, 4, length, 16, device="cuda", requires_grad=True) for _ in range(3)]
    real = ~layout.padding_of(torch.zeros(3, length, device="cuda"))[:, None, :, None]
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        mixed = mix_values(*(x.to(dtype) for x in inputs), visibility, Dropout(0.0)) * real
        gradients = torch.autograd.grad(mixed.float().square().sum(), inputs)
        results.append([mixed.float(), *gradients])
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()
