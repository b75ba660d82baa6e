"""What is read from the source is what importing registers, and nothing is refused that importing
takes.
"""

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from metaseq_lm import plugins
from metaseq_lm.core import declarations
from metaseq_lm.core.declarations import UnreadableError
from metaseq_lm.core.registry import ALL, tasks_for
from metaseq_lm.data.preprocess.pipeline import DATASET_KINDS

ROOT = Path(__file__).resolve().parents[3]
PLUG_IN = """
from dataclasses import dataclass

from metaseq_lm.core.options import option
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions import Criterion
from metaseq_lm.tasks.masked_lm import MaskedLMConfig

POWERS = {"one": min, "two": max}

def power(default):
    about = "the power"
    return option(default, about, choices=tuple(POWERS))

@dataclass
class PowerConfig(MaskedLMConfig):
    power: str = power("one")
    share: float = option(-0.5, "a share", at_least=-1)

@register_criterion("power", dataclass=PowerConfig)
class Power(Criterion):
    \"\"\"A power of the loss.\"\"\"

    tasks = ("masked_lm",)
"""


def options_of(schema: type) -> list[Any]:
    """Return name, type, default and metadata of every field."""
    types = get_type_hints(schema)
    defaults = {
        item.name: item.default if item.default_factory is MISSING else item.default_factory()
        for item in fields(schema)
    }
    return [(f.name, types[f.name], defaults[f.name], dict(f.metadata)) for f in fields(schema)]


@pytest.mark.parametrize("kind", declarations.KINDS)
def test_declarations_are_what_importing_registers(kind: str) -> None:
    read = plugins.declared(str(ROOT / "user_dir"))[kind]
    imported = {**ALL, "dataset_kind": DATASET_KINDS}[kind]
    entries = {
        name: entry
        for name, entry in imported.entries.items()
        if entry.origin.startswith(("metaseq_lm.", "user_dir."))
    }
    assert sorted(entries) == read.names()
    for name, entry in entries.items():
        declared = read.entries[name]
        assert declared.origin == entry.origin
        assert options_of(declared.dataclass) == options_of(entry.dataclass), name
        summaries = [(e.value.__doc__ or "").strip().split("\n")[0] for e in (declared, entry)]
        assert summaries[0] == summaries[1], name


def test_tasks_of_declared_criterions(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = {name: tasks_for(entry.value) for name, entry in ALL["criterion"].entries.items()}
    read = plugins.declared(str(ROOT / "user_dir"))
    monkeypatch.setattr(ALL["task"], "entries", read["task"].entries)
    for name, entry in read["criterion"].entries.items():
        assert tasks_for(entry.value) == imported[name], name


def test_a_plug_in_is_read(tmp_path: Path) -> None:
    (tmp_path / "power.py").write_text(PLUG_IN)
    entry = plugins.declared(str(tmp_path / "power.py"))["criterion"].entries["power"]
    options = {name: (default, more) for name, _, default, more in options_of(entry.dataclass)}
    assert options["power"] == ("one", {"help": "the power", "choices": ("one", "two")})
    assert options["share"][0] == -0.5 and "mask_prob" in options
    assert (entry.value.__doc__, entry.value.tasks) == ("A power of the loss.", ("masked_lm",))


@pytest.mark.parametrize(
    "more",
    [
        "for name in ('a', 'b'):\n    register_criterion(name)(Power)",
        "if POWERS:\n    @register_criterion('third')\n    class Third(Power): ...",
        "from metaseq_lm.core.registry import CRITERIONS",
        "from metaseq_lm.core.registry import register_task as add",
        "import metaseq_lm.core.registry as names",
        "import a_library_of_someone",
        "import importlib\nimportlib.import_module('x')",
        "from metaseq_lm.core.registry import *",
        "exec('register')",
        "try:\n    import json\nexcept ImportError:\n    pass",
        "name = 1 +",
    ],
)  # fmt: skip
def test_a_plug_in_that_may_register_more_is_imported(more: str, tmp_path: Path) -> None:
    (tmp_path / "power.py").write_text(f"{PLUG_IN}\n{more}\n")
    with pytest.raises(UnreadableError):
        plugins.declared(str(tmp_path / "power.py"))


def test_options_that_cannot_be_read_are_not_judged(tmp_path: Path) -> None:
    text = PLUG_IN.replace("-0.5", "sum([1, 2])")
    (tmp_path / "power.py").write_text(text)
    entry = plugins.declared(str(tmp_path / "power.py"))["criterion"].entries["power"]
    with pytest.raises(UnreadableError):
        _ = entry.dataclass
