"""engine.recompute=block: the same weights to the last bit, from a graph that stores less."""

from pathlib import Path

import battery
import numpy as np
import pytest
import real_runs
import torch
from optimizers import make_optimizer
from torch import Tensor, nn

from metaseq_lm.config.transformer import TransformerConfig
from metaseq_lm.core.batch import TokenBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.criterions.masked_lm import MaskedLM
from metaseq_lm.distributed import process_group
from metaseq_lm.engine.engine import Engine
from metaseq_lm.models.transformer.encoder import TransformerLM
from metaseq_lm.runs.folder import read_results
from metaseq_lm.training.run import TrainingRun

# First and second derivatives; virtual students, whose weights are no parameters; exact FOMAML
# steps.
CASES = [
    ("masked_lm", 0),
    ("electra_rtd", 1),
    ("tartan_meta", 0),
    ("bert_pretraining", 2),
    *(("meta_pseudo_label_" + name, i) for name, i in (("hard", 0), ("soft", 0), ("soft", 2))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_recomputing_changes_no_bit(case, moons, whole, tmp_path):
    """With dropout, whose masks the replay draws again."""
    config = battery.configure(moons, tmp_path, case, *battery.dropped("engine.recompute=block"))
    assert battery.difference(whole(case), battery.train_uncounted(config)) == 0


def test_a_resumed_run_may_recompute(moons, tmp_path):
    """And counts the same FLOPs: work that is done twice is not dearer for the objective."""
    case, results = ("meta_pseudo_label_soft", 0), []
    for name, stops in {"plain": {4: "none"}, "resumed": {2: "none", 4: "block"}}.items():
        for last, recompute in stops.items():
            more = [f"trainer.max_update={last}", f"engine.recompute={recompute}"]
            weights = battery.train(battery.configure(moons, tmp_path / name, case, *more))
        results.append((weights, (read_results(tmp_path / name) or {})["flops"]))
    (plain, flops), (resumed, again) = results
    assert battery.difference(plain, resumed) == 0 and flops == again


SHARDED = [("meta_pseudo_label_soft", 0), ("masked_lm", 0)]


def on_shards(data: str, out: str) -> None:
    """Train on sharded parameters, as one of two replicas."""
    more = battery.dropped("engine.recompute=block", "engine.parallel=shard")
    for number, case in enumerate(SHARDED):
        config = battery.configure(Path(data), Path(out) / f"run{number}", case, *more)
        weights = battery.train_uncounted(config)
        torch.save(weights, Path(out) / f"{number}.{process_group.rank()}.pt")
    process_group.finish()


@pytest.mark.slow
def test_sharded_parameters(moons, whole, tmp_path):
    """The replay uses parameters as put together before, or puts a layer's together again."""
    real_runs.on_replicas(2, on_shards, str(moons), str(tmp_path))
    for number, case in enumerate(SHARDED):
        for replica in range(2):
            weights = torch.load(tmp_path / f"{number}.{replica}.pt", weights_only=True)
            assert battery.difference(whole(case), weights) <= 1e-12


def test_models_without_blocks_are_refused(moons, tmp_path):
    config = battery.configure(moons, tmp_path, ("language_modeling", 0), "engine.recompute=block")
    with pytest.raises(UsageError, match=r"engine\.recompute=block .*bilstm_lm"):
        TrainingRun(config)


def stored_bytes(recompute: bool) -> tuple[int, list[Tensor]]:
    """Return what the graph of 12 layers stores beside the parameters, and the gradients."""
    torch.manual_seed(1)
    config = TransformerConfig(encoder_embed_dim=32, encoder_ffn_embed_dim=128)
    model: nn.Module = TransformerLM(config, 100)
    adamw = {"_name": "adamw", "lr": 0.1}
    optimizer = make_optimizer(model.named_parameters(), adamw, {"_name": "constant"})
    engine = Engine({"main": optimizer}, recompute=recompute)
    tokens = torch.randint(1, 100, (4, 64))
    batch = TokenBatch(
        tokens=tokens,
        positions=torch.arange(8).expand(4, 8),
        targets=tokens[:, :8],
        rows=np.arange(4),
        sizes={"targets": 32, "rows_with_targets": 4, "rows": 4},
    )
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    stored: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            stored[tensor.untyped_storage().data_ptr()] = tensor  # alive: addresses are not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        grads, _ = engine.gradients(
            lambda batch: MaskedLM()(model, batch), [batch], engine.parameters("main")
        )
    assert all(g is not None for g in grads)
    return sum(t.untyped_storage().nbytes() for t in stored.values()), list(grads)


def test_the_graph_stores_the_inputs_of_blocks_only():
    (everything, grads), (less, again) = stored_bytes(False), stored_bytes(True)
    assert all(map(torch.equal, grads, again))
    assert less < 0.1 * everything
