"""What plug-ins register is refused, with its place, where the core cannot call it or use it."""

from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from outcomes import expect_error

from metaseq_lm import plugins
from metaseq_lm.cli import main
from metaseq_lm.core.batch import TokenBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import ALL, CRITERIONS
from metaseq_lm.criterions.language_modeling import CausalLM
from metaseq_lm.criterions.masked_lm import MaskedLM, cross_entropy

HEAD = """
import numpy as np
from metaseq_lm.config.optimizers import OptimizerConfig
from metaseq_lm.config.tasks import MaskedLMConfig
from metaseq_lm.core.batch import Term
from metaseq_lm.core.registry import *
from metaseq_lm.criterions import Criterion
from metaseq_lm.criterions.masked_lm import MaskedLM
from metaseq_lm.data.worlds.base import Documents, World
from metaseq_lm.evaluation.suites import GroupMetrics, Suite
from metaseq_lm.tasks import Task
from metaseq_lm.tasks.masked_lm import MaskedLMTask

"""
LINE = HEAD.count("\n") + 1  # of what is registered
SCHEDULE = "@register_schedule('x')\n"
OPTIMIZER = "@register_optimizer('x', dataclass=OptimizerConfig)\n"
CRITERION = "@register_criterion('x')\nclass C(MaskedLM):\n    "
TASK = "@register_task('x', dataclass=MaskedLMConfig)\nclass T(MaskedLMTask):\n    "
SUITE = "@register_suite('x')\nclass S(Suite):\n    def read(self, folder): ...\n    "
WORLD = "@register_world('x')\nclass W(World):\n    def log_probs(self, tokens): ...\n    "
# By what is registered, the line that is named, counted from it, and words of the message.
REFUSED = {
    SCHEDULE + "def f(): ...": (0, "schedule 'x'"),
    SCHEDULE + "def f(config, total): ...": (0, "'total'"),
    SCHEDULE + "def f(*, config): ...": (0, "f(*, config)"),
    OPTIMIZER + "def f(parameters): ...": (0, "f(config, parameters)"),
    OPTIMIZER + "def f(config, parameters, lr): ...": (0, "'lr'"),
    "@register_optimizer('x')\ndef f(config, parameters): ...": (0, "OptimizerConfig"),
    "register_schedule('x')(3)": (0, "schedule 'x'"),
    "@register_criterion\nclass C(MaskedLM): ...": (0, "name"),
    "register_model('x', dataclass=int)": (0, "model 'x'"),
    "@register_criterion('x')\nclass C: ...": (0, "Criterion of metaseq_lm.criterions"),
    "@register_criterion('x')\ndef C(config): ...": (0, "criterion 'x'"),
    "@register_criterion('x')\nclass C(Criterion): ...": (0, "__call__(self, model, batch)"),
    CRITERION + "def __call__(self, batch): ...": (2, "C.__call__(self, model, batch)"),
    CRITERION + "def __init__(self): ...": (2, "C.__init__(self, config)"),
    CRITERION + "def token_log_probs(self, batch): ...": (2, "token_log_probs"),
    CRITERION + "tasks = 'masked_lm'": (0, "C.tasks is a str"),
    TASK + "def __init__(self, config): ...": (2, "run_config"),
    TASK + "def update(self, batches): ...": (2, "T.update(self, engine, model, batches)"),
    TASK + "def prepare(self, config): ...": (2, "T.prepare(run_config)"),
    TASK + "criterions = MaskedLM": (0, "T.criterions"),
    "@register_task('x')\nclass T(Task): ...": (0, "build_streams(self, split)"),
    SUITE + "def score(self, items): ...": (3, "S.score(self, items, probabilities)"),
    SUITE + "patterns = '*'\n    def score(self, items, probabilities): ...": (0, "S.patterns"),
    WORLD + "symbols = 'a b'": (0, "sample(self, keys)"),
    WORLD + "def sample(self): ...": (3, "W.sample(self, keys)"),
}
# The file's own mistakes, with the line from its beginning.
BROKEN = {
    "\ndef f(:\n": (2, "SyntaxError"),
    "if 1:\nx = 1\n": (2, "IndentationError"),
    "import os\nimport not_there\n": (2, "ModuleNotFoundError"),
    "x = 1\nx / 0\n": (2, "ZeroDivisionError"),
    "import json\n\njson.loads('{')\n": (3, "JSONDecodeError"),
    "import sys\nsys.exit(5)\n": (2, "SystemExit"),
    "raise ValueError('two\\n  lines')\n": (1, "two lines"),
    "from metaseq_lm.core.options import option\noption(1, '', affects='all')\n": (2, "affects"),
}


@pytest.fixture(autouse=True)
def _registries(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in ALL.values():
        monkeypatch.setattr(registry, "entries", dict(registry.entries))
    monkeypatch.setattr(plugins, "LOADED", [])


def written(source: str, folder: Path, name: str) -> str:
    file = folder / f"{name}_{abs(hash(source))}.py"
    file.write_text(source)
    return str(file)


@pytest.mark.parametrize("source", REFUSED)
def test_what_the_core_cannot_call_is_refused(source, tmp_path):
    line, words = REFUSED[source]
    file = written(HEAD + source + "\n", tmp_path, "refused")
    with pytest.raises(UsageError) as error:
        plugins.load(file)
    place, _, message = str(error.value).partition(": ")
    # Python counts a class from its decorator or from its own line.
    assert place in {f"{file}:{LINE + line}", f"{file}:{LINE + line + 1}"}
    assert words in message
    assert all("x" not in registry.entries for registry in ALL.values())


@pytest.mark.parametrize("source", BROKEN)
def test_errors_of_an_import_begin_with_the_line(source, tmp_path, capsys):
    line, words = BROKEN[source]
    file = written(source, tmp_path, "broken")
    assert main(["list", "--user-dir", file]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"metaseq-lm: {file}:{line}: ") and words in text
    assert text.count("\n") == 1


def test_what_the_core_can_call_is_not_refused(tmp_path):
    """Decorated methods, further parameters with defaults, mixins, lists in place of tuples."""
    source = """
from functools import wraps
from torch import nn

def with_extra(function):
    @wraps(function)
    def called(self, model, batch):
        return function(self, model, batch, 1)
    return called

@register_criterion('x')
class C(nn.Module, Criterion):
    tasks = ['masked_lm']
    def __init__(self, *args, **kwargs):
        nn.Module.__init__(self)
    @with_extra
    def __call__(self, model, batch, extra):
        return {}
    def eager_reason(self, quiet=False): ...

@register_task('x', dataclass=MaskedLMConfig)
class T(MaskedLMTask):
    def build_streams(self, split, **more):
        return {'a': object()}
"""
    plugins.load(written(HEAD + source, tmp_path, "sound"))
    assert CRITERIONS.entry("x").value(None)(None, None) == {}
    assert torch.nn.Linear(2, 1)(torch.zeros(2)).shape == (1,)


def test_two_plug_ins_are_refused(tmp_path, capsys):
    first, second = (written(f"# {name}\n", tmp_path, name) for name in ("one", "two"))
    assert main(["list", "--user-dir", first, f"--user-dir={second}"]) == 2
    text = capsys.readouterr().err
    assert first in text and second in text and "__init__.py" in text
    assert main(["list", "criterion", "--user-dir", first, "--user-dir", first]) == 0
    (tmp_path / "mine.yaml").write_text(f"defaults: [base, _self_]\nuser_dir: {first}\n")
    config = ["--print-config", "--config", str(tmp_path / "mine.yaml"), "--user-dir"]
    capsys.readouterr()
    expect_error(capsys, main(["train", *config, second]), 2, first, second)
    assert main(["train", *config, first]) == 0


@pytest.mark.parametrize("criterion", [MaskedLM, CausalLM])
def test_built_in_criterions_call_models_as_they_say(criterion):
    """A model of a plug-in is checked by it, see training.parts.check_model."""
    by_position, _, by_name = " ".join(criterion.calls).partition("*")
    zeros = torch.zeros(1, 2, dtype=torch.long)
    batch = TokenBatch(tokens=zeros, positions=zeros, targets=zeros)
    model = Mock()
    with suppress(TypeError):  # of what is no tensor of logits
        criterion()(model, batch)
    (call,) = model.mock_calls
    assert len(call.args) == len(by_position.split()) and " ".join(call.kwargs) == by_name.strip()


@pytest.mark.parametrize(
    "world",
    [
        "symbols = ()",
        "symbols = 'a', 'b c'",
        "longest = 1",
        "def sample(self, keys): return Documents(np.zeros((1, 2), int))",
        "def sample(self, keys): return Documents(np.full((len(keys), 2), 0.5))",
        "def sample(self, keys): return Documents(np.full((len(keys), 2), 2))",
        "def sample(self, keys): return Documents(np.zeros((len(keys), 2), int), {'x': keys[:3]})",
    ],
)
def test_worlds_that_draw_no_documents(world, tmp_path, capsys):
    drawn = "def sample(self, keys): return Documents(np.zeros((len(keys), 2), int))"
    source = f"{HEAD}{WORLD}symbols = 'a', 'b'\n    longest = 2\n    {drawn}\n    {world}\n"
    file = written(source, tmp_path, "world")
    words = ["--world", "x", "--world-documents", "9", "--destdir", str(tmp_path / "data")]
    assert main(["preprocess", "--user-dir", file, *words]) == 2
    text = capsys.readouterr().err
    assert f"metaseq-lm: {file}:" in text and "world 'x'" in text
    assert not list(tmp_path.glob("data/*"))


@pytest.mark.parametrize("logits", [None, (torch.zeros(2, 3, 5),), torch.zeros(2, 4, 5)])
def test_other_logits_than_the_targets_need(logits):
    with pytest.raises(TypeError, match=r"\(2, 3, 'V'\)"):
        cross_entropy(logits, torch.zeros(2, 3, dtype=torch.long))
