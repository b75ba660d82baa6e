"""Helpers of Cross-View Training's tests: runs in double precision, batches and scores."""

from pathlib import Path
from typing import Any

import torch
from battery import CVT
from torch import Tensor

from metaseq_lm.core.batch import WordBatch
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.streams import Shard
from metaseq_lm.models.layers import dropout_at
from metaseq_lm.training.parts import Parts, build_parts

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "cvt" / "config"
SGD = [
    "optimizer=sgd",
    "optimizer.momentum=0.9",
    "optimizer.lr=0.5",
    "engine.tensorboard=false",
    "engine.threads=1",
]
BOTH = ["chunk", "dep"]
NORMALISED = "model.normalize_words=true"


def configure(data: Path, *options: str) -> RunConfig:
    """Return the configuration of a run in double precision."""
    more = [f"data={data}", "save_dir=none", "engine.precision=fp64"]
    return load_config([*more, *CVT, *SGD, *options])


def built(data: Path, *options: str) -> Parts:
    """Return a run in double precision that writes nothing."""
    run = build_parts(configure(data, *options))
    run.model.train()
    return run


def batch_of(run: Parts, stream: str = "unlabelled", number: int = 0) -> WordBatch:
    """Return a global batch; an unlabelled one is for all sets."""
    micro = run.task.build_streams("train")[stream].micro_batches(number, Shard())
    (batch,) = run.engine.to_device(micro)
    return batch.replace(learners=tuple(run.task.names)) if stream == "unlabelled" else batch


def scores(run: Parts, batch: WordBatch, name: str, module: str) -> Tensor:
    with torch.no_grad(), dropout_at(run.model, 0.0):
        return run.model.scores(run.model.views(batch), batch.scored, name, module)


def gradients(run: Parts, batch: WordBatch) -> tuple[dict[str, Any], Any]:
    parameters = run.engine.parameters("main")
    names = {id(p): name for name, p in run.model.named_parameters()}
    grads, _ = run.engine.gradients(
        lambda micro: run.task.criterion(run.model, micro), [batch], parameters
    )
    return {names[id(p)]: g for p, g in zip(parameters, grads)}, grads


def average_moves_before_the_step(run: Parts, batches: dict[str, list]) -> None:
    """Assert that an update adds a tenth of the previous weights to an average of decay 0.9."""
    model, engine = run.model, run.engine
    with torch.no_grad():
        for p in engine.parameters("main"):
            p.add_(0.1)  # there is no average yet
    before, average = (
        {name: p.detach().clone() for name, p in net.named_parameters()}
        for net in (model.net, model.average.net)
    )
    engine.begin(1)
    run.task.update(engine, model, batches)
    for name, now in model.average.net.named_parameters():
        torch.testing.assert_close(
            now, 0.9 * average[name] + 0.1 * before[name], rtol=0, atol=1e-14
        )
    assert any(not torch.equal(p, before[name]) for name, p in model.net.named_parameters())
