"""An optimizer of a plug-in: parameter groups by name, and its refusal on sharded parameters."""

from pathlib import Path

from battery import CASES, TINY
from real_runs import Started

from metaseq_lm.core.loading import load_config
from metaseq_lm.core.registry import OPTIMIZERS
from metaseq_lm.plugins import load_all
from metaseq_lm.training.run import TrainingRun

PLUG_IN = """
import torch

from metaseq_lm.core.registry import register_optimizer
from metaseq_lm.optim.groups import Rule
from metaseq_lm.optim.optimizers import OptimizerConfig


class UnitRows(torch.optim.SGD):
    needs_whole_matrices = True

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if group.get("is_unit") and p.grad is not None:
                    p.grad /= p.grad.norm()
        super().step()


@register_optimizer("unit_rows", dataclass=OptimizerConfig)
def unit_rows(config, parameters):
    hidden = Rule(r".*layers\\.\\d+\\..*weight", {"is_unit": True}, dims=(2,))
    return UnitRows(config.groups(parameters, hidden))
"""


def arguments(data: Path, save: Path, folder: Path, *more: str) -> list[str]:
    plug_in = folder / "unit_rows.py"
    plug_in.write_text(PLUG_IN)
    options = [*CASES["masked_lm"][0], *TINY, "trainer.max_update=2", "optimizer=unit_rows", *more]
    places = [str(data), "--save-dir", str(save), "--user-dir", str(plug_in)]
    return ["train", *places, "criterion=masked_lm", *options]


def test_whole_matrices_are_refused_on_shards(moons: Path, tmp_path: Path) -> None:
    shards = ["--nproc", "2", "engine.parallel=shard"]
    started = Started(arguments(moons, tmp_path / "run", tmp_path, *shards), tmp_path / "err")
    assert started.wait() == 2
    text = started.text()
    assert text.count("unit_rows needs whole matrices") == 1 and "Traceback" not in text
    assert "engine.parallel=replicate" in text


def test_it_trains_on_whole_parameters(moons: Path, tmp_path: Path) -> None:
    alone = ["engine.parallel=shard"]  # of one process, which has them whole
    _, data, *words = arguments(moons, tmp_path / "run", tmp_path, *alone)
    load_all(words[words.index("--user-dir") + 1])
    try:
        options = [word for word in words if "=" in word]
        run = TrainingRun(load_config([*options, f"data={data}", f"save_dir={tmp_path / 'run'}"]))
        (optimizer,) = run.engine.optimizers.values()
        groups = {g.get("is_unit", False): g for g in optimizer.inner.param_groups}
        names = {id(p): name for name, p in run.model.named_parameters()}
        assert len(groups[True]["params"]) == 2 * 4
        assert all(".layers." in names[id(p)] for p in groups[True]["params"])
        run.train()
        assert optimizer.updates == 2
    finally:
        del OPTIMIZERS.entries["unit_rows"]
