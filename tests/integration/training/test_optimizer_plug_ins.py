"""Optimizers of plug-ins: groups by name, refusals on shards, and states of other shapes."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import battery
import pytest
import torch
from battery import CASES, TINY
from optimizers import make_optimizer
from real_runs import FP64, Started
from torch import Tensor, nn

from metaseq_lm.config.optimizers import ConstantConfig, OptimizerConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.core.registry import OPTIMIZERS, SCHEDULES, Entry, register_optimizer
from metaseq_lm.plugins import load_all
from metaseq_lm.runs import checkpoint, manifests
from metaseq_lm.training.run import TrainingRun

PLUG_IN = """
import torch

from metaseq_lm.core.registry import register_optimizer
from metaseq_lm.config.groups import Rule
from metaseq_lm.config.optimizers import OptimizerConfig


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


def test_whole_matrices_are_refused_on_shards(moons, tmp_path):
    shards = ["--nproc", "2", "engine.parallel=shard"]
    started = Started(arguments(moons, tmp_path / "run", tmp_path, *shards), tmp_path / "err")
    assert started.wait() == 2
    text = started.text()
    assert text.count("unit_rows needs") == 1 and "Traceback" not in text
    assert "engine.parallel=replicate" in text


def test_it_trains_on_whole_parameters(moons, tmp_path):
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


def preconditioners(state: dict[str, Any], grad: Tensor, step: int) -> Tensor:
    """As SOAP's: a square matrix for each side, whose eigenvectors have columns in a row."""
    if not state:
        state["sides"] = [torch.eye(n, dtype=torch.float64) for n in grad.shape]
        state["basis"] = None
    for i in range(grad.dim()):
        rows = grad.double().movedim(i, 0).reshape(grad.shape[i], -1)
        state["sides"][i].lerp_(rows @ rows.mT, 0.1)
    state["basis"] = tuple(torch.linalg.eigh(side).eigenvectors.mT.mT for side in state["sides"])
    for vectors in state["basis"]:
        grad = torch.tensordot(grad, (vectors.float() @ vectors.float().mT), ([0], [0]))
    return grad


def rows_and_columns(state: dict[str, Any], grad: Tensor, step: int) -> Tensor:
    """As Adafactor's."""
    state["count"] = state.get("count", 0) + 1
    squares = grad.square().reshape(len(grad), -1)
    state.setdefault("row", torch.zeros(len(grad))).lerp_(squares.mean(1), 0.1)
    state.setdefault("column", torch.zeros(squares.shape[1])).lerp_(squares.mean(0), 0.1)
    return grad / (state["row"].mean() + state["column"].mean()).sqrt()


def low_precision(state: dict[str, Any], grad: Tensor, step: int) -> Tensor:
    return (
        state.setdefault("moment", torch.zeros_like(grad, dtype=torch.bfloat16))
        .lerp_(grad.bfloat16(), 0.3)
        .float()
    )


def nested(state: dict[str, Any], grad: Tensor, step: int) -> Tensor:
    moments = state.setdefault("moments", {"a": {1: [torch.zeros(3), 0.5, None, True]}})
    moments["a"][1][0] += grad.sum()
    return grad * moments["a"][1][0].tanh().mean()


def at_second_step(state: dict[str, Any], grad: Tensor, step: int) -> Tensor:
    state["steps"] = state.get("steps", 0) + 1
    if state["steps"] > 1:
        state.setdefault("norms", torch.zeros(2)).add_(grad.norm())
    return grad / (1 + state.get("norms", torch.zeros(2))[0])


def own_class(state: dict[str, Any], grad: Tensor, step: int) -> Tensor:
    state["window"] = {1, 2}
    return grad


def shared(state: dict[str, Any], grad: Tensor, step: int) -> Tensor:
    state.setdefault("fast", torch.zeros_like(grad)).add_(grad)
    return state.setdefault("slow", state["fast"])


def outside(state: dict[str, Any], grad: Tensor, step: int) -> Tensor:
    return grad / step


def named_parameters() -> list[tuple[str, nn.Parameter]]:
    return [("weight", nn.Parameter(torch.ones(3, 2))), ("bias", nn.Parameter(torch.ones(3)))]


COUNTER = count(1)
Rule = Callable[[dict[str, Any], Tensor, int], Tensor]
RESUMED = [preconditioners, rows_and_columns, low_precision, nested, at_second_step]


class Plugged(torch.optim.Optimizer):
    def __init__(self, groups: Any, rule: Rule) -> None:
        super().__init__(groups, {})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if self.rule is outside:
                group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    grad = self.rule(self.state[p], p.grad, group.get("steps", 1))
                    p.sub_(grad, alpha=group["lr"])


@pytest.fixture
def plugged(request: pytest.FixtureRequest) -> str:
    @register_optimizer("plugged", dataclass=OptimizerConfig)
    def build(config: OptimizerConfig, parameters: Any) -> Plugged:
        return Plugged(config.groups(parameters), request.param)

    return "plugged"


def weights_after(data: Path, save: Path, *more: str) -> dict[str, Tensor]:
    options = ["optimizer=plugged", "optimizer.lr=0.01", "trainer.save_interval_updates=2", *more]
    return battery.train(battery.configure(data, save, ("masked_lm", 0), *options))


@pytest.mark.parametrize("plugged", RESUMED, indirect=True)
def test_states_of_any_shape_resume_bitwise(plugged, moons, tmp_path):
    whole = weights_after(moons, tmp_path / "whole", "trainer.max_update=6")
    for updates in (3, 6):
        again = weights_after(moons, tmp_path / "parts", f"trainer.max_update={updates}")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize("plugged", [own_class, shared, outside], indirect=True)
def test_states_that_no_checkpoint_holds_are_refused(plugged):
    named = named_parameters()
    flat = {"_name": "constant"}
    with pytest.raises(UsageError, match=r"plugged .*(window|slow|steps)"):
        make_optimizer(named, {"_name": plugged}, flat)
    assert all(torch.equal(p, torch.ones_like(p)) and p.grad is None for _, p in named)


@pytest.mark.parametrize("kept", [{}, [0], torch.Generator(), {"of": {"layers": [0.0]}}])
def test_what_an_attribute_holds_is_refused(kept, monkeypatch):
    """Also in containers; a cache has a name that begins with an underscore."""

    class Keeping(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            super().step()
            if isinstance(kept, torch.Generator):
                torch.rand((), generator=kept)
            elif isinstance(kept, list):
                kept[0] += 1
            else:
                kept.setdefault("of", {"layers": [0.0]})["layers"][0] += 1.0

    for name, is_refused in (("bases", True), ("_bases", False)):

        def build(_: Any, named: Any, name: str = name) -> torch.optim.Optimizer:
            inner = Keeping([p for _, p in named], lr=0.1)
            setattr(inner, name, kept)
            return inner

        monkeypatch.setitem(
            OPTIMIZERS.entries, "mine", Entry("mine", OptimizerConfig, "mine.build", build)
        )
        with pytest.raises(UsageError, match="bases") if is_refused else nullcontext():
            make_optimizer(named_parameters(), {"_name": "mine"}, {"_name": "constant"})


@pytest.mark.parametrize(
    "build, problem",
    [
        (lambda config, parameters: None, "NoneType"),
        (lambda config, parameters: torch.optim.LBFGS([p for _, p in parameters]), "LBFGS"),
    ],
)
def test_what_makes_no_steps_is_refused(build, problem, monkeypatch):
    entry = Entry("mine", OptimizerConfig, "mine.build", build)
    monkeypatch.setitem(OPTIMIZERS.entries, "mine", entry)
    with pytest.raises(UsageError, match=problem):
        make_optimizer(named_parameters(), {"_name": "mine"}, {"_name": "constant"})


def test_parameters_that_are_left_out_are_named(monkeypatch, capsys):
    def build(_: Any, named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([named[0][1]])

    entry = Entry("mine", OptimizerConfig, "mine.build", build)
    monkeypatch.setitem(OPTIMIZERS.entries, "mine", entry)
    make_optimizer(named_parameters(), {"_name": "mine"}, {"_name": "constant"})
    assert "1 of 2" in (said := capsys.readouterr().err) and "bias" in said


@pytest.mark.parametrize(
    "factor", [lambda step: 1 / next(COUNTER), lambda step: float("nan"), lambda _: None]
)
def test_a_schedule_is_a_function_of_the_step(factor, monkeypatch):
    entry = Entry("mine", ConstantConfig, "mine.factor", lambda config: factor)
    monkeypatch.setitem(SCHEDULES.entries, "mine", entry)
    with pytest.raises(UsageError, match="mine"):
        make_optimizer(named_parameters(), {"_name": "sgd"}, {"_name": "mine"})


TABLE = 'state_form = {"momentum_buffer": LIKE, "rows": ROWS}'
# A step of a row depends on this row alone.
ROWWISE = (
    PLUG_IN.replace("needs_whole_matrices = True", TABLE)
    .replace(
        "import torch\n", "import torch\nfrom metaseq_lm.optim.states import LIKE, ROWS, WHOLE\n"
    )
    .replace(
        "p.grad /= p.grad.norm()",
        'rows = self.state[p].setdefault("rows", p.new_zeros(len(p))).add_(p.grad.norm(dim=1))\n'
        "                    p.grad /= 1 + rows[:, None]",
    )
)


@pytest.mark.parametrize(
    "table", ["", TABLE.replace("ROWS", "LIKE"), TABLE.replace("ROWS", "WHOLE")]
)
def test_states_of_other_shapes_are_refused_on_shards(table, moons, tmp_path):
    shards = ["--nproc", "2", "engine.parallel=shard"]
    words = arguments(moons, tmp_path / "run", tmp_path, *shards)
    (tmp_path / "unit_rows.py").write_text(ROWWISE.replace(TABLE, table))
    started = Started(words, tmp_path / "err")
    assert started.wait() == 2
    text = started.text()
    assert text.count("metaseq-lm: ") == 1 and "rows" in text and "Traceback" not in text


def test_states_by_rows_resume_on_shards_and_off_them(moons, tmp_path):
    def weights(run: str, updates: int, parallel: str) -> dict[str, Tensor]:
        more = ["--nproc", "2", f"engine.parallel={parallel}", f"trainer.max_update={updates}"]
        words = arguments(moons, tmp_path / run, tmp_path, *FP64, *more)
        (tmp_path / "unit_rows.py").write_text(ROWWISE)
        assert Started(words, tmp_path / "err").wait() == 0, (tmp_path / "err").read_text()
        return checkpoint.load(manifests.resolve(str(tmp_path / run), prefer="last")).weights

    whole = weights("whole", 4, "shard")
    weights("cut", 2, "shard")
    assert battery.difference(whole, weights("cut", 4, "shard")) == 0
    weights("moved", 1, "replicate"), weights("moved", 2, "shard")
    assert battery.difference(whole, weights("moved", 4, "replicate")) < 1e-14
